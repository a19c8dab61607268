//! What only D2TP knows of a connection, and may be told while it lives.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use crate::info::Info;
use crate::settings::{IfLate, Policy, Thresholds, seconds};
use crate::{asynchronous, raw, stream};

/// By what a connection of [`crate::Persist::Open`] is opened again. Whoever is the same user and has it may have the
/// connection: keep it in a file that nobody else may read.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(pub(crate) [u8; Token::BYTES]);

impl Token {
    /// How long one is.
    pub const BYTES: usize = 32;

    /// One that was kept.
    pub fn from_bytes(bytes: [u8; Token::BYTES]) -> Token {
        Token(bytes)
    }

    /// To be kept.
    pub fn as_bytes(&self) -> &[u8; Token::BYTES] {
        &self.0
    }
}

impl TryFrom<&[u8]> for Token {
    type Error = io::Error;

    /// `InvalidInput`: that many bytes are no token.
    fn try_from(bytes: &[u8]) -> io::Result<Token> {
        let words = || format!("a token has {} bytes, not {}", Token::BYTES, bytes.len());
        let bytes = bytes.try_into();
        bytes
            .map(Token)
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, words()))
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // It is in no log.
        f.write_str("Token")
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for crate::Stream {}
    impl Sealed for crate::asynchronous::Stream {}
}

/// What only D2TP knows of a [`stream::Stream`] or an [`asynchronous::Stream`]. Changes reach an agent that carries the
/// connection.
///
/// # Errors
/// Each call: `Unsupported` for a connection that a parent process opened.
pub trait Connection: AsFd + sealed::Sealed {
    /// Changes the deadline, counted from now in whole seconds, at least one; or takes it away.
    ///
    /// # Errors
    /// As said [above](Connection#errors).
    fn set_deadline(&self, within: Option<Duration>) -> io::Result<()> {
        raw::set(self, raw::SO_DEADLINE, &seconds(within))
    }

    /// Changes how many bytes are expected both ways.
    ///
    /// # Errors
    /// As said [above](Connection#errors).
    fn set_size(&self, bytes: Option<u64>) -> io::Result<()> {
        raw::set(self, raw::SO_ESIZE, &bytes.unwrap_or(0).to_ne_bytes())
    }

    /// Changes which networks may be paid for.
    ///
    /// # Errors
    /// As said [above](Connection#errors).
    fn set_policy(&self, policy: Policy) -> io::Result<()> {
        raw::set(self, raw::SO_POLICY, &(policy as i32).to_ne_bytes())
    }

    /// Changes how many bytes networks that cost may carry in all, those that they did carry included; or takes the
    /// limit away.
    ///
    /// # Errors
    /// As said [above](Connection#errors).
    fn set_budget(&self, bytes: Option<u64>) -> io::Result<()> {
        let bytes = bytes.unwrap_or(u64::MAX);
        raw::set(self, raw::SO_BUDGET, &bytes.to_ne_bytes())
    }

    /// Changes what is done when free networks will not make the deadline.
    ///
    /// # Errors
    /// As said [above](Connection#errors).
    fn set_if_late(&self, if_late: IfLate) -> io::Result<()> {
        raw::set(self, raw::SO_IFLATE, &(if_late as i32).to_ne_bytes())
    }

    /// Changes what is held ahead of the program; none: what the kernel holds.
    ///
    /// # Errors
    /// `InvalidInput`: low above high, or more than 64 MiB or a day. And as said [above](Connection#errors).
    fn set_buffer(&self, levels: Option<Thresholds>) -> io::Result<()> {
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
    fn info(&self) -> io::Result<Info> {
        let (bytes, len) = raw::get::<{ Info::BYTES }>(self, d2tp::SOL_D2TP, raw::SO_INFO)?;
        Info::of_bytes(&bytes[..len])
    }

    /// By what it is opened again, if it is one of [`crate::Persist::Open`].
    ///
    /// # Errors
    /// As for `getsockopt` of the kernel.
    fn token(&self) -> io::Result<Option<Token>> {
        let (bytes, len) = raw::get(self, d2tp::SOL_D2TP, raw::SO_PERSIST)?;
        Ok((len == Token::BYTES).then_some(Token(bytes)))
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

impl Connection for stream::Stream {}
impl Connection for asynchronous::Stream {}
