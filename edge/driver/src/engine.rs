//! The engine: one task that moves datagrams between sockets and the core.
//!
//! In each turn the task receives datagrams, handles timers, passes events to their flows, reads
//! from sources, and sends the core's packets. The core has one lock, which is taken once per turn
//! and once per application call, never per packet.

use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use d2tp_session::{
    Addresses, Endpoint, FlowEnd, FlowId, LinkId, RelayId, SerialPathId, SessionEvent, SessionId,
    Span, StreamPathId, Time, Transmit, is_reserved_address,
};
use d2tp_udp::{LinkSocket, RecvBatch};

use crate::clock;
use crate::driver_core::{DriverCore, DriverShared, FlowEntry, MOVE_CONTEXT, SOURCE_FAILED};
use crate::hibernation;
use crate::move_question::MoveQuestion;
use crate::relay_dispatch;
use crate::workers;

/// The number of receive calls per turn.
const RECEIVES_PER_TURN: usize = 8;
/// The number of batches sent per turn.
const SENDS_PER_TURN: usize = 16;
/// The number of bytes read from a source at once.
const SOURCE_PIECE_BYTES: usize = 256 * 1024;
/// Consecutive failed sends after which a device's socket is replaced.
const SOCKET_FAULTS_MAX: u32 = 3; // a guess: a single failure may be due to a firewall rule being replaced
/// The number of runs of datagrams read from a socket at once.
const RECEIVE_RUNS: usize = 8;

/// How late a timer of the core is when the task did not run for a while. What arrived meanwhile is received first, although
/// the reactor may not have reported it yet: what was answered in time needs no probe.
const LATE_MIN: Span = Span::from_millis(5); // a guess: timers of an idle machine are a millisecond late

/// The wait from which a new timer is created. A timer that is postponed wakes the task at its old
/// time first.
const REST_MIN: Span = Span::from_millis(100);

/// Starts the engine's task for a core. `accepts`: whether flows that peers open are accepted.
pub(crate) fn start(core: Endpoint, accepts: bool) -> Arc<DriverShared> {
    let shared = DriverShared::new(core, accepts);
    tokio::spawn(DriverEngine {
        shared: shared.clone(),
        batch: RecvBatch::with_capacity(RECEIVE_RUNS),
        buffer: vec![0; 65_536],
        timer: Box::pin(tokio::time::sleep(Duration::ZERO)),
        armed: Time::ZERO,
        sent: false,
        has_datagrams: false,
    });
    shared
}

struct DriverEngine {
    shared: Arc<DriverShared>,
    batch: RecvBatch,
    buffer: Vec<u8>,
    timer: Pin<Box<tokio::time::Sleep>>,
    armed: Time,
    /// Whether something was sent in this turn.
    sent: bool,
    /// Whether a source of datagrams had more in this turn than its session had room for.
    has_datagrams: bool,
}

/// What a turn received.
#[derive(Clone, Copy, Debug, Default)]
struct Receipt {
    /// Whether something arrived.
    any: bool,
    /// Whether a socket may have more. Otherwise the runtime wakes the task when something arrives.
    has_more: bool,
}

/// Whether nothing has arrived.
fn is_nothing(received: &io::Result<usize>) -> bool {
    let error = received.as_ref().err();
    error.is_some_and(|error| error.kind() == io::ErrorKind::WouldBlock)
}

