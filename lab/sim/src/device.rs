//! The simulated device: the core, its applications, its journal.
//!
//! ```text
//!  starts ─▶ awake ──no path for hibernate_after_s──▶ hibernated: a record, 0 timers
//!              ▲ ▲                                      │
//!              │ └──── a permitted link is up ──────────┘
//!              └────── restarts from the journal ◀── crashed
//! ```
//!
//! The device's scheduler decides which links flows may use; they are its clients (`flow_clients`).
//! `d2tp-device` decides about sockets, paths and grants. Both are the production code; `conductor`
//! passes their inputs and carries out their actions.

use std::collections::BTreeMap;

use cedos_lab_link::{Span, Time};
use cedos_lab_scenario::{
    Class, Crash, Direction, Mirror, Offload, Scenario, ScenarioEnergy, ScenarioFlow,
};
use d2tp_device::{DeviceLinkSettings, DeviceLinks, LinkFacts, LinkUse};
use d2tp_session::{
    Admission, Endpoint, EndpointConfig, FlowArrival, FlowEnd, FlowId, FlowOptions, LinkId,
    SecretKey, Session, SessionEvent, SessionId, StreamPathId,
};

use crate::account::Account;
use crate::fault::SimFault;
use crate::flow_clients::FlowClients;
use crate::host::{SimHost, StoppedProcess};
use crate::identity::Identity;
use crate::journal::{Commit, aged};
use crate::log::{self, Log};
use crate::network::{Delivery, SimNetwork};
use crate::strategy::Strategy;
use crate::transfer::{Progress, SimTransfer};
use crate::viewer::SimViewer;

/// The number of epochs reserved in the journal at a time; every SYN uses one.
const EPOCHS_RESERVED: u32 = 100_000;
/// The tolerance of a deadline: each hibernation and each crash rounds it to a millisecond.
const DEADLINE_ROUNDING: Span = Span::from_millis(50);

/// The most links of a device: the number of a socket is a multiple of this plus its link's number.
const LINKS_MAX: u32 = 256;

/// The link of one of the device's sockets.
pub(crate) fn link_of(socket: LinkId) -> usize {
    (socket.0 % LINKS_MAX) as usize
}

/// The device of a simulation: its host, links, flows and policy.
pub(crate) struct SimDevice {
    pub(crate) host: SimHost<Vec<SimTransfer>>,
    identity: Identity,
    config: EndpointConfig,
    pub(crate) session: Option<SessionId>,
    asleep: Option<(Time, Vec<u8>)>,
    pub(crate) specs: Vec<ScenarioFlow>,
    pub(crate) classes: Vec<Class>,
    /// For each link, whether both directions share a medium.
    pub(crate) half_duplex: Vec<bool>,
    /// Whether ACKs of such links may use metered links.
    pub(crate) acks_pay: bool,
    /// The rate that the device lends on metered links for losses of others, in bytes per second.
    pub(crate) lends: Option<u64>,
    pub(crate) names: Vec<String>,
    pub(crate) transfers: Vec<SimTransfer>,
    pub(crate) accounts: Vec<Account>,
    by_id: BTreeMap<FlowId, usize>,
    epochs_next: u32,
    /// When the conductor is due next.
    pub(crate) look_at: Time,
    /// Flows that must be refused, because this end lost data that the peer knows to be durable.
    forbidden: Vec<FlowId>,
    /// How often each link was lost.
    pub(crate) attachments: Vec<u64>,
    /// Since when the first hop of each link is being asked, and with which ticket.
    pub(crate) asked: Vec<Option<(Time, u64)>>,
    /// The state machine of its links.
    pub(crate) links: DeviceLinks,
    /// The links as they were last passed to the state machine.
    pub(crate) last_links: Vec<(LinkFacts, LinkUse)>,
    /// The newest socket of each link, while it is open.
    pub(crate) sockets: Vec<Option<LinkId>>,
    sockets_made: u32,
    /// The sockets that are streams, and those of them that close once no path needs them.
    pub(crate) streams: BTreeMap<LinkId, StreamPathId>,
    pub(crate) closing: Vec<LinkId>,
    /// The flows as clients of the scheduler.
    pub(crate) clients: FlowClients,
    /// Whether packets moved since the links' timers were handled.
    pub(crate) stirred: bool,
    /// When the links' timers were last handled.
    pub(crate) ticked_at: Time,
    /// The strategy that chooses links, if the policy alone does not.
    pub(crate) strategy: Option<Box<dyn Strategy>>,
    /// The radios, and when energy is saved.
    energy: Option<ScenarioEnergy>,
    /// The viewer of the first flow, if there is one.
    pub(crate) viewer: Option<SimViewer>,
}

