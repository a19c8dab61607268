//! Which segments of a connection were lost behind the end of a tunnel, by the SACK blocks of its receiver, and whether they
//! can be sent again from copies, so that the sender need not know.
//!
//! ```text
//!   acknowledged ▼            ▼ highest
//!        ░░░░░░░░█ hole █▒▒▒▒▒▒▒▒▒▒▒▒   ▒ reported by SACK: three that left after the hole's segment ─▶ it was lost
//! ```

use std::time::{Duration, Instant};

use crate::tcp_segment::{SackBlocks, is_after};

/// How many segments that left after another must have arrived before that one counts as lost (RFC 6675 §2).
const LATER_MIN: u64 = 3;

/// How long the sender is told nothing while its connection makes no progress. Higher: what cannot be repaired stays lost for
/// longer. Lower: a sender with a long round trip to the device sees losses that are being repaired.
const HIDDEN_MAX: Duration = Duration::from_millis(400); // a guess: several round trips of a tunnel

/// How long the sender is told nothing while only slow paths carry and its connection makes no progress: a packet takes a
/// quarter of a second there, and a queue of them some seconds.
const HIDDEN_MAX_SLOW: Duration = Duration::from_secs(10); // a guess: several round trips of a radio of 48 kb/s

/// The holes of a connection that are followed at most; a receiver can report one behind every other segment.
const HOLES_MAX: usize = 256; // a guess: 2 % of what is kept, in segments of 170 bytes

/// The number, in the order in which segments left, of one that has not left since it is to be sent.
pub(crate) const NOT_LEFT: u64 = u64::MAX;

/// The number of one that a queue dropped so that its sender slows down. It is not repaired unless the connection stops.
pub(crate) const DROPPED: u64 = u64::MAX - 1;

/// The number of one whose copy left over another link than the connection's segments. It says nothing of what left before it, and
/// what left after it says nothing of the copy.
pub(crate) const ELSEWHERE: u64 = u64::MAX - 2;

/// A segment that has not arrived although later ones have.
#[derive(Debug)]
struct Hole {
    sequence: u32,
    end: u32,
    /// The segment's number in the order in which the connection's segments left, the last time that it did; [`NOT_LEFT`], [`DROPPED`]
    /// or [`ELSEWHERE`].
    order: u64,
    /// How many segments that left after this one have arrived.
    later: u64,
    /// Whether the segment was lost before.
    was_lost: bool,
}

/// A segment that was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LostSegment {
    pub(crate) sequence: u32,
    /// Whether the segment was lost before, too.
    pub(crate) was_lost: bool,
}

/// A copy of a segment, as the search for holes sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopiedSegment {
    pub(crate) sequence: u32,
    pub(crate) end: u32,
    /// The segment's number in the order in which the connection's segments left, [`NOT_LEFT`], [`DROPPED`] or [`ELSEWHERE`].
    pub(crate) order: u64,
}

/// What arrived of a connection, as far as it is not acknowledged.
#[derive(Debug)]
pub(crate) struct TcpRepair {
    /// The number up to which it is known what arrived.
    highest: u32,
    holes: Vec<Hole>,
    /// The end of the last missing range of which there is no copy, or that a queue dropped.
    uncopied_end: Option<u32>,
    /// The end of the last segment that was not followed, because there were too many holes.
    unfollowed_end: Option<u32>,
    /// Since when nothing more was acknowledged.
    stalled_since: Instant,
}

impl TcpRepair {
    /// The first SACK block of a connection has come, which acknowledges up to here.
    pub(crate) fn new(now: Instant, acknowledged: u32) -> TcpRepair {
        TcpRepair {
            highest: acknowledged,
            holes: Vec::new(),
            uncopied_end: None,
            unfollowed_end: None,
            stalled_since: now,
        }
    }

    /// Everything up to `number` has arrived.
    pub(crate) fn acknowledge(&mut self, now: Instant, number: u32) {
        self.holes.retain(|hole| is_after(hole.end, number));
        self.uncopied_end = self.uncopied_end.filter(|end| is_after(*end, number));
        self.unfollowed_end = self.unfollowed_end.filter(|end| is_after(*end, number));
        if is_after(number, self.highest) {
            self.highest = number;
        }
        self.stalled_since = now;
    }

