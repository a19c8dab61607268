//! A NAT as a table: endpoint-independent mapping, with ports assigned in sequence.
//!
//! An internal endpoint has one external port for all destinations, and every host that knows the
//! port may answer (endpoint-independent filtering), as RFC 4787 requires. `rebind` drops all
//! mappings, like a rebooting router: the next packet from inside gets another port, and packets to
//! the old one are dropped. A NAT with an idle time drops each mapping when no packet has left by
//! it for that time; packets from outside do not keep it (RFC 4787 REQ-6).

use d2tp_time::{Span, Time};
use std::collections::{BTreeMap, VecDeque};

/// The first port that is assigned.
pub const PORT_FIRST: u16 = 20_000;
/// The most mappings; beyond this the oldest one is dropped. It is small enough that a port is not
/// reused soon.
pub const MAPPINGS_MAX: usize = 16_384;

/// A NAT table for internal endpoints `E` (protocol, address and port, or another identifier).
///
/// ```
/// use cedos_lab_link::Nat;
/// let mut nat = Nat::new();
/// let port = nat.outbound("10.0.0.2:5000");
/// assert_eq!(nat.inbound(port), Some("10.0.0.2:5000"));
/// nat.rebind();
/// assert_eq!(nat.inbound(port), None);
/// assert_ne!(nat.outbound("10.0.0.2:5000"), port);
/// ```
#[derive(Clone, Debug)]
pub struct Nat<E> {
    by_inside: BTreeMap<E, u16>,
    by_port: BTreeMap<u16, E>,
    oldest: VecDeque<u16>,
    next: u16,
    idle: Option<Span>,
    /// When a packet last left by each port; only for a NAT with an idle time.
    left_at: BTreeMap<u16, Time>,
}

impl<E: Copy + Ord> Nat<E> {
    /// An empty table.
    pub fn new() -> Nat<E> {
        Nat {
            by_inside: BTreeMap::new(),
            by_port: BTreeMap::new(),
            oldest: VecDeque::new(),
            next: PORT_FIRST,
            idle: None,
            left_at: BTreeMap::new(),
        }
    }

    /// An empty table that drops a mapping when no packet has left by it for `idle`.
    pub fn with_idle(idle: Span) -> Nat<E> {
        Nat {
            idle: Some(idle),
            ..Nat::new()
        }
    }

    /// [`Nat::outbound`] at a given time, for a NAT with an idle time.
    pub fn outbound_at(&mut self, now: Time, inside: E) -> u16 {
        if let Some(port) = self.by_inside.get(&inside).copied()
            && self.is_stale(now, port)
        {
            self.by_inside.remove(&inside);
            self.by_port.remove(&port);
            self.left_at.remove(&port);
            self.oldest.retain(|other| *other != port);
        }
        let port = self.outbound(inside);
        if self.idle.is_some() {
            self.left_at.insert(port, now);
        }
        port
    }

    /// [`Nat::inbound`] at a given time, for a NAT with an idle time.
    pub fn inbound_at(&self, now: Time, port: u16) -> Option<E> {
        self.inbound(port).filter(|_| !self.is_stale(now, port))
    }

    /// The external port of `inside`, without assigning one.
    pub fn port_of(&self, now: Time, inside: E) -> Option<u16> {
        let port = self.by_inside.get(&inside).copied()?;
        (!self.is_stale(now, port)).then_some(port)
    }

    fn is_stale(&self, now: Time, port: u16) -> bool {
        let left_at = self.left_at.get(&port);
        std::iter::zip(self.idle, left_at).any(|(idle, at)| now.since(*at) >= idle)
    }

    /// The external port of a packet from `inside`; assigns one if there is no mapping.
    pub fn outbound(&mut self, inside: E) -> u16 {
        if let Some(port) = self.by_inside.get(&inside) {
            return *port;
        }
        if self.oldest.len() == MAPPINGS_MAX
            && let Some(port) = self.oldest.pop_front()
            && let Some(old) = self.by_port.remove(&port)
        {
            self.by_inside.remove(&old);
            self.left_at.remove(&port);
        }
        let mut port = self.next;
        while self.by_port.contains_key(&port) {
            port = after(port);
        }
        self.next = after(port);
        self.by_inside.insert(inside, port);
        self.by_port.insert(port, inside);
        self.oldest.push_back(port);
        port
    }

    /// The internal endpoint that gets a packet to external port `port`.
    pub fn inbound(&self, port: u16) -> Option<E> {
        self.by_port.get(&port).copied()
    }

    /// Drops all mappings. Port numbers continue, so old ones stay unused.
    pub fn rebind(&mut self) {
        self.by_inside.clear();
        self.by_port.clear();
        self.oldest.clear();
        self.left_at.clear();
    }

    /// The number of mappings.
    pub fn len(&self) -> usize {
        self.by_port.len()
    }

    /// Whether there is no mapping.
    pub fn is_empty(&self) -> bool {
        self.by_port.is_empty()
    }
}

impl<E: Copy + Ord> Default for Nat<E> {
    fn default() -> Self {
        Nat::new()
    }
}

fn after(port: u16) -> u16 {
    port.checked_add(1).unwrap_or(PORT_FIRST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_keeps_its_port_until_a_rebind() {
        let mut nat = Nat::new();
        let first = nat.outbound(1);
        assert_eq!(nat.outbound(1), first);
        assert_ne!(nat.outbound(2), first);
        nat.rebind();
        assert_ne!(nat.outbound(1), first);
        assert_eq!(nat.len(), 1);
    }

    #[test]
    fn a_mapping_lasts_as_long_as_something_leaves_by_it_and_no_longer() {
        let at = Time::from_secs_f64;
        let mut nat = Nat::with_idle(Span::from_secs_f64(30.0));
        let first = nat.outbound_at(at(0.0), 1);
        assert_eq!(nat.outbound_at(at(29.0), 1), first);
        // Incoming packets pass, but do not keep the mapping.
        assert_eq!(nat.inbound_at(at(58.0), first), Some(1));
        assert_eq!(nat.port_of(at(58.0), 1), Some(first));
        assert_eq!(nat.inbound_at(at(59.0), first), None);
        assert_eq!(nat.port_of(at(59.0), 1), None);
        let second = nat.outbound_at(at(60.0), 1);
        assert_ne!(second, first);
        assert_eq!((nat.len(), nat.inbound_at(at(60.0), first)), (1, None));
    }

    #[test]
    fn a_full_table_forgets_the_oldest_mapping() {
        let mut nat = Nat::new();
        let first = nat.outbound(0);
        for inside in 1..=MAPPINGS_MAX {
            nat.outbound(inside);
        }
        assert_eq!(nat.len(), MAPPINGS_MAX);
        assert_eq!(nat.inbound(first), None);
    }

    #[test]
    fn ports_wrap_around_within_their_range() {
        let mut nat = Nat::new();
        for inside in 0..200_000u32 {
            assert!(nat.outbound(inside) >= PORT_FIRST);
        }
    }
}
