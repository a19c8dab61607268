//! The device's end: the core, its applications, its journal.
//!
//! ```text
//!  starts ─▶ awake ──no path for hibernate_after_s──▶ asleep: a record, 0 timers
//!              ▲ ▲                                      │
//!              │ └──── a permitted link is up ──────────┘
//!              └────── restarts from the journal ◀── crashed
//! ```
//!
//! Which links are used is decided by `policy` and carried out by `conductor`.

use std::collections::BTreeMap;

use cedos_lab_link::{Span, Time};
use cedos_lab_scenario::{Class, Direction, Flow, FlowReport, Scenario};
use d2tp_session::{
    Addresses, Admission, Endpoint, Event, FlowEnd, FlowId, FlowOptions, Incoming, Life, LinkId,
    Reason, Record, SecretKey, SessionId,
};

use crate::clock;
use crate::content;
use crate::fault::SimFault;
use crate::identity::Identity;
use crate::log::{self, Log};
use crate::meter::Meter;
use crate::network::{Delivery, Network};
use crate::proxy::{BURST_MAX, Proxy};
use crate::stream::{DIGEST_BYTES, Request, Sink, Source};

/// Epochs reserved in the journal at a time; every SYN spends one.
const EPOCHS_RESERVED: u32 = 100_000;

/// How far a transfer got.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Progress {
    /// It has not started.
    Waiting,
    /// It is under way.
    Active,
    /// It was complete then.
    Done(Time),
    /// It is over and not complete.
    Failed(String),
}

/// What the device's application knows of a flow.
#[derive(Clone, Debug)]
pub(crate) struct Transfer {
    pub id: Option<FlowId>,
    pub progress: Progress,
    source: Source,
    sink: Sink,
    /// Bytes the proxy has of what is sent.
    acked: u64,
}

/// What is counted of a flow from outside; no crash undoes it.
#[derive(Clone, Debug)]
pub(crate) struct Book {
    pub by_link: Vec<u64>,
    pub duplicate: u64,
}

/// What survives a crash.
#[derive(Clone, Debug, Default)]
struct Journal {
    record: Option<(Time, Vec<u8>)>,
    transfers: Vec<Transfer>,
}

/// The device.
pub(crate) struct Device {
    pub(crate) endpoint: Endpoint,
    identity: Identity,
    pub(crate) session: Option<SessionId>,
    asleep: Option<(Time, Vec<u8>)>,
    pub(crate) specs: Vec<Flow>,
    pub(crate) classes: Vec<Class>,
    names: Vec<String>,
    pub(crate) transfers: Vec<Transfer>,
    pub(crate) books: Vec<Book>,
    pub(crate) meters: Vec<Meter>,
    /// Which flow last gained from each link.
    served_last: Vec<Option<usize>>,
    by_id: BTreeMap<FlowId, usize>,
    journal: Journal,
    epochs_next: u32,
    away_until: Option<Time>,
    idle_since: Option<Time>,
    hibernate_after: Span,
    /// When the conductor wants to look again.
    pub(crate) look_at: Time,
    dirty: bool,
}

impl Device {
    pub(crate) fn new(scenario: &Scenario, identity: Identity) -> Device {
        let links = scenario.links.len();
        let transfers = scenario.flows.iter().enumerate();
        let mut device = Device {
            endpoint: endpoint(&identity, 0),
            identity,
            session: None,
            asleep: None,
            specs: scenario.flows.clone(),
            classes: scenario.links.iter().map(|l| l.class).collect(),
            names: scenario.links.iter().map(|l| l.name.clone()).collect(),
            transfers: transfers
                .map(|(n, f)| transfer(f, scenario.seed, n))
                .collect(),
            books: vec![
                Book {
                    by_link: vec![0; links],
                    duplicate: 0
                };
                scenario.flows.len()
            ],
            meters: vec![Meter::default(); links],
            served_last: vec![None; links],
            by_id: BTreeMap::new(),
            journal: Journal::default(),
            epochs_next: 1,
            away_until: None,
            idle_since: None,
            hibernate_after: Span::from_secs_f64(scenario.hibernate_after_s),
            look_at: Time::NEVER,
            dirty: false,
        };
        device.connect(Time::ZERO);
        device
    }

