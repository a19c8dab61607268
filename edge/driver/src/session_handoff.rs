//! Sessions of this process for which another one asks, because their device came there.
//!
//! ```text
//!  device                       this node: owner                     another node
//!    │ ─── SYN ──────────────────────────────────────────────────────▶ │ looks the session up
//!    │                             │ ◀──────────── whose is it? ─────── │
//!    │                             │ writes what the store lacks of it  │
//!    │                             │ ─────────────── written ─────────▶ │ looks it up again, goes on
//!    │                             │ or: busy ────────────────────────▶ │ tells the device to try later
//! ```
//!
//! A node that did not answer its device for a second may be alive: its machine was busy, or the network failed. It
//! knows flows that the store does not know yet, whose requests another node would have to make again.

use std::sync::{Arc, Weak};

use d2tp_session::{FlowId, Span};

use crate::clock;
use crate::driver_core::DriverShared;
use crate::hibernation;
use crate::journal::JournalSessionKey;
use crate::record_store::{OwnerAnswer, OwnerQuestion, SharedRecords};

/// How long a session stays whose flows the store does not all know: its device may not reach this node any more.
const BUSY_MAX: Span = Span::from_secs(3); // a guess
/// The most sessions that are remembered as busy.
const BUSY_SESSIONS_MAX: usize = 4_096; // a guess

/// Answers the questions of other processes until the server stops.
pub(crate) async fn answer_questions(
    store: Arc<dyn SharedRecords>,
    workers: Vec<Weak<DriverShared>>,
) {
    while let Ok(question) = store.next_question().await {
        let (store, workers) = (store.clone(), workers.clone());
        tokio::spawn(async move { answer(&*store, &workers, question).await });
    }
}

async fn answer(
    store: &dyn SharedRecords,
    workers: &[Weak<DriverShared>],
    question: OwnerQuestion,
) {
    let key = question.session;
    let mut answer = OwnerAnswer::Nothing;
    for worker in workers.iter().filter_map(Weak::upgrade) {
        match prepare(&worker, store, key) {
            OwnerAnswer::Written => {
                let journal = worker.inner.lock().hibernation.journal.clone();
                let written = match journal {
                    Some(journal) => hibernation::write_batch(&worker, &journal).await.is_ok(),
                    None => false,
                };
                // What is not written yet may be soon.
                answer = match written {
                    true => OwnerAnswer::Written,
                    false => OwnerAnswer::Busy,
                };
            }
            OwnerAnswer::Busy => answer = OwnerAnswer::Busy,
            OwnerAnswer::Nothing | OwnerAnswer::Gone => {}
        }
    }
    // Without an answer the other node goes on as if this one were gone.
    let _ = store.answer_question(question, answer).await;
}

/// Prepares the handover of a session to another node: its record is written, if this worker has it
/// awake and if the other node can go on with all flows.
fn prepare(
    worker: &DriverShared,
    store: &dyn SharedRecords,
    key: JournalSessionKey,
) -> OwnerAnswer {
    let mut inner = worker.inner.lock();
    let now = clock::now();
    if !inner.core.owns(&key.peer) || !store.owns(&key) {
        return OwnerAnswer::Nothing;
    }
    let Some(id) = inner.core.awake_session(key.peer, key.instance) else {
        return match inner.hibernation.is_pending(&key) {
            true => OwnerAnswer::Written,
            false => OwnerAnswer::Nothing,
        };
    };
    let all = (id, FlowId(0))..=(id, FlowId(u64::MAX));
    let open = inner.flows.range(all).filter(|(_, e)| e.end.is_none());
    let memos: Vec<bool> = open.map(|(_, entry)| entry.memo.is_some()).collect();
    let lacks_memo = memos.contains(&false);
    let is_empty = memos.is_empty();
    let is_pending = inner.hibernation.is_pending(&key);
    let Some(state) = &mut inner.hibernation.shared else {
        return OwnerAnswer::Nothing;
    };
    if !lacks_memo {
        state.asked_since.remove(&key);
        // The store knows all flows.
        if is_empty || !is_pending {
            return OwnerAnswer::Nothing;
        }
    } else {
        state
            .asked_since
            .retain(|_, since| now.since(*since) < BUSY_MAX.times(4));
        let is_full = state.asked_since.len() >= BUSY_SESSIONS_MAX;
        let known = state.asked_since.get(&key).copied();
        let since = known.or((!is_full).then_some(now));
        if let Some(since) = since {
            state.asked_since.insert(key, since);
        }
        if since.is_some_and(|since| now.since(since) < BUSY_MAX) {
            tracing::info!(
                instance = key.instance,
                "another node asks for a session of which the store does not know all; its device tries later"
            );
            return OwnerAnswer::Busy;
        }
    }
    inner.hibernation.stale.insert(key);
    OwnerAnswer::Written
}
