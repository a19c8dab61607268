//! The meaning of HTTP fields, shared by all code that answers requests, and of addresses that requests lead to.

pub mod byte_ranges;
pub mod http2;
pub mod local_address;
pub mod supply_report;

pub use byte_ranges::{ByteRanges, RangeDecision};
pub use local_address::is_local_address;
pub use supply_report::{SUPPLY_ASKED, SUPPLY_CONTEXT, SUPPLY_FIELD, SupplyReport};
