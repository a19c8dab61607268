//! D2TP's cryptography: Noise IK handshake, packet protection, cookies, tokens.
//!
//! ```text
//!  host keys ──▶ handshake (Noise IK over X25519, ChaCha20-Poly1305, SHA-256, by `snow`)
//!                    │ split keys + handshake hash
//!                    ▼
//!                HKDF-SHA-256 ──▶ PacketKeys: AEAD key, IV, header mask per direction
//!                    ▲
//!                    └── session secret, from an exchange by ML-KEM-768 inside the session
//! ```
//!
//! All primitives are those of `aws-lc-rs`. Nothing here draws randomness or reads a clock: seeds
//! come in as arguments, so a simulation replays on every machine.

mod cookie;
mod handshake;
mod host_key;
mod kem;
mod noise;
mod packet_keys;
mod rng;
mod session_secret;
mod ticket;
#[cfg(test)]
mod vectors;
#[cfg(test)]
mod wycheproof;

pub use cookie::{CookieSecrets, SynMacs, open_cookie, verify_unknown_token};
pub use handshake::{
    HandshakeSecrets, Initiator, Responder, SYN_ACK_OVERHEAD_BYTES, SYN_OVERHEAD_BYTES,
    WAKE_OVERHEAD_BYTES,
};
pub use host_key::{KeyTextError, PublicKey, SecretKey};
pub use kem::{
    KEM_CIPHERTEXT_BYTES, KEM_KEY_BYTES, KEM_SEED_BYTES, KemSecret, kem_decapsulate,
    kem_encapsulate, kem_encapsulation_key,
};
pub use noise::x25519_operations;
pub use packet_keys::{CipherSuite, KEY_UPDATE_PACKETS, OpenedPacket, PacketKeys};
pub use rng::Rng;
pub use session_secret::{SECRET_ID_BYTES, SessionSecret};
pub use ticket::{SessionTicket, TICKET_BYTES, TicketHolder, TicketIssuer};

/// Why sealed data was not accepted. It gives no details, because a peer must not learn from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    /// The data was not made by the expected sender, was not meant for this host, or was altered.
    #[error("it does not authenticate")]
    NotAuthentic,
    /// The message is too short or too long to be what it claims.
    #[error("it has the wrong length")]
    BadLength,
}
