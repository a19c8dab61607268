//! The network of a churn run: the link of the server limits all hosts.
//!
//! ```text
//!  server ── socket ── token bucket, --mbps ── veth ──▶ 10.128.0.0, 10.128.0.1, … an address a host
//!         ◀───────────────── nothing limits acknowledgements ─────────────────
//! ```
//!
//! The bucket is on the server's own interface, as the paper's servers were on ports of 10 Gb/s:
//! what it does not accept stays in the socket, then in the protocol, where sessions wait in turn.
//! Nothing is dropped. So the shares are determined by the protocol, not by random drops of a full
//! queue.

use std::net::Ipv4Addr;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::network::{self, BenchNetwork, BenchNetworkKind};
use crate::placement::ProcessPlacement;

/// The addresses of all hosts.
const HOSTS: &str = "10.128.0.0/9";
const FIRST_HOST: Ipv4Addr = Ipv4Addr::new(10, 128, 0, 0);
/// The size of the bucket: two batches of the server.
const BURST: &str = "128kb";
/// More than a socket may hold, so that the bucket never drops.
const LIMIT: &str = "64mb";

/// Makes the network.
///
/// # Errors
/// The namespaces cannot be made, or `ip` and `tc` are missing or fail.
pub fn make(mbps: f64) -> Result<BenchNetwork> {
    let network = BenchNetwork::make(BenchNetworkKind::Veth1500)?;
    let server = |command| network.start_receiver(command);
    let hosts = |command| network.start_sender(command);
    let near = network::SENDER_ADDRESS.to_string();
    done(hosts, &["ip", "link", "set", "lo", "up"])?;
    done(hosts, &["ip", "route", "add", "local", HOSTS, "dev", "lo"])?;
    done(server, &["ip", "route", "add", HOSTS, "via", &near])?;
    let (device, rate) = (network::RECEIVER_LINK, format!("{}bit", mbps * 1e6));
    let bucket = ["rate", &rate, "burst", BURST, "limit", LIMIT];
    let add = ["tc", "qdisc", "add", "dev", device, "root", "tbf"];
    done(server, &[&add[..], &bucket[..]].concat())?;
    Ok(network)
}

fn done(start: impl Fn(Command) -> Result<Child>, words: &[&str]) -> Result<()> {
    let said = || words.join(" ");
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).stderr(Stdio::piped());
    let child = start(command).with_context(said)?;
    let output = child.wait_with_output().with_context(said)?;
    if !output.status.success() {
        bail!("{}: {}", said(), String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// The address of a host.
pub fn address_of(number: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(FIRST_HOST) + number)
}

/// The host with this address.
pub fn host_at(address: Ipv4Addr) -> Option<u32> {
    u32::from(address).checked_sub(FIRST_HOST.into())
}

#[cfg(test)]
mod tests {
    use super::{address_of, host_at};
    use std::net::Ipv4Addr;

    #[test]
    fn every_host_has_an_address_of_its_own() {
        for number in [0, 1, 255, 256, 65_535, 1_000_000] {
            assert_eq!(host_at(address_of(number)), Some(number));
        }
        assert_eq!(host_at(Ipv4Addr::new(10, 77, 0, 2)), None, "the server");
    }
}
