//! A download that is only thought through (`--dry-run`): which links there are, what would be done
//! and why, what to expect. Nothing is written, and of the origin at most the head is asked, over a
//! free link.

use std::path::PathBuf;
use std::time::Duration;

use d2tp_sched::{
    FREE_RATE_FIRST_BYTES_PER_S, FlowDemand, LinkCandidate, LinkChoice, LinkClass,
    SIZE_UNKNOWN_BYTES,
};
use serde::Serialize;
use tokio::time::timeout;

use super::super::mode::FetchMode;
use super::super::partial;
use super::super::proxy::ProxyClient;
use super::super::report::{
    DeadlinePromise, NO_LINK, NO_LINK_WHY, TransferEvent, TransferObserver,
};
use super::{
    BootInstant, ClientDecision, ClientReport, ContentPart, Destination, Dial, DownloadSink,
    EgressLink, FetchFault, FetchResponse, GetRequest, TransferContext, TransferDirection,
    TransferFailure, TransferJob, TransferReason, TransferRun, display, exchange, may_cost,
    redact_url, with_sink,
};

/// Time for the origin to answer a question that is asked out of curiosity.
const LOOK_MAX: Duration = Duration::from_secs(15); // a guess

/// What would be done, and why.
#[derive(Debug, Clone, Serialize)]
pub struct DryRunPlan {
    /// The URL asked for, without credentials.
    pub url: String,
    /// Where the object would go.
    pub file: String,
    /// Who would speak to the origin.
    pub mode: FetchMode,
    /// Every link the system has.
    pub links: Vec<DryRunLink>,
    /// Bytes an earlier run left to continue from.
    pub held_bytes: u64,
    /// The size of the object, when known.
    pub length: Option<u64>,
    /// Who told the size, or why nobody was asked.
    pub length_from: String,
    /// Whether a broken download can be continued, when known.
    pub resumable: Option<bool>,
    /// The link that would be used now; none is a wait.
    pub link: Option<String>,
    /// The reason code of a wait.
    pub reason: Option<TransferReason>,
    /// Why, in words.
    pub why: String,
    /// What would end a wait.
    pub unblocks: Option<String>,
    /// Seconds until the deadline.
    pub deadline_s: Option<f64>,
    /// What can be promised.
    pub promise: Option<DeadlinePromise>,
    /// What that rests upon.
    pub forecast: DryRunForecast,
}

/// What the links are taken to carry.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DryRunForecast {
    /// Bytes still to come.
    pub remaining_bytes: u64,
    /// The origin has not told a size: `remaining_bytes` is a guess.
    pub size_is_a_guess: bool,
    /// What the free links that are up carry together, bytes per second; assumed of those that were
    /// never used.
    pub free_rate_bytes_per_s: f64,
    /// Seconds that takes on them; none if there is none.
    pub free_needed_s: Option<f64>,
    /// Whether the deadline is worth waiting for; none without a deadline, or without links.
    pub feasible: Option<bool>,
    /// Bytes on metered links, on average.
    pub metered_bytes_expected: u64,
    /// More than this it never is.
    pub metered_bytes_worst: u64,
}

/// A link, as it was seen.
#[derive(Debug, Clone, Serialize)]
pub struct DryRunLink {
    /// Name of the network device.
    pub name: String,
    /// What it is made of.
    pub kind: d2tp_links::LinkKind,
    /// What a byte on it costs.
    pub class: d2tp_links::CostClass,
    /// Who says so.
    pub class_because: String,
    /// Whether the link has an address and a route.
    pub usable: bool,
}

/// Hears nothing.
struct NullObserver;

impl TransferObserver for NullObserver {
    fn on_event(&mut self, _event: &TransferEvent) {}
}

