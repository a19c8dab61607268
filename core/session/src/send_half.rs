//! The sending half of a flow: bytes that were written and are not yet acknowledged.
//!
//! ```text
//!   released        acked_to          next             end
//!  ───┴────────────────┴────────────────┴────────────────┴──▶ offset
//!     │ kept for a durable flow │ in flight, or in `lost` │ written, never sent
//! ```
//!
//! A flow whose bytes can be read again keeps none while it hibernates ([`SendHalf::forget`]). Only
//! the offset `acked_to` remains, and the application is asked for bytes from there.

use std::collections::VecDeque;

use bytes::Bytes;

use crate::memory_pool::MemoryCharge;
use crate::ranges::RangeSet;

/// The memory that a written chunk takes beside its bytes: its entry in the list, which doubles as
/// it grows, and its allocation.
const CHUNK_OVERHEAD_BYTES: u64 = 128;
/// The part of the bytes in flight that is charged for records of sent packets: about 100 bytes for
/// each packet of 1,200.
const SENT_RECORDS_PART: u64 = 8;
/// The room in memory below which a writer waits, so that memory is not filled with chunks of a few
/// bytes.
const WRITE_BYTES_MIN: u64 = 1_024; // a guess

/// The number of unsent bytes of a source that a flow may hold while little is in flight.
const AHEAD_BYTES_MIN: u64 = 64 << 10; // a guess: four times the initial window of a path
/// The number of bytes of a source that are read beyond the peer's credit, so that an end that lies there is
/// sent with the last byte.
const BEYOND_CREDIT_BYTES: u64 = 256; // a guess

/// The sending direction of a flow.
#[derive(Debug)]
pub(crate) struct SendHalf {
    chunks: VecDeque<Bytes>,
    charge: MemoryCharge,
    /// Offset of the first byte in `chunks`.
    released: u64,
    acked_to: u64,
    acked: RangeSet,
    lost: RangeSet,
    next: u64,
    end: u64,
    fin: bool,
    fin_sent: bool,
    fin_acked: bool,
    credit: u64,
    durable: Option<u64>,
    /// The chunk of the last read: its index and the offset of its first byte.
    hint: (usize, u64),
    pub(crate) reset: Option<u64>,
    said_early: u64,
}

impl SendHalf {
    pub(crate) fn new(credit: u64, durable: bool, charge: MemoryCharge) -> Self {
        SendHalf {
            chunks: VecDeque::new(),
            charge,
            released: 0,
            acked_to: 0,
            acked: RangeSet::default(),
            lost: RangeSet::default(),
            next: 0,
            end: 0,
            fin: false,
            fin_sent: false,
            fin_acked: false,
            credit,
            durable: durable.then_some(0),
            hint: (0, 0),
            reset: None,
            said_early: 0,
        }
    }

    /// The sending direction of a flow from a record: everything below `offset` arrived.
    pub(crate) fn restored(
        offset: u64,
        fin_at: Option<u64>,
        complete: bool,
        durable: bool,
        charge: MemoryCharge,
    ) -> Self {
        let mut half = SendHalf::new(0, durable, charge);
        half.released = offset;
        half.acked_to = offset;
        half.next = offset;
        half.end = offset;
        half.hint = (0, offset);
        if durable {
            half.durable = Some(offset);
        }
        if complete && fin_at == Some(offset) {
            half.fin = true;
            half.fin_sent = true;
            half.fin_acked = true;
        }
        half
    }

    /// Appends bytes. The caller has checked [`SendHalf::buffered`] before.
    pub(crate) fn write(&mut self, bytes: Bytes) {
        assert!(!self.fin, "written after the end");
        if bytes.is_empty() {
            return;
        }
        self.end += bytes.len() as u64;
        self.chunks.push_back(bytes);
        self.recharge();
    }

    #[inline]
    fn recharge(&mut self) {
        if self.charge.is_counted() {
            let chunks = self.chunks.len() as u64 * CHUNK_OVERHEAD_BYTES;
            let ranges = self.acked.footprint() + self.lost.footprint();
            let records = self.next.saturating_sub(self.released) / SENT_RECORDS_PART;
            let bytes = self.buffered() + chunks + ranges + records;
            self.charge.resize(bytes);
        }
    }

