//! Sessions that the server relays, beside the one with the server: with another device, or with an
//! origin that supports D2TP.
//!
//! ```text
//!  Device::call(key)      RELAY key  ──▶ server ──▶ the device that listens     kept while called
//!  Device::reach(address) RELAY host:port ──▶ server ──▶ origin                 and directly; the
//!                                                                relay is closed when a direct path works
//! ```
//!
//! A relay is a flow to the server that stays open. Its answer names the relay, and lines follow
//! with the addresses at which the server sees this device (`docs/proxy.md`).

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use d2tp_session::{
    PathId, PathStats, PublicKey, RelayId, Rendezvous, Session, SessionEnd, SessionId, Time,
};
use tokio::io::AsyncWriteExt;
use tokio::sync::{broadcast, watch};

use crate::address::ServerAddress;
use crate::clock;
use crate::datagrams::Connection;
use crate::device::{Device, EPOCHS};
use crate::driver_core::{DriverError, DriverShared, FlowEntry};
use crate::flow::{Flow, FlowSettings};
use crate::relay_dispatch::update_rendezvous;
use crate::relay_state::{AbortOnDrop, PeerSession};
use crate::secrets::seed;
use crate::server::CLOSE_GRACE;
use crate::server_lookup::server_addresses;

/// The most bytes of the head of a server's answer.
const ANSWER_BYTES_MAX: usize = 16 * 1024;
/// How long a direct path to an origin must work before the relay is released.
const RELAY_KEPT: Duration = Duration::from_secs(10); // a guess: longer than an unstable path lasts
/// The interval between attempts to get a relay again, at first and at most.
const AGAIN_FIRST: Duration = Duration::from_millis(500);
const AGAIN_MAX: Duration = Duration::from_secs(30);

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The server refused, with an HTTP status and an explanation.
    #[error("the proxy refuses ({status}): {text}")]
    Refused {
        /// Status code, as in HTTP.
        status: u16,
        /// The explanation, for users.
        text: String,
    },
    /// The session with the server failed.
    #[error("cannot ask the proxy: {0}")]
    ServerUnavailable(#[from] std::io::Error),
    /// The session could not be opened.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// The handle by which a device's tasks make requests to its server.
#[derive(Clone)]
pub(crate) struct ServerHandle {
    pub(crate) shared: Weak<DriverShared>,
    pub(crate) session: SessionId,
    pub(crate) peer: [u8; 32],
}

/// A flow to the server whose answer is a sequence of lines.
pub(crate) struct ServerRequest {
    flow: Flow,
    text: Vec<u8>,
    /// The head of the answer.
    head: String,
}

impl ServerHandle {
    /// Sends a request, and waits for the head of the answer.
    pub(crate) async fn request(&self, request: &str) -> Result<ServerRequest, CallError> {
        let gone = || std::io::Error::from(std::io::ErrorKind::NotConnected);
        let shared = self.shared.upgrade().ok_or_else(gone)?;
        let settings = FlowSettings {
            reachable: true,
            ..FlowSettings::default()
        };
        let mut flow = shared.open(self.session, self.peer, settings)?;
        drop(shared);
        flow.write_all(request.as_bytes()).await?;
        let mut text: Vec<u8> = Vec::new();
        let end = loop {
            if let Some(at) = text.windows(4).position(|w| w == b"\r\n\r\n") {
                break at + 4;
            }
            match flow.read_chunk().await? {
                Some(chunk) if text.len() < ANSWER_BYTES_MAX => text.extend_from_slice(&chunk),
                _ => return Err(std::io::Error::from(std::io::ErrorKind::InvalidData).into()),
            }
        };
        let head = String::from_utf8_lossy(&text[..end]).into_owned();
        text.drain(..end);
        let status = head.split(' ').nth(1).and_then(|s| s.parse().ok());
        match status {
            Some(200) => Ok(ServerRequest { flow, text, head }),
            status => {
                while let Ok(Some(chunk)) = flow.read_chunk().await
                    && text.len() < ANSWER_BYTES_MAX
                {
                    text.extend_from_slice(&chunk);
                }
                Err(CallError::Refused {
                    status: status.unwrap_or(0),
                    text: String::from_utf8_lossy(&text).trim().to_owned(),
                })
            }
        }
    }
}

impl ServerRequest {
    /// The relay that the answer names.
    pub(crate) fn relay(&self) -> Option<RelayId> {
        let mut fields = self.head.split("\r\n").filter_map(|f| f.split_once(": "));
        fields
            .find(|(name, _)| name.eq_ignore_ascii_case("relay"))?
            .1
            .parse()
            .ok()
    }

    /// The next line; `None` if the server ended the flow or sent something else.
    pub(crate) async fn line(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.text.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.text.drain(..=end).collect();
                return Some(String::from_utf8_lossy(&line[..end]).into_owned());
            }
            if self.text.len() > ANSWER_BYTES_MAX {
                return None;
            }
            self.text
                .extend_from_slice(&self.flow.read_chunk().await.ok()??);
        }
    }
}