    /// A session with nothing in it yet.
    fn connect(&mut self, now: Time) {
        let (proxy, epochs) = (
            SecretKey::from_bytes(self.identity.proxy_key()),
            self.reserve(),
        );
        let instance = self.identity.instance();
        let id = self
            .endpoint
            .connect(clock::core(now), proxy.public(), instance, epochs);
        self.session = Some(id);
        self.idle_since = Some(now);
    }

    fn reserve(&mut self) -> std::ops::Range<u32> {
        let first = self.epochs_next;
        self.epochs_next = first.saturating_add(EPOCHS_RESERVED);
        first..self.epochs_next
    }

    pub(crate) fn is_away(&self) -> bool {
        self.away_until.is_some()
    }

    pub(crate) fn next_at(&self) -> Time {
        if let Some(until) = self.away_until {
            return until;
        }
        let asleep = if self.asleep.is_some() {
            self.next_deadline()
        } else {
            Time::NEVER
        };
        clock::run(self.endpoint.next_timeout())
            .min(self.hibernate_at())
            .min(self.look_at)
            .min(self.next_start())
            .min(asleep)
    }

    fn hibernate_at(&self) -> Time {
        self.idle_since
            .map_or(Time::NEVER, |since| since + self.hibernate_after)
    }

    fn next_start(&self) -> Time {
        let waiting = self.specs.iter().zip(&self.transfers);
        waiting
            .filter(|(_, t)| t.progress == Progress::Waiting)
            .map(|(spec, _)| Time::from_secs_f64(spec.start_s))
            .min()
            .unwrap_or(Time::NEVER)
    }

    fn next_deadline(&self) -> Time {
        let active = self.specs.iter().zip(&self.transfers);
        active
            .filter(|(_, t)| t.progress == Progress::Active)
            .filter_map(|(spec, _)| spec.deadline_s)
            .map(Time::from_secs_f64)
            .min()
            .unwrap_or(Time::NEVER)
    }

    /// Whether a transfer is under way.
    pub(crate) fn is_active(&self) -> bool {
        self.transfers
            .iter()
            .any(|t| t.progress == Progress::Active)
    }

    /// Whether every transfer is over.
    pub(crate) fn is_done(&self) -> bool {
        let over = |t: &Transfer| matches!(t.progress, Progress::Done(_) | Progress::Failed(_));
        self.transfers.iter().all(over)
    }

    /// Bytes taken and acknowledged in all, to see progress.
    pub(crate) fn moved(&self) -> u64 {
        self.transfers.iter().map(|t| t.sink.offset + t.acked).sum()
    }

    /// Bytes a transfer still needs.
    pub(crate) fn remaining(&self, number: usize) -> u64 {
        let (spec, t) = (&self.specs[number], &self.transfers[number]);
        match spec.direction {
            Direction::Down => spec.bytes.unwrap_or(0).saturating_sub(t.sink.offset),
            Direction::Up => t.source.total().saturating_sub(t.acked),
        }
    }

    // ---- sleep, crash, time ----

    /// The process stops without a word.
    pub(crate) fn crash(&mut self, now: Time, away: Span, log: &mut Log) {
        log.note(now, "device", || "crashes".to_owned());
        self.away_until = Some(now + away);
    }

    /// Lets time pass. True if the device has just come back from a crash.
    pub(crate) fn on_time(&mut self, now: Time, log: &mut Log) -> Result<bool, SimFault> {
        let mut restarted = false;
        if let Some(until) = self.away_until {
            if now < until {
                return Ok(false);
            }
            restarted = true;
            self.restart(now, log);
        }
        if self.asleep.is_some() && self.next_deadline() <= now {
            // What the application hears of it comes from the session.
            self.wake(now, log)?;
        }
        self.endpoint.handle_timeouts(clock::core(now));
        if self.hibernate_at() <= now {
            self.hibernate(now, log);
        }
        for number in 0..self.specs.len() {
            let start = Time::from_secs_f64(self.specs[number].start_s);
            if self.transfers[number].progress == Progress::Waiting && start <= now {
                self.start(now, number, log)?;
            }
        }
        Ok(restarted)
    }

