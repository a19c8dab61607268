//! A transfer directly from the origin: one connection at a time, over the link that the scheduler
//! chooses, left when that changes or the link carries nothing.

mod portal;
mod supply_comparison;
mod suspect_links;

use std::collections::HashMap;
use std::time::Duration;

use d2tp_links::{Link, LinkKind};
use d2tp_sched::{CostPolicy, LinkCandidate, LinkChoice, LinkWaitReason};
use tokio::sync::watch;

use super::control::{LinkWait, TransferControl};
use super::progress::ContentProgress;
use super::retry::{Backoff, RetryDecision};
use super::source::{Readiness, RequestReview, TransferSource};
use crate::fetch::boot_clock::BootInstant;
use crate::fetch::dial::{Dial, EgressLink, FetchFault};
use crate::fetch::exchange::FetchResponse;
use crate::fetch::local_origin::LocalOrigin;
use crate::fetch::outcome::{TransferExit, TransferFailure, TransferReason};
use portal::PortalDetector;
use supply_comparison::SupplyComparison;
use suspect_links::SuspectLinks;

/// The longest delay between tries.
const BACKOFF_MAX: Duration = Duration::from_secs(30); // a guess

/// How long a link that carried nothing counts as the worst choice.
const STALL_MEMORY: Duration = Duration::from_secs(30); // a guess

/// The fewest bytes that are fetched another way: a new request costs a round trip, and up to 16 kB come again.
const GO_OVER_BYTES_MIN: u64 = 256 * 1024; // a guess

/// The shortest time over which a link's rate is measured.
const RATE_OVER: Duration = Duration::from_millis(50); // a guess

/// The source of a transfer without a proxy: connections to the origin itself.
pub(super) struct DirectSource<'a, D> {
    dial: &'a D,
    /// The measured rate of each link in bytes per second.
    rates: HashMap<String, f64>,
    /// Links that carried nothing, and until when they count as the worst choice.
    stalled_until: HashMap<String, BootInstant>,
    suspects: SuspectLinks,
    portals: PortalDetector,
    supply: SupplyComparison,
    /// The link that was chosen last; none while the transfer waits for one.
    current: Option<String>,
    /// The link and source addresses of the current request.
    egress: EgressLink,
    /// When bytes last arrived; none before an answer.
    last_byte: Option<BootInstant>,
}

