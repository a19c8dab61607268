//! Counts of what the engine of an endpoint did.

use std::iter::Sum;

/// What the engine of an endpoint did since it was made. Datagrams are those of its UDP sockets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineCounts {
    /// How often the engine ran.
    pub turns: u64,
    /// Datagrams that were received.
    pub datagrams_in: u64,
    /// Bytes of the datagrams that were received.
    pub bytes_in: u64,
    /// Datagrams that were sent.
    pub datagrams_out: u64,
    /// Bytes of the datagrams that were sent.
    pub bytes_out: u64,
}

impl Sum for EngineCounts {
    fn sum<I: Iterator<Item = EngineCounts>>(counts: I) -> EngineCounts {
        counts.fold(EngineCounts::default(), |sum, of| EngineCounts {
            turns: sum.turns + of.turns,
            datagrams_in: sum.datagrams_in + of.datagrams_in,
            bytes_in: sum.bytes_in + of.bytes_in,
            datagrams_out: sum.datagrams_out + of.datagrams_out,
            bytes_out: sum.bytes_out + of.bytes_out,
        })
    }
}

impl EngineCounts {
    /// Counts datagrams of `stride` bytes that were received together.
    pub(crate) fn on_received(&mut self, bytes: usize, stride: usize) {
        self.datagrams_in += bytes.div_ceil(stride.max(1)) as u64;
        self.bytes_in += bytes as u64;
    }

    /// Counts datagrams of `segment` bytes that were sent together.
    pub(crate) fn on_sent(&mut self, bytes: usize, segment: usize) {
        self.datagrams_out += bytes.div_ceil(segment.max(1)) as u64;
        self.bytes_out += bytes as u64;
    }
}

impl EngineCounts {
    /// The counts of two engines together.
    pub(crate) fn plus(self, other: EngineCounts) -> EngineCounts {
        EngineCounts {
            turns: self.turns + other.turns,
            datagrams_in: self.datagrams_in + other.datagrams_in,
            bytes_in: self.bytes_in + other.bytes_in,
            datagrams_out: self.datagrams_out + other.datagrams_out,
            bytes_out: self.bytes_out + other.bytes_out,
        }
    }
}