    /// The number of bytes for which memory has room; zero if it is too little for a write.
    pub(crate) fn memory_room(&self) -> u64 {
        let room = self.charge.room();
        // When the bytes are sent, they also need records.
        let room = (room - room / SENT_RECORDS_PART).saturating_sub(CHUNK_OVERHEAD_BYTES);
        if room < WRITE_BYTES_MIN { 0 } else { room }
    }

    pub(crate) fn finish(&mut self) {
        self.fin = true;
    }
    pub(crate) fn is_finished(&self) -> bool {
        self.fin
    }
    /// The number of bytes held.
    pub(crate) fn buffered(&self) -> u64 {
        self.end - self.released
    }
    /// The number of bytes that may be written if `limit` bytes may be held. Bytes that arrived
    /// beyond a gap do not count, up to as many again: the retransmission of a packet that was lost
    /// in a deep queue takes seconds, and a waiting writer would leave the path idle.
    pub(crate) fn room(&self, limit: u64) -> u64 {
        let beyond: u64 = self.acked.iter().map(|(start, end)| end - start).sum();
        (limit + beyond.min(limit)).saturating_sub(self.buffered())
    }
    /// The number of bytes that a source may add if `limit` bytes may be held: what can be sent soon.
    /// A source can be read again at any time, so bytes that wait here only cost memory.
    pub(crate) fn source_room(&self, limit: u64) -> u64 {
        let within_credit = (self.credit + BEYOND_CREDIT_BYTES).saturating_sub(self.end);
        self.ahead()
            .saturating_sub(self.end.saturating_sub(self.next))
            .min(within_credit)
            .min(self.room(limit))
    }

    /// The number of bytes of a source that may be held and not yet sent: as many as two rounds of
    /// acknowledgements let go, since slow start doubles what is in flight.
    fn ahead(&self) -> u64 {
        let beyond: u64 = self.acked.iter().map(|(start, end)| end - start).sum();
        let in_flight = self.next.saturating_sub(self.acked_to);
        (2 * in_flight.saturating_sub(beyond)).max(AHEAD_BYTES_MIN)
    }

    /// Whether so much was sent that a source is read again: half of [`SendHalf::ahead`], or as much as
    /// the peer's credit allows.
    pub(crate) fn wants_source(&self, limit: u64) -> bool {
        let few = self.end.saturating_sub(self.next) <= self.ahead() / 2;
        few && self.source_room(limit) > 0
    }
    /// The offset of the next byte to be written.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }
    pub(crate) fn acked_to(&self) -> u64 {
        self.acked_to
    }
    /// The offset below which the peer never asks for bytes again: they arrived, and the peer of a
    /// durable flow has also stored them.
    pub(crate) fn safe_to(&self) -> u64 {
        self.durable.map_or(self.acked_to, |d| d.min(self.acked_to))
    }
    /// The offset below which everything was sent at least once.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }
    /// The offset below which the peer may have received everything. Bytes in a SYN or in early packets
    /// do not count as sent.
    pub(crate) fn maybe_received_to(&self) -> u64 {
        self.next.max(self.said_early)
    }
    /// Records that the bytes below `to` were sent early.
    pub(crate) fn note_early(&mut self, to: u64) {
        self.said_early = self.said_early.max(to);
    }
    /// The offset up to which the peer allows sending.
    pub(crate) fn credit(&self) -> u64 {
        self.credit
    }
    pub(crate) fn set_credit(&mut self, max: u64) {
        self.credit = self.credit.max(max);
    }
    /// Whether there are bytes to send. `session_room`: new bytes that the session's credit allows.
    #[inline]
    pub(crate) fn has_data(&self, session_room: u64) -> bool {
        if self.reset.is_some() {
            return false;
        }
        !self.lost.is_empty()
            || (self.next < self.end.min(self.credit) && session_room > 0)
            || (self.fin && !self.fin_sent && self.next == self.end)
    }

    /// Whether lost bytes wait to be sent again.
    pub(crate) fn has_lost(&self) -> bool {
        !self.lost.is_empty() && self.reset.is_none()
    }
    /// Whether there are bytes that were never sent and may be sent.
    pub(crate) fn has_unsent(&self) -> bool {
        self.next < self.end.min(self.credit)
    }

