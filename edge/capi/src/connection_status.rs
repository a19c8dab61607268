//! The status of a connection: the engine writes it, the program's calls read it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::errno::SocketFault;
use crate::info::D2tpInfo;

/// The status of a connection, set by the engine and read by the program's calls.
#[derive(Debug, Default)]
pub(crate) struct ConnectionStatus {
    /// The connection's number in the engine.
    pub(crate) serial: u64,
    /// Why the connection broke. Set before the kernel's socket is closed.
    pub(crate) fault: OnceLock<SocketFault>,
    /// Whether the connection failed and the program does not know it yet. The kernel's socket
    /// looks connected for a moment, because the handshake is answered before it is reset.
    pub(crate) refused: AtomicBool,
    /// Whether the connection is over.
    pub(crate) over: AtomicBool,
    /// The final information, once the connection is over.
    pub(crate) last: OnceLock<D2tpInfo>,
}

impl ConnectionStatus {
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// The status of a new connection.
    pub(crate) fn new() -> Arc<ConnectionStatus> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Arc::new(ConnectionStatus {
            serial: NEXT.fetch_add(1, Ordering::Relaxed),
            ..ConnectionStatus::default()
        })
    }
}
