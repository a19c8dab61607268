//! A device: a host that connects to a server and moves between links.
//!
//! The program sets the use of each link ([`LinkUse`]), and `d2tp-device` decides about sockets,
//! paths and grants. This file has the sockets, tasks and clocks, and carries out the actions.
//!
//! ```text
//!  links, program, tick ─▶ DeviceLinks ─▶ actions ─▶ sockets, sessions, first hops, radios
//!                              ▲                          │
//!                              └──────── answers ─────────┘
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use d2tp_device::{
    ActionScope, AttachedSocket, DeviceLinkSettings, DeviceLinks, LinkAction, LinkFacts, LinkSpend,
    PaidLinks, SessionPaths, SleepMeter,
};
use d2tp_links::{CostClass, Link, LinkKind, LinkProbe, StationStats};
use d2tp_serial::SerialLine;
use d2tp_session::{
    AckOffload, Admission, Endpoint, EndpointConfig, FlowId, HybridPolicy, LinkId, Mirroring,
    PathState, PathStats, PublicKey, SecretKey, Session, SessionEnd, SessionEvent, SessionId, Span,
    Time,
};
use d2tp_stream::StreamTarget;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{Notify, broadcast, watch};
use tokio::task::JoinHandle;

pub use d2tp_device::{LinkAnswers, LinkUse, StreamFailure, StreamStatus};

use crate::address::ServerAddress;
use crate::attach::{Attach, KernelLinks};
use crate::clock;
use crate::datagrams::Connection;
use crate::device_nodes::{DeviceNodes, NodeStatus};
use crate::device_stream::{self, DeviceStreamOrder, StreamOwner};
use crate::driver_core::{DriverError, DriverShared};
use crate::engine;
use crate::flow::{Flow, FlowSettings};
use crate::link_health;
use crate::local_hints::{HintTrial, PresentNetworks};
use crate::peer::ServerHandle;
use crate::qlog::Qlog;
use crate::relay_dispatch;
use crate::relay_state::AbortOnDrop;
use crate::secrets::seed;
use crate::serial_link;
use crate::server::CLOSE_GRACE;
use crate::server_nodes::{ServerNodeLookup, server_nodes};
use crate::service_records;
use crate::wake_detector::WakeDetector;

/// The epochs of a process with a fresh instance, none of which was used before.
pub(crate) const EPOCHS: std::ops::Range<u32> = 1..u32::MAX;
/// The interval at which grants, rates and paths are updated while data moves.
const TICK: Duration = Duration::from_nanos(d2tp_device::TICK.as_nanos());
/// The length of sleep after which timers are set again; a shorter one is within their own error.
const REARM_MIN: Span = Span::from_millis(100);

/// How a device connects to its server.
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    /// Address and key of the server.
    pub server: ServerAddress,
    /// The key pair of the device.
    pub key: SecretKey,
    /// The settings of the protocol.
    pub config: EndpointConfig,
}

/// The status of a link in this device's session.
#[derive(Clone, Debug, PartialEq)]
pub struct LinkStatus {
    /// The device's name of the link.
    pub name: String,
    /// The cost class of the link.
    pub class: CostClass,
    /// What the link may be used for.
    pub usage: LinkUse,
    /// Payload bytes received and sent over the link since the device started.
    pub payload: (u64, u64),
    /// How long payload was arriving, in steps of 0.1 s. Bytes divided by this time give the link's
    /// rate, even if little arrived.
    pub busy: Span,
    /// Recent bytes per second, received and sent together; `None` before any were.
    pub rate: Option<u64>,
    /// Whether packets sent over the link are answered. A link that is [`LinkAnswers::Silent`] counts
    /// as down, even with an address.
    pub answers: LinkAnswers,
    /// Whether the link's packets travel in a stream, because UDP is not answered there.
    pub stream: StreamStatus,
    /// The link's path, if it has one that works.
    pub path: Option<PathStats>,
}

