//! The proxy's own refusals, which it marks with `Proxy-Status: …; error=…` (RFC 9209).

use std::time::Duration;

use cedos_text::RemoteText;
use http::{HeaderMap, StatusCode};

use super::dial::FetchFault;
use super::outcome::TransferFailure;

/// The failure of a download if the proxy itself refused it; the body explains it. None if the answer is the
/// origin's.
pub fn download_refusal(status: StatusCode, headers: &HeaderMap, body: &str) -> Option<FetchFault> {
    let fault = refusal(status, headers, body)?;
    // The proxy does not reach what is private to a network of this device. Its sentence says whether the address
    // is, or is one that nobody should ask, such as a metadata service.
    let is_private = error_token(headers) == Some("destination_ip_prohibited")
        && body.contains("private or local network");
    Some(match fault {
        FetchFault::Final(failure) if is_private => FetchFault::Final(TransferFailure {
            text: format!(
                "{}. If this device itself reaches it, as on its local network: --no-prox",
                failure.text
            ),
            ..failure
        }),
        fault => fault,
    })
}

/// The type of the proxy's own error.
fn error_token(headers: &HeaderMap) -> Option<&str> {
    let told = headers.get("proxy-status")?.to_str().ok()?;
    let (_, rest) = told.split_once("error=")?;
    rest.split([';', ',', ' ']).next()
}

/// The failure if the proxy itself refused; the body explains it. None if the answer is the origin's.
pub fn refusal(status: StatusCode, headers: &HeaderMap, body: &str) -> Option<FetchFault> {
    let token = error_token(headers)?;
    let words = match RemoteText::new(body) {
        empty if empty.is_empty() => RemoteText::new(token),
        words => words,
    };
    let text = format!("the proxy says: {words}");
    let retry_after = headers
        .get(http::header::RETRY_AFTER)
        .and_then(|value| value.to_str().ok()?.trim().parse().ok())
        .map(Duration::from_secs);
    let passing = matches!(
        token,
        "connection_refused"
            | "connection_terminated"
            | "connection_timeout"
            | "connection_limit_reached"
            | "destination_ip_unroutable"
            | "dns_timeout"
            | "http_response_timeout"
            | "http_response_incomplete"
            | "proxy_internal_error"
    );
    Some(if passing || status == StatusCode::SERVICE_UNAVAILABLE {
        FetchFault::Origin { text, retry_after }
    } else {
        FetchFault::Final(TransferFailure::error(text))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(status: u16, proxy_status: &str) -> Option<FetchFault> {
        let mut headers = HeaderMap::new();
        headers.insert("proxy-status", proxy_status.parse().unwrap());
        let status = StatusCode::from_u16(status).unwrap();
        refusal(status, &headers, "the words of the proxy\n")
    }

    #[test]
    fn a_refusal_of_the_proxy_is_told_in_its_words() {
        match told(
            403,
            "d2prox; error=destination_ip_prohibited; details=\"x\"",
        ) {
            Some(FetchFault::Final(failure)) => {
                assert_eq!(failure.text, "the proxy says: the words of the proxy");
            }
            other => panic!("{other:?}"),
        }
        assert!(matches!(
            told(502, "d2prox; error=connection_refused"),
            Some(FetchFault::Origin { .. })
        ));
        assert!(matches!(
            told(503, "d2prox; error=http_request_denied"),
            Some(FetchFault::Origin { .. })
        ));
    }

    #[test]
    fn a_download_from_an_address_that_the_proxy_does_not_serve_may_go_without_it() {
        let refused = |token: &str, words: &str| {
            let mut headers = HeaderMap::new();
            let told = format!("d2prox; error={token}");
            headers.insert("proxy-status", told.parse().unwrap());
            match download_refusal(StatusCode::FORBIDDEN, &headers, words) {
                Some(FetchFault::Final(failure)) => failure.text,
                other => panic!("{other:?}"),
            }
        };
        let private = "10.0.0.1 is a private or local network";
        assert!(refused("destination_ip_prohibited", private).ends_with("--no-prox"));
        for (token, words) in [
            ("http_request_denied", private),
            (
                "destination_ip_prohibited",
                "169.254.169.254 is a metadata service",
            ),
        ] {
            assert!(!refused(token, words).contains("--no-prox"), "{token}");
        }
    }

    #[test]
    fn an_answer_of_the_origin_is_no_refusal() {
        assert!(told(404, "d2prox; received-status=404").is_none());
        assert!(refusal(StatusCode::NOT_FOUND, &HeaderMap::new(), "").is_none());
    }
}
