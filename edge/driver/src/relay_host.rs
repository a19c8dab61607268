//! Relays that a server provides to its devices: to external addresses, and to devices that listen.
//!
//! ```text
//!  relay_to_address(address) ─▶ RelayHandle: its own UDP socket, so answers are recognized by their port
//!  relay_to_device(key)      ─▶ RelayHandle, and the listener is informed by IncomingCalls::next
//! ```
//!
//! Of a server with several workers each has the relays of its own clients. A call may have its halves in two of them:
//!
//! ```text
//!  caller ─▶ socket ─▶ its worker: may it? ─▶ exchange ─▶ the listener's worker: where is it? ─▶ socket ─▶ listener
//! ```
//!
//! Nothing is queued: datagrams that a socket does not accept now are dropped, and the ends detect
//! that as on any path.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Weak};

use d2tp_session::{
    Addresses, Admission, CallHalf, ForwardTarget, LinkId, PublicKey, RELAY_HEADER_BYTES, RelayId,
    RelayRefusal, SessionId, StreamPathId, unwrap_relayed, wrap_relayed,
};
use d2tp_udp::{BindOptions, LinkSocket, RECV_BUFFER_BYTES, RecvBatch};
use tokio::sync::{mpsc, watch};

use crate::device_sender::put_relayed;
use crate::driver_core::{DriverCore, DriverShared};
use crate::relay_state::{
    AbortOnDrop, CALL_EVENTS_MAX, CallEvent, ExternalRelay, RelayHost, RelayedPackets, put,
};
use crate::source::HostKey;

/// Kernel buffer size in each direction of a relay's socket: enough for a burst, not for a queue.
const SOCKET_BYTES: usize = 256 * 1024; // a guess
/// The number of runs of datagrams read from a relay's socket at once.
const RUNS: usize = 4;

/// The memory charged for a relay to an external address: what is read from its socket at once, and the socket's
/// buffers in the kernel, which counts twice what it is asked for.
const RELAY_BYTES: u64 = (RUNS * RECV_BUFFER_BYTES + 4 * SOCKET_BYTES) as u64;

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

    /// Calls a function with the relays; `None` if the server has stopped.
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

    /// Opens a relay to an external address that the caller has checked. Must be called on a tokio
    /// runtime.
    ///
    /// # Errors
    /// There are too many relays, or no socket can be opened.
    pub fn relay_to_address(&self, to: SocketAddr) -> Result<RelayHandle, RelayError> {
        let local = if to.is_ipv6() {
            SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0))
        } else {
            SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))
        };
        let (id, memory) = self.with(|hosted, core| {
            let client = core.session(self.session).ok_or(RelayRefusal::NoSession)?;
            let mut memory = core.memory().account(client.peer()).charge();
            if !memory.try_resize(RELAY_BYTES) {
                return Err(RelayRefusal::NoMemory);
            }
            Ok((hosted.relays.open(core, self.session)?, memory))
        })?;
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
            _memory: memory,
        };
        self.with(|hosted, _| {
            hosted.external.insert(id, outside);
            Ok(())
        })?;
        Ok(relay)
    }

    /// Opens a relay to a device that listens here.
    ///
    /// # Errors
    /// No device with that key listens, or there are too many relays.
    pub fn relay_to_device(&self, to: HostKey) -> Result<RelayHandle, RelayError> {
        let to = PublicKey(to);
        let (caller, own, worker) = self.with(|hosted, core| {
            let (caller, own) = hosted.relays.begin_call(core, self.session)?;
            Ok((caller, own, core.worker_of(&to)))
        })?;
        // It is closed again if nobody answers.
        let relay = self.handle(own.id);
        let listening = self.shared.worker(worker).ok_or(RelayRefusal::NoSession)?;
        let theirs = answer_call(&listening, caller, own, to)?;
        self.with(|hosted, _| {
            hosted.relays.complete_call(own.id, theirs);
            Ok(())
        })?;
        Ok(relay)
    }

    /// Lets other devices call this one, as long as the returned value exists.
    ///
    /// # Errors
    /// The session is over.
    pub fn listen(&self, callers: Admission) -> Result<IncomingCalls, RelayError> {
        let (tell, calls) = mpsc::channel(CALL_EVENTS_MAX);
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
        // Nobody else reaches the device through its stream.
        let paths = paths.filter(|p| StreamPathId::of(&p.addresses.remote).is_none());
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

/// An open relay. It is closed when this is dropped.
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
        let other = {
            let mut inner = shared.inner.lock();
            let Some(hosted) = &mut inner.relays.host else {
                return;
            };
            hosted.external.remove(&self.id);
            hosted.relays.close(self.id)
        };
        let Some(other) = other else { return };
        if let Some(listening) = shared.worker(other.worker) {
            hang_up(&listening, other.id);
        }
    }
}

