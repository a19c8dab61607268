//! The receiving half of a connection: puts bytes in order, and says when an ACK is due.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use cedos_lab_link::{Span, Time};

use super::segment::ModelSegment;

/// Bytes that wait for the program or behind a gap, at most. // Linux's tcp_rmem
const RECEIVE_BYTES_MAX: u64 = 6 << 20;
/// How long an ACK waits for another segment. // Linux's TCP_DELACK_MIN
const ACK_DELAY: Span = Span::from_millis(40);
/// The most SACK blocks beside timestamps.
const SACKS_MAX: usize = 3;

/// The receiving half of a connection.
#[derive(Debug, Default)]
pub(crate) struct TcpReceiver {
    /// The next byte that is expected.
    next: u64,
    /// Segments beyond a gap, by their first byte.
    beyond: BTreeMap<u64, Vec<u8>>,
    beyond_bytes: u64,
    /// The newest segment beyond a gap.
    newest: u64,
    /// Bytes in order that the program has not read.
    ready: VecDeque<u8>,
    fin_at: Option<u64>,
    /// Whether the FIN is in order.
    ended: bool,
    /// Segments in order that are not acknowledged.
    unacked: u32,
    /// When an ACK must be sent.
    ack_at: Option<Time>,
    /// When the first segment was sent that is not acknowledged.
    echo: Option<Time>,
    /// The end of the window that was announced last.
    announced: u64,
}

impl TcpReceiver {
    /// Takes a segment. Returns whether it contained bytes that were not known.
    pub(crate) fn on_segment(&mut self, now: Time, segment: ModelSegment) -> bool {
        if segment.length() == 0 {
            return false;
        }
        self.echo.get_or_insert(segment.sent_at);
        let (had_gap, before) = (!self.beyond.is_empty(), self.next);
        if segment.fin {
            self.fin_at = Some(segment.seq + segment.bytes.len() as u64);
        }
        let known = self.next.saturating_sub(segment.seq) as usize;
        let fits = segment.seq + segment.bytes.len() as u64 <= self.window_end();
        let news = if known < segment.bytes.len() && fits {
            let seq = segment.seq.max(self.next);
            let bytes = segment.bytes[known..].to_vec();
            self.keep(seq, bytes)
        } else {
            false
        };
        self.put_in_order();
        let in_order = self.next > before && !had_gap && self.beyond.is_empty();
        self.unacked += 1;
        // RFC 5681 §4.2: at once for every second segment, and for one out of order.
        let at_once = !in_order || self.unacked >= 2 || self.ended;
        let at = if at_once { now } else { now + ACK_DELAY };
        self.ack_at = Some(self.ack_at.map_or(at, |due| due.min(at)));
        news
    }

    fn keep(&mut self, seq: u64, bytes: Vec<u8>) -> bool {
        let longer = |kept: &Vec<u8>| kept.len() < bytes.len();
        if !self.beyond.get(&seq).is_none_or(longer) {
            return false;
        }
        self.newest = seq;
        self.beyond_bytes += bytes.len() as u64;
        if let Some(old) = self.beyond.insert(seq, bytes) {
            self.beyond_bytes -= old.len() as u64;
        }
        true
    }

    fn put_in_order(&mut self) {
        while let Some(entry) = self.beyond.first_entry()
            && *entry.key() <= self.next
        {
            let (seq, bytes) = entry.remove_entry();
            self.beyond_bytes -= bytes.len() as u64;
            let known = (self.next - seq) as usize;
            if known < bytes.len() {
                self.next += (bytes.len() - known) as u64;
                self.ready.extend(&bytes[known..]);
            }
        }
        if !self.ended && self.fin_at == Some(self.next) {
            self.next += 1;
            self.ended = true;
        }
    }

    /// Reads everything that is in order.
    pub(crate) fn read(&mut self, now: Time) -> Vec<u8> {
        let read: Vec<u8> = std::mem::take(&mut self.ready).into();
        // A sender that was told of little room waits to hear of more.
        if !read.is_empty() && self.window_end() - self.announced >= RECEIVE_BYTES_MAX / 2 {
            self.ack_at = Some(now);
        }
        read
    }

    /// Whether everything up to the peer's FIN has arrived.
    pub(crate) fn is_complete(&self) -> bool {
        self.ended
    }

    /// Whether the peer has ended its direction and everything before that was read.
    pub(crate) fn is_ended(&self) -> bool {
        self.ended && self.ready.is_empty()
    }

