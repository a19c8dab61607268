//! A UDP socket on one link, which sends and receives batches.
//!
//! The runtime is asked for readiness to receive alone. The kernel reports readiness to send for every packet that has
//! left, which would wake a thread for each; it is asked for while a full buffer makes a send wait.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use quinn_udp::{EcnCodepoint, UdpSockRef, UdpSocketState};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::batch::RecvBatch;
use crate::bind::{self, BindError, BindOptions, DeviceConfinement};

/// One datagram, or several of equal size in one buffer, for one destination.
#[derive(Debug, Clone)]
pub struct UdpTransmit<'a> {
    /// The destination address.
    pub dst: SocketAddr,
    /// The source address, for sockets bound to the unspecified address.
    pub src_ip: Option<IpAddr>,
    /// The ECN bits to set.
    pub ecn: Option<EcnCodepoint>,
    /// The datagrams, one after the other.
    pub contents: &'a [u8],
    /// The size of each datagram (the last may be smaller); `None` for a single one. At most
    /// [`LinkSocket::max_gso_segments`] of them may be sent in one call.
    pub segment_size: Option<usize>,
}

/// A UDP socket bound to one link.
///
/// It belongs to the tokio runtime on which it was bound. One task may poll for sending and one for
/// receiving; a second poller of the same direction displaces the first one's waker.
#[derive(Debug)]
pub struct LinkSocket {
    io: AsyncFd<OwnedFd>,
    /// The registration for readiness to send, while a send waits.
    send_wait: Mutex<Option<AsyncFd<OwnedFd>>>,
    state: UdpSocketState,
    confinement: DeviceConfinement,
    local: SocketAddr,
}

impl LinkSocket {
    /// Binds a socket to a link. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// [`BindError`] names the step that failed; [`crate::is_link_gone`] on it (as an
    /// [`io::Error`]) distinguishes a vanished device or address from a mistake.
    pub fn bind(options: &BindOptions) -> Result<LinkSocket, BindError> {
        let fail = |step| {
            move |cause| BindError {
                local: options.local,
                device: options.device.clone(),
                step,
                cause,
            }
        };
        let (socket, confinement) = bind::bind(options)?;
        let state = UdpSocketState::new(UdpSockRef::from(&socket))
            .map_err(fail("socket options for GSO, GRO and ECN"))?;
        let local = socket.local_addr().map_err(fail("getsockname"))?;
        let io = watch(socket.into(), Interest::READABLE)
            .map_err(fail("registering with the reactor"))?;
        Ok(LinkSocket {
            io,
            send_wait: Mutex::default(),
            state,
            confinement,
            local,
        })
    }

    /// Takes over a socket that the program bound itself. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// The socket cannot be made non-blocking, or refuses the options for batches.
    pub fn from_std(socket: UdpSocket) -> io::Result<LinkSocket> {
        socket.set_nonblocking(true)?;
        let state = UdpSocketState::new(UdpSockRef::from(&socket))?;
        let local = socket.local_addr()?;
        let io = watch(socket.into(), Interest::READABLE)?;
        Ok(LinkSocket {
            io,
            send_wait: Mutex::default(),
            state,
            confinement: DeviceConfinement::None,
            local,
        })
    }

    /// The address and port to which the socket is bound.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// How strictly the socket is confined to its device.
    pub fn confinement(&self) -> DeviceConfinement {
        self.confinement
    }

    /// The most datagrams that one [`LinkSocket::try_send`] passes to the kernel at once. It is 1
    /// without GSO, and it may *become* 1 when the device turns out not to support GSO, so read it
    /// before each batch.
    pub fn max_gso_segments(&self) -> usize {
        self.state.max_gso_segments()
    }

    /// The most datagrams that the kernel joins in one receive buffer; 1 without GRO.
    pub fn gro_segments(&self) -> usize {
        self.state.gro_segments()
    }

    /// Whether packets may be fragmented. Normally false, because don't-fragment is set.
    pub fn may_fragment(&self) -> bool {
        self.state.may_fragment()
    }

