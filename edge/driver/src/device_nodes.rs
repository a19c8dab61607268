//! The nodes of a device's server, and which of them is in use.

use std::net::SocketAddr;

use d2tp_device::NodeChoice;
use d2tp_session::{LinkId, Span, Time};
use tokio::sync::mpsc;

use crate::address::{NODES_MAX, NodeAddress};
use crate::clock;
use crate::server_nodes::ServerNode;

/// A node of the server, as the device knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeStatus {
    /// Host and UDP port of the node.
    pub name: String,
    /// Whether the session is at this node, or is tried there first.
    pub is_current: bool,
    /// The round trip to the node when it was last measured.
    pub round_trip: Option<Span>,
}

/// Says which node of several is in use and why: "a:4433, nearest: 12 ms; b:4433 80 ms". `None` for one node.
pub fn describe_nodes(nodes: &[NodeStatus]) -> Option<String> {
    let current = nodes.iter().find(|node| node.is_current)?;
    let others = nodes.iter().filter(|node| !node.is_current);
    let ms = |node: &NodeStatus| {
        let trip = node.round_trip;
        trip.map(|trip| format!("{:.0} ms", trip.as_nanos() as f64 / 1e6))
    };
    let told: Vec<String> = others
        .clone()
        .map(|node| match ms(node) {
            Some(ms) => format!("{} {ms}", node.name),
            None => format!("{} has not answered", node.name),
        })
        .collect();
    if told.is_empty() {
        return None;
    }
    let is_nearest = others
        .filter_map(|node| node.round_trip)
        .all(|trip| current.round_trip.is_some_and(|ours| ours <= trip));
    let why = match ms(current) {
        Some(ms) if is_nearest => format!(", nearest: {ms}"),
        Some(ms) => format!(": {ms}"),
        None => String::new(),
    };
    Some(format!("{}{why}; {}", current.name, told.join(", ")))
}

/// How late a look at the paths may be: in the time beyond, this process did not run, and what arrived meanwhile waits in
/// its sockets.
const LOOK_LATE_MAX: Span = Span::from_millis(250); // a guess: a busy machine

/// How long paths on which an answer is due have heard nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UnheardTime {
    /// When a path last heard something.
    heard_at: Time,
    /// Since when that is known, later by the time in which this process did not run.
    pub(crate) since: Time,
    looked_at: Time,
}

impl UnheardTime {
    /// What a look at the paths that was due at `due` adds to what was known `before`.
    pub(crate) fn after(
        before: Option<UnheardTime>,
        now: Time,
        heard_at: Time,
        due: Time,
    ) -> UnheardTime {
        let same = before.filter(|before| before.heard_at == heard_at);
        let since = same.map_or(now, |before| {
            let late = now.since(due.max(before.looked_at));
            before.since + late.saturating_sub(LOOK_LATE_MAX)
        });
        UnheardTime {
            heard_at,
            since,
            looked_at: now,
        }
    }
}

/// The driver's state of a device's nodes.
pub(crate) struct DeviceNodes {
    pub(crate) list: Vec<ServerNode>,
    pub(crate) choice: NodeChoice,
    /// The sockets of the system's route, with the node of each, if the device uses that.
    pub(crate) default_route: Vec<(LinkId, usize)>,
    /// How long paths with data in flight have heard nothing, if some have data in flight.
    pub(crate) unheard: Option<UnheardTime>,
    /// Whether a flow waits on paths that fell quiet a moment ago: their probes, and silence, are still to come.
    pub(crate) is_quiet: bool,
    /// When the node in use was asked first, and how long its handshake took, if it has completed one.
    pub(crate) asked_at: Time,
    pub(crate) handshake_took: Option<Span>,
    /// When the paths are to be looked at next.
    pub(crate) look_due: Time,
    /// Payload bytes of all paths at the last look.
    pub(crate) payload: u64,
    /// Probes whose answers are awaited.
    pub(crate) answers: mpsc::UnboundedSender<(usize, Span)>,
    pub(crate) answered: Option<mpsc::UnboundedReceiver<(usize, Span)>>,
    pub(crate) started_at: Time,
}

impl DeviceNodes {
    pub(crate) fn new(list: Vec<ServerNode>) -> DeviceNodes {
        let (answers, answered) = mpsc::unbounded_channel();
        DeviceNodes {
            choice: NodeChoice::new(list.len()),
            list,
            default_route: Vec::new(),
            unheard: None,
            is_quiet: false,
            payload: 0,
            answers,
            answered: Some(answered),
            started_at: clock::now(),
            asked_at: clock::now(),
            handshake_took: None,
            look_due: Time::NEVER,
        }
    }

    /// The node in use.
    pub(crate) fn current(&self) -> &ServerNode {
        &self.list[self.choice.current()]
    }

    /// The addresses of the node in use.
    pub(crate) fn remotes(&self) -> Vec<SocketAddr> {
        self.current().addresses.clone()
    }

    /// Replaces the addresses of the node in use.
    pub(crate) fn replace_current(&mut self, addresses: Vec<SocketAddr>) {
        let current = self.choice.current();
        self.list[current].addresses = addresses;
    }

