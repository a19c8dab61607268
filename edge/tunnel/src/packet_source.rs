//! Packets for a session, which takes them as it has room.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use d2tp_driver::{Connection, DatagramSource, MemoryCharge, RepairOffer, SourcedDatagram};
use parking_lot::{Mutex, RwLock};
use tokio::io::{AsyncWrite, AsyncWriteExt as _};
use tokio::sync::Notify;
use tokio::time::sleep;

use crate::PACKET_CONTEXT;
use crate::capsules::packet_capsule;
use crate::header_compression::{HeaderContext, is_compressed};
use crate::metered_filter::MeteredFilter;
use crate::packet_pieces::{fits_two, split};
use crate::packet_queue::{PacketQueue, PacketQueueCounts, WaitingPacket};
use crate::tcp_hold::{BlockedPacket, TcpHold};
use crate::tcp_segment::is_plain_ack;

/// The most that packets of one session occupy while they wait: 60 ms of 200 Mb/s.
const QUEUE_BYTES_MAX: usize = 1536 * 1024; // a guess: several bursts of 64 KiB that a kernel hands over at once

/// The bytes of capsules that are written and not acknowledged at most: 9 Mb/s at a round trip of 60 ms.
const CAPSULES_AHEAD_MAX: u64 = 64 * 1024; // a guess: half a second at 1 Mb/s

/// The bytes of capsules beyond those that may be in flight: two packets. What is written waits in the flow for its turn, and a
/// call behind a download then waits for all of it. A path that has just come up lets 12 kB be in flight.
const CAPSULES_WAITING_MAX: u64 = 3 * 1024;

/// The interval at which waiting packets are checked for whether they may leave as capsules instead of datagrams.
const LOOK_EVERY: Duration = Duration::from_millis(20); // a guess: one packet of a call

/// The interval at which it is checked whether the flow has room for the next capsule.
const ROOM_EVERY: Duration = Duration::from_millis(5); // a guess: a quarter of what lies between packets of a call

/// The interval at which held packets are checked for whether they may leave, during an outage, or again. They do not expire.
const LOOK_IN_OUTAGE_EVERY: Duration = Duration::from_millis(500); // a guess: seldom enough for a battery

/// How long a packet of TCP that leaves after an outage may wait.
const RELEASED_EXPIRY: Duration = Duration::from_millis(500); // as long as others wait in the queue

/// How much longer than one and a half round trips of another link a repair over it may take until it counts as lost. Higher: a
/// connection waits longer where that link loses. Lower: more is sent twice.
const REPAIR_SLACK: Duration = Duration::from_millis(50); // a guess: a packet of 1,420 bytes takes 28 ms at 0.4 Mb/s

/// How long a released packet of TCP may wait while only slow paths carry, which take some packets at once for later.
const SLOW_EXPIRY: Duration = Duration::from_secs(10); // a guess: four packets of 1,420 bytes take a second at 48 kb/s

/// Segments of end-to-end TCP that were lost and left again from copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketRepairCounts {
    /// Segments that left again by the usual way.
    pub usual: u64,
    /// Segments that left again over another link.
    pub elsewhere: u64,
    /// The bytes of segments that left again over another link which is metered.
    pub metered_bytes: u64,
}

/// Packets that wait for room in a session, in the order of [`PacketQueue`]. Packets of TCP that were under way when the
/// session lost its paths leave again when there is one.
#[derive(Debug)]
pub struct PacketSource {
    state: Mutex<SourceState>,
    /// Notified when packets were added.
    added: Notify,
    too_long: AtomicU64,
    /// Which packets may leave over metered links; none: all.
    filter: Option<Arc<dyn MeteredFilter>>,
    /// How headers may be compressed in both directions; none: not at all.
    headers: RwLock<Option<HeaderContext>>,
}

#[derive(Debug)]
struct SourceState {
    queue: PacketQueue,
    /// Packets of TCP that were not acknowledged.
    hold: TcpHold,
    /// Whether the last packet that left was one that had been held.
    was_released: bool,
    /// The second piece of a packet that was split, and for how long it may still wait.
    second: Option<(Bytes, Duration)>,
    /// The number of the next packet that is split.
    number: u16,
    /// The tunnel's own flow, whose grants pay for repairs on metered links.
    flow: Option<u64>,
    repairs: PacketRepairCounts,
    /// Whether only slow paths carry, so that headers are compressed if both ends do that.
    is_narrow: bool,
    /// Bytes of headers that were not sent.
    header_bytes_saved: u64,
    /// The memory of the packets.
    charge: MemoryCharge,
}

impl PacketSource {
    /// A source whose packets are charged to `charge`.
    pub fn new(charge: MemoryCharge) -> PacketSource {
        PacketSource::with_filter(charge, None)
    }

