//! Connections to a local port that have not shown yet that they may be served.
//!
//! Any user of this machine can connect to a local port and send nothing. Such connections are
//! limited in number and time, and the newest replaces the oldest; connections that have shown the
//! token are counted separately, so that others cannot displace them.
//!
//! ```text
//!  accept ─ admit ─▶ unproven ─ prove ─▶ served as long as it likes
//!                      │  └ the time is up ─▶ closed
//!                      └ the newest of too many came ─▶ closed
//! ```

use std::collections::VecDeque;
use std::future::pending;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// The connections of a port that have proved nothing yet.
#[derive(Debug)]
pub struct UnprovenConnections {
    connections_max: usize,
    within: Duration,
    oldest_first: Mutex<VecDeque<Weak<UnprovenConnection>>>,
}

/// A connection's place until it has proved that it may be served.
#[derive(Debug)]
pub struct UnprovenConnection {
    until: Instant,
    has_proved: AtomicBool,
    gives_way: Notify,
}

impl UnprovenConnections {
    /// Places for `connections_max` connections, each for `within`.
    pub fn new(connections_max: usize, within: Duration) -> UnprovenConnections {
        UnprovenConnections {
            connections_max,
            within,
            oldest_first: Mutex::default(),
        }
    }

    /// Gives a new connection a place. The oldest one loses its place if there are too many.
    pub fn admit(&self) -> Arc<UnprovenConnection> {
        let connection = Arc::new(UnprovenConnection {
            until: Instant::now() + self.within,
            has_proved: AtomicBool::new(false),
            gives_way: Notify::new(),
        });
        let mut waiting = self.lock();
        waiting.retain(|known| known.upgrade().is_some_and(|known| !known.has_proved()));
        while waiting.len() >= self.connections_max {
            let oldest = waiting.pop_front().and_then(|oldest| oldest.upgrade());
            if let Some(oldest) = oldest {
                oldest.gives_way.notify_one();
            }
        }
        waiting.push_back(Arc::downgrade(&connection));
        connection
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Weak<UnprovenConnection>>> {
        self.oldest_first
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl UnprovenConnection {
    /// Records that the connection may be served: it has no limit of time any more.
    pub fn prove(&self) {
        self.has_proved.store(true, Ordering::Release);
    }

    fn has_proved(&self) -> bool {
        self.has_proved.load(Ordering::Acquire)
    }

    /// Ready when the connection is to be closed: its time is up, or it gives way to a newer one. Never
    /// ready once it has proved that it may be served.
    pub async fn closed(&self) {
        tokio::select! {
            () = self.gives_way.notified() => {}
            () = sleep_until(self.until) => {}
        }
        if self.has_proved() {
            pending::<()>().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    const WITHIN: Duration = Duration::from_secs(5);

    fn is_closed(connection: &UnprovenConnection) -> bool {
        connection.closed().now_or_never().is_some()
    }

    #[tokio::test]
    async fn the_oldest_that_proved_nothing_gives_way() {
        let port = UnprovenConnections::new(2, WITHIN);
        let proved = port.admit();
        proved.prove();
        let (old, new) = (port.admit(), port.admit());
        assert!(!is_closed(&old), "who has proved takes no place");
        let newest = port.admit();
        assert!(is_closed(&old));
        assert!(!is_closed(&proved) && !is_closed(&new) && !is_closed(&newest));
        drop(new);
        let another = port.admit();
        assert!(!is_closed(&newest), "one had gone by itself");
        assert!(!is_closed(&another));
    }

    #[tokio::test(start_paused = true)]
    async fn who_proves_nothing_in_time_is_closed() {
        let port = UnprovenConnections::new(2, WITHIN);
        let (idle, proved) = (port.admit(), port.admit());
        proved.prove();
        tokio::time::advance(WITHIN).await;
        assert!(is_closed(&idle));
        assert!(!is_closed(&proved));
    }
}
