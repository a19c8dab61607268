//! The clients that may use the proxy: those configured at the start, and those that invitations
//! enrolled.
//!
//! ```text
//!  --allow-client, --allow-any-client ───────┐
//!                                            ├─▶ ClientStore ─▶ admits(key)? ─▶ handshake and every request
//!  DIR/clients.json ◀─ enrol, rename, remove ┘
//!     or the store that nodes share (client_directory.rs)
//! ```
//!
//! The file holds clients and open invitations together and is replaced in one step, so that a client is
//! enrolled and its invitation used up at the same moment, also across a crash. So does the shared store, and each node
//! follows what the others change there.

mod changes;
mod invitations;

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use d2tp_driver::{Admission, HostKey, PublicKey, SharedRecords};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::client_directory::{ClientDirectory, DirectoryRead};
use crate::client_limits::ClientLimits;
use crate::client_records::{EnrolledClient, StoredClients, read_file, write_file};
use crate::client_store_error::ClientStoreError;
use crate::config::ProxConfig;
use crate::link_keys::link_client_id;

/// The name of the file in the state directory.
const FILE_NAME: &str = "clients.json";
/// Characters of a client's name.
const NAME_CHARS_MAX: usize = 64;
/// How long a change waits until the server applies it.
const APPLIED_WITHIN: Duration = Duration::from_secs(2);

#[derive(Default)]
struct ClientStoreState {
    stored: StoredClients,
    /// Whether clients were seen since the file was written.
    is_seen_unsaved: bool,
    /// Clients that were removed and whose sessions have not been ended.
    removed: Vec<HostKey>,
    /// Clients whose limits another node changed, and to which they have not been applied.
    limits_changed: Vec<HostKey>,
}

/// The clients of a proxy.
pub struct ClientStore {
    path: Option<PathBuf>,
    /// Where the clients are that several nodes share; the file is not used then.
    directory: Option<ClientDirectory>,
    named: BTreeSet<HostKey>,
    allows_any: bool,
    state: Mutex<ClientStoreState>,
    /// The lock held while the file is written, so that one change follows the other.
    writing: Mutex<()>,
    /// The number of changes of who is admitted.
    changes: watch::Sender<u64>,
    /// The number of changes that the server has applied.
    applied: watch::Sender<u64>,
    /// Whether a server applies changes.
    is_attended: watch::Sender<bool>,
}

impl ClientStore {
    /// The store of a proxy with this configuration; `state_dir`: where enrolled clients are kept, unless nodes share
    /// them in a store. Blocks.
    ///
    /// # Errors
    /// The file or the store cannot be read, or has what the proxy did not write.
    pub(crate) fn open(
        config: &ProxConfig,
        state_dir: Option<&Path>,
        shared: Option<Arc<dyn SharedRecords>>,
    ) -> io::Result<ClientStore> {
        let path = state_dir.map(|directory| directory.join(FILE_NAME));
        let mut stored = match &path {
            Some(path) => read_file(path)?,
            None => StoredClients::default(),
        };
        let directory = shared.map(ClientDirectory::new);
        if let Some(directory) = &directory {
            if !stored.clients.is_empty() {
                tracing::warn!(
                    clients = stored.clients.len(),
                    "clients of a time without --store are not clients of all nodes: invite them again"
                );
            }
            let read = directory.read(&StoredClients::default());
            stored = match read.map_err(io::Error::other)? {
                DirectoryRead::Newer(read) => read,
                DirectoryRead::Same | DirectoryRead::Lost(_) => StoredClients::default(),
            };
        }
        Ok(ClientStore {
            path,
            directory,
            named: config.allow_clients.iter().copied().collect(),
            allows_any: config.allow_any_client,
            state: Mutex::new(ClientStoreState {
                stored,
                ..ClientStoreState::default()
            }),
            writing: Mutex::default(),
            changes: watch::Sender::default(),
            applied: watch::Sender::default(),
            is_attended: watch::Sender::default(),
        })
    }

