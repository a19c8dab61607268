//! An HTTP origin that does what a test tells it to, byte for byte, and remembers what it was asked.
//!
//! It reads one request of each connection and hands it to a script. The script either returns the
//! bytes to answer with and how the connection ends ([`ScriptedOrigin::start`]), or has the
//! connection itself ([`ScriptedOrigin::play`]).

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// One request, as it came in.
#[derive(Debug, Clone)]
pub struct OriginRequest {
    /// Its place among all requests, from 0.
    pub count: usize,
    /// Its head, to the empty line.
    pub head: String,
    /// `GET`.
    pub method: String,
    /// What is asked for, as the first line has it.
    pub path: String,
    /// Its header fields, the names in small letters.
    pub headers: HashMap<String, String>,
}

impl OriginRequest {
    fn parse(count: usize, head: String) -> Option<OriginRequest> {
        let mut lines = head.lines();
        let mut words = lines.next()?.split(' ').map(str::to_owned);
        let (method, path) = (words.next()?, words.next()?);
        let fields = lines.filter_map(|line| line.split_once(':'));
        let headers = fields
            .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
            .collect();
        Some(OriginRequest {
            count,
            head,
            method,
            path,
            headers,
        })
    }

    /// A header field, by its name in small letters.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// The first byte of its range, if it has one.
    pub fn range_from(&self) -> Option<usize> {
        let range = self.headers.get("range")?.strip_prefix("bytes=")?;
        range.split_once('-')?.0.parse().ok()
    }

    /// The last byte of its range, if it names one.
    pub fn range_to(&self) -> Option<usize> {
        self.headers.get("range")?.rsplit_once('-')?.1.parse().ok()
    }

    /// Reads its body, whose length its head names; none when the connection ends before.
    pub async fn body(&self, stream: &mut OriginStream) -> Option<Vec<u8>> {
        let length = self.headers.get("content-length")?.parse().ok()?;
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await.ok()?;
        Some(body)
    }
}

/// How an answer ends, after its bytes are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyEnd {
    /// An orderly close.
    Close,
    /// Closes once what came before has had time to be read.
    CloseLater,
    /// A TCP reset.
    Reset,
    /// Silence, with the connection open.
    Silence,
}

/// After the bytes of [`ReplyEnd::CloseLater`].
const LATER: Duration = Duration::from_millis(300);

/// The bytes to answer with, head included, and what follows them.
pub struct OriginReply(pub Vec<u8>, pub ReplyEnd);

/// What an answer goes out on: TCP, or TLS over it.
pub trait OriginIo: AsyncRead + AsyncWrite + Unpin + Send + Sync {
    /// The connection below.
    fn tcp(&self) -> &TcpStream;
}

impl OriginIo for TcpStream {
    fn tcp(&self) -> &TcpStream {
        self
    }
}

impl OriginIo for TlsStream<TcpStream> {
    fn tcp(&self) -> &TcpStream {
        self.get_ref().0
    }
}

/// A connection whose request has been read.
pub type OriginStream = BufReader<Box<dyn OriginIo>>;

/// A certificate authority of a test's own, and a certificate of it for this machine.
pub struct TestAuthority {
    /// The authority's certificate, which `--ca` needs.
    pub pem: String,
    /// The certificate for `localhost`, 127.0.0.1 and 192.0.2.1.
    pub certificate_pem: String,
    /// The key of that certificate.
    pub key_pem: String,
    config: rustls::ServerConfig,
}

impl Default for TestAuthority {
    fn default() -> Self {
        Self::new()
    }
}

impl TestAuthority {
    /// Makes both.
    pub fn new() -> TestAuthority {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // A certificate whose issuer is its subject is taken for self-signed.
        let name = "the authority of a test";
        params.distinguished_name.push(DnType::CommonName, name);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key"))
            .expect("an authority");
        let key = KeyPair::generate().expect("a key");
        let names = ["localhost", "127.0.0.1", "192.0.2.1"].map(str::to_owned);
        let certificate = CertificateParams::new(names)
            .expect("names")
            .signed_by(&key, &issuer)
            .expect("a certificate");
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let der = rustls_pki_types::PrivatePkcs8KeyDer::from(key.serialize_der());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], der.into())
            .expect("its certificate");
        TestAuthority {
            pem: issuer.pem(),
            certificate_pem: certificate.pem(),
            key_pem: key.serialize_pem(),
            config,
        }
    }

    /// A server's side of TLS that offers these protocols (ALPN).
    pub fn acceptor(&self, protocols: &[&[u8]]) -> TlsAcceptor {
        let mut config = self.config.clone();
        config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
        TlsAcceptor::from(Arc::new(config))
    }
}

