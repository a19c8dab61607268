//! The receiving half of a flow: received bytes, which are put in order and kept until they are
//! read.
//!
//! Bytes are stored in blocks of [`BLOCK_BYTES`]. A block holds pieces that do not touch each
//! other. Each piece is allocated by its size, so an isolated piece costs its length and
//! [`PIECE_OVERHEAD_BYTES`]. A block is allocated as a whole only if bytes arrive in sequence, one
//! block after another. A complete block is passed to the reader without a copy.
//!
//! Allocated memory is charged to the peer's key. Bytes that find no room there are neither kept
//! nor acknowledged (R-FLOW-6).

use std::collections::VecDeque;

use bytes::Bytes;
use d2tp_wire::FlowId;

use crate::config::FLOW_GAPS_MAX;
use crate::event::PeerFault;
use crate::memory_pool::MemoryCharge;
use crate::ranges::RangeSet;

/// Bytes of a receive block.
pub(crate) const BLOCK_BYTES: u64 = 16 * 1024;
/// The memory that a piece takes beside its bytes: its entry in the block's list, which doubles as
/// it grows, and the allocator's own overhead.
const PIECE_OVERHEAD_BYTES: u64 = 96;
/// The most pieces of a block: as many as it has gaps. A further one is not kept (R-FLOW-6),
/// because each insertion moves the pieces behind it. Packets of 32 bytes, of which every second
/// one is lost, make this many.
const PIECES_MAX: usize = 256;
/// The memory that a flow costs a host before any byte arrives: its state here, in the driver and
/// in an application.
pub(crate) const FLOW_BYTES: u64 = 4 * 1024; // a guess: the state here is a quarter of it

/// Consecutive received bytes of a block.
#[derive(Debug)]
struct ReceivedPiece {
    /// The offset of the piece within its block.
    start: usize,
    bytes: Vec<u8>,
}

impl ReceivedPiece {
    fn end(&self) -> usize {
        self.start + self.bytes.len()
    }

    /// The memory that the piece takes.
    fn footprint(&self) -> u64 {
        // Allocators do not allocate less than 24 bytes.
        PIECE_OVERHEAD_BYTES + self.bytes.capacity().max(24) as u64
    }

    fn is_whole_block(&self) -> bool {
        self.bytes.len() as u64 == BLOCK_BYTES
    }
}

/// The receiving direction of a flow.
#[derive(Debug)]
pub(crate) struct RecvHalf {
    /// The pieces of each block, in order.
    blocks: VecDeque<Vec<ReceivedPiece>>,
    /// The memory that all pieces take.
    held: u64,
    charge: MemoryCharge,
    first_block: u64,
    read_to: u64,
    received: RangeSet,
    final_size: Option<u64>,
    /// The highest offset received.
    reached: u64,
    credit: u64,
    windows: FlowWindows,
    /// The bytes that may be in flight or unread now.
    window: u64,
    /// Whether the window ever was larger than that of a new flow.
    has_grown: bool,
    advertised_credit: u64,
    durable: u64,
    pub(crate) reset: Option<u64>,
    /// How many bytes the peer sent before its RESET.
    reset_size: Option<u64>,
    pub(crate) stopped: Option<u64>,
    end_read: bool,
    /// Whether the peer may have been given more credit before a crash than the record tells.
    is_restored: bool,
    duplicate: u64,
}

/// How many bytes of a flow may be in flight or unread: while nothing was read, and at most.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlowWindows {
    pub(crate) first: u64,
    pub(crate) max: u64,
}

/// Bytes of a flow that the application has not read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArrivedBytes {
    /// Bytes that can be read now.
    pub readable: u64,
    /// Bytes that arrived and wait for lost ones before them.
    pub after_gap: u64,
    /// Bytes before those that have not arrived.
    pub missing: u64,
}

