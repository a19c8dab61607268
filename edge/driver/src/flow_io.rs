//! What a flow looks like to a program.

use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::relay_host::DeviceRelays;
use crate::source::{HostKey, SendSource};

/// The flow hibernated, so that this handle is over; the flow is not.
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
    /// Sends the content of `source` from its offset 0, after what was written before, and then the
    /// end. Returns at once; the flow keeps the source.
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
    /// The memo that was stored with this flow, if it hibernated before.
    fn memo(&self) -> Option<Bytes> {
        None
    }
    /// The relays of this flow's server, if it has them and the flow is a device's.
    fn relays(&self) -> Option<DeviceRelays> {
        None
    }
    /// Returns a check whether the peer takes no more of what this end sends: it stopped reading, or
    /// the flow is over. For an owner that has lent the flow to another task.
    fn peer_stopped_check(&self) -> Box<dyn Fn() -> bool + Send> {
        Box::new(|| false)
    }
    /// Ends both directions at once with an error code for the peer.
    fn reset(&mut self, code: u64);
    /// Ready when the flow is over: `Ok` when both directions ended and the peer has everything,
    /// an error naming the cause otherwise.
    fn poll_finished(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;
}