    /// Whether clients can be enrolled: there is a place for them.
    pub(crate) fn can_enrol(&self) -> bool {
        self.path.is_some() || self.directory.is_some()
    }

    /// Whether this client may use the proxy.
    pub(crate) fn admits(&self, client: &HostKey) -> bool {
        self.allows_any
            || self.named.contains(client)
            || self.state.lock().stored.clients.contains_key(client)
    }

    /// Records that a client opened a flow.
    pub(crate) fn on_seen(&self, client: &HostKey) {
        let now_s = unix_seconds();
        let mut state = self.state.lock();
        if let Some(known) = state.stored.clients.get_mut(client) {
            known.seen_s = Some(now_s);
            state.is_seen_unsaved = true;
        }
    }

    /// Which devices may connect, for the server.
    pub fn admission(&self) -> Admission {
        if self.allows_any {
            return Admission::Anybody;
        }
        let state = self.state.lock();
        let enrolled = state.stored.clients.keys();
        // Clients of links do not connect by D2TP.
        let enrolled = enrolled.filter(|key| link_client_id(key).is_none());
        let keys = self.named.iter().chain(enrolled).copied().map(PublicKey);
        Admission::Only(keys.collect())
    }

    /// Whether any client may use the proxy.
    pub fn has_clients(&self) -> bool {
        self.allows_any || !self.named.is_empty() || !self.state.lock().stored.clients.is_empty()
    }

    /// The enrolled clients, by name.
    pub fn enrolled(&self) -> Vec<EnrolledClient> {
        let mut clients: Vec<_> = self.state.lock().stored.clients.values().cloned().collect();
        clients.sort_by(|a, b| a.name.cmp(&b.name));
        clients
    }

    /// The number of enrolled clients.
    pub fn enrolled_count(&self) -> usize {
        self.state.lock().stored.clients.len()
    }

    /// The keys that were named when the proxy started.
    pub fn named(&self) -> impl Iterator<Item = &HostKey> {
        self.named.iter()
    }

    /// Finds a client by its name, its key, or the beginning of its key.
    ///
    /// # Errors
    /// There is none, or more than one.
    pub fn find(&self, text: &str) -> Result<EnrolledClient, ClientStoreError> {
        let state = self.state.lock();
        let clients = &state.stored.clients;
        if let Some(known) = clients.values().find(|known| known.name == text) {
            return Ok(known.clone());
        }
        let begins = |known: &&EnrolledClient| crate::show_key(&known.key).starts_with(text);
        let mut found = clients
            .values()
            .filter(begins)
            .filter(|_| text.len() >= KEY_PREFIX_CHARS);
        match (found.next(), found.count()) {
            (Some(known), 0) => Ok(known.clone()),
            (Some(_), more) => Err(ClientStoreError::Ambiguous(more + 1, text.to_owned())),
            (None, _) if self.named.iter().any(|key| crate::show_key(key) == text) => {
                Err(ClientStoreError::NamedAtStart)
            }
            (None, _) => Err(ClientStoreError::NoSuchClient(text.to_owned())),
        }
    }

    /// Gives a client another name. Returns the client as it was.
    ///
    /// # Errors
    /// There is no such client, the name is taken or will not do, or the file cannot be written.
    pub fn rename(&self, text: &str, name: &str) -> Result<EnrolledClient, ClientStoreError> {
        let known = self.find(text)?;
        let name = checked_name(name)?;
        self.change(|stored| {
            let other = |other: &EnrolledClient| other.name == name && other.key != known.key;
            if stored.clients.values().any(other) {
                return Err(ClientStoreError::NameTaken(name.clone()));
            }
            if let Some(client) = stored.clients.get_mut(&known.key) {
                client.name.clone_from(&name);
            }
            Ok(())
        })?;
        Ok(known)
    }

