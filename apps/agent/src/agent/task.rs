//! One transfer of the agent's, from its order to its end, through pauses and tries.
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
//! To pause is to stop as Ctrl-C does: the part and the flow at the proxy stay, and go on.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use d2tp_links::{CostClass, Link};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::hindsight::Hindsight;
use super::queue::{self, Kept, Record, Wish};
use super::{Agent, lock};
use crate::dispatcher::Direction;
use crate::errand::{Errand, Purpose, Tuning};
use crate::fetch::clock::Moment;
use crate::fetch::jobs::{Asked, Memory};
use crate::fetch::landing::Landing;
use crate::fetch::mode::Mode;
use crate::fetch::outcome::{AGAIN_ALONE, Exit, Failure, Reason};
use crate::fetch::report::{Event, Observer, Report};
use crate::fetch::transfer::Setting;
use crate::order::Verb;
use crate::terms::Terms;
use d2tp_sched::CostPolicy;

/// The first wait before what may pass is tried again; it doubles.
const AGAIN_FIRST: Duration = Duration::from_secs(30); // a guess
/// The longest.
const AGAIN_MAX: Duration = Duration::from_secs(600); // a guess

/// Payload that was granted before the policy was changed may still come for so long.
pub(super) const GRANTED_BEFORE: Duration = Duration::from_secs(3); // a second of grants, an epoch, a round trip

/// A transfer as the agent holds it.
pub(super) struct Task {
    pub(super) asked: Asked,
    pub(super) kept: Kept,
    /// The last event, completed.
    pub(super) event: Value,
    /// What the last attempt ended with.
    last: Option<Report>,
    memory: Memory,
    /// Links that cost carried so much, in earlier runs and in this one.
    metered_before: u64,
    metered: u64,
    /// What links carried in this run, as far as it was counted.
    counted: BTreeMap<String, u64>,
    terms: watch::Sender<Terms>,
    changed_at: Moment,
    stop: watch::Sender<bool>,
    pub(super) running: bool,
    /// It will hardly be in time, and that was said.
    is_hardly: bool,
}

impl Task {
    pub(super) fn new(record: Record) -> Task {
        let metered = record.event["metered_bytes"].as_u64().unwrap_or(0);
        Task {
            asked: record.asked,
            kept: record.kept,
            memory: Memory::of(&record.event),
            event: record.event,
            last: None,
            metered_before: metered,
            metered,
            counted: BTreeMap::new(),
            terms: watch::channel(Terms::default()).0,
            changed_at: Moment::now(),
            stop: watch::channel(false).0,
            running: false,
            is_hardly: false,
        }
    }

