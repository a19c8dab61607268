//! One transfer of the agent, from its order to its end, with pauses and retries.
//!
//! ```text
//!            ┌──────────── resume, retry ─────────────┐
//!            ▼                                        │
//!  queued ─ run ─┬─ whole ─▶ done                     │
//!                ├─ pause ──▶ paused ─────────────────┤
//!                ├─ cancel ─▶ cancelled ──────────────┤
//!                ├─ the agent ends ─▶ queued          │
//!                ├─ what may pass, and there is time: wait, run again
//!                └─ else ───▶ failed ─────────────────┘
//! ```
//!
//! One that recurs is not done or failed after a run, but waits for the next one: see `recurring`.
//!
//! A pause stops a transfer like Ctrl-C: the part and the flow at the proxy stay, and are continued
//! later.

use std::sync::Arc;
use std::time::Duration;

use d2tp_links::CostClass;
use serde_json::{Value, json};

use super::queue::{self, TransferIntent};
use super::state::{Agent, lock};
use super::transfer_task::{GRANTED_BEFORE, TransferTask};
use crate::fetch::boot_clock::BootInstant;
use crate::fetch::mode::FetchMode;
use crate::fetch::outcome::{AGAIN_ALONE, TransferExit, TransferFailure, TransferReason};
use crate::fetch::pending_rename::PendingRename;
use crate::fetch::report::{TransferEvent, TransferObserver, TransferReport};
use crate::fetch::transfer::TransferContext;
use crate::order::TransferVerb;
use crate::prepared_transfer::{PreparedTransfer, TransportPurpose};
use crate::terms::TransferTerms;
use d2tp_sched::CostPolicy;
use d2tp_sched::TransferDirection;

/// The first delay before a transient failure is retried; it doubles.
const AGAIN_FIRST: Duration = Duration::from_secs(30); // a guess
/// The longest delay before a retry.
const AGAIN_MAX: Duration = Duration::from_secs(600); // a guess

/// Whether the cause of a failure is transient.
fn may_pass(report: &TransferReport) -> bool {
    matches!(
        report.reason,
        Some(
            TransferReason::OriginWait
                | TransferReason::ProxyUnreachable
                // The operator may admit the device meanwhile.
                | TransferReason::ProxyRefused
                | TransferReason::NetworkBlocked
                | TransferReason::PathTooSlow
        )
    )
}

/// The agent's observer of a transfer.
struct AgentObserver {
    agent: Arc<Agent>,
    id: u64,
}

impl TransferObserver for AgentObserver {
    fn on_event(&mut self, event: &TransferEvent) {
        self.agent.hear(self.id, event);
    }
}

impl Agent {
    /// Handles an event of a transfer.
    pub(super) fn hear(&self, id: u64, event: &TransferEvent) {
        let links = self.link_view.links().borrow().clone();
        let mut tasks = lock(&self.tasks);
        let Some(task) = tasks.get_mut(&id) else {
            return;
        };
        let (carried, repeated) = match event {
            TransferEvent::Progress { bytes_by_link, .. } => (Some(bytes_by_link), 0),
            TransferEvent::Done(report) | TransferEvent::Error(report) => {
                (Some(&report.bytes_by_link), report.duplicate_bytes)
            }
            _ => (None, 0),
        };
        let down = task.saved.order.verb == TransferVerb::Get;
        let direction = match down {
            true => TransferDirection::Down,
            false => TransferDirection::Up,
        };
        let mut meter = lock(&self.meter);
        if let Some(carried) = carried {
            let forbidden = task.terms.borrow().policy == CostPolicy::FreeOnly
                && BootInstant::now().since(task.changed_at) > GRANTED_BEFORE;
            let more = task.count(&links, carried);
            let capped = self.record_spending(&more);
            let mut hindsight = lock(&self.regret_meter);
            task.put_on_paper(id, direction, event, &mut hindsight);
            for (device, class, bytes) in more {
                hindsight.record_carried(id, direction, class != CostClass::Free, bytes);
                meter.carried(class, down, bytes);
                // What was on its way when a cap was reached is no leak.
                let roamed = class == CostClass::Roaming && !capped.contains(&device);
                if roamed || (class == CostClass::Metered && forbidden) {
                    meter.leaked(bytes);
                }
            }
            meter.repeated(repeated);
        }
        if let TransferEvent::Switch {
            silence_ms: Some(ms),
            ..
        } = event
        {
            meter.switched(ms / 1e3);
        }
        drop(meter);
        if let TransferEvent::Done(report) | TransferEvent::Error(report) = event {
            // What becomes of it is decided when it has let go of everything.
            task.last = Some(report.clone());
            return;
        }
        if let TransferEvent::Progress {
            promise: Some(promise),
            ..
        } = event
        {
            // Said once for each time it becomes so.
            if promise.infeasible && !task.is_hardly && task.saved.patient {
                self.notifier
                    .likely_late(id, &task.name(), &promise.describe());
            }
            task.is_hardly = promise.infeasible;
        }
        let value = serde_json::to_value(event).unwrap_or_default();
        Agent::note(&self.events, id, task, value);
    }

