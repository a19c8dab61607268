//! New sockets for old: after a sleep of the machine, when the platform says that networks
//! changed, when sends keep failing, and when a link has lost its path.
//!
//! A socket can be dead without an error: its NAT binding forgotten while the machine slept, its
//! address gone on a platform that does not tell. A new one costs a round trip; a dead one costs
//! probe timeouts until it is found out. So after a sleep every link gets a new socket, and the
//! challenge of its new path is the probe that leaves at once.

use d2tp_session::{LinkId, PathState, Span, Time};

use crate::clock;
use crate::device::{Body, Known};

/// The runtime's timers are set anew after a sleep of this length: less is within their own error.
const REARM_MIN: Span = Span::from_millis(100);
/// A machine that was away for less kept its networks.
const SLEEP_MIN: Span = Span::from_secs(5); // a guess: below every NAT's and lease's patience
/// Every link gets new sockets at most this often, however often we are told.
const RENEW_INTERVAL_MIN: Span = Span::from_secs(1);
/// How long a link stays without a path before it gets another socket, the first time.
const HEAL_AFTER: Span = Span::from_secs(1);
/// Doublings of [`HEAL_AFTER`] while no socket of the link is answered: half a minute at most.
const HEAL_DOUBLINGS_MAX: u32 = 5;
/// How long a link's first address family has to answer before the other is tried beside it
/// (RFC 8305 §5).
const RACE_AFTER: Span = Span::from_millis(250);

/// Notices that the machine slept: the boot-time clock went on, the monotonic one did not. It is
/// asked whenever something else woke us, so it costs no wake-up of its own.
#[derive(Debug, Default)]
pub(crate) struct SleepGauge {
    ahead: Option<Span>,
}

impl SleepGauge {
    /// How long the machine slept since the last call.
    pub(crate) fn slept(&mut self, since_boot: Time, awake: Time) -> Span {
        let ahead = since_boot.since(awake);
        let before = self.ahead.replace(ahead).unwrap_or(ahead);
        ahead.saturating_sub(before)
    }
}

/// When sockets of all links were last renewed, and whether it was asked for again since.
#[derive(Debug, Default)]
pub(crate) struct Renewal {
    gauge: SleepGauge,
    last: Option<Time>,
    due: bool,
}

impl Renewal {
    /// When it may be done, if it is asked for.
    pub(crate) fn next_at(&self) -> Option<Time> {
        let last = self.last.unwrap_or(Time::ZERO);
        self.due.then_some(last + RENEW_INTERVAL_MIN)
    }
}

impl Known {
    /// How long it is left without a path before it gets another socket.
    fn patience(&self) -> Span {
        HEAL_AFTER.times(1 << self.tries.min(HEAL_DOUBLINGS_MAX))
    }

    /// When it gets another socket or address family, as things are.
    pub(crate) fn next_try(&self) -> Option<Time> {
        let heal = self.pathless.then(|| self.healed + self.patience());
        let race = (!self.later.is_empty()).then(|| self.opened + RACE_AFTER);
        heal.into_iter().chain(race).min()
    }
}

impl Body {
    /// Looks whether the machine slept since the last time.
    pub(crate) fn look_for_sleep(&self) {
        let slept = {
            // The lock first: both clocks are read in one breath.
            let mut state = self.state.lock();
            let awake = clock::awake();
            state.renewal.gauge.slept(clock::now(), awake)
        };
        self.on_slept(slept);
    }

    /// The machine slept this long.
    pub(crate) fn on_slept(&self, slept: Span) {
        if slept >= REARM_MIN {
            // Timers of the runtime stood still meanwhile.
            self.shared.rearm();
        }
        if slept >= SLEEP_MIN {
            tracing::info!(
                seconds = slept.as_millis() / 1000,
                "the machine slept: every link gets a new socket"
            );
            self.want_renewal();
        }
    }

    /// Every link gets another socket, now or as soon as it may.
    pub(crate) fn want_renewal(&self) {
        self.state.lock().renewal.due = true;
        self.renew_if_due();
    }

