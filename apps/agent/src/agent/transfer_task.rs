//! The agent's state of a transfer: its stored files, its standing, and its last event.

use std::collections::BTreeMap;
use std::time::Duration;

use d2tp_links::{CostClass, Link};
use d2tp_sched::{CostPolicy, TransferDirection};
use serde_json::Value;
use tokio::sync::watch;

use super::queue::{QueuedTransfer, SavedTransfer, TransferIntent};
use super::regret_meter::RegretMeter;
use crate::fetch::boot_clock::BootInstant;
use crate::fetch::file_stamp::FileStamp;
use crate::fetch::jobs::{JobRequest, LastProgress};
use crate::fetch::outcome::{TransferExit, TransferFailure};
use crate::fetch::report::{TransferEvent, TransferReport};
use crate::terms::TransferTerms;

/// The state of a transfer in the agent.
pub(super) struct TransferTask {
    pub(super) request: JobRequest,
    pub(super) saved: SavedTransfer,
    /// The last event, completed with what earlier ones reported.
    pub(super) event: Value,
    /// The report of the last run.
    pub(super) last: Option<TransferReport>,
    pub(super) memory: LastProgress,
    /// Bytes that metered links carried, in earlier runs and in this one.
    pub(super) metered_before: u64,
    pub(super) metered: u64,
    /// Bytes by link in this run, as far as they were counted.
    pub(super) counted: BTreeMap<String, u64>,
    /// Bytes by link in earlier runs.
    carried_before: BTreeMap<String, u64>,
    pub(super) terms: watch::Sender<TransferTerms>,
    pub(super) changed_at: BootInstant,
    pub(super) stop: watch::Sender<bool>,
    pub(super) running: bool,
    /// Whether the user was notified that the transfer will probably be late.
    pub(super) is_hardly: bool,
    /// The file of a recurring upload when its run began.
    pub(super) sent: Option<FileStamp>,
}

impl TransferTask {
    pub(super) fn new(record: QueuedTransfer) -> TransferTask {
        let metered = record.event["metered_bytes"].as_u64().unwrap_or(0);
        TransferTask {
            request: record.request,
            saved: record.saved,
            memory: LastProgress::of(&record.event),
            last: None,
            metered_before: metered,
            metered,
            counted: BTreeMap::new(),
            carried_before: serde_json::from_value(record.event["carried_by_link"].clone())
                .unwrap_or_default(),
            terms: watch::channel(TransferTerms::default()).0,
            changed_at: BootInstant::now(),
            stop: watch::channel(false).0,
            running: false,
            is_hardly: false,
            sent: None,
            event: record.event,
        }
    }

    /// Begins another run: what the last one carried belongs to earlier runs from now on.
    pub(super) fn begin_run(&mut self) {
        self.metered_before = self.metered;
        self.carried_before = self.carried_by_link();
        self.counted.clear();
        self.last = None;
    }

    /// Forgets what links carried in earlier runs.
    pub(super) fn forget_carried(&mut self) {
        self.carried_before.clear();
    }

    /// Bytes by link in all runs.
    pub(super) fn carried_by_link(&self) -> BTreeMap<String, u64> {
        let mut carried = self.carried_before.clone();
        for (link, bytes) in &self.counted {
            *carried.entry(link.clone()).or_default() += bytes;
        }
        carried
    }

