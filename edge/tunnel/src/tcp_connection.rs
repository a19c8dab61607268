//! A connection of end-to-end TCP in the direction into a tunnel: copies of its segments, and what is known of both ends.
//!
//! ```text
//!   acknowledged ▼                                   ▼ sent_end
//!                [ kept ][ kept ][ kept, not left ] …
//!                   │ a report shows a loss, an outage is over, or nothing was acknowledged for a while
//!                   └▶ not left ─▶ leaves again, with the newest timestamp of its sender
//! ```

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::tcp_repair::{CopiedSegment, DROPPED, ELSEWHERE, LostSegment, NOT_LEFT, TcpRepair};
use crate::tcp_segment::{InnerSegment, TcpTimestamps, is_after, with_timestamp};

/// What a segment takes beside its bytes: its entry, and its allocation's.
const SEGMENT_OVERHEAD_BYTES: usize = 96;

/// How long after the last progress of a watched connection its missing segments leave again; doubled each time. Higher: a copy
/// that is lost costs more time. Lower: more is sent twice over slow paths.
pub(crate) const AGAIN_AFTER: Duration = Duration::from_secs(1); // a guess: the least timer of RFC 6298

/// How long after the last progress one missing segment leaves again while only slow paths carry, which hold seconds of packets.
const AGAIN_AFTER_SLOW: Duration = Duration::from_secs(4); // a guess: a round trip of 48 kb/s with a full queue, and some more

/// How often [`AGAIN_AFTER`] is doubled at most.
const DOUBLINGS_MAX: u32 = 3; // a guess: 8 s are a quarter of what senders wait after an outage of 20 s

/// How often segments leave again without any progress.
const REPEATS_MAX: u32 = 8; // a guess: 47 s; the sender's own timer is not longer but after outages of minutes

/// How many segments leave again at once because there was no progress.
const REPEATED_AT_ONCE_MAX: usize = 64; // a guess: what a session takes at once

/// How long a connection is watched after an outage. Its sender has measured the outage as a round trip, and its timer needs
/// several true ones until it is useful again.
const WATCHED_AFTER_OUTAGE: Duration = Duration::from_secs(30); // a guess: twenty round trips of a second and more

/// How long a connection is watched after its sender was not told of a loss.
const WATCHED_AFTER_LOSS: Duration = Duration::from_secs(2); // a guess: several round trips of a tunnel

/// How long a sender says nothing before it counts as gone. Linux repeats a segment, or probes a window, each two minutes.
const SENDER_SILENT_MAX: Duration = Duration::from_secs(300); // TCP_RTO_MAX twice, and some more

/// What a segment does when a copy of it is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeptAs {
    /// The segment leaves, after all others that have left.
    Leaving,
    /// The segment waits to leave.
    Waiting,
    /// A queue drops the segment.
    Dropped,
}

/// A copy that left over another link, of which nothing was heard.
#[derive(Debug)]
struct CopyElsewhere {
    sequence: u32,
    end: u32,
    /// When the segment leaves by the usual way, if it is still missing.
    due: Instant,
    /// The timestamp with which it left.
    timestamp: Option<u32>,
}

/// A segment that was not acknowledged yet.
#[derive(Debug)]
struct KeptSegment {
    copied: CopiedSegment,
    packet: Bytes,
}

fn cost(packet: &Bytes) -> usize {
    packet.len() + SEGMENT_OVERHEAD_BYTES
}

