//! Path MTU discovery (RFC 8899): padded probes, whose loss does not count as congestion.
//!
//! The list of candidate sizes contains those of common links. The largest one that was not refused
//! is probed first: most paths carry 1,452 or 1,472 bytes and need one probe. A path that carries a full Ethernet
//! frame, and much payload, is asked for a jumbo frame as well. Where the host's own link has an MTU of 1,500 bytes its
//! kernel refuses that probe, and nothing is sent.

use d2tp_time::{Span, Time};
use d2tp_wire::DATAGRAM_FIRST_BYTES;

/// The UDP payload sizes to probe up to a full Ethernet frame: IPv6 and IPv4 over Ethernet, tunnels, PPPoE, LTE.
const LADDER: [u16; 6] = [1252, 1332, 1392, 1432, 1452, ETHERNET_BYTES];
/// The UDP payload of a full Ethernet frame over IPv4: 1,500 bytes without the headers of IP and UDP.
const ETHERNET_BYTES: u16 = 1472;
/// How much longer the IP header of IPv6 is than that of IPv4.
const IPV6_LONGER_BYTES: u16 = 20;
/// Probes of one size before it counts as too large. RFC 8899 §5.1.2 allows three.
const PROBES_MAX: u8 = 2;
/// Consecutive losses of full-size packets after which the path counts as a black hole for that size.
const BLACK_HOLE_LOSSES: u8 = 6;
/// How long a size that failed is not probed again (RFC 8899 PMTU_RAISE_TIMER).
const RAISE_AFTER: Span = Span::from_secs(600);
/// Payload bytes that a path carries before its MTU is probed: short exchanges do not need it.
const MTU_PROBE_AFTER: u64 = 8 << 10;
/// Payload bytes that a path carries before a jumbo frame is tried, which most paths lose.
const JUMBO_PROBE_AFTER: u64 = 256 << 10; // a guess: two lost probes are 7 % of it, once for each path

/// The search for the largest datagram that a path carries.
#[derive(Clone, Debug)]
pub(crate) struct MtuDiscovery {
    current: u16,
    /// The largest size to be tried that fits an Ethernet frame.
    ethernet_max: u16,
    /// The size of a jumbo frame, while the path may carry it.
    jumbo: Option<u16>,
    /// The size to probe next.
    next: Option<u16>,
    in_flight: bool,
    failures: u8,
    large_losses: u8,
    raise_at: Time,
    fixed: bool,
    /// The size that the peer's limit on the bytes in flight permits, while it is small.
    limit: Option<u16>,
}

impl MtuDiscovery {
    /// Searches up to `ipv4_max` bytes of UDP payload over IPv4, and as much less over IPv6 as its header is longer.
    pub(crate) fn new(ipv4_max: u16, is_ipv6: bool) -> Self {
        let longer = if is_ipv6 { IPV6_LONGER_BYTES } else { 0 };
        let max = ipv4_max.saturating_sub(longer);
        let ethernet_max = max.min(ETHERNET_BYTES - longer);
        let mut mtu = MtuDiscovery {
            current: DATAGRAM_FIRST_BYTES as u16,
            ethernet_max,
            jumbo: (max > ethernet_max).then_some(max),
            next: None,
            in_flight: false,
            failures: 0,
            large_losses: 0,
            raise_at: Time::NEVER,
            fixed: false,
            limit: None,
        };
        mtu.next = mtu.below(ethernet_max + 1);
        mtu
    }

    /// A fixed size that the path is known to carry: it is not probed, and no loss lowers it.
    pub(crate) fn fixed(size: u16) -> Self {
        MtuDiscovery {
            current: size,
            ethernet_max: size,
            jumbo: None,
            next: None,
            in_flight: false,
            failures: 0,
            large_losses: 0,
            raise_at: Time::NEVER,
            fixed: true,
            limit: None,
        }
    }

    /// Whether the size is below that with which paths begin.
    pub(crate) fn is_small(&self) -> bool {
        self.current() < DATAGRAM_FIRST_BYTES
    }

    /// R-SERIAL-4: keeps datagrams to a size, without probes of larger ones. With `None` the size found before is used
    /// again, and the search goes on. Returns true if the size of datagrams changed.
    pub(crate) fn set_limit(&mut self, size: Option<u16>) -> bool {
        let before = self.current();
        self.limit = size;
        self.current() != before
    }

    /// The largest candidate size of an Ethernet frame below `limit` that would be an improvement.
    fn below(&self, limit: u16) -> Option<u16> {
        let improves = |s: &&u16| **s < limit && **s > self.current && **s <= self.ethernet_max;
        LADDER.iter().rev().find(improves).copied()
    }

    pub(crate) fn current(&self) -> usize {
        usize::from(
            self.limit
                .map_or(self.current, |limit| limit.min(self.current)),
        )
    }

