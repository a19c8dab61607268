//! Reusable buffers for receive calls.

use std::io::IoSliceMut;
use std::net::{IpAddr, SocketAddr};

use quinn_udp::{EcnCodepoint, RecvMeta};

/// The most buffers that one receive call fills.
pub const RECV_BATCH_DATAGRAMS_MAX: usize = quinn_udp::BATCH_SIZE;

/// The size of each buffer in bytes: the longest run of datagrams that the kernel joins.
pub const RECV_BUFFER_BYTES: usize = 1 << 16;

/// Reusable receive buffers: allocated once, filled by [`crate::LinkSocket::try_recv`] or
/// [`crate::LinkSocket::poll_recv`], read by [`RecvBatch::received`].
///
/// A full batch is 2 MB of address space; pages are touched only as far as datagrams reach.
pub struct RecvBatch {
    bytes: Vec<u8>,
    meta: Vec<RecvMeta>,
    filled: usize,
}

/// One buffer of a batch: one datagram, or several of equal size from one sender.
#[derive(Debug)]
pub struct ReceivedRun<'a> {
    /// The datagrams, one after the other; writable, so that packets can be decrypted in place.
    pub data: &'a mut [u8],
    /// The size of each datagram; the last may be smaller. 0 only for an empty datagram.
    pub stride: usize,
    /// The sender's address.
    pub from: SocketAddr,
    /// The local address to which the datagrams were sent, if the system reports it.
    pub dst_ip: Option<IpAddr>,
    /// The ECN bits of the run. The kernel does not join datagrams with different bits.
    pub ecn: Option<EcnCodepoint>,
    /// The index of the network device on which the datagrams arrived, if the system reports it.
    pub device_index: Option<u32>,
}

impl<'a> ReceivedRun<'a> {
    /// The datagrams one by one. An empty datagram yields nothing.
    pub fn datagrams(self) -> std::slice::ChunksMut<'a, u8> {
        self.data.chunks_mut(self.stride.max(1))
    }
}

impl RecvBatch {
    /// Creates buffers for `datagrams` runs: at least one, at most [`RECV_BATCH_DATAGRAMS_MAX`].
    pub fn with_capacity(datagrams: usize) -> RecvBatch {
        let buffers = datagrams.clamp(1, RECV_BATCH_DATAGRAMS_MAX);
        RecvBatch {
            bytes: vec![0; buffers * RECV_BUFFER_BYTES],
            meta: vec![RecvMeta::default(); buffers],
            filled: 0,
        }
    }

    /// The number of runs that the last call received.
    pub fn len(&self) -> usize {
        self.filled
    }

    /// Whether the last call received nothing.
    pub fn is_empty(&self) -> bool {
        self.filled == 0
    }

    /// Whether the last call filled every buffer, so that the socket may have more.
    pub(crate) fn is_full(&self) -> bool {
        self.filled == self.meta.len()
    }

    /// The runs that the last call received, in order of arrival.
    pub fn received(&mut self) -> impl Iterator<Item = ReceivedRun<'_>> {
        let filled = self.filled;
        self.bytes
            .chunks_exact_mut(RECV_BUFFER_BYTES)
            .zip(&self.meta)
            .take(filled)
            .map(|(buffer, meta)| ReceivedRun {
                data: &mut buffer[..meta.len],
                stride: meta.stride,
                from: meta.addr,
                dst_ip: meta.dst_ip,
                ecn: meta.ecn,
                device_index: meta.interface_index,
            })
    }

    /// Lends every buffer to `receive`, and records how many it filled.
    pub(crate) fn fill(
        &mut self,
        receive: impl FnOnce(&mut [IoSliceMut<'_>], &mut [RecvMeta]) -> std::io::Result<usize>,
    ) -> std::io::Result<usize> {
        self.filled = 0;
        let mut slices = self
            .bytes
            .chunks_exact_mut(RECV_BUFFER_BYTES)
            .map(IoSliceMut::new);
        let mut buffers: [IoSliceMut<'_>; RECV_BATCH_DATAGRAMS_MAX] =
            std::array::from_fn(|_| slices.next().unwrap_or_else(|| IoSliceMut::new(&mut [])));
        let usable = self.meta.len();
        let filled = receive(&mut buffers[..usable], &mut self.meta)?;
        self.filled = filled;
        Ok(filled)
    }
}

impl Default for RecvBatch {
    fn default() -> RecvBatch {
        RecvBatch::with_capacity(RECV_BATCH_DATAGRAMS_MAX)
    }
}
