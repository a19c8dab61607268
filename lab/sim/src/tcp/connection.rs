//! A connection at one end: opening, both halves, closing, resets.
//!
//! ```text
//!  device  SynSent ── SYN ──▶            proxy  SynReceived ── SYN-ACK ──▶
//!  Open ◀── SYN-ACK                      Open ◀── ACK
//!  close: FIN after what was written ─ acknowledged ─▶ Closed      reset, user timeout ─▶ Closed
//! ```

use cedos_lab_link::{Span, Time};

use super::receiver::TcpReceiver;
use super::segment::{ModelSegment, sack_bytes};
use super::sender::TcpSender;

/// The pause after the first SYN, doubled each time. // RFC 6298 §2.1
const SYN_PAUSE: Span = Span::from_secs(1);
/// How long the peer may acknowledge nothing, as edge/stream sets it for its connections.
const UNACKNOWLEDGED_MAX: Span = Span::from_secs(30);

/// Why a connection is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TcpEnd {
    /// The peer's host does not listen.
    Refused,
    /// The peer, or a host between, reset it.
    Reset,
    /// The peer did not acknowledge anything for too long.
    TimedOut,
    /// Both ends closed it, or this end did and the peer knows.
    Finished,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum TcpState {
    SynSent,
    SynReceived,
    Open,
    Closed(TcpEnd),
}

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct TcpConnection {
    state: TcpState,
    began_at: Time,
    /// When the SYN or the SYN-ACK is sent next, and how often it was.
    syn_at: Time,
    syns: u32,
    segment_bytes: usize,
    sender: TcpSender,
    receiver: TcpReceiver,
    /// Whether the program closed it.
    closed: bool,
    /// Whether a reset is to be sent.
    resets: bool,
    /// Whether the peer's FIN is to be acknowledged, although the connection is over.
    acks_end: bool,
}

impl TcpConnection {
    /// The end that opens a connection; `segment_bytes` of data fit into a segment on its link.
    pub(crate) fn connect(now: Time, segment_bytes: usize) -> TcpConnection {
        TcpConnection::new(now, TcpState::SynSent, segment_bytes)
    }

    /// The end that answers a SYN.
    pub(crate) fn accept(now: Time, segment_bytes: usize) -> TcpConnection {
        TcpConnection::new(now, TcpState::SynReceived, segment_bytes)
    }

    fn new(now: Time, state: TcpState, segment_bytes: usize) -> TcpConnection {
        TcpConnection {
            state,
            began_at: now,
            syn_at: now,
            syns: 0,
            segment_bytes,
            sender: TcpSender::new(segment_bytes),
            receiver: TcpReceiver::default(),
            closed: false,
            resets: false,
            acks_end: false,
        }
    }

    /// Whether bytes may be written.
    pub(crate) fn is_open(&self) -> bool {
        self.state == TcpState::Open && !self.closed
    }

    /// Why the connection is over, if it is.
    pub(crate) fn end(&self) -> Option<TcpEnd> {
        match self.state {
            TcpState::Closed(end) => Some(end),
            _ => None,
        }
    }

    /// Whether nothing has to be sent any more.
    pub(crate) fn is_gone(&self) -> bool {
        self.end().is_some() && !self.resets && !self.acks_end
    }

