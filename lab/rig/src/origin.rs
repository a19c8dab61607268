//! A scripted HTTP origin: it answers byte for byte as a test says, and records the requests.
//!
//! It reads one request from each connection and passes it to a script. The script either returns
//! the bytes of the answer and how the connection ends ([`ScriptedOrigin::start`]), or gets the
//! connection itself ([`ScriptedOrigin::play`]).

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rand::{RngCore as _, SeedableRng as _};
use rand_pcg::Pcg32;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// A request, as it was received.
#[derive(Debug, Clone)]
pub struct OriginRequest {
    /// The number of the request among all requests, from 0.
    pub count: usize,
    /// The number of its connection, in the order in which connections were accepted, from 0.
    pub connection: usize,
    /// The head of the request, with the empty line.
    pub head: String,
    /// The method, such as `GET`.
    pub method: String,
    /// The path in the first line.
    pub path: String,
    /// The header fields, with names in lower case.
    pub headers: HashMap<String, String>,
}

impl OriginRequest {
    fn parse(count: usize, connection: usize, head: String) -> Option<OriginRequest> {
        let mut lines = head.lines();
        let mut words = lines.next()?.split(' ').map(str::to_owned);
        let (method, path) = (words.next()?, words.next()?);
        let fields = lines.filter_map(|line| line.split_once(':'));
        let headers = fields
            .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
            .collect();
        Some(OriginRequest {
            count,
            connection,
            head,
            method,
            path,
            headers,
        })
    }

    /// A header field, by its name in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// The first byte of the requested range, if there is one.
    pub fn range_from(&self) -> Option<usize> {
        let range = self.headers.get("range")?.strip_prefix("bytes=")?;
        range.split_once('-')?.0.parse().ok()
    }

    /// The last byte of the requested range, if it has one.
    pub fn range_to(&self) -> Option<usize> {
        self.headers.get("range")?.rsplit_once('-')?.1.parse().ok()
    }

    /// Reads the body, whose length the head contains; `None` if the connection ends before.
    pub async fn body(&self, stream: &mut OriginStream) -> Option<Vec<u8>> {
        let length = self.headers.get("content-length")?.parse().ok()?;
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await.ok()?;
        Some(body)
    }
}

/// How the connection ends after the bytes of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyEnd {
    /// A normal close.
    Close,
    /// A close after a delay, in which the bytes can be read.
    CloseLater,
    /// A TCP reset.
    Reset,
    /// The connection stays open without data.
    Silence,
}

/// The delay of [`ReplyEnd::CloseLater`].
const LATER: Duration = Duration::from_millis(300);

/// The bytes of an answer, with its head, and how the connection ends.
pub struct OriginReply(pub Vec<u8>, pub ReplyEnd);

/// The connection for an answer: TCP, or TLS over it.
pub trait OriginIo: AsyncRead + AsyncWrite + Unpin + Send + Sync {
    /// The TCP connection below.
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

/// A test's own certificate authority, and its certificate for this machine.
pub struct TestAuthority {
    /// The authority's certificate, which `--ca` needs.
    pub pem: String,
    /// The certificate for `localhost`, 127.0.0.1 and 192.0.2.1.
    pub certificate_pem: String,
    /// The private key of the certificate.
    pub key_pem: String,
    config: rustls::ServerConfig,
}

impl Default for TestAuthority {
    fn default() -> Self {
        Self::new()
    }
}

impl TestAuthority {
    /// Creates the authority and the certificate.
    pub fn new() -> TestAuthority {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // Issuer and subject must differ, or the certificate counts as self-signed.
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

    /// A TLS acceptor that offers these protocols (ALPN).
    pub fn acceptor(&self, protocols: &[&[u8]]) -> TlsAcceptor {
        let mut config = self.config.clone();
        config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
        TlsAcceptor::from(Arc::new(config))
    }
}

/// An origin on its own port. It serves until its runtime ends, or [`ScriptedOrigin::stop`].
pub struct ScriptedOrigin {
    /// The address at which the origin listens.
    pub address: SocketAddr,
    secure: bool,
    requests: Arc<Mutex<Vec<OriginRequest>>>,
    /// The addresses of the clients whose connections were accepted, in order.
    accepted: watch::Receiver<Vec<SocketAddr>>,
    task: JoinHandle<()>,
}

impl ScriptedOrigin {
    /// Starts an origin that answers by `script`.
    pub async fn start(
        script: impl Fn(&OriginRequest) -> OriginReply + Send + Sync + 'static,
    ) -> ScriptedOrigin {
        ScriptedOrigin::start_at("127.0.0.1", script).await
    }

    /// Starts an origin at this address.
    pub async fn start_at(
        host: &str,
        script: impl Fn(&OriginRequest) -> OriginReply + Send + Sync + 'static,
    ) -> ScriptedOrigin {
        ScriptedOrigin::serve_at(listener(host).await, None, script)
    }

    /// Starts an origin with TLS.
    pub async fn start_tls(
        authority: &TestAuthority,
        script: impl Fn(&OriginRequest) -> OriginReply + Send + Sync + 'static,
    ) -> ScriptedOrigin {
        ScriptedOrigin::serve_at(listener("127.0.0.1").await, Some(authority), script)
    }