impl<'a, D: Dial> DirectSource<'a, D> {
    /// Creates a source without a request.
    pub(super) fn new(dial: &'a D) -> DirectSource<'a, D> {
        DirectSource {
            dial,
            rates: HashMap::new(),
            stalled_until: HashMap::new(),
            suspects: SuspectLinks::default(),
            portals: PortalDetector::default(),
            supply: SupplyComparison::default(),
            current: None,
            egress: EgressLink {
                device: None,
                sources: Vec::new(),
            },
            last_byte: None,
        }
    }

    /// Whether the connection attempt of the current request goes unanswered. Its link counts as stalled
    /// from then on.
    fn waits_for_connect(&mut self) -> bool {
        // All attempts of a transfer are for one request.
        let connects = self.dial.unanswered_connects();
        let waits = connects.is_some_and(|connects| connects.contains_link(self.link()));
        if waits {
            let until = BootInstant::now().after(STALL_MEMORY);
            self.stalled_until.insert(self.link().to_owned(), until);
        }
        waits
    }

    /// The link of the current request.
    fn link(&self) -> &str {
        self.current.as_deref().unwrap_or_default()
    }

    /// Whether bytes come over a free link that has not been measured for long enough yet. That takes an epoch or two.
    fn lacks_free_rate(&self, control: &TransferControl<'_>) -> bool {
        let comes = self.last_byte.is_some();
        comes && !control.usage.is_metered(self.link()) && self.supply.lacks_free_rate()
    }

    /// Whether the rest comes a better way by another request, which is then said.
    fn goes_over(&self, control: &mut TransferControl<'_>, progress: ContentProgress) -> bool {
        let is_worth_it = progress
            .remaining()
            .is_some_and(|rest| rest >= GO_OVER_BYTES_MIN);
        let goes =
            is_worth_it && progress.is_continuable() && self.dial.has_better_way(&control.job.url);
        if goes {
            let text = "the server speaks D2TP and has the same file: the rest comes that way";
            control.reporter.note(None, text.into());
        }
        goes
    }

    fn local_origin(&self, control: &TransferControl<'_>, links: &[Link]) -> Option<LocalOrigin> {
        match self.dial.needs_no_link() {
            true => Some(LocalOrigin::ThisMachine),
            false => LocalOrigin::of(&control.job.url, links),
        }
    }

    /// The source addresses of a link, while it is usable.
    pub(super) fn egress_link(
        &self,
        control: &TransferControl<'_>,
        name: &str,
    ) -> Option<EgressLink> {
        let links = control.links.borrow();
        match self.local_origin(control, &links) {
            Some(LocalOrigin::ThisMachine) => {
                return Some(EgressLink {
                    device: None,
                    sources: Vec::new(),
                });
            }
            Some(LocalOrigin::OnLink(link, source)) if link == name => {
                return Some(EgressLink {
                    device: Some(link),
                    sources: vec![source],
                });
            }
            _ => {}
        }
        let link = links
            .iter()
            .find(|link| link.name == name && link.is_usable())?;
        Some(EgressLink {
            device: Some(link.name.clone()),
            sources: link.source_addresses().collect(),
        })
    }

    /// Selects `link` for the next request, and reports a change.
    fn take_link(&mut self, control: &mut TransferControl<'_>, link: &str, why: String) {
        if self.current.as_deref() != Some(link) {
            let from = control.usage.set_last_link(link);
            if from.as_ref().is_some_and(|from| from != link) {
                control.usage.count_switch();
            }
            let to = link.to_owned();
            control.reporter.switched(from, to, why.clone());
            self.current = Some(link.to_owned());
        }
        control.reporter.why = why;
    }

    /// Waits as the scheduler says, or for a sign-in on a link with a captive portal.
    fn wait_for_link(
        &mut self,
        wait: LinkWait,
        control: &mut TransferControl<'_>,
        progress: ContentProgress,
    ) -> Result<Readiness, TransferFailure> {
        let wait = control.with_limit_named(wait, progress);
        control.refuse_to_wait(progress, wait.reason, &wait.why)?;
        self.current = None;
        control.block(wait.reason, wait.why.clone());
        let now = BootInstant::now();
        let suspects = self.suspects.names(&control.links.borrow(), now);
        Ok(Readiness::Wait(match suspects {
            Some(suspects) => LinkWait {
                reason: TransferReason::Portal,
                why: format!("{suspects} asks for a sign-in; {}", wait.why),
                unblocks: format!("signing in on {suspects} | {}", wait.unblocks),
            },
            None => wait,
        }))
    }

    /// The scheduler's choice. New terms apply from here on.
    fn choose(
        &mut self,
        control: &mut TransferControl<'_>,
        progress: ContentProgress,
        candidates: &[LinkCandidate],
    ) -> LinkChoice {
        control.take_new_terms();
        let source = self.supply.supply(BootInstant::now());
        control.decide(progress, candidates, false, source).choice
    }

    /// Avoids a link that leads to another host, waits, or gives up.
    fn suspect(
        &mut self,
        text: String,
        control: &mut TransferControl<'_>,
        progress: ContentProgress,
    ) -> Result<RetryDecision, TransferFailure> {
        let link = self.link().to_owned();
        let reached = progress.most > 0 || progress.is_recognisable;
        let mut others = self.candidates(control);
        others.retain(|other| other.name != link);
        let choice = self.choose(control, progress, &others);
        let elsewhere = matches!(choice, LinkChoice::Use { .. });
        let known = find(&control.links.borrow(), &link).cloned();
        let known = known.filter(|known| known.kind != LinkKind::Loopback);
        let Some(known) = known.as_ref().filter(|_| reached || elsewhere) else {
            return Err(match known.map(|known| known.kind) {
                Some(LinkKind::Wifi) => {
                    let text = format!("{text}; if {link} requires a sign-in, sign in first");
                    TransferFailure::of(TransferExit::Error, TransferReason::Portal, text)
                }
                _ => TransferFailure::error(text),
            });
        };
        let (addresses, now) = (known.addresses.clone(), BootInstant::now());
        let length = self.suspects.insert(&link, addresses, now).as_secs();
        control.reporter.note(
            Some(TransferReason::Portal),
            format!("{link}: {text}; not used for {length} s"),
        );
        Ok(RetryDecision::Now)
    }
}

impl<'a, D: Dial> TransferSource<'a> for DirectSource<'a, D> {
    type Client = D;

