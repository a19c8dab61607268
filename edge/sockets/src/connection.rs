//! What only D2TP knows of a connection, and may be told while it lives.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use crate::connection_token::ConnectionToken;
use crate::info::ConnectionInfo;
use crate::raw;
use crate::settings::{BufferThresholds, LatePolicy, PayPolicy, seconds};

pub(crate) mod sealed {
    /// Implemented by the streams of this crate alone.
    pub trait SealedStream {}
}

/// What only D2TP knows of a [`crate::D2tpStream`] or an [`AsyncStream`](crate::asynchronous::AsyncStream). Changes reach an agent that carries the
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