    /// Changes the limits of a client that `newer` names; `None` resets all of them to the limits
    /// of all clients. Returns the changed client.
    ///
    /// # Errors
    /// There is no such client, or the file cannot be written.
    pub(crate) fn set_limits(
        &self,
        text: &str,
        newer: Option<&ClientLimits>,
    ) -> Result<EnrolledClient, ClientStoreError> {
        let known = self.find(text).map_err(|error| match error {
            ClientStoreError::NamedAtStart => ClientStoreError::NoOwnLimits,
            error => error,
        })?;
        self.change(|stored| match stored.clients.get_mut(&known.key) {
            Some(client) => {
                client.limits = newer.map_or_else(ClientLimits::default, |newer| {
                    client.limits.changed_to(newer)
                });
                Ok(client.clone())
            }
            // It was removed this very moment.
            None => Err(ClientStoreError::NoSuchClient(text.to_owned())),
        })
    }

    /// What the operator calls a client, if it was enrolled.
    pub(crate) fn name_of(&self, client: &HostKey) -> Option<String> {
        let state = self.state.lock();
        Some(state.stored.clients.get(client)?.name.clone())
    }

    /// Whether this key was enrolled, or named when the proxy started: it is not one that anybody may make up.
    pub(crate) fn is_known(&self, client: &HostKey) -> bool {
        self.named.contains(client) || self.state.lock().stored.clients.contains_key(client)
    }

    /// Removes a client. Its sessions end as soon as the server has applied it. Returns the client.
    ///
    /// # Errors
    /// There is no such client, it was named when the proxy started, or the file cannot be written.
    pub fn remove(&self, text: &str) -> Result<EnrolledClient, ClientStoreError> {
        let known = self.find(text)?;
        if self.named.contains(&known.key) {
            return Err(ClientStoreError::NamedAtStart);
        }
        self.change(|stored| {
            stored.clients.remove(&known.key);
            Ok(())
        })?;
        self.state.lock().removed.push(known.key);
        self.changes.send_modify(|n| *n += 1);
        Ok(known)
    }

    /// Waits until a client is known no more.
    pub(crate) async fn until_removed(&self, client: &HostKey) {
        let mut changes = self.changes.subscribe();
        while self.is_known(client) {
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    /// Writes down when clients were last seen.
    pub(crate) fn save_seen(&self) {
        let _writing = self.writing.lock();
        let mut state = self.state.lock();
        // Where nodes share clients, `shared_usage.rs` writes when they were seen.
        let path = self.path.as_deref().filter(|_| self.directory.is_none());
        let Some(path) = path.filter(|_| state.is_seen_unsaved) else {
            return;
        };
        state.is_seen_unsaved = false;
        let stored = state.stored.clone();
        drop(state);
        if let Err(error) = write_file(path, &stored) {
            tracing::warn!(%error, "when clients were last seen is not kept");
            self.state.lock().is_seen_unsaved = true;
        }
    }

    /// Clients that were removed since the last call.
    pub(crate) fn take_removed(&self) -> Vec<HostKey> {
        std::mem::take(&mut self.state.lock().removed)
    }

    /// Notified when it changes who is admitted.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.is_attended.send_replace(true);
        self.changes.subscribe()
    }

    /// Records that the server has applied all changes up to this one.
    pub(crate) fn on_applied(&self, change: u64) {
        self.applied.send_replace(change);
    }

    /// Waits until the server has applied the changes made so far, if a server does.
    pub(crate) async fn applied(&self) {
        if !*self.is_attended.borrow() {
            return;
        }
        let change = *self.changes.borrow();
        let mut applied = self.applied.subscribe();
        let waited = tokio::time::timeout(APPLIED_WITHIN, applied.wait_for(|n| *n >= change)).await;
        if waited.is_err() {
            tracing::warn!("the server is slow to apply a change of clients");
        }
    }
}

/// Characters of a key by which a client can be named.
const KEY_PREFIX_CHARS: usize = 6;

fn checked_name(name: &str) -> Result<String, ClientStoreError> {
    let is_plain = name.trim() == name && !name.chars().any(char::is_control);
    match name.chars().count() {
        1..=NAME_CHARS_MAX if is_plain => Ok(name.to_owned()),
        _ => Err(ClientStoreError::BadName),
    }
}

fn unix_seconds() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn store(directory: &Path) -> ClientStore {
        ClientStore::open(&ProxConfig::default(), Some(directory), None).unwrap()
    }

