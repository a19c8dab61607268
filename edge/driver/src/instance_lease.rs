//! A leased instance for a process that keeps no record. When the process ends, the next one leases
//! the instance.
//!
//! ```text
//!  DIR/cedos/instances/<device and server>.0 ── lock ── a process that runs
//!                      <device and server>.1 ── free: its process ended or was killed
//!                                                └── the next process connects with its number, and the
//!                                                    server drops the flows that were left open (R-RESUME-5)
//! ```
//!
//! The folder is deleted when the machine restarts, and its numbers with it: a new file gets a
//! number that no process had. Where the folder is on a disk, and a file of an earlier boot is still there, it counts as
//! new: what was written last before a power cut may be missing in it. So nothing waits for the disk.

use std::env;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::ops::Range;
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::{Path, PathBuf};

use d2tp_session::PublicKey;

use crate::clock;
use crate::secrets::seed;

/// The number of epochs for one process: SYNs for three months, one every two seconds.
const EPOCHS_TAKEN: u32 = 1 << 22;
/// The most processes of a device that use leased instances towards one server at once.
const LEASES_MAX: u32 = 256;
/// Size of a lease file: the instance number, the first unused epoch, and the boot in which it was written.
const FILE_BYTES: usize = 8 + 4 + 4;

/// An instance that belongs to this process while the lease lives.
#[derive(Debug)]
pub struct InstanceLease {
    pub(crate) number: u64,
    pub(crate) epochs: Range<u32>,
    _lock: File,
}

impl InstanceLease {
    /// Leases an instance for this device and server; `None` if there is no folder for leases.
    /// Without a lease, flows of a killed process remain at the server until it gives them up.
    pub fn take(device: PublicKey, server: PublicKey) -> Option<InstanceLease> {
        let dir = folder(
            env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from),
            user() == 0,
        )?;
        let taken = InstanceLease::take_in(&dir, device, server);
        taken
            .inspect_err(|error| tracing::debug!(%error, "no instance that is reused"))
            .ok()
    }

    /// Leases an instance like [`InstanceLease::take`], in this folder.
    ///
    /// # Errors
    /// The folder is writable for other users, or the file system failed.
    pub fn take_in(dir: &Path, device: PublicKey, server: PublicKey) -> io::Result<InstanceLease> {
        // Programs of other users pass through it to the folder that root creates for all.
        make(dir, 0o711)?;
        let dir = dir.join("instances");
        make(&dir, 0o700)?;
        let about = fs::metadata(&dir)?;
        let own = about.uid() == user();
        if !own || about.mode() & 0o022 != 0 {
            let text = format!("other users can access {}", dir.display());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        let owner_prefix = owner_prefix(device, server);
        for place in 0..LEASES_MAX {
            let path = dir.join(format!("{owner_prefix}.{place}"));
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).mode(0o600);
            let file = options.open(path)?;
            match file.try_lock() {
                Ok(()) => return InstanceLease::in_file(file, clock::boot()),
                Err(fs::TryLockError::WouldBlock) => {}
                Err(fs::TryLockError::Error(error)) => return Err(error),
            }
        }
        Err(io::Error::other("too many processes of this device"))
    }

    /// `boot`: the number of this boot; zero if the system has none.
    fn in_file(mut file: File, boot: u32) -> io::Result<InstanceLease> {
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let (number, start) = match read(&bytes, boot) {
            Some((number, start)) if start <= u32::MAX - EPOCHS_TAKEN => (number, start),
            // A file that has no number yet, whose epochs are used up, of another boot or of another format.
            _ => (
                u64::from_be_bytes(seed()[..8].try_into().expect("eight of 32 bytes")),
                1,
            ),
        };
        let end = start + EPOCHS_TAKEN;
        file.rewind()?;
        let (number_bytes, end_bytes) = (number.to_be_bytes(), end.to_be_bytes());
        file.write_all(&[&number_bytes[..], &end_bytes, &boot.to_be_bytes()].concat())?;
        file.set_len(FILE_BYTES as u64)?;
        // R-HS-2: what only a crash of the machine loses is of a boot whose numbers nobody uses again.
        if boot == 0 {
            file.sync_data()?;
        }
        Ok(InstanceLease {
            number,
            epochs: start..end,
            _lock: file,
        })
    }

    /// How often the instance was leased before.
    pub fn turn(&self) -> u32 {
        self.epochs.start / EPOCHS_TAKEN
    }
}