/// Handles a line that any of these flows may carry: the address at which the server sees a path.
pub(crate) fn handle_seen_line(shared: &Arc<DriverShared>, line: &str) {
    let mut words = line.split(' ');
    if let (Some("seen"), Some(path), Some(at)) = (words.next(), words.next(), words.next())
        && let (Ok(path), Ok(at)) = (path.parse(), at.parse())
    {
        let mut inner = shared.inner.lock();
        inner.relays.set_observed_address(PathId(path), at);
        update_rendezvous(&mut inner, clock::now());
        drop(inner);
        shared.wake();
        shared.notify_activity();
    }
}

/// A session with another host, beside the one with the server. It is closed when this is dropped.
pub struct Peer {
    shared: Arc<DriverShared>,
    session: SessionId,
    key: [u8; 32],
    direct: watch::Receiver<bool>,
    events: broadcast::Sender<(Time, d2tp_session::SessionEvent)>,
    _relay_task: AbortOnDrop,
}

impl Device {
    /// Calls a device that listens at this device's server. Packets are relayed by the server at
    /// first, and sent directly as soon as there is a direct path.
    ///
    /// # Errors
    /// The server refuses: no device with that key listens to this one, or it does not relay.
    pub async fn call(&self, peer: PublicKey) -> Result<Peer, CallError> {
        let server = self.to_server();
        let request = format!("RELAY {peer} HTTP/1.1\r\nHost: {peer}\r\n\r\n");
        let asked = server.request(&request).await?;
        let punch = seed()[..8].try_into().expect("eight of 32 bytes");
        let beside = Rendezvous::caller(punch);
        self.open_peer_session(peer, beside, true, request, Some(asked))
    }

    /// Begins a session with an origin that supports D2TP: relayed by this device's server at
    /// first, and directly as soon as that works, which may be at once.
    ///
    /// # Errors
    /// The origin's name has no address.
    pub async fn connect_origin(&self, origin: &ServerAddress) -> Result<Peer, CallError> {
        let host = &origin.host;
        let found = server_addresses(host, origin.port).await;
        let addresses: Vec<SocketAddr> = found
            .map_err(|cause| DriverError::Resolve {
                host: host.clone(),
                cause,
            })?
            .found
            .into_iter()
            .take(d2tp_session::ADDRESSES_MAX)
            .collect();
        let place = match host.contains(':') {
            true => format!("[{host}]:{}", origin.port),
            false => format!("{host}:{}", origin.port),
        };
        let request = format!("RELAY {place} HTTP/1.1\r\nHost: {place}\r\n\r\n");
        let beside = Rendezvous::origin(addresses);
        self.open_peer_session(origin.key, beside, false, request, None)
    }

    fn open_peer_session(
        &self,
        key: PublicKey,
        rendezvous: Rendezvous,
        is_peer: bool,
        request: String,
        asked: Option<ServerRequest>,
    ) -> Result<Peer, CallError> {
        let server = self.to_server();
        let (shared, _, _) = self.parts();
        let shared = shared.clone();
        let number = u64::from_be_bytes(seed()[..8].try_into().expect("eight of 32 bytes"));
        let now = clock::now();
        let session = shared.inner.lock().core.connect(now, key, number, EPOCHS);
        let mut beside = PeerSession::new(rendezvous);
        if is_peer {
            let settings = FlowSettings {
                reachable: true,
                ..FlowSettings::default()
            };
            beside = beside.with_lines(&shared, shared.open(session, key.0, settings)?);
        }
        let (direct, events) = (beside.direct.subscribe(), beside.events.clone());
        {
            let mut inner = shared.inner.lock();
            if is_peer {
                let punch = beside.rendezvous.punch();
                inner.relays.relay_client.await_punch(punch, session);
            }
            inner.relays.peer_sessions.insert(session, beside);
            update_rendezvous(&mut inner, now);
        }
        shared.wake();
        shared.notify_activity();
        let keeper = RelayKeepalive {
            server,
            session,
            request,
            releases_when_direct: !is_peer,
            direct: direct.clone(),
        };
        Ok(Peer {
            shared,
            session,
            key: key.0,
            direct,
            events,
            _relay_task: AbortOnDrop(tokio::spawn(keeper.keep(asked))),
        })
    }
}

/// Keeps a session's relay alive.
struct RelayKeepalive {
    server: ServerHandle,
    session: SessionId,
    request: String,
    /// Whether the relay may be released while a direct path works.
    releases_when_direct: bool,
    direct: watch::Receiver<bool>,
}

