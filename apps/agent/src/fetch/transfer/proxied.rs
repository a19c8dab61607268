//! A transfer through a proxy: one flow that is on every free link, and on others when it must.
//!
//! ```text
//!  every second, and at every change of a link:
//!     links, bytes, what is left ─▶ scheduler ─▶ may this flow spend on links that cost?
//!                                        ├─ others go first: the sender holds it back
//!                                        └─ nothing may be used: say why, the flow sleeps
//!  the flow is forgotten, reset, or its session over ─▶ a new one, with Range from what we hold
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::time::Duration;

use d2tp_driver::{PathSwitchKind, SessionEvent};
use d2tp_links::LinkKind;
use d2tp_sched::{
    CostPolicy, DeadlineFallback, FlowDemand, Grant, LinkCandidate, LinkChoice, LinkClass,
    LinkWaitReason, format_duration,
};
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval};

use super::super::boot_clock::BootInstant;
use super::super::dial::{Dial, EgressLink, FetchFault};
use super::super::exchange::{ContentPart, FetchResponse, GetRequest, HEAD_MAX, exchange};
use super::super::mode::FetchMode;
use super::super::outcome::{TransferExit, TransferFailure, TransferReason};
use super::super::proxy::{FlowLoss, ProxyClient};
use super::super::report::{NO_LINK, NO_LINK_WHY, TransferEvent};
use super::{AttemptEnd, BACKOFF_FIRST, ClientDecision, ClientReport, EPOCH, TransferRun};

/// How long the proxy may be silent before we say so.
const UNREACHABLE_AFTER: Duration = Duration::from_secs(4); // five handshake tries on a fast link

/// How long a link must answer before its rate says something: a new path is still speeding up.
const RATE_AFTER: Duration = Duration::from_millis(1500); // a guess

/// Longest wait before another flow is tried at a proxy that ended the last one.
const AGAIN_MAX: Duration = Duration::from_secs(5); // a guess

/// When a flow that may be late loses its deadline, so that neither end drops it.
const LIFT_DEADLINE: Duration = Duration::from_secs(3); // a guess: more than a slow link's delay

/// How long the path over links that cost is kept after they were paid for: the next moment may need
/// it again.
const READY_FOR: Duration = Duration::from_secs(10); // a guess: as long as a radio stays awake

/// A deadline that moves by more was moved by somebody who set the clock.
const CLOCK_SET: Duration = Duration::from_secs(2); // a guess: more than a clock is slewed in an hour

/// A grant as the session's log has it.
fn grant_word(grant: Grant) -> &'static str {
    match grant {
        Grant::None => "no",
        Grant::Path => "ready",
        Grant::Probe { .. } => "probe",
        Grant::Spend { .. } => "spend",
    }
}

/// What is known of the session while a download steers it.
#[derive(Default)]
pub(super) struct ProxyTransferState {
    pub(super) events: Option<mpsc::UnboundedReceiver<SessionEvent>>,
    /// What the driver was told that links that cost may carry.
    paid: Option<Grant>,
    /// There are other terms: the driver must be told again.
    told_again: bool,
    /// When links that cost were paid for last.
    spent_at: Option<BootInstant>,
    /// What they had carried when the driver began to count.
    spent_before: u64,
    /// Whether other transfers go first.
    behind: bool,
    /// Since when a link answers.
    answering_since: BTreeMap<String, BootInstant>,
    /// What metered links carried when they were last paid for: without payload nothing is measured.
    paid_rates: BTreeMap<String, f64>,
    /// Since when no path answers although one should.
    unanswered_since: Option<BootInstant>,
    /// The proxy answered at least once.
    known: bool,
    /// When the deadline was last told to be.
    due: Option<BootInstant>,
    lifted: bool,
    /// The flow at hand is written down.
    remembered: bool,
    /// The first link on which the proxy answered, and how soon in milliseconds.
    first: Option<(String, u64)>,
    /// Metered links that work and were left because nothing may be spent there.
    left: BTreeSet<String>,
    /// The policy lets no link carry it for now.
    waits: bool,
    /// Since when a tunnel brings nothing although it could.
    quiet_since: Option<BootInstant>,
    /// When the last byte came, while one could have.
    pub(super) last_byte: Option<BootInstant>,
    /// Since when something that answers may carry it.
    asked_since: Option<BootInstant>,
    last_counts: BTreeMap<String, u64>,
    /// The decision that was logged last, without its figures.
    logged: Option<(String, &'static str)>,
}

impl ProxyTransferState {
    /// How long nothing came although it could have.
    fn quiet(&self, now: BootInstant) -> Option<Duration> {
        Some(now.since(self.last_byte?).min(now.since(self.asked_since?)))
    }
}

impl<D: Dial> TransferRun<'_, D> {
    /// What metered links may still carry, less what they were paid for besides the object.
    pub(super) fn metered_bytes_to_spend(&self) -> Option<u64> {
        Some((self.metered_bytes_worth_using()?).saturating_sub(self.paid_besides))
    }
}

