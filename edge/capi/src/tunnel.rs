//! CONNECT over a flow to the proxy, by which a socket reaches a host that does not support D2TP.

use std::cell::RefCell;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};

use cedos_text::RemoteText;
use d2tp_driver::Flow;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};

use crate::errno::SocketFault;

/// The most bytes of a proxy's answer to CONNECT; D2Prox's take 200.
const HEAD_BYTES_MAX: usize = 16 * 1024;
/// The maximum number of header fields in the answer to CONNECT.
const FIELDS_MAX: usize = 64;
/// The most bytes of an explanation that are read.
const WORDS_BYTES_MAX: u64 = 512;

/// A flow that others use at the same time: it is borrowed for a moment per operation.
struct BorrowedFlow<'a>(&'a RefCell<Flow>);

impl AsyncRead for BorrowedFlow<'_> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        pin!(&mut *self.0.borrow_mut()).poll_read(cx, to)
    }
}

impl AsyncWrite for BorrowedFlow<'_> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        pin!(&mut *self.0.borrow_mut()).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        pin!(&mut *self.0.borrow_mut()).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        pin!(&mut *self.0.borrow_mut()).poll_shutdown(cx)
    }
}

/// Asks the proxy for a connection to a host and port. All further data of the flow is the
/// target's.
///
/// # Errors
/// Why the proxy refused or failed.
pub(crate) async fn connect_through(
    flow: &RefCell<Flow>,
    authority: &str,
) -> Result<(), SocketFault> {
    let mut lent = BorrowedFlow(flow);
    let request = format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n");
    let mut head = Vec::new();
    let exchange = async {
        lent.write_all(request.as_bytes()).await?;
        while !head.ends_with(b"\r\n\r\n") && head.len() < HEAD_BYTES_MAX {
            // Byte by byte, because data after the head is the target's.
            head.push(lent.read_u8().await?);
        }
        io::Result::Ok(())
    };
    if let Err(error) = exchange.await {
        let fault = flow.borrow().end().map(SocketFault::of_flow);
        return Err(fault.unwrap_or_else(|| SocketFault::new(libc::ECONNRESET, error)));
    }
    let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
    let mut answer = httparse::Response::new(&mut fields);
    let parsed = answer.parse(&head);
    let Some(status) = answer.code.filter(|_| parsed.is_ok()) else {
        let text = "the proxy does not open tunnels";
        return Err(SocketFault::new(libc::EPROTO, text));
    };
    if (200..300).contains(&status) {
        return Ok(());
    }
    let field = answer
        .headers
        .iter()
        .find(|field| field.name.eq_ignore_ascii_case("proxy-status"));
    let kind = field.map_or("", |field| error_of(field.value));
    let mut words = Vec::new();
    let _ = lent.take(WORDS_BYTES_MAX).read_to_end(&mut words).await;
    Err(refusal(status, kind, &words))
}

/// The fault of a tunnel that the proxy refuses with this status, error type and explanation.
fn refusal(status: u16, kind: &str, words: &[u8]) -> SocketFault {
    // A program may print the text, so the proxy's must not control a terminal.
    let words = RemoteText::from_bytes(words);
    let text = match words.is_empty() {
        true => format!("the proxy refuses ({status})"),
        false => format!("the proxy refuses ({status}): {words}"),
    };
    SocketFault::new(errno_of(status, kind), text)
}

/// The error type of a Proxy-Status field (RFC 9209 §2.1.1).
fn error_of(value: &[u8]) -> &str {
    let value = std::str::from_utf8(value).unwrap_or_default();
    let mut parameters = value.split(';').map(str::trim);
    parameters
        .find_map(|p| p.strip_prefix("error="))
        .unwrap_or_default()
}

/// The error number with which `connect` fails. The error types are those of RFC 9209 §2.3.
fn errno_of(status: u16, kind: &str) -> libc::c_int {
    match (kind, status) {
        ("connection_refused", _) => libc::ECONNREFUSED,
        ("connection_timeout" | "dns_timeout", _) => libc::ETIMEDOUT,
        ("dns_error" | "destination_not_found" | "destination_ip_unroutable", _) => {
            libc::EHOSTUNREACH
        }
        ("destination_ip_prohibited" | "http_request_denied", _) => libc::EACCES,
        ("connection_limit_reached", _) => libc::ENOBUFS,
        (_, 403) => libc::EACCES,
        (_, 504) => libc::ETIMEDOUT,
        _ => libc::ECONNREFUSED,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_becomes_the_error_that_connect_would_have_had() {
        let told = |field: &str, status| errno_of(status, error_of(field.as_bytes()));
        assert_eq!(
            told("d2prox; error=connection_refused; details=\"x\"", 502),
            libc::ECONNREFUSED
        );
        assert_eq!(told("d2prox; error=dns_error", 502), libc::EHOSTUNREACH);
        assert_eq!(told("other", 504), libc::ETIMEDOUT);
        assert_eq!(told("", 403), libc::EACCES);
    }

    #[test]
    fn the_explanation_of_a_proxy_is_one_line_without_controls() {
        let text = |words: &[u8]| refusal(502, "dns_error", words).text;
        assert_eq!(
            text(b"no\r\nhost \x1b[2J\xe2\x80\xae\x07\n"),
            "the proxy refuses (502): no host \\u001b[2J\\u202e\\u0007"
        );
        let page = b"<html>\n<head><title>502 Bad Gateway</title></head><body>long";
        assert_eq!(text(page), "the proxy refuses (502): 502 Bad Gateway");
        assert_eq!(text(b" \n"), "the proxy refuses (502)");
    }
}
