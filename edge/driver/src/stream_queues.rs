//! The queues of this host's streams: connections that carry packets on networks that block UDP.
//!
//! ```text
//!  engine ─▶ enqueue ─▶ queue of a stream ─▶ its task ─▶ TLS, TCP
//!     ▲ room for another batch ◀──────────────┘ the kernel took one
//!  core  ◀─ receive_run, with the address that identifies the stream ◀─ its task
//! ```
//!
//! A device's stream is a socket of its link, and has its own [`LinkId`]; all streams of a server
//! share one.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;

use d2tp_session::{
    Endpoint, LinkId, MemoryAccount, MemoryCharge, STREAM_ROOM_BYTES, StreamPathId,
};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

/// The most bytes that the core is asked for at once on a fast stream.
const BATCH_BYTES_MAX: usize = STREAM_ROOM_BYTES as usize;
/// The fewest bytes that the core is asked for at once: one packet of the largest size.
const BATCH_BYTES_MIN: usize = 9 * 1024;
/// The total number of bytes of one stream that may wait: ACKs and probes are queued without room.
const QUEUE_BYTES_MAX: usize = 16 * STREAM_ROOM_BYTES as usize; // a guess
/// The memory charged for a stream beside its queue: the buffers of WebSocket and TLS, and a message that
/// arrives.
// 64 KiB are read at once, and a message of up to 128 KiB is put together beside what was read; up to 128 KiB wait to
// be written, and are copied into records of TLS, of which 64 KiB may wait.
pub(crate) const STREAM_BYTES: u64 = 384 * 1024;
/// The limit of a stream's send buffer in the kernel, as the kernel counts, where its device has no memory left. Smaller:
/// less in a round trip.
const SEND_BUFFER_MIN: u64 = 128 * 1024; // a guess: two batches with what the kernel adds
/// Bytes of packets that are given to the connection at once.
const MESSAGE_PACKET_BYTES: usize = 64 * 1024;

/// The worker of a server that has a stream, by its index; 0 where there is only one.
///
/// It is locked before the worker is, so that the stream's task never looks for the stream where it is no longer.
#[derive(Default)]
pub(crate) struct StreamWorker(Mutex<u16>);

impl StreamWorker {
    /// The worker's index; the worker keeps the stream until this is dropped.
    pub(crate) fn lock(&self) -> MutexGuard<'_, u16> {
        self.0.lock()
    }
}

/// Waiting packets of one size, back to back.
pub(crate) struct QueuedBatch {
    pub(crate) bytes: Vec<u8>,
    pub(crate) stride: usize,
    is_relayed: bool,
}

/// The stream is closed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamClosed;

/// A stream as seen by the engine.
pub(crate) struct StreamQueue {
    link: LinkId,
    batches: VecDeque<QueuedBatch>,
    /// Bytes that wait or are being written.
    bytes: usize,
    /// Bytes of relayed packets among those that wait or are being written.
    relayed: usize,
    /// Whether what is being written is relayed packets.
    writes_relayed: bool,
    /// The memory of the stream, charged to whoever opened it; counts nothing on a device.
    memory: MemoryCharge,
    /// The limit of the connection's send buffer in the kernel, charged to the device that uses a server's stream.
    in_kernel: MemoryCharge,
    /// Bytes that the core is asked for at once. Two batches may wait or be written: with more, bytes stay
    /// in queues; with fewer, the kernel waits for this process.
    batch: usize,
    /// Whether the stream ends when what waits is written.
    closing: bool,
    signals: StreamSignals,
    /// The TCP peer.
    peer: SocketAddr,
}

impl StreamQueue {
    /// Asks the core for another batch if there is room for it. While anything waits, what is written asks
    /// again; when nothing does, one batch always has room.
    fn ask(&self, core: &mut Endpoint, stream: StreamPathId) {
        let fits = self.bytes == 0 || self.memory.room() >= self.batch as u64;
        if fits && self.own_bytes() < 2 * self.batch {
            core.on_stream_room(stream, self.batch as u64);
        }
    }

    /// Bytes of the stream's own sessions that wait or are being written: relayed packets take no room from them.
    fn own_bytes(&self) -> usize {
        self.bytes - self.relayed
    }

    /// R-RELAY-8: how many of these bytes of relayed packets may wait, in whole packets.
    fn relayed_fit(&self, bytes: usize, stride: usize) -> usize {
        let room = (2 * self.batch).saturating_sub(self.relayed);
        bytes.min(room / stride * stride)
    }

