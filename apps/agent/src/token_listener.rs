//! A port of this machine for clients that know its token: links for players, the agent's page.
//!
//! ```text
//!  client ── GET /TOKEN/rest  Host: 127.0.0.1:PORT ──▶ TokenGuard ─▶ rest
//!  page   ── GET /…           Host: evil.example   ──▶ refused       (DNS rebinding)
//! ```
//!
//! The token is 128 random bits, so that no page of a browser on this machine can guess it; the `Host`
//! must name this machine, so that no page can come here under its own name. A connection that has not
//! shown the token has a short time and one of few places, so that no number of them keeps the others out.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::hmac;
use http::HeaderMap;
use http::header::{HOST, ORIGIN};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OnceCell, OwnedSemaphorePermit, Semaphore};

use crate::socket_owner::ConnectionOwner;
use crate::unproven_connections::{UnprovenConnection, UnprovenConnections};

/// Connections at once that have shown the token; their requests wait if there are more.
pub const CONNECTIONS_MAX: usize = 64; // a guess: a player has a handful, a browser six

/// Connections at once that have not shown the token; the oldest of the user who has most gives way.
pub const UNPROVEN_MAX: usize = 64; // a guess: who knows the token asks at once

/// How long a connection may take to show the token.
pub const TOKEN_WITHIN: Duration = Duration::from_secs(5); // a guess

/// The bytes of a code for one thing behind the token: as many as of the token.
const CODE_BYTES: usize = 16;

/// A listening port, and the token for it.
pub struct TokenListener {
    listener: TcpListener,
    guard: Arc<TokenGuard>,
    unproven: UnprovenConnections,
    room: Arc<Semaphore>,
}

