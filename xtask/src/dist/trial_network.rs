//! The network for the trial of packages: a device and a server, each in a network namespace, and a
//! slow link.
//!
//! ```text
//!  device 198.51.100.2 ◀── 4 Mbit/s, 2 ──▶ server 198.51.100.1: origin on TCP 80, D2Prox on UDP 4433
//! ```

use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use super::context::call;

/// The server's address, which is reserved for documentation.
pub const SERVER: &str = "198.51.100.1";
const DEVICE: &str = "198.51.100.2";

/// The network to which the proxy may connect, since there is no public network.
pub const NETWORK: &str = "198.51.100.0/24";

/// The rate to the device: 20 MB take 40 s, longer than an upgrade.
const RATE: &str = "4mbit";

/// The rate from the device: an upload lasts as long as a download beside others.
const RATE_BACK: &str = "2mbit";

/// The two namespaces, which are removed when this is dropped.
pub struct TrialNetwork {
    device: String,
    server: String,
}

/// An end of the network.
#[derive(Clone, Copy, Debug)]
pub enum NetworkEnd {
    /// The device's namespace.
    Device,
    /// The server's namespace, with origin and proxy.
    Server,
}

impl NetworkEnd {
    /// The address of this end.
    pub fn address(self) -> &'static str {
        match self {
            Self::Device => DEVICE,
            Self::Server => SERVER,
        }
    }
}

impl TrialNetwork {
    /// Makes namespaces with unique names.
    pub fn new() -> Result<TrialNetwork> {
        let own = std::process::id();
        let network = TrialNetwork {
            device: format!("cedos-try-{own}-device"),
            server: format!("cedos-try-{own}-server"),
        };
        for name in [&network.device, &network.server] {
            ip(&["netns", "add", name])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        let peer = ["peer", "name", "eth0", "netns", network.server.as_str()];
        let link = [
            "-n",
            network.device.as_str(),
            "link",
            "add",
            "eth0",
            "type",
            "veth",
        ];
        ip(&[&link[..], &peer[..]].concat())?;
        for (name, address) in [(&network.device, DEVICE), (&network.server, SERVER)] {
            ip(&[
                "-n",
                name,
                "address",
                "add",
                &format!("{address}/24"),
                "dev",
                "eth0",
            ])?;
            ip(&["-n", name, "link", "set", "eth0", "up"])?;
        }
        ip(&[
            "-n",
            &network.device,
            "route",
            "add",
            "default",
            "via",
            SERVER,
        ])?;
        for (end, rate) in [(NetworkEnd::Server, RATE), (NetworkEnd::Device, RATE_BACK)] {
            let mut shape = network.enter(end);
            shape.args(["tc", "qdisc", "add", "dev", "eth0", "root", "tbf"]);
            call(shape.args(["rate", rate, "burst", "32kbit", "latency", "200ms"]))?;
        }
        Ok(network)
    }

    /// A command whose arguments are run at this end.
    pub fn enter(&self, end: NetworkEnd) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", self.name(end)]);
        command
    }

    /// The name of the namespace at this end.
    pub fn name(&self, end: NetworkEnd) -> &str {
        match end {
            NetworkEnd::Device => &self.device,
            NetworkEnd::Server => &self.server,
        }
    }
}

impl Drop for TrialNetwork {
    fn drop(&mut self) {
        for name in [&self.device, &self.server] {
            let mut gone = Command::new("ip");
            gone.args(["netns", "delete", name]).stderr(Stdio::null());
            let _ = gone.status();
        }
    }
}

fn ip(arguments: &[&str]) -> Result<()> {
    call(Command::new("ip").args(arguments)).context("the package iproute2 makes networks")
}