    /// Appends packets of one size, if there is memory for them.
    fn push(&mut self, bytes: &[u8], stride: usize, is_relayed: bool) -> bool {
        if self.bytes + bytes.len() > QUEUE_BYTES_MAX {
            // Dropped as by any full queue: later packets overtake it.
            return false;
        }
        let needed = STREAM_BYTES + (self.bytes + bytes.len()) as u64;
        if self.bytes == 0 {
            // A stream on which nothing waits gets one batch, or the core would never hear of room again.
            self.memory.resize(needed);
        } else if !self.memory.try_resize(needed) {
            return false;
        }
        self.bytes += bytes.len();
        if is_relayed {
            self.relayed += bytes.len();
        }
        match self.batches.back_mut() {
            // Small packets of one size share a message.
            Some(last)
                if last.stride == stride
                    && last.is_relayed == is_relayed
                    && last.bytes.len() % stride == 0
                    && last.bytes.len() + bytes.len() <= MESSAGE_PACKET_BYTES =>
            {
                last.bytes.extend_from_slice(bytes);
            }
            _ => self.batches.push_back(QueuedBatch {
                bytes: bytes.to_vec(),
                stride,
                is_relayed,
            }),
        }
        self.signals.ready.notify_one();
        self.signals.queued.notify_one();
        true
    }

    /// Takes the next packets to write, after `written` bytes were.
    fn pop(&mut self, written: usize) -> Option<QueuedBatch> {
        self.bytes -= written;
        if self.writes_relayed {
            self.relayed -= written;
        }
        (self.memory).resize(STREAM_BYTES + self.bytes as u64);
        let next = self.batches.pop_front();
        self.writes_relayed = next.as_ref().is_some_and(|next| next.is_relayed);
        next
    }
}

/// What a stream's task waits for.
#[derive(Clone, Default)]
pub(crate) struct StreamSignals {
    /// There is something to write, or the stream is closing.
    pub(crate) ready: Arc<Notify>,
    /// Something was queued to be sent.
    pub(crate) queued: Arc<Notify>,
    /// The stream is closing: it may write for a moment.
    pub(crate) closing: Arc<Notify>,
    /// The stream must end at once.
    pub(crate) dropped: Arc<Notify>,
    /// The worker that has the stream.
    pub(crate) worker: Arc<StreamWorker>,
}

/// All streams of a host.
#[derive(Default)]
pub(crate) struct StreamQueues {
    next: u64,
    queues: BTreeMap<StreamPathId, StreamQueue>,
    /// The link number of all streams of a server.
    pub(crate) served: Option<LinkId>,
}

impl StreamQueues {
    /// Queues packets for a stream, and reports to the core whether there is room for more.
    pub(crate) fn enqueue(
        &mut self,
        core: &mut Endpoint,
        stream: StreamPathId,
        bytes: &[u8],
        stride: usize,
    ) {
        let Some(queue) = self.queues.get_mut(&stream).filter(|q| !q.closing) else {
            return;
        };
        if queue.push(bytes, stride, false) {
            queue.ask(core, stream);
        }
    }

    /// Queues relayed packets of one size for a stream: as many as its connection takes soon. Others are dropped, as by
    /// the socket of a relay.
    pub(crate) fn enqueue_relayed(&mut self, stream: StreamPathId, bytes: &[u8], stride: usize) {
        let Some(queue) = self.queues.get_mut(&stream).filter(|q| !q.closing) else {
            return;
        };
        let fitting = queue.relayed_fit(bytes.len(), stride);
        if fitting > 0 {
            queue.push(&bytes[..fitting], stride, true);
        }
    }

    /// Closes the streams of a link when what waits there is written.
    pub(crate) fn close_link(&mut self, link: LinkId) {
        for queue in self.queues.values_mut().filter(|q| q.link == link) {
            queue.closing = true;
            queue.signals.ready.notify_one();
            queue.signals.closing.notify_one();
        }
    }

    /// Ends the streams of a link at once: not a byte more is given to the kernel.
    pub(crate) fn drop_link(&mut self, link: LinkId) {
        self.queues.retain(|_, queue| {
            if queue.link == link {
                queue.signals.dropped.notify_one();
            }
            queue.link != link
        });
    }

    /// Closes a stream after a moment, in which what its sessions still say is written.
    pub(crate) fn close_soon(&self, stream: StreamPathId) {
        if let Some(queue) = self.queues.get(&stream) {
            queue.signals.closing.notify_one();
        }
    }

    /// Closes all streams, because the host stops.
    pub(crate) fn close_all(&mut self) {
        for queue in self.queues.values_mut() {
            queue.closing = true;
            queue.signals.ready.notify_one();
            queue.signals.closing.notify_one();
        }
    }

