//! Ends the processes that a command on the device started.
//!
//! ```text
//!  lab ─┬─ nginx, proxy …                    existed before: not touched
//!       └─ CMD ─┬─ child
//!               └─ daemon ── CMD has ended ─▶ the lab's own child (subreaper), so it is found
//! ```

use std::collections::BTreeSet;
use std::io;

use nix::sys::prctl;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

use super::{FAREWELL, LOOK};

/// The child processes that this process had before.
pub struct ChildTracker {
    before: BTreeSet<i32>,
}

impl ChildTracker {
    /// Makes this process the parent of orphaned descendants from now on.
    ///
    /// # Errors
    /// The system refused.
    pub fn watch() -> io::Result<ChildTracker> {
        prctl::set_child_subreaper(true)?;
        let before = children();
        Ok(ChildTracker { before })
    }

    /// Ends all child processes that were started since, and their descendants.
    pub fn end(&self) {
        let mut left = FAREWELL;
        let mut asked = BTreeSet::new();
        loop {
            let strays: Vec<i32> = children().difference(&self.before).copied().collect();
            if strays.is_empty() {
                return;
            }
            for stray in strays.into_iter().map(Pid::from_raw) {
                if left.is_zero() {
                    let _ = kill(stray, Signal::SIGKILL);
                } else if asked.insert(stray.as_raw()) {
                    let _ = kill(stray, Signal::SIGTERM);
                }
                let _ = waitpid(stray, Some(WaitPidFlag::WNOHANG));
            }
            std::thread::sleep(LOOK);
            left = left.saturating_sub(LOOK);
        }
    }
}

impl Drop for ChildTracker {
    fn drop(&mut self) {
        let _ = prctl::set_child_subreaper(false);
    }
}

/// The children of this process.
fn children() -> BTreeSet<i32> {
    let own = std::process::id().to_string();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    processes
        .filter(|id| {
            let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
            // proc_pid_stat(5): the name is in brackets and may contain any characters; state and
            // parent follow.
            let rest = stat.rsplit_once(") ").map(|(_, rest)| rest);
            rest.and_then(|rest| rest.split(' ').nth(1)) == Some(&*own)
        })
        .collect()
}
