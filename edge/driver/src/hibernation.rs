//! Hibernation of a server's sessions: when a session may hibernate, what is stored of it, and how
//! its flows are resumed.
//!
//! ```text
//!  keep(memo) ──▶ entry ──▶ JournalBatch ──▶ journal_writer ──▶ journal   (awake, and safe against a crash)
//!  suspended for long, every flow has a memo ──▶ record and memos  (keys and buffers are freed)
//!  the device connects ──▶ flows without a handle ──▶ accepted again, each with its memo
//!  a deadline passes meanwhile ──▶ next_expired returns the memo
//! ```
//!
//! A handle is valid for one period awake: when the flow hibernates, the handle reports that and is
//! dropped; the resumed flow has a new one. So no id changes, and a hibernated flow has no task.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use d2tp_session::{
    FlowId, Role, SessionEvent, SessionId, SessionRecord, SessionState, Span, Time,
};

use crate::clock;
use crate::driver_core::{DROPPED, DriverCore, DriverShared, FlowEntry};
use crate::hibernation_state::DeferredChange;
use crate::journal::{
    Journal, JournalBatch, JournalError, JournalFlowKey, JournalPage, JournalSession,
    JournalSessionKey, StoredRecord,
};
use crate::record_store::RecordStore;
use crate::shared_records;

/// How long changes are collected before they are written together.
const GATHER: Duration = Duration::from_millis(50); // a guess: a sync costs some milliseconds
/// The number of sessions loaded before the server accepts any: about 20 ms.
const FIRST_PART: usize = 10_000;
/// The number of sessions loaded at once while the server runs: a millisecond without receiving.
const PART: usize = 500;
/// How long to wait after a failed write of the journal.
const AGAIN_AFTER: Duration = Duration::from_secs(5); // a guess
/// How long to wait after a failed write to a store that nodes share: meanwhile no other node can go on with what began.
const SHARED_AGAIN_AFTER: Duration = Duration::from_millis(500); // a guess

pub(crate) fn key_of(inner: &DriverCore, id: SessionId) -> Option<JournalSessionKey> {
    let session = inner.core.session(id)?;
    (session.role() == Role::Responder).then(|| JournalSessionKey {
        peer: session.peer(),
        instance: session.instance(),
    })
}

/// Allows a flow to hibernate; `memo` is what its application needs afterwards.
pub(crate) fn keep(inner: &mut DriverCore, id: SessionId, flow: FlowId, memo: Bytes) {
    let Some(key) = key_of(inner, id) else { return };
    let Some(entry) = inner.flows.get_mut(&(id, flow)) else {
        return;
    };
    if entry.end.is_none() {
        entry.memo = Some(memo.clone());
        // R-HS-12: nothing is stored for a device that has not confirmed its handshake.
        if inner.core.session(id).is_some_and(|s| s.is_unconfirmed()) {
            return;
        }
        inner.hibernation.is_awake(key, id);
        inner.hibernation.write_memo(key, flow, Some(memo));
        recheck_suspended(inner, id);
    }
}

/// Allows a flow to hibernate no longer.
pub(crate) fn forbid(inner: &mut DriverCore, id: SessionId, flow: FlowId) {
    let Some(key) = key_of(inner, id) else { return };
    let entry = inner.flows.get_mut(&(id, flow));
    // The memo of a flow that is over is removed with it.
    let entry = entry.filter(|entry| entry.end.is_none() && !entry.hibernated);
    if entry.and_then(|entry| entry.memo.take()).is_some() {
        inner.hibernation.write_memo(key, flow, None);
    }
}

/// Checks again whether a suspended session may hibernate.
fn recheck_suspended(inner: &mut DriverCore, id: SessionId) {
    let suspended = inner.core.session(id).map(|s| s.state()) == Some(SessionState::Suspended);
    if let Some(after) = inner
        .hibernation
        .hibernate_after
        .filter(|_| inner.accepts && suspended)
    {
        inner
            .hibernation
            .hibernate_at
            .insert((clock::now() + after, id));
    }
}

/// Checks again whether a session may hibernate, once its application has read what had arrived on a flow. Returns whether
/// the engine's task has to look at its timers.
pub(crate) fn on_read(inner: &mut DriverCore, id: SessionId, flow: FlowId) -> bool {
    let session = inner.core.session(id).filter(|_| inner.accepts);
    let is_due =
        session.is_some_and(|s| s.state() == SessionState::Suspended && !s.has_unread(flow));
    if is_due {
        recheck_suspended(inner, id);
    }
    is_due
}

