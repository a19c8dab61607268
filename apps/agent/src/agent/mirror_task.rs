//! A transfer of the agent that mirrors a folder: one entry of the queue, whatever the number of its files.
//!
//! ```text
//!  attempt (task.rs) ─▶ FolderMirror ─┬─ progress, waits, the end ─▶ the transfer's state, the ledger, the meter
//!                                     └─ files, failures, notes ───▶ those who follow it
//! ```

use std::sync::{Arc, Mutex};

use tokio::sync::watch;

use super::state::{Agent, lock};
use crate::fetch::mode::FetchMode;
use crate::fetch::outcome::TransferFailure;
use crate::fetch::report::TransferEvent;
use crate::fetch::transfer::{FollowingBytes, redact_url};
use crate::mirror::{FileTransfers, FolderMirror, MirrorEvent, MirrorObserver, MirrorReporter};
use crate::order::{TransferOrder, TransferVerb};
use crate::prepared_transfer::PreparedTransfer;
use crate::terms::TransferTerms;

/// The agent's observer of a mirror.
struct AgentMirrorObserver {
    agent: Arc<Agent>,
    id: u64,
}

impl MirrorObserver for AgentMirrorObserver {
    fn on_event(&self, event: &MirrorEvent) {
        match event {
            MirrorEvent::Waiting {
                reason,
                why,
                unblocks,
            } => {
                let event = TransferEvent::Waiting {
                    t_s: 0.0,
                    reason: *reason,
                    why: why.clone(),
                    unblocks: unblocks.clone(),
                };
                self.agent.hear(self.id, &event);
            }
            MirrorEvent::File { .. } | MirrorEvent::Failed { .. } | MirrorEvent::Note { .. } => {
                let event = serde_json::to_value(event).unwrap_or_default();
                self.agent.tell_followers(self.id, event);
            }
        }
    }

    fn on_progress(&self, progress: &TransferEvent) {
        self.agent.hear(self.id, progress);
    }
}

impl Agent {
    /// Runs a mirror once. How it ended is in the last report of its task.
    pub(super) async fn mirror(
        self: &Arc<Agent>,
        id: u64,
        order: &TransferOrder,
        terms: watch::Receiver<TransferTerms>,
        stop: watch::Receiver<bool>,
    ) -> Result<(), TransferFailure> {
        let mode = mode_of(order)?;
        let verb = order.verb.as_str();
        let observer = Box::new(AgentMirrorObserver {
            agent: self.clone(),
            id,
        });
        let reporter = MirrorReporter::new(observer, verb, mode, (false, true));
        let transfers = FileTransfers {
            order: order.clone(),
            terms,
            links: self.link_view.links(),
            stop,
            scheduler: self.scheduler.clone(),
            tuning: self.tuning(),
            rate_limiter: self.rate_limiters.limiter_of(order),
            asks_for_paid: false,
            repeats_waits: true,
            transports: Mutex::default(),
            following: Arc::new(FollowingBytes::default()),
        };
        let mirror = FolderMirror::new(order, false, transfers, reporter)?;
        let file = order.file.as_ref();
        self.hear(
            id,
            &TransferEvent::Begun {
                url: (order.url.parse()).map_or_else(|_| String::new(), |url| redact_url(&url)),
                file: file.map_or_else(String::new, |file| file.display().to_string()),
                mode,
                held_bytes: 0,
            },
        );
        let report = mirror.run().await;
        self.hear(
            id,
            &match report.text {
                None => TransferEvent::Done(report),
                Some(_) => TransferEvent::Error(report),
            },
        );
        Ok(())
    }

    /// The number of another transfer that mirrors into the same folder and has not ended.
    pub(super) fn other_mirror_into(&self, order: &TransferOrder) -> Option<u64> {
        let tasks = lock(&self.tasks);
        let found = tasks.iter().find(|(_, task)| {
            let other = &task.saved.order;
            let is_into_same = other.mirror.is_some() && other.file == order.file;
            is_into_same && other.verb == TransferVerb::Get && !task.has_ended()
        });
        found.map(|(id, _)| *id)
    }
}

/// Which host talks to the server.
fn mode_of(order: &TransferOrder) -> Result<FetchMode, TransferFailure> {
    Ok(PreparedTransfer::prepare(order, order.job()?, false)?.mode())
}
