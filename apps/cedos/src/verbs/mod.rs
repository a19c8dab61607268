//! One file per verb: its command line, and nothing of its work. `transfer_args.rs` is what two share.

pub mod agent;
mod agent_start;
mod credentials;
pub mod descriptor_limit;
pub mod get;
pub mod get_jobs;
pub mod get_plan;
pub mod handover;
pub mod key;
pub mod log_levels;
pub mod net;
pub mod play;
pub mod prox;
pub mod put;
pub mod qlog;
pub mod run;
pub mod serve;
pub mod transfer_args;
pub mod transport;
pub mod url;