    fn restart(&mut self, now: Time, log: &mut Log) {
        log.note(now, "device", || "restarts".to_owned());
        self.away_until = None;
        self.identity.lives += 1;
        self.endpoint = endpoint(&self.identity, self.identity.lives);
        self.session = None;
        self.idle_since = None;
        for (number, kept) in self.journal.transfers.iter().enumerate() {
            let transfer = &mut self.transfers[number];
            // What was read since comes again.
            self.books[number].duplicate += transfer.sink.offset - kept.sink.offset;
            *transfer = kept.clone();
            transfer.source.wait();
        }
        self.asleep = self.journal.record.clone();
        self.index();
        self.meters.fill(Meter::default());
        if self.asleep.is_none() {
            self.connect(now);
        }
    }

    fn hibernate(&mut self, now: Time, log: &mut Log) {
        self.idle_since = None;
        let Some(id) = self.session else { return };
        if !self.endpoint.session(id).is_some_and(|s| s.may_hibernate()) {
            return;
        }
        let Ok(record) = self.endpoint.hibernate(clock::core(now), id) else {
            return;
        };
        log.note(now, "device", || {
            format!("hibernates in {} B", record.len())
        });
        self.session = None;
        self.transfers.iter_mut().for_each(|t| t.source.wait());
        self.asleep = Some((now, record));
        self.dirty = true;
    }

    /// The session out of its record, with what is left of its deadlines.
    pub(crate) fn wake(&mut self, now: Time, log: &mut Log) -> Result<(), SimFault> {
        let Some((since, record)) = self.asleep.take() else {
            return Ok(());
        };
        log.note(now, "device", || "wakes".to_owned());
        let mut record = Record::decode(&record)?;
        let slept = d2tp_session::Span::from_nanos(now.since(since).as_nanos());
        for flow in &mut record.flows {
            flow.deadline_left = flow.deadline_left.map(|left| left.saturating_sub(slept));
        }
        let epochs = self.reserve();
        let id = self
            .endpoint
            .restore(clock::core(now), &record.encode(), epochs)?;
        self.session = Some(id);
        self.idle_since = Some(now);
        self.dirty = true;
        Ok(())
    }

    fn start(&mut self, now: Time, number: usize, log: &mut Log) -> Result<(), SimFault> {
        self.wake(now, log)?;
        if self.session.is_none() {
            // The one before was closed.
            self.connect(now);
        }
        let Some(session) = self.session else {
            return Ok(());
        };
        let spec = &self.specs[number];
        let options = FlowOptions {
            size: spec.bytes,
            deadline: spec.deadline_s.map(|s| clock::core(Time::from_secs_f64(s))),
            hibernates: true,
            ..FlowOptions::default()
        };
        log.note(now, "device", || format!("starts flow {}", spec.id));
        let transfer = &mut self.transfers[number];
        transfer.source.begin_at(0);
        let opened = self.endpoint.with(session, |s| {
            let id = s.open(options)?;
            transfer.source.give(s, id);
            Ok::<_, d2tp_session::FlowError>(id)
        });
        match opened {
            Ok(Ok(id)) => {
                transfer.id = Some(id);
                transfer.progress = Progress::Active;
            }
            Ok(Err(error)) => transfer.progress = Progress::Failed(error.to_string()),
            Err(error) => transfer.progress = Progress::Failed(error.to_string()),
        }
        self.index();
        self.dirty = true;
        self.look_at = now;
        Ok(())
    }

    fn index(&mut self) {
        let known = self.transfers.iter().enumerate();
        self.by_id = known
            .filter_map(|(number, t)| Some((t.id?, number)))
            .collect();
    }

    // ---- datagrams ----

