//! New sockets for all links, after the machine slept and when the platform reports that networks
//! changed.
//!
//! A socket can be dead without an error: its NAT binding expired while the machine slept, or its
//! address is gone on a platform that does not report it. A new socket costs a round trip; a dead
//! one costs several probe timeouts until it is detected. So after a sleep every link gets a new
//! socket, and the path challenge over it probes the link at once.

use d2tp_time::{Span, Time};

/// If a machine slept for less than this, it kept its networks.
pub(crate) const SLEEP_MIN: Span = Span::from_secs(5); // a guess: shorter than every NAT binding and address lease
/// The shortest interval between two renewals of all sockets.
const RENEW_INTERVAL_MIN: Span = Span::from_secs(1);

/// Detects that the machine slept: the boot-time clock advanced, the monotonic clock did not. It is
/// called when something else wakes the device, so it causes no wake-up of its own.
#[derive(Debug, Default)]
pub struct SleepMeter {
    ahead: Option<Span>,
}

impl SleepMeter {
    /// How long the machine has slept since the last call.
    pub fn slept(&mut self, since_boot: Time, awake: Time) -> Span {
        let ahead = since_boot.since(awake);
        let before = self.ahead.replace(ahead).unwrap_or(ahead);
        ahead.saturating_sub(before)
    }
}

/// When all sockets were last renewed, and whether another renewal is requested.
#[derive(Debug, Default)]
pub(crate) struct SocketRenewal {
    last: Option<Time>,
    due: bool,
}

impl SocketRenewal {
    pub(crate) fn request(&mut self) {
        self.due = true;
    }

    /// When a requested renewal is allowed.
    pub(crate) fn next_at(&self) -> Option<Time> {
        let at = self
            .last
            .map_or(Time::ZERO, |last| last + RENEW_INTERVAL_MIN);
        self.due.then_some(at)
    }

    /// Whether a renewal is due now; it then counts as done.
    pub(crate) fn take_due(&mut self, now: Time) -> bool {
        let due = self.next_at().is_some_and(|at| at <= now);
        if due {
            (self.due, self.last) = (false, Some(now));
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(seconds: u64) -> Time {
        Time::ZERO + Span::from_secs(seconds)
    }

    #[test]
    fn only_time_that_the_monotonic_clock_missed_was_slept() {
        let mut meter = SleepMeter::default();
        // The machine may have slept for days before the device was started.
        assert_eq!(meter.slept(s(90_000), s(5_000)), Span::ZERO);
        assert_eq!(meter.slept(s(93_600), s(8_600)), Span::ZERO);
        assert_eq!(meter.slept(s(93_700), s(8_610)), Span::from_secs(90));
        assert_eq!(meter.slept(s(93_710), s(8_620)), Span::ZERO);
    }

    #[test]
    fn clocks_read_one_after_the_other_do_not_look_like_sleep() {
        let mut meter = SleepMeter::default();
        let us = |n| Span::from_micros(n);
        assert_eq!(meter.slept(s(10) + us(0), s(10) + us(3)), Span::ZERO);
        assert!(meter.slept(s(20) + us(9), s(20) + us(1)) < Span::from_millis(1));
        assert!(Span::from_millis(1) < SLEEP_MIN);
    }

    #[test]
    fn a_renewal_is_done_at_once_and_the_next_one_a_second_later() {
        let mut renewal = SocketRenewal::default();
        assert!(!renewal.take_due(s(10)));
        renewal.request();
        assert!(renewal.take_due(s(10)));
        renewal.request();
        assert!(!renewal.take_due(s(10) + Span::from_millis(999)));
        assert_eq!(renewal.next_at(), Some(s(11)));
        assert!(renewal.take_due(s(11)));
        assert_eq!(renewal.next_at(), None);
    }
}