/// A connection in the direction into the tunnel.
#[derive(Debug)]
pub(crate) struct FollowedConnection {
    /// By sequence number.
    segments: VecDeque<KeptSegment>,
    bytes: usize,
    /// The sequence number of the SYN, if it was seen.
    first_sequence: Option<u32>,
    /// What the other end acknowledged last, and its newest timestamp with the echo beside it.
    acknowledged: Option<u32>,
    timestamps: Option<TcpTimestamps>,
    /// The window that the sender has from the other end.
    window: Option<u16>,
    /// Whether the sender was told since that its window is closed.
    is_window_closed: bool,
    /// The end of what the sender repeated of the first unacknowledged segment while paths were slow.
    head_repeated_end: Option<u32>,
    /// The number of the last copy of this connection that left by a slow path: the connection with the lowest is next.
    turn: u64,
    /// The number of segments that left.
    order: u64,
    /// The number after the last that left; `None` before the first.
    sent_end: Option<u32>,
    /// The newest timestamp of its sender among what left.
    newest_timestamp: Option<u32>,
    /// While SACK blocks report what arrived.
    repair: Option<Box<TcpRepair>>,
    /// When the last packet of the sender came.
    heard_at: Instant,
    /// When something was acknowledged last, or the first segment kept.
    progress_at: Instant,
    elsewhere: Vec<CopyElsewhere>,
    /// A stop of progress before this time is not left to the sender's timer.
    watched_until: Option<Instant>,
    /// How often missing segments left again since the last progress, and when they did last.
    repeats: u32,
    repeated_at: Instant,
}

impl FollowedConnection {
    pub(crate) fn new(now: Instant) -> FollowedConnection {
        FollowedConnection {
            segments: VecDeque::new(),
            bytes: 0,
            first_sequence: None,
            acknowledged: None,
            timestamps: None,
            window: None,
            is_window_closed: false,
            head_repeated_end: None,
            turn: 0,
            order: 0,
            sent_end: None,
            newest_timestamp: None,
            repair: None,
            heard_at: now,
            progress_at: now,
            elsewhere: Vec::new(),
            watched_until: None,
            repeats: 0,
            repeated_at: now,
        }
    }

    /// What the copies occupy.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// What a copy of this packet would occupy.
    pub(crate) fn cost(packet: &Bytes) -> usize {
        cost(packet)
    }

    /// The bytes of copies that wait to leave.
    pub(crate) fn waiting_bytes(&self) -> usize {
        let waiting = self.segments.iter().rev();
        let waiting = waiting.filter(|kept| kept.copied.order == NOT_LEFT);
        waiting.map(|kept| kept.packet.len()).sum()
    }

    /// The number of the last copy of this connection that left by a slow path, among those of all connections.
    pub(crate) fn turn(&self) -> u64 {
        self.turn
    }

    /// Notes that it was the connection's turn.
    pub(crate) fn set_turn(&mut self, turn: u64) {
        self.turn = turn;
    }

    /// Notes that the sender is told that its window is closed.
    pub(crate) fn close_window(&mut self) {
        self.is_window_closed = true;
    }

    /// Notes that a sender sends a segment, if it repeats it. Returns whether it does.
    pub(crate) fn note_repeated(&mut self, segment: &InnerSegment) -> bool {
        let is_repeated = self.is_repeated(segment);
        if is_repeated && self.acknowledged == Some(segment.sequence) {
            self.head_repeated_end = Some(segment.end());
        }
        is_repeated
    }

    /// Whether an ACK is not to reach the sender yet: it covers only what the sender's timer repeated, and more is under way. The
    /// sender can tell that its timer was wrong only by an ACK of what it did not repeat (RFC 5682).
    pub(crate) fn awaits_more_than_repeated(&self, answer: &InnerSegment) -> bool {
        let known = self.acknowledged;
        let is_covered = |end: u32| {
            let number = answer.acknowledged;
            number.is_some_and(|number| number == end)
                && known.is_some_and(|known| is_after(end, known))
        };
        let has_more = |end: u32| self.sent_end.is_some_and(|sent| is_after(sent, end));
        self.head_repeated_end
            .is_some_and(|end| is_covered(end) && has_more(end))
    }

    /// Whether everything is acknowledged.
    pub(crate) fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// What the other end acknowledged last.
    pub(crate) fn acknowledged(&self) -> Option<u32> {
        self.acknowledged
    }

