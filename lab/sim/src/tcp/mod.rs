//! A model of TCP, for streams through networks that block UDP: bytes arrive in order, however the
//! link loses, reorders or duplicates segments.
//!
//! ```text
//!  write ─▶ sender.rs ──segments──▶ link ──▶ receiver.rs ─▶ read
//!           unsent │ in flight ◀── ACK, SACK ── in order │ waits behind a gap
//!                    RACK, tail loss probe, timeout · congestion window · receive window
//! ```
//!
//! It has what determines goodput under loss and how long bytes wait behind a lost segment: Reno's
//! window (RFC 5681), to which CUBIC is bound on paths of a few hundred segments (RFC 9438 §4.3),
//! recovery by SACK with RACK and tail loss probes (RFC 8985), timeouts as in Linux, delayed ACKs,
//! and the limits of receive buffer and user timeout. It has no undo of spurious reductions, no
//! pacing, no ECN and no TIME-WAIT.

mod connection;
mod receiver;
mod segment;
mod sender;
#[cfg(test)]
mod tests;

pub(crate) use connection::{TcpConnection, TcpEnd};
pub(crate) use segment::{DATA_HEADER_BYTES, ModelSegment};
