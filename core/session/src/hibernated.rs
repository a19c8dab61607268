//! Hibernated sessions of a server: one record each, found by the peer's key, removed when they
//! expire.
//!
//! ```text
//!  by_peer hash(peer) ─▶ places of its sessions ┐
//!  due     (second, place), earliest first      ┼─▶ slots[place]: since when, until when ─▶ record (record_log.rs)
//! ```
//!
//! There may be a million of them, so nothing is stored twice. The key is read from the start of
//! the record, the totals of a client are counted on demand, and one queue replaces a timer
//! for each flow. A client has at most a thousand sessions (R-QUOTA-1), so visiting all of them
//! costs a fraction of a handshake.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, VecDeque};
use std::num::NonZeroU32;

use d2tp_seal::PublicKey;
use d2tp_time::{Span, Time};
use d2tp_wire::FlowId;
use hashbrown::HashTable;
use slab::Slab;

use crate::record::{FlowRecord, SessionRecord};
use crate::record_log::{RecordLog, RecordPlace};

/// The most entries of what is not due any more, beside as many as there are others.
const STALE_MAX: usize = 64;

/// The most hibernated sessions handled in one call. The others are handled in the next one.
const DUE_PER_CALL: usize = 1_000;

pub(crate) type InstanceKey = (PublicKey, u64);

/// A hibernated session or one of its flows expired.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HibernatedExpiry {
    /// The peer of the session.
    pub peer: PublicKey,
    /// The device's instance.
    pub instance: u64,
    /// The flow whose deadline passed; `None` if the whole session was removed.
    pub flow: Option<FlowId>,
}

impl HibernatedExpiry {
    fn of(key: &InstanceKey, flow: Option<FlowId>) -> HibernatedExpiry {
        HibernatedExpiry {
            peer: key.0,
            instance: key.1,
            flow,
        }
    }
}

/// The slot of a hibernated session: its times, and the place of its record.
pub(crate) struct HibernatedSlot {
    record: RecordPlace,
    /// When the record was made; [`Time::NEVER`] if that is not known.
    since: Time,
    /// When the session's first deadline passes, in seconds; `None` if that is unknown or
    /// suspended.
    due_s: Option<NonZeroU32>,
    flows: u32,
}

impl HibernatedSlot {
    /// How many flows the session is charged for (R-QUOTA-2).
    pub(crate) fn flows(&self) -> usize {
        self.flows as usize
    }
}

/// A hibernated session, with its encoded record.
#[derive(Clone, Copy)]
pub(crate) struct HibernatedSession<'a> {
    slot: &'a HibernatedSlot,
    record: &'a [u8],
}

impl HibernatedSession<'_> {
    /// How many flows the session is charged for (R-QUOTA-2).
    pub(crate) fn flows(&self) -> usize {
        self.slot.flows()
    }

    /// Decodes the record as it was made.
    pub(crate) fn decode(&self) -> Option<SessionRecord> {
        SessionRecord::decode(self.record).ok()
    }

    /// Decodes the record with deadlines as of now.
    pub(crate) fn record_at(&self, now: Time) -> Option<SessionRecord> {
        let mut record = self.decode()?;
        // R-DEADLINE-3: deadlines approach while their session hibernates.
        let slept = now.since(self.slot.since);
        for flow in &mut record.flows {
            flow.deadline_left = flow.deadline_left.map(|l| l.saturating_sub(slept));
        }
        record.closing = record.closing.map(|(c, l)| (c, l.saturating_sub(slept)));
        Some(record)
    }
}

/// All hibernated sessions.
#[derive(Default)]
pub(crate) struct HibernatedSessions {
    slots: Slab<HibernatedSlot>,
    records: RecordLog,
    by_peer: HashTable<u32>,
    /// A salt for the hash, so that peers cannot choose keys that collide.
    salt: [u64; 2],
    /// When sessions are due, in one piece of memory. An entry counts while its slot has the same second; the first one
    /// always does.
    due: BinaryHeap<Reverse<(NonZeroU32, u32)>>,
    /// The number of slots that are due at some time.
    due_slots: usize,
    lapsed: VecDeque<HibernatedExpiry>,
}