    /// Serves connections to `listener`, over TLS if an authority is given.
    pub fn serve_at(
        listener: TcpListener,
        authority: Option<&TestAuthority>,
        script: impl Fn(&OriginRequest) -> OriginReply + Send + Sync + 'static,
    ) -> ScriptedOrigin {
        let script = Arc::new(script);
        ScriptedOrigin::play_at(listener, authority, move |request, stream| {
            let script = script.clone();
            async move {
                // The client may have closed the connection.
                let _ = answer(script(&request), stream).await;
            }
        })
    }

    /// Starts an origin that answers every request with the same bytes, and closes.
    pub async fn fixed(answer: impl Into<Vec<u8>>) -> ScriptedOrigin {
        let answer: Arc<[u8]> = answer.into().into();
        ScriptedOrigin::play(move |_, mut stream| {
            let answer = answer.clone();
            async move {
                // The client may have closed the connection.
                let _ = stream.write_all(&answer).await;
            }
        })
        .await
    }

    /// Starts an origin that passes each request to `script` with the rest of its connection, which
    /// is closed when the script returns.
    pub async fn play<S, T>(script: S) -> ScriptedOrigin
    where
        S: Fn(OriginRequest, OriginStream) -> T + Send + Sync + 'static,
        T: Future<Output = ()> + Send + 'static,
    {
        ScriptedOrigin::play_at(listener("127.0.0.1").await, None, script)
    }

    /// Plays `script` for connections to `listener`, over TLS if an authority is given.
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
        let (accepting, accepted) = watch::channel(Vec::new());
        let task = tokio::spawn(async move {
            while let Ok((stream, from)) = listener.accept().await {
                let connection = accepting.borrow().len();
                accepting.send_modify(|accepted| accepted.push(from));
                let (seen, script, tls) = (seen.clone(), script.clone(), tls.clone());
                tokio::spawn(async move {
                    let stream: Box<dyn OriginIo> = match tls {
                        None => Box::new(stream),
                        Some(tls) => Box::new(tls.accept(stream).await.ok()?),
                    };
                    let mut stream = BufReader::new(stream);
                    let request = read_request(&mut stream, connection, &seen).await?;
                    script(request, stream).await;
                    Some(())
                });
            }
        });
        ScriptedOrigin {
            address,
            secure,
            requests,
            accepted,
            task,
        }
    }

    /// How many connections there have been until now, those included that are still to be accepted: a client that was
    /// killed may have left some, each with a request in it.
    pub async fn connections(&self) -> usize {
        let own = TcpStream::connect(self.address).await;
        let own = own.expect("a connection to the origin");
        let address = own.local_addr().expect("its address");
        // The kernel hands connections over in the order in which they came.
        let mut accepted = self.accepted.clone();
        let accepted = accepted.wait_for(|all| all.contains(&address)).await;
        let accepted = accepted.expect("the origin accepts connections");
        let position = accepted.iter().rposition(|from| *from == address);
        position.map_or(0, |own| own + 1)
    }

    /// Accepts no more connections; open ones continue.
    pub fn stop(&self) {
        self.task.abort();
    }

    /// The URL of a path.
    pub fn url(&self, path: &str) -> String {
        let scheme = if self.secure { "https" } else { "http" };
        format!("{scheme}://{}{path}", self.address)
    }

    /// All requests so far.
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
    connection: usize,
    seen: &Mutex<Vec<OriginRequest>>,
) -> Option<OriginRequest> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head).await.ok()? == 0 {
            return None;
        }
    }
    let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
    let request = OriginRequest::parse(seen.len(), connection, head)?;
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
                // sleep: the close must follow the client's reading, which is not signalled here
                tokio::time::sleep(LATER).await;
            }
            stream.shutdown().await?;
            // Until the other side has closed as well, because unread bytes would turn this into a
            // reset.
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
/// The socket refuses the option.
pub fn reset(stream: OriginStream) -> std::io::Result<()> {
    socket2::SockRef::from(stream.get_ref().tcp()).set_linger(Some(Duration::ZERO))
}

/// The bytes of an answer with this head and body.
pub fn reply(status: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut bytes = format!("HTTP/1.1 {status}\r\n").into_bytes();
    for (name, value) in headers {
        bytes.extend(format!("{name}: {value}\r\n").into_bytes());
    }
    bytes.extend(b"\r\n");
    bytes.extend(body);
    bytes
}

/// A correct answer for `object`: with validator, ranges and If-Range.
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

/// The answer, truncated after `body_bytes` of its body.
pub fn cut(answer: Vec<u8>, body_bytes: usize) -> Vec<u8> {
    let head = answer
        .windows(4)
        .position(|w| w == b"\r\n\r\n")
        .expect("a head")
        + 4;
    let end = (head + body_bytes).min(answer.len());
    answer[..end].to_vec()
}

/// Bytes that differ at every offset and for every seed.
pub fn object(length: usize, seed: u32) -> Vec<u8> {
    let mut bytes = vec![0; length];
    Pcg32::seed_from_u64(seed.into()).fill_bytes(&mut bytes);
    bytes
}

/// The metadata of a partial download, as an earlier run leaves it: `durable` bytes are on disk,
/// and no flow continues.
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
