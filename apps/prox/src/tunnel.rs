//! CONNECT: a TCP connection to the origin, copied both ways with half-close.
//!
//! The origin's side is kept while the device is away: the flow accepts no bytes then, the two
//! buffers fill, and TCP's own flow control stops the origin. A break on either side becomes a
//! reset on the other, never a clean end. A device's reset is noticed although the origin takes no bytes.

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
use crate::flow_report::{FlowLogRecord, ProxFlowOutcome, ServedFrom};
use crate::flow_watch::FlowWatch;
use crate::prox::Prox;
use d2tp_driver::ResetCause;

/// Buffer for each direction of a tunnel. Larger: fewer calls, and fewer tunnels fit the memory of one key
/// (R-QUOTA-4); 1,024 of them take two thirds of its share by default.
pub const TUNNEL_BUFFER_BYTES: usize = 32 * 1024;

/// What the buffers of a tunnel occupy.
pub(crate) const TUNNEL_BYTES: u64 = 2 * TUNNEL_BUFFER_BYTES as u64;

/// The interval of checks whether a device that has finished sending still reads.
const LEFT_EVERY: Duration = Duration::from_secs(1); // a guess

/// Copies until both directions have ended.
pub(crate) async fn serve<F: FlowIo>(
    flow: &mut F,
    first: &[u8],
    origin: ChargedTcp,
    prox: &Arc<Prox>,
    record: &mut FlowLogRecord,
    reports_to: Option<DatagramSender>,
) -> ProxFlowOutcome {
    record.status = Some(200);
    record.served = ServedFrom::Tunnel;
    let metered = record.traffic.clone();
    let traffic = Arc::new(TunnelTraffic::new(&metered));
    let mut origin = CountedStream {
        stream: origin,
        traffic: traffic.clone(),
    };
    let unwanted = flow.peer_stopped_check();
    let id = flow.id();
    let copied = {
        let lent = Mutex::new(&mut *flow);
        let mut lent_flow = LentFlow(&lent);
        let copying = async {
            lent_flow.write_all(tunnel_open()).await?;
            lent_flow.flush().await?;
            origin.write_all(first).await?;
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
                false => ProxFlowOutcome::Broken(error.to_string()),
            }),
            never = metered.supply.report(reports_to.as_ref(), id) => match never {},
            error = traffic.broken(&lent) => Err(ProxFlowOutcome::Broken(error.to_string())),
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
        Err(outcome) => {
            // The origin must not take what it has for all there was.
            let _ = origin.stream.tcp().set_zero_linger();
            outcome
        }
    }
}

/// The traffic of a tunnel.
#[derive(Debug)]
struct TunnelTraffic {
    up: AtomicU64,
    down: AtomicU64,
    origin_failed: AtomicBool,
    /// The flow to the device.
    flow: Arc<FlowTraffic>,
    /// Notified when the device's end has been passed to the origin.
    up_ended: Notify,
    has_up_ended: AtomicBool,
}

impl TunnelTraffic {
    fn new(flow: &Arc<FlowTraffic>) -> TunnelTraffic {
        TunnelTraffic {
            up: AtomicU64::new(0),
            down: AtomicU64::new(0),
            origin_failed: AtomicBool::new(false),
            flow: flow.clone(),
            up_ended: Notify::new(),
            has_up_ended: AtomicBool::new(false),
        }
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
struct LentFlow<'a, F>(&'a Mutex<&'a mut F>);

impl<F: FlowIo> AsyncRead for LentFlow<'_, F> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut **self.0.lock()).poll_read(cx, buf)
    }
}

impl<F: FlowIo> AsyncWrite for LentFlow<'_, F> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut **self.0.lock()).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut **self.0.lock()).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut **self.0.lock()).poll_shutdown(cx)
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
        self.traffic.down.fetch_add(read as u64, Ordering::Relaxed);
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
            self.traffic
                .up
                .fetch_add(*written as u64, Ordering::Relaxed);
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
        }
        self.traffic.note(poll)
    }
}
