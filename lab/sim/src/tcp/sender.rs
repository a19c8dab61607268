//! The sending half of a connection: what is in flight, what is lost, and how much may be sent.
//!
//! ```text
//!  segments   acknowledged │ SACKed · lost · in flight … │ unsent
//!                          una                           next
//!  lost:      a segment sent later arrived, and min RTT / 4 more has passed (RACK)
//!             or nothing arrived for the timeout: all of them
//!  before that, after 2 RTT without an ACK: the last segment again, so that RACK has its answer
//! ```

use std::collections::VecDeque;

use cedos_lab_link::{Span, Time};

use super::segment::ModelSegment;

/// The initial window in segments. // RFC 6928
const WINDOW_INITIAL_SEGMENTS: u64 = 10;
/// The first timeout. // RFC 6298 §2.1
const TIMEOUT_FIRST: Span = Span::from_secs(1);
/// The least that a timeout exceeds the round trip by. // Linux's TCP_RTO_MIN
const TIMEOUT_MARGIN_MIN: Span = Span::from_millis(200);
/// The longest timeout. // Linux's TCP_RTO_MAX
const TIMEOUT_MAX: Span = Span::from_secs(120);
/// How much longer a tail loss probe waits if the peer may delay its ACK. // RFC 8985 §7.2
const DELAYED_ACK_MAX: Span = Span::from_millis(200);
/// The limits of the rise of the round trip that ends slow start, and the samples of a round that
/// count. // RFC 9406 §4.2
const RISE: (Span, Span) = (Span::from_millis(4), Span::from_millis(16));
const ROUND_SAMPLES: u32 = 8;

/// A segment that is not acknowledged.
#[derive(Clone, Copy, Debug)]
struct SentRange {
    seq: u64,
    end: u64,
    sent_at: Time,
    sacked: bool,
    lost: bool,
    again: bool,
}

impl SentRange {
    fn length(&self) -> u64 {
        self.end - self.seq
    }

    fn is_in_flight(&self) -> bool {
        !self.sacked && !self.lost
    }
}

/// What the next timer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SenderTimer {
    /// The oldest segment is not answered.
    Timeout,
    /// The last segment is not answered.
    TailProbe,
    /// A segment may be only late.
    Reordering,
}

/// The measured round trip.
#[derive(Clone, Copy, Debug, Default)]
struct RoundTrip {
    smoothed: Option<Span>,
    deviation: Span,
    min: Option<Span>,
}

impl RoundTrip {
    // RFC 6298 §2
    fn on_sample(&mut self, rtt: Span) {
        self.min = Some(self.min.map_or(rtt, |min| min.min(rtt)));
        let Some(smoothed) = self.smoothed else {
            (self.smoothed, self.deviation) = (Some(rtt), rtt.divided(2));
            return;
        };
        let off = smoothed.max(rtt).saturating_sub(smoothed.min(rtt));
        self.deviation = self.deviation.scaled(3, 4) + off.divided(4);
        self.smoothed = Some(smoothed.scaled(7, 8) + rtt.divided(8));
    }

    fn timeout(&self) -> Span {
        let Some(smoothed) = self.smoothed else {
            return TIMEOUT_FIRST;
        };
        smoothed + self.deviation.times(4).max(TIMEOUT_MARGIN_MIN)
    }
}

/// The sending half of a connection.
#[derive(Debug)]
pub(crate) struct TcpSender {
    /// Bytes from `una` on.
    data: VecDeque<u8>,
    una: u64,
    next: u64,
    /// The number of the FIN, once the program has written everything.
    fin_at: Option<u64>,
    sent: VecDeque<SentRange>,
    in_flight: u64,
    window_end: u64,
    segment_bytes: u64,
    window: u64,
    threshold: u64,
    /// Bytes acknowledged that did not enlarge the window yet.
    acked: u64,
    /// The end of what was in flight when a loss was found; the window shrinks once until then.
    recovery_end: Option<u64>,
    /// Whether the recovery began with a timeout.
    timed_out: bool,
    round_trip: RoundTrip,
    /// For the end of slow start: the end of this round, its samples, its least round trip, that of
    /// the round before.
    round: (u64, u32, Option<Span>, Option<Span>),
    backoff: u32,
    probed: bool,
    last_sent_at: Time,
    /// The newest segment that arrived: when it was sent, its end, and its round trip.
    newest: Option<(Time, u64, Span)>,
    /// When a segment that may be only late counts as lost.
    reordering_until: Option<Time>,
    /// Since when nothing was acknowledged although something is in flight.
    waiting_since: Option<Time>,
}

