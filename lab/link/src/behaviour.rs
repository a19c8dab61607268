//! Mapping and filtering behaviour of NATs in the terms of RFC 4787, on top of the table of
//! [`Nat`].
//!
//! | RFC 3489 called it | mapping | filtering |
//! |---|---|---|
//! | full cone | endpoint-independent | endpoint-independent |
//! | restricted cone | endpoint-independent | address-dependent |
//! | port restricted cone | endpoint-independent | address and port-dependent |
//! | symmetric | address and port-dependent | address and port-dependent |

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use crate::nat::Nat;

/// A kind of NAT.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Behaviour {
    /// One port for all destinations, and every host may answer.
    FullCone,
    /// One port for all destinations; addresses that received a packet may answer.
    AddressRestricted,
    /// One port for all destinations; addresses and ports that received a packet may answer.
    PortRestricted,
    /// A port for each address and port, and only that destination may answer.
    Symmetric,
}

impl Behaviour {
    /// Every behaviour, from the most open to the most restrictive.
    pub const ALL: [Behaviour; 4] = [
        Behaviour::FullCone,
        Behaviour::AddressRestricted,
        Behaviour::PortRestricted,
        Behaviour::Symmetric,
    ];

    /// The name on the command line.
    pub fn word(self) -> &'static str {
        match self {
            Behaviour::FullCone => "full-cone",
            Behaviour::AddressRestricted => "address-restricted",
            Behaviour::PortRestricted => "port-restricted",
            Behaviour::Symmetric => "symmetric",
        }
    }

    /// The part of a remote endpoint that the filter compares with earlier destinations.
    fn told_apart(self, remote: SocketAddr) -> Option<SocketAddr> {
        match self {
            Behaviour::FullCone => None,
            Behaviour::AddressRestricted => Some(SocketAddr::new(remote.ip(), 0)),
            Behaviour::PortRestricted | Behaviour::Symmetric => Some(remote),
        }
    }
}

/// A NAT of one kind, for internal endpoints of type `E`.
///
/// ```
/// use cedos_lab_link::{Behaviour, FilteringNat};
/// let mut nat = FilteringNat::new(Behaviour::PortRestricted);
/// let (near, far, other) = (1, "192.0.2.1:80".parse()?, "192.0.2.1:81".parse()?);
/// let port = nat.outbound(near, far);
/// assert_eq!((nat.inbound(port, far), nat.inbound(port, other)), (Some(near), None));
/// # Ok::<(), std::net::AddrParseError>(())
/// ```
#[derive(Clone, Debug)]
pub struct FilteringNat<E> {
    behaviour: Behaviour,
    table: Nat<(E, Option<SocketAddr>)>,
    /// The destinations of each port, as far as the filter distinguishes them.
    spoken: BTreeMap<u16, BTreeSet<SocketAddr>>,
}

impl<E: Copy + Ord> FilteringNat<E> {
    /// A NAT without mappings.
    pub fn new(behaviour: Behaviour) -> FilteringNat<E> {
        FilteringNat {
            behaviour,
            table: Nat::new(),
            spoken: BTreeMap::new(),
        }
    }

    /// The external port of a packet from `inside` to `remote`.
    pub fn outbound(&mut self, inside: E, remote: SocketAddr) -> u16 {
        let apart = (self.behaviour == Behaviour::Symmetric).then_some(remote);
        let port = self.table.outbound((inside, apart));
        if let Some(remote) = self.behaviour.told_apart(remote) {
            self.spoken.entry(port).or_default().insert(remote);
        }
        port
    }

    /// The internal endpoint that gets a packet from `remote` to external port `port`.
    pub fn inbound(&self, port: u16, remote: SocketAddr) -> Option<E> {
        let (inside, _) = self.table.inbound(port)?;
        let passes = match self.behaviour.told_apart(remote) {
            None => true,
            Some(remote) => self.spoken.get(&port).is_some_and(|s| s.contains(&remote)),
        };
        passes.then_some(inside)
    }

    /// Drops all mappings, as a router does that restarts.
    pub fn rebind(&mut self) {
        self.table.rebind();
        self.spoken.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_lets_in_whom_rfc_4787_says_it_does() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let (spoken, port, host) = (at("192.0.2.1:80"), at("192.0.2.1:81"), at("192.0.2.2:80"));
        for (kind, lets_in) in Behaviour::ALL.into_iter().zip([
            [true, true, true],
            [true, true, false],
            [true, false, false],
            [true, false, false],
        ]) {
            let mut nat = FilteringNat::new(kind);
            let outside = nat.outbound(7, spoken);
            let found = [spoken, port, host].map(|from| nat.inbound(outside, from) == Some(7));
            assert_eq!(found, lets_in, "{kind:?}");
            let one_port = nat.outbound(7, host) == outside;
            assert_eq!(one_port, kind != Behaviour::Symmetric);
            nat.rebind();
            assert_eq!(nat.inbound(outside, spoken), None);
        }
    }
}
