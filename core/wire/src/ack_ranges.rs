//! The ranges of an ACK frame.

use crate::codec::{DecodeError, WireReader};

/// The acknowledged ranges of an ACK frame, largest first, still encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AckRanges<'a> {
    /// The largest packet number acknowledged.
    pub largest: u64,
    first: u64,
    count: u64,
    encoded: &'a [u8],
}

impl<'a> AckRanges<'a> {
    /// Iterates over the ranges `(low, high)`, both ends included, from the largest down.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + Clone + use<'a> {
        let mut reader = WireReader::new(self.encoded);
        let mut high = self.largest;
        let mut low = high - self.first;
        let mut left = self.count;
        let mut start = true;
        std::iter::from_fn(move || {
            if start {
                start = false;
                return Some((low, high));
            }
            if left == 0 {
                return None;
            }
            left -= 1;
            // `decode` has checked the ranges, so this cannot fail; if it did, the iteration would
            // end.
            let gap = reader.varint().ok()?;
            let len = reader.varint().ok()?;
            high = low.checked_sub(gap + 2)?;
            low = high.checked_sub(len)?;
            Some((low, high))
        })
    }

    pub(crate) fn decode(r: &mut WireReader<'a>, largest: u64) -> Result<Self, DecodeError> {
        let count = r.varint()?;
        let first = r.varint()?;
        const UNDERFLOW: DecodeError = DecodeError::BadValue("ACK range below zero");
        let mut low = largest.checked_sub(first).ok_or(UNDERFLOW)?;
        let whole = *r;
        let before = r.remaining();
        for _ in 0..count {
            let gap = r.varint()?;
            let len = r.varint()?;
            let high = low.checked_sub(gap + 2).ok_or(UNDERFLOW)?;
            low = high.checked_sub(len).ok_or(UNDERFLOW)?;
        }
        let mut whole = whole;
        let encoded = whole.bytes(before - r.remaining())?;
        Ok(AckRanges {
            largest,
            first,
            count,
            encoded,
        })
    }
}
