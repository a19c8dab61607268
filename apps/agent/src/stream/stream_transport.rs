//! The transports of a stream: one link at a time directly to the origin, or the flows of one
//! session with a proxy, which uses all links.
//!
//! ```text
//!  feed ── RequestConn: one request ──┬── direct: TCP bound to the link that the feed chose
//!                                     └── proxy: a flow; the feed decides whether it may use metered links
//! ```
//!
//! A [`RequestConn`] reports the status of the answer, even if the exchange turns it into a fault.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use d2tp_driver::{Flow, SessionEvent};
use d2tp_links::{CostClass, Link, LinkKind};
use d2tp_sched::{LinkCandidate, SwitchDelay};
use http::StatusCode;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use url::Url;

use crate::fetch::boot_clock::BootInstant;
use crate::fetch::dial::{ByteStream, Dial, EgressLink, FetchFault};
use crate::fetch::direct::DirectConnector;
use crate::fetch::local_hosts::LocalHosts;
use crate::fetch::mode::FetchMode;
use crate::fetch::origin::is_this_machine;
use crate::fetch::proxy::{FlowLoss, ProxyClient};

/// How long a link must have carried before its rate is measured.
const RATE_AFTER: Duration = Duration::from_millis(1_500); // a guess: a new path still speeds up

/// The interval over which rates of links without a session are averaged.
const RATE_OVER: Duration = Duration::from_secs(1);

/// The delay before a session that ended is opened again.
const CALL_AGAIN: Duration = Duration::from_secs(1); // a guess

/// How long a link is avoided after it failed or stalled.
pub const AVOID: Duration = Duration::from_secs(20); // a guess

/// The interval of checks whether a session has ended.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The name of the link if the system's routes decide.
pub const ANYWHERE: &str = "any";

enum StreamRoute {
    Origin(Box<DirectConnector>),
    Proxy(Box<ProxyClient>),
}

#[derive(Default)]
struct TransportStats {
    /// Payload bytes by link, of requests without a session.
    bytes: BTreeMap<String, u64>,
    rates: BTreeMap<String, f64>,
    /// The last rate sample of each link: its time, and the bytes until then.
    sampled: BTreeMap<String, (BootInstant, u64)>,
    avoided_until: BTreeMap<String, BootInstant>,
    answering_since: BTreeMap<String, BootInstant>,
    challenge: Option<Duration>,
    trouble: Option<String>,
    /// The part of `carried` that was reported to the scheduler.
    counted: BTreeMap<String, u64>,
}

/// Carries requests to origins, directly or through a proxy.
pub struct StreamTransport {
    to: StreamRoute,
    links: watch::Receiver<Arc<Vec<Link>>>,
    measured: Mutex<TransportStats>,
    ledger: OnceLock<TrafficCallback>,
}

/// Receives the total bytes of each link, by name.
type TrafficCallback = Box<dyn Fn(&BTreeMap<String, u64>) + Send + Sync>;

impl StreamTransport {
    /// Creates a transport directly to origins.
    pub fn direct(
        direct: DirectConnector,
        links: watch::Receiver<Arc<Vec<Link>>>,
    ) -> Arc<StreamTransport> {
        StreamTransport::new(StreamRoute::Origin(Box::new(direct)), links)
    }

    /// Creates a transport through a proxy. [`StreamTransport::keep_session`] keeps its session open.
    pub fn proxied(
        proxy: ProxyClient,
        links: watch::Receiver<Arc<Vec<Link>>>,
    ) -> Arc<StreamTransport> {
        StreamTransport::new(StreamRoute::Proxy(Box::new(proxy)), links)
    }

    fn new(to: StreamRoute, links: watch::Receiver<Arc<Vec<Link>>>) -> Arc<StreamTransport> {
        Arc::new(StreamTransport {
            to,
            links,
            measured: Mutex::default(),
            ledger: OnceLock::new(),
        })
    }

    /// Sets the callback that gets the links' traffic at each [`StreamTransport::report_traffic`].
    pub fn with_traffic_callback(
        &self,
        ledger: impl Fn(&BTreeMap<String, u64>) + Send + Sync + 'static,
    ) {
        let _ = self.ledger.set(Box::new(ledger));
    }

    /// Reports the links' traffic to the callback.
    pub fn report_traffic(&self) {
        if let Some(ledger) = self.ledger.get() {
            ledger(&self.carried());
        }
    }

