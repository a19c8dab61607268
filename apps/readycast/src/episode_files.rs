//! Files of episodes, and the disks that they are on: what was removed is told from what is on a disk that is not
//! mounted.
//!
//! The file system of each file is kept. A file counts as removed only if its folder is there, on that file system. The
//! library reads no disk itself; the agent says what it saw.

use std::path::{Path, PathBuf};

use rusqlite::{OptionalExtension, params};

use crate::downloads::remove_file;
use crate::episode::{EpisodeId, EpisodeState};
use crate::episodes::found;
use crate::library::{Library, LibraryError};

/// The file of an episode that is ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadyFile {
    /// Number of the episode.
    pub episode: EpisodeId,
    /// Path of the file.
    pub file: PathBuf,
    /// The file system that it was seen on; none if it was not.
    pub file_system: Option<String>,
}

/// The disk that a folder of episodes is on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FolderMount {
    /// The file system of the folder.
    pub file_system: String,
    /// The file system that its mount point is on; that of the folder if it is below none.
    pub above: String,
}

impl FolderMount {
    /// Whether a folder that was on this disk is now where its mount point is: the disk is not mounted.
    pub fn is_absent(&self, now: &FolderMount) -> bool {
        self.file_system != self.above && now.file_system == self.above
    }
}

impl Library {
    /// Episodes that are ready, with their files.
    ///
    /// # Errors
    /// The database fails.
    pub fn ready_files(&self) -> Result<Vec<ReadyFile>, LibraryError> {
        let connection = self.lock();
        let mut query = connection.prepare_cached(
            "SELECT id, file, file_system FROM episodes WHERE state = ?1 AND state <> 0 AND file IS NOT NULL",
        )?;
        let rows = query.query_map([EpisodeState::Ready.number()], |row| {
            Ok(ReadyFile {
                episode: EpisodeId(row.get(0)?),
                file: PathBuf::from(row.get::<_, String>(1)?),
                file_system: row.get(2)?,
            })
        })?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    /// Files that episodes have, or of which their downloads that failed may have left a part.
    ///
    /// # Errors
    /// The database fails.
    pub fn known_files(&self) -> Result<Vec<(EpisodeId, PathBuf)>, LibraryError> {
        let connection = self.lock();
        let mut query =
            connection.prepare_cached("SELECT id, file FROM episodes WHERE file IS NOT NULL")?;
        let rows = query.query_map([], |row| {
            let file: String = row.get(1)?;
            Ok((EpisodeId(row.get(0)?), PathBuf::from(file)))
        })?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    /// Notes the file system that the file of an episode was seen on, unless the episode has another file by now.
    ///
    /// # Errors
    /// The database fails.
    pub fn note_file_system(
        &self,
        episode: EpisodeId,
        file: &Path,
        file_system: &str,
    ) -> Result<(), LibraryError> {
        self.lock().execute(
            "UPDATE episodes SET file_system = ?4 WHERE id = ?1 AND state = ?2 AND file = ?3",
            params![
                episode.0,
                EpisodeState::Ready.number(),
                file.to_string_lossy(),
                file_system,
            ],
        )?;
        Ok(())
    }

    /// Notes that somebody removed the file of an episode that is ready. One that has another file by now, or is fetched
    /// again, stays as it is.
    ///
    /// # Errors
    /// The database fails.
    pub fn note_missing(&self, episode: EpisodeId, file: &Path) -> Result<(), LibraryError> {
        let mut connection = self.lock();
        let transaction = connection.transaction()?;
        let is_same = transaction
            .query_row(
                "SELECT 1 FROM episodes WHERE id = ?1 AND state = ?2 AND file = ?3",
                params![
                    episode.0,
                    EpisodeState::Ready.number(),
                    file.to_string_lossy(),
                ],
                |_| Ok(()),
            )
            .optional()?;
        if is_same.is_some() {
            remove_file(&transaction, episode)?;
        }
        transaction.commit()?;
        Ok(())
    }

    /// The disk that a folder of episodes was seen on; none if it was not.
    ///
    /// # Errors
    /// The database fails.
    pub fn episode_folder(&self, folder: &Path) -> Result<Option<FolderMount>, LibraryError> {
        let found = self.lock().query_row(
            "SELECT file_system, above FROM episode_folders WHERE path = ?1",
            [folder.to_string_lossy()],
            |row| {
                Ok(FolderMount {
                    file_system: row.get(0)?,
                    above: row.get(1)?,
                })
            },
        );
        Ok(found.optional()?)
    }

    /// Notes the disk that a folder of episodes is on.
    ///
    /// # Errors
    /// The database fails.
    pub fn note_episode_folder(
        &self,
        folder: &Path,
        mount: &FolderMount,
    ) -> Result<(), LibraryError> {
        self.lock().execute(
            "INSERT INTO episode_folders (path, file_system, above) VALUES (?1, ?2, ?3)
             ON CONFLICT (path) DO UPDATE SET file_system = ?2, above = ?3",
            params![folder.to_string_lossy(), mount.file_system, mount.above],
        )?;
        Ok(())
    }

    /// Notes why the download of an episode does not begin yet, in a sentence. It is planned again.
    ///
    /// # Errors
    /// There is no such episode, or the database fails.
    pub fn note_waiting(&self, episode: EpisodeId, reason: &str) -> Result<(), LibraryError> {
        let changed = self.lock().execute(
            "UPDATE episodes SET problem = ?2 WHERE id = ?1",
            params![episode.0, reason],
        )?;
        found(changed, episode)
    }

    /// Notes that no download waits for its folder any longer.
    ///
    /// # Errors
    /// The database fails.
    pub fn end_waiting(&self) -> Result<(), LibraryError> {
        self.lock().execute(
            "UPDATE episodes SET problem = NULL WHERE state = ?1 AND problem IS NOT NULL",
            [EpisodeState::New.number()],
        )?;
        Ok(())
    }
}
