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
//! A process whose connections are to go on in the next one writes a record beside the lease ([`LeaseRecord`]). As long as
//! the processes exist that wait for the connections, the instance is only for who continues it.
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
use crate::lease_record::LeaseRecord;
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
    path: PathBuf,
    _lock: File,
}

impl InstanceLease {
    /// Leases an instance for this device and server; `None` if there is no folder for leases.
    /// Without a lease, flows of a killed process remain at the server until it gives them up.
    pub fn take(device: PublicKey, server: PublicKey) -> Option<InstanceLease> {
        let taken = InstanceLease::take_in(&own_folder()?, device, server);
        taken
            .inspect_err(|error| tracing::debug!(%error, "no instance that is reused"))
            .ok()
    }

    /// Leases an instance like [`InstanceLease::take`], in this folder.
    ///
    /// # Errors
    /// The folder is writable for other users, or the file system failed.
    pub fn take_in(dir: &Path, device: PublicKey, server: PublicKey) -> io::Result<InstanceLease> {
        let dir = private_folder(dir)?;
        let owner_prefix = owner_prefix(device, server);
        for place in 0..LEASES_MAX {
            let path = dir.join(format!("{owner_prefix}.{place}"));
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).mode(0o600);
            let file = options.open(&path)?;
            match file.try_lock() {
                Ok(()) => {
                    let record = LeaseRecord::read(&record_path(&path));
                    if record.is_some_and(|record| record.is_waited_for()) {
                        continue;
                    }
                    let lease = InstanceLease::in_file(file, path, clock::boot())?;
                    lease.remove_record();
                    return Ok(lease);
                }
                Err(fs::TryLockError::WouldBlock) => {}
                Err(fs::TryLockError::Error(error)) => return Err(error),
            }
        }
        Err(io::Error::other("too many processes of this device"))
    }

    /// Leases the instance of this number again, with the record that its last process left; none if there is none.
    ///
    /// # Errors
    /// `WouldBlock`: another process has the instance. Others: those of [`InstanceLease::take_in`].
    pub fn take_record(
        device: PublicKey,
        server: PublicKey,
        number: u64,
    ) -> io::Result<Option<(InstanceLease, LeaseRecord)>> {
        match own_folder() {
            Some(dir) => InstanceLease::take_record_in(&dir, device, server, number),
            None => Ok(None),
        }
    }

    /// Leases an instance again like [`InstanceLease::take_record`], in this folder.
    ///
    /// # Errors
    /// `WouldBlock`: another process has the instance. Others: the folder or a file in it cannot be used.
    pub fn take_record_in(
        dir: &Path,
        device: PublicKey,
        server: PublicKey,
        number: u64,
    ) -> io::Result<Option<(InstanceLease, LeaseRecord)>> {
        let dir = private_folder(dir)?;
        let owner_prefix = owner_prefix(device, server);
        for place in 0..LEASES_MAX {
            let path = dir.join(format!("{owner_prefix}.{place}"));
            let known = match fs::read(&path) {
                Ok(bytes) => read(&bytes, clock::boot()),
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(error),
            };
            if known.is_none_or(|(known, _)| known != number) {
                continue;
            }
            let file = OpenOptions::new().read(true).write(true).open(&path)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(fs::TryLockError::WouldBlock) => return Err(io::ErrorKind::WouldBlock.into()),
                Err(fs::TryLockError::Error(error)) => return Err(error),
            }
            let Some(record) = LeaseRecord::read(&record_path(&path)) else {
                return Ok(None);
            };
            let lease = InstanceLease::in_file(file, path, clock::boot())?;
            // Another process may have had the instance meanwhile, or its epochs are used up.
            return Ok((lease.number == number).then_some((lease, record)));
        }
        Ok(None)
    }

    /// Removes the record of an instance whose process has ended, because nobody waits for its connections any more.
    pub fn forget_record(device: PublicKey, server: PublicKey, number: u64) {
        if let Ok(Some((lease, _))) = InstanceLease::take_record(device, server, number) {
            lease.remove_record();
        }
    }

    /// Leaves a record for the next process of the instance, in place of the one before.
    ///
    /// # Errors
    /// The file system failed.
    pub fn write_record(&self, record: &LeaseRecord) -> io::Result<()> {
        record.write(&record_path(&self.path))
    }

    /// Removes the record.
    pub fn remove_record(&self) {
        // If it stays, nobody waits for what it names.
        let _ = fs::remove_file(record_path(&self.path));
    }

    /// `boot`: the number of this boot; zero if the system has none.
    fn in_file(mut file: File, path: PathBuf, boot: u32) -> io::Result<InstanceLease> {
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
            path,
            _lock: file,
        })
    }

    /// The number of the instance.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// How often the instance was leased before.
    pub fn turn(&self) -> u32 {
        self.epochs.start / EPOCHS_TAKEN
    }
}

