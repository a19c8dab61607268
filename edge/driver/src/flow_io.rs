//! What a flow looks like to a program.

use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::relay_host::DeviceRelays;
use crate::source::{HostKey, SendSource};

/// The flow sleeps: this handle is over, the flow is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the flow sleeps")]
pub struct FlowHibernated;

/// A flow as programs see it. [`AsyncWrite::poll_shutdown`] sends the end of our direction.
pub trait FlowIo: AsyncRead + AsyncWrite + Send + Unpin + 'static {
    /// The flow's id, unique within its session for ever.
    fn id(&self) -> u64;
    /// The key of the host at the other end.
    fn peer(&self) -> HostKey;
    /// Time left until the deadline, if there is one.
    fn deadline_left(&self) -> Option<Duration>;
    /// From here on, everything this end sends is what `source` holds from its offset 0 (after
    /// what was written before), then the end. Returns at once; the flow keeps the source.
    fn send_source(&mut self, source: Arc<dyn SendSource>);
    /// Resumes sending after hibernation, whatever was sent before: offset 0 of `source` is the
    /// first byte that this end ever sent.
    fn resume_source(&mut self, source: Arc<dyn SendSource>) {
        self.send_source(source);
    }
    /// From now on the flow may sleep, and outlive the process where the server has a journal: it
    /// sends from its source alone, and is accepted again with this memo. Its handle then ends
    /// with [`FlowHibernated`], and is to be dropped: the flow is not given again, nor its memo, while the
    /// handle lives.
    fn allow_hibernation(&mut self, _memo: Bytes) {}
    /// What was kept of this flow, if it slept before.
    fn memo(&self) -> Option<Bytes> {
        None
    }
    /// What the host of this flow relays, if it does and the flow is a device's.
    fn relays(&self) -> Option<DeviceRelays> {
        None
    }
    /// Says whether the peer takes no more of what this end sends: it stopped reading, or the flow is over. For who has
    /// lent the flow to somebody else meanwhile.
    fn peer_stopped_check(&self) -> Box<dyn Fn() -> bool + Send> {
        Box::new(|| false)
    }
    /// Ends both directions at once with an error code the peer sees.
    fn reset(&mut self, code: u64);
    /// Ready when the flow is over: `Ok` when both directions ended and the peer has everything,
    /// an error naming the cause otherwise.
    fn poll_finished(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;
}
