//! Blocking streams and listeners, like those of `std::net`.

use std::io::{self, Read, Write};
use std::mem::MaybeUninit;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use crate::connection::{D2tpConnection, sealed};
use crate::connection_token::ConnectionToken;
use crate::raw::{self, WaitOutcome};
use crate::settings::{ConnectSettings, PendingSocket};

/// A D2TP connection. Its own operations are in [`crate::D2tpConnection`].
#[derive(Debug)]
pub struct D2tpStream(OwnedFd);

impl sealed::SealedStream for D2tpStream {}
impl D2tpConnection for D2tpStream {}

impl ConnectSettings {
    /// Connects to `d2tp://host:port/KEY`, or to `host:port` through the proxy. Waits for a network
    /// if there is none.
    ///
    /// # Errors
    /// The same as those of `d2tp_connect`; the inner [`crate::ConnectionFault`] has the cause in
    /// words.
    pub fn connect(&self, address: &str) -> io::Result<D2tpStream> {
        let fd = PendingSocket(Some(self.socket(address, libc::SOCK_STREAM)?));
        raw::connect(fd.get(), address).map_err(|errno| raw::error(fd.get(), errno))?;
        Ok(D2tpStream::from(fd.made()))
    }
}

impl From<OwnedFd> for D2tpStream {
    fn from(fd: OwnedFd) -> D2tpStream {
        D2tpStream(fd)
    }
}

impl From<D2tpStream> for OwnedFd {
    fn from(stream: D2tpStream) -> OwnedFd {
        stream.0
    }
}

impl D2tpStream {
    /// Connects with [`crate::ConnectSettings::default`].
    ///
    /// # Errors
    /// The same as those of [`crate::ConnectSettings::connect`].
    pub fn connect(address: &str) -> io::Result<D2tpStream> {
        ConnectSettings::default().connect(address)
    }

    /// Creates another handle of the same connection.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn try_clone(&self) -> io::Result<D2tpStream> {
        Ok(D2tpStream(self.0.try_clone()?))
    }

    /// Ends one direction or both.
    ///
    /// # Errors
    /// The stream is not connected.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        raw::shutdown(self, in_c(how))
    }

    /// Opens a connection again that was [`crate::ConnectionPersist::Open`] and whose process has
    /// ended. Reading continues with the first byte that it had not read, and the token stays the
    /// same.
    ///
    /// # Errors
    /// With a [`crate::ConnectionFault`]: `NotFound` if no connection with this token is kept;
    /// `ResourceBusy` while its process exists, even if it dropped the stream; `Unsupported`
    /// without an agent; else why the connection broke meanwhile.
    pub fn reopen(token: &ConnectionToken) -> io::Result<D2tpStream> {
        raw::reopen(&token.0, 0).map(D2tpStream)
    }

    /// Ends the connection for all handles; written data is still sent. Dropping the stream does
    /// the same, except that a connection of [`crate::ConnectionPersist::Open`] can be opened again
    /// once this process has ended.
    ///
    /// # Errors
    /// The same as those of the kernel's `close`.
    pub fn end(self) -> io::Result<()> {
        raw::close(self.0)
    }

    /// Waits until the peer has received everything that was written: for this time, in whole
    /// milliseconds, or without limit. [`Write::flush`] returns at once, as for TCP.
    ///
    /// # Errors
    /// The connection broke before, or `WouldBlock`: not yet.
    pub fn flush_to_peer(&self, within: Option<Duration>) -> io::Result<()> {
        let timeout = within.map_or(-1, |within| within.as_millis().min(1 << 30) as i32);
        raw::flush(self, timeout)
    }

    /// The address of the peer.
    ///
    /// # Errors
    /// The stream is not connected, or was connected by name, without an IP address.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        raw::peer(self)
    }
}

pub(crate) fn in_c(how: Shutdown) -> i32 {
    match how {
        Shutdown::Read => libc::SHUT_RD,
        Shutdown::Write => libc::SHUT_WR,
        Shutdown::Both => libc::SHUT_RDWR,
    }
}

/// Views initialised bytes as bytes that may be uninitialised.
pub(crate) fn perhaps(bytes: &mut [u8]) -> &mut [MaybeUninit<u8>] {
    let (at, len) = (bytes.as_mut_ptr(), bytes.len());
    // SAFETY: the same memory and length; only received bytes are written there.
    unsafe { std::slice::from_raw_parts_mut(at.cast(), len) }
}

impl Read for &D2tpStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        raw::recv(self.as_fd(), perhaps(into))
    }
}

impl Write for &D2tpStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        raw::send(self.as_fd(), bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for D2tpStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        (&*self).read(into)
    }
}

impl Write for D2tpStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&*self).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for D2tpStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for D2tpStream {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// The most connections that wait to be accepted in the kernel; others wait in the engine.
const BACKLOG: i32 = 128;

/// A listening D2TP server.
#[derive(Debug)]
pub struct D2tpListener(OwnedFd);

impl D2tpListener {
    /// Listens at a UDP address.
    ///
    /// # Errors
    /// The address is in use, or the process's key is not available.
    pub fn bind(at: SocketAddr) -> io::Result<D2tpListener> {
        D2tpListener::bound(at, 0).map(D2tpListener)
    }

    pub(crate) fn bound(at: SocketAddr, flags: i32) -> io::Result<OwnedFd> {
        let fd = raw::socket(at.is_ipv6(), libc::SOCK_STREAM | flags)?;
        raw::bind(&fd, at)?;
        raw::listen(&fd, BACKLOG)?;
        Ok(fd)
    }

    /// Accepts a connection. Returns it with its current address.
    ///
    /// # Errors
    /// The same as those of the kernel's `accept`.
    pub fn accept(&self) -> io::Result<(D2tpStream, SocketAddr)> {
        let (fd, from) = raw::accept(self, false)?;
        Ok((D2tpStream(fd), from))
    }

    /// Accepts a connection, unless `give_up` becomes readable before. No other thread may accept
    /// meanwhile, because this call would wait for another connection.
    ///
    /// # Errors
    /// The same as those of the kernel's `accept`.
    pub fn accept_until(
        &self,
        give_up: BorrowedFd<'_>,
    ) -> io::Result<Option<(D2tpStream, SocketAddr)>> {
        match raw::wait(self.as_fd(), libc::POLLIN, give_up)? {
            WaitOutcome::GivenUp => Ok(None),
            WaitOutcome::Ready => self.accept().map(Some),
        }
    }

    /// Ends listening. The address is free when this returns, or once the last accepted connection
    /// is over; after a drop it is free a moment later.
    ///
    /// # Errors
    /// The same as those of the kernel's `close`.
    pub fn end(self) -> io::Result<()> {
        raw::close(self.0)
    }

    /// The address that the listener is bound to.
    ///
    /// # Errors
    /// A parent process opened it.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        raw::local(self)
    }

    /// The address for clients: `d2tp://host:port/KEY`.
    ///
    /// # Errors
    /// The same as those of [`D2tpListener::local_addr`].
    pub fn address(&self) -> io::Result<String> {
        address(self)
    }
}

pub(crate) fn address(listener: &impl AsFd) -> io::Result<String> {
    let key = raw::text(listener, raw::SO_HOSTKEY)?;
    Ok(format!("d2tp://{}/{key}", raw::local(listener)?))
}

impl AsFd for D2tpListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