    fn measured(&self) -> MutexGuard<'_, TransportStats> {
        self.measured.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notified when links change from now on.
    pub fn links(&self) -> watch::Receiver<Arc<Vec<Link>>> {
        let mut links = self.links.clone();
        links.mark_unchanged();
        links
    }

    /// Which host talks to origins.
    pub fn mode(&self) -> FetchMode {
        match &self.to {
            StreamRoute::Origin(direct) => direct.mode(),
            StreamRoute::Proxy(proxy) => proxy.mode(),
        }
    }

    /// Whether each request uses one link, chosen by its caller.
    pub fn is_direct(&self) -> bool {
        matches!(self.to, StreamRoute::Origin(_))
    }

    /// Keeps the session open, if there is one.
    pub async fn keep_session(self: Arc<StreamTransport>) {
        let StreamRoute::Proxy(proxy) = &self.to else {
            return std::future::pending().await;
        };
        loop {
            match proxy.connect().await {
                Ok(Some(mut events)) => {
                    loop {
                        match timeout(LOOK_EVERY, events.recv()).await {
                            Ok(Some(SessionEvent::PathUp { took, .. })) => {
                                let mut measured = self.measured();
                                measured.challenge = Some(took.into());
                                measured.trouble = None;
                            }
                            Ok(Some(_)) | Err(_) => {}
                            Ok(None) => break,
                        }
                        if proxy.device().is_none_or(|device| device.ended().is_some()) {
                            break;
                        }
                        let is_asked = proxy.has_alternatives() && self.is_online(proxy);
                        // What a stream asked for it asks for again, so that nothing is lost.
                        if is_asked
                            && !proxy.has_answering_path()
                            && let Some(moved) = proxy.leave_silent_proxy()
                        {
                            tracing::warn!("{moved}");
                            break;
                        }
                    }
                    match proxy.flow_loss() {
                        Err(failure) => self.measured().trouble = Some(failure.text),
                        Ok(Some(FlowLoss::Session(text))) => self.measured().trouble = Some(text),
                        Ok(_) => {}
                    }
                    proxy.drop_session();
                }
                Ok(None) => proxy.drop_session(),
                Err(error) => self.measured().trouble = Some(error.to_string()),
            }
            sleep(CALL_AGAIN).await;
        }
    }

    /// Whether a network is up over which the proxy may answer.
    fn is_online(&self, proxy: &ProxyClient) -> bool {
        proxy.needs_no_link() || self.links.borrow().iter().any(Link::is_usable)
    }

    /// Why there is no session, if so.
    pub fn session_error(&self) -> Option<String> {
        self.measured().trouble.clone()
    }

    /// Closes the session and informs the proxy.
    pub async fn close(&self) {
        if let StreamRoute::Proxy(proxy) = &self.to {
            proxy.close().await;
        }
    }

    /// Sets the links that rest to save energy.
    pub fn set_resting(&self, resting: &BTreeSet<String>) {
        if let StreamRoute::Proxy(proxy) = &self.to
            && let Some(device) = proxy.device()
        {
            device.set_resting(resting);
        }
    }

    /// The current links as candidates. A link that would carry nothing is stalled.
    pub fn link_candidates(&self, origin: &Url) -> Vec<LinkCandidate> {
        let anywhere = || {
            vec![LinkCandidate {
                name: ANYWHERE.into(),
                class: d2tp_sched::LinkClass::Free,
                rate_bytes_per_s: None,
                metric: 0,
                stalled: false,
                in_use: true,
            }]
        };
        let links = self.links.borrow().clone();
        let usable = |link: &&Link| link.kind != LinkKind::Loopback && link.is_usable();
        let now = BootInstant::now();
        match &self.to {
            StreamRoute::Proxy(proxy) if proxy.needs_no_link() => anywhere(),
            StreamRoute::Origin(_) if is_this_machine(origin.host_str().unwrap_or_default()) => {
                anywhere()
            }
            StreamRoute::Proxy(proxy) => {
                let carried = proxy.carried();
                let mut measured = self.measured();
                let candidate = |link: &Link| {
                    let carrying = carried.get(&link.name);
                    let answers = carrying.is_some_and(|c| c.is_answering == Some(true));
                    let since = match answers {
                        true => *measured
                            .answering_since
                            .entry(link.name.clone())
                            .or_insert(now),
                        false => {
                            measured.answering_since.remove(&link.name);
                            now
                        }
                    };
                    let rate = carrying.and_then(|c| c.rate);
                    let rate = rate.filter(|_| now.since(since) >= RATE_AFTER);
                    candidate_of(link, rate.map(|rate| rate as f64), !answers)
                };
                links.iter().filter(usable).map(candidate).collect()
            }
            StreamRoute::Origin(direct) => {
                let host = origin.host_str().unwrap_or_default();
                let measured = self.measured();
                let candidate = |link: &Link| {
                    let avoided = measured.avoided_until.get(&link.name);
                    let stalled = avoided.is_some_and(|until| *until > now)
                        || is_unanswered(direct.as_ref(), &link.name, host);
                    candidate_of(link, measured.rates.get(&link.name).copied(), stalled)
                };
                links.iter().filter(usable).map(candidate).collect()
            }
        }
    }

