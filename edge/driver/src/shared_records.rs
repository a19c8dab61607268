//! A server whose records lie in a store that other nodes share: lookups of sessions, claims to own them, and the end
//! of what another node has taken over.
//!
//! ```text
//!  SYN ─▶ lookup ─▶ another node owns it: asked for what it has (session_handoff.rs)
//!            │  ─▶ adopted for this handshake ─▶ first packet ─▶ claim ─▶ owned: awake
//!            │                                                      └────▶ lost: the device begins again
//!            └ the store does not answer ─▶ "later", the device tries again
//!  a write is refused, or a lookup finds a later epoch ─▶ the session ends here, without a word to its device
//! ```
//!
//! The engine never waits for the store: each lookup and each claim is a task, of which there are few at once.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use d2tp_session::{
    FlowId, OwnershipAnswer, OwnershipRequest, PendingLookup, SessionId, SessionRecord, Span, Time,
};

use crate::clock;
use crate::driver_core::{DriverCore, DriverShared};
use crate::journal::{JournalBatch, JournalError, JournalSessionKey};
use crate::record_store::{OwnerAnswer, OwnershipClaim, SharedRecords, SharedSession};

/// The most lookups and claims at once. SYNs of others wait in the core, which has a bound of its own.
const REQUESTS_MAX: usize = 64; // a guess
/// How long a record that was looked up stays if its handshake is not confirmed: longer than a handshake is half open.
const ADOPTED_FOR: Span = Span::from_secs(15);
/// How soon a record is released again that could not be yet.
const RELEASE_AGAIN: Span = Span::from_secs(2);

/// Starts lookups and claims for which there is room.
pub(crate) fn start_requests(shared: &Arc<DriverShared>, inner: &mut DriverCore) {
    while let Some(state) = &mut inner.hibernation.shared
        && state.requests < REQUESTS_MAX
    {
        let store = state.store.clone();
        if let Some(request) = inner.core.poll_ownership() {
            state.requests += 1;
            tokio::spawn(claim(shared.clone(), store, request));
        } else if let Some(sought) = inner.core.poll_lookup() {
            state.requests += 1;
            tokio::spawn(look_up(shared.clone(), store, sought));
        } else {
            return;
        }
    }
}

async fn look_up(shared: Arc<DriverShared>, store: Arc<dyn SharedRecords>, sought: PendingLookup) {
    let key = JournalSessionKey {
        peer: sought.peer(),
        instance: sought.instance(),
    };
    let (found, is_busy) = look_up_written(&store, key).await;
    let mut inner = shared.inner.lock();
    let now = clock::now();
    let Some(state) = &mut inner.hibernation.shared else {
        return;
    };
    state.requests -= 1;
    match found {
        Ok(_) if is_busy => inner.core.defer_lookup(sought),
        Ok(found) => {
            adopt(&mut inner, now, key, found);
            inner.core.finish_lookup(now, sought);
        }
        Err(error) => {
            state.warn(&error);
            inner.core.defer_lookup(sought);
        }
    }
    drop(inner);
    shared.wake();
}

/// Looks up a session after its owner has written what it had of it, and whether its device has to stay with its owner
/// for now.
async fn look_up_written(
    store: &Arc<dyn SharedRecords>,
    key: JournalSessionKey,
) -> (Result<Option<SharedSession>, JournalError>, bool) {
    let found = store.look_up(key).await;
    let owner = match &found {
        Ok(Some(session)) if !session.is_ours => session.owner.clone(),
        _ => return (found, false),
    };
    match store.ask_owner(key, owner).await {
        Ok(OwnerAnswer::Written) => (store.look_up(key).await, false),
        Ok(OwnerAnswer::Busy) => (found, true),
        Ok(OwnerAnswer::Nothing | OwnerAnswer::Gone) => (found, false),
        Err(error) => (Err(error), false),
    }
}