    pub(super) const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn clients_are_renamed_and_removed_by_name_or_key() {
        let directory = tempfile::tempdir().unwrap();
        let clients = store(directory.path());
        for (n, name) in [(1, "phone"), (2, "phone"), (3, "tablet")] {
            let (secret, _) = clients.invite(None, HOUR).unwrap();
            clients.enrol([n; 32], &secret, Some(name)).unwrap();
        }
        let names = |clients: &ClientStore| {
            let all = clients.enrolled().into_iter();
            all.map(|client| client.name).collect::<Vec<_>>()
        };
        assert_eq!(names(&clients), ["phone", "phone-2", "tablet"]);
        let taken = clients.rename("tablet", "phone").unwrap_err();
        assert!(taken.to_string().contains("choose another"), "{taken}");
        clients
            .rename(&crate::show_key(&[3; 32])[..8], "pad")
            .unwrap();
        assert_eq!(clients.remove("phone").unwrap().key, [1; 32]);
        assert_eq!(names(&clients), ["pad", "phone-2"]);
        assert_eq!(clients.take_removed(), [[1; 32]]);
        assert!(!clients.admits(&[1; 32]) && clients.admits(&[2; 32]));
        assert!(matches!(
            clients.remove("phone"),
            Err(ClientStoreError::NoSuchClient(_))
        ));
    }

    #[test]
    fn a_client_that_the_command_line_names_is_not_removed_here() {
        let config = ProxConfig {
            allow_clients: vec![[7; 32]],
            ..Default::default()
        };
        let directory = tempfile::tempdir().unwrap();
        let clients = ClientStore::open(&config, Some(directory.path()), None).unwrap();
        assert!(clients.admits(&[7; 32]));
        let refused = clients.remove(&crate::show_key(&[7; 32])).unwrap_err();
        assert!(refused.to_string().contains("--allow-client"), "{refused}");
    }

    #[test]
    fn a_file_of_an_older_version_is_read_and_limits_are_kept_in_it() {
        let directory = tempfile::tempdir().unwrap();
        let key = crate::show_key(&[1; 32]);
        let older = format!(
            r#"{{"clients": [{{"name": "pad", "key": "{key}", "enrolled_s": 5}}], "invitations": []}}"#
        );
        let path = directory.path().join(FILE_NAME);
        std::fs::write(&path, older).unwrap();
        let clients = store(directory.path());
        assert_eq!(clients.find("pad").unwrap().limits, ClientLimits::default());
        let slow = ClientLimits {
            down_bytes_per_s: Some(7),
            ..Default::default()
        };
        clients.set_limits("pad", Some(&slow)).unwrap();
        let more = ClientLimits {
            flows: Some(2),
            ..Default::default()
        };
        clients.set_limits("pad", Some(&more)).unwrap();
        let limits = store(directory.path()).find("pad").unwrap().limits;
        assert_eq!((limits.down_bytes_per_s, limits.flows), (Some(7), Some(2)));
        clients.set_limits("pad", None).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(!text.contains("limits"), "{text}");
    }

    #[test]
    fn a_damaged_file_is_an_error_and_not_an_empty_list() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join(FILE_NAME), "{\"clients\":").unwrap();
        let error = ClientStore::open(&ProxConfig::default(), Some(directory.path()), None);
        assert!(error.err().unwrap().to_string().contains("damaged"));
    }
}
