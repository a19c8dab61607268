//! One file per verb, which defines its command line and calls its implementation.

pub mod bench;
pub mod demo;
pub mod foresee;
pub mod lab;
pub mod repro;
pub mod score;
pub mod sim;
