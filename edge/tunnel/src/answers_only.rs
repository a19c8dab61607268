//! A filter for the end that does not pay: only answers to packets that came over metered links leave over them.
//!
//! The device decides which of its packets may leave over metered links. What it does not send there, nobody may answer there.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::inner_packet::{InnerPacket, PROTOCOL_ICMP, PROTOCOL_ICMPV6};
use crate::metered_filter::MeteredFilter;

/// For how long a packet may be answered at least, and at most for twice that.
const ANSWERED_FOR: Duration = Duration::from_secs(60); // a guess: calls send something each few seconds

/// The most peers that are remembered in that time.
const PEERS_MAX: usize = 4_096; // as the connections that D2Prox's system tracks for a client

/// Messages of ICMP about packets that were sent: unreachable, exceeded, a bad header, and "packet too big".
const ICMP_ERRORS: [u8; 3] = [3, 11, 12]; // RFC 792
const ICMPV6_ERRORS: [u8; 4] = [1, 2, 3, 4]; // RFC 4443

/// With whom the device speaks, seen from the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct PacketPeer {
    own: IpAddr,
    other: IpAddr,
    protocol: u8,
    own_port: Option<u16>,
    other_port: Option<u16>,
}

/// Admits answers to packets that came over metered links.
#[derive(Debug)]
pub struct AnswersOnly {
    peers: Mutex<RecentPeers>,
    refused: AtomicU64,
}

#[derive(Debug)]
struct RecentPeers {
    now: HashSet<PacketPeer>,
    before: HashSet<PacketPeer>,
    since: Instant,
}

impl RecentPeers {
    fn age(&mut self, now: Instant) {
        let age = now.saturating_duration_since(self.since);
        if age >= ANSWERED_FOR {
            self.before = match age < 2 * ANSWERED_FOR {
                true => std::mem::take(&mut self.now),
                false => HashSet::new(),
            };
            self.now.clear();
            self.since = now;
        }
    }
}

impl Default for AnswersOnly {
    fn default() -> AnswersOnly {
        AnswersOnly {
            peers: Mutex::new(RecentPeers {
                now: HashSet::new(),
                before: HashSet::new(),
                since: Instant::now(),
            }),
            refused: AtomicU64::new(0),
        }
    }
}

impl AnswersOnly {
    /// Notes a packet that came from the device over metered links: it may be answered there.
    pub fn on_asked(&self, packet: &[u8]) {
        self.asked_at(Instant::now(), packet);
    }

    /// The number of packets that were dropped because they answer none.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    fn asked_at(&self, now: Instant, packet: &[u8]) {
        let Ok(packet) = InnerPacket::parse(packet) else {
            return;
        };
        let mut peers = self.peers.lock();
        peers.age(now);
        if peers.now.len() < PEERS_MAX {
            peers.now.insert(PacketPeer {
                own: packet.source,
                other: packet.destination,
                protocol: packet.protocol,
                own_port: packet.source_port,
                other_port: packet.destination_port,
            });
        }
    }

    fn admits_at(&self, now: Instant, packet: &[u8]) -> bool {
        let Ok(packet) = InnerPacket::parse(packet) else {
            return false;
        };
        let is_error = |types: &[u8]| packet.icmp_type.is_some_and(|kind| types.contains(&kind));
        match packet.protocol {
            PROTOCOL_ICMP if is_error(&ICMP_ERRORS) => return true,
            PROTOCOL_ICMPV6 if is_error(&ICMPV6_ERRORS) => return true,
            _ => {}
        }
        let peer = PacketPeer {
            own: packet.destination,
            other: packet.source,
            protocol: packet.protocol,
            own_port: packet.destination_port,
            other_port: packet.source_port,
        };
        let mut peers = self.peers.lock();
        peers.age(now);
        peers.now.contains(&peer) || peers.before.contains(&peer)
    }
}

impl MeteredFilter for AnswersOnly {
    fn admits(&self, packet: &[u8]) -> bool {
        let is_admitted = self.admits_at(Instant::now(), packet);
        if !is_admitted {
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
        is_admitted
    }

    fn lets_pay(&self, packet: &[u8]) -> bool {
        self.admits_at(Instant::now(), packet)
    }

    fn on_left(&self, _: &[u8], _: bool) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inner_packet::tests::udp_v4;

    /// The answer to a packet of [`udp_v4`].
    fn answer(packet: &[u8]) -> Vec<u8> {
        let mut answer = packet.to_vec();
        answer[12..16].copy_from_slice(&packet[16..20]);
        answer[16..20].copy_from_slice(&packet[12..16]);
        answer[20..22].copy_from_slice(&packet[22..24]);
        answer[22..24].copy_from_slice(&packet[20..22]);
        answer
    }

    #[test]
    fn only_answers_to_what_was_asked_lately_are_admitted() {
        let (filter, began) = (AnswersOnly::default(), Instant::now());
        let asked = udp_v4(3);
        assert!(!filter.admits(&answer(&asked)));
        assert_eq!(filter.refused(), 1);
        filter.asked_at(began, &asked);
        assert!(filter.admits_at(began, &answer(&asked)));
        assert!(!filter.admits_at(began, &asked), "not the same direction");
        let mut other = answer(&asked);
        other[21] ^= 1;
        assert!(!filter.admits_at(began, &other), "another port");
        assert!(filter.admits_at(began + ANSWERED_FOR, &answer(&asked)));
        assert!(!filter.admits_at(began + 3 * ANSWERED_FOR, &answer(&asked)));
        assert!(!filter.admits(&[0x45; 19]));
    }

    #[test]
    fn messages_about_packets_that_were_sent_are_admitted() {
        let mut unreachable = udp_v4(3);
        unreachable[9] = PROTOCOL_ICMP;
        unreachable[20] = 3;
        assert!(AnswersOnly::default().admits(&unreachable));
        unreachable[20] = 8;
        assert!(!AnswersOnly::default().admits(&unreachable));
    }
}
