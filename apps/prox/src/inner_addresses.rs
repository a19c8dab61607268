//! The inner addresses of clients: each key gets one of IPv4 and one of IPv6, and keeps them.
//!
//! ```text
//!  network 10.83.0.0/16, fd00::/64     number 1: the proxy      number n: a client, 10.83.0.n and fd00::n
//!  DIR/tunnel.json ◀── number and key of each client
//! ```
//!
//! A client's first number follows from its key, so that it is mostly the same without the file too.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use d2tp_driver::HostKey;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::private_file::replace_private;
use crate::refusal::ProxRefusal;

/// The name of the file in the state directory.
const FILE_NAME: &str = "tunnel.json";
/// The number of the proxy's own inner address.
const GATEWAY: u32 = 1;
/// The number of the first client.
const FIRST: u32 = 2;
/// Clients with inner addresses at most, whatever the network has room for.
const CLIENTS_MAX: u32 = 100_000; // as many as can be enrolled

/// The networks of inner addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InnerNets {
    /// The network of IPv4.
    pub(crate) v4: Ipv4Net,
    /// The network of IPv6, if there is one.
    pub(crate) v6: Option<Ipv6Net>,
}

/// The inner addresses of a client, or of the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InnerAddressPair {
    /// The address of IPv4.
    pub(crate) v4: Ipv4Addr,
    /// The address of IPv6, if there is a network of it.
    pub(crate) v6: Option<Ipv6Addr>,
}

impl InnerAddressPair {
    /// The IPv4 and the IPv6 address, as far as there are any.
    pub(crate) fn all(&self) -> impl Iterator<Item = IpAddr> {
        let v6 = self.v6.map(IpAddr::from);
        [IpAddr::from(self.v4)].into_iter().chain(v6)
    }

    /// Whether this is one of them.
    pub(crate) fn contains(&self, address: IpAddr) -> bool {
        self.all().any(|own| own == address)
    }
}

impl InnerNets {
    /// The networks of the setting.
    ///
    /// # Errors
    /// A sentence that says what is wrong with them.
    pub(crate) fn of(nets: &[IpNet]) -> Result<InnerNets, String> {
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        for net in nets {
            match net.trunc() {
                IpNet::V4(net) => v4.push(net),
                IpNet::V6(net) => v6.push(net),
            }
        }
        let (&[v4], [] | [_]) = (&v4[..], &v6[..]) else {
            return Err("--tunnel-net takes one network of IPv4, and one of IPv6 if wanted".into());
        };
        if v4.prefix_len() > 29 {
            return Err(format!(
                "--tunnel-net {v4} has no room for clients; give at least a /29"
            ));
        }
        if let Some(net) = v6.first().filter(|net| net.prefix_len() > 96) {
            return Err(format!(
                "--tunnel-net {net} is too small; give at least a /96"
            ));
        }
        let v6 = v6.first().copied();
        Ok(InnerNets { v4, v6 })
    }

    /// The IPv4 and the IPv6 network of inner addresses, as far as there are any.
    pub(crate) fn all(&self) -> impl Iterator<Item = IpNet> {
        let v6 = self.v6.map(IpNet::from);
        [IpNet::from(self.v4)].into_iter().chain(v6)
    }

    /// Whether an address is an inner one.
    pub(crate) fn contains(&self, address: IpAddr) -> bool {
        self.all().any(|net| net.contains(&address))
    }

    /// The proxy's own addresses.
    pub(crate) fn gateway(&self) -> InnerAddressPair {
        self.pair(GATEWAY)
    }

    fn pair(&self, number: u32) -> InnerAddressPair {
        let v6 = |net: Ipv6Net| Ipv6Addr::from(u128::from(net.network()) + u128::from(number));
        InnerAddressPair {
            v4: Ipv4Addr::from(u32::from(self.v4.network()) + number),
            v6: self.v6.map(v6),
        }
    }

    /// The number after a client's last one.
    fn end(&self) -> u32 {
        // Without the broadcast address.
        let in_net = (1u64 << (32 - self.v4.prefix_len())) - 1;
        u32::try_from(in_net).map_or(CLIENTS_MAX, |end| end.min(FIRST + CLIENTS_MAX))
    }
}

/// The content of the file.
#[derive(Debug, Default, Serialize, Deserialize)]
struct StoredAddresses {
    clients: Vec<StoredAddress>,
}

#[derive(Debug, Serialize, Deserialize)]
struct StoredAddress {
    #[serde(with = "crate::key_text::one")]
    key: HostKey,
    number: u32,
}

/// Which client has which inner addresses.
#[derive(Debug)]
pub(crate) struct InnerAddresses {
    nets: InnerNets,
    path: Option<PathBuf>,
    numbers: Mutex<BTreeMap<u32, HostKey>>,
}

