//! Where this user's transfers keep what outlives their processes.

use std::path::PathBuf;

use anyhow::Context;

/// Where this user's downloads keep what outlives them: `$XDG_STATE_HOME/cedos`, else
/// `~/.local/state/cedos`.
///
/// # Errors
/// Nobody says where.
pub fn state_directory() -> anyhow::Result<PathBuf> {
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