    /// Accepts bytes of the program.
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        self.sender.write(bytes);
    }

    /// Bytes that were written and not yet sent.
    pub(crate) fn unsent(&self) -> u64 {
        self.sender.unsent()
    }

    /// Reads everything that has arrived in order.
    pub(crate) fn read(&mut self, now: Time) -> Vec<u8> {
        self.receiver.read(now)
    }

    /// Whether the peer has ended its direction and everything before that was read.
    pub(crate) fn is_peer_done(&self) -> bool {
        self.receiver.is_ended()
    }

    /// Closes the connection: what was written is still sent, what arrives from now on is refused.
    pub(crate) fn close(&mut self) {
        self.closed = true;
        match self.state {
            TcpState::Open | TcpState::SynReceived => self.sender.close(),
            TcpState::SynSent => self.state = TcpState::Closed(TcpEnd::Finished),
            TcpState::Closed(_) => {}
        }
    }

    /// Handles a segment that arrived.
    pub(crate) fn on_segment(&mut self, now: Time, segment: ModelSegment) {
        if segment.damaged || self.end().is_some() {
            let again = !segment.damaged && segment.fin;
            self.acks_end |= again && self.end() == Some(TcpEnd::Finished);
            return;
        }
        if segment.rst {
            self.state = TcpState::Closed(match self.state {
                TcpState::SynSent => TcpEnd::Refused,
                _ => TcpEnd::Reset,
            });
            return;
        }
        let was_open = self.state == TcpState::Open;
        match (self.state, segment.syn) {
            (TcpState::SynSent, Some(peer)) if segment.ack.is_some() => {
                self.sender.set_segment_bytes(peer);
                self.state = TcpState::Open;
            }
            (TcpState::SynReceived, Some(peer)) => {
                self.sender.set_segment_bytes(peer);
                // Again, if the answer was lost.
                self.syn_at = now;
            }
            (TcpState::SynReceived, None) => self.state = TcpState::Open,
            _ => {}
        }
        if segment.syn.is_some() {
            self.receiver.on_syn(segment.sent_at);
        }
        if self.state != TcpState::Open {
            return;
        }
        if segment.syn.is_some() {
            self.receiver.ack_now(now);
        }
        if let Some(sent_at) = segment.echo.filter(|_| !was_open) {
            self.sender.on_first_round_trip(now.since(sent_at));
        }
        self.sender.on_ack(now, &segment);
        let news = self.receiver.on_segment(now, segment);
        let complete = self.receiver.is_complete();
        if self.sender.is_finished() && (complete || self.closed) {
            self.state = TcpState::Closed(TcpEnd::Finished);
            self.acks_end = complete;
        } else if self.closed && news {
            self.reset();
        }
    }

    fn reset(&mut self) {
        self.state = TcpState::Closed(TcpEnd::Reset);
        self.resets = true;
    }

    /// Handles that IP packets on the path carry at most this many bytes of data in a segment.
    pub(crate) fn on_too_big(&mut self, segment_bytes: usize) {
        self.sender.on_too_big(segment_bytes);
    }

    /// When [`TcpConnection::on_time`] and [`TcpConnection::poll`] have to be called.
    pub(crate) fn next_timeout(&self) -> Option<Time> {
        match self.state {
            TcpState::Closed(_) => None,
            TcpState::SynSent | TcpState::SynReceived => {
                Some(self.syn_at.min(self.began_at + UNACKNOWLEDGED_MAX))
            }
            TcpState::Open => {
                let given_up = self
                    .sender
                    .waiting_since()
                    .map(|at| at + UNACKNOWLEDGED_MAX);
                [self.sender.next_timeout(), self.receiver.ack_at(), given_up]
                    .into_iter()
                    .flatten()
                    .min()
            }
        }
    }

    /// Handles timers that are due.
    pub(crate) fn on_time(&mut self, now: Time) {
        let since = match self.state {
            TcpState::Closed(_) => return,
            TcpState::SynSent | TcpState::SynReceived => Some(self.began_at),
            TcpState::Open => self.sender.waiting_since(),
        };
        if since.is_some_and(|since| now >= since + UNACKNOWLEDGED_MAX) {
            self.state = TcpState::Closed(TcpEnd::TimedOut);
            return;
        }
        if self.state == TcpState::Open {
            self.sender.on_time(now);
        }
    }

    /// The next segment to send now.
    pub(crate) fn poll(&mut self, now: Time) -> Option<ModelSegment> {
        if std::mem::take(&mut self.resets) {
            return Some(ModelSegment::reset(now));
        }
        let mut segment = ModelSegment {
            sent_at: now,
            ..ModelSegment::default()
        };
        match self.state {
            TcpState::Closed(_) => {
                let acks = std::mem::take(&mut self.acks_end);
                self.receiver.acknowledge(&mut segment);
                return acks.then_some(segment);
            }
            TcpState::SynSent | TcpState::SynReceived if self.syn_at <= now => {
                self.syn_at = now + SYN_PAUSE.times(1 << self.syns.min(6));
                self.syns += 1;
                segment.syn = Some(self.segment_bytes);
                if self.state == TcpState::SynReceived {
                    self.receiver.acknowledge(&mut segment);
                }
                return Some(segment);
            }
            TcpState::SynSent | TcpState::SynReceived => return None,
            TcpState::Open => {}
        }
        let sack_bytes = sack_bytes(self.receiver.sacks().len());
        if let Some((seq, bytes, fin)) = self.sender.poll(now, sack_bytes) {
            (segment.seq, segment.bytes, segment.fin) = (seq, bytes, fin);
        } else if self.receiver.ack_at().is_none_or(|at| at > now) {
            return None;
        }
        self.receiver.acknowledge(&mut segment);
        Some(segment)
    }
}
