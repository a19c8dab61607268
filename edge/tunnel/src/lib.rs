//! Carries IP packets between the kernel and a session, at both ends of a tunnel.
//!
//! ```text
//!  kernel ── TUN ──▶ TunDevice ─▶ InnerPacket (whose is it?) ─▶ PacketSource ─▶ split ─▶ DATAGRAM frames
//!                                                             └─▶ capsules ─▶ a flow, on metered links
//!  kernel ◀─ TUN ─── TunDevice ◀─ InnerPacket (may it pass?) ◀─ PieceJoiner ◀─ DATAGRAM frames
//!
//!  routes, rules, NAT ◀── `ip`, `nft` ◀── system_command.rs
//!  TCP that nftables redirected: its destination ◀── original_destination.rs
//! ```
//!
//! Which addresses a device has, what may pass and where it goes is decided by the crate's callers:
//! D2Prox (`--tunnel-net`) and `cedos vpn`.

mod capsules;
mod congestion_mark;
mod icmp_error;
mod inner_packet;
mod original_destination;
mod packet_pieces;
mod packet_queue;
mod packet_source;
mod system_command;
mod tun_device;

pub use capsules::{CapsuleReader, packet_capsule};
pub use icmp_error::packet_too_big;
pub use inner_packet::{
    InnerPacket, InnerPacketError, PROTOCOL_ICMP, PROTOCOL_ICMPV6, PROTOCOL_TCP, PROTOCOL_UDP,
};
pub use original_destination::original_destination;
pub use packet_pieces::{PacketTooLong, PieceJoiner, split};
pub use packet_queue::{PacketQueue, PacketQueueCounts, WaitingPacket};
pub use packet_source::PacketSource;
pub use system_command::{SystemCommandError, ip_batch, nft, run_command};
pub use tun_device::{TunBatch, TunDevice, TunError, TunWriter};

/// The context of DATAGRAM frames that carry inner packets.
pub const PACKET_CONTEXT: u64 = 0x6970; // "ip" in ASCII

/// The most packets that came from a session and wait to be written to the device.
pub const PACKETS_UNREAD_MAX: usize = 2048; // a guess: what one turn of a session's engine receives at most

/// The smallest inner MTU, which IPv6 requires (RFC 8200 §5). Packets of this size are split where a path carries less.
pub const INNER_MTU_MIN: u16 = 1280;

/// The largest inner MTU. A packet of this size and what D2TP adds fit into 1,500 bytes.
pub const INNER_MTU_MAX: u16 = 1420; // 1500 − IPv6 and UDP 48 − D2TP 32, as WireGuard's

/// The inner MTU for a session whose largest datagram has this many bytes.
pub fn inner_mtu(datagram_max: usize) -> u16 {
    let fits = u16::try_from(datagram_max).unwrap_or(INNER_MTU_MAX);
    fits.clamp(INNER_MTU_MIN, INNER_MTU_MAX)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_inner_mtu_stays_within_what_ipv6_needs_and_paths_carry() {
        assert_eq!(super::inner_mtu(1_100), 1_280);
        assert_eq!(super::inner_mtu(1_350), 1_350);
        assert_eq!(super::inner_mtu(9_000), 1_420);
    }
}
