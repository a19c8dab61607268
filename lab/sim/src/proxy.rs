//! The proxy's end: the core, the application that serves flows, a journal.
//!
//! The application makes up what it is asked for, from any offset, so its flows may sleep as
//! records. The journal holds the session's record and, as of the same instant, what the
//! application knows of its flows; a crash goes back to it.

use std::collections::BTreeMap;

use cedos_lab_link::{Span, Time};
use cedos_lab_scenario::Scenario;
use d2tp_session::{
    Addresses, Admission, Endpoint, Event, FlowId, Incoming, Life, LinkId, SecretKey, SessionId,
};

use crate::clock;
use crate::fault::SimFault;
use crate::identity::Identity;
use crate::log::{self, Log};
use crate::network::{Delivery, Network};
use crate::stream::{REQUEST_BYTES, Request, Sink, Source};

/// Datagrams one end may send at one instant; more is a live-lock.
pub(crate) const BURST_MAX: usize = 20_000;

/// What the proxy's application knows of a flow.
#[derive(Clone, Debug)]
struct Served {
    sink: Sink,
    source: Option<Source>,
}

/// What survives a crash.
#[derive(Clone, Debug, Default)]
struct Journal {
    record: Option<Vec<u8>>,
    flows: BTreeMap<FlowId, Served>,
}

/// The proxy.
pub(crate) struct Proxy {
    endpoint: Endpoint,
    identity: Identity,
    flows: BTreeMap<FlowId, Served>,
    journal: Journal,
    /// Away after a crash until then.
    away_until: Option<Time>,
    idle_since: Option<Time>,
    hibernate_after: Span,
    dirty: bool,
    /// Bytes of each flow that crashes undid; no crash undoes this.
    undone: BTreeMap<FlowId, u64>,
}

impl Proxy {
    pub(crate) fn new(scenario: &Scenario, identity: Identity) -> Proxy {
        Proxy {
            endpoint: endpoint(&identity, 0),
            identity,
            flows: BTreeMap::new(),
            journal: Journal::default(),
            away_until: None,
            idle_since: None,
            hibernate_after: Span::from_secs_f64(scenario.hibernate_after_s),
            dirty: false,
            undone: BTreeMap::new(),
        }
    }

    fn session(&self) -> Option<SessionId> {
        self.endpoint.ids().first().copied()
    }

    pub(crate) fn next_at(&self) -> Time {
        if let Some(until) = self.away_until {
            return until;
        }
        clock::run(self.endpoint.next_timeout()).min(self.hibernate_at())
    }

    fn hibernate_at(&self) -> Time {
        self.idle_since
            .map_or(Time::NEVER, |since| since + self.hibernate_after)
    }

    /// Content bytes taken in all, to see progress.
    pub(crate) fn taken(&self) -> u64 {
        self.flows.values().map(|f| f.sink.offset).sum()
    }

    /// Content bytes taken of each upload, by the device's flow.
    pub(crate) fn upload_bytes(&self, id: FlowId) -> u64 {
        self.flows.get(&id).map_or(0, |f| f.sink.content_bytes())
    }

    /// Bytes of a flow that had to come again because a crash undid them.
    pub(crate) fn undone(&self, id: FlowId) -> u64 {
        self.undone.get(&id).copied().unwrap_or(0)
    }

    /// Per flow, how many bytes were taken and how many of them were a request, not content.
    pub(crate) fn taken_by_flow(&self) -> Vec<(FlowId, u64, u64)> {
        let flows = self.flows.iter();
        flows
            .map(|(id, f)| (*id, f.sink.offset, f.sink.head.len() as u64))
            .collect()
    }

    /// The process stops without a word.
    pub(crate) fn crash(&mut self, now: Time, away: Span, log: &mut Log) {
        log.note(now, "proxy", || "crashes".to_owned());
        self.away_until = Some(now + away);
    }

    /// Lets time pass.
    pub(crate) fn on_time(&mut self, now: Time, log: &mut Log) -> Result<(), SimFault> {
        if let Some(until) = self.away_until {
            if now < until {
                return Ok(());
            }
            log.note(now, "proxy", || "restarts".to_owned());
            self.away_until = None;
            self.idle_since = None;
            self.identity.lives += 1;
            self.endpoint = endpoint(&self.identity, self.identity.lives);
            for (id, flow) in &self.flows {
                let kept = self
                    .journal
                    .flows
                    .get(id)
                    .map_or(0, |kept| kept.sink.offset);
                *self.undone.entry(*id).or_default() += flow.sink.offset - kept;
            }
            self.flows = self.journal.flows.clone();
            self.flows.values_mut().for_each(Served::wait);
            if let Some(record) = &self.journal.record {
                self.endpoint.adopt(record)?;
            }
        }
        self.endpoint.handle_timeouts(clock::core(now));
        if self.hibernate_at() <= now {
            self.idle_since = None;
            if let Some(id) = self.session()
                && self.endpoint.session(id).is_some_and(|s| s.may_hibernate())
                && let Ok(record) = self.endpoint.hibernate(clock::core(now), id)
            {
                log.note(now, "proxy", || format!("hibernates in {} B", record.len()));
                self.flows.values_mut().for_each(Served::wait);
                self.journal = Journal {
                    record: Some(record),
                    flows: self.flows.clone(),
                };
            }
        }
        Ok(())
    }