    /// Whether a SYN begins another connection than this one.
    pub(crate) fn is_before(&self, syn: &InnerSegment) -> bool {
        self.first_sequence != Some(syn.sequence)
    }

    /// Whether the sender is gone: it has not even repeated what is not acknowledged.
    pub(crate) fn is_abandoned(&self, now: Instant) -> bool {
        !self.is_empty() && now.saturating_duration_since(self.heard_at) > SENDER_SILENT_MAX
    }

    /// The timestamp with which a segment leaves: the newest of its sender, but not newer than that of a copy behind it that is under
    /// way on another link. The receiver would discard that copy, once this segment has come (RFC 7323 §4.3).
    fn timestamp_for(&self, sequence: u32) -> Option<u32> {
        let newest = self.newest_timestamp?;
        let behind = self.elsewhere.iter();
        let behind = behind.filter(|copy| is_after(copy.sequence, sequence));
        let oldest = behind.filter_map(|copy| copy.timestamp);
        Some(
            oldest.fold(newest, |oldest, one| match is_after(oldest, one) {
                true => one,
                false => oldest,
            }),
        )
    }

    /// Notes what a segment says of its sender, which leaves now. Returns another timestamp, if the segment needs one:
    /// a receiver discards one that is older than another which it has (RFC 7323 §5).
    pub(crate) fn note_sent(&mut self, now: Instant, segment: &InnerSegment) -> Option<u32> {
        self.heard_at = now;
        if segment.length > 0 {
            let end = segment.end();
            let known = self.sent_end.filter(|known| is_after(*known, end));
            self.sent_end = Some(known.unwrap_or(end));
        }
        let TcpTimestamps { value, .. } = segment.timestamps?;
        let newer = self
            .newest_timestamp
            .filter(|known| is_after(*known, value));
        self.newest_timestamp = Some(newer.unwrap_or(value));
        self.timestamp_for(segment.sequence)
            .filter(|timestamp| *timestamp != value)
    }

    /// Keeps a copy of a segment.
    pub(crate) fn keep(
        &mut self,
        now: Instant,
        segment: &InnerSegment,
        packet: &Bytes,
        kept_as: KeptAs,
    ) {
        self.note_sent(now, segment);
        let (sequence, end) = (segment.sequence, segment.end());
        let is_old = self
            .acknowledged
            .is_some_and(|acknowledged| !is_after(end, acknowledged));
        if is_old || segment.length == 0 {
            return;
        }
        if segment.is_syn {
            self.first_sequence = Some(sequence);
        }
        let known = self.copy_of(sequence);
        if let Some(at) = known.filter(|at| !is_after(end, self.segments[*at].copied.end)) {
            let kept = &mut self.segments[at];
            if (kept.copied.sequence, kept.copied.end) == (sequence, end) {
                // The newer one acknowledges what came meanwhile.
                self.bytes = self.bytes + cost(packet) - cost(&kept.packet);
                kept.packet = packet.clone();
                if kept_as == KeptAs::Leaving {
                    self.leaves(at);
                }
            }
            return;
        }
        if self.segments.is_empty() {
            self.progress_at = now;
        }
        let at = self
            .segments
            .partition_point(|kept| is_after(sequence, kept.copied.sequence));
        while let Some(covered) = self.segments.get(at)
            && !is_after(covered.copied.end, end)
        {
            self.bytes -= cost(&covered.packet);
            self.segments.remove(at);
        }
        let copied = CopiedSegment {
            sequence,
            end,
            order: match kept_as {
                KeptAs::Dropped => DROPPED,
                KeptAs::Leaving | KeptAs::Waiting => NOT_LEFT,
            },
        };
        self.bytes += cost(packet);
        let packet = packet.clone();
        self.segments.insert(at, KeptSegment { copied, packet });
        if let Some(repair) = &mut self.repair {
            repair.on_copied(copied);
        }
        if kept_as == KeptAs::Leaving {
            self.leaves(at);
        }
    }

