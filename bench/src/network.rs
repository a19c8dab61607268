//! Networks made for one run, in network namespaces: the machine's own network is not changed.
//!
//! ```text
//!  lo1500     one namespace, its lo at MTU 1500              127.0.0.1 ──▶ 127.0.0.1
//!  veth1500   two namespaces, a veth pair at MTU 1500        10.77.0.1 ──▶ 10.77.0.2
//!             receive work of each end steered (RPS) to the core of the process at that end
//!  veth9000   the same at MTU 9000: jumbo frames
//! ```
//!
//! Without steering, a veth's receive work runs on the core that sent, so TCP would measure the
//! sender's core twice. On lo the sender does the receive work anyway and no steering is set.
//!
//! Namespaces need root, or a user namespace in which the process is root, which is tried without
//! root. A namespace lives as long as its descriptor here or a process in it.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::thread;

use anyhow::{Context, Result, anyhow};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::{Uid, getgid, getuid};
use rtnetlink::packet_route::link::{InfoData, InfoVeth};
use rtnetlink::{LinkUnspec, LinkVeth};

use crate::placement::{ProcessPlacement, RECEIVER_CORE, SENDER_CORE};

/// The MTU of the Internet.
pub const MTU_BYTES: u32 = 1500;
/// The MTU of networks with jumbo frames.
const MTU_JUMBO_BYTES: u32 = 9000;

const SENDER_LINK: &str = "bench-snd";
/// The interface of [`BenchNetworkKind::Veth1500`] at the receiver.
pub const RECEIVER_LINK: &str = "bench-rcv";
/// The address of the sender in [`BenchNetworkKind::Veth1500`].
pub const SENDER_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const RECEIVER_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
const PREFIX_BITS: u8 = 24;

/// The kind of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum BenchNetworkKind {
    /// The loopback device of a fresh namespace, MTU 1500
    Lo1500,
    /// A veth pair between two fresh namespaces, MTU 1500
    Veth1500,
    /// A veth pair between two fresh namespaces, MTU 9000
    Veth9000,
}

impl BenchNetworkKind {
    /// The name in tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lo1500 => "lo1500",
            Self::Veth1500 => "veth1500",
            Self::Veth9000 => "veth9000",
        }
    }
}

/// A network, and the namespaces of its two ends.
#[derive(Debug)]
pub struct BenchNetwork {
    receiver_address: IpAddr,
    /// What readers of the results must know about the network.
    pub notes: String,
    sender: File,
    receiver: File,
}

impl BenchNetwork {
    /// Makes the namespaces and devices. Call [`enter_user_namespace`] before.
    pub fn make(kind: BenchNetworkKind) -> Result<Self> {
        let made = match kind {
            BenchNetworkKind::Lo1500 => lo(),
            BenchNetworkKind::Veth1500 => veth(MTU_BYTES),
            BenchNetworkKind::Veth9000 => veth(MTU_JUMBO_BYTES),
        };
        made.with_context(|| format!("the network {} could not be made", kind.name()))
    }
}

impl ProcessPlacement for BenchNetwork {
    fn receiver_address(&self) -> IpAddr {
        self.receiver_address
    }
    fn start_receiver(&self, command: Command) -> Result<Child> {
        start_in(&self.receiver, command)
    }
    fn start_sender(&self, command: Command) -> Result<Child> {
        start_in(&self.sender, command)
    }
    fn holds_cores(&self) -> bool {
        true
    }
}

/// Becomes root of a new user namespace unless root already. Must be called before any thread
/// starts.
///
/// # Errors
/// The system forbids user namespaces.
pub fn enter_user_namespace() -> Result<()> {
    if Uid::effective().is_root() {
        return Ok(());
    }
    let (uid, gid) = (getuid(), getgid());
    unshare(CloneFlags::CLONE_NEWUSER).context(
        "this system does not let an ordinary user make namespaces: run as root, or allow user \
         namespaces (sysctl kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)",
    )?;
    // setgroups must be denied before a group may be mapped: user_namespaces(7).
    std::fs::write("/proc/self/setgroups", "deny")?;
    std::fs::write("/proc/self/uid_map", format!("0 {uid} 1"))?;
    std::fs::write("/proc/self/gid_map", format!("0 {gid} 1"))?;
    Ok(())
}

fn lo() -> Result<BenchNetwork> {
    let namespace = new_namespace()?;
    in_namespace(&namespace, || {
        netlink(async |handle| {
            let lo = LinkUnspec::new_with_name("lo").mtu(MTU_BYTES).up().build();
            handle.link().set(lo).execute().await?;
            Ok(())
        })
    })?;
    Ok(BenchNetwork {
        receiver_address: Ipv4Addr::LOCALHOST.into(),
        notes: format!("lo of a fresh namespace, MTU {MTU_BYTES}, no steering"),
        receiver: namespace.try_clone()?,
        sender: namespace,
    })
}