/// An origin on a port of its own. It serves until its runtime ends, or [`ScriptedOrigin::stop`].
pub struct ScriptedOrigin {
    /// Where it listens.
    pub address: SocketAddr,
    secure: bool,
    requests: Arc<Mutex<Vec<OriginRequest>>>,
    task: JoinHandle<()>,
}

impl ScriptedOrigin {
    /// Starts answering by `script`.
    pub async fn start(
        script: impl Fn(&OriginRequest) -> OriginReply + Send + Sync + 'static,
    ) -> ScriptedOrigin {
        ScriptedOrigin::start_at("127.0.0.1", script).await
    }

    /// Starts answering at an address of its own.
    pub async fn start_at(
        host: &str,
        script: impl Fn(&OriginRequest) -> OriginReply + Send + Sync + 'static,
    ) -> ScriptedOrigin {
        ScriptedOrigin::serve_at(listener(host).await, None, script)
    }

    /// Starts answering over TLS.
    pub async fn start_tls(
        authority: &TestAuthority,
        script: impl Fn(&OriginRequest) -> OriginReply + Send + Sync + 'static,
    ) -> ScriptedOrigin {
        ScriptedOrigin::serve_at(listener("127.0.0.1").await, Some(authority), script)
    }

    /// Starts answering whoever comes to `listener`, over TLS with an authority.
    pub fn serve_at(
        listener: TcpListener,
        authority: Option<&TestAuthority>,
        script: impl Fn(&OriginRequest) -> OriginReply + Send + Sync + 'static,
    ) -> ScriptedOrigin {
        let script = Arc::new(script);
        ScriptedOrigin::play_at(listener, authority, move |request, stream| {
            let script = script.clone();
            async move {
                // A reader that went away is its own affair.
                let _ = answer(script(&request), stream).await;
            }
        })
    }

    /// Answers every request with the same bytes, and closes.
    pub async fn fixed(answer: impl Into<Vec<u8>>) -> ScriptedOrigin {
        let answer: Arc<[u8]> = answer.into().into();
        ScriptedOrigin::play(move |_, mut stream| {
            let answer = answer.clone();
            async move {
                // A reader that went away is its own affair.
                let _ = stream.write_all(&answer).await;
            }
        })
        .await
    }

    /// Hands each request to `script` with the rest of its connection, which closes when the script
    /// returns.
    pub async fn play<S, T>(script: S) -> ScriptedOrigin
    where
        S: Fn(OriginRequest, OriginStream) -> T + Send + Sync + 'static,
        T: Future<Output = ()> + Send + 'static,
    {
        ScriptedOrigin::play_at(listener("127.0.0.1").await, None, script)
    }

    /// Plays `script` for whoever comes to `listener`, over TLS with an authority.
    pub fn play_at<S, T>(
        listener: TcpListener,
        authority: Option<&TestAuthority>,
        script: S,
    ) -> ScriptedOrigin
    where
        S: Fn(OriginRequest, OriginStream) -> T + Send + Sync + 'static,
        T: Future<Output = ()> + Send + 'static,
    {
        let address = listener.local_addr().expect("its address");
        let tls = authority.map(|authority| authority.acceptor(&[]));
        let secure = tls.is_some();
        let requests: Arc<Mutex<Vec<OriginRequest>>> = Arc::default();
        let seen = requests.clone();
        let script = Arc::new(script);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (seen, script, tls) = (seen.clone(), script.clone(), tls.clone());
                tokio::spawn(async move {
                    let stream: Box<dyn OriginIo> = match tls {
                        None => Box::new(stream),
                        Some(tls) => Box::new(tls.accept(stream).await.ok()?),
                    };
                    let mut stream = BufReader::new(stream);
                    let request = read_request(&mut stream, &seen).await?;
                    script(request, stream).await;
                    Some(())
                });
            }
        });
        ScriptedOrigin {
            address,
            secure,
            requests,
            task,
        }
    }

    /// Accepts no more connections; those that are open go on.
    pub fn stop(&self) {
        self.task.abort();
    }

    /// The URL of a path.
    pub fn url(&self, path: &str) -> String {
        let scheme = if self.secure { "https" } else { "http" };
        format!("{scheme}://{}{path}", self.address)
    }

    /// Everything asked so far.
    pub fn requests(&self) -> Vec<OriginRequest> {
        let requests = self.requests.lock();
        requests.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

async fn listener(host: &str) -> TcpListener {
    TcpListener::bind((host, 0)).await.expect("a port")
}

async fn read_request(
    stream: &mut OriginStream,
    seen: &Mutex<Vec<OriginRequest>>,
) -> Option<OriginRequest> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head).await.ok()? == 0 {
            return None;
        }
    }
    let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
    let request = OriginRequest::parse(seen.len(), head)?;
    seen.push(request.clone());
    Some(request)
}

