//! Datagrams that stay with their source until a session has room for them.
//!
//! ```text
//!  source ── next ──▶ a few in the core's queue ──▶ packets
//!    ▲ datagrams_ready                  │ all left in one turn: more next time · some stayed: fewer
//! ```
//!
//! [`Connection::send_datagram`] suits messages that are few: beyond [`crate::DATAGRAMS_MAX`] the oldest is dropped. A
//! source decides itself what waits, in which order, and what is dropped.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use d2tp_session::{DATAGRAMS_MAX, Session, SessionId, Span, Time};

use crate::clock;
use crate::datagrams::Connection;
use crate::driver_core::DriverCore;

/// The fewest datagrams that wait in the core: two packets' worth while a path is full.
const WAITING_MIN: usize = 4; // a guess: some 5 kB, which a path of 1 Mb/s takes in 40 ms

/// A datagram of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourcedDatagram {
    /// The context in which it is sent, below [`crate::CONTEXTS`].
    pub context: u64,
    /// The payload.
    pub bytes: Bytes,
    /// How long it may wait for a path from now on.
    pub expiry: Duration,
}

/// Where a session gets datagrams from: [`Connection::set_datagram_source`].
pub trait DatagramSource: Send + Sync + 'static {
    /// The next datagram, of at most `max` bytes; one that is longer is dropped. `None` if there is none now: then
    /// [`Connection::datagrams_ready`] follows when there is.
    ///
    /// Is called with the session locked: it must not call the session, nor wait for who does.
    fn next(&self, max: usize) -> Option<SourcedDatagram>;
}

/// The source of a session, and how much of it is taken at once.
pub(crate) struct DatagramFeed {
    source: Arc<dyn DatagramSource>,
    /// How many datagrams wait in the core at most.
    waiting_max: usize,
    /// Whether the source had more than was taken in the last turn.
    had_more: bool,
}

impl DatagramFeed {
    /// Hands datagrams to the session. Returns whether the source may have more.
    fn fill(&mut self, now: Time, session: &mut Session) -> bool {
        if !session.carries_datagrams() {
            // A turn follows when a path does.
            self.had_more = false;
            return true;
        }
        let waiting = session.datagrams_waiting();
        if self.had_more {
            self.waiting_max = match waiting {
                0 => (self.waiting_max * 2).min(DATAGRAMS_MAX),
                _ => (self.waiting_max - 1).max(WAITING_MIN),
            };
        }
        self.had_more = true;
        for _ in waiting..self.waiting_max {
            let max = session.datagram_max();
            let Some(datagram) = self.source.next(max) else {
                self.had_more = false;
                break;
            };
            if datagram.bytes.len() <= max {
                let expires = now + Span::from(datagram.expiry);
                session.send_datagram(datagram.context, datagram.bytes, expires);
            }
        }
        self.had_more
    }
}

impl Connection {
    /// Sends the datagrams of a source from now on, in place of an earlier one's, as the session has room. While no path
    /// could take datagrams, they stay with the source.
    pub fn set_datagram_source(&self, source: Arc<dyn DatagramSource>) {
        let mut inner = self.shared.inner.lock();
        if inner.core.session(self.session).is_some() {
            let feed = DatagramFeed {
                source,
                waiting_max: WAITING_MIN,
                had_more: false,
            };
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

    /// Tells the session that its source has datagrams again.
    pub fn datagrams_ready(&self) {
        let mut inner = self.shared.inner.lock();
        inner.fed_sessions.insert(self.session);
        drop(inner);
        self.shared.wake();
    }
}

/// Hands datagrams of sources to their sessions. Returns whether one would have got more if it had room.
pub(crate) fn fill_datagrams(inner: &mut DriverCore) -> bool {
    if inner.fed_sessions.is_empty() {
        return false;
    }
    let now = clock::now();
    let fed: Vec<SessionId> = inner.fed_sessions.iter().copied().collect();
    let mut wants_room = false;
    for id in fed {
        let feed = inner.datagram_feeds.get_mut(&id);
        let may_have_more = feed.is_some_and(|feed| {
            let filled = inner.core.with(id, |s| feed.fill(now, s));
            wants_room |= feed.had_more;
            filled == Ok(true)
        });
        if !may_have_more {
            inner.fed_sessions.remove(&id);
        }
    }
    wants_room
}

impl DriverCore {
    /// Forgets the source of a session that is over or asleep.
    pub(crate) fn forget_datagram_source(&mut self, id: SessionId) {
        self.datagram_feeds.remove(&id);
        self.fed_sessions.remove(&id);
    }
}
