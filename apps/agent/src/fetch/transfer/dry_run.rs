//! A simulated download (`--dry-run`): prints the available links, the decision with its reason,
//! and the expected result. Nothing is written, and at most a HEAD request is sent to the origin,
//! over a free link.

use std::time::Duration;

use d2tp_sched::{
    ClientDecision, CompletionEstimate, FREE_RATE_FIRST_BYTES_PER_S, Grant, LinkCandidate,
    LinkChoice, LinkClass, PROBE_BYTES, SIZE_UNKNOWN_BYTES, SourceSupply, TransferDirection,
};
use serde::Serialize;
use tokio::time::timeout;

use super::control::{LinkWait, TransferControl, may_cost};
use super::direct::DirectSource;
use super::download::whole_object;
use super::job::{Destination, TransferContext, TransferJob, redact_url};
use super::progress::ContentProgress;
use super::proxied::{FlowSender, ProxySource};
use super::source::TransferSource;
use crate::fetch::boot_clock::BootInstant;
use crate::fetch::dial::{Dial, EgressLink, FetchFault};
use crate::fetch::exchange::{ContentPart, FetchResponse, GetRequest, exchange};
use crate::fetch::mode::FetchMode;
use crate::fetch::outcome::{TransferFailure, TransferReason};
use crate::fetch::partial;
use crate::fetch::proxy::ProxyClient;
use crate::fetch::report::{
    DeadlinePromise, NO_LINK, NO_LINK_WHY, TransferEvent, TransferObserver,
};
use crate::fetch::request_method::RequestMethod;

/// How long the origin may take to answer a dry run's request.
const LOOK_MAX: Duration = Duration::from_secs(15); // a guess

/// What a transfer would do, and why.
#[derive(Debug, Clone, Serialize)]
pub struct DryRunPlan {
    /// The URL asked for, without credentials.
    pub url: String,
    /// The destination of the object.
    pub file: String,
    /// Which host would talk to the origin.
    pub mode: FetchMode,
    /// Why the download would be refused as it was requested, such as a file that exists.
    pub refused: Option<String>,
    /// The proxy, by host and port, if the download goes through one.
    pub proxy: Option<String>,
    /// Every link the system has.
    pub links: Vec<DryRunLink>,
    /// Bytes an earlier run left to continue from.
    pub held_bytes: u64,
    /// Size of the object, if known.
    pub length: Option<u64>,
    /// The source of the size, or why the origin was not asked.
    pub length_from: String,
    /// Whether an interrupted download can be continued, if known.
    pub resumable: Option<bool>,
    /// The link that would be used now; none if the transfer would wait.
    pub link: Option<String>,
    /// The reason code of a wait.
    pub reason: Option<TransferReason>,
    /// The reason in words.
    pub why: String,
    /// What would end a wait.
    pub unblocks: Option<String>,
    /// Seconds until the deadline.
    pub deadline_s: Option<f64>,
    /// The estimate for the deadline.
    pub promise: Option<DeadlinePromise>,
    /// The measurement of a metered link that the transfer would make, or might make; none if the
    /// deadline is not in doubt.
    pub probe: Option<DryRunProbe>,
    /// The assumptions of the estimate.
    pub forecast: DryRunForecast,
}

/// Mobile data that a transfer spends to learn how fast a metered link is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DryRunProbe {
    /// Name of the metered link's network device.
    pub link: String,
    /// The most payload of one measurement.
    pub bytes: u64,
    /// Whether the measurement would be made at once. Otherwise it is made if free links, which are not measured
    /// yet, turn out to be too slow.
    pub is_certain: bool,
}

/// The assumed capacity of links.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DryRunForecast {
    /// Bytes still to come.
    pub remaining_bytes: u64,
    /// Whether the origin did not report a size, so that `remaining_bytes` is a guess.
    pub size_is_a_guess: bool,
    /// The total rate of the free links that are up, in bytes per second; assumed for links that were
    /// never used.
    pub free_rate_bytes_per_s: f64,
    /// Seconds that the transfer needs on free links; none if there are none.
    pub free_needed_s: Option<f64>,
    /// Whether waiting for the deadline is worthwhile; none without a deadline, or without links.
    pub feasible: Option<bool>,
    /// Expected bytes on metered links.
    pub metered_bytes_expected: u64,
    /// The maximum of bytes on metered links.
    pub metered_bytes_worst: u64,
}

/// A link as a dry run sees it.
#[derive(Debug, Clone, Serialize)]
pub struct DryRunLink {
    /// Name of the network device.
    pub name: String,
    /// The kind of network.
    pub kind: d2tp_links::LinkKind,
    /// The cost class.
    pub class: d2tp_links::CostClass,
    /// The source of the cost class.
    pub class_because: String,
    /// Whether the link has an address and a route.
    pub usable: bool,
}

/// An observer that ignores events.
struct NullObserver;

impl TransferObserver for NullObserver {
    fn on_event(&mut self, _event: &TransferEvent) {}
}

/// The origin's answer to a request for the head, and its source or why there was none.
type HeadAnswer = (Option<Result<FetchResponse, TransferFailure>>, String);