impl TcpSender {
    pub(crate) fn new(segment_bytes: usize) -> TcpSender {
        let segment_bytes = segment_bytes as u64;
        TcpSender {
            data: VecDeque::new(),
            una: 0,
            next: 0,
            fin_at: None,
            sent: VecDeque::new(),
            in_flight: 0,
            window_end: 0,
            segment_bytes,
            window: WINDOW_INITIAL_SEGMENTS * segment_bytes,
            threshold: u64::MAX,
            acked: 0,
            recovery_end: None,
            timed_out: false,
            round_trip: RoundTrip::default(),
            round: (0, 0, None, None),
            backoff: 0,
            probed: false,
            last_sent_at: Time::ZERO,
            newest: None,
            reordering_until: None,
            waiting_since: None,
        }
    }

    /// The largest segment that the peer accepts, once it is known, before anything is sent.
    pub(crate) fn set_segment_bytes(&mut self, bytes: usize) {
        self.segment_bytes = self.segment_bytes.min(bytes as u64);
        self.window = WINDOW_INITIAL_SEGMENTS * self.segment_bytes;
    }

    /// Accepts bytes of the program.
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        assert!(self.fin_at.is_none(), "nothing is written after the end");
        self.data.extend(bytes);
    }

    /// Ends the direction after everything that was written.
    pub(crate) fn close(&mut self) {
        self.fin_at.get_or_insert(self.una + self.data.len() as u64);
    }

    /// Bytes that were written and not yet sent.
    pub(crate) fn unsent(&self) -> u64 {
        (self.una + self.data.len() as u64).saturating_sub(self.next)
    }

    /// Whether the end was sent and acknowledged.
    pub(crate) fn is_finished(&self) -> bool {
        self.fin_at.is_some_and(|fin| self.una > fin)
    }

    /// Since when the peer has acknowledged nothing although something is in flight.
    pub(crate) fn waiting_since(&self) -> Option<Time> {
        self.waiting_since
    }

    /// The first round-trip time: that of the SYN.
    pub(crate) fn on_first_round_trip(&mut self, rtt: Span) {
        self.round_trip.on_sample(rtt);
    }

    // ---- answers ----

    /// Handles what a segment of the peer acknowledges.
    pub(crate) fn on_ack(&mut self, now: Time, segment: &ModelSegment) {
        let Some(ack) = segment.ack.filter(|ack| *ack <= self.next) else {
            return;
        };
        self.window_end = self.window_end.max(segment.window_end);
        let was_full = self.in_flight + self.segment_bytes > self.window;
        let delivered = self.note_delivered(now, ack, &segment.sacks);
        if ack > self.una {
            self.advance(now, ack);
            if let Some(sent_at) = segment.echo {
                self.on_round_trip(now.since(sent_at));
            }
        }
        self.find_lost(now);
        let grows = self.recovery_end.is_none() || self.timed_out;
        if grows && was_full {
            self.grow(delivered);
        }
    }

    /// Removes what is acknowledged. Returns the bytes that arrived, as far as they were not known
    /// to have.
    fn note_delivered(&mut self, now: Time, ack: u64, sacks: &[std::ops::Range<u64>]) -> u64 {
        let mut delivered = 0;
        let min = self.round_trip.min.unwrap_or(Span::ZERO);
        for range in &mut self.sent {
            let arrived = range.end <= ack
                || sacks
                    .iter()
                    .any(|sack| sack.start <= range.seq && range.end <= sack.end);
            if range.sacked || !arrived {
                continue;
            }
            delivered += range.length();
            if range.is_in_flight() {
                self.in_flight -= range.length();
            }
            (range.sacked, range.lost) = (true, false);
            // RFC 8985 §6.2: an answer this soon is one to the first transmission.
            let rtt = now.since(range.sent_at);
            let known = self.newest.map_or((Time::ZERO, 0), |n| (n.0, n.1));
            if !(range.again && rtt < min) && (range.sent_at, range.end) > known {
                self.newest = Some((range.sent_at, range.end, rtt));
            }
        }
        while self.sent.front().is_some_and(|range| range.end <= ack) {
            self.sent.pop_front();
        }
        if let Some(first) = self.sent.front_mut()
            && first.seq < ack
        {
            if first.is_in_flight() {
                self.in_flight -= ack - first.seq;
            }
            first.seq = ack;
        }
        delivered
    }

    fn advance(&mut self, now: Time, ack: u64) {
        let acked = (ack - self.una).min(self.data.len() as u64);
        self.data.drain(..acked as usize);
        self.una = ack;
        (self.backoff, self.probed) = (0, false);
        self.waiting_since = (!self.sent.is_empty()).then_some(now);
        if self.recovery_end.is_some_and(|end| end <= ack) {
            (self.recovery_end, self.timed_out) = (None, false);
        }
    }

    fn on_round_trip(&mut self, rtt: Span) {
        self.round_trip.on_sample(rtt);
        if self.window >= self.threshold {
            return;
        }
        let (end, samples, least, before) = &mut self.round;
        *samples += 1;
        *least = Some(least.map_or(rtt, |l| l.min(rtt)));
        if let (Some(least), Some(before)) = (*least, *before)
            && *samples >= ROUND_SAMPLES
            && least >= before + before.divided(8).clamp(RISE.0, RISE.1)
        {
            self.threshold = self.window;
        }
        if self.una >= *end {
            self.round = (self.next, 0, None, *least);
        }
    }

    fn grow(&mut self, delivered: u64) {
        if self.window < self.threshold {
            self.window += delivered;
            return;
        }
        self.acked += delivered;
        while self.acked >= self.window {
            self.acked -= self.window;
            self.window += self.segment_bytes;
        }
    }

    /// Marks the segments as lost that later ones have overtaken.
    fn find_lost(&mut self, now: Time) {
        self.reordering_until = None;
        let Some((sent_at, end, rtt)) = self.newest else {
            return;
        };
        let slack = self.round_trip.min.unwrap_or(Span::ZERO).divided(4);
        let mut any = false;
        for range in &mut self.sent {
            if !range.is_in_flight() || (range.sent_at, range.end) >= (sent_at, end) {
                continue;
            }
            let due = range.sent_at + rtt + slack;
            if due <= now {
                range.lost = true;
                self.in_flight -= range.length();
                any = true;
            } else {
                let until = self.reordering_until.unwrap_or(due);
                self.reordering_until = Some(until.min(due));
            }
        }
        if any && self.recovery_end.is_none() {
            self.shrink();
            self.window = self.threshold;
        }
    }

    fn shrink(&mut self) {
        self.threshold = (self.window / 2).max(2 * self.segment_bytes);
        self.recovery_end = Some(self.next);
        self.acked = 0;
    }

    /// Handles that segments of this size are too large for the path, after one was refused.
    pub(crate) fn on_too_big(&mut self, segment_bytes: usize) {
        self.segment_bytes = self.segment_bytes.min(segment_bytes as u64).max(1);
        let max = self.segment_bytes;
        for range in &mut self.sent {
            if range.is_in_flight() && range.length() > max {
                range.lost = true;
                self.in_flight -= range.length();
            }
        }
    }

    // ---- timers ----

    fn timer(&self) -> Option<(Time, SenderTimer)> {
        let timeout = self.round_trip.timeout().times(1 << self.backoff.min(16));
        let timeout = timeout.min(TIMEOUT_MAX);
        if self.sent.is_empty() {
            // A window that is closed is probed.
            let waits = self.unsent() > 0 && self.next >= self.window_end;
            return waits.then_some((self.last_sent_at + timeout, SenderTimer::Timeout));
        }
        if let Some(until) = self.reordering_until {
            return Some((until, SenderTimer::Reordering));
        }
        let since = self.waiting_since.unwrap_or(self.last_sent_at);
        let timeout_at = since.max(self.last_sent_at) + timeout;
        let smoothed = self.round_trip.smoothed.filter(|_| !self.probed);
        if let Some(smoothed) = smoothed.filter(|_| self.recovery_end.is_none()) {
            let alone = self.sent.len() == 1;
            let delayed = if alone { DELAYED_ACK_MAX } else { Span::ZERO };
            let probe_at = self.last_sent_at + smoothed.times(2) + delayed;
            if probe_at < timeout_at {
                return Some((probe_at, SenderTimer::TailProbe));
            }
        }
        Some((timeout_at, SenderTimer::Timeout))
    }

    pub(crate) fn next_timeout(&self) -> Option<Time> {
        self.timer().map(|(at, _)| at)
    }

    /// Handles the timer, if it is due.
    pub(crate) fn on_time(&mut self, now: Time) {
        match self.timer() {
            Some((at, timer)) if at <= now => match timer {
                SenderTimer::Reordering => self.find_lost(now),
                SenderTimer::TailProbe => self.probe_tail(),
                SenderTimer::Timeout => self.on_timeout(now),
            },
            _ => {}
        }
    }

    /// Marks the last segment to be sent again, without regard to the window.
    fn probe_tail(&mut self) {
        self.probed = true;
        if let Some(last) = self.sent.back_mut().filter(|last| last.is_in_flight()) {
            last.lost = true;
            self.in_flight -= last.length();
        }
    }

    fn on_timeout(&mut self, now: Time) {
        self.backoff += 1;
        if self.sent.is_empty() {
            // One byte, which the peer answers with its window.
            (self.window_end, self.last_sent_at) = (self.next + 1, now);
            return;
        }
        if !self.timed_out {
            self.shrink();
            self.timed_out = true;
        }
        self.window = self.segment_bytes;
        self.in_flight = 0;
        (self.newest, self.reordering_until) = (None, None);
        for range in self.sent.iter_mut().filter(|range| !range.sacked) {
            range.lost = true;
        }
    }

    // ---- sending ----

    /// The next range to send now, and its bytes, in a segment with so many bytes of SACK blocks.
    pub(crate) fn poll(&mut self, now: Time, sack_bytes: usize) -> Option<(u64, Vec<u8>, bool)> {
        let most = self.segment_bytes.saturating_sub(sack_bytes as u64).max(1);
        let lost = self.poll_lost(now, most);
        let (seq, end) = lost.or_else(|| self.poll_new(now, most))?;
        self.last_sent_at = now;
        self.waiting_since.get_or_insert(now);
        let fin = self.fin_at.is_some_and(|fin| fin < end);
        let from = (seq - self.una) as usize;
        let to = (end - u64::from(fin) - self.una) as usize;
        let bytes = self.data.range(from..to).copied().collect();
        Some((seq, bytes, fin))
    }

    fn poll_lost(&mut self, now: Time, most: u64) -> Option<(u64, u64)> {
        let at = self.sent.iter().position(|range| range.lost)?;
        let range = self.sent[at];
        let probe = self.probed && at + 1 == self.sent.len();
        let length = range.length().min(most);
        if self.in_flight > 0 && self.in_flight + length > self.window && !probe {
            return None;
        }
        let end = range.seq + length;
        if end < range.end {
            // The segments of the path have become smaller.
            self.sent.insert(at + 1, SentRange { seq: end, ..range });
        }
        self.sent[at] = SentRange {
            end,
            sent_at: now,
            lost: false,
            again: true,
            ..range
        };
        self.in_flight += length;
        Some((range.seq, end))
    }

    fn poll_new(&mut self, now: Time, most: u64) -> Option<(u64, u64)> {
        let written = self.una + self.data.len() as u64;
        let length = written.saturating_sub(self.next).min(most);
        let length = length.min(self.window_end.saturating_sub(self.next));
        let all = self.next + length == written;
        let fin = all && self.fin_at.is_some_and(|fin| self.next <= fin);
        let counted = length + u64::from(fin);
        let full = self.in_flight > 0 && self.in_flight + counted > self.window;
        if counted == 0 || full {
            return None;
        }
        let seq = self.next;
        self.next += counted;
        self.in_flight += counted;
        self.sent.push_back(SentRange {
            seq,
            end: self.next,
            sent_at: now,
            sacked: false,
            lost: false,
            again: false,
        });
        Some((seq, self.next))
    }
}
