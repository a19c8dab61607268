//! One file per verb: its command line, and nothing of its work.

pub mod bench;
pub mod demo;
pub mod get;
pub mod key;
pub mod lab;
pub mod prox;
pub mod qlog;
pub mod sim;
