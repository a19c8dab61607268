//! A tunnel through a proxy to one origin: CONNECT over a flow, and TLS inside if the URL requires
//! it. The flow moves between links and survives outages; the proxy's connection to the origin
//! lasts only until the origin's timeout.

use std::time::Duration;

use cedos_http::{SUPPLY_ASKED, SUPPLY_FIELD};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;
use url::Url;

use super::dial::{ByteStream, FetchFault};
use super::outcome::TransferFailure;
use super::proxy_status;
use super::tls::OriginTls;

/// The most bytes of a proxy's answer to CONNECT; ours take 200.
const HEAD_BYTES_MAX: usize = 16 * 1024;

/// The maximum number of header fields in the answer to CONNECT.
const FIELDS_MAX: usize = 64;

/// The most bytes of an explanation that are read.
const WORDS_BYTES_MAX: u64 = 4096;

/// How long the explanation of a refusal may take to arrive.
const WORDS_WITHIN: Duration = Duration::from_secs(10); // a guess

/// Turns a flow to a proxy into a stream to an origin.
pub struct OriginTunnel {
    tls: OriginTls,
}

impl OriginTunnel {
    /// Creates a tunnel client that trusts origins by `tls`.
    pub fn new(tls: OriginTls) -> OriginTunnel {
        OriginTunnel { tls }
    }

    /// Asks the proxy on `flow` for a connection to `url`'s origin and speaks TLS through it.
    ///
    /// # Errors
    /// The proxy's refusal, an origin that is not who it says, or a flow that broke.
    pub async fn through(
        &self,
        mut flow: impl ByteStream,
        url: &Url,
    ) -> Result<Box<dyn ByteStream>, FetchFault> {
        connect(&mut flow, url).await?;
        match self.tls.wrap(url, flow).await {
            // The proxy is known to be ours, so nobody on the way can have played the origin.
            Err(FetchFault::UntrustedPeer(text)) => {
                Err(FetchFault::Final(TransferFailure::error(text)))
            }
            Err(FetchFault::Path(text)) => Err(FetchFault::Origin {
                text,
                retry_after: None,
            }),
            stream => stream,
        }
    }
}

async fn connect(flow: &mut impl ByteStream, url: &Url) -> Result<(), FetchFault> {
    let host = url.host_str().unwrap_or_default();
    let port = url.port_or_known_default().unwrap_or(80);
    let fields = format!("{SUPPLY_FIELD}: {SUPPLY_ASKED}\r\n");
    write_head(flow, &format!("{host}:{port}"), &fields).await?;
    match read_response(flow).await? {
        None => Ok(()),
        Some(TunnelRefusal {
            status,
            headers,
            body_text: words,
        }) => Err(proxy_status::download_refusal(status, &headers, &words)
            .unwrap_or_else(|| unfit(&format!("it answered CONNECT with {status}")))),
    }
}

/// A proxy's answer that opens no tunnel.
#[derive(Debug)]
pub struct TunnelRefusal {
    /// Status of the response.
    pub status: StatusCode,
    /// The header fields; the reason is in `Proxy-Status`.
    pub headers: HeaderMap,
    /// The text of the answer's body.
    pub body_text: String,
}

/// Asks the proxy on `flow` for a connection to `authority`. Without a refusal, what is read from the
/// flow from then on is the target's.
///
/// # Errors
/// The flow broke, or what is there is no proxy.
pub async fn open_tunnel(
    flow: &mut impl ByteStream,
    authority: &str,
) -> Result<Option<TunnelRefusal>, FetchFault> {
    write_connect(flow, authority).await?;
    read_response(flow).await
}

fn broken(error: std::io::Error) -> FetchFault {
    FetchFault::Path(format!("the flow failed: {error}"))
}

/// The question alone. What is written next is for the target; a proxy that refuses drops it.
///
/// # Errors
/// The flow broke.
pub async fn write_connect(flow: &mut impl ByteStream, authority: &str) -> Result<(), FetchFault> {
    write_head(flow, authority, "").await
}

/// The question with further header fields, each with its line's end.
async fn write_head(
    flow: &mut impl ByteStream,
    authority: &str,
    fields: &str,
) -> Result<(), FetchFault> {
    let request = format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n{fields}\r\n");
    flow.write_all(request.as_bytes()).await.map_err(broken)?;
    flow.flush().await.map_err(broken)
}

