//! Notices from a program about its device, for all its connections.

use std::io;

use crate::raw;

/// Reports that the networks changed in a way that this process may not have seen: every link is
/// tried at once, also by an agent that carries connections of this process. Frequent calls do no
/// harm; before the first connection it does nothing.
///
/// # Errors
/// The engine is gone.
pub fn network_changed() -> io::Result<()> {
    raw::network_changed()
}

/// A D-Lock. While a process holds one, the machine is woken for its connections that wait for a
/// network, and kept awake while they move data. D-Locks are counted; a child of `fork` holds none.
#[derive(Debug)]
pub struct DLock(());

impl DLock {
    /// Acquires a D-Lock, which is released when it is dropped.
    ///
    /// # Errors
    /// ENOLCK: two thousand million are held.
    pub fn acquire() -> io::Result<DLock> {
        raw::dlock_acquire().map(|()| DLock(()))
    }
}

impl Drop for DLock {
    fn drop(&mut self) {
        // This one is held, so the call succeeds.
        let _ = raw::dlock_release();
    }
}