/// The part of an encoded record that holds the key: it follows format and role.
fn key_of(record: &[u8]) -> Option<&[u8]> {
    record.get(2..42)
}

/// The first part of the key: the peer.
fn peer_of(record: &[u8]) -> Option<&[u8]> {
    record.get(2..34)
}

fn hash(salt: [u64; 2], peer: &[u8]) -> u64 {
    let mut h = salt[0];
    for chunk in peer.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        let mixed = u128::from(h ^ u64::from_le_bytes(word)) * u128::from(salt[1] | 1);
        h = (mixed as u64) ^ (mixed >> 64) as u64;
    }
    h
}

fn key_bytes(key: &InstanceKey) -> [u8; 40] {
    let mut bytes = [0; 40];
    bytes[..32].copy_from_slice(&key.0.0);
    bytes[32..].copy_from_slice(&key.1.to_be_bytes());
    bytes
}

impl HibernatedSessions {
    pub(crate) fn new(salt: [u8; 16]) -> Self {
        let (a, b) = salt.split_at(8);
        let word = |half: &[u8]| u64::from_le_bytes(half.try_into().expect("half of sixteen"));
        HibernatedSessions {
            salt: [word(a), word(b)],
            ..HibernatedSessions::default()
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    fn at(&self, place: u32) -> HibernatedSession<'_> {
        let slot = &self.slots[place as usize];
        HibernatedSession {
            slot,
            record: self.records.get(slot.record),
        }
    }

    fn place(&self, key: &InstanceKey) -> Option<u32> {
        let bytes = key_bytes(key);
        let same = |place: &u32| key_of(self.at(*place).record) == Some(&bytes[..]);
        self.by_peer.find(hash(self.salt, &key.0.0), same).copied()
    }

    /// Sessions of this peer.
    fn of<'a>(&'a self, peer: &'a PublicKey) -> impl Iterator<Item = HibernatedSession<'a>> {
        let places = self.by_peer.iter_hash(hash(self.salt, &peer.0));
        let all = places.map(|place| self.at(*place));
        all.filter(|asleep| peer_of(asleep.record) == Some(&peer.0[..]))
    }

    pub(crate) fn get(&self, key: &InstanceKey) -> Option<HibernatedSession<'_>> {
        self.place(key).map(|place| self.at(place))
    }

    pub(crate) fn contains(&self, key: &InstanceKey) -> bool {
        self.place(key).is_some()
    }

    /// How many sessions of this peer there are.
    pub(crate) fn len_of(&self, peer: &PublicKey) -> usize {
        self.of(peer).count()
    }

    /// Flows of all sessions of this peer.
    pub(crate) fn flows_of(&self, peer: &PublicKey) -> usize {
        self.of(peer).map(|asleep| asleep.flows()).sum()
    }

    /// Adds a session with the encoded record `bytes`. `absence`: how long a session without deadlines
    /// is kept. Returns the slot of the previous record.
    pub(crate) fn insert(
        &mut self,
        key: InstanceKey,
        record: &SessionRecord,
        bytes: &[u8],
        since: Option<Time>,
        absence: Span,
    ) -> Option<HibernatedSlot> {
        let before = self.remove(&key);
        let due_s = since.map(|since| second(ends_at(record, since, absence)));
        let entry = self.slots.vacant_entry();
        let place = entry.key() as u32;
        entry.insert(HibernatedSlot {
            record: self.records.insert(place, bytes),
            since: since.unwrap_or(Time::NEVER),
            due_s,
            flows: record.flows.len() as u32,
        });
        if let Some(due_s) = due_s {
            self.due.push(Reverse((due_s, place)));
            self.due_slots += 1;
        }
        let (slots, records, salt) = (&self.slots, &self.records, self.salt);
        let again = |place: &u32| {
            let record = records.get(slots[*place as usize].record);
            hash(salt, peer_of(record).unwrap_or_default())
        };
        let hashed = hash(salt, &key.0.0);
        self.by_peer.insert_unique(hashed, place, again);
        before
    }

