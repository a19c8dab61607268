//! The simulated proxy: the application that serves flows, its journal and hibernation.
//!
//! The application generates the requested content from any offset, so its flows may hibernate.

use std::collections::BTreeMap;

use cedos_lab_link::Time;
use cedos_lab_scenario::{Crash, Scenario};
use d2tp_session::{
    Admission, Endpoint, EndpointConfig, FlowArrival, FlowId, LinkId, SecretKey, Session,
    SessionEvent, SessionId, StreamPathId,
};

use crate::fault::SimFault;
use crate::host::{SimHost, StoppedProcess};
use crate::identity::Identity;
use crate::journal::{Commit, aged};
use crate::log::{self, Log};
use crate::network::{Delivery, SimNetwork};
use crate::stream::{REQUEST_BYTES, SimRequest, SimSink, SimSource};

/// The link numbers of the proxy's UDP socket and of all its streams.
const UDP_LINK: LinkId = LinkId(0);
const STREAM_LINK: LinkId = LinkId(1);

/// The application's state of a flow.
#[derive(Clone, Debug)]
pub(crate) struct ServedFlow {
    sink: SimSink,
    source: Option<SimSource>,
}

/// The proxy of a simulation.
pub(crate) struct Proxy {
    pub(crate) host: SimHost<BTreeMap<FlowId, ServedFlow>>,
    identity: Identity,
    config: EndpointConfig,
    flows: BTreeMap<FlowId, ServedFlow>,
    /// Bytes of each flow that crashes have undone; a crash does not undo this count.
    undone: BTreeMap<FlowId, u64>,
    /// Flows that must be refused, because this end lost data that the peer knows to be durable.
    forbidden: Vec<FlowId>,
    /// Whether the device connected as an unknown one since this was last read.
    met: bool,
}

impl Proxy {
    pub(crate) fn new(scenario: &Scenario, identity: Identity, config: EndpointConfig) -> Proxy {
        Proxy {
            host: SimHost::new("proxy", endpoint(&config, &identity, 0), scenario),
            identity,
            config,
            flows: BTreeMap::new(),
            undone: BTreeMap::new(),
            forbidden: Vec::new(),
            met: false,
        }
    }

    pub(crate) fn session_id(&self) -> Option<SessionId> {
        self.host.endpoint.ids().first().copied()
    }

    pub(crate) fn session(&self) -> Option<&Session> {
        self.session_id()
            .and_then(|id| self.host.endpoint.session(id))
    }

    /// Whether the session is hibernated.
    pub(crate) fn is_asleep(&self) -> bool {
        let (_, asleep, _) = self.host.endpoint.counts();
        asleep > 0
    }

    /// The number of restarts.
    pub(crate) fn lives(&self) -> u64 {
        self.identity.lives
    }

    pub(crate) fn next_at(&self) -> Time {
        self.host.next_at()
    }

    /// Bytes received in total, to detect progress.
    pub(crate) fn taken(&self) -> u64 {
        self.flows.values().map(|f| f.sink.offset).sum()
    }

    /// Content bytes received of an upload, by the device's flow.
    pub(crate) fn upload_bytes(&self, id: FlowId) -> u64 {
        self.flows.get(&id).map_or(0, |f| f.sink.content_bytes())
    }

    /// Bytes of a flow that had to be sent again because a crash undid them.
    pub(crate) fn undone(&self, id: FlowId) -> u64 {
        self.undone.get(&id).copied().unwrap_or(0)
    }

    /// Stops the process without warning.
    pub(crate) fn stop(&mut self, now: Time, crash: &Crash, log: &mut Log) {
        self.host.stop(now, crash, log);
    }

    /// Handles timers. `known`: what the device knows to be durable here. Returns true if the
    /// process has just continued after being frozen.
    pub(crate) fn on_time(
        &mut self,
        now: Time,
        known: &BTreeMap<FlowId, u64>,
        log: &mut Log,
    ) -> Result<bool, SimFault> {
        let thawed = match self.host.come_back(now, log) {
            StoppedProcess::Away => return Ok(false),
            StoppedProcess::Ran => false,
            StoppedProcess::FromFreeze => true,
            StoppedProcess::FromCrash(found) => {
                self.restart(now, found, known)?;
                false
            }
        };
        if let Some(safe) = self.host.synced(now) {
            self.report_durable(&safe);
        }
        let core_now = self.host.clock.core(now);
        self.host.endpoint.handle_timeouts(core_now);
        if self.host.hibernate_at() <= now {
            self.hibernate(now, log);
        }
        Ok(thawed)
    }

