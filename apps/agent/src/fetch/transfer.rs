//! The order of things in a download: choose a link or wait, ask, receive, check, finish.
//!
//! ```text
//!        ┌────────────── link changed · a second passed · link lost · stalled ─────────────┐
//!        ▼                                                                                 │
//!  choose ── Wait: say why, sleep until something changes                                  │
//!        └── Use ──▶ exchange ──▶ 200: from zero   206: compare the overlap, then append ──┤
//!                        └─ fault: back off, count                          whole ──▶ digest, commit
//! ```
//!
//! Whether bytes may be joined to those we hold is decided in one place (`joining`): the origin's
//! strong validator must be the same, the length too, and the last bytes we hold must come again
//! equal. If any of it fails the download starts from zero and says `origin_changed`.

mod budget;
mod dry_run;
mod ending;
mod joining;
mod proxied;
mod reach;
mod suspect_links;
mod upload;
mod waiting;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use d2tp_links::{CostClass, Link};
use d2tp_sched::{CostPolicy, LinkCandidate, LinkChoice, LinkWaitReason, format_duration};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use url::Url;

use super::boot_clock::BootInstant;
use super::dial::{Dial, EgressLink, FetchFault};
use super::exchange::{ContentPart, FetchResponse, GetRequest, exchange};
use super::filename;
use super::header::HeaderField;
use super::outcome::{TransferExit, TransferFailure, TransferReason};
use super::proxy::ProxyClient;
use super::report::{DeadlinePromise, TransferEvent, TransferObserver, TransferReport, percent};
use super::sink::{self, DownloadSink, OVERLAP_BYTES_MAX};
use crate::terms::TransferTerms;
use d2tp_driver::{SchedulerHandle, SpendHandle};
use d2tp_sched::{ClientDecision, ClientReport, TransferDirection};

pub use dry_run::{DryRunPlan, plan_direct, plan_proxied};
pub(super) use reach::on_link;
use suspect_links::SuspectLinks;
pub use upload::run_upload;
use waiting::BACKOFF_FIRST;

/// The scheduling epoch of the Cedos paper (§III.D): rates are averages over it.
const EPOCH: Duration = Duration::from_secs(1);

/// Starts from zero before we call the origin unusable: each costs a whole object at worst.
pub const RESTARTS_MAX: u32 = 5; // a guess

/// Where the object goes.
#[derive(Debug, Clone)]
pub enum Destination {
    /// This file, replaced when the object is whole.
    File(PathBuf),
    /// A file in this directory (empty: the working directory), named by the URL or the origin;
    /// must not exist.
    InDirectory(PathBuf),
    /// Standard output.
    Stdout,
    /// Nothing comes: an upload.
    Nowhere,
}

/// A download, as the user asked for it.
#[derive(Debug, Clone)]
pub struct TransferJob {
    /// The object.
    pub url: Url,
    /// Where it goes.
    pub destination: Destination,
    /// By when, and at what cost.
    pub terms: TransferTerms,
    /// Start at once or not at all.
    pub now: bool,
    /// The digest the object must have.
    pub integrity: Option<[u8; 32]>,
    /// Tries without a new byte before giving up on the origin.
    pub tries_max: u32,
    /// Time without a byte after which a connection is dropped.
    pub stall: Duration,
    /// Follow redirects from https to http.
    pub allow_downgrade: bool,
    /// Fields of the user's own for the request.
    pub fields: Arc<[HeaderField]>,
}

impl TransferJob {
    /// A file that nobody mentioned is not replaced.
    ///
    /// # Errors
    /// It is there.
    pub fn refuse_existing(&self) -> Result<(), TransferFailure> {
        let named = self.expected_path();
        if matches!(self.destination, Destination::InDirectory(_)) && named.exists() {
            let named = named.display();
            return Err(TransferFailure::usage(format!(
                "{named} exists; -o {named} replaces it"
            )));
        }
        Ok(())
    }

    /// The place where the bytes go can be written to.
    ///
    /// # Errors
    /// Why not.
    pub fn check_destination(&self) -> Result<(), TransferFailure> {
        match &self.destination {
            Destination::File(_) | Destination::InDirectory(_) => {
                sink::check_writable(&self.expected_path(), &redact_url(&self.url))
            }
            Destination::Stdout | Destination::Nowhere => Ok(()),
        }
    }