    /// The number of bytes that may be in flight or unread at once.
    pub(crate) fn window(&self) -> u64 {
        self.credit.saturating_sub(self.acked_to)
    }

    /// The number of bytes that were never sent and may be sent, or that were lost.
    pub(crate) fn unsent(&self) -> u64 {
        let lost: u64 = self.lost.iter().map(|(start, end)| end - start).sum();
        lost + self.end.min(self.credit).saturating_sub(self.next)
    }

    /// Whether some of these sent bytes are not known to have arrived.
    pub(crate) fn is_unacked(&self, offset: u64, len: u64) -> bool {
        let end = offset + len;
        self.reset.is_none()
            && offset >= self.released
            && end <= self.next
            && end > self.acked_to
            && self.acked.end_from(offset) < end
    }

    /// Takes the next piece to send, at most `max` bytes: `(offset, length, fin, new bytes)`.
    #[inline]
    pub(crate) fn take(
        &mut self,
        max: usize,
        session_room: u64,
    ) -> Option<(u64, usize, bool, u64)> {
        if !self.lost.is_empty() {
            let (start, len, fin) = self.take_lost(max)?;
            return Some((start, len, fin, 0));
        }
        self.take_unsent(max, session_room)
    }

    /// Takes the next piece of lost data, at most `max` bytes: `(offset, length, fin)`.
    pub(crate) fn take_lost(&mut self, max: usize) -> Option<(u64, usize, bool)> {
        let (start, end) = self.lost.first()?;
        let len = (end - start).min(max as u64);
        if len == 0 {
            return None;
        }
        self.lost.remove(start, start + len);
        let fin = self.fin && start + len == self.end;
        self.fin_sent |= fin;
        Some((start, len as usize, fin))
    }

    /// Takes data that was never sent, in the same form as [`SendHalf::take`].
    #[inline]
    pub(crate) fn take_unsent(
        &mut self,
        max: usize,
        session_room: u64,
    ) -> Option<(u64, usize, bool, u64)> {
        let start = self.next;
        let len = (self.end.min(self.credit).saturating_sub(start))
            .min(session_room)
            .min(max as u64);
        let fin = self.fin && start + len == self.end && !self.fin_sent;
        if len == 0 && !fin {
            return None;
        }
        self.next += len;
        self.fin_sent |= fin;
        Some((start, len as usize, fin, len))
    }

    /// Copies `out.len()` bytes from `offset` on.
    #[inline]
    pub(crate) fn copy(&mut self, offset: u64, out: &mut [u8]) {
        assert!(offset >= self.released && offset + out.len() as u64 <= self.end);
        if out.is_empty() {
            return;
        }
        let (mut index, mut at) = self.hint;
        if at > offset || index >= self.chunks.len() {
            (index, at) = (0, self.released);
        }
        while at + self.chunks[index].len() as u64 <= offset {
            at += self.chunks[index].len() as u64;
            index += 1;
        }
        self.hint = (index, at);
        let mut skip = (offset - at) as usize;
        let mut filled = 0;
        while filled < out.len() {
            let chunk = &self.chunks[index][skip..];
            let n = chunk.len().min(out.len() - filled);
            out[filled..filled + n].copy_from_slice(&chunk[..n]);
            filled += n;
            index += 1;
            skip = 0;
        }
    }

    /// Records acknowledged bytes. Returns true if that made room for writing.
    pub(crate) fn on_acked(&mut self, offset: u64, len: u64, fin: bool) -> bool {
        if fin {
            self.fin_acked = true;
        }
        // After a rewind, packets from before may still be acknowledged; their data will be sent
        // again.
        let len = len.min(self.next.saturating_sub(offset));
        if offset + len > self.acked_to {
            if offset <= self.acked_to && self.acked.is_empty() {
                self.acked_to = offset + len;
            } else {
                self.acked.insert(offset.max(self.acked_to), offset + len);
                if let Some((start, end)) = self.acked.first()
                    && start <= self.acked_to
                {
                    self.acked_to = end;
                    self.acked.pop_first();
                }
            }
        }
        if !self.lost.is_empty() {
            self.lost.remove(offset, offset + len);
        }
        self.release()
    }

