//! The server's side: TLS by itself, or HTTP from a reverse proxy, on one port.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use http::{HeaderValue, StatusCode};
use socket2::{Domain, Protocol, Socket, TcpKeepalive, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_tungstenite::tungstenite::handshake::server::{ErrorResponse, Request, Response};

use crate::identity::StreamIdentity;
use crate::messages::{PacketReceiver, PacketSender, StreamEnd, split};
use crate::{CarrierStream, STREAM_HTTP_PATH, SUBPROTOCOL, carrier_of, websocket_config};

/// The first byte of a TLS connection: a handshake record (RFC 8446 §5.1).
const TLS_HANDSHAKE: u8 = 0x16;
/// How long a connection may be silent until TCP asks whether the device is still there. A device that
/// sleeps keeps its stream for this little; one that vanished frees its place.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(1_800); // a guess
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(60);
/// The number of connections that wait to be accepted.
const BACKLOG: i32 = 1024;

/// Accepts the TCP connections of streams.
pub struct TcpStreamAcceptor {
    listeners: Vec<TcpListener>,
    identity: StreamIdentity,
}

impl TcpStreamAcceptor {
    /// Listens at an address; at `[::]` for both families, each with its own socket.
    ///
    /// # Errors
    /// The port is in use, or not permitted.
    pub fn bind(address: SocketAddr, identity: StreamIdentity) -> io::Result<TcpStreamAcceptor> {
        let first = listen(address);
        let mut listeners = Vec::new();
        if address.is_ipv6() && address.ip().is_unspecified() {
            let port = match &first {
                Ok(first) => first.local_addr()?.port(),
                Err(_) => address.port(),
            };
            match (first, listen((Ipv4Addr::UNSPECIFIED, port).into())) {
                (Err(error), Err(_)) => return Err(error),
                (first, second) => listeners.extend(first.into_iter().chain(second)),
            }
        } else {
            listeners.push(first?);
        }
        Ok(TcpStreamAcceptor {
            listeners,
            identity,
        })
    }

    /// Accepts from sockets that listen already, at least one.
    ///
    /// # Errors
    /// There is none, or one is not usable.
    pub fn on_sockets(
        listeners: Vec<std::net::TcpListener>,
        identity: StreamIdentity,
    ) -> io::Result<TcpStreamAcceptor> {
        if listeners.is_empty() {
            return Err(io::ErrorKind::NotFound.into());
        }
        let use_socket = |listener: std::net::TcpListener| {
            listener.set_nonblocking(true)?;
            TcpListener::from_std(listener)
        };
        let listeners = listeners.into_iter().map(use_socket);
        Ok(TcpStreamAcceptor {
            listeners: listeners.collect::<io::Result<_>>()?,
            identity,
        })
    }

    /// Other descriptors of its sockets, for the next process.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn share_sockets(&self) -> io::Result<Vec<OwnedFd>> {
        let sockets = self.listeners.iter();
        sockets
            .map(|listener| listener.as_fd().try_clone_to_owned())
            .collect()
    }

    /// The address on which the acceptor listens.
    ///
    /// # Errors
    /// The system does not report it.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listeners[0].local_addr()
    }

    /// Accepts the next TCP connection; returns it with its peer's address.
    ///
    /// # Errors
    /// The system allows no more connections.
    pub async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        std::future::poll_fn(|cx| {
            let mut polls = self.listeners.iter().map(|l| l.poll_accept(cx));
            polls
                .find(std::task::Poll::is_ready)
                .unwrap_or(std::task::Poll::Pending)
        })
        .await
    }

    /// The certificate of the listener.
    pub fn identity(&self) -> StreamIdentity {
        self.identity.clone()
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let domain = Domain::for_address(address);
    let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    socket.set_reuse_address(true)?;
    if domain == Domain::IPV6 {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

impl StreamIdentity {
    /// Answers a connection: TLS if it begins with that, and then the request for a WebSocket.
    ///
    /// # Errors
    /// The connection is not a stream.
    pub async fn answer(
        &self,
        tcp: TcpStream,
    ) -> Result<(PacketSender, PacketReceiver), StreamEnd> {
        let broken = |error: io::Error| StreamEnd::Broken(error.to_string());
        let keepalive = TcpKeepalive::new()
            .with_time(KEEPALIVE_AFTER)
            .with_interval(KEEPALIVE_INTERVAL);
        socket2::SockRef::from(&tcp)
            .set_tcp_keepalive(&keepalive)
            .map_err(broken)?;
        let mut first = [0];
        if tcp.peek(&mut first).await.map_err(broken)? == 0 {
            return Err(StreamEnd::Closed);
        }
        let tcp = carrier_of(tcp).map_err(broken)?;
        let carrier: Box<dyn CarrierStream> = if first[0] == TLS_HANDSHAKE {
            let acceptor = TlsAcceptor::from(self.tls());
            Box::new(acceptor.accept(tcp.clone()).await.map_err(broken)?)
        } else {
            Box::new(tcp.clone())
        };
        let stream = tokio_tungstenite::accept_hdr_async_with_config(
            carrier,
            answer_request,
            Some(websocket_config()),
        );
        Ok(split(stream.await?, tcp))
    }
}

/// Accepts a request for a stream, and answers all others as a server without content.
#[expect(
    clippy::result_large_err,
    reason = "the type is that of tungstenite's callback"
)]
fn answer_request(request: &Request, mut response: Response) -> Result<Response, ErrorResponse> {
    let names = request
        .headers()
        .get_all(http::header::SEC_WEBSOCKET_PROTOCOL);
    let ours = names
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|name| name.trim() == SUBPROTOCOL);
    // A reverse proxy may add a prefix to the path.
    if !ours || !request.uri().path().ends_with(STREAM_HTTP_PATH) {
        let mut nothing = ErrorResponse::new(Some("Not Found\n".to_owned()));
        *nothing.status_mut() = StatusCode::NOT_FOUND;
        return Err(nothing);
    }
    response.headers_mut().insert(
        http::header::SEC_WEBSOCKET_PROTOCOL,
        HeaderValue::from_static(SUBPROTOCOL),
    );
    Ok(response)
}
