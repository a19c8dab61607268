//! The receiving half of a flow: bytes that arrived, put in order, until they are read.
//!
//! Bytes lie in blocks of [`BLOCK_BYTES`], allocated when the first of their bytes arrives, so a
//! gappy sender costs at most one block per gap and a quiet flow nothing. A block that was
//! received whole is handed to the reader without a copy.

use std::collections::VecDeque;

use bytes::Bytes;
use d2tp_wire::FlowId;

use crate::config::FLOW_GAPS_MAX;
use crate::event::PeerFault;
use crate::ranges::RangeSet;

/// Bytes of a receive block.
pub(crate) const BLOCK_BYTES: u64 = 16 * 1024;

/// The receiving direction of a flow.
#[derive(Debug)]
pub(crate) struct RecvHalf {
    blocks: VecDeque<Option<Vec<u8>>>,
    first_block: u64,
    read_to: u64,
    received: RangeSet,
    final_size: Option<u64>,
    /// The highest offset received.
    reached: u64,
    credit: u64,
    window: u64,
    advertised_credit: u64,
    durable: u64,
    pub(crate) reset: Option<u64>,
    pub(crate) stopped: Option<u64>,
    end_read: bool,
    duplicate: u64,
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
    /// Whether data could not be stored: their packet must not be acknowledged.
    pub(crate) unkept: bool,
}

impl RecvHalf {
    pub(crate) fn new(window: u64) -> Self {
        RecvHalf {
            blocks: VecDeque::new(),
            first_block: 0,
            read_to: 0,
            received: RangeSet::default(),
            final_size: None,
            reached: 0,
            credit: window,
            window,
            advertised_credit: window,
            durable: 0,
            reset: None,
            stopped: None,
            end_read: false,
            duplicate: 0,
        }
    }

    /// The receiving direction of a flow from a record: the application has everything below `offset`.
    pub(crate) fn restored(
        window: u64,
        offset: u64,
        final_size: Option<u64>,
        end_read: bool,
    ) -> Self {
        let mut half = RecvHalf::new(window);
        half.first_block = offset / BLOCK_BYTES;
        half.read_to = offset;
        half.reached = offset;
        half.durable = offset;
        half.credit = offset + window;
        half.advertised_credit = 0;
        half.final_size = final_size;
        half.end_read = end_read;
        half
    }

    /// The most gaps to keep: as many as a window of full-size packets has when every second one is
    /// missing, and at least [`FLOW_GAPS_MAX`]. The window bounds their memory whatever their number.
    fn gaps_max(&self) -> usize {
        FLOW_GAPS_MAX.max((self.window / 2048) as usize)
    }

    /// The number of gaps in the received bytes.
    pub(crate) fn gaps(&self) -> usize {
        self.received.len()
    }

    /// The end of the contiguous bytes.
    pub(crate) fn contiguous(&self) -> u64 {
        self.received.end_from(self.read_to).max(self.read_to)
    }
    /// Whether bytes are missing before others that were received.
    pub(crate) fn has_gap(&self) -> bool {
        self.reached > self.contiguous()
    }
    /// Offset of the next byte to be read.
    pub(crate) fn read_to(&self) -> u64 {
        self.read_to
    }
    pub(crate) fn final_size(&self) -> Option<u64> {
        self.final_size
    }
    /// Bytes that arrived more than once.
    pub(crate) fn duplicate(&self) -> u64 {
        self.duplicate
    }
    /// The highest offset received.
    pub(crate) fn reached(&self) -> u64 {
        self.reached
    }

