//! The clients of a proxy with several nodes: enrolled clients and invitations, in the store that the nodes share.
//!
//! ```text
//!  note C                 the root: the version of each part          replaced by compare-and-swap
//!  note C PART/VERSION     a part: clients, or the invitations         written once, never changed
//!
//!  change ─▶ new parts ─▶ the root names them? ── yes ─▶ the old parts are removed
//!                                             └── no: another node was faster ─▶ read, and change again
//! ```
//!
//! The root is never removed, and each change makes its number greater. A node that knew one and finds none, one with a
//! smaller number, or the root of another list, knows that the store has lost its data, or its last changes: it keeps the
//! clients that it knows, and writes them back where there is no list or an older one. Where another node has changed the
//! older list before that as often as it had been changed, nobody can tell, and what the store has holds.
//!
//! A change of any number of clients is one step: a client is enrolled and its invitation used up at the same moment, on
//! all nodes. Clients are divided by the first byte of their keys, so that a change moves a small part of them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use d2tp_driver::{JournalError, SharedRecords};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::client_records::StoredClients;

/// The name of the root.
const ROOT: &[u8] = b"C";
/// The part that has the invitations; parts before it have the clients whose keys begin with their number.
const INVITATIONS: u16 = 256;
/// How often parts are looked for that another node replaces at this moment.
const READ_TRIES: usize = 16; // a guess: each is one change of another node

/// The error if the store has a list of clients that another node began without this one.
const OTHER_LIST: &str = "has lost the clients that this node knows, and another node has begun a new list there; to keep \
    those of this node, remove the store's keys that begin with nC; to go on with the new list, restart this node";

/// The root: which version of each part holds. A part without a version is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct DirectoryRoot {
    /// What tells this list from one that began after the store had lost it; empty in one of an older version.
    #[serde(default)]
    list: String,
    /// How many changes the list has had; zero in one of an older version.
    #[serde(default)]
    changes: u64,
    parts: BTreeMap<u16, String>,
}

/// What a node read last.
#[derive(Debug, Default)]
struct DirectoryView {
    /// The root, as the store has it; none if there is none.
    raw: Option<Vec<u8>>,
    root: DirectoryRoot,
}

/// What became of the clients since a node read them last.
#[derive(Debug)]
pub(crate) enum DirectoryRead {
    Same,
    /// Another node has changed them.
    Newer(StoredClients),
    /// The store had them, and has none now, or an older list: this root.
    Lost(Option<Vec<u8>>),
}

/// The result of writing a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DirectoryWrite {
    Written,
    /// Another node has changed something since.
    Outdated,
}

/// The clients of all nodes.
#[derive(Debug)]
pub(crate) struct ClientDirectory {
    store: Arc<dyn SharedRecords>,
    view: Mutex<DirectoryView>,
    /// Whether the log says that the store has another list.
    is_other_list_logged: AtomicBool,
}

impl ClientDirectory {
    pub(crate) fn new(store: Arc<dyn SharedRecords>) -> ClientDirectory {
        ClientDirectory {
            store,
            view: Mutex::default(),
            is_other_list_logged: AtomicBool::new(false),
        }
    }

    /// Whether another node has changed something since this one read it.
    ///
    /// # Errors
    /// The store does not answer.
    pub(crate) async fn is_outdated(&self) -> Result<bool, JournalError> {
        let now = self.store.read_note(ROOT).await?;
        Ok(now != self.view.lock().raw)
    }

