//! The listener for clients without D2TP: an HTTP proxy on a TCP port, which takes kernel MPTCP as well.
//!
//! ```text
//!  any program ── TCP or MPTCP ──▶ listener.rs ──▶ stream_flow.rs ──▶ flow.rs, as for D2TP
//! ```
//!
//! With MPTCP the connection outlives the loss of a network, and needs only the client's kernel.
//! These clients have no keys, so networks are admitted instead, none by default. Connections from
//! other networks are reset before a byte is read. For the ledger and the retained copies an
//! address is a client, under a key that represents it.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use d2tp_tcp::multipath;
use tokio::net::TcpListener;

use crate::address_key::key_of;
use crate::prox::Prox;
use crate::serve::FlowListener;
use crate::stream_flow::StreamFlow;

/// How long to wait when the system is out of descriptors: some connections may end meanwhile.
const PATIENCE: Duration = Duration::from_millis(50);

/// A TCP port that accepts flows.
pub struct TcpFlowListener {
    listener: TcpListener,
    prox: Arc<Prox>,
    flows: u64,
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
        Ok(TcpFlowListener {
            listener: TcpListener::from_std(listener)?,
            prox,
            flows: 0,
        })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// What the system says.
    pub fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

impl FlowListener for TcpFlowListener {
    type Flow = StreamFlow;

    async fn accept(&mut self) -> Option<StreamFlow> {
        loop {
            let (stream, from) = match self.listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept on the TCP port");
                    tokio::time::sleep(PATIENCE).await;
                    continue;
                }
            };
            let from = from.ip().to_canonical();
            if !self.prox.config().admits(from) {
                tracing::debug!(%from, "refused a client");
                let _ = multipath::reset(stream.as_fd());
                continue;
            }
            let _ = stream.set_nodelay(true);
            self.flows += 1;
            let key = key_of(from);
            let account = self.prox.memory_account(key);
            let sockets = self.prox.socket_account(key);
            match StreamFlow::new(stream, self.flows, key, &account, &sockets) {
                Some(flow) => {
                    tracing::debug!(%from, flow = self.flows, "let in");
                    return Some(flow);
                }
                None => tracing::debug!(%from, "no memory for another connection"),
            }
        }
    }
}