    /// The next packets to write, after `written` bytes were, if the connection may have `waiting` bytes
    /// wait. None: nothing waits.
    ///
    /// # Errors
    /// The stream is closed, and all of it is written.
    pub(crate) fn next_batch(
        &mut self,
        core: &mut Endpoint,
        stream: StreamPathId,
        written: usize,
        waiting: usize,
    ) -> Result<Option<QueuedBatch>, StreamClosed> {
        let queue = self.queues.get_mut(&stream).ok_or(StreamClosed)?;
        // Two batches wait here, beside as much in the connection and in the kernel.
        queue.batch = (waiting / 2).clamp(BATCH_BYTES_MIN, BATCH_BYTES_MAX);
        let next = queue.pop(written);
        if next.is_none() && queue.closing {
            return Err(StreamClosed);
        }
        queue.ask(core, stream);
        Ok(next)
    }

    /// Sets the memory of a new stream, which is charged until the stream is forgotten.
    pub(crate) fn set_memory(&mut self, stream: StreamPathId, memory: MemoryCharge) {
        if let Some(queue) = self.queues.get_mut(&stream) {
            queue.memory = memory;
        }
    }

    /// Charges the memory of a stream to another key. Returns false if that has no room for it.
    pub(crate) fn charge_to(&mut self, stream: StreamPathId, account: &MemoryAccount) -> bool {
        let Some(queue) = self.queues.get_mut(&stream) else {
            return false;
        };
        let mut memory = account.charge();
        let fits = memory.try_resize(queue.memory.bytes());
        if fits {
            queue.memory = memory;
            queue.in_kernel = account.charge();
        }
        fits
    }

    /// Charges the limit of a stream's send buffer in the kernel, which enlarges it as the peer acknowledges. Returns the
    /// limit to set instead if the device has no room for that. Nothing is charged before a device uses the stream.
    pub(crate) fn charge_send_buffer(&mut self, stream: StreamPathId, limit: u64) -> Option<u64> {
        let charge = &mut self.queues.get_mut(&stream)?.in_kernel;
        let more = limit.saturating_sub(charge.bytes());
        if !charge.is_counted() || more == 0 {
            return None;
        }
        // Half of the room is left for the sessions that use the stream.
        if charge.try_resize_beside(limit, more) {
            return None;
        }
        let held = charge.bytes().max(SEND_BUFFER_MIN);
        charge.resize(held);
        Some(held)
    }

    /// Charges the limit that the kernel has set for a stream's send buffer.
    pub(crate) fn recharge_send_buffer(&mut self, stream: StreamPathId, limit: u64) {
        if let Some(queue) = self.queues.get_mut(&stream) {
            queue.in_kernel.resize(limit);
        }
    }

    /// Forgets a stream whose task ended. Returns the charge for what the kernel still holds of it.
    pub(crate) fn remove(&mut self, stream: StreamPathId) -> Option<MemoryCharge> {
        let queue = self.queues.remove(&stream)?;
        Some(queue.in_kernel)
    }

    /// The number of open streams.
    pub(crate) fn len(&self) -> usize {
        self.queues.len()
    }

    /// The TCP peer of a stream, for logs.
    pub(crate) fn peer(&self, address: &SocketAddr) -> Option<SocketAddr> {
        let stream = StreamPathId::of(address)?;
        self.queues.get(&stream).map(|queue| queue.peer)
    }

    /// The record of which worker has a stream, if this one has it.
    pub(crate) fn worker_of(&self, stream: StreamPathId) -> Option<Arc<StreamWorker>> {
        Some(self.queues.get(&stream)?.signals.worker.clone())
    }

    /// Takes a stream out, for another worker.
    pub(crate) fn take(&mut self, stream: StreamPathId) -> Option<StreamQueue> {
        self.queues.remove(&stream)
    }

    /// Takes a stream over from another worker. All workers number their sockets in the same way, and the streams of the
    /// server after them.
    pub(crate) fn put(&mut self, stream: StreamPathId, queue: StreamQueue) {
        self.served = Some(queue.link);
        self.queues.insert(stream, queue);
    }

