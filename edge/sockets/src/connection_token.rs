//! The token by which a connection is opened again once its process has ended.

use std::io;

/// By what a connection of [`crate::ConnectionPersist::Open`] is opened again. Whoever is the same user and has it may have the
/// connection: keep it in a file that nobody else may read.
#[derive(Clone, PartialEq, Eq)]
pub struct ConnectionToken(pub(crate) [u8; ConnectionToken::BYTES]);

impl ConnectionToken {
    /// How long one is.
    pub const BYTES: usize = 32;

    /// A token that was kept as bytes.
    pub fn from_bytes(bytes: [u8; ConnectionToken::BYTES]) -> ConnectionToken {
        ConnectionToken(bytes)
    }

    /// To be kept.
    pub fn as_bytes(&self) -> &[u8; ConnectionToken::BYTES] {
        &self.0
    }
}

impl TryFrom<&[u8]> for ConnectionToken {
    type Error = io::Error;

    /// `InvalidInput`: that many bytes are no token.
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
        // It is in no log.
        f.write_str("Token")
    }
}