/// This user's folder for files that are deleted when the machine is switched off.
fn own_folder() -> Option<PathBuf> {
    let runtime = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    folder(runtime, user() == 0)
}

/// The folder for leases in `dir`, which is created if necessary. Only this user can write to it.
fn private_folder(dir: &Path) -> io::Result<PathBuf> {
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
    Ok(dir)
}

/// The path of the record beside a lease.
fn record_path(lease: &Path) -> PathBuf {
    let mut path = lease.as_os_str().to_owned();
    path.push(".record");
    path.into()
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

/// Held by tests that give up a lease and take it again, and by those that start a process: until it runs its program, that has
/// all locks of this one.
#[cfg(test)]
pub(crate) static FORKING: parking_lot::Mutex<()> = parking_lot::Mutex::new(());

#[cfg(test)]
mod tests {
    use super::*;

    const WHO: (PublicKey, PublicKey) = (PublicKey([1; 32]), PublicKey([2; 32]));

    fn take(dir: &Path) -> InstanceLease {
        InstanceLease::take_in(dir, WHO.0, WHO.1).expect("one")
    }

    #[test]
    fn it_is_one_process_s_and_then_the_next_one_s_with_epochs_that_nobody_used() {
        let _alone = FORKING.lock();
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
    fn what_somebody_waits_for_is_only_for_who_continues_it() {
        let _alone = FORKING.lock();
        let dir = tempfile::tempdir().expect("a directory");
        let first = take(dir.path());
        let record = |process| LeaseRecord {
            waiting: vec![(1, process)],
            session: b"a session".to_vec(),
        };
        first
            .write_record(&record(std::process::id()))
            .expect("write");
        let number = first.number;
        let again = || InstanceLease::take_record_in(dir.path(), WHO.0, WHO.1, number);
        let refused = again().expect_err("it is in use");
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
        drop(first);
        let other = take(dir.path());
        assert_ne!(other.number, number);
        let (lease, found) = again().expect("it is there").expect("with a record");
        assert_eq!(found, record(std::process::id()));
        assert_eq!((lease.number, lease.turn()), (number, 1));
        // Nobody waits any more.
        lease.write_record(&record(0)).expect("write");
        drop(lease);
        let next = take(dir.path());
        assert_eq!((next.number, next.turn()), (number, 2));
        drop(next);
        assert!(again().expect("no fault").is_none());
        // Nor is there one of another number.
        let nobodys = InstanceLease::take_record_in(dir.path(), WHO.0, WHO.1, 0);
        assert!(nobodys.expect("no fault").is_none());
    }

    #[test]
    fn what_is_used_up_or_damaged_begins_anew() {
        let _alone = FORKING.lock();
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
        let _alone = FORKING.lock();
        // R-HS-2
        let dir = tempfile::tempdir().expect("a directory");
        let in_boot = |boot| {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true);
            let file = options.open(dir.path().join("lease")).expect("a file");
            InstanceLease::in_file(file, dir.path().join("lease"), boot).expect("one")
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
