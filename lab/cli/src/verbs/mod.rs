//! One file per verb: its command line, and nothing of its work.

pub mod bench;
pub mod demo;
pub mod foresee;
pub mod lab;
pub mod repro;
pub mod score;
pub mod sim;
