//! The log of clients that a server refuses. Operators must learn which key to add, but clients
//! with invented keys must not fill a disk.

use std::net::SocketAddr;

use d2tp_session::{PublicKey, Span, Time};

/// The shortest time between two log entries.
const LOG_EVERY: Span = Span::from_secs(10); // a guess: people try again sooner, and need no second entry

/// Logs refused clients, at most one in [`LOG_EVERY`].
#[derive(Default)]
pub(crate) struct RefusedClientLog {
    logged_at: Option<Time>,
    /// Refusals since the last entry that were not logged.
    unlogged: u64,
}

impl RefusedClientLog {
    /// Logs the refusal of `client`, or counts it.
    pub(crate) fn on_refused(&mut self, now: Time, client: PublicKey, from: SocketAddr) {
        if let Some(unlogged) = self.unlogged_before(now) {
            tracing::warn!(
                %from,
                unlogged,
                "refused a client that is not admitted; to let it in: `cedos prox invite`, or --allow-client {client}"
            );
        }
    }

    /// Whether this refusal is logged; if so, how many before it were not.
    fn unlogged_before(&mut self, now: Time) -> Option<u64> {
        let is_due = self.logged_at.is_none_or(|at| now.since(at) >= LOG_EVERY);
        if !is_due {
            self.unlogged += 1;
            return None;
        }
        self.logged_at = Some(now);
        Some(std::mem::take(&mut self.unlogged))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_logged_at_most_once_in_ten_seconds_and_counted() {
        let mut log = RefusedClientLog::default();
        let start = Time::ZERO + Span::from_secs(100);
        assert_eq!(log.unlogged_before(start), Some(0));
        assert_eq!(log.unlogged_before(start + Span::from_secs(1)), None);
        assert_eq!(log.unlogged_before(start + Span::from_secs(9)), None);
        assert_eq!(log.unlogged_before(start + LOG_EVERY), Some(2));
    }
}
