//! Path MTU discovery (RFC 8899): padded probes, whose loss does not count as congestion.
//!
//! The list of candidate sizes contains those of common links. The largest one that was not refused
//! is probed first: most paths carry 1,452 or 1,472 bytes and need one probe.

use d2tp_time::{Span, Time};
use d2tp_wire::{DATAGRAM_FIRST_BYTES, DATAGRAM_MAX_BYTES};

/// The UDP payload sizes to probe: IPv6 and IPv4 over Ethernet, tunnels, PPPoE, LTE; then jumbo
/// frames.
const LADDER: [u16; 7] = [
    1252,
    1332,
    1392,
    1432,
    1452,
    1472,
    DATAGRAM_MAX_BYTES as u16,
];
/// Probes of one size before it counts as too large. RFC 8899 §5.1.2 allows three.
const PROBES_MAX: u8 = 2;
/// Consecutive losses of full-size packets after which the path counts as a black hole for that size.
const BLACK_HOLE_LOSSES: u8 = 6;
/// How long a size that failed is not probed again (RFC 8899 PMTU_RAISE_TIMER).
const RAISE_AFTER: Span = Span::from_secs(600);

/// The search for the largest datagram that a path carries.
#[derive(Clone, Debug)]
pub(crate) struct MtuDiscovery {
    current: u16,
    max: u16,
    /// The place of the size to probe next in the list of candidate sizes.
    next: Option<u8>,
    in_flight: bool,
    failures: u8,
    large_losses: u8,
    raise_at: Time,
    fixed: bool,
    /// The size that the peer's limit on the bytes in flight permits, while it is small.
    limit: Option<u16>,
}

impl MtuDiscovery {
    pub(crate) fn new(max: u16) -> Self {
        let mut mtu = MtuDiscovery {
            current: DATAGRAM_FIRST_BYTES as u16,
            max,
            next: None,
            in_flight: false,
            failures: 0,
            large_losses: 0,
            raise_at: Time::NEVER,
            fixed: false,
            limit: None,
        };
        mtu.next = mtu.below(max + 1);
        mtu
    }

