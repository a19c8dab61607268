//! TCP that stays end to end, over an outage of the session and over losses: what was under way when the networks went is
//! sent again when one is back, and senders are held by a zero window meanwhile. What is lost on the way is sent again
//! from a copy before the sender knows.
//!
//! ```text
//!                 sent ─▶ kept until its ACK comes back through the tunnel
//!  an ACK reports a hole:     its segment leaves again, over another link where that pays; the sender gets the ACK without the report
//!  no path carries:  what comes is kept, too; its sender gets an ACK with window 0
//!  slow paths alone: what is kept leaves one by one, in order; a sender that has enough here gets ACKs with window 0
//!  a path carries:   all that is kept and has not arrived leaves again, in order, before anything else of those connections
//!  no progress then: what is missing leaves again, after a second and more
//! ```
//!
//! Without it a sender notices the end of an outage when its own timer expires, which doubles: up to as long after the
//! outage as the outage took. With it the ACKs arrive a round trip after the outage, also for segments that its timer has
//! not repeated, so that the sender undoes what it concluded from the timer (RFC 5682). The window is that of the ACKs. A sender
//! measures the outage as a round trip, whatever timestamps say, because it knows when it sent what it did not repeat. Its timer
//! is of little use for some seconds then, so that copies leave again here until the connection makes progress.
//!
//! Whatever leaves has the newest timestamp of its sender: the receiver would discard an older one. This is the zero window
//! advertisement of Freeze-TCP (Goff et al., INFOCOM 2000), sent by the end of the tunnel in place of the receiver. Losses are
//! repaired as Snoop does (Balakrishnan et al., MobiCom 1995), by SACK instead of repeated ACKs. A segment that the tunnel's own
//! queue dropped is not repaired: the ACK passes as it is, and the sender slows down. What it repeats is kept and leaves first.
//!
//! Where a fast path fell silent and a far slower one is left, a sender would see losses, take its timer for what the slow path
//! needs, and use the fast one with a tiny window when it is back. So it keeps its window, and waits as in an outage, while the
//! slow path carries what is kept: an ACK opens the window when little is left here.
//!
//! Nothing here depends on the payload, and nothing of it is changed. Segments that are signed are left alone.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::tcp_connection::{AGAIN_AFTER, FollowedConnection, KeptAs};
use crate::tcp_segment::{
    ConnectionEnds, InnerSegment, is_after, with_timestamp, with_window, without_sack,
};

/// What the segments of a tunnel occupy at most while they wait for their ACKs: 160 ms of 100 Mb/s. Higher: more memory for
/// each client. Lower: fast connections get only the newest part back.
const BYTES_MAX: usize = 2 * 1024 * 1024; // a guess

/// The connections that are followed at most, in each direction.
const CONNECTIONS_MAX: usize = 1024; // a guess: a browser with many pages has some hundred

/// What a connection takes beside its segments.
const CONNECTION_BYTES: usize = size_of::<(ConnectionEnds, FollowedConnection)>();

/// The segments that wait to leave again at most; what a sender repeats waits in the queue then.
const RELEASED_MAX: usize = 16 * 1024; // more than there are copies

/// What of a connection waits here for slow paths before its sender's window is closed. Higher: more memory, and senders' windows
/// grow by what no path has carried. Lower: too little to fill a fast path for the round trip until senders go on.
const SLOW_BACKLOG_BYTES: usize = 64 * 1024; // a guess: a round trip of 100 ms at 5 Mb/s; twelve seconds at 44 kb/s

/// The interval at which connections are forgotten whose senders are gone.
const TIDY_EVERY: Duration = Duration::from_secs(60); // a guess

/// What became of a packet that came while senders are held.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum BlockedPacket {
    /// The packet is no segment with data; it waits like any packet.
    Passed,
    /// The packet is kept, or one like it is; its sender may get this answer.
    Held(Option<Bytes>),
}

