//! Changes of a server's admission while it runs.

use std::time::Duration;

use d2tp_session::{Admission, PublicKey, ReasonCode};

use crate::clock;
use crate::server::Server;

impl Server {
    /// Changes which devices may connect. Existing sessions remain; see [`Server::end_client`].
    pub fn set_admission(&self, admission: Admission) {
        for worker in self.workers() {
            worker.inner.lock().core.set_admission(admission.clone());
        }
    }

    /// Sets how many devices without admission may have a session at once, to request admission at each worker; 0,
    /// the default, refuses them. The application must accept no other request of them, and end
    /// their sessions after a while ([`Server::end_unadmitted`]).
    pub fn set_unadmitted_max(&self, sessions: usize) {
        for worker in self.workers() {
            worker.inner.lock().core.set_unadmitted_max(sessions);
        }
    }

    /// Closes sessions of devices that are not admitted and have been connected for `after`.
    pub fn end_unadmitted(&self, after: Duration) {
        for worker in self.workers() {
            let mut inner = worker.inner.lock();
            let closed = inner.core.end_unadmitted(clock::now(), after.into());
            drop(inner);
            if closed > 0 {
                worker.wake();
            }
        }
    }

    /// Ends every session of a client, awake or hibernated, and frees its resources. Its streams are closed after a
    /// moment, in which it hears that. Exclude it by
    /// [`Server::set_admission`] before, or it connects again.
    pub fn end_client(&self, client: PublicKey) {
        let code = ReasonCode::NotAllowed as u64;
        let text = "this device is no longer a client of the proxy";
        for worker in self.workers() {
            let mut inner = worker.inner.lock();
            for stream in inner.core.streams_of(client) {
                inner.streams.close_soon(stream);
            }
            inner.core.end_client(clock::now(), client, code, text);
            drop(inner);
            worker.wake();
        }
    }
}
