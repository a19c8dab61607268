//! What the kernel's MPTCP is told of a namespace: which addresses connections may use.
//!
//! ```text
//!  link i has an address ──▶ endpoint 2i+1 (IPv4), 2i+2 (IPv6): a subflow from here, too
//!                            of a metered link: a backup, for when no other is left
//! ```
//!
//! `ip mptcp` does it: its netlink family is in none of the libraries that are here.

use anyhow::{Context, ensure};
use std::net::IpAddr;
use std::process::Command;

/// The most the kernel allows beside the first one. // net/mptcp/pm.c
const SUBFLOWS_MAX: &str = "8";

/// The MPTCP endpoints of a device.
pub(crate) struct Multipath {
    /// Which links carry only when no other does.
    backups: Vec<bool>,
}

impl Multipath {
    /// Connections of the calling thread's namespace use all addresses that will be told.
    pub(crate) fn new(backups: Vec<bool>) -> anyhow::Result<Multipath> {
        allow_subflows()?;
        Ok(Multipath { backups })
    }

    /// A link has an address.
    pub(crate) fn add(&self, link: usize, name: &str, address: IpAddr) -> anyhow::Result<()> {
        let id = endpoint(link, address);
        let address = address.to_string();
        let mut words = vec!["endpoint", "add", &address, "id", &id, "dev", name];
        words.extend(["subflow", "fullmesh"]);
        if self.backups.get(link) == Some(&true) {
            words.push("backup");
        }
        ip_mptcp(&words)
    }

    /// A link lost its address.
    pub(crate) fn remove(&self, link: usize, address: IpAddr) -> anyhow::Result<()> {
        ip_mptcp(&["endpoint", "delete", "id", &endpoint(link, address)])
    }
}

/// Lets the calling thread's namespace have as many subflows as there can be.
pub(crate) fn allow_subflows() -> anyhow::Result<()> {
    ip_mptcp(&["limits", "set", "subflows", SUBFLOWS_MAX])
}

fn endpoint(link: usize, address: IpAddr) -> String {
    (2 * link + 1 + usize::from(address.is_ipv6())).to_string()
}

/// In the namespace of the calling thread.
fn ip_mptcp(words: &[&str]) -> anyhow::Result<()> {
    let said = Command::new("ip")
        .arg("mptcp")
        .args(words)
        .output()
        .context("`ip` cannot be run; it is in iproute2")?;
    ensure!(
        said.status.success(),
        "`ip mptcp {}`: {}",
        words.join(" "),
        String::from_utf8_lossy(&said.stderr).trim()
    );
    Ok(())
}
