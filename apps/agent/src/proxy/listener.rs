//! The port of the local proxy: checks who may connect, and detects the protocol.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::carry::reset;
use super::conn_options::ConnOptions;
use super::proxy_context::{HELLO_WITHIN, ProxyContext};
use super::proxy_session::ProxySession;
use super::target::NameLookup;
use super::{http, http2, socks};
use crate::socket_owner::is_this_users;

/// Connections of programs at once; more wait in the kernel.
pub const CONNECTIONS_MAX: usize = 1024; // a guess: a browser has a few hundred

/// How long to wait when the system is out of descriptors: some connections may end meanwhile.
const PATIENCE: Duration = Duration::from_millis(50);

/// The first byte of SOCKS5 (RFC 1928 §3) and of SOCKS4. No method of HTTP begins with one of them.
const SOCKS5: u8 = 5;
const SOCKS4: u8 = 4;

/// Which processes may use the port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientPolicy {
    /// Processes of this user only; a connection whose owner cannot be found is refused.
    OwnUserOnly,
    /// Any process that can reach it: the port is in a network namespace of the program's own.
    Anyone,
}

/// The listening socket of the local proxy, and what its connections share.
pub struct LocalProxyListener {
    listener: TcpListener,
    context: Arc<ProxyContext>,
    client_policy: ClientPolicy,
    places: Arc<Semaphore>,
}

impl LocalProxyListener {
    /// At `at`, an address of this machine's own.
    ///
    /// # Errors
    /// It is another, or cannot be had.
    pub async fn bind(
        at: SocketAddr,
        line: Arc<ProxySession>,
        conn_options: ConnOptions,
    ) -> io::Result<LocalProxyListener> {
        if !at.ip().is_loopback() {
            let text = format!("others can reach {at}; give a loopback address");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let listener = TcpListener::bind(at).await?;
        Ok(LocalProxyListener::from_listener(
            listener,
            line,
            conn_options,
            ClientPolicy::OwnUserOnly,
        ))
    }

    /// Creates the proxy on an existing listener.
    pub fn from_listener(
        listener: TcpListener,
        line: Arc<ProxySession>,
        conn_options: ConnOptions,
        strangers: ClientPolicy,
    ) -> LocalProxyListener {
        LocalProxyListener {
            listener,
            context: Arc::new(ProxyContext {
                session: line,
                options: conn_options,
                names: None,
                http2_streams: Arc::new(Semaphore::new(http2::STREAMS_MAX)),
            }),
            client_policy: strangers,
            places: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
        }
    }

    /// Sets the names behind addresses that were made up for them.
    pub fn with_names(mut self, names: Arc<dyn NameLookup>) -> LocalProxyListener {
        if let Some(context) = Arc::get_mut(&mut self.context) {
            context.names = Some(names);
        }
        self
    }

    /// The address that the local proxy is bound to.
    ///
    /// # Errors
    /// What the system says.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Accepts connections until it is dropped.
    pub async fn serve(self) {
        loop {
            let Ok(place) = self.places.clone().acquire_owned().await else {
                return;
            };
            let program = match self.listener.accept().await {
                Ok((program, _)) => self.admitted(program),
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(PATIENCE).await;
                    None
                }
            };
            if let Some(program) = program {
                let context = self.context.clone();
                tokio::spawn(async move {
                    listen(program, &context, Arc::new(place)).await;
                });
            }
        }
    }

    /// Returns the connection if it belongs to this user, and resets it otherwise.
    fn admitted(&self, program: TcpStream) -> Option<TcpStream> {
        if self.client_policy == ClientPolicy::Anyone {
            return Some(program);
        }
        if is_this_users(&program) {
            return Some(program);
        }
        reset(program);
        None
    }
}

/// Serves one connection, which holds `place` until it and its last tunnel are closed.
async fn listen(program: TcpStream, context: &Arc<ProxyContext>, place: Arc<OwnedSemaphorePermit>) {
    // An answer's head and its body are written as they come, and a program that has the head says nothing
    // until it has the body: the second would wait for the first to be acknowledged, 40 ms later.
    let _ = program.set_nodelay(true);
    let mut first = [0];
    match timeout(HELLO_WITHIN, program.peek(&mut first)).await {
        Ok(Ok(1)) if first[0] == SOCKS5 => socks::serve(program, context).await,
        Ok(Ok(1)) if first[0] == SOCKS4 => socks::reject_socks4(program),
        Ok(Ok(1)) => match timeout(HELLO_WITHIN, http2::has_preface(&program)).await {
            Ok(true) => http2::serve(program, context).await,
            _ => http::serve(program, context, &place).await,
        },
        // It came to say nothing.
        _ => {}
    }
}
