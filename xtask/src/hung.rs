//! A hanging test must not block everything: after a long silence its program is killed, and the
//! others continue.

use std::collections::BTreeMap;
use std::process::{Child, Command};

/// Kills the program that `cargo` is running, with its descendants; returns their descriptions for
/// people.
///
/// If `/proc` does not show it, cargo itself is killed.
pub fn kill_what_runs(cargo: &mut Child) -> Vec<String> {
    let processes = processes();
    let below = descendants(cargo.id(), &processes);
    if below.is_empty() {
        // Its children may continue, but they are not waited for any more.
        let _ = cargo.kill();
        return vec!["cargo".into()];
    }
    let names = below.iter().map(|pid| {
        let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words = String::from_utf8_lossy(&words).replace('\0', " ");
        format!("{pid} {}", words.trim())
    });
    let names = names.collect();
    kill(&below);
    names
}

/// Kills a process and all its descendants.
pub fn kill_with_descendants(process: u32) {
    let mut all = descendants(process, &processes());
    all.push(process);
    kill(&all);
}

fn kill(ids: &[u32]) {
    // By the shell, which has it where there is no program `kill`; this one contains no unsafe code.
    let ids = ids.iter().map(u32::to_string);
    let _ = Command::new("sh")
        .args(["-c", "kill -KILL \"$@\"", "sh"])
        .args(ids)
        .status();
}

/// The parent of every process.
fn processes() -> BTreeMap<u32, u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let parent = |pid: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // "pid (name) state parent …", where the name may contain anything.
        let (_, after) = stat.rsplit_once(") ")?;
        after.split(' ').nth(1)?.parse().ok()
    };
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(|pid| Some((pid, parent(pid)?)))
        .collect()
}

fn descendants(of: u32, parents: &BTreeMap<u32, u32>) -> Vec<u32> {
    let mut found = vec![of];
    let mut at = 0;
    while let Some(parent) = found.get(at).copied() {
        found.extend(
            parents
                .iter()
                .filter(|(_, p)| **p == parent)
                .map(|(c, _)| *c),
        );
        at += 1;
    }
    found.remove(0);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn what_a_process_began_is_killed_and_it_goes_on() {
        let script = "sh -c 'sleep 1000 & wait' ; exit 7";
        let mut shell = Command::new("sh").args(["-c", script]).spawn().unwrap();
        while descendants(shell.id(), &processes()).len() < 2 {
            std::thread::yield_now();
        }
        let killed = kill_what_runs(&mut shell);
        assert!(
            killed.iter().any(|line| line.contains("sleep 1000")),
            "{killed:?}"
        );
        assert_eq!(shell.wait().unwrap().code(), Some(7));
    }
}
