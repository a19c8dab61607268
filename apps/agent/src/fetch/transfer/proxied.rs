//! A transfer through a proxy: one flow that is on every free link, and on others when it must.
//!
//! ```text
//!  every second, and at every change of a link:
//!     links, bytes, what is left ─▶ scheduler ─▶ may this flow spend on metered links?
//!                                        ├─ others go first: the sender holds it back
//!                                        └─ nothing may be used: say why, the flow sleeps
//!  the flow is forgotten, reset, or its session over ─▶ a new one, with Range from what we hold
//! ```

mod decision_log;
mod flow_deadline;
mod paid_grant;
mod proxy_answers;
mod session_links;
mod supply_watch;
mod transfer_flow;

use std::path::Path;
use std::time::Duration;

use d2tp_driver::{SessionEvent, StreamFailure, StreamStatus};
use d2tp_links::Link;
use d2tp_sched::{DeadlineFallback, Grant, LinkCandidate, LinkChoice, LinkClass, format_duration};
use tokio::sync::{mpsc, watch};

use super::control::{LinkWait, TransferControl};
use super::progress::ContentProgress;
use super::retry::{Backoff, RetryDecision};
use super::source::{Readiness, RequestReview, TransferSource};
use crate::fetch::boot_clock::BootInstant;
use crate::fetch::dial::{Dial, EgressLink, FetchFault};
use crate::fetch::exchange::FetchResponse;
use crate::fetch::mode::FetchMode;
use crate::fetch::outcome::{TransferExit, TransferFailure, TransferReason};
use crate::fetch::partial::PartialNote;
use crate::fetch::proxy::{FlowLoss, LinkTraffic, ProxyClient};
use crate::fetch::report::{NO_LINK, NO_LINK_WHY};
use proxy_answers::ProxyAnswers;
use session_links::{LinkSwitch, SessionLinks};
use supply_watch::SupplyWatch;
use transfer_flow::TransferFlow;

pub(super) use transfer_flow::FlowSender;

/// The longest delay before another flow is tried at a proxy that ended the last one.
const AGAIN_MAX: Duration = Duration::from_secs(5); // a guess

/// The longest delay before a server that refused is asked again: each try may cost a whole upload.
const REFUSED_AGAIN_MAX: Duration = Duration::from_secs(60); // a guess

/// Flows of a session with a proxy, as a source.
pub(super) struct ProxySource<'a> {
    client: &'a ProxyClient,
    flow: TransferFlow<'a>,
    session: ProxyTransferState,
}

/// The state of a session.
#[derive(Default)]
struct ProxyTransferState {
    /// Events of the session; none without one.
    events: Option<mpsc::UnboundedReceiver<SessionEvent>>,
    links: SessionLinks,
    answers: ProxyAnswers,
    supply: SupplyWatch,
    /// Since when a tunnel has carried nothing although it could.
    tunnel_quiet_since: Option<BootInstant>,
    /// Whether the current flow is recorded for a later process.
    is_persisted: bool,
    /// Whether no network was up when the session lost its last path.
    is_without_network: bool,
}