/// Queues the record of a session to be written again, if it has one.
fn on_record_changed(inner: &mut DriverCore, id: SessionId) {
    if let Some(key) = key_of(inner, id).filter(|key| inner.hibernation.awake.contains_key(key)) {
        inner.hibernation.stale.insert(key);
        inner.hibernation.changed.notify_one();
    }
}

/// Handles an event of a session.
pub(crate) fn on_event(inner: &mut DriverCore, id: SessionId, event: &SessionEvent) {
    match event {
        SessionEvent::Suspended(_) => recheck_suspended(inner, id),
        SessionEvent::Established { .. } if inner.accepts => on_awake(inner, id),
        // R-KEM-7: the secret belongs into the record.
        SessionEvent::HybridKeys if inner.accepts => on_record_changed(inner, id),
        SessionEvent::SendFrom { flow, offset } if inner.accepts => {
            send_early(inner, id, *flow, *offset)
        }
        // The entry keeps its memo, because an application that has not accepted the flow again
        // must still get the memo to free resources.
        SessionEvent::Ended { flow, .. } => {
            let kept = inner
                .flows
                .get(&(id, *flow))
                .is_some_and(|e| e.memo.is_some());
            if let Some(key) = key_of(inner, id).filter(|_| kept) {
                inner.hibernation.write_memo(key, *flow, None);
            }
            recheck_suspended(inner, id);
        }
        SessionEvent::Closed(_) => {
            let owned = shared_records::on_end(inner, id);
            if let Some(key) = inner.hibernation.is_over(id).or(owned) {
                let flows = inner.flows.range((id, FlowId(0))..=(id, FlowId(u64::MAX)));
                let kept = flows.filter_map(|((_, flow), entry)| {
                    Some((*flow, entry.memo.clone()?, entry.unclaimed))
                });
                for (flow, memo, unclaimed) in kept.collect::<Vec<_>>() {
                    inner.hibernation.write_memo(key, flow, None);
                    if unclaimed {
                        // No handle will report the end.
                        inner.flows.remove(&(id, flow));
                        inner
                            .hibernation
                            .return_memo(JournalFlowKey { session: key, flow }, memo);
                    }
                }
                inner.hibernation.stale.insert(key);
                inner.hibernation.changed.notify_one();
            }
        }
        _ => {}
    }
}

/// R-RESUME-7: sends early data of a hibernated flow that a SYN claims, if it can be read at once.
/// No application gets the flow before the device has confirmed.
fn send_early(inner: &mut DriverCore, id: SessionId, flow: FlowId, offset: u64) {
    if inner.flows.contains_key(&(id, flow)) {
        return;
    }
    let Some(key) = key_of(inner, id) else { return };
    let (Some(peek), Some(memo)) = (
        inner.hibernation.peek.clone(),
        inner.hibernation.memo(key, flow),
    ) else {
        return;
    };
    let _ = inner.core.with(id, |s| {
        let room = s.write_room(flow).unwrap_or(0) as usize;
        if let Some(bytes) = peek(&memo, offset, room).filter(|_| s.is_tentative()) {
            let _ = s.write(flow, bytes.slice(..bytes.len().min(room)));
        }
    });
}

/// Resumes the flows of a session that got new keys. Those without a handle were hibernated, and
/// are offered to the application.
fn on_awake(inner: &mut DriverCore, id: SessionId) {
    let Some(key) = key_of(inner, id) else { return };
    let flows = inner.core.session(id).map(|s| s.flow_ids());
    // Nothing of a session is stored before its device has confirmed.
    let is_stored = inner.hibernation.keys.contains_key(&id);
    for flow in flows.into_iter().flatten() {
        if let Some(entry) = inner.flows.get(&(id, flow)) {
            // Early data opened the flow, and it was kept before the device confirmed.
            if let Some(memo) = entry.memo.clone().filter(|_| !is_stored) {
                keep(inner, id, flow, memo);
            }
            continue;
        }
        match inner.hibernation.take_memo(key, flow) {
            Some(memo) => {
                let entry = FlowEntry {
                    memo: Some(memo),
                    unclaimed: true,
                    ..FlowEntry::default()
                };
                inner.flows.insert((id, flow), entry);
                let held = JournalFlowKey { session: key, flow };
                match inner.hibernation.deferred.get_mut(&held) {
                    Some(next) => *next = DeferredChange::Woke(id),
                    None => inner.accepted.push_back((id, flow)),
                }
                inner.hibernation.is_awake(key, id);
                inner.hibernation.stale.insert(key);
                inner.hibernation.changed.notify_one();
            }
            // Or the flow was opened just now, and its event follows.
            None => inner.hibernation.orphans.push((id, flow)),
        }
    }
    if let Some(waker) = inner.acceptor.take() {
        waker.wake();
    }
}