    /// A fixed size that the path is known to carry: it is not probed, and no loss lowers it.
    pub(crate) fn fixed(size: u16) -> Self {
        MtuDiscovery {
            current: size,
            max: size,
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

    /// The place of the largest candidate size below `limit` that would be an improvement.
    fn below(&self, limit: u16) -> Option<u8> {
        let place = LADDER
            .iter()
            .rposition(|s| *s < limit && *s > self.current && *s <= self.max)?;
        Some(place as u8)
    }

    /// The candidate size to probe next, if there is one.
    fn next_size(&self) -> Option<u16> {
        self.next.map(|place| LADDER[usize::from(place)])
    }

    pub(crate) fn current(&self) -> usize {
        usize::from(
            self.limit
                .map_or(self.current, |limit| limit.min(self.current)),
        )
    }

    /// The size to probe now, if there is one.
    pub(crate) fn probe(&self) -> Option<usize> {
        if self.in_flight || self.limit.is_some() {
            None
        } else {
            self.next_size().map(usize::from)
        }
    }
    pub(crate) fn on_probe_sent(&mut self) {
        self.in_flight = true;
    }
    pub(crate) fn on_probe_acked(&mut self, size: u16) {
        self.in_flight = false;
        self.failures = 0;
        self.current = self.current.max(size);
        self.next = None;
        self.large_losses = 0;
    }
    pub(crate) fn on_probe_lost(&mut self, now: Time) {
        self.in_flight = false;
        self.failures += 1;
        if self.failures >= PROBES_MAX {
            self.failures = 0;
            self.next = self.next_size().and_then(|size| self.below(size));
            if self.next.is_none() {
                self.raise_at = now + RAISE_AFTER;
            }
        }
    }
    /// Handles that what is in flight was given up, a probe perhaps included: neither its answer nor its loss will be
    /// reported. It is sent again when the path answers.
    pub(crate) fn on_abandoned(&mut self) {
        self.in_flight = false;
    }
    /// Handles the error of a socket that refused this size.
    pub(crate) fn on_too_big(&mut self, now: Time, size: u16) {
        if size > self.current {
            self.failures = PROBES_MAX;
            self.on_probe_lost(now);
        } else {
            self.current = DATAGRAM_FIRST_BYTES as u16;
            self.next = self.below(size);
        }
    }
    /// Records the loss of an ordinary packet of `size` bytes. Returns true if the path is a black hole
    /// for that size.
    pub(crate) fn on_loss(&mut self, size: u16) -> bool {
        if size <= DATAGRAM_FIRST_BYTES as u16 || self.fixed {
            return false;
        }
        self.large_losses += 1;
        if self.large_losses < BLACK_HOLE_LOSSES {
            return false;
        }
        self.large_losses = 0;
        self.next = None;
        self.current = DATAGRAM_FIRST_BYTES as u16;
        true
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
            self.next = self.below(self.max + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn search(carries: u16, max: u16) -> usize {
        let mut mtu = MtuDiscovery::new(max);
        for _ in 0..40 {
            let Some(size) = mtu.probe() else { break };
            mtu.on_probe_sent();
            if size <= usize::from(carries) {
                mtu.on_probe_acked(size as u16);
            } else {
                mtu.on_probe_lost(Time::ZERO);
            }
        }
        mtu.current()
    }

    #[test]
    fn the_search_ends_at_the_largest_step_the_path_carries() {
        assert_eq!(search(1472, 1472), 1472);
        assert_eq!(search(1460, 1472), 1452);
        assert_eq!(search(1280, 1472), 1252);
        assert_eq!(search(1200, 1472), 1200);
        assert_eq!(search(9000, DATAGRAM_MAX_BYTES as u16), DATAGRAM_MAX_BYTES);
    }

    #[test]
    fn on_a_silent_path_small_packets_go_first_and_the_old_size_is_asked_for_again() {
        let mut mtu = MtuDiscovery::new(1472);
        mtu.on_probe_sent();
        mtu.on_probe_acked(1472);
        assert_eq!(mtu.probe(), None);
        assert!(mtu.on_silence());
        assert_eq!((mtu.current(), mtu.probe()), (1200, Some(1472)));
        assert!(!mtu.on_silence());
        for _ in 0..2 {
            mtu.on_probe_sent();
            mtu.on_probe_lost(Time::ZERO);
        }
        assert_eq!(mtu.probe(), Some(1452));
    }

    #[test]
    fn after_a_limit_the_search_goes_on_where_it_was() {
        // R-SERIAL-4
        let mut mtu = MtuDiscovery::new(1472);
        assert!(mtu.set_limit(Some(480)));
        assert_eq!((mtu.current(), mtu.probe()), (480, None));
        assert!(mtu.is_small());
        assert!(mtu.set_limit(None));
        assert_eq!((mtu.current(), mtu.probe()), (1200, Some(1472)));
        // A probe that was sent before the limit does not exceed it.
        mtu.on_probe_sent();
        mtu.set_limit(Some(480));
        mtu.on_probe_acked(1472);
        assert_eq!(mtu.current(), 480);
        mtu.set_limit(None);
        assert_eq!((mtu.current(), mtu.probe()), (1472, None));
    }

    #[test]
    fn a_black_hole_for_large_packets_is_noticed() {
        let mut mtu = MtuDiscovery::new(1472);
        mtu.on_probe_sent();
        mtu.on_probe_acked(1472);
        let noticed = (0..BLACK_HOLE_LOSSES).filter(|_| mtu.on_loss(1472)).count();
        assert_eq!((noticed, mtu.current()), (1, DATAGRAM_FIRST_BYTES));
    }
}
