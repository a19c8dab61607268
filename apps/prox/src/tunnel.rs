//! CONNECT: a TCP connection to the origin, copied both ways with half-close.
//!
//! The origin's side is kept while the device is away: the flow accepts no bytes then, the two
//! buffers fill, and TCP's own flow control stops the origin. A break on either side becomes a
//! reset on the other, never a clean end. A device's reset is noticed although the origin takes no bytes.
//!
//! While no path leads to the device and nothing is under way here, the flow may sleep with its session; the origin's
//! connection stays ([`crate::sleeping_tunnels`]). If bytes are between the two when it sleeps, the tunnel is reset.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use d2tp_driver::{DatagramSender, FlowIo};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf, copy_bidirectional_with_sizes};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::answer::tunnel_open;
use crate::charged_tcp::ChargedTcp;
use crate::client_traffic::FlowTraffic;
use crate::counters::TrafficKind;
use crate::flow_memo::{FlowMemo, SleepingTunnel};
use crate::flow_report::{FlowLogRecord, ProxFlowOutcome, ServedFrom};
use crate::flow_watch::{FlowWatch, is_asleep};
use crate::prox::{Prox, random_name};
use crate::tunnel_rest::TunnelRest;
use d2tp_driver::ResetCause;

/// Buffer for each direction of a tunnel. Larger: fewer calls, and fewer tunnels fit the memory of one key
/// (R-QUOTA-4); 1,024 of them take two thirds of its share by default.
pub const TUNNEL_BUFFER_BYTES: usize = 32 * 1024;

/// What the buffers of a tunnel occupy.
pub(crate) const TUNNEL_BYTES: u64 = 2 * TUNNEL_BUFFER_BYTES as u64;

/// The interval of checks whether a device that has finished sending still reads.
const LEFT_EVERY: Duration = Duration::from_secs(1); // a guess

/// Where a tunnel's flow is.
enum TunnelStart<'a> {
    /// The device awaits the answer, and sent these bytes with its request.
    New(&'a [u8]),
    /// The flow slept, and has a memo.
    Woken,
}

/// Copies until both directions have ended.
pub(crate) async fn serve<F: FlowIo>(
    flow: &mut F,
    first: &[u8],
    origin: ChargedTcp,
    prox: &Arc<Prox>,
    record: &mut FlowLogRecord,
    reports_to: Option<DatagramSender>,
) -> ProxFlowOutcome {
    let start = TunnelStart::New(first);
    carry(flow, start, origin, prox, record, reports_to).await
}

/// Goes on with a tunnel whose flow slept.
pub(crate) async fn resume<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    record: &mut FlowLogRecord,
    number: u64,
    reports_to: Option<DatagramSender>,
) -> ProxFlowOutcome {
    record.traffic.set_kind(TrafficKind::Tunnel);
    let Some(origin) = prox.sleeping_tunnels.take(number, flow.peer()) else {
        return ProxFlowOutcome::Reset(ResetCause::TunnelReset); // It was another process's.
    };
    let mut buffers = prox.memory_account(flow.peer()).charge();
    if !buffers.try_resize(TUNNEL_BYTES) {
        let _ = origin.tcp().set_zero_linger();
        return ProxFlowOutcome::Reset(ResetCause::StoreFull);
    }
    let start = TunnelStart::Woken;
    carry(flow, start, origin, prox, record, reports_to).await
}

