//! Sessions that move to another node because theirs asks for it, or because the device found a nearer one.
//!
//! ```text
//!  device                         this node                          another node, with the same store
//!    │ ─── DATAGRAM: may I move? ────▶ │ (if the device found it nearer)
//!    │ ◀── DATAGRAM: move ──────────── │ as the answer; if this node ends, again each second
//!    │ ─── probes, SYN ────────────────────────────────────────────────▶ │ claims the session
//!    │ ◀── data ───────────────────── │ until the other one answers
//!    │ ◀── SYN+ACK, data ─────────────────────────────────────────────── │
//!                                    │ looks it up: another node owns it; it ends here
//! ```
//!
//! The request is a DATAGRAM in a context of its own, so it is authenticated, and a device that does not know it
//! leaves it unread. Its payload is the address of the node that is to be used, or nothing. A device's question is in the
//! same context and names a node; it is answered once all flows can go on there, or not at all.

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use d2tp_session::{FlowId, PathSelection, Session, SessionId, SessionState, Span};
use tokio::time::{Instant, sleep};

use crate::clock;
use crate::driver_core::{DriverCore, DriverShared, MOVE_CONTEXT};
use crate::hibernation;
use crate::server::Server;
use crate::shared_records;

/// How often a server that is to be left asks again.
pub const MOVE_AGAIN_AFTER: Duration = Duration::from_secs(1);
/// How long a device's question waits until all flows of its session can go on elsewhere: until their copies are whole,
/// and the shared store has them. The device compares its nodes again after a minute.
const QUESTION_WAITS: Span = Span::from_secs(30); // a guess: half of that minute
/// The interval between looks at questions that wait, and at sessions that may have moved.
const QUESTIONS_LOOK_EVERY: Duration = Duration::from_millis(500); // a guess: a lookup for each session that moved
/// For how long after an answer sessions that may have moved are looked up: what a device needs to go on elsewhere.
const MOVED_WITHIN: Duration = Duration::from_secs(10); // a guess
/// How long a request waits for a path that takes it.
const REQUEST_EXPIRY: Span = Span::from_secs(1);
/// How long a session has heard nothing of its device that may have moved. A device that moved sends nothing more.
const QUIET_MIN: Span = Span::from_millis(100); // a guess: most round trips are shorter
/// The most lookups of sessions that may have moved at once.
const LOOKUPS_MAX: usize = 64; // as of handshakes

/// The sessions of a server that is to be left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoveReport {
    /// Awake sessions whose devices were asked to go on elsewhere.
    pub asked: usize,
    /// Awake sessions with a flow that another node could not go on with now.
    pub staying: usize,
}

impl Server {
    /// Asks the devices of awake sessions to go on at another node: at `to`, or at the nearest that they know.
    ///
    /// A session is asked if another node can take up all its flows: each has a memo that the shared store has, and
    /// `may_move` is true of all of them. `are_all`: sessions with other flows are asked, too.
    pub fn ask_to_move(
        &self,
        to: Option<SocketAddr>,
        are_all: bool,
        may_move: &dyn Fn(&[Bytes]) -> bool,
    ) -> MoveReport {
        let request = Bytes::from(to.map(|to| to.to_string()).unwrap_or_default());
        let mut report = MoveReport::default();
        for worker in self.workers() {
            let mut inner = worker.inner.lock();
            for id in established(&inner) {
                if !are_all && !can_move(&inner, id, may_move) {
                    report.staying += 1;
                    continue;
                }
                report.asked += 1;
                let expires = clock::now() + REQUEST_EXPIRY;
                let _ = inner.core.with(id, |s| {
                    s.send_datagram_on(PathSelection::Any, MOVE_CONTEXT, request.clone(), expires);
                });
            }
            drop(inner);
            worker.wake();
        }
        report
    }

    /// Answers devices that ask whether they can go on at a nearer node (R-NODE-5), without end: those that ask for
    /// another address of this server, and those whose flows that node could take up from the shared store, and of which
    /// `may_move` is true.
    pub async fn answer_move_questions(&self, may_move: &(dyn Fn(&[Bytes]) -> bool + Sync)) {
        let mut answered = BTreeMap::new();
        loop {
            // New questions end this wait and not that for the next look, or many of them would keep it off for ever.
            let look = sleep(QUESTIONS_LOOK_EVERY);
            tokio::pin!(look);
            let mut waits = self.answer_waiting_questions(&mut answered, may_move);
            loop {
                let asked = self.workers().iter();
                let asked = asked.map(|worker| Box::pin(worker.move_asked.notified()));
                let asked = futures_util::future::select_all(asked);
                tokio::select! {
                    biased;
                    () = &mut look, if waits || !answered.is_empty() => break,
                    _ = asked, if !waits => {
                        waits = self.answer_waiting_questions(&mut answered, may_move);
                    }
                }
            }
            answered.retain(|_, until| Instant::now() < *until);
            if !answered.is_empty() {
                self.release_moved_of(|worker, id| answered.contains_key(&(worker, id)))
                    .await;
            }
        }
    }

