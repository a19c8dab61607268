//! The inner MTU: what packets of a tunnel may have so that each fits one datagram.
//!
//! A session begins with small datagrams on a path that was silent, and finds within some round trips what it carries. Meanwhile
//! packets travel in two pieces. Senders do not learn of it, because they would keep to small packets for ten minutes (RFC 1191
//! §6.3), and would cut into pieces what they had under way.

use std::time::{Duration, Instant};

/// The smallest inner MTU, which IPv6 requires (RFC 8200 §5). Packets of this size are split where a path carries less.
pub const INNER_MTU_MIN: u16 = 1280;

/// The largest inner MTU. A packet of this size and what D2TP adds fit into 1,500 bytes.
pub const INNER_MTU_MAX: u16 = 1420; // 1500 − IPv6 and UDP 48 − D2TP 32, as WireGuard's

/// How long a session's datagrams must have been smaller before the inner MTU is. Higher: packets leave in two pieces for longer on a
/// path of a smaller MTU. Lower: outages make packets small.
const LOWERED_AFTER: Duration = Duration::from_secs(10); // a guess: MTU discovery over a slow path

/// The inner MTU of a session over time.
#[derive(Clone, Debug)]
pub struct InnerMtu {
    current: u16,
    /// Since when datagrams are smaller than that.
    smaller_since: Option<Instant>,
}

impl InnerMtu {
    /// Begins with this one, which the first path may raise at once.
    pub fn new(mtu: u16) -> InnerMtu {
        InnerMtu {
            current: mtu,
            smaller_since: None,
        }
    }

    /// The inner MTU now. `datagram_max`: the bytes of the largest datagram that paths carry now; `None` without such a path.
    ///
    /// ```
    /// use std::time::{Duration, Instant};
    /// use d2tp_tunnel::{INNER_MTU_MIN, InnerMtu};
    /// let (mut mtu, now) = (InnerMtu::new(INNER_MTU_MIN), Instant::now());
    /// assert_eq!(mtu.follow(now, Some(1_400)), 1_400);
    /// assert_eq!(mtu.follow(now, Some(1_150)), 1_400);
    /// assert_eq!(mtu.follow(now + Duration::from_secs(10), Some(1_150)), 1_280);
    /// ```
    pub fn follow(&mut self, now: Instant, datagram_max: Option<usize>) -> u16 {
        let Some(fits) = datagram_max.map(inner_mtu) else {
            self.smaller_since = None;
            return self.current;
        };
        let since = match fits < self.current {
            true => *self.smaller_since.get_or_insert(now),
            false => now - LOWERED_AFTER,
        };
        if now.saturating_duration_since(since) >= LOWERED_AFTER {
            (self.current, self.smaller_since) = (fits, None);
        }
        self.current
    }
}

/// The inner MTU for a session whose largest datagram has this many bytes.
fn inner_mtu(datagram_max: usize) -> u16 {
    let fits = u16::try_from(datagram_max).unwrap_or(INNER_MTU_MAX);
    fits.clamp(INNER_MTU_MIN, INNER_MTU_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_inner_mtu_stays_within_what_ipv6_needs_and_paths_carry() {
        assert_eq!(inner_mtu(1_100), 1_280);
        assert_eq!(inner_mtu(1_350), 1_350);
        assert_eq!(inner_mtu(9_000), 1_420);
    }

    #[test]
    fn an_outage_and_the_search_for_the_mtu_after_it_make_no_packets_smaller() {
        let (mut mtu, begin) = (InnerMtu::new(INNER_MTU_MIN), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        assert_eq!(mtu.follow(at(0), Some(1_420)), 1_420);
        assert_eq!(mtu.follow(at(1), Some(1_150)), 1_420);
        assert_eq!(mtu.follow(at(2), None), 1_420);
        // An hour without a path, then a path that begins with small datagrams.
        for seconds in [3_600, 3_601, 3_609] {
            assert_eq!(mtu.follow(at(seconds), Some(1_150)), 1_420);
        }
        assert_eq!(mtu.follow(at(3_610), Some(1_420)), 1_420);
        assert_eq!(mtu.follow(at(3_611), Some(1_350)), 1_420);
        assert_eq!(mtu.follow(at(3_621), Some(1_350)), 1_350);
        assert_eq!(mtu.follow(at(3_622), Some(1_420)), 1_420);
    }
}