/// The driver's state of a device's links, beside the state machine that decides about them.
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
    /// The server's nodes, and which of them is used. Locked for no longer than a statement, or after the core
    /// and the links.
    pub(crate) nodes: Mutex<DeviceNodes>,
    /// Notified when a lookup found other nodes.
    pub(crate) nodes_changed: Arc<Notify>,
    /// How hints of local networks are tried; `None`: they are not asked for any.
    pub(crate) hint_trial: Option<HintTrial>,
    /// Tell the lookups of the server's names that failed that links changed.
    links_changed: Vec<Arc<Notify>>,
    pub(crate) attach: Arc<dyn Attach>,
    pub(crate) link_probe: Arc<dyn LinkProbe>,
    /// Held from an input until its actions are carried out, so that their order is kept. It is
    /// locked before the core.
    carrying: Mutex<()>,
    /// Locked after the core, if both are needed.
    pub(crate) state: Mutex<DeviceState>,
    /// Notified when payload moved, and with `candidates`.
    moved: watch::Sender<()>,
    /// Notified when a link comes, goes or changes its use, and when it begins or ceases to answer.
    pub(crate) candidates: watch::Sender<()>,
    pub(crate) runtime: Handle,
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

    fn is_carried(&self, flow: FlowId) -> bool {
        self.session.is_some_and(|s| s.is_carried(flow))
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
    /// The task that waits for addresses of the server that are found later.
    _lookup: AbortOnDrop,
    /// The task that chooses among the server's nodes.
    _nodes: AbortOnDrop,
    watcher: Option<JoinHandle<()>>,
    /// The journal of the device's instance, if it has one.
    pub(crate) instance_upkeep: Option<crate::instance::InstanceUpkeep>,
    /// The lease of the device's instance, if the next process uses the instance again.
    pub(crate) lease: Option<Arc<crate::instance_lease::InstanceLease>>,
}

impl Device {
    /// Creates a device, which connects to `options.server` as soon as it has a link. Must be
    /// called on a tokio runtime.
    ///
    /// # Errors
    /// The server's name has no address.
    pub async fn new(options: DeviceOptions) -> Result<Device, DriverError> {
        Device::with_attach(options, Arc::new(KernelLinks)).await
    }

    /// Creates a device whose links get their sockets from `attach`: from [`crate::ProvidedLinks`],
    /// if the links are not the kernel's.
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

    /// Creates a device that does not ask local networks where its server is.
    pub(crate) async fn without_hints(
        options: DeviceOptions,
        attach: Arc<dyn Attach>,
    ) -> Result<Device, DriverError> {
        let number = u64::from_be_bytes(seed()[..8].try_into().expect("eight of 32 bytes"));
        let server = options.server.key;
        let connect = |core: &mut Endpoint| Ok(core.connect(clock::now(), server, number, EPOCHS));
        Device::begin_with(options, attach, false, connect).await
    }

    /// Sets the use of one link, and that there are no others.
    pub(crate) fn use_link(&self, link: &Link, usage: LinkUse) {
        self.body.update(std::slice::from_ref(link), &|_| usage);
    }

    /// Creates a device whose session `make` adds to the core.
    pub(crate) async fn begin(
        options: DeviceOptions,
        attach: Arc<dyn Attach>,
        make: impl FnOnce(&mut Endpoint) -> Result<SessionId, DriverError>,
    ) -> Result<Device, DriverError> {
        Device::begin_with(options, attach, true, make).await
    }

