//! What files that `tools/races` checks use to synchronise threads; there it is loom's.

pub(crate) use std::sync::Mutex;
pub(crate) use std::sync::atomic::{AtomicBool, Ordering};