    /// Records when a SYN was sent that is to be acknowledged.
    pub(crate) fn on_syn(&mut self, sent_at: Time) {
        self.echo = Some(sent_at);
    }

    /// When an ACK is due.
    pub(crate) fn ack_at(&self) -> Option<Time> {
        self.ack_at
    }

    /// Requests an ACK at once.
    pub(crate) fn ack_now(&mut self, now: Time) {
        self.ack_at = Some(now);
    }

    /// Fills in what a segment that is sent now acknowledges.
    pub(crate) fn acknowledge(&mut self, segment: &mut ModelSegment) {
        self.announced = self.window_end();
        segment.ack = Some(self.next);
        segment.sacks = self.sacks();
        segment.window_end = self.announced;
        segment.echo = self.echo.take();
        (self.unacked, self.ack_at) = (0, None);
    }

    fn window_end(&self) -> u64 {
        let held = self.ready.len() as u64 + self.beyond_bytes;
        // A window never shrinks.
        (self.next + RECEIVE_BYTES_MAX.saturating_sub(held)).max(self.announced)
    }

    /// The range with the newest segment, then the last ranges.
    pub(super) fn sacks(&self) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for (seq, bytes) in &self.beyond {
            let end = seq + bytes.len() as u64;
            match ranges.last_mut() {
                Some(last) if *seq <= last.end => last.end = last.end.max(end),
                _ => ranges.push(*seq..end),
            }
        }
        let newest = ranges.iter().position(|r| r.contains(&self.newest));
        let newest = newest.map(|at| ranges.remove(at));
        newest
            .into_iter()
            .chain(ranges.into_iter().rev())
            .take(SACKS_MAX)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(seq: u64, bytes: &[u8]) -> ModelSegment {
        ModelSegment {
            seq,
            bytes: bytes.to_vec(),
            ..ModelSegment::default()
        }
    }

    fn acked(receiver: &mut TcpReceiver) -> ModelSegment {
        let mut ack = ModelSegment::default();
        receiver.acknowledge(&mut ack);
        ack
    }

    #[test]
    fn bytes_behind_a_gap_wait_for_it() {
        let mut receiver = TcpReceiver::default();
        let now = Time::ZERO;
        receiver.on_segment(now, segment(0, b"ab"));
        assert_eq!(receiver.ack_at(), Some(now + ACK_DELAY));
        receiver.on_segment(now, segment(4, b"ef"));
        assert_eq!(receiver.ack_at(), Some(now), "a gap is reported at once");
        receiver.on_segment(now, segment(8, b"ij"));
        assert_eq!(receiver.read(now), b"ab");
        let ack = acked(&mut receiver);
        assert_eq!((ack.ack, ack.sacks), (Some(2), vec![8..10, 4..6]));
        receiver.on_segment(now, segment(1, b"bcdef"));
        assert_eq!(receiver.read(now), b"cdef");
        assert_eq!(acked(&mut receiver).ack, Some(6));
        assert!(!receiver.on_segment(now, segment(2, b"cd")), "known bytes");
    }

    #[test]
    fn the_end_counts_once_everything_before_it_was_read() {
        let mut receiver = TcpReceiver::default();
        let now = Time::ZERO;
        let fin = ModelSegment {
            fin: true,
            ..segment(2, b"c")
        };
        receiver.on_segment(now, fin);
        assert!(!receiver.is_ended());
        receiver.on_segment(now, segment(0, b"ab"));
        assert!(!receiver.is_ended());
        assert_eq!(receiver.read(now), b"abc");
        assert!(receiver.is_ended());
        assert_eq!(acked(&mut receiver).ack, Some(4));
    }

    #[test]
    fn a_program_that_does_not_read_closes_the_window() {
        let mut receiver = TcpReceiver::default();
        let now = Time::ZERO;
        let mut seq = 0;
        let piece = vec![7; 1 << 16];
        while seq < RECEIVE_BYTES_MAX {
            receiver.on_segment(now, segment(seq, &piece));
            seq += piece.len() as u64;
        }
        assert_eq!(acked(&mut receiver).window_end, RECEIVE_BYTES_MAX);
        assert!(!receiver.on_segment(now, segment(seq, &piece)), "no room");
        receiver.acknowledge(&mut ModelSegment::default());
        receiver.read(now);
        assert_eq!(receiver.ack_at(), Some(now), "the sender hears of room");
        assert_eq!(acked(&mut receiver).window_end, seq + RECEIVE_BYTES_MAX);
    }
}
