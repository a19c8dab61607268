//! The server as a bottleneck of its own: how fast it supplies a flow, where that is less than links carry.
//!
//! ```text
//!  server ──120 kB/s──▶ proxy ══ wlan0, 2 MB/s ══▶ device     the link waits for the server
//!                             ══ wwan0, metered ══▶           another link would wait as well
//! ```
//!
//! What such a flow carries says nothing about the most that its links carry, metered links do not
//! help it while free ones keep up with the server, and what the links have left is for other flows.

use crate::history::LinkHistory;
use crate::link_assignment::ScheduledFlow;
use crate::link_choice::{CostPolicy, LinkClass};
use crate::scheduler::Scheduler;
use crate::source_supply::SourceSupply;

/// The share of the server's rate from which free links count as keeping up with it. Lower: less is paid
/// for, and a flow may be later by as much.
const KEEPS_UP_SHARE: f64 = 0.95; // a guess: what rates vary by where nothing is wrong

/// The time left below which an unknown supply does not delay paying, in seconds.
const PATIENT_S: f64 = 10.0; // a guess: several times what it takes to know the supply

impl Scheduler {
    /// Whether metered links would not help a flow now: free ones keep up with its source, or it is
    /// not known yet whether they do and there is time to find out.
    pub(crate) fn is_held_by_source(&self, flow: &ScheduledFlow) -> bool {
        let carrying = self.links().iter();
        let mut free = carrying.filter(|link| link.class() == LinkClass::Free && link.carries());
        match flow.source {
            SourceSupply::Ample => false,
            SourceSupply::Unknown => {
                let is_patient = flow.left_s().is_none_or(|left_s| left_s > PATIENT_S);
                flow.need.policy != CostPolicy::Fast && is_patient && free.next().is_some()
            }
            SourceSupply::NoFasterOnMetered { .. } => free.next().is_some(),
            SourceSupply::Limited { bytes_per_s } | SourceSupply::Throttled { bytes_per_s } => {
                let rates = free.map(LinkHistory::best_known_rate);
                rates.sum::<f64>() >= KEEPS_UP_SHARE * bytes_per_s
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::LinkObservation;
    use crate::link_assignment::LinkShare;
    use crate::link_choice::{DeadlineFallback, FlowDemand};
    use crate::scheduler::SchedulerMode;
    use d2tp_time::{Span, Time};
    use std::time::Duration;

    const FREE_RATE: u64 = 400_000;

    /// A minute of both links: the free one carries [`FREE_RATE`], the metered one 2 MB/s.
    fn scheduler() -> (Scheduler, Time) {
        let classes = [LinkClass::Free, LinkClass::Metered];
        let mut scheduler = Scheduler::new(SchedulerMode::Forecast, classes);
        let mut now = Time::ZERO;
        for _ in 0..60 {
            now += Span::from_secs(1);
            let carried = |bytes| LinkObservation {
                up: true,
                bytes,
                busy: Span::from_secs(1),
            };
            scheduler.observe(now, &[carried(FREE_RATE), carried(2_000_000)]);
        }
        (scheduler, now)
    }

    fn flow(bytes: u64, left_s: u64, policy: CostPolicy, source: SourceSupply) -> ScheduledFlow {
        ScheduledFlow {
            need: FlowDemand {
                remaining_bytes: Some(bytes),
                left: Some(Duration::from_secs(left_s)),
                policy,
                if_late: DeadlineFallback::Cell,
                metered_bytes_left: None,
            },
            size_bytes: bytes,
            priority: 0,
            source,
        }
    }

    fn limited(bytes_per_s: f64) -> SourceSupply {
        SourceSupply::Limited { bytes_per_s }
    }

    /// Whether a flow of 500 MB in ten minutes pays, or is to measure a metered link.
    fn uses_metered(policy: CostPolicy, source: SourceSupply) -> bool {
        let (scheduler, now) = scheduler();
        let flows = [flow(500_000_000, 600, policy, source)];
        let assignment = scheduler.decide(now, &flows);
        let probes = |share: &LinkShare| matches!(share, LinkShare::Probe(_));
        let is_probed = assignment.shares.iter().any(probes) && assignment.probed.is_some();
        !assignment.payers.is_empty() || is_probed
    }

    #[test]
    fn metered_links_carry_nothing_where_free_ones_keep_up_with_the_server() {
        for policy in [
            CostPolicy::FreeFirst,
            CostPolicy::Balanced,
            CostPolicy::Fast,
        ] {
            assert!(uses_metered(policy, SourceSupply::Ample), "{policy:?}");
            assert!(!uses_metered(policy, limited(120_000.0)), "{policy:?}");
            let throttled = SourceSupply::Ample.throttled(120_000.0);
            assert!(!uses_metered(policy, throttled), "{policy:?}");
            // An urgent flow does not wait for that.
            let waits = !uses_metered(policy, SourceSupply::Unknown);
            assert_eq!(waits, policy != CostPolicy::Fast, "{policy:?}");
        }
    }

    #[test]
    fn what_a_flow_compared_itself_holds_whatever_its_links_were_measured_to_carry() {
        let found = SourceSupply::NoFasterOnMetered {
            bytes_per_s: 2.0 * FREE_RATE as f64,
        };
        assert!(!uses_metered(CostPolicy::Fast, found));
        assert!(uses_metered(
            CostPolicy::Fast,
            limited(2.0 * FREE_RATE as f64)
        ));
    }

    #[test]
    fn no_metered_link_is_measured_for_others_because_a_server_is_slow() {
        let (scheduler, mut now) = scheduler();
        // The metered link was not used for a minute.
        now += Span::from_secs(60);
        let policy = CostPolicy::FreeFirst;
        let slow = flow(500_000_000, 600, policy, limited(300_000.0));
        let other = flow(3_000_000, 21_600, policy, SourceSupply::Ample);
        let assignment = scheduler.decide(now, &[slow, other]);
        let is_unused = |share: &LinkShare| matches!(share, LinkShare::All | LinkShare::Nothing);
        assert!(assignment.shares.iter().all(is_unused), "{assignment:?}");
    }

    #[test]
    fn metered_links_help_where_the_server_is_faster_than_the_free_ones() {
        assert!(uses_metered(CostPolicy::FreeFirst, limited(900_000.0)));
        // Without a free link whatever the server sends has to come over the metered one.
        let (mut scheduler, mut now) = scheduler();
        now += Span::from_secs(1);
        let [gone, cell] = [false, true].map(|up| LinkObservation {
            up,
            ..LinkObservation::default()
        });
        scheduler.observe(now, &[gone, cell]);
        let alone = flow(60_000_000, 600, CostPolicy::FreeFirst, limited(120_000.0));
        assert!(!scheduler.is_held_by_source(&alone));
    }

    #[test]
    fn shortly_before_a_deadline_nobody_waits_to_learn_how_fast_the_server_is() {
        let (scheduler, now) = scheduler();
        let flows = [flow(
            20_000_000,
            8,
            CostPolicy::FreeFirst,
            SourceSupply::Unknown,
        )];
        assert_eq!(scheduler.decide(now, &flows).payers, [0]);
    }

    #[test]
    fn what_a_slow_server_cannot_supply_in_time_is_not_promised() {
        let (scheduler, now) = scheduler();
        let ready = |source| {
            let flows = [flow(100_000_000, 600, CostPolicy::FreeFirst, source)];
            scheduler.estimates(now, &flows)[0].ready
        };
        assert!(ready(SourceSupply::Ample) > 0.9);
        // 12 of 100 MB.
        assert!(ready(limited(20_000.0)) < 0.05);
        // 240 MB would come.
        assert!(ready(limited(400_000.0)) > 0.9);
        let in_doubt = ready(limited(166_667.0));
        assert!((0.2..0.8).contains(&in_doubt), "{in_doubt}");
    }

    #[test]
    fn a_flow_with_a_slow_server_leaves_its_share_of_the_links_to_others() {
        let (scheduler, now) = scheduler();
        let other = flow(100_000_000, 600, CostPolicy::FreeOnly, SourceSupply::Ample);
        let ready = |source| {
            let slow = flow(600_000_000, 599, CostPolicy::FreeOnly, source);
            scheduler.estimates(now, &[slow, other.clone()])[1].ready
        };
        assert!(ready(SourceSupply::Ample) < 0.1);
        assert!(ready(limited(20_000.0)) > 0.6);
    }
}
