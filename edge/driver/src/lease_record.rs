//! What a process that leases an instance leaves for the next one: the record of its session, and the processes that wait
//! for each of its flows.
//!
//! ```text
//!  instances/<device and server>.0          the lease
//!  instances/<device and server>.0.record   replaced when a flow opens or ends, and after a handshake
//! ```
//!
//! The file is not synced: it is for the time after a crash of the process, not of the machine, in which the processes that
//! wait end too.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Identifies the format of the file.
const FORMAT: &[u8; 4] = b"LR1\n";
/// The size of an entry: a flow's id and a process's.
const ENTRY_BYTES: usize = 8 + 4;

/// The record of a leased instance's session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeaseRecord {
    /// The flows that go on, each with the id of the process that waits for it.
    pub waiting: Vec<(u64, u32)>,
    /// The session's record.
    pub session: Vec<u8>,
}

impl LeaseRecord {
    /// Whether a process that waits for one of the flows exists.
    pub fn is_waited_for(&self) -> bool {
        self.waiting.iter().any(|(_, process)| is_running(*process))
    }

    /// The flows whose processes exist.
    pub fn awaited_flows(&self) -> Vec<u64> {
        let running = self.waiting.iter().filter(|(_, pid)| is_running(*pid));
        running.map(|(flow, _)| *flow).collect()
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = FORMAT.to_vec();
        bytes.extend((self.waiting.len() as u32).to_be_bytes());
        for (flow, process) in &self.waiting {
            bytes.extend(flow.to_be_bytes());
            bytes.extend(process.to_be_bytes());
        }
        bytes.extend(&self.session);
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<LeaseRecord> {
        let (count, rest) = bytes.strip_prefix(FORMAT)?.split_first_chunk()?;
        let count = u32::from_be_bytes(*count) as usize;
        let (entries, session) = rest.split_at_checked(count.checked_mul(ENTRY_BYTES)?)?;
        let waiting = entries.chunks_exact(ENTRY_BYTES).map(|entry| {
            let (flow, process) = entry.split_at(8);
            let flow = u64::from_be_bytes(flow.try_into().expect("eight bytes"));
            (
                flow,
                u32::from_be_bytes(process.try_into().expect("four bytes")),
            )
        });
        Some(LeaseRecord {
            waiting: waiting.collect(),
            session: session.to_vec(),
        })
    }

    /// Replaces the file at once: who reads it finds the old record or the new one.
    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        let new = path.with_extension("new");
        // It holds the session's keys, so it is nobody else's, whatever the folder is.
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true).truncate(true).mode(0o600);
        options.open(&new)?.write_all(&self.encode())?;
        fs::rename(&new, path)
    }

    /// Reads a record; none if there is no file, or one of another format.
    pub(crate) fn read(path: &Path) -> Option<LeaseRecord> {
        LeaseRecord::decode(&fs::read(path).ok()?)
    }
}

/// Whether a process of this id exists and has not ended.
fn is_running(process: u32) -> bool {
    if process == 0 {
        return false; // It is in another namespace.
    }
    // SAFETY: the arguments are plain numbers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) };
    if fd < 0 {
        return false;
    }
    let mut ended = libc::pollfd {
        fd: fd as libc::c_int,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one entry, and a descriptor that was just created and that nothing else owns.
    unsafe {
        libc::poll(&raw mut ended, 1, 0);
        libc::close(ended.fd);
    }
    ended.revents == 0
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written_and_nothing_else_is_one() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("a.0.record");
        assert_eq!(LeaseRecord::read(&path), None);
        let record = LeaseRecord {
            waiting: vec![(7, 1), (u64::MAX, u32::MAX)],
            session: b"a session".to_vec(),
        };
        record.write(&path).expect("write");
        assert_eq!(LeaseRecord::read(&path), Some(record.clone()));
        let mode = fs::metadata(&path)
            .expect("it is there")
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600, "nobody else reads the session's keys");
        for bytes in [&b"LR1\n"[..], b"LR2\n\0\0\0\0", b"LR1\n\0\0\0\x01short"] {
            assert_eq!(LeaseRecord::decode(bytes), None);
        }
    }

    #[test]
    fn a_process_that_ended_waits_for_nothing_although_its_parent_has_not_read_that() {
        let record = |process| LeaseRecord {
            waiting: vec![(1, process)],
            session: Vec::new(),
        };
        assert!(record(std::process::id()).is_waited_for());
        assert!(!record(0).is_waited_for());
        let alone = crate::instance_lease::FORKING.lock();
        let mut child = std::process::Command::new("sleep")
            .arg("600")
            .spawn()
            .expect("sleep");
        drop(alone);
        assert_eq!(record(child.id()).awaited_flows(), [1]);
        child.kill().expect("it runs");
        let ends = std::time::Instant::now();
        while record(child.id()).is_waited_for() {
            assert!(ends.elapsed().as_secs() < 60);
        }
        child.wait().expect("it ended");
        assert!(record(child.id()).awaited_flows().is_empty());
    }
}
