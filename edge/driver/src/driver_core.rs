//! What the engine's task and all handles share: the core and the bookkeeping beside it, behind one lock.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;

use bytes::Bytes;
use d2tp_session::{
    Endpoint, FlowEnd, FlowId, LinkId, Session, SessionEnd, SessionEvent, SessionId, Time, Transmit,
};
use d2tp_udp::LinkSocket;
use parking_lot::Mutex;
use tokio::sync::{Notify, broadcast};

use crate::clock;
use crate::datagram_inbox::DatagramInbox;
use crate::hibernation_state::HibernationState;
use crate::qlog::{Qlog, QlogFeed};
use crate::relay_state::RelayState;
use crate::source::{HostKey, SendSource};

/// Why the driver could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// The server's name has no address.
    #[error("cannot find the proxy {host}: {cause}. Check the name, or give its address")]
    Resolve {
        /// The name.
        host: String,
        /// What the resolver said.
        cause: io::Error,
    },
    /// A socket could not be had.
    #[error(transparent)]
    Bind(#[from] d2tp_udp::BindError),
    /// The links of this machine could not be read.
    #[error("cannot read the machine's network links: {0}")]
    Links(String),
    /// What must survive the process cannot be read or written.
    #[error(transparent)]
    Journal(#[from] crate::journal::JournalError),
    /// The session is over.
    #[error("{0}")]
    Session(SessionEnd),
    /// No more flows may be opened now.
    #[error("{0}")]
    Flow(d2tp_session::FlowError),
}

/// What the driver keeps of one flow beside the core.
#[derive(Default)]
pub(crate) struct FlowEntry {
    pub(crate) reader: Option<Waker>,
    pub(crate) writer: Option<Waker>,
    pub(crate) finisher: Option<Waker>,
    pub(crate) end: Option<FlowEnd>,
    pub(crate) source: Option<SourceCursor>,
    /// Why the source failed, if it did.
    pub(crate) source_error: Option<String>,
    pub(crate) detached: bool,
    /// What the application needs to take the flow up again, if it may sleep.
    pub(crate) memo: Option<Bytes>,
    /// The flow sleeps: this handle is over.
    pub(crate) hibernated: bool,
    /// Whether the flow waits to be accepted: nobody has a handle yet.
    pub(crate) unclaimed: bool,
    /// Who opened it, if the peer did.
    pub(crate) opener: Option<HostKey>,
    /// What is left to be read of a session that is over.
    pub(crate) remains: Option<VecDeque<Bytes>>,
}

/// A source a flow sends from.
pub(crate) struct SourceCursor {
    pub(crate) source: Arc<dyn SendSource>,
    /// Flow offset of the source's first byte.
    pub(crate) base: u64,
    /// Flow offset of the next byte to draw.
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

/// A link the driver has a socket on.
pub(crate) struct DriverSocket {
    pub(crate) io: Arc<LinkSocket>,
    /// Tell the core at which of our addresses datagrams arrive (servers on a wildcard address).
    pub(crate) reports_local: bool,
    /// A batch the socket would not take yet.
    pub(crate) unsent: Option<(Transmit, Vec<u8>)>,
    /// Sends in a row that failed in a way that is the socket's own fault.
    pub(crate) faults: u32,
}

/// Why sessions ended: the last ones, for whoever still has a handle.
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

/// Ended sessions whose end can still be asked for.
const ENDED_KEPT: usize = 1024; // a guess: a handle that asks does so at once

/// Core and bookkeeping, behind the one lock.
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
    pub(crate) gone: Vec<LinkId>,
    /// What paths had carried when their sockets failed: payload received and sent.
    pub(crate) final_payload: BTreeMap<LinkId, (u64, u64)>,
    /// Links whose sockets go as soon as their paths have said their last word.
    pub(crate) closing: Vec<LinkId>,
    pub(crate) inboxes: BTreeMap<SessionId, DatagramInbox>,
    pub(crate) qlog: Option<QlogFeed>,
    /// Sessions at rest.
    pub(crate) hibernation: HibernationState,
    /// What of its datagrams is not the core's.
    pub(crate) relays: RelayState,
    /// Flows whose sources are to be asked for bytes.
    pub(crate) drawing: BTreeSet<(SessionId, FlowId)>,
}

impl DriverCore {
    /// The flow's source is asked for bytes in the next turn: it is new, there is room for more, or
    /// the place changed. So a turn costs what has something to give, not what there is.
    pub(crate) fn schedule_source(&mut self, session: SessionId, flow: FlowId) {
        self.drawing.insert((session, flow));
    }

    /// Hands on to the log what the core told since the last time.
    pub(crate) fn drain_trace(&mut self) {
        if let Some(feed) = &mut self.qlog {
            feed.drain(&mut self.core);
        }
    }

    /// A session is its record from now on: what was kept for it awake goes.
    pub(crate) fn on_hibernated(&mut self, id: SessionId) {
        if let Some(mut inbox) = self.inboxes.remove(&id) {
            inbox.wake();
        }
        if let Some(feed) = &mut self.qlog {
            feed.end(id);
        }
    }
}

/// What the task and all handles share.
pub(crate) struct DriverShared {
    pub(crate) inner: Mutex<DriverCore>,
    pub(crate) task: Mutex<Option<Waker>>,
    /// Flows whose sources said that they have bytes again.
    pub(crate) ready_sources: Mutex<BTreeSet<(SessionId, FlowId)>>,
    pub(crate) woken: AtomicBool,
    pub(crate) rearm: AtomicBool,
    /// Something moved: for who looks after a device's links.
    pub(crate) activity: Notify,
    pub(crate) events: broadcast::Sender<(Time, SessionEvent)>,
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
                gone: Vec::new(),
                final_payload: BTreeMap::new(),
                closing: Vec::new(),
                inboxes: BTreeMap::new(),
                qlog: None,
                hibernation: HibernationState::default(),
                relays: RelayState::default(),
                drawing: BTreeSet::new(),
            }),
            task: Mutex::new(None),
            ready_sources: Mutex::default(),
            woken: AtomicBool::new(false),
            rearm: AtomicBool::new(false),
            activity: Notify::new(),
            events: broadcast::channel(1024).0,
        })
    }

    /// The task has something to do.
    pub(crate) fn wake(&self) {
        if !self.woken.swap(true, Ordering::AcqRel)
            && let Some(waker) = self.task.lock().as_ref()
        {
            waker.wake_by_ref();
        }
    }

    /// The links or what goes over them changed.
    pub(crate) fn notify_activity(&self) {
        self.activity.notify_one();
    }

    /// The runtime's clock stood still: the task must set its timer anew.
    pub(crate) fn rearm(&self) {
        self.rearm.store(true, Ordering::Release);
        self.wake();
    }

    /// Adds a socket as a link of its own.
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

    /// Tells `log` what sessions do from now on.
    pub(crate) fn log_to(&self, log: &Arc<Qlog>) {
        let mut inner = self.inner.lock();
        inner.core.set_trace(clock::now(), Some(log.level()));
        inner.qlog = Some(log.feed());
    }

    /// Does something with a session and has the result sent.
    pub(crate) fn with<R>(&self, id: SessionId, f: impl FnOnce(&mut Session) -> R) -> Option<R> {
        let r = self.inner.lock().core.with(id, f).ok();
        self.wake();
        r
    }

    /// Ends the task; sessions are closed first by whoever calls.
    pub(crate) fn stop(&self) {
        let mut inner = self.inner.lock();
        inner.stopped = true;
        if let Some(waker) = inner.acceptor.take() {
            waker.wake();
        }
        inner.hibernation.on_stop();
        inner.relays.stop();
        drop(inner);
        self.wake();
    }
}

/// Reset code of a flow whose source failed.
pub(crate) const SOURCE_FAILED: u64 = 0xd100;

/// Reset code of a flow that was dropped before its end.
pub(crate) const DROPPED: u64 = 0xd101;