    /// Sends a batch without waiting.
    ///
    /// Without GSO the batch is sent as single datagrams. If the socket's buffer fills meanwhile,
    /// the rest is dropped as by a full queue, and loss recovery sends it again.
    ///
    /// # Errors
    /// `WouldBlock`: nothing was sent; wait on [`LinkSocket::poll_send_ready`].
    /// [`crate::is_too_big`] and [`crate::is_link_gone`] classify other errors.
    pub fn try_send(&self, transmit: &UdpTransmit<'_>) -> io::Result<()> {
        let single = transmit
            .segment_size
            .is_none_or(|size| size >= transmit.contents.len());
        if single || self.state.max_gso_segments() > 1 {
            match self.send_once(transmit, transmit.contents, transmit.segment_size) {
                // The library disabled GSO in this call, so the whole batch was refused.
                Err(error)
                    if !single && self.state.max_gso_segments() == 1 && is_gso_refusal(&error) => {}
                outcome => return outcome,
            }
        }
        self.send_singly(transmit)
    }

    /// Ready when a send that would have blocked may succeed. Must be called on a tokio runtime.
    pub fn poll_send_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut waiting = self
            .send_wait
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let registered = match waiting.take() {
            Some(registered) => registered,
            None => {
                // The runtime registers a descriptor once, so this is another one of the same socket.
                let socket = self.as_fd().try_clone_to_owned()?;
                watch(socket, Interest::WRITABLE)?
            }
        };
        match registered.poll_write_ready(cx) {
            Poll::Ready(ready) => Poll::Ready(ready.map(drop)),
            Poll::Pending => {
                *waiting = Some(registered);
                Poll::Pending
            }
        }
    }

    /// Receives without waiting. Returns the number of runs in `batch`.
    ///
    /// It tries first, and uses the reactor only after `WouldBlock`, because the reactor does not know the readiness of a
    /// fresh socket before its first turn. The second attempt, inside the reactor, clears the readiness that it remembers;
    /// without it a poll for readiness would spin.
    ///
    /// # Errors
    /// `WouldBlock` if nothing has arrived.
    pub fn try_recv(&self, batch: &mut RecvBatch) -> io::Result<usize> {
        match self.recv_once(batch) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self
                .io
                .try_io(Interest::READABLE, |_| self.recv_once(batch)),
            outcome => outcome,
        }
    }

    /// Receives, or registers to be woken. Returns the number of runs in `batch`.
    pub fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        batch: &mut RecvBatch,
    ) -> Poll<io::Result<usize>> {
        loop {
            let mut readiness = ready!(self.io.poll_read_ready(cx))?;
            let Ok(outcome) = readiness.try_io(|_| self.recv_once(batch)) else {
                continue;
            };
            if outcome.is_ok() && !batch.is_full() {
                // The socket is empty. What arrives from now on is reported anew.
                readiness.clear_ready();
            }
            return Poll::Ready(outcome);
        }
    }

    /// Receives at least one run.
    pub async fn recv(&self, batch: &mut RecvBatch) -> io::Result<usize> {
        std::future::poll_fn(|cx| self.poll_recv(cx, batch)).await
    }

    fn send_singly(&self, transmit: &UdpTransmit<'_>) -> io::Result<()> {
        let size = transmit
            .segment_size
            .unwrap_or(transmit.contents.len())
            .max(1);
        for (sent, datagram) in transmit.contents.chunks(size).enumerate() {
            match self.send_once(transmit, datagram, None) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && sent > 0 => break,
                outcome => outcome?,
            }
        }
        Ok(())
    }

    fn recv_once(&self, batch: &mut RecvBatch) -> io::Result<usize> {
        batch.fill(|buffers, meta| {
            self.state
                .recv(UdpSockRef::from(self.io.get_ref()), buffers, meta)
        })
    }

    fn send_once(
        &self,
        transmit: &UdpTransmit<'_>,
        contents: &[u8],
        segment_size: Option<usize>,
    ) -> io::Result<()> {
        let message = quinn_udp::Transmit {
            destination: transmit.dst,
            ecn: transmit.ecn,
            contents,
            segment_size,
            src_ip: transmit.src_ip,
        };
        self.state
            .try_send(UdpSockRef::from(self.io.get_ref()), &message)
    }
}

/// Registers a socket with the runtime.
fn watch(socket: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd stays the same open descriptor as long as it exists.
    let watched = unsafe { AsyncFd::register_with_interest(socket, interest) };
    watched.map_err(io::Error::from)
}

/// Whether the library interprets this error as a device's refusal of GSO.
fn is_gso_refusal(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EIO) | Some(libc::EINVAL))
}

impl AsFd for LinkSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.io.get_ref().as_fd()
    }
}