fn veth(mtu: u32) -> Result<BenchNetwork> {
    let sender = new_namespace()?;
    let receiver = new_namespace()?;
    // Before the devices exist: they take the namespace's default when they are made, which may be
    // set without root of the whole machine. If a kernel has no default, steer() sets it.
    let _ = in_namespace(&sender, || steer_new_devices(SENDER_CORE));
    let _ = in_namespace(&receiver, || steer_new_devices(RECEIVER_CORE));
    in_namespace(&sender, || {
        netlink(async |handle| {
            // It is made in its final namespace: a moved device keeps the steering of its first
            // namespace.
            let far_end = LinkUnspec::new_with_name(RECEIVER_LINK)
                .setns_by_fd(receiver.as_raw_fd())
                .build();
            let pair = LinkVeth::new(SENDER_LINK, RECEIVER_LINK)
                .set_info_data(InfoData::Veth(InfoVeth::Peer(far_end)))
                .build();
            handle.link().add(pair).execute().await?;
            bring_up_lo(&handle).await?;
            bring_up(&handle, SENDER_LINK, SENDER_ADDRESS, mtu).await
        })
    })?;
    in_namespace(&receiver, || {
        netlink(async |handle| {
            bring_up_lo(&handle).await?;
            bring_up(&handle, RECEIVER_LINK, RECEIVER_ADDRESS, mtu).await
        })
    })?;
    let steered = in_namespace(&sender, || steer(SENDER_LINK, SENDER_CORE))
        .and_then(|()| in_namespace(&receiver, || steer(RECEIVER_LINK, RECEIVER_CORE)));
    let steering = match steered {
        Ok(()) => format!(
            "receive work steered (RPS) to core {SENDER_CORE} at the sender, {RECEIVER_CORE} at the receiver"
        ),
        Err(error) => {
            format!("NOT steered (RPS), so TCP measures the sender's core twice: {error:#}")
        }
    };
    Ok(BenchNetwork {
        receiver_address: RECEIVER_ADDRESS.into(),
        notes: format!("veth pair between two namespaces, MTU {mtu}, {steering}"),
        sender,
        receiver,
    })
}

/// The other ends of `libd2tp`'s descriptors use it.
async fn bring_up_lo(handle: &rtnetlink::Handle) -> Result<()> {
    let lo = LinkUnspec::new_with_name("lo").up().build();
    Ok(handle.link().set(lo).execute().await?)
}

async fn bring_up(
    handle: &rtnetlink::Handle,
    link: &str,
    address: Ipv4Addr,
    mtu: u32,
) -> Result<()> {
    use futures_util::TryStreamExt;
    let found = handle
        .link()
        .get()
        .match_name(link.to_owned())
        .execute()
        .try_next()
        .await?
        .ok_or_else(|| anyhow!("{link} is not in its namespace"))?;
    handle
        .address()
        .add(found.header.index, address.into(), PREFIX_BITS)
        .execute()
        .await?;
    let up = LinkUnspec::new_with_name(link).mtu(mtu).up().build();
    handle.link().set(up).execute().await?;
    Ok(())
}

/// Makes future devices of this namespace steer their receive work to `core`.
fn steer_new_devices(core: usize) -> Result<()> {
    std::fs::write("/proc/sys/net/core/rps_default_mask", mask(core))?;
    Ok(())
}

/// Steers the receive work of `link` to `core`. sysfs shows the devices of the namespace in which
/// it was mounted, so it is mounted again, in a mount namespace of this thread.
fn steer(link: &str, core: usize) -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNS).context("no mount namespace")?;
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .context("no private mounts")?;
    mount(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), none).context("no sysfs")?;
    let file = format!("/sys/class/net/{link}/queues/rx-0/rps_cpus");
    let is_set = || -> Result<bool> {
        let set = std::fs::read_to_string(&file)?;
        Ok(set.trim().trim_start_matches(['0', ',']) == mask(core))
    };
    if is_set()? {
        return Ok(());
    }
    std::fs::write(&file, mask(core)).with_context(|| file.clone())?;
    if is_set()? {
        Ok(())
    } else {
        Err(anyhow!("{file} does not keep what is written to it"))
    }
}

fn mask(core: usize) -> String {
    format!("{:x}", 1u64 << core)
}

/// Makes a network namespace.
pub fn new_namespace() -> Result<File> {
    in_thread(|| {
        unshare(CloneFlags::CLONE_NEWNET)
            .context("no network namespace may be made here: run as root")?;
        Ok(File::open("/proc/thread-self/ns/net")?)
    })
}

/// Makes a network namespace in which this machine's own addresses work.
///
/// # Errors
/// No namespace may be made.
pub fn namespace_with_lo() -> Result<File> {
    let namespace = new_namespace()?;
    in_namespace(&namespace, || {
        netlink(async |handle| bring_up_lo(&handle).await)
    })?;
    Ok(namespace)
}

/// Runs a function in a namespace, in a thread of its own.
pub fn in_namespace<T: Send>(
    namespace: &File,
    run: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    in_thread(|| {
        setns(namespace.as_fd(), CloneFlags::CLONE_NEWNET)?;
        run()
    })
}

/// Runs a function in its own thread, because namespaces belong to threads.
fn in_thread<T: Send>(run: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|scope| scope.spawn(run).join()).expect("the thread does not panic")
}

fn netlink(run: impl AsyncFnOnce(rtnetlink::Handle) -> Result<()>) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let (connection, handle, _) = rtnetlink::new_connection()?;
        tokio::spawn(connection);
        run(handle).await
    })
}

/// Starts a program in a namespace; it ends with this process.
pub fn start_in(namespace: &File, mut command: Command) -> Result<Child> {
    let at = namespace.as_raw_fd();
    // SAFETY: between fork and exec only plain system calls are made; the descriptor stays open in
    // the parent until the child has been spawned.
    unsafe {
        command.pre_exec(move || {
            // If the parent is killed, its children end.
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            match libc::setns(at, libc::CLONE_NEWNET) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
    command
        .spawn()
        .context("a process of the measurement could not be started")
}