/// Handles timers that are due.
pub(crate) fn on_time(inner: &mut DriverCore, now: Time) {
    for (id, flow) in std::mem::take(&mut inner.hibernation.orphans) {
        if !inner.flows.contains_key(&(id, flow)) {
            // No application can continue the flow.
            let _ = inner.core.with(id, |s| {
                s.reset(flow, DROPPED);
                s.stop(flow, DROPPED);
            });
        }
    }
    while let Some((at, id)) = inner.hibernation.hibernate_at.first().copied() {
        if at > now {
            break;
        }
        inner.hibernation.hibernate_at.pop_first();
        let after = inner.hibernation.hibernate_after.unwrap_or(Span::ZERO);
        let silent = inner.core.session(id).is_some_and(|s| {
            s.state() == SessionState::Suspended
                && s.suspended_for(now).is_some_and(|span| span >= after)
        });
        if silent {
            hibernate(inner, id, now);
        }
    }
    shared_records::release_records(inner, now);
    while let Some(lapsed) = inner.core.poll_expired() {
        let key = JournalSessionKey {
            peer: lapsed.peer,
            instance: lapsed.instance,
        };
        // What another node owns is that node's, or the store's, to end.
        let shared = inner.hibernation.shared.as_ref();
        if shared.is_some_and(|shared| !shared.store.owns(&key)) {
            continue;
        }
        match lapsed.flow {
            Some(flow) => inner.hibernation.expire(key, flow),
            None if inner.hibernation.journal.is_some() => {
                inner.hibernation.batch.sessions.insert(key, None);
                inner.hibernation.changed.notify_one();
            }
            None => {}
        }
    }
}

/// Hibernates a session if no data would be lost. Returns whether it did.
fn hibernate(inner: &mut DriverCore, id: SessionId, now: Time) -> bool {
    let Some(session) = inner.core.session(id) else {
        return false;
    };
    let Some(key) = key_of(inner, id) else {
        return false;
    };
    let flows = session.flow_ids();
    // Bytes that were received and not read would be lost with their buffer, and so would those that were written, have
    // no source, and were not acknowledged.
    let bare = flows.iter().any(|flow| {
        let entry = inner.flows.get(&(id, *flow));
        let is_kept = |e: &FlowEntry| {
            let has_memo = e.memo.is_some() && e.end.is_none();
            has_memo && (e.source.is_some() || e.unclaimed || session.is_flushed(*flow))
        };
        // Its application gets what the record lacks.
        let is_taken = entry.is_some_and(|e| e.remainder.is_some() && e.memo.is_some());
        !is_taken && (!entry.is_some_and(is_kept) || session.has_unread(*flow))
    });
    if bare || !session.may_hibernate() || !inner.core.has_room_hibernated() {
        return false;
    }
    inner.drain_trace();
    let Ok(record) = inner.core.hibernate(now, id) else {
        return false;
    };
    tracing::debug!(flows = flows.len(), "a session sleeps");
    let mut memos = BTreeMap::new();
    for flow in &flows {
        if let Some(entry) = inner.flows.get_mut(&(id, *flow)) {
            entry.hibernated = true;
            entry.source = None;
            memos.extend(entry.memo.take().map(|memo| (*flow, memo)));
            entry.wake_all();
            if entry.detached || entry.unclaimed {
                inner.flows.remove(&(id, *flow));
            } else {
                let held = JournalFlowKey {
                    session: key,
                    flow: *flow,
                };
                inner.hibernation.open_handles.insert((id, *flow), key);
                inner
                    .hibernation
                    .deferred
                    .insert(held, DeferredChange::Nothing);
            }
        }
    }
    inner.hibernation.is_over(id);
    shared_records::on_end(inner, id);
    inner.on_hibernated(id);
    let is_shared = inner.hibernation.shared.is_some();
    if (inner.hibernation.journal.is_none() || is_shared) && !memos.is_empty() {
        inner.hibernation.memos.insert(key, memos);
    }
    shared_records::release_when_written(inner, key);
    if inner.hibernation.journal.is_some() && !flows.is_empty() {
        let stored = Some(StoredRecord::now(record));
        inner.hibernation.batch.sessions.insert(key, stored);
        inner.hibernation.stale.remove(&key);
        inner.hibernation.changed.notify_one();
    }
    true
}

