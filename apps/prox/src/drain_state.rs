//! Whether a node is to be left, and how many of its sessions are.

use std::net::SocketAddr;
use std::time::Duration;

use d2tp_driver::MoveReport;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// An order to let the devices go on at another node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DrainOrder {
    /// The node at which devices are to go on; none: the nearest that each device knows.
    pub(crate) to: Option<SocketAddr>,
    /// How long the devices may take to leave.
    pub(crate) within: Duration,
}

/// Whether the proxy is to be left, and what is left of it.
#[derive(Debug, Default)]
pub(crate) struct DrainState {
    pub(crate) order: Mutex<Option<DrainOrder>>,
    /// Wakes the task that waits for an order.
    pub(crate) ordered: Notify,
    /// How many sessions the last request asked to move, and how many could not.
    pub(crate) progress: Mutex<Option<MoveReport>>,
}
