//! Whether a flow that is on every free link at once also spends on links that cost.
//!
//! ```text
//!  time that free and metered links need together, with slack, is less than is left ─▶ not yet
//!  else                                                                             ─▶ spend
//! ```
//!
//! So a metered link begins as late as the deadline allows, carries only what the free links leave
//! over, and stops as soon as those get fast enough. What a link carries now is what it is taken to
//! carry from now on: nothing here forecasts. [`Rule::AlgorithmOne`] is the paper's rule beside it.

use std::time::Duration;

use crate::choice::{
    Choice, Class, IfLate, METERED_RATE_FIRST_BYTES_PER_S, NEEDED_MAX_S, Need, Policy,
    SIZE_UNKNOWN_BYTES, Way, choose, fastest_working, in_words, time_for, wait,
};

/// Time kept in hand before a metered link is needed: the first round trips of its path, slow
/// start, and a second until the next decision. Higher: pays earlier; lower: may be late.
pub const SLACK: Duration = Duration::from_secs(2); // a guess

/// And this share of the time needed, one in so many, against rates that fall.
pub const SLACK_SHARE: u32 = 10; // a guess

/// Once paying, slack must have grown by this much before it stops, or a flow at the edge would begin
/// and stop every second; by three times that before its path goes. Higher: pays longer than needed.
pub const SLACK_PAYING: Duration = Duration::from_secs(1); // a guess

/// How it is judged that a deadline needs links that cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Rule {
    /// Algorithm 1 of the Cedos paper: when the metered link alone would need longer than there is
    /// time, whatever the free links carry meanwhile.
    AlgorithmOne,
    /// When free and metered links together need all the time there is.
    #[default]
    Together,
}

/// Whether a flow on several links at once also uses those that cost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Paid {
    /// Not a packet there.
    No,
    /// No payload, but a path that is ready: the next moment may need it.
    Ready,
    /// Payload, for this reason.
    Spend {
        /// In words.
        why: String,
    },
}

/// What is decided for one flow.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// For a flow that can be on one link at a time; its `Wait` holds for every kind of flow.
    pub choice: Choice,
    /// For a flow that is on every free link anyway.
    pub paid: Paid,
}

/// Decides for one flow. Time is in `need.left`.
pub fn decide(need: &Need, ways: &[Way]) -> Plan {
    decide_by(Rule::default(), need, ways)
}

/// Decides for one flow, by this rule.
pub fn decide_by(rule: Rule, need: &Need, ways: &[Way]) -> Plan {
    let paid = paid(rule, need, ways);
    let by_deadline = matches!(need.policy, Policy::FreeFirst | Policy::Balanced);
    let choice = if by_deadline {
        place(need, ways, &paid)
    } else {
        choose(need, ways)
    };
    Plan { choice, paid }
}

/// Where a flow is that spends only when the deadline says so.
fn place(need: &Need, ways: &[Way], paid: &Paid) -> Choice {
    let of = |class: Class| {
        ways.iter()
            .enumerate()
            .filter(move |(_, way)| way.class == class)
    };
    let free = fastest_working(of(Class::Free), false);
    let metered = match paid {
        Paid::Spend { why } => fastest_working(of(Class::Metered), true).map(|way| (way, why)),
        Paid::No | Paid::Ready => None,
    };
    match (free, metered) {
        (Some((index, way)), metered) if metered.is_none() || !way.stalled => Choice::Use {
            index,
            why: format!("{} is up and free", way.name),
        },
        (_, Some(((index, way), why))) => Choice::Use {
            index,
            why: format!("{why}, so {} may cost", way.name),
        },
        _ => {
            let broke = need.metered_bytes_left == Some(0) && need.if_late == IfLate::Cell;
            let with_budget = Need {
                metered_bytes_left: None,
                ..need.clone()
            };
            let would = matches!(
                self::paid(Rule::default(), &with_budget, ways),
                Paid::Spend { .. }
            );
            wait(need, ways, broke && would)
        }
    }
}

fn paid(rule: Rule, need: &Need, ways: &[Way]) -> Paid {
    let metered = ways.iter().any(|way| way.class == Class::Metered);
    if !metered || need.metered_bytes_left == Some(0) {
        return Paid::No;
    }
    let free_works = working(ways, Class::Free).next().is_some();
    let allowed = || Paid::Spend {
        why: "the policy allows it".into(),
    };
    match need.policy {
        Policy::FreeOnly => Paid::No,
        Policy::Fast => allowed(),
        Policy::Any if free_works => Paid::Ready,
        Policy::Any => allowed(),
        Policy::FreeFirst | Policy::Balanced if need.if_late != IfLate::Cell => Paid::No,
        Policy::FreeFirst | Policy::Balanced => match (rule, need.left) {
            (_, None) => Paid::No,
            (Rule::AlgorithmOne, Some(left)) => by_algorithm_one(need, ways, left),
            (Rule::Together, Some(left)) => together(need, ways, left),
        },
    }
}

