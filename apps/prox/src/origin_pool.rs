//! Connections to origins that are kept for the next upload of the same client to the same origin.
//!
//! ```text
//!  upload ── take: an idle connection of this client ── none ──▶ dial
//!    │
//!    └─ answer read to its end ──▶ put: idle for a while ──▶ next upload, or closed
//! ```
//!
//! A connection is used by one exchange at a time, and by one client only, so that nothing of one client can reach
//! another. A request that must not be sent twice never gets a kept connection: its origin may be closing it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use d2tp_driver::{HostKey, MemoryCharge};
use http_body_util::combinators::UnsyncBoxBody;
use hyper::client::conn::{http1, http2};
use parking_lot::Mutex;
use tokio_util::task::AbortOnDropHandle;
use url::Url;

/// How long a connection waits for another upload. A guess: servers keep theirs for 5 s to 75 s.
const IDLE_FOR: Duration = Duration::from_secs(15);
/// The most idle connections of one client to one origin.
const IDLE_MAX: usize = 8;
/// How long the end of an exchange may take after its answer: the rest of the request may be on its way. A guess.
const ENDED_WITHIN: Duration = Duration::from_secs(1);

type OutgoingBody = UnsyncBoxBody<Bytes, std::io::Error>;

/// A connection's half that sends requests.
pub(crate) enum OriginSender {
    Http1(http1::SendRequest<OutgoingBody>),
    Http2(http2::SendRequest<OutgoingBody>),
}

/// A connection to an origin, which is closed when this is dropped.
pub(crate) struct UpstreamConn {
    pub(crate) sender: OriginSender,
    /// The receive window, whose bytes the connection may hold; 0 of HTTP/1, which reads only what is asked for.
    pub(crate) window_bytes: u32,
    pub(crate) _task: AbortOnDropHandle<()>,
}

/// The client and the origin (scheme, host and port) of connections.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct OriginPoolKey {
    client: HostKey,
    origin: String,
}

/// Idle connections to origins.
#[derive(Default)]
pub(crate) struct OriginPool {
    idle: Mutex<HashMap<OriginPoolKey, Vec<IdleConn>>>,
}

struct IdleConn {
    serial: u64,
    conn: UpstreamConn,
    /// What the connection occupies, charged to the client.
    _memory: MemoryCharge,
}

impl UpstreamConn {
    fn is_closed(&self) -> bool {
        match &self.sender {
            OriginSender::Http1(sender) => sender.is_closed(),
            OriginSender::Http2(sender) => sender.is_closed(),
        }
    }

    /// Ready when another request may be sent; false if none may.
    async fn ready(&mut self) -> bool {
        match &mut self.sender {
            OriginSender::Http1(sender) => sender.ready().await.is_ok(),
            OriginSender::Http2(sender) => sender.ready().await.is_ok(),
        }
    }
}

impl OriginPoolKey {
    pub(crate) fn new(client: HostKey, url: &Url) -> OriginPoolKey {
        OriginPoolKey {
            client,
            origin: url.origin().ascii_serialization(),
        }
    }
}

impl OriginPool {
    /// An idle connection, the one that was used last.
    pub(crate) fn take(&self, key: &OriginPoolKey) -> Option<UpstreamConn> {
        let mut idle = self.idle.lock();
        let conns = idle.get_mut(key)?;
        conns.retain(|idle| !idle.conn.is_closed());
        let taken = conns.pop();
        if conns.is_empty() {
            idle.remove(key);
        }
        taken.map(|idle| idle.conn)
    }

    /// Keeps a connection whose exchange has ended, or is about to.
    pub(crate) fn put(
        self: &Arc<OriginPool>,
        key: OriginPoolKey,
        mut conn: UpstreamConn,
        memory: MemoryCharge,
    ) {
        let pool = Arc::downgrade(self);
        tokio::spawn(async move {
            let ready = tokio::time::timeout(ENDED_WITHIN, conn.ready()).await;
            if ready != Ok(true) {
                return;
            }
            let serial = getrandom::u64().expect("the system has randomness");
            if let Some(pool) = pool.upgrade() {
                let mut idle = pool.idle.lock();
                let conns = idle.entry(key.clone()).or_default();
                if conns.len() == IDLE_MAX {
                    conns.remove(0);
                }
                conns.push(IdleConn {
                    serial,
                    conn,
                    _memory: memory,
                });
            }
            tokio::time::sleep(IDLE_FOR).await;
            if let Some(pool) = pool.upgrade() {
                pool.close(&key, serial);
            }
        });
    }

    fn close(&self, key: &OriginPoolKey, serial: u64) {
        let mut idle = self.idle.lock();
        if let Some(conns) = idle.get_mut(key) {
            conns.retain(|idle| idle.serial != serial);
            if conns.is_empty() {
                idle.remove(key);
            }
        }
    }
}
