//! The processor time of a process and of all that it waited for.
//!
//! Linux keeps the figures of a process that has ended until its parent asks how; they are read before that. A
//! process that outlived its parent is not counted.

use std::process::Child;
use std::time::Duration;

use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;

/// The unit of times in `/proc/PID/stat`, for programs of every architecture that we build for.
const TICK: Duration = Duration::from_millis(10); // USER_HZ: proc(5)

/// Waits for the end of a process; returns its processor time and that of its descendants, if the system tells.
/// [`Child::wait`] still returns its exit status.
pub fn at_the_end(child: &Child) -> Option<Duration> {
    let pid = child.id();
    let id = Id::Pid(Pid::from_raw(pid.cast_signed()));
    waitid(id, WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT).ok()?;
    of_stat(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// The sum of `utime`, `stime`, `cutime` and `cstime`.
fn of_stat(stat: &str) -> Option<Duration> {
    // "pid (name) state …", where the name may contain anything; the state is the third field, `utime` the 14th.
    let (_, after) = stat.rsplit_once(") ")?;
    let times = after.split(' ').skip(11).take(4);
    let ticks = times
        .map(|word| word.parse::<u32>().ok())
        .sum::<Option<u32>>();
    Some(TICK * ticks?)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn times_of_a_process_and_of_its_children_are_added() {
        let stat = "7 (a ) b) Z 1 7 7 0 -1 4 5 6 7 8 100 20 3000 400 20 0 1 0";
        assert_eq!(of_stat(stat), Some(Duration::from_millis(35_200)));
        assert_eq!(of_stat("7 (a) Z 1"), Some(Duration::ZERO));
        assert_eq!(of_stat("nonsense"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_a_child_of_the_process_computed_is_counted_and_the_status_is_still_there() {
        let script = "sh -c 'n=0; while [ $n -lt 200000 ]; do n=$((n + 1)); done'; exit 7";
        let mut shell = Command::new("sh").args(["-c", script]).spawn().unwrap();
        let took = at_the_end(&shell).unwrap();
        assert!(took > Duration::ZERO);
        assert_eq!(shell.wait().unwrap().code(), Some(7));
    }
}