/// Handles the drop of a flow's old handle, after which the application has stored its state.
pub(crate) fn release_handle(inner: &mut DriverCore, id: SessionId, flow: FlowId) {
    let Some(session) = inner.hibernation.open_handles.remove(&(id, flow)) else {
        return;
    };
    let key = JournalFlowKey { session, flow };
    match inner.hibernation.deferred.remove(&key) {
        Some(DeferredChange::Woke(id)) => {
            inner.accepted.push_back((id, flow));
            if let Some(waker) = inner.acceptor.take() {
                waker.wake();
            }
        }
        Some(DeferredChange::Expired(memo)) => inner.hibernation.return_memo(key, memo),
        Some(DeferredChange::Nothing) | None => {}
    }
}

/// All changes since the last call, in their current state.
fn take_batch(inner: &mut DriverCore) -> JournalBatch {
    let now = clock::now();
    for key in std::mem::take(&mut inner.hibernation.stale) {
        let session = inner.hibernation.awake.get(&key).copied();
        let session = session.and_then(|id| Some((id, inner.core.session(id)?)));
        let stored = session.and_then(|(id, session)| {
            let mut record = session.record(now, true);
            // A flow without a memo cannot be resumed after a crash.
            record.flows.retain(|f| {
                let entry = inner.flows.get(&(id, f.id));
                entry.is_some_and(|e| e.memo.is_some() && e.end.is_none())
            });
            (!record.flows.is_empty()).then(|| StoredRecord::now(record.encode()))
        });
        if stored.is_some()
            || session.is_some()
            || !inner.hibernation.batch.sessions.contains_key(&key)
        {
            inner.hibernation.batch.sessions.insert(key, stored);
        }
    }
    std::mem::take(&mut inner.hibernation.batch)
}

/// Writes changes to the journal while the server runs.
pub(crate) async fn journal_writer(shared: Arc<DriverShared>) {
    let (journal, news, is_shared) = {
        let inner = shared.inner.lock();
        let Some(journal) = inner.hibernation.journal.clone() else {
            return;
        };
        let is_shared = inner.hibernation.shared.is_some();
        (journal, inner.hibernation.changed.clone(), is_shared)
    };
    let again_after = match is_shared {
        true => SHARED_AGAIN_AFTER,
        false => AGAIN_AFTER,
    };
    loop {
        news.notified().await;
        // A shared store syncs by itself, and what it does not know yet is lost with this node: changes are collected
        // only while others are being written.
        if !is_shared {
            tokio::time::sleep(GATHER).await;
        }
        if shared.inner.lock().stopped {
            return;
        }
        if let Err(error) = write_batch(&shared, &journal).await {
            tracing::error!(%error, "sleeping sessions would be lost in a crash now");
            tokio::time::sleep(again_after).await;
            news.notify_one();
        }
    }
}