    /// Where the bytes would go, by the name known before the origin is asked.
    pub fn expected_path(&self) -> PathBuf {
        let name = || filename::from_url(&self.url);
        match &self.destination {
            Destination::File(path) => path.clone(),
            Destination::InDirectory(directory) => directory.join(name()),
            Destination::Stdout | Destination::Nowhere => name().into(),
        }
    }
}

/// What a transfer runs in.
#[derive(Debug, Clone)]
pub struct TransferContext {
    /// The links of this device.
    pub links: watch::Receiver<Arc<Vec<Link>>>,
    /// Turning true leaves a partial.
    pub stop: watch::Receiver<bool>,
    /// Who says which links it may use.
    pub scheduler: Arc<SchedulerHandle>,
    /// Other terms than it began with, where they can come.
    pub terms: Option<watch::Receiver<TransferTerms>>,
    /// The number it is known by to the scheduler.
    pub id: u64,
    /// Where it is written down that the object is about to get its name.
    pub pending_rename: Option<PathBuf>,
}

impl TransferContext {
    /// For a transfer beside which there is no other.
    pub fn standalone(
        links: watch::Receiver<Arc<Vec<Link>>>,
        stop: watch::Receiver<bool>,
        scheduler: Arc<SchedulerHandle>,
    ) -> TransferContext {
        TransferContext {
            links,
            stop,
            scheduler,
            terms: None,
            id: 0,
            pending_rename: None,
        }
    }
}

/// Why an attempt ended without a fault.
enum AttemptEnd {
    Whole,
    ChooseAgain,
}

struct TransferRun<'a, D> {
    job: &'a TransferJob,
    dial: &'a D,
    links: watch::Receiver<Arc<Vec<Link>>>,
    stop: watch::Receiver<bool>,
    seat: SpendHandle,
    terms: TransferTerms,
    /// Terms that are another's to change.
    orders: Option<watch::Receiver<TransferTerms>>,
    observer: &'a mut dyn TransferObserver,
    sink: DownloadSink,
    start: BootInstant,
    rates: HashMap<String, f64>,
    stalled_until: HashMap<String, BootInstant>,
    classes: HashMap<String, CostClass>,
    doubts: SuspectLinks,
    /// The last answer that was the object was a web page.
    was_page: Option<bool>,
    /// Why no link may be used, while that is so.
    held: Option<(TransferReason, String)>,
    bytes_by_link: BTreeMap<String, u64>,
    /// Bytes that links that cost were paid for and that are none of the object's: asked with, or lost
    /// on the way.
    paid_besides: u64,
    current: Option<String>,
    last_link: Option<String>,
    /// What was promised when the size was known.
    first_promise: Option<DeadlinePromise>,
    /// Why the current link, in words.
    why: String,
    said_waiting: Option<TransferReason>,
    said_at: Option<BootInstant>,
    said_encoding: bool,
    said_hardly: bool,
    switches: u32,
    duplicate_bytes: u64,
    restarts: u32,
    /// Tries since the object last grew beyond `best_length`.
    tries: u32,
    best_length: u64,
    /// Why what we hold cannot be continued, if so.
    distrust: Option<String>,
    ranges_refused: bool,
    /// An answer's bytes are coming in.
    receiving: bool,
    /// When new bytes of the object came first, and last.
    came: Option<(BootInstant, BootInstant)>,
    encoding: Option<String>,
    offered_name: Option<String>,
    /// What is sent, where something is.
    outgoing: Option<upload::UploadState>,
    /// Where it is written down that the object is about to get its name.
    landing: Option<PathBuf>,
}

/// Runs a download straight from its origin to its end and reports it.
pub async fn run<D: Dial>(
    job: &TransferJob,
    dial: &D,
    setting: TransferContext,
    observer: &mut dyn TransferObserver,
) -> TransferExit {
    match begin(job, dial, setting, TransferDirection::Down, observer) {
        Ok((mut transfer, named)) => {
            transfer.greet(&named);
            let outcome = transfer.receive().await;
            transfer.finish(outcome, named).await
        }
        Err(exit) => exit,
    }
}

/// Runs a download through a proxy, as [`run`] does.
pub async fn run_proxied(
    job: &TransferJob,
    proxy: &ProxyClient,
    setting: TransferContext,
    observer: &mut dyn TransferObserver,
) -> TransferExit {
    match begin(job, proxy, setting, TransferDirection::Down, observer) {
        Ok((mut transfer, named)) => {
            transfer.greet(&named);
            let outcome = transfer.exchange_proxied().await;
            transfer.finish(outcome, named).await
        }
        Err(exit) => exit,
    }
}