    /// A source whose packets leave over metered links if this filter admits them.
    pub fn with_filter(
        charge: MemoryCharge,
        filter: Option<Arc<dyn MeteredFilter>>,
    ) -> PacketSource {
        PacketSource {
            state: Mutex::new(SourceState {
                queue: PacketQueue::new(QUEUE_BYTES_MAX),
                hold: TcpHold::default(),
                was_released: false,
                second: None,
                number: 0,
                flow: None,
                repairs: PacketRepairCounts::default(),
                is_narrow: false,
                header_bytes_saved: 0,
                charge,
            }),
            added: Notify::new(),
            too_long: AtomicU64::new(0),
            filter,
            headers: RwLock::default(),
        }
    }

    /// Compresses headers of packets on slow paths from now on, if the other end does that too, and not otherwise.
    pub fn set_headers(&self, headers: Option<HeaderContext>) {
        *self.headers.write() = headers;
    }

    /// The packet that came from the other end, with whole headers. What is no packet stays what it is.
    pub fn expanded(&self, packet: Bytes) -> Bytes {
        if !is_compressed(&packet) {
            return packet;
        }
        let headers = *self.headers.read();
        let expanded = headers.and_then(|headers| headers.expand(&packet));
        expanded.unwrap_or(packet)
    }

    /// Bytes of headers that were not sent so far, because they were compressed.
    pub fn header_bytes_saved(&self) -> u64 {
        self.state.lock().header_bytes_saved
    }

    /// Lets lost segments leave over other links than most packets, over metered ones as far as `flow` is granted.
    pub fn repair_elsewhere(&self, flow: u64) {
        self.state.lock().flow = Some(flow);
    }

    /// Segments that were lost and left again so far.
    pub fn repair_counts(&self) -> PacketRepairCounts {
        self.state.lock().repairs
    }

    /// Adds packets, and lets `connection`, whose source this is, send them. Returns answers for their senders: in an
    /// outage the window of a TCP connection is closed.
    pub fn push<'a>(
        &self,
        connection: &Connection,
        packets: impl IntoIterator<Item = &'a [u8]>,
    ) -> Vec<Bytes> {
        // What waited before it is asked again when it leaves.
        let filter = self.filter.as_ref().filter(|_| connection.is_metered());
        let mut state = self.state.lock();
        let was_empty = state.is_empty();
        let now = Instant::now();
        let mut answers = Vec::new();
        for packet in packets {
            if filter.is_some_and(|filter| !filter.admits(packet)) {
                continue;
            }
            if !state.hold.holds_senders() {
                if !state.hold.take_repeated(now, packet) {
                    state.queue.push(now, packet);
                }
                continue;
            }
            let kept = Bytes::copy_from_slice(packet);
            match state.hold.on_held(now, &kept) {
                BlockedPacket::Passed => state.queue.push(now, packet),
                BlockedPacket::Held(answer) => answers.extend(answer),
            }
        }
        state.fit_charge(now);
        let has_more = was_empty && !state.is_empty();
        drop(state);
        if has_more {
            connection.datagrams_ready();
            self.added.notify_one();
        }
        answers
    }

    /// Follows packets that came from `connection`, whose source this is, for the kernel: their ACKs. Takes out what their
    /// senders need not know, because what was lost is sent again from here.
    pub fn on_received(&self, connection: &Connection, packets: &mut Vec<Bytes>) {
        let mut state = self.state.lock();
        let was_empty = state.is_empty();
        let now = Instant::now();
        packets.retain_mut(|packet| {
            let passed = state.hold.on_received(now, std::mem::take(packet));
            passed.map(|passed| *packet = passed).is_some()
        });
        let has_more = was_empty && !state.is_empty();
        let has_work = state.has_work();
        drop(state);
        if has_more {
            connection.datagrams_ready();
        }
        if has_work {
            self.added.notify_one();
        }
    }

    /// Writes packets to the tunnel's own flow, whose id is `id`, while metered links are all that `connection` has: as far
    /// as the flow is granted, and only so much ahead that a call waits for no long queue. Meanwhile it has the session take
    /// packets of TCP that are due to be sent again. Ends when the flow does.
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
            while self.has_work() {
                let window = connection.metered_window();
                let has_room = window.is_some_and(|window| {
                    let ahead_max = CAPSULES_AHEAD_MAX.min(window + CAPSULES_WAITING_MAX);
                    let ahead = connection.unacknowledged(id);
                    ahead.is_some_and(|ahead| ahead < ahead_max)
                });
                if let Some(packet) = has_room.then(|| self.next_in_capsule()).flatten() {
                    flow.write_all(&packet_capsule(&packet)).await?;
                    flow.flush().await?;
                    continue;
                }
                if self.is_due() {
                    connection.datagrams_ready();
                }
                match (self.is_queue_empty(), window) {
                    // Only what may have to be sent again is left, or what has gone as datagrams meanwhile.
                    (true, _) => tokio::select! {
                        () = self.added.notified() => {}
                        () = sleep(LOOK_IN_OUTAGE_EVERY) => {}
                    },
                    (false, Some(_)) => sleep(ROOM_EVERY).await,
                    (false, None) => sleep(LOOK_EVERY).await,
                }
            }
            self.added.notified().await;
        }
    }

    /// The next packet that leaves in the tunnel's own flow.
    fn next_in_capsule(&self) -> Option<Bytes> {
        let mut state = self.state.lock();
        let now = Instant::now();
        state.hold.unblock(now);
        let filter = self.filter.as_ref();
        let admits = |packet: &Bytes| filter.is_none_or(|filter| filter.admits(packet));
        let mut popped = std::iter::from_fn(|| state.pop(now).map(|(packet, _)| packet));
        let packet = popped.find(admits);
        let packet = match state.was_released {
            true => packet,
            false => packet.map(|packet| state.hold.on_leaving_reliably(now, packet)),
        };
        state.try_charge();
        if let (Some(filter), Some(packet)) = (filter, &packet) {
            filter.on_left(packet, true);
        }
        packet
    }

    /// Whether packets of TCP are due to be sent again, for which nobody asks if nothing else happens.
    fn is_due(&self) -> bool {
        let look_at = self.state.lock().hold.look_at();
        look_at.is_some_and(|at| at <= Instant::now())
    }

    /// Whether packets wait that are not too old, or may have to be sent again.
    fn has_work(&self) -> bool {
        let mut state = self.state.lock();
        state.queue.forget_expired(Instant::now());
        state.try_charge();
        state.has_work()
    }

    fn is_queue_empty(&self) -> bool {
        self.state.lock().queue.is_empty()
    }

    /// Drops everything that waits.
    pub fn clear(&self) {
        let mut state = self.state.lock();
        state.queue.clear();
        state.hold.clear();
        state.second = None;
        state.try_charge();
    }

    /// What happened to packets so far, and how many did not fit the session's paths.
    pub fn counts(&self) -> (PacketQueueCounts, u64) {
        let counts = self.state.lock().queue.counts();
        (counts, self.too_long.load(Ordering::Relaxed))
    }
}