/// A copy that leaves again.
#[derive(Clone, Copy, Debug)]
struct ReleasedCopy {
    ends: ConnectionEnds,
    /// A sequence number in it.
    sequence: u32,
    elsewhere: LeavesElsewhere,
}

/// When a copy leaves over another link than its connection's segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LeavesElsewhere {
    /// Never: no network lost the segment, or the other link did.
    Never,
    /// Where the segment arrives sooner there: it was lost once.
    IfSooner,
    /// Always: the segment was lost twice, or the connection makes no progress. What loses it again by the usual way costs more than a
    /// longer way.
    Always,
}

/// How many copies are looked at for one that leaves over another link.
const LOOKED_AT_MAX: usize = 64; // as many as are lost at once

/// The segments of a tunnel's connections that were not acknowledged yet.
#[derive(Debug, Default)]
pub(crate) struct TcpHold {
    connections: HashMap<ConnectionEnds, FollowedConnection>,
    /// What all copies occupy.
    bytes: usize,
    /// How many new connections were not followed since the last search for idle ones.
    unfollowed: usize,
    is_blocked: bool,
    /// Whether only paths carry that are far slower than one that fell silent.
    is_slow: bool,
    /// The number of copies that left again.
    left: u64,
    /// The copies that leave again.
    released: VecDeque<ReleasedCopy>,
    /// When connections are searched for those that make no progress.
    look_at: Option<Instant>,
    /// When those were last forgotten whose senders are gone.
    tidied_at: Option<Instant>,
}

impl TcpHold {
    /// What the segments occupy.
    #[cfg(test)]
    fn bytes(&self) -> usize {
        self.bytes
    }

    /// What segments and connections occupy.
    pub(crate) fn memory(&self) -> usize {
        self.bytes + self.connections.len() * CONNECTION_BYTES
    }

    /// Whether no path carries packets.
    pub(crate) fn is_blocked(&self) -> bool {
        self.is_blocked
    }

    /// Whether what senders send is kept, and sent from there: in an outage, and while paths are slow.
    pub(crate) fn holds_senders(&self) -> bool {
        self.is_blocked || self.is_slow
    }

    /// Whether only paths carry that are far slower than one that fell silent.
    pub(crate) fn is_slow(&self) -> bool {
        self.is_slow
    }

    /// Whether segments wait for the end of the outage, or to be sent after it.
    pub(crate) fn has_waiting(&self) -> bool {
        !self.released.is_empty() || (self.is_blocked && self.bytes > 0)
    }

    /// When [`TcpHold::unblock`] has segments leave again, if nothing changes before.
    pub(crate) fn look_at(&self) -> Option<Instant> {
        self.look_at
    }

    /// Keeps a packet that leaves, until it is acknowledged. Returns the packet as it leaves.
    pub(crate) fn on_leaving(&mut self, now: Instant, packet: Bytes) -> Bytes {
        let Some(segment) = InnerSegment::parse(&packet) else {
            return packet;
        };
        self.keep(now, &segment, &packet, KeptAs::Leaving);
        self.with_newest_timestamp(now, &segment, packet)
    }

    /// Keeps a packet that a queue drops, so that it can be sent if its sender does not send it again. Linux forgets a loss
    /// that it has noticed if it takes back what it concluded from its timer then (`tcp_undo_cwnd_reduction`), and sends the
    /// segment again only when its timer expires, which may have measured an outage.
    pub(crate) fn on_dropped(&mut self, now: Instant, packet: &Bytes) {
        if let Some(segment) = InnerSegment::parse(packet)
            && !segment.is_reset
        {
            self.keep(now, &segment, packet, KeptAs::Dropped);
        }
    }

    /// Notes a packet that leaves where nothing is lost, so that it is not kept. Returns the packet as it leaves.
    pub(crate) fn on_leaving_reliably(&mut self, now: Instant, packet: Bytes) -> Bytes {
        match InnerSegment::parse(&packet) {
            Some(segment) => self.with_newest_timestamp(now, &segment, packet),
            None => packet,
        }
    }

