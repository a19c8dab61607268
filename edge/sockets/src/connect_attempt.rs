//! A connection attempt on an existing descriptor, for languages that create a socket from a
//! descriptor before it is connected.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use crate::raw::{self, WaitOutcome};
use crate::settings::{ConnectSettings, PendingSocket};
use crate::stream::D2tpStream;

/// A socket with options that is not connected yet. Dropping it leaves nothing with an agent.
#[derive(Debug)]
pub struct ConnectAttempt {
    socket: PendingSocket,
    address: String,
}

impl ConnectSettings {
    /// Creates a socket that [`ConnectAttempt::run`] connects to `d2tp://host:port/KEY`, or to
    /// `host:port` through the proxy. Its descriptor does not block.
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
    /// Connects, and waits until the connection is established. The attempt is given up when
    /// `give_up` becomes readable.
    ///
    /// # Errors
    /// The same as those of [`ConnectSettings::connect`].
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
