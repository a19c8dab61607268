//! What a sender must know of its receiver.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// What a sender must know of its receiver.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ReceiverInfo {
    /// Where it listens.
    pub address: SocketAddr,
    /// What proves who it is: a certificate or a public key, empty where nothing does.
    pub identity: Vec<u8>,
}
