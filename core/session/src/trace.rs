//! Traces of a session for debugging: packets, frames, metrics, events.
//!
//! While tracing is off, a session holds a null pointer here, which is tested once for each packet.
//! While it is on, records are collected in a bounded queue, which the endpoint empties when it
//! registers a session's changes. Records that find the queue full are counted, and the count
//! becomes a record. The core writes no files; the driver decides what to do with the records.

use std::collections::VecDeque;

use d2tp_time::{Span, Time};
use d2tp_wire::{FlowId, Frame, FrameIter, PathId};

use crate::event::SessionEvent;
use crate::link::{Addresses, LinkId};
use crate::path::SessionPath;

/// The most trace records that wait to be taken, per session and per endpoint; newer ones are dropped
/// and counted.
pub const TRACE_RECORDS_MAX: usize = 16_384;

/// The shortest interval between two records of a path's metrics.
const METRICS_EVERY: Span = Span::from_millis(20); // a guess: below most round trips, above ACKs
/// The number of first packets of each path that are always traced: its handshake and challenges.
const SAMPLED_FIRST: u64 = 16;
/// The sampling interval of later packets: one in this many is traced.
const SAMPLED_ONE_IN: u64 = 64;

/// Which packets are traced. Events, frames that change state, and metrics are always traced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceLevel {
    /// No packets are traced.
    Events,
    /// The first packets of each path are traced, then one in 64.
    Sampled,
    /// Every packet is traced. This costs more than the transfer itself.
    Packets,
}

/// A trace record: something that a session did or observed.
#[derive(Clone, Debug, PartialEq)]
pub enum TraceRecord {
    /// A handshake message was sent.
    HandshakeSent {
        /// The link that the message left on.
        link: LinkId,
        /// The epoch of the handshake.
        epoch: u32,
    },
    /// A path was opened, by either end. It is not known yet whether it works.
    PathOpened {
        /// The path's number.
        path: PathId,
        /// Local and remote address of the path.
        addresses: Addresses,
        /// Whether payload needs grants.
        gated: bool,
    },
    /// This end opened a flow.
    FlowOpened(FlowId),
    /// An event for the driver, except those that occur with every batch of packets.
    Event(SessionEvent),
    /// A packet was sealed or opened.
    Packet {
        /// Whether this end sent the packet.
        sent: bool,
        /// The path of the packet.
        path: PathId,
        /// The packet's number on its path.
        number: u64,
        /// The packet's size.
        bytes: usize,
    },
    /// A frame that changes the state of a path or a flow, or asks for it.
    Frame {
        /// Whether this end sent the frame.
        sent: bool,
        /// The path it travelled on.
        path: PathId,
        /// The frame, without secrets.
        frame: Frame<'static>,
    },
    /// An unreliable datagram was in a packet that was traced.
    Datagram {
        /// Whether this end sent the datagram.
        sent: bool,
        /// The path it travelled on.
        path: PathId,
        /// The datagram's context number.
        context: u64,
        /// The datagram's size.
        bytes: usize,
    },
    /// Packets of a path counted as lost.
    Lost {
        /// The path of the lost packets.
        path: PathId,
        /// The number of lost packets.
        packets: u64,
    },
    /// Metrics of a path.
    Metrics {
        /// The path that changed.
        path: PathId,
        /// The smoothed round trip.
        rtt: Span,
        /// The smallest round trip measured.
        rtt_min: Span,
        /// The last round trip measured.
        rtt_latest: Span,
        /// The number of bytes that may be in flight.
        window: u64,
        /// The number of bytes in flight.
        in_flight: u64,
        /// The size of a datagram in bytes.
        mtu: usize,
    },
    /// The keys of a direction were updated.
    KeysUpdated {
        /// Whether the keys are those of packets that we send.
        sent: bool,
    },
    /// This many records were dropped because the queue was full.
    Dropped(u64),
}

impl TraceRecord {
    /// How many records are lost when this one is dropped.
    pub(crate) fn record_count(&self) -> u64 {
        match self {
            TraceRecord::Dropped(count) => *count,
            _ => 1,
        }
    }

    pub(crate) fn opened(path: &SessionPath) -> TraceRecord {
        TraceRecord::PathOpened {
            path: path.id,
            addresses: path.addresses,
            gated: path.gated,
        }
    }
}

#[derive(Debug)]
struct TracedPath {
    path: PathId,
    lost: u64,
    reported_at: Option<Time>,
    window: u64,
    rtt: Span,
}

/// The trace of one session.
#[derive(Debug)]
pub(crate) struct SessionTrace {
    level: TraceLevel,
    now: Time,
    records: VecDeque<(Time, TraceRecord)>,
    pub(crate) dropped: u64,
    watched: Vec<TracedPath>,
}

impl SessionTrace {
    pub(crate) fn new(level: TraceLevel, now: Time) -> SessionTrace {
        SessionTrace {
            level,
            now,
            records: VecDeque::new(),
            dropped: 0,
            watched: Vec::new(),
        }
    }

    /// Sets the time of the records that follow.
    pub(crate) fn at(&mut self, now: Time) -> &mut SessionTrace {
        self.now = self.now.max(now);
        self
    }

