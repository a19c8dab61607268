//! The handle of a flow for programs.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use d2tp_session::{
    ArrivedBytes, FlowEnd, FlowError, FlowId, FlowOptions, FlowRemainder, PathSelection, PublicKey,
    ReadOutcome, ReasonCode, SessionId, Span, Time,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::clock;
use crate::datagrams::{Connection, DatagramError};
use crate::driver_core::{DROPPED, DriverShared, FlowEntry, SourceCursor};
use crate::flow_io::{DatagramSender, FlowHibernated, FlowIo, FlowTakenOver, HibernationSwitch};
use crate::hibernation;
use crate::received_store::{ReceivedStore, StoredFlow};
use crate::relay_host::DeviceRelays;
use crate::source::{HostKey, SendSource};

/// Options with which a flow is opened.
#[derive(Clone, Copy, Debug, Default)]
pub struct FlowSettings {
    /// Priority: 0 is sent first, 7 last.
    pub priority: u8,
    /// Expected size in bytes.
    pub size: Option<u64>,
    /// Time until the flow's deadline; both ends drop the flow afterwards.
    pub within: Option<Duration>,
    /// Whether the sender keeps bytes until the receiver has stored them on disk.
    pub durable: bool,
    /// Whether the server must be able to send at any time: while the device is awake one free path is
    /// kept open for it, with a packet every 25 s. Other flows send nothing while they are idle.
    pub reachable: bool,
    /// Whether OPEN and the first bytes may travel in the SYN of the first handshake: write them,
    /// then give the device its link. A server that allows it
    /// ([`d2tp_session::EndpointConfig::early_data`]) gets them a round trip sooner. They may be
    /// received twice, so only data that may safely be repeated should be sent so.
    pub early: bool,
    /// The paths that carry the written data; the peer decides for its own direction.
    pub route: PathSelection,
}

impl FlowSettings {
    pub(crate) fn options(&self) -> FlowOptions {
        FlowOptions {
            priority: self.priority,
            size: self.size,
            deadline: self.within.map(|d| clock::now() + Span::from(d)),
            durable: self.durable,
            hibernates: true,
            reachable: self.reachable,
            early: self.early,
        }
    }
}

/// A flow: a byte stream in each direction that survives address changes. Dropping it before its
/// end resets the directions that are not over.
pub struct Flow {
    shared: Arc<DriverShared>,
    session: SessionId,
    id: FlowId,
    peer: HostKey,
}

fn error_of(end: FlowEnd) -> io::Error {
    let kind = match end {
        FlowEnd::DeadlinePassed => io::ErrorKind::TimedOut,
        FlowEnd::Reset(_) | FlowEnd::Refused(_) => io::ErrorKind::ConnectionReset,
        FlowEnd::Local(_) => io::ErrorKind::ConnectionAborted,
        FlowEnd::SessionEnded => io::ErrorKind::NotConnected,
        FlowEnd::Complete => io::ErrorKind::UnexpectedEof,
    };
    io::Error::new(kind, end)
}

fn error_of_call(error: FlowError) -> io::Error {
    let kind = match error {
        FlowError::Reset(_) => io::ErrorKind::ConnectionReset,
        FlowError::Stopped(_) | FlowError::Gone => io::ErrorKind::BrokenPipe,
        FlowError::DeadlinePassed => io::ErrorKind::TimedOut,
        FlowError::TooMany => io::ErrorKind::QuotaExceeded,
        FlowError::SessionOver => io::ErrorKind::NotConnected,
    };
    io::Error::new(kind, error)
}

impl Flow {
    pub(crate) fn new(
        shared: Arc<DriverShared>,
        session: SessionId,
        id: FlowId,
        peer: HostKey,
    ) -> Flow {
        Flow {
            shared,
            session,
            id,
            peer,
        }
    }

    fn key(&self) -> (SessionId, FlowId) {
        (self.session, self.id)
    }

    pub(crate) fn flow_id(&self) -> FlowId {
        self.id
    }

    pub(crate) fn session_id(&self) -> SessionId {
        self.session
    }

    /// The session of the flow.
    pub fn connection(&self) -> Connection {
        Connection::new(self.shared.clone(), self.session, PublicKey(self.peer))
    }

    /// The offset of the next byte in this end's direction.
    fn send_end(&self) -> u64 {
        let inner = self.shared.inner.lock();
        let session = inner.core.session(self.session);
        session
            .and_then(|s| s.send_offsets(self.id))
            .map_or(0, |(end, _)| end)
    }