impl InnerAddresses {
    /// The addresses that a file in `directory` has.
    ///
    /// # Errors
    /// The file cannot be read, or was not written by the proxy.
    pub(crate) fn open(nets: InnerNets, directory: Option<&Path>) -> io::Result<InnerAddresses> {
        let path = directory.map(|directory| directory.join(FILE_NAME));
        let stored = match path.as_deref().map(std::fs::read_to_string) {
            Some(Ok(text)) => serde_json::from_str(&text)?,
            Some(Err(error)) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => StoredAddresses::default(),
        };
        let numbers = stored.clients.into_iter();
        let numbers = numbers.map(|client| (client.number, client.key));
        Ok(InnerAddresses {
            nets,
            path,
            numbers: Mutex::new(
                numbers
                    .filter(|(n, _)| (FIRST..nets.end()).contains(n))
                    .collect(),
            ),
        })
    }

    /// The IPv4 and the IPv6 network of inner addresses, as far as there are any.
    pub(crate) fn nets(&self) -> InnerNets {
        self.nets
    }

    /// The addresses of a client, which it has from now on.
    pub(crate) fn of(&self, client: HostKey) -> Result<InnerAddressPair, ProxRefusal> {
        let mut numbers = self.numbers.lock();
        let known = numbers.iter().find(|(_, key)| **key == client);
        if let Some((number, _)) = known {
            return Ok(self.nets.pair(*number));
        }
        let places = self.nets.end() - FIRST;
        let first = u32::from_le_bytes([client[0], client[1], client[2], client[3]]) % places;
        let candidates = (0..places).map(|n| FIRST + (first + n) % places);
        let free = candidates.into_iter().find(|n| !numbers.contains_key(n));
        let number = free.ok_or(ProxRefusal::TunnelAddressesFull)?;
        numbers.insert(number, client);
        if let Err(error) = self.save(&numbers) {
            numbers.remove(&number);
            tracing::error!(%error, "an inner address was not given");
            return Err(ProxRefusal::StoreFailed);
        }
        Ok(self.nets.pair(number))
    }

    /// For tests: gives a client other addresses than it has.
    #[cfg(test)]
    pub(crate) fn renumber(&self, client: HostKey) {
        let mut numbers = self.numbers.lock();
        let free = (FIRST..self.nets.end()).find(|number| !numbers.contains_key(number));
        numbers.retain(|_, key| *key != client);
        numbers.insert(free.expect("there is room"), client);
    }

    fn save(&self, numbers: &BTreeMap<u32, HostKey>) -> io::Result<()> {
        let Some(path) = &self.path else {
            return Ok(());
        };
        let clients = numbers.iter().map(|(number, key)| StoredAddress {
            key: *key,
            number: *number,
        });
        let stored = StoredAddresses {
            clients: clients.collect(),
        };
        replace_private(path, &serde_json::to_vec_pretty(&stored)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(texts: &[&str]) -> Result<InnerNets, String> {
        let nets: Vec<IpNet> = texts.iter().map(|text| text.parse().unwrap()).collect();
        InnerNets::of(&nets)
    }

    #[test]
    fn networks_that_cannot_serve_clients_are_refused_in_words() {
        assert!(nets(&["10.83.0.0/16", "fd00::/64"]).is_ok());
        for (bad, word) in [
            (&["fd00::/64"][..], "one network of IPv4"),
            (&["10.0.0.0/16", "10.1.0.0/16"], "one network of IPv4"),
            (&["10.0.0.0/30"], "/29"),
            (&["10.0.0.0/16", "fd00::/120"], "/96"),
        ] {
            let error = nets(bad).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn a_client_keeps_its_addresses_across_a_restart_and_no_two_share_one() {
        let directory = tempfile::tempdir().unwrap();
        let nets = nets(&["10.83.0.0/16", "fd00::/64"]).unwrap();
        let open = || InnerAddresses::open(nets, Some(directory.path())).unwrap();
        let table = open();
        // Keys whose first number is the same.
        let keys = [
            [1; 32],
            [[1; 31].as_slice(), &[2]].concat().try_into().unwrap(),
        ];
        let pairs = keys.map(|key| table.of(key).unwrap());
        assert_ne!(pairs[0], pairs[1]);
        let again = open();
        assert_eq!(again.of(keys[1]).unwrap(), pairs[1]);
        assert_eq!(again.of(keys[0]).unwrap(), pairs[0]);
        assert!(
            pairs
                .iter()
                .all(|pair| pair.all().all(|ip| nets.contains(ip)))
        );
    }

    #[test]
    fn a_full_network_refuses_the_next_client_and_serves_the_others() {
        let nets = nets(&["10.83.0.0/29"]).unwrap();
        let table = InnerAddresses::open(nets, None).unwrap();
        let given: Vec<_> = (0..5).map(|n| table.of([n; 32]).unwrap().v4).collect();
        assert!(!given.contains(&"10.83.0.7".parse().unwrap()), "{given:?}");
        assert!(!given.contains(&nets.gateway().v4));
        assert_eq!(table.of([9; 32]), Err(ProxRefusal::TunnelAddressesFull));
        assert_eq!(table.of([3; 32]).unwrap().v4, given[3]);
    }
}
