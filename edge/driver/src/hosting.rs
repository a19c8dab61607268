//! What a server relays for its devices: sockets to addresses outside, calls to devices that listen.
//!
//! ```text
//!  Hosting::reach(address) ─▶ Relay: a UDP socket of its own, so answers are known by their port
//!  Hosting::call(key)      ─▶ Relay, and the listener hears of it by Listening::next
//! ```
//!
//! Nothing is queued: what a socket does not take now is dropped, and the ends notice as on any way.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Weak};

use d2tp_session::{
    Addresses, Admission, ForwardTarget, LinkId, PublicKey, RELAY_HEADER_BYTES, RelayId,
    RelayLimits, RelayRefusal, RelayTable, SessionId, unwrap_relayed, wrap_relayed,
};
use d2tp_udp::{BindOptions, LinkSocket, RecvBatch};
use tokio::sync::{mpsc, watch};

use crate::engine::{Inner, Shared};
use crate::relaying::{Tied, put};
use crate::source::HostKey;

/// Bytes asked of the kernel for each direction of a relay's socket: a burst, not a queue.
const SOCKET_BYTES: usize = 256 * 1024; // a guess
/// Runs of datagrams taken from a relay's socket at once.
const RUNS: usize = 4;

/// Why there is no relay.
#[derive(Debug, thiserror::Error)]
pub enum RelayFault {
    /// It is not to be.
    #[error(transparent)]
    Refused(#[from] RelayRefusal),
    /// No socket could be had.
    #[error("no socket for a relay: {0}")]
    Socket(#[from] d2tp_udp::BindError),
}

/// The relays of a server.
pub(crate) struct Hosted {
    pub(crate) relays: RelayTable,
    outside: BTreeMap<RelayId, Outside>,
    listeners: BTreeMap<SessionId, mpsc::UnboundedSender<CallNews>>,
    /// Counts what may have changed where some device is.
    pub(crate) moved: watch::Sender<u64>,
}

struct Outside {
    io: Arc<LinkSocket>,
    to: SocketAddr,
    _bringing: Tied,
}

impl Hosted {
    pub(crate) fn new(limits: RelayLimits, seed: [u8; 32]) -> Hosted {
        Hosted {
            relays: RelayTable::new(limits, seed),
            outside: BTreeMap::new(),
            listeners: BTreeMap::new(),
            moved: watch::channel(0).0,
        }
    }
}

/// What one device may have relayed.
pub struct Hosting {
    shared: Arc<Shared>,
    session: SessionId,
    moved: watch::Receiver<u64>,
}

impl Hosting {
    pub(crate) fn of(shared: &Arc<Shared>, session: SessionId) -> Option<Hosting> {
        let inner = shared.inner.lock();
        let moved = inner.relaying.hosted.as_ref()?.moved.subscribe();
        Some(Hosting {
            shared: shared.clone(),
            session,
            moved,
        })
    }

    /// Does something with the relays; none if the server stopped meanwhile.
    fn with<R>(
        &self,
        f: impl FnOnce(&mut Hosted, &d2tp_session::Endpoint) -> Result<R, RelayRefusal>,
    ) -> Result<R, RelayRefusal> {
        let mut inner = self.shared.inner.lock();
        let Inner { core, relaying, .. } = &mut *inner;
        let hosted = relaying.hosted.as_mut().ok_or(RelayRefusal::NoSession)?;
        f(hosted, core)
    }

    /// A relay to an address outside, which the caller has judged. Must be called on a runtime.
    ///
    /// # Errors
    /// There are too many, or no socket can be had.
    pub fn reach(&self, to: SocketAddr) -> Result<Relay, RelayFault> {
        let local = if to.is_ipv6() {
            SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0))
        } else {
            SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))
        };
        let id = self.with(|hosted, core| hosted.relays.open(core, self.session))?;
        let relay = self.held(id);
        let io = Arc::new(LinkSocket::bind(&BindOptions {
            send_buffer_bytes: SOCKET_BYTES,
            recv_buffer_bytes: SOCKET_BYTES,
            ..BindOptions::at(local)
        })?);
        let bringing = bring_back(Arc::downgrade(&self.shared), io.clone(), id, to);
        let outside = Outside {
            io,
            to,
            _bringing: Tied(tokio::spawn(bringing)),
        };
        self.with(|hosted, _| {
            hosted.outside.insert(id, outside);
            Ok(())
        })?;
        Ok(relay)
    }

    /// A relay to a device that listens here.
    ///
    /// # Errors
    /// Nobody of that key does, or there are too many.
    pub fn call(&self, to: HostKey) -> Result<Relay, RelayFault> {
        let own = self.with(|hosted, core| {
            let (own, theirs, listener) = hosted.relays.call(core, self.session, PublicKey(to))?;
            let caller = core.session(self.session).map(|s| s.peer().0);
            let told = caller.zip(hosted.listeners.get(&listener));
            let news = |caller| CallNews::Call(theirs, caller);
            if told.is_none_or(|(caller, tell)| tell.send(news(caller)).is_err()) {
                hosted.relays.close(own);
                return Err(RelayRefusal::NobodyListens);
            }
            Ok(own)
        })?;
        Ok(self.held(own))
    }

    /// Others may call this device from now on, for as long as what is returned lives.
    ///
    /// # Errors
    /// The session is over.
    pub fn listen(&self, callers: Admission) -> Result<Listening, RelayFault> {
        let (tell, calls) = mpsc::unbounded_channel();
        self.with(|hosted, core| {
            hosted.relays.listen(core, self.session, callers)?;
            hosted.listeners.insert(self.session, tell);
            Ok(())
        })?;
        Ok(Listening {
            shared: Arc::downgrade(&self.shared),
            session: self.session,
            calls,
        })
    }

    fn held(&self, id: RelayId) -> Relay {
        Relay {
            shared: Arc::downgrade(&self.shared),
            id,
        }
    }

    /// Where the device's paths come from, by their numbers.
    pub fn places(&self) -> BTreeMap<u32, SocketAddr> {
        let inner = self.shared.inner.lock();
        let stats = inner.core.session(self.session).map(|s| s.path_stats());
        let paths = stats.into_iter().flatten();
        paths.map(|p| (p.id.0, p.addresses.remote)).collect()
    }

    /// Ready when the device's places may be others than when this was last called.
    pub async fn moved(&mut self) {
        if self.moved.changed().await.is_err() {
            // The server stopped; its flows end by themselves.
            std::future::pending::<()>().await;
        }
    }
}