    fn draw_from(&self, source: Arc<dyn SendSource>, base: u64) {
        let next = self.send_end().max(base);
        let mut inner = self.shared.inner.lock();
        let entry = inner.flows.get_mut(&self.key());
        if let Some(entry) = entry.filter(|e| e.end.is_none() && !e.hibernated) {
            entry.source = Some(SourceCursor {
                source,
                base,
                next,
                done: false,
            });
            inner.schedule_source(self.session, self.id);
        }
        drop(inner);
        self.shared.wake();
    }

    /// Keeps in `store` what arrives of the flow from now on, from the next byte that is read, before its peer learns that
    /// it arrived. Returns the offset of that byte.
    pub fn store_received(&self, store: Arc<dyn ReceivedStore>) -> u64 {
        let mut inner = self.shared.inner.lock();
        let session = inner.core.session(self.session);
        let from = session.and_then(|s| s.read_offset(self.id)).unwrap_or(0);
        let stored = StoredFlow::new(store, from);
        inner.stored.insert(self.key(), stored);
        inner.store_received_of(self.key());
        from
    }

    /// Keeps the flow open when the handle is dropped, because the process ends and the flow must
    /// not.
    pub fn leave_open(&self) {
        let mut inner = self.shared.inner.lock();
        if let Some(entry) = inner.flows.get_mut(&self.key()) {
            entry.hibernated = true;
        }
    }

    /// Sets the paths that carry data written from now on.
    pub fn set_route(&self, route: PathSelection) {
        let id = self.id;
        // For a flow that is over there is nothing to do.
        self.shared
            .with(self.session, |s| s.set_path_selection(id, route).is_ok());
    }

    /// Changes the deadline, or removes it, at both ends.
    pub fn set_deadline(&self, within: Option<Duration>) {
        let deadline = within.map(|d| clock::now() + Span::from(d));
        let id = self.id;
        self.shared
            .with(self.session, |s| s.set_deadline(id, deadline));
    }

    /// The number of bytes written so far.
    pub fn written(&self) -> u64 {
        self.send_end()
    }

    /// Ends our direction after the bytes that were written so far. A source gives no more.
    pub fn finish(&self) {
        let id = self.id;
        if let Some(entry) = self.shared.inner.lock().flows.get_mut(&self.key()) {
            entry.source = None;
        }
        self.shared.with(self.session, |s| s.finish(id));
    }

    /// Asks the peer to pause sending because other flows have precedence, or to resume.
    pub fn hold_back(&self, held: bool) {
        let id = self.id;
        self.shared.with(self.session, |s| {
            s.pause(id, held, ReasonCode::QueuedBehind)
        });
    }

    /// The number of bytes that the peer has acknowledged without a gap.
    pub fn acknowledged(&self) -> u64 {
        let inner = self.shared.inner.lock();
        let session = inner.core.session(self.session);
        let offsets = session.and_then(|s| s.send_offsets(self.id));
        offsets.map_or(0, |(_, acknowledged)| acknowledged)
    }

    /// The bytes that have arrived and are not read, and those missing between them.
    pub fn arrived(&self) -> ArrivedBytes {
        let inner = self.shared.inner.lock();
        let session = inner.core.session(self.session);
        session.map(|s| s.arrived(self.id)).unwrap_or_default()
    }

    /// Whether the peer has all that was written, and the end if there is one.
    pub fn is_flushed(&self) -> bool {
        let inner = self.shared.inner.lock();
        let session = inner.core.session(self.session);
        session.is_some_and(|s| s.is_flushed(self.id))
    }

    /// Records that everything read below `offset` is stored on disk, so that the sender need not
    /// keep it.
    pub fn set_durable(&self, offset: u64) {
        let id = self.id;
        self.shared
            .with(self.session, |s| s.set_durable(id, offset));
    }

    /// On a server: whether the device has confirmed the handshake. Until then, data may be a
    /// replay, so actions that must not be repeated have to wait.
    pub fn is_confirmed(&self) -> bool {
        let inner = self.shared.inner.lock();
        let session = inner.core.session(self.session);
        session.is_some_and(|s| !s.is_unconfirmed())
    }

    /// How the flow ended, if it has.
    pub fn end(&self) -> Option<FlowEnd> {
        let inner = self.shared.inner.lock();
        let end = inner.flows.get(&self.key()).and_then(|entry| entry.end);
        // A read may fail because of the deadline before the event of that is handled.
        let by_deadline = || {
            let session = inner.core.session(self.session)?;
            let is_over = session.is_ended_by_deadline(self.id);
            is_over.then_some(FlowEnd::DeadlinePassed)
        };
        end.or_else(by_deadline)
    }

