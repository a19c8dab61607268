//! TCP segments, as the model has them on a link.

use std::ops::Range;

use cedos_lab_link::Time;

/// Bytes of the header without options.
const HEADER_BYTES: usize = 20;
/// Bytes of the timestamps option, padded. // RFC 7323
const TIMESTAMP_BYTES: usize = 12;
/// Bytes of a SYN's further options: maximum segment size, window scale, SACK permitted.
const SYN_OPTION_BYTES: usize = 8;
/// Bytes of the SACK option without blocks, padded, and of each block. // RFC 2018
const SACK_BYTES: (usize, usize) = (4, 8);
/// Bytes of headers that every segment with data has beside those of IP.
pub(crate) const DATA_HEADER_BYTES: usize = HEADER_BYTES + TIMESTAMP_BYTES;

/// A segment. Sequence numbers count bytes from 0 and never wrap; a FIN counts as one, a SYN does
/// not.
#[derive(Clone, Debug, Default)]
pub(crate) struct ModelSegment {
    /// The number of the first byte.
    pub seq: u64,
    pub bytes: Vec<u8>,
    /// The sender's largest segment in bytes, if this opens a connection.
    pub syn: Option<usize>,
    pub fin: bool,
    pub rst: bool,
    /// The next byte that the sender expects; `None` in the first SYN.
    pub ack: Option<u64>,
    /// Ranges that arrived beyond that.
    pub sacks: Vec<Range<u64>>,
    /// The number of the first byte that the sender has no buffer for.
    pub window_end: u64,
    /// When the segment was sent.
    pub sent_at: Time,
    /// When the segment was sent that this one acknowledges.
    pub echo: Option<Time>,
    /// Whether the checksum is wrong.
    pub damaged: bool,
}

impl ModelSegment {
    /// A segment that resets the connection.
    pub(crate) fn reset(now: Time) -> ModelSegment {
        ModelSegment {
            rst: true,
            sent_at: now,
            ..ModelSegment::default()
        }
    }

    /// The bytes that the segment counts as in sequence numbers.
    pub(crate) fn length(&self) -> u64 {
        self.bytes.len() as u64 + u64::from(self.fin)
    }

    /// The size in bytes without the header of IP.
    pub(crate) fn size(&self) -> usize {
        let syn = self.syn.map_or(0, |_| SYN_OPTION_BYTES);
        DATA_HEADER_BYTES + syn + sack_bytes(self.sacks.len()) + self.bytes.len()
    }
}

/// The bytes of this many SACK blocks, which leave less room for data.
pub(super) fn sack_bytes(blocks: usize) -> usize {
    match blocks {
        0 => 0,
        blocks => SACK_BYTES.0 + SACK_BYTES.1 * blocks,
    }
}