    /// The size to probe on a path that has carried `payload` bytes, if there is one.
    pub(crate) fn probe(&self, payload: u64) -> Option<usize> {
        if self.in_flight || self.limit.is_some() {
            return None;
        }
        let size = self.next?;
        let after = match Some(size) == self.jumbo {
            true => JUMBO_PROBE_AFTER,
            false => MTU_PROBE_AFTER,
        };
        (payload >= after).then_some(usize::from(size))
    }
    pub(crate) fn on_probe_sent(&mut self) {
        self.in_flight = true;
    }
    pub(crate) fn on_probe_acked(&mut self, size: u16) {
        self.in_flight = false;
        self.failures = 0;
        self.current = self.current.max(size);
        self.next = self.jumbo.filter(|_| self.current == self.ethernet_max);
        self.large_losses = 0;
    }
    pub(crate) fn on_probe_lost(&mut self, now: Time) {
        self.in_flight = false;
        self.failures += 1;
        if self.failures < PROBES_MAX {
            return;
        }
        self.failures = 0;
        let Some(size) = self.next.take() else {
            return;
        };
        if Some(size) == self.jumbo {
            self.jumbo = None;
            return;
        }
        self.next = self.below(size);
        if self.next.is_none() {
            self.raise_at = now + RAISE_AFTER;
        }
    }
    /// Handles that what is in flight was given up, a probe perhaps included: neither its answer nor its loss will be
    /// reported. It is sent again when the path answers.
    pub(crate) fn on_abandoned(&mut self) {
        self.in_flight = false;
    }
    /// Handles the error of a socket that refused this size. Returns true if it refused the probe that was just sent.
    pub(crate) fn on_too_big(&mut self, now: Time, size: u16) -> bool {
        if size <= self.current {
            self.search_below(size);
            return false;
        }
        let refused = self.in_flight && self.next == Some(size);
        if self.next.is_some_and(|next| next >= size) {
            self.failures = PROBES_MAX;
            self.on_probe_lost(now);
        }
        refused
    }
    /// Records the loss of an ordinary packet of `size` bytes. Returns true if the path is a black hole
    /// for that size.
    pub(crate) fn on_loss(&mut self, now: Time, size: u16) -> bool {
        if size <= DATAGRAM_FIRST_BYTES as u16 || self.fixed {
            return false;
        }
        self.large_losses += 1;
        if self.large_losses < BLACK_HOLE_LOSSES {
            return false;
        }
        self.large_losses = 0;
        let was_jumbo = size > self.ethernet_max;
        self.search_below(size);
        if !was_jumbo {
            // Losses of a crowded link look the same.
            self.next = None;
            self.raise_at = now + RAISE_AFTER;
        }
        true
    }
    /// Begins again with the first size, and looks for one below that which the path does not carry any more.
    fn search_below(&mut self, size: u16) {
        if size > self.ethernet_max {
            self.jumbo = None;
        }
        self.current = DATAGRAM_FIRST_BYTES as u16;
        self.next = self.below(size);
    }
    /// Handles the silence of a path: it may not carry its previous datagram size any more, and no
    /// error would report that. Small packets are used first, and the previous size is probed again
    /// when the path answers. Returns true if the size changed.
    pub(crate) fn on_silence(&mut self) -> bool {
        if self.current <= DATAGRAM_FIRST_BYTES as u16 || self.fixed {
            return false;
        }
        let before = self.current;
        self.current = DATAGRAM_FIRST_BYTES as u16;
        self.next = self.below(before + 1);
        self.in_flight = false;
        self.failures = 0;
        self.large_losses = 0;
        true
    }
    pub(crate) fn on_ack(&mut self, now: Time, size: u16) {
        if size > DATAGRAM_FIRST_BYTES as u16 {
            self.large_losses = 0;
        }
        if now >= self.raise_at {
            self.raise_at = Time::NEVER;
            self.next = self.below(self.ethernet_max + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use d2tp_wire::DATAGRAM_MAX_BYTES;

    use super::*;

    const JUMBO: u16 = DATAGRAM_MAX_BYTES as u16;
    const MUCH: u64 = JUMBO_PROBE_AFTER;

    fn ipv4(max: u16) -> MtuDiscovery {
        MtuDiscovery::new(max, false)
    }

    /// A search on a path that lost or carried each probe; returns the size found and how many probes were lost.
    fn search(mut mtu: MtuDiscovery, carries: u16) -> (usize, usize) {
        let mut lost = 0;
        for _ in 0..40 {
            let Some(size) = mtu.probe(MUCH) else { break };
            mtu.on_probe_sent();
            if size <= usize::from(carries) {
                mtu.on_probe_acked(size as u16);
            } else {
                lost += 1;
                mtu.on_probe_lost(Time::ZERO);
            }
        }
        (mtu.current(), lost)
    }

    /// A path that carries jumbo frames, and was asked.
    fn jumbo_path() -> MtuDiscovery {
        let mut mtu = ipv4(JUMBO);
        for size in [1472, JUMBO] {
            mtu.on_probe_sent();
            mtu.on_probe_acked(size);
        }
        assert_eq!((mtu.current(), mtu.probe(MUCH)), (DATAGRAM_MAX_BYTES, None));
        mtu
    }

    #[test]
    fn the_search_ends_at_the_largest_step_the_path_carries() {
        assert_eq!(search(ipv4(1472), 1472), (1472, 0));
        assert_eq!(search(ipv4(1472), 1460), (1452, 2));
        assert_eq!(search(ipv4(1472), 1280).0, 1252);
        assert_eq!(search(ipv4(1472), 1200).0, 1200);
        assert_eq!(search(ipv4(JUMBO), 9000), (DATAGRAM_MAX_BYTES, 0));
        assert_eq!(
            search(MtuDiscovery::new(JUMBO, true), 9000),
            (DATAGRAM_MAX_BYTES - 20, 0)
        );
        // A full Ethernet frame first: nothing is lost on the usual paths before it is used.
        assert_eq!(search(ipv4(JUMBO), 1472), (1472, 2));
        assert_eq!(search(MtuDiscovery::new(JUMBO, true), 1452), (1452, 2));
        // A path that does not carry a full Ethernet frame is not asked for more.
        assert_eq!(search(ipv4(JUMBO), 1460), (1452, 2));
    }

    #[test]
    fn jumbo_frames_are_tried_after_much_payload_and_once() {
        let mut mtu = ipv4(JUMBO);
        assert_eq!(mtu.probe(MTU_PROBE_AFTER - 1), None);
        assert_eq!(mtu.probe(MTU_PROBE_AFTER), Some(1472));
        mtu.on_probe_sent();
        mtu.on_probe_acked(1472);
        assert_eq!(mtu.probe(JUMBO_PROBE_AFTER - 1), None);
        assert_eq!(mtu.probe(JUMBO_PROBE_AFTER), Some(DATAGRAM_MAX_BYTES));
        // The kernel of this host refuses it: nothing was sent.
        mtu.on_probe_sent();
        mtu.on_too_big(Time::ZERO, JUMBO);
        assert_eq!((mtu.current(), mtu.probe(u64::MAX)), (1472, None));
        mtu.on_ack(Time::ZERO + RAISE_AFTER + RAISE_AFTER, 1472);
        assert_eq!(mtu.probe(u64::MAX), None);
    }

    #[test]
    fn a_path_that_carries_jumbo_frames_no_more_returns_to_ethernet_frames() {
        let mut lossy = jumbo_path();
        let noticed = (0..BLACK_HOLE_LOSSES)
            .filter(|_| lossy.on_loss(Time::ZERO, JUMBO))
            .count();
        assert_eq!((noticed, lossy.current()), (1, DATAGRAM_FIRST_BYTES));
        assert_eq!(search(lossy, 1472), (1472, 0));

        let mut refused = jumbo_path();
        refused.on_too_big(Time::ZERO, JUMBO);
        assert_eq!(search(refused, 1472), (1472, 0));

        // A silence tells nothing of sizes: both are asked for again.
        let mut silent = jumbo_path();
        assert!(silent.on_silence());
        assert_eq!(silent.probe(MUCH), Some(1472));
        assert_eq!(search(silent.clone(), 9000), (DATAGRAM_MAX_BYTES, 0));
        assert_eq!(search(silent, 1472), (1472, 2));
    }

    #[test]
    fn on_a_silent_path_small_packets_go_first_and_the_old_size_is_asked_for_again() {
        let mut mtu = ipv4(1472);
        mtu.on_probe_sent();
        mtu.on_probe_acked(1472);
        assert_eq!(mtu.probe(MUCH), None);
        assert!(mtu.on_silence());
        assert_eq!((mtu.current(), mtu.probe(MUCH)), (1200, Some(1472)));
        assert!(!mtu.on_silence());
        for _ in 0..2 {
            mtu.on_probe_sent();
            mtu.on_probe_lost(Time::ZERO);
        }
        assert_eq!(mtu.probe(MUCH), Some(1452));
    }

    #[test]
    fn after_a_limit_the_search_goes_on_where_it_was() {
        // R-SERIAL-4
        let mut mtu = ipv4(1472);
        assert!(mtu.set_limit(Some(480)));
        assert_eq!((mtu.current(), mtu.probe(MUCH)), (480, None));
        assert!(mtu.is_small());
        assert!(mtu.set_limit(None));
        assert_eq!((mtu.current(), mtu.probe(MUCH)), (1200, Some(1472)));
        // A probe that was sent before the limit does not exceed it.
        mtu.on_probe_sent();
        mtu.set_limit(Some(480));
        mtu.on_probe_acked(1472);
        assert_eq!(mtu.current(), 480);
        mtu.set_limit(None);
        assert_eq!((mtu.current(), mtu.probe(MUCH)), (1472, None));
    }

    #[test]
    fn a_black_hole_for_large_packets_is_noticed_and_asked_again_later() {
        let mut mtu = ipv4(1472);
        mtu.on_probe_sent();
        mtu.on_probe_acked(1472);
        let noticed = (0..BLACK_HOLE_LOSSES)
            .filter(|_| mtu.on_loss(Time::ZERO, 1472))
            .count();
        assert_eq!((noticed, mtu.current()), (1, DATAGRAM_FIRST_BYTES));
        assert_eq!(mtu.probe(MUCH), None);
        mtu.on_ack(Time::ZERO + RAISE_AFTER, 1200);
        assert_eq!(mtu.probe(MUCH), Some(1472));
    }
}