/// Takes what the store has of a session, unless this process knows better.
fn adopt(inner: &mut DriverCore, now: Time, key: JournalSessionKey, found: Option<SharedSession>) {
    let is_here = inner.core.has_session(key.peer, key.instance);
    let is_adopted = |inner: &DriverCore| {
        let state = inner.hibernation.shared.as_ref();
        state.is_some_and(|state| {
            let adopted = state.adopted.get(&key);
            adopted.is_some_and(|adopted| adopted.version.is_some())
        })
    };
    let Some(found) = found else {
        return; // Nothing, or the store has lost it; what is here is right.
    };
    if is_here && !is_adopted(inner) {
        if found.is_ours {
            return;
        }
        let held = inner.core.awake_session(key.peer, key.instance);
        let epoch = held
            .and_then(|id| inner.core.session(id))
            .map(|s| s.epoch());
        if epoch.is_some_and(|epoch| epoch > found.epoch) {
            return; // The store has lost its last writes.
        }
        lose(inner, key);
    } else {
        // A lookup before this one, whose handshake was not confirmed.
        forget(inner, key);
    }
    let Some(record) = &found.record else { return };
    let Ok(mut record) = SessionRecord::decode(record) else {
        tracing::warn!(
            instance = key.instance,
            "a session's record has an unknown format; ignored"
        );
        return;
    };
    // A node may have owned it since, and written nothing.
    record.epoch = record.epoch.max(found.epoch);
    let memos: BTreeMap<_, _> = found.memos.into_iter().collect();
    record.flows.retain(|flow| memos.contains_key(&flow.id));
    record.make_older(found.age);
    if inner.core.adopt_at(now, &record).is_err() {
        return;
    }
    inner.hibernation.memos.insert(key, memos);
    if let Some(state) = &mut inner.hibernation.shared {
        state.note(key, Some(found.version), now + ADOPTED_FOR);
    }
}

async fn claim(
    shared: Arc<DriverShared>,
    store: Arc<dyn SharedRecords>,
    request: OwnershipRequest,
) {
    let key = JournalSessionKey {
        peer: request.peer,
        instance: request.instance,
    };
    let claimed = store.claim(key, request.epoch).await;
    let mut inner = shared.inner.lock();
    let Some(state) = &mut inner.hibernation.shared else {
        return;
    };
    state.requests -= 1;
    let looked_up = state.adopted.get(&key).and_then(|adopted| adopted.version);
    let answer = match claimed {
        Ok(OwnershipClaim::Owned { version, from }) => {
            if let Some(from) = from {
                tracing::info!(
                    instance = key.instance,
                    from,
                    "took over a session from another node"
                );
            }
            if looked_up.is_some_and(|looked_up| looked_up != version) {
                // Its owner wrote once more. The device begins again, and finds that.
                forget(&mut inner, key);
                OwnershipAnswer::Lost
            } else {
                state.adopted.remove(&key);
                OwnershipAnswer::Owned
            }
        }
        Ok(OwnershipClaim::Lost { owner, is_ours }) => {
            tracing::info!(
                instance = key.instance,
                owner,
                "a later handshake owns this session; its device begins again"
            );
            if !is_ours {
                lose(&mut inner, key);
            }
            OwnershipAnswer::Lost
        }
        Err(error) => {
            state.warn(&error);
            OwnershipAnswer::Unknown
        }
    };
    let is_owned = matches!(answer, OwnershipAnswer::Owned);
    inner.core.finish_ownership(clock::now(), request, answer);
    if is_owned
        && let Some(id) = inner.core.awake_session(key.peer, key.instance)
        && let Some(state) = &mut inner.hibernation.shared
    {
        state.owned.insert(id, key);
    }
    drop(inner);
    shared.wake();
}

/// Ends the sessions of which the store finds by itself that another node has taken them over.
pub(crate) async fn hear_losses(store: Arc<dyn SharedRecords>, workers: Vec<Weak<DriverShared>>) {
    while let Ok(key) = store.next_lost().await {
        if store.owns(&key) {
            continue; // Its device has come back since.
        }
        for worker in &workers {
            let Some(worker) = worker.upgrade() else {
                return;
            };
            let mut inner = worker.inner.lock();
            if inner.core.owns(&key.peer) {
                lose(&mut inner, key);
            }
            drop(inner);
            worker.wake();
        }
    }
}

