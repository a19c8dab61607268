//! Running a proxy: accept flows, serve each, stop cleanly.

use std::io;
use std::sync::Arc;

use d2tp_driver::FlowIo;
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

use crate::config::ProxConfig;
use crate::flow::serve_flow;
use crate::prox::{Prox, ProxStartError};

/// A source of flows: the D2TP driver, or a channel in tests.
pub trait FlowListener: Send {
    /// The type of its flows.
    type Flow: FlowIo;

    /// The next flow; `None` when there will be no more. May be dropped and called again without
    /// losing a flow.
    fn accept(&mut self) -> impl Future<Output = Option<Self::Flow>> + Send;

    /// The next flow of a client that is connected already, when no others are accepted any more.
    fn accept_last(&mut self) -> impl Future<Output = Option<Self::Flow>> + Send {
        std::future::ready(None)
    }
}

impl<F: FlowIo> FlowListener for mpsc::Receiver<F> {
    type Flow = F;

    fn accept(&mut self) -> impl Future<Output = Option<F>> + Send {
        self.recv()
    }
}

/// Flows of a D2TP server. Whoever holds the other handle closes it.
impl FlowListener for Arc<d2tp_driver::Server> {
    type Flow = d2tp_driver::Flow;

    fn accept(&mut self) -> impl Future<Output = Option<Self::Flow>> + Send {
        d2tp_driver::Server::accept(self)
    }
}

/// Runs a proxy until `shutdown` is ready or the listener ends; then lets flows finish for
/// `stop_grace` and resets the rest.
///
/// # Errors
/// [`ProxStartError`] when the configuration cannot be run.
pub async fn run<L: FlowListener>(
    listener: L,
    config: ProxConfig,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), ProxStartError> {
    serve(listener, Prox::new(config)?, shutdown).await;
    Ok(())
}

/// Serves as [`run`] does, with a proxy that exists already. A proxy serves once: after this it is
/// stopped.
pub async fn serve<L: FlowListener>(
    listener: L,
    prox: Arc<Prox>,
    shutdown: impl Future<Output = ()> + Send,
) {
    let (flows, listener) = accept_until(listener, &prox, shutdown).await;
    if !finish_within_grace(&flows, &prox).await {
        tracing::info!(flows = flows.len(), "resetting the remaining flows");
        prox.stop.cancel();
        flows.wait().await;
    }
    drop(listener);
    tracing::info!("stopped");
}

/// Lets flows that are being served end within `stop_grace`. Returns whether all did.
pub async fn finish_within_grace(flows: &TaskTracker, prox: &Prox) -> bool {
    let grace = prox.config().stop_grace;
    tracing::info!(flows = flows.len(), ?grace, "stopping");
    tokio::time::timeout(grace, flows.wait()).await.is_ok()
}

/// Serves flows until `shutdown` is ready or the listener ends. Returns the flows that are still being served,
/// and the listener, which they may need.
pub async fn accept_until<L: FlowListener>(
    mut listener: L,
    prox: &Arc<Prox>,
    shutdown: impl Future<Output = ()> + Send,
) -> (TaskTracker, L) {
    let flows = TaskTracker::new();
    let mut shutdown = std::pin::pin!(shutdown);
    loop {
        tokio::select! {
            biased;
            () = &mut shutdown => break,
            flow = listener.accept() => match flow {
                Some(flow) => {
                    flows.spawn(serve_flow(flow, prox.clone()));
                }
                None => break,
            },
        }
    }
    while let Some(flow) = listener.accept_last().await {
        flows.spawn(serve_flow(flow, prox.clone()));
    }
    flows.close();
    (flows, listener)
}

/// The faults of starting, as an I/O error, for programs that only print.
impl From<ProxStartError> for io::Error {
    fn from(fault: ProxStartError) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidInput, fault)
    }
}