/// Thinks a download without a proxy through.
pub async fn plan_direct<D: Dial>(
    job: &TransferJob,
    dial: &D,
    setting: TransferContext,
    offline: bool,
) -> Result<DryRunPlan, TransferFailure> {
    let mut deaf = NullObserver;
    let mut transfer = imagined(job, dial, setting, &mut deaf);
    let ways = transfer.link_candidates();
    let (told, from) = match transfer.may_look(&ways, offline) {
        Ok(link) => match transfer.egress_link(&link) {
            Some(via) => look(dial, &transfer.question(), &via, &format!("over {link}")).await,
            None => (None, "the network is gone".into()),
        },
        Err(why) => (None, why),
    };
    transfer.conclude(told, from, &ways, false)
}

/// Thinks a download through a proxy through.
pub async fn plan_proxied(
    job: &TransferJob,
    proxy: &ProxyClient,
    setting: TransferContext,
    offline: bool,
) -> Result<DryRunPlan, TransferFailure> {
    let mut deaf = NullObserver;
    let mut transfer = imagined(job, proxy, setting, &mut deaf);
    let ways = transfer.proxy_link_candidates();
    let (told, from) = match transfer.may_look(&ways, offline) {
        Ok(_) => match proxy.connect().await {
            Ok(_) => {
                let via = EgressLink {
                    device: None,
                    sources: Vec::new(),
                };
                proxy.set_time_left(Some(LOOK_MAX));
                look(proxy, &transfer.question(), &via, "through the proxy").await
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
    transfer.conclude(told, from, &ways, true)
}

/// A download whose bytes would go nowhere, and that knows what an earlier run left.
fn imagined<'a, D: Dial>(
    job: &'a TransferJob,
    dial: &'a D,
    setting: TransferContext,
    deaf: &'a mut NullObserver,
) -> TransferRun<'a, D> {
    let url = redact_url(&job.url);
    let sink = DownloadSink::output(Box::new(std::io::sink()), &url);
    let mut transfer = with_sink(
        job,
        dial,
        setting,
        TransferDirection::Down,
        deaf,
        sink,
        BootInstant::now(),
    );
    if let Some(note) = partial::find_note(&job.expected_path(), &url)
        && !matches!(job.destination, Destination::Stdout)
    {
        transfer.sink.note = note;
    }
    transfer
}

impl<D: Dial> TransferRun<'_, D> {
    /// Asks the scheduler as the download would at its beginning.
    fn imagine(&mut self, ways: &[LinkCandidate], together: bool) -> ClientDecision {
        let note = &self.sink.note;
        let remaining_bytes = note.length.map(|l| l.saturating_sub(note.durable_bytes));
        self.seat.decide(&ClientReport {
            demand: FlowDemand {
                remaining_bytes,
                ..self.demand()
            },
            size_bytes: note.length,
            priority: self.terms.priority,
            candidates: ways,
            carried: &self.bytes_by_link,
            uses_several_links: together,
            always_pays: false,
            is_interactive: false,
            keeps_awake: true,
        })
    }

    /// The free link to ask over, or why the origin is not asked.
    fn may_look(&mut self, ways: &[LinkCandidate], offline: bool) -> Result<String, String> {
        if self.sink.note.length.is_some() {
            return Err("an earlier run".into());
        }
        if offline {
            return Err("not asked: --offline".into());
        }
        match self.imagine(ways, false).choice {
            LinkChoice::Use { index, .. } if ways[index].class == d2tp_sched::LinkClass::Free => {
                Ok(ways[index].name.clone())
            }
            _ => Err("not asked: no free network is up".into()),
        }
    }

    fn question(&self) -> GetRequest {
        GetRequest {
            from: 0,
            to: None,
            if_range: None,
            head_only: true,
            ..self.ask_whole()
        }
    }

    fn forecast(&self, ways: &[LinkCandidate], together: bool) -> DryRunForecast {
        let note = &self.sink.note;
        let left = note.length.map(|l| l.saturating_sub(note.durable_bytes));
        let free = ways.iter().filter(|way| way.class == LinkClass::Free);
        let rates = free.map(|way| way.rate_bytes_per_s.unwrap_or(FREE_RATE_FIRST_BYTES_PER_S));
        let rate = match together {
            true => rates.sum(),
            false => rates.fold(0.0, f64::max),
        };
        let remaining_bytes = left.unwrap_or(SIZE_UNKNOWN_BYTES);
        let promise = self.seat.promise();
        let paid = promise.filter(|_| may_cost(&self.links.borrow()));
        DryRunForecast {
            remaining_bytes,
            size_is_a_guess: left.is_none(),
            free_rate_bytes_per_s: rate,
            free_needed_s: (rate > 0.0).then(|| remaining_bytes as f64 / rate),
            feasible: self
                .time_left()
                .filter(|_| !ways.is_empty())
                .and_then(|_| Some(!promise?.is_infeasible())),
            metered_bytes_expected: paid.map_or(0, |p| p.expected_metered_bytes),
            metered_bytes_worst: paid.map_or(0, |p| p.most_metered_bytes),
        }
    }

    fn conclude(
        mut self,
        told: Option<Result<FetchResponse, TransferFailure>>,
        from: String,
        ways: &[LinkCandidate],
        together: bool,
    ) -> Result<DryRunPlan, TransferFailure> {
        let mut resumable = self.sink.note.validator.as_ref().map(|_| true);
        if let Some(answer) = told {
            let answer = answer?;
            resumable =
                Some(answer.validator.is_some() || self.dial.mode() == FetchMode::ProxyFetch);
            if let ContentPart::Whole(length) = answer.part {
                self.sink.note.length = length;
            }
        }
        let (link, reason, why, unblocks) = match self.imagine(ways, together).choice {
            LinkChoice::Use { index, .. } if ways[index].name == NO_LINK => {
                (Some(NO_LINK.to_owned()), None, NO_LINK_WHY.to_owned(), None)
            }
            LinkChoice::Use { index, why } => (Some(ways[index].name.clone()), None, why, None),
            LinkChoice::Wait {
                reason,
                why,
                unblocks,
            } => (
                None,
                Some(TransferReason::from(reason)),
                why,
                Some(unblocks),
            ),
        };
        let links = self.links.borrow().clone();
        let links = links.iter().map(|link| DryRunLink {
            name: link.name.clone(),
            kind: link.kind,
            class: link.class.class,
            class_because: link.class.because.to_string(),
            usable: link.is_usable() || ways.iter().any(|way| way.name == link.name),
        });
        let named: PathBuf = self.job.expected_path();
        Ok(DryRunPlan {
            url: redact_url(&self.job.url),
            file: display(&self.job.destination, &named),
            mode: self.dial.mode(),
            links: links.collect(),
            held_bytes: self.sink.note.durable_bytes,
            length: self.sink.note.length,
            length_from: from,
            resumable,
            link,
            reason,
            why,
            unblocks,
            deadline_s: self.time_left().map(|left| left.as_secs_f64()),
            promise: self.promise(),
            forecast: self.forecast(ways, together),
        })
    }
}

/// Asks for the head. What it told, and the way it came or why there is nothing.
async fn look<D: Dial>(
    dial: &D,
    ask: &GetRequest,
    via: &EgressLink,
    way: &str,
) -> (Option<Result<FetchResponse, TransferFailure>>, String) {
    match timeout(LOOK_MAX, exchange(dial, ask, via)).await {
        Ok(Ok(answer)) => (Some(Ok(answer)), format!("the origin, asked {way}")),
        Ok(Err(FetchFault::Final(failure))) => (Some(Err(failure)), String::new()),
        Ok(Err(
            FetchFault::Path(text)
            | FetchFault::Proxy(text)
            | FetchFault::NameNotFound(text)
            | FetchFault::UntrustedPeer(text)
            | FetchFault::CaptivePortal(text)
            | FetchFault::Origin { text, .. },
        )) => (None, text),
        Err(_) => (None, format!("no answer {way} in {LOOK_MAX:?}")),
    }
}