    /// The state in a word.
    pub(super) fn state_name(&self) -> &'static str {
        match self.event["event"].as_str() {
            Some("done") => "done",
            Some("error") if self.event["exit"] == TransferExit::Cancelled as u8 => "cancelled",
            Some("error") => "failed",
            Some("paused") => "paused",
            Some("scheduled") => "scheduled",
            Some("waiting") => "waiting",
            Some("begun" | "progress" | "switch") => "running",
            _ => "queued",
        }
    }

    /// The name for users.
    pub(super) fn name(&self) -> String {
        let file = self.request.file.file_name();
        file.map_or_else(
            || self.request.url.clone(),
            |name| name.to_string_lossy().into_owned(),
        )
    }

    /// Whether the transfer will not continue by itself.
    pub(super) fn has_ended(&self) -> bool {
        // The end of a run is none of a transfer that recurs.
        let goes_on = self.recurs() && self.saved.wish != TransferIntent::Cancel;
        !goes_on && matches!(self.state_name(), "done" | "failed" | "cancelled")
    }

    /// Requests a stop; the user's intent decides what happens then.
    pub(super) fn request_stop(&self) {
        self.stop.send_replace(true);
    }

    /// Applies the saved terms.
    pub(super) fn apply_saved(&mut self) -> Result<(), TransferFailure> {
        let terms = self.saved.terms(self.metered_before)?;
        self.changed_at = BootInstant::now();
        self.terms.send_replace(terms);
        Ok(())
    }

    /// Adds the transfer to the regret meter, once its size is known.
    pub(super) fn put_on_paper(
        &self,
        id: u64,
        direction: TransferDirection,
        event: &TransferEvent,
        hindsight: &mut RegretMeter,
    ) {
        let terms = self.terms.borrow();
        match event {
            _ if !matches!(terms.policy, CostPolicy::FreeFirst | CostPolicy::Balanced) => {
                hindsight.untrack(id);
            }
            TransferEvent::Progress {
                bytes,
                length: Some(length),
                ..
            } => {
                let left = terms.time_left();
                if left == Some(Duration::ZERO) {
                    return; // it was judged
                }
                let due = left.map(|left| BootInstant::now().after(left));
                let came: u64 = self.counted.values().sum();
                hindsight.track(id, direction, due, length.saturating_sub(*bytes) + came);
            }
            TransferEvent::Done(_) => hindsight.record_end(id, None),
            TransferEvent::Error(_) => hindsight.record_end(id, Some(self.counted.values().sum())),
            _ => {}
        }
    }

    /// Counts what links carried since the last call, by device and cost.
    pub(super) fn count(
        &mut self,
        links: &[Link],
        carried: &BTreeMap<String, u64>,
    ) -> Vec<(String, CostClass, u64)> {
        let mut more = Vec::new();
        for (name, bytes) in carried {
            let before = self.counted.insert(name.clone(), *bytes).unwrap_or(0);
            let class = links.iter().find(|link| link.name == *name);
            // `any` and links that are gone since: what is not known to cost is free.
            let class = class.map_or(CostClass::Free, |link| link.class.class);
            let bytes = bytes.saturating_sub(before);
            if bytes > 0 {
                more.push((name.clone(), class, bytes));
                if class != CostClass::Free {
                    self.metered += bytes;
                }
            }
        }
        more
    }
}

/// How long payload that was granted before a change of policy may still arrive.
pub(super) const GRANTED_BEFORE: Duration = Duration::from_secs(3); // a second of grants, an epoch, a round trip

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::order::{TransferOrder, TransferVerb};

    fn task(event: Value) -> TransferTask {
        let order = TransferOrder::new(TransferVerb::Get, "http://h/a");
        TransferTask::new(QueuedTransfer {
            id: 1,
            request: JobRequest {
                verb: TransferVerb::Get,
                url: "http://h/a".into(),
                file: "/a".into(),
                since: String::new(),
                deadline: None,
            },
            saved: SavedTransfer::new(order, true).expect("an order"),
            event,
        })
    }

    #[test]
    fn what_links_carried_counts_all_runs_also_those_of_an_earlier_agent() {
        let carried = |pairs: &[(&str, u64)]| -> BTreeMap<String, u64> {
            let pairs = pairs
                .iter()
                .map(|(link, bytes)| ((*link).to_owned(), *bytes));
            pairs.collect()
        };
        let mut task = task(json!({"event": "paused", "carried_by_link": {"wlan0": 5}}));
        task.begin_run();
        task.count(&[], &carried(&[("wlan0", 3), ("wwan0", 2)]));
        assert_eq!(
            task.carried_by_link(),
            carried(&[("wlan0", 8), ("wwan0", 2)])
        );
        task.begin_run();
        task.count(&[], &carried(&[("wlan0", 1)]));
        assert_eq!(
            task.carried_by_link(),
            carried(&[("wlan0", 9), ("wwan0", 2)])
        );
    }
}