fn by_algorithm_one(need: &Need, ways: &[Way], left: Duration) -> Paid {
    let needed = time_for(need, metered_rate(ways));
    if needed > left {
        return spend(needed, left);
    }
    Paid::No
}

fn together(need: &Need, ways: &[Way], left: Duration) -> Paid {
    let free_rate: f64 = working(ways, Class::Free).map(Way::rate).sum();
    let needed = seconds_for(need, free_rate + metered_rate(ways));
    let paying = ways
        .iter()
        .any(|way| way.in_use && way.class == Class::Metered);
    let slack = |steps| with_slack(need, needed, steps);
    if left > slack(u32::from(paying)) {
        // A path costs a handshake: near the edge it stays, or is made, without payload.
        return if left > slack(3) {
            Paid::No
        } else {
            Paid::Ready
        };
    }
    // A free link that was not measured yet is measured before money is spent.
    let unmeasured = |way: &Way| way.rate_bytes_per_s.is_none();
    if working(ways, Class::Free).any(unmeasured) {
        return Paid::Ready;
    }
    spend(needed, left)
}

fn spend(needed: Duration, left: Duration) -> Paid {
    Paid::Spend {
        why: format!("{} needed of {} left", in_words(needed), in_words(left)),
    }
}

fn working(ways: &[Way], class: Class) -> impl Iterator<Item = &Way> {
    ways.iter()
        .filter(move |way| way.class == class && !way.stalled)
}

/// What the metered links carry together; the first estimate where none works.
fn metered_rate(ways: &[Way]) -> f64 {
    let rate: f64 = working(ways, Class::Metered).map(Way::rate).sum();
    if rate > 0.0 {
        rate
    } else {
        METERED_RATE_FIRST_BYTES_PER_S
    }
}

/// How long what is left takes, exactly: rounded up it would be paid for early.
fn seconds_for(need: &Need, rate: f64) -> Duration {
    let remaining = need.remaining_bytes.unwrap_or(SIZE_UNKNOWN_BYTES);
    Duration::from_secs_f64((remaining as f64 / rate).min(NEEDED_MAX_S))
}

