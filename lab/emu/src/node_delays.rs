//! The distance of the proxy's nodes: what goes to one of them is held for the round trip to it beyond the link's own.

use std::collections::VecDeque;

use cedos_lab_link::{Span, Time};
use cedos_lab_scenario::Scenario;

use crate::packet::{self, UDP};
use crate::plan;

/// A round trip to a node from a time on.
struct NodeRoundTrip {
    from: Time,
    node: usize,
    round_trip: Span,
}

/// The packets on their way to nodes that are far away.
pub(crate) struct NodeDelays {
    /// In the order of their times.
    changes: VecDeque<NodeRoundTrip>,
    round_trips: [Span; plan::PROXY_PORTS.len()],
    /// Packets on the way, with the time at which each arrives. Nothing overtakes.
    held: [VecDeque<(Time, Vec<u8>)>; plan::PROXY_PORTS.len()],
}

impl NodeDelays {
    pub(crate) fn of(scenario: &Scenario) -> NodeDelays {
        let mut changes: Vec<NodeRoundTrip> = scenario
            .node_distances
            .iter()
            .map(|distance| NodeRoundTrip {
                from: Time::ZERO + Span::from_secs_f64(distance.t_s),
                node: usize::from(distance.node) - 1,
                round_trip: Span::from_secs_f64(distance.rtt_ms / 1e3),
            })
            .collect();
        changes.sort_by_key(|change| change.from);
        NodeDelays {
            changes: changes.into(),
            round_trips: Default::default(),
            held: Default::default(),
        }
    }

    /// Takes a packet for the proxy's host on. Returns it if its node is not far away.
    pub(crate) fn hold(&mut self, now: Time, packet: Vec<u8>) -> Option<Vec<u8>> {
        while let Some(change) = self.changes.front()
            && change.from <= now
        {
            self.round_trips[change.node] = change.round_trip;
            self.changes.pop_front();
        }
        let Some(node) = node_of(&packet) else {
            return Some(packet);
        };
        let due = now + self.round_trips[node];
        let last = self.held[node].back().map(|(at, _)| *at);
        let due = last.map_or(due, |last| due.max(last));
        if due == now {
            return Some(packet);
        }
        self.held[node].push_back((due, packet));
        None
    }

    /// A packet that has arrived by now.
    pub(crate) fn arrived(&mut self, now: Time) -> Option<Vec<u8>> {
        let is_due = |packets: &&mut VecDeque<(Time, Vec<u8>)>| {
            packets.front().is_some_and(|(at, _)| *at <= now)
        };
        let packets = self.held.iter_mut().find(is_due)?;
        packets.pop_front().map(|(_, packet)| packet)
    }

    /// When the next packet arrives.
    pub(crate) fn next_event(&self) -> Option<Time> {
        let first = self.held.iter().filter_map(VecDeque::front);
        first.map(|(at, _)| *at).min()
    }
}

/// The node to whose port a packet goes.
fn node_of(packet: &[u8]) -> Option<usize> {
    let head = packet::head(packet).filter(|head| head.protocol == UDP)?;
    let (_, to) = head.ports?;
    plan::PROXY_PORTS.iter().position(|port| *port == to)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::tests::v4;

    fn at(ms: u64) -> Time {
        Time::ZERO + Span::from_millis(ms)
    }

    fn scenario(text: &str) -> Scenario {
        let text = format!("duration_s = 60\nnodes = 2\n[[link]]\nname = \"wlan0\"\n{text}");
        Scenario::parse("test.toml", &text, &mut |_| {
            unreachable!("it has no traces")
        })
        .unwrap()
    }

    #[test]
    fn packets_to_a_far_node_are_held_in_order_and_those_to_a_near_one_are_not() {
        let far = "[[node_distance]]\nt_s = 1\nnode = 2\nrtt_ms = 80\n";
        let near = "[[node_distance]]\nt_s = 2\nnode = 2\nrtt_ms = 10\n";
        let mut delays = NodeDelays::of(&scenario(&format!("{near}{far}")));
        let to = |port| v4(UDP, ([10, 64, 1, 2].into(), 5), (plan::PROXY_V4, port));
        let (first, second) = (to(plan::PROXY_PORTS[0]), to(plan::PROXY_PORTS[1]));
        assert!(delays.hold(at(0), second.clone()).is_some(), "not yet far");
        assert!(delays.hold(at(1_000), first).is_some());
        assert!(delays.hold(at(1_990), second.clone()).is_none());
        assert!(delays.hold(at(2_000), second).is_none());
        assert_eq!(delays.next_event(), Some(at(2_070)));
        assert_eq!(delays.arrived(at(2_069)), None);
        assert!(delays.arrived(at(2_070)).is_some());
        assert!(
            delays.arrived(at(2_070)).is_some(),
            "it waited behind the first"
        );
        assert_eq!(
            (delays.arrived(at(9_000)), delays.next_event()),
            (None, None)
        );
    }
}
