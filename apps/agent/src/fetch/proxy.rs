//! Requests through a D2Prox: every request is a flow of one D2TP session, which moves between
//! links.
//!
//! ```text
//!  exchange ── SharedFlow (AsyncRead + AsyncWrite) ── flow ── Device ══ wlan0, wwan0 … ══▶ D2Prox
//!                                                               ▲
//!  transfer/proxied ── grants for metered links ────────────────┘
//! ```
//!
//! The session belongs to this process; a new one is opened only after the proxy ended the old one, or at another
//! proxy of the list after this one fell silent (`server_selection`).

mod flow_loss;
mod head_scanner;
mod link_traffic;
mod persistence;
mod round_trip_store;
mod server_selection;
mod shared_flow;
mod supply_inbox;

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use cedos_http::SupplyReport;
use d2tp_driver::{
    Device, DeviceOptions, DriverError, EndpointConfig, Flow, FlowIo as _, FlowSettings, Instance,
    InstanceClaim, InstanceLease, LinkUse, PathState, ProvidedLinks, Qlog, SecretKey,
    ServerAddress, ServerList, SessionEvent,
};
use d2tp_links::{CostClass, Link, LinkKind};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use url::Url;

use super::boot_clock::BootInstant;
use super::dial::{ByteStream, Dial, EgressLink, FetchFault};
use super::local_origin::LocalOrigin;
use super::mode::FetchMode;
use super::outcome::TransferFailure;
use super::session_refusal::host_and_port;
use super::stream_ports;
use super::tunnel::OriginTunnel;
use super::upload_body::UploadSource;
use head_scanner::HeadScanner;
use server_selection::ServerSelection;
use shared_flow::SharedFlow;
use supply_inbox::SupplyInbox;

pub use flow_loss::FlowLoss;
pub use link_traffic::LinkTraffic;
pub use server_selection::{ProxyStatus, SILENT_MAX, describe_proxies, remembered_round_trips};

/// Time to end the flow and the session with a proxy.
const FAREWELL: Duration = Duration::from_millis(500); // a guess: one slow round trip

/// Why a flow to a proxy cannot be opened now.
#[derive(Debug)]
pub enum FlowOpenError {
    /// There is no session.
    NoSession,
    /// The session takes no more flows, or is over.
    Driver(DriverError),
}

impl fmt::Display for FlowOpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FlowOpenError::NoSession => f.write_str("there is no session to the proxy"),
            FlowOpenError::Driver(error) => error.fmt(f),
        }
    }
}

/// Carries requests to a proxy.
pub struct ProxyClient {
    servers: ServerList,
    key: SecretKey,
    links: watch::Receiver<Arc<Vec<Link>>>,
    config: EndpointConfig,
    /// Whether sent bytes are counted, not received ones.
    sends: bool,
    /// The connector by which the device talks to origins itself.
    tunnel: Option<OriginTunnel>,
    /// Links that the program provides instead of the kernel's.
    given: Option<Arc<ProvidedLinks>>,
    log: Option<Arc<Qlog>>,
    /// The directory of instances, if they are kept.
    instances: Option<PathBuf>,
    state: Mutex<ProxyClientState>,
}

#[derive(Default)]
struct ProxyClientState {
    device: Option<Arc<Device>>,
    flow: Option<Arc<Mutex<Flow>>>,
    within: Option<Duration>,
    /// Payload bytes by link, and repeated bytes, of earlier sessions.
    carried_before: BTreeMap<String, u64>,
    duplicate_before: u64,
    instance: Option<Arc<Instance>>,
    /// The instance and the flow of an earlier process.
    claim: Option<(u64, Option<InstanceClaim>)>,
    /// Whether the current flow was claimed and is not read yet.
    claimed: bool,
    /// The scanner for the head of the current flow's answer.
    head: Option<Arc<Mutex<HeadScanner>>>,
    /// The code with which the current flow was reset. Its other direction may still be open then, so
    /// that the flow has no end yet.
    broken: Arc<OnceLock<u64>>,
    /// Why no instance could be opened.
    trouble: Option<String>,
    supply: SupplyInbox,
    /// Which proxy of the list is used.
    selection: ServerSelection,
}

impl ProxyClient {
    /// Creates the client. Nothing is sent before [`ProxyClient::connect`]. Of several proxies the nearest that answers
    /// is used.
    pub fn new(
        servers: impl Into<ServerList>,
        key: SecretKey,
        links: watch::Receiver<Arc<Vec<Link>>>,
        tunnel: Option<OriginTunnel>,
    ) -> ProxyClient {
        ProxyClient {
            servers: servers.into(),
            key,
            links,
            config: EndpointConfig::default(),
            sends: false,
            tunnel,
            given: None,
            log: None,
            instances: None,
            state: Mutex::default(),
        }
    }

