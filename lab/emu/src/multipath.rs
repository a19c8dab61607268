//! Configures the kernel's MPTCP in a namespace: the addresses that connections may use.
//!
//! ```text
//!  link i has an address ──▶ endpoint 2i+1 (IPv4), 2i+2 (IPv6): another subflow from here
//!                            of a metered link: a backup, if no other is left
//! ```
//!
//! It uses `ip mptcp`, because none of the libraries in use supports the netlink family.

use anyhow::{Context, ensure};
use std::net::IpAddr;
use std::process::Command;

/// The most subflows that the kernel allows beside the first one. // net/mptcp/pm.c
const SUBFLOWS_MAX: &str = "8";

/// The MPTCP endpoints of a device.
pub(crate) struct Multipath {
    /// For each link, whether it is used only if no other one works.
    backups: Vec<bool>,
}

impl Multipath {
    /// Makes connections in the calling thread's namespace use all addresses that will be added.
    pub(crate) fn new(backups: Vec<bool>) -> anyhow::Result<Multipath> {
        allow_subflows()?;
        Ok(Multipath { backups })
    }

    /// Adds an address of a link.
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

    /// Removes an address of a link.
    pub(crate) fn remove(&self, link: usize, address: IpAddr) -> anyhow::Result<()> {
        ip_mptcp(&["endpoint", "delete", "id", &endpoint(link, address)])
    }
}

/// Allows the largest number of subflows in the calling thread's namespace.
pub(crate) fn allow_subflows() -> anyhow::Result<()> {
    ip_mptcp(&["limits", "set", "subflows", SUBFLOWS_MAX])
}

fn endpoint(link: usize, address: IpAddr) -> String {
    (2 * link + 1 + usize::from(address.is_ipv6())).to_string()
}

/// Runs `ip mptcp` in the namespace of the calling thread.
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