impl DriverEngine {
    fn receive(&mut self, cx: &mut Context<'_>) -> Receipt {
        let (sockets, is_late): (Vec<(LinkId, Arc<LinkSocket>, bool)>, bool) = {
            let inner = self.shared.inner.lock();
            if inner.is_deaf || inner.stopped {
                return Receipt::default();
            }
            let sockets = inner.sockets.iter();
            let sockets = sockets.map(|(id, s)| (*id, s.io.clone(), s.reports_local));
            let overdue = clock::now().since(inner.core.next_timeout());
            (sockets.collect(), overdue >= LATE_MIN)
        };
        let mut receipt = Receipt::default();
        for (link, io, tells_local) in sockets {
            let mut is_drained = false;
            for _ in 0..RECEIVES_PER_TURN {
                let received = match is_late.then(|| io.try_recv(&mut self.batch)) {
                    Some(received) if !is_nothing(&received) => Poll::Ready(received),
                    _ => io.poll_recv(cx, &mut self.batch),
                };
                match received {
                    Poll::Pending => {
                        is_drained = true;
                        break;
                    }
                    Poll::Ready(Err(error)) => {
                        // ICMP errors appear here; they are only hints.
                        tracing::debug!(?link, %error, "receive");
                        if d2tp_udp::is_link_gone(&error) {
                            let mut inner = self.shared.inner.lock();
                            if !inner.accepts {
                                inner.gone.push(link);
                            }
                            is_drained = true;
                            break;
                        }
                    }
                    Poll::Ready(Ok(_)) => {
                        receipt.any = true;
                        let now = clock::now();
                        let mut inner = self.shared.inner.lock();
                        if inner.stopped {
                            break;
                        }
                        // R-STREAM-5: an address that identifies a stream or a relay is proved; a
                        // datagram from there is forged.
                        let runs = self.batch.received();
                        for run in runs.filter(|run| !is_reserved_address(&run.from)) {
                            inner.counts.on_received(run.data.len(), run.stride);
                            let local: Option<IpAddr> = run.dst_ip.filter(|_| tells_local);
                            let addresses = Addresses {
                                link,
                                local,
                                remote: run.from,
                            };
                            relay_dispatch::receive_run(
                                &mut inner, now, addresses, run.data, run.stride,
                            );
                            if let Some(client) = inner.core.take_refused_client() {
                                inner.refused_clients.on_refused(now, client, run.from);
                            }
                        }
                    }
                }
            }
            receipt.has_more |= !is_drained;
        }
        receipt
    }

    /// Sends one batch. Returns false if the socket is full.
    fn send(
        inner: &mut DriverCore,
        cx: &mut Context<'_>,
        transmit: Transmit,
        bytes: &[u8],
        now: Time,
    ) -> bool {
        if let Some(relay) = RelayId::of(&transmit.remote) {
            relay_dispatch::send(inner, now, relay, &transmit, bytes);
            return true;
        }
        if let Some(stream) = StreamPathId::of(&transmit.remote) {
            let DriverCore { core, streams, .. } = inner;
            streams.enqueue(core, stream, bytes, transmit.segment);
            return true;
        }
        if SerialPathId::of(&transmit.remote).is_some() {
            inner.counts.on_sent(bytes.len(), transmit.segment);
            inner
                .serial_links
                .send(transmit.link, bytes, transmit.segment);
            return true;
        }
        let Some(socket) = inner.sockets.get_mut(&transmit.link) else {
            return true;
        };
        let most = socket.io.max_gso_segments().max(1) * transmit.segment;
        let mut at = 0;
        while at < bytes.len() {
            let end = (at + most).min(bytes.len());
            let piece = &bytes[at..end];
            let result = socket.io.try_send(&d2tp_udp::UdpTransmit {
                dst: transmit.remote,
                src_ip: transmit.local,
                ecn: None,
                contents: piece,
                segment_size: (piece.len() > transmit.segment).then_some(transmit.segment),
            });
            match result {
                Ok(()) => {
                    socket.faults = 0;
                    inner.counts.on_sent(piece.len(), transmit.segment);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let rest = Transmit {
                        len: bytes.len() - at,
                        ..transmit
                    };
                    socket.unsent = Some((rest, bytes[at..].to_vec()));
                    if socket.io.poll_send_ready(cx).is_ready() {
                        cx.waker().wake_by_ref();
                    }
                    return false;
                }
                Err(error) if d2tp_udp::is_too_big(&error) => {
                    inner.core.on_too_big(now, &transmit, transmit.segment);
                    return true;
                }
                Err(error) => {
                    tracing::debug!(link = ?transmit.link, %error, "send");
                    if !relay_dispatch::is_link_fault(inner, &transmit) {
                        return true;
                    }
                    // A server does not change its links: an error is about the destination, and
                    // one peer at a bad address must not cost the others their paths.
                    let Some(socket) = inner.sockets.get_mut(&transmit.link) else {
                        return true;
                    };
                    socket.faults += u32::from(d2tp_udp::is_socket_unfit(&error));
                    let unfit = socket.faults >= SOCKET_FAULTS_MAX;
                    if !inner.accepts && (unfit || d2tp_udp::is_link_gone(&error)) {
                        inner.gone.push(transmit.link);
                    }
                    return true;
                }
            }
            at = end;
        }
        true
    }

