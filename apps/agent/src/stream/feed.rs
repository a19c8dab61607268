//! Fetches the data that a stream needs next, over the links that the buffer manager allows.
//!
//! ```text
//!        ┌────────── a reader went elsewhere · a fifth of a second passed · a link changed ───────┐
//!        ▼                                                                                        │
//!  view ─▶ D2BufMgr ─┬─ free links: until the quota is full                                       │
//!                    ├─ low reached: metered links too, up to high                              │
//!                    └─ between: what comes for nothing, or wait      fetch ──▶ put ──▶ readers ──┘
//! ```
//!
//! One request is under way for a stream at a time. It is left when a reader waits for bytes elsewhere;
//! a flow to a proxy stays open while nothing may be spent on it, a connection of TCP does not.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use d2tp_sched::{
    BufferedStream, CostPolicy, FlowDemand, LinkCandidate, LinkChoice, LinkClass, LinkWaitReason,
    RefillThresholds, StreamBuffer, format_duration,
};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::object::{AnswerPosition, OriginRefusal, StreamObject};
use super::stream_transport::{AVOID, RequestConn, StreamTransport};
use super::title::{MissingRange, StreamTitle, TitleView};
use crate::fetch::boot_clock::BootInstant;
use crate::fetch::cookie_file::CookieFile;
use crate::fetch::dial::FetchFault;
use crate::fetch::exchange::{FetchResponse, GetRequest, exchange};
use crate::fetch::header::HeaderField;
use crate::fetch::mode::FetchMode;
use crate::fetch::request_method::RequestMethod;
use d2tp_driver::SpendHandle;
use d2tp_sched::ClientReport;

/// The interval of decisions about levels and links.
const LOOK_EVERY: Duration = Duration::from_millis(200); // a guess: 16 kB of a stream at 640 kb/s

/// The interval at which received bytes are synced to disk.
const SETTLE_EVERY: Duration = Duration::from_secs(2); // a guess: what an SD card bears

/// How long a connection may carry nothing before it is dropped.
const STALL: Duration = Duration::from_secs(10);

/// How long a link with a captive portal is avoided.
const AVOID_PORTAL: Duration = Duration::from_secs(60); // a guess

/// The shortest interval between a request without result and the next one.
const TURN: Duration = Duration::from_millis(20); // a guess

/// The first delay between tries; it doubles.
const BACKOFF_FIRST: Duration = Duration::from_millis(500); // a guess

/// The longest delay between tries, since a player is waiting.
const BACKOFF_MAX: Duration = Duration::from_secs(10); // a guess

/// The smallest gap that is worth its own request.
const SKIP_BYTES: u64 = 256 * 1024; // a guess: a round trip at 20 Mb/s

/// The share of a full quota that must be free before it is filled again.
const ROOM_SHARE: u64 = 16;

/// Options of how a stream is fetched.
#[derive(Debug, Clone)]
pub struct StreamRules {
    /// The cost policy: free-only never pays.
    pub policy: CostPolicy,
    /// The buffer levels at which use of metered links begins and ends; measured if not given.
    pub thresholds: StreamThresholds,
    /// The most that is kept on the disk.
    pub quota_bytes: u64,
    /// The most bytes that metered links may carry.
    pub metered_bytes_max: Option<u64>,
    /// The playing time, if the user gave it.
    pub duration: Option<Duration>,
    /// Header fields that the user added.
    pub fields: Arc<[HeaderField]>,
    /// The user's cookies, which go where their file says.
    pub cookies: Option<Arc<CookieFile>>,
    /// Whether redirects from https to http are followed.
    pub allow_downgrade: bool,
}

/// A buffer level in bytes, or in playing time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StreamThreshold {
    /// A number of bytes.
    Bytes(u64),
    /// A time of playback.
    Time(Duration),
}

impl StreamThreshold {
    fn bytes(self, rate: f64) -> u64 {
        match self {
            StreamThreshold::Bytes(bytes) => bytes,
            StreamThreshold::Time(span) => (span.as_secs_f64() * rate) as u64,
        }
    }
}

