//! CONNECT: a TCP connection to the origin, copied both ways with half-close.
//!
//! The origin's side is kept while the device is away: the flow accepts no bytes then, the two
//! buffers fill, and TCP's own flow control stops the origin. A break on either side becomes a
//! reset on the other, never a clean end. A device's reset is noticed although the origin takes no bytes.
//!
//! While no path leads to the device and nothing is under way here, the flow may sleep with its session; the origin's
//! connection stays ([`crate::sleeping_tunnels`]). When the process stops and another one follows, each tunnel sleeps, with
//! what is under way in it.

use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use d2tp_driver::{DatagramSender, FlowIo};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
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
use crate::sleeping_tunnels::{SleptTunnel, TunnelRemainder};
use crate::tunnel_pump::{TUNNEL_BUFFER_BYTES, TunnelPump, copy_both};
use crate::tunnel_rest::TunnelRest;
use d2tp_driver::ResetCause;

/// What the buffers of a tunnel occupy.
pub(crate) const TUNNEL_BYTES: u64 = 2 * TUNNEL_BUFFER_BYTES as u64;

/// The interval of checks whether a device that has finished sending still reads.
const LEFT_EVERY: Duration = Duration::from_secs(1); // a guess

/// The interval of checks whether the device of a restored session has said what it has of a tunnel. It comes with the
/// handshake as a rule.
const CLAIMED_CHECK_EVERY: Duration = Duration::from_millis(5); // a guess

