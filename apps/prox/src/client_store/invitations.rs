//! Invitations: how a client that nobody named at the start comes to be enrolled.

use std::time::Duration;

use d2tp_driver::HostKey;

use super::{ClientStore, checked_name, unix_seconds};
use crate::client_limits::ClientLimits;
use crate::client_records::{EnrolledClient, OpenInvitation, StoredInvitation};
use crate::client_store_error::ClientStoreError;
use crate::invitation::InvitationSecret;
use crate::link_keys::{LINK_CLIENT_ID_BYTES, link_client_id, link_client_key};
use crate::refusal::ProxRefusal;

/// Clients that invitations can enrol.
const CLIENTS_MAX: usize = 100_000; // a guess: more are no longer enrolled one by one
/// Invitations that can be open at the same time.
const INVITATIONS_MAX: usize = 1_000; // a guess: 200 bytes each, and each request compares all
/// How long a used or expired invitation is remembered, so that a device that shows it gets the
/// reason.
const REMEMBERED: Duration = Duration::from_secs(24 * 3600);

impl ClientStore {
    /// Whether an invitation is open, so that unknown devices may ask to be enrolled.
    pub fn is_inviting(&self) -> bool {
        let now_s = unix_seconds();
        let state = self.state.lock();
        state.stored.invitations.iter().any(|i| i.is_open(now_s))
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

    /// The client of links with this name, which is made if there is none.
    ///
    /// # Errors
    /// The name will not do or is a device's, there are too many clients, or the file cannot be written.
    pub(crate) fn client_of_links(&self, name: &str) -> Result<EnrolledClient, ClientStoreError> {
        let name = checked_name(name)?;
        let mut id = [0; LINK_CLIENT_ID_BYTES];
        getrandom::fill(&mut id).expect("the system has randomness");
        let new = EnrolledClient {
            name: name.clone(),
            key: link_client_key(id),
            enrolled_s: unix_seconds(),
            seen_s: None,
            limits: ClientLimits::default(),
        };
        self.change(|stored| {
            let known = stored.clients.values().find(|known| known.name == name);
            match known {
                Some(known) if link_client_id(&known.key).is_some() => Ok(known.clone()),
                Some(_) => Err(ClientStoreError::NotOfLinks(name.clone())),
                None if stored.clients.len() >= CLIENTS_MAX => Err(ClientStoreError::ClientsFull),
                None => {
                    stored.clients.insert(new.key, new.clone());
                    Ok(new.clone())
                }
            }
        })
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client_store::FILE_NAME;
    use crate::client_store::tests::{HOUR, store};

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
}