    /// Reads what has changed since `known` was read. Blocks.
    ///
    /// # Errors
    /// The store does not answer, or has what no node wrote, or another list than the one that was read.
    pub(crate) fn read(&self, known: &StoredClients) -> Result<DirectoryRead, JournalError> {
        for _ in 0..READ_TRIES {
            let raw = self.store.note(ROOT)?;
            let (before, has_read, is_same) = {
                let view = self.view.lock();
                (view.root.clone(), view.raw.is_some(), view.raw == raw)
            };
            if is_same {
                return Ok(DirectoryRead::Same);
            }
            // It is not the same: the one that was read is gone.
            let Some(raw) = raw else {
                return Ok(DirectoryRead::Lost(None));
            };
            let root: DirectoryRoot = serde_json::from_slice(&raw).map_err(|_| self.damaged())?;
            if has_read && root.list != before.list {
                let error = self.error(OTHER_LIST);
                if !self.is_other_list_logged.swap(true, Ordering::Relaxed) {
                    tracing::error!(%error, "this node keeps the clients that it knows");
                }
                return Err(error);
            }
            self.is_other_list_logged.store(false, Ordering::Relaxed);
            // A node of an older version does not count.
            if root.changes > 0 && root.changes < before.changes {
                return Ok(DirectoryRead::Lost(Some(raw)));
            }
            if let Some(read) = self.read_parts(&before, &root, known)? {
                let raw = Some(raw);
                *self.view.lock() = DirectoryView { raw, root };
                return Ok(DirectoryRead::Newer(read));
            }
        }
        Err(self.error("changes all the time; try again"))
    }

    /// Writes `known` to a store that has lost it and has the root `there` instead, if any, unless another node was faster.
    /// The list remains the same one, so that other nodes go on with it. Blocks.
    ///
    /// # Errors
    /// The store does not answer.
    pub(crate) fn write_back(
        &self,
        there: Option<Vec<u8>>,
        known: &StoredClients,
    ) -> Result<(), JournalError> {
        let older: DirectoryRoot = match &there {
            Some(raw) => serde_json::from_slice(raw).map_err(|_| self.damaged())?,
            None => DirectoryRoot::default(),
        };
        let root = {
            let view = self.view.lock();
            DirectoryRoot {
                list: view.root.list.clone(),
                changes: view.root.changes,
                parts: BTreeMap::new(),
            }
        };
        let written = self.write_from(there, root, &StoredClients::default(), known)?;
        if written == DirectoryWrite::Written {
            for (part, version) in &older.parts {
                self.remove(&name_of(*part, version));
            }
            tracing::error!(
                clients = known.clients.len(),
                invitations = known.invitations.len(),
                "the store has lost its list of clients, or the last changes of it; this node has written back what it knows"
            );
        }
        Ok(())
    }

    /// `known` with the parts that differ between two roots; `None` if one of them is gone, because the root has changed.
    fn read_parts(
        &self,
        before: &DirectoryRoot,
        root: &DirectoryRoot,
        known: &StoredClients,
    ) -> Result<Option<StoredClients>, JournalError> {
        let mut read = known.clone();
        for part in changed_parts(before, root) {
            let clients = match root.parts.get(&part) {
                Some(version) => match self.store.note(&name_of(part, version))? {
                    Some(text) => serde_json::from_slice(&text).map_err(|_| self.damaged())?,
                    None => return Ok(None),
                },
                None => StoredClients::default(),
            };
            put_part(&mut read, part, clients);
        }
        Ok(Some(read))
    }

    /// Writes the parts in which `newer` differs from `known`, which was read last. Blocks.
    ///
    /// # Errors
    /// The store does not answer: the change may have been made.
    pub(crate) fn write(
        &self,
        known: &StoredClients,
        newer: &StoredClients,
    ) -> Result<DirectoryWrite, JournalError> {
        let (mut root, before) = {
            let view = self.view.lock();
            (view.root.clone(), view.raw.clone())
        };
        if before.is_none() {
            root.list = random_name();
        }
        self.write_from(before, root, known, newer)
    }