impl TokenListener {
    /// Listens at `port` of 127.0.0.1; 0 is any.
    ///
    /// # Errors
    /// The port is not to be had.
    pub async fn bind(token: String, port: u16) -> io::Result<TokenListener> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
        let address = listener.local_addr()?;
        Ok(TokenListener {
            listener,
            guard: Arc::new(TokenGuard { token, address }),
            unproven: UnprovenConnections::new(UNPROVEN_MAX, TOKEN_WITHIN),
            room: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
        })
    }

    /// The address of the port.
    pub fn address(&self) -> SocketAddr {
        self.guard.address
    }

    /// The beginning of all links to this port.
    pub fn base(&self) -> String {
        format!("http://{}/{}", self.guard.address, self.guard.token)
    }

    /// The rules for requests to this port.
    pub fn guard(&self) -> &Arc<TokenGuard> {
        &self.guard
    }

    /// The next connection, and its place.
    pub async fn accept(&self) -> (TcpStream, Arc<ConnectionPlace>) {
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let place = ConnectionPlace {
                        unproven: self.unproven.admit(ConnectionOwner::of(&stream)),
                        room: self.room.clone(),
                        permit: OnceCell::new(),
                    };
                    return (stream, Arc::new(place));
                }
                Err(error) => {
                    // Out of descriptors, most likely: some will be closed.
                    tracing::warn!(%error, "refused a connection of this machine");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

/// The place of a connection: among strangers until it has shown the token, then among clients.
pub struct ConnectionPlace {
    unproven: Arc<UnprovenConnection>,
    room: Arc<Semaphore>,
    permit: OnceCell<Option<OwnedSemaphorePermit>>,
}

impl ConnectionPlace {
    /// Records that the connection has shown the token; ready when there is room for it.
    pub async fn prove(&self) {
        self.unproven.prove();
        let room = || async { self.room.clone().acquire_owned().await.ok() };
        self.permit.get_or_init(room).await;
    }

    /// Ready when the connection is to be closed because it did not show the token.
    pub async fn closed(&self) {
        self.unproven.closed().await;
    }
}

/// Checks which requests come from this machine, and which know the token.
pub struct TokenGuard {
    token: String,
    address: SocketAddr,
}

impl TokenGuard {
    /// Whether the Host header names this machine.
    pub fn is_ours(&self, headers: &HeaderMap) -> bool {
        let mut hosts = headers.get_all(HOST).iter();
        let (Some(host), None) = (hosts.next(), hosts.next()) else {
            return false;
        };
        self.names().any(|ours| ours.as_bytes() == host.as_bytes())
    }

    /// Whether the Origin header, if there is one, names this port: the request is not another page's.
    /// None without an Origin.
    pub fn is_same_origin(&self, headers: &HeaderMap) -> Option<bool> {
        let mut origins = headers.get_all(ORIGIN).iter();
        let origin = origins.next()?;
        let is_ours = |name: String| format!("http://{name}").as_bytes() == origin.as_bytes();
        Some(origins.next().is_none() && self.names().any(is_ours))
    }

    /// The path after the token, without its slash, if the token is right.
    pub fn behind_token<'a>(&self, path: &'a str) -> Option<&'a str> {
        let (token, rest) = path.strip_prefix('/')?.split_once('/')?;
        verify_slices_are_equal(token.as_bytes(), self.token.as_bytes()).ok()?;
        Some(rest)
    }

    /// The first part of all paths: a slash and the token.
    pub fn prefix(&self) -> String {
        format!("/{}", self.token)
    }

    /// The code for one thing behind the token, such as `play/17`: it proves that whoever made the link knew the token,
    /// and does not tell the token.
    pub fn code_for(&self, thing: &str) -> String {
        let key = hmac::Key::new(hmac::HMAC_SHA256, self.token.as_bytes());
        let tag = hmac::sign(&key, thing.as_bytes());
        hex::encode(&tag.as_ref()[..CODE_BYTES])
    }

    /// Whether a code is the one for this thing.
    pub fn is_code_for(&self, thing: &str, code: &str) -> bool {
        verify_slices_are_equal(code.as_bytes(), self.code_for(thing).as_bytes()).is_ok()
    }

    fn names(&self) -> impl Iterator<Item = String> {
        let port = self.address.port();
        ["127.0.0.1", "localhost"]
            .into_iter()
            .map(move |host| format!("{host}:{port}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(fields: &[(http::HeaderName, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(name, http::HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn a_request_is_ours_by_its_host_its_origin_and_its_token() {
        let guard = TokenGuard {
            token: "secret".into(),
            address: ([127, 0, 0, 1], 4711).into(),
        };
        let host = |host| guard.is_ours(&headers(&[(HOST, host)]));
        assert!(host("127.0.0.1:4711") && host("localhost:4711"));
        for other in [
            "127.0.0.1",
            "127.0.0.1:4712",
            "evil.example:4711",
            "localhost.evil.example",
            "",
        ] {
            assert!(!host(other), "{other}");
        }
        assert!(!guard.is_ours(&headers(&[])));
        let two = [(HOST, "127.0.0.1:4711"), (HOST, "127.0.0.1:4711")];
        assert!(!guard.is_ours(&headers(&two)));

        let origin = |origin| guard.is_same_origin(&headers(&[(ORIGIN, origin)]));
        assert_eq!(guard.is_same_origin(&headers(&[])), None);
        assert_eq!(origin("http://127.0.0.1:4711"), Some(true));
        assert_eq!(origin("http://localhost:4711"), Some(true));
        for other in [
            "null",
            "http://127.0.0.1",
            "http://127.0.0.1:4712",
            "https://127.0.0.1:4711",
            "http://evil.example",
        ] {
            assert_eq!(origin(other), Some(false), "{other}");
        }

        assert_eq!(guard.behind_token("/secret/"), Some(""));
        assert_eq!(guard.behind_token("/secret/a/b?c"), Some("a/b?c"));
        for other in ["/secret", "/secre/", "//", "/secrets/", "", "/Secret/"] {
            assert_eq!(guard.behind_token(other), None, "{other}");
        }

        let code = guard.code_for("play/17");
        assert!(guard.is_code_for("play/17", &code) && !code.contains("secret"));
        assert!(!guard.is_code_for("play/18", &code));
        assert!(!guard.is_code_for("play/17", &code[1..]) && !guard.is_code_for("play/17", ""));
    }
}
