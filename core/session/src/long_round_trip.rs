//! Round trips of minutes, as to another planet, where links carry packets at times of a schedule and store them between.
//!
//! ```text
//!  device  SYN ───────── 20 min ────────▶ server      one SYN: the next one is due after 5/4 of the round trip
//!          SYN+ACK ◀──── 20 min ─────────             half open for four round trips
//!          DATA … at the known rate ────▶             nothing counts as late before the expected round trip is over
//! ```
//!
//! Defaults suit round trips of up to some seconds. Every time in which an answer of the peer is awaited is longer here,
//! by [`EndpointConfig::expect_round_trip`]; timers that follow from measured round trips adapt by themselves. Where the
//! rate is known as well, by [`EndpointConfig::expect_rates`], nothing searches for it: to find 1 Mb/s by doubling ten
//! packets takes twelve round trips of 20 minutes, which are four hours.

use d2tp_time::Span;
use d2tp_wire::DATAGRAM_FIRST_BYTES;

use crate::config::EndpointConfig;
use crate::congestion::{Controller, KnownRate, controller};
use crate::recovery::SENT_MAX;

/// The shortest round trip that counts as long: no answer is late before it is over.
pub(crate) const LONG_ROUND_TRIP_MIN: Span = Span::from_secs(1); // a guess: satellites in high orbits take 0.6 s
/// A SYN without an answer is repeated after the expected round trip and a quarter of it, and each time after twice as
/// long, up to this many doublings.
pub(crate) const LONG_RETRY_DOUBLINGS_MAX: u32 = 2; // a guess: 5 round trips at most
/// The longest delay of an ACK where round trips are long.
const LONG_ACK_DELAY_MAX: Span = Span::from_secs(1); // a guess

impl EndpointConfig {
    /// Sets everything that depends on it to a round trip that is known to be long; one below a second changes nothing.
    /// Waiting times are at least so many of it:
    ///
    /// | setting | round trips |
    /// |---|---|
    /// | [`EndpointConfig::half_open_max`], [`EndpointConfig::probe_interval_max`] | 4 |
    /// | [`EndpointConfig::silence_max`], [`EndpointConfig::silence_reachable_max`], [`EndpointConfig::closing_max`] | 8 |
    /// | [`EndpointConfig::keys_max`], [`EndpointConfig::absence_max`] | 24 |
    /// | [`EndpointConfig::hibernated_age_max`] | 72 |
    ///
    /// ACKs wait for a thousandth of it, at most a second, since links that far are slow.
    ///
    /// Both ends need it. Where links are scheduled, it includes the longest wait for one. Higher than needed: losses of the
    /// last packets are noticed later. Lower: what is still on its way is sent again.
    ///
    /// ```
    /// use d2tp_session::{EndpointConfig, Span};
    ///
    /// let mut config = EndpointConfig::default();
    /// config.expect_round_trip(Span::from_secs(2_400));
    /// assert_eq!(config.half_open_max, Span::from_secs(4 * 2_400));
    /// ```
    pub fn expect_round_trip(&mut self, round_trip: Span) {
        if round_trip < LONG_ROUND_TRIP_MIN {
            return;
        }
        self.rtt_initial = self.rtt_initial.max(round_trip);
        for (setting, trips) in [
            (&mut self.half_open_max, 4),
            (&mut self.probe_interval_max, 4),
            (&mut self.silence_max, 8),
            (&mut self.silence_reachable_max, 8),
            (&mut self.closing_max, 8),
            (&mut self.keys_max, 24),
            (&mut self.absence_max, 24),
            (&mut self.hibernated_age_max, 72),
        ] {
            *setting = (*setting).max(round_trip.times(trips));
        }
        let ack_delay = round_trip.divided(1_000).min(LONG_ACK_DELAY_MAX);
        self.ack_delay_max = self.ack_delay_max.max(ack_delay);
    }

    /// Sets the rates of paths that are known beforehand, in bytes a second of whole IP packets: this end sends at `send`,
    /// without a search and without regard to losses, and has room for what arrives at `receive`. Only for links that are
    /// this end's own: it takes no account of others there. At most 61,440 packets are on their way at once, so that some
    /// 250 kb/s are used of a way of 40 minutes. To be called after [`EndpointConfig::expect_round_trip`].
    pub fn expect_rates(&mut self, send: u64, receive: u64) {
        // What is on its way, and as much again for each time that a loss before it is repaired, or read.
        let room = |rate: u64| bytes_within(rate, self.rtt_initial).saturating_mul(4);
        let (sent, received) = (room(send), room(receive));
        self.known_rate = Some(send.max(1));
        self.send_buffer = self.send_buffer.max(sent);
        self.flow_window = self.flow_window.max(received);
        self.flow_window_first = self.flow_window_first.max(received);
        self.session_window = self.session_window.max(received);
    }

    /// Whether answers may take longer than anything on ordinary networks does.
    pub fn has_long_round_trip(&self) -> bool {
        self.rtt_initial >= LONG_ROUND_TRIP_MIN
    }

    /// The congestion controller of a new path over datagrams.
    pub(crate) fn new_controller(&self, datagram: u64) -> Box<dyn Controller> {
        match self.known_rate {
            Some(rate) => {
                // R-ACK-3: more packets would count as lost.
                let window_max = SENT_MAX as u64 / 16 * 15 * DATAGRAM_FIRST_BYTES as u64;
                let window = bytes_within(rate, self.rtt_initial).min(window_max);
                Box::new(KnownRate::new(rate, window, datagram))
            }
            None => controller(self.congestion, datagram),
        }
    }
}

/// The bytes that a rate carries in a time.
fn bytes_within(bytes_per_second: u64, span: Span) -> u64 {
    let bytes = u128::from(bytes_per_second) * u128::from(span.as_nanos()) / 1_000_000_000;
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_round_trip_changes_nothing() {
        let mut config = EndpointConfig::default();
        config.expect_round_trip(Span::from_millis(999));
        assert!(!config.has_long_round_trip());
        let usual = EndpointConfig::default();
        assert_eq!(format!("{config:?}"), format!("{usual:?}"));
    }

    #[test]
    fn no_wait_for_an_answer_is_shorter_than_the_round_trip() {
        let round_trip = Span::from_secs(2_400);
        let mut config = EndpointConfig::default();
        config.expect_round_trip(round_trip);
        assert!(config.has_long_round_trip());
        for wait in [
            config.rtt_initial,
            config.half_open_max,
            config.probe_interval_max,
            config.silence_max,
            config.silence_reachable_max,
            config.absence_max,
            config.hibernated_age_max,
            config.keys_max,
            config.closing_max,
        ] {
            assert!(wait >= round_trip, "{wait:?}");
        }
    }

    #[test]
    fn windows_hold_what_is_on_its_way_at_a_known_rate() {
        let mut config = EndpointConfig::default();
        config.expect_round_trip(Span::from_secs(1_200));
        config.expect_rates(500, 100_000);
        assert_eq!(config.flow_window, 4 * 1_200 * 100_000);
        // Less than the default would hold.
        assert_eq!(config.send_buffer, EndpointConfig::default().send_buffer);
        let controller = config.new_controller(1_200);
        assert_eq!(controller.window(), 1_200 * 500);
        assert!(controller.pacing_rate().is_some_and(|rate| rate < 500));
    }
}