/// Plans a download without a proxy.
pub async fn plan_direct<D: Dial>(
    job: &TransferJob,
    dial: &D,
    context: TransferContext,
    offline: bool,
) -> Result<DryRunPlan, TransferFailure> {
    let mut observer = NullObserver;
    let mut run = DryRun::new(job, dial.mode(), context, false, &mut observer);
    let mut source = DirectSource::new(dial);
    let candidates = source.candidates(&mut run.control);
    let told = match run.may_ask(&candidates, offline) {
        Ok(link) => match source.egress_link(&run.control, &link) {
            Some(via) => ask_head(dial, &head_of(job), &via, &format!("over {link}")).await,
            None => (None, "the network is gone".into()),
        },
        Err(why) => (None, why),
    };
    run.conclude(told, &candidates)
}

/// Plans a download through a proxy.
pub async fn plan_proxied(
    job: &TransferJob,
    proxy: &ProxyClient,
    context: TransferContext,
    offline: bool,
) -> Result<DryRunPlan, TransferFailure> {
    let mut observer = NullObserver;
    let mut run = DryRun::new(job, proxy.mode(), context, true, &mut observer);
    let candidates = ProxySource::new(proxy, FlowSender::Proxy).candidates(&mut run.control);
    let (told, from) = match run.may_ask(&candidates, offline) {
        Ok(_) => match proxy.connect().await {
            Ok(_) => {
                let via = EgressLink {
                    device: None,
                    sources: Vec::new(),
                };
                proxy.set_time_left(Some(LOOK_MAX));
                ask_head(proxy, &head_of(job), &via, "through the proxy").await
            }
            Err(error) => (None, error.to_string()),
        },
        Err(why) => (None, why),
    };
    let answers = proxy.has_answering_path();
    proxy.close().await;
    let from = if told.is_none() && !answers && from.contains("no answer") {
        format!(
            "the proxy {} did not answer in {LOOK_MAX:?}",
            proxy.address_text()
        )
    } else {
        from
    };
    let mut plan = run.conclude((told, from), &candidates)?;
    plan.proxy = Some(proxy.address_text());
    Ok(plan)
}

/// A download that is only planned, with what an earlier run left.
struct DryRun<'a> {
    control: TransferControl<'a>,
    progress: ContentProgress,
    /// Whether the download would use several links at once.
    together: bool,
}

