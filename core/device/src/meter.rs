//! Traffic of a link: payload bytes in total, the recent rate, and for how long payload arrived.

use std::collections::BTreeMap;

use d2tp_session::LinkId;
use d2tp_time::{Span, Time};

/// The interval at which grants, rates and paths are updated while data moves.
pub const TICK: Span = Span::from_millis(100);

/// The shortest time over which a rate is measured.
const RATE_OVER: Span = Span::from_millis(250);
/// From this length on, a round trip is long compared with the interval of grants.
const LONG_ROUND_TRIP: Span = Span::from_millis(500);
/// Weight of a new rate sample, in tenths.
const RATE_WEIGHT_TENTHS: u64 = 3;

/// The traffic of one link over all of its sockets, past ones included.
#[derive(Debug)]
pub(crate) struct LinkMeter {
    /// Bytes received and sent by each current socket at the last update.
    last: BTreeMap<LinkId, (u64, u64)>,
    /// Bytes received and sent in total.
    pub(crate) payload: (u64, u64),
    /// How long payload was arriving, in steps of [`TICK`].
    pub(crate) busy: Span,
    /// Recent bytes per second, received and sent together; `None` before any were.
    pub(crate) rate: Option<u64>,
    looked_at: Time,
    rate_since: (Time, u64),
}

impl LinkMeter {
    pub(crate) fn new(now: Time) -> LinkMeter {
        LinkMeter {
            last: BTreeMap::new(),
            payload: (0, 0),
            busy: Span::ZERO,
            rate: None,
            looked_at: now,
            rate_since: (now, 0),
        }
    }

    /// Counts what a socket's path has carried since the last update. Returns true if it carried
    /// anything.
    pub(crate) fn count(&mut self, socket: LinkId, carried: (u64, u64)) -> bool {
        let before = self.last.insert(socket, carried).unwrap_or((0, 0));
        // A new path over the same socket counts from zero.
        let more = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
        let more = (more(carried.0, before.0), more(carried.1, before.1));
        self.payload.0 += more.0;
        self.payload.1 += more.1;
        more != (0, 0)
    }

    /// Forgets the sockets, because they are replaced.
    pub(crate) fn forget_sockets(&mut self) {
        self.last.clear();
    }

    /// Completes an update. `received`: bytes that had arrived before it; `was_moving`: payload moved
    /// on some link at the previous update; `lent`: the link's traffic proves nothing about its rate.
    pub(crate) fn end_look(
        &mut self,
        now: Time,
        received: u64,
        was_moving: bool,
        lent: bool,
        round_trip: Span,
    ) {
        if self.payload.0 > received {
            let looked = now.since(self.looked_at);
            // While nothing moves, updates are rare, so the time since the last one says nothing.
            let moved = if was_moving { looked } else { looked.min(TICK) };
            self.busy = self.busy + moved;
        }
        self.looked_at = now;
        let total = self.payload.0 + self.payload.1;
        let (since, before) = self.rate_since;
        let span = now.since(since);
        // If grants run out, the bytes of a round trip arrive in one burst, so a sample spans a
        // whole round trip.
        if span < RATE_OVER.max(round_trip) {
            return;
        }
        let bytes = total - before;
        if bytes > 0 && !lent {
            let rate = (u128::from(bytes) * 1_000_000_000 / u128::from(span.as_nanos())) as u64;
            // Over a long round trip the measured rate may be that of the grants. A rise therefore
            // counts at once, so that the next grants are no longer the limit.
            let rises = |before: u64| round_trip > LONG_ROUND_TRIP && rate > before;
            self.rate = Some(match self.rate {
                Some(r) if rises(r) => rate,
                Some(r) => (r * (10 - RATE_WEIGHT_TENTHS) + rate * RATE_WEIGHT_TENTHS) / 10,
                None => rate,
            });
        }
        self.rate_since = (now, total);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Time {
        Time::ZERO + Span::from_millis(n)
    }

    #[test]
    fn what_each_socket_carried_counts_once_also_when_its_path_is_replaced() {
        let mut meter = LinkMeter::new(ms(0));
        assert!(meter.count(LinkId(1), (10, 5)));
        assert!(!meter.count(LinkId(1), (10, 5)));
        assert!(meter.count(LinkId(2), (1, 1)));
        assert_eq!(meter.payload, (11, 6));
        // A new path over the first socket.
        assert!(meter.count(LinkId(1), (4, 0)));
        assert_eq!(meter.payload, (15, 6));
        meter.forget_sockets();
        meter.count(LinkId(3), (100, 0));
        assert_eq!(meter.payload, (115, 6));
    }

    #[test]
    fn a_pause_does_not_count_as_time_in_which_payload_came() {
        let mut meter = LinkMeter::new(ms(0));
        let look = |meter: &mut LinkMeter, at, received, was_moving| {
            let before = meter.payload.0;
            meter.count(LinkId(1), (received, 0));
            meter.end_look(ms(at), before, was_moving, false, NEAR);
        };
        look(&mut meter, 10_000, 1_000, false);
        assert_eq!(meter.busy, TICK, "nobody looked for ten seconds");
        look(&mut meter, 10_150, 2_000, true);
        assert_eq!(meter.busy, Span::from_millis(250));
        look(&mut meter, 10_250, 2_000, true);
        assert_eq!(meter.busy, Span::from_millis(250));
    }

    const NEAR: Span = Span::from_millis(20);

    #[test]
    fn over_a_long_round_trip_a_rise_counts_at_once_and_a_fall_slowly() {
        let far = Span::from_secs(2);
        let mut meter = LinkMeter::new(ms(0));
        let mut received = 0;
        for (look, more) in [2_000, 40_000, 4_000].into_iter().enumerate() {
            // The bytes of a round trip arrive at its end, all at once.
            let begin = 2_000 * look as u64;
            meter.end_look(ms(begin + 1_900), received, true, false, far);
            meter.count(LinkId(1), (received + more, 0));
            meter.end_look(ms(begin + 2_000), received, true, false, far);
            received += more;
        }
        assert_eq!(meter.rate, Some((7 * 20_000 + 3 * 2_000) / 10));
    }

    #[test]
    fn a_lent_link_keeps_the_rate_it_had() {
        let mut meter = LinkMeter::new(ms(0));
        meter.count(LinkId(1), (1_000, 0));
        meter.end_look(ms(1_000), 0, true, false, NEAR);
        assert_eq!(meter.rate, Some(1_000));
        meter.count(LinkId(1), (1_010, 0));
        meter.end_look(ms(2_000), 1_000, true, true, NEAR);
        assert_eq!(meter.rate, Some(1_000));
    }
}
