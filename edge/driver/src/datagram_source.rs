//! Datagrams that stay with their source until a session has room for them.
//!
//! ```text
//!  source ── take ──▶ a few in the core's queue ──▶ packets
//!    ▲ datagrams_ready                  │ all left in one turn: more next time · some stayed: fewer
//! ```
//!
//! [`crate::Connection::send_datagram`] suits messages that are few: beyond [`crate::DATAGRAMS_MAX`] the oldest is dropped. A
//! source decides itself what waits, in which order, and what is dropped.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use d2tp_session::{DATAGRAMS_MAX, Session, Span, Time};

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

/// Where a session gets datagrams from: [`crate::Connection::set_datagram_source`].
pub trait DatagramSource: Send + Sync + 'static {
    /// Appends the next datagrams to `datagrams`: at most `count`, each of at most `max` bytes; those that are longer are
    /// dropped. Fewer than `count` if there are no more now: then [`crate::Connection::datagrams_ready`] follows when there
    /// are.
    ///
    /// Is called with the session locked: it must not call the session, nor wait for who does.
    fn take(&self, max: usize, count: usize, datagrams: &mut Vec<SourcedDatagram>);
}

/// The source of a session, and how much of it is taken at once.
pub(crate) struct DatagramFeed {
    source: Arc<dyn DatagramSource>,
    /// How many datagrams wait in the core at most.
    waiting_max: usize,
    /// Whether the source had more than was taken when it was last asked.
    pub(crate) had_more: bool,
    /// Room for what is taken at once.
    taken: Vec<SourcedDatagram>,
}

impl DatagramFeed {
    pub(crate) fn new(source: Arc<dyn DatagramSource>) -> DatagramFeed {
        DatagramFeed {
            source,
            waiting_max: WAITING_MIN,
            had_more: false,
            taken: Vec::new(),
        }
    }

    /// Hands datagrams to the session. Returns whether the source may have more.
    pub(crate) fn fill(&mut self, now: Time, session: &mut Session) -> bool {
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
        let room = self.waiting_max.saturating_sub(waiting);
        if room > 0 {
            let max = session.datagram_max();
            self.source.take(max, room, &mut self.taken);
            self.had_more = self.taken.len() >= room;
            for datagram in self.taken.drain(..) {
                if datagram.bytes.len() <= max {
                    let expires = now + Span::from(datagram.expiry);
                    session.send_datagram(datagram.context, datagram.bytes, expires);
                }
            }
        } else {
            self.had_more = true;
        }
        self.had_more
    }
}