    fn with_newest_timestamp(
        &mut self,
        now: Instant,
        segment: &InnerSegment,
        packet: Bytes,
    ) -> Bytes {
        let connection = self.connections.get_mut(&segment.ends);
        let newer = connection.and_then(|connection| connection.note_sent(now, segment));
        let changed = newer.and_then(|newer| with_timestamp(&packet, newer));
        changed.unwrap_or(packet)
    }

    /// Takes a packet that is to be sent, if its sender sends it again: it leaves before others, and no queue drops it.
    ///
    /// A sender that has measured an outage as a round trip waits for as long again if its repetition is lost.
    pub(crate) fn take_repeated(&mut self, now: Instant, packet: &[u8]) -> bool {
        if self.connections.is_empty() || self.released.len() >= RELEASED_MAX {
            return false;
        }
        let Some(segment) = InnerSegment::parse(packet) else {
            return false;
        };
        let connection = self.connections.get_mut(&segment.ends);
        let connection = connection.filter(|connection| connection.is_repeated(&segment));
        let Some(connection) = connection else {
            return false;
        };
        connection.note_repeated(&segment);
        let waited = connection.waits(&segment);
        let kept = Bytes::copy_from_slice(packet);
        self.keep(now, &segment, &kept, KeptAs::Waiting);
        let Some(connection) = self.connections.get_mut(&segment.ends) else {
            return false;
        };
        connection.release(segment.sequence);
        if !connection.waits(&segment) {
            // There was no room to keep it.
            return false;
        }
        if !waited {
            self.released.push_back(ReleasedCopy {
                ends: segment.ends,
                sequence: segment.sequence,
                elsewhere: LeavesElsewhere::Never,
            });
        }
        true
    }

    /// Follows what comes out of the tunnel: ACKs of the other end. Returns the packet as it goes on to the sender: without
    /// what it says of losses that are repaired here, or not at all if it says nothing else.
    pub(crate) fn on_received(&mut self, now: Instant, packet: Bytes) -> Option<Bytes> {
        if self.connections.is_empty() {
            return Some(packet);
        }
        let Some(segment) = InnerSegment::parse(&packet) else {
            return Some(packet);
        };
        let ends = segment.ends.reversed();
        if segment.is_reset {
            self.forget(ends);
            return Some(packet);
        }
        let Some(connection) = self.connections.get_mut(&ends) else {
            return Some(packet);
        };
        let is_of_repeated = self.is_slow && connection.awaits_more_than_repeated(&segment);
        let before = connection.bytes();
        let answer = connection.on_answer(now, &segment);
        self.bytes = self.bytes + connection.bytes() - before;
        let Some(is_repeated) = answer else {
            return Some(packet);
        };
        let mut lost = Vec::new();
        let hides = connection.on_sack(now, &segment, self.is_slow, &mut lost);
        let opens = connection.passes_window(&segment);
        let lost = lost.into_iter().map(|lost| ReleasedCopy {
            ends,
            sequence: lost.sequence,
            elsewhere: match lost.was_lost {
                false => LeavesElsewhere::IfSooner,
                true => LeavesElsewhere::Always,
            },
        });
        match self.is_slow {
            // Before what waits for its first turn.
            true => lost.rev().for_each(|one| self.released.push_front(one)),
            false => self.released.extend(lost),
        }
        if is_of_repeated && segment.length == 0 {
            return None;
        }
        let mut packet = packet;
        if self.is_slow && self.has_backlog(&ends) {
            if let Some(connection) = self.connections.get_mut(&ends) {
                connection.close_window();
            }
            packet = with_window(&packet, 0).unwrap_or(packet);
        }
        if !hides {
            return Some(packet);
        }
        self.look_by(now + AGAIN_AFTER);
        match is_repeated && segment.length == 0 && !opens {
            true => None,
            false => without_sack(&packet).or(Some(packet)),
        }
    }

    fn look_by(&mut self, at: Instant) {
        self.look_at = Some(self.look_at.map_or(at, |known| known.min(at)));
    }

