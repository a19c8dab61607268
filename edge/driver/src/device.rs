//! A host that calls a server and moves between its links.
//!
//! The device says which link may be used for what ([`LinkUse`]), and `d2tp-device` decides what follows
//! from it; this file holds the sockets, tasks and clocks, and carries its actions out.
//!
//! ```text
//!  links, program, tick ─▶ DeviceLinks ─▶ actions ─▶ sockets, sessions, first hops, radios
//!                              ▲                          │
//!                              └──────── answers ─────────┘
//! ```

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use d2tp_device::{
    ActionScope, AttachedSocket, DeviceLinkSettings, DeviceLinks, LinkAction, LinkFacts, LinkSpend,
    PaidLinks, SessionPaths, SleepMeter,
};
use d2tp_links::{CostClass, Link, LinkKind, LinkProbe, StationStats};
use d2tp_session::{
    AckOffload, Addresses, Admission, Endpoint, EndpointConfig, FlowId, LinkId, Mirroring,
    PathStats, PublicKey, SecretKey, Session, SessionEnd, SessionEvent, SessionId, Span, Time,
};
use d2tp_udp::{BindOptions, LinkSocket};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{broadcast, watch};
use tokio::task::JoinHandle;

pub use d2tp_device::{LinkAnswers, LinkUse};

use crate::address::ServerAddress;
use crate::attach::{Attach, KernelLinks};
use crate::clock;
use crate::datagrams::Connection;
use crate::driver_core::{DriverError, DriverShared};
use crate::engine;
use crate::flow::{Flow, FlowSettings};
use crate::link_health;
use crate::peer::ServerHandle;
use crate::qlog::Qlog;
use crate::relay_dispatch;
use crate::server::{CLOSE_GRACE, seed};
use crate::wake_detector::WakeDetector;

/// Epochs of a process with a fresh instance, of which none was used before.
pub(crate) const EPOCHS: std::ops::Range<u32> = 1..u32::MAX;
/// The interval at which grants, rates and paths are updated while data moves.
const TICK: Duration = Duration::from_nanos(d2tp_device::TICK.as_nanos());
/// The length of sleep after which timers are set anew: less is within their own error.
const REARM_MIN: Span = Span::from_millis(100);

/// How a device connects to its server.
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    /// Address and key of the server.
    pub server: ServerAddress,
    /// The key pair of the device.
    pub key: SecretKey,
    /// Protocol settings.
    pub config: EndpointConfig,
}

/// The status of a link in this device's session.
#[derive(Clone, Debug, PartialEq)]
pub struct LinkStatus {
    /// The device's name of the link.
    pub name: String,
    /// The cost class of the link.
    pub class: CostClass,
    /// What it may be used for.
    pub usage: LinkUse,
    /// Payload bytes received and sent over it since the device started.
    pub payload: (u64, u64),
    /// How long payload was arriving, in steps of 0.1 s. With the bytes of that time this gives the
    /// link's rate even where little arrived.
    pub busy: Span,
    /// Recent bytes per second, received and sent together; none before any were.
    pub rate: Option<u64>,
    /// Whether packets sent over the link are answered. A link that is [`LinkAnswers::Silent`] counts
    /// as down, even with an address.
    pub answers: LinkAnswers,
    /// The link's path, if it has one that works.
    pub path: Option<PathStats>,
}

/// What the device stores of its links beside the state of their decisions.
#[derive(Default)]
pub(crate) struct DeviceState {
    pub(crate) links: DeviceLinks,
    /// The latest description of every link.
    pub(crate) described: BTreeMap<String, Link>,
    /// Radio statistics of each link when they were last read.
    pub(crate) stations: BTreeMap<String, StationStats>,
    sleep: SleepMeter,
}

pub(crate) struct DeviceInner {
    pub(crate) shared: Arc<DriverShared>,
    pub(crate) session: SessionId,
    remotes: Vec<SocketAddr>,
    attach: Arc<dyn Attach>,
    pub(crate) link_probe: Arc<dyn LinkProbe>,
    /// Held from an input until its actions are carried out, so that they keep their order. Locked
    /// before the core.
    carrying: Mutex<()>,
    /// Locked after the core, where both are needed.
    pub(crate) state: Mutex<DeviceState>,
    /// Notified when payload was seen to move, and when a link begins or ceases to answer.
    moved: watch::Sender<()>,
    /// Notified when a link begins or ceases to answer.
    answers: watch::Sender<()>,
    runtime: Handle,
}

