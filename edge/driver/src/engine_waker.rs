//! How other threads wake the engine's task, once for any number of changes.
//!
//! ```text
//!  another thread   change something ─▶ wake()  ── marked already? nothing else to do
//!                                               └─ else mark, and wake the task
//!  the task         begin_turn(): the mark is taken ─▶ look at everything ─▶ is_woken()? one more turn
//! ```
//!
//! A change is never left without a turn: what is marked before `begin_turn` is seen in that turn, what is marked later wakes
//! the task again. `tools/races` runs this file with every order of its threads.

use std::sync::PoisonError;
use std::task::Waker;

use crate::synchronisation::{AtomicBool, Mutex, Ordering};

/// The engine's task, and whether it was woken since its turn began.
#[derive(Debug)]
pub(crate) struct EngineWaker {
    task: Mutex<Option<Waker>>,
    woken: AtomicBool,
    /// Whether the timer is to be set again.
    rearm: AtomicBool,
}

impl EngineWaker {
    pub(crate) fn new() -> Self {
        EngineWaker {
            task: Mutex::new(None),
            woken: AtomicBool::new(false),
            rearm: AtomicBool::new(false),
        }
    }

    /// Wakes the task, unless that happened since its turn began.
    pub(crate) fn wake(&self) {
        if !self.woken.swap(true, Ordering::AcqRel) {
            let task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(waker) = task.as_ref() {
                waker.wake_by_ref();
            }
        }
    }

    /// Makes the task set its timer again, because the runtime's clock was stopped.
    pub(crate) fn rearm(&self) {
        self.rearm.store(true, Ordering::Release);
        self.wake();
    }

    /// Begins a turn of the task, which sees all that was changed before.
    pub(crate) fn begin_turn(&self, waker: &Waker) {
        *self.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(waker.clone());
        // Not a store: only an operation that reads the mark is ordered after what its writer did before, such as
        // `rearm`, which is under no lock. loom does not show that: to it, every swap reads the last value.
        self.woken.swap(false, Ordering::AcqRel);
    }

    /// Whether the task was woken since its turn began.
    pub(crate) fn is_woken(&self) -> bool {
        self.woken.load(Ordering::Acquire)
    }

    /// Whether the timer is to be set again, which is then done.
    pub(crate) fn take_rearm(&self) -> bool {
        self.rearm.swap(false, Ordering::AcqRel)
    }
}