/// The key of an awake session that ends, if this process owns it: the store is told.
pub(crate) fn on_end(inner: &mut DriverCore, id: SessionId) -> Option<JournalSessionKey> {
    inner.hibernation.shared.as_mut()?.owned.remove(&id)
}

/// Forgets that this process owns sessions that have ended, after the store was told.
pub(crate) fn disown_ended(inner: &mut DriverCore, batch: &JournalBatch) {
    let Some(state) = &inner.hibernation.shared else {
        return;
    };
    let ended = batch.sessions.iter().filter(|(_, kept)| kept.is_none());
    for (key, _) in ended {
        if !inner.core.has_session(key.peer, key.instance) && !inner.hibernation.is_pending(key) {
            state.store.disown(key);
        }
    }
}

/// Ends what this node knows of a session that another node has taken over. Its device hears nothing.
pub(crate) fn lose(inner: &mut DriverCore, key: JournalSessionKey) {
    if inner.core.has_session(key.peer, key.instance) {
        tracing::warn!(
            instance = key.instance,
            "another node has taken over this session: it ends here"
        );
    }
    if let Some(id) = inner.core.awake_session(key.peer, key.instance) {
        let flows = inner
            .flows
            .range_mut((id, FlowId(0))..=(id, FlowId(u64::MAX)));
        let mut unclaimed = Vec::new();
        for ((_, flow), entry) in flows {
            entry.hibernated = true;
            entry.taken_over = true;
            entry.memo = None;
            entry.source = None;
            entry.wake_all();
            if entry.detached || entry.unclaimed {
                unclaimed.push(*flow);
            }
        }
        for flow in unclaimed {
            inner.flows.remove(&(id, flow));
        }
        inner.hibernation.is_over(id);
        on_end(inner, id);
        inner.on_hibernated(id);
    }
    forget(inner, key);
    let batch = &mut inner.hibernation.batch;
    batch.sessions.remove(&key);
    batch.memos.retain(|memo, _| memo.session != key);
    inner.hibernation.stale.remove(&key);
    if let Some(state) = &inner.hibernation.shared {
        state.store.disown(&key);
    }
}

/// Drops a record that the store has.
fn forget(inner: &mut DriverCore, key: JournalSessionKey) {
    inner.core.forget_session(key.peer, key.instance);
    inner.hibernation.memos.remove(&key);
    if let Some(state) = &mut inner.hibernation.shared {
        state.adopted.remove(&key);
    }
}

/// Marks a hibernated session as one that the store has, or will have soon.
pub(crate) fn release_when_written(inner: &mut DriverCore, key: JournalSessionKey) {
    if let Some(state) = &mut inner.hibernation.shared {
        state.note(key, None, clock::now() + RELEASE_AGAIN);
    }
}

/// Drops records that the store has and that no handshake needs.
pub(crate) fn release_records(inner: &mut DriverCore, now: Time) {
    let Some(state) = &inner.hibernation.shared else {
        return;
    };
    if state.next_timeout() > now {
        return;
    }
    let due = state.adopted.iter().filter(|(_, a)| a.until <= now);
    for key in due.map(|(key, _)| *key).collect::<Vec<_>>() {
        let awake = inner.core.awake_session(key.peer, key.instance);
        let tentative = awake.and_then(|id| inner.core.session(id));
        let is_needed = tentative.is_some_and(|session| session.is_tentative())
            || inner.hibernation.is_pending(&key);
        let Some(state) = &mut inner.hibernation.shared else {
            return;
        };
        if is_needed {
            if let Some(adopted) = state.adopted.get_mut(&key) {
                adopted.until = now + RELEASE_AGAIN;
            }
        } else if awake.is_some() {
            state.adopted.remove(&key);
        } else {
            state.store.disown(&key);
            forget(inner, key);
        }
    }
    if let Some(state) = &mut inner.hibernation.shared {
        let left = state.adopted.values().map(|adopted| adopted.until);
        state.next_release = left.min().unwrap_or(Time::NEVER);
    }
}
