//! The scheduler's decisions in a session's log.

use d2tp_driver::Device;
use d2tp_sched::{ClientDecision, Grant, LinkCandidate, LinkChoice};

use super::paid_grant;
use crate::fetch::outcome::TransferReason;

/// Logs a decision in the session's log when it differs from the previous one.
#[derive(Debug, Default)]
pub(super) struct DecisionLog {
    /// The last logged decision, without its numbers.
    last: Option<(String, &'static str)>,
}

impl DecisionLog {
    /// Records a decision, and the grant that the flow uses.
    pub(super) fn record(
        &mut self,
        decision: &ClientDecision,
        grant: Grant,
        candidates: &[LinkCandidate],
        device: Option<&Device>,
    ) {
        let (chosen, why) = match &decision.choice {
            LinkChoice::Use { index, why } => (candidates[*index].name.clone(), why),
            LinkChoice::Wait { reason, why, .. } => {
                (TransferReason::from(*reason).code().to_owned(), why)
            }
        };
        let paid = paid_grant::word(grant);
        if self.last.as_ref() == Some(&(chosen.clone(), paid)) {
            return;
        }
        self.last = Some((chosen.clone(), paid));
        let Some(device) = device else {
            return;
        };
        device.note("cedos:decision", || {
            let waits = matches!(decision.choice, LinkChoice::Wait { .. });
            serde_json::json!({
                "decision": if waits { "wait" } else { "use" },
                "link": (!waits).then_some(&chosen),
                "reason": waits.then_some(&chosen),
                "why": why,
                "paid_links": paid,
                "paid_because": decision.pays_because,
                "links": candidates.iter().map(|link| serde_json::json!({
                    "name": link.name,
                    "class": format!("{:?}", link.class).to_lowercase(),
                    "rate_bytes_per_s": link.rate_bytes_per_s,
                    "stalled": link.stalled,
                })).collect::<Vec<_>>(),
            })
        });
    }
}