/// The effects of received bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReceivedChange {
    /// How far the flow's highest offset advanced, which counts against the session's credit.
    pub(crate) advanced: u64,
    /// Bytes that had not been received before.
    pub(crate) new: u64,
    /// Whether bytes became readable.
    pub(crate) readable: bool,
    /// Whether data could not be stored, so that its packet must not be acknowledged.
    pub(crate) unkept: bool,
}

impl RecvHalf {
    pub(crate) fn new(windows: FlowWindows, charge: MemoryCharge) -> Self {
        let window = windows.first;
        let mut half = RecvHalf {
            blocks: VecDeque::new(),
            held: 0,
            charge,
            first_block: 0,
            read_to: 0,
            received: RangeSet::default(),
            final_size: None,
            reached: 0,
            credit: window,
            windows,
            window,
            has_grown: false,
            advertised_credit: window,
            durable: 0,
            reset: None,
            reset_size: None,
            stopped: None,
            end_read: false,
            is_restored: false,
            duplicate: 0,
        };
        half.recharge();
        half
    }

    /// The receiving direction of a flow from a record: the application has everything below `offset`.
    pub(crate) fn restored(
        windows: FlowWindows,
        charge: MemoryCharge,
        offset: u64,
        final_size: Option<u64>,
        end_read: bool,
    ) -> Self {
        let mut half = RecvHalf::new(windows, charge);
        half.first_block = offset / BLOCK_BYTES;
        half.read_to = offset;
        half.reached = offset;
        half.durable = offset;
        half.credit = offset + windows.first;
        half.advertised_credit = 0;
        half.final_size = final_size;
        half.end_read = end_read;
        half.is_restored = true;
        half
    }

    /// Gives the peer as much credit as it had at most before a crash, after which everything was kept that was read: it
    /// may be sending by that.
    pub(crate) fn renew_credit(&mut self) {
        self.credit = self.credit.max(self.read_to + self.windows.max);
    }

    /// The most gaps to keep: as many as a window of full-size packets has if every second one is
    /// missing, and at least [`FLOW_GAPS_MAX`]. The window limits their memory whatever their
    /// number.
    fn gaps_max(&self) -> usize {
        FLOW_GAPS_MAX.max((self.windows.max / 2048) as usize)
    }

    fn is_block_full_of_gaps(&self, offset: u64) -> bool {
        let index = (offset / BLOCK_BYTES - self.first_block) as usize;
        self.blocks
            .get(index)
            .is_some_and(|block| block.len() >= PIECES_MAX)
    }

    /// The number of gaps in the received bytes.
    pub(crate) fn gaps(&self) -> usize {
        self.received.len()
    }

    /// The end of the bytes that arrived without a gap.
    pub(crate) fn contiguous(&self) -> u64 {
        self.received.end_from(self.read_to).max(self.read_to)
    }
    /// The bytes that are not read.
    pub(crate) fn arrived(&self) -> ArrivedBytes {
        let from = self.contiguous();
        let later = self.received.iter();
        let after_gap = later
            .map(|(start, end)| end.saturating_sub(start.max(from)))
            .sum();
        ArrivedBytes {
            readable: self.readable(),
            after_gap,
            missing: self.reached.saturating_sub(from + after_gap),
        }
    }
    /// Whether bytes are missing before others that were received.
    pub(crate) fn has_gap(&self) -> bool {
        !self.is_complete() && self.reached > self.contiguous()
    }
    /// The offset of the next byte to be read.
    pub(crate) fn read_to(&self) -> u64 {
        self.read_to
    }
    pub(crate) fn final_size(&self) -> Option<u64> {
        self.final_size
    }
    /// The number of bytes that arrived more than once.
    pub(crate) fn duplicate(&self) -> u64 {
        self.duplicate
    }
    /// The highest offset received.
    pub(crate) fn reached(&self) -> u64 {
        self.reached
    }

    /// The number of bytes up to the highest offset that are to be read.
    pub(crate) fn unread(&self) -> u64 {
        match self.is_complete() {
            true => 0,
            false => self.reached - self.read_to,
        }
    }

