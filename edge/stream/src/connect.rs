//! The device's side: TCP on one link, an HTTP proxy if the user has one, TLS, WebSocket.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use http::{HeaderValue, Method, Request, StatusCode, Uri};
use hyper_util::client::proxy::matcher::{Intercept, Matcher};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use tokio::net::TcpSocket;
use tokio_rustls::TlsConnector;
use tokio_tungstenite::tungstenite;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;

use crate::messages::{PacketReceiver, PacketSender, split};
use crate::unsent::SharedTcp;
use crate::{
    CONNECT_MAX, CarrierStream, STREAM_HTTP_PATH, SUBPROTOCOL, carrier_of, tls, websocket_config,
};

/// The server of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamTarget {
    /// The server's name or literal address, as given by the user (IPv6 without brackets).
    pub host: String,
    /// The TCP port.
    pub port: u16,
}

impl StreamTarget {
    /// Host and port in the form of a URL.
    fn authority(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }
}

/// Why no stream could be opened.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// There is no TCP connection to the host.
    #[error("no TCP connection: {0}")]
    Unreachable(io::Error),
    /// The user's HTTP proxy refuses the connection.
    #[error("the HTTP proxy {proxy} does not connect us: {why}")]
    HttpProxy {
        /// The proxy's host and port.
        proxy: String,
        /// The reason that the server gave.
        why: String,
    },
    /// Another host answers: a portal, a middlebox, or another server (R-STREAM-7).
    #[error("something else answers: {0}")]
    Foreign(String),
    /// The connection took longer than [`CONNECT_MAX`].
    #[error("no answer within {} s", CONNECT_MAX.as_secs())]
    TimedOut,
}

/// How long a TCP connection to an HTTP proxy is waited for before the server itself is tried beside it.
const HTTP_PROXY_WAIT: Duration = Duration::from_millis(500); // a guess: a proxy is near, or absent
/// How long a TCP connection to an HTTP proxy is waited for at most: until the answer to its second SYN has come.
const HTTP_PROXY_MAX: Duration = Duration::from_millis(2_500); // RFC 6298 §2.1

/// The HTTP proxy of this program's settings, once they were read.
static SETTINGS_PROXY: RwLock<Option<Option<Matcher>>> = RwLock::new(None);

/// A text is not the address of an HTTP proxy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no HTTP proxy: it looks like http://HOST:PORT or http://NAME:PASSWORD@HOST:PORT")]
pub struct HttpProxyError(String);

/// Checks the address of an HTTP proxy.
///
/// # Errors
/// The text is not the address of an HTTP proxy.
pub fn check_http_proxy(text: &str) -> Result<(), HttpProxyError> {
    let uri: Option<Uri> = text.parse().ok();
    let is_one = uri.is_some_and(|uri| {
        let is_bare = matches!(uri.path(), "" | "/") && uri.query().is_none();
        uri.scheme_str() == Some("http") && uri.host().is_some_and(|h| !h.is_empty()) && is_bare
    });
    // What is wrong may be a password.
    let shown = || text.rsplit('@').next().unwrap_or_default().to_owned();
    is_one.then_some(()).ok_or_else(|| HttpProxyError(shown()))
}

/// Sets the HTTP proxy for all streams of this process to which the environment names none; `None`:
/// there is none. `NO_PROXY` excepts hosts from it, too.
///
/// # Errors
/// It is no HTTP proxy.
pub fn use_http_proxy(text: Option<&str>) -> Result<(), HttpProxyError> {
    let matcher = text.map(|text| {
        check_http_proxy(text)?;
        let excepted = ["NO_PROXY", "no_proxy"].map(std::env::var);
        let excepted = excepted
            .into_iter()
            .find_map(Result::ok)
            .unwrap_or_default();
        Ok(Matcher::builder().https(text).no(excepted).build())
    });
    let matcher = matcher.transpose()?;
    *SETTINGS_PROXY
        .write()
        .unwrap_or_else(PoisonError::into_inner) = Some(matcher);
    Ok(())
}

/// Whether [`use_http_proxy`] was called.
pub fn is_http_proxy_set() -> bool {
    let settings = SETTINGS_PROXY
        .read()
        .unwrap_or_else(PoisonError::into_inner);
    settings.is_some()
}

