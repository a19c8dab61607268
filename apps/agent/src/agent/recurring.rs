//! Transfers that recur: one entry of the queue, which runs again and again and never is done.
//!
//! ```text
//!  scheduled ── its time has come ──▶ run (task.rs) ── done, unchanged, failed ──▶ scheduled
//!      ▲ │ pause, resume                  │ the agent is killed
//!      └─┘                                └▶ the next agent goes on with the same run
//! ```
//!
//! A download asks for the object only if it is another than the one that the last run brought, and an upload whose
//! file is the same asks for nothing.

use std::time::Duration;

use jiff::tz::TimeZone;
use jiff::{Timestamp, Zoned};
use serde_json::{Value, json};

use super::queue::{self, SavedDeadline, SavedTransfer, whole_seconds};
use super::saved_recurrence::SavedRecurrence;
use super::state::{Agent, lock};
use super::transfer_task::TransferTask;
use crate::fetch::file_stamp::FileStamp;
use crate::fetch::jobs::LastProgress;
use crate::fetch::object_version::ObjectVersion;
use crate::fetch::outcome::{TransferExit, TransferFailure};
use crate::fetch::report::TransferReport;
use crate::fetch::upload_body::new_token;
use crate::order::TransferVerb;
use crate::recurrence::{RecurrenceStep, RecurringRun};
use crate::terms::DueTime;

/// How often the time of day is compared with the beginning of the next run: the clock may be set, the machine may
/// have slept, and the time zone may be another.
const LOOK_EVERY: Duration = Duration::from_secs(5); // as often as slowly changing state is saved

impl SavedTransfer {
    /// The step that a recurring transfer needs now.
    fn step(&self) -> Option<RecurrenceStep> {
        let (time, lead) = self.order.recurrence().ok().flatten()?;
        let now = Zoned::now().with_time_zone(TimeZone::system());
        self.recurrence.as_ref()?.progress.step(time, lead, &now)
    }

    /// The event of a recurring transfer that waits for its next run.
    fn scheduled_event(&self, starts: Timestamp, due: Timestamp) -> Value {
        let recurrence = self.recurrence.as_ref();
        json!({
            "event": "scheduled",
            "t_s": 0.0,
            "every": self.order.every,
            "starts": whole_seconds(starts),
            "due": whole_seconds(due),
            "missed": recurrence.map(|recurrence| recurrence.progress.missed),
            "last_run": recurrence.and_then(SavedRecurrence::last_run),
        })
    }

    /// The next run of a transfer that was just ordered, for the answer: when it begins, and its deadline.
    pub(super) fn first_run(&self) -> Option<(String, String)> {
        let (starts, due) = match self.step()? {
            RecurrenceStep::Wait { starts, due } => (starts, due),
            RecurrenceStep::Run { run, .. } => (Timestamp::now(), run.due),
        };
        Some((whole_seconds(starts), whole_seconds(due)))
    }
}

impl TransferTask {
    /// The version of the object that the file of a recurring download holds.
    pub(super) fn held_version(&self) -> Option<ObjectVersion> {
        self.saved
            .recurrence
            .as_ref()?
            .held_version(&self.request.file)
    }

    /// Whether the transfer runs again and again.
    pub(super) fn recurs(&self) -> bool {
        self.saved.recurrence.is_some()
    }

    /// Whether a recurring transfer has begun the run for the same time of its schedule.
    fn is_in_run(&self, run: RecurringRun) -> bool {
        let current = self
            .saved
            .recurrence
            .as_ref()
            .and_then(|r| r.progress.current);
        current.is_some_and(|current| current.slot == run.slot)
    }

    /// Begins another run of a recurring transfer, which has the metered bytes of its order again.
    fn begin_recurring_run(&mut self, run: RecurringRun, missed: u64) {
        let Some(recurrence) = &mut self.saved.recurrence else {
            return;
        };
        let current = &mut recurrence.progress.current;
        if current.is_some_and(|current| current.slot == run.slot) {
            // It goes on after its deadline: the same run, with what it has spent and sent.
            *current = Some(run);
        } else {
            recurrence.progress.begin(run, missed);
            self.metered = 0;
            self.begin_run();
            self.forget_carried();
            self.memory = LastProgress::default();
            self.is_hardly = false;
            if self.saved.order.verb == TransferVerb::Put {
                // Each run is an upload of its own.
                self.saved.order.token = Some(new_token());
            }
        }
        self.set_due(run.due);
    }

    fn set_due(&mut self, due: Timestamp) {
        self.saved.due = Some(SavedDeadline::of(DueTime::At(due)));
        self.request.deadline = Some(whole_seconds(due));
    }