/// The buffer levels that the user gave.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StreamThresholds {
    /// The level at which paying begins.
    pub low: Option<StreamThreshold>,
    /// The level at which paying ends.
    pub high: Option<StreamThreshold>,
}

impl StreamThresholds {
    /// The levels in bytes, for a stream of this rate over links with this switching delay.
    pub fn thresholds(&self, rate: f64, switching: &d2tp_sched::SwitchDelay) -> RefillThresholds {
        let derived = RefillThresholds::derived(rate as u64, switching);
        let of = |amount: Option<StreamThreshold>, else_bytes| {
            amount.map_or(else_bytes, |a| a.bytes(rate))
        };
        let low_bytes = of(self.low, derived.low_bytes);
        RefillThresholds {
            low_bytes,
            high_bytes: of(self.high, derived.high_bytes).max(low_bytes),
        }
    }
}

/// What to fetch now, and over which links.
#[derive(Debug, Clone, PartialEq)]
struct FetchPlan {
    /// Whether bytes are read.
    reads: bool,
    /// Whether metered links may carry them.
    pays: bool,
    /// The most bytes to pay for, if limited.
    budget: Option<u64>,
    /// The link to use, if one must be chosen; none if no link may carry anything.
    link: Option<String>,
    why: String,
}

impl FetchPlan {
    /// The plan to fetch nothing, with the reason.
    fn nothing(why: String) -> FetchPlan {
        FetchPlan {
            reads: false,
            pays: false,
            budget: None,
            link: None,
            why,
        }
    }
}

/// Why a request ended.
enum FetchEnd {
    /// Everything that was requested has arrived.
    Done,
    /// Other bytes, or another link, are more urgent.
    Elsewhere,
}

/// Fetches one title.
pub struct StreamFeed {
    title: Arc<StreamTitle>,
    transport: Arc<StreamTransport>,
    rules: StreamRules,
    buffer: StreamBuffer,
    begun: BootInstant,
    /// Whether the quota is full, without enough room to continue.
    is_full: bool,
    tries: u32,
    settle_at: BootInstant,
    slot: Option<SpendHandle>,
    /// Bytes that links carried, in the form reported to the scheduler.
    carried: BTreeMap<String, u64>,
    /// The links that rest to save energy.
    resting: BTreeSet<String>,
}

impl StreamFeed {
    /// Creates the feed of this title; its times count from `begun`.
    pub fn new(
        title: Arc<StreamTitle>,
        transport: Arc<StreamTransport>,
        rules: StreamRules,
        begun: BootInstant,
    ) -> StreamFeed {
        let switching = transport.switching();
        let rate = title.pace(|pace| pace.rate(Duration::ZERO));
        let thresholds = rules.thresholds.thresholds(rate, &switching);
        StreamFeed {
            buffer: StreamBuffer::new(thresholds, switching),
            title,
            transport,
            rules,
            begun,
            is_full: false,
            tries: 0,
            settle_at: begun,
            slot: None,
            carried: BTreeMap::new(),
            resting: BTreeSet::new(),
        }
    }

    /// Returns the feed as a client of a scheduler that decides for others too.
    pub fn with_slot(self, client: Option<SpendHandle>) -> StreamFeed {
        StreamFeed {
            slot: client,
            ..self
        }
    }

