//! State that the engine's task and all handles share: the core and the driver's bookkeeping, with
//! one lock.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::Arc;
use std::task::Waker;

use bytes::Bytes;
use d2tp_session::{
    Endpoint, FlowEnd, FlowId, FlowRemainder, LinkId, MemoryCharge, Session, SessionEnd,
    SessionEvent, SessionId, Time, Transmit,
};
use d2tp_udp::LinkSocket;
use parking_lot::Mutex;
use tokio::sync::{Notify, broadcast};

use crate::clock;
use crate::datagram_inbox::DatagramInbox;
use crate::datagram_source::DatagramFeed;
use crate::engine_counts::EngineCounts;
use crate::engine_waker::EngineWaker;
use crate::hibernation_state::HibernationState;
use crate::move_question::MoveQuestion;
use crate::qlog::{Qlog, QlogFeed};
use crate::received_store::StoredFlows;
use crate::refused_clients::RefusedClientLog;
use crate::relay_state::RelayState;
use crate::serial_carriers::SerialCarriers;
use crate::source::{HostKey, SendSource};
use crate::stream_queues::StreamQueues;
use crate::worker_links::WorkerLinks;

/// Why a call of the driver failed.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// The server's name has no address.
    #[error("cannot find the proxy {host}: {cause}. Check the name, or give its address")]
    Resolve {
        /// The server's host name.
        host: String,
        /// The resolver's error.
        cause: io::Error,
    },
    /// No socket could be opened.
    #[error(transparent)]
    Bind(#[from] d2tp_udp::BindError),
    /// A socket that was bound before cannot be used.
    #[error("cannot use a socket that was passed to this process: {0}")]
    Socket(io::Error),
    /// The links of this machine could not be read.
    #[error("cannot read the machine's network links: {0}")]
    Links(String),
    /// The journal cannot be read or written.
    #[error(transparent)]
    Journal(#[from] crate::journal::JournalError),
    /// The session is over.
    #[error("{0}")]
    Session(SessionEnd),
    /// The flow cannot be opened now.
    #[error("{0}")]
    Flow(d2tp_session::FlowError),
}

/// The driver's state of a flow, beside the core's.
#[derive(Default)]
pub(crate) struct FlowEntry {
    pub(crate) reader: Option<Waker>,
    pub(crate) writer: Option<Waker>,
    pub(crate) finisher: Option<Waker>,
    pub(crate) end: Option<FlowEnd>,
    pub(crate) source: Option<SourceCursor>,
    /// Why the flow's source failed; `None` if it has not.
    pub(crate) source_error: Option<String>,
    pub(crate) detached: bool,
    /// What the application needs to resume the flow, if the flow may hibernate.
    pub(crate) memo: Option<Bytes>,
    /// Whether the flow hibernated, so that this handle is over.
    pub(crate) hibernated: bool,
    /// Whether the flow is gone because another node has taken over its session.
    pub(crate) taken_over: bool,
    /// Whether the flow waits to be accepted and has no handle yet.
    pub(crate) unclaimed: bool,
    /// The host that opened the flow, if the peer did.
    pub(crate) opener: Option<HostKey>,
    /// What this process still held of a flow that hibernated because the process stops.
    pub(crate) remainder: Option<FlowRemainder>,
    /// Unread bytes of a flow whose session is over.
    pub(crate) remains: Option<VecDeque<Bytes>>,
    /// The memory charge of the bytes that were not read.
    pub(crate) remains_charge: Option<Arc<MemoryCharge>>,
}

/// The source that a flow sends from, and the position in it.
pub(crate) struct SourceCursor {
    pub(crate) source: Arc<dyn SendSource>,
    /// The flow offset of the source's first byte.
    pub(crate) base: u64,
    /// The flow offset of the next byte to read.
    pub(crate) next: u64,
    pub(crate) done: bool,
}

impl FlowEntry {
    pub(crate) fn wake_all(&mut self) {
        for waker in [&mut self.reader, &mut self.writer, &mut self.finisher] {
            if let Some(waker) = waker.take() {
                waker.wake();
            }
        }
    }
}

/// A socket of the driver, which is a link for the core.
pub(crate) struct DriverSocket {
    pub(crate) io: Arc<LinkSocket>,
    /// Whether the core needs the local address of received datagrams (servers on a wildcard address).
    pub(crate) reports_local: bool,
    /// A batch that the socket has no room for yet.
    pub(crate) unsent: Option<(Transmit, Vec<u8>)>,
    /// Consecutive failed sends with an error of the socket.
    pub(crate) faults: u32,
}

/// The ends of the latest ended sessions, for remaining handles.
#[derive(Default)]
pub(crate) struct SessionEnds(VecDeque<(SessionId, SessionEnd)>);

impl SessionEnds {
    pub(crate) fn push(&mut self, id: SessionId, end: SessionEnd) {
        self.0.truncate(ENDED_KEPT - 1);
        self.0.push_front((id, end));
    }

    pub(crate) fn get(&self, id: &SessionId) -> Option<&SessionEnd> {
        self.0.iter().find(|(of, _)| of == id).map(|(_, end)| end)
    }
}

/// The number of ended sessions whose end is remembered.
const ENDED_KEPT: usize = 1024; // a guess: a handle asks for the end soon

/// The core and the driver's state, under one lock.
pub(crate) struct DriverCore {
    pub(crate) core: Endpoint,
    pub(crate) flows: BTreeMap<(SessionId, FlowId), FlowEntry>,
    pub(crate) sockets: BTreeMap<LinkId, DriverSocket>,
    pub(crate) next_link: u32,
    pub(crate) accepted: VecDeque<(SessionId, FlowId)>,
    pub(crate) acceptor: Option<Waker>,
    pub(crate) ended: SessionEnds,
    pub(crate) accepts: bool,
    pub(crate) stopped: bool,
    /// Whether nothing is received any more, because the next process is to receive it.
    pub(crate) is_deaf: bool,
    pub(crate) gone: Vec<LinkId>,
    /// Payload received and sent by paths whose sockets failed.
    pub(crate) final_payload: BTreeMap<LinkId, (u64, u64)>,
    /// Links whose sockets are closed as soon as their paths have sent their last packets.
    pub(crate) closing: Vec<LinkId>,
    pub(crate) inboxes: BTreeMap<SessionId, DatagramInbox>,
    /// Sources of sessions' datagrams.
    pub(crate) datagram_feeds: BTreeMap<SessionId, DatagramFeed>,
    /// Sessions whose sources may have datagrams.
    pub(crate) fed_sessions: BTreeSet<SessionId>,
    /// Notified when a session is suspended, or awake again; only of sessions whose suspension somebody awaited.
    pub(crate) suspension_notices: BTreeMap<SessionId, Arc<Notify>>,
    pub(crate) qlog: Option<QlogFeed>,
    /// Hibernated sessions.
    pub(crate) hibernation: HibernationState,
    /// Connections that carry packets in place of UDP.
    pub(crate) streams: StreamQueues,
    /// Serial lines of a device.
    pub(crate) serial_links: SerialCarriers,
    /// Relays, and peers reached by them.
    pub(crate) relays: RelayState,
    /// Flows whose sources must be read.
    pub(crate) drawing: BTreeSet<(SessionId, FlowId)>,
    /// Limits the log entries about refused clients.
    pub(crate) refused_clients: RefusedClientLog,
    /// Stores of what arrives.
    pub(crate) stored: StoredFlows,
    /// What the engine did.
    pub(crate) counts: EngineCounts,
    /// The latest request of a device's server to go on at another node ([`crate::session_moves`]).
    pub(crate) move_request: Option<Bytes>,
    /// Questions of devices whether they can go on at another node ([`crate::session_moves`]).
    pub(crate) move_questions: BTreeMap<SessionId, MoveQuestion>,
}

impl DriverCore {
    /// Whether a flow hibernated because the process stops: its bytes are no longer this handle's, even if its session is
    /// still here.
    pub(crate) fn was_left(&self, session: SessionId, flow: FlowId) -> bool {
        self.is_deaf
            && self
                .flows
                .get(&(session, flow))
                .is_some_and(|e| e.hibernated)
    }

    /// Schedules a read of the flow's source in the next turn, because the source is new, there is
    /// room, or the offset changed. A turn then visits only sources that have work.
    pub(crate) fn schedule_source(&mut self, session: SessionId, flow: FlowId) {
        self.drawing.insert((session, flow));
    }

    /// Passes new trace records of the core to the log.
    pub(crate) fn drain_trace(&mut self) {
        if let Some(feed) = &mut self.qlog {
            feed.drain(&mut self.core);
        }
    }

    /// The inbox of a session's datagrams, whose memory is charged to its peer.
    pub(crate) fn inbox(&mut self, id: SessionId) -> &mut DatagramInbox {
        let core = &self.core;
        self.inboxes.entry(id).or_insert_with(|| {
            let peer = core.session(id).map(Session::peer);
            let account = peer.map(|peer| core.memory().account(peer));
            DatagramInbox::new(account.unwrap_or_default())
        })
    }

    /// Hands datagrams of sources to their sessions. Returns whether one would have got more if it had room.
    pub(crate) fn fill_datagrams(&mut self) -> bool {
        if self.fed_sessions.is_empty() {
            return false;
        }
        let now = clock::now();
        let fed: Vec<SessionId> = self.fed_sessions.iter().copied().collect();
        let mut wants_room = false;
        for id in fed {
            let (core, feed) = (&mut self.core, self.datagram_feeds.get_mut(&id));
            let may_have_more = feed.is_some_and(|feed| {
                let filled = core.with(id, |s| feed.fill(now, s));
                wants_room |= feed.had_more;
                filled == Ok(true)
            });
            if !may_have_more {
                self.fed_sessions.remove(&id);
            }
        }
        wants_room
    }

    /// Forgets the source of a session that is over or asleep.
    pub(crate) fn forget_datagram_source(&mut self, id: SessionId) {
        self.datagram_feeds.remove(&id);
        self.fed_sessions.remove(&id);
    }

    /// Wakes those who wait until a session is suspended or awake.
    pub(crate) fn notify_suspension(&self, id: SessionId) {
        if let Some(notice) = self.suspension_notices.get(&id) {
            notice.notify_waiters();
        }
    }

    /// Wakes those who wait until a session is suspended or awake, because it is over or hibernated.
    pub(crate) fn end_suspension_notice(&mut self, id: SessionId) {
        if let Some(notice) = self.suspension_notices.remove(&id) {
            notice.notify_waiters();
        }
    }

    /// Removes the state of a session that hibernated.
    pub(crate) fn on_hibernated(&mut self, id: SessionId) {
        self.end_suspension_notice(id);
        if let Some(mut inbox) = self.inboxes.remove(&id) {
            inbox.wake();
        }
        self.forget_datagram_source(id);
        self.move_questions.remove(&id);
        if let Some(feed) = &mut self.qlog {
            feed.end(id);
        }
    }
}

/// The state shared by the engine's task and all handles.
pub(crate) struct DriverShared {
    pub(crate) inner: Mutex<DriverCore>,
    pub(crate) waker: EngineWaker,
    /// Flows whose sources have new bytes.
    pub(crate) ready_sources: Mutex<BTreeSet<(SessionId, FlowId)>>,
    /// Notified when data moves: for the task that watches a device's links.
    pub(crate) activity: Notify,
    pub(crate) events: broadcast::Sender<(Time, SessionEvent)>,
    /// Notified when the server of a device asked it to go on at another node, or a device asked its server whether
    /// it can.
    pub(crate) move_asked: Arc<Notify>,
    /// The other workers of a server.
    pub(crate) workers: WorkerLinks,
}

impl DriverShared {
    pub(crate) fn new(core: Endpoint, accepts: bool) -> Arc<DriverShared> {
        Arc::new(DriverShared {
            inner: Mutex::new(DriverCore {
                core,
                flows: BTreeMap::new(),
                sockets: BTreeMap::new(),
                next_link: 0,
                accepted: VecDeque::new(),
                acceptor: None,
                ended: SessionEnds::default(),
                accepts,
                stopped: false,
                is_deaf: false,
                gone: Vec::new(),
                final_payload: BTreeMap::new(),
                closing: Vec::new(),
                inboxes: BTreeMap::new(),
                datagram_feeds: BTreeMap::new(),
                fed_sessions: BTreeSet::new(),
                suspension_notices: BTreeMap::new(),
                qlog: None,
                hibernation: HibernationState::default(),
                streams: StreamQueues::default(),
                serial_links: SerialCarriers::default(),
                relays: RelayState::default(),
                drawing: BTreeSet::new(),
                refused_clients: RefusedClientLog::default(),
                stored: StoredFlows::new(),
                counts: EngineCounts::default(),
                move_request: None,
                move_questions: BTreeMap::new(),
            }),
            waker: EngineWaker::new(),
            ready_sources: Mutex::default(),
            activity: Notify::new(),
            events: broadcast::channel(1024).0,
            move_asked: Arc::default(),
            workers: WorkerLinks::default(),
        })
    }

    /// The worker of this server with this index; this one if there is no other.
    pub(crate) fn worker(self: &Arc<Self>, index: u16) -> Option<Arc<DriverShared>> {
        match self.workers.others() {
            Some(workers) => workers.get(usize::from(index))?.upgrade(),
            None => Some(self.clone()),
        }
    }

    /// Wakes the engine's task.
    pub(crate) fn wake(&self) {
        self.waker.wake();
    }

    /// Notifies that the links or their traffic changed.
    pub(crate) fn notify_activity(&self) {
        self.activity.notify_one();
    }

    /// Makes the task set its timer again, because the runtime's clock was stopped.
    pub(crate) fn rearm(&self) {
        self.waker.rearm();
    }

    /// Adds a socket as a link.
    pub(crate) fn add_socket(&self, io: LinkSocket, tells_local: bool) -> LinkId {
        let mut inner = self.inner.lock();
        let id = LinkId(inner.next_link);
        inner.next_link += 1;
        inner.sockets.insert(
            id,
            DriverSocket {
                io: Arc::new(io),
                reports_local: tells_local,
                unsent: None,
                faults: 0,
            },
        );
        drop(inner);
        self.wake();
        id
    }

    /// Logs the events of sessions to `log` from now on.
    pub(crate) fn log_to(&self, log: &Arc<Qlog>) {
        let mut inner = self.inner.lock();
        inner.core.set_trace(clock::now(), Some(log.level()));
        inner.qlog = Some(log.feed());
    }

    /// Calls `f` with a session, and lets the engine send what results.
    pub(crate) fn with<R>(&self, id: SessionId, f: impl FnOnce(&mut Session) -> R) -> Option<R> {
        let r = self.inner.lock().core.with(id, f).ok();
        self.wake();
        r
    }

    /// Ends the task. The caller closes sessions first.
    pub(crate) fn stop(&self) {
        let mut inner = self.inner.lock();
        // The last turn acknowledges nothing else: the next process may read the store from here on.
        inner.store_received();
        inner.stopped = true;
        if let Some(waker) = inner.acceptor.take() {
            waker.wake();
        }
        inner.hibernation.on_stop();
        inner.relays.stop();
        inner.streams.close_all();
        inner.serial_links.clear();
        drop(inner);
        self.wake();
    }
}

/// R-NODE-4: the DATAGRAM context of requests to go on at another node.
pub const MOVE_CONTEXT: u64 = 0x4d0e_71c9; // drawn at random

/// Reset code of a flow whose source failed.
pub(crate) const SOURCE_FAILED: u64 = 0xd100;

/// Reset code of a flow that was dropped before its end.
pub(crate) const DROPPED: u64 = 0xd101;
