//! The process that changes the system's network for a proxy in its sandbox: its device, its rules, forwarding.
//!
//! ```text
//!  cedos prox, before its sandbox ── starts ──▶ helper, with root's rights
//!      │ "open"                                   │ a device that the proxy's user may attach to; rules
//!      │ attaches to the device                   │
//!      │ "close", or its end ───────────────────▶ │ no rules, no device; it ends with the proxy
//! ```
//!
//! It does two things, to one device and inner networks that it was started with: whoever takes over the proxy can have it do
//! them and undo them, and nothing else. It cleans up even if the proxy is killed.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use d2tp_tunnel::{INNER_MTU_MAX, SystemCommandError, ip_batch, run_command};
use ipnet::IpNet;
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::unistd::geteuid;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::signal::unix::{SignalKind, signal};

use crate::inner_addresses::InnerNets;
use crate::packet_network::PacketNetworkError;
use crate::tunnel_rules::{DEVICE, TunnelRules};

/// The variable with the descriptor of the helper's socket, for a proxy that begins anew.
pub(crate) const HELPER_SOCKET_VARIABLE: &str = "CEDOS_PROX_TUNNEL_HELPER";

/// How long the helper may take for one request.
const ANSWER_WITHIN: Duration = Duration::from_secs(20); // a guess: `nft` on a slow machine

/// The name of the abstract socket that is bound while a helper has the device.
const LOCK_NAME: &str = "cedos/cedos-prox0";

/// The flag of close_range(2) by which descriptors are closed at execve.
const CLOSE_RANGE_CLOEXEC: libc::c_uint = 4; // linux/close_range.h

/// The most bytes of a request.
const REQUEST_BYTES_MAX: u64 = 64;