    fn restart(
        &mut self,
        now: Time,
        found: Option<Commit<BTreeMap<FlowId, ServedFlow>>>,
        known: &BTreeMap<FlowId, u64>,
    ) -> Result<(), SimFault> {
        self.identity.lives += 1;
        self.host.endpoint = endpoint(&self.config, &self.identity, self.identity.lives);
        let kept = found.as_ref().map(|f| f.state.clone()).unwrap_or_default();
        for (id, flow) in &self.flows {
            let offset = kept.get(id).map_or(0, |kept| kept.sink.offset);
            // A flow that started again may be behind its journal's offset.
            *self.undone.entry(*id).or_default() += flow.sink.offset.saturating_sub(offset);
        }
        self.flows = kept;
        self.flows.values_mut().for_each(ServedFlow::wait);
        self.forbidden.clear();
        for (id, flow) in &self.flows {
            if known.get(id).is_some_and(|known| *known > flow.sink.offset) {
                self.forbidden.push(*id);
            }
        }
        if let Some((made_at, record)) = found.and_then(|f| Some((f.made_at, f.record?))) {
            let record = aged(&record, now.since(made_at))?;
            self.host.endpoint.adopt(&record)?;
        }
        Ok(())
    }

    /// Whether data that the device knew to be durable is gone, because of a faulty disk.
    pub(crate) fn rolled_back(&self) -> bool {
        !self.forbidden.is_empty()
    }

    /// Whether the device connected as an unknown one since the last call, so that its state is
    /// gone.
    pub(crate) fn take_met(&mut self) -> bool {
        std::mem::take(&mut self.met)
    }

    /// Handles that the device has lost its state: it may resume at any offset again.
    pub(crate) fn forgive(&mut self) {
        self.forbidden.clear();
    }

    fn hibernate(&mut self, now: Time, log: &mut Log) {
        self.host.idle_since = None;
        let Some(id) = self.session_id() else { return };
        if !self.session().is_some_and(Session::may_hibernate) {
            return;
        }
        let core_now = self.host.clock.core(now);
        let Ok(record) = self.host.endpoint.hibernate(core_now, id) else {
            return;
        };
        log.note(now, "proxy", || format!("hibernates in {} B", record.len()));
        self.flows.values_mut().for_each(ServedFlow::wait);
        self.host.commit(now, Some(record), self.flows.clone());
    }

    /// Records that the applications' data of a commit is durable.
    fn report_durable(&mut self, safe: &BTreeMap<FlowId, ServedFlow>) {
        let Some(session) = self.session_id() else {
            return;
        };
        let _ = self.host.endpoint.with(session, |s| {
            for (id, flow) in safe {
                if s.options(*id).is_some_and(|o| o.durable) {
                    s.set_durable(*id, flow.sink.offset);
                    s.set_committed(*id, flow.sink.offset);
                }
            }
        });
    }

    /// Handles a datagram. Returns its payload by flow.
    pub(crate) fn on_datagram(&mut self, now: Time, delivery: Delivery) -> Vec<FlowArrival> {
        let session = self.session_id();
        let link = delivery.stream.map_or(UDP_LINK, |_| STREAM_LINK);
        self.host
            .take_in(now, link, delivery, session)
            .unwrap_or_default()
    }

    /// Handles the end of a stream.
    pub(crate) fn on_stream_closed(&mut self, now: Time, stream: StreamPathId) {
        let core_now = self.host.clock.core(now);
        self.host.endpoint.on_stream_closed(core_now, stream);
    }

    /// Lets the application handle the core's events.
    pub(crate) fn attend(&mut self, now: Time, log: &mut Log) -> Result<bool, SimFault> {
        if self.host.is_away() {
            return Ok(false);
        }
        let mut any = false;
        while let Some((session, event)) = self.host.endpoint.poll_event() {
            any = true;
            log.note(now, "proxy", || format!("{event:?}"));
            match event {
                SessionEvent::Established { resumed: false, .. } => self.met = true,
                SessionEvent::Opened(id) => {
                    let sink = SimSink::new(REQUEST_BYTES, 0);
                    self.flows.insert(id, ServedFlow { sink, source: None });
                    self.host.dirty = true;
                    self.serve(session, id)?;
                }
                SessionEvent::Readable(id) | SessionEvent::Writable(id) => {
                    self.serve(session, id)?
                }
                SessionEvent::SendFrom { flow, offset } => {
                    if let Some(source) = self.flows.get_mut(&flow).and_then(|f| f.source.as_mut())
                    {
                        source.begin_at(offset);
                    }
                    self.serve(session, flow)?;
                }
                SessionEvent::Asleep => self.flows.values_mut().for_each(ServedFlow::wait),
                SessionEvent::PeerDurable { flow, offset } => {
                    let known = self.host.peer_durable.entry(flow).or_default();
                    *known = offset.max(*known);
                }
                SessionEvent::Established { .. } | SessionEvent::Ended { .. } => {
                    self.host.dirty = true
                }
                SessionEvent::Closed(end) => SimFault::of_end("proxy", &end)?,
                _ => {}
            }
        }
        let session = self.session_id();
        self.host.note_idle(now, session);
        Ok(any)
    }