/// The session with the server as [`DeviceLinks`] sees it.
struct CorePaths<'a> {
    session: Option<&'a Session>,
    failed: &'a BTreeMap<LinkId, (u64, u64)>,
}

impl SessionPaths for CorePaths<'_> {
    fn is_over(&self) -> bool {
        self.session.is_none()
    }

    fn path_stats(&self) -> Vec<PathStats> {
        self.session.map(Session::path_stats).unwrap_or_default()
    }

    fn has_path(&self, socket: LinkId) -> bool {
        self.session.is_some_and(|s| s.has_path(socket))
    }

    fn spend(&self, flow: FlowId, socket: LinkId) -> Option<LinkSpend> {
        SessionPaths::spend(self.session?, flow, socket)
    }

    fn failed_payload(&self, socket: LinkId) -> Option<(u64, u64)> {
        self.failed.get(&socket).copied()
    }
}

/// A device with a session to one server.
pub struct Device {
    body: Arc<DeviceInner>,
    peer: [u8; 32],
    ticker: JoinHandle<()>,
    /// The task that probes first hops.
    hop_prober: JoinHandle<()>,
    watcher: Option<JoinHandle<()>>,
    /// The journal of the device's instance, if it has one.
    pub(crate) instance_upkeep: Option<crate::instance::InstanceUpkeep>,
    /// The lease of the device's instance, if the next process uses the instance again.
    pub(crate) lease: Option<Arc<crate::instance_lease::InstanceLease>>,
}

impl Device {
    /// A device that will call `options.server` as soon as it is given a link. Must be called on
    /// a tokio runtime.
    ///
    /// # Errors
    /// The server's name has no address.
    pub async fn new(options: DeviceOptions) -> Result<Device, DriverError> {
        Device::with_attach(options, Arc::new(KernelLinks)).await
    }

    /// A device whose links get their sockets from `attach`: from [`crate::ProvidedLinks`], where the
    /// links are not the kernel's.
    ///
    /// # Errors
    /// The server's name has no address.
    pub async fn with_attach(
        options: DeviceOptions,
        attach: Arc<dyn Attach>,
    ) -> Result<Device, DriverError> {
        let number = u64::from_be_bytes(seed()[..8].try_into().expect("eight of 32 bytes"));
        let server = options.server.key;
        let connect = |core: &mut Endpoint| Ok(core.connect(clock::now(), server, number, EPOCHS));
        Device::begin(options, attach, connect).await
    }

    /// Creates a device whose session `make` adds to the core.
    pub(crate) async fn begin(
        options: DeviceOptions,
        attach: Arc<dyn Attach>,
        make: impl FnOnce(&mut Endpoint) -> Result<SessionId, DriverError>,
    ) -> Result<Device, DriverError> {
        let DeviceOptions {
            server,
            key,
            config,
        } = options;
        let resolve = |cause| DriverError::Resolve {
            host: server.host.clone(),
            cause,
        };
        let remotes: Vec<SocketAddr> = tokio::net::lookup_host((server.host.as_str(), server.port))
            .await
            .map_err(resolve)?
            .collect();
        let acks_pay = matches!(config.ack_offload, AckOffload::Paid { .. });
        let lend_rate = match config.mirroring {
            Mirroring::Paid { bytes_per_second } => Some(bytes_per_second),
            Mirroring::Never | Mirroring::Free => None,
        };
        let mut core = Endpoint::new(config, key, Admission::Nobody, seed(), seed());
        let session = make(&mut core)?;
        let shared = engine::start(core, false);
        shared.inner.lock().relays.server_session = Some(session);
        let body = Arc::new(DeviceInner {
            shared,
            session,
            remotes,
            link_probe: attach.link_probe(),
            attach,
            carrying: Mutex::default(),
            state: Mutex::new(DeviceState {
                links: DeviceLinks::new(DeviceLinkSettings {
                    acks_pay,
                    lend_rate,
                }),
                ..DeviceState::default()
            }),
            moved: watch::Sender::default(),
            answers: watch::Sender::default(),
            runtime: Handle::current(),
        });
        let ticker = tokio::spawn(tick(body.clone()));
        let asker = link_health::watch_first_hops(body.clone());
        Ok(Device {
            body,
            peer: server.key.0,
            ticker,
            hop_prober: asker,
            watcher: None,
            instance_upkeep: None,
            lease: None,
        })
    }

