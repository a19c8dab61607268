//! The library for LD_PRELOAD, in a file: written once and never removed, because programs that
//! outlive `cedos run` load it for each program that they start.
//!
//! It is in the first usable of these folders: `$XDG_RUNTIME_DIR/cedos`; `/run/cedos`, for root;
//! `$XDG_CACHE_HOME/cedos`; `cedos-UID` in the folder for temporary files. The folder belongs to
//! this user, and no other user can create a file in it or replace it. The file's name identifies
//! its content, which is compared before it is used. Root's folder is readable for all users, if
//! possible, for programs that change their user.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use nix::sys::statvfs::{FsFlags, statvfs};
use sha2::Digest;

/// Mode bits that let other users write.
const OTHERS_WRITE: u32 = 0o022;
/// Mode bit that lets other users open a file in a folder whose name they know.
const OTHERS_PASS: u32 = 0o001;
/// The mode bit of folders in which users cannot remove files of others.
const STICKY: u32 = 0o1000;

/// Bytes of the digest that are in the name.
const NAME_BYTES: usize = 8; // the rest is compared

/// Where the library is, made if need be.
///
/// # Errors
/// No folder will do; the sentence says why each does not.
pub fn ensure_library(bytes: &[u8]) -> anyhow::Result<PathBuf> {
    let root = nix::unistd::geteuid().is_root();
    let mut refused = Vec::new();
    // Root in a user namespace has none that all can reach, and few users to become.
    for for_all in [true, false] {
        if for_all && !root {
            continue;
        }
        for place in places(root) {
            match in_folder(&place, bytes, for_all) {
                Ok(path) => return Ok(path),
                Err(error) => refused.push(format!("{}: {error:#}", place.folder.display())),
            }
        }
    }
    bail!(
        "no place for the library that catches connections ({}); set XDG_RUNTIME_DIR or HOME",
        refused.join("; ")
    )
}

struct LibraryFolder {
    folder: PathBuf,
    /// The folder above is made, too.
    and_above: bool,
}

