//! What a program tells of its device, for all its connections.

use std::io;

use crate::raw;

/// The networks changed in a way that this process may not have seen: every link is tried at once, by an agent too
/// where one carries its connections. Calling it often does no harm; before the first connection it does nothing.
///
/// # Errors
/// The engine is gone.
pub fn network_changed() -> io::Result<()> {
    raw::network_changed()
}

/// While one is held the machine is woken for connections of this process that wait for a network, and kept awake while
/// they move. They are counted; a child of `fork` holds none.
#[derive(Debug)]
pub struct DLock(());

impl DLock {
    /// Takes one; its drop gives it back.
    ///
    /// # Errors
    /// ENOLCK: two thousand million are held.
    pub fn acquire() -> io::Result<DLock> {
        raw::dlock_acquire().map(|()| DLock(()))
    }
}

impl Drop for DLock {
    fn drop(&mut self) {
        // It is held, so there is one to give back.
        let _ = raw::dlock_release();
    }
}