    /// The core and the session, for [`crate::instance`].
    pub(crate) fn parts(&self) -> (&Arc<DriverShared>, SessionId, [u8; 32]) {
        (&self.body.shared, self.body.session, self.peer)
    }

    /// The handle by which tasks make requests to the server.
    pub(crate) fn to_server(&self) -> ServerHandle {
        ServerHandle {
            shared: Arc::downgrade(&self.body.shared),
            session: self.body.session,
            peer: self.peer,
        }
    }

    /// Follows the machine's links: sets each to what `usage` returns, now and at every change.
    pub fn follow_links(
        &mut self,
        mut links: watch::Receiver<Arc<Vec<Link>>>,
        usage: impl Fn(&Link) -> LinkUse + Send + 'static,
    ) {
        let body = self.body.clone();
        self.watcher = Some(tokio::spawn(async move {
            loop {
                let now: Arc<Vec<Link>> = links.borrow_and_update().clone();
                body.update(&now, &usage);
                if links.changed().await.is_err() {
                    return;
                }
            }
        }));
    }

    /// Uses whatever route the system has, as one free link named `any`: for hosts that do not
    /// move, and for tests on loopback.
    ///
    /// # Errors
    /// No socket could be bound.
    pub fn use_default_route(&self) -> Result<(), DriverError> {
        let Some(remote) = self.body.remotes.first().copied() else {
            return Ok(());
        };
        let local: IpAddr = if remote.is_ipv6() {
            std::net::Ipv6Addr::UNSPECIFIED.into()
        } else {
            std::net::Ipv4Addr::UNSPECIFIED.into()
        };
        let socket = LinkSocket::bind(&BindOptions::at(SocketAddr::new(local, 0)))?;
        let link = self.body.shared.add_socket(socket, false);
        self.body.state.lock().links.name_socket(link, "any");
        let addresses = Addresses {
            link,
            local: None,
            remote,
        };
        self.body.shared.with(self.body.session, |s| {
            s.open_path(clock::now(), addresses, false)
        });
        Ok(())
    }

    /// Opens a flow. It may be written to at once, with or without a network.
    ///
    /// # Errors
    /// The session is over, or too many flows are open.
    pub fn open(&self, settings: FlowSettings) -> Result<Flow, DriverError> {
        self.body
            .shared
            .open(self.body.session, self.peer, settings)
    }

    /// Sets whether a flow may spend on paid links, and how many bytes in all. Takes effect at once, in
    /// both directions.
    pub fn allow_paid(&self, flow: &Flow, allowed: bool, budget: Option<u64>) {
        let id = flow.flow_id();
        self.body.input(|links, now, session| match allowed {
            true => links.allow_paid(now, session, id, budget, PaidLinks::All),
            false => links.forbid_paid(now, session, id),
        });
    }

    /// Bytes carried for the flow on metered links since it was last allowed to pay.
    pub fn paid_bytes(&self, flow: &Flow) -> u64 {
        self.body
            .observed(|links, _| links.paid_bytes(flow.flow_id()))
    }

    /// Sets what one link may be used for.
    pub fn set_use(&self, name: &str, usage: LinkUse) {
        self.body
            .input(|links, now, session| links.on_use(now, session, name, usage));
    }

    /// Leaves a link alone until [`Device::unfreeze`], and keeps its place: not a packet leaves there, what was in
    /// flight travels elsewhere, and its window stays. For who knows of a hole before it comes, or wants to be
    /// still for a moment; whoever does not want the link at all sets its use ([`Device::set_use`]).
    pub fn freeze(&self, name: &str) {
        self.body.input(|links, now, _| links.freeze(now, name));
    }

