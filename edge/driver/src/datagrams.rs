//! Unreliable datagrams: small messages for which it matters more to be early than to arrive.
//!
//! ```text
//!  send_datagram ─▶ core's queue (DATAGRAMS_MAX, oldest out) ─▶ any free path
//!  recv_datagram ◀─ inbox (DATAGRAMS_UNREAD_MAX, oldest out) ◀─ engine
//!  ContextInbox ◀── another, for one context alone ◀──────────────┘
//! ```
//!
//! They move between links with the session, and are not sent again when lost; an application may
//! send copies on several paths at once. They never use a gated path, where every byte needs a
//! grant and grants are for flows, so with only a metered link a datagram waits until it expires.
//! Reliable or paid messages need a flow.

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use d2tp_session::{
    DatagramStats, FlowId, PathSelection, PathStats, PublicKey, Session, SessionEnd, SessionId,
    SessionState, Span,
};

use crate::clock;
use crate::datagram_inbox::{DATAGRAMS_UNREAD_MAX, Datagram};
use crate::datagram_source::{DatagramFeed, DatagramSource};
use crate::driver_core::DriverShared;

/// Why a datagram was not sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DatagramError {
    /// The datagram does not fit in one packet, and datagrams are never split.
    #[error("a datagram of {bytes} bytes is too large: {max} fit a packet now")]
    TooBig {
        /// Size of the datagram in bytes.
        bytes: usize,
        /// The largest size that can be sent now.
        max: usize,
    },
    /// The session is over.
    #[error("the session is over: {0}")]
    SessionEnded(SessionEnd),
}

/// The received datagrams of one context of a session: created by [`Connection::context`], until it
/// is dropped.
pub struct ContextInbox {
    connection: Connection,
    context: u64,
}

impl ContextInbox {
    /// Receives the next datagram of the context; `None` when the session is over. At most
    /// [`crate::DATAGRAMS_UNREAD_MAX`] wait to be read; beyond that the oldest is dropped.
    pub async fn recv(&self) -> Option<Bytes> {
        std::future::poll_fn(|cx| {
            let Connection {
                shared, session, ..
            } = &self.connection;
            let mut inner = shared.inner.lock();
            let over = inner.core.session(*session).is_none() || inner.stopped;
            let inbox = inner.inboxes.get_mut(session);
            let own = inbox.and_then(|inbox| inbox.context_inboxes.get_mut(&self.context));
            match own {
                Some(own) => match own.pop() {
                    Some(datagram) => Poll::Ready(Some(datagram.bytes)),
                    None if over => Poll::Ready(None),
                    None => {
                        own.reader = Some(cx.waker().clone());
                        Poll::Pending
                    }
                },
                None => Poll::Ready(None),
            }
        })
        .await
    }
}

impl ContextInbox {
    /// Waits for the next datagrams of the context, and appends all that have come to `datagrams`. False when the session
    /// is over.
    pub async fn recv_all(&self, datagrams: &mut Vec<Bytes>) -> bool {
        let Some(first) = self.recv().await else {
            return false;
        };
        datagrams.push(first);
        let mut inner = self.connection.shared.inner.lock();
        let inbox = inner.inboxes.get_mut(&self.connection.session);
        if let Some(own) = inbox.and_then(|inbox| inbox.context_inboxes.get_mut(&self.context)) {
            datagrams.extend(std::iter::from_fn(|| own.pop()).map(|datagram| datagram.bytes));
        }
        true
    }
}

impl Drop for ContextInbox {
    fn drop(&mut self) {
        let mut inner = self.connection.shared.inner.lock();
        if let Some(inbox) = inner.inboxes.get_mut(&self.connection.session) {
            inbox.context_inboxes.remove(&self.context);
        }
    }
}

