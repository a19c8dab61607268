//! The handle of the process's engine: calls send jobs to its thread.

use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};

use crate::engine_state::EngineState;
use crate::errno::{CallResult, Errno};

/// A job for the engine's thread.
pub(crate) type EngineJob = Box<dyn FnOnce(&Rc<EngineState>) + Send>;

/// The engine of this process.
pub(crate) struct SocketEngine {
    pub(crate) jobs: mpsc::Sender<EngineJob>,
    /// The port of the engine's ends of socket pairs.
    pub(crate) port: u16,
    /// The process that the engine runs in.
    pub(crate) pid: u32,
}

static ENGINE: Mutex<Option<Arc<SocketEngine>>> = Mutex::new(None);

/// Locks the engine, for fork handlers.
pub(crate) fn lock() -> MutexGuard<'static, Option<Arc<SocketEngine>>> {
    ENGINE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// This process's engine, if it has one.
pub(crate) fn running() -> Option<Arc<SocketEngine>> {
    let engine = lock();
    engine
        .as_ref()
        .filter(|e| e.pid == std::process::id())
        .cloned()
}

impl SocketEngine {
    /// Queues `job` for the engine's thread.
    pub(crate) fn post(&self, job: impl FnOnce(&Rc<EngineState>) + Send + 'static) {
        // If the thread is gone, its sockets are closed, and the other ends get that.
        let _ = self.jobs.send(Box::new(job));
    }

    /// Runs `job` on the engine's thread, which replies later.
    ///
    /// # Errors
    /// EIO: the engine is gone.
    pub(crate) fn request<T: Send + 'static>(
        &self,
        job: impl FnOnce(&Rc<EngineState>, mpsc::Sender<T>) + Send + 'static,
    ) -> CallResult<T> {
        let (reply, answer) = mpsc::channel();
        self.post(move |home| job(home, reply));
        answer.recv().map_err(|_| Errno(libc::EIO))
    }
}
