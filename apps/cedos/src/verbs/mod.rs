//! One file per verb: its command line, and nothing of its work. `how.rs` is what two share.

pub mod agent;
pub mod bench;
pub mod demo;
pub mod foresee;
pub mod get;
pub mod get_jobs;
pub mod get_plan;
pub mod handover;
pub mod how;
pub mod key;
pub mod lab;
pub mod net;
pub mod play;
pub mod prox;
pub mod put;
pub mod qlog;
pub mod repro;
pub mod run;
pub mod score;
pub mod serve;
pub mod sim;
pub mod transport;
pub mod url;
