//! Processes that keep the queues of programs' connections short: one beside each agent, and a service of the system.
//!
//! ```text
//!  cedos agent ── a pipe ──▶ `cedos agent --keep-queues-short=3`: this user's programs, by descriptors of their sockets
//!                  its end ──▶ it ends, too
//!  systemd ─────────────────▶ `cedos agent --short-queues-of-all-users`: all programs, by a program in the kernel
//! ```
//!
//! The process beside an agent is outside its sandbox, since a process in one may not touch the sockets of processes outside. None
//! is started where the service runs. Each thread sleeps until it is told to end, the next look is due, or, while there is no
//! network, there is one.

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use cedos_sandbox::{CapabilitySet, keep_capabilities};
use cedos_terminal::print_stderr;
use d2tp_session::{DrwaLambda, Time};
use d2tp_tcp::{DeviceQueues, ReachBarrier};
use nix::errno::Errno;
use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, setns};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::{
    AddressFamily, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, socket,
};

/// A look takes at most this part of the time until the next one, however many connections a machine has.
const LOOK_SHARE: u32 = 50; // 2 % of a processor
/// Multicast groups of rtnetlink: changes of links and addresses (linux/rtnetlink.h).
const NETWORK_GROUPS: u32 =
    (libc::RTMGRP_LINK | libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR).cast_unsigned();
/// The file that the service keeps locked.
const SERVICE_LOCK: &str = "/run/cedos-queues/lock";
/// Where network namespaces have names: those of `ip netns` and of container engines.
const NAMESPACE_FOLDERS: [&str; 2] = ["/run/netns", "/run/docker/netns"];

/// Starts the process beside an agent; it ends with the pipe.
///
/// # Errors
/// It cannot be started.
pub fn start(lambda: DrwaLambda) -> anyhow::Result<File> {
    let mut child = Command::new(std::env::current_exe()?)
        .arg("agent")
        .arg(format!("--keep-queues-short={lambda}"))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .context("cannot start the process that keeps queues short")?;
    let pipe = child.stdin.take().context("no pipe to it")?;
    Ok(File::from(OwnedFd::from(pipe)))
}

/// Who keeps the queues of this user's programs short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueReach {
    /// A process beside the agent can.
    Agent,
    /// The system's service does.
    Service,
    /// Nobody does, for this reason.
    Nobody(ReachBarrier),
}

impl QueueReach {
    /// Who does it on this machine.
    pub fn of_this_user() -> QueueReach {
        if is_locked(Path::new(SERVICE_LOCK)) {
            return QueueReach::Service;
        }
        ReachBarrier::of_this_process().map_or(QueueReach::Agent, QueueReach::Nobody)
    }
}

/// Whether another process has this file and keeps it locked.
fn is_locked(path: &Path) -> bool {
    let locked = File::open(path).map(|file| file.try_lock_shared());
    matches!(locked, Ok(Err(TryLockError::WouldBlock)))
}

/// Keeps queues short beside an agent, until the pipe on standard input ends or the kernel does not let it. Nobody may have asked
/// for it, so a failure is no error.
pub fn run(lambda: DrwaLambda) {
    // A terminal's signals are for the agent, with which this process ends in any case.
    let _ = nix::unistd::setsid();
    // Who may reach sockets of others needs nothing else.
    let rights = keep_capabilities(CapabilitySet::SYS_PTRACE).map_err(anyhow::Error::msg);
    let queues = DeviceQueues::new(lambda);
    let input = std::io::stdin();
    let kept = rights.and_then(|()| keep_short(queues, input.as_fd(), || ()));
    if let Err(error) = kept {
        print_stderr(&format!(
            "note: queues of programs are not kept short: {error:#}"
        ));
    }
}