/// A session as a whole: its datagrams and statistics, which belong to no flow.
///
/// It is returned by [`crate::Device::connection`], [`crate::Flow::connection`] and
/// [`crate::Server::connections`]. It does not keep the session alive.
///
/// ```
/// # use d2tp_driver::*;
/// # use std::time::Duration;
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> anyhow::Result<()> {
/// # let server = Server::bind(ServerOptions { listen: "127.0.0.1:0".parse()?,
/// #     key: SecretKey::from_bytes([2; 32]), admission: Admission::Anybody, config: EndpointConfig::default() })?;
/// # let device = Device::new(DeviceOptions { key: SecretKey::from_bytes([1; 32]), config: EndpointConfig::default(),
/// #     server: ServerAddress::new("127.0.0.1", server.local_addr().port(), server.public_key()) }).await?;
/// # device.use_default_route()?;
/// # let _flow = { use tokio::io::AsyncWriteExt; let mut f = device.open(FlowSettings::default())?; f.write_all(b"x").await?; f };
/// # let far = server.accept().await.unwrap().connection();
/// let connection = device.connection();
/// // Dropped if it cannot be sent within a fifth of a second.
/// connection.send_datagram(b"where I am now".as_slice().into(), Duration::from_millis(200))?;
/// # if false {
/// let answer = connection.recv_datagram().await;
/// # }
/// # assert_eq!(far.recv_datagram().await.unwrap().bytes, &b"where I am now"[..]);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Connection {
    shared: Arc<DriverShared>,
    session: SessionId,
    peer: PublicKey,
}

impl Connection {
    pub(crate) fn new(
        shared: Arc<DriverShared>,
        session: SessionId,
        peer: PublicKey,
    ) -> Connection {
        Connection {
            shared,
            session,
            peer,
        }
    }

    /// The public key of the peer.
    pub fn peer(&self) -> PublicKey {
        self.peer
    }

    /// Statistics of the session's paths.
    pub fn paths(&self) -> Vec<PathStats> {
        let inner = self.shared.inner.lock();
        let session = inner.core.session(self.session);
        session.map(|s| s.path_stats()).unwrap_or_default()
    }

    /// The largest datagram that can be sent now, in bytes. It changes with the paths in use, so
    /// call this again after [`DatagramError::TooBig`]. About 1,100 bytes always fit.
    pub fn datagram_max(&self) -> Option<usize> {
        let inner = self.shared.inner.lock();
        inner.core.session(self.session).map(|s| s.datagram_max())
    }

    /// The largest datagram that paths carry now, in bytes; `None` while none does, or only metered links do.
    pub fn datagram_max_now(&self) -> Option<usize> {
        let inner = self.shared.inner.lock();
        let session = inner.core.session(self.session)?;
        session.carries_datagrams().then(|| session.datagram_max())
    }

    /// Sends a datagram, and drops it if no free path could take it within `expiry`. Returns at
    /// once.
    ///
    /// At most [`crate::DATAGRAMS_MAX`] wait to be sent; a newer one displaces the oldest. The
    /// results are counted ([`Connection::datagram_stats`]), not reported one by one. Whoever has
    /// more than that at once uses a [`crate::DatagramSource`].
    ///
    /// # Errors
    /// The datagram is too large, or the session is over.
    pub fn send_datagram(&self, bytes: Bytes, expiry: Duration) -> Result<(), DatagramError> {
        self.send_datagram_on(PathSelection::Any, 0, bytes, expiry)
    }

    /// Sends a datagram in a context, a number that distinguishes kinds of datagrams of one
    /// session, on the paths that `route` selects: for example reports on the steadiest path, and
    /// commands on each path. The other end's reader gets one of the copies.
    ///
    /// # Errors
    /// The same as those of [`Connection::send_datagram`].
    ///
    /// # Panics
    /// If the context is not below [`crate::CONTEXTS`], or, with [`PathSelection::Each`], not below
    /// [`crate::CONTEXTS_OF_COPIES`].
    pub fn send_datagram_on(
        &self,
        route: PathSelection,
        context: u64,
        bytes: Bytes,
        expiry: Duration,
    ) -> Result<(), DatagramError> {
        let expires = clock::now() + Span::from(expiry);
        let sent = self.shared.with(self.session, |s| {
            let (len, max) = (bytes.len(), s.datagram_max());
            if len > max {
                return Err(DatagramError::TooBig { bytes: len, max });
            }
            s.send_datagram_on(route, context, bytes, expires);
            Ok(())
        });
        sent.unwrap_or_else(|| Err(DatagramError::SessionEnded(self.end())))
    }