fn places(root: bool) -> Vec<LibraryFolder> {
    let set = |name: &str| {
        let path = std::env::var_os(name).map(PathBuf::from);
        path.filter(|path| path.is_absolute())
    };
    let place = |folder| LibraryFolder {
        folder,
        and_above: false,
    };
    let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
    let own = format!("cedos-{}", nix::unistd::geteuid());
    [
        set("XDG_RUNTIME_DIR").map(|folder| place(folder.join("cedos"))),
        root.then(|| place("/run/cedos".into())),
        cache.map(|folder| LibraryFolder {
            folder: folder.join("cedos"),
            and_above: true,
        }),
        Some(place(std::env::temp_dir().join(own))),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// `for_all`: other users' programs are to reach it.
fn in_folder(place: &LibraryFolder, bytes: &[u8], for_all: bool) -> anyhow::Result<PathBuf> {
    let folder = &place.folder;
    let separates = |b: &u8| b.is_ascii_whitespace() || matches!(b, b':' | b'$');
    let path = folder.as_os_str().as_bytes();
    ensure!(
        !path.iter().any(separates),
        "its path cannot be written in LD_PRELOAD"
    );
    let above = folder.parent().context("no folder")?;
    if place.and_above {
        let mut private = DirBuilder::new();
        private.mode(0o700).recursive(true).create(above)?;
    }
    // Before a folder is made in vain.
    keeps_others_away(above)?;
    if for_all {
        lets_others_pass(above)?;
    }
    make_folder(folder, for_all)?;
    is_ours_alone(folder)?;
    if for_all {
        lets_others_pass(folder)?;
    }
    let digest = hex::encode(&sha2::Sha256::digest(bytes)[..NAME_BYTES]);
    let path = folder.join(format!("cedos-preload-{digest}.so"));
    if !is_whole(&path, bytes) {
        // Whatever it is, it is this user's.
        let _ = fs::remove_file(&path);
        make(folder, &path, bytes)?;
        ensure!(
            is_whole(&path, bytes),
            "its content changes after it is written"
        );
    }
    Ok(path)
}

/// Whether no other user can replace files in this folder.
fn keeps_others_away(above: &Path) -> anyhow::Result<()> {
    let is = fs::metadata(above)?;
    let sticks = is.mode() & OTHERS_WRITE == 0 || is.mode() & STICKY != 0;
    ensure!(
        [nix::unistd::geteuid().as_raw(), 0].contains(&is.uid()) && sticks,
        "other users may replace it"
    );
    Ok(())
}

fn lets_others_pass(folder: &Path) -> anyhow::Result<()> {
    let folder = fs::canonicalize(folder)?;
    let passes = |folder: &Path| fs::metadata(folder).is_ok_and(|is| is.mode() & OTHERS_PASS != 0);
    ensure!(
        folder.ancestors().all(passes),
        "programs that change their user cannot read it"
    );
    Ok(())
}

fn make_folder(folder: &Path, for_all: bool) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Ok(()) if for_all => fs::set_permissions(folder, Permissions::from_mode(0o755)),
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

fn is_ours_alone(folder: &Path) -> anyhow::Result<()> {
    let is = fs::symlink_metadata(folder)?;
    let ours = is.is_dir() && is.uid() == nix::unistd::geteuid().as_raw();
    ensure!(
        ours && is.mode() & OTHERS_WRITE == 0,
        "other users may write there"
    );
    ensure!(
        !statvfs(folder)?.flags().contains(FsFlags::ST_NOEXEC),
        "it is mounted noexec"
    );
    Ok(())
}

/// Whether the file is this user's, and says what it should.
fn is_whole(path: &Path, bytes: &[u8]) -> bool {
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path);
    let Ok(file) = opened else {
        return false;
    };
    let ours = file.metadata().is_ok_and(|is| {
        is.is_file()
            && is.uid() == nix::unistd::geteuid().as_raw()
            && is.mode() & 0o777 == MODE
            && is.len() == bytes.len() as u64
    });
    let mut has = Vec::new();
    ours && file
        .take(bytes.len() as u64)
        .read_to_end(&mut has)
        .is_ok_and(|_| has == bytes)
}

const MODE: u32 = 0o644;

fn make(folder: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let fill = |mut file: &File| {
        file.write_all(bytes)?;
        file.set_permissions(Permissions::from_mode(MODE))
    };
    // It has no name until it is whole: a run that is killed meanwhile leaves nothing.
    let nameless = OpenOptions::new()
        .write(true)
        .custom_flags(libc::O_TMPFILE)
        .mode(0o600)
        .open(folder);
    if let Ok(file) = nameless {
        fill(&file)?;
        let open = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let flags = nix::fcntl::AtFlags::AT_SYMLINK_FOLLOW;
        let here = nix::fcntl::AT_FDCWD;
        return match nix::unistd::linkat(here, &open, here, path, flags) {
            // Another run was faster.
            Ok(()) | Err(nix::errno::Errno::EEXIST) => Ok(()),
            Err(error) => Err(error.into()),
        };
    }
    // A filesystem that has no nameless files.
    let file = tempfile::NamedTempFile::new_in(folder)?;
    fill(file.as_file())?;
    file.persist(path).map_err(|e| e.error)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_folder(folder: &Path, bytes: &[u8], for_all: bool) -> anyhow::Result<PathBuf> {
        let place = LibraryFolder {
            folder: folder.to_owned(),
            and_above: false,
        };
        super::in_folder(&place, bytes, for_all)
    }

    #[test]
    fn the_library_is_made_once_and_made_anew_where_somebody_wrote_into_it() {
        let home = tempfile::tempdir().expect("a directory");
        let folder = home.path().join("cedos");
        let path = in_folder(&folder, b"bytes", false).expect("a place");
        let made = |path: &Path| fs::metadata(path).expect("it").ino();
        let first = made(&path);
        assert_eq!(in_folder(&folder, b"bytes", false).expect("it"), path);
        assert_eq!(made(&path), first);
        let other = in_folder(&folder, b"other", false).expect("a place");
        assert_ne!(other, path);
        // Another's words, more of them, a file for all to write, a link to elsewhere.
        let elsewhere = home.path().join("elsewhere");
        fs::write(&elsewhere, b"bytes").expect("write");
        let spoilt: [&dyn Fn(); 4] = [
            &|| fs::write(&path, b"bytez").expect("write"),
            &|| fs::write(&path, b"bytes and more").expect("write"),
            &|| fs::set_permissions(&path, Permissions::from_mode(0o666)).expect("chmod"),
            &|| {
                fs::remove_file(&path).expect("remove");
                std::os::unix::fs::symlink(&elsewhere, &path).expect("link");
            },
        ];
        for spoil in spoilt {
            spoil();
            assert_eq!(in_folder(&folder, b"bytes", false).expect("it"), path);
            assert_eq!(fs::read(&path).expect("it"), b"bytes");
            let is = fs::symlink_metadata(&path).expect("it");
            assert!(is.is_file() && is.mode() & 0o777 == MODE);
        }
        assert_eq!(fs::read_dir(&folder).expect("it").count(), 2);
    }

    #[test]
    fn a_folder_that_others_can_change_is_not_used() {
        let home = tempfile::tempdir().expect("a directory");
        let mode = |path: &Path, mode| {
            fs::set_permissions(path, Permissions::from_mode(mode)).expect("chmod");
        };
        let folder = home.path().join("cedos");
        let is_refused = |folder: &Path, for_all| in_folder(folder, b"bytes", for_all).is_err();
        assert!(!is_refused(&folder, false));
        for writable in [0o770, 0o707, 0o1777] {
            mode(&folder, writable);
            assert!(is_refused(&folder, false), "{writable:o}");
        }
        mode(&folder, 0o700);
        mode(home.path(), 0o777);
        assert!(is_refused(&folder, false), "another in its place");
        mode(home.path(), 0o700);
        let link = home.path().join("link");
        std::os::unix::fs::symlink(&folder, &link).expect("link");
        assert!(is_refused(&link, false), "a link");
        let unmade = home.path().join("unmade");
        assert!(is_refused(&unmade, true), "programs of other users");
        assert!(!unmade.exists());
        let listed = home.path().join("a:b");
        assert!(is_refused(&listed, false), "two paths");
    }
}