impl SimDevice {
    pub(crate) fn new(
        scenario: &Scenario,
        identity: Identity,
        config: EndpointConfig,
    ) -> SimDevice {
        let links = scenario.links.len();
        // The flows' contents differ, so that bytes of one flow in another are detected.
        let seed = |number: usize| scenario.seed.wrapping_add(number as u64);
        let transfers = scenario.flows.iter().enumerate();
        let mut device = SimDevice {
            host: SimHost::new("device", endpoint(&config, &identity, 0), scenario),
            identity,
            config,
            session: None,
            asleep: None,
            specs: scenario.flows.clone(),
            classes: scenario.links.iter().map(|l| l.class).collect(),
            acks_pay: matches!(scenario.acks.offload, Offload::Paid(_)),
            lends: match scenario.transport.mirror {
                Some(Mirror::Paid(bytes_per_second)) => Some(bytes_per_second),
                _ => None,
            },
            half_duplex: (scenario.links.iter())
                .map(|l| l.medium.is_some())
                .collect(),
            names: scenario.links.iter().map(|l| l.name.clone()).collect(),
            transfers: transfers
                .map(|(n, spec)| SimTransfer::new(spec, seed(n)))
                .collect(),
            accounts: vec![Account::new(links); scenario.flows.len()],
            by_id: BTreeMap::new(),
            epochs_next: 1,
            look_at: Time::NEVER,
            forbidden: Vec::new(),
            attachments: vec![0; links],
            asked: vec![None; links],
            links: DeviceLinks::default(),
            last_links: Vec::new(),
            sockets: vec![None; links],
            sockets_made: 0,
            streams: BTreeMap::new(),
            closing: Vec::new(),
            clients: FlowClients::new(std::iter::empty()),
            stirred: false,
            ticked_at: Time::ZERO,
            strategy: None,
            energy: scenario.energy.clone(),
            viewer: None,
        };
        device.forget_links();
        device.connect(Time::ZERO);
        device
    }

    /// Creates a session without flows.
    fn connect(&mut self, now: Time) {
        let proxy = SecretKey::from_bytes(self.identity.proxy_key());
        let (instance, epochs) = (self.identity.instance(), self.reserve());
        let core_now = self.host.clock.core(now);
        let id = self
            .host
            .endpoint
            .connect(core_now, proxy.public(), instance, epochs);
        self.session = Some(id);
        self.host.idle_since = Some(now);
        self.links.on_session_began(core_now);
        self.clients.on_session_began();
    }

    /// Creates the state of a process that knows nothing about its links.
    fn forget_links(&mut self) {
        self.links = DeviceLinks::new(DeviceLinkSettings {
            acks_pay: self.acks_pay,
            lend_rate: self.lends,
            round_trip: match self.config.has_long_round_trip() {
                true => self.config.rtt_initial,
                false => Span::ZERO,
            },
        });
        self.last_links.clear();
        self.sockets.fill(None);
        self.streams.clear();
        self.closing.clear();
        let paid = |account: &Account| {
            let links = self.classes.iter().enumerate();
            let paid = links.filter(|(_, class)| **class != Class::Free);
            paid.map(|(link, _)| account.of_link(link)).sum()
        };
        self.clients = FlowClients::new(self.accounts.iter().map(paid));
        if let Some(energy) = &self.energy {
            self.clients.set_energy(energy, &self.names);
        }
        for transfer in &mut self.transfers {
            transfer.source.held = false;
        }
        self.asked.fill(None);
    }