    /// Sets the configuration of sessions.
    pub fn with_config(mut self, set: impl FnOnce(&mut EndpointConfig)) -> ProxyClient {
        set(&mut self.config);
        self
    }

    /// Counts sent bytes of links, for uploads.
    pub fn for_uploads(mut self) -> ProxyClient {
        self.sends = true;
        self
    }

    /// Opens a flow that sends a file and then ends our direction; the answer is read from it.
    pub fn post(&self, drawn: Arc<UploadSource>) -> Result<Box<dyn ByteStream>, FetchFault> {
        let stream = self.open(Some(drawn.size()), None)?;
        stream.flow().send_source(drawn);
        Ok(Box::new(stream))
    }

    /// Opens a flow. `head`: the scanner for the head of the answer, for a flow that a later process
    /// may claim.
    fn open(
        &self,
        size: Option<u64>,
        head: Option<Arc<Mutex<HeadScanner>>>,
    ) -> Result<SharedFlow, FetchFault> {
        let Some(device) = self.device() else {
            return Err(FetchFault::Proxy("there is no session to the proxy".into()));
        };
        let settings = FlowSettings {
            within: self.state().within,
            size,
            ..FlowSettings::default()
        };
        let flow = device
            .open(settings)
            .map_err(|error| FetchFault::Proxy(error.to_string()))?;
        let flow = Arc::new(Mutex::new(flow));
        let mut state = self.state();
        state.flow = Some(flow.clone());
        state.head = head.clone();
        state.broken = Arc::default();
        state.claimed = false;
        let broken = state.broken.clone();
        drop(state);
        Ok(SharedFlow { flow, head, broken })
    }

    /// Opens another flow, for a caller that manages several; `steer` gets it before anything is sent.
    pub fn open_parallel(
        &self,
        steer: impl FnOnce(&Device, &Arc<Mutex<Flow>>),
    ) -> Result<Box<dyn ByteStream>, FetchFault> {
        let opened = self.open_parallel_with(FlowSettings::default(), steer);
        opened.map_err(|error| FetchFault::Proxy(error.to_string()))
    }

    /// Opens another flow, with these settings.
    pub fn open_parallel_with(
        &self,
        settings: FlowSettings,
        steer: impl FnOnce(&Device, &Arc<Mutex<Flow>>),
    ) -> Result<Box<dyn ByteStream>, FlowOpenError> {
        let device = self.device().ok_or(FlowOpenError::NoSession)?;
        let flow = device.open(settings).map_err(FlowOpenError::Driver)?;
        let flow = Arc::new(Mutex::new(flow));
        steer(&device, &flow);
        Ok(Box::new(SharedFlow {
            flow,
            head: None,
            broken: Arc::default(),
        }))
    }

    /// The connector by which the device talks to origins itself, if it does.
    pub fn tunnel(&self) -> Option<&OriginTunnel> {
        self.tunnel.as_ref()
    }

    /// A client over links that the program describes itself.
    pub fn with_provided_links(
        address: ServerAddress,
        key: SecretKey,
        given: Arc<ProvidedLinks>,
    ) -> ProxyClient {
        ProxyClient {
            given: Some(given.clone()),
            ..ProxyClient::new(address, key, given.subscribe(), None)
        }
    }

    /// Logs sessions to `log`.
    pub fn log_to(&mut self, log: Arc<Qlog>) {
        self.log = Some(log);
    }

    /// The address of the proxy in use.
    pub fn address(&self) -> ServerAddress {
        let place = self.state().selection.current();
        self.servers.servers()[place].clone()
    }

    /// The address of the proxy in use, for users.
    pub fn address_text(&self) -> String {
        host_and_port(&self.address())
    }

    /// This device's public key, in the form that the proxy's operator needs.
    pub fn public_key(&self) -> String {
        self.key.public().to_string()
    }

    fn state(&self) -> MutexGuard<'_, ProxyClientState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The session's device, if there is a session.
    pub fn device(&self) -> Option<Arc<Device>> {
        self.state().device.clone()
    }

