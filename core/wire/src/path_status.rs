//! The state of a path in one byte.

use crate::codec::DecodeError;

/// The state of a path, as its device reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PathStatus {
    /// The path may carry payload.
    Available,
    /// The path is kept, but must not carry payload.
    Standby,
    /// The path's link is silent for a while: nothing is sent, and the congestion window is kept.
    Frozen,
    /// The path no longer exists.
    Gone,
}

impl PathStatus {
    pub(crate) fn from_u8(b: u8) -> Result<PathStatus, DecodeError> {
        Ok(match b {
            0 => PathStatus::Available,
            1 => PathStatus::Standby,
            2 => PathStatus::Frozen,
            3 => PathStatus::Gone,
            _ => return Err(DecodeError::BadValue("path status")),
        })
    }
    pub(crate) fn to_u8(self) -> u8 {
        match self {
            PathStatus::Available => 0,
            PathStatus::Standby => 1,
            PathStatus::Frozen => 2,
            PathStatus::Gone => 3,
        }
    }
}
