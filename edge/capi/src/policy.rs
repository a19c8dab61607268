//! Whether a socket's flow pays for links, from its options: D2Sched's decision for one flow.
//!
//! Only a deadline makes this look again every second, and only while a link that costs is up: other
//! policies are decided once.

use std::convert::Infallible;
use std::time::Duration;

use d2tp_driver::{LinkUse, PathState, Way};
use d2tp_links::Class;
use d2tp_sched::{Flow, IfLate, Mode, Need, Policy, SIZE_UNKNOWN_BYTES, Scheduler, Sight};
use d2tp_time::{Span, Time};

use crate::options::{Options, since_boot};
use crate::pump::Held;

/// Between two decisions where time counts.
const EPOCH: Duration = Duration::from_secs(1);

/// Decides for a flow for as long as it is carried.
pub(crate) async fn steer(held: &Held) -> Infallible {
    let Some((line, mut links)) = held
        .line
        .as_ref()
        .and_then(|line| Some((&line.0, line.0.links.clone()?)))
    else {
        return std::future::pending().await;
    };
    let (mut pays, mut budget) = (false, None);
    let mut seen = Seen::new(now());
    loop {
        let options = held.options.borrow().clone();
        let moved = held.sent.get() + held.received.get();
        let ways = line.device.ways();
        seen.look(now(), &ways);
        let spends = seen.spends(now(), &options, moved);
        if spends != pays || (spends && budget != options.budget) {
            (pays, budget) = (spends, options.budget);
            let flow = held.flow.borrow();
            line.device.allow_paid(&flow, pays, budget);
        }
        let costs = ways.iter().any(|way| way.usage == LinkUse::Paid);
        let counts = costs && options.deadline.is_some() && is_weighing(&options);
        tokio::select! {
            () = tokio::time::sleep(EPOCH), if counts => {}
            _ = links.changed() => {}
            () = held.changed.notified() => {}
        }
    }
}

fn now() -> Time {
    Time::from_nanos(u64::try_from(since_boot().as_nanos()).unwrap_or(u64::MAX))
}

/// Whether time decides.
fn is_weighing(options: &Options) -> bool {
    matches!(options.policy, Policy::FreeFirst | Policy::Balanced)
        && options.if_late == IfLate::Cell
}

/// What was seen of the links since the flow began.
struct Seen {
    scheduler: Scheduler,
    /// Their names and what they had carried at the last look, in the scheduler's order.
    links: Vec<(String, u64)>,
    at: Time,
}

impl Seen {
    fn new(at: Time) -> Seen {
        Seen {
            scheduler: Scheduler::new(Mode::Outlook, []),
            links: Vec::new(),
            at,
        }
    }

    fn look(&mut self, now: Time, ways: &[Way]) {
        let passed = now.since(self.at);
        self.at = now;
        let mut sights = vec![Sight::default(); self.links.len()];
        for way in ways.iter().filter(|way| way.usage != LinkUse::Off) {
            let class = class_of(way.class);
            let carried = way.payload.0 + way.payload.1;
            let known = self.links.iter().position(|(name, _)| *name == way.name);
            let place = known.unwrap_or_else(|| {
                self.links.push((way.name.clone(), carried));
                sights.push(Sight::default());
                self.scheduler.add_link(class)
            });
            self.scheduler.set_class(place, class);
            let silent = way.path.as_ref().map(|path| path.state) == Some(PathState::Silent);
            let before = std::mem::replace(&mut self.links[place].1, carried);
            // Whoever meets a link that others measured takes their word for a second of it.
            let (bytes, busy) = match (known, way.rate) {
                (None, Some(rate)) => (rate, Span::from_secs(1)),
                // A program that is silent says nothing of the link.
                _ if carried > before => (carried - before, passed),
                _ => (0, Span::ZERO),
            };
            sights[place] = Sight {
                up: !silent,
                bytes,
                busy,
            };
        }
        self.scheduler.see(now, &sights);
    }

    fn spends(&self, now: Time, options: &Options, moved: u64) -> bool {
        let flow = Flow {
            need: Need {
                remaining_bytes: options.size.map(|size| size.saturating_sub(moved)),
                left: options.left(),
                policy: options.policy,
                if_late: options.if_late,
                // What is left of it is counted where it is granted.
                metered_bytes_left: options.budget.filter(|budget| *budget == 0),
            },
            size_bytes: options.size.unwrap_or(SIZE_UNKNOWN_BYTES),
            priority: 0,
        };
        !self.scheduler.decide(now, &[flow]).payers.is_empty()
    }
}

fn class_of(class: Class) -> d2tp_sched::Class {
    match class {
        Class::Free => d2tp_sched::Class::Free,
        Class::Metered => d2tp_sched::Class::Metered,
        Class::Roaming => d2tp_sched::Class::Roaming,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn way(class: Class, usage: LinkUse, rate: u64) -> Way {
        Way {
            name: format!("{class:?}"),
            class,
            usage,
            payload: (0, 0),
            rate: Some(rate),
            path: None,
        }
    }

    #[test]
    fn a_deadline_that_free_links_do_not_make_pays_and_one_that_they_make_does_not() {
        let ways = [
            way(Class::Free, LinkUse::Free, 100_000),
            way(Class::Metered, LinkUse::Paid, 1_000_000),
        ];
        let in_a_minute = Options {
            deadline: Some(crate::options::since_boot() + Duration::from_secs(60)),
            ..Options::default()
        };
        let begun = now();
        let mut seen = Seen::new(begun);
        seen.look(begun + Span::from_secs(1), &ways);
        let spends =
            |options: &Options, moved| seen.spends(begun + Span::from_secs(1), options, moved);
        let sized = |bytes| Options {
            size: Some(bytes),
            ..in_a_minute.clone()
        };
        assert!(!spends(&sized(1_000_000), 0));
        assert!(spends(&sized(30_000_000), 0));
        assert!(!spends(&sized(30_000_000), 29_500_000));
        let free_only = Options {
            policy: Policy::FreeOnly,
            ..sized(30_000_000)
        };
        assert!(!spends(&free_only, 0));
        let fast = Options {
            policy: Policy::Fast,
            ..Options::default()
        };
        assert!(spends(&fast, 0));
        let broke = Options {
            budget: Some(0),
            ..fast
        };
        assert!(!spends(&broke, 0));
    }
}