    fn transmit(&mut self, cx: &mut Context<'_>) -> bool {
        let now = clock::now();
        let mut inner = self.shared.inner.lock();
        let inner = &mut *inner;
        // Before any ACK of it leaves.
        inner.store_received();
        self.has_datagrams = inner.fill_datagrams();
        let stuck: Vec<(Transmit, Vec<u8>)> = inner
            .sockets
            .values_mut()
            .filter_map(|s| s.unsent.take())
            .collect();
        for (transmit, bytes) in stuck {
            if !Self::send(inner, cx, transmit, &bytes, now) {
                return false;
            }
        }
        for sent in 0..SENDS_PER_TURN {
            // Of several sessions each is visited once a turn.
            if sent > 0 && self.has_datagrams && inner.fed_sessions.len() == 1 {
                // What left made room.
                self.has_datagrams = inner.fill_datagrams();
            }
            let Some(transmit) = inner.core.poll_transmit(now, &mut self.buffer) else {
                return false;
            };
            self.sent = true;
            if !Self::send(inner, cx, transmit, &self.buffer[..transmit.len], now) {
                return false;
            }
        }
        true
    }

    /// Passes events to their flows. Returns whether there was one.
    fn dispatch(&mut self) -> bool {
        let mut any = false;
        let mut inner = self.shared.inner.lock();
        let inner = &mut *inner;
        inner.drain_trace();
        while let Some((session, event)) = inner.core.poll_event() {
            any = true;
            hibernation::on_event(inner, session, &event);
            let event = match event {
                SessionEvent::Datagram { context, bytes } if context != MOVE_CONTEXT => {
                    inner.inbox(session).push(context, bytes);
                    continue;
                }
                other => other,
            };
            let wake = |flow: FlowId, f: fn(&mut FlowEntry), inner: &mut DriverCore| {
                if let Some(entry) = inner.flows.get_mut(&(session, flow)) {
                    f(entry);
                }
            };
            match &event {
                SessionEvent::Opened(flow) if inner.relays.is_rendezvous_flow(session, *flow) => {
                    relay_dispatch::start_rendezvous(&self.shared, inner, session, *flow);
                }
                SessionEvent::Opened(flow)
                    if inner.accepts || inner.relays.accepts_flows(session) =>
                {
                    let entry = FlowEntry {
                        unclaimed: true,
                        opener: inner.core.session(session).map(|s| s.peer().0),
                        ..FlowEntry::default()
                    };
                    inner.flows.insert((session, *flow), entry);
                    inner.accepted.push_back((session, *flow));
                    if let Some(waker) = inner.acceptor.take() {
                        waker.wake();
                    }
                }
                SessionEvent::Readable(flow) => wake(
                    *flow,
                    |e| {
                        if let Some(w) = e.reader.take() {
                            w.wake();
                        }
                    },
                    inner,
                ),
                SessionEvent::Writable(flow) => {
                    inner.schedule_source(session, *flow);
                    wake(
                        *flow,
                        |e| {
                            if let Some(w) = e.writer.take() {
                                w.wake();
                            }
                        },
                        inner,
                    );
                }
                SessionEvent::SendFrom { flow, offset } => {
                    wake(
                        *flow,
                        |e| {
                            if let Some(w) = e.writer.take() {
                                w.wake();
                            }
                        },
                        inner,
                    );
                    if let Some(drawn) = inner
                        .flows
                        .get_mut(&(session, *flow))
                        .and_then(|e| e.source.as_mut())
                    {
                        drawn.next = (*offset).max(drawn.base);
                        drawn.done = false;
                        inner.schedule_source(session, *flow);
                    }
                }
                SessionEvent::Remains {
                    flow,
                    pieces,
                    charge,
                } => {
                    if let Some(entry) = inner.flows.get_mut(&(session, *flow)) {
                        entry.remains = Some(pieces.iter().cloned().collect());
                        entry.remains_charge = Some(charge.clone());
                    }
                    continue;
                }
                SessionEvent::Ended { flow, end } => {
                    if let Some(entry) = inner.flows.get_mut(&(session, *flow)) {
                        entry.end = Some(*end);
                        entry.source = None;
                        entry.wake_all();
                        if entry.detached {
                            inner.flows.remove(&(session, *flow));
                        }
                    }
                }
                SessionEvent::Datagram { context, bytes }
                    if *context == MOVE_CONTEXT && inner.relays.server_session == Some(session) =>
                {
                    inner.move_request = Some(bytes.clone());
                    self.shared.move_asked.notify_one();
                    continue;
                }
                SessionEvent::Datagram { context, bytes }
                    if *context == MOVE_CONTEXT && inner.accepts =>
                {
                    // Without a store that other nodes share there is none to go on at, and nobody answers.
                    let is_shared = inner.hibernation.shared.is_some();
                    let question = MoveQuestion::decode(bytes, clock::now());
                    if let Some(question) = question.filter(|_| is_shared) {
                        inner.move_questions.insert(session, question);
                        self.shared.move_asked.notify_one();
                    }
                    continue;
                }
                SessionEvent::Datagram { context, bytes } => {
                    inner.inbox(session).push(*context, bytes.clone());
                    continue;
                }
                SessionEvent::Asleep => inner.on_hibernated(session),
                SessionEvent::Suspended(_)
                | SessionEvent::Woken { .. }
                | SessionEvent::Established { .. } => inner.notify_suspension(session),
                SessionEvent::Closed(end) => {
                    inner.end_suspension_notice(session);
                    inner.move_questions.remove(&session);
                    if let Some(mut inbox) = inner.inboxes.remove(&session) {
                        inbox.wake();
                    }
                    inner.forget_datagram_source(session);
                    inner.ended.push(session, end.clone());
                    let all = (session, FlowId(0))..=(session, FlowId(u64::MAX));
                    for (_, entry) in inner.flows.range_mut(all) {
                        entry.end.get_or_insert(FlowEnd::SessionEnded);
                        entry.wake_all();
                    }
                }
                _ => {}
            }
            inner.relays.note(&event);
            let over = matches!(event, SessionEvent::Closed(_));
            // A receiver that is late would lose the rare events among those that come for each batch of packets, of
            // which the tasks of flows have been woken.
            let is_for_flows =
                matches!(event, SessionEvent::Readable(_) | SessionEvent::Writable(_));
            if !is_for_flows
                && let Some(to) = inner.relays.event_sender(session, &self.shared.events)
            {
                // There may be no receiver.
                let _ = to.send((clock::now(), event));
            }
            if over {
                inner.relays.forget(session);
            }
        }
        any
    }

