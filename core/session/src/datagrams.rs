//! Unreliable datagrams that wait to leave: a short queue that forgets rather than delays.
//!
//! ```text
//!  send_datagram ─▶ [ newest … oldest ] ─▶ a packet of any path that is available and not gated
//!                     │ full: the oldest goes     │ past its time: goes    │ fits no packet: goes
//!                     └────────────── each counted ─────────────────────────┘
//! ```

use std::collections::VecDeque;

use bytes::Bytes;
use d2tp_time::Time;
use d2tp_wire::{DATA_HEADER_BYTES, DATAGRAM_FIRST_BYTES, TAG_BYTES};

use crate::config::DATAGRAMS_MAX;
use crate::session::Session;

/// Bytes of a DATAGRAM frame beside its payload, at most: type, context, length.
const HEAD_MAX: usize = 1 + 8 + 4;

/// What became of the datagrams handed over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DatagramStats {
    /// Left in a packet.
    pub sent: u64,
    /// Pushed out by newer ones while no path took them.
    pub displaced: u64,
    /// Still here when their time was over.
    pub expired: u64,
    /// Too large for any packet by the time they could leave.
    pub too_big: u64,
    /// Arrived from the peer.
    pub received: u64,
}

/// One that waits.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) context: u64,
    pub(crate) bytes: Bytes,
    expires: Time,
}

/// All that wait.
#[derive(Debug, Default)]
pub(crate) struct Datagrams {
    waiting: VecDeque<Waiting>,
    pub(crate) stats: DatagramStats,
}

impl Datagrams {
    fn push(&mut self, waiting: Waiting) {
        if self.waiting.len() == DATAGRAMS_MAX {
            self.waiting.pop_front();
            self.stats.displaced += 1;
        }
        self.waiting.push_back(waiting);
    }

    /// How many wait.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The session takes no more; those that wait are gone.
    pub(crate) fn clear(&mut self) {
        self.waiting.clear();
    }

    /// The next to leave in a packet that has `room` bytes left, `fresh` if it holds nothing yet.
    pub(crate) fn next(&mut self, now: Time, room: usize, fresh: bool) -> Option<Waiting> {
        while let Some(front) = self.waiting.front() {
            let need = HEAD_MAX + front.bytes.len();
            if front.expires <= now {
                self.stats.expired += 1;
            } else if room >= need {
                self.stats.sent += 1;
                return self.waiting.pop_front();
            } else if fresh && need > ROOM_SURE {
                // What no packet can carry will never leave: drop it rather than block the rest.
                self.stats.too_big += 1;
            } else {
                return None;
            }
            self.waiting.pop_front();
        }
        None
    }
}

/// Room for frames that every path has.
const ROOM_SURE: usize = room(DATAGRAM_FIRST_BYTES);

const fn room(datagram: usize) -> usize {
    datagram - DATA_HEADER_BYTES - TAG_BYTES
}

impl Session {
    /// Sends an unreliable datagram, unless it is still here at `expires`. It leaves on any path
    /// that is available and not gated; while there is none it waits, and newer ones push it out.
    pub fn send_datagram(&mut self, context: u64, bytes: Bytes, expires: Time) {
        self.datagrams.push(Waiting {
            context,
            bytes,
            expires,
        });
    }

    /// The largest datagram that every path which may carry one now can carry; where no path may,
    /// the largest that any path will.
    pub fn datagram_max(&self) -> usize {
        let now = self
            .paths
            .iter()
            .filter(|p| p.takes_payload() && !p.gated)
            .map(|p| room(p.mtu.current()))
            .min();
        now.unwrap_or(ROOM_SURE) - HEAD_MAX
    }

    /// What became of the datagrams so far.
    pub fn datagram_stats(&self) -> DatagramStats {
        self.datagrams.stats
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_time::Span;

    fn waiting(n: u8, bytes: usize, expires: u64) -> Waiting {
        Waiting {
            context: 0,
            bytes: vec![n; bytes].into(),
            expires: Time::ZERO + Span::from_secs(expires),
        }
    }

    #[test]
    fn a_full_queue_forgets_its_oldest_and_counts_it() {
        let mut queue = Datagrams::default();
        for n in 0..=DATAGRAMS_MAX {
            queue.push(waiting(n as u8, 10, 9));
        }
        let first = queue.next(Time::ZERO, 1000, true).unwrap();
        assert_eq!(first.bytes[0], 1);
        assert_eq!((queue.stats.displaced, queue.stats.sent), (1, 1));
    }

    #[test]
    fn what_expired_is_passed_over_and_counted() {
        let mut queue = Datagrams::default();
        queue.push(waiting(1, 10, 3));
        queue.push(waiting(2, 10, 9));
        let now = Time::ZERO + Span::from_secs(3);
        assert_eq!(queue.next(now, 1000, true).unwrap().bytes[0], 2);
        assert_eq!(queue.stats.expired, 1);
        assert!(queue.is_empty());
    }

    #[test]
    fn one_that_fits_no_packet_goes_and_one_that_fits_the_next_stays() {
        let mut queue = Datagrams::default();
        queue.push(waiting(1, 2000, 9));
        queue.push(waiting(2, 800, 9));
        assert!(queue.next(Time::ZERO, 500, false).is_none());
        assert_eq!(queue.stats.too_big, 0, "a full packet proves nothing");
        assert!(queue.next(Time::ZERO, 500, true).is_none());
        assert_eq!(queue.stats.too_big, 1);
        assert_eq!(queue.next(Time::ZERO, 1100, true).unwrap().bytes[0], 2);
    }
}