    /// Suspends the expiry of a session that was tentatively restored, until its record is inserted
    /// again.
    pub(crate) fn suspend_expiry(&mut self, key: &InstanceKey) {
        if let Some(place) = self.place(key)
            && self.slots[place as usize].due_s.take().is_some()
        {
            self.due_slots -= 1;
            self.drop_stale();
        }
    }

    /// Removes entries of what is not due any more: those at the front, and all once they are most.
    fn drop_stale(&mut self) {
        let slots = &self.slots;
        let is_due = |(due_s, place): &(NonZeroU32, u32)| {
            let slot = slots.get(*place as usize);
            slot.is_some_and(|slot| slot.due_s == Some(*due_s))
        };
        while self.due.peek().is_some_and(|Reverse(entry)| !is_due(entry)) {
            self.due.pop();
        }
        if self.due.len() > 2 * self.due_slots + STALE_MAX {
            let mut due = std::mem::take(&mut self.due).into_vec();
            due.retain(|Reverse(entry)| is_due(entry));
            due.sort_unstable();
            due.dedup();
            self.due = due.into();
        }
    }

    pub(crate) fn remove(&mut self, key: &InstanceKey) -> Option<HibernatedSlot> {
        let place = self.place(key)?;
        let hashed = hash(self.salt, &key.0.0);
        if let Ok(entry) = self.by_peer.find_entry(hashed, |p| *p == place) {
            entry.remove();
        }
        let slot = self.slots.remove(place as usize);
        let slots = &mut self.slots;
        self.records.remove(slot.record, |place, record| {
            slots[place as usize].record = record;
        });
        if slot.due_s.is_some() {
            self.due_slots -= 1;
            self.drop_stale();
        }
        Some(slot)
    }

    /// When [`HibernatedSessions::expire`] has something to do.
    pub(crate) fn next_timeout(&self) -> Time {
        let first = self.due.peek();
        first.map_or(Time::NEVER, |Reverse((second, _))| start_of(*second))
    }

    // R-DEADLINE-3
    /// Removes what has expired. Returns the sessions whose number of flows fell, with the numbers
    /// before and after.
    pub(crate) fn expire(&mut self, now: Time, absence: Span) -> Vec<(PublicKey, usize, usize)> {
        let mut fewer = Vec::new();
        for _ in 0..DUE_PER_CALL {
            let Some(Reverse((due_s, place))) = self.due.peek().copied() else {
                break;
            };
            if start_of(due_s) > now {
                break;
            }
            let asleep = self.at(place);
            let since = asleep.slot.since;
            let was = asleep.flows();
            let mut record = asleep.decode().expect("decoded when it came in");
            let key = (record.peer, record.instance);
            let asleep_for = now.since(since);
            let late = |f: &FlowRecord| f.deadline_left.is_some_and(|left| left <= asleep_for);
            let over: BTreeSet<FlowId> = record
                .flows
                .iter()
                .filter(|f| late(f))
                .map(|f| f.id)
                .collect();
            self.expire_flows(&key, &record, |id| over.contains(&id));
            record.flows.retain(|f| !over.contains(&f.id));
            if ends_at(&record, since, absence) <= now {
                self.expire_all_flows(&key, &record);
                self.remove(&key);
                fewer.push((key.0, was, 0));
            } else {
                self.insert(key, &record, &record.encode(), Some(since), absence);
                fewer.push((key.0, was, record.flows.len()));
            }
        }
        fewer
    }

    /// Ends all sessions of this client. Returns how many flows each had.
    pub(crate) fn expire_client(&mut self, client: &PublicKey) -> Vec<usize> {
        let records: Vec<SessionRecord> = (self.of(client))
            .filter_map(|asleep| asleep.decode())
            .collect();
        let ended = records.iter().map(|record| {
            let key = (record.peer, record.instance);
            self.expire_all_flows(&key, record);
            self.remove(&key).map_or(0, |asleep| asleep.flows())
        });
        ended.collect()
    }