/// The number of attempts to remove a device that a task of the proxy still reads.
const REMOVE_TRIES: u32 = 40;
const REMOVE_AGAIN: Duration = Duration::from_millis(50);

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum HelperRequest {
    Open,
    Close,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum HelperAnswer {
    Done,
    /// Another proxy of this host has the device.
    InUse,
    Failed(String),
}

/// The proxy's end of its helper.
#[derive(Clone, Debug)]
pub struct TunnelHelper {
    socket: Arc<Mutex<BufReader<UnixStream>>>,
    /// Whether an answer failed to come: a late one must not be taken for that to another request.
    is_broken: Arc<AtomicBool>,
}

impl TunnelHelper {
    /// Starts this program again as the helper, with these arguments and the inner networks behind them. Must be called
    /// before the sandbox and before there are threads.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(arguments: &[&str], nets: &[IpNet]) -> io::Result<TunnelHelper> {
        let (ours, theirs) = UnixStream::pair()?;
        let nets: Vec<String> = nets.iter().map(IpNet::to_string).collect();
        let mut command = Command::new("/proc/self/exe");
        // SAFETY: between fork and exec there is one system call.
        unsafe {
            command.pre_exec(|| {
                // Sockets of a service manager are this process's alone. musl has no function for the call.
                libc::syscall(
                    libc::SYS_close_range,
                    3,
                    libc::c_uint::MAX,
                    CLOSE_RANGE_CLOEXEC,
                );
                Ok(())
            });
        }
        // It ends by itself when this process has.
        command
            .args(arguments)
            .env_clear()
            .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
            .envs(std::env::var_os("RUST_LOG").map(|levels| ("RUST_LOG", levels)))
            // Errors are told apart by their words.
            .env("LC_ALL", "C")
            .arg(format!("--owner={}", geteuid()))
            .arg(nets.join(","))
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()?;
        // A proxy that begins anew keeps it.
        rustix::io::fcntl_setfd(&ours, rustix::io::FdFlags::empty())?;
        TunnelHelper::of(ours)
    }

    /// The helper of a proxy that began anew.
    pub fn adopt() -> Option<TunnelHelper> {
        let text = std::env::var(HELPER_SOCKET_VARIABLE).ok()?;
        let number = text.parse().ok().filter(|number| *number > 2)?;
        // SAFETY: the descriptor is looked at only while this expression lasts.
        let is_open = unsafe { rustix::io::fcntl_getfd(BorrowedFd::borrow_raw(number)) }.is_ok();
        if !is_open {
            return None;
        }
        // SAFETY: this process was given the descriptor for this, and nobody else takes it out of the variable.
        let socket = unsafe { OwnedFd::from_raw_fd(number) };
        TunnelHelper::of(socket.into()).ok()
    }

    fn of(socket: UnixStream) -> io::Result<TunnelHelper> {
        socket.set_read_timeout(Some(ANSWER_WITHIN))?;
        Ok(TunnelHelper {
            socket: Arc::new(Mutex::new(BufReader::new(socket))),
            is_broken: Arc::default(),
        })
    }

    /// What a proxy that begins anew needs in its environment to find the helper.
    pub fn environment(&self) -> (&'static str, String) {
        let socket = self.socket.lock().get_ref().as_raw_fd();
        (HELPER_SOCKET_VARIABLE, socket.to_string())
    }

    /// Makes the device and the rules. False if another proxy of this host has them.
    pub(crate) fn open(&self) -> Result<bool, PacketNetworkError> {
        match self.ask(&HelperRequest::Open) {
            Ok(HelperAnswer::Done) => Ok(true),
            Ok(HelperAnswer::InUse) => Ok(false),
            Ok(HelperAnswer::Failed(text)) => Err(PacketNetworkError::Helper(text)),
            Err(error) => Err(PacketNetworkError::Helper(error.to_string())),
        }
    }

    /// Removes the device and its addresses.
    pub(crate) fn close(&self) {
        match self.ask(&HelperRequest::Close) {
            Ok(HelperAnswer::Done) => {}
            Ok(answer) => tracing::warn!(?answer, "the rules of packet tunnels stay"),
            Err(error) => tracing::warn!(%error, "the rules of packet tunnels stay"),
        }
    }

    fn ask(&self, request: &HelperRequest) -> io::Result<HelperAnswer> {
        if self.is_broken.load(Ordering::Relaxed) {
            return Err(io::Error::other("its helper did not answer before"));
        }
        let answer = self.exchange(request);
        self.is_broken.store(answer.is_err(), Ordering::Relaxed);
        answer
    }

    fn exchange(&self, request: &HelperRequest) -> io::Result<HelperAnswer> {
        let mut socket = self.socket.lock();
        let text = serde_json::to_string(request)? + "\n";
        socket.get_mut().write_all(text.as_bytes())?;
        let mut answer = String::new();
        match socket.read_line(&mut answer)? {
            0 => Err(io::Error::other("its helper ended")),
            _ => Ok(serde_json::from_str(&answer)?),
        }
    }
}

/// The device and its rules, removed with this.
struct OpenNetwork {
    rules: Option<TunnelRules>,
    /// Bound while a helper has the device: the kernel knows the name only in this network namespace.
    _lock: UnixListener,
}

impl OpenNetwork {
    /// Makes them; none if another proxy of this host has a device of this name.
    fn open(nets: &InnerNets, owner: u32) -> Result<Option<OpenNetwork>, String> {
        let lock = lock_name().and_then(|name| UnixListener::bind_addr(&name));
        let lock = match lock {
            Ok(lock) => lock,
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => return check_holder(),
            Err(error) => return Err(error.to_string()),
        };
        // Of a helper that was killed.
        let _ = remove_device();
        if let Err(error) = add_device(owner) {
            // A proxy without a helper.
            return match error.to_string().contains("busy") {
                true => Ok(None),
                false => Err(error.to_string()),
            };
        }
        let mut network = OpenNetwork {
            rules: None,
            _lock: lock,
        };
        let rules = TunnelRules::set(nets).map_err(|error| error.to_string())?;
        network.rules = Some(rules);
        Ok(Some(network))
    }
}

