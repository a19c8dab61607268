//! The token that a PUT without an agent has with its proxy, stored for the next process.
//!
//! ```text
//!  cedos put ── ticket of (request, digest) in the state folder, locked ──▶ answered: removed
//!      └─ killed: the file stays, its lock does not ──▶ the same put again takes it up
//! ```
//!
//! The token itself is random: a put that was answered and one that follows it are two uploads, even
//! if the proxy has not yet heard that the first is over.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sha2::{Digest, Sha256};

/// The age after which a ticket is useless: no proxy keeps an upload that long.
const AGE_MAX: Duration = Duration::from_secs(7 * 24 * 3600);

/// A new token by which the proxy recognises an upload.
pub fn new_token() -> String {
    let mut bytes = [0; 16];
    aws_lc_rs::rand::fill(&mut bytes).expect("the system has random numbers");
    hex::encode(bytes)
}

/// A token, and the file that stores it, if there is one.
pub(super) struct UploadTicket {
    pub(super) token: String,
    kept: Option<TicketFile>,
    /// The file whose presence says that all of a POST was sent once, for the next process with the same token.
    sent: Option<PathBuf>,
}

struct TicketFile {
    path: PathBuf,
    /// The lock of the file, so that no other process sends the same upload.
    _file: File,
}

impl UploadTicket {
    /// A ticket with a token that the caller stores.
    pub(super) fn from_token(token: String) -> UploadTicket {
        UploadTicket {
            token,
            kept: None,
            sent: None,
        }
    }

    /// A ticket for a POST with a token that the caller stores. Whether it was sent is stored in `folder`.
    pub(super) fn for_post(token: String, folder: Option<&Path>) -> UploadTicket {
        let name = hex::encode(&Sha256::digest(format!("sent {token}"))[..16]);
        UploadTicket {
            sent: folder.map(|folder| folder.join(name)),
            ..UploadTicket::from_token(token)
        }
    }

    /// Whether all of the POST was sent once, by this process or by one before.
    pub(super) fn is_sent(&self) -> bool {
        self.sent.as_ref().is_some_and(|path| path.exists())
    }

    /// Stores that all of the POST is about to be sent.
    pub(super) fn set_sent(&self) -> io::Result<()> {
        let Some(path) = &self.sent else {
            return Ok(());
        };
        let folder = path.parent().expect("a file in a folder");
        fs::create_dir_all(folder)?;
        sweep(folder);
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true).truncate(false);
        options.mode(0o600).open(path)?.sync_all()
    }

    /// Loads the ticket of `identity`, or creates one. If it cannot be stored, or another process is
    /// sending the same upload, the ticket is for this process alone.
    pub(super) fn load_or_create(folder: Option<&Path>, identity: &str) -> UploadTicket {
        let taken = folder.and_then(|folder| UploadTicket::taken_up(folder, identity).ok());
        taken.unwrap_or_else(|| UploadTicket::from_token(new_token()))
    }

    fn taken_up(folder: &Path, identity: &str) -> io::Result<UploadTicket> {
        fs::create_dir_all(folder)?;
        sweep(folder);
        let path = folder.join(hex::encode(&Sha256::digest(identity)[..16]));
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)?;
        file.try_lock()?;
        if !is_there(&path, &file) {
            // It was answered between our opening and our locking it.
            return Err(io::ErrorKind::NotFound.into());
        }
        let fresh = new_token();
        let mut token = String::new();
        file.read_to_string(&mut token)?;
        let is_whole = token.len() == fresh.len() && token.bytes().all(|b| b.is_ascii_hexdigit());
        if !is_whole {
            file.set_len(0)?;
            io::Seek::rewind(&mut file)?;
            file.write_all(fresh.as_bytes())?;
            token = fresh;
        }
        let kept = Some(TicketFile { path, _file: file });
        Ok(UploadTicket {
            token,
            kept,
            sent: None,
        })
    }

    /// Removes the ticket of a finished upload: the next one with the same identity gets a new one.
    pub(super) fn remove(&self) {
        if let Some(kept) = &self.kept {
            let _ = fs::remove_file(&kept.path);
        }
        if let Some(sent) = &self.sent {
            let _ = fs::remove_file(sent);
        }
    }
}

fn is_there(path: &Path, file: &File) -> bool {
    use std::os::unix::fs::MetadataExt;
    let identity = |about: fs::Metadata| (about.dev(), about.ino());
    let there = fs::metadata(path).map(identity).ok();
    there.is_some() && there == file.metadata().map(identity).ok()
}

/// Removes old tickets.
fn sweep(folder: &Path) {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    for entry in entries {
        let age = entry.metadata().ok().and_then(|about| {
            let age = about.modified().ok()?.elapsed();
            age.ok()
        });
        if age.is_some_and(|age| age > AGE_MAX) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_stays_until_it_is_spent_and_is_one_processes_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let take = |what| UploadTicket::load_or_create(Some(folder.path()), what);
        let first = take("a");
        let beside = take("a");
        assert_ne!(first.token, beside.token, "two at once are two uploads");
        assert_ne!(first.token, take("b").token);
        let token = first.token.clone();
        drop(first);
        let again = take("a");
        assert_eq!(again.token, token);
        again.remove();
        drop(again);
        assert_ne!(take("a").token, token);
    }

    #[test]
    fn that_a_post_was_sent_is_known_to_the_next_process_with_its_token() {
        let folder = tempfile::tempdir().unwrap();
        let of = |token: &str| UploadTicket::for_post(token.into(), Some(folder.path()));
        assert!(!of("a").is_sent());
        of("a").set_sent().unwrap();
        assert!(of("a").is_sent() && !of("b").is_sent());
        of("a").remove();
        assert!(!of("a").is_sent());
        let nowhere = UploadTicket::for_post("a".into(), None);
        nowhere.set_sent().unwrap();
        assert!(!nowhere.is_sent());
    }

    #[test]
    fn what_is_damaged_old_or_has_no_place_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let take = |what| UploadTicket::load_or_create(Some(folder.path()), what);
        let token = take("a").token;
        let path = fs::read_dir(folder.path()).unwrap().next().unwrap();
        let path = path.unwrap().path();
        fs::write(&path, &token[..7]).unwrap();
        let new = take("a").token;
        assert_eq!(new.len(), token.len());
        assert_ne!(new, token);
        assert_eq!(fs::read_to_string(&path).unwrap(), new);

        let old = std::time::SystemTime::now() - 2 * AGE_MAX;
        let file = File::options().write(true).open(&path).unwrap();
        file.set_modified(old).unwrap();
        drop(file);
        assert_ne!(take("a").token, new);

        let nowhere = folder.path().join("file");
        fs::write(&nowhere, "").unwrap();
        assert!(
            UploadTicket::load_or_create(Some(&nowhere), "a")
                .kept
                .is_none()
        );
        assert!(UploadTicket::load_or_create(None, "a").kept.is_none());
    }
}