/// The time in which a repair that leaves over another link is reported as received, or is lost.
fn repair_expiry(offer: &RepairOffer) -> Duration {
    let round_trip = Duration::from(offer.round_trip);
    round_trip + round_trip / 2 + REPAIR_SLACK
}

impl SourceState {
    fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.second.is_none() && !self.hold.has_waiting()
    }

    fn has_work(&self) -> bool {
        !self.is_empty() || self.hold.look_at().is_some()
    }

    /// The next whole packet: of those that were held in turn with others.
    fn pop(&mut self, now: Instant) -> Option<(Bytes, Duration)> {
        // Its first piece went another way, or nowhere.
        self.second = None;
        let queued = |state: &mut SourceState| {
            let mut dropped = Vec::new();
            let popped = state.queue.pop(now, &mut dropped);
            for packet in dropped {
                state.hold.on_dropped(now, &packet.freeze());
            }
            let WaitingPacket { packet, left } = popped?;
            state.was_released = false;
            Some((packet.freeze(), left))
        };
        let released = |state: &mut SourceState| {
            let packet = state.hold.next_released()?;
            state.repairs.usual += 1;
            state.was_released = true;
            let expiry = match state.hold.is_slow() {
                true => SLOW_EXPIRY,
                false => RELEASED_EXPIRY,
            };
            Some((packet, expiry))
        };
        match self.was_released {
            true => queued(self).or_else(|| released(self)),
            false => released(self).or_else(|| queued(self)),
        }
    }

    /// The next datagram, of at most `max` bytes, for how long it may wait, and whether it is a plain ACK. Counts packets for which
    /// even two are too small in `too_long`.
    fn next_datagram(
        &mut self,
        now: Instant,
        max: usize,
        too_long: &AtomicU64,
        filter: Option<&dyn MeteredFilter>,
        headers: Option<HeaderContext>,
    ) -> Option<(Bytes, Duration, bool)> {
        if let Some((second, left)) = self.second.take_if(|(second, _)| second.len() <= max) {
            return Some((second, left, false));
        }
        loop {
            let (mut packet, left) = self.pop(now)?;
            if !self.was_released {
                packet = self.hold.on_leaving(now, packet);
            }
            if let Some(filter) = filter {
                filter.on_left(&packet, false);
            }
            self.number = self.number.wrapping_add(1);
            let acknowledges = is_plain_ack(&packet);
            let packet = self.compressed(packet, headers);
            match split(packet, max, self.number) {
                Ok((first, second)) => {
                    let acknowledges = acknowledges && second.is_none();
                    self.second = second.map(|second| (second, left));
                    return Some((first, left, acknowledges));
                }
                Err(_) => drop(too_long.fetch_add(1, Ordering::Relaxed)),
            }
        }
    }

    /// The packet as it is sent on the paths that carry now.
    fn compressed(&mut self, packet: Bytes, headers: Option<HeaderContext>) -> Bytes {
        let headers = headers.filter(|_| self.is_narrow);
        match headers.and_then(|headers| headers.compress(&packet)) {
            Some(compressed) => {
                self.header_bytes_saved += (packet.len() - compressed.len()) as u64;
                compressed
            }
            None => packet,
        }
    }

    /// Has packets of TCP that wait in the queue held.
    fn hold_queued(&mut self, now: Instant) {
        for packet in self.queue.take_tcp() {
            let packet = packet.freeze();
            // Its sender is answered when it sends the next one.
            if self.hold.on_held(now, &packet) == BlockedPacket::Passed {
                self.queue.push(now, &packet);
            }
        }
        self.try_charge();
    }

    /// Charges what the packets occupy now. False if there is no room for it.
    fn try_charge(&mut self) -> bool {
        let bytes = self.queue.bytes() + self.hold.memory();
        self.charge.try_resize(bytes as u64)
    }

    /// Charges what the packets occupy now, and drops some if there is no room: first of those that have left.
    fn fit_charge(&mut self, now: Instant) {
        while !self.try_charge()
            && (self.hold.forget_largest() || self.queue.drop_from_longest(now))
        {}
    }
}