    /// A datagram arrives. True if it held payload.
    pub(crate) fn on_datagram(
        &mut self,
        now: Time,
        delivery: Delivery,
        log: &mut Log,
    ) -> Result<bool, SimFault> {
        if self.is_away() {
            return Ok(false);
        }
        let (before, offsets) = (self.totals(), self.offsets());
        let Delivery {
            link,
            from,
            mut bytes,
        } = delivery;
        let addresses = Addresses {
            link: LinkId(link as u32),
            local: None,
            remote: from,
        };
        let incoming = Incoming {
            addresses,
            bytes: &mut bytes,
        };
        self.endpoint.handle_datagram(clock::core(now), incoming);
        let after = self.totals();
        self.attend(now, log)?;
        let payload = after.0.saturating_sub(before.0);
        if payload > 0 {
            self.meters[link].on_payload(payload);
            let mut gained: Vec<usize> = (0..offsets.len())
                .filter(|n| self.transfers[*n].sink.offset > offsets[*n])
                .collect();
            // An answer to an upload is not content.
            let answers: u64 = gained
                .iter()
                .map(|n| self.transfers[*n].sink.head.len() as u64)
                .sum();
            let repeated = after.1.saturating_sub(before.1);
            let content = payload.saturating_sub(answers);
            gained.retain(|n| self.specs[*n].direction == Direction::Down);
            self.book(link, Direction::Down, gained, content, repeated);
        }
        Ok(payload > 0)
    }

    /// Payload reached the proxy over this link. `before` and `after`: flow, bytes taken of it, and
    /// how many of those were its request.
    pub(crate) fn on_uploaded(
        &mut self,
        link: usize,
        payload: u64,
        repeated: u64,
        before: &[(FlowId, u64, u64)],
        after: &[(FlowId, u64, u64)],
    ) {
        let (mut gained, mut requests) = (Vec::new(), 0);
        for (id, taken, request) in after {
            let was = before.iter().find(|(known, _, _)| known == id);
            let (was_taken, was_request) = was.map_or((0, 0), |(_, t, r)| (*t, *r));
            requests += request.saturating_sub(was_request);
            let number = self.by_id.get(id).copied();
            let upload = |n: &usize| self.specs[*n].direction == Direction::Up;
            gained.extend(number.filter(|_| *taken > was_taken).filter(upload));
        }
        let content = payload.saturating_sub(requests);
        if content > 0 {
            self.meters[link].on_payload(content);
            self.book(link, Direction::Up, gained, content, repeated);
        }
    }

    /// Books payload to a flow. With one flow in that direction it is that one; with several, the
    /// one that could read on, else the last one that did over this link. (The core does not tell
    /// whose bytes a packet held.)
    fn book(
        &mut self,
        link: usize,
        way: Direction,
        gained: Vec<usize>,
        payload: u64,
        repeated: u64,
    ) {
        let open = |n: &usize| {
            self.specs[*n].direction == way && self.transfers[*n].progress != Progress::Waiting
        };
        let candidates: Vec<usize> = (0..self.specs.len()).filter(open).collect();
        let last = self.served_last[link].filter(|n| candidates.contains(n));
        let number = match (&candidates[..], &gained[..]) {
            ([], _) => return,
            _ if payload == 0 => return,
            ([only], _) => *only,
            (_, [one, ..]) => *one,
            ([first, ..], _) => last.unwrap_or(*first),
        };
        self.served_last[link] = Some(number);
        self.books[number].by_link[link] += payload;
        self.books[number].duplicate += repeated;
    }

    fn offsets(&self) -> Vec<u64> {
        self.transfers.iter().map(|t| t.sink.offset).collect()
    }

    fn totals(&self) -> (u64, u64) {
        let Some(session) = self.session.and_then(|id| self.endpoint.session(id)) else {
            return (0, 0);
        };
        let payload = session.path_stats().iter().map(|p| p.payload_in).sum();
        (payload, session.duplicate_bytes())
    }