    /// Saves an event and sends it to subscribers.
    pub(super) fn note(
        news: &super::state::AgentEventSender,
        id: u64,
        task: &mut TransferTask,
        event: Value,
    ) {
        let passing = event["event"] == "note";
        let event = match passing {
            true => event,
            false => task.memory.complete(event),
        };
        let event = Agent::tell(news, id, task, event);
        if !passing {
            if let Err(error) = queue::save_event(id, &event) {
                tracing::warn!(id, %error, "cannot save the state");
            }
            task.event = event;
        }
    }

    /// Sends an event to subscribers. Returns it with what belongs to every event.
    fn tell(
        news: &super::state::AgentEventSender,
        id: u64,
        task: &TransferTask,
        mut event: Value,
    ) -> Value {
        if let Some(fields) = event.as_object_mut() {
            fields.insert("id".to_owned(), id.into());
            fields.insert("metered_bytes".to_owned(), task.metered.into());
            let carried = serde_json::to_value(task.carried_by_link());
            fields.insert("carried_by_link".to_owned(), carried.unwrap_or_default());
        }
        // Nobody may be listening.
        let _ = news.send((id, event.clone()));
        event
    }

    /// Sends an event that says nothing of the transfer's state to those who follow it.
    pub(super) fn tell_followers(&self, id: u64, event: Value) {
        if let Some(task) = lock(&self.tasks).get(&id) {
            Agent::tell(&self.events, id, task, event);
        }
    }

    /// Sends an event of the agent's own.
    pub(super) fn send_event(&self, id: u64, event: Value) {
        if let Some(task) = lock(&self.tasks).get_mut(&id) {
            Agent::note(&self.events, id, task, event);
        }
    }

    /// Starts a transfer, or resumes it.
    pub(super) fn start(self: &Arc<Agent>, id: u64) {
        {
            let mut tasks = lock(&self.tasks);
            let Some(task) = tasks.get_mut(&id).filter(|task| !task.running) else {
                return;
            };
            task.running = true;
            task.stop.send_replace(false);
        }
        tokio::task::spawn_local(self.clone().carry_out(id));
    }

    async fn carry_out(self: Arc<Agent>, id: u64) {
        if self.wait_for_run(id).await {
            return self.conclude_stopped(id);
        }
        let mut pause = AGAIN_FIRST;
        loop {
            let begun = BootInstant::now();
            let report = self.attempt(id).await;
            let report = match report {
                Ok(report) => report,
                Err(failure) => self.report_of(id, &failure),
            };
            if BootInstant::now().since(begun) > AGAIN_MAX {
                pause = AGAIN_FIRST;
            }
            if !self.is_tried_again(id, &report) {
                let report = self.at_the_deadline(id, report);
                self.conclude(id, report);
                return;
            }
            if self.wait_until_again(id, &report, pause).await {
                return self.conclude_stopped(id);
            }
            pause = (pause * 2).min(AGAIN_MAX);
        }
    }

    /// Reports that a transfer of which nothing moves was stopped.
    fn conclude_stopped(self: &Arc<Agent>, id: u64) {
        let stopped = TransferFailure::of(
            TransferExit::Cancelled,
            TransferReason::UserPaused,
            "stopped",
        );
        let report = self.report_of(id, &stopped);
        self.conclude(id, report);
    }