    /// A datagram arrives. Tells the payload bytes in it, new ones and repeated ones.
    pub(crate) fn on_datagram(&mut self, now: Time, delivery: Delivery) -> (u64, u64) {
        if self.away_until.is_some() {
            return (0, 0);
        }
        let before = self.totals();
        let Delivery {
            from, mut bytes, ..
        } = delivery;
        let addresses = Addresses {
            link: LinkId(0),
            local: None,
            remote: from,
        };
        let incoming = Incoming {
            addresses,
            bytes: &mut bytes,
        };
        self.endpoint.handle_datagram(clock::core(now), incoming);
        let after = self.totals();
        (
            after.0.saturating_sub(before.0),
            after.1.saturating_sub(before.1),
        )
    }

    fn totals(&self) -> (u64, u64) {
        let Some(session) = self.session().and_then(|id| self.endpoint.session(id)) else {
            return (0, 0);
        };
        let payload = session.path_stats().iter().map(|p| p.payload_in).sum();
        (payload, session.duplicate_bytes())
    }

    /// Lets the application act on what the core tells it.
    pub(crate) fn attend(&mut self, now: Time, log: &mut Log) -> Result<bool, SimFault> {
        if self.away_until.is_some() {
            return Ok(false);
        }
        let mut any = false;
        while let Some((session, event)) = self.endpoint.poll_event() {
            any = true;
            log.note(now, "proxy", || format!("{event:?}"));
            match event {
                Event::Opened(id) => {
                    let sink = Sink::new(REQUEST_BYTES, 0);
                    self.flows.insert(id, Served { sink, source: None });
                    self.dirty = true;
                    self.serve(session, id)?;
                }
                Event::Readable(id) | Event::Writable(id) => self.serve(session, id)?,
                Event::SendFrom { flow, offset } => {
                    if let Some(source) = self.flows.get_mut(&flow).and_then(|f| f.source.as_mut())
                    {
                        source.begin_at(offset);
                    }
                    self.serve(session, flow)?;
                }
                Event::Asleep => self.flows.values_mut().for_each(Served::wait),
                Event::Established { .. } | Event::Ended { .. } => self.dirty = true,
                _ => {}
            }
            self.note_idle(now);
        }
        Ok(any)
    }

    fn note_idle(&mut self, now: Time) {
        let suspended = self
            .session()
            .and_then(|id| self.endpoint.session(id))
            .is_some_and(|s| s.life() == Life::Suspended);
        if suspended {
            self.idle_since.get_or_insert(now);
        } else {
            self.idle_since = None;
        }
    }

    fn serve(&mut self, session: SessionId, id: FlowId) -> Result<(), SimFault> {
        let Some(flow) = self.flows.get_mut(&id) else {
            return Ok(());
        };
        let ended_before = flow.sink.ended;
        let outcome = self.endpoint.with(session, |s| {
            flow.sink.take(s, id)?;
            if flow.source.is_none() {
                flow.source = answer(&flow.sink);
            }
            if let Some(source) = &mut flow.source {
                source.give(s, id);
            }
            Ok(())
        });
        self.dirty |= flow.sink.ended != ended_before;
        outcome.unwrap_or(Ok(()))
    }

    /// Sends whatever there is to be sent.
    pub(crate) fn transmit(
        &mut self,
        now: Time,
        network: &mut Network,
        buf: &mut [u8],
        log: &mut Log,
    ) -> Result<bool, SimFault> {
        if self.away_until.is_some() {
            return Ok(false);
        }
        let mut sent = 0;
        while let Some(t) = self.endpoint.poll_transmit(clock::core(now), buf) {
            for datagram in buf[..t.len].chunks(t.segment) {
                sent += 1;
                let outcome = network.send_down(now, t.remote, datagram);
                log.note(now, "proxy", || {
                    let hash = log::hash(datagram);
                    format!(
                        "sends {} to {}, {hash:08x}: {outcome:?}",
                        datagram.len(),
                        t.remote
                    )
                });
            }
            if sent > BURST_MAX {
                let what = "the proxy sends without end".to_owned();
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
        if self.away_until.is_some() || !(pace || self.dirty) {
            return;
        }
        self.dirty = false;
        if let Some(session) = self.session().and_then(|id| self.endpoint.session(id)) {
            let record = session.record(clock::core(now), true).encode();
            self.journal = Journal {
                record: Some(record),
                flows: self.flows.clone(),
            };
        }
    }

    /// The state in a few words.
    pub(crate) fn state(&self) -> String {
        let (awake, asleep, half_open) = self.endpoint.counts();
        let session = self.session().and_then(|id| self.endpoint.session(id));
        let life = session.map(|s| (s.life(), s.path_stats()));
        format!("proxy: {awake} awake, {asleep} asleep, {half_open} half open, {life:?}")
    }
}

impl Served {
    fn wait(&mut self) {
        if let Some(source) = &mut self.source {
            source.wait();
        }
    }
}

/// What the application answers to what it has read so far, once it can.
fn answer(sink: &Sink) -> Option<Source> {
    let request = Request::decode(sink.whole_head()?)?;
    if !request.upload {
        return Some(Source::new(Vec::new(), request.seed, request.size));
    }
    sink.ended
        .then(|| Source::new(sink.digest().to_vec(), 0, 0))
}

fn endpoint(identity: &Identity, life: u64) -> Endpoint {
    Endpoint::new(
        identity.config(),
        SecretKey::from_bytes(identity.proxy_key()),
        Admission::Anybody,
        identity.fresh_seed("proxy", life),
        identity.token_seed(),
    )
}
