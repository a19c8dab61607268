//! The nodes of a device's server, and which of them is in use.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use d2tp_device::NodeChoice;
use d2tp_session::{LinkId, Span, Time};
use tokio::sync::mpsc;

use crate::address::{NODES_MAX, NodeAddress};
use crate::clock;
use crate::local_hints::{HintSource, LocalHint, LocalNetwork};
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
    /// Who on the local network said where the node is, if the device did not know that by itself.
    pub hint: Option<HintSource>,
}

/// Says which node of several is in use and why: "a:4433, nearest: 12 ms; b:4433 80 ms", or "192.168.1.5:4433 (announced
/// on this network), nearest: 1 ms; a:4433 12 ms". `None` for one node.
pub fn describe_nodes(nodes: &[NodeStatus]) -> Option<String> {
    let current = nodes.iter().find(|node| node.is_current)?;
    let others = nodes.iter().filter(|node| !node.is_current);
    let ms = |node: &NodeStatus| {
        let trip = node.round_trip;
        trip.map(|trip| format!("{:.0} ms", trip.as_nanos() as f64 / 1e6))
    };
    let name = |node: &NodeStatus| match node.hint {
        Some(hint) => format!("{} ({})", node.name, hint.describe()),
        None => node.name.clone(),
    };
    let told: Vec<String> = others
        .clone()
        .map(|node| match ms(node) {
            Some(ms) => format!("{} {ms}", name(node)),
            None => format!("{} has not answered", name(node)),
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
    Some(format!("{}{why}; {}", name(current), told.join(", ")))
}

/// How late a look at the paths may be: in the time beyond, this process did not run, and what arrived meanwhile waits in
/// its sockets.
const LOOK_LATE_MAX: Span = Span::from_millis(250); // a guess: a busy machine

/// How long paths on which an answer is due have heard nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UnheardTime {
    /// When a path last heard something.
    heard_at: Time,
    /// The time from which the silence counts: `heard_at`, later by the time in which this process
    /// did not run.
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
    /// The nodes that hints named, with the network on which each was named. Their places in `list` are kept when the
    /// network is left.
    hinted: BTreeMap<usize, (LocalNetwork, HintSource)>,
    /// The links over which the session was active when nodes were looked at last.
    pub(crate) active_links: BTreeSet<LinkId>,
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
            hinted: BTreeMap::new(),
            list,
            active_links: BTreeSet::new(),
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

    /// Notes over which links the session is active now.
    pub(crate) fn note_active_links(&mut self, active: BTreeSet<LinkId>) {
        if active.is_empty() || active == self.active_links {
            return;
        }
        let is_first = self.active_links.is_empty();
        if !is_first && !active.is_subset(&self.active_links) {
            self.choice.on_other_network();
        }
        self.active_links = active;
    }

    /// The addresses of the node in use.
    pub(crate) fn remotes(&self) -> Vec<SocketAddr> {
        self.current().addresses.clone()
    }

    /// An address of node `n`, if it exists: of the family of the first one of the node in use, where it has one.
    pub(crate) fn address_of(&self, n: usize) -> Option<SocketAddr> {
        let is_v4 = self.current().addresses.first().map(SocketAddr::is_ipv4);
        let addresses = &self.list.get(n)?.addresses;
        let same = addresses.iter().find(|at| Some(at.is_ipv4()) == is_v4);
        same.or_else(|| addresses.first()).copied()
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

    /// Adds a node that a hint named truly. Returns whether it is new, and there is room for it.
    pub(crate) fn add_hinted(&mut self, network: &LocalNetwork, hint: LocalHint) -> bool {
        if self.node_at(hint.address).is_some() {
            return false;
        }
        let node = ServerNode {
            name: NodeAddress {
                host: hint.address.ip().to_string(),
                port: hint.address.port(),
            },
            // A port of TCP is not part of a hint.
            stream_port: None,
            addresses: vec![hint.address],
        };
        let hinted = self.hinted.keys().copied();
        let free = hinted.filter(|n| self.list[*n].addresses.is_empty()).min();
        let n = match free {
            Some(n) => {
                self.list[n] = node;
                n
            }
            None if self.list.len() < NODES_MAX => {
                self.list.push(node);
                self.choice.set_count(self.list.len());
                self.list.len() - 1
            }
            None => return false,
        };
        self.hinted.insert(n, (network.clone(), hint.source));
        self.choice.on_node_found();
        true
    }

    /// Removes the hinted nodes that do not serve any more: those of networks that are not in use, and where another node
    /// answers those that are not named by each network in use. Returns whether there were any.
    ///
    /// An address of one local network is not reached over other networks, which would carry nothing meanwhile.
    pub(crate) fn remove_hinted(
        &mut self,
        in_use: &BTreeSet<LocalNetwork>,
        named_by_all: &[LocalHint],
    ) -> bool {
        let round_trips = self.choice.round_trips();
        let mut others = (0..self.list.len()).filter(|n| !self.hinted.contains_key(n));
        let another_answers = others.any(|n| round_trips[n].is_some());
        let is_named = |node: &ServerNode| {
            let mut named = named_by_all.iter();
            named.any(|hint| node.addresses.contains(&hint.address))
        };
        let gone = self.hinted.iter().filter(|(n, (network, _))| {
            let node = &self.list[**n];
            !node.addresses.is_empty()
                && !is_named(node)
                && (another_answers || !in_use.contains(network))
        });
        let gone: Vec<usize> = gone.map(|(n, _)| *n).collect();
        for n in &gone {
            self.list[*n].addresses.clear();
            self.choice.on_node_gone(*n);
        }
        !gone.is_empty()
    }

    pub(crate) fn statuses(&self) -> Vec<NodeStatus> {
        let nodes = self.list.iter().zip(self.choice.round_trips());
        let nodes = nodes.enumerate();
        let is_known = |n: &usize, node: &ServerNode| {
            !self.hinted.contains_key(n) || !node.addresses.is_empty()
        };
        let nodes = nodes.filter(|(n, (node, _))| is_known(n, node));
        let nodes = nodes.map(|(n, (node, round_trip))| NodeStatus {
            name: node.name.to_string(),
            is_current: n == self.choice.current(),
            round_trip,
            hint: self.hinted.get(&n).map(|(_, source)| *source),
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
    use crate::attach::tests::link;

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
    fn hinted_nodes_are_there_while_the_device_is_on_their_network() {
        let network = |last: u8| LocalNetwork::of(&link(&[&format!("192.168.{last}.7")]));
        let hint = |last: u8| LocalHint {
            address: SocketAddr::from(([192, 168, last, 5], 4433)),
            source: HintSource::Announced,
        };
        let names = |nodes: &DeviceNodes| {
            let statuses = nodes.statuses().into_iter();
            statuses.map(|node| node.name).collect::<Vec<_>>()
        };
        let mut nodes = DeviceNodes::new(vec![ServerNode {
            name: NodeAddress {
                host: "a.example".into(),
                port: 1,
            },
            stream_port: None,
            addresses: vec!["192.0.2.1:1".parse().unwrap()],
        }]);
        assert!(nodes.add_hinted(&network(1), hint(1)));
        assert!(!nodes.add_hinted(&network(1), hint(1)), "it is known");
        assert_eq!(names(&nodes), ["a.example:1", "192.168.1.5:4433"]);
        let two = BTreeSet::from([network(1), network(2)]);
        assert!(!nodes.remove_hinted(&two, &[]), "no other node answers");
        assert!(!nodes.remove_hinted(&BTreeSet::new(), &[hint(1)]));
        let at = Time::ZERO + Span::from_millis(1);
        let near = Span::from_millis(1);
        nodes.choice.on_answer(at, 0, near, &NodeView::default());
        assert!(!nodes.remove_hinted(&two, &[hint(1)]));
        assert!(nodes.remove_hinted(&two, &[]));
        assert!(!nodes.remove_hinted(&two, &[]), "it is gone");
        assert!(nodes.add_hinted(&network(1), hint(1)));
        assert!(nodes.remove_hinted(&[network(2)].into(), &[]));
        assert_eq!(names(&nodes), ["a.example:1"]);
        // Places are used again.
        for last in 2..100 {
            assert!(nodes.add_hinted(&network(last), hint(last)));
            assert_eq!(nodes.list.len(), 2);
            nodes.remove_hinted(&BTreeSet::new(), &[]);
        }
        for last in 0..100 {
            let has_room = usize::from(last) < NODES_MAX - 1;
            assert_eq!(nodes.add_hinted(&network(1), hint(last)), has_room);
        }
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
            hint: None,
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
        let hinted = NodeStatus {
            hint: Some(HintSource::Announced),
            ..node("192.168.1.5:1", true, Some(1))
        };
        let text = "192.168.1.5:1 (announced on this network), nearest: 1 ms; b:1 80 ms";
        assert_eq!(
            describe_nodes(&[hinted, near[1].clone()]).as_deref(),
            Some(text)
        );
    }
}
