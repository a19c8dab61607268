//! `cedos run`: runs an unmodified program whose connections are carried by D2TP flows.
//!
//! ```text
//!  program ─┬─ environment: it asks the local proxy itself ──▶ cedos_agent::proxy ─┐
//!           ├─ preload, notify: calls.rs, its own socket gets another end ─────────┼─▶ Line ──▶ D2Prox
//!           └─ tun: tun.rs, a TCP/IP stack at the end of its only link ────────────┘
//!
//!  others ──▶ D2TP listener, serve.rs ──▶ loopback ──▶ the program's own listener
//! ```

mod calls;
mod capture_mode;
mod preload_library;
mod serve;
mod tun;
mod wait;

pub use calls::CallHandler;
pub use capture_mode::{CaptureChoice, CaptureMode, choose};
pub use preload_library::ensure_library;
pub use serve::{ProgramServers, ProgramServing};
pub use tun::take_packets;
pub use wait::{ProgramExit, SignalForwarder, wait_for_program};
