//! The key files that identify hosts.
//!
//! A key file holds a 32-byte X25519 private key as one line of base64url, readable by its owner
//! only. The public key is what others write down: in `d2tp://host:port/KEY` and after
//! `--allow-client`.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use d2tp_session::SecretKey;

use crate::settings::{UserSettings, config_directory};

/// Permissions of a key file: read and write for its owner.
const KEY_FILE_MODE: u32 = 0o600;
/// The largest key file: a key is one line, so a larger file is something else.
const KEY_FILE_BYTES_MAX: u64 = 256;
/// Permissions of the folder of the default key file.
const KEY_FOLDER_MODE: u32 = 0o700;
/// The environment variable with the path of the device's key file, if `--key` is not given.
pub const KEY_FILE_VARIABLE: &str = "CEDOS_KEY_FILE";

/// A new random key.
///
/// # Errors
/// The system cannot provide random bytes.
pub fn generate() -> anyhow::Result<SecretKey> {
    let mut secret = [0; 32];
    aws_lc_rs::rand::fill(&mut secret)
        .map_err(|_| anyhow!("the system gives no random numbers"))?;
    Ok(SecretKey::from_bytes(secret))
}

/// Reads a key file.
///
/// # Errors
/// When it cannot be read, is readable by others, or is not a key.
pub fn read(path: &Path) -> anyhow::Result<SecretKey> {
    let shown = path.display();
    let file = std::fs::File::open(path)
        .with_context(|| format!("cannot open {shown}; `cedos key gen -o {shown}` makes one"))?;
    let mode = file.metadata()?.permissions().mode();
    if mode & 0o077 != 0 {
        bail!(
            "{shown} can be read by others (mode {:o}); chmod 600 {shown}",
            mode & 0o777
        );
    }
    let mut text = String::new();
    file.take(KEY_FILE_BYTES_MAX)
        .read_to_string(&mut text)
        .with_context(|| format!("cannot read {shown}"))?;
    SecretKey::from_text(text.trim_end()).map_err(|_| {
        anyhow!("{shown} is not a key file: expected one line of 43 base64url characters")
    })
}

/// Writes a new key file. Never overwrites: a lost key is a lost identity.
///
/// # Errors
/// When the file exists or cannot be written.
pub fn write_new(key: &SecretKey, path: &Path) -> anyhow::Result<()> {
    let shown = path.display();
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(KEY_FILE_MODE)
        .open(path)
        .map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => anyhow!(
                "{shown} exists, and a key is never overwritten; name another file, or remove that one"
            ),
            _ => anyhow!("cannot create {shown}: {error}"),
        })?;
    file.write_all(format!("{}\n", key.to_text()).as_bytes())?;
    file.sync_all()
        .with_context(|| format!("cannot write {shown}"))
}

/// The key file of this device: `$CEDOS_KEY_FILE`, else the settings' `device.key_file`, else
/// `cedos/key` in the user's folder of configuration.
///
/// # Errors
/// When the user has no such folder, or the settings make no sense.
pub fn device_key_path() -> anyhow::Result<PathBuf> {
    if let Some(path) = std::env::var_os(KEY_FILE_VARIABLE).filter(|path| !path.is_empty()) {
        return Ok(path.into());
    }
    if let Some(path) = UserSettings::load(None)?.path("device.key_file") {
        return Ok(path);
    }
    config_directory()
        .map(|config| config.join("cedos").join("key"))
        .context("no place for this device's key: set HOME, or name a file with --key")
}

/// This device's key; the default file is made on first use.
///
/// # Errors
/// As for [`read`] and [`write_new`].
pub fn load_device_key(named: Option<&Path>) -> anyhow::Result<SecretKey> {
    if let Some(path) = named {
        return read(path);
    }
    let path = device_key_path()?;
    if path.try_exists().unwrap_or(true) || std::env::var_os(KEY_FILE_VARIABLE).is_some() {
        return read(&path);
    }
    if let Some(folder) = path.parent() {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(KEY_FOLDER_MODE)
            .create(folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let key = generate()?;
    match write_new(&key, &path) {
        Ok(()) => Ok(key),
        // Another process made it meanwhile; both must be the same device.
        Err(error) if is_existing(&error) => read(&path),
        Err(error) => Err(error),
    }
}

fn is_existing(error: &anyhow::Error) -> bool {
    error
        .root_cause()
        .downcast_ref::<std::io::Error>()
        .is_some_and(|error| error.kind() == ErrorKind::AlreadyExists)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_file_is_private_and_gives_the_same_key_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let key = generate().unwrap();
        write_new(&key, &path).unwrap();
        assert_eq!(
            std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        let again = read(&path).unwrap();
        assert_eq!(again.to_bytes(), key.to_bytes());
        assert_eq!(again.public(), key.public());
    }

    #[test]
    fn an_existing_file_is_never_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        std::fs::write(&path, "precious").unwrap();
        assert!(write_new(&generate().unwrap(), &path).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn a_file_that_others_can_read_and_one_that_is_no_key_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        write_new(&generate().unwrap(), &path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert!(read(&path).err().unwrap().to_string().contains("chmod 600"));
        std::fs::write(&path, "no key").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert!(
            read(&path)
                .err()
                .unwrap()
                .to_string()
                .contains("not a key file")
        );
    }

    #[test]
    fn the_public_key_is_that_of_rfc_7748() {
        // RFC 7748 §6.1, Alice.
        let hex = |text: &str| -> [u8; 32] { hex::decode(text).unwrap().try_into().unwrap() };
        let alice = SecretKey::from_bytes(hex(
            "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a",
        ));
        let public = hex("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a");
        assert_eq!(alice.public().0, public);
    }
}
