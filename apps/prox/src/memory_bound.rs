//! The most memory that a proxy takes, as one number, and the limit of its control group beside it.
//!
//! A control group with a limit (`MemoryMax` of a unit, a container's memory) kills the process that exceeds it. What is
//! charged to the group is the process's own memory and the kernel's buffers for its sockets, so the number has both:
//!
//! ```text
//!  --session-memory            sessions, flows, request heads, tunnels
//!  2 × --session-memory        the kernel's buffers for TCP connections of clients (socket memory)
//!  --memory-quota              copies
//!  16 MiB                      heads in the shared cache
//!  64 MiB                      the program, its stacks, its allocator's reserve, its tables
//!  16 MiB for each worker      the kernel's buffers for its UDP socket
//! ```

use std::path::Path;

use d2tp_driver::SOCKET_BUFFER_BYTES;

use crate::prox::Prox;
use crate::shared_cache::HEAD_BYTES_MAX;

/// The program, its threads' stacks, its allocator's reserve and its tables. `cedos bench hostile` holds the proxy to it.
const PROGRAM_BYTES: u64 = 64 << 20;

/// What the kernel may hold for one worker's UDP socket: it gives a buffer twice as much as was asked for (socket(7)).
const UDP_BYTES: u64 = 2 * 2 * SOCKET_BUFFER_BYTES as u64;

/// Where control groups are mounted.
const MOUNT: &str = "/sys/fs/cgroup";

/// The least value that means no limit. The first version writes the largest multiple of a page.
const UNLIMITED_MIN: u64 = 1 << 60;

impl Prox {
    /// The most memory that this proxy takes with so many workers, the kernel's buffers for its sockets included.
    pub fn memory_bound(&self, workers: usize) -> u64 {
        let pool = |max: Option<u64>| max.unwrap_or(u64::MAX);
        [
            pool(self.session_memory().max()),
            pool(self.socket_memory().max()),
            self.config().memory_quota_bytes,
            HEAD_BYTES_MAX as u64,
            PROGRAM_BYTES,
            UDP_BYTES.saturating_mul(workers as u64),
        ]
        .into_iter()
        .fold(0, u64::saturating_add)
    }

    /// Logs the most memory that this proxy takes, and warns if its control group allows less.
    pub fn log_memory_bound(&self, workers: usize) {
        let memory_bound = self.memory_bound(workers);
        tracing::info!(
            memory_bound,
            "takes this many bytes of memory at most, with the kernel's buffers"
        );
        if let Some(group_max) = group_memory_max().filter(|max| *max < memory_bound) {
            tracing::warn!(
                memory_bound,
                group_max,
                "the control group of this proxy allows less memory than the proxy may take, and clients could have it \
                 killed: lower --session-memory or --memory-quota, or raise the group's limit (MemoryMax)"
            );
        }
    }
}

/// The least limit on memory of this process's control group and those above it; `None` if there is none, or it cannot
/// be read.
fn group_memory_max() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    least_limit(&groups, Path::new(MOUNT))
}

/// The least limit on memory of the groups that `/proc/self/cgroup` lists (cgroups(7)): `0::/path` in the second
/// version, `4:memory:/path` in the first.
fn least_limit(groups: &str, mount: &Path) -> Option<u64> {
    let limits = groups.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let path = path.trim_start_matches('/');
        if controllers.is_empty() {
            limit_up_to(mount, path, "memory.max")
        } else if controllers.split(',').any(|name| name == "memory") {
            limit_up_to(&mount.join("memory"), path, "memory.limit_in_bytes")
        } else {
            None
        }
    });
    limits.min()
}

/// The least limit in the files of this name from the group at `path` up to the mount.
fn limit_up_to(mount: &Path, path: &str, file: &str) -> Option<u64> {
    let groups = Path::new(path).ancestors();
    let limits = groups.filter_map(|group| {
        let text = std::fs::read_to_string(mount.join(group).join(file)).ok()?;
        // `max` is no number.
        let limit: u64 = text.trim().parse().ok()?;
        (limit < UNLIMITED_MIN).then_some(limit)
    });
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A mount of control groups with these files.
    fn mount(files: &[(&str, &str)]) -> tempfile::TempDir {
        let mount = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = mount.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        mount
    }

    #[test]
    fn the_least_limit_of_a_group_and_those_above_it_counts() {
        let mount = mount(&[
            ("system.slice/memory.max", "536870912\n"),
            ("system.slice/cedos-prox.service/memory.max", "1073741824\n"),
        ]);
        let limit = |groups: &str| least_limit(groups, mount.path());
        let service = "0::/system.slice/cedos-prox.service\n";
        assert_eq!(limit(service), Some(512 << 20));
        assert_eq!(limit("0::/user.slice\n"), None);
        assert_eq!(limit("0::/\n"), None);
        assert_eq!(limit("nonsense\n"), None);
    }

    #[test]
    fn a_group_of_the_first_version_has_a_limit_and_no_limit_is_a_large_number() {
        let mount = mount(&[
            ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory/docker/a/memory.limit_in_bytes", "268435456\n"),
            ("memory.max", "max\n"),
        ]);
        let limit = |groups: &str| least_limit(groups, mount.path());
        let inside = "9:name=systemd:/\n4:cpu,memory:/docker/a\n0::/\n";
        assert_eq!(limit(inside), Some(256 << 20));
        assert_eq!(limit("4:memory:/\n0::/\n"), None);
    }
}