    /// Resumes a link that was frozen by [`Device::freeze`].
    pub fn unfreeze(&self, name: &str) {
        self.body
            .input(|links, now, session| links.unfreeze(now, session, name));
    }

    /// Something about the networks changed that we may not see: every link gets a new socket, and
    /// a probe on it at once. For platforms that tell programs of a wake or of another network and
    /// do not let them watch; where the links are followed it is not needed. Calling it often costs
    /// at most one renewal a second.
    pub fn network_changed(&self) {
        self.body
            .input(|links, now, session| links.renew(now, session));
    }

    /// Logs the session's events to `log` from now on.
    pub fn log_to(&self, log: &Arc<Qlog>) {
        self.body.shared.log_to(log);
        let inner = self.body.shared.inner.lock();
        let state = self.body.state.lock();
        if let Some(feed) = &inner.qlog {
            for (id, name) in state.links.socket_names() {
                feed.name_link(id, name);
            }
        }
    }

    /// Adds an event of the program's own to the session's log, if there is one: for example, why it
    /// chose a link. `name` is `schema:event`.
    pub fn note(&self, name: &str, data: impl FnOnce() -> serde_json::Value) {
        let mut inner = self.body.shared.inner.lock();
        inner.drain_trace();
        let Some(mut feed) = inner.qlog.take() else {
            return;
        };
        let session = self.body.session;
        if let Some(s) = inner.core.session(session) {
            feed.begin(session, s.role(), s.peer().to_string());
        }
        feed.note(session, clock::now(), name.to_owned(), data());
        inner.qlog = Some(feed);
    }

    /// A handle on the session, which sends and receives datagrams.
    pub fn connection(&self) -> Connection {
        let peer = PublicKey(self.peer);
        Connection::new(self.body.shared.clone(), self.body.session, peer)
    }

    /// The current status of each link.
    pub fn link_statuses(&self) -> Vec<LinkStatus> {
        self.body.link_statuses()
    }

    /// Notifies, at most ten times a second, that links carried payload, and that a link begins or
    /// ceases to answer: for a client that reads [`Device::link_statuses`] only then.
    pub fn watch_traffic(&self) -> watch::Receiver<()> {
        self.body.moved.subscribe()
    }

    /// Notifies when a link begins to answer, or counts as silent, so that its use must be decided
    /// anew.
    pub fn watch_answers(&self) -> watch::Receiver<()> {
        self.body.answers.subscribe()
    }

    /// Statistics of every path, whatever its link.
    pub fn paths(&self) -> Vec<PathStats> {
        self.body.paths()
    }

    /// The name of a link in an event.
    pub fn link_name(&self, link: LinkId) -> Option<String> {
        let state = self.body.state.lock();
        state.links.link_name(link).map(|name| name.to_string())
    }

    /// Payload bytes that arrived more than once.
    pub fn duplicate_bytes(&self) -> u64 {
        let inner = self.body.shared.inner.lock();
        inner
            .core
            .session(self.body.session)
            .map_or(0, |s| s.duplicate_bytes())
    }

    /// The session's events from now on, each with its time.
    pub fn events(&self) -> broadcast::Receiver<(Time, SessionEvent)> {
        self.body.shared.events.subscribe()
    }

    /// Why the session ended, if it has.
    pub fn ended(&self) -> Option<SessionEnd> {
        self.body
            .shared
            .inner
            .lock()
            .ended
            .get(&self.body.session)
            .cloned()
    }

    /// Informs the server that the device leaves, without waiting as [`Device::close`] does.
    pub fn say_goodbye(&self) {
        self.body
            .shared
            .with(self.body.session, |s| s.close(0, "done"));
    }

    /// Informs the server that the device leaves, and ends the session.
    pub async fn close(self) {
        self.say_goodbye();
        tokio::time::sleep(CLOSE_GRACE).await;
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.ticker.abort();
        self.hop_prober.abort();
        if let Some(watcher) = &self.watcher {
            watcher.abort();
        }
        self.body.shared.stop();
    }
}

