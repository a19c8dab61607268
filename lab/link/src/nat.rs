//! A NAT as a pure table: endpoint-independent mapping, ports handed out in turn.
//!
//! One inside endpoint has one outside port whatever it talks to, and whoever knows the port may
//! answer (endpoint-independent filtering), which is what RFC 4787 asks of a NAT. `rebind` forgets
//! every mapping, as a rebooting router or an expired timer does: the next packet from inside gets
//! another port, and packets to the old one reach nobody.

use std::collections::{BTreeMap, VecDeque};

/// The lowest port handed out.
pub const PORT_FIRST: u16 = 20_000;
/// Mappings kept; beyond this the oldest one goes. Small enough that a port is not used again soon.
pub const MAPPINGS_MAX: usize = 16_384;

/// A NAT table over inside endpoints `E` (protocol, address and port, or whatever tells two apart).
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
}

impl<E: Copy + Ord> Nat<E> {
    /// An empty table.
    pub fn new() -> Nat<E> {
        Nat {
            by_inside: BTreeMap::new(),
            by_port: BTreeMap::new(),
            oldest: VecDeque::new(),
            next: PORT_FIRST,
        }
    }

    /// The outside port of a packet that leaves from `inside`; makes a mapping if there is none.
    pub fn outbound(&mut self, inside: E) -> u16 {
        if let Some(port) = self.by_inside.get(&inside) {
            return *port;
        }
        if self.oldest.len() == MAPPINGS_MAX
            && let Some(port) = self.oldest.pop_front()
            && let Some(old) = self.by_port.remove(&port)
        {
            self.by_inside.remove(&old);
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

    /// Who gets a packet sent to outside `port`.
    pub fn inbound(&self, port: u16) -> Option<E> {
        self.by_port.get(&port).copied()
    }

    /// Forget every mapping. Ports go on from where they were, so old ones stay unanswered.
    pub fn rebind(&mut self) {
        self.by_inside.clear();
        self.by_port.clear();
        self.oldest.clear();
    }

    /// How many mappings there are.
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
