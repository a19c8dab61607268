//! The decision for a client: its link, or why it waits, and its grant on metered links.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::SourceSupply;
use crate::{
    CostPolicy, DeadlineFallback, FlowDemand, FlowExplanation, LinkCandidate, LinkChoice,
    LinkClass, LinkWaitReason, fastest_working, format_duration,
};

use super::ClientReport;

/// What metered links may carry for a client until its next report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Grant {
    /// No packet may use metered links.
    #[default]
    None,
    /// A path without payload, which is kept open because it may be needed soon.
    Path,
    /// Payload up to a limit, to measure the link.
    Probe {
        /// The most payload to carry.
        bytes: u64,
    },
    /// Payload may use metered links, up to a limit.
    Spend {
        /// The most payload to carry: what free links leave over, within the device's budget;
        /// `None` means no limit. The client enforces its own budget itself.
        up_to: Option<u64>,
    },
}

/// The decision for one client.
#[derive(Debug, Clone, PartialEq)]
pub struct ClientDecision {
    /// What metered links may carry for the client.
    pub grant: Grant,
    /// Why metered links carry the client, if the scheduler decided so.
    pub pays_because: Option<String>,
    /// What the device's budget allows the client until its next report, whether it pays or not;
    /// `None` means no limit.
    pub limit: Option<u64>,
    /// Whether metered links would carry the client now if the budget were not used up.
    pub lacks_budget: bool,
    /// The time after which the decision may change by itself; `None` if it changes only with links
    /// and needs.
    pub recheck_after: Option<Duration>,
    /// The links that rest to save energy, by the names of their devices: the client uses none of them.
    pub resting: BTreeSet<String>,
    /// The link to use, for a client that uses one link at a time. If it says to wait, every client
    /// waits.
    pub choice: LinkChoice,
}

/// What the scheduler allows a client on metered links.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct MeteredUse {
    /// Whether metered links carry the client's payload.
    pub(super) pays: bool,
    /// The most payload that metered links should carry until the next decision; `None` means all
    /// of it.
    pub(super) share: Option<u64>,
    /// The rate in bytes per second of the free links that are up, if they are too slow for the
    /// policy `any`.
    pub(super) slow_free_rate: Option<f64>,
    /// Payload bytes for measuring a metered link.
    pub(super) probe: Option<u64>,
    /// The server's rate in bytes per second, if free links keep up with it, so that metered ones
    /// would not help.
    pub(super) source_limit: Option<f64>,
}

/// Adapts the scheduler's decision to the links that a client has.
pub(super) fn fit_to_links(
    need: &FlowDemand,
    report: &ClientReport,
    metered: MeteredUse,
    why: FlowExplanation,
    behind: bool,
    capped: &dyn Fn(&str) -> bool,
) -> ClientDecision {
    let candidates = report.candidates;
    let of = |class: LinkClass| {
        let all = candidates.iter().enumerate();
        all.filter(move |(_, candidate)| candidate.class == class)
    };
    let broke = need.metered_bytes_left == Some(0);
    let costs = of(LinkClass::Metered).next().is_some() && !broke;
    let free = fastest_working(of(LinkClass::Free), need.policy == CostPolicy::Fast);
    let free_works = free.is_some_and(|(_, candidate)| !candidate.stalled);
    let slow_free = metered.slow_free_rate.filter(|_| free_works);
    let is_free_enough = need.policy == CostPolicy::Any && free_works && slow_free.is_none();
    let pays = metered.pays && costs && !is_free_enough;
    // Where only one link at a time carries, a probe of another would interrupt the one that does.
    let probe = metered
        .probe
        .filter(|_| report.uses_several_links && costs && !pays);
    let ready = costs && need.policy == CostPolicy::Any && !pays;
    if behind {
        return ClientDecision {
            grant: Grant::None,
            pays_because: None,
            limit: None,
            lacks_budget: false,
            recheck_after: None,
            resting: BTreeSet::new(),
            choice: LinkChoice::Wait {
                reason: LinkWaitReason::QueuedBehind,
                why: "transfers with earlier deadlines go first".into(),
                unblocks: "the end of those | an earlier deadline".into(),
            },
        };
    }
    let choice = match free {
        Some((index, candidate)) if free_works && (report.uses_several_links || !pays) => {
            used(index, while_free(candidate, &metered, report.source, costs))
        }
        _ if pays => {
            // The fastest link; one that was not measured is tried.
            let pool = of(LinkClass::Free).chain(of(LinkClass::Metered));
            let best = fastest_working(pool, true).expect("a metered link is there");
            let because = match best.1.class {
                LinkClass::Free => format!("{} is free", best.1.name),
                _ => for_money(need, candidates, slow_free, &why),
            };
            used(best.0, because)
        }
        Some((index, candidate)) => {
            used(index, while_free(candidate, &metered, report.source, costs))
        }
        None if probe.is_some() => {
            let (index, candidate) = of(LinkClass::Metered).next().expect("it is there");
            used(
                index,
                format!("measuring {}, in case it is needed", candidate.name),
            )
        }
        None => wait(need, candidates, &why, capped),
    };
    ClientDecision {
        grant: match (pays, probe) {
            (true, _) => Grant::Spend {
                up_to: metered.share,
            },
            (false, Some(bytes)) => Grant::Probe { bytes },
            (false, None) if ready => Grant::Path,
            (false, None) => Grant::None,
        },
        pays_because: pays.then(|| for_money(need, candidates, slow_free, &why)),
        limit: None,
        lacks_budget: false,
        recheck_after: None,
        resting: BTreeSet::new(),
        choice,
    }
}