    /// Records the end of a run of a recurring transfer.
    pub(super) fn end_recurring_run(&mut self, report: &TransferReport) {
        let (verb, path) = (self.saved.order.verb, self.request.file.clone());
        let sent = self.sent.take();
        if let Some(recurrence) = &mut self.saved.recurrence {
            let stamp = match verb {
                TransferVerb::Get => FileStamp::of(&path),
                TransferVerb::Put => sent,
            };
            recurrence.end_run(report, stamp);
        }
    }
}

impl Agent {
    /// Waits until a run of the transfer is to begin, or to go on; at once if it does not recur. True if the transfer
    /// was stopped meanwhile.
    pub(super) async fn wait_for_run(&self, id: u64) -> bool {
        let mut shown = None;
        loop {
            let (mut stop, pause) = {
                let mut tasks = lock(&self.tasks);
                let Some(task) = tasks.get_mut(&id) else {
                    return true;
                };
                if !task.recurs() {
                    return false;
                }
                if *task.stop.borrow() {
                    return true;
                }
                match task.saved.step() {
                    Some(RecurrenceStep::Run { run, missed }) => {
                        if !task.is_in_run(run) {
                            // A file that an earlier run finished, with the agent killed before it recorded that.
                            queue::remove_pending_rename(id);
                        }
                        task.begin_recurring_run(run, missed);
                        save(id, task);
                        if shown.is_some() {
                            lock(&self.meter).woke("recurrence");
                        }
                        return false;
                    }
                    Some(RecurrenceStep::Wait { starts, due }) => {
                        if shown != Some((starts, due)) {
                            shown = Some((starts, due));
                            task.set_due(due);
                            save(id, task);
                            let event = task.saved.scheduled_event(starts, due);
                            Agent::note(&self.events, id, task, event);
                        }
                        let left = starts.duration_since(Timestamp::now());
                        let left = Duration::try_from(left).unwrap_or_default();
                        (task.stop.subscribe(), left.min(LOOK_EVERY))
                    }
                    None => (task.stop.subscribe(), LOOK_EVERY),
                }
            };
            tokio::select! {
                _ = stop.wait_for(|stop| *stop) => return true,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// The report of an upload whose file is the one that the last run sent, so that nothing needs to be sent. None if
    /// there is something to send.
    pub(super) fn report_of_sent_file(&self, id: u64) -> Option<TransferReport> {
        let is_sent = {
            let mut tasks = lock(&self.tasks);
            let task = tasks.get_mut(&id).filter(|task| task.recurs())?;
            // A folder says nothing of its files.
            if task.saved.order.verb != TransferVerb::Put || task.saved.order.mirror.is_some() {
                return None;
            }
            task.sent = task.saved.order.file.as_deref().and_then(FileStamp::of);
            let recurrence = task.saved.recurrence.as_ref();
            let sent = task.sent;
            recurrence
                .is_some_and(|recurrence| sent.is_some_and(|stamp| recurrence.has_sent(stamp)))
        };
        if !is_sent {
            return None;
        }
        let mut report = self.report_of(id, &TransferFailure::error(""));
        (report.exit, report.text) = (TransferExit::Done as u8, None);
        report.unchanged = true;
        report.deadline_met = report.deadline_s.map(|left| left > 0.0);
        Some(report)
    }

    /// Begins a run of a recurring transfer now, although its time has not come.
    ///
    /// # Errors
    /// It does not recur, or a run is under way.
    pub(super) fn run_now(&self, id: u64) -> Result<(), TransferFailure> {
        let mut tasks = lock(&self.tasks);
        let task = tasks
            .get_mut(&id)
            .filter(|task| task.state_name() == "scheduled");
        let recurs = task.and_then(|task| {
            let (_, lead) = task.saved.order.recurrence().ok().flatten()?;
            Some((task, lead))
        });
        let Some((task, lead)) = recurs else {
            let text = format!("transfer {id} has not ended");
            return Err(TransferFailure::error(text));
        };
        let Some(recurrence) = &mut task.saved.recurrence else {
            unreachable!("it recurs");
        };
        let run = RecurringRun {
            slot: recurrence.progress.handled,
            due: DueTime::within(lead).at(),
        };
        task.begin_recurring_run(run, 0);
        save(id, task);
        // It waits for its time; the next step finds the run.
        task.request_stop();
        Ok(())
    }

    /// The time until the first run of a recurring transfer is to begin; none if there is none.
    pub(super) fn next_recurring_run(&self) -> Option<Duration> {
        let starts = |task: &TransferTask| {
            let is_waiting = task.running && task.state_name() == "scheduled";
            let starts = task.event["starts"].as_str().filter(|_| is_waiting)?;
            starts.parse::<Timestamp>().ok()
        };
        let first = lock(&self.tasks).values().filter_map(starts).min()?;
        let left = first.duration_since(Timestamp::now());
        Some(Duration::try_from(left).unwrap_or_default())
    }
}

fn save(id: u64, task: &TransferTask) {
    if let Err(error) = queue::save(id, &task.saved) {
        tracing::warn!(id, %error, "cannot save when a transfer recurs");
    }
}