impl RelayKeepalive {
    async fn keep(mut self, mut asked: Option<ServerRequest>) {
        let mut wait = AGAIN_FIRST;
        loop {
            if asked.is_none() {
                if self.releases_when_direct
                    && self.direct.wait_for(|direct| !direct).await.is_err()
                {
                    return;
                }
                match self.server.request(&self.request).await {
                    Ok(answer) => asked = Some(answer),
                    Err(error) => tracing::debug!(%error, "no relay"),
                }
            }
            if let Some(answer) = asked.take()
                && let Some(relay) = answer.relay()
            {
                wait = AGAIN_FIRST;
                if !self.set(Some(relay)) {
                    return;
                }
                self.follow_answer(answer).await;
                self.set(None);
                if let Some(shared) = self.server.shared.upgrade() {
                    shared.inner.lock().relays.relay_client.leave_relay(relay);
                }
            }
            let over = |shared: Arc<DriverShared>| {
                shared.inner.lock().core.session(self.session).is_none()
            };
            if self.server.shared.upgrade().is_none_or(over) {
                return;
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(AGAIN_MAX);
        }
    }

    /// Sets the session's relay. Returns false if the session is over.
    fn set(&self, relay: Option<RelayId>) -> bool {
        let Some(shared) = self.server.shared.upgrade() else {
            return false;
        };
        let mut inner = shared.inner.lock();
        let relaying = &mut inner.relays;
        let Some(beside) = relaying.peer_sessions.get_mut(&self.session) else {
            return false;
        };
        beside.rendezvous.set_relay(relay);
        beside.relay = relay;
        if let Some(relay) = relay {
            relaying.relay_client.use_relay(relay, self.server.session);
        }
        update_rendezvous(&mut inner, clock::now());
        drop(inner);
        shared.wake();
        shared.notify_activity();
        true
    }

    /// Handles the server's lines until the relay is gone or no longer needed.
    async fn follow_answer(&mut self, mut answer: ServerRequest) {
        loop {
            let mut direct = self.direct.clone();
            let unneeded = async {
                if !self.releases_when_direct {
                    return std::future::pending().await;
                }
                loop {
                    if direct.wait_for(|direct| *direct).await.is_err() {
                        return;
                    }
                    let lost = direct.wait_for(|direct| !direct);
                    if tokio::time::timeout(RELAY_KEPT, lost).await.is_err() {
                        return;
                    }
                }
            };
            tokio::select! {
                line = answer.line() => match (line, self.server.shared.upgrade()) {
                    (Some(line), Some(shared)) => handle_seen_line(&shared, &line),
                    _ => return,
                },
                () = unneeded => {
                    let _ = answer.flow.shutdown().await;
                    return;
                }
            }
        }
    }
}

impl Peer {
    /// Opens a flow. The caller may write to it at once.
    ///
    /// # Errors
    /// The session is over, or too many flows are open.
    pub fn open(&self, settings: FlowSettings) -> Result<Flow, DriverError> {
        self.shared.open(self.session, self.key, settings)
    }

    /// The public key of the peer.
    pub fn key(&self) -> PublicKey {
        PublicKey(self.key)
    }

    /// A handle on the session, which sends and receives datagrams.
    pub fn connection(&self) -> Connection {
        Connection::new(self.shared.clone(), self.session, PublicKey(self.key))
    }

    /// The session's events from now on, each with its time, but for those that a flow can be read or written.
    pub fn events(&self) -> broadcast::Receiver<(Time, d2tp_session::SessionEvent)> {
        self.events.subscribe()
    }

    /// Statistics of the session's paths. Those with an address for which [`RelayId::of`] returns a
    /// relay are relayed by the server.
    pub fn paths(&self) -> Vec<PathStats> {
        let inner = self.shared.inner.lock();
        let session = inner.core.session(self.session);
        session.map(|s| s.path_stats()).unwrap_or_default()
    }

    /// Whether a direct path answers.
    pub fn is_direct(&self) -> bool {
        *self.direct.borrow()
    }

    /// Why the session ended, if it has.
    pub fn ended(&self) -> Option<SessionEnd> {
        self.shared.inner.lock().ended.get(&self.session).cloned()
    }

    /// Closes the session and informs the peer.
    pub async fn close(self) {
        self.shared.with(self.session, |s| s.close(0, "done"));
        tokio::time::sleep(CLOSE_GRACE).await;
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.shared.with(self.session, |s| s.close(0, "done"));
    }
}

impl DriverShared {
    /// Opens a flow of a session.
    pub(crate) fn open(
        self: &Arc<DriverShared>,
        session: SessionId,
        peer: [u8; 32],
        settings: FlowSettings,
    ) -> Result<Flow, DriverError> {
        let mut inner = self.inner.lock();
        let open = |s: &mut Session| {
            let id = s.open(settings.options())?;
            s.set_path_selection(id, settings.route)?;
            Ok(id)
        };
        match inner.core.with(session, open) {
            Ok(Ok(id)) => {
                inner.flows.insert((session, id), FlowEntry::default());
                drop(inner);
                self.wake();
                Ok(Flow::new(self.clone(), session, id, peer))
            }
            Ok(Err(error)) => Err(DriverError::Flow(error)),
            Err(_) => {
                let end = inner.ended.get(&session).cloned();
                Err(DriverError::Session(end.unwrap_or(SessionEnd::Local)))
            }
        }
    }
}