    /// Handles received bytes.
    #[inline]
    pub(crate) fn on_data(
        &mut self,
        flow: FlowId,
        offset: u64,
        data: &[u8],
        fin: bool,
    ) -> Result<ReceivedChange, PeerFault> {
        let end = offset + data.len() as u64;
        // R-FLOW-4
        if let Some(size) = self.final_size.or(self.reset_size)
            && (end > size || (fin && end != size))
        {
            return Err(PeerFault::FinalSize {
                flow,
                was: size,
                now: end,
            });
        }
        if end > self.credit && self.is_restored {
            // By credit from before a crash. It is sent again when there is credit now.
            return Ok(ReceivedChange {
                unkept: true,
                ..ReceivedChange::default()
            });
        }
        if end > self.credit {
            return Err(PeerFault::OverCredit {
                flow: Some(flow),
                end,
                credit: self.credit,
            });
        }
        // R-FLOW-6: a piece that would open one gap too many is neither kept nor acknowledged.
        let start = offset.max(self.read_to);
        let wanted = start < end && self.reset.is_none() && self.stopped.is_none();
        let gap = start > self.read_to && !self.received.touches(start, end);
        let crowded = gap
            && (self.received.len() >= self.gaps_max()
                || self.is_block_full_of_gaps(start)
                || self.is_block_full_of_gaps(end));
        if wanted && (crowded || !self.charge.has_room(self.growth(start, end))) {
            return Ok(ReceivedChange {
                unkept: true,
                ..ReceivedChange::default()
            });
        }
        if fin {
            if end < self.reached {
                return Err(PeerFault::FinalSize {
                    flow,
                    was: self.reached,
                    now: end,
                });
            }
            self.final_size = Some(end);
        }
        let advanced = end.saturating_sub(self.reached);
        self.reached = self.reached.max(end);
        let before = self.contiguous();
        let had_end = fin && !self.end_read;
        let mut new = 0;
        if wanted {
            new = self.received.insert(start, end);
            self.store(start, &data[(start - offset) as usize..]);
            self.recharge();
        }
        self.duplicate += data.len() as u64 - new.min(data.len() as u64);
        let readable = self.contiguous() > before || had_end;
        Ok(ReceivedChange {
            advanced,
            new,
            readable,
            unkept: false,
        })
    }

    /// The memory that the flow takes here.
    fn footprint(&self) -> u64 {
        let lists = self.blocks.capacity() * size_of::<Vec<ReceivedPiece>>();
        FLOW_BYTES + self.held + lists as u64 + self.received.footprint()
    }

    #[inline]
    fn recharge(&mut self) {
        if self.charge.is_counted() {
            self.charge.resize(self.footprint());
        }
    }

    /// A lower bound of the memory that `start..end` would add; zero if it fits into allocated
    /// memory.
    #[inline]
    fn growth(&self, start: u64, end: u64) -> u64 {
        if !self.charge.is_counted() {
            return 0;
        }
        let index = (start / BLOCK_BYTES - self.first_block) as usize;
        let at = (start % BLOCK_BYTES) as usize;
        let len = (end - start) as usize;
        if let Some(last) = self.blocks.get(index).and_then(|block| block.last())
            && last.end() == at
            && last.bytes.len() + len <= last.bytes.capacity()
        {
            return 0;
        }
        let lists = (index + 2).saturating_sub(self.blocks.capacity());
        let lists = (2 * lists * size_of::<Vec<ReceivedPiece>>()) as u64;
        len as u64 + 2 * PIECE_OVERHEAD_BYTES + lists
    }

    #[inline]
    fn store(&mut self, mut offset: u64, mut data: &[u8]) {
        while !data.is_empty() {
            let index = (offset / BLOCK_BYTES - self.first_block) as usize;
            let at = (offset % BLOCK_BYTES) as usize;
            let n = data.len().min(BLOCK_BYTES as usize - at);
            if self.blocks.len() <= index {
                self.blocks.resize_with(index + 1, Vec::new);
            }
            match &mut self.blocks[index][..] {
                // The common case, arrival in order: nothing is allocated or copied twice.
                [piece] if piece.end() == at && piece.bytes.capacity() - piece.bytes.len() >= n => {
                    piece.bytes.extend_from_slice(&data[..n]);
                }
                _ => self.store_in_block(index, at, &data[..n]),
            }
            offset += n as u64;
            data = &data[n..];
        }
    }

