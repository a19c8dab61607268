//! One socket on one link: send a batch, receive a batch, know when to try again.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::task::{Context, Poll, ready};

use quinn_udp::{EcnCodepoint, UdpSockRef, UdpSocketState};
use tokio::io::Interest;
use tokio::net::UdpSocket;

use crate::batch::RecvBatch;
use crate::bind::{self, BindError, BindOptions, DeviceConfinement};

/// One datagram, or several of equal size in one buffer, for one destination.
#[derive(Debug, Clone)]
pub struct UdpTransmit<'a> {
    /// Where to.
    pub dst: SocketAddr,
    /// Our source address, for sockets bound to the unspecified address.
    pub src_ip: Option<IpAddr>,
    /// Congestion bits to set.
    pub ecn: Option<EcnCodepoint>,
    /// The datagrams, back to back.
    pub contents: &'a [u8],
    /// Size of each datagram (the last may be smaller); `None` for a single one. At most
    /// [`LinkSocket::max_gso_segments`] of them fit one call.
    pub segment_size: Option<usize>,
}

/// A UDP socket bound to one link.
///
/// Belongs to the tokio runtime it was bound on. One task may poll for sending and one for
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
    /// [`io::Error`]) tells a vanished device or address from a mistake.
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

    /// The address and port we are bound to.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// How firmly the socket stays on its device.
    pub fn confinement(&self) -> DeviceConfinement {
        self.confinement
    }

    /// Most datagrams one [`LinkSocket::try_send`] hands to the kernel at once: 1 where there is
    /// no GSO, and it may *become* 1 when the device turns out not to do it. Ask before each batch.
    pub fn max_gso_segments(&self) -> usize {
        self.state.max_gso_segments()
    }

    /// Most datagrams the kernel joins in one receive buffer; 1 where there is no GRO.
    pub fn gro_segments(&self) -> usize {
        self.state.gro_segments()
    }

    /// False when don't-fragment is set, which is the normal case.
    pub fn may_fragment(&self) -> bool {
        self.state.may_fragment()
    }

    /// Sends now or says why not.
    ///
    /// Where GSO is not to be had, a batch goes out as single datagrams; should the socket's
    /// buffer fill part-way, the rest is dropped as a full queue would, and recovery re-sends it.
    ///
    /// # Errors
    /// `WouldBlock`: nothing was sent, wait on [`LinkSocket::poll_send_ready`]. Otherwise ask
    /// [`crate::is_too_big`] and [`crate::is_link_gone`].
    pub fn try_send(&self, transmit: &UdpTransmit<'_>) -> io::Result<()> {
        self.attempt(Interest::WRITABLE, || {
            let single = transmit
                .segment_size
                .is_none_or(|size| size >= transmit.contents.len());
            if single || self.state.max_gso_segments() > 1 {
                match self.send_once(transmit, transmit.contents, transmit.segment_size) {
                    // The library switched GSO off on this very call: the batch was refused whole.
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

    /// Ready when a send that would have blocked is worth another try.
    pub fn poll_send_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.io.poll_send_ready(cx)
    }

    /// Receives what is there, without waiting; returns the number of runs in `batch`.
    ///
    /// # Errors
    /// `WouldBlock` when nothing is there.
    pub fn try_recv(&self, batch: &mut RecvBatch) -> io::Result<usize> {
        self.attempt(Interest::READABLE, || self.recv_once(batch))
    }

    /// Receives what is there, or arranges to be woken; returns the number of runs in `batch`.
    pub fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        batch: &mut RecvBatch,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.io.poll_recv_ready(cx))?;
            // The reactor says ready, so its own try is the first one here.
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

    /// Tries first, and asks the reactor only after `WouldBlock`: a fresh socket is not known to be
    /// ready until the reactor has turned once. The second try, under the reactor's eye, is what
    /// clears the readiness it remembers; without it a poll for readiness would spin.
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

/// Errors the library takes as a device's refusal of GSO.
fn is_gso_refusal(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EIO) | Some(libc::EINVAL))
}