    /// Reports the title's needs to the scheduler. Returns why it must wait, if others go first or
    /// nothing may be spent, and how many metered bytes it may use.
    fn ask(
        &mut self,
        need: &FlowDemand,
        candidates: &[LinkCandidate],
        high_bytes: u64,
        pays: bool,
    ) -> (Option<(LinkWaitReason, String)>, Option<u64>) {
        let Some(client) = &self.slot else {
            return (None, self.metered_bytes_left());
        };
        // Before it is asked what it may: a grant is of what is left.
        self.transport.report_traffic();
        for (link, bytes) in self.transport.take_traffic() {
            *self.carried.entry(link).or_default() += bytes;
        }
        for (link, round_trip) in self.transport.round_trips() {
            client.record_round_trip(&link, round_trip);
        }
        let report = ClientReport {
            demand: FlowDemand {
                policy: self.rules.policy,
                metered_bytes_left: self.metered_bytes_left(),
                ..need.clone()
            },
            // Not the whole quota: beside that every transfer would be small.
            size_bytes: need.remaining_bytes.map(|bytes| bytes.min(high_bytes)),
            priority: 0,
            start: None,
            candidates,
            carried: &self.carried,
            uses_several_links: !self.transport.is_direct(),
            always_pays: pays,
            is_interactive: false,
            keeps_awake: true,
            source: d2tp_sched::SourceSupply::Ample,
        };
        let decision = client.decide(&report);
        self.transport.set_resting(&decision.resting);
        self.resting = decision.resting;
        let held = match decision.choice {
            LinkChoice::Wait { reason, why, .. } => Some((reason, why)),
            LinkChoice::Use { .. } => None,
        };
        let grant = decision.limit.or(self.metered_bytes_left());
        (held, grant)
    }

    fn now(&self) -> Duration {
        BootInstant::now().since(self.begun)
    }

