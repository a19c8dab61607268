//! Early packets: a server sends the first bytes of claimed flows right behind the SYN+ACK, before
//! the device has confirmed the handshake.
//!
//! ```text
//!  device                                         server
//!   SYN, claims: flow, received r  ──────────▶     answers; restores the session from its record
//!                                  ◀──────────  SYN+ACK
//!                                  ◀──────────  RESUMED flow; DATA flow from r on   (this file)
//!   first packet, ACK              ──────────▶     confirmed: those packets count as sent
//! ```
//!
//! Until the confirmation nothing in the session changes: each handshake reads the flows' bytes
//! with its own cursor, and this module records what was sent. A replayed SYN is answered with at
//! most as many bytes as it has, once for each handshake.

use d2tp_seal::PacketKeys;
use d2tp_time::Time;
use d2tp_wire::{
    CID_BYTES, Cid, DATA_HEADER_BYTES, DATAGRAM_FIRST_BYTES, Frame, PacketKind, PathId, TAG_BYTES,
    WireWriter,
};

use crate::claim::{FlowClaim, SynClaims};
use crate::config::EndpointConfig;
use crate::flow::want;
use crate::path::SPEAK_MIN;
use crate::recovery::Recovery;
use crate::sent_packet::{SentData, SentFrame, SentPacket};
use crate::session::Session;
use crate::session_id::SessionId;

/// Bytes of a RESUMED and a FLOW_CREDIT frame of one flow.
const ANSWER_BYTES_MAX: usize = 2 * (1 + 8 + 8);
/// The smallest piece of data that is worth its header, in bytes.
const DATA_MIN: usize = 32;

/// How far a claimed flow was served before the handshake was confirmed.
#[derive(Debug)]
struct ServedClaim {
    claim: FlowClaim,
    /// Whether the SYN opened the flow, so that there is no claim.
    opened: bool,
    answered: bool,
    /// Offset of the next byte.
    next: u64,
    fin: bool,
}

/// The packets of a half-open handshake.
pub(crate) struct EarlyPackets {
    pub(crate) session: SessionId,
    gated: bool,
    cid: Cid,
    served: Vec<ServedClaim>,
    pieces: Vec<SentData>,
    /// Bytes that may still be sent to an address that is not validated (R-PATH-2).
    room: u64,
    session_credit: u64,
    pub(crate) recovery: Recovery,
    /// Whether the handshake is in the endpoint's transmit queue.
    pub(crate) queued: bool,
}

impl EarlyPackets {
    /// Creates the state; `room` is the SYN's size less that of its answer.
    pub(crate) fn new(
        session: SessionId,
        cid: Cid,
        claims: SynClaims,
        opened: Vec<FlowClaim>,
        room: u64,
        session_credit: u64,
        config: &EndpointConfig,
    ) -> Self {
        let datagram = DATAGRAM_FIRST_BYTES as u64;
        let serve = |claim: FlowClaim, opened| ServedClaim {
            claim,
            opened,
            // A flow that the SYN opened needs no RESUMED.
            answered: opened,
            next: claim.received,
            fin: false,
        };
        let claimed = claims.list.into_iter().map(|claim| serve(claim, false));
        let served = claimed.chain(opened.into_iter().map(|claim| serve(claim, true)));
        EarlyPackets {
            session,
            gated: claims.gated,
            cid,
            served: served.collect(),
            pieces: Vec::new(),
            room,
            session_credit,
            recovery: Recovery::new(config.rtt_initial, config.new_controller(datagram)),
            queued: false,
        }
    }