    /// Adds bytes to a block in which no piece has room for them yet.
    fn store_in_block(&mut self, index: usize, at: usize, data: &[u8]) {
        // Bytes that follow a complete block are a stream, so their block will be filled as well.
        let streams = at == 0
            && match index.checked_sub(1) {
                None => self.first_block > 0,
                Some(before) => self.blocks[before]
                    .first()
                    .is_some_and(ReceivedPiece::is_whole_block),
            };
        let most = BLOCK_BYTES as usize;
        let room = self.charge.room();
        let reserve = |bytes: &mut Vec<u8>, needed: usize| {
            let wish = if streams { most } else { 2 * bytes.capacity() };
            let wish = wish.clamp(needed, most);
            let capacity = if wish as u64 <= room { wish } else { needed };
            if bytes.capacity() < needed {
                bytes.reserve_exact(capacity - bytes.len());
            }
        };
        let block = &mut self.blocks[index];
        let i = block.partition_point(|piece| piece.end() < at);
        if block.get(i).is_none_or(|piece| piece.start > at) {
            let mut bytes = Vec::new();
            reserve(&mut bytes, data.len());
            bytes.extend_from_slice(data);
            if block.is_empty() {
                block.reserve_exact(1);
            }
            block.insert(i, ReceivedPiece { start: at, bytes });
        } else {
            let piece = &mut block[i];
            self.held -= piece.footprint();
            let (from, len) = (at - piece.start, piece.bytes.len());
            let known = data.len().min(len - from);
            piece.bytes[from..from + known].copy_from_slice(&data[..known]);
            reserve(&mut piece.bytes, len + data.len() - known);
            piece.bytes.extend_from_slice(&data[known..]);
        }
        // The piece may now reach the following ones.
        while block
            .get(i + 1)
            .is_some_and(|next| next.start <= block[i].end())
        {
            let next = block.remove(i + 1);
            self.held -= next.footprint();
            let piece = &mut block[i];
            let known = piece.end() - next.start;
            if let Some(rest) = next.bytes.get(known..) {
                let needed = piece.bytes.len() + rest.len();
                reserve(&mut piece.bytes, needed);
                piece.bytes.extend_from_slice(rest);
            }
        }
        self.held += block[i].footprint();
    }

    /// The piece with the next bytes to be read, and their offset in it.
    fn front_piece(&self) -> (&ReceivedPiece, usize) {
        let piece = self.blocks[0].first().expect("received bytes have a piece");
        (piece, (self.read_to % BLOCK_BYTES) as usize - piece.start)
    }

    /// The number of bytes ready to be read.
    pub(crate) fn readable(&self) -> u64 {
        self.contiguous() - self.read_to
    }
    /// Whether the reader reached the end, or the end follows immediately.
    pub(crate) fn is_at_end(&self) -> bool {
        self.final_size == Some(self.read_to)
    }

    /// Reads into `out`. Zero means that nothing is available, or the end
    /// ([`RecvHalf::is_at_end`]).
    pub(crate) fn read(&mut self, out: &mut [u8]) -> usize {
        let total = (self.readable() as usize).min(out.len());
        let mut filled = 0;
        while filled < total {
            let at = (self.read_to % BLOCK_BYTES) as usize;
            let n = (total - filled).min(BLOCK_BYTES as usize - at);
            let (piece, from) = self.front_piece();
            out[filled..filled + n].copy_from_slice(&piece.bytes[from..from + n]);
            filled += n;
            self.advance(n as u64);
        }
        self.recharge();
        self.end_read |= self.is_at_end();
        total
    }

