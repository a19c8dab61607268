//! An origin that does what a test tells it to, byte for byte, and remembers what it was asked.

#![allow(dead_code)] // each test file uses a part of it

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// One request, as it came in.
#[derive(Debug, Clone)]
pub struct Asked {
    /// Its place among all requests, from 0.
    pub count: usize,
    pub method: String,
    pub path: String,
    pub headers: HashMap<String, String>,
}

impl Asked {
    /// The first byte of its range, if it has one.
    pub fn range_from(&self) -> Option<usize> {
        let range = self.headers.get("range")?.strip_prefix("bytes=")?;
        range.split_once('-')?.0.parse().ok()
    }

    /// The last byte of its range, if it has one.
    pub fn range_to(&self) -> Option<usize> {
        self.headers.get("range")?.rsplit_once('-')?.1.parse().ok()
    }
}

/// How an answer ends, after its bytes are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// An orderly close.
    Close,
    /// Closes once what came before has had time to be read.
    CloseLater,
    /// A TCP reset.
    Reset,
    /// Silence, with the connection open.
    Silence,
}

/// After [`End::CloseLater`]'s bytes.
const LATER: std::time::Duration = std::time::Duration::from_millis(300);

/// The bytes to answer with, head included, and what follows them.
pub struct Reply(pub Vec<u8>, pub End);

/// What an answer goes out on: TCP, or TLS over it.
trait Wire: AsyncRead + AsyncWrite + Unpin {
    fn tcp(&self) -> &TcpStream;
}

impl Wire for TcpStream {
    fn tcp(&self) -> &TcpStream {
        self
    }
}

impl Wire for TlsStream<TcpStream> {
    fn tcp(&self) -> &TcpStream {
        self.get_ref().0
    }
}

/// An authority of a test's own, and a certificate of it for this machine.
pub struct Authority {
    /// What `--ca` needs.
    pub pem: String,
    acceptor: TlsAcceptor,
}

impl Authority {
    pub fn new() -> Authority {
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
        let key = rustls_pki_types::PrivatePkcs8KeyDer::from(key.serialize_der());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key.into())
            .expect("its certificate");
        Authority {
            pem: issuer.pem(),
            acceptor: TlsAcceptor::from(Arc::new(config)),
        }
    }
}

/// An origin on a port of its own.
pub struct Origin {
    pub address: SocketAddr,
    secure: bool,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Origin {
    /// Starts answering by `script`.
    pub async fn start(script: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> Origin {
        Origin::start_at("127.0.0.1", script).await
    }

    /// Starts answering at an address of its own.
    pub async fn start_at(
        host: &str,
        script: impl Fn(&Asked) -> Reply + Send + Sync + 'static,
    ) -> Origin {
        let listener = TcpListener::bind((host, 0)).await.expect("a port");
        Origin::serve(listener, None, script)
    }

    /// Starts answering over TLS.
    pub async fn start_tls(
        authority: &Authority,
        script: impl Fn(&Asked) -> Reply + Send + Sync + 'static,
    ) -> Origin {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        Origin::serve(listener, Some(authority.acceptor.clone()), script)
    }

    /// Starts answering whoever comes to `listener`, over TLS with an authority.
    pub fn serve_at(
        listener: TcpListener,
        authority: Option<&Authority>,
        script: impl Fn(&Asked) -> Reply + Send + Sync + 'static,
    ) -> Origin {
        Origin::serve(listener, authority.map(|a| a.acceptor.clone()), script)
    }

    fn serve(
        listener: TcpListener,
        tls: Option<TlsAcceptor>,
        script: impl Fn(&Asked) -> Reply + Send + Sync + 'static,
    ) -> Origin {
        let address = listener.local_addr().expect("its address");
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (seen, script, secure) = (asked.clone(), Arc::new(script), tls.is_some());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (seen, script) = (seen.clone(), script.clone());
                match tls.clone() {
                    None => drop(tokio::spawn(answer(stream, seen, script))),
                    Some(tls) => drop(tokio::spawn(async move {
                        let stream = tls.accept(stream).await.ok()?;
                        answer(stream, seen, script).await
                    })),
                }
            }
        });
        Origin {
            address,
            secure,
            asked,
        }
    }

    pub fn url(&self, path: &str) -> String {
        let scheme = if self.secure { "https" } else { "http" };
        format!("{scheme}://{}{path}", self.address)
    }

    /// Everything asked so far.
    pub fn asked(&self) -> Vec<Asked> {
        self.asked.lock().expect("no panic").clone()
    }
}

async fn answer(
    stream: impl Wire,
    seen: Arc<Mutex<Vec<Asked>>>,
    script: Arc<impl Fn(&Asked) -> Reply>,
) -> Option<()> {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    stream.read_line(&mut line).await.ok()?;
    let mut words = line.split(' ').map(str::to_owned);
    let (method, path) = (words.next()?, words.next()?);
    let mut headers = HashMap::new();
    loop {
        line.clear();
        stream.read_line(&mut line).await.ok()?;
        let Some((name, value)) = line.trim_end().split_once(": ") else {
            break;
        };
        headers.insert(name.to_ascii_lowercase(), value.to_owned());
    }
    let asked = {
        let mut seen = seen.lock().expect("no panic");
        let count = seen.len();
        seen.push(Asked {
            count,
            method,
            path,
            headers,
        });
        seen.last().expect("just added").clone()
    };
    let Reply(bytes, end) = script(&asked);
    stream.get_mut().write_all(&bytes).await.ok()?;
    match end {
        End::Close | End::CloseLater => {
            if matches!(end, End::CloseLater) {
                tokio::time::sleep(LATER).await;
            }
            stream.get_mut().shutdown().await.ok()?;
            // Until the other side has closed too, or unread bytes would turn this into a reset.
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
        End::Reset => socket2::SockRef::from(stream.get_ref().tcp())
            .set_linger(Some(std::time::Duration::ZERO))
            .ok()?,
        End::Silence => {
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
    }
    Some(())
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
pub fn proper(asked: &Asked, object: &[u8], etag: &str) -> Vec<u8> {
    let matches = asked.headers.get("if-range").is_none_or(|tag| tag == etag);
    match asked.range_from().filter(|_| matches) {
        Some(from) if from < object.len() => {
            let to = asked.range_to().unwrap_or(usize::MAX).min(object.len() - 1);
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
            reply(
                "200 OK",
                &[("Content-Length", &length), ("ETag", etag)],
                object,
            )
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