fn used(index: usize, why: String) -> LinkChoice {
    LinkChoice::Use { index, why }
}

/// Why a free link is used. `costs`: there is a metered link that could be paid for.
fn while_free(
    candidate: &LinkCandidate,
    metered: &MeteredUse,
    source: SourceSupply,
    costs: bool,
) -> String {
    let name = &candidate.name;
    match metered.source_limit {
        None => format!("{name} is free"),
        Some(rate) => {
            let whose = match source {
                SourceSupply::Throttled { .. } => "--limit-rate allows",
                _ => "the server sends",
            };
            let sends = format!("{name} is free; {whose} {}", format_rate(rate));
            match costs {
                true => format!("{sends}, so mobile data would not help"),
                false => sends,
            }
        }
    }
}

/// A rate for people: `120 kB/s`, `1.4 MB/s`.
fn format_rate(bytes_per_s: f64) -> String {
    match bytes_per_s {
        ..1e6 => format!("{:.0} kB/s", bytes_per_s / 1e3),
        _ => format!("{:.1} MB/s", bytes_per_s / 1e6),
    }
}

fn named(candidates: &[LinkCandidate], class: LinkClass) -> String {
    let of_class = candidates
        .iter()
        .filter(|candidate| candidate.class == class);
    let names: Vec<&str> = of_class.map(|candidate| candidate.name.as_str()).collect();
    names.join(" and ")
}

/// The decision to use a metered link, with the reason.
fn for_money(
    need: &FlowDemand,
    candidates: &[LinkCandidate],
    slow_free: Option<f64>,
    why: &FlowExplanation,
) -> String {
    match (need.policy, slow_free) {
        (CostPolicy::Any, Some(rate)) => {
            let free = named(candidates, LinkClass::Free);
            let megabits = 8e-6 * rate;
            format!(
                "{free} is slow ({megabits:.1} Mb/s), and the policy allows {}, which is metered",
                named(candidates, LinkClass::Metered)
            )
        }
        (CostPolicy::Fast | CostPolicy::Any, _) => {
            format!(
                "the policy allows {}, which is metered",
                named(candidates, LinkClass::Metered)
            )
        }
        (CostPolicy::FreeOnly | CostPolicy::FreeFirst | CostPolicy::Balanced, _) => {
            why.because.clone()
        }
    }
}

