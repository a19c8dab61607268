//! A batch of changes to be written: the newest value of each key, so that it is never larger than
//! the content.

use std::collections::BTreeMap;

use bytes::Bytes;
use d2tp_session::{FlowId, PublicKey, Span, Time};

use crate::clock;

/// The key of a session in the journal, constant across hibernation, restarts and new keys: peer
/// and instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JournalSessionKey {
    /// The public key of the peer.
    pub peer: PublicKey,
    /// The device's instance.
    pub instance: u64,
}

impl JournalSessionKey {
    /// The key as bytes, those of one peer together.
    pub fn bytes(self) -> [u8; 40] {
        let mut bytes = [0; 40];
        bytes[..32].copy_from_slice(&self.peer.0);
        bytes[32..].copy_from_slice(&self.instance.to_be_bytes());
        bytes
    }

    /// The key with these bytes, as [`JournalSessionKey::bytes`] gives them.
    pub fn from_bytes(bytes: &[u8]) -> Option<JournalSessionKey> {
        JournalSessionKey::read(bytes).filter(|key| key.bytes() == bytes)
    }

    pub(super) fn read(bytes: &[u8]) -> Option<JournalSessionKey> {
        let (peer, instance) = bytes.split_at_checked(32)?;
        Some(JournalSessionKey {
            peer: PublicKey(peer.try_into().ok()?),
            instance: u64::from_be_bytes(instance.try_into().ok()?),
        })
    }
}

/// One flow of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JournalFlowKey {
    /// The key of the flow's session.
    pub session: JournalSessionKey,
    /// The flow's id in its session.
    pub flow: FlowId,
}

impl JournalFlowKey {
    pub(super) fn bytes(self) -> Vec<u8> {
        [&self.session.bytes()[..], &self.flow.0.to_be_bytes()].concat()
    }

    /// The lower bound of the keys of a session's flows.
    pub(super) fn first_of(session: JournalSessionKey) -> Vec<u8> {
        session.bytes().to_vec()
    }

    pub(super) fn last_of(session: JournalSessionKey) -> Vec<u8> {
        [&session.bytes()[..], &[0xff; 8]].concat()
    }

    pub(super) fn read(bytes: &[u8]) -> Option<JournalFlowKey> {
        let (session, flow) = bytes.split_at_checked(40)?;
        Some(JournalFlowKey {
            session: JournalSessionKey::read(session)?,
            flow: FlowId(u64::from_be_bytes(flow.try_into().ok()?)),
        })
    }
}

/// A session's record, and when it was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredRecord {
    /// The record as encoded by [`d2tp_session::SessionRecord::encode`].
    pub record: Vec<u8>,
    boot: u32,
    since_boot: Time,
    wall_ms: u64,
}

impl StoredRecord {
    /// A record made now.
    pub fn now(record: Vec<u8>) -> StoredRecord {
        StoredRecord {
            record,
            boot: clock::boot(),
            since_boot: clock::now(),
            wall_ms: clock::wall_ms(),
        }
    }

    /// The age of the record: by the boot clock if the machine has not restarted, else by the wall
    /// clock, which is less reliable.
    pub fn age(&self) -> Span {
        if self.boot == clock::boot() {
            clock::now().since(self.since_boot)
        } else {
            Span::from_millis(clock::wall_ms().saturating_sub(self.wall_ms))
        }
    }

    fn bytes(&self) -> Vec<u8> {
        [
            &self.boot.to_be_bytes()[..],
            &self.since_boot.as_nanos().to_be_bytes(),
            &self.wall_ms.to_be_bytes(),
            &self.record,
        ]
        .concat()
    }

    pub(super) fn read(bytes: &[u8]) -> Option<StoredRecord> {
        let (boot, rest) = bytes.split_first_chunk()?;
        let (since_boot, rest) = rest.split_first_chunk()?;
        let (wall_ms, record) = rest.split_first_chunk()?;
        Some(StoredRecord {
            record: record.to_vec(),
            boot: u32::from_be_bytes(*boot),
            since_boot: Time::from_nanos(u64::from_be_bytes(*since_boot)),
            wall_ms: u64::from_be_bytes(*wall_ms),
        })
    }
}

/// Changes that are committed together. `None` removes a key.
#[derive(Clone, Debug, Default)]
pub struct JournalBatch {
    /// Records of sessions by key; `None` removes a session.
    pub sessions: BTreeMap<JournalSessionKey, Option<StoredRecord>>,
    /// Memos that applications need to resume their flows.
    pub memos: BTreeMap<JournalFlowKey, Option<Bytes>>,
    /// Notes of applications, by name.
    pub notes: BTreeMap<Vec<u8>, Option<Bytes>>,
}

impl JournalBatch {
    /// Whether the batch is empty.
    pub fn is_empty(&self) -> bool {
        self.sessions.is_empty() && self.memos.is_empty() && self.notes.is_empty()
    }

    /// Merges an older batch that was not written; this one takes precedence.
    pub fn merge_older(&mut self, older: JournalBatch) {
        fn under<K: Ord, V>(newer: &mut BTreeMap<K, V>, older: BTreeMap<K, V>) {
            for (key, value) in older {
                newer.entry(key).or_insert(value);
            }
        }
        under(&mut self.sessions, older.sessions);
        under(&mut self.memos, older.memos);
        under(&mut self.notes, older.notes);
    }

    pub(super) fn of_table(&self, table: usize) -> Vec<(Vec<u8>, Option<Vec<u8>>)> {
        match table {
            0 => {
                let sessions = self.sessions.iter();
                sessions
                    .map(|(k, v)| (k.bytes().to_vec(), v.as_ref().map(StoredRecord::bytes)))
                    .collect()
            }
            1 => {
                let memos = self.memos.iter();
                memos
                    .map(|(k, v)| (k.bytes(), v.as_ref().map(|v| v.to_vec())))
                    .collect()
            }
            _ => {
                let notes = self.notes.iter();
                notes
                    .map(|(k, v)| (k.clone(), v.as_ref().map(|v| v.to_vec())))
                    .collect()
            }
        }
    }
}