/// The time needed and what is kept in hand; more of it by steps, for hysteresis.
fn with_slack(need: &Need, needed: Duration, steps: u32) -> Duration {
    let wanted = needed + needed / SLACK_SHARE + SLACK + SLACK_PAYING * steps;
    if need.policy == Policy::Balanced {
        return wanted.saturating_mul(2);
    }
    wanted
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choice::Hold;

    fn way(name: &str, class: Class, rate: f64) -> Way {
        Way {
            name: name.into(),
            class,
            rate_bytes_per_s: Some(rate),
            metric: 100,
            stalled: false,
            in_use: class == Class::Free,
        }
    }

    fn wifi() -> Way {
        way("wlan0", Class::Free, 1e6)
    }

    fn cell() -> Way {
        way("wwan0", Class::Metered, 2e6)
    }

    fn paying() -> Way {
        Way {
            in_use: true,
            ..cell()
        }
    }

    fn stalled(way: Way) -> Way {
        Way {
            stalled: true,
            ..way
        }
    }

    /// 60 MB: 20 s over both, 30 s over the metered link alone, 60 s over the free one.
    fn need(policy: Policy, left_s: u64) -> Need {
        Need {
            remaining_bytes: Some(60_000_000),
            left: Some(Duration::from_secs(left_s)),
            policy,
            if_late: IfLate::Cell,
            metered_bytes_left: None,
        }
    }

    fn pays(need: &Need, ways: &[Way]) -> bool {
        matches!(decide(need, ways).paid, Paid::Spend { .. })
    }

    #[test]
    fn what_the_free_link_carries_meanwhile_lets_the_metered_one_wait() {
        // 20 s and 4 s of slack.
        assert!(!pays(&need(Policy::FreeFirst, 26), &[wifi(), cell()]));
        assert!(pays(&need(Policy::FreeFirst, 24), &[wifi(), cell()]));
        // Without the free link: 30 s and 5 s.
        assert!(!pays(&need(Policy::FreeFirst, 36), &[cell()]));
        assert!(pays(&need(Policy::FreeFirst, 35), &[cell()]));
        // One that is up and carries nothing helps as little.
        let dead = stalled(wifi());
        assert!(pays(&need(Policy::FreeFirst, 35), &[dead, cell()]));
    }

    #[test]
    fn algorithm_one_asks_the_metered_link_alone() {
        let pays = |left_s, ways: &[Way]| {
            let plan = decide_by(Rule::AlgorithmOne, &need(Policy::FreeFirst, left_s), ways);
            matches!(plan.paid, Paid::Spend { .. })
        };
        for ways in [vec![cell()], vec![wifi(), cell()]] {
            assert!(!pays(30, &ways));
            assert!(pays(29, &ways));
        }
    }

    #[test]
    fn a_free_link_that_makes_it_alone_ends_the_spending_at_once() {
        let fast = way("wlan0", Class::Free, 9e6); // 7 s
        let need = need(Policy::FreeFirst, 12);
        assert!(pays(&need, &[wifi(), paying()]));
        assert_eq!(decide(&need, &[fast, paying()]).paid, Paid::No);
    }

    #[test]
    fn a_flow_at_the_edge_does_not_begin_and_stop_every_second() {
        let need = |left_s| need(Policy::FreeFirst, left_s);
        // Not enough to begin, nor to stop; then enough to stop.
        assert!(!pays(&need(25), &[wifi(), cell()]));
        assert!(pays(&need(25), &[wifi(), paying()]));
        assert!(!pays(&need(26), &[wifi(), paying()]));
        // Near the edge there is a path, without payload.
        assert_eq!(decide(&need(27), &[wifi(), cell()]).paid, Paid::Ready);
        assert_eq!(decide(&need(28), &[wifi(), cell()]).paid, Paid::No);
    }

    #[test]
    fn a_new_free_link_is_measured_before_money_is_spent() {
        let new = Way {
            rate_bytes_per_s: None,
            ..wifi()
        };
        let need = need(Policy::FreeFirst, 20);
        assert_eq!(decide(&need, &[new, cell()]).paid, Paid::Ready);
        assert_eq!(decide(&need, &[wifi()]).paid, Paid::No);
    }

    #[test]
    fn a_deadline_that_passed_or_cannot_be_met_spends_all_it_may() {
        for left_s in [0, 1, 10] {
            assert!(pays(&need(Policy::FreeFirst, left_s), &[wifi(), cell()]));
        }
        let never = Need {
            left: None,
            ..need(Policy::FreeFirst, 0)
        };
        assert_eq!(decide(&never, &[cell()]).paid, Paid::No);
    }

    #[test]
    fn balanced_pays_at_twice_the_slack() {
        assert!(!pays(&need(Policy::FreeFirst, 48), &[wifi(), cell()]));
        assert!(pays(&need(Policy::Balanced, 48), &[wifi(), cell()]));
        assert!(!pays(&need(Policy::Balanced, 52), &[wifi(), cell()]));
    }

    #[test]
    fn any_keeps_a_metered_path_ready_and_pays_when_no_free_link_works() {
        let need = need(Policy::Any, 3600);
        assert_eq!(decide(&need, &[wifi(), cell()]).paid, Paid::Ready);
        assert!(pays(&need, &[stalled(wifi()), cell()]));
        assert!(pays(&need, &[cell()]));
    }

    #[test]
    fn budget_policy_and_if_late_keep_a_flow_off_links_that_cost() {
        let broke = Need {
            metered_bytes_left: Some(0),
            ..need(Policy::Fast, 0)
        };
        assert_eq!(decide(&broke, &[cell()]).paid, Paid::No);
        let never = need(Policy::FreeOnly, 0);
        assert_eq!(decide(&never, &[cell()]).paid, Paid::No);
        for if_late in [IfLate::Wait, IfLate::Fail] {
            let patient = Need {
                if_late,
                ..need(Policy::FreeFirst, 0)
            };
            assert_eq!(decide(&patient, &[cell()]).paid, Paid::No);
        }
    }

    #[test]
    fn where_a_flow_is_agrees_with_what_it_may_spend() {
        let at = |need: &Need, ways: &[Way]| match decide(need, ways).choice {
            Choice::Use { index, .. } => ways[index].name.clone(),
            Choice::Wait { reason, .. } => format!("{reason:?}"),
        };
        let early = need(Policy::FreeFirst, 3600);
        let late = need(Policy::FreeFirst, 20);
        assert_eq!(at(&early, &[wifi(), cell()]), "wlan0");
        assert_eq!(at(&early, &[cell()]), format!("{:?}", Hold::PathCost));
        assert_eq!(at(&late, &[cell()]), "wwan0");
        assert_eq!(at(&late, &[stalled(wifi()), cell()]), "wwan0");
        assert_eq!(at(&early, &[stalled(wifi()), cell()]), "wlan0");
        assert_eq!(at(&late, &[]), format!("{:?}", Hold::NoPath));
        let broke = Need {
            metered_bytes_left: Some(0),
            ..late
        };
        assert_eq!(at(&broke, &[cell()]), format!("{:?}", Hold::OverBudget));
        let broke_early = Need {
            metered_bytes_left: Some(0),
            ..early
        };
        assert_eq!(at(&broke_early, &[cell()]), format!("{:?}", Hold::PathCost));
    }
}
