//! Tests that need access to private items of the crate.

mod agreement;