    /// Ends those flows of the record for which `ends` returns true.
    pub(crate) fn expire_flows(
        &mut self,
        key: &InstanceKey,
        record: &SessionRecord,
        ends: impl Fn(FlowId) -> bool,
    ) {
        let over = record.flows.iter().map(|f| f.id).filter(|id| ends(*id));
        self.lapsed
            .extend(over.map(|id| HibernatedExpiry::of(key, Some(id))));
    }

    /// Ends all flows of the record, and the session.
    pub(crate) fn expire_all_flows(&mut self, key: &InstanceKey, record: &SessionRecord) {
        self.expire_flows(key, record, |_| true);
        self.lapsed.push_back(HibernatedExpiry::of(key, None));
    }

    pub(crate) fn poll_expired(&mut self) -> Option<HibernatedExpiry> {
        self.lapsed.pop_front()
    }
}

/// When the record expires: at its first deadline, or without one after its absence. A closed session
/// only waits to send CLOSE (R-CLOSE-4).
fn ends_at(record: &SessionRecord, since: Time, absence: Span) -> Time {
    if let Some((_, left)) = record.closing {
        return since + left;
    }
    let first = record.flows.iter().filter_map(|f| f.deadline_left).min();
    since + first.unwrap_or(absence)
}

/// The first full second after a time.
fn second(at: Time) -> NonZeroU32 {
    let s = u32::try_from(at.as_nanos() / 1_000_000_000).unwrap_or(u32::MAX);
    NonZeroU32::MIN.saturating_add(s)
}

