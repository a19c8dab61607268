//! A client of HTTP/2 without TLS, for the tests of proxies: streams, and frames that no client should send.
//!
//! [`Http2Client`] keeps to the protocol, by the crate `h2`. [`RawHttp2`] sends what a test says.

use std::fmt::Debug;

use bytes::Bytes;
use h2::client::{Builder, ResponseFuture, SendRequest};
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, ToSocketAddrs};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::PATIENCE;

/// The type of a frame that begins a stream (RFC 9113 §6.2).
pub const HEADERS: u8 = 1;
/// The type of a frame that ends a stream at once.
pub const RST_STREAM: u8 = 3;
/// The type of the frame that begins a connection.
pub const SETTINGS: u8 = 4;
/// The type of the frame that ends a connection.
pub const GOAWAY: u8 = 7;
/// The type of a frame that enlarges a window.
pub const WINDOW_UPDATE: u8 = 8;
/// The type of a frame with the rest of a head.
pub const CONTINUATION: u8 = 9;

/// The flag of a stream's last frame.
pub const END_STREAM: u8 = 1;
/// The flag of a head's last frame.
pub const END_HEADERS: u8 = 4;

/// What a connection's streams may receive together before the test reads it.
const CONN_WINDOW_BYTES: u32 = 16 << 20;

/// Streams that it opens before it knows how many the proxy allows (RFC 9113 §6.5.2).
const SEND_STREAMS_MAX: usize = 100;

/// A connection to a proxy that speaks HTTP/2.
#[derive(Clone)]
pub struct Http2Client {
    sender: SendRequest<Bytes>,
}

/// A whole answer.
#[derive(Debug)]
pub struct Http2Answer {
    /// The answer's status.
    pub status: StatusCode,
    /// The header fields.
    pub fields: HeaderMap,
    /// The bytes of the body.
    pub body: Vec<u8>,
    /// Whether there were trailers.
    pub has_trailers: bool,
}

impl Http2Client {
    /// Connects. A stream that the test does not read leaves room for others.
    pub async fn connect(at: impl ToSocketAddrs) -> Http2Client {
        Http2Client::connect_watched(at).await.0
    }

    /// Connects. The task ends with the connection.
    pub async fn connect_watched(
        at: impl ToSocketAddrs,
    ) -> (Http2Client, JoinHandle<Result<(), h2::Error>>) {
        let tcp = TcpStream::connect(at).await.expect("connect");
        let handshake = Builder::new()
            .initial_connection_window_size(CONN_WINDOW_BYTES)
            .initial_max_send_streams(SEND_STREAMS_MAX)
            .handshake(tcp)
            .await;
        let (sender, connection) = handshake.expect("a connection of HTTP/2");
        (Http2Client { sender }, tokio::spawn(connection))
    }

    /// Opens a stream with this request, which `is_whole` or has a body.
    pub async fn open(
        &self,
        request: Request<()>,
        is_whole: bool,
    ) -> Result<(ResponseFuture, SendStream<Bytes>), h2::Error> {
        let mut sender = self.sender.clone().ready().await?;
        sender.send_request(request, is_whole)
    }

    /// Sends a request, with this body if there is one, and reads its answer to the end.
    pub async fn ask(
        &self,
        request: Request<()>,
        body: Option<&[u8]>,
    ) -> Result<Http2Answer, h2::Error> {
        let exchange = async {
            let (answer, mut stream) = self.open(request, body.is_none()).await?;
            if let Some(body) = body {
                send(&mut stream, body).await?;
                stream.send_data(Bytes::new(), true)?;
            }
            whole(answer.await?).await
        };
        let answered = timeout(PATIENCE, exchange).await;
        answered.expect("an answer in time")
    }

    /// Asks for a URL.
    pub async fn get(&self, url: &str) -> Result<Http2Answer, h2::Error> {
        self.ask(request(Method::GET, url, &[]), None).await
    }
}

/// A request with these fields.
pub fn request(method: Method, url: &str, fields: &[(&str, &str)]) -> Request<()> {
    let mut request = Request::builder().method(method).uri(url);
    for (name, value) in fields {
        request = request.header(*name, *value);
    }
    request.body(()).expect("a request")
}