    /// The source addresses of this link, while it is usable.
    pub fn egress_link(&self, link: Option<&str>) -> Option<EgressLink> {
        let routed = EgressLink {
            device: None,
            sources: Vec::new(),
        };
        let Some(name) = link.filter(|name| *name != ANYWHERE) else {
            return Some(routed);
        };
        let links = self.links.borrow();
        let link = links.iter().find(|l| l.name == name && l.is_usable())?;
        Some(EgressLink {
            device: Some(link.name.clone()),
            sources: link.source_addresses().collect(),
        })
    }

    /// Avoids a link for a while, because it carries nothing.
    pub fn avoid(&self, link: &str, span: Duration) {
        let until = BootInstant::now().after(span);
        self.measured().avoided_until.insert(link.into(), until);
    }

    /// Counts received bytes, by link if it is known.
    pub fn count(&self, link: Option<&str>, bytes: u64) {
        let counts_itself = matches!(&self.to, StreamRoute::Proxy(proxy) if !proxy.needs_no_link());
        let Some(link) = link.or(Some(ANYWHERE)).filter(|_| !counts_itself) else {
            return;
        };
        let now = BootInstant::now();
        let mut measured = self.measured();
        *measured.bytes.entry(link.into()).or_default() += bytes;
        let (since, sum) = measured.sampled.entry(link.into()).or_insert((now, 0));
        *sum += bytes;
        let span = now.since(*since);
        if span >= RATE_OVER {
            let rate = *sum as f64 / span.as_secs_f64();
            (*since, *sum) = (now, 0);
            // What was read slowly because nobody needed it says nothing of the link.
            let known = measured.rates.entry(link.into()).or_insert(rate);
            *known = if rate > *known {
                rate
            } else {
                0.7 * *known + 0.3 * rate
            };
        }
    }

    /// Payload bytes by link so far.
    pub fn carried(&self) -> BTreeMap<String, u64> {
        let mut carried = self.measured().bytes.clone();
        if let StreamRoute::Proxy(proxy) = &self.to {
            let of_session = proxy.carried().into_iter();
            carried.extend(
                of_session
                    .map(|(name, c)| (name, c.bytes))
                    .filter(|(_, n)| *n > 0),
            );
        }
        carried
    }

    /// Bytes by link since the last call, whoever made it.
    pub fn take_traffic(&self) -> BTreeMap<String, u64> {
        let carried = self.carried();
        let mut measured = self.measured();
        let counted = std::mem::replace(&mut measured.counted, carried.clone());
        let more = carried.into_iter().map(|(name, bytes)| {
            let before = counted.get(&name).copied().unwrap_or(0);
            (name, bytes.saturating_sub(before))
        });
        more.filter(|(_, bytes)| *bytes > 0).collect()
    }

    /// The round trips of links, as the session measured them.
    pub fn round_trips(&self) -> BTreeMap<String, Duration> {
        let StreamRoute::Proxy(proxy) = &self.to else {
            return BTreeMap::new();
        };
        let carried = proxy.carried().into_iter();
        carried
            .filter_map(|(name, c)| Some((name, c.round_trip?)))
            .collect()
    }