    /// Records that the peer has stored everything below `offset`.
    pub(crate) fn on_durable(&mut self, offset: u64) -> bool {
        match &mut self.durable {
            Some(durable) if offset > *durable => *durable = offset.min(self.end),
            _ => return false,
        }
        self.release()
    }

    /// Frees bytes that will never be sent again: for a durable flow, those that are durable
    /// (R-DURABLE-1).
    fn release(&mut self) -> bool {
        let to = self.safe_to();
        let before = self.released;
        while let Some(front) = self.chunks.front_mut() {
            let len = front.len() as u64;
            if self.released + len > to {
                break;
            }
            self.released += len;
            self.chunks.pop_front();
            self.hint = match self.hint {
                (0, _) => (0, self.released),
                (i, at) => (i - 1, at),
            };
        }
        self.recharge();
        self.released != before
    }

    /// Records that bytes were lost and must be sent again.
    pub(crate) fn on_lost(&mut self, offset: u64, len: u64, fin: bool) {
        let (start, end) = (offset.max(self.acked_to), (offset + len).min(self.next));
        if start < end {
            self.lost.insert(start, end);
            let acked: Vec<_> = self.acked.iter().collect();
            for (a, b) in acked {
                self.lost.remove(a, b);
            }
        }
        if fin && !self.fin_acked {
            self.fin_sent = false;
            // A lost end is sent again with the last byte, or alone if that arrived.
        }
    }

    /// Rewinds to `offset`: the peer has everything below it and nothing else, so the rest is sent
    /// as if for the first time. Returns false if bytes from `offset` on are not held here.
    pub(crate) fn rewind(&mut self, offset: u64) -> bool {
        if offset < self.released || offset > self.end {
            return false;
        }
        self.acked.clear();
        self.lost.clear();
        self.acked_to = offset;
        self.next = offset;
        // A peer that crashed may have forgotten an end that it had acknowledged.
        self.fin_sent = false;
        self.fin_acked = false;
        self.release();
        true
    }

    /// Whether sending can resume at `offset` with the bytes held here.
    pub(crate) fn holds(&self, offset: u64) -> bool {
        (self.released..=self.end).contains(&offset)
    }

    /// Records bytes that were sent in early packets. Returns how many are new for the session's
    /// credit.
    pub(crate) fn on_sent_early(&mut self, offset: u64, len: u64, fin: bool) -> u64 {
        let end = offset + len;
        if offset > self.next || end > self.end {
            return 0;
        }
        let new = end.saturating_sub(self.next);
        self.next += new;
        self.fin_sent |= fin && self.fin && end == self.end;
        new
    }

    /// Drops all bytes, because nothing will be sent again.
    pub(crate) fn drop_bytes(&mut self) {
        self.chunks = VecDeque::new();
        self.lost = RangeSet::default();
        self.released = self.end;
        self.hint = (0, self.end);
        self.recharge();
    }

    /// Drops all bytes; the application writes them again from `offset` on.
    pub(crate) fn forget(&mut self, offset: u64) {
        self.chunks = VecDeque::new();
        self.acked = RangeSet::default();
        self.lost = RangeSet::default();
        self.released = offset;
        self.acked_to = offset;
        self.next = offset;
        self.end = offset;
        self.hint = (0, offset);
        self.recharge();
        self.fin = false;
        self.fin_sent = false;
        self.fin_acked = false;
    }

    /// Records that the peer has everything up to the end, which is at `offset`.
    pub(crate) fn complete_at(&mut self, offset: u64) {
        if self.fin && self.end != offset {
            return;
        }
        self.forget(offset);
        self.fin = true;
        self.fin_sent = true;
        self.fin_acked = true;
        if let Some(durable) = &mut self.durable {
            *durable = offset;
        }
    }

    /// Keeps bytes from now on until the peer has stored them.
    pub(crate) fn make_durable(&mut self) {
        self.durable.get_or_insert(self.released);
    }