    fn write_from(
        &self,
        before: Option<Vec<u8>>,
        mut root: DirectoryRoot,
        known: &StoredClients,
        newer: &StoredClients,
    ) -> Result<DirectoryWrite, JournalError> {
        let (mut made, mut replaced) = (Vec::new(), Vec::new());
        for part in 0..=INVITATIONS {
            let text = text_of(newer, part);
            if text == text_of(known, part) {
                continue;
            }
            let old = match text {
                Some(text) => {
                    let version = random_name();
                    let name = name_of(part, &version);
                    self.store.replace_note(&name, None, Some(&text))?;
                    made.push((name, text));
                    root.parts.insert(part, version)
                }
                None => root.parts.remove(&part),
            };
            replaced.extend(old.map(|version| name_of(part, &version)));
        }
        root.changes += 1;
        let raw = serde_json::to_vec(&root).expect("plain data");
        let is_written = self
            .store
            .replace_note(ROOT, before.as_deref(), Some(&raw))?;
        if !is_written {
            for (name, text) in made {
                // What stays of it, if the store is gone now, nobody reads.
                let _ = self.store.replace_note(&name, Some(&text), None);
            }
            return Ok(DirectoryWrite::Outdated);
        }
        *self.view.lock() = DirectoryView {
            raw: Some(raw),
            root,
        };
        for name in replaced {
            self.remove(&name);
        }
        Ok(DirectoryWrite::Written)
    }

    /// Removes a part that no root names any more. What stays of it, if the store is gone now, nobody reads.
    fn remove(&self, name: &[u8]) {
        if let Ok(Some(text)) = self.store.note(name) {
            let _ = self.store.replace_note(name, Some(&text), None);
        }
    }

    fn damaged(&self) -> JournalError {
        self.error("has a list of clients that no node wrote; remove its keys that begin with nC and invite the clients again")
    }

    fn error(&self, cause: &str) -> JournalError {
        JournalError::Store {
            place: self.store.place(),
            cause: cause.to_owned(),
        }
    }
}

fn random_name() -> String {
    let random = getrandom::u64().expect("the system has randomness");
    format!("{random:016x}")
}

/// The name of a version of a part.
fn name_of(part: u16, version: &str) -> Vec<u8> {
    format!("C{part}/{version}").into_bytes()
}

/// The parts of which two roots name different versions.
fn changed_parts(before: &DirectoryRoot, root: &DirectoryRoot) -> BTreeSet<u16> {
    let all = before.parts.keys().chain(root.parts.keys()).copied();
    all.filter(|part| before.parts.get(part) != root.parts.get(part))
        .collect()
}

/// The first and the last key of a part with clients.
fn keys_of(part: u8) -> std::ops::RangeInclusive<[u8; 32]> {
    let (mut first, mut last) = ([0; 32], [u8::MAX; 32]);
    (first[0], last[0]) = (part, part);
    first..=last
}

/// What the store has of a part; `None` if it is empty. When clients were seen is elsewhere: it changes all the time.
fn text_of(all: &StoredClients, part: u16) -> Option<Vec<u8>> {
    let of_part = match u8::try_from(part) {
        Ok(first) => StoredClients {
            clients: all
                .clients
                .range(keys_of(first))
                .map(|(key, client)| {
                    let mut client = client.clone();
                    client.seen_s = None;
                    (*key, client)
                })
                .collect(),
            invitations: Vec::new(),
        },
        Err(_) => StoredClients {
            clients: BTreeMap::new(),
            invitations: all.invitations.clone(),
        },
    };
    let is_empty = of_part.clients.is_empty() && of_part.invitations.is_empty();
    (!is_empty).then(|| serde_json::to_vec(&of_part).expect("plain data"))
}

