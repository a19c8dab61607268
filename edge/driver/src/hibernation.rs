//! Sessions at rest on a server: when one may sleep, what is written down of it, and who takes up its
//! flows when it wakes.
//!
//! ```text
//!  keep(memo) ──▶ entry ──▶ Batch ──▶ keeper task ──▶ journal     (awake, and safe against a crash)
//!  suspended for long, every flow has a memo ──▶ record and memos  (keys and buffers go)
//!  the device knocks ──▶ flows without a handle ──▶ accepted again, each with its memo
//!  a deadline passes meanwhile ──▶ the memo goes to whoever asks `lapsed`
//! ```
//!
//! A handle belongs to one time awake: the handle of a flow that fell asleep says so and is dropped;
//! the flow comes back as a new one. So nothing is renamed, and a flow at rest has no task.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::task::Poll;
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

/// How long changes are collected before they are written together.
const GATHER: Duration = Duration::from_millis(50); // a guess: a sync costs some milliseconds
/// Sessions loaded before the server accepts any: some 20 ms.
const FIRST_PART: usize = 10_000;
/// Sessions loaded at once while the server runs: a millisecond without receiving.
const PART: usize = 500;
/// How long to wait after a failed write of the journal.
const AGAIN_AFTER: Duration = Duration::from_secs(5); // a guess