    /// Fills the send buffers of flows from their sources.
    fn draw(&mut self) {
        // Taken before the core is locked: a source may call its waker while the core's lock is held.
        let ready = std::mem::take(&mut *self.shared.ready_sources.lock());
        let mut inner = self.shared.inner.lock();
        let inner = &mut *inner;
        for (session, flow) in ready {
            inner.schedule_source(session, flow);
        }
        for (session, flow) in std::mem::take(&mut inner.drawing) {
            let entry = inner.flows.get_mut(&(session, flow));
            let Some((drawn, error)) =
                entry.and_then(|e| e.source.as_mut().zip(Some(&mut e.source_error)))
            else {
                continue;
            };
            if drawn.done {
                continue;
            }
            let waker = Waker::from(Arc::new(SourceWaker {
                shared: Arc::downgrade(&self.shared),
                key: (session, flow),
            }));
            let mut cx = Context::from_waker(&waker);
            let mut failed = None;
            let _ = inner.core.with(session, |s| {
                // After a rewind the core needs another offset than the source's current one.
                match s.send_offsets(flow) {
                    Some((end, _)) if end == drawn.next => {}
                    Some((end, _)) if end >= drawn.base => drawn.next = end,
                    _ => return,
                }
                while let Ok(room @ 1..) = s.source_room(flow) {
                    let max = (room as usize).min(SOURCE_PIECE_BYTES);
                    match drawn
                        .source
                        .poll_read_at(&mut cx, drawn.next - drawn.base, max)
                    {
                        Poll::Pending => break,
                        Poll::Ready(Ok(bytes)) if bytes.is_empty() => {
                            drawn.done = true;
                            let _ = s.finish(flow);
                            break;
                        }
                        Poll::Ready(Ok(bytes)) => {
                            drawn.next += bytes.len() as u64;
                            if s.write(flow, bytes).is_err() {
                                drawn.done = true;
                                break;
                            }
                        }
                        Poll::Ready(Err(cause)) => {
                            drawn.done = true;
                            s.reset(flow, SOURCE_FAILED);
                            failed = Some(cause.to_string());
                            break;
                        }
                    }
                }
            });
            *error = error.take().or(failed);
        }
    }
}

