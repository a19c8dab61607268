//! The codes with which D2Prox resets a flow when it cannot finish a response that it has begun.
//!
//! After the head of the response was sent, the status cannot change, so the reset code carries the
//! cause; the device shows it as text. A reset is never mistaken for the end of the body.

/// Why the proxy reset a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum ResetCause {
    /// The origin stopped in the middle and gave no strong validator, so the transfer cannot be
    /// resumed. A new request starts over.
    OriginGone = 0xd201,
    /// The origin now serves other content under this URL. A new request starts over.
    OriginChanged = 0xd202,
    /// The origin stopped in the middle and did not return in time. A new request may help.
    OriginTimeout = 0xd203,
    /// The object exceeds the proxy's storage for this client, or for all clients.
    StoreFull = 0xd204,
    /// The proxy's own disk failed.
    StoreFailed = 0xd205,
    /// The deadline passed.
    Deadline = 0xd206,
    /// The proxy is stopping. A new request with `Range` continues where validators allow.
    Stopping = 0xd207,
    /// The origin end of a CONNECT tunnel was reset.
    TunnelReset = 0xd208,
    /// A CONNECT tunnel carried no data for too long.
    TunnelIdle = 0xd209,
    /// The client has transferred as much as it may in this month. A new request is refused with the time at which it
    /// may go on.
    MonthUsedUp = 0xd20a,
}

impl ResetCause {
    /// Every cause, for tables and for converting codes to text.
    pub const ALL: [ResetCause; 10] = [
        ResetCause::OriginGone,
        ResetCause::OriginChanged,
        ResetCause::OriginTimeout,
        ResetCause::StoreFull,
        ResetCause::StoreFailed,
        ResetCause::Deadline,
        ResetCause::Stopping,
        ResetCause::TunnelReset,
        ResetCause::TunnelIdle,
        ResetCause::MonthUsedUp,
    ];

    /// The reset code on the wire.
    pub fn code(self) -> u64 {
        self as u64
    }

    /// The cause that a code stands for, if it is one of the proxy's codes.
    ///
    /// ```
    /// use d2tp_driver::ResetCause;
    /// assert_eq!(ResetCause::from_code(0xd202), Some(ResetCause::OriginChanged));
    /// ```
    pub fn from_code(code: u64) -> Option<ResetCause> {
        Self::ALL.into_iter().find(|cause| cause.code() == code)
    }

    /// The name of the cause in logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            ResetCause::OriginGone => "origin_gone",
            ResetCause::OriginChanged => "origin_changed",
            ResetCause::OriginTimeout => "origin_timeout",
            ResetCause::StoreFull => "storage_full",
            ResetCause::StoreFailed => "storage_failed",
            ResetCause::Deadline => "deadline",
            ResetCause::Stopping => "stopping",
            ResetCause::TunnelReset => "tunnel_reset",
            ResetCause::TunnelIdle => "tunnel_idle",
            ResetCause::MonthUsedUp => "month_used_up",
        }
    }
}

impl std::fmt::Display for ResetCause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            ResetCause::OriginGone => {
                "the server stopped in the middle and names no version of the object, so it \
                 cannot resume; request it again to start over"
            }
            ResetCause::OriginChanged => {
                "the server now has different content under this URL; request it again to start \
                 over"
            }
            ResetCause::OriginTimeout => "the server stopped in the middle and did not come back",
            ResetCause::StoreFull => "the object outgrew the proxy's quota",
            ResetCause::StoreFailed => "the proxy's disk failed",
            ResetCause::Deadline => "the deadline passed",
            ResetCause::Stopping => "the proxy is stopping; request it again with Range to resume",
            ResetCause::TunnelReset => "the server reset the connection",
            ResetCause::TunnelIdle => "the tunnel was silent for too long",
            ResetCause::MonthUsedUp => {
                "this device has transferred as much as it may through this proxy in a month; request it again to \
                 hear until when"
            }
        })
    }
}

impl std::error::Error for ResetCause {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_distinct_and_lead_back_to_their_cause() {
        for cause in ResetCause::ALL {
            assert_eq!(ResetCause::from_code(cause.code()), Some(cause));
        }
        assert_eq!(ResetCause::from_code(0), None);
    }
}
