//! Binds a socket to a link: options, the order of attempts, and errors.
//!
//! The order matters: `SO_BINDTODEVICE` comes before `bind`, because Linux lets an unprivileged
//! process bind only a socket that is not yet bound (since 5.7). A source address alone does not
//! choose the outgoing device; the routing table does. If the system refuses, `IP_UNICAST_IF` (or
//! its IPv6 counterpart) directs the routing instead; packets that arrive on other devices are then
//! not filtered. If it refuses that as well, only the link's address connects the socket with the
//! link.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;

use socket2::{Domain, Protocol, Socket, Type};

/// The default size that is requested for each direction's kernel buffer, in bytes.
///
/// 4 MB hold 32 ms at 1 Gb/s. A smaller buffer loses bursts while the process is not scheduled; a
/// larger one only delays the detection of overload. The kernel may give less
/// (`net.core.rmem_max`).
pub const SOCKET_BUFFER_BYTES: usize = 4 << 20; // a guess, to be measured under load

/// How a [`crate::LinkSocket`] is bound.
#[derive(Debug, Clone)]
pub struct BindOptions {
    /// The local address on the link. Port 0 chooses a free one; the unspecified address stands for
    /// all local addresses.
    pub local: SocketAddr,
    /// The network device to which the socket is confined, for example `wlan0`. `None`: routing
    /// decides.
    pub device: Option<String>,
    /// The strictest confinement to the device that is tried. If the system refuses it, the next
    /// weaker one is tried. Anything weaker than [`DeviceConfinement::Device`] is for tests, and
    /// for programs that share a device with a VPN on purpose.
    pub firmest: DeviceConfinement,
    /// Whether several sockets (one for each worker) may share the port.
    pub reuse_port: bool,
    /// The size of the send buffer to request, in bytes; 0 keeps the system's default.
    pub send_buffer_bytes: usize,
    /// The size of the receive buffer to request, in bytes; 0 keeps the system's default.
    pub recv_buffer_bytes: usize,
}

impl BindOptions {
    /// Options for an ordinary socket at `local`: any device, port not shared, large buffers.
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

    /// Confines the socket to a network device: packets leave and arrive only by `device`.
    pub fn on_device(mut self, device: impl Into<String>) -> BindOptions {
        self.device = Some(device.into());
        self
    }
}

/// How strictly a socket is confined to its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceConfinement {
    /// Routing decides; no device was requested.
    None,
    /// `SO_BINDTODEVICE`: no packet leaves or arrives by another device.
    Device,
    /// `IP_UNICAST_IF`: sent packets leave by the device; received ones are not filtered.
    Egress,
    /// Only the source address is the link's. Routing may still use another device, unless it
    /// chooses by source address as on phones.
    Address,
}

/// Why a socket could not be bound.
#[derive(Debug)]
pub struct BindError {
    /// The local address that was requested.
    pub local: SocketAddr,
    /// The device that was requested.
    pub device: Option<String>,
    /// The step that failed, as the name of its system call or option.
    pub step: &'static str,
    /// The system's error.
    pub cause: io::Error,
}

impl fmt::Display for BindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot bind {}", self.local)?;
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

// The message contains the cause already. A source would repeat it when the chain is printed.
impl std::error::Error for BindError {}

impl From<BindError> for io::Error {
    fn from(error: BindError) -> io::Error {
        io::Error::new(error.cause.kind(), error)
    }
}

/// Creates the bound, non-blocking socket that `options` describe.
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
        // One family for each socket, because the v4 and v6 addresses of a link come and go
        // independently.
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

/// Creates an unconnected UDP socket that is bound according to `options`, for packets of no session.
///
/// # Errors
/// [`BindError`] names the step that failed.
pub fn bind_udp(options: &BindOptions) -> Result<std::net::UdpSocket, BindError> {
    bind(options).map(|(socket, _)| socket)
}

/// Creates an unconnected TCP socket that is bound according to `options`, except for its buffer
/// sizes.
///
/// # Errors
/// [`BindError`] names the step that failed.
pub fn bind_tcp(options: &BindOptions) -> Result<std::net::TcpStream, BindError> {
    let fail = |step| {
        move |cause| BindError {
            local: options.local,
            device: options.device.clone(),
            step,
            cause,
        }
    };
    let domain = Domain::for_address(options.local);
    let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP)).map_err(fail("socket"))?;
    socket.set_nonblocking(true).map_err(fail("O_NONBLOCK"))?;
    if let Some(device) = &options.device {
        confine(&socket, domain, device, options.firmest).map_err(fail("SO_BINDTODEVICE"))?;
    }
    socket.bind(&options.local.into()).map_err(fail("bind"))?;
    Ok(socket.into())
}

/// Confines a socket to a device as strictly as the system allows. If it allows neither option,
/// only the bound address is left.
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

/// Whether the system does not permit or does not know the option, in contrast to "there is no such
/// device".
fn is_refusal(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EPERM | libc::EACCES | libc::ENOPROTOOPT | libc::EOPNOTSUPP | libc::ENOSYS)
    )
}

/// Makes routing use the device for packets that the socket sends.
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

/// Requests the buffer sizes, beyond the system's limit if permitted. Smaller buffers are not an
/// error.
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
    // The kernel doubles the value, so it must stay below half of the type's range.
    bytes.min(libc::c_int::MAX as usize / 2) as libc::c_int
}

fn set_option<T: Copy>(socket: &Socket, level: i32, option: i32, value: T) -> io::Result<()> {
    // SAFETY: pointer and length describe `value`, which lives during the call; the caller owns the
    // descriptor.
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