async fn carry<F: FlowIo>(
    flow: &mut F,
    start: TunnelStart<'_>,
    origin: ChargedTcp,
    prox: &Arc<Prox>,
    record: &mut FlowLogRecord,
    reports_to: Option<DatagramSender>,
) -> ProxFlowOutcome {
    record.status = Some(200);
    record.served = ServedFrom::Tunnel;
    let metered = record.traffic.clone();
    let traffic = Arc::new(TunnelTraffic::new(&metered));
    let number = random_name();
    let tunnel = SleepingTunnel::Connection(number);
    let memo = FlowMemo::of_tunnel(tunnel, &record.asked, reports_to.is_some());
    let is_woken = matches!(start, TunnelStart::Woken);
    let rest = TunnelRest::new(flow, prox, &memo, is_woken);
    let mut origin = CountedStream {
        stream: origin,
        traffic: traffic.clone(),
    };
    let unwanted = flow.peer_stopped_check();
    let id = flow.id();
    let copied = {
        let lent = Mutex::new(&mut *flow);
        let mut lent_flow = LentFlow {
            flow: &lent,
            traffic: &traffic,
        };
        let copying = async {
            if let TunnelStart::New(first) = start {
                lent_flow.write_all(tunnel_open()).await?;
                lent_flow.flush().await?;
                origin.write_all(first).await?;
            }
            traffic.begin_copying();
            copy_bidirectional_with_sizes(
                &mut lent_flow,
                &mut origin,
                TUNNEL_BUFFER_BYTES,
                TUNNEL_BUFFER_BYTES,
            )
            .await
        };
        tokio::select! {
            copied = copying => copied.map_err(|error| match traffic.origin_failed() {
                true => ProxFlowOutcome::Reset(ResetCause::TunnelReset),
                false => outcome_of(&error),
            }),
            never = rest.while_idle(|| traffic.is_empty(), || traffic.moved.notified()) => match never {},
            never = metered.supply.report(reports_to.as_ref(), id) => match never {},
            error = traffic.broken(&lent) => Err(outcome_of(&error)),
            () = traffic.until_left(unwanted) => Ok((0, 0)),
            () = traffic.silent_for(prox.config().tunnel_idle) => {
                Err(ProxFlowOutcome::Reset(ResetCause::TunnelIdle))
            }
            () = metered.used_up() => Err(ProxFlowOutcome::Reset(ResetCause::MonthUsedUp)),
            () = prox.stop.cancelled() => Err(ProxFlowOutcome::Reset(ResetCause::Stopping)),
        }
    };
    record.bytes_up = traffic.up.load(Ordering::Relaxed);
    record.bytes_down = traffic.down.load(Ordering::Relaxed);
    match copied {
        // Both ends said they are done, or the device that it does not even read; stay until the device has it all.
        Ok(_) => FlowWatch::new(prox, &metered)
            .gone(flow, prox)
            .await
            .outcome(),
        Err(ProxFlowOutcome::Hibernated) if traffic.is_empty() => {
            let (connection, client) = (origin.stream, flow.peer());
            prox.sleeping_tunnels.put(number, client, connection);
            ProxFlowOutcome::Hibernated
        }
        Err(outcome) => {
            // The origin must not take what it has for all there was.
            let _ = origin.stream.tcp().set_zero_linger();
            outcome
        }
    }
}

/// What a tunnel ends with whose flow had this error.
fn outcome_of(error: &io::Error) -> ProxFlowOutcome {
    match is_asleep(error) {
        true => ProxFlowOutcome::Hibernated,
        false => ProxFlowOutcome::Broken(error.to_string()),
    }
}

/// The traffic of a tunnel.
#[derive(Debug)]
struct TunnelTraffic {
    /// Bytes that the origin took, and bytes that came from it.
    up: AtomicU64,
    down: AtomicU64,
    /// Bytes that came from the device since copying began, and bytes that its flow took.
    up_taken: AtomicU64,
    down_given: AtomicU64,
    has_down_ended: AtomicBool,
    /// Whether the answer was sent, so that bytes are copied.
    is_copying: AtomicBool,
    origin_failed: AtomicBool,
    /// The flow to the device.
    flow: Arc<FlowTraffic>,
    /// Notified when the device's end has been passed to the origin.
    up_ended: Notify,
    has_up_ended: AtomicBool,
    /// Notified when [`TunnelTraffic::is_empty`] may have changed.
    moved: Notify,
}

impl TunnelTraffic {
    fn new(flow: &Arc<FlowTraffic>) -> TunnelTraffic {
        TunnelTraffic {
            up: AtomicU64::new(0),
            down: AtomicU64::new(0),
            up_taken: AtomicU64::new(0),
            down_given: AtomicU64::new(0),
            has_down_ended: AtomicBool::new(false),
            is_copying: AtomicBool::new(false),
            origin_failed: AtomicBool::new(false),
            flow: flow.clone(),
            up_ended: Notify::new(),
            has_up_ended: AtomicBool::new(false),
            moved: Notify::new(),
        }
    }

    /// Notes that all bytes so far have arrived: those that came with the request, and the answer.
    fn begin_copying(&self) {
        let up = self.up.load(Ordering::Relaxed);
        self.up_taken.store(up, Ordering::Relaxed);
        self.down_given.store(0, Ordering::Relaxed);
        self.is_copying.store(true, Ordering::Relaxed);
        self.moved.notify_one();
    }

    /// Adds to one of the counts of bytes.
    fn add(&self, count: &AtomicU64, bytes: usize) {
        count.fetch_add(bytes as u64, Ordering::Relaxed);
        self.moved.notify_one();
    }