/// Wakes the task when a source has new bytes.
struct SourceWaker {
    shared: Weak<DriverShared>,
    key: (SessionId, FlowId),
}

impl Wake for SourceWaker {
    fn wake(self: Arc<Self>) {
        if let Some(shared) = self.shared.upgrade() {
            // This is not the core's lock, because a source may call the waker while the core's
            // lock is held.
            shared.ready_sources.lock().insert(self.key);
            shared.wake();
        }
    }
}

impl Future for DriverEngine {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        this.shared.waker.begin_turn(cx.waker());
        let received = this.receive(cx);
        workers::exchange(&this.shared);
        let now = clock::now();
        {
            let mut inner = this.shared.inner.lock();
            inner.counts.turns += 1;
            hibernation::answer_lookups(&this.shared, &mut inner);
            if inner.core.next_timeout() <= now {
                inner.core.handle_timeouts(now);
            }
        }
        this.dispatch();
        hibernation::on_time(&mut this.shared.inner.lock(), now);
        this.draw();
        this.sent = false;
        let more = this.transmit(cx);
        // What left made room, and what stayed waits for a packet of the peer.
        let refills = this.has_datagrams && this.sent;
        let dispatched = this.dispatch();
        let mut moved = received.any || this.sent;
        let (next, stopped, draws) = {
            let mut inner = this.shared.inner.lock();
            for link in std::mem::take(&mut inner.gone) {
                moved = true;
                for id in inner.core.ids() {
                    let stats = inner.core.session(id).map(|s| s.path_stats());
                    for path in stats.into_iter().flatten() {
                        if path.addresses.link == link && !inner.accepts {
                            inner
                                .final_payload
                                .insert(link, (path.payload_in, path.payload_out));
                        }
                    }
                    let _ = inner.core.with(id, |s| s.on_link_down(now, link));
                }
            }
            let DriverCore {
                closing,
                core,
                sockets,
                streams,
                serial_links,
                ..
            } = &mut *inner;
            closing.retain(|link| {
                let used = core
                    .ids()
                    .iter()
                    .any(|id| core.session(*id).is_some_and(|s| s.has_path(*link)));
                if !used {
                    sockets.remove(link);
                    streams.close_link(*link);
                    serial_links.remove(*link);
                }
                used
            });
            let next = inner
                .core
                .next_timeout()
                .min(inner.hibernation.next_timeout());
            // A server has no task that watches its links.
            moved &= !inner.accepts;
            (next, inner.stopped, !inner.drawing.is_empty())
        };
        if moved {
            this.shared.notify_activity();
        }
        if stopped {
            return Poll::Ready(());
        }
        // Each further turn goes through the runtime's queue, of which another worker is woken.
        let turns_again = received.has_more || more || draws || refills || dispatched;
        if turns_again || this.shared.waker.is_woken() {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if next != Time::NEVER {
            let stood_still = this.shared.waker.take_rearm();
            if next != this.armed || stood_still || this.timer.is_elapsed() {
                this.armed = next;
                let span = next.since(now).max(Span::from_nanos(1));
                let at = tokio::time::Instant::now() + span.into();
                if span < REST_MIN {
                    this.timer.as_mut().reset(at);
                } else {
                    this.timer.set(tokio::time::sleep_until(at));
                }
            }
            if this.timer.as_mut().poll(cx).is_ready() {
                cx.waker().wake_by_ref();
            }
        } else if this.armed != next {
            // A timer that is not polled never fires.
            this.armed = next;
            this.timer.set(tokio::time::sleep(Duration::ZERO));
        }
        Poll::Pending
    }
}