impl DeviceInner {
    /// Passes an input to the links' state machine, and carries out its actions.
    pub(crate) fn input<R>(
        self: &Arc<Self>,
        input: impl FnOnce(&mut DeviceLinks, Time, &dyn SessionPaths) -> R,
    ) -> R {
        let _in_order = self.carrying.lock();
        let r = self.with_links(input);
        let mut stirs = false;
        loop {
            // Not in the loop's head: there the lock would be held while the action is carried out.
            let action = self.state.lock().links.poll_action();
            let Some(action) = action else { break };
            stirs |= self.carry_out(&action);
        }
        if stirs {
            self.shared.notify_activity();
        }
        r
    }

    /// Reads from the links' state machine after an update.
    fn observed<R>(&self, ask: impl FnOnce(&DeviceLinks, &dyn SessionPaths) -> R) -> R {
        self.with_links(|links, now, session| {
            links.observe(now, session);
            ask(links, session)
        })
    }

    fn with_links<R>(&self, f: impl FnOnce(&mut DeviceLinks, Time, &dyn SessionPaths) -> R) -> R {
        let inner = self.shared.inner.lock();
        let paths = CorePaths {
            session: inner.core.session(self.session),
            failed: &inner.final_payload,
        };
        let mut state = self.state.lock();
        let r = f(&mut state.links, clock::now(), &paths);
        let news = state.links.take_news();
        drop((state, inner));
        if news.traffic || news.answers {
            self.moved.send_replace(());
        }
        if news.answers {
            self.answers.send_replace(());
        }
        r
    }

    /// Carries out one action. Returns whether the links must be checked again soon.
    fn carry_out(self: &Arc<Self>, action: &LinkAction) -> bool {
        let now = clock::now();
        match action.scope() {
            ActionScope::Sockets => {}
            ActionScope::Session => {
                self.shared.with(self.session, |s| action.apply(now, s));
            }
            ActionScope::EverySession => {
                let mut inner = self.shared.inner.lock();
                for session in inner.core.ids() {
                    // It was there a moment ago, and may end any time.
                    let _ = inner.core.with(session, |s| action.apply(now, s));
                }
                drop(inner);
                self.shared.wake();
            }
        }
        match action {
            LinkAction::Attach { link, ticket } => self.attach(link, *ticket),
            LinkAction::ClosePath { socket } => self.shared.inner.lock().closing.push(*socket),
            LinkAction::DropSocket { socket } => {
                let mut inner = self.shared.inner.lock();
                inner.sockets.remove(socket);
                inner.final_payload.remove(socket);
            }
            LinkAction::AskFirstHop { link, ticket } => {
                let asks = link_health::ask(self.clone(), link.to_string(), *ticket);
                self.runtime.spawn(asks);
            }
            LinkAction::ReadRadio { link, first } => {
                let reads = link_health::read_radio(self.clone(), link.to_string(), *first);
                self.runtime.spawn(reads);
                return false;
            }
            LinkAction::OpenPath { .. }
            | LinkAction::Freeze { .. }
            | LinkAction::Unfreeze { .. } => {}
            LinkAction::SetGated { .. }
            | LinkAction::Grant { .. }
            | LinkAction::Lend { .. }
            | LinkAction::EndLending { .. }
            | LinkAction::FirstHopSaid { .. } => return false,
        }
        true
    }

    /// Creates a link's sockets. Neither the links nor the core are locked meanwhile.
    fn attach(&self, name: &str, ticket: u64) {
        let link = self.state.lock().described.get(name).cloned();
        let found = link.map_or(Ok(Vec::new()), |link| {
            self.attach.attach(&link, &self.remotes)
        });
        let found = found.unwrap_or_else(|error| {
            tracing::warn!(link = %name, %error, "cannot use this link");
            Vec::new()
        });
        let mut made = Vec::new();
        for attachment in found {
            let socket = self.shared.add_socket(attachment.socket, false);
            if let Some(feed) = &self.shared.inner.lock().qlog {
                feed.name_link(socket, name);
            }
            made.push(AttachedSocket {
                socket,
                remote: attachment.remote,
            });
        }
        let mut state = self.state.lock();
        state.links.on_socket(clock::now(), name, ticket, made);
    }

