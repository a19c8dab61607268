//! Runs a program under strace, which injects a fault at a system call.
//!
//! strace runs beside the program (`-D`), so that the program is a child of this process, which
//! waits for it and ends it as usual.

use std::path::Path;

use tokio::process::Command;

use super::point::{KillEffect, KillFault, SystemCall};

/// The number of consecutive calls that fail, because a full disk rarely fails for one call only.
const FAILING: u32 = 3;

/// Whether strace is available and permitted; if not, the reason.
pub async fn is_there() -> Result<(), String> {
    let mut command = Command::new("strace");
    command.args(["-D", "-qq", "-e", "trace=none", "true"]);
    match command.output().await {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!(
            "strace may not watch programs here: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        )),
        Err(error) => Err(format!("strace cannot be run ({error}); install it")),
    }
}

/// A command for `program`, with a fault if there is one. Calls on files and their results are
/// listed in `log`. `paths` are the files for which calls count if a disk fails.
pub fn command(program: &Path, blow: Option<&KillFault>, log: &Path, paths: &[&Path]) -> Command {
    let Some(blow) = blow else {
        return Command::new(program);
    };
    let pattern = SystemCall::named(blow.call).map_or(blow.call, |call| call.pattern);
    let (first, last) = (blow.nth, blow.nth + FAILING - 1);
    let action = match blow.fault {
        KillEffect::Kill | KillEffect::Power => format!("signal=SIGKILL:when={first}"),
        KillEffect::Full => format!("error=ENOSPC:when={first}..{last}"),
        KillEffect::Io => format!("error=EIO:when={first}..{last}"),
    };
    let mut command = Command::new("strace");
    // -y adds the file name to each descriptor.
    command.args(["-D", "-f", "-qq", "-y", "-o"]).arg(log);
    if !blow.fault.kills() {
        for path in paths {
            command.arg("-P").arg(path);
        }
    }
    let trace = format!("trace={pattern},/^f(data)?sync$,/^rename,/^unlink");
    command.args(["-e", "signal=none", "-e", &trace, "-e"]);
    command
        .arg(format!("inject={pattern}:{action}"))
        .arg(program);
    command
}

/// Files that were synced again after a failed sync, from a log of [`command`].
pub fn synced_again(log: &str) -> Vec<String> {
    let mut failed = Vec::new();
    let mut again = Vec::new();
    for line in log.lines() {
        let named = [" rename", " unlink"].into_iter();
        let named = named.filter_map(|call| line.split_once(call)).next();
        if let Some((_, names)) = named.filter(|_| line.ends_with("= 0")) {
            // Another file has this name now, or none.
            let to = names.rsplit('"').nth(1).unwrap_or_default();
            failed.retain(|file: &String| !file.ends_with(to));
        }
        let Some((_, rest)) = line.split_once("sync(") else {
            continue;
        };
        let Some(file) = rest.split_once('<').and_then(|(_, r)| r.split_once('>')) else {
            continue;
        };
        let file = file.0.to_owned();
        if failed.contains(&file) && !again.contains(&file) {
            again.push(file.clone());
        }
        if rest.contains("(INJECTED)") {
            failed.push(file);
        }
    }
    again
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sync_that_is_repeated_is_seen() {
        let once = "7 fdatasync(9</a/b>) = -1 EIO (Input/output error) (INJECTED)\n";
        let other = "7 fsync(9</a/c>) = 0\n";
        let again = "7 fsync(11</a/b>) = 0\n";
        let renamed = "7 rename(\"/a/b.new\", \"/a/b\") = 0\n";
        assert!(synced_again(&format!("{once}{other}")).is_empty());
        assert_eq!(synced_again(&format!("{once}{other}{again}")), ["/a/b"]);
        let removed = "7 unlink(\"/a/b\") = 0\n";
        let not_removed = "7 unlink(\"/a/b\") = -1 EIO (Input/output error)\n";
        assert!(synced_again(&format!("{once}{renamed}{again}")).is_empty());
        assert!(synced_again(&format!("{once}{removed}{again}")).is_empty());
        assert_eq!(
            synced_again(&format!("{once}{not_removed}{again}")),
            ["/a/b"]
        );
    }
}