    /// Bytes that metered links carried.
    pub fn paid_bytes(&self) -> u64 {
        let links = self.links.borrow().clone();
        let costs = |name: &str| {
            let link = links.iter().find(|link| link.name == name);
            link.is_some_and(|link| link.class.class != CostClass::Free)
        };
        let carried = self.carried();
        carried
            .iter()
            .filter(|(name, _)| costs(name))
            .map(|(_, n)| n)
            .sum()
    }

    /// The delay until another link's first byte arrives.
    pub fn switching(&self) -> SwitchDelay {
        SwitchDelay::measured(self.measured().challenge)
    }

    /// Opens a connection for one request to `origin`.
    pub fn request_conn(
        self: &Arc<StreamTransport>,
        origin: &Url,
        link: Option<String>,
        pays: bool,
    ) -> RequestConn {
        RequestConn {
            transport: self.clone(),
            host: origin.host_str().unwrap_or_default().to_owned(),
            link,
            state: Mutex::new(RequestConnState {
                pays,
                budget: None,
                flow: None,
                peer: None,
            }),
            local_hosts: None,
            status: Arc::default(),
        }
    }
}

/// Whether a connection attempt over `link` for a request to `host` goes unanswered.
fn is_unanswered(dial: &impl Dial, link: &str, host: &str) -> bool {
    let connects = dial.unanswered_connects();
    connects.is_some_and(|connects| connects.contains(link, host))
}

fn candidate_of(link: &Link, rate: Option<f64>, stalled: bool) -> LinkCandidate {
    LinkCandidate {
        name: link.name.clone(),
        class: link.class.class.into(),
        rate_bytes_per_s: rate,
        metric: link.metric().unwrap_or(u32::MAX),
        stalled,
        in_use: false,
    }
}

struct RequestConnState {
    pays: bool,
    budget: Option<u64>,
    flow: Option<Arc<Mutex<Flow>>>,
    peer: Option<IpAddr>,
}

/// The connection of one request.
pub struct RequestConn {
    transport: Arc<StreamTransport>,
    /// The host of the request, before redirects.
    host: String,
    /// The link that the connection is bound to, if any.
    pub link: Option<String>,
    /// The hosts of local networks that the request may lead to; none are the transport's own.
    local_hosts: Option<LocalHosts>,
    state: Mutex<RequestConnState>,
    status: Arc<AtomicU16>,
}

impl RequestConn {
    fn state(&self) -> MutexGuard<'_, RequestConnState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Limits which hosts of local networks the request may lead to.
    pub fn with_local_hosts(mut self, local_hosts: LocalHosts) -> RequestConn {
        self.local_hosts = Some(local_hosts);
        self
    }

    /// The address of the origin that answered last; none through a proxy.
    pub fn peer(&self) -> Option<IpAddr> {
        self.state().peer
    }

    /// Sets whether metered links may carry the request from now on, and the most bytes.
    pub fn set_paying(&self, pays: bool, budget: Option<u64>) {
        let mut state = self.state();
        let limited = pays && budget.is_some();
        if state.pays == pays && !limited && state.budget.is_none() {
            return;
        }
        (state.pays, state.budget) = (pays, budget.filter(|_| pays));
        if let (StreamRoute::Proxy(proxy), Some(flow)) = (&self.transport.to, &state.flow)
            && let Some(device) = proxy.device()
        {
            let flow = flow.lock().unwrap_or_else(PoisonError::into_inner);
            // It counts from when the flow was first told that it may pay.
            let budget = state
                .budget
                .map(|more| device.paid_bytes(&flow).saturating_add(more));
            device.allow_paid(&flow, pays, budget);
        }
    }

    /// Whether the attempt to connect goes unanswered.
    pub fn is_unanswered(&self) -> bool {
        match (&self.transport.to, &self.link) {
            (StreamRoute::Origin(direct), Some(link)) => {
                is_unanswered(direct.as_ref(), link, &self.host)
            }
            _ => false,
        }
    }

    /// Waits until the attempt to connect has gone unanswered for some time.
    pub async fn until_unanswered(&self) {
        if let StreamRoute::Origin(direct) = &self.transport.to
            && let Some(connects) = direct.unanswered_connects()
        {
            let mut changes = connects.changes();
            while !self.is_unanswered() {
                if changes.changed().await.is_err() {
                    break;
                }
            }
            return;
        }
        std::future::pending().await
    }

    /// Avoids the link of the connection for a while, because it does not answer.
    pub fn avoid_link(&self) {
        if let Some(link) = &self.link {
            self.transport.avoid(link, AVOID);
        }
    }