/// Sends these bytes on a stream as its window allows.
pub async fn send(stream: &mut SendStream<Bytes>, bytes: &[u8]) -> Result<(), h2::Error> {
    let mut left = Bytes::copy_from_slice(bytes);
    while !left.is_empty() {
        stream.reserve_capacity(left.len());
        let capacity = std::future::poll_fn(|cx| stream.poll_capacity(cx)).await;
        let capacity = capacity.ok_or(h2::Error::from(Reason::CANCEL))??;
        let part = left.split_to(capacity.min(left.len()));
        stream.send_data(part, false)?;
    }
    Ok(())
}

/// Reads a stream to its end.
pub async fn read_all(stream: &mut RecvStream) -> Result<Vec<u8>, h2::Error> {
    let mut all = Vec::new();
    while let Some(data) = stream.data().await {
        let data = data?;
        all.extend_from_slice(&data);
        stream.flow_control().release_capacity(data.len())?;
    }
    Ok(all)
}

/// Reads an answer to its end.
pub async fn whole(answer: Response<RecvStream>) -> Result<Http2Answer, h2::Error> {
    let (head, mut stream) = answer.into_parts();
    let body = read_all(&mut stream).await?;
    let has_trailers = stream.trailers().await?.is_some();
    Ok(Http2Answer {
        status: head.status,
        fields: head.headers,
        body,
        has_trailers,
    })
}

/// The reason for which a stream was reset.
#[track_caller]
pub fn reason<T: Debug>(broken: Result<T, h2::Error>) -> Reason {
    let error = broken.expect_err("broken off");
    assert!(error.is_remote(), "{error}");
    error.reason().unwrap_or_else(|| panic!("reset: {error}"))
}

/// A connection to which a test writes frames itself.
pub struct RawHttp2 {
    tcp: TcpStream,
}

impl RawHttp2 {
    /// Connects, and sends the preface and SETTINGS.
    pub async fn connect(at: impl ToSocketAddrs) -> RawHttp2 {
        let mut tcp = TcpStream::connect(at).await.expect("connect");
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
        tcp.write_all(preface).await.expect("the preface");
        let mut raw = RawHttp2 { tcp };
        raw.send(SETTINGS, 0, 0, &[]).await.expect("SETTINGS");
        raw
    }

    /// Writes a frame.
    pub async fn send(
        &mut self,
        kind: u8,
        flags: u8,
        stream: u32,
        payload: &[u8],
    ) -> std::io::Result<()> {
        let length = u32::try_from(payload.len()).expect("a frame");
        let mut frame = length.to_be_bytes()[1..].to_vec();
        frame.extend([kind, flags]);
        frame.extend(stream.to_be_bytes());
        frame.extend(payload);
        self.tcp.write_all(&frame).await
    }

    /// The type, stream and payload of the next frame; none at the end.
    pub async fn next(&mut self) -> Option<(u8, u32, Vec<u8>)> {
        let mut head = [0; 9];
        let read = async {
            self.tcp.read_exact(&mut head).await.ok()?;
            let [a, b, c, kind, _, stream @ ..] = head;
            let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
            self.tcp.read_exact(&mut payload).await.ok()?;
            Some((kind, u32::from_be_bytes(stream), payload))
        };
        timeout(PATIENCE, read).await.expect("a frame, or the end")
    }

    /// The code of the GOAWAY by which the connection ends; none if it ends without.
    pub async fn goaway(&mut self) -> Option<Reason> {
        let mut code = None;
        while let Some((kind, _, payload)) = self.next().await {
            if let (GOAWAY, Some(bytes)) = (kind, payload.get(4..8)) {
                let bytes = bytes.try_into().expect("four bytes");
                code = Some(Reason::from(u32::from_be_bytes(bytes)));
            }
        }
        code
    }
}

/// Fields as HPACK writes them without tables and codes (RFC 7541 §6.2.2); names and values of up to 126 bytes.
pub fn hpack(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.push(0);
        for text in [name, value] {
            let length = u8::try_from(text.len()).expect("a short text");
            assert!(length < 127, "a short text");
            block.push(length);
            block.extend(text.as_bytes());
        }
    }
    block
}