    fn serve(&mut self, session: SessionId, id: FlowId) -> Result<(), SimFault> {
        let Some(flow) = self.flows.get_mut(&id) else {
            return Ok(());
        };
        let before = (flow.sink.ended, flow.sink.offset);
        let outcome = self.host.endpoint.with(session, |s| {
            flow.sink.take(s, id)?;
            if flow.source.is_none() {
                flow.source = answer(&flow.sink);
                // A request that was lost in a crash arrives again, its answer does not.
                if let (Some(source), Some((next, _))) = (&mut flow.source, s.send_offsets(id)) {
                    source.begin_at(next);
                }
            }
            if let Some(source) = &mut flow.source {
                source.give(s, id);
            }
            Ok(())
        });
        self.host.dirty |= flow.sink.ended != before.0;
        if flow.sink.offset > before.1 && self.forbidden.contains(&id) {
            return Err(SimFault::RolledBack { flow: id });
        }
        outcome.unwrap_or(Ok(()))
    }

    /// Sends everything that can be sent now.
    pub(crate) fn transmit(
        &mut self,
        now: Time,
        network: &mut SimNetwork,
        buf: &mut [u8],
        log: &mut Log,
    ) -> Result<bool, SimFault> {
        let core_now = self.host.clock.core(now);
        self.host.transmit(now, buf, |endpoint, t, datagram| {
            if let Some(stream) = StreamPathId::of(&t.remote) {
                network.streams.send(stream, datagram);
                return log.note(now, "proxy", || {
                    let (bytes, hash) = (datagram.len(), log::hash(datagram));
                    format!("sends {bytes} in stream {}, {hash:08x}", stream.0)
                });
            }
            if network.is_too_big_for_proxy(t.remote, datagram.len()) {
                return endpoint.on_too_big(core_now, t, datagram.len());
            }
            let outcome = network.send_down(now, t.remote, datagram);
            log.note(now, "proxy", || {
                let (bytes, hash) = (datagram.len(), log::hash(datagram));
                format!("sends {bytes} to {}, {hash:08x}: {outcome:?}", t.remote)
            });
        })
    }

    /// Writes the journal: at the scenario's interval, or because something must not be lost.
    pub(crate) fn keep(&mut self, now: Time, pace: bool) {
        if self.host.wants_commit(pace)
            && let Some(session) = self.session().filter(|s| !s.is_unconfirmed())
        {
            let record = session.record(self.host.clock.core(now), false).encode();
            self.host.commit(now, Some(record), self.flows.clone());
        }
    }

    /// A flow that is still open long after its deadline, if there is one.
    pub(crate) fn overdue(&self, now: Time) -> Option<FlowId> {
        let session = self.session().filter(|_| !self.host.is_away())?;
        let late = |id: &FlowId| {
            let deadline = session.deadline(*id);
            deadline.is_some_and(|at| self.host.clock.core(now) > at)
        };
        session.flow_ids().into_iter().find(late)
    }

    /// The state in a few words.
    pub(crate) fn state(&self) -> String {
        let (awake, asleep, half_open) = self.host.endpoint.counts();
        let life = self.session().map(|s| (s.state(), s.path_stats()));
        let flows = self.session().map(Session::explain).unwrap_or_default();
        format!("proxy: {awake} awake, {asleep} asleep, {half_open} half open, {life:?}, {flows}")
    }
}

impl ServedFlow {
    fn wait(&mut self) {
        if let Some(source) = &mut self.source {
            source.wait();
        }
    }
}

/// The application's answer to what it has read so far; `None` if it needs more.
fn answer(sink: &SimSink) -> Option<SimSource> {
    let request = SimRequest::decode(sink.whole_head()?)?;
    if !request.upload {
        return Some(SimSource::new(
            Vec::new(),
            request.seed,
            request.from,
            request.size,
        ));
    }
    // The device may keep its direction open until it has the answer.
    (sink.content_bytes() == request.size).then(|| SimSource::new(sink.receipt().to_vec(), 0, 0, 0))
}

fn endpoint(config: &EndpointConfig, identity: &Identity, life: u64) -> Endpoint {
    Endpoint::new(
        config.clone(),
        SecretKey::from_bytes(identity.proxy_key()),
        Admission::Anybody,
        identity.fresh_seed("proxy", life),
        identity.token_seed(),
    )
}
