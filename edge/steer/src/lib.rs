//! Whether one connection pays for links: D2Sched's decision for a flow that is alone, by what was seen of
//! the links since it began.
//!
//! For programs' sockets and the agent's local proxy, whose connections know nothing of each other.
//! Transfers of the agent are decided together.
#![forbid(unsafe_code)]

use d2tp_driver::{LinkUse, PathState, Way};
use d2tp_sched::{Flow, Mode, Need, SIZE_UNKNOWN_BYTES, Scheduler, Sight};
use d2tp_time::{Span, Time};
use std::time::Duration;

/// What was carried since the last look moved in no more time than this: links are looked at every second while they
/// carry, and who rests is woken by the first byte.
const LOOKED_WITHIN: Span = Span::from_millis(1_500);

/// What was seen of the links since a connection began.
#[derive(Debug)]
pub struct Seen {
    scheduler: Scheduler,
    /// Their names and what they had carried at the last look, in the scheduler's order.
    links: Vec<(String, u64)>,
    at: Time,
}

/// Whether links that cost carry a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// They do.
    pub spends: bool,
    /// After this time it may be otherwise, though nothing moved; none if only what happens decides.
    pub again: Option<Duration>,
}

impl Seen {
    /// Nothing yet; time counts from here.
    pub fn new(at: Time) -> Seen {
        Seen {
            scheduler: Scheduler::new(Mode::Outlook, []),
            links: Vec::new(),
            at,
        }
    }

    /// Takes down what links carried since the last look.
    pub fn look(&mut self, now: Time, ways: &[Way]) {
        let passed = now.since(self.at);
        self.at = now;
        let mut sights = vec![Sight::default(); self.links.len()];
        for way in ways.iter().filter(|way| way.usage != LinkUse::Off) {
            let class = way.class.into();
            let carried = way.payload.0 + way.payload.1;
            let known = self.links.iter().position(|(name, _)| *name == way.name);
            let place = known.unwrap_or_else(|| {
                self.links.push((way.name.clone(), carried));
                sights.push(Sight::default());
                self.scheduler.add_link(class)
            });
            self.scheduler.set_class(place, class);
            let answers = way
                .path
                .as_ref()
                .is_none_or(|p| p.state != PathState::Silent);
            let before = std::mem::replace(&mut self.links[place].1, carried);
            let (bytes, busy) = match (known, way.rate) {
                // The first look takes the link's word for a second.
                (None, Some(rate)) => (rate, Span::from_secs(1)),
                // A program that is silent says nothing of the link.
                _ if carried > before => (carried - before, passed.min(LOOKED_WITHIN)),
                _ => (0, Span::ZERO),
            };
            sights[place] = Sight {
                up: answers,
                bytes,
                busy,
            };
        }
        self.scheduler.see(now, &sights);
    }

    /// Whether links that cost carry a flow that needs this. `size_bytes`: of all of it, if that is known.
    pub fn spends(&self, now: Time, need: Need, size_bytes: Option<u64>) -> bool {
        self.decide(now, need, size_bytes).spends
    }

    /// The same, and when that is to be asked again, should links not change and nothing move.
    pub fn decide(&self, now: Time, need: Need, size_bytes: Option<u64>) -> Decision {
        let is_timed = need.left.is_some();
        let flow = Flow {
            need,
            size_bytes: size_bytes.unwrap_or(SIZE_UNKNOWN_BYTES),
            priority: 0,
        };
        let roster = self.scheduler.decide(now, &[flow]);
        Decision {
            spends: !roster.payers.is_empty(),
            again: is_timed.then(|| roster.again.into()),
        }
    }

    /// In how long links that cost would, if links stayed as they are. None: never.
    pub fn spends_in(&self, now: Time, need: Need, size_bytes: Option<u64>) -> Option<Duration> {
        let flow = Flow {
            need,
            size_bytes: size_bytes.unwrap_or(SIZE_UNKNOWN_BYTES),
            priority: 0,
        };
        self.scheduler.pays_in(now, &[flow], 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_links::Class;
    use d2tp_sched::{IfLate, Policy};

    fn way(class: Class, usage: LinkUse) -> Way {
        Way {
            name: format!("{class:?}"),
            class,
            usage,
            payload: (0, 0),
            busy: Default::default(),
            rate: Some(1_000_000),
            path: None,
        }
    }

    #[test]
    fn any_pays_only_while_nothing_free_is_there_and_free_only_never() {
        let both = [
            way(Class::Free, LinkUse::Free),
            way(Class::Metered, LinkUse::Paid),
        ];
        let need = |policy| Need {
            remaining_bytes: None,
            left: None,
            policy,
            if_late: IfLate::Cell,
            metered_bytes_left: None,
        };
        let after = |seconds| Time::ZERO + Span::from_secs(seconds);
        let mut seen = Seen::new(after(0));
        seen.look(after(1), &both);
        assert!(!seen.spends(after(1), need(Policy::Any), None));
        assert!(seen.spends(after(1), need(Policy::Fast), None));
        seen.look(after(2), &both[1..]);
        assert!(seen.spends(after(2), need(Policy::Any), None));
        assert!(!seen.spends(after(2), need(Policy::FreeOnly), None));
        // Time alone changes nothing, but for who has a deadline.
        assert_eq!(
            seen.decide(after(2), need(Policy::FreeFirst), None).again,
            None
        );
        let timed = |seconds| Need {
            left: Some(Duration::from_secs(seconds)),
            ..need(Policy::FreeFirst)
        };
        let again = |seconds| seen.decide(after(2), timed(seconds), None).again;
        assert_eq!(again(60), Some(Duration::from_secs(1)));
        assert_eq!(again(86_400), Some(Duration::from_secs(10)));
    }

    #[test]
    fn a_rest_does_not_make_a_link_slow() {
        let mut ways = [
            way(Class::Free, LinkUse::Free),
            way(Class::Metered, LinkUse::Paid),
        ];
        let need = || Need {
            remaining_bytes: Some(30_000_000),
            left: Some(Duration::from_secs(60)),
            policy: Policy::FreeFirst,
            if_late: IfLate::Cell,
            metered_bytes_left: None,
        };
        let after = |seconds| Time::ZERO + Span::from_secs(seconds);
        let mut seen = Seen::new(after(0));
        seen.look(after(1), &ways);
        assert!(!seen.spends(after(1), need(), Some(30_000_000)));
        ways[0].payload.0 = 1_000_000;
        seen.look(after(3_600), &ways);
        assert!(!seen.spends(after(3_600), need(), Some(30_000_000)));
        // While a link that is looked at carries little it is slow.
        for second in 1..60 {
            ways[0].payload.0 += 1_000;
            seen.look(after(3_600 + second), &ways);
        }
        assert!(seen.spends(after(3_660), need(), Some(30_000_000)));
    }
}
