//! What a fork leaves: the child has the sockets and not the engine.
//!
//! The engine's descriptors are its thread's own, so the child does not inherit them, and its sockets
//! work on as the kernel's do, served by the parent's engine. What it asks for anew gets an engine of its
//! own.

use std::cell::RefCell;
use std::sync::{Arc, MutexGuard};

use crate::engine::{self, Engine};
use crate::table::{self, Table};

type Held = (
    MutexGuard<'static, Option<Arc<Engine>>>,
    MutexGuard<'static, Option<Table>>,
);

thread_local! {
    /// Both locks, while this thread forks. std's own, which need nothing but their word of memory: the
    /// child can open them.
    static HELD: RefCell<Option<Held>> = const { RefCell::new(None) };
}

/// Has forks wait for our locks, so that no child is born with one that nobody will open.
pub(crate) fn watch() {
    // SAFETY: the handlers are functions of this library, which is never unloaded (build.rs).
    let failed = unsafe { libc::pthread_atfork(Some(before), Some(after), Some(after)) };
    assert_eq!(failed, 0, "no memory for three pointers");
}

unsafe extern "C" fn before() {
    HELD.with_borrow_mut(|held| *held = Some((engine::lock(), table::lock())));
}

unsafe extern "C" fn after() {
    HELD.with_borrow_mut(Option::take);
}
