//! UDP with segmentation offload on both sides and no protocol: the ceiling for all UDP peers.
//!
//! One `sendmsg` carries as many full datagrams as GSO and the largest UDP payload allow; one
//! `recvmmsg` takes up to a batch of coalesced buffers. Nothing is acknowledged, so datagrams that
//! do not fit the receiver's socket buffer are lost: the sender's rate counts sent bytes, the
//! receiver's rate received ones, and the table shows the receiver's.

use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;

use anyhow::{Context, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use quinn_udp::{BATCH_SIZE, RecvMeta, Transmit, UdpSockRef, UdpSocketState};

use super::BenchPeer;
use crate::meter::ProcessMeter;
use crate::network::MTU_BYTES;
use crate::receiver_info::ReceiverInfo;

/// Payload of one datagram: MTU less the IPv4 and UDP headers.
const DATAGRAM_BYTES: usize = MTU_BYTES as usize - 20 - 8;
/// The largest UDP payload, also of a GSO send: 65,535 less IPv4 and UDP headers.
const UDP_PAYLOAD_MAX: usize = 65_535 - 20 - 8;
/// The requested buffer size of both sockets; the kernel grants at most `net.core.rmem_max`.
pub const SOCKET_BUFFER_BYTES: usize = 4 << 20;
/// How often a silent socket checks whether the run is over.
const LOOK_MS: u16 = 100;

/// Plain UDP without any control as a peer of the benchmark.
pub struct Udp;

impl BenchPeer for Udp {
    fn name(&self) -> &'static str {
        "udp"
    }

    fn serve(
        &self,
        address: IpAddr,
        meter: &Arc<ProcessMeter>,
        ready: &mut dyn FnMut(ReceiverInfo) -> Result<()>,
    ) -> Result<()> {
        let socket = bind(address)?;
        let state = UdpSocketState::new(UdpSockRef::from(&socket))?;
        ready(ReceiverInfo {
            address: socket.local_addr()?,
            identity: Vec::new(),
        })?;
        let mut storage = vec![[0u8; 1 << 16]; BATCH_SIZE];
        let mut metas = [RecvMeta::default(); BATCH_SIZE];
        let mut datagrams = (0u64, 0u64);
        while !meter.is_over() {
            let mut slices: Vec<_> = storage
                .iter_mut()
                .map(|buffer| IoSliceMut::new(buffer))
                .collect();
            match state.recv(UdpSockRef::from(&socket), &mut slices, &mut metas) {
                Ok(count) => {
                    for meta in &metas[..count] {
                        datagrams.0 += meta.len.div_ceil(meta.stride.max(1)) as u64;
                        datagrams.1 += 1;
                        meter.add(meta.len);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let mut waiting = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
                    poll(&mut waiting, PollTimeout::from(LOOK_MS))?;
                }
                Err(error) => return Err(error).context("receiving"),
            }
        }
        meter.note(format!(
            "GRO {:.1} datagrams per buffer, receive buffer {} kB",
            datagrams.0 as f64 / datagrams.1.max(1) as f64,
            state.recv_buffer_size(UdpSockRef::from(&socket))? / 1000,
        ));
        Ok(())
    }

    fn send(&self, card: &ReceiverInfo, meter: &Arc<ProcessMeter>) -> Result<()> {
        let socket = bind(match card.address {
            SocketAddr::V4(_) => IpAddr::from([0, 0, 0, 0]),
            SocketAddr::V6(_) => IpAddr::from([0u16; 8]),
        })?;
        let state = UdpSocketState::new(UdpSockRef::from(&socket))?;
        // A full send buffer blocks: this process has nothing else to do.
        socket.set_nonblocking(false)?;
        let segments = state
            .max_gso_segments()
            .min(UDP_PAYLOAD_MAX / DATAGRAM_BYTES);
        let payload = vec![0x5a; segments * DATAGRAM_BYTES];
        let transmit = Transmit {
            destination: card.address,
            ecn: None,
            contents: &payload,
            segment_size: Some(DATAGRAM_BYTES),
            src_ip: None,
        };
        meter.note(format!("{DATAGRAM_BYTES} B datagrams, GSO {segments}"));
        while !meter.is_over() {
            match state.try_send(UdpSockRef::from(&socket), &transmit) {
                Ok(()) => meter.add(payload.len()),
                // ICMP from a receiver that has finished.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                Err(error) => return Err(error).context("sending"),
            }
        }
        Ok(())
    }
}

fn bind(address: IpAddr) -> Result<UdpSocket> {
    socket(address).with_context(|| format!("no UDP socket on {address}"))
}

/// A UDP socket on any port of `address`, with the buffers of every UDP peer here.
pub fn socket(address: IpAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind((address, 0))?;
    let options = socket2::SockRef::from(&socket);
    options.set_recv_buffer_size(SOCKET_BUFFER_BYTES)?;
    options.set_send_buffer_size(SOCKET_BUFFER_BYTES)?;
    Ok(socket)
}
