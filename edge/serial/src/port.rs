//! An open serial line: one task reads packets from it, another writes those that wait.
//!
//! ```text
//!  send ─▶ FairQueue ─▶ LineTurns ─▶ device, a frame when the device's own queue is nearly empty (AHEAD)
//!  device ─▶ FrameReader ─┬▶ Reassembly ─▶ channel of received packets
//!                         └▶ LineTurns: polls, and what mobiles may send
//! ```
//!
//! What waits, waits here and not in the kernel or the modem: there, no station could have its turn any
//! more, and an answer would wait behind everything before it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;

use crate::air::{SharedAir, draw_byte};
use crate::counts::LinkCounts;
use crate::delimiter::{Delimited, FrameReader};
use crate::fair_queue::FairQueue;
use crate::fragments::{PACKET_BYTES_MAX, Reassembled, Reassembly};
use crate::frame::{FrameBody, FrameFault, LinkFrame, StationAddress};
use crate::line::SerialLine;
use crate::terminal;
use crate::turns::{FrameUse, LineStep, LineTurns};

/// Received packets that may wait for whoever takes them.
const RECEIVED_MAX: usize = 256; // a guess
/// How long packets may wait for the line, for each station. Longer: what arrives is old, and senders notice
/// later that the line is full. Shorter: a burst of a sender does not fit.
const QUEUE_TIME: Duration = Duration::from_secs(4); // a guess: a few round trips
/// The smallest bound of a station's queue in bytes: four packets of the first size, which senders may have
/// in flight at least.
const QUEUE_BYTES_MIN: usize = 4 * 1_200;
/// How late a frame may have been written for the next one to follow earlier.
const LATE_MAX: Duration = Duration::from_millis(10); // a guess: timers of a busy machine
/// How much of the line's time a frame is written before the line has carried the one before it. Shorter: the line is idle
/// whenever this host runs the task late. Longer: a packet of another station waits for that long more.
const AHEAD: Duration = Duration::from_millis(50); // a guess: what a task waits for a processor on a busy host
/// How often the device's queue is asked while it is not yet short enough, at least.
const ASK_EVERY_MIN: Duration = Duration::from_millis(2);

/// Which end of a line this host is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StationRole {
    /// The bridge: it hears the mobiles.
    Bridge,
    /// A mobile: it hears the bridge.
    Mobile,
}

/// A packet that was received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkPacket {
    /// The mobile that sent it, or that it is for.
    pub address: StationAddress,
    /// The packet.
    pub bytes: Vec<u8>,
}

/// A line cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenLineError {
    /// Another program uses the device.
    #[error("{device} is in use by another program; end that program, or name another device")]
    InUse {
        /// The device file.
        device: String,
    },
    /// The system refuses.
    #[error("cannot open the serial device {device}: {cause}{hint}")]
    Io {
        /// The device file.
        device: String,
        /// The system's error.
        cause: io::Error,
        /// What to do.
        hint: &'static str,
    },
}

struct PortShared {
    line: SerialLine,
    role: StationRole,
    device: AsyncFd<OwnedFd>,
    queue: Mutex<FairQueue>,
    /// Who sends next. It is locked after the others.
    turns: Mutex<LineTurns>,
    /// Notified when a packet was queued, and when a frame was heard.
    changed: Notify,
    counts: Mutex<LinkCounts>,
    air: SharedAir,
    /// Why the line ended.
    end: Mutex<Option<String>>,
}

/// An open line. When it is dropped, the device is closed.
pub struct SerialPort {
    shared: Arc<PortShared>,
    tasks: [JoinHandle<()>; 2],
}

