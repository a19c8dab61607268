//! Connections and listeners on tokio.

use std::io;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::spawn_blocking;

use crate::connection::{D2tpConnection, sealed};
use crate::connection_token::ConnectionToken;
use crate::settings::{ConnectSettings, PendingSocket};
use crate::{raw, stream};

impl ConnectSettings {
    /// Connects like [`ConnectSettings::connect`], on tokio. Dropping the future gives up the
    /// attempt.
    ///
    /// # Errors
    /// The same as those of [`ConnectSettings::connect`].
    pub async fn connect_async(&self, address: &str) -> io::Result<AsyncStream> {
        let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK;
        let fd = PendingSocket(Some(self.socket(address, kind)?));
        match raw::connect(fd.get(), address) {
            Err(said) if said.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(said) => return Err(raw::error(fd.get(), said)),
            Ok(()) => {}
        }
        // SAFETY: it is registered no longer than it is open.
        let watch = unsafe { AsyncFd::register(fd.get().as_fd()) }.map_err(io::Error::from)?;
        watch.writable().await?.retain_ready();
        drop(watch);
        raw::pending(fd.get())?;
        Ok(AsyncStream(watched(fd.made())?))
    }
}

fn watched(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an owned descriptor stays the same open one until it is dropped.
    unsafe { AsyncFd::register(fd) }.map_err(io::Error::from)
}

/// A D2TP connection for tokio: `AsyncRead` and `AsyncWrite` over a kernel socket.
#[derive(Debug)]
pub struct AsyncStream(AsyncFd<OwnedFd>);

impl sealed::SealedStream for AsyncStream {}
impl D2tpConnection for AsyncStream {}

impl AsyncStream {
    /// Connects with [`ConnectSettings::default`].
    ///
    /// # Errors
    /// The same as those of [`ConnectSettings::connect`].
    pub async fn connect(address: &str) -> io::Result<AsyncStream> {
        ConnectSettings::default().connect_async(address).await
    }

    /// Opens a connection again like [`crate::D2tpStream::reopen`], on tokio. Dropping the future
    /// leaves the connection as dropping the stream does.
    ///
    /// # Errors
    /// The same as those of [`crate::D2tpStream::reopen`].
    pub async fn reopen(token: &ConnectionToken) -> io::Result<AsyncStream> {
        let token = token.clone();
        // An agent may take two seconds to answer.
        let reopened = spawn_blocking(move || raw::reopen(&token.0, libc::SOCK_NONBLOCK)).await;
        watched(reopened.map_err(io::Error::other)??).map(AsyncStream)
    }

    /// Ends the connection like [`crate::D2tpStream::end`], on tokio.
    ///
    /// # Errors
    /// The same as those of [`crate::D2tpStream::end`].
    pub async fn end(self) -> io::Result<()> {
        let fd = self.0.into_inner();
        let ended = spawn_blocking(move || raw::close(fd)).await;
        ended.map_err(io::Error::other)?
    }

    /// Waits until the peer has received everything that was written. `flush` of
    /// [`tokio::io::AsyncWriteExt`] returns at once, as for TCP. It uses a thread for blocking
    /// calls.
    ///
    /// # Errors
    /// The connection broke before.
    pub async fn flush_to_peer(&self) -> io::Result<()> {
        loop {
            let fd = self.0.get_ref().try_clone()?;
            let flushed = spawn_blocking(move || raw::flush(&fd, FLUSH_LOOK_MS)).await;
            match flushed.map_err(io::Error::other)? {
                Err(late) if late.kind() == io::ErrorKind::WouldBlock => {}
                flushed => return flushed,
            }
        }
    }
}

/// How soon a thread notices that its flush was dropped, in milliseconds. A guess.
const FLUSH_LOOK_MS: i32 = 200;

impl AsyncRead for AsyncStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let mut guard = ready!(self.0.poll_read_ready(cx))?;
            // SAFETY: only received bytes are written there.
            let into: &mut [MaybeUninit<u8>] = unsafe { buffer.unfilled_mut() };
            match guard.try_io(|fd| raw::recv(fd.as_fd(), into)) {
                Ok(read) => {
                    let bytes = read?;
                    // SAFETY: this many bytes were received.
                    unsafe { buffer.assume_init(bytes) };
                    buffer.advance(bytes);
                    return Poll::Ready(Ok(()));
                }
                Err(_not_yet) => {}
            }
        }
    }
}

impl AsyncWrite for AsyncStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = ready!(self.0.poll_write_ready(cx))?;
            match guard.try_io(|fd| raw::send(fd.as_fd(), bytes)) {
                Ok(written) => return Poll::Ready(written),
                Err(_not_yet) => {}
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(raw::shutdown(&self.0.as_fd(), libc::SHUT_WR))
    }
}

impl AsFd for AsyncStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A listening D2TP server for tokio.
#[derive(Debug)]
pub struct AsyncListener(AsyncFd<OwnedFd>);

impl AsyncListener {
    /// Listens at a UDP address.
    ///
    /// # Errors
    /// The same as those of [`crate::D2tpListener::bind`].
    pub fn bind(at: SocketAddr) -> io::Result<AsyncListener> {
        let fd = crate::D2tpListener::bound(at, libc::SOCK_NONBLOCK)?;
        watched(fd).map(AsyncListener)
    }

    /// Accepts a connection. Returns it with its current address.
    ///
    /// # Errors
    /// The same as those of the kernel's `accept`.
    pub async fn accept(&self) -> io::Result<(AsyncStream, SocketAddr)> {
        loop {
            let mut guard = self.0.readable().await?;
            if let Ok(accepted) = guard.try_io(|fd| raw::accept(&fd.as_fd(), true)) {
                let (fd, from) = accepted?;
                return Ok((AsyncStream(watched(fd)?), from));
            }
        }
    }

    /// The address for clients: `d2tp://host:port/KEY`.
    ///
    /// # Errors
    /// The same as those of [`crate::D2tpListener::local_addr`].
    pub fn address(&self) -> io::Result<String> {
        stream::address(&self.0.as_fd())
    }
}
