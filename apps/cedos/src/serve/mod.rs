//! `cedos serve`: serves a directory to D2TP clients.
//!
//! ```text
//!  origin   Server at an address ─┐
//!                                 ├─ flow: one GET or HEAD ─▶ files.rs ─▶ 200, 206, 304 …
//!  device   Listener at a proxy ──┘
//! ```

mod files;
mod listing;

use std::sync::Arc;

use d2tp_driver::{Flow, FlowIo as _};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;

pub use files::{DirectoryAccess, EtagFormat, FileBody, FileService, HiddenFiles};

/// Answers the one request of a flow.
pub async fn answer(flow: Flow, files: Arc<FileService>) {
    let peer = flow.connection().peer();
    let flow_id = flow.id();
    let service = service_fn(move |request| {
        let files = files.clone();
        async move { Ok::<_, std::convert::Infallible>(files.answer(&request).await) }
    });
    let served = http1::Builder::new()
        .keep_alive(false)
        .half_close(true)
        .serve_connection(TokioIo::new(flow), service)
        .await;
    match served {
        Ok(()) => tracing::info!(?peer, flow = flow_id, "served"),
        Err(error) => tracing::info!(?peer, flow = flow_id, %error, "broken off"),
    }
}
