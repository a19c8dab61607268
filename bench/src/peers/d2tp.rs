//! Where ours goes. There is nothing to measure yet: `edge/driver` opens no flows so far.
//!
//! When it does, this file holds `struct D2tp` with [`Peer`](super::Peer) for it, [`super::all`]
//! gets its line, and [`MISSING`] goes:
//!
//! - `serve`: bind a driver endpoint on the address, `ready(Card { address, identity: host key })`,
//!   accept one session and one flow, read until the meter is over.
//! - `send`: connect with the pinned host key, open one flow without a deadline, and write. Use
//!   `AsyncWrite`, not `send_source`: the others are measured copying from the application too.
//! - One thread per process (`new_current_thread`), since each process has one core.
//! - Note the datagram size after path MTU discovery, the congestion controller, the suite, and
//!   how many datagrams a GSO send carried on average.

/// The name in tables and JSON.
pub const NAME: &str = "d2tp";

/// Why it cannot be measured.
pub const MISSING: &str = "the driver of this tree opens no flows";