fn key_of(inner: &DriverCore, id: SessionId) -> Option<JournalSessionKey> {
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
        // R-HS-12: of a device that has not proved that it is there nothing is written down.
        if inner.core.session(id).is_some_and(|s| s.is_unconfirmed()) {
            return;
        }
        inner.hibernation.is_awake(key, id);
        inner.hibernation.write_memo(key, flow, Some(memo));
        recheck_suspended(inner, id);
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

/// Handles an event of a session.
pub(crate) fn on_event(inner: &mut DriverCore, id: SessionId, event: &SessionEvent) {
    match event {
        SessionEvent::Suspended(_) => recheck_suspended(inner, id),
        SessionEvent::Established { .. } if inner.accepts => on_awake(inner, id),
        SessionEvent::SendFrom { flow, offset } if inner.accepts => {
            send_early(inner, id, *flow, *offset)
        }
        // The entry keeps its memo: whoever has not taken the flow up yet must still learn what
        // it was to free it.
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
            if let Some(key) = inner.hibernation.is_over(id) {
                let flows = inner.flows.range((id, FlowId(0))..=(id, FlowId(u64::MAX)));
                let kept = flows.filter_map(|((_, flow), entry)| {
                    Some((*flow, entry.memo.clone()?, entry.unclaimed))
                });
                for (flow, memo, unclaimed) in kept.collect::<Vec<_>>() {
                    inner.hibernation.write_memo(key, flow, None);
                    if unclaimed {
                        // Nobody will be given a handle that says it.
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

// R-RESUME-7
/// Sends early data of a hibernated flow that a SYN claims, if it can be read at once. No application
/// gets the flow before the device has confirmed.
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

/// Takes up the flows of a session that got new keys: those without a handle were hibernated, and are
/// offered to the application.
fn on_awake(inner: &mut DriverCore, id: SessionId) {
    let Some(key) = key_of(inner, id) else { return };
    let flows = inner.core.session(id).map(|s| s.flow_ids());
    for flow in flows.into_iter().flatten() {
        if let Some(entry) = inner.flows.get(&(id, flow)) {
            // It was opened by early data, and kept before the device confirmed.
            if let Some(memo) = entry
                .memo
                .clone()
                .filter(|_| !inner.hibernation.keys.contains_key(&id))
            {
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
            // Or it was opened just now, and its event follows.
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
            // Nobody can go on with it.
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
    while let Some(lapsed) = inner.core.poll_expired() {
        let key = JournalSessionKey {
            peer: lapsed.peer,
            instance: lapsed.instance,
        };
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

/// Hibernates a session if nothing of it would be lost. Returns whether it did.
fn hibernate(inner: &mut DriverCore, id: SessionId, now: Time) -> bool {
    let Some(session) = inner.core.session(id) else {
        return false;
    };
    let Some(key) = key_of(inner, id) else {
        return false;
    };
    let flows = session.flow_ids();
    // What was received and not read would be lost with its buffer.
    let bare = flows.iter().any(|flow| {
        let entry = inner.flows.get(&(id, *flow));
        entry.is_none_or(|e| e.memo.is_none() || e.end.is_some()) || session.has_unread(*flow)
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
    inner.on_hibernated(id);
    if inner.hibernation.journal.is_none() {
        if !memos.is_empty() {
            inner.hibernation.memos.insert(key, memos);
        }
    } else if !flows.is_empty() {
        let stored = Some(StoredRecord::now(record));
        inner.hibernation.batch.sessions.insert(key, stored);
        inner.hibernation.stale.remove(&key);
        inner.hibernation.changed.notify_one();
    }
    true
}

/// Handles the drop of a flow's handle from before its hibernation: the application has stored what it
/// held.
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
            // What has no memo cannot be taken up after a crash.
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

/// Writes changes to the journal while the server lives.
pub(crate) async fn journal_writer(shared: Arc<DriverShared>) {
    let (journal, news) = {
        let inner = shared.inner.lock();
        let Some(journal) = inner.hibernation.journal.clone() else {
            return;
        };
        (journal, inner.hibernation.changed.clone())
    };
    loop {
        news.notified().await;
        tokio::time::sleep(GATHER).await;
        if shared.inner.lock().stopped {
            return;
        }
        if let Err(error) = write_batch(&shared, &journal).await {
            tracing::error!(%error, "sleeping sessions would be lost in a crash now");
            tokio::time::sleep(AGAIN_AFTER).await;
            news.notify_one();
        }
    }
}

/// Writes all changes to the journal.
pub(crate) async fn write_batch(
    shared: &Arc<DriverShared>,
    journal: &Arc<Journal>,
) -> Result<(), JournalError> {
    let batch = take_batch(&mut shared.inner.lock());
    if batch.is_empty() {
        return Ok(());
    }
    let journal = journal.clone();
    let work = move || {
        let written = journal.commit(&batch);
        (batch, written)
    };
    match tokio::task::spawn_blocking(work).await {
        Ok((_, Ok(()))) => Ok(()),
        Ok((batch, Err(error))) => {
            shared.inner.lock().hibernation.batch.merge_older(batch);
            Err(error)
        }
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// Loads a session from the journal, as a hibernated one.
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
    record.closing = record.closing.map(|(c, l)| (c, l.saturating_sub(age)));
    for flow in &mut record.flows {
        flow.deadline_left = flow.deadline_left.map(|left| left.saturating_sub(age));
    }
    // One that is no server's is dropped like one of another form.
    let taken = inner.core.adopt_at(now, &record).is_ok();
    inner.hibernation.loaded += u64::from(taken);
    let known = |id: &FlowId| taken && record.flows.iter().any(|f| f.id == *id);
    let over = flows.into_iter().filter(|id| !known(id)).collect();
    expire_all(inner, key, over);
}

/// Expires flows whose session is gone, so that the application frees what it stored.
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
        met || inner.core.has_session(key.peer, key.instance)
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
/// sessions. Returns where to continue, if there is more.
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

/// Loads the rest while the server runs. Devices that connect before their record was loaded are looked
/// up in [`answer_lookups`], so only deadlines wait for this.
pub(crate) async fn journal_loader(
    shared: Arc<DriverShared>,
    journal: Arc<Journal>,
    after: JournalSessionKey,
) {
    let read = |after| {
        let from = journal.clone();
        tokio::task::spawn_blocking(move || from.page(Some(after), PART))
    };
    let mut reading = read(after);
    loop {
        let part = match reading.await {
            Ok(Ok(part)) => part,
            Ok(Err(error)) => {
                // What was not read is not lost: each is still looked for when it comes.
                tracing::error!(%error, "not all sleeping sessions could be read");
                return;
            }
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        };
        // The next is read while this one is taken in; after the last there is nothing to read.
        let next = part.sessions.last().map(|last| last.key);
        let next = next.filter(|_| !part.is_last).map(read);
        let done = {
            let mut inner = shared.inner.lock();
            inner.stopped || load_page(&mut inner, part)
        };
        // New sleepers may be due before all others.
        shared.wake();
        match next {
            Some(next) if !done => reading = next,
            _ => return,
        }
        tokio::task::yield_now().await;
    }
}

/// Looks up the sessions of connecting devices in the part of the journal that is not loaded.
pub(crate) fn answer_lookups(inner: &mut DriverCore) {
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
        // Who was met before and is not known is new, or was here and is over.
        let first = rest
            .seen_while_loading
            .as_mut()
            .is_some_and(|met| met.insert(key));
        if !known
            && first
            && let Some(journal) = rest.journal.clone()
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

/// Stops without informing devices: hibernates what may hibernate and writes it to the journal; resets
/// other flows with `code`.
pub(crate) fn hibernate_all(inner: &mut DriverCore, code: u64) {
    let now = clock::now();
    for id in inner.core.ids() {
        // A session read out of its record for a handshake under way is still that record.
        if inner.core.session(id).is_some_and(|s| s.is_tentative()) {
            continue;
        }
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

/// The next memo of a flow that expired while it was hibernated.
pub(crate) async fn next_expired(shared: &DriverShared) -> Option<(JournalSessionKey, Bytes)> {
    std::future::poll_fn(|cx| {
        let mut inner = shared.inner.lock();
        if let Some(lapsed) = inner.hibernation.expired.pop_front() {
            return Poll::Ready(Some(lapsed));
        }
        if inner.stopped {
            return Poll::Ready(None);
        }
        inner.hibernation.expired_waker = Some(cx.waker().clone());
        Poll::Pending
    })
    .await
}