    /// Fetches until `stop` becomes true, and then syncs what is held.
    pub async fn run(mut self, mut stop: watch::Receiver<bool>) {
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => {}
            () = self.feed() => {}
        }
        self.settle().await;
    }

    async fn feed(&mut self) {
        loop {
            let (view, drive) = self.decide();
            self.keep().await;
            let Some(missing) = view.missing else {
                self.wait(&drive.why, LOOK_EVERY).await;
                continue;
            };
            let object = self.title.pieces()[missing.piece].object.clone();
            if let Some(refusal) = object.refusal().filter(|refusal| !refusal.is_temporary) {
                self.wait(&refusal.text, LOOK_EVERY).await;
                continue;
            }
            if !drive.reads || drive.link.is_none() {
                self.wait(&drive.why, LOOK_EVERY).await;
                continue;
            }
            let conn = match self.transport.is_direct() {
                true => self
                    .transport
                    .request_conn(&object.url, drive.link.clone(), true),
                false => self.transport.request_conn(&object.url, None, false),
            };
            let before = object.held_bytes();
            let fetched = self.fetch(&object, missing, &conn).await;
            if object.held_bytes() > before {
                self.tries = 0;
            } else {
                // Whatever makes it turn on the spot, it does not turn fast.
                sleep(TURN).await;
            }
            match fetched {
                Ok(FetchEnd::Done | FetchEnd::Elsewhere) => {}
                Err(fault) => self.recover(fault, &object, &conn).await,
            }
        }
    }

    async fn wait(&mut self, why: &str, span: Duration) {
        self.title.set_reason(why);
        let mut news = self.title.changes();
        let mut links = self.transport.links();
        let _ = timeout(span, async {
            tokio::select! {
                _ = news.changed() => {}
                _ = links.changed() => {}
            }
        })
        .await;
    }

    /// The plan that follows from the levels and the links.
    fn decide(&mut self) -> (TitleView, FetchPlan) {
        let now = self.now();
        self.learn_rate();
        let view = self.title.view(now);
        let (rate, in_player) = self.title.pace(|pace| (pace.rate(now), pace.in_player()));
        let switching = self.transport.switching();
        let thresholds = self.rules.thresholds.thresholds(rate, &switching);
        self.buffer.set_thresholds(thresholds, switching);
        let piece = view.missing.map_or(view.at.0, |missing| missing.piece);
        let pieces = self.title.pieces();
        let candidates = self.transport.link_candidates(&pieces[piece].object.url);
        let mut free = candidates
            .iter()
            .filter(|candidate| candidate.class == LinkClass::Free && !candidate.stalled)
            .peekable();
        let free_rate = free.peek().is_some().then(|| {
            // A link nobody measured gets its chance: the disk bridges it.
            free.map(|candidate| candidate.rate_bytes_per_s.unwrap_or(f64::MAX / 16.0))
                .sum::<f64>()
        });
        let stream = BufferedStream {
            bytes_per_s: rate as u64,
            ahead_bytes: view.held_bytes + in_player,
            to_come_bytes: view.to_come,
            quota_bytes: self.rules.quota_bytes.saturating_add(in_player),
            free_bytes_per_s: free_rate,
        };
        let need = self.buffer.need(&stream);
        let room = self.rules.quota_bytes.saturating_sub(view.held_bytes);
        self.is_full = room == 0 || (self.is_full && room < self.rules.quota_bytes / ROOM_SHARE);
        let is_idle = self.title.only_watched && !view.is_watched;
        let Some(need) = need.filter(|_| !self.is_full && !is_idle) else {
            let why = match view.missing {
                None => "all of it is stored",
                Some(_) if is_idle => "nobody watches",
                Some(_) => "the store is full (--keep)",
            };
            return (view, FetchPlan::nothing(why.into()));
        };
        let would_pay = self.would_pay(&view, &candidates);
        let (held, grant) = self.ask(&need, &candidates, thresholds.high_bytes, would_pay);
        let budget = match held {
            Some((LinkWaitReason::OverBudget, _)) => Some(0),
            _ => grant,
        };
        let drive = match held {
            // What is watched now is not held back: who is due before is done before it is dry.
            Some((LinkWaitReason::QueuedBehind | LinkWaitReason::SavesEnergy, why))
                if !self.buffer.is_filling() =>
            {
                FetchPlan::nothing(why)
            }
            _ => self.drive(&view, &candidates, &stream, &thresholds, budget),
        };
        // Whatever a link could carry, nothing comes without a session.
        let why = self.transport.session_error().unwrap_or(drive.why);
        (view, FetchPlan { why, ..drive })
    }

    fn drive(
        &self,
        view: &TitleView,
        candidates: &[LinkCandidate],
        stream: &BufferedStream,
        levels: &RefillThresholds,
        budget: Option<u64>,
    ) -> FetchPlan {
        let ahead = stream.ahead_bytes as f64 / stream.bytes_per_s.max(1) as f64;
        let ahead = format!("{ahead:.0} s ahead");
        let best = |class: LinkClass| {
            let candidates = candidates
                .iter()
                .filter(move |candidate| candidate.class == class && !candidate.stalled)
                .filter(|candidate| !self.resting.contains(&candidate.name));
            let rate = |candidate: &LinkCandidate| candidate.rate_bytes_per_s.unwrap_or(f64::MAX);
            candidates.max_by(|a, b| rate(a).total_cmp(&rate(b)).then(b.metric.cmp(&a.metric)))
        };
        let free = best(LinkClass::Free);
        let may_pay = self.rules.policy != CostPolicy::FreeOnly && budget != Some(0);
        let pays = may_pay && self.would_pay(view, candidates);
        let keeps_up = |candidate: &LinkCandidate| {
            let rate = candidate.rate_bytes_per_s;
            rate.is_none_or(|rate| rate >= stream.bytes_per_s as f64)
        };
        if self.transport.is_direct() {
            // One link at a time: the one that costs only where a free one does not keep up.
            let link = match (free, pays) {
                (Some(candidate), false) => Some(candidate),
                (Some(candidate), true) if keeps_up(candidate) => Some(candidate),
                (_, true) => best(LinkClass::Metered).or(free),
                (None, false) => None,
            };
            let why = match link {
                Some(candidate) if candidate.class == LinkClass::Free => {
                    format!("{} is free; {ahead}", candidate.name)
                }
                Some(candidate) => format!("{ahead}; using {} (metered)", candidate.name),
                None => self.why_not(view, candidates, may_pay, &ahead, levels),
            };
            return FetchPlan {
                reads: true,
                pays,
                budget,
                link: link.map(|candidate| candidate.name.clone()),
                why,
            };
        }
        let why = match (free, pays) {
            (Some(candidate), false) => format!("{} is free; {ahead}", candidate.name),
            (Some(candidate), true) => format!(
                "{ahead} and {} is too slow; using metered networks too",
                candidate.name
            ),
            (None, true) => format!("{ahead}; using metered networks"),
            (None, false) => self.why_not(view, candidates, may_pay, &ahead, levels),
        };
        let carried = free.is_some() || pays;
        FetchPlan {
            reads: true,
            pays,
            budget,
            link: carried.then(|| super::stream_transport::ANYWHERE.to_owned()),
            why,
        }
    }

    /// Whether the stream needs metered links, and one is up.
    fn would_pay(&self, view: &TitleView, candidates: &[LinkCandidate]) -> bool {
        let paid = candidates
            .iter()
            .any(|candidate| candidate.class == LinkClass::Metered);
        let may = self.rules.policy != CostPolicy::FreeOnly;
        may && paid && self.buffer.is_filling() && view.is_watched
    }

    fn why_not(
        &self,
        view: &TitleView,
        candidates: &[LinkCandidate],
        may_pay: bool,
        ahead: &str,
        levels: &RefillThresholds,
    ) -> String {
        let metered = candidates
            .iter()
            .find(|candidate| candidate.class == LinkClass::Metered);
        match (candidates.first(), metered) {
            (None, _) => format!("no network is up; {ahead}"),
            (Some(candidate), None) => format!("{} carries no data; {ahead}", candidate.name),
            (_, Some(_)) if !may_pay => {
                format!("only metered networks are up, and they may not be used; {ahead}")
            }
            (_, Some(candidate)) if !view.is_watched => {
                format!(
                    "only {} (metered) is up, and nobody is watching",
                    candidate.name
                )
            }
            (_, Some(candidate)) => {
                let (low, high) = (levels.low_bytes / 1000, levels.high_bytes / 1000);
                format!(
                    "only {} (metered) is up; {ahead}; it is used below {low} kB, up to {high} kB",
                    candidate.name
                )
            }
        }
    }

    fn metered_bytes_left(&self) -> Option<u64> {
        let max = self.rules.metered_bytes_max?;
        Some(max.saturating_sub(self.transport.paid_bytes()))
    }

    /// Derives the rate from the length and the duration.
    fn learn_rate(&self) {
        let pieces = self.title.pieces();
        let known = pieces.iter().filter_map(|piece| {
            let plays = match (piece.duration, &pieces[..]) {
                (None, [_]) => self.rules.duration,
                (plays, _) => plays,
            }?;
            Some((piece.object.length()? as f64, plays.as_secs_f64()))
        });
        let (bytes, seconds) = known.fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        if seconds > 0.0 {
            self.title.pace(|pace| pace.set_rate(bytes / seconds));
        }
    }

    /// Runs one request, until its bytes end or there is a reason to leave it.
    async fn fetch(
        &mut self,
        object: &Arc<StreamObject>,
        missing: MissingRange,
        conn: &RequestConn,
    ) -> Result<FetchEnd, FetchFault> {
        let Some(via) = self.transport.egress_link(conn.link.as_deref()) else {
            return Ok(FetchEnd::Elsewhere);
        };
        let note = object.note();
        let ask = GetRequest {
            url: object.url.clone(),
            from: object.ask_from(missing.from),
            to: missing.to.map(|to| to - 1),
            if_range: note.validator,
            unless: None,
            cookies: self.rules.cookies.clone(),
            allow_downgrade: self.rules.allow_downgrade,
            fields: self.rules.fields.clone(),
            method: RequestMethod::Get,
        };
        let mut look = interval(LOOK_EVERY);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut news = self.title.changes();
        let mut at = missing.from;
        let mut answer = {
            let mut asked = pin!(exchange(conn, &ask, &via));
            loop {
                tokio::select! {
                    biased;
                    answer = &mut asked => break answer?,
                    _ = look.tick() => {}
                    Ok(()) = news.changed() => {}
                }
                let drive = self.look(object, at, conn, true).await;
                if drive.is_none() {
                    return Ok(FetchEnd::Elsewhere);
                }
            }
        };
        if answer.is_page
            && !object.head().is_some_and(|head| is_page(&head))
            && self.transport.is_direct()
        {
            return Err(FetchFault::CaptivePortal(format!(
                "{} answers with a web page instead",
                host(object)
            )));
        }
        at = match object.accept(&answer).map_err(on_disk)? {
            AnswerPosition::At(at) => at,
            AnswerPosition::OutOfRange | AnswerPosition::Changed => return Ok(FetchEnd::Done),
        };
        self.receive(object, missing, conn, &mut answer, at).await
    }

    async fn receive(
        &mut self,
        object: &Arc<StreamObject>,
        missing: MissingRange,
        conn: &RequestConn,
        answer: &mut FetchResponse,
        mut at: u64,
    ) -> Result<FetchEnd, FetchFault> {
        // One that begins before what was asked for cannot begin elsewhere either.
        let takes_ranges = at >= missing.from.saturating_sub(super::object::OVERLAP_BYTES);
        let mut look = interval(LOOK_EVERY);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut news = self.title.changes();
        let mut reads = true;
        let mut last = BootInstant::now();
        loop {
            tokio::select! {
                biased;
                _ = look.tick() => {}
                Ok(()) = news.changed() => {}
                data = answer.next(), if reads => {
                    let Some(data) = data else {
                        object.set_end(at);
                        return Ok(FetchEnd::Done);
                    };
                    let data = data?;
                    if !object.put(at, &data).map_err(on_disk)? {
                        return Ok(FetchEnd::Done);
                    }
                    at += data.len() as u64;
                    self.transport.count(conn.link.as_deref(), data.len() as u64);
                    last = BootInstant::now();
                    let whole = object.length().is_some_and(|length| at >= length);
                    if whole || missing.to.is_some_and(|to| at >= to) {
                        return Ok(FetchEnd::Done);
                    }
                    continue;
                }
            }
            let Some(drive) = self.look(object, at, conn, takes_ranges).await else {
                return Ok(FetchEnd::Elsewhere);
            };
            if !reads || !drive.reads || drive.link.is_none() {
                last = BootInstant::now();
            }
            reads = drive.reads;
            if self.transport.is_direct() && !reads {
                return Ok(FetchEnd::Elsewhere);
            }
            let silent = BootInstant::now().since(last);
            // A flow that is answered by the proxy itself knows when it is lost.
            if silent >= STALL && self.transport.mode() != FetchMode::ProxyFetch {
                return Err(FetchFault::Path(format!(
                    "not a byte for {}",
                    format_duration(silent)
                )));
            }
        }
    }

    /// Decides again and applies the permission to pay to the connection. None if the request must be
    /// left.
    async fn look(
        &mut self,
        object: &Arc<StreamObject>,
        at: u64,
        conn: &RequestConn,
        may_seek: bool,
    ) -> Option<FetchPlan> {
        let (view, drive) = self.decide();
        self.title.set_reason(&drive.why);
        self.keep().await;
        if let Some(missing) = view.missing.filter(|_| may_seek && view.is_starved) {
            let pieces = self.title.pieces();
            let elsewhere = !Arc::ptr_eq(&pieces[missing.piece].object, object);
            let before = missing.from < at;
            let far = missing.from > at.saturating_add(SKIP_BYTES);
            if elsewhere || before || far {
                return None;
            }
        }
        if self.transport.is_direct() {
            let stays = match &conn.link {
                // A link that may still answer is better than none, or than another one that does not.
                Some(link) if conn.is_unanswered() => {
                    let moves = drive.link.as_ref().is_some_and(|other| other != link);
                    if moves {
                        conn.avoid_link();
                    }
                    !moves
                }
                link => drive.link == *link,
            };
            return stays.then_some(drive);
        }
        conn.set_paying(drive.pays, drive.budget);
        Some(drive)
    }

    /// Frees space, and syncs what is held.
    async fn keep(&mut self) {
        if BootInstant::now() < self.settle_at {
            return;
        }
        self.settle_at = BootInstant::now().after(SETTLE_EVERY);
        let held = self.title.held_bytes();
        if held > self.rules.quota_bytes {
            self.title.release(held - self.rules.quota_bytes);
        }
        self.settle().await;
    }

    async fn settle(&mut self) {
        let pieces = self.title.pieces();
        let settlings: Vec<_> = pieces
            .iter()
            .filter_map(|p| p.object.prepare_sync())
            .collect();
        if settlings.is_empty() {
            return;
        }
        let run = move || settlings.iter().try_for_each(|settling| settling.run());
        if let Ok(Err(error)) = spawn_blocking(run).await {
            tracing::warn!(%error, "cannot save what is stored");
        }
    }

    /// Handles a fault: reports it, and waits before the next try.
    async fn recover(&mut self, fault: FetchFault, object: &Arc<StreamObject>, conn: &RequestConn) {
        self.tries += 1;
        let heard = conn.status().filter(|status| status.as_u16() >= 400);
        let link = conn.link.as_deref();
        let (text, wait, passes) = match fault {
            FetchFault::Final(failure) => (failure.text, None, false),
            FetchFault::Origin { text, retry_after } => (text, retry_after, true),
            FetchFault::Proxy(text) => (text, None, true),
            // A name that answered before will again.
            FetchFault::NameNotFound(text) => (text, None, object.head().is_some()),
            FetchFault::Path(text) | FetchFault::UntrustedPeer(text) => {
                link.inspect(|link| self.transport.avoid(link, AVOID));
                (text, None, true)
            }
            FetchFault::CaptivePortal(text) => {
                link.inspect(|link| self.transport.avoid(link, AVOID_PORTAL));
                (text, None, true)
            }
        };
        tracing::debug!(url = %object.url, %text, passes, "a request failed");
        self.title.set_reason(&text);
        if object.head().is_none() || !passes {
            let status = heard.unwrap_or(StatusCode::BAD_GATEWAY);
            let text = text.clone();
            object.refuse(OriginRefusal {
                status,
                text,
                is_temporary: passes,
            });
        }
        if !passes {
            return;
        }
        let doublings = self.tries.saturating_sub(1).min(8);
        let backoff = (BACKOFF_FIRST * 2u32.pow(doublings)).min(BACKOFF_MAX);
        let until = BootInstant::now().after(wait.unwrap_or(backoff));
        while let left = until.since(BootInstant::now())
            && !left.is_zero()
        {
            let text = text.clone();
            self.wait(&text, left.min(LOOK_EVERY)).await;
            self.decide();
        }
    }
}