    /// Takes in received bytes.
    #[inline]
    pub(crate) fn on_data(
        &mut self,
        flow: FlowId,
        offset: u64,
        data: &[u8],
        fin: bool,
    ) -> Result<ReceivedChange, PeerFault> {
        let end = offset + data.len() as u64;
        if let Some(size) = self.final_size
            && (end > size || (fin && end != size))
        {
            return Err(PeerFault::FinalSize {
                flow,
                was: size,
                now: end,
            });
        }
        if end > self.credit {
            return Err(PeerFault::OverCredit {
                flow: Some(flow),
                end,
                credit: self.credit,
            });
        }
        // R-FLOW-6: a piece that would open one gap too many is not kept, nor acknowledged.
        let start = offset.max(self.read_to);
        let wanted = start < end && self.reset.is_none() && self.stopped.is_none();
        let gap = start > self.read_to && !self.received.touches(start, end);
        if wanted && gap && self.received.len() >= self.gaps_max() {
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

    #[inline]
    fn store(&mut self, mut offset: u64, mut data: &[u8]) {
        while !data.is_empty() {
            let index = (offset / BLOCK_BYTES - self.first_block) as usize;
            let at = (offset % BLOCK_BYTES) as usize;
            let n = data.len().min(BLOCK_BYTES as usize - at);
            while self.blocks.len() <= index {
                self.blocks.push_back(None);
            }
            let room = || Vec::with_capacity(BLOCK_BYTES as usize);
            let block = self.blocks[index].get_or_insert_with(room);
            if block.len() == at {
                // In order, as nearly always: nothing is written twice.
                block.extend_from_slice(&data[..n]);
            } else {
                block.resize(block.len().max(at + n), 0);
                block[at..at + n].copy_from_slice(&data[..n]);
            }
            offset += n as u64;
            data = &data[n..];
        }
    }

    /// Bytes ready to be read.
    pub(crate) fn readable(&self) -> u64 {
        self.contiguous() - self.read_to
    }
    /// Whether the reader reached the end, or the end follows immediately.
    pub(crate) fn is_at_end(&self) -> bool {
        self.final_size == Some(self.read_to)
    }

    /// Reads into `out`; zero means nothing is there (or the end, see [`RecvHalf::is_at_end`]).
    pub(crate) fn read(&mut self, out: &mut [u8]) -> usize {
        let total = (self.readable() as usize).min(out.len());
        let mut filled = 0;
        while filled < total {
            let at = (self.read_to % BLOCK_BYTES) as usize;
            let n = (total - filled).min(BLOCK_BYTES as usize - at);
            let block = self.blocks[0]
                .as_ref()
                .expect("received bytes have a block");
            out[filled..filled + n].copy_from_slice(&block[at..at + n]);
            filled += n;
            self.advance(n as u64);
        }
        self.end_read |= self.is_at_end();
        total
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
            let block = self.blocks[0].take().expect("received bytes have a block");
            let mut whole = Bytes::from(block);
            whole.split_off(at)
        } else {
            let block = self.blocks[0]
                .as_ref()
                .expect("received bytes have a block");
            Bytes::copy_from_slice(&block[at..at + n])
        };
        self.advance(n as u64);
        self.end_read |= self.is_at_end();
        Some(chunk)
    }

    fn advance(&mut self, n: u64) {
        self.read_to += n;
        while self.first_block < self.read_to / BLOCK_BYTES {
            self.blocks.pop_front();
            self.first_block += 1;
        }
        self.received.remove_below(self.read_to);
        self.credit = self.credit.max(self.read_to + self.window);
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

    /// Records that the application made everything below `offset` safe. True if that is new.
    pub(crate) fn set_durable(&mut self, offset: u64) -> bool {
        let offset = offset.min(self.read_to);
        let news = offset > self.durable;
        self.durable = self.durable.max(offset);
        news
    }
    pub(crate) fn durable(&self) -> u64 {
        self.durable
    }

    /// Drops unread bytes that no reader wants. The counts remain.
    pub(crate) fn discard(&mut self) {
        self.blocks.clear();
        self.received.clear();
        self.first_block = self.read_to / BLOCK_BYTES;
    }
    /// Whether the total number of bytes the peer sent is known, so that the session's credit is exact.
    pub(crate) fn is_counted(&self) -> bool {
        self.stopped.is_none()
            || self.reset.is_some()
            || self.final_size.is_some_and(|size| self.reached >= size)
    }

    /// Drops unread bytes of a hibernating flow: they will be sent again.
    pub(crate) fn forget_unread(&mut self) {
        self.blocks.clear();
        self.received.clear();
        self.reached = self.read_to;
        self.first_block = self.read_to / BLOCK_BYTES;
        if self.final_size != Some(self.read_to) {
            self.final_size = None;
        }
    }

    /// Drops bytes beyond a gap: after a wake both ends continue from the contiguous end.
    pub(crate) fn forget_gaps(&mut self) {
        let end = self.contiguous();
        if end == self.read_to {
            return self.forget_unread();
        }
        self.received.clear();
        self.received.insert(self.read_to, end);
        self.reached = end;
        let blocks = (end.div_ceil(BLOCK_BYTES) - self.first_block) as usize;
        self.blocks.truncate(blocks);
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
    /// Memory held, in bytes.
    #[cfg(test)]
    fn memory(&self) -> usize {
        self.blocks.iter().flatten().map(Vec::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FLOW: FlowId = FlowId(0);

    proptest! {
        #[test]
        fn what_is_read_is_a_prefix_of_what_was_sent(
            total in 1usize..60_000,
            pieces in proptest::collection::vec((0usize..60_000, 1usize..3_000), 1..80),
            reads in proptest::collection::vec(1usize..40_000, 1..80)) {
            let content: Vec<u8> = (0..total).map(|i| (i % 253) as u8).collect();
            let mut half = RecvHalf::new(1 << 20);
            let mut got = Vec::new();
            let mut pieces = pieces.into_iter();
            let mut reads = reads.into_iter().cycle();
            let mut next = 0;
            while !half.is_complete() {
                // Random pieces first, then the rest in order.
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
        let mut half = RecvHalf::new(100);
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
        let mut half = RecvHalf::new(1 << 19);
        let mut unkept = 0;
        for i in 0..10_000u64 {
            let arrival = half.on_data(FLOW, 1 + i * 50, &[7], false).unwrap();
            unkept += u64::from(arrival.unkept);
        }
        assert_eq!(half.received.len(), half.gaps_max());
        assert_eq!(unkept, 10_000 - half.gaps_max() as u64);
        assert!(half.memory() <= 1 << 19);
        assert_eq!(half.reached(), 1 + 50 * (half.gaps_max() as u64 - 1) + 1);
    }
}