    /// Begins a session if there is none, and returns what happens in it.
    ///
    /// # Errors
    /// The proxy's name has no address, or no socket can be had.
    pub async fn connect(
        &self,
    ) -> Result<Option<mpsc::UnboundedReceiver<SessionEvent>>, DriverError> {
        if self.state().device.is_some() {
            return Ok(None);
        }
        self.select_server().await;
        let options = DeviceOptions {
            server: stream_ports::with_known_port(&self.address()),
            key: self.key.clone(),
            config: self.config.clone(),
        };
        let (mut device, claimed) = match (&self.given, self.instance().await) {
            (Some(given), _) => (Device::with_attach(options, given.clone()).await?, None),
            (None, Some(instance)) => {
                let claim = self.state().claim.and_then(|(_, claim)| claim);
                Device::resume(options, instance, claim).await?
            }
            (None, None) => (self.device_on_lease(options).await?, None),
        };
        if let Some(log) = &self.log {
            device.log_to(log);
        }
        let mut events = device.events();
        let (sender, receiver) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            loop {
                match events.recv().await {
                    Ok((_, event)) => {
                        if sender.send(event).is_err() {
                            return;
                        }
                    }
                    Err(RecvError::Lagged(events)) => tracing::warn!(events, "events lost"),
                    Err(RecvError::Closed) => return,
                }
            }
        });
        if self.needs_no_link() {
            device.use_default_route()?;
        }
        let (address, is_given) = (self.address(), self.given.is_some());
        // A network may come up just now: its routes are known to the system before they are known here.
        device.follow_links_or_route(self.links.clone(), usage, move |links| {
            !is_given && is_reached_without_link(&address, links)
        });
        let mut state = self.state();
        // What is not taken up now is over.
        state.claim = None;
        state.claimed = claimed.is_some();
        state.flow = claimed.map(|flow| Arc::new(Mutex::new(flow)));
        state.supply = SupplyInbox::of_session(&device.connection());
        state.device = Some(Arc::new(device));
        drop(state);
        Ok(Some(receiver))
    }

    /// A device without stored flows, whose instance the next process uses again.
    async fn device_on_lease(&self, options: DeviceOptions) -> Result<Device, DriverError> {
        let (ours, theirs) = (self.key.public(), self.address().key);
        let lease = tokio::task::spawn_blocking(move || InstanceLease::take(ours, theirs)).await;
        match lease.ok().flatten() {
            Some(lease) => Device::with_lease(options, Arc::new(lease)).await,
            None => Device::new(options).await,
        }
    }

    /// Whether the proxy in use is on this machine, or reached by a specific route.
    pub fn needs_no_link(&self) -> bool {
        self.is_reached_without_link(&self.address())
    }

    fn is_reached_without_link(&self, address: &ServerAddress) -> bool {
        self.given.is_none() && is_reached_without_link(address, &self.links.borrow())
    }

    /// Drops the session, which has ended, and keeps its counts.
    pub fn drop_session(&self) {
        let carried = self.carried();
        let duplicate = self.duplicate_bytes();
        let mut state = self.state();
        state.flow = None;
        state.device = None;
        state.carried_before = carried.into_iter().map(|(n, c)| (n, c.bytes)).collect();
        state.duplicate_before = duplicate;
    }

    /// Sets the time until the deadline of further flows.
    pub fn set_time_left(&self, within: Option<Duration>) {
        self.state().within = within;
    }

    /// Calls `f` with the flow of the current request.
    pub fn with_flow<R>(&self, f: impl FnOnce(&Device, &mut Flow) -> R) -> Option<R> {
        let (device, flow) = {
            let state = self.state();
            (state.device.clone()?, state.flow.clone()?)
        };
        let mut flow = flow.lock().unwrap_or_else(PoisonError::into_inner);
        Some(f(&device, &mut flow))
    }

    /// The proxy's last report on how the server supplies the current flow, with its moment.
    pub fn supply_report(&self) -> Option<(SupplyReport, BootInstant)> {
        let flow = self.with_flow(|_, flow| flow.id())?;
        self.state().supply.last(flow)
    }

    /// What each link carried, and its state.
    pub fn carried(&self) -> BTreeMap<String, LinkTraffic> {
        let (device, before) = {
            let state = self.state();
            (state.device.clone(), state.carried_before.clone())
        };
        let statuses = device.map(|device| device.link_statuses());
        LinkTraffic::of_links(before, statuses.unwrap_or_default(), self.sends)
    }

    /// Which of the proxy's nodes is in use and why, if it has several and there is a session.
    pub fn describe_nodes(&self) -> Option<String> {
        d2tp_driver::describe_nodes(&self.device()?.nodes())
    }

    /// Notifies when what the links of the session may carry must be decided again; none without a
    /// session.
    pub fn watch_candidates(&self) -> Option<watch::Receiver<()>> {
        self.device().map(|device| device.watch_candidates())
    }

    /// Whether any path answers now.
    pub fn has_answering_path(&self) -> bool {
        self.device().is_some_and(|device| {
            device
                .paths()
                .iter()
                .any(|path| path.state == PathState::Active)
        })
    }

    /// Payload bytes that were received more than once.
    pub fn duplicate_bytes(&self) -> u64 {
        let (device, before) = {
            let state = self.state();
            (state.device.clone(), state.duplicate_before)
        };
        before + device.map_or(0, |device| device.duplicate_bytes())
    }

    /// Ends the current flow cleanly: the proxy learns that everything arrived.
    pub async fn finish(&self) {
        let Some(flow) = self.state().flow.take() else {
            return;
        };
        let mut held = SharedFlow {
            flow,
            head: None,
            broken: Arc::default(),
        };
        let _ = timeout(FAREWELL, async {
            let _ = held.shutdown().await;
            let mut rest = [0; 1024];
            while held.read(&mut rest).await.is_ok_and(|n| n > 0) {}
        })
        .await;
    }

    /// Ends our direction of the current flow, of which the whole answer is there. A flow that is dropped before
    /// would be reset, and the proxy would not know that the answer arrived.
    pub fn end_sending(&self) {
        self.with_flow(|_, flow| flow.finish());
    }

    /// Drops the current flow, with whatever it still carries.
    pub fn drop_flow(&self) {
        let mut state = self.state();
        state.flow = None;
        state.broken = Arc::default();
    }

    /// Closes the session and informs the proxy.
    pub async fn close(&self) {
        let device = {
            let mut state = self.state();
            state.flow = None;
            state.device.take()
        };
        let Some(device) = device.and_then(Arc::into_inner) else {
            return;
        };
        // A session that ends before its flows have would break them off.
        let is_settled = timeout(FAREWELL, persistence::until_flows_settled(&device))
            .await
            .is_ok();
        // What the proxy does not know by then, the next process tells it.
        if device.has_instance() && !is_settled {
            if let Err(error) = device.leave().await {
                tracing::warn!(%error, "cannot save what the proxy must be told");
            }
            return;
        }
        if let Err(error) = device.forget().await {
            tracing::warn!(%error, "the proxy may be told twice");
        }
        device.close().await;
    }
}