    /// Begins an outage: nothing leaves any more.
    pub(crate) fn block(&mut self) {
        self.is_blocked = true;
        // All of it is kept.
        self.released.clear();
        self.look_at = None;
    }

    /// Begins or ends a time in which only slow paths carry: all that is kept and has not arrived leaves again, in order.
    pub(crate) fn set_slow(&mut self, now: Instant, is_slow: bool) {
        if self.is_slow == is_slow {
            return;
        }
        self.is_slow = is_slow;
        self.released.clear();
        self.release_all(now);
    }

    /// Keeps a packet that came while senders are held.
    pub(crate) fn on_held(&mut self, now: Instant, packet: &Bytes) -> BlockedPacket {
        if self.is_blocked {
            return self.on_blocked(now, packet);
        }
        let Some(segment) = InnerSegment::parse(packet).filter(|segment| !segment.is_reset) else {
            return self.on_blocked(now, packet);
        };
        let waits = |hold: &TcpHold| {
            let connection = hold.connections.get(&segment.ends);
            connection.is_some_and(|connection| connection.waits(&segment))
        };
        let connection = self.connections.get_mut(&segment.ends);
        let is_repeated = connection.is_some_and(|connection| connection.note_repeated(&segment));
        let waited = waits(self);
        let held = self.on_blocked(now, packet);
        // A copy that left by a slow path is under way, or leaves again when it counts as lost.
        if held != BlockedPacket::Passed && !waited && waits(self) {
            let one = ReleasedCopy {
                ends: segment.ends,
                sequence: segment.sequence,
                elsewhere: LeavesElsewhere::Never,
            };
            match is_repeated {
                true => self.released.push_front(one),
                false => self.released.push_back(one),
            }
        }
        held
    }

    /// Whether so much of a connection waits here for slow paths that its sender is to wait. What waits leads to ACKs, which open
    /// the window.
    fn has_backlog(&self, ends: &ConnectionEnds) -> bool {
        let connection = self.connections.get(ends);
        let waiting = connection.map_or(0, FollowedConnection::waiting_bytes);
        waiting > SLOW_BACKLOG_BYTES || (waiting > 0 && self.bytes > BYTES_MAX / 2)
    }

    /// Keeps a packet that came during an outage.
    pub(crate) fn on_blocked(&mut self, now: Instant, packet: &Bytes) -> BlockedPacket {
        let Some(segment) = InnerSegment::parse(packet) else {
            return BlockedPacket::Passed;
        };
        if segment.is_reset {
            self.forget(segment.ends);
            return BlockedPacket::Passed;
        }
        self.forget_earlier(&segment);
        let is_probe = self.probes_window(&segment);
        let is_slow = self.is_slow && !self.is_blocked;
        if segment.length == 0 && (!is_probe || (is_slow && !self.has_backlog(&segment.ends))) {
            return BlockedPacket::Passed;
        }
        // What was first is kept: without it the rest would be of no use.
        if !is_probe && self.bytes + FollowedConnection::cost(packet) <= BYTES_MAX {
            self.keep(now, &segment, packet, KeptAs::Waiting);
        }
        let has_backlog = self.has_backlog(&segment.ends);
        let connection = self.connections.get_mut(&segment.ends);
        BlockedPacket::Held(connection.and_then(|connection| {
            connection.note_sent(now, &segment);
            let closes = match is_slow {
                true => has_backlog,
                false => !is_probe || !connection.is_empty(),
            };
            match is_slow && !is_probe && !closes {
                true => None,
                false => connection.answer_here(&segment, closes),
            }
        }))
    }

    /// Whether a segment asks if the window is open again, or whether the other end is there: it has nothing new, from before
    /// what is acknowledged.
    fn probes_window(&self, segment: &InnerSegment) -> bool {
        let connection = self.connections.get(&segment.ends);
        let acknowledged = connection.and_then(FollowedConnection::acknowledged);
        acknowledged.is_some_and(|number| {
            is_after(number, segment.sequence) && !is_after(segment.end(), number)
        })
    }

