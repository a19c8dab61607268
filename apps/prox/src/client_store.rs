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

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use d2tp_driver::{Admission, HostKey, PublicKey, SharedRecords};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::client_directory::{ClientDirectory, DirectoryRead, DirectoryWrite};
use crate::client_limits::ClientLimits;
use crate::client_records::{
    EnrolledClient, OpenInvitation, StoredClients, StoredInvitation, read_file, write_file,
};
use crate::client_store_error::ClientStoreError;
use crate::config::ProxConfig;
use crate::invitation::InvitationSecret;
use crate::refusal::ProxRefusal;

/// The name of the file in the state directory.
const FILE_NAME: &str = "clients.json";
/// Clients that invitations can enrol.
const CLIENTS_MAX: usize = 100_000; // a guess: more are no longer enrolled one by one
/// Invitations that can be open at the same time.
const INVITATIONS_MAX: usize = 1_000; // a guess: 200 bytes each, and each request compares all
/// How long a used or expired invitation is remembered, so that whoever shows it hears what became of it.
const REMEMBERED: Duration = Duration::from_secs(24 * 3600);
/// Characters of a client's name.
const NAME_CHARS_MAX: usize = 64;
/// How often a change is tried while other nodes make theirs.
const CHANGE_TRIES: usize = 32; // a guess: each is one change of another node
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
    /// Held while the file is written: one change after the other.
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
        let keys = self.named.iter().chain(enrolled).copied().map(PublicKey);
        Admission::Only(keys.collect())
    }

    /// Whether any client may use the proxy.
    pub fn has_clients(&self) -> bool {
        self.allows_any || !self.named.is_empty() || !self.state.lock().stored.clients.is_empty()
    }

    /// Whether an invitation is open, so that unknown devices may ask to be enrolled.
    pub fn is_inviting(&self) -> bool {
        let now_s = unix_seconds();
        let state = self.state.lock();
        state.stored.invitations.iter().any(|i| i.is_open(now_s))
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

    /// Makes an invitation for one device; `name`: what the client will be called. Returns its secret, and
    /// how it is listed.
    ///
    /// # Errors
    /// The name will not do, too many are open, or the file cannot be written.
    pub fn invite(
        &self,
        name: Option<&str>,
        expires_in: Duration,
    ) -> Result<(InvitationSecret, OpenInvitation), ClientStoreError> {
        let now_s = unix_seconds();
        let expires_s = now_s.saturating_add(expires_in.as_secs().max(1));
        let secret = InvitationSecret::generate(expires_s);
        let invitation = StoredInvitation {
            hash: secret.hash(),
            name: name.map(checked_name).transpose()?,
            expires_s,
            used_by: None,
        };
        self.change(|stored| {
            if let Some(name) = &invitation.name
                && stored.clients.values().any(|known| known.name == *name)
            {
                return Err(ClientStoreError::NameTaken(name.clone()));
            }
            let remembered = now_s.saturating_sub(REMEMBERED.as_secs());
            stored.invitations.retain(|old| old.expires_s > remembered);
            if stored.invitations.len() >= INVITATIONS_MAX {
                // Those that are used or expired are remembered only while there is room.
                stored.invitations.retain(|old| old.is_open(now_s));
            }
            if stored.invitations.len() >= INVITATIONS_MAX {
                return Err(ClientStoreError::InvitationsFull(INVITATIONS_MAX));
            }
            stored.invitations.push(invitation.clone());
            Ok(())
        })?;
        Ok((secret, invitation.shown()))
    }

    /// The invitations that are open, the first to expire first.
    pub fn open_invitations(&self) -> Vec<OpenInvitation> {
        let now_s = unix_seconds();
        let state = self.state.lock();
        let open = state.stored.invitations.iter().filter(|i| i.is_open(now_s));
        let mut open: Vec<OpenInvitation> = open.map(StoredInvitation::shown).collect();
        open.sort_by_key(|invitation| invitation.expires_s);
        open
    }

    /// Withdraws an open invitation, by its number or the name of its client: from now on it is unknown.
    ///
    /// # Errors
    /// There is none, there are several, or the file cannot be written.
    pub fn withdraw(&self, text: &str) -> Result<OpenInvitation, ClientStoreError> {
        let open = self.open_invitations();
        let is_meant = |i: &&OpenInvitation| i.id == text || i.name.as_deref() == Some(text);
        let mut found = open.iter().filter(is_meant);
        let known = match (found.next(), found.count()) {
            (Some(known), 0) => known.clone(),
            (Some(_), more) => {
                return Err(ClientStoreError::AmbiguousInvitation(
                    more + 1,
                    text.to_owned(),
                ));
            }
            (None, _) => return Err(ClientStoreError::NoSuchInvitation(text.to_owned())),
        };
        self.change(|stored| {
            let before = stored.invitations.len();
            stored
                .invitations
                .retain(|i| i.used_by.is_some() || i.hash.id() != known.id);
            // It may have been used this very moment.
            match stored.invitations.len() < before {
                true => Ok(()),
                false => Err(ClientStoreError::NoSuchInvitation(text.to_owned())),
            }
        })?;
        Ok(known)
    }

    /// Enrols a client by the secret of an invitation, which is used up by that. Returns the client's name:
    /// the invitation's, else the one that the device suggests.
    ///
    /// # Errors
    /// The invitation is used, expired or unknown; or the file cannot be written, and then it remains open.
    pub(crate) fn enrol(
        &self,
        client: HostKey,
        secret: &InvitationSecret,
        suggested: Option<&str>,
    ) -> Result<String, ProxRefusal> {
        let now_s = unix_seconds();
        let hash = secret.hash();
        self.change(|stored| {
            // Every hash is compared, and each in constant time.
            let matches = stored.invitations.iter().map(|known| known.hash.is(&hash));
            let matches: Vec<bool> = matches.collect();
            let at = matches.iter().position(|same| *same);
            let at = at.ok_or(ProxRefusal::InvitationUnknown)?;
            let invitation = &stored.invitations[at];
            match invitation.used_by {
                Some(used_by) if used_by == client => {
                    return Err(ProxRefusal::InvitationUsedByThisDevice);
                }
                Some(_) => return Err(ProxRefusal::InvitationUsed),
                None if now_s >= invitation.expires_s => {
                    return Err(ProxRefusal::InvitationExpired);
                }
                None if stored.clients.len() >= CLIENTS_MAX => {
                    return Err(ProxRefusal::ClientsFull);
                }
                None => {}
            }
            let suggested = suggested.and_then(|name| checked_name(name).ok());
            let wanted = invitation.name.clone().or(suggested);
            let name = match stored.clients.get(&client) {
                Some(known) => known.name.clone(),
                None => {
                    let name = stored.free_name(wanted.as_deref().unwrap_or("device"));
                    let known = EnrolledClient {
                        name: name.clone(),
                        key: client,
                        enrolled_s: now_s,
                        seen_s: Some(now_s),
                        limits: ClientLimits::default(),
                    };
                    stored.clients.insert(client, known);
                    name
                }
            };
            stored.invitations[at].used_by = Some(client);
            Ok(name)
        })
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

    /// Changes the limits of a client: those that `newer` names, or all to those of all clients if it is none. Returns
    /// the client as it is now.
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

    /// Changes the stored clients, in the file or the shared store first. Nothing changes, and nothing is written, if
    /// `change` or the write fails. Whoever asks who is admitted does not wait for that.
    fn change<T, E: From<ClientStoreError>>(
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

    fn store(directory: &Path) -> ClientStore {
        ClientStore::open(&ProxConfig::default(), Some(directory), None).unwrap()
    }

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn an_invitation_enrols_one_client_and_the_file_keeps_both_facts() {
        let directory = tempfile::tempdir().unwrap();
        let clients = store(directory.path());
        let (secret, _) = clients.invite(Some("laptop"), HOUR).unwrap();
        assert!(clients.is_inviting() && !clients.admits(&[1; 32]));
        let name = clients.enrol([1; 32], &secret, Some("host")).unwrap();
        assert_eq!(name, "laptop");
        assert!(clients.admits(&[1; 32]) && !clients.is_inviting());
        let again = store(directory.path());
        assert!(again.admits(&[1; 32]) && !again.is_inviting());
        let second = again.enrol([2; 32], &secret, None).unwrap_err();
        assert_eq!(second, ProxRefusal::InvitationUsed);
        let same = again.enrol([1; 32], &secret, None).unwrap_err();
        assert_eq!(same, ProxRefusal::InvitationUsedByThisDevice);
        assert!(!again.admits(&[2; 32]));
    }

    #[test]
    fn a_secret_that_nobody_was_given_enrols_nobody() {
        let directory = tempfile::tempdir().unwrap();
        let clients = store(directory.path());
        clients.invite(None, HOUR).unwrap();
        let guessed = InvitationSecret::generate(u64::from(u32::MAX));
        let refused = clients.enrol([1; 32], &guessed, None).unwrap_err();
        assert_eq!(refused, ProxRefusal::InvitationUnknown);
        assert!(clients.is_inviting(), "the invitation is still open");
    }

    #[test]
    fn a_device_that_is_refused_makes_the_proxy_write_and_change_nothing() {
        use std::os::unix::fs::MetadataExt;
        let directory = tempfile::tempdir().unwrap();
        let clients = store(directory.path());
        let (used, _) = clients.invite(None, HOUR).unwrap();
        clients.enrol([1; 32], &used, None).unwrap();
        clients.invite(None, HOUR).unwrap();
        // Each write replaces the file by a new one.
        let path = directory.path().join(FILE_NAME);
        let file = std::fs::File::open(&path).unwrap();
        let changes = clients.changes.subscribe();
        let guessed = InvitationSecret::generate(u64::from(u32::MAX));
        for secret in [&guessed, &used] {
            assert!(clients.enrol([2; 32], secret, None).is_err());
        }
        let inode = |metadata: std::fs::Metadata| metadata.ino();
        let now = inode(std::fs::metadata(&path).unwrap());
        assert_eq!(now, inode(file.metadata().unwrap()));
        assert!(!changes.has_changed().unwrap());
    }

    #[test]
    fn an_invitation_that_is_withdrawn_enrols_nobody_and_others_stay() {
        let folder = tempfile::tempdir().unwrap();
        let clients = store(folder.path());
        let (secret, listed) = clients.invite(Some("laptop"), HOUR).unwrap();
        let (other, _) = clients.invite(Some("phone"), 2 * HOUR).unwrap();
        let names: Vec<_> = clients
            .open_invitations()
            .into_iter()
            .map(|i| i.name)
            .collect();
        assert_eq!(names, [Some("laptop".to_owned()), Some("phone".to_owned())]);
        assert!(clients.withdraw("tablet").is_err());
        assert_eq!(clients.withdraw("laptop").unwrap(), listed);
        assert!(clients.withdraw(&listed.id).is_err(), "it is gone");
        // Also for the next process.
        let again = store(folder.path());
        assert!(matches!(
            again.enrol([1; 32], &secret, None),
            Err(ProxRefusal::InvitationUnknown)
        ));
        assert_eq!(again.enrol([2; 32], &other, None).unwrap(), "phone");
        assert!(again.withdraw("phone").is_err(), "a used one is not open");
        let (_, one) = again.invite(None, HOUR).unwrap();
        again.withdraw(&one.id).unwrap();
        assert!(!again.is_inviting());
    }

    #[test]
    fn an_expired_invitation_is_refused_as_such() {
        let directory = tempfile::tempdir().unwrap();
        let clients = store(directory.path());
        let (secret, _) = clients.invite(None, HOUR).unwrap();
        clients.state.lock().stored.invitations[0].expires_s = unix_seconds();
        assert!(!clients.is_inviting());
        let refused = clients.enrol([1; 32], &secret, None).unwrap_err();
        assert_eq!(refused, ProxRefusal::InvitationExpired);
    }

    #[test]
    fn the_file_has_no_secret_and_is_its_owners_alone() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let clients = store(directory.path());
        let (secret, _) = clients.invite(None, HOUR).unwrap();
        let path = directory.path().join(FILE_NAME);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(!text.contains(&secret.to_text()), "{text}");
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_file_that_cannot_be_written_leaves_the_invitation_open_and_the_client_outside() {
        let directory = tempfile::tempdir().unwrap();
        let clients = store(directory.path());
        let (secret, _) = clients.invite(None, HOUR).unwrap();
        // The file to be renamed is a directory: that fails for root, too.
        std::fs::create_dir(directory.path().join("clients.new")).unwrap();
        let refused = clients.enrol([1; 32], &secret, None).unwrap_err();
        assert_eq!(refused, ProxRefusal::StoreFailed);
        assert!(clients.is_inviting() && !clients.admits(&[1; 32]));
        std::fs::remove_dir(directory.path().join("clients.new")).unwrap();
        clients.enrol([1; 32], &secret, None).unwrap();
    }

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
