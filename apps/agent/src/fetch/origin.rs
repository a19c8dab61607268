//! A D2TP origin, or a device that serves: every request is a flow of one session with it, end to
//! end, possibly relayed by a proxy.
//!
//! ```text
//!  d2tp://host:port/KEY/path   an origin at an address
//!  d2tp://KEY/path             a device that listens at the proxy
//! ```
//!
//! The session moves between links by itself, over free ones only; metered ones are left alone.

use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::Duration;

use cedos_text::RemoteText;
use d2tp_driver::{
    CallError, Device, DeviceOptions, DriverError, EndpointConfig, Flow, FlowSettings, LinkUse,
    PathState, Peer, PublicKey, Qlog, SecretKey, ServerAddress, ServerList, SessionEnd,
    asked_servers, choose_server, is_by_system_route, is_loopback_host, measure_servers,
};
use d2tp_links::{CostClass, Link};
use tokio::sync::{Mutex, watch};
use tokio::time::timeout;
use url::Url;

use super::dial::{ByteStream, Dial, EgressLink, FetchFault};
use super::exchange::{FetchResponse, GetRequest, exchange};
use super::mode::FetchMode;
use super::outcome::TransferFailure;
use super::request_method::RequestMethod;
use super::session_refusal::{host_and_port, session_end_text, session_refusal};

/// How long an origin may take to answer a handshake.
const ANSWERS_WITHIN: Duration = Duration::from_secs(3); // a guess: a handshake and an answer

/// How long answers of proxies are awaited before one is chosen.
const PROXY_ANSWERS_WITHIN: Duration = Duration::from_secs(1); // as for downloads

/// The host that a `d2tp:` URL names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum D2tpTarget {
    /// An origin, at its address.
    Address(ServerAddress),
    /// A device, by its key.
    Device(PublicKey),
}

impl D2tpTarget {
    /// Reads whom a `d2tp:` URL names, and returns what to ask for: the URL without the key of an
    /// origin at an address.
    ///
    /// # Errors
    /// It is no such URL; in words.
    pub fn of(url: &Url) -> Result<(D2tpTarget, Url), String> {
        let host = url.host_str().unwrap_or_default();
        if url.port().is_none() {
            let key = PublicKey::from_text(host).map_err(|_| {
                "it needs a port and a key (d2tp://host:port/KEY/path), or a key for its host \
                 (d2tp://KEY/path)"
            })?;
            return Ok((D2tpTarget::Device(key), url.clone()));
        }
        let path = url.path().trim_start_matches('/');
        let (key, rest) = path.split_once('/').unwrap_or((path, ""));
        let place = &url[url::Position::BeforeHost..url::Position::AfterPort];
        let address: ServerAddress = format!("d2tp://{place}/{key}")
            .parse()
            .map_err(|error| format!("{error}"))?;
        let mut plain = url.clone();
        plain.set_path(&format!("/{rest}"));
        Ok((D2tpTarget::Address(address), plain))
    }
}

/// The session with an origin.
enum OriginSession {
    /// A session with the origin, over our own links.
    Direct(Device),
    /// A session through a proxy, which is the device's server.
    ThroughProxy(Device, Peer),
}

impl OriginSession {
    fn open(&self) -> Result<Flow, DriverError> {
        let settings = FlowSettings::default();
        match self {
            OriginSession::Direct(device) => device.open(settings),
            OriginSession::ThroughProxy(_, peer) => peer.open(settings),
        }
    }

    /// The host with which a session of this device ended, for users, and how it ended.
    fn ended_by(&self, origin: &D2tpOrigin) -> Option<(String, SessionEnd)> {
        match self {
            OriginSession::Direct(device) => Some((origin.server_text(), device.ended()?)),
            OriginSession::ThroughProxy(device, peer) => match device.ended() {
                Some(end) => Some((origin.server_text(), end)),
                None => Some(("the device that serves it".into(), peer.ended()?)),
            },
        }
    }

    fn is_over(&self) -> bool {
        match self {
            OriginSession::Direct(device) => device.ended().is_some(),
            OriginSession::ThroughProxy(device, peer) => {
                device.ended().is_some() || peer.ended().is_some()
            }
        }
    }
}

/// Carries requests to an origin that speaks D2TP.
pub struct D2tpOrigin {
    whom: D2tpTarget,
    proxies: Option<ServerList>,
    /// The proxy in use.
    proxy: StdMutex<Option<ServerAddress>>,
    key: SecretKey,
    config: EndpointConfig,
    links: watch::Receiver<Arc<Vec<Link>>>,
    log: Option<Arc<Qlog>>,
    session: Mutex<Option<OriginSession>>,
}