    /// The copy that contains this number.
    fn copy_of(&self, sequence: u32) -> Option<usize> {
        let after = self
            .segments
            .partition_point(|kept| !is_after(kept.copied.sequence, sequence));
        let at = after.checked_sub(1)?;
        is_after(self.segments[at].copied.end, sequence).then_some(at)
    }

    fn leaves(&mut self, at: usize) {
        self.order += 1;
        self.set_order(at, self.order);
    }

    fn set_order(&mut self, at: usize, order: u64) {
        let copied = &mut self.segments[at].copied;
        if copied.order == ELSEWHERE && order != ELSEWHERE {
            let sequence = copied.sequence;
            self.elsewhere.retain(|copy| copy.sequence != sequence);
        }
        copied.order = order;
        if let Some(repair) = &mut self.repair {
            repair.leaves_again(copied.sequence, copied.end, order);
        }
    }

    /// Has the copy of this number wait to leave again. `None` if there is none, or it waits already.
    pub(crate) fn release(&mut self, sequence: u32) -> Option<u32> {
        let at = self.copy_of(sequence)?;
        let copied = self.segments[at].copied;
        if copied.order == NOT_LEFT {
            return None;
        }
        self.set_order(at, NOT_LEFT);
        Some(copied.sequence)
    }

    /// Whether a sender sends a segment again: later ones have left, and it is not acknowledged.
    pub(crate) fn is_repeated(&self, segment: &InnerSegment) -> bool {
        let end = segment.end();
        segment.length > 0
            && !segment.is_syn
            && self.sent_end.is_some_and(|sent| !is_after(end, sent))
            && self.acknowledged.is_none_or(|had| is_after(end, had))
    }

    /// Whether a copy of all of a segment waits to leave.
    pub(crate) fn waits(&self, segment: &InnerSegment) -> bool {
        let at = self.copy_of(segment.sequence);
        at.is_some_and(|at| {
            let copied = self.segments[at].copied;
            copied.order == NOT_LEFT && !is_after(segment.end(), copied.end)
        })
    }

    /// Has all copies of what is not known to have arrived leave, because an outage is over: the numbers of them.
    pub(crate) fn release_all(&mut self, now: Instant) -> Vec<u32> {
        self.watched_until = Some(now + WATCHED_AFTER_OUTAGE);
        (self.progress_at, self.repeats) = (now, 0);
        let mut released = Vec::new();
        for at in 0..self.segments.len() {
            let CopiedSegment { sequence, end, .. } = self.segments[at].copied;
            if self.is_missing(sequence, end) {
                self.set_order(at, NOT_LEFT);
                released.push(sequence);
            }
        }
        released
    }

    /// Whether a segment is not known to have arrived.
    fn is_missing(&self, sequence: u32, end: u32) -> bool {
        // A receiver may forget what it reported above what it acknowledged (RFC 2018 §8).
        self.acknowledged == Some(sequence)
            || self
                .repair
                .as_ref()
                .is_none_or(|repair| !repair.has_arrived(sequence, end))
    }

    /// The copy with this number, which leaves now. `None` if it does not wait, or has arrived.
    pub(crate) fn leave_again(&mut self, sequence: u32) -> Option<Bytes> {
        self.leave(sequence, None)
    }

    /// The copy with this number, which leaves over another link now, and by the usual way at `due` if it is missing then. `None`
    /// if it does not wait, or has arrived.
    pub(crate) fn leave_elsewhere(&mut self, sequence: u32, due: Instant) -> Option<Bytes> {
        self.leave(sequence, Some(due))
    }