    /// Sends several datagrams in a context, in one turn of the engine; each as
    /// [`Connection::send_datagram`] does. Those that are too large are left out, and their number is returned.
    ///
    /// # Errors
    /// The session is over.
    ///
    /// # Panics
    /// If the context is not below [`crate::CONTEXTS`].
    pub fn send_datagrams(
        &self,
        context: u64,
        datagrams: impl IntoIterator<Item = Bytes>,
        expiry: Duration,
    ) -> Result<usize, DatagramError> {
        let expires = clock::now() + Span::from(expiry);
        let sent = self.shared.with(self.session, |s| {
            let max = s.datagram_max();
            let mut too_big = 0;
            for bytes in datagrams {
                match bytes.len() <= max {
                    true => s.send_datagram(context, bytes, expires),
                    false => too_big += 1,
                }
            }
            too_big
        });
        sent.ok_or_else(|| DatagramError::SessionEnded(self.end()))
    }

    /// Sends the datagrams of a source from now on, in place of an earlier one's, as the session has room. While no path
    /// could take datagrams, they stay with the source.
    pub fn set_datagram_source(&self, source: Arc<dyn DatagramSource>) {
        let mut inner = self.shared.inner.lock();
        if inner.core.session(self.session).is_some() {
            let feed = DatagramFeed::new(source);
            inner.datagram_feeds.insert(self.session, feed);
        }
        drop(inner);
        self.datagrams_ready();
    }

    /// Whether a path could take datagrams now. Metered links do not, where every byte needs a grant and grants are for
    /// flows.
    pub fn carries_datagrams(&self) -> bool {
        let inner = self.shared.inner.lock();
        let session = inner.core.session(self.session);
        session.is_some_and(Session::carries_datagrams)
    }

    /// Whether metered links are all that the session has: datagrams wait, and flows need grants.
    pub fn is_metered(&self) -> bool {
        let inner = self.shared.inner.lock();
        let session = inner.core.session(self.session);
        session.is_some_and(Session::is_metered)
    }

    /// The bytes that may be in flight where metered links are all that the session has; `None` elsewhere.
    pub fn metered_window(&self) -> Option<u64> {
        let inner = self.shared.inner.lock();
        let session = inner.core.session(self.session);
        session.and_then(Session::metered_window)
    }

    /// Whether no path leads to the peer now, or the session is over.
    pub fn has_no_path(&self) -> bool {
        let inner = self.shared.inner.lock();
        let session = inner.core.session(self.session);
        session.is_none_or(|s| s.state() == SessionState::Suspended)
    }

    /// Waits until no path leads to the peer, or the session is over. Nothing wakes the caller before.
    pub async fn until_suspended(&self) {
        self.until_suspension_is(true).await;
    }

    /// Waits until a path leads to the peer; for ever if the session is over. Nothing wakes the caller before.
    pub async fn until_awake(&self) {
        self.until_suspension_is(false).await;
    }

    async fn until_suspension_is(&self, wanted: bool) {
        loop {
            let notified = {
                let mut inner = self.shared.inner.lock();
                let state = inner.core.session(self.session).map(Session::state);
                if state.is_none_or(|state| state == SessionState::Suspended) == wanted {
                    return;
                }
                state.map(|_| {
                    let notice = inner.suspension_notices.entry(self.session).or_default();
                    // Notified from now on, before the lock is released.
                    notice.clone().notified_owned()
                })
            };
            match notified {
                Some(notified) => notified.await,
                None => std::future::pending().await,
            }
        }
    }

    /// How many bytes were written to a flow and not acknowledged yet; none if it is over.
    pub fn unacknowledged(&self, flow: u64) -> Option<u64> {
        let inner = self.shared.inner.lock();
        let session = inner.core.session(self.session)?;
        let (end, acknowledged) = session.send_offsets(FlowId(flow))?;
        Some(end - acknowledged)
    }

    /// Tells the session that its source has datagrams again.
    pub fn datagrams_ready(&self) {
        let mut inner = self.shared.inner.lock();
        inner.fed_sessions.insert(self.session);
        drop(inner);
        self.shared.wake();
    }