    pub(crate) fn claims(&self) -> impl Iterator<Item = FlowClaim> + '_ {
        self.served.iter().filter(|s| !s.opened).map(|s| s.claim)
    }

    /// Whether any packet was sent: its number counts as used even if the handshake fails (R-SEAL-2).
    pub(crate) fn has_sent(&self) -> bool {
        self.recovery.next_number() > 0
    }

    /// Bytes that may still be sent to the address of the SYN while it is not validated.
    pub(crate) fn room(&self) -> u64 {
        self.room
    }

    /// Stops sending, because another handshake of the device was confirmed.
    pub(crate) fn stop_sending(&mut self) {
        self.room = 0;
    }

    /// R-RESUME-7: writes and seals the next packet. Returns its length, or zero if there is nothing to
    /// send or no room.
    pub(crate) fn write(
        &mut self,
        now: Time,
        keys: &mut PacketKeys,
        session: &mut Session,
        buf: &mut [u8],
    ) -> usize {
        let size = usize::try_from(self.room)
            .unwrap_or(usize::MAX)
            .min(DATAGRAM_FIRST_BYTES)
            .min(buf.len());
        if (size as u64) < SPEAK_MIN {
            return 0;
        }
        let mut sent = SentPacket::new(now);
        let mut w = WireWriter::new(&mut buf[DATA_HEADER_BYTES..size - TAG_BYTES]);
        self.write_answers(session, &mut w, &mut sent);
        if !self.gated {
            self.write_data(session, &mut w, &mut sent);
        }
        let written = w.written();
        if written == 0 {
            return 0;
        }
        let total = DATA_HEADER_BYTES + written + TAG_BYTES;
        sent.bytes = total as u16;
        sent.eliciting = true;
        sent.app_limited = true;
        let number = self.recovery.next_number();
        self.recovery.on_sent(sent);
        self.room -= total as u64;
        buf[0] = PacketKind::Data.first_byte();
        buf[1..1 + CID_BYTES].copy_from_slice(&self.cid.0);
        keys.seal(PathId(0), number, &mut buf[..total]);
        total
    }

    fn write_answers(&mut self, session: &Session, w: &mut WireWriter<'_>, sent: &mut SentPacket) {
        for served in self.served.iter_mut().filter(|s| !s.answered) {
            if w.room() < ANSWER_BYTES_MAX {
                return;
            }
            // Refusals wait for the confirmation, because they end flows.
            let Some(flow) = session.flow_to_resume(&served.claim) else {
                continue;
            };
            let (id, received) = (flow.id, flow.recv.contiguous());
            Frame::Resumed { flow: id, received }.encode(w);
            let mut what = want::RESUMED;
            if !flow.recv.is_all_received() {
                let max = flow.recv.credit();
                Frame::FlowCredit { flow: id, max }.encode(w);
                what |= want::CREDIT;
            }
            sent.note(SentFrame::Flow { flow: id, what });
            served.answered = true;
        }
    }

    fn write_data(&mut self, session: &mut Session, w: &mut WireWriter<'_>, sent: &mut SentPacket) {
        let mut order: Vec<(u8, usize)> = (0..self.served.len())
            .filter_map(|i| {
                Some((
                    session
                        .flows
                        .get(self.served[i].claim.flow)?
                        .options
                        .priority,
                    i,
                ))
            })
            .collect();
        order.sort_unstable();
        for (_, i) in order {
            let served = &mut self.served[i];
            let id = served.claim.flow;
            if !served.answered || served.claim.is_complete() || served.fin {
                continue;
            }
            let Some(flow) = session.flows.get_mut(id) else {
                continue;
            };
            let offset = served.next;
            let head = Frame::data_head_len(id, offset, w.room());
            if w.room() < head + DATA_MIN {
                return;
            }
            if flow.pause_in.1 || flow.send.reset.is_some() || !flow.send.holds(offset) {
                continue;
            }
            let end = flow
                .send
                .end()
                .min(served.claim.received + served.claim.credit);
            let len = end
                .saturating_sub(offset)
                .min(self.session_credit)
                .min((w.room() - head) as u64) as usize;
            let fin = flow.send.is_finished() && offset + len as u64 == flow.send.end();
            if len == 0 && !fin {
                continue;
            }
            Frame::encode_data_head(w, id, offset, len, fin);
            flow.send.copy(offset, w.reserve(len));
            served.next += len as u64;
            flow.send.note_early(served.next);
            served.fin = fin;
            self.session_credit -= len as u64;
            let piece = SentData {
                flow: id,
                offset,
                len: len as u16,
                fin,
            };
            self.pieces.push(piece);
            sent.note(SentFrame::Data(piece));
        }
    }
}

impl Session {
    /// Applies a confirmed handshake: flows that its SYN claimed are claimed, and early packets count
    /// as sent.
    pub(crate) fn adopt_early(&mut self, early: EarlyPackets) {
        if early.has_sent()
            && let Some(path) = self.paths.get_mut(PathId(0))
        {
            let controller = std::mem::replace(&mut path.recovery, early.recovery).controller;
            if path.is_stream() {
                path.recovery.controller = controller;
            }
        }
        for served in &early.served {
            let FlowClaim {
                flow: id,
                received,
                credit,
                flags,
            } = served.claim;
            if served.opened {
                self.reopen_claimed(id);
            } else {
                self.on_resume(id, received, flags);
            }
            let Some(flow) = self.flows.get_mut(id) else {
                continue;
            };
            flow.send.set_credit(received + credit);
            if served.answered && !served.opened {
                flow.wants &= !want::RESUMED;
            }
            if std::mem::take(&mut flow.wants_writable) {
                self.emit(crate::event::SessionEvent::Writable(id));
            }
            self.flows.touch(id);
        }
        for piece in &early.pieces {
            if let Some(flow) = self.flows.get_mut(piece.flow) {
                let len = u64::from(piece.len);
                let new = flow.send.on_sent_early(piece.offset, len, piece.fin);
                self.credit.sent += new;
            }
        }
    }
}
