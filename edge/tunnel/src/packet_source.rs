//! Packets for a session, which takes them as it has room.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use d2tp_driver::{Connection, DatagramSource, MemoryCharge, SourcedDatagram};
use parking_lot::Mutex;
use tokio::io::{AsyncWrite, AsyncWriteExt as _};
use tokio::sync::Notify;
use tokio::time::sleep;

use crate::PACKET_CONTEXT;
use crate::capsules::packet_capsule;
use crate::packet_pieces::split;
use crate::packet_queue::{PacketQueue, PacketQueueCounts, WaitingPacket};

/// The most that packets of one session occupy while they wait: 60 ms of 200 Mb/s.
const QUEUE_BYTES_MAX: usize = 1536 * 1024; // a guess: several bursts of 64 KiB that a kernel hands over at once

/// The bytes of capsules that are written and not acknowledged at most: 9 Mb/s at a round trip of 60 ms.
const CAPSULES_AHEAD_MAX: u64 = 64 * 1024; // a guess: half a second at 1 Mb/s

/// How often it is asked whether packets that wait may leave as datagrams.
const LOOK_EVERY: Duration = Duration::from_millis(20); // a guess: some packets of a call

/// Packets that wait for room in a session, in the order of [`PacketQueue`].
#[derive(Debug)]
pub struct PacketSource {
    state: Mutex<SourceState>,
    /// Notified when packets were added.
    added: Notify,
    too_long: AtomicU64,
}

#[derive(Debug)]
struct SourceState {
    queue: PacketQueue,
    /// The second piece of a packet that was split, and for how long it may still wait.
    second: Option<(Bytes, Duration)>,
    /// The number of the next packet that is split.
    number: u16,
    /// The memory of the packets.
    charge: MemoryCharge,
}

impl PacketSource {
    /// A source whose packets are charged to `charge`.
    pub fn new(charge: MemoryCharge) -> PacketSource {
        PacketSource {
            state: Mutex::new(SourceState {
                queue: PacketQueue::new(QUEUE_BYTES_MAX),
                second: None,
                number: 0,
                charge,
            }),
            added: Notify::new(),
            too_long: AtomicU64::new(0),
        }
    }

    /// Adds packets, and lets `connection`, whose source this is, send them.
    pub fn push<'a>(&self, connection: &Connection, packets: impl IntoIterator<Item = &'a [u8]>) {
        let mut state = self.state.lock();
        let was_empty = state.is_empty();
        let now = Instant::now();
        for packet in packets {
            state.queue.push(now, packet);
        }
        while !state.try_charge() && state.queue.drop_from_longest(now) {}
        let has_more = was_empty && !state.is_empty();
        drop(state);
        if has_more {
            connection.datagrams_ready();
            self.added.notify_one();
        }
    }

    /// Writes packets to the tunnel's own flow, whose id is `id`, while metered links are all that `connection` has: as far
    /// as the flow is granted, and only so much ahead that a call waits for no long queue. Ends when the flow does.
    ///
    /// # Errors
    /// The flow's.
    pub async fn write_capsules(
        &self,
        connection: &Connection,
        id: u64,
        flow: &mut (impl AsyncWrite + Unpin),
    ) -> io::Result<()> {
        loop {
            while self.holds_packets() {
                let has_room = || {
                    let ahead = connection.unacknowledged(id);
                    ahead.is_some_and(|ahead| ahead < CAPSULES_AHEAD_MAX)
                };
                if !connection.is_metered() || !has_room() {
                    sleep(LOOK_EVERY).await;
                    continue;
                }
                let waiting = {
                    let mut state = self.state.lock();
                    let waiting = state.pop(Instant::now());
                    state.try_charge();
                    waiting
                };
                if let Some(WaitingPacket { packet, .. }) = waiting {
                    flow.write_all(&packet_capsule(&packet)).await?;
                    flow.flush().await?;
                }
            }
            self.added.notified().await;
        }
    }

    /// Whether packets wait that are not too old.
    fn holds_packets(&self) -> bool {
        let mut state = self.state.lock();
        state.queue.forget_expired(Instant::now());
        state.try_charge();
        !state.is_empty()
    }

    /// Drops everything that waits.
    pub fn clear(&self) {
        let mut state = self.state.lock();
        state.queue.clear();
        state.second = None;
        state.try_charge();
    }

    /// What happened to packets so far, and how many did not fit the session's paths.
    pub fn counts(&self) -> (PacketQueueCounts, u64) {
        let counts = self.state.lock().queue.counts();
        (counts, self.too_long.load(Ordering::Relaxed))
    }
}

impl SourceState {
    fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.second.is_none()
    }

    /// The next whole packet.
    fn pop(&mut self, now: Instant) -> Option<WaitingPacket> {
        // Its first piece went another way, or nowhere.
        self.second = None;
        self.queue.pop(now)
    }

    /// The next datagram, of at most `max` bytes. Counts packets for which even two are too small in `too_long`.
    fn next_datagram(
        &mut self,
        now: Instant,
        max: usize,
        too_long: &AtomicU64,
    ) -> Option<(Bytes, Duration)> {
        if let Some(second) = self.second.take_if(|(second, _)| second.len() <= max) {
            return Some(second);
        }
        loop {
            let WaitingPacket { packet, left } = self.pop(now)?;
            self.number = self.number.wrapping_add(1);
            match split(packet.freeze(), max, self.number) {
                Ok((first, second)) => {
                    self.second = second.map(|second| (second, left));
                    return Some((first, left));
                }
                Err(_) => drop(too_long.fetch_add(1, Ordering::Relaxed)),
            }
        }
    }

    /// Charges what the packets occupy now. False if there is no room for it.
    fn try_charge(&mut self) -> bool {
        self.charge.try_resize(self.queue.bytes() as u64)
    }
}

impl DatagramSource for PacketSource {
    fn take(&self, max: usize, count: usize, datagrams: &mut Vec<SourcedDatagram>) {
        let mut state = self.state.lock();
        let now = Instant::now();
        let taken = std::iter::from_fn(|| state.next_datagram(now, max, &self.too_long));
        datagrams.extend(taken.take(count).map(|(bytes, expiry)| SourcedDatagram {
            context: PACKET_CONTEXT,
            bytes,
            expiry,
        }));
        state.try_charge();
    }
}