    /// Passes what arrived without a gap and is not read to `f`, from `offset` on, piece by piece.
    pub(crate) fn visit_unread(&self, offset: u64, mut f: impl FnMut(u64, &[u8])) {
        let (mut at, to) = (offset.max(self.read_to), self.contiguous());
        while at < to {
            let block = &self.blocks[(at / BLOCK_BYTES - self.first_block) as usize];
            let start = (at % BLOCK_BYTES) as usize;
            let holds = |piece: &&ReceivedPiece| (piece.start..piece.end()).contains(&start);
            let piece = block.iter().find(holds);
            let piece = piece.expect("received bytes have a piece");
            let bytes = &piece.bytes[start - piece.start..];
            let bytes = &bytes[..bytes.len().min((to - at) as usize)];
            f(at, bytes);
            at += bytes.len() as u64;
        }
    }

    /// Reads the next bytes as a chunk of their own, at most one block.
    pub(crate) fn read_chunk(&mut self, max: usize) -> Option<Bytes> {
        let at = (self.read_to % BLOCK_BYTES) as usize;
        let n = (self.readable() as usize)
            .min(BLOCK_BYTES as usize - at)
            .min(max);
        if n == 0 {
            self.end_read |= self.is_at_end();
            return None;
        }
        let chunk = if at + n == BLOCK_BYTES as usize {
            let (_, from) = self.front_piece();
            let piece = self.blocks[0].remove(0);
            self.held -= piece.footprint();
            let mut whole = Bytes::from(piece.bytes);
            whole.split_off(from)
        } else {
            let (piece, from) = self.front_piece();
            Bytes::copy_from_slice(&piece.bytes[from..from + n])
        };
        self.advance(n as u64);
        self.recharge();
        self.end_read |= self.is_at_end();
        Some(chunk)
    }

    fn advance(&mut self, n: u64) {
        self.read_to += n;
        while self.first_block < self.read_to / BLOCK_BYTES {
            let read = self.blocks.pop_front().unwrap_or_default();
            self.held -= read.iter().map(ReceivedPiece::footprint).sum::<u64>();
            self.first_block += 1;
        }
        self.received.remove_below(self.read_to);
        self.credit = self.credit.max(self.read_to + self.window);
    }

    /// R-FLOW-13: sets how many bytes may be in flight or unread beside those of other flows. The window grows by as much as
    /// is read, so a reader that keeps pace has the whole one after it has read as many bytes.
    pub(crate) fn set_share(&mut self, share: u64) {
        let FlowWindows { first, max } = self.windows;
        self.window = share.clamp(
            first,
            max.min(first.saturating_add(self.read_to)).max(first),
        );
        self.has_grown |= self.window > first;
        self.credit = self.credit.max(self.read_to + self.window);
    }

    /// Whether the window ever was larger than that of a new flow.
    pub(crate) fn has_grown(&self) -> bool {
        self.has_grown
    }

    /// Whether the credit has grown enough to be announced.
    pub(crate) fn wants_credit(&self) -> bool {
        self.final_size.is_none()
            && self.reset.is_none()
            && self.credit - self.advertised_credit >= self.window / 4
    }
    /// The credit to announce to the peer.
    pub(crate) fn credit(&self) -> u64 {
        self.credit
    }
    pub(crate) fn take_credit(&mut self) -> u64 {
        self.advertised_credit = self.credit;
        self.credit
    }

    /// Records that the application has stored everything below `offset`. Returns true if that is
    /// new.
    pub(crate) fn set_durable(&mut self, offset: u64) -> bool {
        let offset = offset.min(self.read_to);
        let news = offset > self.durable;
        self.durable = self.durable.max(offset);
        news
    }
    pub(crate) fn durable(&self) -> u64 {
        self.durable
    }

