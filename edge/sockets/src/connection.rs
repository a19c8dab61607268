//! What only D2TP knows of a connection, and may be told while it lives.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use crate::info::ConnectionInfo;
use crate::settings::{BufferThresholds, LatePolicy, PayPolicy, seconds};
use crate::{asynchronous, raw, stream};

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

mod sealed {
    pub trait SealedStream {}
    impl SealedStream for crate::D2tpStream {}
    impl SealedStream for crate::asynchronous::AsyncStream {}
}

/// What only D2TP knows of a [`stream::D2tpStream`] or an [`asynchronous::AsyncStream`]. Changes reach an agent that carries the
/// connection.
///
/// # Errors
/// Each call: `Unsupported` for a connection that a parent process opened.
pub trait D2tpConnection: AsFd + sealed::SealedStream {
    /// Changes the deadline, counted from now in whole seconds, at least one; or takes it away.
    ///
    /// # Errors
    /// As said [above](D2tpConnection#errors).
    fn set_deadline(&self, within: Option<Duration>) -> io::Result<()> {
        raw::set(self, raw::SO_DEADLINE, &seconds(within))
    }

    /// Changes how many bytes are expected both ways.
    ///
    /// # Errors
    /// As said [above](D2tpConnection#errors).
    fn set_size(&self, bytes: Option<u64>) -> io::Result<()> {
        raw::set(self, raw::SO_ESIZE, &bytes.unwrap_or(0).to_ne_bytes())
    }

    /// Changes which networks may be paid for.
    ///
    /// # Errors
    /// As said [above](D2tpConnection#errors).
    fn set_policy(&self, policy: PayPolicy) -> io::Result<()> {
        raw::set(self, raw::SO_POLICY, &(policy as i32).to_ne_bytes())
    }

    /// Changes how many bytes networks that cost may carry in all, those that they did carry included; or takes the
    /// limit away.
    ///
    /// # Errors
    /// As said [above](D2tpConnection#errors).
    fn set_budget(&self, bytes: Option<u64>) -> io::Result<()> {
        let bytes = bytes.unwrap_or(u64::MAX);
        raw::set(self, raw::SO_BUDGET, &bytes.to_ne_bytes())
    }

    /// Changes what is done when free networks will not make the deadline.
    ///
    /// # Errors
    /// As said [above](D2tpConnection#errors).
    fn set_if_late(&self, if_late: LatePolicy) -> io::Result<()> {
        raw::set(self, raw::SO_IFLATE, &(if_late as i32).to_ne_bytes())
    }

    /// Changes what is held ahead of the program; none: what the kernel holds.
    ///
    /// # Errors
    /// `InvalidInput`: low above high, or more than 64 MiB or a day. And as said [above](D2tpConnection#errors).
    fn set_buffer(&self, levels: Option<BufferThresholds>) -> io::Result<()> {
        raw::set(
            self,
            raw::SO_RCVBUFTH,
            &levels.unwrap_or_default().to_bytes(),
        )
    }

    /// What the connection and its paths do now. It asks the engine, and where an agent carries the connection that:
    /// two seconds at most, for which it blocks.
    ///
    /// # Errors
    /// As for `getsockopt` of the kernel.
    fn info(&self) -> io::Result<ConnectionInfo> {
        let (bytes, len) =
            raw::get::<{ ConnectionInfo::BYTES }>(self, d2tp::SOL_D2TP, raw::SO_INFO)?;
        ConnectionInfo::of_bytes(&bytes[..len])
    }

    /// By what it is opened again, if it is one of [`crate::ConnectionPersist::Open`].
    ///
    /// # Errors
    /// As for `getsockopt` of the kernel.
    fn token(&self) -> io::Result<Option<ConnectionToken>> {
        let (bytes, len) = raw::get(self, d2tp::SOL_D2TP, raw::SO_PERSIST)?;
        Ok((len == ConnectionToken::BYTES).then_some(ConnectionToken(bytes)))
    }

    /// Why the connection broke, in words, if it did.
    ///
    /// # Errors
    /// As for `getsockopt` of the kernel.
    fn cause(&self) -> io::Result<Option<String>> {
        let words = raw::text(self, raw::SO_ERROR)?;
        Ok(Some(words).filter(|words| !words.is_empty()))
    }
}

impl D2tpConnection for stream::D2tpStream {}
impl D2tpConnection for asynchronous::AsyncStream {}