fn is_page(head: &super::object::ObjectHead) -> bool {
    head.media_type
        .as_deref()
        .is_some_and(|kind| kind.starts_with("text/html"))
}

fn host(object: &StreamObject) -> String {
    object.url.host_str().unwrap_or_default().to_owned()
}

fn on_disk(error: io::Error) -> FetchFault {
    FetchFault::Origin {
        text: format!("cannot write to the disk: {error}; make room"),
        retry_after: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_bytes_or_time_and_derived_where_nobody_gave_them() {
        let switching = d2tp_sched::SwitchDelay {
            interface: Duration::from_millis(1_500),
            challenge: Duration::from_millis(250),
            first_packet: Duration::from_millis(250),
        };
        let of = |low, high| {
            let levels = StreamThresholds { low, high }.thresholds(80_000.0, &switching);
            (levels.low_bytes, levels.high_bytes)
        };
        let span = |s| Some(StreamThreshold::Time(Duration::from_secs(s)));
        // Three changes of 2 s, and 10 s above that.
        assert_eq!(of(None, None), (480_000, 1_280_000));
        assert_eq!(of(span(3), span(30)), (240_000, 2_400_000));
        let bytes = |n| Some(StreamThreshold::Bytes(n));
        assert_eq!(of(bytes(200_000), bytes(3_000_000)), (200_000, 3_000_000));
        assert_eq!(of(bytes(9_000_000), None), (9_000_000, 9_000_000));
    }
}
