//! How many handshakes of one source a loaded server works on in a second.
//!
//! A cookie, or a stream, proves an address; who has one may still be an attacker, and each handshake costs public-key
//! operations.
//!
//! ```text
//!  under load:  SYN or WAKE from a proved address ─▶ that address's part of this second, or that of all streams
//!                                                       left ─▶ public-key work       none ─▶ dropped, the device repeats it
//! ```

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use d2tp_time::{Span, Time};

use crate::stream_path_state::StreamPathId;

/// R-HS-22: handshakes of one source in a second, under load. Smaller: more devices behind one address wait when a server is
/// attacked. Larger: one attacker costs more.
pub(crate) const PROVED_HANDSHAKES_PER_SECOND: u32 = 500; // as many as are no load; a twentieth of a core
/// Sources that are counted by themselves; the rest share one part.
const SOURCES_MAX: usize = 4_096;

/// What is counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum HandshakeSource {
    /// Every stream: a connection costs who opens it little.
    Streams,
    V4(Ipv4Addr),
    /// The first half of an address of IPv6, which is one network.
    V6([u8; 8]),
    /// Sources that found no place.
    Others,
}

impl HandshakeSource {
    fn of(address: &SocketAddr) -> HandshakeSource {
        if StreamPathId::of(address).is_some() {
            return HandshakeSource::Streams;
        }
        match address.ip().to_canonical() {
            IpAddr::V4(v4) => HandshakeSource::V4(v4),
            IpAddr::V6(v6) => {
                let bytes = v6.octets();
                HandshakeSource::V6(*bytes.first_chunk().expect("sixteen have eight"))
            }
        }
    }
}

/// The handshakes of this second, by source.
#[derive(Debug)]
pub(crate) struct HandshakeBudget {
    since: Time,
    counts: BTreeMap<HandshakeSource, u32>,
}

impl HandshakeBudget {
    pub(crate) fn new() -> HandshakeBudget {
        HandshakeBudget {
            since: Time::ZERO,
            counts: BTreeMap::new(),
        }
    }

    /// Takes one handshake of an address. Returns whether it was among the first `most` of this second.
    pub(crate) fn take(&mut self, now: Time, from: &SocketAddr, most: usize) -> bool {
        if now.since(self.since) >= Span::from_secs(1) {
            self.since = now;
            self.counts.clear();
        }
        let mut source = HandshakeSource::of(from);
        if self.counts.len() >= SOURCES_MAX && !self.counts.contains_key(&source) {
            source = HandshakeSource::Others;
        }
        let count = self.counts.entry(source).or_default();
        *count = count.saturating_add(1);
        *count as usize <= most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_counted_by_themselves_and_only_so_many() {
        let mut budget = HandshakeBudget::new();
        let now = Time::ZERO + Span::from_secs(5);
        let v4 = |n: u32| SocketAddr::from((Ipv4Addr::from(n), 7));
        let mut take = |now, from: &SocketAddr| budget.take(now, from, 1);
        assert!(take(now, &v4(1)) && !take(now, &v4(1)));
        assert!(take(now + Span::from_secs(1), &v4(1)), "a new second");
        let now = now + Span::from_secs(1);
        let streams = [StreamPathId(1).address(), StreamPathId(2).address()];
        assert!(take(now, &streams[0]) && !take(now, &streams[1]));
        let of_one_net = ["[2001:db8::1]:1", "[2001:db8::2]:1"].map(|a| a.parse().unwrap());
        assert!(take(now, &of_one_net[0]) && !take(now, &of_one_net[1]));
        let taken = (2..10_000).filter(|n| take(now, &v4(*n))).count();
        // Three were there before, and those without a place have one together.
        assert_eq!(taken, SOURCES_MAX - 3 + 1);
    }
}