/// Checks that the holder of the lock is another proxy: any program could bind its name.
fn check_holder() -> Result<Option<OpenNetwork>, String> {
    let holder = lock_name().and_then(|name| UnixStream::connect_addr(&name));
    let holder = holder.and_then(|at| Ok(getsockopt(&at, PeerCredentials)?));
    match holder {
        Ok(holder) if holder.uid() != 0 && holder.uid() != geteuid().as_raw() => Err(format!(
            "process {} of user {} holds the name {LOCK_NAME}; end it",
            holder.pid(),
            holder.uid()
        )),
        // Or it has just ended; it is tried again.
        _ => Ok(None),
    }
}

fn lock_name() -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(LOCK_NAME)
}

impl Drop for OpenNetwork {
    fn drop(&mut self) {
        self.rules = None;
        for _ in 0..REMOVE_TRIES {
            match remove_device() {
                Err(error) if error.to_string().contains("busy") => {
                    std::thread::sleep(REMOVE_AGAIN);
                }
                Err(error) => return tracing::warn!(%error, "{DEVICE} stays"),
                Ok(_) => return,
            }
        }
        tracing::warn!("{DEVICE} stays: a process reads it");
    }
}

/// Makes a device that processes of `owner` may attach to without any right.
fn add_device(owner: u32) -> Result<(), SystemCommandError> {
    let user = owner.to_string();
    let words = ["tuntap", "add", "dev", DEVICE, "mode", "tun", "user", &user];
    let words = [&words[..], &["vnet_hdr"]].concat();
    run_command("ip", "iproute2", &words, "")?;
    ip_batch(false, &format!("link set {DEVICE} mtu {INNER_MTU_MAX}\n"))
}

fn remove_device() -> Result<String, SystemCommandError> {
    let words = ["tuntap", "del", "dev", DEVICE, "mode", "tun"];
    run_command("ip", "iproute2", &words, "")
}

/// Serves the proxy at standard input until it ends.
///
/// # Errors
/// The networks make no sense, or signals cannot be taken.
pub async fn serve_tunnel_helper(nets: &[IpNet], owner: u32) -> io::Result<()> {
    let nets = InnerNets::of(nets).map_err(io::Error::other)?;
    // It ends after the proxy, whatever ends both: a terminal, a service manager.
    let _ignored = [
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
        signal(SignalKind::hangup())?,
    ];
    let input = io::stdin();
    let socket = UnixStream::from(std::os::fd::AsFd::as_fd(&input).try_clone_to_owned()?);
    let serving = move || serve(socket, &nets, owner);
    tokio::task::spawn_blocking(serving).await?
}

fn serve(mut socket: UnixStream, nets: &InnerNets, owner: u32) -> io::Result<()> {
    let mut open: Option<OpenNetwork> = None;
    let mut reader = BufReader::new(socket.try_clone()?);
    loop {
        let mut line = String::new();
        if (&mut reader).take(REQUEST_BYTES_MAX).read_line(&mut line)? == 0 {
            return Ok(());
        }
        let answer = match serde_json::from_str(&line) {
            Ok(HelperRequest::Open) if open.is_some() => HelperAnswer::Done,
            Ok(HelperRequest::Open) => match OpenNetwork::open(nets, owner) {
                Ok(Some(opened)) => {
                    open = Some(opened);
                    HelperAnswer::Done
                }
                Ok(None) => HelperAnswer::InUse,
                Err(text) => HelperAnswer::Failed(text),
            },
            Ok(HelperRequest::Close) => {
                open = None;
                HelperAnswer::Done
            }
            Err(error) => HelperAnswer::Failed(error.to_string()),
        };
        let text = serde_json::to_string(&answer)? + "\n";
        socket.write_all(text.as_bytes())?;
    }
}
