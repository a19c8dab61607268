//! Connections to origins that are kept for the next upload of the same client to the same origin.
//!
//! ```text
//!  upload ── take: an idle connection of this client ── none ──▶ dial
//!    │
//!    └─ answer read to its end ──▶ put: idle for a while ──▶ next upload, or closed
//! ```
//!
//! A connection is used by one exchange at a time, and by one client only, so that nothing of one client can reach
//! another. The origin may be closing a kept connection. A request that must not be sent twice therefore keeps its body
//! back there until the origin has answered (`body_gate.rs`), unless the origin is known not to do that.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

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

/// How long an origin is known not to answer `Expect: 100-continue`. A guess: it may be configured otherwise.
const SILENT_FOR: Duration = Duration::from_secs(3600);
/// The most origins of which that is known; beyond, all are asked again.
const SILENT_MAX: usize = 1_024;

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
    /// Origins that did not answer `Expect: 100-continue`, and since when that is known.
    silent: Mutex<HashMap<OriginPoolKey, Instant>>,
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

    /// Remembers that an origin does not answer `Expect: 100-continue`.
    pub(crate) fn note_silent(&self, key: &OriginPoolKey) {
        let mut silent = self.silent.lock();
        if silent.len() >= SILENT_MAX {
            silent.clear();
        }
        silent.insert(key.clone(), Instant::now());
    }

    /// Whether an origin is known not to answer `Expect: 100-continue`.
    pub(crate) fn is_silent(&self, key: &OriginPoolKey) -> bool {
        let silent = self.silent.lock();
        let since = silent.get(key);
        since.is_some_and(|since| since.elapsed() < SILENT_FOR)
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