    /// Ends an outage, if there is one: all that is kept and has not arrived is to be sent. Without one, what is missing of
    /// connections that make no progress.
    pub(crate) fn unblock(&mut self, now: Instant) {
        self.tidy(now);
        if !std::mem::take(&mut self.is_blocked) {
            return self.release_due(now);
        }
        self.release_all(now);
    }

    /// Has all that is kept and has not arrived leave again.
    fn release_all(&mut self, now: Instant) {
        let connections = self.connections.iter_mut();
        let mut waiting: Vec<_> = connections
            .map(|(ends, connection)| (*ends, connection.release_all(now).into_iter()))
            .collect();
        // In turn, so that no connection waits for all of another's.
        while !waiting.is_empty() {
            waiting.retain_mut(|(ends, sequences)| {
                let next = sequences.next();
                self.released.extend(next.map(|sequence| ReleasedCopy {
                    ends: *ends,
                    sequence,
                    elsewhere: LeavesElsewhere::Never,
                }));
                next.is_some()
            });
        }
        self.look_at = (self.bytes > 0).then(|| now + AGAIN_AFTER);
    }

    /// Has missing segments of connections that make no progress leave again, if it is time.
    fn release_due(&mut self, now: Instant) {
        if self.look_at.is_none_or(|at| now < at) {
            return;
        }
        for (ends, connection) in &mut self.connections {
            let of = |sequences: Vec<u32>, elsewhere| {
                sequences.into_iter().map(move |sequence| ReleasedCopy {
                    ends: *ends,
                    sequence,
                    elsewhere,
                })
            };
            self.released
                .extend(of(connection.return_due(now), LeavesElsewhere::Never));
            let due = of(
                connection.release_due(now, self.is_slow),
                LeavesElsewhere::Always,
            );
            match self.is_slow {
                true => due.rev().for_each(|one| self.released.push_front(one)),
                false => self.released.extend(due),
            }
        }
        let connections = self.connections.values();
        let looks_at = |connection: &FollowedConnection| {
            let repeats_at = connection.repeats_at(self.is_slow);
            repeats_at.into_iter().chain(connection.returns_at()).min()
        };
        self.look_at = connections.filter_map(looks_at).min();
    }

    /// Forgets connections whose senders are gone, so that nothing of them is sent again.
    fn tidy(&mut self, now: Instant) {
        let tidied_at = *self.tidied_at.get_or_insert(now);
        if now.saturating_duration_since(tidied_at) < TIDY_EVERY {
            return;
        }
        self.tidied_at = Some(now);
        self.connections.retain(|_, connection| {
            let is_abandoned = connection.is_abandoned(now);
            if is_abandoned {
                self.bytes -= connection.bytes();
            }
            !is_abandoned
        });
    }

    /// Whether segments were not acknowledged, which an outage would keep.
    pub(crate) fn is_waiting(&self) -> bool {
        self.bytes > 0
    }

    /// The next packet to be sent again.
    pub(crate) fn next_released(&mut self) -> Option<Bytes> {
        loop {
            let ReleasedCopy { ends, sequence, .. } = self.pop_released()?;
            let connection = self.connections.get_mut(&ends);
            let packet = connection.and_then(|connection| connection.leave_again(sequence));
            if packet.is_some() {
                return packet;
            }
        }
    }

    /// Whether a copy waits that may leave over another link.
    pub(crate) fn has_repair(&self) -> bool {
        let mut first = self.released.iter().take(LOOKED_AT_MAX);
        !self.is_slow && first.any(|one| one.elsewhere != LeavesElsewhere::Never)
    }

