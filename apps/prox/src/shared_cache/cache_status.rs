//! What `Cache-Status` (RFC 9211) says about an answer.

use std::fmt;

use http::StatusCode;

use crate::origin::PSEUDONYM;

/// Where an answer is from, for `Cache-Status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheStatus {
    /// The shared cache; fresh for this many seconds, negative if it is stale.
    Hit(i64),
    /// The shared cache, for which another request had asked the origin.
    Collapsed,
    /// The shared cache, after the origin said that it still holds.
    Validated,
    /// A copy of the client's own.
    Pinned,
    /// The request was forwarded to the origin.
    Forwarded {
        /// Why the origin was asked, in the words of RFC 9211 §2.2.
        why: &'static str,
        /// The status of the origin's answer.
        status: StatusCode,
        /// Whether there is a copy from which the client can continue.
        stored: bool,
    },
}

impl fmt::Display for CacheStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PSEUDONYM}; ")?;
        match self {
            CacheStatus::Hit(ttl) => write!(f, "hit; ttl={ttl}"),
            CacheStatus::Collapsed => f.write_str("fwd=miss; collapsed"),
            CacheStatus::Validated => f.write_str("fwd=stale; fwd-status=304"),
            CacheStatus::Pinned => f.write_str("hit; detail=pinned"),
            CacheStatus::Forwarded {
                why,
                status,
                stored,
            } => {
                write!(f, "fwd={why}; fwd-status={}", status.as_u16())?;
                if *stored {
                    f.write_str("; stored")?;
                }
                Ok(())
            }
        }
    }
}
