//! The simulator: virtual time around the real protocol core.
//!
//! The same scenario files, link models, NATs and report as the lab, but the clock jumps from one
//! thing that happens to the next: six hours without a network cost what two events cost. All
//! chance comes from the seed, so a run can be repeated to the byte.
//!
//! ```text
//!  applications ◀─▶ session ◀─▶ links, NATs ◀─▶ session ◀─▶ applications
//!    device.rs       (core)      network.rs      (core)       proxy.rs
//!        ▲ flow_clients.rs, strategy.rs, conductor.rs run.rs: what comes next
//! ```
//!
//! After each step it is checked that what was read is what was written, that nothing crossed a
//! link that is down, that nobody talks without end, and that a permitted link which carries
//! packets carries progress.
#![forbid(unsafe_code)]

mod account;
mod archive;
mod clock;
mod conductor;
pub mod coverage;
mod coverage_limits;
mod device;
mod draw;
mod ends;
mod fault;
pub mod field;
mod flow_clients;
mod flow_reports;
pub mod foresight;
pub mod fuzz;
mod host;
mod identity;
mod journal;
mod log;
mod network;
pub mod peers;
mod picked_links;
pub mod proxy;
pub mod route;
mod run;
pub mod score;
pub mod strategy;
mod stream;
mod transfer;
pub mod video;
mod viewer;
pub mod waiting;

pub use coverage::Coverage;
pub use ends::EndpointConfigs;
pub use fault::SimFault;
pub use network::PassedPacket;
pub use run::{RunOutcome, STUCK_AFTER, run, run_between, run_by, run_viewed, run_watched};
pub use viewer::{ViewerConfig, ViewingReport};
