//! Links over which a TCP connection attempt has gone unanswered for a second.
//!
//! A link can be attached, have addresses and routes, and carry nothing. A connection attempt shows that
//! long before it times out: whoever chooses links counts such a link as stalled and uses another one if
//! policy allows. The attempt goes on where no other link may be used.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

/// How long a connection attempt may go unanswered before its link counts as stalled.
// RFC 6298 §2.1: when the kernel repeats a SYN. Paths of sessions are raced after the same time.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);

/// The connection attempts that go unanswered, by link and by the host of the request: a host that does not
/// answer says nothing of a link that carries another one.
#[derive(Debug, Default)]
pub struct UnansweredConnects {
    attempts: Mutex<BTreeMap<(String, String), usize>>,
    changed: watch::Sender<()>,
}

/// Counts one unanswered attempt until it is dropped.
struct UnansweredAttempt<'a> {
    connects: &'a UnansweredConnects,
    key: (String, String),
}

impl UnansweredConnects {
    /// Whether a connection attempt over `link` goes unanswered, to any host.
    pub fn contains_link(&self, link: &str) -> bool {
        self.attempts().keys().any(|(over, _)| over == link)
    }

    /// Whether a connection attempt over `link` for a request to `host` goes unanswered.
    pub fn contains(&self, link: &str, host: &str) -> bool {
        let key = (link.to_owned(), host.to_owned());
        self.attempts().contains_key(&key)
    }

    /// Notified when an attempt begins to count as unanswered.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    fn attempts(&self) -> MutexGuard<'_, BTreeMap<(String, String), usize>> {
        self.attempts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a connection attempt over `link` for a request to `host`, and counts it after [`ANSWERS_WITHIN`] until it ends or is
    /// dropped.
    pub(super) async fn observe<F: Future>(
        &self,
        link: Option<&str>,
        host: &str,
        attempt: F,
    ) -> F::Output {
        let mut attempt = pin!(attempt);
        let Some(link) = link else {
            return attempt.await;
        };
        if let Ok(output) = timeout(ANSWERS_WITHIN, &mut attempt).await {
            return output;
        }
        let key = (link.to_owned(), host.to_owned());
        *self.attempts().entry(key.clone()).or_default() += 1;
        let _counted = UnansweredAttempt {
            connects: self,
            key,
        };
        self.changed.send_replace(());
        attempt.await
    }
}

impl Drop for UnansweredAttempt<'_> {
    fn drop(&mut self) {
        let mut attempts = self.connects.attempts();
        if let Some(count) = attempts.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                attempts.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::pending;

    #[tokio::test(start_paused = true)]
    async fn a_link_counts_from_a_second_on_until_its_attempt_ends_or_is_dropped() {
        let connects = UnansweredConnects::default();
        let mut changes = connects.changes();
        {
            let mut attempt = pin!(connects.observe(Some("wlan0"), "b.example", pending::<()>()));
            let soon = timeout(Duration::from_millis(990), &mut attempt);
            assert!(soon.await.is_err());
            assert!(!connects.contains_link("wlan0") && !changes.has_changed().unwrap());
            tokio::select! {
                () = &mut attempt => unreachable!("nobody answers"),
                changed = changes.changed() => changed.unwrap(),
            }
            assert!(connects.contains_link("wlan0") && !connects.contains_link("wwan0"));
            assert!(connects.contains("wlan0", "b.example"));
            let other = connects.contains("wlan0", "a.example");
            assert!(!other, "another host may answer there");
        }
        assert!(!connects.contains_link("wlan0"), "it was dropped");
        // sleep: in paused time
        let late = async { tokio::time::sleep(Duration::from_secs(2)).await };
        connects.observe(Some("wlan0"), "b.example", late).await;
        assert!(!connects.contains_link("wlan0"), "it ended");
    }
}