impl TransferRun<'_, ProxyClient> {
    /// Receives or sends until the object is whole, or a failure ends it.
    pub(super) async fn exchange_proxied(&mut self) -> Result<(), TransferFailure> {
        let may_claim = self.dial.mode() == FetchMode::ProxyFetch;
        if let Some(flow) = self.sink.note.flow.as_ref().filter(|_| may_claim) {
            self.dial.claim(flow, self.sink.note.durable_bytes);
        }
        let mut outcome = self.exchange_flows().await;
        if outcome.is_ok() {
            // Nobody can be asked for the length any more, if nobody knew it before.
            self.sink.note.length = Some(self.sink.held_bytes());
            // The proxy forgets what it is told has arrived: it must be safe before.
            outcome = self.sink.sync().await;
        }
        self.duplicate_bytes += self.dial.duplicate_bytes();
        match &outcome {
            Ok(()) => {
                self.dial.finish().await;
                self.dial.close().await;
            }
            Err(_) if may_claim && self.sink.note.flow.is_some() => self.dial.detach().await,
            Err(_) => self.dial.close().await,
        }
        outcome
    }

    /// One flow after another, as long as it takes.
    async fn exchange_flows(&mut self) -> Result<(), TransferFailure> {
        if self.sink.held_bytes() > 0 && self.sink.note.length == Some(self.sink.held_bytes()) {
            return Ok(());
        }
        let mut helm = ProxyTransferState::default();
        loop {
            self.check_deadline()?;
            self.check_stop()?;
            match self.dial.connect().await {
                Ok(Some(events)) => {
                    helm = ProxyTransferState {
                        events: Some(events),
                        ..ProxyTransferState::default()
                    };
                    if let Some(trouble) = self.dial.take_persist_error() {
                        let text = format!("this download may not survive a crash: {trouble}");
                        self.note(None, text);
                    }
                }
                Ok(None) => {}
                Err(error) => {
                    let reason = if self.proxied_ways(&mut helm).is_empty() {
                        TransferReason::NoPath
                    } else {
                        TransferReason::ProxyUnreachable
                    };
                    if self.job.now && reason == TransferReason::ProxyUnreachable {
                        let text = format!("{error}; --now does not wait");
                        return Err(TransferFailure::of(TransferExit::Error, reason, text));
                    }
                    self.refuse_to_wait(reason, &error.to_string())?;
                    self.give_up_on_proxy(&helm, &error.to_string())?;
                    let unblocks = "any network | the right --prox address".to_owned();
                    self.wait(reason, error.to_string(), unblocks, EPOCH)
                        .await?;
                    continue;
                }
            }
            self.dial
                .set_time_left(self.time_left().filter(|left| !left.is_zero()));
            helm.lifted = self.time_left().is_none_or(|left| left.is_zero());
            helm.paid = None;
            helm.due = None;
            self.hold_back(false, &mut helm);
            helm.behind = false;
            let parcel = self.outgoing.as_ref().map(|o| o.parcel.clone());
            let outcome = match parcel {
                Some(parcel) => self.attempt_upload(parcel, &mut helm).await,
                None => self.attempt_proxied(&mut helm).await,
            };
            self.receiving = false;
            self.count_links(&mut helm);
            match outcome {
                Ok(AttemptEnd::Whole) => return Ok(()),
                Ok(AttemptEnd::ChooseAgain) => {
                    self.check_stop()?; // that leaves the flow as it is
                    self.dial.drop_flow();
                }
                Err(fault) => self.recover_proxied(fault, &mut helm).await?,
            }
        }
    }

    /// One request in one flow, until its bytes end.
    async fn attempt_proxied(
        &mut self,
        helm: &mut ProxyTransferState,
    ) -> Result<AttemptEnd, FetchFault> {
        let ask = self.ask_whole();
        helm.quiet_since = None;
        let mut epoch = interval(EPOCH);
        epoch.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut answer = match self.claimed_rest() {
            Some(answer) => answer,
            None => {
                self.sink.note.flow = None;
                match self.ask_proxy(helm, &ask, &mut epoch).await? {
                    Some(answer) => answer,
                    None => return Ok(AttemptEnd::ChooseAgain),
                }
            }
        };
        let Some(mut overlap) = self.accept(&answer, &ask)? else {
            return Ok(AttemptEnd::ChooseAgain);
        };
        if self.sink.note.flow.is_none() {
            let from = match answer.part {
                ContentPart::Range { from, .. } => from,
                _ => 0,
            };
            self.sink.note.flow = self.dial.flow_note(from);
            helm.remembered = false;
        }
        self.receiving = true;
        if self.terms.due.is_some() && self.first_promise.is_none() && self.length().is_some() {
            self.update_spending(helm).map_err(FetchFault::Final)?;
            if self.last_link.is_none() {
                self.report_first_byte(helm);
            }
            let used = self.count_links(helm);
            self.tell_size(&used);
        }
        let held = self.sink.held_bytes();
        let mut links = self.links.clone();
        let mut answers = self.dial.watch_answers();
        let mut stop = self.stop.clone();
        let local = self.dial.needs_no_link();
        let (mut epoch_start, mut epoch_bytes) = (BootInstant::now(), 0u64);
        loop {
            tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => return Ok(AttemptEnd::ChooseAgain),
                Ok(()) = links.changed() => self.update_spending(helm).map_err(FetchFault::Final)?,
                () = answers_changed(&mut answers) => self.update_spending(helm).map_err(FetchFault::Final)?,
                event = next_event(&mut helm.events) => self.on_session_event(event, helm).map_err(FetchFault::Final)?,
                _ = epoch.tick() => {
                    let now = BootInstant::now();
                    let seconds = now.since(epoch_start).as_secs_f64().max(1e-3);
                    let used = self.count_links(helm);
                    // What was spent is told before it is asked what may be.
                    self.tell_progress(&used, epoch_bytes as f64 / seconds);
                    self.update_spending(helm).map_err(FetchFault::Final)?;
                    (epoch_start, epoch_bytes) = (now, 0);
                    self.remember(helm).await;
                    self.sink.tick().await.map_err(FetchFault::Final)?;
                    self.check_tunnel(helm, self.job.stall)?;
                }
                data = answer.next() => {
                    let Some(data) = data else { break };
                    let data = data.map_err(|fault| self.flow_cause(fault))?;
                    epoch_bytes += data.len() as u64;
                    if local {
                        *self.bytes_by_link.entry(NO_LINK.into()).or_default() += data.len() as u64;
                    }
                    helm.last_byte = Some(BootInstant::now());
                    helm.quiet_since = None;
                    self.said_waiting = None;
                    if self.last_link.is_none() {
                        self.report_first_byte(helm);
                    }
                    if !self.take_in(&data, &mut overlap)? {
                        return Ok(AttemptEnd::ChooseAgain);
                    }
                    let whole = self.sink.note.length == Some(self.sink.held_bytes());
                    // All may be held and only now be known to be all: what is compared must come.
                    if whole && overlap.is_empty() {
                        break;
                    }
                }
            }
        }
        if !overlap.is_empty() {
            self.distrust = Some("the object is shorter than what was received before".into());
            return Ok(AttemptEnd::ChooseAgain);
        }
        match self.step_if_whole(true) {
            AttemptEnd::ChooseAgain if self.sink.held_bytes() == held => Err(FetchFault::Origin {
                text: "the proxy answered with nothing new".into(),
                retry_after: None,
            }),
            step => Ok(step),
        }
    }

    /// The rest of the answer that an earlier process began to read.
    fn claimed_rest(&mut self) -> Option<FetchResponse> {
        let stream = self.dial.take_claimed()?;
        let left = self.time_left().filter(|left| !left.is_zero());
        self.dial.with_flow(|_, flow| flow.set_deadline(left));
        let note = &self.sink.note;
        let (total, validator) = (note.length, note.validator.clone());
        Some(FetchResponse::continued(
            stream,
            self.sink.held_bytes(),
            total,
            validator,
        ))
    }

    /// Has it written down, as soon as that is possible, how the next process goes on.
    async fn remember(&mut self, helm: &mut ProxyTransferState) {
        let flow = self.sink.note.flow.map(|note| note.flow);
        let (false, Some(flow), Some(path)) = (helm.remembered, flow, self.sink.note_path()) else {
            return;
        };
        match self.dial.persist_flow(flow, path).await {
            Ok(done) => helm.remembered = done,
            Err(error) => {
                helm.remembered = true;
                let text = format!("this download may not survive a crash: {error}");
                self.note(None, text);
            }
        }
    }

    /// Opens a flow, asks, and waits for the head of the answer, however long networks take.
    async fn ask_proxy(
        &mut self,
        helm: &mut ProxyTransferState,
        ask: &GetRequest,
        epoch: &mut tokio::time::Interval,
    ) -> Result<Option<FetchResponse>, FetchFault> {
        let dial = self.dial;
        let via = EgressLink {
            device: None,
            sources: Vec::new(),
        };
        let mut links = self.links.clone();
        let mut answers = self.dial.watch_answers();
        let mut stop = self.stop.clone();
        let mut fetch = pin!(exchange(dial, ask, &via));
        loop {
            tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => return Ok(None),
                answer = &mut fetch => {
                    return answer.map(Some).map_err(|fault| self.flow_cause(fault));
                }
                Ok(()) = links.changed() => {}
                () = answers_changed(&mut answers) => {}
                event = next_event(&mut helm.events) => {
                    self.on_session_event(event, helm).map_err(FetchFault::Final)?;
                    continue;
                }
                _ = epoch.tick() => {}
            }
            self.update_spending(helm).map_err(FetchFault::Final)?;
            self.check_tunnel(helm, HEAD_MAX)?;
        }
    }

    /// Behind a tunnel is one connection of the proxy to the origin, which can hang while the proxy
    /// is well: it is given up after `limit` in which bytes could have come.
    fn check_tunnel(
        &self,
        helm: &mut ProxyTransferState,
        limit: Duration,
    ) -> Result<(), FetchFault> {
        if self.dial.mode() != FetchMode::Sealed || helm.asked_since.is_none() {
            helm.quiet_since = None;
            return Ok(());
        }
        let quiet =
            BootInstant::now().since(*helm.quiet_since.get_or_insert_with(BootInstant::now));
        if quiet < limit {
            return Ok(());
        }
        helm.quiet_since = None;
        let text = format!("no data through the tunnel for {}", format_duration(quiet));
        Err(FetchFault::Origin {
            text,
            retry_after: None,
        })
    }

    /// Decides whether this flow may spend on links that cost, and says why it waits if it does.
    pub(super) fn update_spending(
        &mut self,
        helm: &mut ProxyTransferState,
    ) -> Result<(), TransferFailure> {
        self.check_deadline()?;
        let ways = self.proxied_ways(helm);
        if self.take_new_terms() {
            // The driver and the proxy go by them too.
            helm.told_again = true;
            helm.lifted = false;
            helm.due = None;
            let left = self.time_left().filter(|left| !left.is_zero());
            self.dial.with_flow(|_, flow| flow.set_deadline(left));
        }
        self.follow_clock(helm);
        self.count_paid(helm);
        let verdict = self.seat.decide(&ClientReport {
            demand: FlowDemand {
                metered_bytes_left: self.metered_bytes_to_spend(),
                ..self.demand()
            },
            size_bytes: self.length(),
            priority: self.terms.priority,
            candidates: &ways,
            carried: &self.bytes_by_link,
            uses_several_links: true,
            always_pays: false,
            is_interactive: false,
            keeps_awake: true,
        });
        helm.waits = matches!(verdict.choice, LinkChoice::Wait { .. });
        if !helm.waits {
            self.held = None;
        }
        let paid = self.paid(&verdict, helm);
        self.log_decision(&verdict, paid, &ways, helm);
        let on_time = self.time_left().is_none_or(|left| left > LIFT_DEADLINE);
        if !on_time && !helm.lifted && self.terms.if_late != DeadlineFallback::Fail {
            // Late is better than never: neither end may drop the flow now.
            helm.lifted = true;
            self.dial.with_flow(|_, flow| flow.set_deadline(None));
        }
        self.spend(paid, helm);
        let behind = matches!(
            verdict.choice,
            LinkChoice::Wait {
                reason: LinkWaitReason::QueuedBehind,
                ..
            }
        );
        self.hold_back(behind, helm);
        let carries = |way: &LinkCandidate| way.class == LinkClass::Free && !way.stalled;
        let may_come = !helm.waits && (plan_spends(helm) || ways.iter().any(carries));
        helm.asked_since = (may_come && self.dial.has_answering_path())
            .then(|| helm.asked_since.unwrap_or_else(BootInstant::now));
        match verdict.choice {
            LinkChoice::Wait {
                reason,
                why,
                unblocks,
            } => {
                helm.unanswered_since = None;
                let reason = TransferReason::from(reason);
                self.refuse_to_wait(reason, &why)?;
                self.held = Some((reason, why.clone()));
                self.why = format!("waiting: {why}");
                self.report_waiting(reason, why, unblocks);
            }
            LinkChoice::Use { index, why } => {
                self.why = match verdict.pays_because.filter(|_| plan_spends(helm)) {
                    Some(why) => why,
                    None if ways[index].name == NO_LINK => NO_LINK_WHY.to_owned(),
                    None if ways[index].stalled => format!(
                        "{} is free, but the proxy does not answer on it",
                        ways[index].name
                    ),
                    None => why,
                };
                self.watch_answers(helm)?;
            }
        }
        Ok(())
    }

    /// A flow's deadline passes as time does; one at a time of day moves where the clock is set.
    fn follow_clock(&mut self, helm: &mut ProxyTransferState) {
        let Some(left) = self
            .time_left()
            .filter(|left| !left.is_zero() && !helm.lifted)
        else {
            return;
        };
        let due = BootInstant::now().after(left);
        let known = *helm.due.get_or_insert(due);
        if due.since(known).max(known.since(due)) > CLOCK_SET {
            helm.due = Some(due);
            self.dial.with_flow(|_, flow| flow.set_deadline(Some(left)));
        }
    }

    /// What links that cost may carry, by what was decided and what they carried lately.
    fn paid(&self, verdict: &ClientDecision, helm: &mut ProxyTransferState) -> Grant {
        let now = BootInstant::now();
        match verdict.grant {
            Grant::Spend { .. } => {
                helm.spent_at = Some(now);
                return verdict.grant;
            }
            Grant::Probe { .. } | Grant::Path => return verdict.grant,
            Grant::None => {}
        }
        let lately = helm.spent_at.is_some_and(|at| now.since(at) < READY_FOR);
        let may_again = self.terms.policy != CostPolicy::FreeOnly
            && self.terms.if_late == DeadlineFallback::Cell
            && self.metered_bytes_to_spend() != Some(0);
        match lately && may_again {
            true => Grant::Path,
            false => Grant::None,
        }
    }

    /// Takes down what the driver counts that the object does not show: requests, and what was lost.
    fn count_paid(&mut self, helm: &ProxyTransferState) {
        if matches!(helm.paid, None | Some(Grant::None)) {
            return;
        }
        let paid = self.dial.with_flow(|device, flow| device.paid_bytes(flow));
        if let Some(paid) = paid {
            self.paid_besides = (helm.spent_before + paid).saturating_sub(self.metered_by_now());
        }
    }

    /// What metered links carried, to this moment.
    fn metered_by_now(&self) -> u64 {
        let carried = self.dial.carried().into_iter();
        let metered = carried.filter(|(link, _)| self.is_metered(link));
        metered.map(|(_, carrying)| carrying.bytes).sum()
    }

    /// Has the driver go by it.
    fn spend(&mut self, paid: Grant, helm: &mut ProxyTransferState) {
        let again = std::mem::take(&mut helm.told_again);
        if helm.paid == Some(paid) && !again {
            return;
        }
        let carried = self.metered_by_now() + self.paid_besides;
        let own = (self.terms.metered_bytes_max).map(|max| max.saturating_sub(carried));
        if matches!(helm.paid, None | Some(Grant::None)) {
            helm.spent_before = carried;
        }
        // The driver counts from when it was first told that the flow may pay.
        let counted = carried.saturating_sub(helm.spent_before);
        let within = |most: Option<u64>| {
            let least = own.into_iter().chain(most).min();
            least.map(|bytes| counted + bytes)
        };
        let set = self.dial.with_flow(|device, flow| match paid {
            Grant::None => device.allow_paid(flow, false, None),
            Grant::Path => device.allow_paid(flow, true, Some(0)),
            Grant::Probe { bytes } => device.allow_paid(flow, true, within(Some(bytes))),
            Grant::Spend { up_to } => device.allow_paid(flow, true, within(up_to)),
        });
        if set.is_some() {
            if again || helm.paid.map(grant_word) != Some(grant_word(paid)) {
                helm.left.clear();
            }
            helm.paid = Some(paid);
        }
    }

    /// Has whoever sends hold the flow back, or go on.
    fn hold_back(&mut self, behind: bool, helm: &mut ProxyTransferState) {
        if helm.behind == behind {
            return;
        }
        if let Some(outgoing) = &self.outgoing {
            outgoing.parcel.set_held(behind);
            helm.behind = behind;
        } else if self
            .dial
            .with_flow(|_, flow| flow.hold_back(behind))
            .is_some()
        {
            helm.behind = behind;
        }
    }

    /// Adds a decision of the scheduler to the session's log, when it is another one than before.
    fn log_decision(
        &self,
        verdict: &ClientDecision,
        paid: Grant,
        ways: &[LinkCandidate],
        helm: &mut ProxyTransferState,
    ) {
        let (chosen, why) = match &verdict.choice {
            LinkChoice::Use { index, why } => (ways[*index].name.clone(), why),
            LinkChoice::Wait { reason, why, .. } => {
                (TransferReason::from(*reason).code().to_owned(), why)
            }
        };
        let paid = grant_word(paid);
        if helm.logged.as_ref() == Some(&(chosen.clone(), paid)) {
            return;
        }
        helm.logged = Some((chosen.clone(), paid));
        let Some(device) = self.dial.device() else {
            return;
        };
        device.note("cedos:decision", || {
            let waits = matches!(verdict.choice, LinkChoice::Wait { .. });
            serde_json::json!({
                "decision": if waits { "wait" } else { "use" },
                "link": (!waits).then_some(&chosen),
                "reason": waits.then_some(&chosen),
                "why": why,
                "paid_links": paid,
                "paid_because": verdict.pays_because,
                "links": ways.iter().map(|way| serde_json::json!({
                    "name": way.name,
                    "class": format!("{:?}", way.class).to_lowercase(),
                    "rate_bytes_per_s": way.rate_bytes_per_s,
                    "stalled": way.stalled,
                })).collect::<Vec<_>>(),
            })
        });
    }

    /// Says so if a proxy that could be reached does not answer.
    fn watch_answers(&mut self, helm: &mut ProxyTransferState) -> Result<(), TransferFailure> {
        if self.dial.has_answering_path() {
            helm.known = true;
            if helm.asked_since.is_none() {
                self.watch_others(helm);
                return Ok(());
            }
            helm.unanswered_since = None;
            let quiet = helm.quiet(BootInstant::now());
            if let Some(quiet) = quiet.filter(|quiet| *quiet >= self.job.stall) {
                let text = format!("no data for {}", format_duration(quiet));
                self.report_waiting(
                    TransferReason::OriginWait,
                    text,
                    "data from the server".into(),
                );
            }
            return Ok(());
        }
        let since = *helm.unanswered_since.get_or_insert_with(BootInstant::now);
        let silence = BootInstant::now().since(since);
        if silence < UNREACHABLE_AFTER {
            return Ok(());
        }
        let text = if helm.known {
            format!(
                "{} has not answered for {}",
                self.dial.address_text(),
                format_duration(silence)
            )
        } else {
            format!(
                "the proxy {} does not answer. Is it running, is the key in --prox right, does \
                 this network allow UDP?",
                self.dial.address_text()
            )
        };
        if self.job.now && !helm.known {
            let text = format!("{text} (--now does not wait)");
            return Err(TransferFailure::of(
                TransferExit::Error,
                TransferReason::ProxyUnreachable,
                text,
            ));
        }
        self.give_up_on_proxy(helm, &text)?;
        let unblocks = "an answer from the proxy | another network | leaving out --prox".into();
        self.report_waiting(TransferReason::ProxyUnreachable, text, unblocks);
        Ok(())
    }

    /// Says so if the proxy answers only where nothing may be spent.
    fn watch_others(&mut self, helm: &mut ProxyTransferState) {
        let since = *helm.unanswered_since.get_or_insert_with(BootInstant::now);
        if BootInstant::now().since(since) >= UNREACHABLE_AFTER {
            let unblocks = "an answer from the proxy there | --policy any".to_owned();
            self.report_waiting(TransferReason::PathTooSlow, self.why.clone(), unblocks);
        }
    }

    /// At the deadline, a proxy that never was heard of is not waited for any longer.
    fn give_up_on_proxy(
        &self,
        helm: &ProxyTransferState,
        why: &str,
    ) -> Result<(), TransferFailure> {
        if helm.known || self.time_left() != Some(Duration::ZERO) {
            return Ok(());
        }
        let text = format!("{why}; the deadline passed without an answer from the proxy");
        Err(TransferFailure::of(
            TransferExit::DeadlineMissed,
            TransferReason::ProxyUnreachable,
            text,
        ))
    }

    /// Takes in what happened in the session.
    pub(super) fn on_session_event(
        &mut self,
        event: SessionEvent,
        helm: &mut ProxyTransferState,
    ) -> Result<(), TransferFailure> {
        let name = |id| {
            let device = self.dial.device()?;
            device.link_name(id)
        };
        match event {
            SessionEvent::Established { .. } => helm.known = true,
            SessionEvent::PathUp { link, took, .. } => {
                helm.known = true;
                let took = took.as_millis();
                if let Some(name) = name(link) {
                    tracing::debug!(link = %name, took_ms = took, "a path answers");
                    helm.first.get_or_insert((name, took));
                }
                self.update_spending(helm)?;
            }
            SessionEvent::Switched {
                from,
                to,
                kind,
                silence,
            } => {
                let (from, to) = (from.and_then(name), name(to));
                let from = from.or_else(|| self.last_link.clone());
                let Some(to) = to else { return Ok(()) };
                if let Some(from) = &from
                    && !self.is_left(from, &to, helm)
                {
                    return Ok(());
                }
                self.switches += u32::from(from.is_some());
                self.last_link = Some(to.clone());
                let t_s = self.t_s();
                self.observer.on_event(&TransferEvent::Switch {
                    t_s,
                    from,
                    to,
                    why: self.why.clone(),
                    kind: Some(match kind {
                        PathSwitchKind::MakeBeforeBreak => "make-before-break".into(),
                        PathSwitchKind::BreakBeforeMake => "break-before-make".into(),
                    }),
                    silence_ms: Some(silence.as_secs_f64() * 1e3),
                });
            }
            SessionEvent::PathSilent { .. } | SessionEvent::PathDown { .. } => {
                self.update_spending(helm)?
            }
            SessionEvent::Woken { after } if after.as_secs_f64() >= 0.1 => {
                let text = format!(
                    "resumed after {:.1} s without a network",
                    after.as_secs_f64()
                );
                self.note(None, text);
            }
            _ => {}
        }
        Ok(())
    }

    /// Whether data that came over `from` and now comes over `to` has moved: not if both carry it
    /// side by side, and once only if what is under way on `from` still trickles in.
    fn is_left(&self, from: &str, to: &str, helm: &mut ProxyTransferState) -> bool {
        let answers = self
            .dial
            .carried()
            .get(from)
            .is_some_and(|carrying| carrying.is_answering == Some(true));
        if !answers || from == to {
            helm.left.remove(to);
            return true;
        }
        // A metered link that may not be spent on is left while it still works.
        let carries = !self.is_metered(from) || plan_spends(helm);
        !carries && helm.left.insert(from.to_owned())
    }

    /// Says on which link the first byte came.
    pub(super) fn report_first_byte(&mut self, helm: &mut ProxyTransferState) {
        let busiest = self
            .dial
            .carried()
            .into_iter()
            .max_by_key(|(_, carrying)| carrying.bytes)
            .map(|(name, _)| name);
        let (first, took) = helm.first.clone().unzip();
        let Some(to) = busiest.or(first) else { return };
        self.last_link = Some(to.clone());
        let t_s = self.t_s();
        self.observer.on_event(&TransferEvent::Switch {
            t_s,
            from: None,
            to,
            why: format!("the proxy answered in {} ms", took.unwrap_or(0)),
            kind: None,
            silence_ms: None,
        });
    }

    /// The links before anything was tried on them.
    pub(super) fn proxy_link_candidates(&mut self) -> Vec<LinkCandidate> {
        self.proxied_ways(&mut ProxyTransferState::default())
    }

    /// The links, as the scheduler sees them.
    fn proxied_ways(&mut self, helm: &mut ProxyTransferState) -> Vec<LinkCandidate> {
        if self.dial.needs_no_link() {
            return vec![LinkCandidate {
                name: NO_LINK.into(),
                class: LinkClass::Free,
                rate_bytes_per_s: None,
                metric: 0,
                stalled: false,
                in_use: true,
            }];
        }
        let links = self.links.borrow().clone();
        let carried = self.dial.carried();
        let now = BootInstant::now();
        let spends = plan_spends(helm);
        let mut ways = Vec::new();
        for link in links
            .iter()
            .filter(|link| link.kind != LinkKind::Loopback && link.is_usable())
        {
            let carrying = carried.get(&link.name);
            let class = LinkClass::from(link.class.class);
            self.classes.insert(link.name.clone(), link.class.class);
            let in_use = match class {
                LinkClass::Free => true,
                LinkClass::Metered => spends,
                LinkClass::Roaming => false,
            };
            let answering = match carrying.and_then(|c| c.is_answering) {
                Some(true) => *helm.answering_since.entry(link.name.clone()).or_insert(now),
                _ => {
                    helm.answering_since.remove(&link.name);
                    now
                }
            };
            let mut rate = carrying
                .and_then(|c| c.rate)
                .filter(|_| now.since(answering) >= RATE_AFTER)
                .map(|rate| rate as f64);
            if class == LinkClass::Metered {
                if let Some(rate) = rate.filter(|_| spends) {
                    helm.paid_rates.insert(link.name.clone(), rate);
                }
                rate = helm.paid_rates.get(&link.name).copied();
            }
            ways.push(LinkCandidate {
                name: link.name.clone(),
                class,
                rate_bytes_per_s: rate,
                metric: link.metric().unwrap_or(u32::MAX),
                stalled: carrying.is_some_and(|carrying| carrying.is_silent),
                in_use,
            });
        }
        ways
    }

    /// Brings the shares of the links up to date; returns those that carried since the last time.
    pub(super) fn count_links(&mut self, helm: &mut ProxyTransferState) -> String {
        let mut used = Vec::new();
        if self.dial.needs_no_link() {
            used.push(NO_LINK.to_owned());
        }
        for (name, carrying) in self.dial.carried() {
            if carrying.bytes > helm.last_counts.get(&name).copied().unwrap_or(0) {
                used.push(name.clone());
            }
            helm.last_counts.insert(name.clone(), carrying.bytes);
            if let Some(trip) = carrying.round_trip {
                self.seat.record_round_trip(&name, trip);
            }
            if let Some(busy) = carrying.active_time {
                self.seat.record_busy_time(&name, busy);
            }
            if carrying.bytes > 0 {
                self.bytes_by_link.insert(name, carrying.bytes);
            }
        }
        used.join("+")
    }

    /// The deadline ends it, and is here: either end may have found so a moment before.
    fn ends_at_deadline(&self) -> bool {
        let is_here = self.time_left().is_some_and(|left| left < LIFT_DEADLINE);
        is_here && self.terms.if_late == DeadlineFallback::Fail
    }

    /// What a broken exchange is really about: the flow knows better than HTTP.
    pub(super) fn flow_cause(&self, fault: FetchFault) -> FetchFault {
        match self.dial.flow_loss() {
            Err(failure) => FetchFault::Final(failure),
            Ok(None) => fault,
            Ok(Some(FlowLoss::Reset(text))) => FetchFault::Origin {
                text,
                retry_after: None,
            },
            Ok(Some(FlowLoss::Forgotten)) => {
                FetchFault::Proxy("the proxy was restarted and does not know the transfer".into())
            }
            Ok(Some(FlowLoss::Session(text))) => FetchFault::Proxy(text),
            Ok(Some(FlowLoss::Deadline)) if self.ends_at_deadline() => {
                FetchFault::Final(self.late_failure())
            }
            Ok(Some(FlowLoss::Deadline)) => FetchFault::Proxy("the deadline passed".into()),
        }
    }

    /// After a fault: give up, or wait a little, say so, and ask again from where we are.
    async fn recover_proxied(
        &mut self,
        fault: FetchFault,
        helm: &mut ProxyTransferState,
    ) -> Result<(), TransferFailure> {
        let (text, reason, retry_after, counts) = match fault {
            FetchFault::Final(failure) => return Err(failure),
            FetchFault::UntrustedPeer(text) | FetchFault::CaptivePortal(text) => {
                return Err(TransferFailure::error(text));
            }
            FetchFault::Origin { text, retry_after } => {
                (text, TransferReason::OriginWait, retry_after, true)
            }
            FetchFault::Path(text) | FetchFault::Proxy(text) | FetchFault::NameNotFound(text) => {
                (text, TransferReason::ProxyUnreachable, None, false)
            }
        };
        self.dial.drop_flow();
        if self
            .dial
            .device()
            .is_none_or(|device| device.ended().is_some())
        {
            self.dial.drop_session();
            helm.events = None;
        }
        self.tries += 1;
        if counts && self.tries >= self.job.tries_max {
            let tries = self.tries;
            let text = format!("{text}; gave up after {tries} tries without a new byte");
            return Err(TransferFailure::of(TransferExit::Error, reason, text));
        }
        let first = self.tries == 1 && retry_after.is_none() && !counts;
        if first {
            self.note(Some(reason), format!("{text}; trying again"));
            return Ok(());
        }
        let doublings = self.tries.saturating_sub(1).min(10);
        let backoff = (BACKOFF_FIRST * 2u32.pow(doublings)).min(AGAIN_MAX);
        let until = BootInstant::now().after(retry_after.unwrap_or(backoff));
        self.said_waiting = None;
        loop {
            let left = until.since(BootInstant::now());
            if left.is_zero() {
                return Ok(());
            }
            self.check_deadline()?;
            let next = format!("the next try in {:.1} s", left.as_secs_f64());
            self.wait(reason, text.clone(), next, left.min(EPOCH))
                .await?;
        }
    }
}