/// Opens the place where the bytes go.
fn begin<'a, D: Dial>(
    job: &'a TransferJob,
    dial: &'a D,
    setting: TransferContext,
    direction: TransferDirection,
    observer: &'a mut dyn TransferObserver,
) -> Result<(TransferRun<'a, D>, PathBuf), TransferExit> {
    let start = BootInstant::now();
    let url = redact_url(&job.url);
    let named = job.expected_path();
    let opened = match &job.destination {
        Destination::File(path) => DownloadSink::file(path, &url),
        Destination::InDirectory(_) => job
            .refuse_existing()
            .and_then(|()| DownloadSink::file(&named, &url)),
        Destination::Stdout => Ok(DownloadSink::output(Box::new(std::io::stdout()), &url)),
        Destination::Nowhere => Ok(DownloadSink::output(Box::new(std::io::sink()), &url)),
    };
    let sink = match opened {
        Ok(sink) => sink,
        Err(failure) => {
            let file = display(&job.destination, &named);
            let verb = match direction {
                TransferDirection::Down => "get",
                TransferDirection::Up => "put",
            };
            let report =
                TransferReport::failed(verb, (url, file), dial.mode(), &job.terms, &failure);
            observer.on_event(&TransferEvent::Error(report));
            return Err(failure.exit);
        }
    };
    let transfer = with_sink(job, dial, setting, direction, observer, sink, start);
    Ok((transfer, named))
}

/// A download that begins at `start` and has what `sink` holds.
fn with_sink<'a, D: Dial>(
    job: &'a TransferJob,
    dial: &'a D,
    setting: TransferContext,
    direction: TransferDirection,
    observer: &'a mut dyn TransferObserver,
    sink: DownloadSink,
    start: BootInstant,
) -> TransferRun<'a, D> {
    TransferRun {
        job,
        dial,
        links: setting.links,
        stop: setting.stop,
        seat: setting.scheduler.join(direction, setting.id),
        terms: job.terms.clone(),
        orders: setting.terms,
        observer,
        best_length: sink.held_bytes(),
        sink,
        start,
        rates: HashMap::new(),
        stalled_until: HashMap::new(),
        classes: HashMap::new(),
        doubts: SuspectLinks::default(),
        was_page: None,
        held: None,
        bytes_by_link: BTreeMap::new(),
        paid_besides: 0,
        current: None,
        last_link: None,
        first_promise: None,
        why: String::new(),
        said_waiting: None,
        said_at: None,
        said_encoding: false,
        said_hardly: false,
        switches: 0,
        duplicate_bytes: 0,
        restarts: 0,
        tries: 0,
        distrust: None,
        ranges_refused: false,
        receiving: false,
        came: None,
        encoding: None,
        offered_name: None,
        outgoing: None,
        landing: setting.pending_rename,
    }
}