    /// Runs a transfer once. Returns how the run ended.
    async fn attempt(self: &Arc<Agent>, id: u64) -> Result<TransferReport, TransferFailure> {
        let (order, terms, orders, stopped, unless) = {
            let mut tasks = lock(&self.tasks);
            let task = tasks
                .get_mut(&id)
                .ok_or_else(|| TransferFailure::error("it is gone"))?;
            task.begin_run();
            task.apply_saved()?;
            let mut orders = task.terms.subscribe();
            let terms = orders.borrow_and_update().clone();
            (
                task.saved.order.clone(),
                terms,
                orders,
                task.stop.subscribe(),
                task.held_version(),
            )
        };
        if order.mirror.is_some() {
            self.mirror(id, &order, orders, stopped).await?;
            return self.last_report(id);
        }
        let landing = queue::pending_rename_path(id);
        if let Some(landed) = landing.as_deref().and_then(PendingRename::read_completed) {
            if let Some(note) = &landed.note {
                let _ = std::fs::remove_file(note);
            }
            return Ok(self.report_landed(id, &terms, &landed));
        }
        if let Some(report) = self.report_of_sent_file(id) {
            return Ok(report);
        }
        let mut job = order.job_on(terms)?;
        job.unless = unless;
        let mut prepared = PreparedTransfer::prepare(&order, job, false)?;
        let upload_body = prepared
            .open_upload_body(stopped.clone(), |_, _| ())
            .await?;
        let links = self.link_view.links();
        let transport = prepared
            .open_transport(&links, &self.tuning(), TransportPurpose::Carry)
            .await;
        let setting = TransferContext {
            links,
            stop: stopped,
            scheduler: self.scheduler.clone(),
            terms: Some(orders),
            id,
            pending_rename: landing,
            rate_limiter: self.rate_limiters.limiter_of(&order),
            following: None,
        };
        let mut observer = AgentObserver {
            agent: self.clone(),
            id,
        };
        transport
            .run(&prepared.job, upload_body, setting, &mut observer)
            .await;
        self.last_report(id)
    }

    /// Takes the report with which a run ended.
    fn last_report(&self, id: u64) -> Result<TransferReport, TransferFailure> {
        let mut tasks = lock(&self.tasks);
        let last = tasks.get_mut(&id).and_then(|task| task.last.take());
        last.ok_or_else(|| TransferFailure::error("it ended without a message"))
    }

    pub(super) fn report_of(&self, id: u64, failure: &TransferFailure) -> TransferReport {
        let tasks = lock(&self.tasks);
        let (url, file, verb) = tasks.get(&id).map_or_else(Default::default, |task| {
            let file = task.request.file.display().to_string();
            (
                task.request.url.clone(),
                file,
                task.saved.order.verb.as_str(),
            )
        });
        let terms = tasks.get(&id).and_then(|task| task.saved.terms(0).ok());
        TransferReport::failed(
            verb,
            (url, file),
            FetchMode::Direct,
            &terms.unwrap_or_default(),
            failure,
        )
    }

    /// The report of a transfer that was completed just as an earlier agent was killed.
    fn report_landed(
        &self,
        id: u64,
        terms: &TransferTerms,
        landed: &PendingRename,
    ) -> TransferReport {
        let unsaid = TransferFailure::error("");
        let mut report = self.report_of(id, &unsaid);
        let exit = match landed.late {
            true => TransferExit::DeadlineMissed,
            false => TransferExit::Done,
        };
        (report.exit, report.text) = (exit as u8, None);
        report.file = landed.file.display().to_string();
        (report.bytes, report.sha256) = (landed.bytes, landed.sha256.clone());
        report.duration_s = landed.duration_s;
        report.deadline_met = terms.due.map(|_| !landed.late);
        report
    }

    /// Whether a failed run is retried.
    fn is_tried_again(&self, id: u64, report: &TransferReport) -> bool {
        let tasks = lock(&self.tasks);
        let Some(task) = tasks.get(&id) else {
            return false;
        };
        let in_time = task
            .terms
            .borrow()
            .time_left()
            .is_none_or(|left| !left.is_zero());
        report.exit == TransferExit::Error as u8
            && may_pass(report)
            && in_time
            && task.saved.patient
            && task.saved.wish == TransferIntent::Run
            && !*task.stop.borrow()
    }

