//! Descendants of this process (proc(5)).

use std::fs;

/// The children of this process.
pub fn children() -> Vec<i32> {
    let Ok(threads) = fs::read_dir("/proc/self/task") else {
        return Vec::new();
    };
    let lists = threads
        .flatten()
        .filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    let lists: Vec<String> = lists.collect();
    let ids = lists.iter().flat_map(|list| list.split_whitespace());
    ids.filter_map(|id| id.parse().ok()).collect()
}

/// The most generations between a process and this one. A longer chain is an error.
const GENERATIONS_MAX: usize = 4_096; // a guess

/// Whether a process descends from this one. If this process is a subreaper (prctl(2)), that
/// includes those whose parents have ended.
pub(crate) fn descends_from_here(pid: i32) -> bool {
    let here = std::process::id() as i32;
    let mut next = Some(pid);
    for _ in 0..GENERATIONS_MAX {
        match next {
            Some(pid) if pid == here => return true,
            Some(pid @ 2..) => next = parent(pid),
            _ => return false,
        }
    }
    false
}

fn parent(pid: i32) -> Option<i32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    parent.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_known_and_comes_from_here() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let id = child.id() as i32;
        assert!(children().contains(&id));
        assert!(descends_from_here(id));
        assert!(!descends_from_here(
            std::os::unix::process::parent_id() as i32
        ));
        assert!(!descends_from_here(1));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