    /// Reads the next bytes without copying them, at most one block; `None` is the end.
    ///
    /// # Errors
    /// The same as those of [`AsyncRead`].
    pub async fn read_chunk(&mut self) -> io::Result<Option<Bytes>> {
        std::future::poll_fn(|cx| self.poll_chunk(cx)).await
    }

    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        let (session, id) = self.key();
        let mut inner = self.shared.inner.lock();
        if inner.was_left(session, id) {
            return Poll::Ready(Err(io::Error::other(FlowHibernated)));
        }
        inner.store_received_of((session, id));
        let mut news = false;
        let read = inner.core.with(session, |s| {
            let read = s.read(id, usize::MAX);
            news = s.has_pending_frames();
            read
        });
        // Reading the last byte may have ended the flow; the task handles the event.
        news |= inner.core.has_events();
        let entry = inner.flows.get_mut(&(session, id));
        let out = match (read, entry) {
            (Ok(Ok(ReadOutcome::Chunk(chunk))), _) => Poll::Ready(Ok(Some(chunk))),
            (Ok(Ok(ReadOutcome::End)), _) => Poll::Ready(Ok(None)),
            (Ok(Ok(ReadOutcome::Pending)), Some(entry)) => {
                entry.reader = Some(cx.waker().clone());
                Poll::Pending
            }
            (
                Ok(Err(FlowError::Gone)) | Err(_),
                Some(FlowEntry {
                    remains: Some(remains),
                    ..
                }),
            ) => Poll::Ready(Ok(remains.pop_front())),
            (Ok(Err(FlowError::Gone)) | Err(_), Some(entry)) => match entry.end {
                Some(FlowEnd::Complete) => Poll::Ready(Ok(None)),
                Some(end) => Poll::Ready(Err(error_of(end))),
                None => {
                    // The core already knows the flow's end, and the event will follow.
                    entry.reader = Some(cx.waker().clone());
                    Poll::Pending
                }
            },
            (Ok(Err(error)), _) => Poll::Ready(Err(error_of_call(error))),
            (_, None) => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        };
        news |= out.is_ready() && hibernation::on_read(&mut inner, session, id);
        drop(inner);
        if news {
            self.shared.wake();
        }
        out
    }

    /// Writes bytes without copying them, after waiting for room.
    ///
    /// # Errors
    /// The same as those of [`AsyncWrite`].
    pub async fn write_chunk(&mut self, chunk: Bytes) -> io::Result<()> {
        let mut chunk = Some(chunk);
        std::future::poll_fn(|cx| {
            self.poll_put(cx, |_| chunk.take().expect("asked for once"))
                .map_ok(|_| ())
        })
        .await
    }

    fn poll_put(
        &mut self,
        cx: &mut Context<'_>,
        make: impl FnOnce(usize) -> Bytes,
    ) -> Poll<io::Result<usize>> {
        let (session, id) = self.key();
        let mut inner = self.shared.inner.lock();
        if inner.was_left(session, id) {
            return Poll::Ready(Err(io::Error::other(FlowHibernated)));
        }
        let put = inner.core.with(session, |s| match s.write_room(id) {
            // What is written before the offset is known would be dropped.
            Ok(_) if s.awaits_offset(id) => Ok(None),
            Ok(0) => Ok(None),
            Ok(room) => {
                let bytes = make(room as usize);
                let n = bytes.len();
                s.write(id, bytes).map(|()| Some(n))
            }
            Err(error) => Err(error),
        });
        let out = match put {
            Ok(Ok(Some(n))) => Poll::Ready(Ok(n)),
            Ok(Ok(None)) => {
                if let Some(entry) = inner.flows.get_mut(&(session, id)) {
                    entry.writer = Some(cx.waker().clone());
                }
                Poll::Pending
            }
            Ok(Err(error)) => {
                let end = inner.flows.get(&(session, id)).and_then(|e| e.end);
                Poll::Ready(Err(end.map_or_else(|| error_of_call(error), error_of)))
            }
            Err(_) => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        };
        drop(inner);
        self.shared.wake();
        out
    }
}

