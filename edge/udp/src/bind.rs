//! Binding a socket to a link: options, the order of attempts, and what can go wrong.
//!
//! Order matters: `SO_BINDTODEVICE` before `bind`, because Linux lets an unprivileged process
//! bind a socket that is not yet bound (since 5.7), and because a source address alone does not
//! choose the way out: the routing table does. Where the system refuses, `IP_UNICAST_IF` (or its
//! IPv6 twin) steers routing instead; replies arriving on other devices are then not filtered.
//! Where it refuses that too, the link's address is all that says which link is meant.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;

use socket2::{Domain, Protocol, Socket, Type};

/// Default size asked of the kernel for each direction's buffer.
///
/// 4 MB hold 32 ms at 1 Gb/s. Smaller loses bursts while the process is not scheduled; larger
/// only delays the news of overload. The kernel may give less (`net.core.rmem_max`).
pub const SOCKET_BUFFER_BYTES: usize = 4 << 20; // a guess, to be measured under load

/// Where and how to bind a [`crate::LinkSocket`].
#[derive(Debug, Clone)]
pub struct BindOptions {
    /// Our address on the link; port 0 picks a free one, the unspecified address any of ours.
    pub local: SocketAddr,
    /// The network device to stay on, for example `wlan0`. `None`: whatever routing says.
    pub device: Option<String>,
    /// The firmest confinement to the device to try; what the system refuses gives way to the
    /// next looser one. Anything looser than [`DeviceConfinement::Device`] is for tests and for programs
    /// that share a device with a VPN on purpose.
    pub firmest: DeviceConfinement,
    /// Lets several sockets (one per worker) share the port.
    pub reuse_port: bool,
    /// Send buffer asked of the kernel, in bytes; 0 keeps the system's default.
    pub send_buffer_bytes: usize,
    /// Receive buffer asked of the kernel, in bytes; 0 keeps the system's default.
    pub recv_buffer_bytes: usize,
}

impl BindOptions {
    /// The usual socket at `local`: any device, port not shared, generous buffers.
    pub fn at(local: SocketAddr) -> BindOptions {
        BindOptions {
            local,
            device: None,
            firmest: DeviceConfinement::Device,
            reuse_port: false,
            send_buffer_bytes: SOCKET_BUFFER_BYTES,
            recv_buffer_bytes: SOCKET_BUFFER_BYTES,
        }
    }

    /// Binds to a network device: packets leave and come by `device` only.
    pub fn on_device(mut self, device: impl Into<String>) -> BindOptions {
        self.device = Some(device.into());
        self
    }
}

/// How firmly a socket stays on its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceConfinement {
    /// Routing decides; no device was asked for.
    None,
    /// `SO_BINDTODEVICE`: nothing leaves or arrives by another device.
    Device,
    /// `IP_UNICAST_IF`: what we send leaves by the device; arrivals are not filtered.
    Egress,
    /// Only the source address is the link's: routing may still send it out by another device,
    /// unless it chooses by source address as phones do.
    Address,
}

/// Why a socket could not be bound.
#[derive(Debug)]
pub struct BindError {
    /// The local address asked for.
    pub local: SocketAddr,
    /// The device asked for.
    pub device: Option<String>,
    /// The step that failed, as the name of its system call or option.
    pub step: &'static str,
    /// What the system said.
    pub cause: io::Error,
}

impl fmt::Display for BindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot bind UDP {}", self.local)?;
        if let Some(device) = &self.device {
            write!(f, " on {device}")?;
        }
        write!(f, ": {}: {}", self.step, self.cause)?;
        match self.cause.raw_os_error() {
            Some(libc::ENODEV) => write!(f, " (no such network device; see `ip link`)"),
            Some(libc::EADDRNOTAVAIL) => {
                write!(f, " (the address is not, or no longer, on this machine)")
            }
            Some(libc::EADDRINUSE) => write!(f, " (another program has the port; choose another)"),
            Some(libc::EPERM) | Some(libc::EACCES) => {
                write!(f, " (needs CAP_NET_RAW, or Linux 5.7 or later)")
            }
            _ => Ok(()),
        }
    }
}

// Its words tell the cause already: no source, or whoever prints the chain says it twice.
impl std::error::Error for BindError {}

impl From<BindError> for io::Error {
    fn from(error: BindError) -> io::Error {
        io::Error::new(error.cause.kind(), error)
    }
}