/// Keeps queues short for the programs of all users, as a service, until SIGTERM or SIGINT.
///
/// # Errors
/// Another service does it, or the kernel does not let this process.
pub fn run_for_all(lambda: DrwaLambda) -> anyhow::Result<()> {
    let lock = Path::new(SERVICE_LOCK);
    let folder = lock.parent().expect("a file in a folder");
    let file = std::fs::create_dir_all(folder).and_then(|()| File::create(lock));
    let file = file.with_context(|| format!("cannot write {SERVICE_LOCK}; run it as root"))?;
    if file.try_lock().is_err() {
        bail!("another service keeps queues short already");
    }
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    signals.thread_block().context("signals")?;
    let end = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC).context("signals")?;
    // The last one is for other network namespaces, and may be missing.
    let kept = CapabilitySet::BPF | CapabilitySet::PERFMON | CapabilitySet::SYS_ADMIN;
    keep_capabilities(kept).map_err(anyhow::Error::msg)?;
    let queues = of_all_users(lambda)?;
    print_stderr("cedos agent: keeps the queues of bloated networks short for all users");
    let mut others = NamedNamespaces::default();
    let kept = keep_short(queues, end.as_fd(), || others.update(lambda));
    others.end();
    kept
}

fn of_all_users(lambda: DrwaLambda) -> anyhow::Result<DeviceQueues> {
    DeviceQueues::of_all_users(lambda).context(
        "cannot load a BPF program, which needs Linux 5.15 with BTF, and the capabilities BPF and PERFMON",
    )
}

/// Looks at connections until `end` can be read or has ended. After each look it calls `after_look`.
fn keep_short(
    mut queues: DeviceQueues,
    end: BorrowedFd<'_>,
    mut after_look: impl FnMut(),
) -> anyhow::Result<()> {
    let begun = Instant::now();
    let mut is_said = false;
    loop {
        let span = match has_network() {
            false => None,
            true => {
                let began = begun.elapsed();
                let look = queues.update(Time::ZERO + began.into());
                let look = look.context("cannot look at connections")?;
                if look.out_of_reach > 0 && !std::mem::replace(&mut is_said, true) {
                    print_stderr(
                        "note: the queues of some programs are not kept short, because these programs keep others from \
                         their sockets",
                    );
                }
                let took = begun.elapsed() - began;
                Some(Duration::from(look.next).max(took * LOOK_SHARE))
            }
        };
        after_look();
        if wait(end, span)? == WaitEnd::End {
            queues.lift();
            return Ok(());
        }
    }
}

/// Network namespaces with names, in each of which a thread keeps queues short.
#[derive(Default)]
struct NamedNamespaces {
    /// By the number of the namespace: a pipe to the thread, which ends with it.
    threads: BTreeMap<u64, (OwnedFd, JoinHandle<()>)>,
}

impl NamedNamespaces {
    /// Starts and ends threads, as namespaces come and go.
    fn update(&mut self, lambda: DrwaLambda) {
        let named = named_namespaces();
        self.threads.retain(|number, _| named.contains_key(number));
        for (number, path) in named {
            if self.threads.contains_key(&number) {
                continue;
            }
            let Ok((end, told)) = nix::unistd::pipe() else {
                return;
            };
            let thread = std::thread::spawn(move || {
                if let Err(error) = keep_short_within(&path, lambda, &end) {
                    let name = path.display();
                    print_stderr(&format!(
                        "note: queues in {name} are not kept short: {error:#}"
                    ));
                }
            });
            self.threads.insert(number, (told, thread));
        }
    }

    /// Ends all threads, and waits until they have lifted their limits.
    fn end(self) {
        for (told, thread) in self.threads.into_values() {
            drop(told);
            let _ = thread.join();
        }
    }
}

