//! Messages: unreliable, never cut, as private as streams.

use std::io;
use std::mem::ManuallyDrop;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use crate::raw;
use crate::settings::{ConnectSettings, SendRoute, seconds};
use crate::stream::{self, perhaps};

/// A datagram socket: of a device, connected to a D2TP server, or of a server that is bound. Messages of some 1,100
/// bytes fit everywhere. What is sent while there is no network waits as long as it is worth it
/// ([`DatagramSocket::set_expiry`]), 64 messages at most.
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
    /// Datagrams to and from the D2TP server at `d2tp://host:port/KEY`; returns at once, whether or not there is a
    /// network. Policy, budget and size count for nothing: datagrams travel on networks that cost nothing.
    ///
    /// # Errors
    /// As `d2tp_connect` says them: `InvalidInput` for what is no address, ENETUNREACH or EPROTONOSUPPORT where the
    /// server's key is missing, `Unsupported` with [`ConnectSettings::persist`] or [`ConnectSettings::buffer`], which are of streams.
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
    /// Connects with [`ConnectSettings::default`] to `d2tp://host:port/KEY`, and waits for nothing.
    ///
    /// # Errors
    /// As for [`ConnectSettings::connect_datagrams`].
    pub fn connect(address: &str) -> io::Result<DatagramSocket> {
        ConnectSettings::default().connect_datagrams(address)
    }

    /// A server at a UDP address.
    ///
    /// # Errors
    /// The address is taken, or the process's key cannot be had.
    pub fn bind(at: SocketAddr) -> io::Result<DatagramSocket> {
        let fd = raw::socket(at.is_ipv6(), libc::SOCK_DGRAM)?;
        raw::bind(&fd, at)?;
        Ok(DatagramSocket::from(fd))
    }

    /// Sends a message to the server that this is connected to.
    ///
    /// # Errors
    /// EMSGSIZE: no packet carries it; `ConnectionReset`, ETIME: the session is over; EDESTADDRREQ: of a server.
    pub fn send(&self, message: &[u8]) -> io::Result<usize> {
        raw::send(self.as_fd(), message)
    }

    /// The next message. What does not fit `into` is lost.
    ///
    /// # Errors
    /// `WouldBlock` after [`DatagramSocket::set_read_timeout`]; `ConnectionReset`, ETIME: the session is over.
    pub fn recv(&self, into: &mut [u8]) -> io::Result<usize> {
        raw::recv(self.as_fd(), perhaps(into))
    }

    /// Answers the device that spoke by this address, whatever networks it is at now.
    ///
    /// # Errors
    /// EMSGSIZE; `ConnectionRefused`: that device is gone; `NotConnected`: an address that no device spoke by;
    /// EISCONN: this is no server.
    pub fn send_to(&self, message: &[u8], to: SocketAddr) -> io::Result<usize> {
        raw::send_to(self, message, to)
    }

    /// The next message and who sent it: for a server an address of 127.1.0.0/16 that names the device's session and
    /// stays the same when the device moves; else the server's, or 0.0.0.0 where that was connected to by a name.
    ///
    /// # Errors
    /// As for [`DatagramSocket::recv`].
    pub fn recv_from(&self, into: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        raw::recv_from(self, into)
    }

    /// How long a message is worth sending: a millisecond to a day, and a second unless said. Longer: what is late is
    /// still sent; shorter: less of it arrives.
    ///
    /// # Errors
    /// `InvalidInput`: less, or more.
    pub fn set_expiry(&self, within: Duration) -> io::Result<()> {
        let milliseconds = i32::try_from(within.as_millis()).unwrap_or(i32::MAX);
        raw::set(self, raw::SO_EXPIRY, &milliseconds.to_ne_bytes())
    }

    /// Which paths carry what is sent.
    ///
    /// # Errors
    /// It was opened by a parent process.
    pub fn set_route(&self, route: SendRoute) -> io::Result<()> {
        raw::set(self, raw::SO_ROUTE, &(route as i32).to_ne_bytes())
    }

    /// Changes the deadline, which ends the session, counted from now in whole seconds; or takes it away.
    ///
    /// # Errors
    /// It was opened by a parent process.
    pub fn set_deadline(&self, within: Option<Duration>) -> io::Result<()> {
        raw::set(self, raw::SO_DEADLINE, &seconds(within))
    }

    /// How long [`DatagramSocket::recv`] waits; none: for ever.
    ///
    /// # Errors
    /// As for `setsockopt` of the kernel.
    pub fn set_read_timeout(&self, within: Option<Duration>) -> io::Result<()> {
        raw::set_read_timeout(self, within)
    }

    /// Where a server is.
    ///
    /// # Errors
    /// It was opened by a parent process.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        raw::local(self)
    }

    /// What others connect to, of a server: `d2tp://host:port/KEY`.
    ///
    /// # Errors
    /// As for [`DatagramSocket::local_addr`].
    pub fn address(&self) -> io::Result<String> {
        stream::address(self)
    }
}

impl Drop for DatagramSocket {
    fn drop(&mut self) {
        // SAFETY: nobody has it after this.
        let fd = unsafe { ManuallyDrop::take(&mut self.0) };
        // By the library, so that the address is free again.
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
