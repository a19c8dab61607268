//! What every attack is given, and what it tells of itself.

use std::net::SocketAddr;
use std::time::Instant;

use d2tp_seal::SecretKey;
use d2tp_session::PublicKey;

use super::proxy_under_load::TcpPorts;
use crate::handshake_hosts::key_of;

/// The first number of hostile clients among the keys.
pub const FIRST: u64 = 1 << 50;
/// The first number of clients that are not admitted.
pub const STRANGERS: u64 = 1 << 51;

/// The target of an attack, and its resources.
#[derive(Clone, Debug)]
pub struct AttackContext {
    /// The address on which the proxy listens.
    pub proxy: SocketAddr,
    /// The public key of the proxy.
    pub proxy_key: PublicKey,
    /// The TCP ports of the proxy.
    pub tcp: TcpPorts,
    /// The origin that answers requests.
    pub http: SocketAddr,
    /// The origin that sends endlessly.
    pub blast: SocketAddr,
    /// The origin that sends nothing.
    pub silent: SocketAddr,
    /// Admitted keys of the attacker.
    pub keys: u64,
    /// Datagrams per second of floods.
    pub rate: u64,
    /// When the attack ends.
    pub until: Instant,
}

/// The extent of an attack: a limit that holds without an attack means nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttackTally {
    /// Handshakes that were completed.
    pub sessions: u64,
    /// Flows that were opened.
    pub flows: u64,
    /// Datagrams of a flood.
    pub datagrams: u64,
    /// TCP connections that were opened.
    pub connections: u64,
    /// Bytes that were written to TCP connections.
    pub tcp_bytes: u64,
    /// Flows that the proxy refused with a sentence.
    pub refused: u64,
    /// Flows that the proxy ended otherwise before they had an answer.
    pub unexplained: u64,
    /// Limits that an attack on all of them did not reach.
    pub limits_left: u64,
}

/// The secret keys of an attacker.
pub fn hostile_keys(count: u64) -> impl Iterator<Item = SecretKey> {
    (FIRST..FIRST + count).map(key_of)
}
