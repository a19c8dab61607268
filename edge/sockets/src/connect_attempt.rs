//! A connection that is being made, on a descriptor that is there already: for a language whose sockets are made of
//! a descriptor before they are connected.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use crate::raw::{self, WaitOutcome};
use crate::settings::{ConnectSettings, PendingSocket};
use crate::stream::D2tpStream;

/// A socket with its options that is not connected yet. Dropped, it leaves nothing with an agent.
#[derive(Debug)]
pub struct ConnectAttempt {
    socket: PendingSocket,
    address: String,
}

impl ConnectSettings {
    /// A socket that [`ConnectAttempt::run`] connects to `d2tp://host:port/KEY`, or to `host:port` through the proxy. Its
    /// descriptor does not block.
    ///
    /// # Errors
    /// The socket refuses an option.
    pub fn attempt(&self, address: &str) -> io::Result<ConnectAttempt> {
        let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK;
        Ok(ConnectAttempt {
            socket: PendingSocket(Some(self.socket(address, kind)?)),
            address: address.to_owned(),
        })
    }
}

impl ConnectAttempt {
    /// Connects, and waits until the connection is made; nothing comes of it once `give_up` is readable.
    ///
    /// # Errors
    /// As for [`ConnectSettings::connect`].
    pub fn run(self, give_up: BorrowedFd<'_>) -> io::Result<Option<D2tpStream>> {
        match raw::connect(self.socket.get(), &self.address) {
            Err(said) if said.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(said) => return Err(raw::error(self.socket.get(), said)),
            Ok(()) => {}
        }
        match raw::wait(self.socket.get().as_fd(), libc::POLLOUT, give_up)? {
            WaitOutcome::GivenUp => Ok(None),
            WaitOutcome::Ready => {
                raw::pending(self.socket.get())?;
                Ok(Some(D2tpStream::from(self.socket.made())))
            }
        }
    }
}

impl AsFd for ConnectAttempt {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.get().as_fd()
    }
}
