//! The servers' connections of tunnels whose sessions sleep.
//!
//! ```text
//!  no path to the device, and nothing under way in the tunnel ─▶ its flow may sleep
//!  the session sleeps ─▶ the connection stays here: what its server sends waits in the kernel, and then at the server
//!  the device is back ─▶ the flow is accepted again with the number of its connection, and copying goes on
//!  the record of the session expires, or the process ends ─▶ the connection is reset
//! ```
//!
//! A connection belongs to this process. A device that comes back to another process gets a reset, as for a tunnel whose
//! session was awake.

use std::collections::HashMap;

use d2tp_driver::HostKey;
use parking_lot::Mutex;
use socket2::SockRef;

use crate::charged_tcp::ChargedTcp;

/// The connections of sleeping tunnels, by the numbers in their memos.
#[derive(Debug, Default)]
pub(crate) struct SleepingTunnels {
    connections: Mutex<HashMap<u64, (HostKey, ChargedTcp)>>,
}

impl SleepingTunnels {
    /// Keeps the connection of a client's tunnel that sleeps. It is reset if nobody comes for it.
    pub(crate) fn put(&self, number: u64, client: HostKey, connection: ChargedTcp) {
        // The server must not take what it has for all there was.
        let _ = connection.tcp().set_zero_linger();
        self.connections.lock().insert(number, (client, connection));
    }

    /// Takes the connection of a client's tunnel that woke; none if it is another process's.
    pub(crate) fn take(&self, number: u64, client: HostKey) -> Option<ChargedTcp> {
        let mut connections = self.connections.lock();
        if connections.get(&number)?.0 != client {
            return None;
        }
        let (_, connection) = connections.remove(&number)?;
        drop(connections);
        let _ = SockRef::from(connection.tcp()).set_linger(None);
        Some(connection)
    }

    /// Resets the connection of a tunnel that will not wake any more.
    pub(crate) fn remove(&self, number: u64) {
        let removed = self.connections.lock().remove(&number);
        drop(removed); // Outside the lock: this closes it.
    }
}
