//! The device's programs: downloads and uploads that move between links, wait if allowed, and leave
//! a complete object or none; the scheduler that they share; and the agent that keeps a queue of
//! them.

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod agent;
pub mod energy_watch;
pub mod fetch;
pub mod key;
pub mod metrics_listener;
pub mod mirror;
pub mod order;
pub mod prepared_transfer;
pub mod proxy;
pub mod recurrence;
pub mod schedule_message;
pub mod settings;
pub mod socket_owner;
pub mod stream;
pub mod terms;
pub mod token_listener;
pub mod transfer_text;
pub mod unproven_connections;
