//! `cedos run`: a program as it is, its connections carried by D2TP flows.
//!
//! ```text
//!  program ─┬─ environment: it asks the local proxy itself ──▶ cedos_agent::proxy ─┐
//!           ├─ preload, notify: calls.rs, its own socket gets another end ─────────┼─▶ Line ──▶ D2Prox
//!           └─ tun: tun.rs, a TCP/IP stack at the end of its only link ────────────┘
//!
//!  others ──▶ D2TP listener, serve.rs ──▶ loopback ──▶ the program's own listener
//! ```

mod calls;
mod library;
mod rung;
mod serve;
mod tun;
mod wait;

pub use calls::Calls;
pub use library::library;
pub use rung::{Chosen, Rung, choose};
pub use serve::{Fronts, Served};
pub use tun::take_packets;
pub use wait::{Ended, Signals, until_ended};