    /// The node at an address: the one in use, if several have the address.
    pub(crate) fn node_at(&self, remote: SocketAddr) -> Option<usize> {
        let of_node = |node: &ServerNode| node.addresses.iter().any(|at| is_same(*at, remote));
        if of_node(self.current()) {
            return Some(self.choice.current());
        }
        self.list.iter().position(of_node)
    }

    /// The number of the node at an address, which is added if it is new and there is room.
    ///
    /// R-NODE-1: the address proves nothing. It gets what any other gets that does not hold the server's key.
    pub(crate) fn node_or_new(&mut self, at: SocketAddr) -> Option<usize> {
        if let Some(n) = self.node_at(at) {
            return Some(n);
        }
        if self.list.len() >= NODES_MAX {
            return None;
        }
        let stream_port = self.current().stream_port;
        self.list.push(ServerNode {
            name: NodeAddress {
                host: at.ip().to_string(),
                port: at.port(),
            },
            stream_port,
            addresses: vec![at],
        });
        let count = self.list.len();
        self.choice.set_count(count);
        Some(count - 1)
    }

    pub(crate) fn statuses(&self) -> Vec<NodeStatus> {
        let nodes = self.list.iter().zip(self.choice.round_trips());
        let nodes = nodes.enumerate().map(|(n, (node, round_trip))| NodeStatus {
            name: node.name.to_string(),
            is_current: n == self.choice.current(),
            round_trip,
        });
        nodes.collect()
    }
}

/// Whether a path to `remote` leads to the node at `at`, which a NAT64 may translate.
fn is_same(at: SocketAddr, remote: SocketAddr) -> bool {
    let translated = || match (at, remote) {
        (SocketAddr::V4(at), SocketAddr::V6(remote)) => {
            at.port() == remote.port() && remote.ip().octets()[12..] == at.ip().octets()
        }
        _ => false,
    };
    at == remote || translated()
}

#[cfg(test)]
mod tests {
    use d2tp_device::NodeView;

    use super::*;

    #[test]
    fn an_address_that_two_nodes_share_is_that_of_the_node_in_use() {
        let at = "192.0.2.1:4433".parse().unwrap();
        let node = |host: &str| ServerNode {
            name: crate::NodeAddress {
                host: host.into(),
                port: 4433,
            },
            stream_port: None,
            addresses: vec![at],
        };
        let mut nodes = DeviceNodes::new(vec![node("a.example"), node("192.0.2.1")]);
        assert_eq!(nodes.node_at(at), Some(0));
        let view = NodeView {
            answering: Some(0),
            is_busy: true,
            round_trip: Span::from_millis(80),
            ..NodeView::default()
        };
        let at_ms = |ms| Time::ZERO + Span::from_millis(ms);
        nodes.choice.on_time(at_ms(1_000), &view);
        for (node, ms) in [(1, 1), (0, 80)] {
            let round_trip = Span::from_millis(ms);
            nodes
                .choice
                .on_answer(at_ms(1_000 + ms), node, round_trip, &view);
        }
        assert_eq!(nodes.choice.current(), 1);
        assert_eq!(nodes.node_at(at), Some(1));
    }

    #[test]
    fn time_in_which_the_process_did_not_run_is_no_silence() {
        let at = |ms| Time::ZERO + Span::from_millis(ms);
        let first = UnheardTime::after(None, at(1_000), at(900), at(1_000));
        let second = UnheardTime::after(Some(first), at(1_250), at(900), at(1_250));
        assert_eq!(at(1_250).since(second.since), Span::from_millis(250));
        // Nine seconds without a processor.
        let third = UnheardTime::after(Some(second), at(10_500), at(900), at(1_500));
        assert_eq!(at(10_500).since(third.since), Span::from_millis(750));
        // A look that was due only then.
        let fourth = UnheardTime::after(Some(third), at(40_500), at(900), at(40_500));
        assert_eq!(at(40_500).since(fourth.since), Span::from_millis(30_750));
        let heard = UnheardTime::after(Some(fourth), at(40_550), at(40_540), at(40_550));
        assert_eq!(heard.since, at(40_550));
    }

    #[test]
    fn the_node_in_use_is_described_with_the_others() {
        let node = |name: &str, is_current, ms: Option<u64>| NodeStatus {
            name: name.to_owned(),
            is_current,
            round_trip: ms.map(Span::from_millis),
        };
        let near = [node("a:1", true, Some(12)), node("b:1", false, Some(80))];
        assert_eq!(
            describe_nodes(&near).as_deref(),
            Some("a:1, nearest: 12 ms; b:1 80 ms")
        );
        let left = [node("a:1", false, Some(12)), node("b:1", true, Some(80))];
        assert_eq!(
            describe_nodes(&left).as_deref(),
            Some("b:1: 80 ms; a:1 12 ms")
        );
        let new = [node("a:1", true, None), node("b:1", false, None)];
        assert_eq!(
            describe_nodes(&new).as_deref(),
            Some("a:1; b:1 has not answered")
        );
        assert_eq!(describe_nodes(&near[..1]), None);
    }
}
