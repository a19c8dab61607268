//! One file per verb: its command line, and nothing of its work. `how.rs` is what two share.

pub mod agent;
pub mod get;
pub mod get_jobs;
pub mod get_plan;
pub mod handover;
pub mod how;
pub mod key;
pub mod net;
pub mod play;
pub mod prox;
pub mod put;
pub mod qlog;
pub mod run;
pub mod serve;
pub mod transport;
pub mod url;
