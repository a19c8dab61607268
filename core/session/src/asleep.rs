//! Sessions at rest on a server: a record each, found by who they are with, let go of when time is up.
//!
//! ```text
//!  by_key  hash(peer, instance) ─▶ place ─┐
//!  due     (second, place), earliest first ┼─▶ slots[place]: record, since when, until when
//! ```
//!
//! There may be a million of them, so the key is not stored beside the record that begins with it,
//! and there is one ordered set instead of a timer per flow.

use std::collections::{BTreeSet, VecDeque};

use d2tp_seal::PublicKey;
use d2tp_time::{Span, Time};
use d2tp_wire::FlowId;
use hashbrown::HashTable;
use slab::Slab;

use crate::record::Record;

/// Sessions that may be asleep at once; one more stays awake.
pub const ASLEEP_MAX: usize = 4_000_000;
/// Sleepers looked at in one call: the rest have their turn in the next one.
const DUE_PER_CALL: usize = 1_000;

pub(crate) type Key = (PublicKey, u64);

/// Something of a session at rest is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lapsed {
    /// The host it is with.
    pub peer: PublicKey,
    /// The host's instance.
    pub instance: u64,
    /// The flow whose deadline passed; none if the session itself is let go of.
    pub flow: Option<FlowId>,
}

/// A session at rest.
pub(crate) struct Asleep {
    pub(crate) record: Box<[u8]>,
    /// When the record was made; none for one that nobody said it of.
    pub(crate) since: Option<Time>,
    /// When something of it is over, in seconds.
    due_s: Option<u32>,
}

/// All sessions at rest.
#[derive(Default)]
pub(crate) struct Sleepers {
    slots: Slab<Asleep>,
    by_key: HashTable<u32>,
    /// Stirred into every hash, so that nobody can choose keys that collide.
    salt: [u64; 2],
    due: BTreeSet<(u32, u32)>,
    lapsed: VecDeque<Lapsed>,
}

/// Where the key lies in a record: after format and role.
fn key_of(record: &[u8]) -> Option<&[u8]> {
    record.get(2..42)
}

fn hash(salt: [u64; 2], key: &[u8]) -> u64 {
    let mut h = salt[0];
    for chunk in key.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        let mixed = u128::from(h ^ u64::from_le_bytes(word)) * u128::from(salt[1] | 1);
        h = (mixed as u64) ^ (mixed >> 64) as u64;
    }
    h
}

fn key_bytes(key: &Key) -> [u8; 40] {
    let mut bytes = [0; 40];
    bytes[..32].copy_from_slice(&key.0.0);
    bytes[32..].copy_from_slice(&key.1.to_be_bytes());
    bytes
}

