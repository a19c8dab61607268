//! The asynchronous API over the D2TP core: connect, open, read, write.
//!
//! Programs see [`FlowIo`]: a byte stream each way that outlives addresses. What they want sent
//! from something re-readable (a file, a cached object) they hand over as a [`Source`], so that a
//! flow that sleeps for hours holds a cursor instead of a buffer.

mod source;

pub use source::{FlowIo, HostKey, Source};