/// A relay that is there until this is dropped.
pub struct Relay {
    shared: Weak<Shared>,
    id: RelayId,
}

impl Relay {
    /// Its name on the wire, for the device.
    pub fn id(&self) -> RelayId {
        self.id
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let Some(shared) = self.shared.upgrade() else {
            return;
        };
        let mut inner = shared.inner.lock();
        if let Some(hosted) = &mut inner.relaying.hosted {
            hosted.outside.remove(&self.id);
            if let Some((other, listener)) = hosted.relays.close(self.id)
                && let Some(tell) = hosted.listeners.get(&listener)
            {
                let _ = tell.send(CallNews::HungUp(other));
            }
        }
    }
}

/// What a listener hears from its relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallNews {
    /// The relay's id for the listener, and who calls.
    Call(RelayId, HostKey),
    /// That relay is over.
    HungUp(RelayId),
}

/// A device that may be called until this is dropped.
pub struct Listening {
    shared: Weak<Shared>,
    session: SessionId,
    calls: mpsc::UnboundedReceiver<CallNews>,
}

impl Listening {
    /// What happens next. None when the same session listens anew. May be dropped and called again
    /// without losing a call.
    pub async fn next(&mut self) -> Option<CallNews> {
        self.calls.recv().await
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        let Some(shared) = self.shared.upgrade() else {
            return;
        };
        let mut inner = shared.inner.lock();
        if let Some(hosted) = &mut inner.relaying.hosted {
            hosted.relays.stop_listening(self.session);
            hosted.listeners.remove(&self.session);
        }
    }
}

/// Passes on what a device sent: datagrams of one relay, of `stride` bytes.
pub(crate) fn pass_on(
    inner: &mut Inner,
    id: RelayId,
    from: &Addresses,
    group: &mut [u8],
    stride: usize,
) {
    let Inner {
        core,
        relaying,
        sockets,
        ..
    } = inner;
    let Some(hosted) = &mut relaying.hosted else {
        return;
    };
    let mut bytes = Vec::with_capacity(group.len());
    // One relay leads to one place.
    let mut to = None;
    for datagram in group.chunks_mut(stride) {
        let Some(packet) = unwrap_relayed(datagram) else {
            continue;
        };
        let onward = hosted.relays.forward_from_device(core, id, from, packet);
        match onward {
            Some(ForwardTarget::Outside(_)) => bytes.extend_from_slice(packet),
            Some(ForwardTarget::Device(id, _)) => wrap_relayed(id, packet, &mut bytes),
            None => continue,
        }
        to = onward;
    }
    if hosted.relays.take_moved() {
        hosted.moved.send_modify(|n| *n += 1);
    }
    let sent = match to {
        Some(ForwardTarget::Outside(id)) => hosted.outside.get(&id).map(|out| {
            let to = Addresses {
                link: LinkId(0),
                local: None,
                remote: out.to,
            };
            put(&out.io, &to, &bytes, stride - RELAY_HEADER_BYTES)
        }),
        Some(ForwardTarget::Device(_, at)) => sockets
            .get(&at.link)
            .map(|socket| put(&socket.io, &at, &bytes, stride)),
        None => None,
    };
    if let Some(Err(error)) = sent {
        // R-RELAY-2: lost, as on any way.
        tracing::trace!(%error, "a relay drops");
    }
}

/// Passes on what comes back from outside.
async fn bring_back(shared: Weak<Shared>, io: Arc<LinkSocket>, id: RelayId, target: SocketAddr) {
    let mut batch = RecvBatch::with_capacity(RUNS);
    loop {
        if let Err(error) = io.recv(&mut batch).await {
            // Of a socket that is not connected they are about nobody in particular.
            if !is_passing(&error) {
                tracing::debug!(%error, "a relay's socket failed");
                return;
            }
            continue;
        }
        let Some(shared) = shared.upgrade() else {
            return;
        };
        let mut inner = shared.inner.lock();
        let Inner {
            core,
            relaying,
            sockets,
            ..
        } = &mut *inner;
        let Some(hosted) = &mut relaying.hosted else {
            return;
        };
        for run in batch.received().filter(|run| run.from == target) {
            let stride = run.stride.max(1);
            let mut bytes = Vec::with_capacity(run.data.len());
            let mut to = None;
            for packet in run.data.chunks(stride) {
                let Some(at) = hosted.relays.forward_to_device(core, id, packet) else {
                    continue;
                };
                wrap_relayed(id, packet, &mut bytes);
                to = Some(at);
            }
            if let Some(at) = to
                && let Some(socket) = sockets.get(&at.link)
                && let Err(error) = put(&socket.io, &at, &bytes, stride + RELAY_HEADER_BYTES)
            {
                tracing::trace!(%error, "a relay drops");
            }
        }
    }
}

fn is_passing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::Interrupted
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable
    )
}