    /// Lets the applications act on what the core tells them.
    pub(crate) fn attend(&mut self, now: Time, log: &mut Log) -> Result<bool, SimFault> {
        if self.is_away() {
            return Ok(false);
        }
        let mut any = false;
        while let Some((session, event)) = self.endpoint.poll_event() {
            any = true;
            log.note(now, "device", || format!("{event:?}"));
            match event {
                Event::Readable(id) | Event::Writable(id) => self.use_flow(now, session, id)?,
                Event::SendFrom { flow, offset } => {
                    if let Some(number) = self.by_id.get(&flow) {
                        self.transfers[*number].source.begin_at(offset);
                    }
                    self.use_flow(now, session, flow)?;
                }
                Event::Ended { flow, end } => self.on_ended(now, flow, end, log)?,
                Event::Established { .. } => {
                    self.dirty = true;
                    self.look_at = now;
                }
                Event::Closed(_) => {
                    self.session = None;
                    self.idle_since = None;
                    self.dirty = true;
                }
                _ => {}
            }
        }
        self.note_state(now);
        Ok(any)
    }

    fn note_state(&mut self, now: Time) {
        let Some(session) = self.session.and_then(|id| self.endpoint.session(id)) else {
            return;
        };
        if session.life() == Life::Suspended {
            self.idle_since.get_or_insert(now);
        } else {
            self.idle_since = None;
        }
        for transfer in &mut self.transfers {
            if let Some((_, acked)) = transfer.id.and_then(|id| session.send_offsets(id)) {
                transfer.acked = acked;
            }
        }
    }

    fn use_flow(&mut self, now: Time, session: SessionId, id: FlowId) -> Result<(), SimFault> {
        let Some(number) = self.by_id.get(&id).copied() else {
            return Ok(());
        };
        let transfer = &mut self.transfers[number];
        let outcome = self.endpoint.with(session, |s| {
            transfer.sink.take(s, id)?;
            transfer.source.give(s, id);
            Ok::<_, SimFault>(())
        });
        outcome.unwrap_or(Ok(()))?;
        if transfer.sink.ended && transfer.progress == Progress::Active {
            transfer.progress = Progress::Done(now);
            self.dirty = true;
            self.look_at = now;
        }
        Ok(())
    }

    fn on_ended(
        &mut self,
        now: Time,
        id: FlowId,
        end: FlowEnd,
        log: &mut Log,
    ) -> Result<(), SimFault> {
        let Some(number) = self.by_id.get(&id).copied() else {
            return Ok(());
        };
        let transfer = &mut self.transfers[number];
        self.dirty = true;
        if transfer.progress != Progress::Active {
            return Ok(());
        }
        let untouched = transfer.sink.offset == 0 && transfer.acked == 0;
        if end == FlowEnd::Refused(Reason::UnknownFlow) && untouched {
            // The request never got there: an application asks again.
            log.note(now, "device", || {
                format!("asks again for flow {}", self.specs[number].id)
            });
            let seed = transfer.source.seed;
            self.transfers[number] = transfer_of(&self.specs[number], seed);
            return self.start(now, number, log);
        }
        transfer.progress = match end {
            // Reading the last byte may end the flow at once, without a separate end to read.
            FlowEnd::Complete => Progress::Done(now),
            end => Progress::Failed(end.to_string()),
        };
        self.look_at = now;
        Ok(())
    }

    /// Sends whatever there is to be sent.
    pub(crate) fn transmit(
        &mut self,
        now: Time,
        network: &mut Network,
        buf: &mut [u8],
        log: &mut Log,
    ) -> Result<bool, SimFault> {
        if self.is_away() {
            return Ok(false);
        }
        let mut sent = 0;
        while let Some(t) = self.endpoint.poll_transmit(clock::core(now), buf) {
            let link = t.link.0 as usize;
            for datagram in buf[..t.len].chunks(t.segment) {
                sent += 1;
                let verdict = network.send_up(now, link, t.remote, datagram);
                log.note(now, "device", || {
                    let (hash, name) = (log::hash(datagram), &self.names[link]);
                    format!(
                        "sends {} on {name}, {hash:08x}: {verdict:?}",
                        datagram.len()
                    )
                });
                if verdict == cedos_lab_link::Verdict::TooBig {
                    let core_now = clock::core(now);
                    self.endpoint.on_too_big(core_now, t.link, datagram.len());
                }
            }
            if sent > BURST_MAX {
                let what = "the device sends without end".to_owned();
                return Err(SimFault::LiveLock {
                    at_s: now.as_secs_f64(),
                    what,
                });
            }
        }
        Ok(sent > 0)
    }

