//! The log of clients that a server refuses: an operator must learn which key to add, and nobody who
//! makes up keys may fill a disk.

use std::net::SocketAddr;

use d2tp_session::{PublicKey, Span, Time};

/// The shortest time between two lines of the log.
const LOG_EVERY: Span = Span::from_secs(10); // a guess: a person tries again sooner, and need not be told

/// Logs refused clients, one in [`LOG_EVERY`].
#[derive(Default)]
pub(crate) struct RefusedClientLog {
    logged_at: Option<Time>,
    /// Refusals since then that were not logged.
    unlogged: u64,
}

impl RefusedClientLog {
    /// Logs the refusal of `client`, or counts it.
    pub(crate) fn on_refused(&mut self, now: Time, client: PublicKey, from: SocketAddr) {
        if let Some(unlogged) = self.unlogged_before(now) {
            tracing::warn!(
                %from,
                unlogged,
                "refused a client that is not admitted; to let it in: --allow-client {client}"
            );
        }
    }

    /// Whether this refusal is logged; how many before it were not.
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
