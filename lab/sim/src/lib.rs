//! The simulator: virtual time around the real protocol core.
//!
//! It uses the same scenario files, link models, NATs and reports as the lab, but the clock jumps
//! from one event to the next: six hours without a network cost as much as two events. All random
//! values come from the seed, so a run can be repeated exactly.
//!
//! ```text
//!  applications ◀─▶ session ◀─▶ links, NATs ◀─▶ session ◀─▶ applications
//!    device.rs       (core)      network.rs      (core)       proxy.rs
//!        ▲ flow_clients.rs, strategy.rs, conductor.rs run.rs: what comes next
//! ```
//!
//! After each step the simulator checks that the bytes read are those written, that nothing crossed
//! a link that is down, that no end sends without limit, and that there is progress over a
//! permitted link that carries packets.
#![forbid(unsafe_code)]

mod account;
mod archive;
mod clock;
mod conductor;
pub mod coverage;
mod coverage_limits;
mod device;
mod device_streams;
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
mod stream_paths;
mod tcp;
mod transfer;
pub mod vary;
pub mod video;
mod viewer;
pub mod waiting;

pub use coverage::Coverage;
pub use ends::EndpointConfigs;
pub use fault::SimFault;
pub use network::PassedPacket;
pub use run::{RunOutcome, STUCK_AFTER, run, run_between, run_by, run_viewed, run_watched};
pub use viewer::{ViewerConfig, ViewingReport};