/// The answer alone.
///
/// # Errors
/// As [`open_tunnel`].
pub async fn read_response(
    flow: &mut (impl AsyncRead + Unpin),
) -> Result<Option<TunnelRefusal>, FetchFault> {
    Ok(read_fields(flow).await?.err())
}

/// The header fields of the answer, or the refusal.
///
/// # Errors
/// As [`open_tunnel`].
pub async fn read_fields(
    flow: &mut (impl AsyncRead + Unpin),
) -> Result<Result<HeaderMap, TunnelRefusal>, FetchFault> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() == HEAD_BYTES_MAX {
            return Err(unfit("the head of its answer is too long"));
        }
        // Byte by byte: what follows the head is the origin's.
        head.push(flow.read_u8().await.map_err(broken)?);
    }
    let (status, headers) = parse(&head)?;
    if status.is_success() {
        return Ok(Ok(headers));
    }
    let mut words = Vec::new();
    let mut rest = flow.take(WORDS_BYTES_MAX);
    let _ = timeout(WORDS_WITHIN, rest.read_to_end(&mut words)).await;
    let words = String::from_utf8_lossy(&words).into_owned();
    Ok(Err(TunnelRefusal {
        status,
        headers,
        body_text: words,
    }))
}

fn unfit(why: &str) -> FetchFault {
    FetchFault::Final(TransferFailure::error(format!(
        "the proxy cannot open a tunnel: {why}"
    )))
}

fn parse(head: &[u8]) -> Result<(StatusCode, HeaderMap), FetchFault> {
    let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
    let mut response = httparse::Response::new(&mut fields);
    response
        .parse(head)
        .map_err(|error| unfit(&error.to_string()))?;
    let status = response.code.and_then(|c| StatusCode::from_u16(c).ok());
    let headers = response
        .headers
        .iter()
        .filter_map(|field| {
            let name = HeaderName::from_bytes(field.name.as_bytes()).ok()?;
            Some((name, HeaderValue::from_bytes(field.value).ok()?))
        })
        .collect();
    Ok((
        status.ok_or_else(|| unfit("its answer has no status"))?,
        headers,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::DuplexStream;

    fn url() -> Url {
        "http://origin.example/a".parse().unwrap()
    }

    async fn answered(answer: &'static [u8]) -> (Result<(), FetchFault>, DuplexStream, String) {
        let (mut ours, mut proxys) = tokio::io::duplex(1 << 16);
        proxys.write_all(answer).await.unwrap();
        let outcome = connect(&mut ours, &url()).await;
        let mut asked = vec![0; 1024];
        let n = proxys.read(&mut asked).await.unwrap();
        asked.truncate(n);
        (outcome, ours, String::from_utf8(asked).unwrap())
    }

    #[tokio::test]
    async fn what_follows_the_proxys_head_is_the_origins() {
        let (outcome, mut ours, asked) =
            answered(b"HTTP/1.1 200 OK\r\nVia: x\r\n\r\norigin's").await;
        assert!(outcome.is_ok());
        assert!(asked.starts_with("CONNECT origin.example:80 HTTP/1.1\r\n"));
        let mut rest = [0; 8];
        ours.read_exact(&mut rest).await.unwrap();
        assert_eq!(&rest, b"origin's");
    }

    // Refusals without an end are read for ten seconds.
    #[tokio::test(start_paused = true)]
    async fn a_refusal_is_told_in_the_proxys_words_and_nonsense_as_nonsense() {
        let refused =
            b"HTTP/1.1 403 Forbidden\r\nProxy-Status: d2prox; error=http_request_denied\r\n\
                        Content-Length: 9\r\n\r\nport 25\n.";
        let (outcome, ours, _) = answered(refused).await;
        drop(ours);
        match outcome {
            Err(FetchFault::Final(failure)) => {
                assert!(failure.text.contains("port 25"), "{failure:?}")
            }
            other => panic!("{other:?}"),
        }
        for nonsense in [&b"SSH-2.0-x\r\n\r\n"[..], b"HTTP/1.1 302 Found\r\n\r\n"] {
            let (outcome, ..) = answered(nonsense).await;
            assert!(matches!(outcome, Err(FetchFault::Final(_))), "{outcome:?}");
        }
    }
}