    fn leave(&mut self, sequence: u32, elsewhere_until: Option<Instant>) -> Option<Bytes> {
        let at = self.copy_of(sequence)?;
        let CopiedSegment {
            sequence,
            end,
            order,
        } = self.segments[at].copied;
        if order != NOT_LEFT {
            return None;
        }
        if !self.is_missing(sequence, end) {
            self.segments[at].copied.order = self.order;
            return None;
        }
        match elsewhere_until {
            None => self.leaves(at),
            Some(_) => self.set_order(at, ELSEWHERE),
        }
        let timestamp = self.timestamp_for(sequence);
        if let Some(due) = elsewhere_until {
            self.elsewhere.push(CopyElsewhere {
                sequence,
                end,
                due,
                timestamp,
            });
        }
        let packet = self.segments[at].packet.clone();
        let changed = timestamp.and_then(|timestamp| with_timestamp(&packet, timestamp));
        Some(changed.unwrap_or(packet))
    }

    /// When missing segments of a watched connection are to leave again. `is_slow`: by paths on which that takes some seconds.
    pub(crate) fn repeats_at(&self, is_slow: bool) -> Option<Instant> {
        let is_watched = self
            .watched_until
            .is_some_and(|until| self.progress_at < until);
        let (is_watched, after) = match is_slow {
            true => (true, AGAIN_AFTER_SLOW),
            false => (is_watched, AGAIN_AFTER),
        };
        let may_repeat = is_watched && !self.is_empty() && self.repeats < REPEATS_MAX;
        let since = match self.repeats {
            0 => self.progress_at,
            _ => self.repeated_at,
        };
        may_repeat.then(|| since + after * (1 << self.repeats.min(DOUBLINGS_MAX)))
    }

    /// The waiting copy with this number, if it has not arrived.
    pub(crate) fn waiting_copy(&self, sequence: u32) -> Option<&Bytes> {
        let kept = &self.segments[self.copy_of(sequence)?];
        let CopiedSegment {
            sequence,
            end,
            order,
        } = kept.copied;
        let waits = order == NOT_LEFT && self.is_missing(sequence, end);
        waits.then_some(&kept.packet)
    }

    /// When the first of the copies that left over another link is to leave by the usual way.
    pub(crate) fn returns_at(&self) -> Option<Instant> {
        self.elsewhere.iter().map(|copy| copy.due).min()
    }

    /// Has copies that left over another link leave by the usual way, if it is time: the numbers of them.
    pub(crate) fn return_due(&mut self, now: Instant) -> Vec<u32> {
        let is_due = |copy: &mut CopyElsewhere| copy.due <= now;
        let due: Vec<CopyElsewhere> = self.elsewhere.extract_if(.., is_due).collect();
        let is_elsewhere = |connection: &FollowedConnection, sequence: u32| {
            let at = connection.copy_of(sequence);
            at.is_some_and(|at| connection.segments[at].copied.order == ELSEWHERE)
        };
        due.into_iter()
            .map(|copy| copy.sequence)
            .filter_map(|sequence| match is_elsewhere(self, sequence) {
                true => self.release(sequence),
                false => None,
            })
            .collect()
    }

    /// Has missing segments leave again, if it is time: the numbers of them.
    pub(crate) fn release_due(&mut self, now: Instant, is_slow: bool) -> Vec<u32> {
        let Some(first) = self.segments.front().map(|kept| kept.copied) else {
            return Vec::new();
        };
        if self.repeats_at(is_slow).is_none_or(|at| now < at) {
            return Vec::new();
        }
        if first.order == NOT_LEFT {
            // It still waits for room.
            (self.progress_at, self.repeats) = (now, 0);
            return Vec::new();
        }
        (self.repeated_at, self.repeats) = (now, self.repeats + 1);
        let holes = self.repair.iter().flat_map(|repair| repair.holes());
        let mut missing: Vec<u32> = [first.sequence].into_iter().chain(holes).collect();
        missing.truncate(if is_slow { 1 } else { REPEATED_AT_ONCE_MAX });
        missing
            .into_iter()
            .filter_map(|sequence| self.release(sequence))
            .collect()
    }

