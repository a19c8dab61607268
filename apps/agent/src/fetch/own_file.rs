//! Files in a folder where other users may write too, as `/tmp` is.
//!
//! A user who knows the name of the next file can create something else there first: a symbolic
//! link, so that its target is overwritten; a second name of another file; or their own file, which
//! they can still change after its digest was checked. So a file that exists is used only if it is
//! a regular file of this user with one name, and links are not followed.

use std::fs::{DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::libc::{ELOOP, ENOTDIR, O_DIRECTORY, O_NOFOLLOW};
use nix::unistd::geteuid;
use rustix::fs::{AtFlags, CWD, Mode, OFlags};

/// Opens a file of this user for reading and writing, or creates it as the umask allows.
///
/// # Errors
/// From the disk; `InvalidInput`, with a sentence, if something else lies there.
pub(crate) fn open_or_create(path: &Path) -> io::Result<File> {
    open_or_create_at(CWD, path, AS_UMASK_ALLOWS)
}

/// Creates a file in place of whatever has this name. Nothing is followed and nothing opened.
///
/// # Errors
/// From the disk.
pub(crate) fn create_fresh(path: &Path) -> io::Result<File> {
    create_fresh_at(CWD, path, AS_UMASK_ALLOWS)
}

/// The content of a file of this user.
///
/// # Errors
/// As [`open_or_create`], and `NotFound`.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    read_at(CWD, path)
}

/// Opens a file of this user for reading.
///
/// # Errors
/// As [`open_or_create`], and `NotFound`.
pub(crate) fn open_existing(path: &Path) -> io::Result<File> {
    open_at(CWD, path, OFlags::RDONLY)
}

/// Replaces a file as a whole, by one for this user alone. What has its name before is not followed.
///
/// # Errors
/// From the disk; then the file is as before.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_at(CWD, path, bytes)
}

/// A folder of this user, with files for this user alone. It is held open, so that its files are found in it even if
/// something else has its name by now.
#[derive(Debug)]
pub(crate) struct OwnFolder(File);

impl OwnFolder {
    /// Opens a folder of this user, or creates it for this user alone.
    ///
    /// # Errors
    /// From the disk; `InvalidInput`, with a sentence, if something else lies there.
    pub(crate) fn open_or_create(path: &Path) -> io::Result<OwnFolder> {
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700).create(path)?;
        OwnFolder::open(path)
    }

    /// Opens a folder of this user.
    ///
    /// # Errors
    /// As [`OwnFolder::open_or_create`], and `NotFound`.
    pub(crate) fn open(path: &Path) -> io::Result<OwnFolder> {
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(O_NOFOLLOW | O_DIRECTORY)
            .open(path);
        let folder = opened.map_err(|error| match error.raw_os_error() {
            Some(ELOOP | ENOTDIR) => foreign("a symbolic link, or no folder,"),
            _ => error,
        })?;
        match foreign_folder(&folder.metadata()?, geteuid().as_raw()) {
            Some(kind) => Err(foreign(kind)),
            None => Ok(OwnFolder(folder)),
        }
    }

    /// Opens a file of this folder for reading and writing, or creates it for this user alone.
    ///
    /// # Errors
    /// As [`open_or_create`].
    pub(crate) fn open_or_create_file(&self, name: &str) -> io::Result<File> {
        open_or_create_at(self.0.as_fd(), Path::new(name), OWNER_ALONE)
    }

    /// Opens a file of this folder for reading.
    ///
    /// # Errors
    /// As [`open_existing`].
    pub(crate) fn open_file(&self, name: &str) -> io::Result<File> {
        open_at(self.0.as_fd(), Path::new(name), OFlags::RDONLY)
    }

    /// The content of a file of this folder.
    ///
    /// # Errors
    /// As [`read`].
    pub(crate) fn read_file(&self, name: &str) -> io::Result<Vec<u8>> {
        read_at(self.0.as_fd(), Path::new(name))
    }

    /// Replaces a file of this folder as a whole.
    ///
    /// # Errors
    /// As [`replace`].
    pub(crate) fn replace_file(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        replace_at(self.0.as_fd(), Path::new(name), bytes)
    }
}

/// The mode of files that others may read if the umask lets them.
const AS_UMASK_ALLOWS: Mode = Mode::from_raw_mode(0o666);
/// The mode of files that nobody else may read.
const OWNER_ALONE: Mode = Mode::from_raw_mode(0o600);

fn open_or_create_at(folder: BorrowedFd<'_>, path: &Path, mode: Mode) -> io::Result<File> {
    loop {
        match open_at(folder, path, OFlags::RDWR) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            opened => return opened,
        }
        match create_new_at(folder, path, mode) {
            // Somebody was faster: what they made is looked at.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => return created,
        }
    }
}