impl AsyncRead for Flow {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let (session, id) = self.key();
        let mut inner = self.shared.inner.lock();
        if inner.was_left(session, id) {
            return Poll::Ready(Err(io::Error::other(FlowHibernated)));
        }
        inner.store_received_of((session, id));
        let mut news = false;
        let read = inner.core.with(session, |s| {
            let read = s.read_into(id, buf.initialize_unfilled());
            news = s.has_pending_frames();
            read
        });
        // Reading the last byte may have ended the flow; the task handles the event.
        news |= inner.core.has_events();
        let entry = inner.flows.get_mut(&(session, id));
        let out = match (read, entry) {
            (Ok(Ok(None)), _) => Poll::Ready(Ok(())),
            (Ok(Ok(Some(0))), _) if buf.remaining() == 0 => Poll::Ready(Ok(())),
            (Ok(Ok(Some(0))), Some(entry)) => {
                entry.reader = Some(cx.waker().clone());
                Poll::Pending
            }
            (Ok(Ok(Some(n))), _) => {
                buf.advance(n);
                Poll::Ready(Ok(()))
            }
            (
                Ok(Err(FlowError::Gone)) | Err(_),
                Some(FlowEntry {
                    remains: Some(remains),
                    ..
                }),
            ) => {
                if let Some(piece) = remains.front_mut() {
                    let n = piece.len().min(buf.remaining());
                    buf.put_slice(&piece.split_to(n));
                    if piece.is_empty() {
                        remains.pop_front();
                    }
                }
                Poll::Ready(Ok(()))
            }
            (Ok(Err(FlowError::Gone)) | Err(_), Some(entry)) => match entry.end {
                Some(FlowEnd::Complete) => Poll::Ready(Ok(())),
                Some(end) => Poll::Ready(Err(error_of(end))),
                None => {
                    entry.reader = Some(cx.waker().clone());
                    Poll::Pending
                }
            },
            (Ok(Err(error)), _) => Poll::Ready(Err(error_of_call(error))),
            (_, None) => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        };
        news |= out.is_ready() && hibernation::on_read(&mut inner, session, id);
        drop(inner);
        if news {
            self.shared.wake();
        }
        out
    }
}

impl AsyncWrite for Flow {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        if buf.is_empty() {
            return Poll::Ready(Ok(0));
        }
        self.poll_put(cx, |room| {
            Bytes::copy_from_slice(&buf[..buf.len().min(room)])
        })
    }

    /// Waits until the peer has all written bytes. They are sent without a flush, too.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let id = self.id;
        let mut inner = self.shared.inner.lock();
        let finished = inner
            .core
            .with(self.session, |s| match s.awaits_offset(id) {
                true => false,
                false => {
                    let _ = s.finish(id);
                    true
                }
            });
        if finished == Ok(false)
            && let Some(entry) = inner.flows.get_mut(&(self.session, id))
        {
            entry.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        drop(inner);
        self.shared.wake();
        Poll::Ready(Ok(()))
    }
}