    async fn begin_with(
        options: DeviceOptions,
        attach: Arc<dyn Attach>,
        takes_hints: bool,
        make: impl FnOnce(&mut Endpoint) -> Result<SessionId, DriverError>,
    ) -> Result<Device, DriverError> {
        let DeviceOptions {
            server,
            key,
            mut config,
        } = options;
        if let Some(round_trip) = server.round_trip {
            config.expect_round_trip(round_trip);
        }
        // R-KEM-8
        if server.requires_hybrid {
            config.hybrid = HybridPolicy::Required;
        }
        let resolve = |cause| DriverError::Resolve {
            host: server.host.clone(),
            cause,
        };
        let ServerNodeLookup {
            found,
            mut later,
            links_changed,
        } = server_nodes(&server).await.map_err(resolve)?;
        let acks_pay = matches!(config.ack_offload, AckOffload::Paid { .. });
        let lend_rate = match config.mirroring {
            Mirroring::Paid { bytes_per_second } => Some(bytes_per_second),
            Mirroring::Never | Mirroring::Free => None,
        };
        let round_trip = match config.has_long_round_trip() {
            true => config.rtt_initial,
            false => Span::ZERO,
        };
        let hint_trial = takes_hints.then(|| HintTrial {
            server: server.key,
            key: key.clone(),
            config: config.clone(),
            attach: attach.clone(),
        });
        let mut core = Endpoint::new(config, key, Admission::Nobody, seed(), seed());
        let session = make(&mut core)?;
        let shared = engine::start(core, false);
        shared.inner.lock().relays.server_session = Some(session);
        let body = Arc::new(DeviceInner {
            shared,
            session,
            nodes: Mutex::new(DeviceNodes::new(found)),
            nodes_changed: Arc::default(),
            hint_trial,
            links_changed,
            link_probe: attach.link_probe(),
            attach,
            carrying: Mutex::default(),
            state: Mutex::new(DeviceState {
                links: DeviceLinks::new(DeviceLinkSettings {
                    acks_pay,
                    lend_rate,
                    round_trip,
                }),
                ..DeviceState::default()
            }),
            moved: watch::Sender::default(),
            candidates: watch::Sender::default(),
            runtime: Handle::current(),
        });
        let ticker = tokio::spawn(tick(body.clone()));
        let asker = link_health::watch_first_hops(body.clone());
        let finds = Arc::downgrade(&body);
        let lookup = AbortOnDrop(tokio::spawn(async move {
            while let Some(found) = later.recv().await {
                let Some(body) = finds.upgrade() else { return };
                body.on_node_found(found);
            }
        }));
        let nodes = AbortOnDrop(tokio::spawn(DeviceInner::watch_nodes(Arc::downgrade(
            &body,
        ))));
        Ok(Device {
            body,
            peer: server.key.0,
            ticker,
            hop_prober: asker,
            _lookup: lookup,
            _nodes: nodes,
            watcher: None,
            instance_upkeep: None,
            lease: None,
        })
    }

    /// The core and the session's id, for [`crate::instance`].
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

    /// Follows the machine's links: sets the use of each to the result of `usage`, now and at every
    /// change.
    pub fn follow_links(
        &mut self,
        links: watch::Receiver<Arc<Vec<Link>>>,
        usage: impl Fn(&Link) -> LinkUse + Send + 'static,
    ) {
        self.follow_links_or_route(links, usage, |_| false);
    }

    /// Follows the machine's links as [`Device::follow_links`] does. While `is_by_route` is true of them, the server is
    /// reached by the system's route alone, as [`Device::use_default_route`] does: on a local network without a router,
    /// for example.
    pub fn follow_links_or_route(
        &mut self,
        mut links: watch::Receiver<Arc<Vec<Link>>>,
        usage: impl Fn(&Link) -> LinkUse + Send + 'static,
        is_by_route: impl Fn(&[Link]) -> bool + Send + 'static,
    ) {
        let body = self.body.clone();
        self.watcher = Some(tokio::spawn(async move {
            let mut networks = PresentNetworks::default();
            loop {
                let now: Arc<Vec<Link>> = links.borrow_and_update().clone();
                networks.update(&now);
                let by_route = is_by_route(&now);
                if by_route
                    && !body.has_default_route()
                    && let Err(error) = body.open_default_route()
                {
                    tracing::warn!(%error, "no socket for the system's route");
                }
                body.update(if by_route { &[] } else { &now }, &usage);
                if !by_route && body.has_default_route() {
                    // After the links, whose paths take over what is in flight.
                    body.drop_default_routes(|_| true);
                }
                body.links_changed
                    .iter()
                    .for_each(|lookup| lookup.notify_one());
                if links.changed().await.is_err() {
                    return;
                }
                service_records::forget();
            }
        }));
    }

    /// Uses the system's route as one free link named `any`: for hosts that do not move, and for
    /// tests on loopback.
    ///
    /// # Errors
    /// No socket could be bound.
    pub fn use_default_route(&self) -> Result<(), DriverError> {
        self.body.open_default_route()
    }

    /// The server's nodes, in the order of its address or records. There is always one at least.
    pub fn nodes(&self) -> Vec<NodeStatus> {
        self.body.nodes.lock().statuses()
    }

    /// Opens a flow. The caller may write to it at once, with or without a network.
    ///
    /// # Errors
    /// The session is over, or too many flows are open.
    pub fn open(&self, settings: FlowSettings) -> Result<Flow, DriverError> {
        self.body
            .shared
            .open(self.body.session, self.peer, settings)
    }

