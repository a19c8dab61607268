//! Which worker of a server has a stream.
//!
//! ```text
//!  accepted ─▶ worker 0 ── a packet of another worker's client ─▶ that worker, with what waits to be written
//!                              └ its connection id, or the key in its handshake
//! ```
//!
//! A stream carries the sessions of one device, and all sessions of a client are in one worker. So the stream goes to
//! that worker as a whole, and its packets need not be passed on one by one. A stream that an admitted device uses stays
//! where it is.

use std::sync::{Arc, Weak};

use d2tp_session::StreamPathId;
use parking_lot::{Mutex, MutexGuard};

use crate::driver_core::DriverShared;

/// The worker that has a stream now.
///
/// It is locked before the worker is, so that the stream's task never looks for the stream where it is no longer.
#[derive(Default)]
pub(crate) struct StreamWorker(Mutex<Weak<DriverShared>>);

impl StreamWorker {
    pub(crate) fn new(shared: &Arc<DriverShared>) -> Arc<StreamWorker> {
        Arc::new(StreamWorker(Mutex::new(Arc::downgrade(shared))))
    }

    /// The worker; it keeps the stream until this is dropped.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Weak<DriverShared>> {
        self.0.lock()
    }
}

/// Gives a stream to the worker whose client sends by it, unless an admitted device of this worker uses it.
pub(crate) fn hand_over(from: &DriverShared, to: &Arc<DriverShared>, stream: StreamPathId) {
    let Some(place) = from.inner.lock().streams.worker_of(stream) else {
        return;
    };
    let mut worker = place.lock();
    let taken = {
        let mut inner = from.inner.lock();
        match inner.core.client_of_stream(stream) {
            Some(_) => None,
            None => inner.streams.take(stream),
        }
    };
    let Some(queue) = taken else { return };
    to.inner.lock().streams.put(stream, queue);
    *worker = Arc::downgrade(to);
}
