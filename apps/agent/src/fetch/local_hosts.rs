//! Which hosts of local networks a request may reach.
//!
//! ```text
//!  name ─▶ addresses ─┬─ public ────────────────────────────────▶ connect
//!                     └─ local ─┬─ any, or this host is listed ─▶ connect
//!                               └─ else: left out; refused if no address is left
//! ```
//!
//! What a stranger's document names (a feed, its enclosures, where they redirect) must not lead into the user's own
//! networks. The addresses that are connected to are checked, so a name that changes its address gains nothing.

use std::net::SocketAddr;

use cedos_http::is_local_address;
use serde::{Deserialize, Serialize};
use url::Host;

use super::dial::FetchFault;
use super::outcome::TransferFailure;

/// Which hosts of local networks a request may reach, redirects included. Public addresses are always allowed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LocalHosts(Option<Vec<String>>);

impl LocalHosts {
    /// Any host: for what a user named.
    pub const ANY: LocalHosts = LocalHosts(None);

    /// This host at most, by its name or address as URLs write it.
    pub fn only(host: Option<&str>) -> LocalHosts {
        LocalHosts(Some(host.map(str::to_owned).into_iter().collect()))
    }

    /// Whether there is no limit.
    pub fn is_any(&self) -> bool {
        self.0.is_none()
    }

    /// The addresses of `host` that may be connected to.
    pub(super) fn admit(
        &self,
        host: &Host<&str>,
        mut addresses: Vec<SocketAddr>,
    ) -> Result<Vec<SocketAddr>, FetchFault> {
        let Some(listed) = &self.0 else {
            return Ok(addresses);
        };
        let name = host.to_string();
        if listed.contains(&name) {
            return Ok(addresses);
        }
        let local = addresses.iter().find(|a| is_local_address(a.ip())).copied();
        addresses.retain(|address| !is_local_address(address.ip()));
        match local.filter(|_| addresses.is_empty()) {
            None => Ok(addresses),
            Some(local) => Err(refused(host, local)),
        }
    }
}

fn refused(host: &Host<&str>, local: SocketAddr) -> FetchFault {
    let what = "in a local network; a podcast may use only its own host there, and only if you add its feed by hand \
                (`cedos cast add`)";
    match host {
        // Another network's resolver may know a better address: networks that ask for a sign-in give their own.
        Host::Domain(name) => {
            FetchFault::UntrustedPeer(format!("{name} is at {}, {what}", local.ip()))
        }
        _ => FetchFault::Final(TransferFailure::error(format!("{host} is {what}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(of: &[&str]) -> Vec<SocketAddr> {
        of.iter()
            .map(|text| SocketAddr::new(text.parse().expect(text), 80))
            .collect()
    }

    fn admit(hosts: &LocalHosts, host: &str, of: &[&str]) -> Option<usize> {
        let host = Host::parse(host).expect(host);
        let host = match &host {
            Host::Domain(name) => Host::Domain(name.as_str()),
            Host::Ipv4(ip) => Host::Ipv4(*ip),
            Host::Ipv6(ip) => Host::Ipv6(*ip),
        };
        let admitted = hosts.admit(&host, addresses(of));
        admitted.ok().map(|admitted| admitted.len())
    }

    #[test]
    fn local_addresses_are_for_the_listed_host_only() {
        let none = LocalHosts::only(None);
        assert_eq!(
            admit(&none, "pod.example", &["1.1.1.1", "10.0.0.1"]),
            Some(1)
        );
        assert_eq!(admit(&none, "pod.example", &["10.0.0.1", "::1"]), None);
        assert_eq!(admit(&none, "[::1]", &["::1"]), None);
        let nas = LocalHosts::only(Some("nas.example"));
        assert_eq!(admit(&nas, "nas.example", &["10.0.0.1"]), Some(1));
        assert_eq!(admit(&nas, "pod.example", &["10.0.0.1"]), None);
        let literal = LocalHosts::only(Some("[fd00::1]"));
        assert_eq!(admit(&literal, "[fd00::1]", &["fd00::1"]), Some(1));
        assert_eq!(admit(&LocalHosts::ANY, "any", &["10.0.0.1"]), Some(1));
    }

    #[test]
    fn no_limit_and_an_empty_list_are_kept_apart() {
        for hosts in [
            LocalHosts::ANY,
            LocalHosts::only(None),
            LocalHosts::only(Some("nas.example")),
        ] {
            let text = serde_json::to_string(&hosts).expect("JSON");
            let read: LocalHosts = serde_json::from_str(&text).expect(&text);
            assert_eq!(read, hosts, "{text}");
        }
    }
}
