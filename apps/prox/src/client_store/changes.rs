//! Changes of the clients: one after the other, written before they count, and those of the other nodes
//! that share a store.

use std::sync::Arc;

use d2tp_driver::HostKey;

use super::{ClientStore, ClientStoreState};
use crate::client_directory::{ClientDirectory, DirectoryRead, DirectoryWrite};
use crate::client_limits::ClientLimits;
use crate::client_records::{StoredClients, write_file};
use crate::client_store_error::ClientStoreError;

/// How often a change is tried while other nodes make theirs.
const CHANGE_TRIES: usize = 32; // a guess: each is one change of another node

impl ClientStore {
    /// Changes the stored clients, in the file or the shared store first. Nothing changes, and nothing is written, if
    /// `change` or the write fails. Whoever asks who is admitted does not wait for that.
    pub(super) fn change<T, E: From<ClientStoreError>>(
        &self,
        change: impl Fn(&mut StoredClients) -> Result<T, E>,
    ) -> Result<T, E> {
        let _writing = self.writing.lock();
        for _ in 0..CHANGE_TRIES {
            let known = self.state.lock().stored.clone();
            let mut stored = known.clone();
            let changed = change(&mut stored);
            match (&self.directory, &self.path) {
                (Some(directory), _) => {
                    // What this node knows may be outdated: a refusal counts only if it is not.
                    let written = match &changed {
                        Ok(_) => directory.write(&known, &stored),
                        Err(_) => Ok(DirectoryWrite::Outdated),
                    };
                    let written = written.map_err(ClientStoreError::StoreUnreachable)?;
                    if written == DirectoryWrite::Outdated {
                        if self.take_changes_of_others(directory)? || changed.is_ok() {
                            continue;
                        }
                        return changed;
                    }
                }
                (None, Some(path)) => {
                    let changed = changed?;
                    write_file(path, &stored)?;
                    self.replace(stored);
                    return Ok(changed);
                }
                (None, None) => return Err(ClientStoreError::NoStateDirectory.into()),
            }
            self.replace(stored);
            return changed;
        }
        Err(ClientStoreError::Contended.into())
    }

    /// Replaces what is known, after it was written.
    fn replace(&self, stored: StoredClients) {
        Self::replace_in(&mut self.state.lock(), stored);
        self.changes.send_modify(|n| *n += 1);
    }

    fn replace_in(state: &mut ClientStoreState, mut stored: StoredClients) {
        for client in stored.clients.values_mut() {
            // Clients were seen while it was written.
            let meanwhile = state.stored.clients.get(&client.key);
            let meanwhile = meanwhile.and_then(|client| client.seen_s);
            client.seen_s = client.seen_s.max(meanwhile);
        }
        state.stored = stored;
    }

    /// Takes what other nodes have changed. Returns whether they have changed anything. [`ClientStore::writing`] is held.
    fn take_changes_of_others(
        &self,
        directory: &ClientDirectory,
    ) -> Result<bool, ClientStoreError> {
        let known = self.state.lock().stored.clone();
        let read = directory
            .read(&known)
            .map_err(ClientStoreError::StoreUnreachable)?;
        let newer = match read {
            DirectoryRead::Newer(newer) => newer,
            DirectoryRead::Same => return Ok(false),
            DirectoryRead::Lost(there) => {
                let written = directory.write_back(there, &known);
                written.map_err(ClientStoreError::StoreUnreachable)?;
                return Ok(true);
            }
        };
        let mut state = self.state.lock();
        let is_gone = |key: &&HostKey| !newer.clients.contains_key(*key);
        let removed: Vec<HostKey> = known.clients.keys().filter(is_gone).copied().collect();
        let limits_of = |all: &StoredClients, key: &HostKey| {
            all.clients
                .get(key)
                .map_or_else(ClientLimits::default, |client| client.limits)
        };
        let has_other = |key: &&HostKey| limits_of(&known, key) != limits_of(&newer, key);
        let limits_changed: Vec<HostKey> =
            newer.clients.keys().filter(has_other).copied().collect();
        state.removed.extend(removed);
        state.limits_changed.extend(limits_changed);
        // In the same step: who loses its session is not admitted any more.
        Self::replace_in(&mut state, newer);
        drop(state);
        self.changes.send_modify(|n| *n += 1);
        Ok(true)
    }

    /// Takes what other nodes have changed in the shared store, if this proxy has one. Blocks only where something has.
    ///
    /// # Errors
    /// The store does not answer.
    pub(crate) async fn follow_other_nodes(self: &Arc<Self>) -> Result<(), ClientStoreError> {
        let Some(directory) = &self.directory else {
            return Ok(());
        };
        let is_outdated = directory.is_outdated().await;
        if !is_outdated.map_err(ClientStoreError::StoreUnreachable)? {
            return Ok(());
        }
        let store = self.clone();
        let reading = tokio::task::spawn_blocking(move || {
            let _writing = store.writing.lock();
            match &store.directory {
                Some(directory) => store.take_changes_of_others(directory).map(drop),
                None => Ok(()),
            }
        });
        reading.await.expect("reading does not panic")
    }

    /// The limits of clients that other nodes changed since the last call.
    pub(crate) fn take_limits_changed(&self) -> Vec<(HostKey, ClientLimits)> {
        let mut state = self.state.lock();
        let changed = std::mem::take(&mut state.limits_changed);
        let clients = &state.stored.clients;
        let limits = changed.into_iter().map(|key| {
            let own = clients.get(&key).map(|client| client.limits);
            (key, own.unwrap_or_default())
        });
        limits.collect()
    }
}