    /// Notes a packet of the other end, and forgets what it acknowledges. `None` if it says nothing of what is kept; else
    /// whether it acknowledges what the last one did.
    pub(crate) fn on_answer(&mut self, now: Instant, answer: &InnerSegment) -> Option<bool> {
        if let Some(stamps) = answer.timestamps {
            let known = self.timestamps;
            let newer = known.filter(|known| is_after(known.value, stamps.value));
            self.timestamps = newer.or(Some(stamps));
        }
        let number = answer.acknowledged?;
        // Nobody acknowledges what was not sent.
        self.sent_end.filter(|end| !is_after(number, *end))?;
        match self.acknowledged {
            Some(known) if is_after(known, number) => return None,
            Some(known) if known == number => return Some(true),
            _ => {}
        }
        self.acknowledged = Some(number);
        (self.progress_at, self.repeats) = (now, 0);
        if let Some(repair) = &mut self.repair {
            repair.acknowledge(now, number);
        }
        while let Some(first) = self.segments.front()
            && !is_after(first.copied.end, number)
        {
            self.bytes -= cost(&first.packet);
            self.segments.pop_front();
        }
        self.elsewhere.retain(|copy| is_after(copy.end, number));
        Some(false)
    }

    /// Reads the SACK blocks of an answer, adds copies of what is lost to `released`, and returns whether the
    /// sender need not know of it. `is_slow`: only slow paths carry.
    pub(crate) fn on_sack(
        &mut self,
        now: Instant,
        answer: &InnerSegment,
        is_slow: bool,
        released: &mut Vec<LostSegment>,
    ) -> bool {
        let Some(acknowledged) = self.acknowledged else {
            return false;
        };
        if answer.sack.above(acknowledged).next().is_none() {
            self.repair = None;
            return false;
        }
        let repair = self
            .repair
            .get_or_insert_with(|| TcpRepair::new(now, acknowledged).into());
        let highest = repair.highest();
        let from = self
            .segments
            .partition_point(|kept| !is_after(kept.copied.end, highest));
        let copies = self.segments.range(from..).map(|kept| kept.copied);
        repair.on_sack(answer.sack, acknowledged, copies);
        self.elsewhere
            .retain(|copy| !repair.has_arrived(copy.sequence, copy.end));
        let awaited = self.elsewhere.iter().map(|copy| copy.due).max();
        let (lost, hides) = (
            repair.take_lost(self.order),
            repair.hides_losses(now, is_slow, awaited),
        );
        let lost = lost.into_iter();
        released.extend(lost.filter_map(|one| {
            let sequence = self.release(one.sequence)?;
            Some(LostSegment { sequence, ..one })
        }));
        if hides {
            let until = now + WATCHED_AFTER_LOSS;
            self.watched_until = self.watched_until.max(Some(until));
        }
        hides
    }

    /// Notes that the sender gets the window of an answer. Returns whether it had another one.
    pub(crate) fn passes_window(&mut self, answer: &InnerSegment) -> bool {
        let was_closed = std::mem::take(&mut self.is_window_closed);
        self.window.replace(answer.window) != Some(answer.window) || was_closed
    }

    /// The answer to a segment that is kept here, or to a probe of a sender that waits for nothing: an ACK that leaves the window
    /// as it is, or closes it.
    pub(crate) fn answer_here(&mut self, segment: &InnerSegment, closes: bool) -> Option<Bytes> {
        let acknowledged = self.acknowledged?;
        self.is_window_closed |= closes;
        let window = self.window.filter(|_| !self.is_window_closed);
        segment.answer(acknowledged, window.unwrap_or(0), self.timestamps)
    }

    /// Forgets all copies.
    pub(crate) fn forget_copies(&mut self) {
        self.segments.clear();
        self.elsewhere.clear();
        self.bytes = 0;
        self.repair = None;
    }
}
