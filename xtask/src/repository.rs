//! The repository's files.

use std::path::{Path, PathBuf};

use anyhow::Result;

/// The repository's top folder.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask/ is in the repository")
        .to_owned()
}

/// Options of the compiler, separated as `CARGO_ENCODED_RUSTFLAGS` wants it, by which no path of this machine is in what
/// is built from `folder`.
pub fn remapped_paths(folder: &Path) -> String {
    let home = std::env::var_os("HOME")
        .map(PathBuf::from)
        .unwrap_or_default();
    let cargo = std::env::var_os("CARGO_HOME").map_or_else(|| home.join(".cargo"), PathBuf::from);
    let remap = |from: &Path, to: &str| format!("--remap-path-prefix={}={to}", from.display());
    [remap(folder, "/cedos"), remap(&cargo, "/cargo")].join("\x1f")
}

/// Every file below `folder` with `extension`, sorted, without build output and hidden folders.
///
/// # Errors
/// When a folder cannot be read.
pub fn files_below(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let entry = entry?;
            let (path, name) = (entry.path(), entry.file_name());
            let hidden = name.to_string_lossy().starts_with('.');
            if entry.file_type()?.is_dir() {
                if !hidden && name != "target" {
                    folders.push(path);
                }
            } else if path.extension().is_some_and(|e| e == extension) {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}