    /// Whether no byte is between the device and the origin, and both may still send.
    fn is_empty(&self) -> bool {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        self.is_copying.load(Ordering::Relaxed)
            && of(&self.up) == of(&self.up_taken)
            && of(&self.down) == of(&self.down_given)
            && !self.has_up_ended.load(Ordering::Relaxed)
            && !self.has_down_ended.load(Ordering::Relaxed)
    }

    fn origin_failed(&self) -> bool {
        self.origin_failed.load(Ordering::Relaxed)
    }

    fn bytes(&self) -> u64 {
        self.up.load(Ordering::Relaxed) + self.down.load(Ordering::Relaxed)
    }

    /// Ready when nothing has moved for `limit` (noticed within an eighth of it).
    async fn silent_for(&self, limit: Duration) {
        let (mut seen, mut since) = (self.bytes(), Instant::now());
        loop {
            tokio::time::sleep(limit / 8).await;
            let now = self.bytes();
            if now != seen {
                (seen, since) = (now, Instant::now());
            } else if since.elapsed() >= limit {
                return;
            }
        }
    }

    /// Ready when the flow broke before the device had finished sending. Copying notices that only while the origin takes
    /// bytes.
    async fn broken<F: FlowIo>(&self, flow: &Mutex<&mut F>) -> io::Error {
        std::future::poll_fn(|cx| match flow.lock().poll_finished(cx) {
            Poll::Ready(Err(error)) if !self.has_up_ended.load(Ordering::Relaxed) => {
                Poll::Ready(error)
            }
            _ => Poll::Pending,
        })
        .await
    }

    /// Ready when the device has finished sending and no longer reads, whether or not the origin ends.
    async fn until_left(&self, unwanted: impl Fn() -> bool) {
        self.up_ended.notified().await;
        while !unwanted() {
            tokio::time::sleep(LEFT_EVERY).await;
        }
    }

    fn note<T>(&self, poll: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if let Poll::Ready(Err(_)) = &poll {
            self.origin_failed.store(true, Ordering::Relaxed);
        }
        poll
    }
}

/// A flow that is copied, and watched meanwhile by the same task.
struct LentFlow<'a, F> {
    flow: &'a Mutex<&'a mut F>,
    traffic: &'a TunnelTraffic,
}

impl<F: FlowIo> AsyncRead for LentFlow<'_, F> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let poll = Pin::new(&mut **self.flow.lock()).poll_read(cx, buf);
        let read = buf.filled().len() - before;
        if read > 0 {
            self.traffic.add(&self.traffic.up_taken, read);
        }
        poll
    }
}

impl<F: FlowIo> AsyncWrite for LentFlow<'_, F> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut **self.flow.lock()).poll_write(cx, bytes);
        if let Poll::Ready(Ok(written)) = &poll {
            self.traffic.add(&self.traffic.down_given, *written);
        }
        poll
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut **self.flow.lock()).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut **self.flow.lock()).poll_shutdown(cx)
    }
}

/// The origin's stream, with byte counts.
struct CountedStream {
    stream: ChargedTcp,
    traffic: Arc<TunnelTraffic>,
}

impl AsyncRead for CountedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let poll = Pin::new(&mut self.stream).poll_read(cx, buf);
        let read = buf.filled().len() - before;
        if read > 0 {
            self.traffic.add(&self.traffic.down, read);
        }
        if matches!(poll, Poll::Ready(Ok(()))) && read == 0 && buf.remaining() > 0 {
            self.traffic.has_down_ended.store(true, Ordering::Relaxed);
            self.traffic.moved.notify_one();
        }
        match &poll {
            Poll::Ready(_) => self.traffic.flow.supply.on_read(Instant::now(), read),
            Poll::Pending => self.traffic.flow.supply.on_wait(Instant::now()),
        }
        self.traffic.note(poll)
    }
}

impl AsyncWrite for CountedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.stream).poll_write(cx, bytes);
        if let Poll::Ready(Ok(written)) = &poll {
            self.traffic.add(&self.traffic.up, *written);
        }
        self.traffic.note(poll)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let poll = Pin::new(&mut self.stream).poll_flush(cx);
        self.traffic.note(poll)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let poll = Pin::new(&mut self.stream).poll_shutdown(cx);
        if poll.is_ready() {
            self.traffic.has_up_ended.store(true, Ordering::Relaxed);
            self.traffic.up_ended.notify_one();
            self.traffic.moved.notify_one();
        }
        self.traffic.note(poll)
    }
}
