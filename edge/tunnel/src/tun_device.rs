//! A TUN device, read and written in batches.
//!
//! With the kernel's segmentation offloads one read returns up to 64 KiB of a connection, which is cut here into packets
//! of the MTU; one write takes packets that belong together in one piece.

use std::io;

use bytes::{Bytes, BytesMut};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tun_rs::{DeviceBuilder, GROTable, Layer, SyncDevice, VIRTIO_NET_HDR_LEN};

/// Packets that one read returns at most: 64 KiB in segments of 268 bytes.
const BATCH_MAX: usize = 256;

/// Packets that are looked at together for pieces of one connection when they are written. Each that begins another piece, as
/// every new timestamp of TCP does, is compared with all later ones.
const WRITE_TOGETHER_MAX: usize = 128; // as wireguard-go

/// Bytes of a packet at most.
const PACKET_BYTES_MAX: usize = 2048;

/// Bytes of what the kernel hands over at once.
const SUPER_PACKET_BYTES: usize = VIRTIO_NET_HDR_LEN + 65_535;

/// Why there is no TUN device.
#[derive(Debug, thiserror::Error)]
pub enum TunError {
    /// The process may not create one.
    #[error("cannot create the network device {name}: {cause}; it needs root, or CAP_NET_ADMIN")]
    Forbidden {
        /// The device's name.
        name: String,
        /// The system's error.
        cause: io::Error,
    },
    /// Another process has the device.
    #[error("the network device {0} is in use by another process")]
    InUse(String),
    /// The kernel has no TUN, or another error.
    #[error("cannot create the network device {name}: {cause}")]
    Failed {
        /// The device's name.
        name: String,
        /// The system's error.
        cause: io::Error,
    },
}

/// Packets that were read together.
#[derive(Debug)]
pub struct TunBatch {
    super_packet: Vec<u8>,
    packets: Vec<Vec<u8>>,
    sizes: Vec<usize>,
    count: usize,
}

impl Default for TunBatch {
    fn default() -> TunBatch {
        TunBatch {
            super_packet: vec![0; SUPER_PACKET_BYTES],
            packets: vec![vec![0; PACKET_BYTES_MAX]; BATCH_MAX],
            sizes: vec![0; BATCH_MAX],
            count: 0,
        }
    }
}

impl TunBatch {
    /// The packets of the last read.
    pub fn packets(&self) -> impl Iterator<Item = &[u8]> {
        let sized = self.packets.iter().zip(&self.sizes);
        sized
            .take(self.count)
            .map(|(packet, size)| &packet[..*size])
    }
}

/// What writing several packets at once needs.
#[derive(Default)]
pub struct TunWriter {
    groups: GROTable,
    buffers: Vec<BytesMut>,
}

/// A TUN device of this process, which is gone with it.
pub struct TunDevice {
    io: AsyncFd<SyncDevice>,
    name: String,
}

impl TunDevice {
    /// Creates a device, which is up and has no address. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// The process may not, another one has the device, or the kernel has no TUN.
    pub fn create(name: &str, mtu: u16) -> Result<TunDevice, TunError> {
        TunDevice::build(name, DeviceBuilder::new().mtu(mtu))
    }

    /// Attaches to a device that exists and belongs to this process's user, as it is. That needs no right. Must be called
    /// on a tokio runtime.
    ///
    /// # Errors
    /// The device is another user's, or another process has it.
    pub fn attach(name: &str) -> Result<TunDevice, TunError> {
        TunDevice::build(name, DeviceBuilder::new().inherit_enable_state())
    }

    fn build(name: &str, builder: DeviceBuilder) -> Result<TunDevice, TunError> {
        let failed = |cause: io::Error| {
            let name = name.to_owned();
            match cause.raw_os_error() {
                Some(libc::EPERM | libc::EACCES) => TunError::Forbidden { name, cause },
                Some(libc::EBUSY) => TunError::InUse(name),
                _ => TunError::Failed { name, cause },
            }
        };
        let device = builder
            .name(name)
            .layer(Layer::L3)
            .with(|options| {
                options.offload(true).packet_information(false);
            })
            .build_sync()
            .map_err(failed)?;
        device.set_nonblocking(true).map_err(failed)?;
        Ok(TunDevice {
            // SAFETY: the device keeps its descriptor until it is dropped, and that is after its registration.
            io: unsafe { AsyncFd::register(device) }.map_err(|error| failed(error.into()))?,
            name: name.to_owned(),
        })
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Changes the MTU.
    ///
    /// # Errors
    /// The system's error.
    pub fn set_mtu(&self, mtu: u16) -> io::Result<()> {
        self.io.get_ref().set_mtu(mtu)
    }

    /// Reads the next packets.
    ///
    /// # Errors
    /// The device is gone.
    pub async fn recv(&self, batch: &mut TunBatch) -> io::Result<()> {
        let TunBatch {
            super_packet,
            packets,
            sizes,
            count,
        } = batch;
        *count = 0;
        let mut read = |device: &SyncDevice| device.recv_multiple(super_packet, packets, sizes, 0);
        match self.io.async_io(Interest::READABLE, &mut read).await {
            Ok(packets) => *count = packets,
            // The device was removed.
            Err(error) if error.raw_os_error() == Some(libc::EBADFD) => return Err(error),
            Err(error) => tracing::debug!(%error, device = self.name, "a packet was not read"),
        }
        Ok(())
    }

    /// Hands packets to the kernel, which drops what it cannot take.
    ///
    /// # Errors
    /// The device is gone.
    pub fn send(&self, writer: &mut TunWriter, packets: &[Bytes]) -> io::Result<()> {
        let mut pieces = packets.chunks(WRITE_TOGETHER_MAX);
        pieces.try_for_each(|packets| self.send_together(writer, packets))
    }

    fn send_together(&self, writer: &mut TunWriter, packets: &[Bytes]) -> io::Result<()> {
        writer.buffers.truncate(packets.len());
        writer.buffers.resize_with(packets.len(), BytesMut::new);
        for (buffer, packet) in writer.buffers.iter_mut().zip(packets) {
            buffer.clear();
            buffer.resize(VIRTIO_NET_HDR_LEN, 0);
            buffer.extend_from_slice(packet);
        }
        let TunWriter { groups, buffers } = writer;
        let device = self.io.get_ref();
        match device.send_multiple(groups, buffers, VIRTIO_NET_HDR_LEN) {
            Err(error) if error.raw_os_error() == Some(libc::EBADFD) => Err(error),
            Err(error) => {
                tracing::debug!(%error, device = self.name, "a packet was not taken");
                Ok(())
            }
            Ok(_) => Ok(()),
        }
    }
}