    /// Reads SACK blocks. `copies`: those of the connection's segments from the highest known number on, in order.
    pub(crate) fn on_sack(
        &mut self,
        sack: SackBlocks,
        acknowledged: u32,
        copies: impl Iterator<Item = CopiedSegment>,
    ) {
        let filled = |hole: &Hole| sack.contains(hole.sequence, hole.end);
        self.holes.retain(|hole| !filled(hole));
        let highest = sack.above(acknowledged).map(|(_, end)| end);
        let Some(highest) = highest.reduce(|a, b| if is_after(a, b) { a } else { b }) else {
            return;
        };
        let mut at = self.highest;
        for copy in copies.take_while(|copy| is_after(highest, copy.sequence)) {
            if is_after(copy.sequence, at) && !sack.contains(at, copy.sequence) {
                self.uncopied_end = Some(copy.sequence);
            }
            if is_after(copy.end, at) {
                at = copy.end;
            }
            if sack.contains(copy.sequence, copy.end) {
                if copy.order >= ELSEWHERE {
                    // It arrived before an outage or over another link, and says nothing of what leaves after it.
                    continue;
                }
                let earlier = self.holes.iter_mut().filter(|hole| hole.order < copy.order);
                earlier.for_each(|hole| hole.later += 1);
            } else if self.holes.len() == HOLES_MAX {
                self.uncopied_end = Some(copy.end);
                self.unfollowed_end = Some(copy.end);
            } else {
                if copy.order == DROPPED {
                    self.uncopied_end = Some(copy.end);
                }
                self.holes.push(Hole {
                    sequence: copy.sequence,
                    end: copy.end,
                    order: copy.order,
                    later: 0,
                    was_lost: false,
                });
            }
        }
        if is_after(highest, at) {
            if !sack.contains(at, highest) {
                self.uncopied_end = Some(highest);
            }
            at = highest;
        }
        if is_after(at, self.highest) {
            self.highest = at;
        }
    }

    /// Notes that there is a copy of a segment now: of one that its sender sends again, if it is below the highest known number.
    pub(crate) fn on_copied(&mut self, copy: CopiedSegment) {
        if !is_after(self.highest, copy.sequence) {
            return;
        }
        if self.holes.len() == HOLES_MAX {
            let known = self.unfollowed_end.filter(|end| is_after(*end, copy.end));
            self.unfollowed_end = known.or(Some(copy.end));
            return;
        }
        self.holes.push(Hole {
            sequence: copy.sequence,
            end: copy.end,
            order: copy.order,
            later: 0,
            was_lost: false,
        });
    }

    /// The sequence numbers of segments that have not arrived although later ones have.
    pub(crate) fn holes(&self) -> impl Iterator<Item = u32> {
        self.holes.iter().map(|hole| hole.sequence)
    }

    /// Notes that what a segment contains leaves again, as this one of the connection's; or, with [`NOT_LEFT`], that it is to.
    pub(crate) fn leaves_again(&mut self, sequence: u32, end: u32, order: u64) {
        let within =
            |hole: &&mut Hole| !is_after(sequence, hole.sequence) && !is_after(hole.end, end);
        for hole in self.holes.iter_mut().filter(within) {
            (hole.order, hole.later) = (order, 0);
        }
    }

    /// Whether the receiver is known to have all bytes of a segment.
    pub(crate) fn has_arrived(&self, sequence: u32, end: u32) -> bool {
        let is_followed = self
            .unfollowed_end
            .is_none_or(|unfollowed| !is_after(unfollowed, sequence));
        let mut holes = self.holes.iter();
        let overlaps = |hole: &Hole| is_after(end, hole.sequence) && is_after(hole.end, sequence);
        !is_after(end, self.highest) && is_followed && !holes.any(overlaps)
    }

    /// The segments that are lost, if the last one that left has this number. They are not named again before they have left again.
    pub(crate) fn take_lost(&mut self, last: u64) -> Vec<LostSegment> {
        let lost = self
            .holes
            .iter_mut()
            .filter(|hole| hole.later >= LATER_MIN.min(last.saturating_sub(hole.order).max(1)));
        lost.map(|hole| {
            // Nothing has left after it that could show that it is lost.
            (hole.order, hole.later) = (NOT_LEFT, 0);
            LostSegment {
                sequence: hole.sequence,
                was_lost: std::mem::replace(&mut hole.was_lost, true),
            }
        })
        .collect()
    }

    /// The number up to which it is known what arrived.
    pub(crate) fn highest(&self) -> u32 {
        self.highest
    }

    /// Whether the sender need not know what is missing. `is_slow`: what carries is far slower than before. `awaited`: until when the
    /// receiver may still report copies that left over another link.
    pub(crate) fn hides_losses(
        &self,
        now: Instant,
        is_slow: bool,
        awaited: Option<Instant>,
    ) -> bool {
        let hidden_max = if is_slow { HIDDEN_MAX_SLOW } else { HIDDEN_MAX };
        let until = awaited.max(Some(self.stalled_since + hidden_max));
        self.uncopied_end.is_none() && until.is_some_and(|until| now < until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp_segment::InnerSegment;

    #[test]
    fn a_receiver_that_reports_every_other_segment_as_lost_occupies_no_memory() {
        let now = Instant::now();
        let mut repair = TcpRepair::new(now, 100);
        let copies = (0..4 * HOLES_MAX as u32).map(|n| CopiedSegment {
            sequence: 100 + n,
            end: 101 + n,
            order: u64::from(n),
        });
        let last = 100 + 4 * HOLES_MAX as u32;
        let ack = crate::tcp_segment::selective_acknowledgement(100, &[(last - 1, last)]);
        let sack = InnerSegment::parse(&ack).expect("TCP").sack;
        repair.on_sack(sack, 100, copies);
        assert_eq!(repair.holes.len(), HOLES_MAX);
        assert!(!repair.hides_losses(now, false, None));
        repair.acknowledge(now, last - 1);
        assert!(repair.hides_losses(now, false, None));
    }
}
