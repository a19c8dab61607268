//! The reasons why a connection fails, for each protocol: errno, SOCKS5, HTTP.

use fast_socks5::ReplyError;
use http::StatusCode;

use crate::fetch::tunnel::TunnelRefusal;

/// Why a connection is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalCause {
    /// The host refused the connection.
    Refused,
    /// The host does not answer.
    TimedOut,
    /// The name has no address, or there is no route.
    Unreachable,
    /// D2Prox does not allow the destination.
    Forbidden,
    /// D2Prox has reached a limit for this client.
    Full,
    /// D2Prox does not admit this device, or the session ended.
    NoProxy,
    /// The deadline passed.
    Late,
    /// The request is invalid.
    BadRequest,
}

/// A refused connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectRefusal {
    /// Why the connection is refused.
    pub cause: RefusalCause,
    /// The explanation, for users.
    pub text: String,
}

impl ConnectRefusal {
    /// Creates a refusal with this text.
    pub fn new(cause: RefusalCause, text: impl Into<String>) -> ConnectRefusal {
        ConnectRefusal {
            cause,
            text: text.into(),
        }
    }

    /// The refusal that D2Prox reported. The kinds are RFC 9209's, §2.3.
    pub(super) fn from_proxy(refused: &TunnelRefusal) -> ConnectRefusal {
        let field = refused.headers.get("proxy-status");
        let field = field.and_then(|field| field.to_str().ok());
        let kind = field.unwrap_or_default();
        let kind = kind.split(';').map(str::trim);
        let kind = kind.filter_map(|part| part.strip_prefix("error=")).next();
        let cause = match (kind.unwrap_or_default(), refused.status.as_u16()) {
            ("connection_refused", _) => RefusalCause::Refused,
            ("connection_timeout" | "dns_timeout", _) => RefusalCause::TimedOut,
            ("dns_error" | "destination_not_found" | "destination_ip_unroutable", _) => {
                RefusalCause::Unreachable
            }
            ("destination_ip_prohibited" | "http_request_denied", _) | (_, 403) => {
                RefusalCause::Forbidden
            }
            ("connection_limit_reached", _) | (_, 503) => RefusalCause::Full,
            (_, 400) => RefusalCause::BadRequest,
            (_, 504) => RefusalCause::TimedOut,
            _ => RefusalCause::Refused,
        };
        ConnectRefusal::new(
            cause,
            format!(
                "the proxy says: {}",
                cedos_text::RemoteText::new(&refused.body_text)
            ),
        )
    }

    /// The error number that `connect` fails with.
    pub fn errno(&self) -> i32 {
        use nix::errno::Errno;
        let errno = match self.cause {
            RefusalCause::Refused => Errno::ECONNREFUSED,
            RefusalCause::TimedOut => Errno::ETIMEDOUT,
            RefusalCause::Unreachable => Errno::EHOSTUNREACH,
            RefusalCause::Forbidden => Errno::EACCES,
            RefusalCause::Full => Errno::ENOBUFS,
            RefusalCause::NoProxy => Errno::ENETUNREACH,
            RefusalCause::Late => Errno::ETIME,
            RefusalCause::BadRequest => Errno::EINVAL,
        };
        errno as i32
    }

    /// The reply field of SOCKS5 (RFC 1928 §6).
    pub(super) fn reply(&self) -> ReplyError {
        match self.cause {
            RefusalCause::Refused => ReplyError::ConnectionRefused,
            RefusalCause::TimedOut | RefusalCause::Unreachable => ReplyError::HostUnreachable,
            RefusalCause::Forbidden => ReplyError::ConnectionNotAllowed,
            RefusalCause::NoProxy => ReplyError::NetworkUnreachable,
            RefusalCause::Late => ReplyError::TtlExpired,
            RefusalCause::Full | RefusalCause::BadRequest => ReplyError::GeneralFailure,
        }
    }

    /// The status of an HTTP response, with the kind of error of RFC 9209.
    pub(super) fn status(&self) -> (StatusCode, &'static str) {
        match self.cause {
            RefusalCause::Refused => (StatusCode::BAD_GATEWAY, "connection_refused"),
            RefusalCause::TimedOut => (StatusCode::GATEWAY_TIMEOUT, "connection_timeout"),
            RefusalCause::Unreachable => (StatusCode::BAD_GATEWAY, "destination_ip_unroutable"),
            RefusalCause::Forbidden => (StatusCode::FORBIDDEN, "http_request_denied"),
            RefusalCause::Full => (StatusCode::SERVICE_UNAVAILABLE, "connection_limit_reached"),
            RefusalCause::NoProxy => (StatusCode::BAD_GATEWAY, "destination_unavailable"),
            RefusalCause::Late => (StatusCode::GATEWAY_TIMEOUT, "http_response_timeout"),
            RefusalCause::BadRequest => (StatusCode::BAD_REQUEST, "http_request_error"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderMap;

    #[test]
    fn what_d2prox_refuses_is_the_error_that_connect_would_have_had() {
        let told = |field: &str, status: u16| {
            let mut headers = HeaderMap::new();
            headers.insert("proxy-status", field.parse().unwrap());
            let status = StatusCode::from_u16(status).unwrap();
            let words = "because".to_owned();
            ConnectRefusal::from_proxy(&TunnelRefusal {
                status,
                headers,
                body_text: words,
            })
        };
        let refused = told("d2prox; error=connection_refused; details=\"x\"", 502);
        assert_eq!(refused.cause, RefusalCause::Refused);
        assert_eq!(refused.errno(), nix::errno::Errno::ECONNREFUSED as i32);
        let prohibited = told("d2prox; error=destination_ip_prohibited", 403);
        assert_eq!(prohibited.cause, RefusalCause::Forbidden);
        assert!(prohibited.text.contains("because"));
        assert_eq!(
            told("d2prox; error=dns_error", 502).cause,
            RefusalCause::Unreachable
        );
        assert_eq!(told("other", 504).cause, RefusalCause::TimedOut);
    }
}
