//! One file per verb: its command line, and nothing of its work.

pub mod bench;
pub mod demo;
pub mod get;
pub mod get_jobs;
pub mod get_plan;
pub mod key;
pub mod lab;
pub mod prox;
pub mod sim;
