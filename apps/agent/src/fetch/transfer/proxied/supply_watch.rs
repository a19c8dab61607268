//! The rate at which the server supplies a flow, for the scheduler: from the proxy's reports, which
//! begin soon after the first byte and stop when no bytes arrive.

use std::time::Duration;

use cedos_http::SupplyReport;
use d2tp_sched::SourceSupply;

use crate::fetch::boot_clock::BootInstant;

/// How long a report counts. Higher: one that was lost matters less, and a faster server is noticed later.
const COUNTS_FOR: Duration = Duration::from_secs(3); // three reports
/// How long after the first byte the first report may take.
const REPORTED_WITHIN: Duration = Duration::from_secs(2); // a guess: half a second, and a long way
/// How long after the request a flow without a byte counts as one whose server is unknown.
const ANSWERED_WITHIN: Duration = Duration::from_secs(4); // a guess: longer, and free links may be at fault

/// When a download's flow began; an upload, which this device supplies, begins none.
#[derive(Debug, Default)]
pub(super) struct SupplyWatch {
    asked_at: Option<BootInstant>,
    first_byte_at: Option<BootInstant>,
}

impl SupplyWatch {
    /// Records a new request.
    pub(super) fn on_new_flow(&mut self, now: BootInstant) {
        *self = SupplyWatch {
            asked_at: Some(now),
            first_byte_at: None,
        };
    }

    /// Records that bytes arrived.
    pub(super) fn on_byte(&mut self, now: BootInstant) {
        self.first_byte_at.get_or_insert(now);
    }

    /// The server's supply. `last`: the last report on the flow, with its moment; `free_answers`: the proxy
    /// answers on a free link, which otherwise may be what is slow.
    pub(super) fn supply(
        &self,
        last: Option<(SupplyReport, BootInstant)>,
        free_answers: bool,
        now: BootInstant,
    ) -> SourceSupply {
        let is_within = |since: Option<BootInstant>, limit: Duration| {
            since.is_some_and(|since| now.since(since) < limit)
        };
        match last {
            Some((report, at)) if now.since(at) < COUNTS_FOR => match report.limit {
                Some(rate) => SourceSupply::Limited {
                    // A server that sends nothing for a moment is no division by zero.
                    bytes_per_s: (rate as f64).max(1.0),
                },
                None => SourceSupply::Ample,
            },
            Some(_) => SourceSupply::Ample,
            None => {
                let is_young = match self.first_byte_at {
                    Some(_) => is_within(self.first_byte_at, REPORTED_WITHIN),
                    None => is_within(self.asked_at, ANSWERED_WITHIN),
                };
                match is_young && free_answers && self.asked_at.is_some() {
                    true => SourceSupply::Unknown,
                    false => SourceSupply::Ample,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(milliseconds: u64) -> BootInstant {
        BootInstant::from_boot(Duration::from_secs(100) + Duration::from_millis(milliseconds))
    }

    #[test]
    fn the_supply_is_unknown_until_the_first_report_and_not_for_long() {
        let mut watch = SupplyWatch::default();
        assert_eq!(watch.supply(None, true, at(0)), SourceSupply::Ample);
        watch.on_new_flow(at(0));
        assert_eq!(watch.supply(None, true, at(3_900)), SourceSupply::Unknown);
        assert_eq!(watch.supply(None, true, at(4_000)), SourceSupply::Ample);
        watch.on_byte(at(5_000));
        assert_eq!(watch.supply(None, true, at(6_900)), SourceSupply::Unknown);
        assert_eq!(watch.supply(None, true, at(7_000)), SourceSupply::Ample);
        // A free link on which the proxy does not answer is not waited for.
        assert_eq!(watch.supply(None, false, at(6_900)), SourceSupply::Ample);
        // Another request, another server.
        watch.on_new_flow(at(8_000));
        assert_eq!(watch.supply(None, true, at(8_500)), SourceSupply::Unknown);
    }

    #[test]
    fn a_report_counts_until_the_next_ones_are_missing() {
        let mut watch = SupplyWatch::default();
        watch.on_new_flow(at(0));
        watch.on_byte(at(100));
        let said = |limit| Some((SupplyReport { flow: 1, limit }, at(600)));
        let limited = SourceSupply::Limited {
            bytes_per_s: 120_000.0,
        };
        assert_eq!(watch.supply(said(Some(120_000)), true, at(3_500)), limited);
        assert_eq!(
            watch.supply(said(Some(120_000)), true, at(3_600)),
            SourceSupply::Ample
        );
        assert_eq!(watch.supply(said(None), true, at(700)), SourceSupply::Ample);
    }
}
