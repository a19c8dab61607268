//! What became of a connection: written by the engine, read by the program's calls.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::errno::SocketFault;
use crate::info::D2tpInfo;

/// What becomes of a connection, told by the engine and asked by the program.
#[derive(Debug, Default)]
pub(crate) struct ConnectionStatus {
    /// Its number in the engine.
    pub(crate) serial: u64,
    /// Why it broke. Set before the kernel's socket hears of it.
    pub(crate) fault: OnceLock<SocketFault>,
    /// The connection was never made, and the program has not heard so. For a moment the kernel's socket
    /// looks connected then: what resets it comes after what answers it.
    pub(crate) refused: AtomicBool,
    /// Nothing is carried any more.
    pub(crate) over: AtomicBool,
    /// What it came to, once it is over.
    pub(crate) last: OnceLock<D2tpInfo>,
}

impl ConnectionStatus {
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// The status of a connection that is about to be made.
    pub(crate) fn new() -> Arc<ConnectionStatus> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Arc::new(ConnectionStatus {
            serial: NEXT.fetch_add(1, Ordering::Relaxed),
            ..ConnectionStatus::default()
        })
    }
}
