//! An open stream: the task that carries its packets both ways.

use std::sync::{Arc, Weak};
use std::time::Duration;

use d2tp_session::{Addresses, LinkId, StreamPathId};
use d2tp_stream::{PacketReceiver, PacketSender, StreamConnection, StreamEnd};
use tokio::time::Instant;

use crate::clock;
use crate::driver_core::{DriverCore, DriverShared};
use crate::relay_dispatch;
use crate::stream_queues::StreamSignals;

/// How long a stream that is closed may write what waits, and then the kernel what it has.
const CLOSE_MAX: Duration = Duration::from_secs(1); // a guess
/// What a server reads from a stream that no admitted device uses: more than a handshake and a request to be enrolled take.
/// Larger: strangers keep the server busier, by as much with each connection.
const UNPROVEN_BYTES_MAX: usize = 64 * 1024; // R-STREAM-8; a guess: fifty packets
/// How long a stream with more than that is not read, until the session of an admitted device has answered by it.
const PROVEN_WITHIN: Duration = Duration::from_secs(1); // a guess: a turn of the engine, on a busy machine
/// How often a stream that waits to be proved looks whether a session has answered.
const PROVEN_LOOK_EVERY: Duration = Duration::from_millis(5);

impl DriverCore {
    /// A link number that was never used.
    pub(crate) fn new_link(&mut self) -> LinkId {
        let id = LinkId(self.next_link);
        self.next_link += 1;
        id
    }
}

/// A stream whose connection is open.
pub(crate) struct OpenStream {
    /// The device, or the worker of a server that accepted the stream.
    pub(crate) shared: Weak<DriverShared>,
    pub(crate) stream: StreamPathId,
    pub(crate) addresses: Addresses,
    /// Whether a device opened it at this server, so that the device's memory is charged.
    pub(crate) is_served: bool,
    pub(crate) signals: StreamSignals,
}

impl OpenStream {
    /// The worker with this index, or the device.
    pub(crate) fn shared_by(&self, worker: u16) -> Option<Arc<DriverShared>> {
        self.shared.upgrade()?.worker(worker)
    }

    /// Carries packets in both directions until the connection ends or the stream is closed.
    pub(crate) async fn carry(
        &self,
        mut sender: PacketSender,
        receiver: PacketReceiver,
    ) -> StreamEnd {
        let closing = async {
            self.signals.closing.notified().await;
            tokio::time::sleep(CLOSE_MAX).await;
        };
        let end = tokio::select! {
            end = self.receive(receiver) => end,
            end = self.send(&mut sender) => end,
            () = closing => StreamEnd::Closed,
            () = self.signals.dropped.notified() => return StreamEnd::Closed,
        };
        // The peer notices sooner; a failure to notify it is no fault.
        let _ = tokio::time::timeout(CLOSE_MAX, sender.close()).await;
        end
    }

    async fn receive(&self, mut receiver: PacketReceiver) -> StreamEnd {
        // What came before an admitted device used the stream.
        let mut unproven = self.is_served.then_some(0);
        loop {
            let mut batch = match receiver.recv().await {
                Ok(batch) => batch,
                Err(end) => return end,
            };
            let (shared, is_device) = {
                let worker = self.signals.worker.lock();
                let Some(shared) = self.shared_by(*worker) else {
                    return StreamEnd::Closed;
                };
                let now = clock::now();
                let mut inner = shared.inner.lock();
                if inner.is_deaf {
                    // R-STREAM-9: read to the end, so that the connection is not reset, and left to the next process.
                    continue;
                }
                for packet in batch.packets() {
                    let stride = packet.len();
                    unproven = unproven.map(|bytes| bytes + stride);
                    relay_dispatch::receive_run(&mut inner, now, self.addresses, packet, stride);
                }
                if let Some(client) = inner.core.take_refused_client() {
                    let peer = inner.streams.peer(&self.addresses.remote);
                    let from = peer.unwrap_or(self.addresses.remote);
                    inner.refused_clients.on_refused(now, client, from);
                }
                if unproven.is_some() && inner.core.client_of_stream(self.stream).is_some() {
                    unproven = None;
                }
                let is_device = !inner.accepts;
                drop(inner);
                (shared, is_device)
            };
            shared.wake();
            if unproven.is_some_and(|bytes| bytes > UNPROVEN_BYTES_MAX) {
                if !self.is_proven_soon().await {
                    return StreamEnd::Closed;
                }
                unproven = None;
            }
            if is_device {
                shared.notify_activity();
            }
        }
    }

    /// Whether a session of an admitted device sends by the stream; none if the worker that has it is gone.
    fn is_proven(&self) -> Option<bool> {
        let worker = self.signals.worker.lock();
        let shared = self.shared_by(*worker)?;
        let inner = shared.inner.lock();
        Some(inner.core.client_of_stream(self.stream).is_some())
    }

    /// Whether an admitted device uses the stream, or does a moment later: its first packets may come together, before its
    /// session has answered any.
    async fn is_proven_soon(&self) -> bool {
        let until = Instant::now() + PROVEN_WITHIN;
        while self.is_proven() == Some(false) && Instant::now() < until {
            tokio::time::sleep(PROVEN_LOOK_EVERY).await;
        }
        self.is_proven() == Some(true)
    }

    async fn send(&self, sender: &mut PacketSender) -> StreamEnd {
        let (mut written, mut is_held) = (0, false);
        loop {
            let mut hold = None;
            // A system call, which others must not wait for.
            let is_asked = self.is_served && written > 0 && !is_held;
            let send_buffer = is_asked.then(|| sender.send_buffer_max());
            let next = {
                let worker = self.signals.worker.lock();
                let Some(shared) = self.shared_by(*worker) else {
                    return StreamEnd::Closed;
                };
                let mut inner = shared.inner.lock();
                let inner = &mut *inner;
                let DriverCore { core, streams, .. } = inner;
                let waiting = sender.waiting_bytes_max();
                let written = std::mem::take(&mut written);
                if let Some(limit) = send_buffer {
                    hold = streams.charge_send_buffer(self.stream, limit);
                }
                let next = streams.next_batch(core, self.stream, written, waiting);
                shared.wake();
                match next {
                    Ok(next) => next,
                    Err(_) => return StreamEnd::Closed,
                }
            };
            if let Some(limit) = hold {
                is_held = true;
                let set = sender.hold_send_buffer(limit);
                let worker = self.signals.worker.lock();
                if let Some(shared) = self.shared_by(*worker) {
                    let mut inner = shared.inner.lock();
                    inner.streams.recharge_send_buffer(self.stream, set);
                }
            }
            let Some(batch) = next else {
                self.signals.ready.notified().await;
                continue;
            };
            if let Err(end) = sender.send(&batch.bytes, batch.stride).await {
                return end;
            }
            written = batch.bytes.len();
        }
    }

    /// Tells the core that the stream ended, and forgets it. Its connection ends once the peer has taken what the kernel
    /// holds for it, or a moment later; until then the device pays for that.
    pub(crate) fn end(&self, connection: StreamConnection) {
        let mut in_kernel = None;
        let worker = self.signals.worker.lock();
        if let Some(shared) = self.shared_by(*worker) {
            let mut inner = shared.inner.lock();
            in_kernel = inner.streams.remove(self.stream);
            inner.core.on_stream_closed(clock::now(), self.stream);
            drop(inner);
            shared.wake();
        }
        drop(worker);
        tokio::spawn(async move {
            connection.end(CLOSE_MAX).await;
            drop(in_kernel);
        });
    }
}