/// Where a tunnel's flow is.
enum TunnelStart<'a> {
    /// The device awaits the answer, and sent these bytes with its request.
    New(&'a [u8]),
    /// The flow slept, has a memo, and this was under way.
    Woken(&'a TunnelRemainder),
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
    let Some(slept) = prox.sleeping_tunnels.take(number, flow.peer()) else {
        return ProxFlowOutcome::Reset(ResetCause::TunnelReset); // It was another process's.
    };
    let SleptTunnel {
        connection: origin,
        mut remainder,
        memory,
        ..
    } = slept;
    drop(memory); // Of what follows.
    let mut buffers = prox.memory_account(flow.peer()).charge();
    let fits = buffers.try_resize(TUNNEL_BYTES + remainder.bytes());
    let refused = match fits {
        true => remainder.begin_at(resumed_at(flow).await).err(),
        false => Some(ResetCause::StoreFull),
    };
    if let Some(cause) = refused {
        let _ = origin.tcp().set_zero_linger();
        return ProxFlowOutcome::Reset(cause);
    }
    let start = TunnelStart::Woken(&remainder);
    carry(flow, start, origin, prox, record, reports_to).await
}

/// The offset from which the device reads the tunnel on; none if the flow is over before it says so.
async fn resumed_at<F: FlowIo>(flow: &mut F) -> Option<u64> {
    loop {
        if let Some(at) = flow.resumed_at() {
            return Some(at);
        }
        let is_over = std::future::poll_fn(|cx| Poll::Ready(flow.poll_finished(cx).is_ready()));
        if is_over.await {
            return None;
        }
        tokio::time::sleep(CLAIMED_CHECK_EVERY).await;
    }
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
    let is_woken = matches!(start, TunnelStart::Woken(_));
    let rest = TunnelRest::new(flow, prox, &memo, is_woken);
    let (mut up, mut down) = match start {
        TunnelStart::New(first) => (
            TunnelPump::new(first, false, false),
            TunnelPump::new(tunnel_open(), false, false),
        ),
        TunnelStart::Woken(remainder) => remainder.pumps(),
    };
    let mut origin = CountedStream {
        stream: origin,
        traffic: traffic.clone(),
    };
    let unwanted = flow.peer_stopped_check();
    let id = flow.id();
    let is_idle = || traffic.is_idle();
    let mut resting = pin!(rest.while_idle(is_idle, || traffic.moved.notified(), &prox.leaving));
    let copied = {
        let lent = Mutex::new(&mut *flow);
        let mut lent_flow = LentFlow { flow: &lent };
        let copying = copy_both(
            &mut lent_flow,
            &mut origin,
            &mut up,
            &mut down,
            |up, down| traffic.on_step(up.is_idle() && down.is_idle()),
        );
        tokio::select! {
            copied = copying => copied.map_err(|error| match traffic.origin_failed() {
                true => ProxFlowOutcome::Reset(ResetCause::TunnelReset),
                false => outcome_of(&error),
            }),
            never = &mut resting => match never {},
            never = metered.supply.report(reports_to.as_ref(), id) => match never {},
            error = traffic.broken(&lent) => Err(outcome_of(&error)),
            () = traffic.until_left(unwanted) => Ok(()),
            () = traffic.silent_for(prox.config().tunnel_idle) => {
                Err(ProxFlowOutcome::Reset(ResetCause::TunnelIdle))
            }
            () = metered.used_up() => Err(ProxFlowOutcome::Reset(ResetCause::MonthUsedUp)),
            () = prox.stop.cancelled() => Err(ProxFlowOutcome::Reset(ResetCause::Stopping)),
        }
    };
    record.bytes_up = traffic.up.load(Ordering::Relaxed);
    record.bytes_down = traffic.down.load(Ordering::Relaxed);
    let outcome = match copied {
        // Both ends said they are done, or the device that it does not even read; stay until the device has it all.
        Ok(()) => {
            let mut watch = FlowWatch::new(prox, &metered);
            tokio::select! {
                gone = watch.gone(flow, prox) => gone.outcome(),
                never = &mut resting => match never {},
            }
        }
        Err(ref outcome) => outcome.clone(),
    };
    let remainder = match (&outcome, flow.take_remainder()) {
        (ProxFlowOutcome::Hibernated, Some(of_flow)) => {
            Some(TunnelRemainder::of(of_flow, &up, &down))
        }
        (ProxFlowOutcome::Hibernated, None) if up.is_idle() && down.is_idle() => {
            Some(TunnelRemainder::default())
        }
        _ => None,
    };
    if let Some(remainder) = remainder {
        let account = prox.memory_account(flow.peer());
        let slept = SleptTunnel::new(flow.peer(), origin.stream, remainder, &account);
        // A process that leaves passes it on itself.
        let is_kept = !prox.leaving.is_cancelled();
        prox.sleeping_tunnels.put(number, slept, is_kept);
    } else if copied.is_err() {
        // The origin must not take what it has for all there was.
        let _ = origin.stream.tcp().set_zero_linger();
    }
    outcome
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
    /// Whether nothing is held between the two, and both may still send.
    is_idle: AtomicBool,
    origin_failed: AtomicBool,
    /// The flow to the device.
    flow: Arc<FlowTraffic>,
    /// Notified when the device's end has been passed to the origin.
    up_ended: Notify,
    has_up_ended: AtomicBool,
    /// Notified when [`TunnelTraffic::is_idle`] may have changed.
    moved: Notify,
}

impl TunnelTraffic {
    fn new(flow: &Arc<FlowTraffic>) -> TunnelTraffic {
        TunnelTraffic {
            up: AtomicU64::new(0),
            down: AtomicU64::new(0),
            is_idle: AtomicBool::new(false),
            origin_failed: AtomicBool::new(false),
            flow: flow.clone(),
            up_ended: Notify::new(),
            has_up_ended: AtomicBool::new(false),
            moved: Notify::new(),
        }
    }

    /// Notes after a step of copying whether the tunnel is idle. Only a change wakes who waits for it: that may be the task
    /// which copies.
    fn on_step(&self, is_idle: bool) {
        if self.is_idle.swap(is_idle, Ordering::Relaxed) != is_idle {
            self.moved.notify_one();
        }
    }

    fn is_idle(&self) -> bool {
        self.is_idle.load(Ordering::Relaxed)
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
}

impl<F: FlowIo> AsyncRead for LentFlow<'_, F> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut **self.flow.lock()).poll_read(cx, buf)
    }
}

impl<F: FlowIo> AsyncWrite for LentFlow<'_, F> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut **self.flow.lock()).poll_write(cx, bytes)
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
            self.traffic.down.fetch_add(read as u64, Ordering::Relaxed);
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