impl<'a> ProxySource<'a> {
    /// Creates a source without a session.
    pub(super) fn new(client: &'a ProxyClient, sender: FlowSender) -> ProxySource<'a> {
        ProxySource {
            client,
            flow: TransferFlow::new(client, sender),
            session: ProxyTransferState::default(),
        }
    }

    /// Opens a session if there is none. Returns the reason for a wait if that fails.
    async fn connect(
        &mut self,
        control: &mut TransferControl<'_>,
        progress: ContentProgress,
    ) -> Result<Option<LinkWait>, TransferFailure> {
        let error = match self.client.connect().await {
            Ok(None) => return Ok(None),
            Ok(Some(events)) => {
                self.session = ProxyTransferState {
                    events: Some(events),
                    ..ProxyTransferState::default()
                };
                self.flow.on_new_session();
                if let Some(trouble) = self.client.take_persist_error() {
                    let text = format!("this download may not survive a crash: {trouble}");
                    control.reporter.note(None, text);
                }
                return Ok(None);
            }
            Err(error) => error.to_string(),
        };
        let reason = match self.candidates(control).is_empty() {
            true => TransferReason::NoPath,
            false => TransferReason::ProxyUnreachable,
        };
        if control.job.now && reason == TransferReason::ProxyUnreachable {
            let text = format!("{error}; --now does not wait");
            return Err(TransferFailure::of(TransferExit::Error, reason, text));
        }
        control.refuse_to_wait(progress, reason, &error)?;
        self.session.answers.give_up_at_deadline(control, &error)?;
        Ok(Some(LinkWait {
            reason,
            why: error,
            unblocks: "any network | the right --prox address".to_owned(),
        }))
    }

    /// Why the chosen link is used, for users.
    fn why(
        &self,
        pays_because: Option<String>,
        chosen: &LinkCandidate,
        why: String,
        refusal: Option<&str>,
    ) -> String {
        if let Some(refusal) = refusal {
            return format!("{refusal}; trying again");
        }
        match pays_because.filter(|_| self.flow.spends()) {
            Some(why) => why,
            None if chosen.name == NO_LINK => NO_LINK_WHY.to_owned(),
            None => {
                let traffic = self.client.carried();
                let stream = traffic.get(&chosen.name).map(|link| link.stream);
                why_by_stream(chosen, stream.unwrap_or_default(), why)
            }
        }
    }

    /// The obstacle on links where another host answers.
    fn intercepted(&self) -> Option<String> {
        let traffic = self.client.carried();
        let is_foreign = |link: &LinkTraffic| {
            link.is_silent && link.stream == StreamStatus::Failed(StreamFailure::Foreign)
        };
        let mut found = traffic.iter().filter(|(_, link)| is_foreign(link));
        let (name, _) = found.next()?;
        Some(format!("{name} {INTERCEPTED}"))
    }

    /// The links on which the proxy answers neither over UDP nor over TCP.
    fn blocked(&self) -> Vec<String> {
        let traffic = self.client.carried();
        let is_blocked = |link: &LinkTraffic| {
            link.is_silent && link.stream == StreamStatus::Failed(StreamFailure::Unreachable)
        };
        let found = traffic.into_iter().filter(|(_, link)| is_blocked(link));
        found.map(|(name, _)| name).collect()
    }

    /// Decides again about links, and reports what the transfer waits for.
    fn review_links(
        &mut self,
        control: &mut TransferControl<'_>,
        progress: ContentProgress,
    ) -> Result<(), TransferFailure> {
        control.check_deadline(progress)?;
        let candidates = self.candidates(control);
        self.flow.follow_deadline(control);
        self.flow.count_paid(control);
        let now = BootInstant::now();
        let free_answers = self.client.carried().iter().any(|(link, traffic)| {
            traffic.is_answering == Some(true) && !control.usage.is_metered(link)
        });
        let report = self.client.supply_report();
        let source = self.session.supply.supply(report, free_answers, now);
        let decision = control.decide(progress, &candidates, true, source);
        let waits = matches!(decision.choice, LinkChoice::Wait { .. });
        if !waits {
            control.unblock();
        }
        let metered = (candidates.iter()).find(|link| link.class == LinkClass::Metered);
        let probe = match (decision.grant, metered) {
            (Grant::Probe { bytes }, Some(link)) => {
                let left = control.metered_bytes_left().unwrap_or(u64::MAX);
                Some((&*link.name, bytes.min(left)))
            }
            _ => None,
        };
        let spent = control.usage.metered_bytes();
        control.reporter.note_probe(probe, spent);
        if self.flow.go_by(&decision, &candidates, control, progress) {
            self.session.links.on_grant_changed();
        }
        let carries = |link: &LinkCandidate| link.class == LinkClass::Free && !link.stalled;
        let may_come = !waits && (self.flow.spends() || candidates.iter().any(carries));
        let asked = may_come && self.client.has_answering_path();
        self.session.answers.set_asked(asked, BootInstant::now());
        match LinkWait::or_use(decision.choice) {
            Err(wait) => {
                self.session.answers.on_wait();
                let wait = control.with_limit_named(wait, progress);
                control.refuse_to_wait(progress, wait.reason, &wait.why)?;
                control.block(wait.reason, wait.why.clone());
                control.reporter.why = format!("waits: {}", wait.why);
                control.report_wait(wait);
            }
            Ok((index, why)) => {
                let chosen = &candidates[index];
                if let Some(because) = &decision.pays_because
                    && chosen.class == LinkClass::Free
                {
                    control.reporter.note_spending(because);
                }
                control.reporter.why =
                    self.why(decision.pays_because, chosen, why, control.refusal());
                let answers = self.client.has_answering_path();
                let address = self.client.address_text();
                let intercepted = self.intercepted();
                let blocked = self.blocked();
                let watched = &mut self.session.answers;
                watched.watch(answers, &address, intercepted, &blocked, control)?;
            }
        }
        Ok(())
    }

    /// Goes on at another proxy of the list if this one is silent and that one is not. An upload stays: what arrived of
    /// it is at this one, and a request may not be sent twice.
    fn leave_silent_proxy(&mut self, control: &mut TransferControl<'_>) -> bool {
        let silence = self.session.answers.unanswered_for(BootInstant::now());
        let (Some(silence), true) = (silence, self.flow.is_download()) else {
            return false;
        };
        if silence < self.client.silent_max() {
            return false;
        }
        let Some(text) = self.client.leave_silent_proxy() else {
            return false;
        };
        self.session.events = None;
        let reason = TransferReason::ProxyUnreachable;
        control.reporter.note(Some(reason), text);
        true
    }

    fn link_name(&self, link: d2tp_session::LinkId) -> Option<String> {
        self.client.device()?.link_name(link)
    }

    /// Reports once on which link the first byte came.
    pub(super) fn report_first_byte(&self, control: &mut TransferControl<'_>) {
        if control.usage.last_link().is_none() {
            let traffic = self.client.carried();
            self.session.links.report_first_byte(&traffic, control);
        }
    }

    /// Ends our direction of the current flow, once its whole answer is there.
    pub(super) fn end_sending(&self) {
        self.client.end_sending();
    }

    /// Bytes of the current flow that the proxy acknowledged.
    pub(super) fn acknowledged_bytes(&self) -> u64 {
        self.flow.acknowledged_bytes()
    }

    /// Records that bytes of the object arrived, or were acknowledged.
    pub(super) fn on_arrival(&mut self, control: &mut TransferControl<'_>) {
        let now = BootInstant::now();
        self.session.answers.on_byte(now);
        self.session.supply.on_byte(now);
        self.session.tunnel_quiet_since = None;
        control.reporter.wait_is_over();
        self.report_first_byte(control);
    }

    /// Updates the bytes by link. Returns the links that carried since the last update.
    fn count_links(&mut self, control: &mut TransferControl<'_>) -> String {
        let mut used = self.session.links.count(self.client.carried(), control);
        if self.client.needs_no_link() {
            used.insert(0, NO_LINK.to_owned());
        }
        used.join("+")
    }
}

/// The description of a link where another host answers in place of the proxy.
const INTERCEPTED: &str = "blocks UDP, and a sign-in page or a filter answers for the proxy";

/// Why a free link is used, or waited for, with what is known of UDP there.
fn why_by_stream(chosen: &LinkCandidate, stream: StreamStatus, why: String) -> String {
    let name = &chosen.name;
    match (chosen.stalled, stream) {
        (false, StreamStatus::InUse) => format!("{why}; {name} blocks UDP, so packets go over TCP"),
        (false, _) => why,
        (true, StreamStatus::Failed(StreamFailure::Foreign)) => format!("{name} {INTERCEPTED}"),
        (true, StreamStatus::Failed(StreamFailure::Unreachable)) => {
            format!("{name} is free, but the proxy answers there neither over UDP nor over TCP")
        }
        (true, _) => format!("{name} is free, but the proxy does not answer on it"),
    }
}

impl<'a> TransferSource<'a> for ProxySource<'a> {
    type Client = ProxyClient;

