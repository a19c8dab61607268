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
    RelayRefusal, SessionId, unwrap_relayed, wrap_relayed,
};
use d2tp_udp::{BindOptions, LinkSocket, RecvBatch};
use tokio::sync::{mpsc, watch};

use crate::driver_core::{DriverCore, DriverShared};
use crate::relay_state::{AbortOnDrop, CallEvent, ExternalRelay, RelayHost, put};
use crate::source::HostKey;

/// Kernel buffer size in each direction of a relay's socket: enough for a burst, not for a queue.
const SOCKET_BYTES: usize = 256 * 1024; // a guess
/// Runs of datagrams read from a relay's socket at once.
const RUNS: usize = 4;

/// Why a relay was not opened.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// The limits or the listener do not allow it.
    #[error(transparent)]
    Refused(#[from] RelayRefusal),
    /// No socket could be opened.
    #[error("no socket for a relay: {0}")]
    Socket(#[from] d2tp_udp::BindError),
}

/// The relays of one device.
pub struct DeviceRelays {
    shared: Arc<DriverShared>,
    session: SessionId,
    moved: watch::Receiver<u64>,
}

impl DeviceRelays {
    pub(crate) fn of(shared: &Arc<DriverShared>, session: SessionId) -> Option<DeviceRelays> {
        let inner = shared.inner.lock();
        let moved = inner.relays.host.as_ref()?.addresses_changed.subscribe();
        Some(DeviceRelays {
            shared: shared.clone(),
            session,
            moved,
        })
    }

    /// Calls a function with the relays; none if the server has stopped.
    fn with<R>(
        &self,
        f: impl FnOnce(&mut RelayHost, &d2tp_session::Endpoint) -> Result<R, RelayRefusal>,
    ) -> Result<R, RelayRefusal> {
        let mut inner = self.shared.inner.lock();
        let DriverCore {
            core,
            relays: relaying,
            ..
        } = &mut *inner;
        let hosted = relaying.host.as_mut().ok_or(RelayRefusal::NoSession)?;
        f(hosted, core)
    }

    /// A relay to an address outside, which the caller has judged. Must be called on a runtime.
    ///
    /// # Errors
    /// There are too many, or no socket can be had.
    pub fn relay_to_address(&self, to: SocketAddr) -> Result<RelayHandle, RelayError> {
        let local = if to.is_ipv6() {
            SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0))
        } else {
            SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))
        };
        let id = self.with(|hosted, core| hosted.relays.open(core, self.session))?;
        let relay = self.handle(id);
        let io = Arc::new(LinkSocket::bind(&BindOptions {
            send_buffer_bytes: SOCKET_BYTES,
            recv_buffer_bytes: SOCKET_BYTES,
            ..BindOptions::at(local)
        })?);
        let bringing = return_replies(Arc::downgrade(&self.shared), io.clone(), id, to);
        let outside = ExternalRelay {
            io,
            to,
            _return_task: AbortOnDrop(tokio::spawn(bringing)),
        };
        self.with(|hosted, _| {
            hosted.external.insert(id, outside);
            Ok(())
        })?;
        Ok(relay)
    }

    /// A relay to a device that listens here.
    ///
    /// # Errors
    /// Nobody of that key does, or there are too many.
    pub fn relay_to_device(&self, to: HostKey) -> Result<RelayHandle, RelayError> {
        let own = self.with(|hosted, core| {
            let (own, theirs, listener) = hosted.relays.call(core, self.session, PublicKey(to))?;
            let caller = core.session(self.session).map(|s| s.peer().0);
            let told = caller.zip(hosted.listeners.get(&listener));
            let news = |caller| CallEvent::Call(theirs, caller);
            if told.is_none_or(|(caller, tell)| tell.send(news(caller)).is_err()) {
                hosted.relays.close(own);
                return Err(RelayRefusal::NobodyListens);
            }
            Ok(own)
        })?;
        Ok(self.handle(own))
    }

    /// Lets other devices call this one, for as long as the returned value lives.
    ///
    /// # Errors
    /// The session is over.
    pub fn listen(&self, callers: Admission) -> Result<IncomingCalls, RelayError> {
        let (tell, calls) = mpsc::unbounded_channel();
        self.with(|hosted, core| {
            hosted.relays.listen(core, self.session, callers)?;
            hosted.listeners.insert(self.session, tell);
            Ok(())
        })?;
        Ok(IncomingCalls {
            shared: Arc::downgrade(&self.shared),
            session: self.session,
            calls,
        })
    }

    fn handle(&self, id: RelayId) -> RelayHandle {
        RelayHandle {
            shared: Arc::downgrade(&self.shared),
            id,
        }
    }

    /// The addresses that the device's paths come from, by path id.
    pub fn observed_addresses(&self) -> BTreeMap<u32, SocketAddr> {
        let inner = self.shared.inner.lock();
        let stats = inner.core.session(self.session).map(|s| s.path_stats());
        let paths = stats.into_iter().flatten();
        paths.map(|p| (p.id.0, p.addresses.remote)).collect()
    }

    /// Ready when the device's addresses may have changed since the last call.
    pub async fn addresses_changed(&mut self) {
        if self.moved.changed().await.is_err() {
            // The server stopped; its flows end by themselves.
            std::future::pending::<()>().await;
        }
    }
}

