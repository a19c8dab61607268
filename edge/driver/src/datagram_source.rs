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
use d2tp_session::{DATAGRAMS_MAX, FlowId, RepairOffer, Session, Span, Time};

/// The fewest datagrams that wait in the core: two packets' worth while a path is full.
const WAITING_MIN: usize = 4; // a guess: some 5 kB, which a path of 1 Mb/s takes in 40 ms

/// The datagrams that wait in the core while only slow paths carry. More: what is urgent waits for them. Fewer: packets are less full.
const WAITING_SLOW: usize = 2; // a guess: half a second at 48 kb/s

/// A datagram of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourcedDatagram {
    /// The context in which the datagram is sent, below [`crate::CONTEXTS`].
    pub context: u64,
    /// The payload.
    pub bytes: Bytes,
    /// How long the datagram may wait for a path from now on.
    pub expiry: Duration,
    /// Whether the datagram only acknowledges what arrives in other datagrams, so that it may leave on another path
    /// ([`crate::EndpointConfig::ack_offload`]).
    pub acknowledges: bool,
}

/// Where a session gets datagrams from: [`crate::Connection::set_datagram_source`].
pub trait DatagramSource: Send + Sync + 'static {
    /// Appends the next datagrams to `datagrams`: at most `count`, each of at most `max` bytes; those that are longer are
    /// dropped. Fewer than `count` if there are no more now: then [`crate::Connection::datagrams_ready`] follows when there
    /// are.
    ///
    /// Is called with the session locked: it must not call the session, nor wait for who does.
    fn take(&self, max: usize, count: usize, datagrams: &mut Vec<SourcedDatagram>);

    /// The flow whose grants pay for repairs on metered links, if the source has a packet now that repairs a loss and may leave over
    /// another link. It is called as `take` is, before it.
    fn repair_flow(&self) -> Option<u64> {
        None
    }

    /// Appends the datagrams of a packet that repairs a loss, to leave over another link than most datagrams; none if that does not
    /// pay. It follows [`DatagramSource::repair_flow`].
    fn take_repair(&self, _offer: &RepairOffer, _datagrams: &mut Vec<SourcedDatagram>) {}

    /// The session would have taken datagrams, and no path carries any, nor would one with grants. [`DatagramSource::take`]
    /// follows when one does. It is called as `take` is, several times in an outage.
    fn on_outage(&self) {}

    /// The session carries datagrams only by paths that are far slower than one that fell silent, or no longer so. It is called
    /// as `take` is, before it.
    fn on_slow(&self, _is_slow: bool) {}

    /// All paths that carry datagrams are slow, so that few bytes matter more than computing, or no longer so. It is called as `take`
    /// is, before it.
    fn on_narrow(&self, _is_narrow: bool) {}

    /// Whether the source, without datagrams now, has to learn of an outage, or is asked for datagrams again without
    /// [`crate::Connection::datagrams_ready`]. It is called as `take` is.
    fn is_waiting(&self) -> bool {
        false
    }
}

/// The source of a session, and how much of it is taken at once.
pub(crate) struct DatagramFeed {
    source: Arc<dyn DatagramSource>,
    /// How many datagrams wait in the core at most.
    waiting_max: usize,
    /// Whether the source had more than was taken when it was last asked.
    pub(crate) had_more: bool,
    /// What the source was told last by [`DatagramSource::on_slow`].
    is_slow: bool,
    /// What the source was told last by [`DatagramSource::on_narrow`].
    is_narrow: bool,
    /// Room for what is taken at once.
    taken: Vec<SourcedDatagram>,
}

impl DatagramFeed {
    pub(crate) fn new(source: Arc<dyn DatagramSource>) -> DatagramFeed {
        // What an earlier session told it.
        source.on_narrow(false);
        DatagramFeed {
            source,
            waiting_max: WAITING_MIN,
            had_more: false,
            is_slow: false,
            is_narrow: false,
            taken: Vec::new(),
        }
    }

    /// Hands datagrams to the session. Returns whether the source may have more.
    pub(crate) fn fill(&mut self, now: Time, session: &mut Session) -> bool {
        if !session.carries_datagrams() {
            if !session.is_metered() {
                self.source.on_outage();
            }
            // A turn follows when a path does.
            self.had_more = false;
            return true;
        }
        let is_narrow = session.carries_datagrams_by_slow_paths();
        if is_narrow != self.is_narrow {
            self.is_narrow = is_narrow;
            self.source.on_narrow(is_narrow);
        }
        let is_slow = session.carries_datagrams_slowly(self.is_slow);
        if is_slow != self.is_slow {
            self.is_slow = is_slow;
            self.waiting_max = WAITING_MIN;
            self.source.on_slow(is_slow);
        }
        if !is_slow {
            self.take_repair(now, session);
        }
        let waiting = session.datagrams_waiting();
        if is_slow {
            self.waiting_max = WAITING_SLOW;
        } else if self.had_more {
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
                    match datagram.acknowledges {
                        true => {
                            session.send_ack_datagram(datagram.context, datagram.bytes, expires)
                        }
                        false => session.send_datagram(datagram.context, datagram.bytes, expires),
                    }
                }
            }
        } else {
            self.had_more = true;
        }
        self.had_more || self.source.is_waiting()
    }

    /// Hands over a packet that repairs a loss, if another link has room for it.
    fn take_repair(&mut self, now: Time, session: &mut Session) {
        let Some(flow) = self.source.repair_flow() else {
            return;
        };
        let Some(offer) = session.repair_offer(now, FlowId(flow)) else {
            return;
        };
        self.source.take_repair(&offer, &mut self.taken);
        for SourcedDatagram {
            context,
            bytes,
            expiry,
            ..
        } in self.taken.drain(..)
        {
            if bytes.len() <= offer.datagram_max {
                session.send_repair_datagram(&offer, context, bytes, now + Span::from(expiry));
            }
        }
    }
}
