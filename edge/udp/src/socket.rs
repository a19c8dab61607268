//! A UDP socket on one link, which sends and receives batches.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::task::{Context, Poll, ready};

use quinn_udp::{EcnCodepoint, UdpSockRef, UdpSocketState};
use tokio::io::Interest;
use tokio::net::UdpSocket;

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
    io: UdpSocket,
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
        let io = UdpSocket::from_std(socket).map_err(fail("registering with the reactor"))?;
        let local = io.local_addr().map_err(fail("getsockname"))?;
        Ok(LinkSocket {
            io,
            state,
            confinement,
            local,
        })
    }

    /// Takes over a socket that the program bound itself. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// The socket cannot be made non-blocking, or refuses the options for batches.
    pub fn from_std(socket: std::net::UdpSocket) -> std::io::Result<LinkSocket> {
        socket.set_nonblocking(true)?;
        let state = UdpSocketState::new(UdpSockRef::from(&socket))?;
        let io = UdpSocket::from_std(socket)?;
        let local = io.local_addr()?;
        Ok(LinkSocket {
            io,
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
        self.attempt(Interest::WRITABLE, || {
            let single = transmit
                .segment_size
                .is_none_or(|size| size >= transmit.contents.len());
            if single || self.state.max_gso_segments() > 1 {
                match self.send_once(transmit, transmit.contents, transmit.segment_size) {
                    // The library disabled GSO in this call, so the whole batch was refused.
                    Err(error)
                        if !single
                            && self.state.max_gso_segments() == 1
                            && is_gso_refusal(&error) => {}
                    outcome => return outcome,
                }
            }
            self.send_singly(transmit)
        })
    }

    /// Ready when a send that would have blocked may succeed.
    pub fn poll_send_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.io.poll_send_ready(cx)
    }

    /// Receives without waiting. Returns the number of runs in `batch`.
    ///
    /// # Errors
    /// `WouldBlock` if nothing has arrived.
    pub fn try_recv(&self, batch: &mut RecvBatch) -> io::Result<usize> {
        self.attempt(Interest::READABLE, || self.recv_once(batch))
    }

    /// Receives, or registers to be woken. Returns the number of runs in `batch`.
    pub fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        batch: &mut RecvBatch,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.io.poll_recv_ready(cx))?;
            // The reactor reports readiness, so the first attempt is made here.
            let outcome = self.io.try_io(Interest::READABLE, || self.recv_once(batch));
            match outcome {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                outcome => return Poll::Ready(outcome),
            }
        }
    }

    /// Receives at least one run.
    pub async fn recv(&self, batch: &mut RecvBatch) -> io::Result<usize> {
        std::future::poll_fn(|cx| self.poll_recv(cx, batch)).await
    }

    /// Tries first, and uses the reactor only after `WouldBlock`, because the reactor does not know
    /// the readiness of a fresh socket before its first turn. The second attempt, inside the
    /// reactor, clears the readiness that it remembers; without it a poll for readiness would spin.
    fn attempt<T>(
        &self,
        interest: Interest,
        mut call: impl FnMut() -> io::Result<T>,
    ) -> io::Result<T> {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.io.try_io(interest, call)
            }
            outcome => outcome,
        }
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
        batch.fill(|buffers, meta| self.state.recv(UdpSockRef::from(&self.io), buffers, meta))
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
        self.state.try_send(UdpSockRef::from(&self.io), &message)
    }
}

/// Whether the library interprets this error as a device's refusal of GSO.
fn is_gso_refusal(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EIO) | Some(libc::EINVAL))
}

impl AsFd for LinkSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.io.as_fd()
    }
}