fn start_of(second: NonZeroU32) -> Time {
    Time::from_nanos(u64::from(second.get()) * 1_000_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow_options::FlowOptions;
    use crate::session_state::Role;

    const ABSENCE: Span = Span::from_secs(3600);

    fn record(n: u64, deadlines_s: &[Option<u64>]) -> SessionRecord {
        let flow = |(i, left): (usize, &Option<u64>)| FlowRecord {
            id: FlowId::new(1, i as u32, true),
            options: FlowOptions::default(),
            deadline_left: left.map(Span::from_secs),
            deadline_seq: 0,
            sent_to: 0,
            send_end: None,
            send_complete: false,
            received_to: 0,
            receive_end: None,
            receive_complete: false,
            reset: None,
            stopped: None,
        };
        SessionRecord {
            role: Role::Responder,
            peer: PublicKey([n as u8; 32]),
            instance: n,
            epoch: 1,
            seen_floor: 0,
            seen: Vec::new(),
            closing: None,
            ticket: None,
            secret: None,
            flows: deadlines_s.iter().enumerate().map(flow).collect(),
        }
    }

    fn put(sleepers: &mut HibernatedSessions, n: u64, record: &SessionRecord, since: Option<Time>) {
        sleepers.insert(key(n), record, &record.encode(), since, ABSENCE);
    }

    fn at(s: u64) -> Time {
        Time::from_nanos(s * 1_000_000_000)
    }

    fn key(n: u64) -> InstanceKey {
        (PublicKey([n as u8; 32]), n)
    }

    #[test]
    fn each_flow_ends_at_its_own_deadline_and_the_session_when_nothing_is_left_of_it() {
        // R-DEADLINE-3
        let mut sleepers = HibernatedSessions::new([7; 16]);
        let deadlines = [Some(10), None, Some(5_000)];
        put(&mut sleepers, 1, &record(1, &deadlines), Some(at(100)));
        sleepers.expire(at(109), ABSENCE);
        assert_eq!(sleepers.poll_expired(), None);
        sleepers.expire(at(111), ABSENCE);
        let first = sleepers.poll_expired().unwrap();
        assert_eq!(first.flow, Some(FlowId::new(1, 0, true)));
        assert_eq!(sleepers.poll_expired(), None);
        assert_eq!(sleepers.len(), 1);
        // If a deadline is still to come, the absence limit does not apply; the session is removed
        // with its last flow.
        sleepers.expire(at(4_000), ABSENCE);
        assert_eq!(sleepers.len(), 1);
        sleepers.expire(at(5_102), ABSENCE);
        let over: Vec<_> = std::iter::from_fn(|| sleepers.poll_expired()).collect();
        assert_eq!(over.len(), 3, "two flows and the session");
        assert_eq!(over.last().unwrap().flow, None);
        assert_eq!((sleepers.len(), sleepers.next_timeout()), (0, Time::NEVER));
    }

    #[test]
    fn a_thousand_sleepers_come_and_go_and_leave_nothing() {
        let mut sleepers = HibernatedSessions::new([9; 16]);
        for n in 0..1_000 {
            put(&mut sleepers, n, &record(n, &[Some(n + 1)]), Some(at(0)));
        }
        assert!((0..1_000).all(|n| sleepers.get(&key(n)).is_some()));
        for n in (0..1_000).step_by(2) {
            assert!(sleepers.remove(&key(n)).is_some());
            assert!(sleepers.get(&key(n)).is_none());
        }
        // Only sessions that are still hibernated expire, however often others slept and woke in
        // between.
        sleepers.expire(at(2_000), ABSENCE);
        let flows = std::iter::from_fn(|| sleepers.poll_expired());
        assert_eq!(flows.filter(|l| l.flow.is_some()).count(), 500);
        assert_eq!(
            sleepers.next_timeout(),
            at(3_601),
            "without flows an hour is left"
        );
        sleepers.expire(at(4_000), ABSENCE);
        assert_eq!((sleepers.len(), sleepers.due.len()), (0, 0));
        assert!(sleepers.by_peer.is_empty());
    }

    #[test]
    fn a_record_that_came_without_a_time_stays_until_its_device_comes() {
        let mut sleepers = HibernatedSessions::new([1; 16]);
        put(&mut sleepers, 3, &record(3, &[Some(1)]), None);
        sleepers.expire(at(1_000_000), ABSENCE);
        assert!(sleepers.get(&key(3)).is_some());
    }

    #[test]
    fn what_is_held_does_not_lapse_and_its_flows_still_count() {
        // R-QUOTA-2, R-RESUME-8
        let mut sleepers = HibernatedSessions::new([2; 16]);
        let with_deadlines = record(4, &[Some(1), Some(20)]);
        put(&mut sleepers, 4, &with_deadlines, Some(at(0)));
        sleepers.suspend_expiry(&key(4));
        assert!(sleepers.expire(at(1_000_000), ABSENCE).is_empty());
        assert_eq!(sleepers.get(&key(4)).map(|asleep| asleep.flows()), Some(2));
        assert_eq!(sleepers.len_of(&key(4).0), 1);
        let before = sleepers.insert(
            key(4),
            &with_deadlines,
            &with_deadlines.encode(),
            Some(at(0)),
            ABSENCE,
        );
        assert_eq!(before.map(|b| b.flows()), Some(2));
        assert_eq!(sleepers.expire(at(2), ABSENCE), [(key(4).0, 2, 1)]);
        assert_eq!(sleepers.len_of(&key(4).0), 1);
    }

    #[test]
    fn a_closed_session_is_let_go_of_when_it_was_worth_telling_no_longer() {
        // R-CLOSE-4
        let mut sleepers = HibernatedSessions::new([3; 16]);
        let mut closed = record(5, &[None]);
        closed.closing = Some((7, Span::from_secs(60)));
        put(&mut sleepers, 5, &closed, Some(at(0)));
        let thawed = sleepers
            .get(&key(5))
            .and_then(|a| a.record_at(at(20)))
            .unwrap();
        assert_eq!(thawed.closing, Some((7, Span::from_secs(40))));
        assert_eq!(sleepers.expire(at(61), ABSENCE), [(key(5).0, 1, 0)]);
        assert_eq!(sleepers.len(), 0);
    }
}
