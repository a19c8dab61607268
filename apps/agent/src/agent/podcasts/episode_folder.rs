//! The folder of episodes: where it is, whether its disk is there, and which files in it somebody removed.
//!
//! ```text
//!  statvfs of the folder, or of what is left of its path ─┬─ the disk that it was on ──▶ new episodes go there
//!                                                         └─ that of its mount point ──▶ not mounted: they wait
//! ```
//!
//! A disk may not answer, so all calls are on threads for blocking calls, and no page waits for them.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cedos_readycast::{EpisodeId, FolderMount, Library, LibraryError, PlannedDownload};
use tokio::time::Instant;

use super::super::state::{Agent, lock};
use crate::fetch::filename;
use crate::fetch::outcome::TransferFailure;
use crate::settings::UserSettings;

/// The shortest interval between looks for files that somebody removed, while pages or commands show episodes.
const FILES_LOOK_EVERY: Duration = Duration::from_secs(3); // a guess: as often as pages look at what changed

/// The setting of the folder of episodes.
const DIRECTORY_SETTING: &str = "podcasts.directory";

/// Where new episodes go.
pub(super) enum NewEpisodesFolder {
    /// Into this folder, which may have to be made.
    Ready(PathBuf),
    /// Nowhere, because there is no such folder; in a sentence.
    Unknown(String),
    /// Nowhere until its disk is mounted; in a sentence.
    Absent(String),
}

impl Agent {
    /// Begins to look for files that somebody removed, unless that was done a moment ago. Nobody waits for it: the disk
    /// may be slow.
    pub(in super::super) fn look_for_missing_files(self: &Arc<Agent>) {
        {
            let mut look = lock(&self.podcasts.files_look);
            let is_recent = |at: Instant| at.elapsed() < FILES_LOOK_EVERY;
            if look.is_running || look.begun_at.is_some_and(is_recent) {
                return;
            }
            look.is_running = true;
            look.begun_at = Some(Instant::now());
        }
        let agent = self.clone();
        tokio::task::spawn_local(async move {
            let noted = agent.podcasts.with(note_missing_files).await;
            lock(&agent.podcasts.files_look).is_running = false;
            match noted {
                // Others may have room now.
                Ok(true) => agent.podcasts.changed(),
                Ok(false) => {}
                Err(failure) => {
                    tracing::warn!(error = failure.text, "files of episodes are not looked for");
                }
            }
        });
    }

    /// Where new episodes go now.
    ///
    /// # Errors
    /// The library's, in a sentence.
    pub(super) async fn new_episodes_folder(&self) -> Result<NewEpisodesFolder, TransferFailure> {
        let found = self.podcasts.with(|library| {
            let folder = match episodes_folder() {
                Ok(folder) => folder,
                Err(reason) => return Ok(NewEpisodesFolder::Unknown(reason)),
            };
            // Why it cannot be looked at is said when something is written into it.
            let Ok(mount) = mount_of(&folder) else {
                return Ok(NewEpisodesFolder::Ready(folder));
            };
            let known = library.episode_folder(&folder)?;
            let is_absent = known.as_ref().is_some_and(|known| known.is_absent(&mount));
            if is_absent && !has_ready_file(library, &folder)? {
                return Ok(NewEpisodesFolder::Absent(format!(
                    "{} is on a disk that is not mounted; the download waits for it, or for another folder \
                     (`cedos config set {DIRECTORY_SETTING} FOLDER`)",
                    folder.display()
                )));
            }
            if known.as_ref() != Some(&mount) {
                library.note_episode_folder(&folder, &mount)?;
            }
            library.end_waiting()?;
            Ok(NewEpisodesFolder::Ready(folder))
        });
        found.await
    }
}

/// Whether an episode's file is in this folder: a person who gave up a disk may have copied them.
fn has_ready_file(library: &Library, folder: &Path) -> Result<bool, LibraryError> {
    let ready = library.ready_files()?;
    let mut below = ready.iter().filter(|ready| ready.file.starts_with(folder));
    Ok(below.any(|ready| ready.file.exists()))
}

/// Notes which episodes somebody removed the files of, and which disks the others are on; returns whether any was
/// removed. A file whose folder is not there, or is not on the disk that the file was on, stays as it is: its disk may
/// not be mounted.
fn note_missing_files(library: &Library) -> Result<bool, LibraryError> {
    let mut is_any = false;
    let mut folders: BTreeMap<PathBuf, Option<String>> = BTreeMap::new();
    for ready in library.ready_files()? {
        let Some(folder) = ready.file.parent() else {
            continue;
        };
        let here = folders
            .entry(folder.to_owned())
            .or_insert_with(|| file_system_of(folder).ok());
        let Some(here) = here else {
            continue;
        };
        let is_same = ready.file_system.as_ref() == Some(here);
        // What cannot be looked at, as on a disk that does not answer, is not removed.
        match ready.file.try_exists() {
            Ok(true) if !is_same => {
                library.note_file_system(ready.episode, &ready.file, here)?;
            }
            Ok(false) if is_same => {
                library.note_missing(ready.episode, &ready.file)?;
                is_any = true;
            }
            _ => {}
        }
    }
    Ok(is_any)
}

