//! One file per verb: its command line, and nothing of its work.

pub mod get;