    /// The report of a transfer that was retried until its deadline.
    fn at_the_deadline(&self, id: u64, mut report: TransferReport) -> TransferReport {
        let tasks = lock(&self.tasks);
        let is_over = |task: &TransferTask| {
            let left = task.terms.borrow().time_left();
            task.saved.patient && left == Some(Duration::ZERO)
        };
        if report.exit == TransferExit::Error as u8
            && may_pass(&report)
            && tasks.get(&id).is_some_and(is_over)
        {
            report.exit = TransferExit::DeadlineMissed as u8;
        }
        report
    }

    /// Waits before the next run. True if the transfer was stopped meanwhile.
    async fn wait_until_again(&self, id: u64, report: &TransferReport, pause: Duration) -> bool {
        let (mut stop, left) = {
            let tasks = lock(&self.tasks);
            let Some(task) = tasks.get(&id) else {
                return true;
            };
            (task.stop.subscribe(), task.terms.borrow().time_left())
        };
        let pause = left.map_or(pause, |left| pause.min(left));
        let next = jiff::Zoned::now()
            .saturating_add(jiff::SignedDuration::try_from(pause).unwrap_or_default());
        self.send_event(
            id,
            json!({
                "event": "waiting",
                "t_s": 0.0,
                "reason": report.reason,
                "why": report.text,
                "unblocks": format!("the next try at {}", next.strftime("%H:%M:%S")),
            }),
        );
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => true,
            () = tokio::time::sleep(pause) => {
                lock(&self.meter).woke("retry");
                false
            }
        }
    }

    /// Reports the end of a transfer that has released everything.
    fn conclude(self: &Arc<Agent>, id: u64, mut report: TransferReport) {
        // What goes on here is not begun by another command.
        let again = format!("cedos retry {id} resumes");
        report.text = (report.text).map(|text| text.replace(AGAIN_ALONE, &again));
        let mut tasks = lock(&self.tasks);
        let Some(task) = tasks.get_mut(&id) else {
            return;
        };
        task.running = false;
        let stopped = report.exit == TransferExit::Cancelled as u8;
        let whole = report.text.is_none();
        let event = match (stopped, task.saved.wish) {
            (true, TransferIntent::Pause) => {
                json!({"event": "paused", "reason": TransferReason::UserPaused})
            }
            (true, TransferIntent::Run) if task.state_name() == "scheduled" => task.event.clone(),
            // The agent ends, or it was resumed while it was still letting go.
            (true, TransferIntent::Run) => json!({"event": "queued"}),
            _ => {
                let how = match (whole, stopped) {
                    (true, _) => "done",
                    (false, true) => "cancelled",
                    (false, false) => "failed",
                };
                let slack = match (whole, report.deadline_s) {
                    (true, Some(deadline_s)) => Some(deadline_s - report.duration_s),
                    _ => None,
                };
                let met = report.deadline_met.filter(|_| !stopped);
                lock(&self.meter).ended(how, met, slack);
                if task.recurs() && !stopped {
                    task.end_recurring_run(&report);
                }
                if task.saved.patient && !stopped && !report.unchanged {
                    self.notifier
                        .ended(id, &task.name(), report.text.as_deref());
                }
                let event = match whole {
                    true => TransferEvent::Done(report),
                    false => TransferEvent::Error(report),
                };
                serde_json::to_value(event).unwrap_or_default()
            }
        };
        let runs_again = task.recurs() && !stopped;
        if runs_again {
            if let Err(error) = queue::save(id, &task.saved) {
                tracing::warn!(id, %error, "cannot save when a transfer recurs");
            }
            queue::remove_pending_rename(id);
            // Not the state of the transfer: that is when it runs next.
            Agent::tell(&self.events, id, task, event);
        } else {
            Agent::note(&self.events, id, task, event);
        }
        let goes_on = task.saved.wish == TransferIntent::Run && !self.is_ending();
        let again = goes_on && (stopped || runs_again);
        if whole && !runs_again {
            queue::remove_order(id);
        }
        lock(&self.ledger).save();
        drop(tasks);
        if again {
            self.start(id);
        }
    }
}
