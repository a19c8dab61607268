//! The end of an agent that was started by need: it exits when it has had nothing to do for some time.
//!
//! A transfer that runs, waits or is queued is something to do, and so is any connection to the socket: a
//! command that follows a transfer, a player's stream, a program's socket. So are subscriptions to podcasts, whose
//! feeds are read again and again. A paused transfer is not: it
//! waits for a command, and that command starts the agent again.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::state::{Agent, lock};
use crate::fetch::boot_clock::BootInstant;

/// How long an agent that was started by need stays without anything to do.
pub const IDLE_MAX: Duration = Duration::from_secs(300); // a guess: a user who types the next command

/// How often an agent with nothing to do looks whether it still has nothing to do.
const LOOK_EVERY: Duration = Duration::from_secs(5); // a guess

/// A program's connection to the agent's socket, counted while it lasts.
pub(super) struct ConnectionCount(Arc<Agent>);

impl ConnectionCount {
    pub(super) fn new(agent: Arc<Agent>) -> ConnectionCount {
        agent.open_connections.fetch_add(1, Ordering::Relaxed);
        ConnectionCount(agent)
    }
}

impl Drop for ConnectionCount {
    fn drop(&mut self) {
        self.0.open_connections.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Agent {
    /// Returns when the agent has had nothing to do for `limit`, or at once when it has nothing to
    /// do and its socket was removed, so that no command can reach it. Without a limit it never
    /// returns.
    pub(super) async fn idle_for(self: Arc<Agent>, limit: Option<Duration>, socket: &Path) {
        let Some(limit) = limit else {
            return std::future::pending().await;
        };
        let mut busy_at = BootInstant::now();
        loop {
            let now = BootInstant::now();
            let idle = now.since(busy_at);
            if self.has_work() {
                busy_at = now;
            } else if idle >= limit || !socket.exists() {
                return;
            }
            let rest = limit.saturating_sub(idle);
            tokio::time::sleep(rest.clamp(Duration::from_millis(10), LOOK_EVERY)).await;
        }
    }

    fn has_work(&self) -> bool {
        self.open_connections.load(Ordering::Relaxed) > 0
            || self.has_subscriptions.load(Ordering::Relaxed)
            || lock(&self.tasks).values().any(|task| task.running)
    }
}