    /// The status of the answer by the origin, or the proxy on its behalf.
    pub fn status(&self) -> Option<StatusCode> {
        StatusCode::from_u16(self.status.load(Ordering::Relaxed)).ok()
    }
}

impl Dial for RequestConn {
    async fn dial(&self, url: &Url, via: &EgressLink) -> Result<Box<dyn ByteStream>, FetchFault> {
        let stream: Box<dyn ByteStream> = match &self.transport.to {
            StreamRoute::Origin(direct) => {
                let local_hosts = self.local_hosts.as_ref();
                let connected = direct.dial_for(&self.host, url, via, local_hosts).await?;
                self.state().peer = Some(connected.peer);
                connected.stream
            }
            StreamRoute::Proxy(proxy) => {
                if proxy.device().is_none()
                    && let Some(error) = self.transport.session_error()
                {
                    return Err(FetchFault::Proxy(error));
                }
                let flow = proxy.open_parallel(|device, flow| {
                    let mut state = self.state();
                    state.flow = Some(flow.clone());
                    if state.pays {
                        let flow = flow.lock().unwrap_or_else(PoisonError::into_inner);
                        device.allow_paid(&flow, true, state.budget);
                    }
                })?;
                match proxy.tunnel() {
                    Some(tunnel) => tunnel.through(flow, url).await?,
                    None => flow,
                }
            }
        };
        Ok(Box::new(StatusReader {
            stream,
            head: Vec::new(),
            status: self.status.clone(),
        }))
    }

    fn mode(&self) -> FetchMode {
        self.transport.mode()
    }

    fn answering_proxy(&self) -> Option<String> {
        match &self.transport.to {
            StreamRoute::Origin(direct) => direct.answering_proxy(),
            StreamRoute::Proxy(proxy) => proxy.answering_proxy(),
        }
    }
}

/// Bytes of a status line up to the end of the status.
const STATUS_BYTES: usize = "HTTP/1.1 200".len();

/// A stream whose status line is parsed while it is read.
struct StatusReader {
    stream: Box<dyn ByteStream>,
    head: Vec<u8>,
    status: Arc<AtomicU16>,
}

impl AsyncRead for StatusReader {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, into);
        let left = STATUS_BYTES - self.head.len();
        if left > 0 {
            let fresh = &into.filled()[before..];
            let fresh = &fresh[..fresh.len().min(left)];
            self.head.extend_from_slice(fresh);
            if self.head.len() == STATUS_BYTES {
                let digits = std::str::from_utf8(&self.head[STATUS_BYTES - 3..]).ok();
                let status = digits.and_then(|digits| digits.parse().ok());
                self.status.store(status.unwrap_or(0), Ordering::Relaxed);
            }
        }
        read
    }
}

impl AsyncWrite for StatusReader {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn what_is_known_of_links_wakes_nobody() {
        let (sender, links) = watch::channel(Arc::new(Vec::new()));
        let tls = crate::fetch::tls::OriginTls::new(None).unwrap();
        let transport = StreamTransport::direct(DirectConnector::new(tls), links);
        sender.send_replace(Arc::new(Vec::new()));
        let news = transport.links();
        assert!(!news.has_changed().unwrap());
        sender.send_replace(Arc::new(Vec::new()));
        assert!(news.has_changed().unwrap());
    }

    #[tokio::test]
    async fn the_status_is_heard_however_it_comes() {
        for step in [1, 5, 64] {
            let (ours, mut theirs) = tokio::io::duplex(1 << 10);
            let status = Arc::new(AtomicU16::new(0));
            let mut reader = StatusReader {
                stream: Box::new(ours),
                head: Vec::new(),
                status: status.clone(),
            };
            theirs
                .write_all(b"HTTP/1.1 404 Not Found\r\n")
                .await
                .unwrap();
            drop(theirs);
            let mut got = Vec::new();
            let mut piece = vec![0; step];
            loop {
                let n = reader.read(&mut piece).await.unwrap();
                if n == 0 {
                    break;
                }
                got.extend_from_slice(&piece[..n]);
            }
            assert_eq!(got, b"HTTP/1.1 404 Not Found\r\n");
            assert_eq!(status.load(Ordering::Relaxed), 404);
        }
    }
}
