//! What a sender must know about its receiver.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// What a sender must know about its receiver.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ReceiverInfo {
    /// The address on which the receiver listens.
    pub address: SocketAddr,
    /// The receiver's identity: a certificate or a public key, or empty without authentication.
    pub identity: Vec<u8>,
}