/// The HTTP proxy for a target: the one that the environment names (`HTTPS_PROXY`, `ALL_PROXY`, `NO_PROXY`),
/// else the one of the settings.
pub fn http_proxy_for(target: &StreamTarget) -> Option<Intercept> {
    let uri: Uri = format!("https://{}/", target.authority()).parse().ok()?;
    let settings = SETTINGS_PROXY
        .read()
        .unwrap_or_else(PoisonError::into_inner);
    let by_settings = || settings.as_ref()?.as_ref()?.intercept(&uri);
    let found = Matcher::from_env().intercept(&uri).or_else(by_settings)?;
    let plain = found.uri().scheme_str().is_none_or(|s| s == "http");
    if !plain {
        tracing::warn!("HTTPS_PROXY is not an http:// address: streams go without a proxy");
    }
    plain.then_some(found)
}

/// The host and the port of an HTTP proxy.
fn proxy_place(proxy: &Intercept) -> Option<(String, u16)> {
    let uri = proxy.uri();
    let host = uri.host()?.trim_matches(['[', ']']).to_owned();
    Some((host, uri.port_u16().unwrap_or(80)))
}

/// Opens a stream to `target`, whose address over this link is `remote`. `socket` creates a TCP
/// socket on the link, for one address family (true: IPv6).
///
/// An HTTP proxy comes first. Where it does not answer, it belongs to another network and this one may not need it: then
/// the server itself is tried, after half a second beside it.
///
/// # Errors
/// The server cannot be reached, or another host answers.
pub async fn connect(
    target: &StreamTarget,
    remote: SocketAddr,
    proxy: Option<&Intercept>,
    socket: impl Fn(SocketAddr) -> io::Result<TcpSocket>,
) -> Result<(PacketSender, PacketReceiver), ConnectError> {
    let opening = async {
        match proxy {
            Some(proxy) => by_proxy_or_direct(target, remote, proxy, &socket).await,
            None => direct(target, remote, &socket).await,
        }
    };
    tokio::time::timeout(CONNECT_MAX, opening)
        .await
        .map_err(|_| ConnectError::TimedOut)?
}

async fn direct(
    target: &StreamTarget,
    remote: SocketAddr,
    socket: &impl Fn(SocketAddr) -> io::Result<TcpSocket>,
) -> Result<(PacketSender, PacketReceiver), ConnectError> {
    let tcp = connect_tcp(remote, socket).await?;
    upgrade(target, Box::new(tcp.clone()), tcp).await
}

async fn by_proxy_or_direct(
    target: &StreamTarget,
    remote: SocketAddr,
    proxy: &Intercept,
    socket: &impl Fn(SocketAddr) -> io::Result<TcpSocket>,
) -> Result<(PacketSender, PacketReceiver), ConnectError> {
    let mut to_proxy = Box::pin(connect_to_proxy(proxy, socket));
    match tokio::time::timeout(HTTP_PROXY_WAIT, &mut to_proxy).await {
        Ok(Ok(tcp)) => return through(target, proxy, tcp).await,
        Ok(Err(ConnectError::Unreachable(error))) => {
            tracing::debug!(%error, "the HTTP proxy is not reachable here");
            return direct(target, remote, socket).await;
        }
        Ok(Err(error)) => return Err(error),
        Err(_) => tracing::debug!("the HTTP proxy does not answer: trying without it, too"),
    }
    let by_proxy = async {
        let tcp = tokio::time::timeout(HTTP_PROXY_MAX - HTTP_PROXY_WAIT, to_proxy)
            .await
            .map_err(|_| ConnectError::Unreachable(io::ErrorKind::TimedOut.into()))?;
        through(target, proxy, tcp?).await
    };
    let direct = direct(target, remote, socket);
    tokio::pin!(by_proxy, direct);
    tokio::select! {
        opened = &mut by_proxy => match opened {
            Ok(opened) => Ok(opened),
            Err(_) => direct.await,
        },
        opened = &mut direct => match opened {
            Ok(opened) => Ok(opened),
            // Who answers in the server's place says more than a proxy that does not answer.
            Err(error) => by_proxy.await.map_err(|by_proxy| match (&error, &by_proxy) {
                (ConnectError::Foreign(_), _) | (_, ConnectError::Unreachable(_)) => error,
                _ => by_proxy,
            }),
        },
    }
}

async fn connect_tcp(
    remote: SocketAddr,
    socket: &impl Fn(SocketAddr) -> io::Result<TcpSocket>,
) -> Result<SharedTcp, ConnectError> {
    let connecting = async {
        let stream = socket(remote)?.connect(remote).await?;
        carrier_of(stream)
    };
    connecting.await.map_err(ConnectError::Unreachable)
}

/// Why an HTTP proxy does not connect.
fn refused(proxy: &Intercept, why: String) -> ConnectError {
    ConnectError::HttpProxy {
        proxy: proxy.uri().authority().map_or_else(String::new, |a| {
            // Without the password that may precede it.
            a.as_str().rsplit('@').next().unwrap_or_default().to_owned()
        }),
        why,
    }
}