    pub(crate) fn insert(
        &mut self,
        link: LinkId,
        peer: SocketAddr,
    ) -> (StreamPathId, StreamSignals) {
        let stream = StreamPathId(self.next);
        self.next += 1;
        let signals = StreamSignals::default();
        let queue = StreamQueue {
            link,
            batches: VecDeque::new(),
            bytes: 0,
            relayed: 0,
            writes_relayed: false,
            memory: MemoryCharge::default(),
            in_kernel: MemoryCharge::default(),
            batch: BATCH_BYTES_MAX,
            closing: false,
            signals: signals.clone(),
            peer,
        };
        self.queues.insert(stream, queue);
        (stream, signals)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use d2tp_session::{MemoryPool, PublicKey};

    use super::*;

    /// A stream that a device with this memory uses.
    fn stream_of(account: &MemoryAccount) -> (StreamQueues, StreamPathId) {
        let mut streams = StreamQueues::default();
        let peer = SocketAddr::from(([127, 0, 0, 1], 1));
        let (stream, _) = streams.insert(LinkId(0), peer);
        assert!(streams.charge_to(stream, account));
        (streams, stream)
    }

    #[test]
    fn a_send_buffer_is_charged_as_it_grows_and_held_where_half_of_the_room_would_not_be_left() {
        let pool = MemoryPool::new(10_000_000);
        // A key has a fifth of what others leave.
        let account = pool.account(PublicKey([1; 32]));
        let (mut streams, stream) = stream_of(&account);
        assert_eq!(streams.charge_send_buffer(stream, 300_000), None);
        assert_eq!(streams.charge_send_buffer(stream, 700_000), None);
        assert_eq!(account.used(), 700_000);
        // 1.5 MB are left; what it would grow by is more than half of that.
        assert_eq!(streams.charge_send_buffer(stream, 2_000_000), Some(700_000));
        streams.recharge_send_buffer(stream, 699_392);
        assert_eq!(account.used(), 699_392);
        assert_eq!(pool.refusals(), 0, "nobody was refused anything");
        let in_kernel = streams.remove(stream);
        assert_eq!(account.used(), 699_392, "until the peer has taken it");
        drop(in_kernel);
        assert_eq!(account.used(), 0);
    }

    #[test]
    fn a_send_buffer_without_any_room_is_the_smallest_and_one_that_nobody_pays_for_is_left_alone() {
        let pool = MemoryPool::new(10_000_000);
        let account = pool.account(PublicKey([1; 32]));
        let mut others = account.charge();
        others.resize(account.room());
        let (mut streams, stream) = stream_of(&account);
        let held = streams.charge_send_buffer(stream, 2_000_000);
        assert_eq!(held, Some(SEND_BUFFER_MIN));
        // A device's own stream.
        let (own, _) = streams.insert(LinkId(1), SocketAddr::from(([127, 0, 0, 1], 2)));
        assert_eq!(streams.charge_send_buffer(own, 2_000_000), None);
    }

    // R-RELAY-8
    #[test]
    fn relayed_packets_wait_up_to_what_the_stream_takes_soon_and_leave_its_sessions_their_room() {
        let pool = MemoryPool::new(100_000_000);
        let (mut streams, stream) = stream_of(&pool.account(PublicKey([1; 32])));
        let packets = vec![7; 200 * 1_209];
        streams.enqueue_relayed(stream, &packets, 1_209);
        streams.enqueue_relayed(stream, &packets, 1_209);
        let queue = &streams.queues[&stream];
        let most = 2 * BATCH_BYTES_MAX;
        assert!(queue.bytes <= most && queue.bytes + 1_209 > most);
        assert_eq!(queue.bytes % 1_209, 0, "whole packets");
        assert_eq!(queue.own_bytes(), 0);
        // Those of the stream's own sessions have their room beside them.
        let queue = streams.queues.get_mut(&stream).expect("it is open");
        assert!(queue.push(&packets[..60_000], 1_200, false));
        assert_eq!(queue.own_bytes(), 60_000);
        // What is written makes room for its own kind.
        let mut written = 0;
        while let Some(batch) = queue.pop(written) {
            written = batch.bytes.len();
        }
        assert_eq!((queue.bytes, queue.relayed), (0, 0));
        assert_eq!(queue.relayed_fit(packets.len(), 1_209), 108 * 1_209);
        // A slow stream holds less.
        queue.batch = BATCH_BYTES_MIN;
        assert_eq!(queue.relayed_fit(packets.len(), 1_209), 15 * 1_209);
        assert_eq!(queue.relayed_fit(100, 1_209), 100);
    }

    #[test]
    fn workers_that_charge_a_key_at_once_do_not_exceed_its_limit_together() {
        const ROUNDS: usize = 20_000;
        let pool = MemoryPool::new(1_000_000);
        let room = pool.account(PublicKey([1; 32])).room();
        let arrived = AtomicU64::new(0);
        let granted = AtomicU64::new(0);
        let charge_in_rounds = || {
            let account = pool.account(PublicKey([1; 32]));
            // Waits until both threads have come as far.
            let meet = |times: usize| {
                arrived.fetch_add(1, Ordering::SeqCst);
                while arrived.load(Ordering::SeqCst) < 2 * times as u64 {
                    std::thread::yield_now();
                }
            };
            for round in 0..ROUNDS {
                meet(2 * round + 1);
                let mut charge = account.charge();
                granted.fetch_add(u64::from(charge.try_resize(room)), Ordering::SeqCst);
                meet(2 * round + 2);
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(charge_in_rounds);
            scope.spawn(charge_in_rounds);
        });
        assert_eq!(granted.into_inner(), ROUNDS as u64);
    }
}
