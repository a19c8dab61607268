//! The relay's end of an interface: a TUN device or, if `/dev/net/tun` cannot be opened, the far
//! end of a pair of Ethernet devices that is read through a packet socket.
//!
//! ```text
//!   device namespace            relay's namespace
//!   wlan0 ═══════ TUN ════════▶ descriptor
//!   wlan0 ───── Ethernet ─────▶ lab0 ── packet socket (IP only, link header cut off)
//! ```
//!
//! The pair sends no neighbour requests (NOARP) and computes its checksums itself, so that the
//! received packets are plain IP packets, as from a TUN device.

use nix::errno::Errno;
use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use tun_rs::SyncDevice;

/// The size of a packet socket's receive buffer in the kernel.
const RECEIVE_BUFFER_BYTES: libc::c_int = 8 << 20;

/// An interface as the relay sees it.
pub(crate) enum Port {
    /// A TUN device.
    Tun(SyncDevice),
    /// A packet socket on the far end of a pair.
    Wire(Wire),
}

/// A packet socket and the address it sends to.
pub(crate) struct Wire {
    socket: OwnedFd,
    to: libc::sockaddr_ll,
}

impl Port {
    /// Receives the next packet without waiting.
    pub(crate) fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Port::Tun(device) => device.recv(buffer),
            Port::Wire(wire) => {
                // SAFETY: the buffer has the length that is passed.
                let bytes = unsafe {
                    let at = buffer.as_mut_ptr().cast();
                    libc::recv(
                        wire.socket.as_raw_fd(),
                        at,
                        buffer.len(),
                        libc::MSG_DONTWAIT,
                    )
                };
                Ok(Errno::result(bytes)? as usize)
            }
        }
    }

    /// Sends a packet to the interface.
    pub(crate) fn send(&self, packet: &[u8]) -> io::Result<usize> {
        match self {
            Port::Tun(device) => device.send(packet),
            Port::Wire(wire) => {
                let six = packet.first().is_some_and(|first| first >> 4 == 6);
                let mut to = wire.to;
                to.sll_protocol = (if six {
                    libc::ETH_P_IPV6
                } else {
                    libc::ETH_P_IP
                } as u16)
                    .to_be();
                // SAFETY: packet and address have the lengths that are passed.
                let bytes = unsafe {
                    libc::sendto(
                        wire.socket.as_raw_fd(),
                        packet.as_ptr().cast(),
                        packet.len(),
                        libc::MSG_DONTWAIT,
                        (&raw const to).cast(),
                        size_of::<libc::sockaddr_ll>() as libc::socklen_t,
                    )
                };
                Ok(Errno::result(bytes)? as usize)
            }
        }
    }

    /// The descriptor to wait on.
    pub(crate) fn descriptor(&self) -> RawFd {
        match self {
            Port::Tun(device) => device.as_raw_fd(),
            Port::Wire(wire) => wire.socket.as_raw_fd(),
        }
    }
}

/// Opens a packet socket on interface number `index` of the calling thread's namespace, which sends
/// to `hardware`, the other end's address.
pub(crate) fn wire(index: u32, hardware: [u8; 6]) -> io::Result<Wire> {
    let every = (libc::ETH_P_ALL as u16).to_be();
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: plain system calls on a descriptor that has an owner from the next line on; an
    // all-zero sockaddr_ll is valid.
    unsafe {
        let socket = libc::socket(libc::AF_PACKET, kind, i32::from(every));
        let socket = OwnedFd::from_raw_fd(Errno::result(socket)?);
        let mut address: libc::sockaddr_ll = zeroed();
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = every;
        address.sll_ifindex = index as i32;
        let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        Errno::result(libc::bind(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            length,
        ))?;
        let bytes = RECEIVE_BUFFER_BYTES;
        // Without it the system's default is used, which loses packets only at high rates.
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVBUFFORCE,
            (&raw const bytes).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        );
        address.sll_halen = 6;
        address.sll_addr[..6].copy_from_slice(&hardware);
        Ok(Wire {
            socket,
            to: address,
        })
    }
}

/// Makes interface `name` compute checksums before it sends, so that it also sends no packet larger
/// than its MTU.
pub(crate) fn plain_packets(name: &str) -> io::Result<()> {
    /// The command that sets checksumming by the device. // linux/ethtool.h
    const ETHTOOL_STXCSUM: u32 = 0x17;
    #[repr(C)]
    struct Value {
        command: u32,
        data: u32,
    }
    let mut value = Value {
        command: ETHTOOL_STXCSUM,
        data: 0,
    };
    // SAFETY: an all-zero ifreq is valid; the pointer in it outlives the call.
    unsafe {
        let socket = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        let socket = OwnedFd::from_raw_fd(Errno::result(socket)?);
        let mut request: libc::ifreq = zeroed();
        for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *to = from as libc::c_char;
        }
        request.ifr_ifru.ifru_data = (&raw mut value).cast();
        let done = libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut request);
        Errno::result(done)?;
    }
    Ok(())
}
