//! Streams that block, as `std::net`'s do.

use std::io::{self, Read, Write};
use std::mem::MaybeUninit;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use crate::connection::Token;
use crate::raw;

/// A connection. What only D2TP knows of it is in [`crate::Connection`].
#[derive(Debug)]
pub struct Stream(OwnedFd);

impl From<OwnedFd> for Stream {
    fn from(fd: OwnedFd) -> Stream {
        Stream(fd)
    }
}

impl From<Stream> for OwnedFd {
    fn from(stream: Stream) -> OwnedFd {
        stream.0
    }
}

impl Stream {
    /// Connects with [`crate::Settings::default`].
    ///
    /// # Errors
    /// As for [`crate::Settings::connect`].
    pub fn connect(address: &str) -> io::Result<Stream> {
        crate::Settings::default().connect(address)
    }

    /// Another handle of the same connection.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn try_clone(&self) -> io::Result<Stream> {
        Ok(Stream(self.0.try_clone()?))
    }

    /// Ends one direction or both.
    ///
    /// # Errors
    /// It is not connected.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        raw::shutdown(self, in_c(how))
    }

    /// A connection of [`crate::Persist::Open`] whose process has ended: reading goes on with the first byte that it
    /// had not read, and the token stays the same.
    ///
    /// # Errors
    /// With a [`crate::Cause`]: `NotFound` where none of this token is kept; `ResourceBusy` while the process that has
    /// it is there, though it dropped the stream; `Unsupported` without an agent; else why it broke meanwhile.
    pub fn reopen(token: &Token) -> io::Result<Stream> {
        raw::reopen(&token.0, 0).map(Stream)
    }

    /// Ends the connection for everybody: what was written is still sent. A drop does the same, but leaves one of
    /// [`crate::Persist::Open`] to be opened again once this process has ended.
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

/// The same memory: initialised bytes are also perhaps initialised ones.
pub(crate) fn perhaps(bytes: &mut [u8]) -> &mut [MaybeUninit<u8>] {
    let (at, len) = (bytes.as_mut_ptr(), bytes.len());
    // SAFETY: the same place and length; only bytes that were received are written there.
    unsafe { std::slice::from_raw_parts_mut(at.cast(), len) }
}

impl Read for &Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        raw::recv(self.as_fd(), perhaps(into))
    }
}

impl Write for &Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        raw::send(self.as_fd(), bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        (&*self).read(into)
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&*self).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Stream {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Connections that wait to be accepted, as many as the kernel lets; others wait in the engine.
const BACKLOG: i32 = 128;

/// A D2TP server.
#[derive(Debug)]
pub struct Listener(OwnedFd);

impl Listener {
    /// Listens at a UDP address.
    ///
    /// # Errors
    /// The address is taken, or the process's key cannot be had.
    pub fn bind(at: SocketAddr) -> io::Result<Listener> {
        Listener::bound(at, 0).map(Listener)
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
    pub fn accept(&self) -> io::Result<(Stream, SocketAddr)> {
        let (fd, from) = raw::accept(self, false)?;
        Ok((Stream(fd), from))
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
    /// As for [`Listener::local_addr`].
    pub fn address(&self) -> io::Result<String> {
        address(self)
    }
}

pub(crate) fn address(listener: &impl AsFd) -> io::Result<String> {
    let key = raw::text(listener, raw::SO_HOSTKEY)?;
    Ok(format!("d2tp://{}/{key}", raw::local(listener)?))
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