    fn client(&self) -> &'a ProxyClient {
        self.client
    }

    fn candidates(&mut self, control: &mut TransferControl<'_>) -> Vec<LinkCandidate> {
        if self.client.needs_no_link() {
            return vec![LinkCandidate {
                name: NO_LINK.into(),
                class: LinkClass::Free,
                rate_bytes_per_s: None,
                metric: 0,
                stalled: false,
                in_use: true,
            }];
        }
        let links = control.links.borrow().clone();
        for link in links.iter() {
            control.usage.set_class(&link.name, link.class.class);
        }
        let (spends, traffic) = (self.flow.spends(), self.client.carried());
        let now = BootInstant::now();
        (self.session.links).candidates(&links, &traffic, spends, now)
    }

    async fn prepare(
        &mut self,
        control: &mut TransferControl<'_>,
        progress: ContentProgress,
    ) -> Result<Readiness, TransferFailure> {
        if let Some(wait) = self.connect(control, progress).await? {
            return Ok(Readiness::Wait(wait));
        }
        self.flow.on_new_flow(control);
        if self.flow.is_download() {
            self.session.supply.on_new_flow(BootInstant::now());
        }
        self.session.tunnel_quiet_since = None;
        Ok(Readiness::Ready(EgressLink {
            device: None,
            sources: Vec::new(),
        }))
    }

    fn review(
        &mut self,
        control: &mut TransferControl<'_>,
        progress: ContentProgress,
    ) -> Result<RequestReview, TransferFailure> {
        self.review_links(control, progress)?;
        Ok(match self.leave_silent_proxy(control) {
            true => RequestReview::Leave,
            false => RequestReview::Stay,
        })
    }

    fn watch_candidates(&self) -> Option<watch::Receiver<()>> {
        self.client.watch_candidates()
    }

    async fn next_event(&mut self) -> SessionEvent {
        if let Some(events) = &mut self.session.events {
            if let Some(event) = events.recv().await {
                return event;
            }
            self.session.events = None;
        }
        std::future::pending().await
    }

    fn on_event(
        &mut self,
        event: SessionEvent,
        control: &mut TransferControl<'_>,
        progress: ContentProgress,
    ) -> Result<(), TransferFailure> {
        match event {
            SessionEvent::Established { .. } => {
                self.session.answers.on_answer();
                if let Some(proxy) = self.client.describe_proxy() {
                    control
                        .reporter
                        .note(None, format!("through the proxy {proxy}"));
                }
                if let Some(node) = self.client.describe_nodes() {
                    let text = format!("through the proxy's node {node}");
                    control.reporter.note(None, text);
                }
            }
            SessionEvent::PathUp { link, took, .. } => {
                self.session.answers.on_answer();
                let took = took.as_millis();
                if let Some(name) = self.link_name(link) {
                    tracing::debug!(link = %name, took_ms = took, "a path answers");
                    self.session.links.on_path_up(name, took);
                }
                self.review_links(control, progress)?;
            }
            SessionEvent::Switched {
                from,
                to,
                kind,
                silence,
            } => {
                let from = from.and_then(|from| self.link_name(from));
                let Some(to) = self.link_name(to) else {
                    return Ok(());
                };
                let switch = LinkSwitch {
                    from,
                    to,
                    kind,
                    silence: silence.into(),
                };
                let (traffic, spends) = (self.client.carried(), self.flow.spends());
                (self.session.links).on_switched(switch, &traffic, spends, control);
            }
            SessionEvent::PathSilent { .. } | SessionEvent::PathDown { .. } => {
                self.review_links(control, progress)?;
            }
            SessionEvent::Suspended(_) => {
                // A session without a path is also one that the proxy closed, or that had nothing to carry.
                self.session.is_without_network = !self.client.needs_no_link()
                    && !control.links.borrow().iter().any(Link::is_usable);
            }
            SessionEvent::Woken { after }
                if self.session.is_without_network && after.as_secs_f64() >= 0.1 =>
            {
                let text = format!(
                    "resumed after {:.1} s without a network",
                    after.as_secs_f64()
                );
                control.reporter.note(None, text);
            }
            _ => {}
        }
        Ok(())
    }

    fn on_answer(
        &mut self,
        _answer: &FetchResponse,
        _control: &mut TransferControl<'_>,
        _progress: ContentProgress,
    ) -> Result<(), FetchFault> {
        Ok(()) // the proxy proves who it is, so no portal answers in its place
    }

    fn announce_link(&mut self, control: &mut TransferControl<'_>) {
        self.report_first_byte(control);
    }

    fn on_bytes(&mut self, bytes: u64, control: &mut TransferControl<'_>) {
        if self.client.needs_no_link() {
            control.usage.add(NO_LINK, bytes);
        }
        self.on_arrival(control);
    }

    fn on_epoch(
        &mut self,
        _bytes: u64,
        _length: Duration,
        control: &mut TransferControl<'_>,
    ) -> String {
        let (proxy, node) = (self.client.describe_proxy(), self.client.describe_nodes());
        control.reporter.node = match (proxy, node) {
            (Some(proxy), Some(node)) => Some(format!("{proxy}, at {node}")),
            (proxy, node) => proxy.or(node),
        };
        self.count_links(control)
    }

    fn on_held(&mut self) {
        self.session.tunnel_quiet_since = None;
    }

    /// Checks a tunnel for silence: the proxy's connection to the origin can hang while the proxy
    /// answers. It is given up after `limit` in which bytes could have arrived.
    fn check_silence(&mut self, limit: Duration) -> Result<(), FetchFault> {
        if self.client.mode() != FetchMode::Sealed || !self.session.answers.is_asked() {
            self.session.tunnel_quiet_since = None;
            return Ok(());
        }
        let now = BootInstant::now();
        let quiet = now.since(*self.session.tunnel_quiet_since.get_or_insert(now));
        if quiet < limit {
            return Ok(());
        }
        self.session.tunnel_quiet_since = None;
        let quiet = format_duration(quiet);
        Err(FetchFault::Origin {
            text: format!("no data through the tunnel for {quiet}"),
            retry_after: None,
        })
    }

    /// The cause of a broken stream according to its flow, which knows more than HTTP.
    fn cause(
        &self,
        fault: FetchFault,
        control: &TransferControl<'_>,
        progress: ContentProgress,
    ) -> FetchFault {
        let ends_at_deadline = flow_deadline::is_here(control.time_left())
            && control.terms.if_late == DeadlineFallback::Fail;
        match self.client.flow_loss() {
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
            Ok(Some(FlowLoss::Deadline)) if ends_at_deadline => {
                FetchFault::Final(control.late_failure(progress))
            }
            Ok(Some(FlowLoss::Deadline)) => FetchFault::Proxy("the deadline passed".into()),
        }
    }

    fn on_request_end(&mut self, control: &mut TransferControl<'_>) {
        self.count_links(control);
    }

    fn leave(&mut self) {
        self.client.drop_flow();
    }

    fn recover(
        &mut self,
        fault: FetchFault,
        _control: &mut TransferControl<'_>,
        _progress: ContentProgress,
    ) -> Result<RetryDecision, TransferFailure> {
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
        self.client.drop_flow();
        let device = self.client.device();
        if device.is_none_or(|device| device.ended().is_some()) {
            self.client.drop_session();
            self.session.events = None;
        }
        Ok(RetryDecision::After(Backoff {
            text,
            reason,
            retry_after,
            counts,
            at_most: match counts {
                true => REFUSED_AGAIN_MAX,
                false => AGAIN_MAX,
            },
            ends_with_links: false,
            first_at_once: !counts,
        }))
    }

    fn take_claimed(
        &mut self,
        note: &mut PartialNote,
        held_bytes: u64,
        control: &TransferControl<'_>,
    ) -> Option<FetchResponse> {
        let Some(stream) = self.client.take_claimed() else {
            note.flow = None;
            return None;
        };
        self.flow.set_deadline(control.time_ahead());
        let (length, validator) = (note.length, note.validator.clone());
        Some(FetchResponse::continued(
            stream, held_bytes, length, validator,
        ))
    }

    fn note_flow(&mut self, note: &mut PartialNote, from: u64) {
        if note.flow.is_none() {
            note.flow = self.client.flow_note(from);
            self.session.is_persisted = false;
        }
    }

    async fn persist_flow(
        &mut self,
        note: &PartialNote,
        path: Option<&Path>,
        control: &mut TransferControl<'_>,
    ) {
        let (false, Some(flow), Some(path)) = (self.session.is_persisted, note.flow, path) else {
            return;
        };
        match self.client.persist_flow(flow.flow, path).await {
            Ok(done) => self.session.is_persisted = done,
            Err(error) => {
                self.session.is_persisted = true;
                let text = format!("this download may not survive a crash: {error}");
                control.reporter.note(None, text);
            }
        }
    }

    fn frees_what_arrived(&self) -> bool {
        true
    }

    fn answerer(&self) -> &'static str {
        "the proxy"
    }

    fn duplicate_bytes(&self) -> u64 {
        self.client.duplicate_bytes()
    }

    async fn close(&mut self, whole: bool, claimable: bool) {
        if whole {
            self.client.finish().await;
        } else if claimable && self.client.mode() == FetchMode::ProxyFetch {
            return self.client.detach().await;
        }
        self.client.close().await;
    }
}