    /// Assigns the number of a new socket on a link; packets arrive at that one from now on.
    pub(crate) fn new_socket(&mut self, link: usize) -> LinkId {
        let socket = self.socket_number(link);
        self.sockets[link] = Some(socket);
        socket
    }

    pub(crate) fn socket_number(&mut self, link: usize) -> LinkId {
        self.sockets_made += 1;
        LinkId(self.sockets_made * LINKS_MAX + link as u32)
    }

    /// Records that packets move, so that the links are updated soon, as in the driver.
    fn stir(&mut self, now: Time) {
        self.stirred = true;
        let soon = (self.ticked_at + d2tp_device::TICK).max(now);
        self.look_at = self.look_at.min(soon);
    }

    fn reserve(&mut self) -> std::ops::Range<u32> {
        let first = self.epochs_next;
        self.epochs_next = first.saturating_add(EPOCHS_RESERVED);
        first..self.epochs_next
    }

    pub(crate) fn core(&self) -> Option<&Session> {
        self.session.and_then(|id| self.host.endpoint.session(id))
    }

    /// Whether the session is hibernated.
    pub(crate) fn is_asleep(&self) -> bool {
        self.asleep.is_some()
    }

    pub(crate) fn next_at(&self) -> Time {
        let host = self.host.next_at();
        if self.host.is_away() {
            return host;
        }
        let asleep = if self.is_asleep() {
            self.next_deadline()
        } else {
            Time::NEVER
        };
        host.min(self.look_at).min(self.next_start()).min(asleep)
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
        let mut transfers = self.transfers.iter();
        transfers.any(|t| t.progress == Progress::Active)
    }

    /// Whether every transfer is over.
    pub(crate) fn is_done(&self) -> bool {
        self.transfers.iter().all(SimTransfer::is_over)
    }

    /// Flows that failed for a reason other than their deadline: id and reason.
    pub(crate) fn failures(&self) -> Vec<(String, String)> {
        let flows = self.specs.iter().zip(&self.transfers);
        let failed = flows.filter_map(|(spec, t)| match &t.progress {
            Progress::Failed(why) => Some((spec.id.clone(), why.clone())),
            _ => None,
        });
        failed.collect()
    }

    /// Whether payload of a transfer arrived at either end.
    pub(crate) fn has_payload(&self) -> bool {
        self.accounts.iter().any(|account| account.came.is_some())
    }

    /// Bytes received and acknowledged in total, to detect progress.
    pub(crate) fn moved(&self) -> u64 {
        let moved = |t: &SimTransfer| t.sink.content_bytes() + t.acked;
        self.transfers.iter().map(moved).sum()
    }

    /// Bytes a transfer still needs.
    pub(crate) fn remaining(&self, number: usize) -> u64 {
        let (spec, t) = (&self.specs[number], &self.transfers[number]);
        match spec.direction {
            Direction::Down => spec
                .bytes
                .unwrap_or(0)
                .saturating_sub(t.sink.content_bytes()),
            Direction::Up => t.source.total().saturating_sub(t.acked),
        }
    }

    /// The flow of a transfer that is not over long after its deadline, if there is one.
    pub(crate) fn overdue(&self, now: Time) -> Option<FlowId> {
        let late = |n: usize| {
            let by = self.specs[n].deadline_s.map(Time::from_secs_f64);
            self.transfers[n].progress == Progress::Active
                && by.is_some_and(|by| now > by + DEADLINE_ROUNDING)
        };
        let number = (0..self.specs.len()).find(|n| !self.host.is_away() && late(*n))?;
        self.transfers[number].id
    }

    // ---- hibernation, crashes, timers ----

