//! The identity of this process: the device's key file, which `cedos` also uses.
//!
//! The file is `$CEDOS_KEY_FILE`, else that of the settings, else `cedos/key` in the user's configuration folder. It is
//! created at first use, with one line of base64url, readable only by its owner.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use d2tp_driver::SecretKey;

use crate::errno::SocketFault;
use crate::settings_file;

/// The largest key file: a key is one line, so a larger file is something else.
const KEY_FILE_BYTES_MAX: u64 = 256;

/// The key of this process.
///
/// # Errors
/// ENOKEY: the file cannot be read or created, is readable by others, or does not contain a key.
pub(crate) fn key() -> Result<SecretKey, SocketFault> {
    read(&file()?)
}

/// The path of the key file, which is created if necessary.
///
/// # Errors
/// ENOKEY: the file cannot be created, or its location is unknown.
pub(crate) fn file() -> Result<PathBuf, SocketFault> {
    let said = std::env::var_os("CEDOS_KEY_FILE").filter(|path| !path.is_empty());
    if let Some(path) = said {
        return std::path::absolute(&path).map_err(no_key);
    }
    if let Some(path) = settings_file::key_file()? {
        if let Ok(false) = path.try_exists() {
            make(&path)?;
        }
        return std::path::absolute(&path).map_err(no_key);
    }
    let path = default_file()?;
    if let Ok(false) = path.try_exists() {
        make(&path)?;
    }
    Ok(path)
}

fn no_key(text: impl std::fmt::Display) -> SocketFault {
    SocketFault::new(libc::ENOKEY, text)
}

fn default_file() -> Result<PathBuf, SocketFault> {
    // XDG Base Directory Specification: relative paths must be ignored.
    let folder = |name: &str| {
        let path = PathBuf::from(std::env::var_os(name)?);
        path.is_absolute().then_some(path)
    };
    folder("XDG_CONFIG_HOME")
        .or_else(|| Some(folder("HOME")?.join(".config")))
        .map(|config| config.join("cedos").join("key"))
        .ok_or_else(|| no_key("no place for a key: set HOME or CEDOS_KEY_FILE"))
}

pub(crate) fn read(path: &Path) -> Result<SecretKey, SocketFault> {
    let shown = path.display();
    let file = File::open(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => no_key(format!(
            "{shown} is not there; `cedos key gen -o {shown}` makes one"
        )),
        _ => no_key(format!("{shown}: {error}")),
    })?;
    let mode = file.metadata().map_or(0, |m| m.permissions().mode());
    if mode & 0o077 != 0 {
        return Err(no_key(format!("{shown} can be read by others: chmod 600")));
    }
    let mut text = String::new();
    let read = file.take(KEY_FILE_BYTES_MAX).read_to_string(&mut text);
    read.map_err(|error| no_key(format!("{shown}: {error}")))?;
    SecretKey::from_text(text.trim_end()).map_err(|_| no_key(format!("{shown} is not a key file")))
}

fn make(path: &Path) -> Result<SecretKey, SocketFault> {
    let failed = |error: std::io::Error| no_key(format!("{}: {error}", path.display()));
    if let Some(folder) = path.parent() {
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700);
        builder.create(folder).map_err(failed)?;
    }
    let mut secret = [0; 32];
    aws_lc_rs::rand::fill(&mut secret).map_err(|_| no_key("the system has no randomness"))?;
    let key = SecretKey::from_bytes(secret);
    // The file appears complete or not at all, because another process may read it now.
    let fresh = path.with_extension(format!("new-{}", std::process::id()));
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&fresh)
        .and_then(|mut file| {
            file.write_all(format!("{}\n", key.to_text()).as_bytes())?;
            file.sync_all()
        })
        .and_then(|()| std::fs::hard_link(&fresh, path));
    let _ = std::fs::remove_file(&fresh);
    match written {
        Ok(()) => Ok(key),
        // Another process was faster. Both have the same device key.
        Err(error) if error.kind() == ErrorKind::AlreadyExists => read(path),
        Err(error) => Err(failed(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_made_once_and_only_its_owner_may_read_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cedos").join("key");
        let made = make(&path).unwrap();
        assert_eq!(read(&path).unwrap().to_bytes(), made.to_bytes());
        assert_eq!(make(&path).unwrap().to_bytes(), made.to_bytes());
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert!(read(&path).unwrap_err().text.contains("chmod 600"));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::write(&path, "no key").unwrap();
        assert_eq!(read(&path).unwrap_err().errno, libc::ENOKEY);
    }
}
