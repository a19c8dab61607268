//! The process that changes the system's network for a proxy in its sandbox: its device, its rules, forwarding.
//!
//! ```text
//!  cedos prox, before its sandbox ── starts ──▶ helper, with root's rights
//!      │ "open"                                   │ a device that the proxy's user may attach to; rules
//!      │ attaches to the device                   │
//!      │ "close", or its end ───────────────────▶ │ no rules, no device; it ends with the proxy
//! ```
//!
//! It does two things, to one device and inner networks that it was started with. Whoever takes over the proxy can have
//! them done and undone, and nothing else. It cleans up even if the proxy is killed.

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use d2tp_tunnel::{INNER_MTU_MAX, SystemCommandError, ip_batch, run_command};
use ipnet::IpNet;
use nix::unistd::geteuid;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::signal::unix::{SignalKind, signal};

use crate::inner_addresses::InnerNets;
use crate::packet_network::PacketNetworkError;
use crate::tunnel_rules::{DEVICE, TunnelRules};

/// The variable with the descriptor of the helper's socket, for a proxy that begins anew.
const SOCKET_VARIABLE: &str = "CEDOS_PROX_TUNNEL_HELPER";

/// How long the helper may take for one request.
const ANSWER_WITHIN: Duration = Duration::from_secs(20); // a guess: `nft` on a slow machine

/// How often it is tried to remove a device that a task of the proxy still reads.
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
pub struct TunnelHelper(Arc<Mutex<BufReader<UnixStream>>>);

impl TunnelHelper {
    /// Starts this program again as the helper, with these arguments and the inner networks behind them. Must be called
    /// before the sandbox and before there are threads.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(arguments: &[&str], nets: &[IpNet]) -> io::Result<TunnelHelper> {
        let (ours, theirs) = UnixStream::pair()?;
        let nets: Vec<String> = nets.iter().map(IpNet::to_string).collect();
        // It ends by itself when this process has.
        Command::new("/proc/self/exe")
            .args(arguments)
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
        let text = std::env::var(SOCKET_VARIABLE).ok()?;
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
        Ok(TunnelHelper(Arc::new(Mutex::new(BufReader::new(socket)))))
    }

    /// What a proxy that begins anew needs in its environment to find the helper.
    pub fn environment(&self) -> (&'static str, String) {
        let socket = self.0.lock().get_ref().as_raw_fd();
        (SOCKET_VARIABLE, socket.to_string())
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

    /// Removes them.
    pub(crate) fn close(&self) {
        match self.ask(&HelperRequest::Close) {
            Ok(HelperAnswer::Done) => {}
            Ok(answer) => tracing::warn!(?answer, "the rules of packet tunnels stay"),
            Err(error) => tracing::warn!(%error, "the rules of packet tunnels stay"),
        }
    }

    fn ask(&self, request: &HelperRequest) -> io::Result<HelperAnswer> {
        let mut socket = self.0.lock();
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
    /// None if another proxy of this host has them.
    fn open(nets: &InnerNets, owner: u32) -> Result<Option<OpenNetwork>, String> {
        let name = SocketAddr::from_abstract_name(format!("cedos/{DEVICE}"));
        let lock = name.and_then(|name| UnixListener::bind_addr(&name));
        let lock = match lock {
            Ok(lock) => lock,
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => return Ok(None),
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
    for line in BufReader::new(socket.try_clone()?).lines() {
        let answer = match serde_json::from_str(&line?) {
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
    Ok(())
}