    /// Stops the process without warning.
    pub(crate) fn stop(&mut self, now: Time, crash: &Crash, log: &mut Log) {
        self.host.stop(now, crash, log);
    }

    /// Records that the link has a new attachment or none, so that the conductor runs.
    pub(crate) fn on_link_down(&mut self, link: usize) {
        self.attachments[link] += 1;
    }

    /// Handles timers. `known`: what the proxy knows to be durable here. Returns true if the
    /// process has just come back, in whatever way, so that all links have to be checked.
    pub(crate) fn on_time(
        &mut self,
        now: Time,
        known: &BTreeMap<FlowId, u64>,
        log: &mut Log,
    ) -> Result<ProcessReturn, SimFault> {
        let came = match self.host.come_back(now, log) {
            StoppedProcess::Away => return Ok(ProcessReturn::Not),
            StoppedProcess::Ran => ProcessReturn::Not,
            StoppedProcess::FromFreeze => ProcessReturn::Thawed,
            StoppedProcess::FromCrash(found) => {
                self.restart(now, found, known);
                ProcessReturn::Anew
            }
        };
        if let Some(safe) = self.host.synced(now) {
            self.report_durable(&safe);
        }
        if self.is_asleep() && self.next_deadline() <= now {
            // The application is informed by the session.
            self.wake(now, log)?;
        }
        let core_now = self.host.clock.core(now);
        self.host.endpoint.handle_timeouts(core_now);
        if self.host.hibernate_at() <= now {
            self.hibernate(now, log);
        }
        for number in 0..self.specs.len() {
            let start = Time::from_secs_f64(self.specs[number].start_s);
            if self.transfers[number].progress == Progress::Waiting && start <= now {
                self.start(now, number, log)?;
            }
        }
        Ok(came)
    }

    fn restart(
        &mut self,
        now: Time,
        found: Option<Commit<Vec<SimTransfer>>>,
        known: &BTreeMap<FlowId, u64>,
    ) {
        self.identity.lives += 1;
        self.host.endpoint = endpoint(&self.config, &self.identity, self.identity.lives);
        self.session = None;
        let (record, kept) = match found {
            Some(f) => (f.record.map(|r| (f.made_at, r)), Some(f.state)),
            None => (None, None),
        };
        self.forbidden.clear();
        for (number, spec) in self.specs.iter().enumerate() {
            let transfer = &mut self.transfers[number];
            let kept = match &kept {
                Some(kept) => kept[number].clone(),
                None => SimTransfer::new(spec, transfer.seed),
            };
            // Data read since the commit arrives again.
            let undone = transfer.sink.content_bytes() - kept.sink.content_bytes();
            if spec.direction == Direction::Down {
                self.accounts[number].duplicate += undone;
            }
            *transfer = kept;
            transfer.source.wait();
            if let Some(id) = transfer.id
                && known
                    .get(&id)
                    .is_some_and(|known| *known > transfer.sink.offset)
            {
                self.forbidden.push(id);
            }
        }
        self.asleep = record;
        self.index();
        self.forget_links();
        if self.asleep.is_none() {
            // Its flows belonged to a session that is lost.
            for (number, spec) in self.specs.iter().enumerate() {
                if self.transfers[number].progress == Progress::Active {
                    self.transfers[number].again(spec);
                }
            }
            self.connect(now);
        }
    }

    /// Whether data that the proxy knew to be durable is gone, because of a faulty disk.
    pub(crate) fn rolled_back(&self) -> bool {
        !self.forbidden.is_empty()
    }

    /// Handles that the proxy has lost its state: it may resume at any offset again.
    pub(crate) fn forgive(&mut self) {
        self.forbidden.clear();
    }

    fn hibernate(&mut self, now: Time, log: &mut Log) {
        self.host.idle_since = None;
        let Some(id) = self.session else { return };
        if !self.core().is_some_and(Session::may_hibernate) {
            return;
        }
        let core_now = self.host.clock.core(now);
        let Ok(record) = self.host.endpoint.hibernate(core_now, id) else {
            return;
        };
        log.note(now, "device", || {
            format!("hibernates in {} B", record.len())
        });
        self.session = None;
        self.transfers.iter_mut().for_each(|t| t.source.wait());
        self.asleep = Some((now, record));
        self.host.dirty = true;
    }

