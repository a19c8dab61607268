//! Whether a socket's flow pays for links, from its options: D2Sched's decision for one flow.
//!
//! Only a deadline or a budget makes this look again every second, and only while a link that costs is up: other
//! policies are decided once.

use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::{Device, Flow, LinkUse, PathState, Way};
use d2tp_links::Link;
use d2tp_sched::{IfLate, Need, Policy};
use d2tp_steer::Seen;
use d2tp_time::{Span, Time};
use tokio::sync::{Notify, watch};

use crate::errno::Fault;
use crate::home::Line;
use crate::options::{Options, since_boot};
use crate::pump::Held;

/// Between two decisions where time counts.
const EPOCH: Duration = Duration::from_secs(1);

/// A budget that is used up ends a connection when no free link has worked for so long: shorter, and one that is
/// just being connected by is not waited for.
const BROKE_FOR: Span = Span::from_secs(5); // a guess

/// Decides for a flow for as long as it is carried, or until its budget is used up and it would have to pay.
pub(crate) async fn steer(held: &Held) -> Fault {
    let Some(line) = held.line.as_ref().map(|line| line.0.clone()) else {
        // Who accepted does not decide.
        return std::future::pending().await;
    };
    let Some(mut links) = line.links.clone() else {
        return std::future::pending().await;
    };
    let mut purse = Purse::default();
    let mut seen = Seen::new(now());
    loop {
        let options = held.options.borrow().clone();
        let moved = held.sent.get() + held.received.get();
        let ways = line.device.ways();
        seen.look(now(), &ways);
        let verdict = {
            let flow = held.flow.borrow();
            purse.look(&line.device, &flow);
            let verdict = verdict(&seen, now(), &options, moved, purse.left(&options));
            purse.allow(
                &line.device,
                &flow,
                verdict == Verdict::Pays,
                options.budget,
            );
            verdict
        };
        let stuck = verdict == Verdict::Broke && ways.iter().any(costs);
        if purse.is_broke(now(), stuck && !ways.iter().any(works_free)) {
            return Fault::new(libc::EDQUOT, used_up(&options));
        }
        wait(&options, &ways, &mut links, &held.changed).await;
    }
}

/// The same while the session is being made, when there is nothing to be measured yet.
pub(crate) async fn steer_opening(line: &Line, flow: &Flow, options: &Options) -> Fault {
    let Some(mut links) = line.links.clone() else {
        return std::future::pending().await;
    };
    let mut purse = Purse::default();
    let mut seen = Seen::new(now());
    loop {
        let ways = line.device.ways();
        seen.look(now(), &ways);
        purse.look(&line.device, flow);
        let verdict = verdict(&seen, now(), options, 0, purse.left(options));
        purse.allow(&line.device, flow, verdict == Verdict::Pays, options.budget);
        let stuck = verdict == Verdict::Broke && ways.iter().any(costs);
        if purse.is_broke(now(), stuck && !ways.iter().any(works_free)) {
            return Fault::new(libc::EDQUOT, used_up(options));
        }
        wait(options, &ways, &mut links, &Notify::new()).await;
    }
}

/// The flow is over: it pays no more.
pub(crate) fn stop(held: &Held) {
    if let Some(line) = &held.line
        && line.0.links.is_some()
    {
        line.0.device.allow_paid(&held.flow.borrow(), false, None);
    }
}

fn used_up(options: &Options) -> String {
    let bytes = options.budget.unwrap_or(0);
    format!("the budget of {bytes} bytes is used up, and no network that is free works")
}

fn costs(way: &Way) -> bool {
    way.usage == LinkUse::Paid
}

fn works_free(way: &Way) -> bool {
    let path = way.path.as_ref().map(|path| path.state);
    way.usage == LinkUse::Free && path == Some(PathState::Active)
}

/// Until there may be something else to decide.
async fn wait(
    options: &Options,
    ways: &[Way],
    links: &mut watch::Receiver<Arc<Vec<Link>>>,
    changed: &Notify,
) {
    let costly = ways.iter().any(costs);
    let weighs = options.deadline.is_some() && is_weighing(options);
    let counts = costly && (weighs || options.budget.is_some());
    tokio::select! {
        () = tokio::time::sleep(EPOCH), if counts => {}
        _ = links.changed() => {}
        () = changed.notified() => {}
    }
}

