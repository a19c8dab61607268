//! The sandbox of `cedos agent`: what an agent keeps of its user's rights (docs/security.md has the table).
//!
//! Users name folders for downloads as long as the agent runs, and a process cannot get rights back. So the agent reads
//! what its user may read, and writes where users keep files: in every folder at the top of the file system that is not
//! the system's. It starts no program; the hooks that the user gave run in a process that is started before.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::Context;
use cedos_agent::agent::Hooks;
use cedos_agent::fetch::state_directory::state_directory;
use cedos_sandbox::{
    CapabilitySet, FileAccess, ProcessSandbox, ProgramStarts, SandboxReport, set_confinement,
};

/// Folders at the top of the file system in which users keep no files (hier(7)).
const SYSTEM_FOLDERS: [&str; 16] = [
    "bin",
    "boot",
    "dev",
    "efi",
    "etc",
    "lib",
    "lib32",
    "lib64",
    "libx32",
    "lost+found",
    "nix",
    "proc",
    "run",
    "sbin",
    "sys",
    "usr",
];
/// Folders below those in which users have files all the same.
const USERS_FOLDERS: [&str; 5] = [
    "/run/media",
    "/run/cedos",
    "/run/lock",
    "/dev/shm",
    "/usr/local/share",
];
/// Devices that lead nowhere.
const NULL_DEVICES: [&str; 2] = ["/dev/null", "/dev/full"];
/// Variables that name a folder of this user's.
const FOLDER_VARIABLES: [&str; 7] = [
    "HOME",
    "XDG_RUNTIME_DIR",
    "XDG_STATE_HOME",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
    "XDG_CACHE_HOME",
    "TMPDIR",
];
/// Variables that name a file in such a folder.
const FILE_VARIABLES: [&str; 3] = ["CEDOS_AGENT", "CEDOS_CONFIG", "CEDOS_KEY_FILE"];

/// Enters the sandbox. Programs cannot be started from then on. `has_lines`: some links are serial lines, which may be
/// plugged in at any time.
pub fn enter(has_lines: bool) -> SandboxReport {
    let mut files = FileAccess::default();
    files.read("/");
    for folder in user_folders() {
        files.write(folder);
    }
    for device in NULL_DEVICES {
        files.write(device);
    }
    if has_lines {
        files.write("/dev");
    }
    for file in FILE_VARIABLES.iter().filter_map(std::env::var_os) {
        files.write_replaceable(PathBuf::from(file));
    }
    let sandbox = ProcessSandbox {
        files,
        starts: ProgramStarts::Refused,
        // Those of a root's agent: files of others; pings, scans for networks, alarms that wake the machine.
        capabilities: CapabilitySet::CHOWN
            | CapabilitySet::DAC_OVERRIDE
            | CapabilitySet::DAC_READ_SEARCH
            | CapabilitySet::FOWNER
            | CapabilitySet::NET_BIND_SERVICE
            | CapabilitySet::NET_ADMIN
            | CapabilitySet::NET_RAW
            | CapabilitySet::WAKE_ALARM
            | CapabilitySet::BLOCK_SUSPEND,
    };
    sandbox.enter()
}

/// Runs without a sandbox: parsers are not confined either.
pub fn stay_out() {
    set_confinement(false);
}

/// Folders in which this user may want files.
fn user_folders() -> Vec<PathBuf> {
    let top = std::fs::read_dir("/").into_iter().flatten().flatten();
    let is_users = |name: &OsStr| SYSTEM_FOLDERS.iter().all(|system| name != *system);
    let top = top
        .filter(|entry| is_users(&entry.file_name()))
        .map(|entry| entry.path())
        // Where /lib and the like lead, they do not count as users' folders.
        .filter(|path| path.is_dir() && !path.is_symlink());
    let named = FOLDER_VARIABLES.iter().filter_map(std::env::var_os);
    let named = named.map(PathBuf::from).filter(|path| path.is_absolute());
    let fixed = USERS_FOLDERS.iter().map(PathBuf::from);
    let own = [state_directory().ok(), std::env::current_dir().ok()];
    let own = own.into_iter().flatten();
    // The root itself, as where a command starts the agent, is no folder of the user's.
    let all = top.chain(named).chain(fixed).chain(own);
    all.filter(|path| path.parent().is_some()).collect()
}

/// Starts a process for the hooks, outside the sandbox that this one enters. None without hooks.
///
/// # Errors
/// It cannot be started.
pub fn start_hook_runner(hooks: &Hooks) -> anyhow::Result<Option<File>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["agent", "--run-hooks"]);
    let given = [
        ("--when-free", &hooks.when_free),
        ("--when-not-free", &hooks.when_not_free),
    ];
    let mut is_needed = false;
    for (option, hook) in given {
        if let Some(hook) = hook {
            command.arg(format!("{option}={hook}"));
            is_needed = true;
        }
    }
    if !is_needed {
        return Ok(None);
    }
    let mut child = command
        .stdin(Stdio::piped())
        .spawn()
        .context("cannot start the process that runs --when-free and --when-not-free")?;
    let pipe = child.stdin.take().context("no pipe to it")?;
    Ok(Some(File::from(OwnedFd::from(pipe))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_folders_are_not_the_systems() {
        let folders = user_folders();
        let has = |path: &str| folders.iter().any(|folder| folder == OsStr::new(path));
        assert!(has("/home") && has("/tmp"), "{folders:?}");
        for system in [
            "/", "/etc", "/usr", "/boot", "/dev", "/proc", "/run", "/lib",
        ] {
            assert!(!has(system), "{system}: {folders:?}");
        }
    }
}