    pub(crate) fn note(&mut self, record: TraceRecord) {
        if self.records.len() >= TRACE_RECORDS_MAX {
            self.dropped += 1;
            return;
        }
        if self.dropped > 0 {
            let dropped = std::mem::take(&mut self.dropped);
            self.records
                .push_back((self.now, TraceRecord::Dropped(dropped)));
        }
        self.records.push_back((self.now, record));
    }

    pub(crate) fn event(&mut self, event: &SessionEvent) {
        let reported = !matches!(
            event,
            SessionEvent::Readable(_) | SessionEvent::Writable(_) | SessionEvent::Datagram { .. }
        );
        if reported {
            self.note(TraceRecord::Event(event.clone()));
        }
    }

    /// Records a packet and its frames.
    pub(crate) fn packet(
        &mut self,
        sent: bool,
        path: PathId,
        number: u64,
        bytes: usize,
        plaintext: &[u8],
    ) {
        let reported = match self.level {
            TraceLevel::Events => false,
            TraceLevel::Sampled => number < SAMPLED_FIRST || number.is_multiple_of(SAMPLED_ONE_IN),
            TraceLevel::Packets => true,
        };
        if reported {
            self.note(TraceRecord::Packet {
                sent,
                path,
                number,
                bytes,
            });
        }
        for frame in FrameIter::new(plaintext).map_while(Result::ok) {
            if let Frame::Datagram { context, bytes } = frame
                && reported
            {
                let bytes = bytes.len();
                self.note(TraceRecord::Datagram {
                    sent,
                    path,
                    context,
                    bytes,
                });
            }
            if let Some(frame) = of_interest(frame) {
                self.note(TraceRecord::Frame { sent, path, frame });
            }
        }
    }

    /// Records what changed about a path since the last call.
    pub(crate) fn note_path_changes(&mut self, path: &SessionPath) {
        let index = match self.watched.iter().position(|w| w.path == path.id) {
            Some(index) => index,
            None => {
                // Path ids only grow, so the first ones here belong to closed paths.
                if self.watched.len() > crate::config::PATHS_MAX {
                    self.watched.remove(0);
                }
                self.watched.push(TracedPath {
                    path: path.id,
                    lost: 0,
                    reported_at: None,
                    window: 0,
                    rtt: Span::ZERO,
                });
                self.watched.len() - 1
            }
        };
        let now = self.now;
        let (window, rtt) = (
            path.recovery.controller.window(),
            path.recovery.rtt.smoothed(),
        );
        let watched = &mut self.watched[index];
        // After new keys path ids start again, and so do the counts.
        let packets = path.recovery.lost_total.saturating_sub(watched.lost);
        watched.lost = path.recovery.lost_total;
        let due = watched
            .reported_at
            .is_none_or(|at| now.since(at) >= METRICS_EVERY);
        let changed = (watched.window, watched.rtt) != (window, rtt);
        let report = changed && (due || packets > 0);
        if report {
            watched.reported_at = Some(now);
            (watched.window, watched.rtt) = (window, rtt);
        }
        if packets > 0 {
            let path = path.id;
            self.note(TraceRecord::Lost { path, packets });
        }
        if report {
            self.note(TraceRecord::Metrics {
                path: path.id,
                rtt,
                rtt_min: path.recovery.rtt.min(),
                rtt_latest: path.recovery.rtt.latest(),
                window,
                in_flight: path.recovery.in_flight,
                mtu: path.mtu.current(),
            });
        }
    }

    pub(crate) fn take(&mut self) -> std::collections::vec_deque::Drain<'_, (Time, TraceRecord)> {
        self.records.drain(..)
    }
}

/// The frame as it is traced, without secrets and data; `None` if it is not traced.
fn of_interest(frame: Frame<'_>) -> Option<Frame<'static>> {
    Some(match frame {
        // With the nonce, a reader of the log could answer in place of the peer.
        Frame::Chg { .. } => Frame::Chg { nonce: [0; 16] },
        Frame::Rsp { .. } => Frame::Rsp { nonce: [0; 16] },
        Frame::Auth { path } => Frame::Auth { path },
        Frame::PathStatus {
            path,
            seq,
            status,
            gated,
            reason,
        } => Frame::PathStatus {
            path,
            seq,
            status,
            gated,
            reason,
        },
        Frame::Grant {
            seq,
            flow,
            path,
            max_sent,
        } => Frame::Grant {
            seq,
            flow,
            path,
            max_sent,
        },
        Frame::Spent { flow, path, sent } => Frame::Spent { flow, path, sent },
        Frame::Reset {
            flow,
            code,
            final_size,
        } => Frame::Reset {
            flow,
            code,
            final_size,
        },
        Frame::Stop { flow, code } => Frame::Stop { flow, code },
        Frame::Deadline {
            flow,
            seq,
            remaining_ms,
        } => Frame::Deadline {
            flow,
            seq,
            remaining_ms,
        },
        Frame::FlowPause {
            flow,
            seq,
            paused,
            reason,
        } => Frame::FlowPause {
            flow,
            seq,
            paused,
            reason,
        },
        Frame::Resume {
            flow,
            received,
            flags,
        } => Frame::Resume {
            flow,
            received,
            flags,
        },
        Frame::Resumed { flow, received } => Frame::Resumed { flow, received },
        Frame::Refused { flow, reason } => Frame::Refused { flow, reason },
        _ => return None,
    })
}