impl SerialPort {
    /// Opens a line. The second value yields received packets, and ends with the line. Must be called on a
    /// tokio runtime.
    ///
    /// # Errors
    /// The device cannot be opened, is no serial device, or is in use.
    pub fn open(
        line: &SerialLine,
        role: StationRole,
    ) -> Result<(SerialPort, mpsc::Receiver<LinkPacket>), OpenLineError> {
        let device = terminal::open(line)?;
        let failed = |cause: io::Error| OpenLineError::Io {
            device: line.device.display().to_string(),
            cause,
            hint: "",
        };
        // SAFETY: the descriptor is open, and its owner alone closes it.
        let device = unsafe { AsyncFd::register(device) };
        let queue_bytes = line.bytes_per_second() as usize * QUEUE_TIME.as_secs() as usize;
        let shared = Arc::new(PortShared {
            line: line.clone(),
            role,
            device: device.map_err(|refused| failed(refused.into()))?,
            queue: Mutex::new(FairQueue::new(queue_bytes.max(QUEUE_BYTES_MIN))),
            turns: Mutex::new(LineTurns::new(line, role, Instant::now())),
            changed: Notify::new(),
            counts: Mutex::default(),
            air: SharedAir::new(line),
            end: Mutex::default(),
        });
        let (give, take) = mpsc::channel(RECEIVED_MAX);
        let (reads, writes) = (shared.clone(), shared.clone());
        let reader = tokio::spawn(async move {
            let end = reads.read_all(&give).await;
            reads.on_end(&end);
        });
        let writer = tokio::spawn(async move {
            let end = writes.write_all().await;
            writes.on_end(&end);
        });
        let tasks = [reader, writer];
        Ok((SerialPort { shared, tasks }, take))
    }

    /// Queues a packet for a station, or of a station. A packet that is too large or finds a full queue is
    /// dropped and counted.
    pub fn send(&self, address: StationAddress, packet: &[u8]) {
        if packet.len() > PACKET_BYTES_MAX || packet.is_empty() {
            self.shared.counts.lock().too_large += 1;
            return;
        }
        let pushed = self.shared.queue.lock().push(address, packet.to_vec());
        match pushed {
            Ok(()) => {
                self.shared.turns.lock().on_queued(address);
                self.shared.changed.notify_one();
            }
            Err(_) => self.shared.counts.lock().queue_full += 1,
        }
    }

    /// What was carried and dropped.
    pub fn counts(&self) -> LinkCounts {
        let counts = *self.shared.counts.lock();
        let (turns, unanswered_turns) = self.shared.turns.lock().counts();
        LinkCounts {
            turns,
            unanswered_turns,
            ..counts
        }
    }

    /// Bytes of packets that wait.
    pub fn waiting_bytes(&self) -> usize {
        self.shared.queue.lock().bytes()
    }

    /// Why the line ended, if it has.
    pub fn end(&self) -> Option<String> {
        self.shared.end.lock().clone()
    }
}

impl Drop for SerialPort {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl PortShared {
    fn on_end(&self, end: &io::Error) {
        let device = self.line.device.display();
        self.end
            .lock()
            .get_or_insert_with(|| format!("the serial device {device} is gone: {end}"));
    }

    /// Reads packets until the device is gone.
    async fn read_all(&self, give: &mpsc::Sender<LinkPacket>) -> io::Error {
        let mut reader = FrameReader::new(self.line.framing.clone());
        let mut reassembly = Reassembly::default();
        let mut buffer = [0; 2_048];
        loop {
            let n = match self.read_some(&mut buffer).await {
                Ok(0) => return io::Error::new(io::ErrorKind::UnexpectedEof, "the line hung up"),
                Ok(n) => n,
                Err(error) => return error,
            };
            let now = Instant::now();
            self.air.on_heard(now);
            self.turns.lock().on_heard(now);
            let mut found = Vec::new();
            reader.read(&buffer[..n], |delimited| found.push(delimited));
            self.counts.lock().bytes_in += n as u64;
            for delimited in found {
                if let Some(packet) = self.take_frame(&mut reassembly, delimited)
                    && give.try_send(packet).is_err()
                {
                    self.counts.lock().not_taken += 1;
                }
            }
            self.counts.lock().incomplete = reassembly.abandoned();
            self.changed.notify_one();
        }
    }

    async fn read_some(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut ready = self.device.readable().await?;
            let read = |device: &AsyncFd<OwnedFd>| {
                rustix::io::read(device.get_ref(), &mut *buffer).map_err(io::Error::from)
            };
            if let Ok(done) = ready.try_io(read) {
                match done {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    done => return done,
                }
            }
        }
    }