    /// Whether everything was sent and acknowledged.
    pub(crate) fn is_complete(&self) -> bool {
        self.reset.is_some()
            || (self.fin
                && self.fin_acked
                && self.acked_to == self.end
                && self.durable.is_none_or(|d| d >= self.end))
    }
    pub(crate) fn is_fin_acked(&self) -> bool {
        self.fin_acked
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_pool::MemoryPool;
    use d2tp_seal::PublicKey;
    use proptest::prelude::*;

    fn half(credit: u64, durable: bool) -> SendHalf {
        SendHalf::new(credit, durable, MemoryCharge::default())
    }

    proptest! {
        /// Random sends, losses and ACKs over random chunks: the peer always assembles exactly what
        /// was written.
        #[test]
        fn the_peer_can_always_assemble_what_was_written(
            chunks in proptest::collection::vec(1usize..300, 1..20),
            fates in proptest::collection::vec(0u8..4, 1..400)) {
            let total: usize = chunks.iter().sum();
            let content: Vec<u8> = (0..total).map(|i| (i * 7 % 251) as u8).collect();
            let mut half = half(u64::MAX >> 2, false);
            let mut at = 0;
            for n in chunks {
                half.write(Bytes::copy_from_slice(&content[at..at + n]));
                at += n;
            }
            half.finish();
            let mut got = vec![None; total];
            let mut flying: VecDeque<(u64, usize, bool)> = VecDeque::new();
            let mut fates = fates.into_iter();
            for _ in 0..100_000 {
                if half.is_complete() { break }
                if let Some((offset, len, fin, _)) = half.take(100, u64::MAX) {
                    let mut buf = vec![0; len];
                    half.copy(offset, &mut buf);
                    flying.push_back((offset, len, fin));
                    for (i, b) in buf.into_iter().enumerate() {
                        got[offset as usize + i] = Some(b);
                    }
                }
                match fates.next().unwrap_or(0) {
                    0 | 1 => if let Some((o, l, f)) = flying.pop_front() { half.on_acked(o, l as u64, f); },
                    2 => if let Some((o, l, f)) = flying.pop_back() { half.on_lost(o, l as u64, f); },
                    _ => if let Some((o, l, f)) = flying.pop_back() { half.on_acked(o, l as u64, f); },
                }
            }
            prop_assert!(half.is_complete());
            prop_assert_eq!(got.into_iter().collect::<Option<Vec<u8>>>(), Some(content));
            prop_assert_eq!(half.buffered(), 0);
        }
    }

    #[test]
    fn a_source_is_read_as_far_as_can_be_sent_soon() {
        let mut half = half(1 << 20, false);
        let limit = 4 << 20;
        assert_eq!(half.source_room(limit), AHEAD_BYTES_MIN);
        half.write(Bytes::from(vec![1; AHEAD_BYTES_MIN as usize]));
        assert_eq!(
            (half.source_room(limit), half.wants_source(limit)),
            (0, false)
        );
        half.take(50_000, 1 << 20);
        assert!(half.wants_source(limit), "most of it was sent");
        // Twice of what is in flight may wait.
        assert_eq!(
            half.source_room(limit),
            100_000 - (AHEAD_BYTES_MIN - 50_000)
        );
        half.on_acked(0, 50_000, false);
        assert_eq!(half.source_room(limit), 50_000);
    }

    #[test]
    fn a_source_is_not_read_far_beyond_the_credit_of_the_peer() {
        let mut half = half(4_096, false);
        assert_eq!(half.source_room(4 << 20), 4_096 + BEYOND_CREDIT_BYTES);
        half.write(Bytes::from(vec![1; 4_096 + BEYOND_CREDIT_BYTES as usize]));
        half.take(4_096, 1 << 20);
        assert!(!half.wants_source(4 << 20));
        half.set_credit(6_144);
        assert!(half.wants_source(4 << 20));
        assert_eq!(half.source_room(4 << 20), 2_048);
    }

    #[test]
    fn what_arrived_beyond_a_hole_makes_room_up_to_as_much_again() {
        let mut half = half(1_000, false);
        half.write(Bytes::from(vec![1; 100]));
        half.take(10, 1_000);
        half.take(90, 1_000);
        assert_eq!(half.room(100), 0);
        half.on_acked(10, 90, false);
        assert_eq!((half.buffered(), half.room(100)), (100, 90));
        half.write(Bytes::from(vec![2; 90]));
        half.take(90, 1_000);
        half.on_acked(100, 90, false);
        assert_eq!(
            half.room(100),
            10,
            "180 arrived, but no more than 200 are held"
        );
        half.on_acked(0, 10, false);
        assert_eq!((half.buffered(), half.room(100)), (0, 100));
    }

    #[test]
    fn a_durable_flow_keeps_bytes_until_they_are_safe() {
        // R-DURABLE-1
        let mut half = half(1_000, true);
        half.write(Bytes::from_static(&[1; 100]));
        half.take(100, 1_000);
        half.on_acked(0, 100, false);
        assert_eq!((half.buffered(), half.acked_to()), (100, 100));
        half.on_durable(100);
        assert_eq!(half.buffered(), 0);
    }

    #[test]
    fn after_a_rewind_the_end_is_sent_until_it_is_acknowledged_again() {
        // Its packet had arrived before an earlier one, and the peer forgot both.
        let mut half = half(1_000, false);
        half.write(Bytes::from_static(&[1; 100]));
        half.finish();
        assert_eq!(half.take(50, 1_000), Some((0, 50, false, 50)));
        assert_eq!(half.take(50, 1_000), Some((50, 50, true, 50)));
        half.on_acked(50, 50, true);
        assert!(half.rewind(0));
        assert_eq!(half.take(100, 1_000), Some((0, 100, true, 100)));
        half.on_lost(0, 100, true);
        assert_eq!(half.take(100, 1_000), Some((0, 100, true, 0)));
        half.on_acked(0, 100, true);
        assert!(half.is_complete());
        half.forget(10);
        half.write(Bytes::from_static(&[1; 90]));
        half.finish();
        assert!(!half.is_complete() && !half.is_fin_acked());
    }

    #[test]
    fn a_durable_flow_goes_back_only_to_what_is_safe() {
        // R-CRASH-1: a record contains only durable data.
        let mut half = half(1_000, true);
        half.write(Bytes::from_static(&[1; 100]));
        half.take(100, 1_000);
        half.on_acked(0, 100, false);
        half.on_durable(60);
        assert_eq!(half.safe_to(), 60);
    }

    #[test]
    fn an_end_alone_needs_no_bytes() {
        let mut half = half(1_000, false);
        half.write(Bytes::from_static(b"x"));
        half.take(10, 10);
        half.on_acked(0, 1, false);
        half.finish();
        assert_eq!(half.take(10, 10), Some((1, 0, true, 0)));
        half.copy(1, &mut []);
    }

    #[test]
    fn a_peer_that_lost_what_it_had_gets_the_end_again() {
        for forgets in [false, true] {
            let mut half = half(1_000, true);
            half.write(Bytes::from_static(&[1; 10]));
            half.finish();
            half.take(10, 10);
            half.on_acked(0, 10, true);
            assert!(half.is_fin_acked());
            if forgets {
                half.forget(4);
                half.write(Bytes::from_static(&[1; 6]));
                half.finish();
            } else {
                assert!(half.rewind(4));
            }
            assert_eq!(half.take(10, 10), Some((4, 6, true, 6)));
            half.on_lost(4, 6, true);
            assert_eq!(half.take(10, 10), Some((4, 6, true, 0)), "with its end");
        }
    }

    #[test]
    fn credit_bounds_new_bytes_only() {
        let mut half = half(10, false);
        half.write(Bytes::from_static(&[1; 100]));
        assert_eq!(half.take(100, 1_000), Some((0, 10, false, 10)));
        assert_eq!(half.take(100, 1_000), None);
        half.on_lost(0, 10, false);
        assert_eq!(half.take(4, 0), Some((0, 4, false, 0)));
    }

    #[test]
    fn what_is_charged_covers_many_small_chunks_and_goes_when_they_arrived() {
        let pool = MemoryPool::new(1_000_000);
        let charge = pool.account(PublicKey([1; 32])).charge();
        let mut half = SendHalf::new(1 << 20, false, charge);
        let mut written = 0;
        while half.memory_room() > 0 {
            half.write(Bytes::from_static(b"x"));
            written += 1;
        }
        assert!(written < 200_000 / 64, "{written} chunks of a byte");
        assert!((190_000..=200_000).contains(&pool.used()));
        half.take(written, 1 << 20);
        half.on_acked(0, written as u64, false);
        assert_eq!(pool.used(), 0);
        assert!(half.memory_room() > 100_000);
    }
}