    /// Answers the questions that can be answered, and returns whether others wait. `answered`: sessions that may have moved,
    /// by worker, and until when they are looked up.
    fn answer_waiting_questions(
        &self,
        answered: &mut BTreeMap<(usize, SessionId), Instant>,
        may_move: &dyn Fn(&[Bytes]) -> bool,
    ) -> bool {
        let mut waits = false;
        let local = self.local_addr();
        for (number, worker) in self.workers().iter().enumerate() {
            let mut inner = worker.inner.lock();
            if inner.move_questions.is_empty() {
                continue;
            }
            let now = clock::now();
            let mut questions = std::mem::take(&mut inner.move_questions);
            questions.retain(|id, question| {
                let is_shared = inner.hibernation.shared.is_some();
                // The session stays where it is, with all that it has.
                let is_own = is_own_address(local, question.to);
                if !is_own && (!is_shared || now.since(question.asked_at) >= QUESTION_WAITS) {
                    return false;
                }
                if !is_own && !can_move(&inner, *id, may_move) {
                    return true;
                }
                let answer = Bytes::from(question.to.to_string());
                let expires = now + REQUEST_EXPIRY;
                let sent = inner.core.with(*id, |s| {
                    s.send_datagram_on(PathSelection::Any, MOVE_CONTEXT, answer, expires);
                });
                if sent.is_ok() && !is_own {
                    answered.insert((number, *id), Instant::now() + MOVED_WITHIN);
                }
                false
            });
            waits |= !questions.is_empty();
            inner.move_questions = questions;
            drop(inner);
            worker.wake();
        }
        waits
    }

    /// Ends the sessions here that another node has taken over, as the shared store says. Without one it does nothing.
    pub async fn release_moved(&self) {
        self.release_moved_of(|_, _| true).await;
    }

    /// Ends those of the sessions that `may_have_moved`, by the number of their worker, which another node has taken over.
    async fn release_moved_of(&self, may_have_moved: impl Fn(usize, SessionId) -> bool) {
        for (number, worker) in self.workers().iter().enumerate() {
            let owned: Vec<_> = {
                let inner = worker.inner.lock();
                let now = clock::now();
                let is_quiet = |id: &SessionId| {
                    let session = inner.core.session(*id);
                    let paths = session.map(Session::path_stats).unwrap_or_default();
                    let heard = paths.iter().map(|path| path.heard_at).max();
                    heard.is_none_or(|heard| now.since(heard) >= QUIET_MIN)
                };
                let ids = established(&inner).into_iter();
                let ids = ids.filter(|id| may_have_moved(number, *id) && is_quiet(id));
                ids.filter_map(|id| hibernation::key_of(&inner, id))
                    .collect()
            };
            let Some(store) = shared_store(worker) else {
                return;
            };
            for keys in owned.chunks(LOOKUPS_MAX) {
                let lookups: Vec<_> = keys
                    .iter()
                    .map(|key| (*key, tokio::spawn(store.look_up(*key))))
                    .collect();
                for (key, lookup) in lookups {
                    if let Ok(Ok(Some(found))) = lookup.await
                        && !found.is_ours
                    {
                        let mut inner = worker.inner.lock();
                        let awake = inner.core.awake_session(key.peer, key.instance);
                        // Its device may have come back since.
                        let epoch = awake
                            .and_then(|id| inner.core.session(id))
                            .map(Session::epoch);
                        if epoch.is_some_and(|epoch| epoch < found.epoch) {
                            shared_records::lose(&mut inner, key);
                        }
                    }
                }
            }
            worker.wake();
        }
    }
}

/// Whether a server that listens at `local` is also reached at `asked`: a nearer address of this same host.
fn is_own_address(local: SocketAddr, asked: SocketAddr) -> bool {
    let listens = local.ip().is_unspecified() || local.ip() == asked.ip();
    // An address can be bound on the host that has it.
    asked.port() == local.port()
        && listens
        && !asked.ip().is_unspecified()
        && UdpSocket::bind(SocketAddr::new(asked.ip(), 0)).is_ok()
}

fn shared_store(worker: &DriverShared) -> Option<Arc<dyn crate::SharedRecords>> {
    let inner = worker.inner.lock();
    let shared = inner.hibernation.shared.as_ref()?;
    Some(shared.store.clone())
}

/// The sessions of a server whose devices answer.
fn established(inner: &DriverCore) -> Vec<SessionId> {
    let is_established = |id: &SessionId| {
        let session = inner.core.session(*id);
        session.is_some_and(|s| !s.is_tentative() && s.state() == SessionState::Established)
    };
    let mut ids = inner.core.ids();
    ids.retain(is_established);
    ids
}

/// Whether another node can go on with all flows of a session.
fn can_move(inner: &DriverCore, id: SessionId, may_move: &dyn Fn(&[Bytes]) -> bool) -> bool {
    let all = (id, FlowId(0))..=(id, FlowId(u64::MAX));
    let open = inner.flows.range(all).filter(|(_, e)| e.end.is_none());
    let memos: Option<Vec<Bytes>> = open.map(|(_, entry)| entry.memo.clone()).collect();
    let Some(memos) = memos else {
        return false;
    };
    if memos.is_empty() {
        return true;
    }
    // What a journal of this node alone has is nowhere else, and what is not written yet neither.
    let is_written = |key| !inner.hibernation.is_pending(&key);
    inner.hibernation.shared.is_some()
        && hibernation::key_of(inner, id).is_some_and(is_written)
        && may_move(&memos)
}
