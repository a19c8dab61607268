//! Connections to a local port that have not shown yet that they may be served.
//!
//! Any user of this machine can connect to a local port and send nothing. Such connections are
//! limited in number and time; if there are too many, the oldest of the user who has most gives way,
//! so that one user's connections, however many and however fast, displace none of another's.
//! Connections that have shown the token are counted separately.
//!
//! ```text
//!  accept ─ admit ─▶ unproven ─ prove ─▶ served as long as it likes
//!                      │  └ the time is up ─▶ closed
//!                      └ one too many came, and its user has most ─▶ closed
//! ```

use std::collections::{HashMap, VecDeque};
use std::future::pending;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::socket_owner::ConnectionOwner;

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
    owner: ConnectionOwner,
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

    /// Gives a new connection a place. If there are too many, a connection of the user who has most, the new one
    /// counted, loses its own: the oldest.
    pub fn admit(&self, owner: ConnectionOwner) -> Arc<UnprovenConnection> {
        let connection = Arc::new(UnprovenConnection {
            owner,
            until: Instant::now() + self.within,
            has_proved: AtomicBool::new(false),
            gives_way: Notify::new(),
        });
        let mut oldest_first = self.lock();
        let mut waiting: VecDeque<Arc<UnprovenConnection>> = oldest_first
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|known| !known.has_proved())
            .collect();
        while waiting.len() >= self.connections_max {
            match most_crowded(&waiting, owner).and_then(|at| waiting.remove(at)) {
                Some(oldest) => oldest.gives_way.notify_one(),
                None => break,
            }
        }
        waiting.push_back(connection.clone());
        *oldest_first = waiting.iter().map(Arc::downgrade).collect();
        connection
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Weak<UnprovenConnection>>> {
        self.oldest_first
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of the oldest connection of the owner who has most, when `newest` gets one more. Of two who have as many
/// it is the one whose oldest is older.
fn most_crowded(
    oldest_first: &VecDeque<Arc<UnprovenConnection>>,
    newest: ConnectionOwner,
) -> Option<usize> {
    let mut counts = HashMap::from([(newest, 1)]);
    for known in oldest_first {
        *counts.entry(known.owner).or_insert(0) += 1;
    }
    let owners = oldest_first.iter().map(|known| counts[&known.owner]);
    // The last of equal maxima is found, so the search begins at the newest.
    owners
        .enumerate()
        .rev()
        .max_by_key(|(_, count)| *count)
        .map(|(at, _)| at)
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
    const ME: ConnectionOwner = ConnectionOwner::User(1000);
    const STRANGER: ConnectionOwner = ConnectionOwner::User(1001);

    fn is_closed(connection: &UnprovenConnection) -> bool {
        connection.closed().now_or_never().is_some()
    }

    #[tokio::test]
    async fn the_oldest_that_proved_nothing_gives_way() {
        let port = UnprovenConnections::new(2, WITHIN);
        let proved = port.admit(ME);
        proved.prove();
        let (old, new) = (port.admit(ME), port.admit(ME));
        assert!(!is_closed(&old), "who has proved takes no place");
        let newest = port.admit(ME);
        assert!(is_closed(&old));
        assert!(!is_closed(&proved) && !is_closed(&new) && !is_closed(&newest));
        drop(new);
        let another = port.admit(ME);
        assert!(!is_closed(&newest), "one had gone by itself");
        assert!(!is_closed(&another));
    }

    #[tokio::test]
    async fn a_user_who_connects_without_end_displaces_nobody_else() {
        let port = UnprovenConnections::new(4, WITHIN);
        let mine = [port.admit(ME), port.admit(ME)];
        let mut theirs: Vec<_> = (0..100).map(|_| port.admit(STRANGER)).collect();
        assert!(mine.iter().all(|mine| !is_closed(mine)));
        let open = theirs.split_off(98);
        assert!(theirs.iter().all(|theirs| is_closed(theirs)));
        assert!(open.iter().all(|theirs| !is_closed(theirs)));
        // Who comes to a full port gets a place from those who have many.
        let third = ConnectionOwner::User(1002);
        let newest = port.admit(third);
        assert!(!is_closed(&newest));
        assert!(is_closed(&mine[0]), "of two with as many the older one");
        assert!(!is_closed(&mine[1]) && open.iter().all(|theirs| !is_closed(theirs)));
    }

    #[tokio::test]
    async fn of_many_users_each_has_one_place_and_then_the_oldest_gives_way() {
        let port = UnprovenConnections::new(2, WITHIN);
        let [first, second, third] = [1, 2, 3].map(|user| port.admit(ConnectionOwner::User(user)));
        assert!(is_closed(&first));
        assert!(!is_closed(&second) && !is_closed(&third));
    }

    #[tokio::test(start_paused = true)]
    async fn who_proves_nothing_in_time_is_closed() {
        let port = UnprovenConnections::new(2, WITHIN);
        let (idle, proved) = (port.admit(ME), port.admit(ME));
        proved.prove();
        tokio::time::advance(WITHIN).await;
        assert!(is_closed(&idle));
        assert!(!is_closed(&proved));
    }
}
