//! Gets the permission to create network namespaces. Root has it; other users become root of their
//! own user namespace, which has privileges only over what it creates itself.

use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};
use std::fs;
use thiserror::Error;

/// Why the lab cannot run on this machine, and what would change that.
#[derive(Debug, Error)]
pub enum Forbidden {
    /// The process had other threads already.
    #[error(
        "the lab must be entered before the process starts threads ({threads} are running); this is a mistake in the program that calls it"
    )]
    Threads {
        /// The number of running threads.
        threads: usize,
    },
    /// The system refuses user namespaces.
    #[error(
        "this system refuses unprivileged user namespaces ({errno}); run as root, or allow them: `sysctl kernel.unprivileged_userns_clone=1` (Debian), `sysctl kernel.apparmor_restrict_unprivileged_userns=0` (Ubuntu)"
    )]
    UserNamespaces {
        /// The system's error.
        errno: Errno,
    },
    /// User namespaces are permitted, but not network namespaces in them.
    #[error(
        "this system lets nobody make network namespaces here ({errno}); in a container, add the capability SYS_ADMIN or run outside it"
    )]
    NetworkNamespaces {
        /// The system's error.
        errno: Errno,
    },
}

/// Makes sure that this process may create network namespaces, in its own user namespace if
/// necessary. Call it before any thread is started, because only a process with one thread may
/// change its user. Afterwards the process is root over what it creates, and its former user for
/// everything else.
///
/// # Errors
/// What the system forbids, and what would permit it.
pub fn enter() -> Result<(), Forbidden> {
    if may_make_networks().is_ok() {
        return Ok(());
    }
    let threads = fs::read_dir("/proc/self/task").map_or(1, |tasks| tasks.count());
    if threads > 1 {
        return Err(Forbidden::Threads { threads });
    }
    let (user, group) = (nix::unistd::geteuid(), nix::unistd::getegid());
    unshare(CloneFlags::CLONE_NEWUSER).map_err(|errno| Forbidden::UserNamespaces { errno })?;
    let refused = |error: std::io::Error| Forbidden::UserNamespaces {
        errno: Errno::from_raw(error.raw_os_error().unwrap_or(0)),
    };
    fs::write("/proc/self/setgroups", "deny").map_err(refused)?;
    fs::write("/proc/self/uid_map", format!("0 {user} 1")).map_err(refused)?;
    fs::write("/proc/self/gid_map", format!("0 {group} 1")).map_err(refused)?;
    may_make_networks().map_err(|errno| Forbidden::NetworkNamespaces { errno })
}

/// Tries it on a thread that ends at once.
fn may_make_networks() -> Result<(), Errno> {
    std::thread::spawn(|| unshare(CloneFlags::CLONE_NEWNET))
        .join()
        .unwrap_or(Err(Errno::EPERM))
}
