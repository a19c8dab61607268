//! Where the two processes of a flow run, and on which cores.

use std::net::IpAddr;
use std::process::{Child, Command};

use anyhow::Result;

/// The core the sending process is held on.
pub const SENDER_CORE: usize = 0;

/// The core the receiving process is held on.
pub const RECEIVER_CORE: usize = 1;

/// Where the two processes of a flow run, and how they are started there.
pub trait ProcessPlacement {
    /// Where the receiver listens.
    fn receiver_address(&self) -> IpAddr;
    /// Starts `command` at the receiver.
    fn start_receiver(&self, command: Command) -> Result<Child>;
    /// Starts `command` at the sender.
    fn start_sender(&self, command: Command) -> Result<Child>;
    /// Whether each process keeps to a core of its own.
    fn holds_cores(&self) -> bool;
}