    /// Ends the direction because the peer abandoned it after `size` bytes. Those that have not arrived count as received
    /// (R-FLOW-7), so they must not count again when they arrive late.
    pub(crate) fn end_by_reset(&mut self, code: u64, size: u64) {
        self.discard();
        (self.reset, self.reset_size) = (Some(code), Some(size));
        self.reached = size;
    }

    /// Drops unread bytes that will not be read. The counts remain.
    pub(crate) fn discard(&mut self) {
        self.blocks = VecDeque::new();
        self.held = 0;
        self.received = RangeSet::default();
        self.first_block = self.read_to / BLOCK_BYTES;
        self.recharge();
    }

    /// Returns the charge of bytes that were read and are not delivered yet.
    pub(crate) fn take_charge(&mut self, delivered: u64) -> MemoryCharge {
        let mut charge = std::mem::take(&mut self.charge);
        charge.resize(delivered);
        charge
    }
    /// Whether the total number of bytes the peer sent is known, so that the session's credit is exact.
    pub(crate) fn is_counted(&self) -> bool {
        self.stopped.is_none()
            || self.reset.is_some()
            || self.final_size.is_some_and(|size| self.reached >= size)
    }

    /// Drops unread bytes of a hibernating flow: they will be sent again.
    pub(crate) fn forget_unread(&mut self) {
        self.discard();
        self.reached = self.read_to;
        self.reset_size = None;
        if self.final_size != Some(self.read_to) {
            self.final_size = None;
        }
    }

    /// Drops bytes beyond a gap: after a resume both ends continue from the end of the contiguous
    /// bytes.
    pub(crate) fn forget_gaps(&mut self) {
        let end = self.contiguous();
        if end == self.read_to {
            return self.forget_unread();
        }
        self.received.clear();
        self.received.insert(self.read_to, end);
        self.reached = end;
        self.reset_size = None;
        let blocks = (end.div_ceil(BLOCK_BYTES) - self.first_block) as usize;
        self.blocks.truncate(blocks);
        let end_block = (end / BLOCK_BYTES - self.first_block) as usize;
        if let Some(last) = self.blocks.get_mut(end_block) {
            last.retain(|piece| piece.start < (end % BLOCK_BYTES) as usize);
        }
        let pieces = self.blocks.iter().flatten();
        self.held = pieces.map(ReceivedPiece::footprint).sum();
        self.recharge();
        if self.final_size != Some(end) {
            self.final_size = None;
        }
    }
    /// Marks the credit to be announced again, because the peer forgot it.
    pub(crate) fn resend_credit(&mut self) {
        self.advertised_credit = 0;
    }

