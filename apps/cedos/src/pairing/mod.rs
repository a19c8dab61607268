//! `cedos send` and `cedos receive`: two devices that share only a proxy and a short code.
//!
//! ```text
//!  sender   ── MAILBOX * ────▶ proxy ◀── MAILBOX 4271 ── receiver      mailbox.rs
//!           ◀════ key exchange by the words of the code ════▶          key_exchange.rs
//!           ◀════ GET d2tp://KEY/TOKEN/name, end to end ═════          as `cedos serve` and `cedos get`
//! ```
//!
//! The proxy carries the exchange and, without a direct path, sealed packets. It learns neither the
//! words nor the content.

pub mod accepted_offer;
mod code_words;
pub mod key_exchange;
pub mod mailbox;
mod one_file;
pub mod transfer_code;

pub use one_file::OneFileService;

/// Why two devices did not come together.
#[derive(Debug, thiserror::Error)]
pub enum PairingError {
    /// The other end used other words.
    #[error("the words of the code do not match")]
    WrongCode,
    /// The other end left before everything was said.
    #[error("the other device left")]
    PeerLeft,
    /// The other end does not speak this.
    #[error("the other device has another version of cedos; update both")]
    OtherVersion,
    /// The proxy has no mailbox of this number.
    #[error("nobody waits under this code")]
    NobodyWaits,
    /// The proxy refuses, in its words.
    #[error("the proxy refuses: {0}")]
    Refused(String),
    /// The session with the proxy broke.
    #[error("the connection to the proxy broke")]
    ProxyLost,
}