    /// Receives the next datagram of the peer; `None` when the session is over.
    ///
    /// At most [`crate::DATAGRAMS_UNREAD_MAX`] wait to be read; beyond that the oldest is dropped.
    /// Only one task at a time may wait here.
    pub async fn recv_datagram(&self) -> Option<Datagram> {
        std::future::poll_fn(|cx| {
            let mut inner = self.shared.inner.lock();
            let over = inner.core.session(self.session).is_none() || inner.stopped;
            if over && !inner.inboxes.contains_key(&self.session) {
                return Poll::Ready(None);
            }
            let inbox = inner.inbox(self.session);
            if let Some(datagram) = inbox.pop() {
                return Poll::Ready(Some(datagram));
            }
            if over {
                return Poll::Ready(None);
            }
            inbox.reader = Some(cx.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Separates the datagrams of this context. They are then read from the returned inbox,
    /// including those that have already arrived. `None` if the context already has a reader, or
    /// the session is over.
    pub fn context(&self, context: u64) -> Option<ContextInbox> {
        self.context_with_room(context, DATAGRAMS_UNREAD_MAX)
    }

    /// Separates the datagrams of this context, of which at most `unread_max` wait to be read; beyond that the oldest is
    /// dropped. Otherwise like [`Connection::context`].
    pub fn context_with_room(&self, context: u64, unread_max: usize) -> Option<ContextInbox> {
        let mut inner = self.shared.inner.lock();
        inner.core.session(self.session)?;
        let inbox = inner.inbox(self.session);
        let is_new = inbox.separate_context(context, unread_max);
        is_new.then(|| ContextInbox {
            connection: self.clone(),
            context,
        })
    }

    /// Counts of sent datagrams, and the number of received ones that were dropped unread.
    pub fn datagram_stats(&self) -> Option<(DatagramStats, u64)> {
        let inner = self.shared.inner.lock();
        let stats = inner.core.session(self.session)?.datagram_stats();
        let dropped = inner
            .inboxes
            .get(&self.session)
            .map_or(0, |inbox| inbox.unread_dropped);
        Some((stats, dropped))
    }

    fn end(&self) -> SessionEnd {
        let inner = self.shared.inner.lock();
        let end = inner.ended.get(&self.session).cloned();
        end.unwrap_or(SessionEnd::Local)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datagram_inbox::DatagramInbox;
    use d2tp_session::{MemoryPool, PublicKey};

    #[test]
    fn an_unread_inbox_keeps_the_newest_and_counts_the_rest() {
        let mut inbox = DatagramInbox::default();
        for n in 0..DATAGRAMS_UNREAD_MAX + 3 {
            inbox.push(n as u64, Bytes::new());
        }
        assert_eq!(inbox.unread.len(), DATAGRAMS_UNREAD_MAX);
        assert_eq!(inbox.unread.front().map(|d| d.context), Some(3));
        assert_eq!(inbox.unread_dropped, 3);
    }

    #[test]
    fn datagrams_without_room_in_memory_are_dropped_and_what_is_read_makes_room() {
        let pool = MemoryPool::new(50_000);
        let mut inbox = DatagramInbox::new(pool.account(PublicKey([1; 32])));
        for _ in 0..100 {
            inbox.push(0, Bytes::from(vec![0; 1_000]));
        }
        assert!(pool.used() <= 10_000 && inbox.unread_dropped > 0);
        assert!(!inbox.separate_context(7, 8) || pool.used() <= 10_000);
        while inbox.pop().is_some() {}
        assert_eq!(pool.used(), 0);
        inbox.push(7, Bytes::from(vec![0; 1_000]));
        assert!(pool.used() >= 1_000);
        drop(inbox);
        assert_eq!(pool.used(), 0);
    }

    #[test]
    fn a_context_that_is_set_apart_takes_what_came_before_and_nothing_else() {
        let mut inbox = DatagramInbox::default();
        for context in [7, 8, 7] {
            inbox.push(context, Bytes::new());
        }
        assert!(inbox.separate_context(7, 3));
        assert!(!inbox.separate_context(7, 3), "it has a reader");
        inbox.push(7, Bytes::new());
        assert_eq!(inbox.context_inboxes[&7].unread.len(), 3);
        inbox.push(7, Bytes::new());
        assert_eq!(inbox.context_inboxes[&7].unread.len(), 3);
        assert_eq!(inbox.context_inboxes[&7].unread_dropped, 1, "it is full");
        assert_eq!(inbox.unread.len(), 1);
    }
}