impl FlowIo for Flow {
    fn id(&self) -> u64 {
        self.id.0
    }
    fn peer(&self) -> HostKey {
        self.peer
    }
    fn deadline_left(&self) -> Option<Duration> {
        if self.end() == Some(FlowEnd::DeadlinePassed) {
            return Some(Duration::ZERO);
        }
        let inner = self.shared.inner.lock();
        let deadline: Time = inner.core.session(self.session)?.deadline(self.id)?;
        Some(deadline.since(clock::now()).into())
    }
    fn limit_moved_deadlines(&mut self, max: Duration) {
        self.shared
            .with(self.session, |s| s.limit_moved_deadlines(max.into()));
    }
    fn send_source(&mut self, source: Arc<dyn SendSource>) {
        let base = self.send_end();
        self.draw_from(source, base);
    }
    fn resume_source(&mut self, source: Arc<dyn SendSource>) {
        self.draw_from(source, 0);
    }
    fn allow_hibernation(&mut self, memo: Bytes) {
        hibernation::keep(&mut self.shared.inner.lock(), self.session, self.id, memo);
        // The device may have left before.
        self.shared.wake();
    }
    fn hibernation_switch(&self) -> HibernationSwitch {
        let (shared, (session, id)) = (self.shared.clone(), self.key());
        Box::new(move |memo| {
            let mut inner = shared.inner.lock();
            match memo {
                Some(memo) => hibernation::keep(&mut inner, session, id, memo),
                None => hibernation::forbid(&mut inner, session, id),
            }
            drop(inner);
            shared.wake();
        })
    }
    fn memo(&self) -> Option<Bytes> {
        let inner = self.shared.inner.lock();
        inner.flows.get(&self.key())?.memo.clone()
    }
    fn take_remainder(&mut self) -> Option<FlowRemainder> {
        let mut inner = self.shared.inner.lock();
        inner.flows.get_mut(&self.key())?.remainder.take()
    }
    fn resumed_at(&self) -> Option<u64> {
        let inner = self.shared.inner.lock();
        let session = inner.core.session(self.session)?;
        match session.awaits_claim(self.id) {
            true => None,
            false => session.send_offsets(self.id).map(|(end, _)| end),
        }
    }
    fn peer_stopped_check(&self) -> Box<dyn Fn() -> bool + Send> {
        let (shared, (session, id)) = (self.shared.clone(), self.key());
        Box::new(move || {
            let mut inner = shared.inner.lock();
            if inner
                .flows
                .get(&(session, id))
                .is_some_and(|e| e.end.is_some())
            {
                return true;
            }
            // A hibernated session still has the flow.
            let room = inner.core.with(session, |s| s.write_room(id));
            matches!(room, Ok(Err(FlowError::Stopped(_))))
        })
    }
    fn datagram_sender(&self) -> Option<DatagramSender> {
        let connection = self.connection();
        Some(Box::new(move |context, bytes, expiry| {
            let sent = connection.send_datagram_on(PathSelection::Any, context, bytes, expiry);
            !matches!(sent, Err(DatagramError::SessionEnded(_)))
        }))
    }
    fn session(&self) -> Option<Connection> {
        Some(self.connection())
    }
    fn relays(&self) -> Option<DeviceRelays> {
        DeviceRelays::of(&self.shared, self.session)
    }
    fn reset(&mut self, code: u64) {
        let id = self.id;
        self.shared.with(self.session, |s| {
            s.reset(id, code);
            s.stop(id, code);
        });
    }
    fn poll_finished(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let key = self.key();
        let mut inner = self.shared.inner.lock();
        match inner.flows.get_mut(&key) {
            Some(entry) => match entry.end {
                _ if entry.taken_over => Poll::Ready(Err(io::Error::other(FlowTakenOver))),
                _ if entry.hibernated => Poll::Ready(Err(io::Error::other(FlowHibernated))),
                Some(FlowEnd::Complete) => Poll::Ready(Ok(())),
                Some(end) => Poll::Ready(Err(error_of(end))),
                None => {
                    entry.finisher = Some(cx.waker().clone());
                    Poll::Pending
                }
            },
            None => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        let key = self.key();
        let id = self.id;
        let mut inner = self.shared.inner.lock();
        let Some(entry) = inner.flows.get_mut(&key) else {
            inner.stored.remove(&key);
            return;
        };
        if !entry.hibernated {
            // What a flow receives that is left open is stored until the process ends.
            inner.stored.remove(&key);
        }
        let Some(entry) = inner.flows.get_mut(&key) else {
            return;
        };
        if entry.end.is_some() || entry.hibernated {
            inner.flows.remove(&key);
            hibernation::release_handle(&mut inner, self.session, id);
            return;
        }
        entry.detached = true;
        entry.source = None;
        let _ = inner.core.with(self.session, |s| {
            // Bytes of a finished direction are still delivered; the other direction is reset.
            if !s.is_finishing(id) {
                s.reset(id, DROPPED);
            }
            s.stop(id, DROPPED);
        });
        drop(inner);
        self.shared.wake();
    }
}

impl std::fmt::Debug for Flow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Flow({:#x})", self.id.0)
    }
}

impl DriverShared {
    /// The next flow that a peer opens; `None` once the driver has stopped.
    pub(crate) async fn accept(self: &Arc<DriverShared>) -> Option<Flow> {
        std::future::poll_fn(|cx| self.poll_accept(cx)).await
    }

    /// The next flow that a peer opens; `None` once the driver has stopped.
    pub(crate) fn poll_accept(
        self: &Arc<DriverShared>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Flow>> {
        let mut inner = self.inner.lock();
        if inner.stopped {
            return Poll::Ready(None);
        }
        while let Some((session, id)) = inner.accepted.pop_front() {
            let peer = inner.core.session(session).map(|s| s.peer().0);
            let entry = inner.flows.get_mut(&(session, id));
            // If the session is over, a flow that was received completely can still be read.
            let left = entry.as_ref().filter(|e| e.remains.is_some());
            let Some(peer) = peer.or(left.and_then(|e| e.opener)) else {
                continue;
            };
            if let Some(entry) = entry {
                entry.unclaimed = false;
            }
            return Poll::Ready(Some(Flow::new(self.clone(), session, id, peer)));
        }
        inner.acceptor = Some(cx.waker().clone());
        Poll::Pending
    }
}
