//! What a session tells somebody who wants to see everything: packets, frames, figures, events.
//!
//! Off, a session holds an empty pointer here, and sending or receiving a packet tests it once. On,
//! records collect in a bounded line that the endpoint takes away whenever it books a session's
//! changes; what finds the line full is counted and the count becomes a record. Nothing here says
//! what is done with them: the core writes no files.

use std::collections::VecDeque;

use d2tp_time::{Span, Time};
use d2tp_wire::{FlowId, Frame, FrameIter, PathId};

use crate::event::SessionEvent;
use crate::link::{Addresses, LinkId};
use crate::path::SessionPath;

/// Records of a session, or of all of an endpoint, that nobody took yet; newer ones are counted.
pub const TRACE_RECORDS_MAX: usize = 16_384;

/// Figures of a path are told at most this often.
const METRICS_EVERY: Span = Span::from_millis(20); // a guess: below most round trips, above ACKs
/// Packets of each path that are told before sampling begins: its handshake and challenges.
const SAMPLED_FIRST: u64 = 16;
/// The sampling interval of later packets: one in this many is traced.
const SAMPLED_ONE_IN: u64 = 64;

/// Which packets are told. Events, frames that change something, and figures always are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceLevel {
    /// No packets are traced, only events.
    Events,
    /// The first of each path, then a few.
    Sampled,
    /// Each. Costs more than the transfer itself.
    Packets,
}

/// Something a session did or saw.
#[derive(Clone, Debug, PartialEq)]
pub enum TraceRecord {
    /// A handshake message left.
    HandshakeSent {
        /// Over this link.
        link: LinkId,
        /// With this epoch.
        epoch: u32,
    },
    /// A path was opened, by either end; it is not known to work yet.
    PathOpened {
        /// Its number.
        path: PathId,
        /// Local and remote address of the path.
        addresses: Addresses,
        /// Whether payload needs grants.
        gated: bool,
    },
    /// We opened a flow.
    FlowOpened(FlowId),
    /// What the driver hears too, without what comes with every batch of packets.
    Event(SessionEvent),
    /// A packet was sealed or opened.
    Packet {
        /// Whether the packet is ours.
        sent: bool,
        /// The path of the packet.
        path: PathId,
        /// Its number there.
        number: u64,
        /// Its size.
        bytes: usize,
    },
    /// A frame that changes the state of a path or a flow, or asks for it.
    Frame {
        /// Whether the frame is ours.
        sent: bool,
        /// The path it travelled on.
        path: PathId,
        /// What it says. Secrets are left out.
        frame: Frame<'static>,
    },
    /// An unreliable datagram was in a packet that was told.
    Datagram {
        /// Whether the datagram is ours.
        sent: bool,
        /// The path it travelled on.
        path: PathId,
        /// The datagram's context number.
        context: u64,
        /// How many bytes it has.
        bytes: usize,
    },
    /// Packets counted as lost.
    Lost {
        /// Their path.
        path: PathId,
        /// How many.
        packets: u64,
    },
    /// Figures of a path.
    Metrics {
        /// The path that changed.
        path: PathId,
        /// Smoothed round trip.
        rtt: Span,
        /// Smallest round trip.
        rtt_min: Span,
        /// Last round trip.
        rtt_latest: Span,
        /// Bytes allowed in flight.
        window: u64,
        /// Bytes in flight.
        in_flight: u64,
        /// Bytes of a datagram.
        mtu: usize,
    },
    /// The keys of a direction moved on.
    KeysUpdated {
        /// Whether the keys are those of packets that we send.
        sent: bool,
    },
    /// This many records found no room.
    Dropped(u64),
}

impl TraceRecord {
    /// How many records are lost when this one is.
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

/// The line of one session.
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

    /// A packet and what is in it.
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

    /// What changed about a path since the last look.
    pub(crate) fn note_path_changes(&mut self, path: &SessionPath) {
        let index = match self.watched.iter().position(|w| w.path == path.id) {
            Some(index) => index,
            None => {
                // Numbers of paths only grow: the oldest here are gone.
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
        // Counted anew under new keys, where numbers of paths begin again.
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

/// The frames that are told, without secrets and without bytes.
fn of_interest(frame: Frame<'_>) -> Option<Frame<'static>> {
    Some(match frame {
        // A nonce would let a reader of the log answer for the peer.
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
