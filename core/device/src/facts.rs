//! Inputs of a device's links: the platform's links, the sockets on them, and the session's paths.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use d2tp_session::{FlowId, LinkId, PathStats, Session};
use d2tp_time::Span;

/// The bytes for which an answer may wait on a serial line.
const SERIAL_ANSWER_BYTES: u64 = 1_200; // a guess: a window on a slow line, twice

/// What a link may be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkUse {
    /// No packet may use the link.
    Off,
    /// All payload may use the link without limit.
    Free,
    /// Flows that may pay can use the link, up to their budgets.
    Paid,
}

/// A link of the device as the platform describes it now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkFacts {
    /// The device's name of the link, for example `wlan0`.
    pub name: Arc<str>,
    /// The platform's number of the interface. Another number is another attachment.
    pub index: u32,
    /// Whether the interface is enabled.
    pub up: bool,
    /// Whether the link has a carrier: associated, plugged in, attached.
    pub carrier: bool,
    /// Addresses a program may send from.
    pub addresses: Vec<IpAddr>,
    /// Whether there is a default route for IPv4.
    pub routes_v4: bool,
    /// Whether there is a default route for IPv6.
    pub routes_v6: bool,
    /// Whether both directions share one medium, as on Wi-Fi, and the radio has statistics.
    pub half_duplex: bool,
    /// Bytes that a serial line carries in a second; `None` on other links.
    pub serial_rate: Option<u32>,
    /// Whether the link is left alone while another one works, so that its radio sleeps.
    pub sleeps: bool,
}

impl LinkFacts {
    /// Whether packets can leave by the link: up, with a carrier, an address and a route of one family.
    pub fn is_usable(&self) -> bool {
        self.source_addresses().next().is_some()
    }

    /// How much longer than on other links an answer may take: a SYN and its answer, or a full window, on a
    /// serial line (R-SERIAL-3).
    pub(crate) fn answer_slack(&self) -> Span {
        let rate = self.serial_rate.map(|rate| u64::from(rate.max(1)));
        let longest = rate.map(|rate| Span::from_millis(SERIAL_ANSWER_BYTES * 1_000 / rate));
        longest.unwrap_or(Span::ZERO)
    }

    /// The addresses to send from: each is of a family that has a route. None unless the link is up.
    pub fn source_addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
        let on = self.up && self.carrier;
        let (v4, v6) = (self.routes_v4, self.routes_v6);
        let routed = move |a: &IpAddr| on && if a.is_ipv6() { v6 } else { v4 };
        self.addresses.iter().copied().filter(routed)
    }
}

/// A socket that was made for a link, and the server's address as it is reached there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachedSocket {
    /// The socket's number, which no other socket of the device ever has.
    pub socket: LinkId,
    /// The server's address over this socket.
    pub remote: SocketAddr,
}

/// What [`crate::DeviceLinks`] reads of the session with the server.
pub trait SessionPaths {
    /// Whether the session is over, so that no path can be opened.
    fn is_over(&self) -> bool;
    /// Statistics of every path.
    fn path_stats(&self) -> Vec<PathStats>;
    /// Whether a path over this socket exists, or a handshake tries it.
    fn has_path(&self, socket: LinkId) -> bool;
    /// What a flow spent and was granted on a metered link; `None` if it has no path there. Of a flow that ended it is
    /// what it had spent, for as long as that is known.
    fn spend(&self, flow: FlowId, socket: LinkId) -> Option<crate::LinkSpend>;
    /// Whether nothing of a flow remains to be carried, so that it pays for nothing any more.
    fn is_carried(&self, flow: FlowId) -> bool;
    /// Payload bytes received and sent by the last path over a socket that failed.
    fn failed_payload(&self, _socket: LinkId) -> Option<(u64, u64)> {
        None
    }
}

impl SessionPaths for Session {
    fn is_over(&self) -> bool {
        false
    }

    fn path_stats(&self) -> Vec<PathStats> {
        Session::path_stats(self)
    }

    fn has_path(&self, socket: LinkId) -> bool {
        Session::has_path(self, socket)
    }

    fn spend(&self, flow: FlowId, socket: LinkId) -> Option<crate::LinkSpend> {
        let Some((theirs, received)) = self.grant_left(flow, socket) else {
            return Some(crate::LinkSpend {
                socket,
                spent: self.ended_spending(flow, socket)?,
                granted_max: 0,
                granted_min: 0,
            });
        };
        let (ours, sent) = self.own_grant_left(flow, socket)?;
        Some(crate::LinkSpend {
            socket,
            spent: received + sent,
            granted_max: theirs.max(ours),
            granted_min: theirs.min(ours),
        })
    }

    fn is_carried(&self, flow: FlowId) -> bool {
        Session::is_carried(self, flow)
    }
}

/// A session that is over or does not exist yet.
impl SessionPaths for () {
    fn is_over(&self) -> bool {
        true
    }

    fn path_stats(&self) -> Vec<PathStats> {
        Vec::new()
    }

    fn has_path(&self, _: LinkId) -> bool {
        false
    }

    fn spend(&self, _: FlowId, _: LinkId) -> Option<crate::LinkSpend> {
        None
    }

    fn is_carried(&self, _: FlowId) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_without_a_carrier_a_route_or_an_address_is_not_usable() {
        let whole = LinkFacts {
            name: "wlan0".into(),
            index: 3,
            up: true,
            carrier: true,
            addresses: vec!["192.0.2.7".parse().unwrap()],
            routes_v4: true,
            routes_v6: false,
            half_duplex: true,
            serial_rate: None,
            sleeps: false,
        };
        assert!(whole.is_usable());
        let changed = |change: fn(&mut LinkFacts)| {
            let mut facts = whole.clone();
            change(&mut facts);
            facts.is_usable()
        };
        assert!(!changed(|f| f.carrier = false));
        assert!(!changed(|f| f.up = false));
        assert!(!changed(|f| f.addresses.clear()));
        assert!(!changed(|f| (f.routes_v4, f.routes_v6) = (false, true)));
    }
}
