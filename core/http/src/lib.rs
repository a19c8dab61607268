//! What fields of HTTP mean, decided once for everything that answers requests.

pub mod byte_ranges;

pub use byte_ranges::{ByteRanges, RangeDecision};