    /// The next packet to be sent again over another link, of those that `may_leave` admits. At `due` it leaves by the usual way if
    /// it is still missing. `is_sooner`: it arrives sooner there than by the usual way.
    pub(crate) fn next_repair(
        &mut self,
        due: Instant,
        is_sooner: bool,
        may_leave: impl Fn(&Bytes) -> bool,
    ) -> Option<Bytes> {
        let mut at = 0;
        while at < self.released.len().min(LOOKED_AT_MAX) {
            let ReleasedCopy {
                ends,
                sequence,
                elsewhere,
            } = self.released[at];
            let pays = match elsewhere {
                LeavesElsewhere::Never => false,
                LeavesElsewhere::IfSooner => is_sooner,
                LeavesElsewhere::Always => true,
            };
            let connection = self.connections.get_mut(&ends);
            let connection = connection.filter(|connection| {
                let waiting = connection.waiting_copy(sequence);
                pays && waiting.is_some_and(&may_leave)
            });
            if let Some(connection) = connection {
                self.released.remove(at);
                let packet = connection.leave_elsewhere(sequence, due);
                self.look_by(due);
                return packet;
            }
            at += 1;
        }
        None
    }

    /// The first of the copies that leave again; on slow paths of the connection whose turn it is, so that none waits for all
    /// that is kept of another.
    fn pop_released(&mut self) -> Option<ReleasedCopy> {
        if !self.is_slow {
            return self.released.pop_front();
        }
        let turn = |one: &ReleasedCopy| {
            let connection = self.connections.get(&one.ends);
            connection.map_or(0, FollowedConnection::turn)
        };
        let mut turns = self.released.iter().map(turn).enumerate();
        let first = turns.next()?;
        let (at, _) = turns.fold(first, |best, one| if one.1 < best.1 { one } else { best });
        let one = self.released.remove(at)?;
        self.left += 1;
        if let Some(connection) = self.connections.get_mut(&one.ends) {
            connection.set_turn(self.left);
        }
        Some(one)
    }

    /// Forgets the segments of the connection with most of them. False if there are none.
    pub(crate) fn forget_largest(&mut self) -> bool {
        let largest = self
            .connections
            .values_mut()
            .max_by_key(|connection| connection.bytes());
        let Some(largest) = largest.filter(|connection| !connection.is_empty()) else {
            return false;
        };
        self.bytes -= largest.bytes();
        largest.forget_copies();
        true
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        *self = TcpHold::default();
    }

    fn keep(&mut self, now: Instant, segment: &InnerSegment, packet: &Bytes, kept_as: KeptAs) {
        if segment.is_reset {
            return self.forget(segment.ends);
        }
        if segment.length == 0 {
            return;
        }
        self.forget_earlier(segment);
        if !self.connections.contains_key(&segment.ends)
            && self.connections.len() >= CONNECTIONS_MAX
        {
            // Not for each packet of a flood.
            if self.unfollowed.is_multiple_of(CONNECTIONS_MAX) {
                self.connections
                    .retain(|_, connection| !connection.is_empty());
            }
            self.unfollowed += 1;
            if self.connections.len() >= CONNECTIONS_MAX {
                return;
            }
            self.unfollowed = 0;
        }
        let connection = self
            .connections
            .entry(segment.ends)
            .or_insert_with(|| FollowedConnection::new(now));
        let before = connection.bytes();
        connection.keep(now, segment, packet, kept_as);
        self.bytes = self.bytes + connection.bytes() - before;
        if !self.is_blocked
            && let Some(at) = connection.repeats_at(self.is_slow)
        {
            self.look_by(at.max(now));
        }
        while self.bytes > BYTES_MAX && self.forget_largest() {}
    }

    /// Forgets an earlier connection of the same ports, whose numbers mean nothing any more.
    fn forget_earlier(&mut self, segment: &InnerSegment) {
        if !segment.is_syn {
            return;
        }
        let connection = self.connections.get(&segment.ends);
        if connection.is_some_and(|connection| connection.is_before(segment)) {
            self.forget(segment.ends);
        }
    }

    fn forget(&mut self, ends: ConnectionEnds) {
        if let Some(connection) = self.connections.remove(&ends) {
            self.bytes -= connection.bytes();
        }
    }
}

#[cfg(test)]
mod tests;