/// An open relay, which is closed when this is dropped.
pub struct RelayHandle {
    shared: Weak<DriverShared>,
    id: RelayId,
}

impl RelayHandle {
    /// The relay's id on the wire.
    pub fn id(&self) -> RelayId {
        self.id
    }
}

impl Drop for RelayHandle {
    fn drop(&mut self) {
        let Some(shared) = self.shared.upgrade() else {
            return;
        };
        let mut inner = shared.inner.lock();
        if let Some(hosted) = &mut inner.relays.host {
            hosted.external.remove(&self.id);
            if let Some((other, listener)) = hosted.relays.close(self.id)
                && let Some(tell) = hosted.listeners.get(&listener)
            {
                let _ = tell.send(CallEvent::HungUp(other));
            }
        }
    }
}

/// Incoming calls to a listening device, until this is dropped.
pub struct IncomingCalls {
    shared: Weak<DriverShared>,
    session: SessionId,
    calls: mpsc::UnboundedReceiver<CallEvent>,
}

impl IncomingCalls {
    /// The next event. None when the same session registers anew. May be dropped and called again
    /// without losing an event.
    pub async fn next(&mut self) -> Option<CallEvent> {
        self.calls.recv().await
    }
}

impl Drop for IncomingCalls {
    fn drop(&mut self) {
        let Some(shared) = self.shared.upgrade() else {
            return;
        };
        let mut inner = shared.inner.lock();
        if let Some(hosted) = &mut inner.relays.host {
            hosted.relays.stop_listening(self.session);
            hosted.listeners.remove(&self.session);
        }
    }
}

/// Forwards a device's datagrams of one relay, of `stride` bytes each.
pub(crate) fn forward(
    inner: &mut DriverCore,
    id: RelayId,
    from: &Addresses,
    group: &mut [u8],
    stride: usize,
) {
    let DriverCore {
        core,
        relays: relaying,
        sockets,
        ..
    } = inner;
    let Some(hosted) = &mut relaying.host else {
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
        hosted.addresses_changed.send_modify(|n| *n += 1);
    }
    let sent = match to {
        Some(ForwardTarget::Outside(id)) => hosted.external.get(&id).map(|out| {
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

/// Forwards datagrams from outside to the device.
async fn return_replies(
    shared: Weak<DriverShared>,
    io: Arc<LinkSocket>,
    id: RelayId,
    target: SocketAddr,
) {
    let mut batch = RecvBatch::with_capacity(RUNS);
    loop {
        if let Err(error) = io.recv(&mut batch).await {
            // Of a socket that is not connected they are about nobody in particular.
            if !is_transient(&error) {
                tracing::debug!(%error, "a relay's socket failed");
                return;
            }
            continue;
        }
        let Some(shared) = shared.upgrade() else {
            return;
        };
        let mut inner = shared.inner.lock();
        let DriverCore {
            core,
            relays: relaying,
            sockets,
            ..
        } = &mut *inner;
        let Some(hosted) = &mut relaying.host else {
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

fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::Interrupted
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable
    )
}