impl<D: Dial> TransferRun<'_, D> {
    fn greet(&mut self, named: &Path) {
        self.observer.on_event(&TransferEvent::Begun {
            url: redact_url(&self.job.url),
            file: display(&self.job.destination, named),
            mode: self.dial.mode(),
            held_bytes: self.sink.held_bytes(),
        });
        if let Some(why) = self.sink.discard_reason.take() {
            self.note(None, format!("{why}; starting from the first byte"));
        }
        if self.sink.held_bytes() > 0 {
            let held = self.sink.held_bytes();
            self.note(None, format!("resuming at {held} bytes of an earlier run"));
        }
    }

    /// Receives until the object is whole, or a failure ends it.
    async fn receive(&mut self) -> Result<(), TransferFailure> {
        if self.sink.held_bytes() > 0 && self.sink.note.length == Some(self.sink.held_bytes()) {
            return Ok(());
        }
        loop {
            self.check_deadline()?;
            let ways = self.link_candidates();
            let (way, why) = match self.decide(&ways, false).choice {
                LinkChoice::Use { index, why } => (ways[index].clone(), why),
                LinkChoice::Wait {
                    reason,
                    why,
                    unblocks,
                } => {
                    let reason = TransferReason::from(reason);
                    self.refuse_to_wait(reason, &why)?;
                    self.current = None;
                    self.held = Some((reason, why.clone()));
                    match self.suspect_names() {
                        Some(doubted) => {
                            let why = format!("{doubted} asks for a sign-in; {why}");
                            let unblocks = format!("signing in on {doubted} | {unblocks}");
                            self.wait(TransferReason::Portal, why, unblocks, EPOCH)
                                .await?;
                        }
                        None => self.wait(reason, why, unblocks, EPOCH).await?,
                    }
                    continue;
                }
            };
            self.held = None;
            self.take(&way, &why);
            self.why = why;
            let outcome = self.attempt(&way.name).await;
            self.receiving = false;
            match outcome {
                Ok(AttemptEnd::Whole) => return Ok(()),
                Ok(AttemptEnd::ChooseAgain) => self.check_stop()?,
                Err(fault) => self.recover(fault, &way.name).await?,
            }
        }
    }

    /// One request over one link, until its bytes end or there is reason to leave.
    async fn attempt(&mut self, link: &str) -> Result<AttemptEnd, FetchFault> {
        let Some(via) = self.egress_link(link) else {
            return Ok(AttemptEnd::ChooseAgain);
        };
        let dial = self.dial;
        let ask = self.ask(link);
        let mut links = self.links.clone();
        let mut stop = self.stop.clone();
        let mut epoch = interval(EPOCH);
        epoch.set_missed_tick_behavior(MissedTickBehavior::Delay);
        epoch.reset();

        let mut answer = {
            let mut fetch = pin!(exchange(dial, &ask, &via));
            loop {
                tokio::select! {
                    biased;
                    _ = stop.wait_for(|stop| *stop) => return Ok(AttemptEnd::ChooseAgain),
                    answer = &mut fetch => break answer?,
                    Ok(()) = links.changed() => {}
                    _ = epoch.tick() => {}
                }
                if self.should_leave(link, &via).map_err(FetchFault::Final)? {
                    return Ok(AttemptEnd::ChooseAgain);
                }
            }
        };
        self.refuse_portal(&answer, link)?;
        let Some(mut overlap) = self.accept(&answer, &ask)? else {
            return Ok(AttemptEnd::ChooseAgain);
        };
        self.said_waiting = None;
        self.receiving = true;
        if self.terms.due.is_some() && self.first_promise.is_none() && self.length().is_some() {
            let ways = self.link_candidates();
            self.decide(&ways, false);
            self.tell_size(link);
        }
        let held = self.sink.held_bytes();

        let mut last_byte = BootInstant::now();
        let mut epoch_start = BootInstant::now();
        let mut epoch_bytes = 0u64;
        loop {
            tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => return Ok(AttemptEnd::ChooseAgain),
                Ok(()) = links.changed() => {
                    if self.should_leave(link, &via).map_err(FetchFault::Final)? {
                        return Ok(AttemptEnd::ChooseAgain);
                    }
                }
                _ = epoch.tick() => {
                    let now = BootInstant::now();
                    let seconds = now.since(epoch_start).as_secs_f64().max(1e-3);
                    self.record_rate(link, epoch_bytes as f64 / seconds);
                    self.tell_progress(link, epoch_bytes as f64 / seconds);
                    (epoch_start, epoch_bytes) = (now, 0);
                    self.sink.tick().await.map_err(FetchFault::Final)?;
                    if self.should_leave(link, &via).map_err(FetchFault::Final)? {
                        return Ok(AttemptEnd::ChooseAgain);
                    }
                    if now.since(last_byte) >= self.job.stall {
                        let silence = now.since(last_byte).as_secs();
                        return Err(FetchFault::Path(format!("no data for {silence} s")));
                    }
                }
                data = answer.next() => {
                    let Some(data) = data else { break };
                    let data = data?;
                    last_byte = BootInstant::now();
                    epoch_bytes += data.len() as u64;
                    *self.bytes_by_link.entry(link.to_owned()).or_default() += data.len() as u64;
                    if !self.take_in(&data, &mut overlap)? {
                        return Ok(AttemptEnd::ChooseAgain);
                    }
                    if self.metered_bytes_left() == Some(0) && self.is_metered(link) {
                        return Ok(self.step_if_whole(false));
                    }
                }
            }
        }
        let seconds = BootInstant::now().since(epoch_start).as_secs_f64();
        if seconds > 0.05 {
            self.record_rate(link, epoch_bytes as f64 / seconds);
        }
        if !overlap.is_empty() {
            self.distrust = Some("the object is shorter than what was received before".into());
            return Ok(AttemptEnd::ChooseAgain);
        }
        match self.step_if_whole(ask.to.is_none()) {
            AttemptEnd::ChooseAgain if self.sink.held_bytes() == held => Err(FetchFault::Origin {
                text: "the origin answered with nothing new".into(),
                retry_after: None,
            }),
            step => Ok(step),
        }
    }

    /// Adds bytes to what we hold, after those that must come again. False if they differ.
    fn take_in(&mut self, data: &[u8], overlap: &mut Vec<u8>) -> Result<bool, FetchFault> {
        let repeated = overlap.len().min(data.len());
        self.duplicate_bytes += repeated as u64;
        if data[..repeated] != overlap[..repeated] {
            self.duplicate_bytes += (data.len() - repeated) as u64;
            let text = "the server says that the object is the same, but its bytes differ";
            self.distrust = Some(text.into());
            return Ok(false);
        }
        overlap.drain(..repeated);
        if repeated < data.len() {
            let now = BootInstant::now();
            self.came = Some((self.came.map_or(now, |(first, _)| first), now));
        }
        self.sink
            .append(&data[repeated..])
            .map_err(FetchFault::Final)?;
        if self.sink.held_bytes() > self.best_length {
            self.best_length = self.sink.held_bytes();
            self.tries = 0;
        }
        Ok(true)
    }

    /// Whole when the length says so, or when the origin never told one and ended cleanly.
    fn step_if_whole(&self, ended_cleanly: bool) -> AttemptEnd {
        match self.sink.note.length {
            Some(length) if self.sink.held_bytes() >= length => AttemptEnd::Whole,
            None if ended_cleanly => AttemptEnd::Whole,
            _ => AttemptEnd::ChooseAgain,
        }
    }

    /// What to ask for: all of it, or the rest of what we hold with some overlap.
    fn ask_whole(&self) -> GetRequest {
        let held = self.sink.held_bytes();
        let continues = held > 0 && self.distrust.is_none() && self.sink.note.validator.is_some();
        let overlap = if continues {
            self.sink.tail().len().min(OVERLAP_BYTES_MAX) as u64
        } else {
            0
        };
        let from = if continues { held - overlap } else { 0 };
        GetRequest {
            url: self.job.url.clone(),
            from,
            to: None,
            if_range: self.sink.note.validator.clone().filter(|_| continues),
            allow_downgrade: self.job.allow_downgrade,
            fields: self.job.fields.clone(),
            head_only: false,
        }
    }

    /// The request for what is missing; on a metered link with a budget, the origin is not even
    /// asked for more than that allows.
    fn ask(&mut self, link: &str) -> GetRequest {
        let whole = self.ask_whole();
        let held = self.sink.held_bytes();
        let (continues, overlap) = (whole.if_range.is_some(), held - whole.from.min(held));
        let allowed = self.metered_bytes_left().filter(|_| self.is_metered(link));
        let to = allowed
            .filter(|_| !self.ranges_refused && (continues || held == 0))
            .map(|allowed| whole.from + allowed.max(overlap + 1) - 1)
            .filter(|to| self.sink.note.length.is_none_or(|length| to + 1 < length));
        GetRequest { to, ..whole }
    }

    /// True when the transfer should go on elsewhere, or not at all for now.
    fn should_leave(&mut self, link: &str, via: &EgressLink) -> Result<bool, TransferFailure> {
        self.check_deadline()?;
        let Some(now) = self.egress_link(link) else {
            return Ok(!self.dial.survives_link_loss());
        };
        if !via.sources.is_empty()
            && !via
                .sources
                .iter()
                .any(|source| now.sources.contains(source))
        {
            return Ok(true); // the address our connection stands on is gone
        }
        let ways = self.link_candidates();
        let mut spends_too_much = self.metered_bytes_left() == Some(0);
        let stays = match self.decide(&ways, false).choice {
            LinkChoice::Use { index, why } if ways[index].name == link => {
                self.why = why;
                true
            }
            LinkChoice::Wait { reason, .. } => {
                spends_too_much |= reason == LinkWaitReason::OverBudget;
                false
            }
            LinkChoice::Use { .. } => false,
        };
        // Leaving of our own accord is only worth it if what we hold can be continued, …
        let continuable = self.sink.note.validator.is_some() || self.sink.held_bytes() == 0;
        // … but what must not be paid for is left in any case.
        let forbidden = spends_too_much || self.terms.policy == CostPolicy::FreeOnly;
        Ok(!stays && (continuable || (self.is_metered(link) && forbidden)))
    }

    fn take(&mut self, way: &LinkCandidate, why: &str) {
        if self.current.as_deref() == Some(&way.name) {
            return;
        }
        let from = self.last_link.replace(way.name.clone());
        if from.as_ref().is_some_and(|from| *from != way.name) {
            self.switches += 1;
        }
        let to = way.name.clone();
        self.observer.on_event(&TransferEvent::Switch {
            t_s: self.t_s(),
            from,
            to,
            why: why.to_owned(),
            kind: None,
            silence_ms: None,
        });
        self.current = Some(way.name.clone());
    }

    /// Bytes that are where they belong.
    fn done(&self) -> u64 {
        match &self.outgoing {
            Some(outgoing) => outgoing.acknowledged,
            None => self.sink.held_bytes(),
        }
    }

    /// Says if it will hardly be in time, once.
    fn note_hardly(&mut self, promise: Option<DeadlinePromise>) {
        if let Some(promise) = promise.filter(|promise| promise.infeasible && !self.said_hardly) {
            self.said_hardly = true;
            let left = format_duration(Duration::from_secs_f64(promise.left_s));
            self.note(
                None,
                format!(
                    "it will probably be late: {} likely to finish in {left}",
                    percent(promise.p)
                ),
            );
        }
    }

    /// Bytes of the object, when known.
    fn length(&self) -> Option<u64> {
        match &self.outgoing {
            Some(outgoing) => Some(outgoing.parcel.length),
            None => self.sink.note.length,
        }
    }

    /// What is promised, as soon as the size is known. How fast links are, nobody knows yet.
    fn tell_size(&mut self, link: &str) {
        let promise = self.promise();
        self.note_hardly(promise);
        self.tell_bytes(link, 0.0, promise);
    }

    /// How far it is, and what is promised by what links carried.
    fn tell_progress(&mut self, link: &str, rate_bytes_per_s: f64) {
        let promise = self.promise();
        self.first_promise = self.first_promise.or(promise);
        self.note_hardly(promise);
        self.tell_bytes(link, rate_bytes_per_s, promise);
    }

    fn tell_bytes(&mut self, link: &str, rate_bytes_per_s: f64, promise: Option<DeadlinePromise>) {
        if self.said_waiting.is_some() {
            return; // that it waits says more than what still trickles in
        }
        let event = TransferEvent::Progress {
            t_s: self.t_s(),
            bytes: self.done(),
            length: self.length(),
            rate_bytes_per_s,
            link: link.to_owned(),
            bytes_by_link: self.bytes_by_link.clone(),
            why: self.why.clone(),
            mode: self.dial.mode(),
            promise,
        };
        self.observer.on_event(&event);
    }

    fn note(&mut self, reason: Option<TransferReason>, text: String) {
        self.observer.on_event(&TransferEvent::Note {
            t_s: self.t_s(),
            reason,
            text,
        });
    }

    /// What can be promised now.
    fn promise(&self) -> Option<DeadlinePromise> {
        let left = self.time_left().filter(|_| self.length().is_some())?;
        let promise = self.seat.promise()?;
        Some(DeadlinePromise::of(
            &promise,
            left,
            may_cost(&self.links.borrow()),
        ))
    }

    fn t_s(&self) -> f64 {
        BootInstant::now().since(self.start).as_secs_f64()
    }
}

/// Whether any of the links there are costs, up or not: where none does, no byte on such is to be expected.
pub(crate) fn may_cost(links: &[Link]) -> bool {
    links
        .iter()
        .any(|link| link.class.class == CostClass::Metered)
}

pub(super) fn display(destination: &Destination, file: &Path) -> String {
    match destination {
        Destination::Stdout | Destination::Nowhere => "-".into(),
        Destination::File(path) => path.display().to_string(),
        Destination::InDirectory(_) => file.display().to_string(),
    }
}

/// The URL without credentials or fragment: what may be written down.
pub fn redact_url(url: &Url) -> String {
    let mut url = url.clone();
    let _ = url.set_username("");
    let _ = url.set_password(None);
    url.set_fragment(None);
    url.to_string()
}
