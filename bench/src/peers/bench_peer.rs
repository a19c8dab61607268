//! The trait of measured transports, which carry one flow from one process to another.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;

use crate::meter::ProcessMeter;
use crate::receiver_info::ReceiverInfo;

/// Bytes that an application writes or reads in one call if the transport has no unit of its own.
/// Single measurements for TCP on lo: 30 Gb/s with 64 kB, 38 with 256 kB, 47 with 4 MB; programs
/// that copy resemble the middle one.
pub const CALL_BYTES: usize = 256 << 10;

/// How often an asynchronous peer checks whether the measurement is over.
pub(super) const LOOK: Duration = Duration::from_millis(50);

/// A transport that carries one flow of meaningless payload from one process to another.
///
/// Both sides run until [`ProcessMeter::is_over`]; each counts payload, not headers. The settings
/// that readers need to judge the figure (segment size, buffers, congestion control) go to
/// [`ProcessMeter::note`], read back from the running connection rather than from the source.
pub trait BenchPeer: Send + Sync {
    /// The name on the command line, in tables and in JSON.
    fn name(&self) -> &'static str;

    /// Why this machine cannot run the peer, if so.
    fn missing(&self) -> Option<String> {
        None
    }

    /// Listens on any port of `address`, passes `ready` what a sender needs, accepts one flow and
    /// counts its bytes as the application receives them.
    fn serve(
        &self,
        address: IpAddr,
        meter: &Arc<ProcessMeter>,
        ready: &mut dyn FnMut(ReceiverInfo) -> Result<()>,
    ) -> Result<()>;

    /// Opens one flow and fills it, counting bytes as the transport accepts them.
    fn send(&self, card: &ReceiverInfo, meter: &Arc<ProcessMeter>) -> Result<()>;
}

/// Runs an asynchronous peer on one thread, since its process has one core.
pub(super) fn on_this_thread(flow: impl Future<Output = Result<()>>) -> Result<()> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(flow)
}

/// Runs `flow` until it ends or the measurement is over. The other process may end without notice,
/// and nothing else would wake a flow that waits for it.
pub(super) async fn measured(
    meter: &ProcessMeter,
    flow: impl Future<Output = Result<()>>,
) -> Result<()> {
    let over = async {
        while !meter.is_over() {
            tokio::time::sleep(LOOK).await;
        }
    };
    tokio::select! {
        outcome = flow => outcome,
        () = over => Ok(()),
    }
}