/// Replaces a part. When its clients were seen stays.
fn put_part(all: &mut StoredClients, part: u16, newer: StoredClients) {
    let Ok(first) = u8::try_from(part) else {
        all.invitations = newer.invitations;
        return;
    };
    let old: Vec<_> = all
        .clients
        .range(keys_of(first))
        .map(|(key, _)| *key)
        .collect();
    let mut seen = BTreeMap::new();
    for key in old {
        if let Some(client) = all.clients.remove(&key) {
            seen.insert(key, client.seen_s);
        }
    }
    for (key, mut client) in newer.clients {
        client.seen_s = client.seen_s.max(seen.get(&key).copied().flatten());
        all.clients.insert(key, client);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::client_store::ClientStore;
    use crate::config::ProxConfig;
    use crate::memory_notes::SharedNotes;

    const HOUR: Duration = Duration::from_secs(3600);

    fn node(notes: &Arc<SharedNotes>, name: &str) -> Arc<ClientStore> {
        let shared: Arc<dyn SharedRecords> = notes.at(name);
        Arc::new(ClientStore::open(&ProxConfig::default(), None, Some(shared)).unwrap())
    }

    fn enrol(at: &ClientStore, client: [u8; 32]) {
        let (secret, _) = at.invite(None, HOUR).unwrap();
        at.enrol(client, &secret, None).unwrap();
    }

    #[tokio::test]
    async fn a_store_that_is_emptied_gets_its_clients_back_and_no_node_loses_them() {
        let notes = Arc::new(SharedNotes::default());
        let (a, b) = (node(&notes, "a"), node(&notes, "b"));
        enrol(&a, [1; 32]);
        b.follow_other_nodes().await.unwrap();
        notes.empty();
        for one in [&a, &b] {
            one.follow_other_nodes().await.unwrap();
            assert!(one.admits(&[1; 32]) && one.take_removed().is_empty());
        }
        enrol(&b, [2; 32]);
        a.follow_other_nodes().await.unwrap();
        assert!(a.admits(&[2; 32]) && node(&notes, "c").admits(&[1; 32]));
        // Also where the change comes first.
        notes.empty();
        a.remove(&crate::show_key(&[1; 32])).unwrap();
        b.follow_other_nodes().await.unwrap();
        assert!(!b.admits(&[1; 32]) && b.admits(&[2; 32]));
        assert_eq!(b.take_removed(), [[1; 32]]);
    }

    #[tokio::test]
    async fn a_store_that_goes_back_to_an_older_list_lets_no_removed_client_in_again() {
        let notes = Arc::new(SharedNotes::default());
        let (a, b) = (node(&notes, "a"), node(&notes, "b"));
        enrol(&a, [1; 32]);
        enrol(&a, [2; 32]);
        let older = notes.copy();
        a.remove(&crate::show_key(&[1; 32])).unwrap();
        enrol(&a, [3; 32]);
        b.follow_other_nodes().await.unwrap();
        // Another server takes the store's place, which had not heard of the last changes.
        notes.become_copy(&older);
        for one in [&b, &a] {
            one.follow_other_nodes().await.unwrap();
            assert!(!one.admits(&[1; 32]) && one.admits(&[2; 32]) && one.admits(&[3; 32]));
        }
        let new = node(&notes, "new");
        assert!(!new.admits(&[1; 32]) && new.admits(&[3; 32]));
        // Also where a change comes first, and without what the older list named.
        notes.become_copy(&older);
        enrol(&a, [4; 32]);
        b.follow_other_nodes().await.unwrap();
        assert!(!b.admits(&[1; 32]) && b.admits(&[3; 32]) && b.admits(&[4; 32]));
        let root: DirectoryRoot = serde_json::from_slice(&notes.get(ROOT).unwrap()).unwrap();
        let named = root
            .parts
            .iter()
            .map(|(part, version)| name_of(*part, version));
        let mut all: Vec<Vec<u8>> = named.chain([ROOT.to_vec()]).collect();
        all.sort();
        assert_eq!(notes.names_with(ROOT), all);
    }

    #[tokio::test]
    async fn a_list_that_a_new_node_began_in_an_emptied_store_removes_no_client_elsewhere() {
        let notes = Arc::new(SharedNotes::default());
        let a = node(&notes, "a");
        enrol(&a, [1; 32]);
        notes.empty();
        let new = node(&notes, "new");
        enrol(&new, [2; 32]);
        let refused = a.follow_other_nodes().await.unwrap_err().to_string();
        assert!(refused.contains("restart this node"), "{refused}");
        assert!(a.invite(None, HOUR).is_err());
        assert!(a.admits(&[1; 32]) && a.take_removed().is_empty());
        assert!(new.admits(&[2; 32]));
    }
}
