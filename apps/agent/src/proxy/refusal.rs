//! Why a connection is not made, in the words of each that asks: errno, SOCKS5, HTTP.

use fast_socks5::ReplyError;
use http::StatusCode;

use crate::fetch::tunnel::Refused;

/// Whose fault it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// The host refuses.
    Refused,
    /// The host does not answer.
    TimedOut,
    /// The name has no address, or no way leads there.
    Unreachable,
    /// D2Prox does not go there.
    Forbidden,
    /// D2Prox has no room for this client now.
    Full,
    /// D2Prox does not let this device in, or the session ended.
    NoProxy,
    /// The deadline passed.
    Late,
    /// What was asked makes no sense.
    Nonsense,
}

/// A connection that is not made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Why.
    pub cause: Cause,
    /// For people.
    pub text: String,
}

impl Refusal {
    /// With these words.
    pub fn new(cause: Cause, text: impl Into<String>) -> Refusal {
        Refusal {
            cause,
            text: text.into(),
        }
    }

    /// As D2Prox said it. The kinds are RFC 9209's, §2.3.
    pub(super) fn of_proxy(refused: &Refused) -> Refusal {
        let field = refused.headers.get("proxy-status");
        let field = field.and_then(|field| field.to_str().ok());
        let kind = field.unwrap_or_default();
        let kind = kind.split(';').map(str::trim);
        let kind = kind.filter_map(|part| part.strip_prefix("error=")).next();
        let cause = match (kind.unwrap_or_default(), refused.status.as_u16()) {
            ("connection_refused", _) => Cause::Refused,
            ("connection_timeout" | "dns_timeout", _) => Cause::TimedOut,
            ("dns_error" | "destination_not_found" | "destination_ip_unroutable", _) => {
                Cause::Unreachable
            }
            ("destination_ip_prohibited" | "http_request_denied", _) | (_, 403) => Cause::Forbidden,
            ("connection_limit_reached", _) | (_, 503) => Cause::Full,
            (_, 400) => Cause::Nonsense,
            (_, 504) => Cause::TimedOut,
            _ => Cause::Refused,
        };
        Refusal::new(cause, format!("the proxy says: {}", refused.words.trim()))
    }

    /// As `connect` says it.
    pub fn errno(&self) -> i32 {
        use nix::errno::Errno;
        let errno = match self.cause {
            Cause::Refused => Errno::ECONNREFUSED,
            Cause::TimedOut => Errno::ETIMEDOUT,
            Cause::Unreachable => Errno::EHOSTUNREACH,
            Cause::Forbidden => Errno::EACCES,
            Cause::Full => Errno::ENOBUFS,
            Cause::NoProxy => Errno::ENETUNREACH,
            Cause::Late => Errno::ETIME,
            Cause::Nonsense => Errno::EINVAL,
        };
        errno as i32
    }

    /// As SOCKS5 says it (RFC 1928 §6).
    pub(super) fn reply(&self) -> ReplyError {
        match self.cause {
            Cause::Refused => ReplyError::ConnectionRefused,
            Cause::TimedOut | Cause::Unreachable => ReplyError::HostUnreachable,
            Cause::Forbidden => ReplyError::ConnectionNotAllowed,
            Cause::NoProxy => ReplyError::NetworkUnreachable,
            Cause::Late => ReplyError::TtlExpired,
            Cause::Full | Cause::Nonsense => ReplyError::GeneralFailure,
        }
    }

    /// As HTTP says it, with the kind of RFC 9209.
    pub(super) fn status(&self) -> (StatusCode, &'static str) {
        match self.cause {
            Cause::Refused => (StatusCode::BAD_GATEWAY, "connection_refused"),
            Cause::TimedOut => (StatusCode::GATEWAY_TIMEOUT, "connection_timeout"),
            Cause::Unreachable => (StatusCode::BAD_GATEWAY, "destination_ip_unroutable"),
            Cause::Forbidden => (StatusCode::FORBIDDEN, "http_request_denied"),
            Cause::Full => (StatusCode::SERVICE_UNAVAILABLE, "connection_limit_reached"),
            Cause::NoProxy => (StatusCode::BAD_GATEWAY, "destination_unavailable"),
            Cause::Late => (StatusCode::GATEWAY_TIMEOUT, "http_response_timeout"),
            Cause::Nonsense => (StatusCode::BAD_REQUEST, "http_request_error"),
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
            Refusal::of_proxy(&Refused {
                status,
                headers,
                words,
            })
        };
        let refused = told("d2prox; error=connection_refused; details=\"x\"", 502);
        assert_eq!(refused.cause, Cause::Refused);
        assert_eq!(refused.errno(), nix::errno::Errno::ECONNREFUSED as i32);
        let prohibited = told("d2prox; error=destination_ip_prohibited", 403);
        assert_eq!(prohibited.cause, Cause::Forbidden);
        assert!(prohibited.text.contains("because"));
        assert_eq!(
            told("d2prox; error=dns_error", 502).cause,
            Cause::Unreachable
        );
        assert_eq!(told("other", 504).cause, Cause::TimedOut);
    }
}