impl D2tpOrigin {
    /// Creates the client. Nothing is sent before the first request. Of several proxies the nearest is used that
    /// answers and leads to the origin.
    pub fn new(
        whom: D2tpTarget,
        proxies: Option<ServerList>,
        key: SecretKey,
        config: EndpointConfig,
        links: watch::Receiver<Arc<Vec<Link>>>,
        log: Option<Arc<Qlog>>,
    ) -> D2tpOrigin {
        D2tpOrigin {
            whom,
            proxy: StdMutex::new(proxies.as_ref().map(|proxies| proxies.first().clone())),
            proxies,
            key,
            config,
            links,
            log,
            session: Mutex::default(),
        }
    }

    /// Whether the origin answers and has what `url` names.
    pub async fn is_available(&self, url: &Url) -> bool {
        self.head(url).await.is_some()
    }

    /// What the origin says of what `url` names, if it answers soon and has it.
    pub async fn head(&self, url: &Url) -> Option<FetchResponse> {
        let ask = GetRequest {
            url: url.clone(),
            from: 0,
            to: None,
            if_range: None,
            unless: None,
            cookies: None,
            allow_downgrade: false,
            fields: [].into(),
            method: RequestMethod::Head,
        };
        let any_link = EgressLink {
            device: None,
            sources: Vec::new(),
        };
        let answered = timeout(ANSWERS_WITHIN, exchange(self, &ask, &any_link)).await;
        answered.ok()?.ok()
    }

    /// The server of the device's own session.
    fn server(&self) -> Option<ServerAddress> {
        let proxy = self.proxy.lock().unwrap_or_else(PoisonError::into_inner);
        match (&*proxy, &self.whom) {
            (Some(proxy), _) => Some(proxy.clone()),
            (None, D2tpTarget::Address(origin)) => Some(origin.clone()),
            (None, D2tpTarget::Device(_)) => None,
        }
    }

    fn use_proxy(&self, proxy: &ServerAddress) {
        *self.proxy.lock().unwrap_or_else(PoisonError::into_inner) = Some(proxy.clone());
    }

    /// The list of proxies, if there is a choice.
    fn several_proxies(&self) -> Option<&ServerList> {
        self.proxies
            .as_ref()
            .filter(|proxies| proxies.servers().len() > 1)
    }

    /// Begins a session: through the nearest proxy, and where that one does not lead to the origin, through the others.
    async fn begin(&self) -> Result<OriginSession, FetchFault> {
        let Some(proxies) = self.several_proxies() else {
            let server = self.server().ok_or_else(|| {
                let text = "a device is called through a proxy: give --prox";
                FetchFault::Final(TransferFailure::usage(text))
            })?;
            return self.begin_at(&server).await;
        };
        let asked = asked_servers(proxies, &self.links.borrow().clone());
        let choice = choose_server(asked, PROXY_ANSWERS_WITHIN).await;
        let nearest = choice.nearest.unwrap_or(0);
        let others = (0..proxies.servers().len()).filter(|place| *place != nearest);
        let mut failed = None;
        for place in std::iter::once(nearest).chain(others) {
            let proxy = &proxies.servers()[place];
            self.use_proxy(proxy);
            match self.begin_at(proxy).await {
                Err(fault @ (FetchFault::Final(_) | FetchFault::Origin { .. })) => {
                    failed.get_or_insert(fault);
                }
                begun => return begun,
            }
        }
        Err(failed.expect("a list has one proxy at least"))
    }

    /// Whether the session's proxy is silent while another one answers.
    async fn is_proxy_silent(&self, session: &OriginSession) -> bool {
        let (OriginSession::ThroughProxy(device, peer), Some(proxies)) =
            (session, self.several_proxies())
        else {
            return false;
        };
        let mut paths = device.paths().into_iter();
        if peer.is_direct() || paths.any(|path| path.state == PathState::Active) {
            return false;
        }
        let asked = asked_servers(proxies, &self.links.borrow().clone());
        let choice = measure_servers(asked, PROXY_ANSWERS_WITHIN).await;
        let own = self.server().map(|server| server.key);
        let servers = proxies.servers().iter();
        let is_there = servers
            .zip(&choice.round_trips)
            .any(|(server, trip)| Some(server.key) == own && trip.is_some());
        choice.nearest.is_some() && !is_there
    }

    async fn begin_at(&self, server: &ServerAddress) -> Result<OriginSession, FetchFault> {
        let options = DeviceOptions {
            server: server.clone(),
            key: self.key.clone(),
            config: self.config.clone(),
        };
        let mut device = Device::new(options).await.map_err(on_path)?;
        if let Some(log) = &self.log {
            device.log_to(log);
        }
        follow_free_links(&mut device, &server.host, self.links.clone()).map_err(on_path)?;
        let mut proxy_events = device.events();
        let peer = match (&self.proxies, &self.whom) {
            (None, _) => return Ok(OriginSession::Direct(device)),
            (Some(_), D2tpTarget::Address(origin)) => device.connect_origin(origin).await,
            (Some(_), D2tpTarget::Device(key)) => device.call(*key).await,
        };
        match peer {
            Ok(peer) => {
                let mut peer_events = peer.events();
                // A relay that the proxy refuses would be asked for again and again.
                loop {
                    if let Some(fault) = self.session_fault(&device) {
                        return Err(fault);
                    }
                    let mut paths = device.paths().into_iter();
                    let answers = paths.any(|path| path.state == PathState::Active);
                    if answers || peer.is_direct() {
                        return Ok(OriginSession::ThroughProxy(device, peer));
                    }
                    tokio::select! {
                        _ = proxy_events.recv() => {}
                        _ = peer_events.recv() => {}
                    }
                }
            }
            Err(CallError::Refused { text, .. }) => Err(FetchFault::Origin {
                text: RemoteText::new(&text).into(),
                retry_after: None,
            }),
            Err(error) => Err(self
                .session_fault(&device)
                .unwrap_or_else(|| FetchFault::Path(error.to_string()))),
        }
    }