    fn client(&self) -> &'a D {
        self.dial
    }

    fn candidates(&mut self, control: &mut TransferControl<'_>) -> Vec<LinkCandidate> {
        let links = control.links.borrow().clone();
        let now = BootInstant::now();
        let candidate = |name: &str, class, metric| LinkCandidate {
            name: name.to_owned(),
            class,
            rate_bytes_per_s: self.rates.get(name).copied(),
            metric,
            stalled: self
                .stalled_until
                .get(name)
                .is_some_and(|until| *until > now),
            in_use: self.current.as_deref() == Some(name),
        };
        let local = self.local_origin(control, &links);
        if let Some(LocalOrigin::ThisMachine) = local {
            let class = d2tp_links::CostClass::Free;
            control.usage.set_class("lo", class);
            return vec![candidate("lo", class.into(), 0)];
        }
        let on_link =
            |link: &Link| matches!(&local, Some(LocalOrigin::OnLink(on, _)) if *on == link.name);
        let mut candidates = Vec::new();
        for link in links.iter() {
            let reaches = link.is_usable() || on_link(link);
            // A serial line leads to a proxy only.
            let leads_nowhere = matches!(link.kind, LinkKind::Loopback | LinkKind::Serial);
            if leads_nowhere || !reaches || self.suspects.contains(link, now) {
                continue;
            }
            let class = link.class.class;
            control.usage.set_class(&link.name, class);
            let metric = link.metric().unwrap_or(u32::MAX);
            candidates.push(candidate(&link.name, class.into(), metric));
        }
        candidates
    }

    fn watch_candidates(&self) -> Option<watch::Receiver<()>> {
        Some(self.dial.unanswered_connects()?.changes())
    }

    async fn prepare(
        &mut self,
        control: &mut TransferControl<'_>,
        progress: ContentProgress,
    ) -> Result<Readiness, TransferFailure> {
        self.last_byte = None;
        loop {
            let candidates = self.candidates(control);
            let choice = self.choose(control, progress, &candidates);
            let (index, why) = match LinkWait::or_use(choice) {
                Ok(used) => used,
                Err(wait) => return self.wait_for_link(wait, control, progress),
            };
            control.unblock();
            let link = &candidates[index].name;
            self.take_link(control, link, why);
            // The link may have gone in this moment; then there are others to choose from.
            if let Some(egress) = self.egress_link(control, link) {
                self.egress = egress.clone();
                return Ok(Readiness::Ready(egress));
            }
        }
    }

    fn review(
        &mut self,
        control: &mut TransferControl<'_>,
        progress: ContentProgress,
    ) -> Result<RequestReview, TransferFailure> {
        control.check_deadline(progress)?;
        let link = self.link().to_owned();
        let Some(now) = self.egress_link(control, &link) else {
            return Ok(match self.dial.survives_link_loss() {
                true => RequestReview::Stay,
                false => RequestReview::Leave,
            });
        };
        let sources = &self.egress.sources;
        if !sources.is_empty() && !sources.iter().any(|source| now.sources.contains(source)) {
            return Ok(RequestReview::Leave); // the address our connection stands on is gone
        }
        if self.goes_over(control, progress) {
            return Ok(RequestReview::Leave);
        }
        let connects = self.waits_for_connect();
        let candidates = self.candidates(control);
        let mut spends_too_much = control.metered_bytes_left() == Some(0);
        match self.choose(control, progress, &candidates) {
            LinkChoice::Use { index, why } if candidates[index].name == link => {
                control.reporter.why = why;
                return Ok(RequestReview::Stay);
            }
            LinkChoice::Wait { reason, .. } => {
                spends_too_much |= reason == LinkWaitReason::OverBudget;
            }
            // Another link that does not answer either is no reason to begin anew.
            LinkChoice::Use { index, .. } if connects && candidates[index].stalled => {
                return Ok(RequestReview::Stay);
            }
            LinkChoice::Use { .. } if connects => return Ok(RequestReview::Leave),
            // What a metered link gains would never be known.
            LinkChoice::Use { index, .. }
                if self.lacks_free_rate(control)
                    && control.usage.is_metered(&candidates[index].name) =>
            {
                return Ok(RequestReview::Stay);
            }
            LinkChoice::Use { .. } => {}
        }
        // Leaving of our own accord is only worth it if what we hold can be continued, …
        let continuable = progress.is_continuable();
        // … but what must not be paid for is left in any case.
        let forbidden = spends_too_much || control.terms.policy == CostPolicy::FreeOnly;
        Ok(
            match continuable || (control.usage.is_metered(&link) && forbidden) {
                true => RequestReview::Leave,
                false => RequestReview::Stay,
            },
        )
    }

    fn request_limit(&self, control: &TransferControl<'_>) -> Option<u64> {
        let left = control.metered_bytes_left();
        left.filter(|_| control.usage.is_metered(self.link()))
    }

    fn on_answer(
        &mut self,
        answer: &FetchResponse,
        control: &mut TransferControl<'_>,
        progress: ContentProgress,
    ) -> Result<(), FetchFault> {
        self.last_byte = Some(BootInstant::now());
        let answers = self.link().to_owned();
        self.stalled_until.remove(&answers);
        let url = &control.job.url;
        let link = self.current.as_deref().unwrap_or_default();
        let kind = find(&control.links.borrow(), link).map(|link| link.kind);
        let recognisable = progress.is_recognisable;
        if self
            .portals
            .is_portal(answer, url, (link, kind), recognisable)
        {
            let host = url.host_str().unwrap_or_default();
            let text = format!("a web page comes instead of the object of {host}");
            return Err(FetchFault::CaptivePortal(text));
        }
        control.reporter.wait_is_over();
        Ok(())
    }

    fn on_bytes(&mut self, bytes: u64, control: &mut TransferControl<'_>) {
        self.last_byte = Some(BootInstant::now());
        control.usage.add(self.link(), bytes);
    }

    fn on_held(&mut self) {
        self.last_byte = Some(BootInstant::now());
    }

    fn is_cut_short(&self, control: &TransferControl<'_>) -> bool {
        self.request_limit(control) == Some(0)
    }

    fn on_epoch(
        &mut self,
        bytes: u64,
        length: Duration,
        control: &mut TransferControl<'_>,
    ) -> String {
        let link = self.link().to_owned();
        if length > RATE_OVER {
            // Half old, half new: one epoch of silence does not make a link worthless.
            let now = bytes as f64 / length.as_secs_f64();
            let rate = self.rates.entry(link.clone()).or_insert(now);
            *rate = (*rate + now) / 2.0;
            let is_metered = control.usage.is_metered(&link);
            let moment = BootInstant::now();
            (self.supply).on_epoch(&link, is_metered, (bytes, length), moment);
        }
        link
    }

    fn check_silence(&mut self, limit: Duration) -> Result<(), FetchFault> {
        let Some(last_byte) = self.last_byte else {
            return Ok(()); // whoever waits for the head has a limit of its own
        };
        let silence = BootInstant::now().since(last_byte);
        if silence < limit {
            return Ok(());
        }
        let silence = silence.as_secs();
        Err(FetchFault::Path(format!("no data for {silence} s")))
    }

    fn cause(
        &self,
        fault: FetchFault,
        _control: &TransferControl<'_>,
        _progress: ContentProgress,
    ) -> FetchFault {
        let fault = match self.dial.session_failure() {
            Some(failure) => FetchFault::Final(failure),
            None => fault,
        };
        match (fault, self.dial.session_end_text()) {
            (FetchFault::Final(failure), _) if self.dial.goes_better_way() => FetchFault::Origin {
                text: failure.text,
                retry_after: None,
            },
            (FetchFault::Path(_), Some(text)) => FetchFault::Path(text),
            (fault, _) => fault,
        }
    }

    fn recover(
        &mut self,
        fault: FetchFault,
        control: &mut TransferControl<'_>,
        progress: ContentProgress,
    ) -> Result<RetryDecision, TransferFailure> {
        let unreached = progress.most == 0;
        let is_outage = self.egress_link(control, self.link()).is_none();
        if let FetchFault::Path(text) | FetchFault::Origin { text, .. } = &fault
            && self.dial.goes_better_way()
            && !is_outage
        {
            let text =
                format!("D2TP with the server failed ({text}): the rest comes from the web server");
            control.reporter.note(None, text);
            self.dial.leave_better_way();
            return Ok(RetryDecision::Now);
        }
        let (text, reason, retry_after, counts) = match fault {
            FetchFault::Final(failure) => return Err(failure),
            FetchFault::UntrustedPeer(text) | FetchFault::CaptivePortal(text) => {
                return self.suspect(text, control, progress);
            }
            // Once it had an address, a resolver that knows none is a bad network's.
            FetchFault::NameNotFound(text) if unreached => {
                return Err(TransferFailure::error(text));
            }
            FetchFault::Path(text) | FetchFault::NameNotFound(text) => {
                let link = self.link().to_owned();
                if is_outage {
                    return Ok(RetryDecision::Now);
                }
                let text = match self.dial.survives_link_loss() {
                    true => text, // what moves between links has no fault of one link
                    false => format!("{link}: {text}"),
                };
                let until = BootInstant::now().after(STALL_MEMORY);
                self.stalled_until.insert(link, until);
                // Once the origin has answered, a bad network is waited out.
                (text, TransferReason::PathTooSlow, None, unreached)
            }
            FetchFault::Origin { text, retry_after } => {
                (text, TransferReason::OriginWait, retry_after, true)
            }
            FetchFault::Proxy(text) => (text, TransferReason::ProxyUnreachable, None, true),
        };
        Ok(RetryDecision::After(Backoff {
            text,
            reason,
            retry_after,
            counts,
            at_most: BACKOFF_MAX,
            ends_with_links: true,
            first_at_once: false,
        }))
    }

    fn answerer(&self) -> &'static str {
        "the origin"
    }
}

fn find<'l>(links: &'l [Link], name: &str) -> Option<&'l Link> {
    links.iter().find(|link| link.name == name)
}
