//! The token by which a connection is opened again once its process has ended.

use std::io;

/// The token by which a connection of [`crate::ConnectionPersist::Open`] is opened again. Any
/// process of the same user that has it may open the connection, so keep it in a file that no other
/// user can read.
#[derive(Clone, PartialEq, Eq)]
pub struct ConnectionToken(pub(crate) [u8; ConnectionToken::BYTES]);

impl ConnectionToken {
    /// The size of a token in bytes.
    pub const BYTES: usize = 32;

    /// A token from stored bytes.
    pub fn from_bytes(bytes: [u8; ConnectionToken::BYTES]) -> ConnectionToken {
        ConnectionToken(bytes)
    }

    /// The bytes of the token, to be stored.
    pub fn as_bytes(&self) -> &[u8; ConnectionToken::BYTES] {
        &self.0
    }
}

impl TryFrom<&[u8]> for ConnectionToken {
    type Error = io::Error;

    /// `InvalidInput`: the slice has another length than a token.
    fn try_from(bytes: &[u8]) -> io::Result<ConnectionToken> {
        let words = || {
            format!(
                "a token has {} bytes, not {}",
                ConnectionToken::BYTES,
                bytes.len()
            )
        };
        let bytes = bytes.try_into();
        bytes
            .map(ConnectionToken)
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, words()))
    }
}

impl std::fmt::Debug for ConnectionToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The token must not appear in logs.
        f.write_str("Token")
    }
}