    /// Restores the session from its record, with the rest of its deadlines.
    pub(crate) fn wake(&mut self, now: Time, log: &mut Log) -> Result<(), SimFault> {
        let Some((since, record)) = self.asleep.take() else {
            return Ok(());
        };
        log.note(now, "device", || "wakes".to_owned());
        let record = aged(&record, now.since(since))?;
        let epochs = self.reserve();
        let core_now = self.host.clock.core(now);
        let id = self.host.endpoint.restore(core_now, &record, epochs)?;
        self.session = Some(id);
        self.host.idle_since = Some(now);
        self.host.dirty = true;
        self.links.on_session_began(core_now);
        self.clients.on_session_began();
        self.look_at = now;
        Ok(())
    }

    fn start(&mut self, now: Time, number: usize, log: &mut Log) -> Result<(), SimFault> {
        self.wake(now, log)?;
        if self.session.is_none() {
            // The previous session was closed.
            self.connect(now);
        }
        let Some(session) = self.session else {
            return Ok(());
        };
        let (spec, clock) = (&self.specs[number], self.host.clock);
        let options = FlowOptions {
            size: spec.bytes,
            deadline: spec.deadline_s.map(|s| clock.core(Time::from_secs_f64(s))),
            hibernates: true,
            durable: spec.durable,
            early: spec.early,
            reachable: spec.reachable,
            ..FlowOptions::default()
        };
        if spec
            .deadline_s
            .is_some_and(|by| Time::from_secs_f64(by) <= now)
        {
            self.transfers[number].progress = Progress::Late;
            return Ok(());
        }
        log.note(now, "device", || format!("starts flow {}", spec.id));
        let transfer = &mut self.transfers[number];
        transfer.source.begin_at(0);
        let opened = self.host.endpoint.with(session, |s| {
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
        self.accounts[number].on_request();
        self.index();
        self.host.dirty = true;
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

    /// Handles a datagram. Returns true if it contained payload.
    pub(crate) fn on_datagram(
        &mut self,
        now: Time,
        delivery: Delivery,
        log: &mut Log,
    ) -> Result<bool, SimFault> {
        let link = delivery.link;
        let number = match delivery.stream {
            Some(stream) => self.socket_of(stream),
            None => self.sockets[link],
        };
        let Some(number) = number else {
            // There is no socket any more.
            return Ok(false);
        };
        self.stir(now);
        let Some(arrived) = self.host.take_in(now, number, delivery, self.session) else {
            return Ok(false);
        };
        let payload: u64 = arrived.iter().map(|a| a.bytes).sum();
        for piece in &arrived {
            self.account(now, link, Direction::Down, piece);
        }
        self.attend(now, log)?;
        if payload > 0 {
            self.show(now);
        }
        Ok(payload > 0)
    }

    /// Records that payload reached the proxy over this link.
    pub(crate) fn on_uploaded(&mut self, now: Time, link: usize, arrived: &[FlowArrival]) {
        for piece in arrived {
            self.account(now, link, Direction::Up, piece);
        }
    }

    /// Counts a piece of a flow.
    fn account(&mut self, now: Time, link: usize, way: Direction, piece: &FlowArrival) {
        let Some(number) = self.by_id.get(&piece.flow).copied() else {
            return;
        };
        // Neither an answer to an upload nor a request is content.
        if self.specs[number].direction == way {
            self.accounts[number].on_arrived(now, link, way, piece);
        }
    }

    /// Lets the applications handle the core's events.
    pub(crate) fn attend(&mut self, now: Time, log: &mut Log) -> Result<bool, SimFault> {
        if self.host.is_away() {
            return Ok(false);
        }
        let mut any = false;
        while let Some((session, event)) = self.host.endpoint.poll_event() {
            any = true;
            log.note(now, "device", || format!("{event:?}"));
            match event {
                SessionEvent::Readable(id) | SessionEvent::Writable(id) => {
                    self.use_flow(now, session, id)?
                }
                SessionEvent::SendFrom { flow, offset } => {
                    if let Some(number) = self.by_id.get(&flow) {
                        self.transfers[*number].source.begin_at(offset);
                    }
                    self.use_flow(now, session, flow)?;
                }
                SessionEvent::PeerDurable { flow, offset } => {
                    let known = self.host.peer_durable.entry(flow).or_default();
                    *known = offset.max(*known);
                }
                SessionEvent::Ended { flow, end } => self.on_ended(now, flow, end, log)?,
                SessionEvent::Established { .. } => {
                    self.host.dirty = true;
                    self.look_at = now;
                }
                SessionEvent::PathQuiet { link, .. } => {
                    self.links.on_path_quiet(self.host.clock.core(now), link);
                    self.look_at = now;
                }
                SessionEvent::PathUp { link, .. } => {
                    self.with_links(now, |links, now, session| {
                        links.on_path_up(now, session, link);
                    });
                    self.look_at = now;
                }
                SessionEvent::PathSilent { .. } => {
                    self.with_links(now, |links, now, session| {
                        links.on_path_silent(now, session);
                    });
                    self.look_at = now;
                }
                SessionEvent::Closed(end) => {
                    SimFault::of_end("device", &end)?;
                    self.session = None;
                    self.host.idle_since = None;
                    self.host.dirty = true;
                }
                _ => {}
            }
        }
        self.host.note_idle(now, self.session);
        self.note_acked();
        Ok(any)
    }

    fn note_acked(&mut self) {
        let Some(session) = self.session.and_then(|id| self.host.endpoint.session(id)) else {
            return;
        };
        for transfer in &mut self.transfers {
            if let Some((_, acked)) = transfer.id.and_then(|id| session.send_offsets(id)) {
                transfer.acked = acked;
            }
        }
    }

    pub(crate) fn use_flow(
        &mut self,
        now: Time,
        session: SessionId,
        id: FlowId,
    ) -> Result<(), SimFault> {
        let Some(number) = self.by_id.get(&id).copied() else {
            return Ok(());
        };
        let transfer = &mut self.transfers[number];
        let before = transfer.sink.offset;
        let outcome = self.host.endpoint.with(session, |s| {
            transfer.sink.take(s, id)?;
            transfer.source.open_ended &= !transfer.sink.ended;
            transfer.source.give(s, id);
            Ok::<_, SimFault>(())
        });
        outcome.unwrap_or(Ok(()))?;
        if transfer.sink.offset > before && self.forbidden.contains(&id) {
            return Err(SimFault::RolledBack { flow: id });
        }
        if transfer.sink.ended && transfer.progress == Progress::Active {
            transfer.progress = Progress::Done(now);
            self.host.dirty = true;
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
        let (transfer, spec) = (&mut self.transfers[number], &self.specs[number]);
        self.host.dirty = true;
        self.look_at = now;
        if transfer.progress != Progress::Active {
            return Ok(());
        }
        match end {
            // Reading the last byte may end the flow at once, without a separate end to read.
            FlowEnd::Complete => transfer.progress = Progress::Done(now),
            FlowEnd::DeadlinePassed => {
                let by = spec.deadline_s.map(Time::from_secs_f64);
                if by.is_none_or(|by| now + DEADLINE_ROUNDING < by) {
                    return Err(SimFault::EndedEarly { flow: id });
                }
                transfer.progress = Progress::Late;
            }
            FlowEnd::Refused(_) | FlowEnd::SessionEnded => {
                log.note(now, "device", || format!("asks again for {}", spec.id));
                if !transfer.again(spec) {
                    transfer.progress = Progress::Failed("it is refused for ever".to_owned());
                }
                self.index();
            }
            end => transfer.progress = Progress::Failed(end.to_string()),
        }
        Ok(())
    }

    /// Sends everything that can be sent now.
    pub(crate) fn transmit(
        &mut self,
        now: Time,
        network: &mut SimNetwork,
        buf: &mut [u8],
        log: &mut Log,
    ) -> Result<bool, SimFault> {
        let (names, core_now) = (&self.names, self.host.clock.core(now));
        let (sockets, streams) = (&self.sockets, &self.streams);
        let any = self.host.transmit(now, buf, |endpoint, t, datagram| {
            let link = link_of(t.link);
            if let Some(stream) = StreamPathId::of(&t.remote) {
                if streams.contains_key(&t.link) {
                    network.streams.send(stream, datagram);
                    log.note(now, "device", || {
                        let (bytes, hash, name) =
                            (datagram.len(), log::hash(datagram), &names[link]);
                        format!("sends {bytes} on {name} in stream {}, {hash:08x}", stream.0)
                    });
                }
                return;
            }
            if sockets[link] != Some(t.link) {
                // Its socket is closed.
                return;
            }
            let verdict = network.send_up(now, link, t.remote, datagram);
            log.note(now, "device", || {
                let (bytes, hash, name) = (datagram.len(), log::hash(datagram), &names[link]);
                format!("sends {bytes} on {name}, {hash:08x}: {verdict:?}")
            });
            if verdict == cedos_lab_link::PushOutcome::TooBig {
                endpoint.on_too_big(core_now, t, datagram.len());
            }
        })?;
        self.close_streams(network);
        if any {
            self.stir(now);
        }
        Ok(any)
    }

    // ---- the journal ----

    /// Writes the journal: at the scenario's interval, or because something must not be lost.
    pub(crate) fn keep(&mut self, now: Time, pace: bool) {
        if !self.host.wants_commit(pace) {
            return;
        }
        let (made_at, record) = match (self.core(), &self.asleep) {
            (Some(session), _) => {
                let record = session.record(self.host.clock.core(now), false);
                (now, Some(record.encode()))
            }
            // The record's deadlines were computed when it was made.
            (None, Some((since, record))) => (*since, Some(record.clone())),
            (None, None) => (now, None),
        };
        let transfers = self.transfers.clone();
        let record = record.map(|r| aged(&r, now.since(made_at)).unwrap_or(r));
        self.host.commit(now, record, transfers);
    }

    /// Records that the applications' data of a commit is durable.
    fn report_durable(&mut self, safe: &[SimTransfer]) {
        let Some(session) = self.session else { return };
        let _ = self.host.endpoint.with(session, |s| {
            for transfer in safe {
                if let Some(id) = transfer.id
                    && s.options(id).is_some_and(|o| o.durable)
                {
                    s.set_durable(id, transfer.sink.offset);
                    s.set_committed(id, transfer.sink.offset);
                }
            }
        });
    }

    /// The state in a few words.
    pub(crate) fn state(&self) -> String {
        let life = self.core().map(|s| (s.state(), s.path_stats()));
        let flows: Vec<_> = self
            .transfers
            .iter()
            .map(|t| (t.id, &t.progress, t.sink.content_bytes(), t.acked))
            .collect();
        format!(
            "device: {life:?}, asleep {}, flows {flows:?}, {}",
            self.is_asleep(),
            self.core().map(Session::explain).unwrap_or_default()
        )
    }
}

/// How the device's process came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessReturn {
    /// The process did not come back.
    Not,
    /// The process was frozen, and continues.
    Thawed,
    /// The process came back as a new one, with new sockets.
    Anew,
}

fn endpoint(config: &EndpointConfig, identity: &Identity, life: u64) -> Endpoint {
    Endpoint::new(
        config.clone(),
        SecretKey::from_bytes(identity.device_key()),
        Admission::Nobody,
        identity.fresh_seed("device", life),
        identity.token_seed(),
    )
}