async fn answer(reply: OriginReply, mut stream: OriginStream) -> std::io::Result<()> {
    let OriginReply(bytes, end) = reply;
    stream.write_all(&bytes).await?;
    stream.flush().await?;
    match end {
        ReplyEnd::Close | ReplyEnd::CloseLater => {
            if end == ReplyEnd::CloseLater {
                // sleep: the close is to come after the bytes were read, which nobody tells here
                tokio::time::sleep(LATER).await;
            }
            stream.shutdown().await?;
            // Until the other side has closed too, or unread bytes would turn this into a reset.
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
        ReplyEnd::Reset => reset(stream)?,
        ReplyEnd::Silence => {
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
    }
    Ok(())
}

/// Ends a connection with a TCP reset.
///
/// # Errors
/// The socket takes no option.
pub fn reset(stream: OriginStream) -> std::io::Result<()> {
    socket2::SockRef::from(stream.get_ref().tcp()).set_linger(Some(Duration::ZERO))
}

/// A head and a body.
pub fn reply(status: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut bytes = format!("HTTP/1.1 {status}\r\n").into_bytes();
    for (name, value) in headers {
        bytes.extend(format!("{name}: {value}\r\n").into_bytes());
    }
    bytes.extend(b"\r\n");
    bytes.extend(body);
    bytes
}

/// A well-behaved answer for `object`: validator, ranges, If-Range.
pub fn proper(request: &OriginRequest, object: &[u8], etag: &str) -> Vec<u8> {
    let matches = request
        .headers
        .get("if-range")
        .is_none_or(|tag| tag == etag);
    match request.range_from().filter(|_| matches) {
        Some(from) if from < object.len() => {
            let last = object.len() - 1;
            let to = request.range_to().unwrap_or(usize::MAX).min(last);
            let range = format!("bytes {from}-{to}/{}", object.len());
            let length = (to + 1 - from).to_string();
            let headers = [
                ("Content-Range", &*range),
                ("Content-Length", &*length),
                ("ETag", etag),
            ];
            reply("206 Partial Content", &headers, &object[from..=to])
        }
        Some(_) => {
            let range = format!("bytes */{}", object.len());
            let headers = [("Content-Range", &*range), ("Content-Length", "0")];
            reply("416 Range Not Satisfiable", &headers, b"")
        }
        None => {
            let length = object.len().to_string();
            let headers = [("Content-Length", &*length), ("ETag", etag)];
            reply("200 OK", &headers, object)
        }
    }
}

/// The answer, cut off after `body_bytes` of its body.
pub fn cut(answer: Vec<u8>, body_bytes: usize) -> Vec<u8> {
    let head = answer
        .windows(4)
        .position(|w| w == b"\r\n\r\n")
        .expect("a head")
        + 4;
    let end = (head + body_bytes).min(answer.len());
    answer[..end].to_vec()
}

/// Bytes that differ at every place and for every seed.
pub fn object(length: usize, seed: u32) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    })
    .take(length)
    .collect()
}

/// The note beside a part, as an earlier run leaves it: `durable` bytes are safe, and no flow brings
/// the rest.
pub fn note(url: &str, etag: &str, length: Option<usize>, durable: usize) -> String {
    use sha2::Digest;
    let text = |text: &str| serde_json::Value::from(text);
    let length = length.map_or("null".to_owned(), |length| length.to_string());
    let note = format!(
        r#""version":2,"url":{},"validator":{{"etag":{}}},"length":{length},"durable_bytes":{durable}"#,
        text(url),
        text(etag),
    );
    let sum = hex::encode(&sha2::Sha256::digest(format!("{{{note}}}"))[..8]);
    format!(r#"{{{note},"sum":"{sum}"}}"#)
}
