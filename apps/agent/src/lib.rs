//! What runs on the device: fetches and puts that move between links, wait when they may, and are
//! whole or absent; the one scheduler they share; and the agent that keeps a queue of them.

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod agent;
pub mod fetch;
pub mod key;
pub mod order;
pub mod prepared_transfer;
pub mod proxy;
pub mod schedule_message;
pub mod settings;
pub mod stream;
pub mod terms;
pub mod unproven_connections;