    pub(crate) fn renew_if_due(&self) {
        let now = clock::now();
        let old: Vec<LinkId> = {
            let mut state = self.state.lock();
            let waits = state
                .renewal
                .last
                .is_some_and(|at| now.since(at) < RENEW_INTERVAL_MIN);
            if !state.renewal.due || waits {
                return;
            }
            state.renewal.due = false;
            state.renewal.last = Some(now);
            state.links.values_mut().for_each(|k| k.tries = 0);
            state
                .links
                .values_mut()
                .flat_map(Known::take_sockets)
                .collect()
        };
        // What the old paths carried is counted, the new ones are opened, the old ones go: data in
        // flight on them travels on the new ones at once.
        self.align();
        self.drop_links(&old);
    }

    /// A link that is up but has no path (its socket failed, nobody answered) gets another socket,
    /// at once after a second and ever more rarely while that does not help.
    pub(crate) fn heal(&self) {
        let now = clock::now();
        let mut lost = Vec::new();
        let mut again = false;
        {
            let inner = self.shared.inner.lock();
            let Some(session) = inner.core.session(self.session) else {
                return;
            };
            let active: Vec<LinkId> = session
                .path_stats()
                .iter()
                .filter(|p| p.state == PathState::Active)
                .map(|p| p.addresses.link)
                .collect();
            let mut state = self.state.lock();
            let pays = state.pays();
            let wanted = |k: &&mut Known| k.is_wanted(pays) && !k.signs.is_held();
            for known in state.links.values_mut().filter(wanted) {
                if known.ids.iter().any(|id| active.contains(id)) {
                    known.tries = 0;
                }
                let had_path = !known.pathless;
                known.pathless = !known.ids.iter().any(|id| session.has_path(*id));
                if !known.pathless || had_path {
                    known.healed = now;
                } else if now.since(known.healed) >= known.patience() {
                    known.healed = now;
                    known.tries += 1;
                    again = true;
                    lost.extend(known.take_sockets());
                }
            }
        }
        if again {
            self.drop_links(&lost);
            self.align();
        }
    }

    /// Tries a link's other address family when the first one does not answer, and settles for
    /// the one that did.
    pub(crate) fn race(&self) {
        let now = clock::now();
        let mut open = Vec::new();
        let mut close = Vec::new();
        {
            let inner = self.shared.inner.lock();
            let Some(session) = inner.core.session(self.session) else {
                return;
            };
            let stats = session.path_stats();
            let answers = |id: &LinkId| {
                stats
                    .iter()
                    .any(|p| p.addresses.link == *id && p.state == PathState::Active)
            };
            let mut state = self.state.lock();
            let used = |k: &&mut Known| !k.ids.is_empty() && !k.signs.is_held();
            for known in state.links.values_mut().filter(used) {
                if let Some(first) = known.ids.iter().copied().find(answers) {
                    close.extend(known.later.drain(..).map(|(id, _)| id));
                    close.extend(known.ids.iter().copied().filter(|id| *id != first));
                    known.ids = vec![first];
                } else if !known.later.is_empty() && now.since(known.opened) >= RACE_AFTER {
                    let (id, remote) = known.later.remove(0);
                    known.opened = now;
                    known.ids.push(id);
                    open.push((id, remote, known.is_gated()));
                }
            }
        }
        for (link, remote, gated) in open {
            self.open_path(link, remote, gated);
        }
        self.drop_links(&close);
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
        let mut gauge = SleepGauge::default();
        // Before we were started the machine may have slept for days.
        assert_eq!(gauge.slept(s(90_000), s(5_000)), Span::ZERO);
        assert_eq!(gauge.slept(s(93_600), s(8_600)), Span::ZERO);
        assert_eq!(gauge.slept(s(93_700), s(8_610)), Span::from_secs(90));
        assert_eq!(gauge.slept(s(93_710), s(8_620)), Span::ZERO);
    }

    #[test]
    fn clocks_read_one_after_the_other_do_not_look_like_sleep() {
        let mut gauge = SleepGauge::default();
        let us = |n| Span::from_micros(n);
        assert_eq!(gauge.slept(s(10) + us(0), s(10) + us(3)), Span::ZERO);
        assert!(gauge.slept(s(20) + us(9), s(20) + us(1)) < Span::from_millis(1));
        assert!(Span::from_millis(1) < SLEEP_MIN);
    }
}