impl<'a> DryRun<'a> {
    fn new(
        job: &'a TransferJob,
        mode: FetchMode,
        context: TransferContext,
        together: bool,
        observer: &'a mut NullObserver,
    ) -> DryRun<'a> {
        let (start, direction) = (BootInstant::now(), TransferDirection::Down);
        let note = match job.destination {
            Destination::Stdout | Destination::Device(_) => None,
            _ => partial::find_note(&job.expected_path(), &redact_url(&job.url)),
        };
        let progress = note.map_or_else(ContentProgress::default, |note| ContentProgress {
            done: note.durable_bytes,
            length: note.length,
            repeated_by_request: 0,
            most: note.durable_bytes,
            is_recognisable: note.validator.is_some(),
        });
        DryRun {
            control: TransferControl::new(job, mode, context, direction, observer, start),
            progress,
            together,
        }
    }

    /// Asks the scheduler, as the download would at its start.
    fn choose(&self, candidates: &[LinkCandidate]) -> ClientDecision {
        self.control.decide(
            self.progress,
            candidates,
            self.together,
            SourceSupply::Ample,
        )
    }

    /// The free link over which the origin may be asked, or why it is not asked.
    fn may_ask(&self, candidates: &[LinkCandidate], offline: bool) -> Result<String, String> {
        if self.progress.length.is_some() {
            return Err("an earlier run".into());
        }
        if offline {
            return Err("not asked: --offline".into());
        }
        match self.choose(candidates).choice {
            LinkChoice::Use { index, .. } if candidates[index].class == LinkClass::Free => {
                Ok(candidates[index].name.clone())
            }
            _ => Err("not asked: no free network is up".into()),
        }
    }

    /// The measurement of a metered link that `grant`, or a doubt about free links, leads to.
    fn probe(&self, candidates: &[LinkCandidate], grant: Grant) -> Option<DryRunProbe> {
        let metered = |link: &&LinkCandidate| link.class == LinkClass::Metered;
        let link = candidates.iter().find(metered)?.name.clone();
        let left = self.control.metered_bytes_left().unwrap_or(u64::MAX);
        let probe = |bytes: u64, is_certain| DryRunProbe {
            link,
            bytes: bytes.min(left),
            is_certain,
        };
        let may_be_late = |promise: CompletionEstimate| promise.expected_metered_bytes > 0;
        match grant {
            Grant::Probe { bytes } => Some(probe(bytes, true)),
            // How fast free links are is found out by the transfer itself.
            Grant::None
                if self.together && self.control.spending.promise().is_some_and(may_be_late) =>
            {
                Some(probe(PROBE_BYTES, false))
            }
            Grant::None | Grant::Path | Grant::Spend { .. } => None,
        }
    }

    fn forecast(&self, candidates: &[LinkCandidate], probe_bytes: u64) -> DryRunForecast {
        let left = self.progress.remaining();
        let free = candidates
            .iter()
            .filter(|link| link.class == LinkClass::Free);
        let rates = free.map(|link| link.rate_bytes_per_s.unwrap_or(FREE_RATE_FIRST_BYTES_PER_S));
        let rate = match self.together {
            // A sum of nothing is -0.
            true => rates.fold(0.0, |sum, rate| sum + rate),
            false => rates.fold(0.0, f64::max),
        };
        let remaining_bytes = left.unwrap_or(SIZE_UNKNOWN_BYTES);
        let promise = self.control.spending.promise();
        let paid = promise.filter(|_| may_cost(&self.control.links.borrow()));
        DryRunForecast {
            remaining_bytes,
            size_is_a_guess: left.is_none(),
            free_rate_bytes_per_s: rate,
            free_needed_s: (rate > 0.0).then(|| remaining_bytes as f64 / rate),
            feasible: (self.control.time_left())
                .filter(|_| !candidates.is_empty())
                .and_then(|_| Some(!promise?.is_infeasible())),
            metered_bytes_expected: paid
                .map_or(0, |p| p.expected_metered_bytes)
                .max(probe_bytes),
            metered_bytes_worst: paid.map_or(0, |p| p.most_metered_bytes).max(probe_bytes),
        }
    }

    fn conclude(
        mut self,
        (told, from): HeadAnswer,
        candidates: &[LinkCandidate],
    ) -> Result<DryRunPlan, TransferFailure> {
        let mode = self.control.reporter.mode();
        let mut resumable = self.progress.is_recognisable.then_some(true);
        if let Some(answer) = told {
            let answer = answer?;
            resumable = Some(answer.validator.is_some() || mode == FetchMode::ProxyFetch);
            if let ContentPart::Whole(length) = answer.part {
                self.progress.length = length;
            }
        }
        let decision = self.choose(candidates);
        let probe = self.probe(candidates, decision.grant);
        let certain = probe.as_ref().filter(|probe| probe.is_certain);
        let probe_bytes = certain.map_or(0, |probe| probe.bytes);
        let (link, reason, why, unblocks) = match LinkWait::or_use(decision.choice) {
            Ok((index, _)) if candidates[index].name == NO_LINK => {
                (Some(NO_LINK.to_owned()), None, NO_LINK_WHY.to_owned(), None)
            }
            Ok((index, why)) => (Some(candidates[index].name.clone()), None, why, None),
            Err(wait) => (None, Some(wait.reason), wait.why, Some(wait.unblocks)),
        };
        let (job, control) = (self.control.job, &self.control);
        let links = control.links.borrow().clone();
        let is_candidate = |name: &str| candidates.iter().any(|link| link.name == name);
        let links = links.iter().map(|link| DryRunLink {
            name: link.name.clone(),
            kind: link.kind,
            class: link.class.class,
            class_because: link.class.because.to_string(),
            usable: link.is_usable() || is_candidate(&link.name),
        });
        Ok(DryRunPlan {
            url: redact_url(&job.url),
            file: job.destination.describe(&job.expected_path()),
            mode,
            refused: job.check_path().err().map(|failure| failure.text),
            proxy: None,
            links: links.collect(),
            held_bytes: self.progress.done,
            length: self.progress.length,
            length_from: from,
            resumable,
            link,
            reason,
            why,
            unblocks,
            deadline_s: control.time_left().map(|left| left.as_secs_f64()),
            promise: control.promise(self.progress),
            probe,
            forecast: self.forecast(candidates, probe_bytes),
        })
    }
}

/// The request for the head of the job's object.
fn head_of(job: &TransferJob) -> GetRequest {
    GetRequest {
        method: RequestMethod::Head,
        ..whole_object(job)
    }
}

/// Requests the head; `way` describes the route in words.
async fn ask_head<D: Dial>(
    dial: &D,
    request: &GetRequest,
    via: &EgressLink,
    way: &str,
) -> HeadAnswer {
    let answered = timeout(LOOK_MAX, exchange(dial, request, via)).await;
    if !matches!(answered, Ok(Ok(_)))
        && let Some(failure) = dial.session_failure()
    {
        return (Some(Err(failure)), String::new());
    }
    match answered {
        Ok(Ok(answer)) => (Some(Ok(answer)), format!("from the server, asked {way}")),
        Ok(Err(FetchFault::Final(failure))) => (Some(Err(failure)), String::new()),
        Ok(Err(FetchFault::Path(text) | FetchFault::Proxy(text))) => {
            (None, dial.session_end_text().unwrap_or(text))
        }
        Ok(Err(
            FetchFault::NameNotFound(text)
            | FetchFault::UntrustedPeer(text)
            | FetchFault::CaptivePortal(text)
            | FetchFault::Origin { text, .. },
        )) => (None, text),
        Err(_) => (None, format!("no answer {way} in {LOOK_MAX:?}")),
    }
}
