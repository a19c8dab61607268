//! The ownership of a session whose records several servers share: what is asked, and what waits for the answer
//! (R-HS-20; `endpoint/ownership.rs`).

use d2tp_seal::PublicKey;

use crate::link::Addresses;

/// A session that this server must own before it confirms a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnershipRequest {
    /// The public key of the device.
    pub peer: PublicKey,
    /// The device's instance number.
    pub instance: u64,
    /// The epoch of the handshake, which only grows (R-HS-1).
    pub epoch: u32,
}

/// The answer to an [`OwnershipRequest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnershipAnswer {
    /// This server owns the session.
    Owned,
    /// Another server owns it, or its record has changed since it was looked up: the device must begin again.
    Lost,
    /// Nobody knows now: the device repeats its packets, and each asks again.
    Unknown,
}

/// Whether a half-open handshake has the ownership of its session, where servers share records.
#[derive(Debug, Default)]
pub(crate) enum HandshakeOwnership {
    /// Nobody was asked yet.
    #[default]
    Unasked,
    /// The owner was asked. These packets, still sealed, wait.
    Asked(Vec<(Addresses, Vec<u8>)>),
    /// This server owns the session.
    Owned,
}