    /// Takes in a new state of the machine's links.
    fn update(self: &Arc<Self>, links: &[Link], usage: &impl Fn(&Link) -> LinkUse) {
        let present: Vec<(LinkFacts, LinkUse)> =
            links.iter().map(|l| (facts_of(l), usage(l))).collect();
        {
            let mut state = self.state.lock();
            for link in links {
                state.described.insert(link.name.clone(), link.clone());
            }
        }
        self.input(|links, now, session| links.on_links(now, session, &present));
        self.look_for_sleep();
    }

    /// Checks whether the machine was asleep since the last check.
    fn look_for_sleep(self: &Arc<Self>) {
        let slept = {
            // The lock first: both clocks are read in one breath.
            let mut state = self.state.lock();
            let awake = clock::awake();
            state.sleep.slept(clock::now(), awake)
        };
        if slept < REARM_MIN {
            return;
        }
        // Timers of the runtime stood still meanwhile.
        self.shared.rearm();
        tracing::info!(milliseconds = slept.as_millis(), "the machine was asleep");
        self.input(|links, now, session| links.on_slept(now, session, slept));
    }

    fn paths(&self) -> Vec<PathStats> {
        let inner = self.shared.inner.lock();
        let session = inner.core.session(self.session);
        session.map(|s| s.path_stats()).unwrap_or_default()
    }

    /// When the links must be checked again without an event.
    fn next_check_at(&self) -> Option<Time> {
        let beside = self.shared.inner.lock().relays.next_at();
        let links = self.state.lock().links.next_timeout();
        beside.into_iter().chain(links).min()
    }

    fn link_statuses(&self) -> Vec<LinkStatus> {
        let statuses = self.observed(|links, session| links.statuses(session));
        let state = self.state.lock();
        let link_status = |status: d2tp_device::TrackedStatus| {
            let described = state.described.get(&*status.name)?;
            Some(LinkStatus {
                name: status.name.to_string(),
                class: described.class.class,
                usage: status.usage,
                payload: status.payload,
                busy: status.busy,
                rate: status.rate,
                answers: status.answers,
                path: status.path,
            })
        };
        statuses.into_iter().filter_map(link_status).collect()
    }
}

/// The facts about a link that its decisions need.
fn facts_of(link: &Link) -> LinkFacts {
    let routes = |ipv6| link.routes.iter().any(|route| route.ipv6 == ipv6);
    LinkFacts {
        name: link.name.as_str().into(),
        index: link.index,
        up: link.up,
        carrier: link.carrier,
        addresses: link.addresses.clone(),
        routes_v4: routes(false),
        routes_v6: routes(true),
        half_duplex: link.kind == LinkKind::Wifi,
    }
}

/// Updates the links while data moves, and otherwise only at events: an idle device has no timer.
async fn tick(body: Arc<DeviceInner>) {
    let standby = WakeDetector::watch()
        .inspect_err(|error| tracing::warn!(%error, "a sleep of the machine was noticed late"))
        .ok();
    loop {
        body.look_for_sleep();
        body.input(|links, now, session| links.on_time(now, session));
        let tended = relay_dispatch::update_rendezvous(&mut body.shared.inner.lock(), clock::now());
        if tended {
            body.shared.wake();
        }
        let stirred = async {
            match &standby {
                Some(standby) => tokio::select! {
                    () = body.shared.activity.notified() => {}
                    () = standby.woken() => {}
                },
                None => body.shared.activity.notified().await,
            }
        };
        let wait = body
            .next_check_at()
            .map(|at| Duration::from(at.since(clock::now())));
        let moved = match wait {
            None => {
                stirred.await;
                true
            }
            Some(wait) if wait <= TICK => true,
            Some(wait) => tokio::time::timeout(wait, stirred).await.is_ok(),
        };
        // Not at every packet: a tick later.
        if moved {
            tokio::time::sleep(TICK).await;
            // What stirred in that time is seen now.
            tokio::select! {
                biased;
                () = body.shared.activity.notified() => {}
                () = std::future::ready(()) => {}
            }
        }
    }
}