fn create_fresh_at(folder: BorrowedFd<'_>, path: &Path, mode: Mode) -> io::Result<File> {
    match rustix::fs::unlinkat(folder, path, AtFlags::empty()) {
        Err(error) if error != rustix::io::Errno::NOENT => Err(error.into()),
        _ => create_new_at(folder, path, mode),
    }
}

fn read_at(folder: BorrowedFd<'_>, path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_at(folder, path, OFlags::RDONLY)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn replace_at(folder: BorrowedFd<'_>, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let fresh: PathBuf = path.with_extension("new");
    let written: io::Result<()> = (|| {
        let mut file = create_fresh_at(folder, &fresh, OWNER_ALONE)?;
        file.write_all(bytes)?;
        file.sync_data()?;
        rustix::fs::renameat(folder, &fresh, folder, path)?;
        Ok(())
    })();
    if written.is_err() {
        // A half-written file is of no use.
        let _ = rustix::fs::unlinkat(folder, &fresh, AtFlags::empty());
    }
    written
}

fn create_new_at(folder: BorrowedFd<'_>, path: &Path, mode: Mode) -> io::Result<File> {
    // O_EXCL follows no link (open(2)).
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(folder, path, flags, mode)?.into())
}

fn open_at(folder: BorrowedFd<'_>, path: &Path, access: OFlags) -> io::Result<File> {
    // A FIFO does not hold us up.
    let flags = access | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = rustix::fs::openat(folder, path, flags, Mode::empty());
    let file = File::from(opened.map_err(|error| match error {
        rustix::io::Errno::LOOP => foreign("a symbolic link"),
        _ => error.into(),
    })?);
    match foreign_kind(&file.metadata()?, geteuid().as_raw()) {
        Some(kind) => Err(foreign(kind)),
        None => Ok(file),
    }
}

/// What makes a folder one that is not used; none for a folder of `user`.
fn foreign_folder(about: &Metadata, user: u32) -> Option<&'static str> {
    (about.uid() != user).then_some("a folder of another user")
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
    fn a_folder_of_another_user_or_behind_a_link_is_not_used() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        let folder = OwnFolder::open_or_create(&path("a")).unwrap();
        let about = folder.0.metadata().unwrap();
        assert_eq!(about.mode() & 0o777, 0o700);
        assert_eq!(foreign_folder(&about, about.uid()), None);
        let other = foreign_folder(&about, about.uid() + 1);
        assert_eq!(other, Some("a folder of another user"));
        symlink(path("a"), path("link")).unwrap();
        std::fs::write(path("file"), "").unwrap();
        for name in ["link", "file"] {
            let error = OwnFolder::open(&path(name)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{name}: {error}");
        }
        assert!(OwnFolder::open_or_create(&path("link")).is_err());
    }

    #[test]
    fn root_uses_no_file_and_no_folder_of_a_real_other_user() {
        if !geteuid().is_root() {
            return eprintln!("skipped: only root gives files away");
        }
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        std::fs::write(path("a.part"), "theirs").unwrap();
        std::fs::create_dir(path("folder")).unwrap();
        for name in ["a.part", "folder"] {
            std::os::unix::fs::chown(path(name), Some(65534), None).unwrap();
        }
        assert!(refusal(&path("a.part")).contains("of another user"));
        assert!(read(&path("a.part")).is_err());
        let error = OwnFolder::open_or_create(&path("folder")).unwrap_err();
        assert!(error.to_string().contains("of another user"), "{error}");
        // What replaces it is ours.
        replace(&path("a.part"), b"ours").unwrap();
        assert_eq!(read(&path("a.part")).unwrap(), b"ours");
    }

    #[test]
    fn files_of_a_folder_stay_in_it_when_something_else_takes_its_name() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        let folder = OwnFolder::open_or_create(&path("a")).unwrap();
        std::fs::rename(path("a"), path("moved")).unwrap();
        std::fs::create_dir(path("precious")).unwrap();
        std::fs::write(path("precious/note"), "precious").unwrap();
        symlink(path("precious"), path("a")).unwrap();
        folder.replace_file("note", b"new").unwrap();
        assert_eq!(folder.read_file("note").unwrap(), b"new");
        assert_eq!(std::fs::read(path("moved/note")).unwrap(), b"new");
        assert_eq!(std::fs::read(path("precious/note")).unwrap(), b"precious");
    }

    #[test]
    fn what_replaces_a_file_follows_no_link_and_is_for_its_owner_alone() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        std::fs::write(path("precious"), "precious").unwrap();
        symlink(path("precious"), path("a.new")).unwrap();
        symlink(path("precious"), path("a.link")).unwrap();
        replace(&path("a.link"), b"new").unwrap();
        assert_eq!(std::fs::read(path("precious")).unwrap(), b"precious");
        let about = std::fs::symlink_metadata(path("a.link")).unwrap();
        assert!(about.is_file());
        assert_eq!(about.mode() & 0o777, 0o600);
        assert!(!path("a.new").exists());
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
