//! Files in a folder where other users may write too, as `/tmp` is.
//!
//! A user who knows the name of the next file can create something else there first: a symbolic
//! link, so that its target is overwritten; a second name of another file; or their own file, which
//! they can still change after its digest was checked. So a file that exists is used only if it is
//! a regular file of this user with one name, and links are not followed.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::libc::{ELOOP, O_NOFOLLOW, O_NONBLOCK};
use nix::unistd::geteuid;

/// Opens a file of this user for reading and writing, or creates it as the umask allows.
///
/// # Errors
/// From the disk; `InvalidInput`, with a sentence, if something else lies there.
pub(super) fn open_or_create(path: &Path) -> io::Result<File> {
    loop {
        match open(path, true) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            opened => return opened,
        }
        match create_new(path) {
            // Somebody was faster: what they made is looked at.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => return created,
        }
    }
}

/// Creates a file in place of whatever has this name. Nothing is followed and nothing opened.
///
/// # Errors
/// From the disk.
pub(super) fn create_fresh(path: &Path) -> io::Result<File> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => create_new(path),
    }
}

/// The content of a file of this user.
///
/// # Errors
/// As [`open_or_create`], and `NotFound`.
pub(super) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path, false)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Opens a file of this user for reading.
///
/// # Errors
/// As [`open_or_create`], and `NotFound`.
pub(super) fn open_existing(path: &Path) -> io::Result<File> {
    open(path, false)
}

fn create_new(path: &Path) -> io::Result<File> {
    // O_EXCL follows no link (open(2)).
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).open(path)
}

fn open(path: &Path, write: bool) -> io::Result<File> {
    let opened = OpenOptions::new()
        .read(true)
        .write(write)
        // A FIFO does not hold us up.
        .custom_flags(O_NOFOLLOW | O_NONBLOCK)
        .open(path);
    let file = opened.map_err(|error| match error.raw_os_error() {
        Some(ELOOP) => foreign("a symbolic link"),
        _ => error,
    })?;
    match foreign_kind(&file.metadata()?, geteuid().as_raw()) {
        Some(kind) => Err(foreign(kind)),
        None => Ok(file),
    }
}

/// What makes a file one that is not used; none for a regular file of `user` with one name.
fn foreign_kind(about: &Metadata, user: u32) -> Option<&'static str> {
    if !about.is_file() {
        return (!about.is_dir()).then_some("not a regular file");
    }
    match (about.uid() == user, about.nlink()) {
        (false, _) => Some("a file of another user"),
        (true, 0 | 1) => None,
        (true, _) => Some("a file with a second name (a hard link)"),
    }
}

fn foreign(kind: &str) -> io::Error {
    let text = format!("{kind} lies there");
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn refusal(path: &Path) -> String {
        let error = open_or_create(path).expect_err("something else lies there");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
        error.to_string()
    }

    #[test]
    fn links_and_what_is_no_file_are_neither_followed_nor_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("precious"), "precious").unwrap();
        symlink(path("precious"), path("link")).unwrap();
        assert!(refusal(&path("link")).contains("symbolic link"));
        symlink(path("nothing"), path("dangling")).unwrap();
        assert!(refusal(&path("dangling")).contains("symbolic link"));
        assert!(!path("nothing").exists());
        std::fs::hard_link(path("precious"), path("second")).unwrap();
        assert!(refusal(&path("second")).contains("second name"));
        nix::unistd::mkfifo(&path("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(refusal(&path("fifo")).contains("not a regular file"));
        assert_eq!(std::fs::read(path("precious")).unwrap(), b"precious");
    }

    #[test]
    fn a_file_of_another_user_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let file = open_or_create(&folder.path().join("a")).unwrap();
        let about = file.metadata().unwrap();
        assert_eq!(foreign_kind(&about, about.uid()), None);
        let other = foreign_kind(&about, about.uid() + 1);
        assert_eq!(other, Some("a file of another user"));
    }

    #[test]
    fn a_fresh_file_replaces_a_link_and_leaves_its_target() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("precious"), "precious").unwrap();
        symlink(path("precious"), path("link")).unwrap();
        create_fresh(&path("link")).unwrap();
        assert!(std::fs::symlink_metadata(path("link")).unwrap().is_file());
        assert_eq!(std::fs::read(path("precious")).unwrap(), b"precious");
    }
}