/// The network namespaces that have names, but for that of this process: by number, one name of each.
fn named_namespaces() -> BTreeMap<u64, PathBuf> {
    let Ok(own) = std::fs::metadata("/proc/self/ns/net") else {
        return BTreeMap::new();
    };
    let folders = NAMESPACE_FOLDERS
        .iter()
        .filter_map(|folder| std::fs::read_dir(folder).ok());
    let named = folders.flatten().flatten().filter_map(|entry| {
        let file = entry.metadata().ok()?;
        // A name is a file of another file system until the namespace is mounted on it.
        let is_another = file.dev() == own.dev() && file.ino() != own.ino();
        is_another.then(|| (file.ino(), entry.path()))
    });
    named.collect()
}

/// Keeps queues short in a network namespace, on a thread of its own.
fn keep_short_within(path: &Path, lambda: DrwaLambda, end: &OwnedFd) -> anyhow::Result<()> {
    let namespace = File::open(path).context("cannot open it")?;
    setns(namespace, CloneFlags::CLONE_NEWNET).context("cannot enter it")?;
    keep_short(of_all_users(lambda)?, end.as_fd(), || ())
}

/// Whether a link that leads to others has an address and a carrier.
fn has_network() -> bool {
    let Ok(addresses) = getifaddrs() else {
        return true;
    };
    addresses.into_iter().any(|one| {
        let is_inet = one.address.as_ref().is_some_and(|address| {
            address.as_sockaddr_in().is_some() || address.as_sockaddr_in6().is_some()
        });
        let leads_to_others = one.flags.contains(InterfaceFlags::IFF_RUNNING)
            && !one.flags.contains(InterfaceFlags::IFF_LOOPBACK);
        is_inet && leads_to_others
    })
}

/// Why a wait is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WaitEnd {
    /// Connections are to be looked at.
    Look,
    /// The process or thread is to end.
    End,
}

/// Waits this long, or without a limit for a network, and for `end`.
fn wait(end: BorrowedFd<'_>, span: Option<Duration>) -> anyhow::Result<WaitEnd> {
    let changes = match span {
        Some(_) => None,
        None => {
            let changes = network_changes().context("cannot hear of changes of networks")?;
            if has_network() {
                return Ok(WaitEnd::Look);
            }
            Some(changes)
        }
    };
    let mut awaited = vec![PollFd::new(end, PollFlags::POLLIN)];
    let changes = changes
        .iter()
        .map(|one| PollFd::new(one.as_fd(), PollFlags::POLLIN));
    awaited.extend(changes);
    let timeout = span.map_or(PollTimeout::NONE, |span| {
        PollTimeout::try_from(span).unwrap_or(PollTimeout::MAX)
    });
    match poll(&mut awaited, timeout) {
        Ok(_) | Err(Errno::EINTR) => {}
        Err(error) => return Err(error).context("cannot wait"),
    }
    Ok(match awaited[0].any() {
        Some(true) => WaitEnd::End,
        _ => WaitEnd::Look,
    })
}

/// A socket on which the kernel announces changes of links and addresses (rtnetlink(7)).
fn network_changes() -> nix::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let protocol = SockProtocol::NetlinkRoute;
    let kernel = socket(AddressFamily::Netlink, SockType::Raw, flags, protocol)?;
    bind(kernel.as_raw_fd(), &NetlinkAddr::new(0, NETWORK_GROUPS))?;
    Ok(kernel)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_that_runs_is_told_from_one_that_left_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        assert!(!is_locked(&path));
        let file = File::create(&path).unwrap();
        file.try_lock().unwrap();
        assert!(is_locked(&path));
        drop(file);
        assert!(!is_locked(&path));
    }

    #[test]
    fn a_wait_is_over_when_its_time_is_and_at_once_when_it_is_told_to_end() {
        let (end, told) = nix::unistd::pipe().unwrap();
        let soon = Some(Duration::from_millis(10));
        assert_eq!(wait(end.as_fd(), soon).unwrap(), WaitEnd::Look);
        drop(told);
        let late = Some(Duration::from_secs(90));
        assert_eq!(wait(end.as_fd(), late).unwrap(), WaitEnd::End);
    }
}
