//! A connection of HTTP/2 of a client without D2TP: each of its streams is a flow (RFC 9113).
//!
//! ```text
//!  preface ──▶ SETTINGS ──▶ HEADERS of a stream ──▶ http2_flow.rs ──▶ the listener, as flows of connections
//!                           no more streams: GOAWAY, and those that run end
//! ```
//!
//! Served by the crate `h2`, not by hyper on top of it: hyper ends a tunnel with END_STREAM where it broke, and takes a
//! client's CANCEL for an end.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cedos_http::http2::{
    CancelCount, HTTP2_CONN_STREAMS_MAX, HTTP2_ERROR_RESETS_MAX, HTTP2_RESETS_UNSEEN_MAX,
};
use h2::Reason;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::address_key::key_of;
use crate::flow::task_bytes_of;
use crate::http2_flow::{Http2Flow, Http2Piece, PIECE_BYTES, WINDOW_BYTES};
use crate::prox::Prox;
use crate::request_head::HEAD_BYTES_MAX;
use crate::stream_flow::StreamFlow;
use crate::tcp_flow::TcpFlow;

/// How long a client may take for its SETTINGS, and be without streams.
const IDLE_MAX: Duration = Duration::from_secs(60); // a guess

/// What connections of one listener share.
#[derive(Clone)]
pub(crate) struct Http2Flows {
    pub(crate) prox: Arc<Prox>,
    /// Where flows go.
    pub(crate) flows: mpsc::Sender<TcpFlow>,
    /// The number of the last flow.
    pub(crate) last_number: Arc<AtomicU64>,
    /// Cancelled when no more flows are accepted.
    pub(crate) closing: CancellationToken,
}

/// Serves the streams of a connection until it ends, or has none for a while.
pub(crate) async fn serve_http2(connection: StreamFlow, from: IpAddr, shared: Http2Flows) {
    let handshake = h2::server::Builder::new()
        .max_concurrent_streams(HTTP2_CONN_STREAMS_MAX)
        .max_header_list_size(HEAD_BYTES_MAX as u32)
        .initial_window_size(WINDOW_BYTES)
        // That of all streams, so that a body which waits delays no others.
        .initial_connection_window_size(WINDOW_BYTES * HTTP2_CONN_STREAMS_MAX)
        .max_send_buffer_size(PIECE_BYTES)
        .max_pending_accept_reset_streams(HTTP2_RESETS_UNSEEN_MAX)
        .max_local_error_reset_streams(Some(HTTP2_ERROR_RESETS_MAX))
        .handshake::<_, Http2Piece>(connection);
    let mut connection = match timeout(IDLE_MAX, handshake).await {
        Ok(Ok(connection)) => connection,
        Ok(Err(error)) => return tracing::debug!(%from, %error, "an HTTP/2 client disconnected"),
        Err(_) => return,
    };
    let key = key_of(from);
    let account = shared.prox.memory_account(key);
    let cancels = Arc::new(CancelCount::default());
    // Whether it ends when its streams have.
    let mut is_ending = false;
    loop {
        let accepted = tokio::select! {
            accepted = timeout(IDLE_MAX, connection.accept()) => accepted,
            () = shared.closing.cancelled(), if !is_ending => {
                connection.graceful_shutdown();
                is_ending = true;
                continue;
            }
        };
        match accepted {
            Ok(Some(Ok((request, mut reply)))) => {
                if cancels.is_too_many() {
                    tracing::debug!(%from, "cancels too many requests");
                    connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
                    continue;
                }
                // It may have been removed since it connected.
                if !shared.prox.config().admits(from) {
                    reply.send_reset(Reason::REFUSED_STREAM);
                    connection.graceful_shutdown();
                    is_ending = true;
                    continue;
                }
                let Ok(place) = shared.flows.try_reserve() else {
                    reply.send_reset(Reason::REFUSED_STREAM);
                    continue;
                };
                let number = 1 + shared.last_number.fetch_add(1, Ordering::Relaxed);
                let task_bytes = task_bytes_of::<TcpFlow>();
                let id = (number, key);
                match Http2Flow::new(request, reply, id, &account, task_bytes, &cancels) {
                    Some(flow) => place.send(TcpFlow::Stream(flow)),
                    None => tracing::debug!(%from, "no memory for another stream"),
                }
            }
            Ok(Some(Err(error))) => {
                return tracing::debug!(%from, %error, "an HTTP/2 client disconnected");
            }
            Ok(None) => return,
            Err(_) if connection.has_streams() => {}
            Err(_) if is_ending => return,
            Err(_) => {
                connection.graceful_shutdown();
                is_ending = true;
            }
        }
    }
}