/// Whether a proxy is on this machine, or on a free local network while none leads further. Over a metered link nothing
/// limits what the system's route carries. A link that is coming up has its address before its default route is known.
fn is_reached_without_link(address: &ServerAddress, links: &[Link]) -> bool {
    let ip: IpAddr = match address.host.parse() {
        Ok(ip) => ip,
        Err(_) => return address.host == "localhost",
    };
    ip.is_loopback()
        || links.iter().any(|link| link.addresses.contains(&ip))
        || (!links
            .iter()
            .any(|link| link.kind != LinkKind::Loopback && link.is_usable())
            && match LocalOrigin::of_address(ip, links) {
                Some(LocalOrigin::OnLink(name, _)) => {
                    links.iter().any(|link| link.name == name && link.is_free())
                }
                Some(LocalOrigin::ThisMachine) => true,
                None => false,
            })
}

/// What a link may be used for. Use of metered links is decided per flow.
fn usage(link: &Link) -> LinkUse {
    match (link.kind, link.class.class) {
        (LinkKind::Loopback, _) | (_, CostClass::Roaming) => LinkUse::Off,
        (_, CostClass::Free) => LinkUse::Free,
        (_, CostClass::Metered) => LinkUse::Paid,
    }
}

impl Dial for ProxyClient {
    async fn dial(&self, url: &Url, _via: &EgressLink) -> Result<Box<dyn ByteStream>, FetchFault> {
        match &self.tunnel {
            // What TLS was inside nobody could go on with: no head, no claim.
            Some(tunnel) => tunnel.through(self.open(None, None)?, url).await,
            None => Ok(Box::new(self.open(None, Some(Arc::default()))?)),
        }
    }

    fn mode(&self) -> FetchMode {
        match &self.tunnel {
            Some(_) => FetchMode::Sealed,
            None => FetchMode::ProxyFetch,
        }
    }

    fn session_failure(&self) -> Option<TransferFailure> {
        self.flow_loss().err()
    }

    fn session_end_text(&self) -> Option<String> {
        self.words_of_lost_session()
    }

    fn answering_proxy(&self) -> Option<String> {
        self.tunnel.is_none().then(|| self.address().to_string())
    }
}
