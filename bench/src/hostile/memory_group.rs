//! A control group with a limit on memory, in which the proxy is killed if it takes too much.
//!
//! With cgroup v2 the limit counts the same as `MemoryMax` of systemd; with v1, memory and page
//! cache. If neither can be made (not root, no controller), the proxy runs without a limit and only
//! its resident memory is measured.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;

/// Where systemd and most container programs mount control groups.
const MOUNT: &str = "/sys/fs/cgroup";

/// The mechanism that enforces the limit on memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryLimiter {
    /// `memory.max` of the unified hierarchy.
    CgroupV2,
    /// `memory.limit_in_bytes` of the memory controller.
    CgroupV1,
    /// No group can be made.
    None,
}

/// A control group of one process; removed when this is dropped and the process has ended.
#[derive(Debug)]
pub struct MemoryGroup {
    limiter: MemoryLimiter,
    directory: PathBuf,
}

impl MemoryGroup {
    /// Makes a group with this limit in bytes.
    pub fn new(limit: u64) -> MemoryGroup {
        let name = format!("cedos-bench-{}", std::process::id());
        let v2 = Path::new(MOUNT).join(&name);
        let v1 = Path::new(MOUNT).join("memory").join(&name);
        let made = [
            (MemoryLimiter::CgroupV2, v2, "memory.max"),
            (MemoryLimiter::CgroupV1, v1, "memory.limit_in_bytes"),
        ]
        .into_iter()
        .find_map(|(limiter, directory, file)| {
            // A directory of another file system takes any file, and limits nothing.
            let mount = directory.parent()?;
            if !mount.join("cgroup.procs").exists() {
                return None;
            }
            fs::create_dir(&directory).ok()?;
            let group = MemoryGroup { limiter, directory };
            fs::write(group.directory.join(file), limit.to_string()).ok()?;
            // Swapped memory counts too. Without swap there is no such file.
            let _ = fs::write(group.directory.join("memory.swap.max"), "0");
            let _ = fs::write(
                group.directory.join("memory.memsw.limit_in_bytes"),
                limit.to_string(),
            );
            Some(group)
        });
        made.unwrap_or(MemoryGroup {
            limiter: MemoryLimiter::None,
            directory: PathBuf::new(),
        })
    }

    /// The mechanism that enforces the limit.
    pub fn limiter(&self) -> MemoryLimiter {
        self.limiter
    }

    /// Moves a process into the group.
    ///
    /// # Errors
    /// The system refuses the move.
    pub fn admit(&self, process: u32) -> Result<()> {
        if self.limiter == MemoryLimiter::None {
            return Ok(());
        }
        fs::write(self.directory.join("cgroup.procs"), process.to_string())
            .context("cannot move the proxy into its control group")
    }

    /// How often the kernel killed a process of the group.
    pub fn kills(&self) -> u64 {
        let file = match self.limiter {
            MemoryLimiter::CgroupV2 => "memory.events",
            MemoryLimiter::CgroupV1 => "memory.oom_control",
            MemoryLimiter::None => return 0,
        };
        let text = fs::read_to_string(self.directory.join(file)).unwrap_or_default();
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.and_then(|count| count.parse().ok()).unwrap_or(0)
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        if self.limiter != MemoryLimiter::None {
            let _ = fs::remove_dir(&self.directory);
        }
    }
}
