//! The directory for the state of this user's transfers that outlives their processes.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Serialize;

use crate::settings::UserSettings;

/// The directory for the state of this user's downloads that outlives them: the settings'
/// `directories.state`, else `$XDG_STATE_HOME/cedos`, else `~/.local/state/cedos`.
///
/// # Errors
/// The directory is not known, or the settings are not valid.
pub fn state_directory() -> anyhow::Result<PathBuf> {
    if let Some(path) = UserSettings::load(None)?.path("directories.state") {
        return Ok(path);
    }
    // XDG Base Directory Specification: a path that is not absolute is to be ignored.
    let absolute = |name: &str| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    absolute("XDG_STATE_HOME")
        .or_else(|| Some(absolute("HOME")?.join(".local/state")))
        .map(|state| state.join("cedos"))
        .context("no place for the state of downloads: set XDG_STATE_HOME or HOME")
}

/// Replaces a file of the state by a value in JSON. Only its owner can read it.
pub(crate) fn replace(path: &Path, what: &impl Serialize) -> io::Result<()> {
    let fresh = path.with_extension("new");
    let mut file = OpenOptions::new()
        .create(true)
        .write(true)
        .truncate(true)
        .mode(0o600)
        .open(&fresh)?;
    file.write_all(&serde_json::to_vec(what)?)?;
    std::fs::rename(&fresh, path)
}
