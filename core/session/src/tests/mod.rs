//! Tests that look at what the crate keeps to itself.

mod agreement;