    /// Writes the journal: at the scenario's pace, or because something must not be lost.
    pub(crate) fn keep(&mut self, now: Time, pace: bool) {
        if self.is_away() || !(pace || self.dirty) {
            return;
        }
        self.dirty = false;
        let session = self.session.and_then(|id| self.endpoint.session(id));
        let record = session.map(|s| (now, s.record(clock::core(now), true).encode()));
        self.journal.record = record.or_else(|| self.asleep.clone());
        self.journal.transfers = self.transfers.clone();
    }

    // ---- what came of it ----

    pub(crate) fn reports(&self, proxy: &Proxy) -> Vec<FlowReport> {
        let flows = self.specs.iter().zip(&self.transfers).zip(&self.books);
        flows
            .map(|((spec, t), book)| self.report(spec, t, book, proxy))
            .collect()
    }

    fn report(&self, spec: &Flow, t: &Transfer, book: &Book, proxy: &Proxy) -> FlowReport {
        let size = spec.bytes.unwrap_or(0);
        let finished = match t.progress {
            Progress::Done(at) => Some(at),
            _ => None,
        };
        let (bytes, digest) = match spec.direction {
            Direction::Down => (t.sink.content_bytes(), Some(t.sink.digest())),
            Direction::Up => {
                let told = t.sink.whole_head().and_then(|d| d.try_into().ok());
                (t.id.map_or(0, |id| proxy.upload_bytes(id)), told)
            }
        };
        let sha256_ok = finished.is_some() && digest == Some(content::sha256(t.source.seed, size));
        let finished_s = finished.filter(|_| sha256_ok).map(Time::as_secs_f64);
        let carried = self
            .names
            .iter()
            .zip(&book.by_link)
            .filter(|(_, n)| **n > 0);
        FlowReport {
            id: spec.id.clone(),
            bytes,
            sha256_ok,
            finished_s,
            deadline_s: spec.deadline_s,
            deadline_met: finished_s.is_some_and(|at| spec.deadline_s.is_none_or(|by| at <= by)),
            bytes_by_link: carried.map(|(name, n)| (name.clone(), *n)).collect(),
            duplicate_bytes: book.duplicate + t.id.map_or(0, |id| proxy.undone(id)),
        }
    }

    /// The state in a few words.
    pub(crate) fn state(&self) -> String {
        let session = self.session.and_then(|id| self.endpoint.session(id));
        let life = session.map(|s| (s.life(), s.path_stats()));
        let flows: Vec<_> = self
            .transfers
            .iter()
            .map(|t| (&t.progress, t.sink.offset, t.acked))
            .collect();
        format!(
            "device: {life:?}, asleep {}, flows {flows:?}",
            self.asleep.is_some()
        )
    }
}

fn transfer(spec: &Flow, seed: u64, number: usize) -> Transfer {
    // Flows differ in content, or one flow's bytes in another would go unnoticed.
    transfer_of(spec, seed.wrapping_add(number as u64))
}

fn transfer_of(spec: &Flow, seed: u64) -> Transfer {
    let size = spec.bytes.unwrap_or(0);
    let upload = spec.direction == Direction::Up;
    let request = Request { upload, size, seed };
    Transfer {
        id: None,
        progress: Progress::Waiting,
        source: Source::new(request.encode(), seed, if upload { size } else { 0 }),
        sink: Sink::new(if upload { DIGEST_BYTES } else { 0 }, seed),
        acked: 0,
    }
}

fn endpoint(identity: &Identity, life: u64) -> Endpoint {
    Endpoint::new(
        identity.config(),
        SecretKey::from_bytes(identity.device_key()),
        Admission::Nobody,
        identity.fresh_seed("device", life),
        identity.token_seed(),
    )
}
