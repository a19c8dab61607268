//! Clients that several nodes share: this node follows what others change, and tells them what clients do here.
//!
//! ```text
//!  another node: enrol, remove, limit ─▶ store ── looked at every 0.3 s ──▶ ClientStore ─▶ enrolment.rs applies it
//!  flows and bytes of this node ─▶ shared_usage.rs ─▶ store
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use d2tp_driver::HostKey;
use futures_util::stream::{self, StreamExt as _};
use tokio::time::{sleep, timeout};

use crate::prox::Prox;

/// How often this node looks whether another has changed clients. A client that one node removes is served by the others
/// for so long, and the time in which the server applies it.
const LOOK_EVERY: Duration = Duration::from_millis(300); // a guess: one small read
/// How long the end of a process waits until the store has what its clients did.
const FINISH_WITHIN: Duration = Duration::from_secs(2); // a guess
/// How many clients are looked up at once for a list.
const READS_AT_ONCE: usize = 64; // as copies

impl Prox {
    /// Shares clients with other nodes until the proxy stops, if it has a shared store.
    pub async fn share_clients(self: Arc<Prox>) {
        let Some(usage) = self.usage.clone() else {
            return;
        };
        let known = self.clients.clone();
        let telling = usage.tell_other_nodes(
            self.ledger.clone(),
            self.traffic.clone(),
            move |client| known.is_known(client),
            self.stop.clone(),
        );
        let telling = tokio::spawn(telling);
        loop {
            // The store's own log says that it is unreachable, and the list's what became of it.
            let _ = self.clients.follow_other_nodes().await;
            tokio::select! {
                () = sleep(LOOK_EVERY) => {}
                () = self.stop.cancelled() => break,
            }
        }
        let _ = telling.await;
    }

    /// Takes what other nodes have changed since, before an operator's request is carried out.
    pub(crate) async fn follow_other_nodes(&self) {
        let _ = self.clients.follow_other_nodes().await;
    }

    /// Tells other nodes what clients have done here, before the process ends.
    pub async fn finish_sharing(&self) {
        let Some(usage) = &self.usage else {
            return;
        };
        let is_known = |client: &HostKey| self.clients.is_known(client);
        let finishing = usage.finish(&self.ledger, &self.traffic, is_known);
        if timeout(FINISH_WITHIN, finishing).await.is_err() {
            tracing::warn!(
                "the store does not answer; what clients transferred last is not counted"
            );
        }
    }

    /// Learns what these clients do at other nodes, for the operator.
    pub(crate) async fn read_usage(&self, clients: Vec<HostKey>) {
        let Some(usage) = &self.usage else {
            return;
        };
        let is_unreachable = AtomicBool::new(false);
        let reads = clients.into_iter().map(|client| {
            let is_unreachable = &is_unreachable;
            async move {
                // After a failure no more are tried.
                if !is_unreachable.load(Ordering::Relaxed)
                    && !usage.read(client, &self.traffic).await
                {
                    is_unreachable.store(true, Ordering::Relaxed);
                }
            }
        });
        let mut reads = stream::iter(reads).buffer_unordered(READS_AT_ONCE);
        while reads.next().await.is_some() {}
    }

    /// When a client was seen at any node, in seconds since 1970, as far as this one has heard.
    pub(crate) fn seen_elsewhere_s(&self, client: &HostKey) -> Option<u64> {
        self.usage.as_ref()?.seen_s(client)
    }

    /// Whether this node holds clients to what it alone knows, because the store does not answer.
    pub(crate) fn counts_alone(&self) -> bool {
        self.usage.as_ref().is_some_and(|usage| usage.is_alone())
    }
}