    /// Whether nothing remains to be read.
    pub(crate) fn is_complete(&self) -> bool {
        self.end_read || self.reset.is_some() || self.stopped.is_some()
    }
    /// Whether everything the peer sends has arrived.
    pub(crate) fn is_all_received(&self) -> bool {
        self.final_size
            .is_some_and(|size| self.contiguous() >= size)
    }
    /// The number of bytes allocated for unread data, as a test counts them.
    #[cfg(test)]
    fn allocated(&self) -> u64 {
        let list = size_of::<ReceivedPiece>();
        let lists: usize = self
            .blocks
            .iter()
            .map(|block| block.capacity() * list)
            .sum();
        let pieces = self.blocks.iter().flatten();
        let bytes: usize = pieces.map(|piece| piece.bytes.capacity()).sum();
        (lists + bytes + self.blocks.capacity() * size_of::<Vec<ReceivedPiece>>()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_pool::MemoryPool;
    use d2tp_seal::PublicKey;
    use proptest::prelude::*;

    const FLOW: FlowId = FlowId(0);

    /// A window that is as large from the start as it gets.
    fn fixed(window: u64) -> FlowWindows {
        FlowWindows {
            first: window,
            max: window,
        }
    }

    fn half(window: u64) -> RecvHalf {
        RecvHalf::new(fixed(window), MemoryCharge::default())
    }

    proptest! {
        /// Whatever arrived, and however much of it was read: what is visited is what is read then.
        #[test]
        fn what_is_visited_is_what_is_read_next(
            pieces in proptest::collection::vec((0u64..60_000, 1u64..9_000), 1..60),
            read in 0usize..40_000, skip in 0u64..30_000) {
            let byte = |at: u64| (at.wrapping_mul(31) >> 3) as u8;
            let mut half = half(1 << 20);
            for (at, len) in pieces {
                let data: Vec<u8> = (at..at + len).map(byte).collect();
                half.on_data(FLOW, at, &data, false).unwrap();
            }
            half.read(&mut vec![0; read]);
            let from = half.read_to() + skip;
            let mut at = from;
            half.visit_unread(from, |offset, bytes| {
                assert_eq!(offset, at);
                assert!(bytes.iter().zip(at..).all(|(found, at)| *found == byte(at)));
                at += bytes.len() as u64;
            });
            prop_assert_eq!(at, half.contiguous().max(from));
        }
    }

    #[test]
    fn a_peer_that_sends_by_credit_from_before_a_crash_breaks_no_rule() {
        let windows = FlowWindows {
            first: 100,
            max: 1000,
        };
        let charge = MemoryCharge::default;
        let mut half = RecvHalf::restored(windows, charge(), 500, None, false);
        let beyond = half.on_data(FLOW, 590, &[0; 20], false).unwrap();
        assert!(beyond.unkept && beyond.advanced == 0);
        half.renew_credit();
        assert!(!half.on_data(FLOW, 590, &[0; 20], false).unwrap().unkept);
        assert_eq!(half.take_credit(), 1500);
        let mut new = RecvHalf::new(windows, charge());
        assert!(new.on_data(FLOW, 90, &[0; 20], false).is_err());
    }

    #[test]
    fn what_is_not_read_lies_before_or_after_a_gap() {
        let mut half = half(100);
        half.on_data(FLOW, 0, &[0; 10], false).unwrap();
        half.on_data(FLOW, 20, &[0; 5], false).unwrap();
        half.on_data(FLOW, 30, &[0; 5], false).unwrap();
        assert_eq!(half.read(&mut [0; 4]), 4);
        let with_gaps = ArrivedBytes {
            readable: 6,
            after_gap: 10,
            missing: 15,
        };
        assert_eq!(half.arrived(), with_gaps);
        half.on_data(FLOW, 10, &[0; 20], false).unwrap();
        let whole = ArrivedBytes {
            readable: 31,
            ..ArrivedBytes::default()
        };
        assert_eq!(half.arrived(), whole);
        assert_eq!(half.read(&mut [0; 100]), 31);
        assert_eq!(half.arrived(), ArrivedBytes::default());
    }

    proptest! {
        #[test]
        fn what_is_read_is_a_prefix_of_what_was_sent(
            total in 1usize..60_000,
            pieces in proptest::collection::vec((0usize..60_000, 1usize..3_000), 1..80),
            reads in proptest::collection::vec(1usize..40_000, 1..80)) {
            let content: Vec<u8> = (0..total).map(|i| (i % 253) as u8).collect();
            let mut half = half(1 << 20);
            let mut got = Vec::new();
            let mut pieces = pieces.into_iter();
            let mut reads = reads.into_iter().cycle();
            let mut next = 0;
            while !half.is_complete() {
                // First random pieces, then the rest in order.
                let (start, len) = match pieces.next() {
                    Some((s, l)) => (s % total, l),
                    None => { let s = next; next += 2_000; (s, 2_000) }
                };
                let end = (start + len).min(total);
                if start <= end {
                    half.on_data(FLOW, start as u64, &content[start..end], end == total).unwrap();
                }
                let n = reads.next().unwrap();
                if n % 2 == 0 {
                    while let Some(chunk) = half.read_chunk(n) { got.extend_from_slice(&chunk); }
                } else {
                    let mut buf = vec![0; n];
                    let n = half.read(&mut buf);
                    got.extend_from_slice(&buf[..n]);
                }
                prop_assert!(content.starts_with(&got));
            }
            prop_assert_eq!(got, content);
        }
    }

    #[test]
    fn more_than_the_credit_and_a_changing_length_are_faults() {
        let mut half = half(100);
        assert!(matches!(
            half.on_data(FLOW, 90, &[0; 11], false),
            Err(PeerFault::OverCredit { .. })
        ));
        half.on_data(FLOW, 0, &[0; 50], true).unwrap();
        assert!(matches!(
            half.on_data(FLOW, 0, &[0; 40], true),
            Err(PeerFault::FinalSize { .. })
        ));
        assert!(matches!(
            half.on_data(FLOW, 50, &[0; 1], false),
            Err(PeerFault::FinalSize { .. })
        ));
    }

    #[test]
    fn gaps_are_bounded_and_memory_by_the_window() {
        let mut half = half(1 << 19);
        let mut unkept = 0;
        for i in 0..10_000u64 {
            let arrival = half.on_data(FLOW, 1 + i * 50, &[7], false).unwrap();
            unkept += u64::from(arrival.unkept);
        }
        assert_eq!(half.received.len(), half.gaps_max());
        assert_eq!(unkept, 10_000 - half.gaps_max() as u64);
        assert!(half.allocated() <= 1 << 19);
        assert_eq!(half.reached(), 1 + 50 * (half.gaps_max() as u64 - 1) + 1);
    }

    proptest! {
        /// Pieces at any offsets, overlapping or not: the charge always covers the allocated
        /// memory.
        #[test]
        fn what_is_charged_is_at_least_what_is_allocated(
            pieces in proptest::collection::vec((0usize..200_000, 1usize..3_000), 1..300),
            read in 0usize..100) {
            let pool = MemoryPool::new(1 << 30);
            let charge = pool.account(PublicKey([1; 32])).charge();
            let mut half = RecvHalf::new(fixed(1 << 20), charge);
            for (i, (start, len)) in pieces.into_iter().enumerate() {
                half.on_data(FLOW, start as u64, &vec![1; len], false).unwrap();
                if i % 100 == read {
                    while half.read_chunk(usize::MAX).is_some() {}
                }
                prop_assert!(pool.used() >= half.allocated());
                prop_assert_eq!(half.charge.bytes(), half.footprint());
                let sum: u64 = half.blocks.iter().flatten().map(ReceivedPiece::footprint).sum();
                prop_assert_eq!(half.held, sum);
            }
            half.forget_gaps();
            prop_assert!(half.charge.bytes() >= half.allocated());
            drop(half);
            prop_assert_eq!(pool.used(), 0);
        }
    }

    #[test]
    fn a_byte_at_the_end_of_each_block_costs_no_block() {
        let pool = MemoryPool::new(1 << 30);
        let charge = pool.account(PublicKey([1; 32])).charge();
        let mut half = RecvHalf::new(fixed(8 << 20), charge);
        for block in 0..512 {
            let at = (block + 1) * BLOCK_BYTES - 1;
            assert!(!half.on_data(FLOW, at, &[7], false).unwrap().unkept);
        }
        // 512 blocks of 16 KiB would be 8 MiB.
        assert!(pool.used() < 128 * 1024, "{} bytes", pool.used());
        assert!(pool.used() >= half.allocated());
    }

    #[test]
    fn bytes_without_room_in_memory_are_not_kept_and_come_again() {
        let pool = MemoryPool::new(200_000);
        let charge = pool.account(PublicKey([1; 32])).charge();
        let mut half = RecvHalf::new(fixed(8 << 20), charge);
        let mut end = 0;
        while !half.on_data(FLOW, end, &[7; 1_000], false).unwrap().unkept {
            end += 1_000;
        }
        assert!(pool.used() <= 40_000 && end >= 30_000, "{end} bytes kept");
        assert_eq!(half.reached(), end);
        while half.read_chunk(usize::MAX).is_some() {}
        assert!(!half.on_data(FLOW, end, &[7; 1_000], false).unwrap().unkept);
    }
}
