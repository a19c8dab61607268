//! Streams that block, as `std::net`'s do.

use std::io::{self, Read, Write};
use std::mem::MaybeUninit;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use crate::connection::{D2tpConnection, sealed};
use crate::connection_token::ConnectionToken;
use crate::raw::{self, WaitOutcome};
use crate::settings::{ConnectSettings, PendingSocket};

/// A connection. What only D2TP knows of it is in [`crate::D2tpConnection`].
#[derive(Debug)]
pub struct D2tpStream(OwnedFd);

impl sealed::SealedStream for D2tpStream {}
impl D2tpConnection for D2tpStream {}

impl ConnectSettings {
    /// Connects to `d2tp://host:port/KEY`, or to `host:port` through the proxy; waits for a network if there is
    /// none.
    ///
    /// # Errors
    /// As `d2tp_connect` says them; [`crate::ConnectionFault`] within has the cause in words.
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
    /// As for [`crate::ConnectSettings::connect`].
    pub fn connect(address: &str) -> io::Result<D2tpStream> {
        ConnectSettings::default().connect(address)
    }

    /// Another handle of the same connection.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn try_clone(&self) -> io::Result<D2tpStream> {
        Ok(D2tpStream(self.0.try_clone()?))
    }

    /// Ends one direction or both.
    ///
    /// # Errors
    /// It is not connected.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        raw::shutdown(self, in_c(how))
    }

    /// A connection of [`crate::ConnectionPersist::Open`] whose process has ended: reading goes on with the first byte that it
    /// had not read, and the token stays the same.
    ///
    /// # Errors
    /// With a [`crate::ConnectionFault`]: `NotFound` where none of this token is kept; `ResourceBusy` while the process that has
    /// it is there, though it dropped the stream; `Unsupported` without an agent; else why it broke meanwhile.
    pub fn reopen(token: &ConnectionToken) -> io::Result<D2tpStream> {
        raw::reopen(&token.0, 0).map(D2tpStream)
    }

    /// Ends the connection for everybody: what was written is still sent. A drop does the same, but leaves one of
    /// [`crate::ConnectionPersist::Open`] to be opened again once this process has ended.
    ///
    /// # Errors
    /// As for `close` of the kernel.
    pub fn end(self) -> io::Result<()> {
        raw::close(self.0)
    }

    /// Waits until the peer has everything that was written: so long, in whole milliseconds, or as long as it takes.
    /// [`Write::flush`] returns at once, as for TCP.
    ///
    /// # Errors
    /// The connection broke before, or `WouldBlock`: not yet.
    pub fn flush_to_peer(&self, within: Option<Duration>) -> io::Result<()> {
        let timeout = within.map_or(-1, |within| within.as_millis().min(1 << 30) as i32);
        raw::flush(self, timeout)
    }

    /// Who is at the far end.
    ///
    /// # Errors
    /// It is not connected, or was connected by a name, which is no address.
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
    // SAFETY: the same place and length; only bytes that were received are written there.
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

/// Connections that wait to be accepted, as many as the kernel lets; others wait in the engine.
const BACKLOG: i32 = 128;

/// A D2TP server.
#[derive(Debug)]
pub struct D2tpListener(OwnedFd);

impl D2tpListener {
    /// Listens at a UDP address.
    ///
    /// # Errors
    /// The address is taken, or the process's key cannot be had.
    pub fn bind(at: SocketAddr) -> io::Result<D2tpListener> {
        D2tpListener::bound(at, 0).map(D2tpListener)
    }

    pub(crate) fn bound(at: SocketAddr, flags: i32) -> io::Result<OwnedFd> {
        let fd = raw::socket(at.is_ipv6(), libc::SOCK_STREAM | flags)?;
        raw::bind(&fd, at)?;
        raw::listen(&fd, BACKLOG)?;
        Ok(fd)
    }

    /// The next connection, and where it comes from now.
    ///
    /// # Errors
    /// As for `accept` of the kernel.
    pub fn accept(&self) -> io::Result<(D2tpStream, SocketAddr)> {
        let (fd, from) = raw::accept(self, false)?;
        Ok((D2tpStream(fd), from))
    }

    /// The next connection, unless `give_up` becomes readable before it comes. Nobody else may accept meanwhile: this
    /// would wait for one more.
    ///
    /// # Errors
    /// As for `accept` of the kernel.
    pub fn accept_until(
        &self,
        give_up: BorrowedFd<'_>,
    ) -> io::Result<Option<(D2tpStream, SocketAddr)>> {
        match raw::wait(self.as_fd(), libc::POLLIN, give_up)? {
            WaitOutcome::GivenUp => Ok(None),
            WaitOutcome::Ready => self.accept().map(Some),
        }
    }

    /// Ends listening. The address is free when this returns, or once the last connection that was accepted is over; after
    /// a drop it is a moment later.
    ///
    /// # Errors
    /// As for `close` of the kernel.
    pub fn end(self) -> io::Result<()> {
        raw::close(self.0)
    }

    /// Where it listens.
    ///
    /// # Errors
    /// It was opened by a parent process.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        raw::local(self)
    }

    /// What others connect to: `d2tp://host:port/KEY`.
    ///
    /// # Errors
    /// As for [`D2tpListener::local_addr`].
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