/// Opens the half of a call that belongs to a device of this worker, and informs the device.
fn answer_call(
    worker: &DriverShared,
    caller: PublicKey,
    calling: CallHalf,
    to: PublicKey,
) -> Result<CallHalf, RelayRefusal> {
    let mut inner = worker.inner.lock();
    let DriverCore { core, relays, .. } = &mut *inner;
    let hosted = relays.host.as_mut().ok_or(RelayRefusal::NoSession)?;
    let (theirs, listener) = hosted.relays.answer_call(core, caller, calling, to)?;
    let open_calls = hosted.relays.calls(listener);
    // The end of each open call, this one among them, has room behind this event.
    let has_room = |tell: &&mpsc::Sender<_>| tell.capacity() > open_calls;
    let told = hosted.listeners.get(&listener).filter(has_room);
    let news = CallEvent::Call(theirs.id, caller.0);
    if told.is_none_or(|tell| tell.try_send(news).is_err()) {
        hosted.relays.hang_up(theirs.id);
        return Err(RelayRefusal::NobodyListens);
    }
    Ok(theirs)
}

/// Ends the half of a call that belongs to a device of this worker, and informs the device.
fn hang_up(worker: &DriverShared, theirs: RelayId) {
    let mut inner = worker.inner.lock();
    if let Some(hosted) = &mut inner.relays.host
        && let Some(listener) = hosted.relays.hang_up(theirs)
        && let Some(tell) = hosted.listeners.get(&listener)
    {
        // It has room, or the listener has just gone.
        let _ = tell.try_send(CallEvent::HungUp(theirs));
    }
}

/// Incoming calls to a listening device, until this is dropped.
pub struct IncomingCalls {
    shared: Weak<DriverShared>,
    session: SessionId,
    calls: mpsc::Receiver<CallEvent>,
}

impl IncomingCalls {
    /// The next event; `None` if the same session registers again. The future may be dropped
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
        if self.calls.is_closed() {
            // The session has registered again.
            return;
        }
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
        streams,
        ..
    } = inner;
    let Some(hosted) = &mut relaying.host else {
        return;
    };
    let mut bytes = Vec::with_capacity(group.len());
    // All packets of a relay have one destination.
    let mut to = None;
    for datagram in group.chunks_mut(stride) {
        let Some(packet) = unwrap_relayed(datagram) else {
            continue;
        };
        let onward = hosted.relays.forward_from_device(core, id, from, packet);
        // R-RELAY-7
        let onward = onward.filter(|_| hosted.admits(core, id, true, packet.len()));
        match onward {
            Some(ForwardTarget::Outside(_)) => bytes.extend_from_slice(packet),
            Some(ForwardTarget::Device(id, _) | ForwardTarget::Worker(CallHalf { id, .. })) => {
                wrap_relayed(id, packet, &mut bytes);
            }
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
        Some(ForwardTarget::Device(_, at)) => {
            Some(put_relayed(sockets, streams, &at, &bytes, stride))
        }
        Some(ForwardTarget::Worker(CallHalf { worker, id })) => {
            let packets = RelayedPackets { id, bytes, stride };
            relaying.for_workers.push((worker, packets));
            None
        }
        None => None,
    };
    if let Some(Err(error)) = sent {
        // R-RELAY-2: the packet is lost, as on any path.
        tracing::trace!(%error, "a relay drops");
    }
}

/// Sends packets of a call to a device of this worker, whose other half another worker has.
pub(crate) fn deliver(inner: &mut DriverCore, packets: &RelayedPackets) {
    let DriverCore {
        core,
        relays,
        sockets,
        streams,
        ..
    } = inner;
    let hosted = relays.host.as_ref();
    let at = hosted.and_then(|hosted| hosted.relays.forward_from_worker(core, packets.id));
    let Some(at) = at else { return };
    if let Err(error) = put_relayed(sockets, streams, &at, &packets.bytes, packets.stride) {
        // R-RELAY-2
        tracing::trace!(%error, "a relay drops");
    }
}

/// Forwards datagrams from an external address to the device.
async fn return_replies(
    shared: Weak<DriverShared>,
    io: Arc<LinkSocket>,
    id: RelayId,
    target: SocketAddr,
) {
    let mut batch = RecvBatch::with_capacity(RUNS);
    loop {
        if let Err(error) = io.recv(&mut batch).await {
            // The errors of an unconnected socket do not name a destination.
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
            streams,
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
                if !hosted.admits(core, id, false, packet.len()) {
                    continue; // R-RELAY-7
                }
                wrap_relayed(id, packet, &mut bytes);
                to = Some(at);
            }
            let Some(at) = to else { continue };
            let stride = stride + RELAY_HEADER_BYTES;
            if let Err(error) = put_relayed(sockets, streams, &at, &bytes, stride) {
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