    /// The packet that a frame completes.
    fn take_frame(&self, reassembly: &mut Reassembly, found: Delimited) -> Option<LinkPacket> {
        let mut counts = self.counts.lock();
        let bytes = match found {
            Delimited::Frame(bytes) => bytes,
            Delimited::Noise => {
                counts.noise += 1;
                self.turns.lock().on_noise();
                return None;
            }
            Delimited::Foreign => {
                counts.foreign += 1;
                return None;
            }
        };
        let frame = match LinkFrame::decode(&bytes) {
            Ok(frame) => frame,
            Err(FrameFault::Damaged) => {
                counts.noise += 1;
                self.turns.lock().on_noise();
                return None;
            }
            Err(FrameFault::Unknown) => {
                counts.unknown += 1;
                return None;
            }
        };
        if frame.from_bridge == (self.role == StationRole::Bridge) {
            counts.reflected += 1;
            return None;
        }
        let now = Instant::now();
        let used = self
            .turns
            .lock()
            .on_frame(now, &frame, bytes.len(), draw_byte());
        match used {
            FrameUse::Packet => {}
            FrameUse::Turn => return None,
            FrameUse::OutOfTurn => {
                counts.out_of_turn += 1;
                return None;
            }
        }
        let address = frame.address;
        let packet = match frame.body {
            FrameBody::Poll { .. } | FrameBody::Invitation { .. } | FrameBody::TurnEnd { .. } => {
                return None;
            }
            FrameBody::Whole(packet) => packet.to_vec(),
            FrameBody::Fragment(part) => match reassembly.on_fragment(now, address, part) {
                Reassembled::Packet(packet) => packet,
                Reassembled::Incomplete => return None,
                Reassembled::Dropped => {
                    counts.contradicting += 1;
                    return None;
                }
            },
        };
        counts.packets_in += 1;
        Some(LinkPacket {
            address,
            bytes: packet,
        })
    }

    /// Writes packets until the device is gone.
    async fn write_all(&self) -> io::Error {
        let mut free_at = Instant::now();
        loop {
            let step = {
                let mut queue = self.queue.lock();
                self.turns.lock().step(Instant::now(), &mut queue)
            };
            let frame = match step {
                LineStep::Send(frame) => frame,
                LineStep::Wait(None) => {
                    self.changed.notified().await;
                    continue;
                }
                LineStep::Wait(Some(until)) => {
                    tokio::select! {
                        () = self.changed.notified() => {}
                        () = tokio::time::sleep_until(until.into()) => {}
                    }
                    continue;
                }
            };
            if frame.listens_first {
                self.air.wait_for_turn().await;
            }
            // When the line has carried the frame: a sleep that ends late delays no later one.
            free_at = free_at.max(Instant::now() - LATE_MAX) + self.line.time_of(frame.bytes.len());
            if let Err(error) = self.write_frame(&frame.bytes, free_at).await {
                return error;
            }
            self.counts.lock().packets_out += u64::from(frame.ends_packet);
        }
    }

    /// Writes a frame, and waits until the line has taken most of it.
    async fn write_frame(&self, bytes: &[u8], free_at: Instant) -> io::Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let mut ready = self.device.writable().await?;
            let write = |device: &AsyncFd<OwnedFd>| {
                rustix::io::write(device.get_ref(), rest).map_err(io::Error::from)
            };
            match ready.try_io(write) {
                Ok(Ok(n)) => rest = &rest[n..],
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(error)) => return Err(error),
                Err(_) => {}
            }
        }
        self.counts.lock().bytes_out += bytes.len() as u64;
        // The bit rate says how long it takes at least; the device's queue, whether that is enough: a modem
        // that holds back makes it longer.
        let ahead = self.ahead();
        let due = free_at.checked_sub(ahead).unwrap_or(free_at);
        tokio::time::sleep_until(due.into()).await;
        while let Some(queued) = terminal::queued_bytes(self.device.get_ref().as_fd())
            && let wait = self.line.time_of(queued).saturating_sub(ahead)
            && !wait.is_zero()
        {
            tokio::time::sleep(wait.max(ASK_EVERY_MIN)).await;
        }
        Ok(())
    }

    /// How long before the line is free the next frame is written. Where stations share the line, each waits for its
    /// turn when the line is free.
    fn ahead(&self) -> Duration {
        match self.line.half_duplex {
            true => Duration::ZERO,
            false => AHEAD,
        }
    }
}

impl std::fmt::Debug for SerialPort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let device = self.shared.device.get_ref().as_raw_fd();
        write!(f, "SerialPort({}, descriptor {device})", self.shared.line)
    }
}