impl DatagramSource for PacketSource {
    fn repair_flow(&self) -> Option<u64> {
        let mut state = self.state.lock();
        state.hold.unblock(Instant::now());
        let flow = state.flow;
        flow.filter(|_| state.hold.has_repair())
    }

    fn take_repair(&self, offer: &RepairOffer, datagrams: &mut Vec<SourcedDatagram>) {
        let mut state = self.state.lock();
        let now = Instant::now();
        let filter = self.filter.as_deref().filter(|_| offer.is_gated);
        let expiry = repair_expiry(offer);
        let is_sooner = offer.round_trip <= offer.usual_round_trip;
        let packet = state.hold.next_repair(now + expiry, is_sooner, |packet| {
            fits_two(packet.len(), offer.datagram_max)
                && filter.is_none_or(|filter| filter.lets_pay(packet))
        });
        let Some(packet) = packet else {
            return;
        };
        state.repairs.elsewhere += 1;
        state.repairs.metered_bytes += u64::from(offer.is_gated) * packet.len() as u64;
        if let Some(filter) = &self.filter {
            filter.on_left(&packet, offer.is_gated);
        }
        state.number = state.number.wrapping_add(1);
        let pieces = split(packet, offer.datagram_max, state.number);
        let pieces = pieces
            .into_iter()
            .flat_map(|(first, second)| [Some(first), second]);
        datagrams.extend(pieces.flatten().map(|bytes| SourcedDatagram {
            context: PACKET_CONTEXT,
            acknowledges: false,
            bytes,
            expiry,
        }));
    }

    fn take(&self, max: usize, count: usize, datagrams: &mut Vec<SourcedDatagram>) {
        let mut state = self.state.lock();
        let now = Instant::now();
        state.hold.unblock(now);
        let headers = *self.headers.read();
        let filter = self.filter.as_deref();
        let taken =
            std::iter::from_fn(|| state.next_datagram(now, max, &self.too_long, filter, headers));
        datagrams.extend(
            taken
                .take(count)
                .map(|(bytes, expiry, acknowledges)| SourcedDatagram {
                    context: PACKET_CONTEXT,
                    acknowledges,
                    bytes,
                    expiry,
                }),
        );
        state.fit_charge(now);
        if state.hold.look_at().is_some() {
            self.added.notify_one();
        }
    }

    fn is_waiting(&self) -> bool {
        self.state.lock().hold.is_waiting()
    }

    fn on_outage(&self) {
        let mut state = self.state.lock();
        if state.hold.is_blocked() {
            return;
        }
        state.hold.block();
        let now = Instant::now();
        state.hold_queued(now);
    }

    fn on_narrow(&self, is_narrow: bool) {
        self.state.lock().is_narrow = is_narrow;
    }

    fn on_slow(&self, is_slow: bool) {
        let mut state = self.state.lock();
        let now = Instant::now();
        state.hold.unblock(now);
        state.hold.set_slow(now, is_slow);
        if is_slow {
            state.hold_queued(now);
        }
    }
}