    /// Sets whether a flow may use metered links, and how many bytes in total. It takes effect at
    /// once, in both directions. A flow that has ended pays no more, whatever was set; when no flow pays, metered paths are
    /// closed after [`d2tp_device::PAID_PATH_KEPT`].
    pub fn allow_paid(&self, flow: &Flow, allowed: bool, budget: Option<u64>) {
        let id = flow.flow_id();
        self.body.input(|links, now, session| match allowed {
            true => links.allow_paid(now, session, id, budget, PaidLinks::All),
            false => links.forbid_paid(now, session, id),
        });
    }

    /// Bytes carried for the flow on metered links since it was last allowed to pay, also when it has ended.
    pub fn paid_bytes(&self, flow: &Flow) -> u64 {
        self.body
            .observed(|links, _| links.paid_bytes(flow.flow_id()))
    }

    /// Bytes carried for the flow on metered links since it was last allowed to pay, with those since the last tick.
    pub fn paid_bytes_now(&self, flow: &Flow) -> u64 {
        self.body
            .observed(|links, session| links.paid_bytes_now(session, flow.flow_id()))
    }

    /// Sets what one link may be used for.
    pub fn set_use(&self, name: &str, usage: LinkUse) {
        self.body
            .input(|links, now, session| links.on_use(now, session, name, usage));
    }

    /// Sets the links that rest to save energy, by name. A link that is in use is left once another one
    /// answers, so that data always moves; if all rest, nothing is sent.
    pub fn set_resting(&self, resting: &BTreeSet<String>) {
        self.body
            .input(|links, now, session| links.set_resting(now, session, resting));
    }

    /// Sends nothing over a link until [`Device::unfreeze`], and keeps its paths: data in flight
    /// moves to other paths, and the congestion window is kept. It is for programs that expect a
    /// short outage or need silence for a moment. To stop using a link, call [`Device::set_use`].
    pub fn freeze(&self, name: &str) {
        self.body.input(|links, now, _| links.freeze(now, name));
    }

    /// Resumes a link that was frozen by [`Device::freeze`].
    pub fn unfreeze(&self, name: &str) {
        self.body
            .input(|links, now, session| links.unfreeze(now, session, name));
    }

    /// Gives every link a new socket, and probes it at once, because the networks may have changed.
    /// It is for platforms that report a wake-up or another network but do not let programs watch
    /// links. If links are followed it is not needed. Frequent calls cause at most one renewal a
    /// second.
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

    /// Adds an event of the program to the session's log, if there is one: for example, why it
    /// chose a link. `name` has the form `schema:event`.
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

    /// Notifies, at most ten times a second, that links carried payload, and of what
    /// [`Device::watch_candidates`] notifies of. Clients can wait for it before they read [`Device::link_statuses`].
    pub fn watch_traffic(&self) -> watch::Receiver<()> {
        self.body.moved.subscribe()
    }

    /// Notifies when a link comes, goes or changes its use, and when it begins to answer or counts as
    /// silent, so that its use must be decided again. [`Device::link_statuses`] has the change by then.
    pub fn watch_candidates(&self) -> watch::Receiver<()> {
        self.body.candidates.subscribe()
    }

    /// Statistics of the paths on all links.
    pub fn paths(&self) -> Vec<PathStats> {
        self.body.paths()
    }

    /// The name of the link with this id, which events contain.
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

    /// The session's events from now on, each with its time, but for those that a flow can be read or written.
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