/// Makes the bound, non-blocking socket that `options` describe.
pub(crate) fn bind(
    options: &BindOptions,
) -> Result<(std::net::UdpSocket, DeviceConfinement), BindError> {
    let fail = |step| {
        move |cause| BindError {
            local: options.local,
            device: options.device.clone(),
            step,
            cause,
        }
    };
    let domain = Domain::for_address(options.local);
    let socket = Socket::new(domain, Type::DGRAM, Some(Protocol::UDP)).map_err(fail("socket"))?;
    socket.set_nonblocking(true).map_err(fail("O_NONBLOCK"))?;
    if domain == Domain::IPV6 {
        // One family per socket: a link has v4 and v6 addresses with different fates.
        socket.set_only_v6(true).map_err(fail("IPV6_V6ONLY"))?;
    }
    if options.reuse_port {
        socket.set_reuse_port(true).map_err(fail("SO_REUSEPORT"))?;
    }
    let confinement = match &options.device {
        None => DeviceConfinement::None,
        Some(device) => {
            confine(&socket, domain, device, options.firmest).map_err(fail("SO_BINDTODEVICE"))?
        }
    };
    enlarge(&socket, options);
    socket.bind(&options.local.into()).map_err(fail("bind"))?;
    Ok((socket.into(), confinement))
}

/// Keeps a socket on a device as firmly as the system lets us. The bound address is what is left
/// where it lets us do neither.
fn confine(
    socket: &Socket,
    domain: Domain,
    device: &str,
    firmest: DeviceConfinement,
) -> io::Result<DeviceConfinement> {
    if firmest == DeviceConfinement::Device {
        match socket.bind_device(Some(device.as_bytes())) {
            Ok(()) => return Ok(DeviceConfinement::Device),
            Err(error) if is_refusal(&error) => {
                tracing::info!(device, %error, "SO_BINDTODEVICE refused");
            }
            Err(error) => return Err(error),
        }
    }
    if firmest != DeviceConfinement::Address {
        match prefer_for_sending(socket, domain, device) {
            Ok(()) => {
                tracing::info!(device, "only what is sent keeps to the device");
                return Ok(DeviceConfinement::Egress);
            }
            Err(error) if is_refusal(&error) => {
                tracing::info!(device, %error, "IP_UNICAST_IF refused");
            }
            Err(error) => return Err(error),
        }
    }
    tracing::warn!(
        device,
        "the socket has the link's address, but the system's routing chooses the way out: what is \
         meant for this link may leave by another. CAP_NET_RAW, Linux 5.7, or routing by source \
         address keeps it there"
    );
    Ok(DeviceConfinement::Address)
}

/// We may not, or this system does not know how; as opposed to "there is no such device".
fn is_refusal(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EPERM | libc::EACCES | libc::ENOPROTOOPT | libc::EOPNOTSUPP | libc::ENOSYS)
    )
}

/// Has routing use the device for what the socket sends.
fn prefer_for_sending(socket: &Socket, domain: Domain, device: &str) -> io::Result<()> {
    let name =
        std::ffi::CString::new(device).map_err(|_| io::Error::from_raw_os_error(libc::ENODEV))?;
    // SAFETY: `name` is a NUL-terminated string that outlives the call.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    if index == 0 {
        return Err(io::Error::last_os_error());
    }
    // Both options take the index in network byte order.
    let index = index.to_be();
    let (level, option) = if domain == Domain::IPV6 {
        (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_IF)
    } else {
        (libc::IPPROTO_IP, libc::IP_UNICAST_IF)
    };
    set_option(socket, level, option, index)
}

/// Asks for the buffer sizes, beyond the system's limit where we may. Less is not an error.
fn enlarge(socket: &Socket, options: &BindOptions) {
    let (send, recv) = (options.send_buffer_bytes, options.recv_buffer_bytes);
    if send > 0
        && set_option(socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, clamp(send)).is_err()
        && let Err(error) = socket.set_send_buffer_size(send)
    {
        tracing::debug!(%error, "send buffer stays at the system's default");
    }
    if recv > 0
        && set_option(socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, clamp(recv)).is_err()
        && let Err(error) = socket.set_recv_buffer_size(recv)
    {
        tracing::debug!(%error, "receive buffer stays at the system's default");
    }
}

fn clamp(bytes: usize) -> libc::c_int {
    // The kernel doubles what it is given, so stay below half of the type.
    bytes.min(libc::c_int::MAX as usize / 2) as libc::c_int
}

fn set_option<T: Copy>(socket: &Socket, level: i32, option: i32, value: T) -> io::Result<()> {
    // SAFETY: the pointer and length describe `value`, alive for the call; the descriptor is ours.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
