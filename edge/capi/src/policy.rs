//! Whether a socket's flow pays for links, from its options: D2Sched's rule for one flow.
//!
//! Only a deadline makes this look again every second, and only while a link that costs is up: other
//! policies are decided once.

use std::convert::Infallible;
use std::time::Duration;

use d2tp_driver::{LinkUse, PathState, Way};
use d2tp_links::Class;
use d2tp_sched::{IfLate, Need, Paid, Policy, decide};

use crate::options::Options;
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
    loop {
        let options = held.options.borrow().clone();
        let moved = held.sent.get() + held.received.get();
        let ways = line.device.ways();
        let spends = spends(&options, moved, &ways, pays);
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

/// Whether time decides.
fn is_weighing(options: &Options) -> bool {
    matches!(options.policy, Policy::FreeFirst | Policy::Balanced)
        && options.if_late == IfLate::Cell
}

fn spends(options: &Options, moved: u64, ways: &[Way], pays: bool) -> bool {
    let need = Need {
        remaining_bytes: options.size.map(|size| size.saturating_sub(moved)),
        left: options.left(),
        policy: options.policy,
        if_late: options.if_late,
        // What is left of it is counted where it is granted.
        metered_bytes_left: options.budget.filter(|budget| *budget == 0),
    };
    let usable = ways.iter().filter(|way| way.usage != LinkUse::Off);
    let ways: Vec<d2tp_sched::Way> = usable
        .map(|way| {
            let silent = way.path.as_ref().map(|path| path.state) == Some(PathState::Silent);
            d2tp_sched::Way {
                name: way.name.clone(),
                class: match way.class {
                    Class::Free => d2tp_sched::Class::Free,
                    Class::Metered => d2tp_sched::Class::Metered,
                    Class::Roaming => d2tp_sched::Class::Roaming,
                },
                rate_bytes_per_s: way.rate.map(|rate| rate as f64),
                metric: 0,
                stalled: silent,
                in_use: pays || way.class == Class::Free,
            }
        })
        .collect();
    // A path that is only ready is opened as one that pays, and its grants are what it costs.
    !matches!(decide(&need, &ways).paid, Paid::No)
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
        let sized = |bytes| Options {
            size: Some(bytes),
            ..in_a_minute.clone()
        };
        assert!(!spends(&sized(1_000_000), 0, &ways, false));
        assert!(spends(&sized(100_000_000), 0, &ways, false));
        assert!(!spends(&sized(100_000_000), 99_500_000, &ways, false));
        let free_only = Options {
            policy: Policy::FreeOnly,
            ..sized(100_000_000)
        };
        assert!(!spends(&free_only, 0, &ways, false));
        let fast = Options {
            policy: Policy::Fast,
            ..Options::default()
        };
        assert!(spends(&fast, 0, &ways, false));
        let broke = Options {
            budget: Some(0),
            ..fast
        };
        assert!(!spends(&broke, 0, &ways, false));
    }
}