/// What names the file system of a path: its own identifier, which many keep from mount to mount, else its device.
pub(super) fn file_system_of(path: &Path) -> io::Result<String> {
    match rustix::fs::statvfs(path)?.f_fsid {
        0 => Ok(format!("device {:x}", path.metadata()?.dev())),
        id => Ok(format!("{id:x}")),
    }
}

/// The disk of a path, or of what is left of it if it is not there.
pub(super) fn mount_of(path: &Path) -> io::Result<FolderMount> {
    let mut ancestors = path.ancestors().filter(|path| path.exists());
    let present = ancestors.next().unwrap_or(Path::new("/"));
    let file_system = file_system_of(present)?;
    let mut above = file_system.clone();
    for ancestor in ancestors {
        above = file_system_of(ancestor)?;
        if above != file_system {
            break;
        }
    }
    Ok(FolderMount { file_system, above })
}

/// The folder of all episodes: the setting, else `Podcasts` in the user's folder of music, else in the home.
///
/// # Errors
/// The user has no home; in a sentence.
pub(super) fn episodes_folder() -> Result<PathBuf, String> {
    let settings = UserSettings::load(None).map_err(|error| error.to_string())?;
    if let Some(folder) = settings.path(DIRECTORY_SETTING) {
        return match folder.is_absolute() {
            true => Ok(folder),
            false => Err(format!(
                "the setting {DIRECTORY_SETTING} does not begin at the root: {}",
                folder.display()
            )),
        };
    }
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let home = home.filter(|home| home.is_absolute()).ok_or_else(|| {
        format!("there is no place for episodes: set HOME, or {DIRECTORY_SETTING} in the settings")
    })?;
    Ok(music_folder(&home).unwrap_or(home).join("Podcasts"))
}

/// The folder of music that the desktop knows (xdg-user-dirs).
fn music_folder(home: &Path) -> Option<PathBuf> {
    let file = crate::settings::config_directory()
        .ok()?
        .join("user-dirs.dirs");
    let text = std::fs::read_to_string(file).ok()?;
    let line = text
        .lines()
        .find_map(|line| line.trim().strip_prefix("XDG_MUSIC_DIR="))?;
    let path = line.trim().trim_matches('"');
    let path = match path.strip_prefix("$HOME/") {
        Some(rest) => home.join(rest),
        None => PathBuf::from(path),
    };
    (path.is_absolute() && path.is_dir()).then_some(path)
}

/// The file of an episode in the folder of episodes, which nothing else has, and no other episode of these; its folder is
/// made. What an earlier attempt left is continued.
///
/// # Errors
/// A folder cannot be made; in a sentence.
pub(super) async fn episode_file(
    planned: &PlannedDownload,
    folder: PathBuf,
    taken: Arc<BTreeMap<PathBuf, EpisodeId>>,
) -> Result<PathBuf, String> {
    let planned = planned.clone();
    let found = tokio::task::spawn_blocking(move || free_file(&planned, &folder, &taken)).await;
    found.map_err(|error| error.to_string())?
}

fn free_file(
    planned: &PlannedDownload,
    folder: &Path,
    taken: &BTreeMap<PathBuf, EpisodeId>,
) -> Result<PathBuf, String> {
    let is_others = |path: &Path| {
        let owner = taken.get(path);
        owner.is_some_and(|owner| *owner != planned.episode)
    };
    let is_taken = |path: &Path| path.exists() || is_others(path);
    let make = |folder: &Path| {
        std::fs::create_dir_all(folder)
            .map_err(|error| format!("cannot make {}: {error}", folder.display()))
    };
    // Only below the present folder: the person may have chosen another one because that disk is full, or gone.
    let before = planned.file.as_ref();
    // The rule may choose another form of the episode by now.
    let ending = ending(planned);
    let is_its = |file: &&PathBuf| {
        file.starts_with(folder) && file.extension().is_some_and(|known| known == ending)
    };
    if let Some(file) = before.filter(|file| is_its(file) && !is_taken(file)) {
        make(file.parent().unwrap_or(Path::new("/")))?;
        return Ok(file.clone());
    }
    let channel = filename::from_title(&planned.channel_title);
    let folder = folder.join(channel);
    make(&folder)?;
    let day = planned.published.strftime("%Y-%m-%d");
    let title = filename::from_title(&planned.title);
    let name = format!("{day} {title}.{ending}");
    let file = folder.join(name);
    Ok(filename::free_path(&file, is_taken).unwrap_or(file))
}

/// The ending of an episode's file: that of its URL if it is one of audio or video, else by the media type.
fn ending(planned: &PlannedDownload) -> &'static str {
    const KNOWN: [&str; 12] = [
        "mp3", "m4a", "m4b", "aac", "ogg", "oga", "opus", "flac", "wav", "mp4", "m4v", "webm",
    ];
    let name = filename::from_url(&planned.source.url).to_lowercase();
    let by_url = name.rsplit_once('.').map(|(_, ending)| ending);
    if let Some(known) = KNOWN.into_iter().find(|known| by_url == Some(known)) {
        return known;
    }
    match planned.media_type.as_deref().unwrap_or_default() {
        "audio/mp4" | "audio/x-m4a" => "m4a",
        "audio/ogg" => "ogg",
        "audio/opus" => "opus",
        "audio/flac" => "flac",
        "audio/wav" | "audio/x-wav" => "wav",
        "video/mp4" => "mp4",
        "video/webm" => "webm",
        _ => "mp3",
    }
}
