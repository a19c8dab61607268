//! The offer that a code led to, kept by the receiver until it has the file: a code opens its mailbox once,
//! and an interrupted transfer goes on by the same code.
//!
//! ```text
//! $XDG_STATE_HOME/cedos/receive/HASH-OF-CODE.json   the FileOffer; its owner's alone
//! ```

use std::fs::{DirBuilder, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use cedos_agent::fetch::state_directory::state_directory;
use sha2::{Digest, Sha256};

use super::key_exchange::FileOffer;
use super::transfer_code::TransferCode;

/// How long an offer is kept that nobody takes up again.
const KEPT_FOR: Duration = Duration::from_secs(7 * 24 * 3600); // a guess: longer than senders wait

/// The place of one code's offer.
pub struct AcceptedOffer {
    path: PathBuf,
}

impl AcceptedOffer {
    /// The place of this code's offer. Offers that are too old are removed.
    ///
    /// # Errors
    /// There is no place for state.
    pub fn of(code: &TransferCode) -> anyhow::Result<AcceptedOffer> {
        let place = AcceptedOffer::in_folder(&state_directory()?.join("receive"), code);
        place.remove_old();
        Ok(place)
    }

    fn in_folder(folder: &Path, code: &TransferCode) -> AcceptedOffer {
        let hash = hex::encode(Sha256::digest(code.to_string()));
        AcceptedOffer {
            path: folder.join(format!("{}.json", &hash[..32])),
        }
    }

    fn remove_old(&self) {
        let folder = self.path.parent().expect("an offer is in a folder");
        let Ok(entries) = std::fs::read_dir(folder) else {
            return;
        };
        for entry in entries.flatten() {
            let written = entry.metadata().and_then(|about| about.modified());
            let age = written.map(|at| SystemTime::now().duration_since(at).unwrap_or_default());
            if age.is_ok_and(|age| age > KEPT_FOR) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }

    /// The offer, if an earlier run got it.
    pub fn read(&self) -> Option<FileOffer> {
        serde_json::from_slice(&std::fs::read(&self.path).ok()?).ok()
    }

    /// Keeps the offer.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, offer: &FileOffer) -> anyhow::Result<()> {
        let folder = self.path.parent().expect("an offer is in a folder");
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700).create(folder)?;
        let mut options = OpenOptions::new();
        let file = options.create(true).write(true).truncate(true).mode(0o600);
        file.open(&self.path)
            .and_then(|mut file| file.write_all(&serde_json::to_vec(offer)?))
            .with_context(|| format!("cannot write {}", self.path.display()))
    }

    /// Forgets the offer: the file is there.
    pub fn remove(&self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn an_offer_is_found_again_by_its_code_alone_until_it_is_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let code = TransferCode::new(7, [1, 2, 3]);
        let place = AcceptedOffer::in_folder(&folder.path().join("receive"), &code);
        assert_eq!(place.read(), None);
        let offer = FileOffer {
            key: "k".into(),
            token: "t".into(),
            name: "report.pdf".into(),
            bytes: 5,
            sha256: "s".into(),
        };
        place.write(&offer).expect("written");
        let mode = place.path.metadata().expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let other = TransferCode::new(7, [1, 2, 4]);
        let folder = folder.path().join("receive");
        assert_eq!(AcceptedOffer::in_folder(&folder, &other).read(), None);
        let again = AcceptedOffer::in_folder(&folder, &code);
        assert_eq!(again.read(), Some(offer));
        again.remove();
        assert_eq!(place.read(), None);
    }
}