/// The decision to wait, with the reason.
fn wait(
    need: &FlowDemand,
    candidates: &[LinkCandidate],
    why: &FlowExplanation,
    capped: &dyn Fn(&str) -> bool,
) -> LinkChoice {
    let (metered, roaming) = (
        named(candidates, LinkClass::Metered),
        named(candidates, LinkClass::Roaming),
    );
    let would_pay = match need.policy {
        CostPolicy::FreeOnly => false,
        CostPolicy::FreeFirst | CostPolicy::Balanced => need.if_late == DeadlineFallback::Cell,
        CostPolicy::Fast | CostPolicy::Any => true,
    };
    let (reason, because, unblocks) = if candidates.is_empty() {
        let text = "no network is up".to_owned();
        (LinkWaitReason::NoPath, text, "any network".to_owned())
    } else if metered.is_empty() && candidates.iter().any(|candidate| capped(&candidate.name)) {
        let capped = candidates
            .iter()
            .filter(|candidate| capped(&candidate.name));
        let names: Vec<&str> = capped.map(|candidate| candidate.name.as_str()).collect();
        let text = format!("the monthly cap of {} is used up", names.join(" and "));
        let unblocks = "another network | the reset day | a larger cap in the settings".to_owned();
        (LinkWaitReason::OverBudget, text, unblocks)
    } else if metered.is_empty() {
        let text = format!("only {roaming} (roaming) is up");
        let unblocks = format!("another network | --link {roaming}=metered");
        (LinkWaitReason::RoamingBlocked, text, unblocks)
    } else if need.metered_bytes_left == Some(0) && would_pay {
        let text = format!("the data limit of {metered} is used up");
        let unblocks = "a free network | a larger --max-cell or budget".to_owned();
        (LinkWaitReason::OverBudget, text, unblocks)
    } else {
        let left = need
            .left
            .map(|left| format!(", {} left", format_duration(left)));
        let text = format!("only {metered} (metered) is up{}", left.unwrap_or_default());
        let unblocks = match why.reason == Some(LinkWaitReason::PathCost)
            && would_pay
            && need.left.is_some()
        {
            true => format!("{} | --policy any", why.unblocks),
            false => "a free network | --policy any".to_owned(),
        };
        (LinkWaitReason::PathCost, text, unblocks)
    };
    LinkChoice::Wait {
        reason,
        why: because,
        unblocks,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    use crate::SourceSupply;

    fn candidate(name: &str, class: LinkClass) -> LinkCandidate {
        LinkCandidate {
            name: name.into(),
            class,
            rate_bytes_per_s: Some(1e6),
            metric: 0,
            stalled: false,
            in_use: false,
        }
    }

    fn need(policy: CostPolicy) -> FlowDemand {
        FlowDemand {
            remaining_bytes: Some(1),
            left: Some(Duration::from_secs(60)),
            policy,
            if_late: DeadlineFallback::Cell,
            metered_bytes_left: None,
        }
    }

    fn decide_as(
        policy: CostPolicy,
        candidates: &[LinkCandidate],
        pays: bool,
        probe: bool,
        together: bool,
    ) -> ClientDecision {
        let (need, carried) = (need(policy), BTreeMap::new());
        let report = ClientReport {
            demand: need.clone(),
            size_bytes: None,
            priority: 0,
            start: None,
            candidates,
            carried: &carried,
            uses_several_links: together,
            always_pays: false,
            is_interactive: false,
            keeps_awake: true,
            source: SourceSupply::Ample,
        };
        let why = FlowExplanation {
            reason: Some(LinkWaitReason::PathCost),
            because: "because".into(),
            unblocks: "wwan0 in 5 s".into(),
        };
        let metered = MeteredUse {
            pays,
            probe: probe.then_some(100),
            ..MeteredUse::default()
        };
        fit_to_links(&need, &report, metered, why, false, &|_| false)
    }

    fn probed(decision: &ClientDecision) -> Option<u64> {
        match decision.grant {
            Grant::Probe { bytes } => Some(bytes),
            _ => None,
        }
    }

    fn on(decision: &ClientDecision, candidates: &[LinkCandidate]) -> String {
        match &decision.choice {
            LinkChoice::Use { index, .. } => candidates[*index].name.clone(),
            LinkChoice::Wait { reason, .. } => format!("{reason:?}"),
        }
    }

    #[test]
    fn a_transfer_is_on_the_link_that_the_decision_allows() {
        let (wifi, cell) = (
            candidate("wlan0", LinkClass::Free),
            candidate("wwan0", LinkClass::Metered),
        );
        let silent = LinkCandidate {
            stalled: true,
            ..wifi.clone()
        };
        let faster = LinkCandidate {
            rate_bytes_per_s: Some(1e7),
            ..cell.clone()
        };
        let first = CostPolicy::FreeFirst;
        // A client on one link takes the fastest if it may pay. On several links the free one
        // carries anyway.
        for (candidates, pays, together, expected) in [
            (vec![wifi.clone(), faster.clone()], true, false, "wwan0"),
            (vec![wifi.clone(), faster.clone()], true, true, "wlan0"),
            (vec![wifi.clone(), faster.clone()], false, false, "wlan0"),
            (vec![cell.clone()], false, true, "PathCost"),
            (vec![cell.clone()], true, true, "wwan0"),
            (vec![silent.clone(), cell.clone()], true, false, "wwan0"),
            (vec![silent.clone(), cell.clone()], false, false, "wlan0"),
            (vec![], true, true, "NoPath"),
            (
                vec![candidate("r0", LinkClass::Roaming)],
                true,
                true,
                "RoamingBlocked",
            ),
        ] {
            let decision = decide_as(first, &candidates, pays, false, together);
            assert_eq!(on(&decision, &candidates), expected, "{candidates:?}");
            let has_metered = candidates
                .iter()
                .any(|candidate| candidate.class == LinkClass::Metered);
            assert_eq!(
                decision.pays_because.is_some(),
                pays && has_metered,
                "{candidates:?}"
            );
        }
    }

    #[test]
    fn any_keeps_a_path_ready_beside_a_free_link_and_pays_without_one() {
        let candidates = [
            candidate("wlan0", LinkClass::Free),
            candidate("wwan0", LinkClass::Metered),
        ];
        let beside = decide_as(CostPolicy::Any, &candidates, true, false, true);
        assert!(beside.grant == Grant::Path, "{beside:?}");
        let alone = decide_as(CostPolicy::Any, &candidates[1..], true, false, true);
        assert!(alone.grant == Grant::Spend { up_to: None }, "{alone:?}");
    }

    #[test]
    fn a_link_is_measured_only_where_others_go_on_meanwhile() {
        let candidates = [
            candidate("wlan0", LinkClass::Free),
            candidate("wwan0", LinkClass::Metered),
        ];
        assert_eq!(
            probed(&decide_as(
                CostPolicy::FreeFirst,
                &candidates,
                false,
                true,
                true
            )),
            Some(100)
        );
        assert_eq!(
            probed(&decide_as(
                CostPolicy::FreeFirst,
                &candidates,
                false,
                true,
                false
            )),
            None
        );
        // A client that pays needs no probe, and without a metered link there is none.
        assert_eq!(
            probed(&decide_as(
                CostPolicy::FreeFirst,
                &candidates,
                true,
                true,
                true
            )),
            None
        );
        assert_eq!(
            probed(&decide_as(
                CostPolicy::FreeFirst,
                &candidates[..1],
                false,
                true,
                true
            )),
            None
        );
    }

    #[test]
    fn a_budget_that_is_used_up_is_a_reason_only_for_those_who_would_pay() {
        let candidates = [candidate("wwan0", LinkClass::Metered)];
        let why = FlowExplanation {
            reason: None,
            because: String::new(),
            unblocks: String::new(),
        };
        for (policy, reason) in [
            (CostPolicy::FreeOnly, LinkWaitReason::PathCost),
            (CostPolicy::FreeFirst, LinkWaitReason::OverBudget),
            (CostPolicy::Any, LinkWaitReason::OverBudget),
        ] {
            let broke = FlowDemand {
                metered_bytes_left: Some(0),
                ..need(policy)
            };
            let LinkChoice::Wait { reason: found, .. } =
                wait(&broke, &candidates, &why, &|_| false)
            else {
                panic!("it waits");
            };
            assert_eq!(found, reason);
        }
    }

    #[test]
    fn a_cap_that_is_used_up_is_the_reason_and_not_that_a_link_roams() {
        let candidates = [candidate("wwan0", LinkClass::Roaming)];
        let why = FlowExplanation {
            reason: None,
            because: String::new(),
            unblocks: String::new(),
        };
        let reason =
            |capped: bool| match wait(&need(CostPolicy::Any), &candidates, &why, &|_| capped) {
                LinkChoice::Wait { reason, .. } => reason,
                LinkChoice::Use { .. } => panic!("it waits"),
            };
        assert_eq!(
            (reason(true), reason(false)),
            (LinkWaitReason::OverBudget, LinkWaitReason::RoamingBlocked)
        );
    }
}
