//! Datagram sockets: unreliable messages with boundaries, encrypted like streams.

use std::io;
use std::mem::ManuallyDrop;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use crate::raw;
use crate::settings::{ConnectSettings, SendRoute, seconds};
use crate::stream::{self, perhaps};

/// A datagram socket: a device's, connected to a D2TP server, or a server's, which is bound.
/// Messages of about 1,100 bytes always fit. Messages sent while there is no network wait until
/// they expire ([`DatagramSocket::set_expiry`]), at most 64 of them.
///
/// ```
/// # fn main() -> std::io::Result<()> {
/// # let home = std::env::temp_dir().join(format!("d2tp-datagrams-doc-{}", std::process::id()));
/// # // SAFETY: nothing else runs yet.
/// # unsafe { std::env::set_var("XDG_CONFIG_HOME", &home) };
/// use d2tp_sockets::DatagramSocket;
/// use std::time::Duration;
///
/// let server = DatagramSocket::bind("127.0.0.1:0".parse().unwrap())?;
/// let device = DatagramSocket::connect(&server.address()?)?;
/// device.set_expiry(Duration::from_secs(30))?;
/// device.send(b"where I am now")?;
/// let mut message = [0; 1500];
/// let (bytes, from) = server.recv_from(&mut message)?;
/// assert_eq!(&message[..bytes], b"where I am now");
/// server.send_to(b"heard", from)?;
/// assert_eq!(device.recv(&mut message)?, 5);
/// # std::fs::remove_dir_all(home)
/// # }
/// ```
#[derive(Debug)]
pub struct DatagramSocket(ManuallyDrop<OwnedFd>);

impl ConnectSettings {
    /// Creates a datagram socket that is connected to the D2TP server at `d2tp://host:port/KEY`.
    /// Returns at once, whether or not there is a network. Policy, budget and size have no effect:
    /// datagrams use only free networks.
    ///
    /// # Errors
    /// The same as those of `d2tp_connect`: `InvalidInput` for an invalid address, ENETUNREACH or
    /// EPROTONOSUPPORT if the server's key is missing, `Unsupported` with
    /// [`ConnectSettings::persist`] or [`ConnectSettings::buffer`], which are for streams.
    pub fn connect_datagrams(&self, address: &str) -> io::Result<DatagramSocket> {
        let fd = self.socket(address, libc::SOCK_DGRAM)?;
        raw::connect(&fd, address).map_err(|errno| raw::error(&fd, errno))?;
        Ok(DatagramSocket::from(fd))
    }
}

impl From<OwnedFd> for DatagramSocket {
    fn from(fd: OwnedFd) -> DatagramSocket {
        DatagramSocket(ManuallyDrop::new(fd))
    }
}

impl DatagramSocket {
    /// Connects with [`ConnectSettings::default`] to `d2tp://host:port/KEY`, and returns at once.
    ///
    /// # Errors
    /// The same as those of [`ConnectSettings::connect_datagrams`].
    pub fn connect(address: &str) -> io::Result<DatagramSocket> {
        ConnectSettings::default().connect_datagrams(address)
    }

    /// Binds a server to a UDP address.
    ///
    /// # Errors
    /// The address is in use, or the process's key is not available.
    pub fn bind(at: SocketAddr) -> io::Result<DatagramSocket> {
        let fd = raw::socket(at.is_ipv6(), libc::SOCK_DGRAM)?;
        raw::bind(&fd, at)?;
        Ok(DatagramSocket::from(fd))
    }

    /// Sends a message to the server that this socket is connected to.
    ///
    /// # Errors
    /// EMSGSIZE: no packet can carry it; `ConnectionReset`, ETIME: the session is over;
    /// EDESTADDRREQ: the socket is a server's.
    pub fn send(&self, message: &[u8]) -> io::Result<usize> {
        raw::send(self.as_fd(), message)
    }

    /// Receives the next message. The part that does not fit into `into` is lost.
    ///
    /// # Errors
    /// `WouldBlock` after the time of [`DatagramSocket::set_read_timeout`]; `ConnectionReset`,
    /// ETIME: the session is over.
    pub fn recv(&self, into: &mut [u8]) -> io::Result<usize> {
        raw::recv(self.as_fd(), perhaps(into))
    }

    /// Sends a message to the device with this address, whatever networks it uses now.
    ///
    /// # Errors
    /// EMSGSIZE: no packet can carry it; `ConnectionRefused`: the device is gone; `NotConnected`:
    /// no device has sent from this address; EISCONN: this is not a server's socket.
    pub fn send_to(&self, message: &[u8], to: SocketAddr) -> io::Result<usize> {
        raw::send_to(self, message, to)
    }

    /// Receives the next message and the sender's address: for a server an address of 127.1.0.0/16
    /// that stands for the device's session and does not change when the device moves; else the
    /// server's, or 0.0.0.0 if the socket was connected by name.
    ///
    /// # Errors
    /// The same as those of [`DatagramSocket::recv`].
    pub fn recv_from(&self, into: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        raw::recv_from(self, into)
    }

    /// Sets the time after which an unsent message is dropped: a millisecond to a day; the default
    /// is a second. Higher: late messages are still sent. Lower: fewer of them arrive.
    ///
    /// # Errors
    /// `InvalidInput`: the time is out of range.
    pub fn set_expiry(&self, within: Duration) -> io::Result<()> {
        let milliseconds = i32::try_from(within.as_millis()).unwrap_or(i32::MAX);
        raw::set(self, raw::SO_EXPIRY, &milliseconds.to_ne_bytes())
    }

    /// Sets which paths carry sent messages.
    ///
    /// # Errors
    /// A parent process opened the socket.
    pub fn set_route(&self, route: SendRoute) -> io::Result<()> {
        raw::set(self, raw::SO_ROUTE, &(route as i32).to_ne_bytes())
    }

    /// Sets the deadline, at which the session ends, counted from now in whole seconds; `None`
    /// removes it.
    ///
    /// # Errors
    /// A parent process opened the socket.
    pub fn set_deadline(&self, within: Option<Duration>) -> io::Result<()> {
        raw::set(self, raw::SO_DEADLINE, &seconds(within))
    }

    /// Sets how long [`DatagramSocket::recv`] waits; `None`: without limit.
    ///
    /// # Errors
    /// The same as those of the kernel's `setsockopt`.
    pub fn set_read_timeout(&self, within: Option<Duration>) -> io::Result<()> {
        raw::set_read_timeout(self, within)
    }

    /// The address that a server is bound to.
    ///
    /// # Errors
    /// A parent process opened the socket.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        raw::local(self)
    }

    /// The address for clients of a server: `d2tp://host:port/KEY`.
    ///
    /// # Errors
    /// The same as those of [`DatagramSocket::local_addr`].
    pub fn address(&self) -> io::Result<String> {
        stream::address(self)
    }
}

impl Drop for DatagramSocket {
    fn drop(&mut self) {
        // SAFETY: it is not used after this.
        let fd = unsafe { ManuallyDrop::take(&mut self.0) };
        // Closed by the library's call, so that the address is free again.
        let _ = raw::close(fd);
    }
}

impl AsFd for DatagramSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for DatagramSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