    /// Informs the server that the device leaves, and ends the session: once the server has confirmed that, or after
    /// a moment in which the last packets have left.
    pub async fn close(self) {
        let mut events = self.events();
        self.say_goodbye();
        let confirmed = async {
            while self.ended().is_none() {
                if let Err(RecvError::Closed) = events.recv().await {
                    break;
                }
            }
        };
        let _ = tokio::time::timeout(CLOSE_GRACE, confirmed).await;
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
            // The action is taken in its own statement, so that the lock is not held while it is
            // carried out.
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
        if news.traffic || news.candidates {
            self.moved.send_replace(());
        }
        if news.candidates {
            self.candidates.send_replace(());
        }
        if news.unpaid {
            // The task of the links may sleep until a later time.
            self.shared.notify_activity();
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
                    // The session existed a moment ago, but may end at any time.
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
                inner.streams.drop_link(*socket);
                inner.serial_links.remove(*socket);
                inner.final_payload.remove(socket);
            }
            LinkAction::OpenStream { link, ticket } => {
                let node = self.nodes.lock().current().clone();
                let order = DeviceStreamOrder {
                    shared: self.shared.clone(),
                    attach: self.attach.clone(),
                    name: link.to_string(),
                    link: self.state.lock().described.get(&**link).cloned(),
                    remotes: node.addresses,
                    target: node.stream_port.map(|port| StreamTarget {
                        host: node.name.host,
                        port,
                    }),
                    ticket: *ticket,
                };
                let carries = device_stream::run(order, self.clone());
                self.runtime.spawn(carries);
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
            | LinkAction::WakeAt { .. }
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

    /// Creates a link's sockets. Neither the links nor the core are locked during that.
    fn attach(&self, name: &str, ticket: u64) {
        let link = self.state.lock().described.get(name).cloned();
        if let Some(line) = link.as_ref().and_then(serial_line_of) {
            return self.attach_line(name, ticket, &line);
        }
        let found = link.map_or(Ok(Vec::new()), |link| {
            let remotes = self.nodes.lock().remotes();
            self.attach.attach(&link, &remotes)
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

    /// Attaches to a serial line.
    fn attach_line(&self, name: &str, ticket: u64, line: &SerialLine) {
        let _on_runtime = self.runtime.enter();
        let made = serial_link::attach(&self.shared, line).inspect_err(|error| {
            tracing::warn!(link = %name, %error, "cannot use this link");
        });
        let made: Vec<AttachedSocket> = made.ok().into_iter().collect();
        if let (Some(made), Some(feed)) = (made.first(), &self.shared.inner.lock().qlog) {
            feed.name_link(made.socket, name);
        }
        let mut state = self.state.lock();
        state.links.on_socket(clock::now(), name, ticket, made);
    }

    /// Replaces the server's addresses, unless it has answered at the known ones.
    pub(crate) fn replace_remotes(self: &Arc<Self>, found: Vec<SocketAddr>) {
        // Resolvers return some of a name's addresses in turn.
        let known = self.nodes.lock().remotes();
        if known.iter().all(|known| found.contains(known)) {
            return;
        }
        let has_answered = |paths: &[PathStats]| {
            let mut states = paths.iter().map(|path| path.state);
            states.any(|state| state != PathState::Opening)
        };
        if self.with_links(|_, _, session| has_answered(&session.path_stats())) {
            return;
        }
        self.nodes.lock().replace_current(found);
        self.input(|links, now, session| links.renew(now, session));
    }

    /// Handles a new state of the machine's links.
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
            // The lock is taken first, so that both clocks are read in direct succession.
            let mut state = self.state.lock();
            let awake = clock::awake();
            state.sleep.slept(clock::now(), awake)
        };
        if slept < REARM_MIN {
            return;
        }
        // Timers of the runtime did not advance during the sleep.
        self.shared.rearm();
        tracing::info!(milliseconds = slept.as_millis(), "the machine was asleep");
        self.input(|links, now, session| links.on_slept(now, session, slept));
    }

    pub(crate) fn paths(&self) -> Vec<PathStats> {
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

    pub(crate) fn link_statuses(&self) -> Vec<LinkStatus> {
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
                stream: status.stream,
                path: status.path,
            })
        };
        statuses.into_iter().filter_map(link_status).collect()
    }
}

impl StreamOwner for DeviceInner {
    fn on_stream(
        self: Arc<Self>,
        name: &str,
        ticket: u64,
        made: Result<AttachedSocket, StreamFailure>,
    ) {
        self.input(|links, now, _| links.on_stream(now, name, ticket, made));
    }

    fn on_stream_closed(self: Arc<Self>, socket: LinkId) {
        self.input(|links, now, session| links.on_stream_closed(now, session, socket));
        // R-STREAM-9: the link has a socket for UDP again, beside which the next stream is opened where UDP is blocked.
        self.input(|links, now, session| links.on_time(now, session));
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
        serial_rate: serial_line_of(link).map(|line| line.packet_bytes_per_second()),
        sleeps: serial_line_of(link).is_some_and(|line| line.sleeps),
    }
}

/// The serial line that a link is, if it is one.
fn serial_line_of(link: &Link) -> Option<SerialLine> {
    let is_line = link.kind == LinkKind::Serial;
    link.name.parse().ok().filter(|_| is_line)
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
        // The next update is a tick later, not at every packet.
        if moved {
            tokio::time::sleep(TICK).await;
            // Changes during the tick are handled now.
            tokio::select! {
                biased;
                () = body.shared.activity.notified() => {}
                () = std::future::ready(()) => {}
            }
        }
    }
}
