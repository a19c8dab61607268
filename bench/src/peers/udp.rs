//! UDP with segmentation offload on both sides and no protocol: the ceiling for all UDP peers.
//! Sealed by AES-128-GCM, datagram by datagram, it is the floor of what an encrypted transport of datagrams costs.
//!
//! One `sendmsg` carries as many full datagrams as GSO and the largest UDP payload allow; one
//! `recvmmsg` takes up to a batch of coalesced buffers. Nothing is acknowledged, so datagrams that
//! do not fit the receiver's socket buffer are lost: the sender's rate counts sent bytes, the
//! receiver's rate received ones, and the table shows the receiver's.

use std::io::{self, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use aws_lc_rs::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{getsockopt, sockopt};
use quinn_udp::{BATCH_SIZE, RecvMeta, Transmit, UdpSockRef, UdpSocketState};

use super::BenchPeer;
use crate::meter::ProcessMeter;
use crate::receiver_info::ReceiverInfo;

/// The headers of IPv4 and UDP.
const HEADERS_BYTES: usize = 20 + 8;
/// The payload of a datagram where the MTU is larger than any jumbo frame, as on most loopback devices.
const DATAGRAM_BYTES_MAX: usize = 9_000 - HEADERS_BYTES;
/// What stands before the payload of a sealed datagram: its number, from which the nonce is made.
const NUMBER_BYTES: usize = 8;
/// What stands behind it.
const TAG_BYTES: usize = 16;
/// The key of every run: nothing here is secret.
const KEY: [u8; 16] = [0x5a; 16];
/// The largest UDP payload, also of a GSO send: 65,535 less IPv4 and UDP headers.
const UDP_PAYLOAD_MAX: usize = 65_535 - 20 - 8;
/// The requested buffer size of both sockets; the kernel grants at most `net.core.rmem_max`.
pub const SOCKET_BUFFER_BYTES: usize = 4 << 20;
/// How often a silent socket checks whether the run is over.
const LOOK_MS: u16 = 100;

/// UDP without any control as a peer of the benchmark.
pub struct Udp {
    is_sealed: bool,
}

impl Udp {
    /// Datagrams as they are.
    pub fn plain() -> Self {
        Udp { is_sealed: false }
    }
    /// Each datagram sealed by AES-128-GCM, and opened by the receiver.
    pub fn sealed() -> Self {
        Udp { is_sealed: true }
    }
}

/// Seals and opens single datagrams.
struct DatagramCipher(LessSafeKey);

impl DatagramCipher {
    fn new() -> Result<Self> {
        let key = UnboundKey::new(&AES_128_GCM, &KEY).map_err(|_| anyhow!("no AES-128-GCM"))?;
        Ok(DatagramCipher(LessSafeKey::new(key)))
    }
    fn nonce(number: [u8; NUMBER_BYTES]) -> Nonce {
        let mut bytes = [0; 12];
        bytes[4..].copy_from_slice(&number);
        Nonce::assume_unique_for_key(bytes)
    }
    /// Seals a datagram in place, whose last bytes are for the tag.
    fn seal(&self, number: u64, datagram: &mut [u8]) -> Result<()> {
        let number = number.to_be_bytes();
        let (head, rest) = datagram.split_at_mut(NUMBER_BYTES);
        head.copy_from_slice(&number);
        let (text, tag) = rest.split_at_mut(rest.len() - TAG_BYTES);
        let made = self
            .0
            .seal_in_place_separate_tag(Self::nonce(number), Aad::from(number), text)
            .map_err(|_| anyhow!("a datagram was not sealed"))?;
        tag.copy_from_slice(made.as_ref());
        Ok(())
    }
    /// Opens a datagram in place. Returns the bytes of its payload.
    fn open(&self, datagram: &mut [u8]) -> Result<usize> {
        let (head, rest) = datagram
            .split_first_chunk_mut::<NUMBER_BYTES>()
            .context("a datagram without a number")?;
        let opened = self
            .0
            .open_in_place(Self::nonce(*head), Aad::from(*head), rest)
            .map_err(|_| anyhow!("a datagram was not authentic"))?;
        Ok(opened.len())
    }
}

impl BenchPeer for Udp {
    fn name(&self) -> &'static str {
        match self.is_sealed {
            true => "udp-sealed",
            false => "udp",
        }
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
        let cipher = DatagramCipher::new()?;
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
                    for (meta, buffer) in metas[..count].iter().zip(&mut storage) {
                        datagrams.0 += meta.len.div_ceil(meta.stride.max(1)) as u64;
                        datagrams.1 += 1;
                        let mut payload = meta.len;
                        if self.is_sealed {
                            payload = 0;
                            for datagram in buffer[..meta.len].chunks_mut(meta.stride.max(1)) {
                                payload += cipher.open(datagram)?;
                            }
                        }
                        meter.add(payload);
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
        let datagram = datagram_bytes(card.address)?;
        let segments = state.max_gso_segments().min(UDP_PAYLOAD_MAX / datagram);
        let mut batch = vec![0x5a; segments * datagram];
        let payload = match self.is_sealed {
            true => segments * (datagram - NUMBER_BYTES - TAG_BYTES),
            false => batch.len(),
        };
        let cipher = DatagramCipher::new()?;
        let mut number = 0;
        meter.note(format!("{datagram} B datagrams, GSO {segments}"));
        while !meter.is_over() {
            if self.is_sealed {
                for datagram in batch.chunks_mut(datagram) {
                    cipher.seal(number, datagram)?;
                    number += 1;
                }
            }
            let transmit = Transmit {
                destination: card.address,
                ecn: None,
                contents: &batch,
                segment_size: Some(datagram),
                src_ip: None,
            };
            match state.try_send(UdpSockRef::from(&socket), &transmit) {
                Ok(()) => meter.add(payload),
                // ICMP from a receiver that has finished.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                Err(error) => return Err(error).context("sending"),
            }
        }
        Ok(())
    }
}

/// The largest UDP payload that the route to `address`, an IPv4 one, carries whole.
fn datagram_bytes(address: SocketAddr) -> Result<usize> {
    // The kernel tells the MTU of a route to connected sockets alone.
    let connected = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    connected.connect(address)?;
    let mtu = getsockopt(&connected, sockopt::IpMtu).context("no MTU of the route")?;
    let payload = usize::try_from(mtu)
        .unwrap_or(0)
        .saturating_sub(HEADERS_BYTES);
    Ok(payload.clamp(HEADERS_BYTES, DATAGRAM_BYTES_MAX))
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