/// Connects to the HTTP proxy.
async fn connect_to_proxy(
    proxy: &Intercept,
    socket: &impl Fn(SocketAddr) -> io::Result<TcpSocket>,
) -> Result<SharedTcp, ConnectError> {
    let place =
        proxy_place(proxy).ok_or_else(|| refused(proxy, "its address has no host".into()))?;
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    let found = tokio::net::lookup_host(place)
        .await
        .map_err(ConnectError::Unreachable)?;
    for address in found {
        match connect_tcp(address, socket).await {
            Ok(tcp) => return Ok(tcp),
            Err(ConnectError::Unreachable(error)) => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(ConnectError::Unreachable(last))
}

/// Requests a connection to the target from an HTTP proxy (RFC 9110 §9.3.6), and opens the stream in it.
async fn through(
    target: &StreamTarget,
    proxy: &Intercept,
    tcp: SharedTcp,
) -> Result<(PacketSender, PacketReceiver), ConnectError> {
    let refused = |why| refused(proxy, why);
    let broken = |error: hyper::Error| refused(error.to_string());
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(tcp.clone()))
        .await
        .map_err(broken)?;
    let driving = tokio::spawn(connection.with_upgrades());
    let authority = target.authority();
    let mut request = Request::builder()
        .method(Method::CONNECT)
        .uri(&authority)
        .header(http::header::HOST, &authority)
        .body(http_body_util::Empty::<bytes::Bytes>::new())
        .map_err(|error| refused(error.to_string()))?;
    if let Some(auth) = proxy.basic_auth() {
        let headers = request.headers_mut();
        headers.insert(http::header::PROXY_AUTHORIZATION, auth.clone());
    }
    let answer = sender.send_request(request).await.map_err(broken)?;
    match answer.status() {
        status if status.is_success() => {}
        StatusCode::PROXY_AUTHENTICATION_REQUIRED => {
            driving.abort();
            return Err(refused(
                "it asks for a name and a password; write them into HTTPS_PROXY".into(),
            ));
        }
        status => {
            driving.abort();
            return Err(refused(format!("it answers {status}")));
        }
    }
    let tunnel = hyper::upgrade::on(answer).await.map_err(broken)?;
    upgrade(target, Box::new(TokioIo::new(tunnel)), tcp).await
}

/// Opens TLS and the WebSocket over a connection to the target.
async fn upgrade(
    target: &StreamTarget,
    carrier: Box<dyn CarrierStream>,
    tcp: SharedTcp,
) -> Result<(PacketSender, PacketReceiver), ConnectError> {
    static CONFIG: OnceLock<Arc<ClientConfig>> = OnceLock::new();
    let config = CONFIG.get_or_init(tls::client_config).clone();
    let foreign = |what: &str| ConnectError::Foreign(what.to_owned());
    let name = ServerName::try_from(target.host.clone())
        .map_err(|_| foreign("the host has no name that TLS takes"))?;
    let encrypted = TlsConnector::from(config)
        .connect(name, carrier)
        .await
        .map_err(|error| ConnectError::Foreign(format!("no TLS: {error}")))?;
    let uri = format!("wss://{}{STREAM_HTTP_PATH}", target.authority());
    let mut request = uri
        .into_client_request()
        .map_err(|error| ConnectError::Foreign(error.to_string()))?;
    request.headers_mut().insert(
        http::header::SEC_WEBSOCKET_PROTOCOL,
        HeaderValue::from_static(SUBPROTOCOL),
    );
    let encrypted: Box<dyn CarrierStream> = Box::new(encrypted);
    let opened =
        tokio_tungstenite::client_async_with_config(request, encrypted, Some(websocket_config()));
    // R-STREAM-7: a portal answers with its page, and receives nothing more.
    let (stream, _) = opened.await.map_err(|error| match error {
        tungstenite::Error::Http(answer) => {
            ConnectError::Foreign(format!("an HTTP server with {}", answer.status()))
        }
        error => ConnectError::Foreign(error.to_string()),
    })?;
    Ok(split(stream, tcp))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_http_proxy_is_named_without_its_password() {
        for good in ["http://proxy.example:3128", "http://a:b@[2001:db8::1]:80/"] {
            assert_eq!(check_http_proxy(good), Ok(()), "{good}");
        }
        for bad in [
            "",
            "proxy:3128",
            "https://proxy:3128",
            "http://",
            "http://h:1/x",
        ] {
            assert!(check_http_proxy(bad).is_err(), "{bad}");
        }
        let error = check_http_proxy("socks5://me:secret@host:1").unwrap_err();
        assert!(!error.to_string().contains("secret"), "{error}");
    }
}