fn plan_spends(helm: &ProxyTransferState) -> bool {
    matches!(helm.paid, Some(Grant::Spend { .. } | Grant::Probe { .. }))
}

/// The next event of the session; never, if there is none to come.
pub(super) async fn next_event(
    events: &mut Option<mpsc::UnboundedReceiver<SessionEvent>>,
) -> SessionEvent {
    match events {
        Some(receiver) => match receiver.recv().await {
            Some(event) => event,
            None => {
                *events = None;
                std::future::pending().await
            }
        },
        None => std::future::pending().await,
    }
}

/// Waits until a link of the session begins to answer, or counts as silent; without a session, for ever.
pub(super) async fn answers_changed(answers: &mut Option<watch::Receiver<()>>) {
    if let Some(answers) = answers
        && answers.changed().await.is_ok()
    {
        return;
    }
    std::future::pending().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_held_back_is_quiet_only_from_when_something_may_carry_it() {
        let begun = BootInstant::from_boot(Duration::from_secs(100));
        let at = |seconds| begun.after(Duration::from_secs(seconds));
        let mut helm = ProxyTransferState {
            last_byte: Some(at(1)),
            asked_since: Some(at(0)),
            ..ProxyTransferState::default()
        };
        assert_eq!(helm.quiet(at(5)), Some(Duration::from_secs(4)));
        helm.asked_since = None;
        assert_eq!(helm.quiet(at(11)), None);
        helm.asked_since = Some(at(11));
        assert_eq!(helm.quiet(at(12)), Some(Duration::from_secs(1)));
    }
}
