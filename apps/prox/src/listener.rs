//! The listener for clients without D2TP: an HTTP proxy on a TCP port, which takes kernel MPTCP as well.
//!
//! ```text
//!  any program ── TCP or MPTCP ──▶ listener.rs ─┬─ HTTP/1.1 ──▶ stream_flow.rs ─┬─▶ flow.rs, as for D2TP
//!                              the first bytes say └─ HTTP/2 ──▶ http2_conn.rs ────┘
//! ```
//!
//! With MPTCP the connection outlives the loss of a network, and needs only the client's kernel.
//! These clients have no keys, so networks are admitted instead, none by default. Connections from
//! other networks are reset before a byte is read, unless links of podcast apps are served: those say themselves whose
//! they are (`link_flow.rs`), and other requests from there are reset. For the ledger and the retained copies an
//! address is a client, under a key that represents it.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use d2tp_tcp::multipath;
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::address_key::key_of;
use crate::flow::task_bytes_of;
use crate::http2_conn::{Http2Flows, serve_http2};
use crate::link_keys::guest_key_of;
use crate::prox::Prox;
use crate::serve::FlowListener;
use crate::stream_flow::{ConnectionBeginning, StreamFlow};
use crate::tcp_flow::TcpFlow;

/// How long to wait when the system is out of descriptors: some connections may end meanwhile.
const PATIENCE: Duration = Duration::from_millis(50);

/// How long a client may say nothing before its connection is served as one of HTTP/1.1, where it counts as a flow. A
/// client of HTTP/2 begins as soon as it is connected (RFC 9113 §3.4).
const FIRST_BYTES_WITHIN: Duration = Duration::from_secs(10); // a guess

/// Streams of HTTP/2 on their way to being served; further ones are refused.
const QUEUED_STREAMS_MAX: usize = 256; // a guess

/// A connection that has begun.
struct BegunConnection {
    flow: StreamFlow,
    from: IpAddr,
    beginning: ConnectionBeginning,
    /// Whether the address may use the proxy.
    is_admitted: bool,
}

/// A TCP port that accepts flows.
pub struct TcpFlowListener {
    listener: TcpListener,
    /// Connections that may still begin with HTTP/2.
    beginning: FuturesUnordered<BoxFuture<'static, BegunConnection>>,
    /// Streams of HTTP/2.
    streams: mpsc::Receiver<TcpFlow>,
    shared: Http2Flows,
    _closes_when_dropped: DropGuard,
}

impl TcpFlowListener {
    /// Listens for those whom the proxy's configuration lets in by address.
    ///
    /// # Errors
    /// The port cannot be had.
    pub fn bind(at: SocketAddr, prox: Arc<Prox>) -> std::io::Result<TcpFlowListener> {
        TcpFlowListener::on_socket(multipath::listen(at)?, prox)
    }

    /// Accepts from a socket that listens already.
    ///
    /// # Errors
    /// The socket is not usable.
    pub fn on_socket(
        listener: std::net::TcpListener,
        prox: Arc<Prox>,
    ) -> std::io::Result<TcpFlowListener> {
        listener.set_nonblocking(true)?;
        let (flows, streams) = mpsc::channel(QUEUED_STREAMS_MAX);
        let closing = CancellationToken::new();
        Ok(TcpFlowListener {
            listener: TcpListener::from_std(listener)?,
            beginning: FuturesUnordered::new(),
            streams,
            shared: Http2Flows {
                prox,
                flows,
                last_number: Arc::new(AtomicU64::new(0)),
                closing: closing.clone(),
            },
            _closes_when_dropped: closing.drop_guard(),
        })
    }

    /// The address that the listener is bound to.
    ///
    /// # Errors
    /// What the system says.
    pub fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Lets a connection in, and waits for its first bytes meanwhile.
    fn begin(&self, stream: TcpStream, from: IpAddr) {
        let prox = &self.shared.prox;
        let is_admitted = prox.config().admits(from);
        let guest = match is_admitted {
            true => None,
            false => prox.links().and_then(|_| prox.link_state.guest()),
        };
        if !is_admitted && guest.is_none() {
            tracing::debug!(%from, "refused a client");
            let _ = multipath::reset(stream.as_fd());
            return;
        }
        let _ = stream.set_nodelay(true);
        let number = 1 + self.shared.last_number.fetch_add(1, Ordering::Relaxed);
        let key = match is_admitted {
            true => key_of(from),
            false => guest_key_of(from),
        };
        let account = prox.memory_account(key);
        let sockets = prox.socket_account(key);
        let task_bytes = task_bytes_of::<TcpFlow>();
        let flow = StreamFlow::new(stream, number, key, &account, &sockets, task_bytes);
        let Some(mut flow) = flow else {
            return tracing::debug!(%from, "no memory for another connection");
        };
        tracing::debug!(%from, flow = number, "let in");
        let closing = self.shared.closing.clone();
        self.beginning.push(Box::pin(async move {
            let beginning = tokio::select! {
                biased;
                beginning = flow.beginning() => beginning,
                () = tokio::time::sleep(FIRST_BYTES_WITHIN) => ConnectionBeginning::ProxyRequest,
                () = closing.cancelled() => ConnectionBeginning::ProxyRequest,
            };
            drop(guest);
            BegunConnection {
                flow,
                from,
                beginning,
                is_admitted,
            }
        }));
    }

    /// The flow that a connection is; none if its streams are, or if it may not be one.
    fn flow_of(&self, begun: BegunConnection) -> Option<TcpFlow> {
        let BegunConnection {
            mut flow,
            from,
            beginning,
            is_admitted,
        } = begun;
        match beginning {
            ConnectionBeginning::Path if self.shared.prox.links().is_some() => {
                flow.set_peer(guest_key_of(from));
                Some(TcpFlow::Connection(flow))
            }
            _ if !is_admitted => {
                tracing::debug!(%from, "refused a client that asks for no link");
                None
            }
            ConnectionBeginning::Http2 => {
                tracing::debug!(%from, "speaks HTTP/2");
                tokio::spawn(serve_http2(flow, from, self.shared.clone()));
                None
            }
            _ => Some(TcpFlow::Connection(flow)),
        }
    }
}

impl FlowListener for TcpFlowListener {
    type Flow = TcpFlow;

    async fn accept(&mut self) -> Option<TcpFlow> {
        loop {
            tokio::select! {
                Some(flow) = self.streams.recv() => return Some(flow),
                Some(begun) = self.beginning.next() => {
                    if let Some(flow) = self.flow_of(begun) {
                        return Some(flow);
                    }
                }
                accepted = self.listener.accept() => match accepted {
                    Ok((stream, from)) => self.begin(stream, from.ip().to_canonical()),
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept on the TCP port");
                        tokio::time::sleep(PATIENCE).await;
                    }
                },
            }
        }
    }

    async fn accept_last(&mut self) -> Option<TcpFlow> {
        self.shared.closing.cancel();
        self.streams.close();
        loop {
            tokio::select! {
                Some(flow) = self.streams.recv() => return Some(flow),
                Some(begun) = self.beginning.next() => {
                    if let Some(flow) = self.flow_of(begun) {
                        return Some(flow);
                    }
                }
                else => return None,
            }
        }
    }
}
