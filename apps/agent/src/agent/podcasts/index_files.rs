//! Files with an index of podcasts: the database that Podcast Index publishes, as it is or in its archive.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use cedos_readycast::{IndexImport, PodcastIndex};

use super::super::state::Agent;
use super::service::library_folder;
use crate::fetch::outcome::TransferFailure;

/// The maximum number of bytes of an unpacked database.
const DATABASE_BYTES_MAX: u64 = 64 << 30; // a guess: Podcast Index has 5 GB

/// The first bytes of a file that gzip compressed (RFC 1952 §2.3.1).
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// A database that was unpacked, removed when this is dropped.
struct UnpackedDatabase(PathBuf);

impl Drop for UnpackedDatabase {
    fn drop(&mut self) {
        // The next one takes its place in any case.
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Agent {
    /// Makes the index of podcasts from a file of Podcast Index.
    ///
    /// # Errors
    /// The file is none, or there is no room.
    pub(super) async fn import_index(&self, file: PathBuf) -> Result<IndexImport, TransferFailure> {
        // The folder is the library's.
        self.podcasts.library()?;
        let Ok(guard) = self.podcasts.importing.clone().try_lock_owned() else {
            return Err(TransferFailure::error(
                "an index is being made already; wait until it is there",
            ));
        };
        let work = move || {
            let _guard = guard;
            import(&file)
        };
        let importing = tokio::task::spawn_blocking(work).await;
        importing.map_err(|error| TransferFailure::error(error.to_string()))?
    }
}

fn import(file: &Path) -> Result<IndexImport, TransferFailure> {
    let folder = library_folder()?;
    let index = PodcastIndex::in_folder(&folder);
    let failed = |error: &dyn std::fmt::Display| {
        TransferFailure::error(format!("{}: {error}", file.display()))
    };
    let mut beginning = [0; 2];
    File::open(file)
        .and_then(|mut file| file.read_exact(&mut beginning))
        .map_err(|error| failed(&error))?;
    let unpacked = match beginning == GZIP {
        true => Some(unpack(file, &folder.join("index-source.db"))?),
        false => None,
    };
    let database = unpacked.as_ref().map_or(file, |database| &database.0);
    let imported = index.import(database);
    imported.map_err(|error| TransferFailure::error(error.to_string()))
}

/// Unpacks the database of an archive, its only file.
fn unpack(archive: &Path, database: &Path) -> Result<UnpackedDatabase, TransferFailure> {
    let by_hand = "unpack it with `tar -xzf`, and give the .db file in it";
    let failed = |why: &dyn std::fmt::Display| {
        let archive = archive.display();
        TransferFailure::error(format!("cannot unpack {archive}: {why}; {by_hand}"))
    };
    let unpacked = UnpackedDatabase(database.to_owned());
    let bytes = copy_first_file(archive, database).map_err(|error| failed(&error))?;
    match bytes {
        Some(bytes) if bytes < DATABASE_BYTES_MAX => Ok(unpacked),
        _ => Err(failed(&"it is damaged, or no archive")),
    }
}

/// Copies the first ordinary file of an archive. Returns its bytes; none if there is no such file.
fn copy_first_file(archive: &Path, to: &Path) -> io::Result<Option<u64>> {
    let compressed = io::BufReader::new(File::open(archive)?);
    let mut archive = tar::Archive::new(flate2::bufread::GzDecoder::new(compressed));
    for entry in archive.entries()? {
        let entry = entry?;
        if entry.header().entry_type().is_file() {
            let size = entry.header().size()?;
            let mut into = File::create(to)?;
            let bytes = io::copy(&mut entry.take(DATABASE_BYTES_MAX), &mut into)?;
            return Ok((bytes == size.min(DATABASE_BYTES_MAX)).then_some(bytes));
        }
    }
    Ok(None)
}
