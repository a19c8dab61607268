//! The interface of flows for programs.

use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use d2tp_session::FlowRemainder;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::datagrams::Connection;
use crate::relay_host::DeviceRelays;
use crate::source::{HostKey, SendSource};

/// The flow hibernated, so this handle is of no further use. The flow itself continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the flow sleeps")]
pub struct FlowHibernated;

/// Another node has taken over the flow's session, so this handle is of no further use here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("another node has taken over the flow")]
pub struct FlowTakenOver;

/// Sends a datagram of a context (its first argument), unless no free path could take it within the last
/// argument. False once the session is over.
pub type DatagramSender = Box<dyn Fn(u64, Bytes, Duration) -> bool + Send + Sync>;

/// Allows a flow to hibernate with a memo, or no longer: [`FlowIo::hibernation_switch`].
pub type HibernationSwitch = Box<dyn Fn(Option<Bytes>) + Send + Sync>;

/// A flow as programs see it. [`AsyncWrite::poll_shutdown`] sends the end of our direction.
pub trait FlowIo: AsyncRead + AsyncWrite + Send + Unpin + 'static {
    /// The flow's id, which no other flow of its session ever has.
    fn id(&self) -> u64;
    /// The key of the host at the other end.
    fn peer(&self) -> HostKey;
    /// Time left until the deadline, if there is one.
    fn deadline_left(&self) -> Option<Duration>;
    /// Lets the peer move the deadlines of its flows no further away than this from now on. One that is further away
    /// already stays.
    fn limit_moved_deadlines(&mut self, max: Duration);
    /// Sends the content of `source` from its offset 0, after all data written before, and then the
    /// end. Returns at once; the flow keeps the source.
    fn send_source(&mut self, source: Arc<dyn SendSource>);
    /// Resumes sending after hibernation, however much was sent before: offset 0 of `source` is the
    /// first byte that this end ever sent.
    fn resume_source(&mut self, source: Arc<dyn SendSource>) {
        self.send_source(source);
    }
    /// Allows the flow to hibernate from now on, and to outlive the process if the server has a
    /// journal. It sends only from its source, and is accepted again with this memo. Its handle
    /// then ends with [`FlowHibernated`] and must be dropped: as long as it exists, the flow and
    /// its memo are not returned again.
    fn allow_hibernation(&mut self, _memo: Bytes) {}
    /// Returns a function that allows the flow to hibernate with a memo, or no longer. It is for a flow without a source,
    /// while nothing of it is under way: it hibernates only once its peer has acknowledged all that was written.
    fn hibernation_switch(&self) -> HibernationSwitch {
        Box::new(|_| {})
    }
    /// Takes what the process held of a flow without a source that hibernated because the server leaves
    /// ([`Server::leave`](crate::Server::leave)): whoever resumes the flow needs it beside the memo.
    fn take_remainder(&mut self) -> Option<FlowRemainder> {
        None
    }
    /// The offset from which a flow without a source is resumed, once its peer has said it. Until then nothing may be
    /// written.
    fn resumed_at(&self) -> Option<u64> {
        Some(0)
    }
    /// The memo that was stored with this flow, if it hibernated before.
    fn memo(&self) -> Option<Bytes> {
        None
    }
    /// The relays of this flow's server, if it provides them and a device opened the flow.
    fn relays(&self) -> Option<DeviceRelays> {
        None
    }
    /// Sends datagrams beside the flow; none where it has no session of its own.
    fn datagram_sender(&self) -> Option<DatagramSender> {
        None
    }
    /// The session of the flow, for datagrams both ways; none where it has no session of its own.
    fn session(&self) -> Option<Connection> {
        None
    }
    /// Returns a check whether the peer accepts no more of this end's data, because it stopped
    /// reading or the flow is over. It is for an owner that has lent the flow to another task.
    fn peer_stopped_check(&self) -> Box<dyn Fn() -> bool + Send> {
        Box::new(|| false)
    }
    /// Ends both directions at once with an error code for the peer.
    fn reset(&mut self, code: u64);
    /// Ready when the flow is over: `Ok` if both directions ended and the peer has all data,
    /// otherwise an error with the cause.
    fn poll_finished(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;
}
