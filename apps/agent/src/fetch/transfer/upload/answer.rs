//! The meaning of an origin's answer to an upload: done, retry later, or failed.

use std::time::Duration;

use cedos_text::RemoteText;
use http::StatusCode;
use http::header::{LOCATION, RETRY_AFTER};

use crate::fetch::dial::FetchFault;
use crate::fetch::outcome::{TransferExit, TransferFailure, TransferReason};
use crate::fetch::proxy_status;
use crate::fetch::upload_body::UploadResponse;

/// An answer that does not accept the upload.
pub(super) enum Refusal {
    /// The answer leaves open whether the origin has the body.
    Open(FetchFault),
    /// The answer says what happened to the body.
    Told(FetchFault),
}

/// Checks whether `host` accepted the upload. `post`: sending the body again may have an effect twice.
pub(super) fn check_answer(answer: &UploadResponse, host: &str, post: bool) -> Result<(), Refusal> {
    if let Some(fault) = proxy_status::refusal(answer.status, &answer.headers, &answer.body_text) {
        // The proxy's words say whether it reached the origin; only these two leave it open.
        let told = answer.headers.get("proxy-status");
        let told = told.and_then(|told| told.to_str().ok()).unwrap_or_default();
        let open = ["connection_terminated", "http_response_timeout"];
        return Err(match open.iter().any(|token| told.contains(token)) {
            true => Refusal::Open(fault),
            false => Refusal::Told(fault),
        });
    }
    let text = |name| {
        let value = answer.headers.get(name)?;
        Some(String::from(RemoteText::from_bytes(value.as_bytes())))
    };
    let fault = match answer.status {
        status if status.is_success() => return Ok(()),
        status if status.is_redirection() => {
            let to = text(LOCATION).unwrap_or_else(|| "nowhere".into());
            FetchFault::Final(TransferFailure::error(format!(
                "{host} did not accept the upload ({status}) and redirects to {to}"
            )))
        }
        StatusCode::UNAUTHORIZED => FetchFault::Final(TransferFailure::of(
            TransferExit::Error,
            TransferReason::AuthRequired,
            format!("{host} requires credentials ({})", answer.status),
        )),
        status => {
            let words = RemoteText::new(&answer.body_text);
            let said = format!("{host} answers {status}: {words}");
            let not_now = matches!(status.as_u16(), 408 | 425 | 429 | 503);
            // These do not change by waiting, and each try costs the whole body.
            let never = matches!(status.as_u16(), 501 | 505 | 507 | 508);
            if not_now || (status.is_server_error() && !never && !post) {
                let wait = text(RETRY_AFTER).and_then(|wait| wait.trim().parse().ok());
                FetchFault::Origin {
                    text: said,
                    retry_after: wait.map(Duration::from_secs),
                }
            } else {
                FetchFault::Final(TransferFailure::error(said))
            }
        }
    };
    Err(Refusal::Told(fault))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, proxy_status: Option<&str>) -> UploadResponse {
        let proxy_status = proxy_status.map_or(String::new(), |told| {
            format!("Proxy-Status: d2prox; error={told}\r\n")
        });
        let text = format!("HTTP/1.1 {status} x\r\n{proxy_status}\r\nwords");
        UploadResponse::read(text.as_bytes(), text.len() as u64).unwrap()
    }

    /// "done", "later", "never" or "open".
    fn judged(status: u16, proxy_status: Option<&str>, post: bool) -> &'static str {
        match check_answer(&answer(status, proxy_status), "host", post) {
            Ok(()) => "done",
            Err(Refusal::Open(_)) => "open",
            Err(Refusal::Told(FetchFault::Origin { .. })) => "later",
            Err(Refusal::Told(_)) => "never",
        }
    }

    #[test]
    fn a_page_that_explains_a_refusal_is_one_line_without_controls() {
        let page = "<html><head><title>No\x1b[31m</title></head>\n<body>\n</body></html>";
        let text = format!("HTTP/1.1 409 Conflict\r\n\r\n{page}");
        let answer = UploadResponse::read(text.as_bytes(), text.len() as u64).unwrap();
        match check_answer(&answer, "host", false) {
            Err(Refusal::Told(FetchFault::Final(failure))) => {
                assert_eq!(failure.text, "host answers 409 Conflict: No\\u001b[31m");
            }
            _ => panic!("a refusal for good"),
        }
    }

    #[test]
    fn an_error_of_the_server_is_tried_again_unless_it_is_for_good_or_answers_a_post() {
        for (status, put, post) in [
            (201, "done", "done"),
            (308, "never", "never"),
            (401, "never", "never"),
            (404, "never", "never"),
            (429, "later", "later"),
            (500, "later", "never"),
            (503, "later", "later"),
            (507, "never", "never"),
        ] {
            assert_eq!(judged(status, None, false), put, "PUT, {status}");
            assert_eq!(judged(status, None, true), post, "POST, {status}");
        }
    }

    #[test]
    fn a_proxy_that_lost_the_origin_leaves_open_whether_that_has_the_body() {
        assert_eq!(judged(502, Some("connection_terminated"), true), "open");
        assert_eq!(judged(504, Some("http_response_timeout"), true), "open");
        assert_eq!(judged(502, Some("connection_refused"), true), "later");
        assert_eq!(
            judged(403, Some("destination_ip_prohibited"), true),
            "never"
        );
    }
}