/// What a flow has spent. The device counts from when it was last allowed to.
#[derive(Default)]
struct Purse {
    pays: bool,
    /// In times before this one.
    before: u64,
    now: u64,
    told: Option<Option<u64>>,
    broke_since: Option<Time>,
}

impl Purse {
    fn look(&mut self, device: &Device, flow: &Flow) {
        if self.pays {
            self.now = device.paid_bytes(flow);
        }
    }

    /// What may still be spent.
    fn left(&self, options: &Options) -> Option<u64> {
        let spent = self.before + self.now;
        options.budget.map(|budget| budget.saturating_sub(spent))
    }

    /// Whether there is nothing left, and nothing that is free, for so long that it is no hole.
    fn is_broke(&mut self, now: Time, stuck: bool) -> bool {
        if !stuck {
            self.broke_since = None;
            return false;
        }
        now.since(*self.broke_since.get_or_insert(now)) >= BROKE_FOR
    }

    fn allow(&mut self, device: &Device, flow: &Flow, pays: bool, budget: Option<u64>) {
        if self.pays && !pays {
            self.look(device, flow);
            self.before += std::mem::take(&mut self.now);
        }
        let budget = budget.map(|budget| budget.saturating_sub(self.before));
        let told = pays.then_some(budget);
        if pays != self.pays || told != self.told {
            device.allow_paid(flow, pays, budget);
            (self.pays, self.told) = (pays, told);
        }
    }
}

/// What is decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// It does not pay.
    Free,
    Pays,
    /// It would, and has nothing left.
    Broke,
}

fn now() -> Time {
    Time::from_nanos(u64::try_from(since_boot().as_nanos()).unwrap_or(u64::MAX))
}

/// Whether time decides.
fn is_weighing(options: &Options) -> bool {
    matches!(options.policy, Policy::FreeFirst | Policy::Balanced)
        && options.if_late == IfLate::Cell
}

/// What a flow with these options does, `moved` bytes after its beginning and with so much left to spend.
fn verdict(seen: &Seen, now: Time, options: &Options, moved: u64, left: Option<u64>) -> Verdict {
    let spends = |left| {
        let need = Need {
            remaining_bytes: options.size.map(|size| size.saturating_sub(moved)),
            left: options.left(),
            policy: options.policy,
            if_late: options.if_late,
            metered_bytes_left: left,
        };
        seen.spends(now, need, options.size)
    };
    match left {
        _ if spends(left) => Verdict::Pays,
        Some(0) if options.if_late != IfLate::Wait && spends(None) => Verdict::Broke,
        _ => Verdict::Free,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_links::Class;

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
        let later = begun + Span::from_secs(1);
        let verdict =
            |options: &Options, moved, left| super::verdict(&seen, later, options, moved, left);
        let spends = |options: &Options, moved| verdict(options, moved, None) == Verdict::Pays;
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
        assert_eq!(verdict(&fast, 0, Some(1)), Verdict::Pays);
        assert_eq!(verdict(&fast, 0, Some(0)), Verdict::Broke);
        // Nothing is to be paid for, so nothing is missing.
        assert_eq!(verdict(&free_only, 0, Some(0)), Verdict::Free);
        assert_eq!(verdict(&sized(1_000_000), 0, Some(0)), Verdict::Free);
        let patient = Options {
            if_late: IfLate::Wait,
            ..fast
        };
        assert_eq!(verdict(&patient, 0, Some(0)), Verdict::Free);
    }

    #[test]
    fn a_free_link_that_comes_soon_enough_saves_a_flow_whose_budget_is_used_up() {
        let at = |seconds| Time::ZERO + Span::from_secs(seconds);
        let mut purse = Purse::default();
        assert!(!purse.is_broke(at(1), true));
        assert!(!purse.is_broke(at(5), true));
        assert!(!purse.is_broke(at(6), false), "it works again");
        assert!(!purse.is_broke(at(7), true));
        assert!(purse.is_broke(at(12), true));
    }

    #[test]
    fn what_was_spent_before_is_not_to_be_spent_again() {
        let purse = Purse {
            before: 700,
            now: 200,
            ..Purse::default()
        };
        let options = |budget| Options {
            budget,
            ..Options::default()
        };
        assert_eq!(purse.left(&options(Some(1000))), Some(100));
        assert_eq!(purse.left(&options(Some(500))), Some(0));
        assert_eq!(purse.left(&options(None)), None);
    }
}
