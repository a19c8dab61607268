//! Becoming allowed to make network namespaces: as root one is; anybody else becomes root of a user
//! namespace of their own, which has power over nothing but what it makes itself.

use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};
use std::fs;
use thiserror::Error;

/// Why the lab cannot be built on this machine, and what would change that.
#[derive(Debug, Error)]
pub enum Forbidden {
    /// The process had other threads already.
    #[error(
        "the lab must be entered before the process starts threads ({threads} are running); this is a mistake in the program that calls it"
    )]
    Threads {
        /// How many threads were running.
        threads: usize,
    },
    /// The system refuses user namespaces.
    #[error(
        "this system refuses unprivileged user namespaces ({errno}); run as root, or allow them: `sysctl kernel.unprivileged_userns_clone=1` (Debian), `sysctl kernel.apparmor_restrict_unprivileged_userns=0` (Ubuntu)"
    )]
    UserNamespaces {
        /// The system's answer.
        errno: Errno,
    },
    /// There are user namespaces, but not the network namespaces in them.
    #[error(
        "this system lets nobody make network namespaces here ({errno}); in a container, add the capability SYS_ADMIN or run outside it"
    )]
    NetworkNamespaces {
        /// The system's answer.
        errno: Errno,
    },
}

/// Make sure that this process may make network namespaces, in a user namespace of its own if need
/// be. Call it before any thread is started: only a process with one thread may change its user.
/// Afterwards it is root among what it makes, and its former user to everybody else.
///
/// # Errors
/// What the system forbids, and what would allow it.
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

/// Try it on a thread that ends at once.
fn may_make_networks() -> Result<(), Errno> {
    std::thread::spawn(|| unshare(CloneFlags::CLONE_NEWNET))
        .join()
        .unwrap_or(Err(Errno::EPERM))
}