fn make(dir: &Path, mode: u32) -> io::Result<()> {
    match DirBuilder::new().mode(mode).create(dir) {
        // Independent of the umask.
        Ok(()) => fs::set_permissions(dir, Permissions::from_mode(mode)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

fn user() -> u32 {
    // SAFETY: it takes nothing and does not fail.
    unsafe { libc::geteuid() }
}

/// The number and the first unused epoch in a file that was written in this boot.
fn read(bytes: &[u8], boot: u32) -> Option<(u64, u32)> {
    let bytes: &[u8; FILE_BYTES] = bytes.try_into().ok()?;
    let (number, rest) = bytes.split_first_chunk()?;
    let (start, written_in) = rest.split_first_chunk()?;
    let is_of_this_boot = written_in == boot.to_be_bytes();
    is_of_this_boot.then(|| (u64::from_be_bytes(*number), u32::from_be_bytes(*start)))
}

/// The user's folder for files that are deleted when the machine is switched off.
fn folder(runtime: Option<PathBuf>, root: bool) -> Option<PathBuf> {
    let runtime = runtime.filter(|path| path.is_absolute());
    let runtime = runtime.or_else(|| root.then(|| "/run".into()))?;
    Some(runtime.join("cedos"))
}

/// The file name prefix for this device and this server.
fn owner_prefix(device: PublicKey, server: PublicKey) -> String {
    let both = [device.0, server.0].concat();
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, &both);
    let bytes = digest.as_ref().first_chunk().expect("SHA-256 has 32 bytes");
    format!("{:016x}", u64::from_be_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHO: (PublicKey, PublicKey) = (PublicKey([1; 32]), PublicKey([2; 32]));

    fn take(dir: &Path) -> InstanceLease {
        InstanceLease::take_in(dir, WHO.0, WHO.1).expect("one")
    }

    #[test]
    fn it_is_one_process_s_and_then_the_next_one_s_with_epochs_that_nobody_used() {
        let dir = tempfile::tempdir().expect("a directory");
        let (first, second) = (take(dir.path()), take(dir.path()));
        assert_ne!(first.number, second.number);
        assert_eq!((first.epochs.start, first.turn()), (1, 0));
        let (number, end) = (first.number, first.epochs.end);
        drop(first);
        let next = take(dir.path());
        assert_eq!((next.number, next.turn()), (number, 1));
        assert!(next.epochs.start >= end);
        // Another device, or another server, gets another instance.
        let other = InstanceLease::take_in(dir.path(), WHO.1, WHO.0).expect("one");
        assert!(![number, second.number].contains(&other.number));
    }

    #[test]
    fn what_is_used_up_or_damaged_begins_anew() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut known = vec![take(dir.path()).number];
        let name = format!("instances/{}.0", owner_prefix(WHO.0, WHO.1));
        let path = dir.path().join(name);
        let (first_unused, this_boot) = (u32::MAX - 1, clock::boot());
        let used_up = [
            &[7; 8][..],
            &first_unused.to_be_bytes(),
            &this_boot.to_be_bytes(),
        ]
        .concat();
        for bytes in [&b"torn"[..], &used_up, &[0; FILE_BYTES + 1]] {
            fs::write(&path, bytes).expect("write");
            let lease = take(dir.path());
            assert_eq!(lease.epochs.start, 1);
            assert!(!known.contains(&lease.number));
            known.push(lease.number);
            drop(lease);
            assert_eq!(take(dir.path()).number, *known.last().expect("one"));
        }
    }

    #[test]
    fn a_number_of_an_earlier_boot_is_nobody_s_any_more() {
        // R-HS-2
        let dir = tempfile::tempdir().expect("a directory");
        let in_boot = |boot| {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true);
            let file = options.open(dir.path().join("lease")).expect("a file");
            InstanceLease::in_file(file, boot).expect("one")
        };
        let first = in_boot(1).number;
        let again = in_boot(1);
        assert_eq!((again.number, again.turn()), (first, 1));
        let later = in_boot(2);
        assert_ne!(later.number, first);
        assert_eq!(later.epochs.start, 1);
        // Where the system does not tell boots apart, the file is on the disk before it is used.
        let unknown = in_boot(0).number;
        assert_eq!(in_boot(0).number, unknown);
    }

    #[test]
    fn a_folder_that_others_write_to_is_not_used() {
        let above = tempfile::tempdir().expect("a directory");
        let dir = above.path().join("cedos");
        drop(take(&dir));
        let mode = |path: &Path| fs::metadata(path).expect("it").mode() & 0o777;
        assert_eq!(
            (mode(&dir) & 0o077, mode(&dir.join("instances"))),
            (0o011, 0o700)
        );
        let folder = dir.join("instances");
        fs::set_permissions(&folder, Permissions::from_mode(0o777)).expect("change");
        let refused = InstanceLease::take_in(&dir, WHO.0, WHO.1);
        let error = refused.expect_err("others write");
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(folder_is(None, false), None);
        assert_eq!(folder_is(Some("run"), false), None);
        assert_eq!(folder_is(None, true), Some("/run/cedos".into()));
        assert_eq!(
            folder_is(Some("/run/user/7"), true),
            Some("/run/user/7/cedos".into())
        );
    }

    fn folder_is(runtime: Option<&str>, root: bool) -> Option<PathBuf> {
        folder(runtime.map(PathBuf::from), root)
    }
}
