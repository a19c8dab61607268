//! Carries IP packets between the kernel and a session, at both ends of a tunnel.
//!
//! ```text
//!  kernel ── TUN ──▶ TunDevice ─▶ InnerPacket (whose is it?) ─▶ PacketSource ─▶ split ─▶ DATAGRAM frames
//!                                              │              │    on slow radios HeaderContext, before split
//!                                              │              └─▶ capsules ─▶ a flow, on metered links
//!                                              └─ without a path: TcpHold ─▶ again when there is one
//!  kernel ◀─ TUN ─── TunDevice ◀─ InnerPacket (may it pass?) ◀─ PieceJoiner ◀─ DATAGRAM frames
//!
//!  routes, rules, NAT ◀── `ip`, `nft` ◀── system_command.rs
//!  TCP that nftables redirected: its destination ◀── original_destination.rs
//! ```
//!
//! Which addresses a device has, what may pass and where it goes is decided by the crate's callers:
//! D2Prox (`--tunnel-net`) and `cedos vpn`.

mod answers_only;
mod capsules;
mod congestion_mark;
mod header_compression;
mod icmp_error;
mod inner_mtu;
mod inner_packet;
mod internet_checksum;
mod metered_filter;
mod original_destination;
mod packet_pieces;
mod packet_queue;
mod packet_source;
mod system_command;
mod tcp_connection;
#[cfg(test)]
mod tcp_exchange;
mod tcp_hold;
mod tcp_repair;
mod tcp_segment;
mod tun_device;

pub use answers_only::AnswersOnly;
pub use capsules::{CapsuleReader, packet_capsule};
pub use header_compression::HeaderContext;
pub use icmp_error::packet_too_big;
pub use inner_mtu::{INNER_MTU_MAX, INNER_MTU_MIN, InnerMtu};
pub use inner_packet::{
    InnerPacket, InnerPacketError, PROTOCOL_ICMP, PROTOCOL_ICMPV6, PROTOCOL_TCP, PROTOCOL_UDP,
};
pub use metered_filter::MeteredFilter;
pub use original_destination::original_destination;
pub use packet_pieces::{PacketTooLong, PieceJoiner, split};
pub use packet_queue::{PacketQueue, PacketQueueCounts, WaitingPacket};
pub use packet_source::{PacketRepairCounts, PacketSource};
pub use system_command::{SystemCommandError, ip_batch, nft, run_command};
pub use tun_device::{TunBatch, TunDevice, TunError, TunWriter};

/// The context of DATAGRAM frames that carry inner packets.
pub const PACKET_CONTEXT: u64 = 0x6970; // "ip" in ASCII

/// The field of a CONNECT-IP request that says what the proxy may send over metered links.
pub const METERED_FIELD: &str = "tunnel-metered";

/// The value of [`METERED_FIELD`] for answers to packets that came over metered links, and nothing else ([`AnswersOnly`]).
pub const METERED_ANSWERS: &str = "answers";

/// The field of a CONNECT-IP request, and of its answer, that says how headers of packets may be compressed.
pub const HEADERS_FIELD: &str = "tunnel-headers";

/// The value of [`HEADERS_FIELD`] for the rules of [`HeaderContext`].
pub const HEADERS_BY_RULES: &str = "rules-1";

/// The most packets that came from a session and wait to be written to the device.
pub const PACKETS_UNREAD_MAX: usize = 2048; // a guess: what one turn of a session's engine receives at most