/// Writes all changes to the journal.
pub(crate) async fn write_batch(
    shared: &Arc<DriverShared>,
    journal: &Arc<dyn RecordStore>,
) -> Result<(), JournalError> {
    let turn = shared.inner.lock().hibernation.write_turn.clone();
    let _turn = turn.lock().await;
    let batch = {
        let mut inner = shared.inner.lock();
        let batch = take_batch(&mut inner);
        let of_memos = batch.memos.keys().map(|memo| memo.session);
        inner.hibernation.writing = batch.sessions.keys().copied().chain(of_memos).collect();
        batch
    };
    if batch.is_empty() {
        return Ok(());
    }
    let journal = journal.clone();
    let work = move || {
        let written = journal.commit(&batch);
        (batch, written)
    };
    let written = tokio::task::spawn_blocking(work).await;
    let mut inner = shared.inner.lock();
    inner.hibernation.writing.clear();
    match written {
        Ok((batch, Ok(report))) => {
            for key in report.lost {
                shared_records::lose(&mut inner, key);
            }
            shared_records::disown_ended(&mut inner, &batch);
            Ok(())
        }
        Ok((batch, Err(error))) => {
            inner.hibernation.batch.merge_older(batch);
            Err(error)
        }
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// Loads a session of the journal as a hibernated one.
fn load_session(inner: &mut DriverCore, now: Time, kept: JournalSession) {
    let JournalSession { key, stored, flows } = kept;
    let Ok(mut record) = SessionRecord::decode(&stored.record) else {
        let instance = key.instance;
        tracing::warn!(
            instance,
            "a session's record has an unknown format; dropped"
        );
        inner.hibernation.batch.sessions.insert(key, None);
        return expire_all(inner, key, flows);
    };
    let age = stored.age();
    record.flows.retain(|flow| flows.contains(&flow.id));
    record.make_older(age);
    // A record that is not a server's is dropped like one of another format.
    let taken = inner.core.adopt_at(now, &record).is_ok();
    inner.hibernation.loaded += u64::from(taken);
    let known = |id: &FlowId| taken && record.flows.iter().any(|f| f.id == *id);
    let over = flows.into_iter().filter(|id| !known(id)).collect();
    expire_all(inner, key, over);
}

/// Expires flows without a session, so that the application frees what it stored.
fn expire_all(inner: &mut DriverCore, session: JournalSessionKey, flows: Vec<FlowId>) {
    for flow in flows {
        inner.hibernation.expire(session, flow);
    }
}

/// Loads a page of the journal. Sessions that were looked up meanwhile are newer than their records.
/// Returns whether it was the last page.
fn load_page(inner: &mut DriverCore, part: JournalPage) -> bool {
    let now = clock::now();
    let is_met = |inner: &DriverCore, key: &JournalSessionKey| {
        let met = inner
            .hibernation
            .seen_while_loading
            .as_ref()
            .is_some_and(|met| met.contains(key));
        // Another worker loads the sessions of its own clients.
        met || !inner.core.owns(&key.peer) || inner.core.has_session(key.peer, key.instance)
    };
    for kept in part.sessions {
        if !is_met(inner, &kept.key) {
            load_session(inner, now, kept);
        }
    }
    for bare in part.orphan_memos {
        if !is_met(inner, &bare.session) {
            expire_all(inner, bare.session, vec![bare.flow]);
        }
    }
    if part.is_last {
        inner.core.set_records_elsewhere(false);
        inner.hibernation.seen_while_loading = None;
        let sessions = inner.hibernation.loaded;
        tracing::info!(sessions, "sessions restored from the journal");
    }
    part.is_last
}

/// Loads the first part of the journal, so that a small one is complete before the server accepts
/// sessions. Returns the key from which to continue, if there is more.
pub(crate) fn load(
    inner: &mut DriverCore,
    journal: &Journal,
) -> Result<Option<JournalSessionKey>, JournalError> {
    let part = journal.page(None, FIRST_PART)?;
    let last = part.sessions.last().map(|kept| kept.key);
    if load_page(inner, part) {
        return Ok(None);
    }
    inner.core.set_records_elsewhere(true);
    inner.hibernation.seen_while_loading = Some(HashSet::new());
    Ok(last)
}

/// Loads the rest of the journal while the server runs. The record of a device that connects
/// earlier is looked up in [`answer_lookups`], so only deadlines have to wait for this.
pub(crate) async fn journal_loader(
    shared: Arc<DriverShared>,
    journal: Arc<dyn RecordStore>,
    after: JournalSessionKey,
) {
    let read = |after| {
        let from = journal.clone();
        tokio::task::spawn_blocking(move || match from.as_journal() {
            Some(journal) => journal.page(Some(after), PART),
            None => Ok(JournalPage::default()),
        })
    };
    let mut reading = read(after);
    loop {
        let part = match reading.await {
            Ok(Ok(part)) => part,
            Ok(Err(error)) => {
                // Sessions that were not read are not lost: each is still looked up when its device
                // connects.
                tracing::error!(%error, "not all sleeping sessions could be read");
                return;
            }
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        };
        // The next part is read while this one is handled; after the last one there is nothing to
        // read.
        let next = part.sessions.last().map(|last| last.key);
        let next = next.filter(|_| !part.is_last).map(read);
        let done = {
            let mut inner = shared.inner.lock();
            inner.stopped || load_page(&mut inner, part)
        };
        // New hibernated sessions may be due before all others.
        shared.wake();
        match next {
            Some(next) if !done => reading = next,
            _ => return,
        }
        tokio::task::yield_now().await;
    }
}

/// Looks up the sessions of connecting devices in the part of the journal that is not loaded.
pub(crate) fn answer_lookups(shared: &Arc<DriverShared>, inner: &mut DriverCore) {
    if inner.hibernation.shared.is_some() {
        return shared_records::start_requests(shared, inner);
    }
    while let Some(sought) = inner.core.poll_lookup() {
        let now = clock::now();
        let key = JournalSessionKey {
            peer: sought.peer(),
            instance: sought.instance(),
        };
        let DriverCore {
            core,
            hibernation: rest,
            ..
        } = inner;
        let known = core.has_session(key.peer, key.instance);
        // A device that connected before and is unknown now is new, or its session has ended.
        let first = rest
            .seen_while_loading
            .as_mut()
            .is_some_and(|met| met.insert(key));
        if !known
            && first
            && let Some(journal) = rest.journal.clone()
            && let Some(journal) = journal.as_journal()
        {
            match journal.session(key) {
                Ok(Some(kept)) => load_session(inner, now, kept),
                Ok(None) => {}
                Err(error) => {
                    tracing::error!(%error, "cannot look up a sleeping session; the device is not \
                        answered");
                    if let Some(met) = &mut inner.hibernation.seen_while_loading {
                        met.remove(&key);
                    }
                    continue;
                }
            }
        }
        inner.core.finish_lookup(now, sought);
    }
}

/// Gives the applications of a session's flows without a source what the record of the session lacks.
fn take_remainders(inner: &mut DriverCore, id: SessionId) {
    let flows = inner.core.session(id).map(|s| s.flow_ids());
    for flow in flows.into_iter().flatten() {
        let DriverCore { core, flows, .. } = inner;
        let entry = flows.get_mut(&(id, flow));
        let is_written = |e: &&mut FlowEntry| {
            e.memo.is_some() && e.end.is_none() && e.source.is_none() && !e.unclaimed && !e.detached
        };
        if let Some(entry) = entry.filter(is_written)
            && let Ok(remainder) = core.with(id, |s| s.take_remainder(flow))
        {
            entry.remainder = remainder;
        }
    }
}

/// Stops without informing devices: hibernates sessions where possible and writes them to the
/// journal; resets other flows with `code`.
pub(crate) fn hibernate_all(inner: &mut DriverCore, code: u64) {
    let now = clock::now();
    for id in inner.core.ids() {
        // A session that was restored for an unconfirmed handshake is still represented by its
        // record.
        if inner.core.session(id).is_some_and(|s| s.is_tentative()) {
            continue;
        }
        take_remainders(inner, id);
        if !hibernate(inner, id, now) {
            let flows = inner.core.session(id).map(|s| s.flow_ids());
            for flow in flows.into_iter().flatten() {
                let entry = inner.flows.get_mut(&(id, flow));
                if let Some(entry) = entry.filter(|e| e.memo.is_some()) {
                    entry.hibernated = true;
                    entry.source = None;
                    entry.wake_all();
                } else {
                    let _ = inner.core.with(id, |s| {
                        s.reset(flow, code);
                        s.stop(flow, code);
                    });
                }
            }
        }
    }
}

/// The next memo of a flow that expired while it was hibernated; `None` when the server has stopped.
pub(crate) fn poll_next_expired(
    shared: &DriverShared,
    cx: &mut Context<'_>,
) -> Poll<Option<(JournalSessionKey, Bytes)>> {
    let mut inner = shared.inner.lock();
    if let Some(lapsed) = inner.hibernation.expired.pop_front() {
        return Poll::Ready(Some(lapsed));
    }
    if inner.stopped {
        return Poll::Ready(None);
    }
    inner.hibernation.expired_waker = Some(cx.waker().clone());
    Poll::Pending
}
