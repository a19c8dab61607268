//! Where the two processes of a flow run, and on which cores.

use std::net::IpAddr;
use std::process::{Child, Command};

use anyhow::Result;

/// The core of the sending process.
pub const SENDER_CORE: usize = 0;

/// The core of the receiving process.
pub const RECEIVER_CORE: usize = 1;

/// Where the two processes of a flow run, and how they are started there.
pub trait ProcessPlacement {
    /// The address on which the receiver listens.
    fn receiver_address(&self) -> IpAddr;
    /// Starts `command` at the receiver.
    fn start_receiver(&self, command: Command) -> Result<Child>;
    /// Starts `command` at the sender.
    fn start_sender(&self, command: Command) -> Result<Child>;
    /// Whether each process stays on its own core.
    fn holds_cores(&self) -> bool;
}