impl Sleepers {
    pub(crate) fn new(salt: [u8; 16]) -> Self {
        let (a, b) = salt.split_at(8);
        let word = |half: &[u8]| u64::from_le_bytes(half.try_into().expect("half of sixteen"));
        Sleepers {
            salt: [word(a), word(b)],
            ..Sleepers::default()
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    fn place(&self, key: &Key) -> Option<u32> {
        let key = key_bytes(key);
        let same = |place: &u32| key_of(&self.slots[*place as usize].record) == Some(&key[..]);
        self.by_key.find(hash(self.salt, &key), same).copied()
    }

    pub(crate) fn get(&self, key: &Key) -> Option<&Asleep> {
        self.place(key).map(|place| &self.slots[place as usize])
    }

    /// Takes a session in. `absence`: how long one without deadlines is kept.
    pub(crate) fn insert(
        &mut self,
        key: Key,
        record: Box<[u8]>,
        since: Option<Time>,
        absence: Span,
    ) {
        self.remove(&key);
        let until = Record::decode(&record).ok().zip(since);
        let due_s = until.map(|(record, since)| second(ends_at(&record, since, absence)));
        let asleep = Asleep {
            record,
            since,
            due_s,
        };
        let place = self.slots.insert(asleep) as u32;
        if let Some(due_s) = due_s {
            self.due.insert((due_s, place));
        }
        let (slots, salt) = (&self.slots, self.salt);
        let again = |place: &u32| {
            let record = &slots[*place as usize].record;
            hash(salt, key_of(record).unwrap_or_default())
        };
        let hashed = hash(salt, &key_bytes(&key));
        self.by_key.insert_unique(hashed, place, again);
    }

    pub(crate) fn remove(&mut self, key: &Key) -> Option<Asleep> {
        let place = self.place(key)?;
        let hashed = hash(self.salt, &key_bytes(key));
        if let Ok(entry) = self.by_key.find_entry(hashed, |p| *p == place) {
            entry.remove();
        }
        let asleep = self.slots.remove(place as usize);
        if let Some(due_s) = asleep.due_s {
            self.due.remove(&(due_s, place));
        }
        Some(asleep)
    }

    /// When [`Sleepers::expire`] has something to do.
    pub(crate) fn next_timeout(&self) -> Time {
        self.due.first().map_or(Time::NEVER, |(s, _)| {
            Time::from_nanos(u64::from(*s) * 1_000_000_000)
        })
    }

    // R-DEADLINE-3
    /// Lets go of what is over.
    pub(crate) fn expire(&mut self, now: Time, absence: Span) {
        for _ in 0..DUE_PER_CALL {
            let Some((due_s, place)) = self.due.first().copied() else {
                return;
            };
            if Time::from_nanos(u64::from(due_s) * 1_000_000_000) > now {
                return;
            }
            let asleep = &self.slots[place as usize];
            let since = asleep.since.expect("due, so it is known since when");
            let mut record = Record::decode(&asleep.record).expect("decoded when it came in");
            let key = (record.peer, record.instance);
            let asleep_for = now.since(since);
            let mut over = Vec::new();
            record.flows.retain(|flow| {
                let late = flow.deadline_left.is_some_and(|left| left <= asleep_for);
                if late {
                    over.push(flow.id);
                }
                !late
            });
            let gone = ends_at(&record, since, absence) <= now;
            if gone {
                over.extend(record.flows.drain(..).map(|flow| flow.id));
            }
            self.remove(&key);
            let lapse = |flow| Lapsed {
                peer: key.0,
                instance: key.1,
                flow,
            };
            self.lapsed
                .extend(over.into_iter().map(|id| lapse(Some(id))));
            if gone {
                self.lapsed.push_back(lapse(None));
            } else {
                self.insert(key, record.encode().into(), Some(since), absence);
            }
        }
    }

    pub(crate) fn poll_lapsed(&mut self) -> Option<Lapsed> {
        self.lapsed.pop_front()
    }
}

/// When something of a session at rest is over: its first deadline, or without any its absence.
fn ends_at(record: &Record, since: Time, absence: Span) -> Time {
    let first = record.flows.iter().filter_map(|f| f.deadline_left).min();
    since + first.unwrap_or(absence)
}

/// The second in which a time has passed.
fn second(at: Time) -> u32 {
    u32::try_from(at.as_nanos() / 1_000_000_000 + 1).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::FlowOptions;
    use crate::record::FlowRecord;
    use crate::session::Role;

    const ABSENCE: Span = Span::from_secs(3600);

    fn record(n: u64, deadlines_s: &[Option<u64>]) -> Record {
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
        };
        Record {
            role: Role::Responder,
            peer: PublicKey([n as u8; 32]),
            instance: n,
            epoch: 1,
            seen_floor: 0,
            seen: Vec::new(),
            flows: deadlines_s.iter().enumerate().map(flow).collect(),
        }
    }

    fn at(s: u64) -> Time {
        Time::from_nanos(s * 1_000_000_000)
    }

    fn key(n: u64) -> Key {
        (PublicKey([n as u8; 32]), n)
    }

    #[test]
    fn each_flow_ends_at_its_own_deadline_and_the_session_when_nothing_is_left_of_it() {
        // R-DEADLINE-3
        let mut sleepers = Sleepers::new([7; 16]);
        let deadlines = [Some(10), None, Some(5_000)];
        let bytes = record(1, &deadlines).encode().into();
        sleepers.insert(key(1), bytes, Some(at(100)), ABSENCE);
        sleepers.expire(at(109), ABSENCE);
        assert_eq!(sleepers.poll_lapsed(), None);
        sleepers.expire(at(111), ABSENCE);
        let first = sleepers.poll_lapsed().unwrap();
        assert_eq!(first.flow, Some(FlowId::new(1, 0, true)));
        assert_eq!(sleepers.poll_lapsed(), None);
        assert_eq!(sleepers.len(), 1);
        // With a deadline still to come, absence does not count; then the last flow goes with it.
        sleepers.expire(at(4_000), ABSENCE);
        assert_eq!(sleepers.len(), 1);
        sleepers.expire(at(5_102), ABSENCE);
        let over: Vec<_> = std::iter::from_fn(|| sleepers.poll_lapsed()).collect();
        assert_eq!(over.len(), 3, "two flows and the session");
        assert_eq!(over.last().unwrap().flow, None);
        assert_eq!((sleepers.len(), sleepers.next_timeout()), (0, Time::NEVER));
    }

    #[test]
    fn a_thousand_sleepers_come_and_go_and_leave_nothing() {
        let mut sleepers = Sleepers::new([9; 16]);
        for n in 0..1_000 {
            let bytes = record(n, &[Some(n + 1)]).encode().into();
            sleepers.insert(key(n), bytes, Some(at(0)), ABSENCE);
        }
        assert!((0..1_000).all(|n| sleepers.get(&key(n)).is_some()));
        for n in (0..1_000).step_by(2) {
            assert!(sleepers.remove(&key(n)).is_some());
            assert!(sleepers.get(&key(n)).is_none());
        }
        // Only what is still here lapses, however often somebody slept and woke in between.
        sleepers.expire(at(2_000), ABSENCE);
        let flows = std::iter::from_fn(|| sleepers.poll_lapsed());
        assert_eq!(flows.filter(|l| l.flow.is_some()).count(), 500);
        assert_eq!(
            sleepers.next_timeout(),
            at(3_601),
            "without flows an hour is left"
        );
        sleepers.expire(at(4_000), ABSENCE);
        assert_eq!((sleepers.len(), sleepers.due.len()), (0, 0));
    }

    #[test]
    fn a_record_that_came_without_a_time_stays_until_its_device_comes() {
        let mut sleepers = Sleepers::new([1; 16]);
        sleepers.insert(key(3), record(3, &[Some(1)]).encode().into(), None, ABSENCE);
        sleepers.expire(at(1_000_000), ABSENCE);
        assert!(sleepers.get(&key(3)).is_some());
    }
}
