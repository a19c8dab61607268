//! The meaning of HTTP fields, shared by all code that answers requests.

pub mod byte_ranges;
pub mod supply_report;

pub use byte_ranges::{ByteRanges, RangeDecision};
pub use supply_report::{SUPPLY_ASKED, SUPPLY_CONTEXT, SUPPLY_FIELD, SupplyReport};
