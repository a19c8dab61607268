//! D2TP's own operations on connections.

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

/// D2TP's own operations on a [`crate::D2tpStream`] or an
/// [`AsyncStream`](crate::asynchronous::AsyncStream). Changes are also sent to an agent that
/// carries the connection.
///
/// # Errors
/// Each call returns `Unsupported` for a connection that a parent process opened.
pub trait D2tpConnection: AsFd + sealed::SealedStream {
    /// Sets the deadline, counted from now in whole seconds, at least one; `None` removes it.
    ///
    /// # Errors
    /// See [`D2tpConnection`](D2tpConnection#errors).
    fn set_deadline(&self, within: Option<Duration>) -> io::Result<()> {
        raw::set(self, raw::SO_DEADLINE, &seconds(within))
    }

    /// Sets how many bytes are expected in both directions together.
    ///
    /// # Errors
    /// See [`D2tpConnection`](D2tpConnection#errors).
    fn set_size(&self, bytes: Option<u64>) -> io::Result<()> {
        raw::set(self, raw::SO_ESIZE, &bytes.unwrap_or(0).to_ne_bytes())
    }

    /// Sets which networks may be paid for.
    ///
    /// # Errors
    /// See [`D2tpConnection`](D2tpConnection#errors).
    fn set_policy(&self, policy: PayPolicy) -> io::Result<()> {
        raw::set(self, raw::SO_POLICY, &(policy as i32).to_ne_bytes())
    }

    /// Sets how many bytes metered networks may carry in total, including those that they have
    /// carried; `None` removes the limit.
    ///
    /// # Errors
    /// See [`D2tpConnection`](D2tpConnection#errors).
    fn set_budget(&self, bytes: Option<u64>) -> io::Result<()> {
        let bytes = bytes.unwrap_or(u64::MAX);
        raw::set(self, raw::SO_BUDGET, &bytes.to_ne_bytes())
    }

    /// Sets what is done when free networks cannot meet the deadline.
    ///
    /// # Errors
    /// See [`D2tpConnection`](D2tpConnection#errors).
    fn set_if_late(&self, if_late: LatePolicy) -> io::Result<()> {
        raw::set(self, raw::SO_IFLATE, &(if_late as i32).to_ne_bytes())
    }

    /// Sets how much is buffered ahead of the program; `None`: only the kernel's buffers.
    ///
    /// # Errors
    /// `InvalidInput`: low is above high, or a value exceeds 64 MiB or a day. See also
    /// [`D2tpConnection`](D2tpConnection#errors).
    fn set_buffer(&self, levels: Option<BufferThresholds>) -> io::Result<()> {
        raw::set(
            self,
            raw::SO_RCVBUFTH,
            &levels.unwrap_or_default().to_bytes(),
        )
    }

    /// The current state of the connection and its paths. It asks the engine and, if an agent
    /// carries the connection, the agent, for which it blocks up to two seconds.
    ///
    /// # Errors
    /// The same as those of the kernel's `getsockopt`.
    fn info(&self) -> io::Result<ConnectionInfo> {
        let (bytes, len) =
            raw::get::<{ ConnectionInfo::BYTES }>(self, d2tp::SOL_D2TP, raw::SO_INFO)?;
        ConnectionInfo::of_bytes(&bytes[..len])
    }

    /// The token by which the connection is opened again, if it is
    /// [`crate::ConnectionPersist::Open`].
    ///
    /// # Errors
    /// The same as those of the kernel's `getsockopt`.
    fn token(&self) -> io::Result<Option<ConnectionToken>> {
        let (bytes, len) = raw::get(self, d2tp::SOL_D2TP, raw::SO_PERSIST)?;
        Ok((len == ConnectionToken::BYTES).then_some(ConnectionToken(bytes)))
    }

    /// Why the connection broke, in words; `None` if it did not.
    ///
    /// # Errors
    /// The same as those of the kernel's `getsockopt`.
    fn cause(&self) -> io::Result<Option<String>> {
        let words = raw::text(self, raw::SO_ERROR)?;
        Ok(Some(words).filter(|words| !words.is_empty()))
    }
}
