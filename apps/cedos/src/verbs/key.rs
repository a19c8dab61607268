//! `cedos key`: the keys hosts are known by.
//!
//! A key file holds a 32-byte X25519 private key as one line of base64url, readable by its owner
//! only. The public key is what others write down: in `d2tp://host:port/KEY` and after
//! `--allow-client`.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use aws_lc_rs::agreement::{PrivateKey, X25519};
use aws_lc_rs::encoding::{AsBigEndian, Curve25519SeedBin};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use clap::{Args, Subcommand};

/// Permissions of a key file: read and write for its owner.
const KEY_FILE_MODE: u32 = 0o600;
/// A key file is one line; more is some other file.
const KEY_FILE_BYTES_MAX: u64 = 256;

/// `cedos key …`
#[derive(Debug, Args)]
pub struct KeyArgs {
    #[command(subcommand)]
    verb: KeyVerb,
}

#[derive(Debug, Subcommand)]
enum KeyVerb {
    /// Make a new private key and print its public key
    Gen {
        /// Where to write it; without this the private key goes to stdout, the public one to stderr
        #[arg(short, long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Print the public key of a private key file
    Show {
        /// The private key file
        file: PathBuf,
    },
}

/// A private key. Not printable by accident.
pub struct SecretKey([u8; 32]);

impl SecretKey {
    /// A new random key.
    ///
    /// # Errors
    /// When the system has no randomness to give.
    pub fn generate() -> anyhow::Result<SecretKey> {
        let key = PrivateKey::generate(&X25519).context("no randomness from the system")?;
        let seed: Curve25519SeedBin<'_> = key.as_be_bytes().context("X25519 key cannot be read")?;
        let bytes = seed
            .as_ref()
            .try_into()
            .context("X25519 key is not 32 bytes")?;
        Ok(SecretKey(bytes))
    }

    /// The bytes, for the transport.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The public key.
    ///
    /// # Errors
    /// When the bytes are no X25519 key.
    pub fn public(&self) -> anyhow::Result<[u8; 32]> {
        let key = PrivateKey::from_private_key(&X25519, &self.0).context("not an X25519 key")?;
        let public = key.compute_public_key().context("not an X25519 key")?;
        public
            .as_ref()
            .try_into()
            .context("X25519 public key is not 32 bytes")
    }

    /// Reads a key file.
    ///
    /// # Errors
    /// When it cannot be read, is readable by others, or is not a key.
    pub fn read(path: &Path) -> anyhow::Result<SecretKey> {
        let shown = path.display();
        let file = std::fs::File::open(path).with_context(|| {
            format!("cannot open {shown}; `cedos key gen -o {shown}` makes one")
        })?;
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
        match cedos_prox::parse_key(text.trim_end()) {
            Ok(bytes) => Ok(SecretKey(bytes)),
            Err(_) => {
                bail!("{shown} is not a key file: expected one line of 43 base64url characters")
            }
        }
    }

    /// Writes a new key file. Never overwrites: a lost key is a lost identity.
    ///
    /// # Errors
    /// When the file exists or cannot be written.
    pub fn write_new(&self, path: &Path) -> anyhow::Result<()> {
        let shown = path.display();
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(KEY_FILE_MODE)
            .open(path)
            .with_context(|| {
                format!("cannot create {shown}; an existing file is never overwritten")
            })?;
        file.write_all(self.text().as_bytes())?;
        file.sync_all()
            .with_context(|| format!("cannot write {shown}"))
    }

    fn text(&self) -> String {
        format!("{}\n", URL_SAFE_NO_PAD.encode(self.0))
    }
}

/// Runs `cedos key`.
///
/// # Errors
/// When a file cannot be read or written, or is not a key.
pub fn run(args: &KeyArgs) -> anyhow::Result<()> {
    match &args.verb {
        KeyVerb::Gen { out: Some(path) } => {
            let key = SecretKey::generate()?;
            key.write_new(path)?;
            println!("{}", cedos_prox::show_key(&key.public()?));
        }
        KeyVerb::Gen { out: None } => {
            let key = SecretKey::generate()?;
            print!("{}", key.text());
            eprintln!("public key: {}", cedos_prox::show_key(&key.public()?));
        }
        KeyVerb::Show { file } => {
            println!(
                "{}",
                cedos_prox::show_key(&SecretKey::read(file)?.public()?)
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_file_is_private_and_gives_the_same_key_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let key = SecretKey::generate().unwrap();
        key.write_new(&path).unwrap();
        assert_eq!(
            std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        let again = SecretKey::read(&path).unwrap();
        assert_eq!(again.bytes(), key.bytes());
        assert_eq!(again.public().unwrap(), key.public().unwrap());
    }

    #[test]
    fn an_existing_file_is_never_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        std::fs::write(&path, "precious").unwrap();
        assert!(SecretKey::generate().unwrap().write_new(&path).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn a_file_that_others_can_read_and_one_that_is_no_key_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        SecretKey::generate().unwrap().write_new(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert!(
            SecretKey::read(&path)
                .err()
                .unwrap()
                .to_string()
                .contains("chmod 600")
        );
        std::fs::write(&path, "no key").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert!(
            SecretKey::read(&path)
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
        let alice = SecretKey(hex(
            "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a",
        ));
        let public = hex("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a");
        assert_eq!(alice.public().unwrap(), public);
    }
}