    /// How it stands, in a word.
    pub(super) fn standing(&self) -> &'static str {
        match self.event["event"].as_str() {
            Some("done") => "done",
            Some("error") if self.event["exit"] == Exit::Cancelled as u8 => "cancelled",
            Some("error") => "failed",
            Some("paused") => "paused",
            Some("waiting") => "waiting",
            Some("begun" | "progress" | "switch") => "running",
            _ => "queued",
        }
    }

    /// What people call it.
    pub(super) fn name(&self) -> String {
        let file = self.asked.file.file_name();
        file.map_or_else(
            || self.asked.url.clone(),
            |name| name.to_string_lossy().into_owned(),
        )
    }

    /// It will not go on by itself.
    pub(super) fn has_ended(&self) -> bool {
        matches!(self.standing(), "done" | "failed" | "cancelled")
    }

    /// Has it stop; what becomes of it says its wish.
    pub(super) fn halt(&self) {
        self.stop.send_replace(true);
    }

    /// Goes by what is kept of it now.
    pub(super) fn adopt(&mut self) -> Result<(), Failure> {
        let terms = self.kept.terms(self.metered_before)?;
        self.changed_at = Moment::now();
        self.terms.send_replace(terms);
        Ok(())
    }

    /// Has it judged in hindsight, as far as it is known what there is to carry.
    fn put_on_paper(
        &self,
        id: u64,
        direction: Direction,
        event: &Event,
        hindsight: &mut Hindsight,
    ) {
        let terms = self.terms.borrow();
        match event {
            _ if !matches!(terms.policy, CostPolicy::FreeFirst | CostPolicy::Balanced) => {
                hindsight.drops(id);
            }
            Event::Progress {
                bytes,
                length: Some(length),
                ..
            } => {
                let left = terms.left();
                if left == Some(Duration::ZERO) {
                    return; // it was judged
                }
                let due = left.map(|left| Moment::now().after(left));
                let came: u64 = self.counted.values().sum();
                hindsight.takes(id, direction, due, length.saturating_sub(*bytes) + came);
            }
            Event::Done(_) => hindsight.ended(id, None),
            Event::Error(_) => hindsight.ended(id, Some(self.counted.values().sum())),
            _ => {}
        }
    }

    /// Adds up what links carried since the last time: by which device, at what cost.
    fn count(
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

/// Whether what ended a run may be otherwise later.
fn may_pass(report: &Report) -> bool {
    matches!(
        report.reason,
        Some(Reason::OriginWait | Reason::ProxyUnreachable | Reason::PathTooSlow)
    )
}

/// Hears a transfer for the agent.
struct Ear {
    agent: Arc<Agent>,
    id: u64,
}

impl Observer for Ear {
    fn tell(&mut self, event: &Event) {
        self.agent.hear(self.id, event);
    }
}

impl Agent {
    /// Takes in what a transfer tells.
    fn hear(&self, id: u64, event: &Event) {
        let links = self.roads.links().borrow().clone();
        let mut tasks = lock(&self.tasks);
        let Some(task) = tasks.get_mut(&id) else {
            return;
        };
        let (carried, repeated) = match event {
            Event::Progress { bytes_by_link, .. } => (Some(bytes_by_link), 0),
            Event::Done(report) | Event::Error(report) => {
                (Some(&report.bytes_by_link), report.duplicate_bytes)
            }
            _ => (None, 0),
        };
        let down = task.kept.order.verb == Verb::Get;
        let direction = match down {
            true => Direction::Down,
            false => Direction::Up,
        };
        let mut meter = lock(&self.meter);
        if let Some(carried) = carried {
            let forbidden = task.terms.borrow().policy == CostPolicy::FreeOnly
                && Moment::now().since(task.changed_at) > GRANTED_BEFORE;
            let more = task.count(&links, carried);
            let capped = self.spend(&more);
            let mut hindsight = lock(&self.hindsight);
            task.put_on_paper(id, direction, event, &mut hindsight);
            for (device, class, bytes) in more {
                hindsight.carried(id, direction, class != CostClass::Free, bytes);
                meter.carried(class, down, bytes);
                // What was on its way when a cap was reached is no leak.
                let roamed = class == CostClass::Roaming && !capped.contains(&device);
                if roamed || (class == CostClass::Metered && forbidden) {
                    meter.leaked(bytes);
                }
            }
            meter.repeated(repeated);
        }
        if let Event::Switch {
            silence_ms: Some(ms),
            ..
        } = event
        {
            meter.switched(ms / 1e3);
        }
        drop(meter);
        if let Event::Done(report) | Event::Error(report) = event {
            // What becomes of it is decided when it has let go of everything.
            task.last = Some(report.clone());
            return;
        }
        if let Event::Progress {
            promise: Some(promise),
            ..
        } = event
        {
            // Said once for each time it becomes so.
            if promise.infeasible && !task.is_hardly && task.kept.patient {
                self.notices.hardly(id, &task.name(), &promise.in_words());
            }
            task.is_hardly = promise.infeasible;
        }
        let value = serde_json::to_value(event).unwrap_or_default();
        Agent::note(&self.news, id, task, value);
    }

    /// Writes an event down and tells it.
    fn note(news: &super::News, id: u64, task: &mut Task, event: Value) {
        let passing = event["event"] == "note";
        let mut event = match passing {
            true => event,
            false => task.memory.complete(event),
        };
        if let Some(fields) = event.as_object_mut() {
            fields.insert("id".to_owned(), id.into());
            fields.insert("metered_bytes".to_owned(), task.metered.into());
        }
        if !passing {
            task.event = event.clone();
            if let Err(error) = queue::note(id, &event) {
                tracing::warn!(id, %error, "the state cannot be written down");
            }
        }
        // Nobody may be listening.
        let _ = news.send((id, event));
    }

    /// Tells an event of the agent's own.
    pub(super) fn tell(&self, id: u64, event: Value) {
        if let Some(task) = lock(&self.tasks).get_mut(&id) {
            Agent::note(&self.news, id, task, event);
        }
    }

    /// Begins with a transfer, or goes on with it.
    pub(super) fn begin(self: &Arc<Agent>, id: u64) {
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
        let mut pause = AGAIN_FIRST;
        loop {
            let begun = Moment::now();
            let report = self.attempt(id).await;
            let report = match report {
                Ok(report) => report,
                Err(failure) => self.report_of(id, &failure),
            };
            if Moment::now().since(begun) > AGAIN_MAX {
                pause = AGAIN_FIRST;
            }
            if !self.is_tried_again(id, &report) {
                let report = self.at_the_deadline(id, report);
                self.conclude(id, report);
                return;
            }
            if self.wait_until_again(id, &report, pause).await {
                let stopped = Failure::of(Exit::Cancelled, Reason::UserPaused, "stopped");
                let report = self.report_of(id, &stopped);
                self.conclude(id, report);
                return;
            }
            pause = (pause * 2).min(AGAIN_MAX);
        }
    }

    /// One run of a transfer; what it ended with.
    async fn attempt(self: &Arc<Agent>, id: u64) -> Result<Report, Failure> {
        let (order, terms, orders, stopped) = {
            let mut tasks = lock(&self.tasks);
            let task = tasks
                .get_mut(&id)
                .ok_or_else(|| Failure::error("it is gone"))?;
            task.metered_before = task.metered;
            task.counted.clear();
            task.last = None;
            task.adopt()?;
            let mut orders = task.terms.subscribe();
            let terms = orders.borrow_and_update().clone();
            (
                task.kept.order.clone(),
                terms,
                orders,
                task.stop.subscribe(),
            )
        };
        let landing = queue::landing(id);
        if let Some(landed) = landing.as_deref().and_then(Landing::happened) {
            if let Some(note) = &landed.note {
                let _ = std::fs::remove_file(note);
            }
            return Ok(self.report_landed(id, &terms, &landed));
        }
        let job = order.job_on(terms)?;
        let mut errand = Errand::prepare(&order, job, false)?;
        let parcel = errand.pack(stopped.clone(), |_, _| ()).await?;
        let links = self.roads.links();
        let way = errand.way(&links, &Tuning::default(), Purpose::Carry).await;
        let setting = Setting {
            links,
            stop: stopped,
            dispatcher: self.dispatcher.clone(),
            terms: Some(orders),
            number: id,
            landing,
        };
        let mut ear = Ear {
            agent: self.clone(),
            id,
        };
        way.run(&errand.job, parcel, setting, &mut ear).await;
        let mut tasks = lock(&self.tasks);
        let last = tasks.get_mut(&id).and_then(|task| task.last.take());
        last.ok_or_else(|| Failure::error("it ended without a word"))
    }

    fn report_of(&self, id: u64, failure: &Failure) -> Report {
        let tasks = lock(&self.tasks);
        let (url, file, verb) = tasks.get(&id).map_or_else(Default::default, |task| {
            let file = task.asked.file.display().to_string();
            (task.asked.url.clone(), file, task.kept.order.verb.word())
        });
        let terms = tasks.get(&id).and_then(|task| task.kept.terms(0).ok());
        Report::failed(
            verb,
            (url, file),
            Mode::Direct,
            &terms.unwrap_or_default(),
            failure,
        )
    }

    /// The report of one that became whole as an earlier agent ended without a word.
    fn report_landed(&self, id: u64, terms: &Terms, landed: &Landing) -> Report {
        let unsaid = Failure::error("");
        let mut report = self.report_of(id, &unsaid);
        let exit = match landed.late {
            true => Exit::DeadlineMissed,
            false => Exit::Done,
        };
        (report.exit, report.text) = (exit as u8, None);
        report.file = landed.file.display().to_string();
        (report.bytes, report.sha256) = (landed.bytes, landed.sha256.clone());
        report.duration_s = landed.duration_s;
        report.deadline_met = terms.due.map(|_| !landed.late);
        report
    }

    /// Whether a run that failed is followed by another.
    fn is_tried_again(&self, id: u64, report: &Report) -> bool {
        let tasks = lock(&self.tasks);
        let Some(task) = tasks.get(&id) else {
            return false;
        };
        let in_time = task
            .terms
            .borrow()
            .left()
            .is_none_or(|left| !left.is_zero());
        report.exit == Exit::Error as u8
            && may_pass(report)
            && in_time
            && task.kept.patient
            && task.kept.wish == Wish::Run
            && !*task.stop.borrow()
    }

    /// What was tried until the deadline has missed it.
    fn at_the_deadline(&self, id: u64, mut report: Report) -> Report {
        let tasks = lock(&self.tasks);
        let is_over = |task: &Task| {
            let left = task.terms.borrow().left();
            task.kept.patient && left == Some(Duration::ZERO)
        };
        if report.exit == Exit::Error as u8
            && may_pass(&report)
            && tasks.get(&id).is_some_and(is_over)
        {
            report.exit = Exit::DeadlineMissed as u8;
        }
        report
    }

    /// Waits before the next run; true if it was stopped meanwhile.
    async fn wait_until_again(&self, id: u64, report: &Report, pause: Duration) -> bool {
        let (mut stop, left) = {
            let tasks = lock(&self.tasks);
            let Some(task) = tasks.get(&id) else {
                return true;
            };
            (task.stop.subscribe(), task.terms.borrow().left())
        };
        let pause = left.map_or(pause, |left| pause.min(left));
        let next = jiff::Zoned::now()
            .saturating_add(jiff::SignedDuration::try_from(pause).unwrap_or_default());
        self.tell(
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

    /// Says what became of a transfer that let go of everything.
    fn conclude(self: &Arc<Agent>, id: u64, mut report: Report) {
        // What goes on here is not begun by another command.
        let again = format!("cedos retry {id} continues");
        report.text = (report.text).map(|text| text.replace(AGAIN_ALONE, &again));
        let mut tasks = lock(&self.tasks);
        let Some(task) = tasks.get_mut(&id) else {
            return;
        };
        task.running = false;
        let stopped = report.exit == Exit::Cancelled as u8;
        let whole = report.text.is_none();
        let event = match (stopped, task.kept.wish) {
            (true, Wish::Pause) => json!({"event": "paused", "reason": Reason::UserPaused}),
            // The agent ends, or it was resumed while it was still letting go.
            (true, Wish::Run) => json!({"event": "queued"}),
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
                if task.kept.patient && !stopped {
                    self.notices.ended(id, &task.name(), report.text.as_deref());
                }
                let event = match whole {
                    true => Event::Done(report),
                    false => Event::Error(report),
                };
                serde_json::to_value(event).unwrap_or_default()
            }
        };
        Agent::note(&self.news, id, task, event);
        let again = stopped && task.kept.wish == Wish::Run && !self.is_ending();
        if whole {
            queue::forget(id);
        }
        lock(&self.ledger).save();
        drop(tasks);
        if again {
            self.begin(id);
        }
    }
}