    /// Why the device's own session is over, if it is.
    fn session_fault(&self, device: &Device) -> Option<FetchFault> {
        let (end, server) = (device.ended()?, self.server_text());
        Some(match session_refusal(&end, &server, &self.key.public()) {
            Some(refusal) => FetchFault::Final(refusal),
            None => FetchFault::Path(session_end_text(&end, &server)),
        })
    }

    /// The server of the device's own session, for users.
    fn server_text(&self) -> String {
        let kind = if self.proxies.is_some() {
            "proxy"
        } else {
            "server"
        };
        match self.server() {
            Some(server) => format!("the {kind} {}", host_and_port(&server)),
            None => format!("the {kind}"),
        }
    }
}

fn on_path(error: DriverError) -> FetchFault {
    FetchFault::Path(error.to_string())
}

/// Whether a host is this machine, which no link leads to.
pub fn is_this_machine(host: &str) -> bool {
    is_loopback_host(host)
}

/// Has a device follow the free links to a server, or the system's route where no link leads to it.
///
/// # Errors
/// No socket could be bound.
pub fn follow_free_links(
    device: &mut Device,
    host: &str,
    links: watch::Receiver<Arc<Vec<Link>>>,
) -> Result<(), DriverError> {
    if is_by_system_route(host, &links.borrow()) {
        device.use_default_route()?;
    }
    if !is_loopback_host(host) {
        let host = host.to_owned();
        let usage = |link: &Link| match link.class.class {
            CostClass::Free => LinkUse::Free,
            _ => LinkUse::Off,
        };
        device.follow_links_or_route(links, usage, move |links| is_by_system_route(&host, links));
    }
    Ok(())
}

impl Dial for D2tpOrigin {
    async fn dial(&self, _: &Url, _: &EgressLink) -> Result<Box<dyn ByteStream>, FetchFault> {
        let mut session = self.session.lock().await;
        let is_lost = match session.as_ref() {
            Some(session) => session.is_over() || self.is_proxy_silent(session).await,
            None => true,
        };
        if is_lost {
            *session = None;
            *session = Some(self.begin().await?);
        }
        let session = session.as_ref().expect("it was just begun");
        Ok(Box::new(session.open().map_err(on_path)?))
    }

    fn mode(&self) -> FetchMode {
        FetchMode::Direct
    }

    fn session_failure(&self) -> Option<TransferFailure> {
        // While it is locked, a session is being begun, which says itself how that fails.
        let session = self.session.try_lock().ok()?;
        let (server, end) = session.as_ref()?.ended_by(self)?;
        session_refusal(&end, &server, &self.key.public())
    }

    fn session_end_text(&self) -> Option<String> {
        let session = self.session.try_lock().ok()?;
        let (server, end) = session.as_ref()?.ended_by(self)?;
        Some(session_end_text(&end, &server))
    }

    fn answering_proxy(&self) -> Option<String> {
        // What it says of itself is worth no more than what led here, which is remembered already.
        Some("itself".into())
    }

    fn needs_no_link(&self) -> bool {
        self.server()
            .is_some_and(|server| is_this_machine(&server.host))
    }

    fn survives_link_loss(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_an_origin_by_address_and_key_or_a_device_by_its_key() {
        let key = PublicKey([0xfb; 32]);
        let of = |text: &str| D2tpTarget::of(&text.parse().unwrap());
        for host in ["files.example", "192.0.2.1", "[2001:db8::1]"] {
            let (whom, url) = of(&format!("d2tp://{host}:4433/{key}/a/b.bin?c")).unwrap();
            let D2tpTarget::Address(address) = whom else {
                panic!("{whom:?}")
            };
            assert_eq!((address.port, address.key), (4433, key));
            assert_eq!(url.as_str(), format!("d2tp://{host}:4433/a/b.bin?c"));
        }
        let (whom, url) = of(&format!("d2tp://{key}/a.bin")).unwrap();
        assert_eq!((whom, url.path()), (D2tpTarget::Device(key), "/a.bin"));
        for bad in [
            "d2tp://files.example/a.bin",
            "d2tp://files.example:4433/a.bin",
            "d2tp://files.example:4433/",
        ] {
            assert!(of(bad).is_err(), "{bad}");
        }
    }
}
