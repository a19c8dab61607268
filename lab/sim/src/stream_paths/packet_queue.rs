//! Packets that wait for a stream, and the room for more that the core hears of, as in the driver
//! (`stream_queues.rs`) and edge/stream (`unsent.rs`).
//!
//! ```text
//!  core ─▶ batches, two at most ─▶ messages ─▶ TCP: unsent, a twentieth of a second ─▶ in flight
//!    ▲ room for a batch ◀── while fewer than two wait
//! ```

use std::collections::VecDeque;

use cedos_lab_link::{Span, Time};
use d2tp_session::STREAM_ROOM_BYTES;

use super::messages::packet_messages;
use crate::tcp::TcpConnection;

/// The limits of a batch. // edge/driver
const BATCH_BYTES_MAX: u64 = STREAM_ROOM_BYTES;
const BATCH_BYTES_MIN: u64 = 9 * 1024;
/// The most bytes that may wait, because ACKs and probes are queued without room. // edge/driver
const QUEUE_BYTES_MAX: u64 = 16 * STREAM_ROOM_BYTES;
/// The limits of what TCP accepts beyond what it may send at once. // edge/stream
const UNSENT_BYTES_FIRST: u64 = 128 * 1024;
const UNSENT_BYTES_MIN: u64 = 16 * 1024;
const UNSENT_BYTES_MAX: u64 = 1024 * 1024;
/// The time that TCP can send from what waits, and the shortest measurement. // edge/stream
const UNSENT_TIME: Span = Span::from_millis(50);
const MEASURED_MIN: Span = Span::from_millis(100);

/// Packets of one size.
#[derive(Debug)]
struct PacketRun {
    bytes: Vec<u8>,
    stride: usize,
}

/// A batch that is being written.
#[derive(Debug)]
struct WritingBatch {
    messages: VecDeque<Vec<u8>>,
    bytes: u64,
    began_at: Time,
}

/// The packets that wait for one stream.
#[derive(Debug)]
pub(crate) struct StreamPacketQueue {
    batches: VecDeque<PacketRun>,
    writing: Option<WritingBatch>,
    /// Bytes that wait or are being written.
    bytes: u64,
    batch: u64,
    /// How much TCP may have unsent; the bytes that it took since when.
    unsent_max: u64,
    measured: (u64, Option<Time>),
    room: Option<u64>,
    closing: bool,
}

impl StreamPacketQueue {
    pub(crate) fn new() -> StreamPacketQueue {
        StreamPacketQueue {
            batches: VecDeque::new(),
            writing: None,
            bytes: 0,
            batch: BATCH_BYTES_MAX,
            unsent_max: UNSENT_BYTES_FIRST,
            measured: (0, None),
            room: None,
            closing: false,
        }
    }

    /// Queues a packet, or drops it as any full queue does.
    pub(crate) fn push(&mut self, packet: &[u8]) {
        if self.closing || self.bytes + packet.len() as u64 > QUEUE_BYTES_MAX {
            return;
        }
        self.bytes += packet.len() as u64;
        match self.batches.back_mut() {
            Some(last)
                if last.bytes.len() % last.stride == 0
                    && packet.len() <= last.stride
                    && last.bytes.len() + packet.len() <= BATCH_BYTES_MAX as usize =>
            {
                last.bytes.extend(packet);
            }
            _ => self.batches.push_back(PacketRun {
                bytes: packet.to_vec(),
                stride: packet.len(),
            }),
        }
        self.ask();
    }

    /// Ends the stream when what waits is written.
    pub(crate) fn close(&mut self) {
        self.closing = true;
    }

    /// Whether everything is written and nothing more comes.
    pub(crate) fn is_finished(&self) -> bool {
        self.closing && self.bytes == 0
    }

    /// The bytes that the core may send now, if that changed.
    pub(crate) fn take_room(&mut self) -> Option<u64> {
        self.room.take()
    }

    fn ask(&mut self) {
        if self.bytes < 2 * self.batch {
            self.room = Some(self.batch);
        }
    }

    /// Writes as much as the connection takes.
    pub(crate) fn write(&mut self, now: Time, tcp: &mut TcpConnection) {
        loop {
            if let Some(writing) = &mut self.writing {
                while tcp.unsent() < self.unsent_max
                    && let Some(message) = writing.messages.pop_front()
                {
                    tcp.write(&message);
                }
                if !writing.messages.is_empty() {
                    return;
                }
                let (bytes, began_at) = (writing.bytes, writing.began_at);
                self.writing = None;
                self.bytes -= bytes;
                self.measure(now, began_at, bytes);
                self.batch = (self.unsent_max / 2).clamp(BATCH_BYTES_MIN, BATCH_BYTES_MAX);
                self.ask();
            }
            let Some(run) = self.batches.pop_front() else {
                return;
            };
            self.writing = Some(WritingBatch {
                messages: packet_messages(&run.bytes, run.stride).collect(),
                bytes: run.bytes.len() as u64,
                began_at: now,
            });
        }
    }

    fn measure(&mut self, now: Time, began_at: Time, bytes: u64) {
        let (sum, since) = &mut self.measured;
        let since = *since.get_or_insert(began_at);
        *sum += bytes;
        let took = now.since(since);
        if took >= MEASURED_MIN {
            let wanted = *sum * UNSENT_TIME.as_micros() / took.as_micros();
            self.unsent_max = wanted
                .clamp(UNSENT_BYTES_MIN, UNSENT_BYTES_MAX)
                .next_power_of_two();
            self.measured = (0, Some(now));
        }
    }
}
