//! The frames of a packet, in their order: challenge, ACK, path, session, flows, datagrams, data.

use d2tp_time::Time;
use d2tp_wire::{FlowId, Frame, PathId, PathStatus, ReasonCode, TOKEN_BYTES, WireWriter};

use super::{DATA_MIN, PATH_GONE_SEQ, PROBE_GATED_BYTES};
use crate::datagram_queue::{DatagramPath, room};
use crate::event::SessionEvent;
use crate::flow::want;
use crate::path;
use crate::path_limit::SentLimit;
use crate::sent_packet::{SentData, SentFrame, SentPacket};
use crate::session::{Session, say};
use crate::session_state::Role;

impl Session {
    /// R-PATH-3: writes the challenge to a path's address. Returns the size to which the packet must be
    /// padded.
    pub(super) fn write_challenge(
        &mut self,
        slot: usize,
        w: &mut WireWriter<'_>,
        sent: &mut SentPacket,
    ) -> usize {
        let initiator = self.role == Role::Initiator;
        let path = self.paths.at(slot);
        if path.wants & path::want::CHG == 0 || w.room() < 17 {
            return 0;
        }
        path.wants &= !path::want::CHG;
        // An answer to a later challenge may have come after this one was lost.
        let Some(nonce) = path.challenge_here() else {
            return 0;
        };
        Frame::Chg { nonce }.encode(w);
        sent.eliciting = true;
        sent.note(SentFrame::Path {
            path: path.id,
            what: path::want::CHG,
        });
        let is_first = !std::mem::replace(&mut path.first_packet_padded, true);
        match is_first && initiator {
            true => path.first_packet_bytes(),
            false => 0,
        }
    }

    /// Writes the other control frames of a path. Returns the size to which the packet must be padded.
    pub(super) fn write_path_frames(
        &mut self,
        slot: usize,
        w: &mut WireWriter<'_>,
        sent: &mut SentPacket,
    ) -> usize {
        let initiator = self.role == Role::Initiator;
        let reason = self.reason_of(&self.paths[slot]);
        let path = self.paths.at(slot);
        let id = path.id;
        let mut least = 0;
        while path.has_answer() {
            if w.room() < 17 {
                return least;
            }
            let Some(nonce) = path.take_answer() else {
                break;
            };
            Frame::Rsp { nonce }.encode(w);
            sent.eliciting = true;
            if initiator {
                path.note_answered(nonce);
                sent.note(SentFrame::Path {
                    path: id,
                    what: path::want::RSP,
                });
            }
        }
        if path.wants == 0 {
            return least;
        }
        let mut put = |frame: Frame<'_>, bit: u16, wants: &mut u16, w: &mut WireWriter<'_>| {
            if w.room() < 40 {
                return;
            }
            *wants &= !bit;
            frame.encode(w);
            sent.eliciting = true;
            sent.note(SentFrame::Path {
                path: id,
                what: bit,
            });
        };
        let mut wants = path.wants;
        if wants & path::want::STATUS != 0 {
            let frame = Frame::PathStatus {
                path: id,
                seq: path.status_seq,
                status: path.status,
                gated: path.gated,
                reason,
            };
            put(frame, path::want::STATUS, &mut wants, w);
        }
        if wants & path::want::AUTH != 0 {
            put(Frame::Auth { path: id }, path::want::AUTH, &mut wants, w);
        }
        if wants & path::want::ACK_RATE != 0 {
            let delay = path.recovery.rtt.smoothed().divided(4);
            let frame = Frame::AckRate {
                path: id,
                every: path.ack_every,
                delay_us: delay.as_micros(),
            };
            put(frame, path::want::ACK_RATE, &mut wants, w);
        }
        if wants & path::want::LIMIT != 0
            && let Some(SentLimit { seq, bytes }) = path.announced_limit()
        {
            let frame = Frame::PathLimit {
                path: id,
                seq,
                bytes,
            };
            put(frame, path::want::LIMIT, &mut wants, w);
        }
        if wants & path::want::RSP != 0 {
            // R-PATH-13: the answer was lost, and the peer has not reported that it is not needed.
            match path.answered() {
                Some(nonce) => {
                    put(Frame::Rsp { nonce }, path::want::RSP, &mut wants, w);
                }
                None => wants &= !path::want::RSP,
            }
        }
        if wants & path::want::PING != 0 && w.room() > 0 {
            wants &= !path::want::PING;
            Frame::Ping.encode(w);
            sent.eliciting = true;
            if std::mem::take(&mut path.pad_next) {
                // R-PATH-9
                least = least.max(match path.gated {
                    true => PROBE_GATED_BYTES.min(path.first_packet_bytes()),
                    false => path.first_packet_bytes(),
                });
            }
        }
        path.wants = wants & !path::want::CID;
        least
    }

    pub(super) fn write_session_frames(&mut self, w: &mut WireWriter<'_>, sent: &mut SentPacket) {
        if self.wants & say::CREDIT != 0 && w.room() >= 9 {
            self.wants &= !say::CREDIT;
            let max = self.session_credit_max();
            self.credit.advertised = self.credit.advertised.max(max);
            Frame::SessionCredit {
                max: self.credit.advertised,
            }
            .encode(w);
            sent.eliciting = true;
            sent.note(SentFrame::Session { what: say::CREDIT });
        }
        if self.wants & say::FROZEN != 0 {
            self.write_frozen(w, sent);
        }
        if self.wants & (say::SHARE_FIRST | say::SHARE_SECOND) != 0 {
            self.write_key_shares(w, sent);
        }
        for gone in self.gone.iter_mut().filter(|g| g.must_send) {
            if w.room() < 40 {
                return;
            }
            gone.must_send = false;
            let (path, status, reason) = (gone.path, PathStatus::Gone, ReasonCode::NoPath);
            let mut ranges = [0; 256];
            let room = (w.room() - 16).min(ranges.len());
            let mut ack = WireWriter::new(&mut ranges[..room]);
            Frame::encode_ack(&mut ack, path, 0, gone.received.iter().copied());
            let n = ack.written();
            w.bytes(&ranges[..n]);
            Frame::PathStatus {
                path,
                seq: PATH_GONE_SEQ,
                status,
                gated: false,
                reason,
            }
            .encode(w);
            sent.eliciting = true;
            sent.note(SentFrame::Gone(path));
        }
        for (path, issued) in self.issued.iter_mut().filter(|(_, i)| i.must_send) {
            if w.room() < 40 {
                return;
            }
            issued.must_send = false;
            let secrets = self.cookie_secrets.as_ref();
            let token = secrets.map_or([0; TOKEN_BYTES], |secrets| secrets.token(issued.cid));
            Frame::PathCid {
                path: *path,
                cid: issued.cid,
                token,
            }
            .encode(w);
            sent.eliciting = true;
            sent.note(SentFrame::Path {
                path: *path,
                what: path::want::CID,
            });
        }
    }

    /// Whether RESUME_END may be sent: the peer received all claims (R-RESUME-5).
    pub(super) fn ends_claims(&self) -> bool {
        self.wants & say::RESUME_END != 0 && (self.inherits_instance || self.flows.are_claimed())
    }

    pub(super) fn write_flow_frames(
        &mut self,
        now: Time,
        w: &mut WireWriter<'_>,
        sent: &mut SentPacket,
    ) {
        const FRAME_MAX: usize = 40;
        // R-RESUME-5: a claim that was lost is repeated; RESUME_END waits for the last one.
        if self.ends_claims() && w.room() >= FRAME_MAX {
            self.wants &= !say::RESUME_END;
            Frame::ResumeEnd {
                flows: self.flows.claims_delivered,
            }
            .encode(w);
            sent.eliciting = true;
            sent.note(SentFrame::Session {
                what: say::RESUME_END,
            });
        }
        while w.room() >= FRAME_MAX
            && let Some((flow, reason)) = self.flows.next_refusal()
        {
            Frame::Refused { flow, reason }.encode(w);
            sent.eliciting = true;
            sent.note(SentFrame::Refused(flow));
        }
        if self.inherits_instance {
            return;
        }
        while let Some(id) = self.flows.front_dirty() {
            let Some(flow) = self.flows.get_mut(id) else {
                self.flows.pop_dirty();
                continue;
            };
            let mut wants = flow.wants;
            let mut said = 0;
            let bits = [
                want::OPEN,
                want::RESUME,
                want::RESUMED,
                want::RESET,
                want::STOP,
                want::CREDIT,
                want::DEADLINE,
                want::DURABLE,
                want::COMMITTED,
                want::PAUSE,
            ];
            for bit in bits {
                if wants & bit == 0 {
                    continue;
                }
                if w.room() < FRAME_MAX {
                    break;
                }
                let frame = match bit {
                    want::OPEN => flow.options.open_frame(now, flow.id),
                    want::RESUME => Frame::Resume {
                        flow: id,
                        received: flow.recv.contiguous(),
                        flags: if flow.recv.is_all_received() {
                            Frame::RESUME_COMPLETE
                        } else {
                            0
                        },
                    },
                    want::RESUMED => Frame::Resumed {
                        flow: id,
                        received: flow.recv.contiguous(),
                    },
                    want::RESET => Frame::Reset {
                        flow: id,
                        code: flow.send.reset.unwrap_or(0),
                        final_size: flow.send.maybe_received_to(),
                    },
                    want::STOP => Frame::Stop {
                        flow: id,
                        code: flow.recv.stopped.unwrap_or(0),
                    },
                    want::CREDIT => Frame::FlowCredit {
                        flow: id,
                        max: flow.recv.take_credit(),
                    },
                    want::DEADLINE => Frame::Deadline {
                        flow: id,
                        seq: flow.deadline_seq,
                        remaining_ms: flow.options.deadline.map(|d| d.since(now).as_millis()),
                    },
                    want::DURABLE => Frame::Durable {
                        flow: id,
                        offset: flow.recv.durable(),
                    },
                    want::COMMITTED => Frame::Committed {
                        flow: id,
                        offset: flow.committed,
                    },
                    _ => Frame::FlowPause {
                        flow: id,
                        seq: flow.pause_out.0,
                        paused: flow.pause_out.1,
                        reason: flow.pause_out.2,
                    },
                };
                frame.encode(w);
                wants &= !bit;
                said |= bit;
            }
            flow.wants = wants;
            if said != 0 {
                sent.eliciting = true;
                sent.note(SentFrame::Flow {
                    flow: id,
                    what: said,
                });
            }
            while w.room() >= FRAME_MAX
                && let Some((path, seq, max_sent)) = flow.grants_out.take_grant()
            {
                Frame::Grant {
                    seq,
                    flow: id,
                    path,
                    max_sent,
                }
                .encode(w);
                sent.eliciting = true;
                sent.note(SentFrame::Grant { flow: id, path });
            }
            while w.room() >= FRAME_MAX
                && let Some((path, spent)) = flow.grants_in.take_spent()
            {
                Frame::Spent {
                    flow: id,
                    path,
                    sent: spent,
                }
                .encode(w);
                sent.eliciting = true;
                sent.note(SentFrame::Spent { flow: id, path });
            }
            if flow.wants != 0 || flow.grants_in.wants() || flow.grants_out.wants() {
                break;
            }
            self.flows.pop_dirty();
        }
    }

    pub(super) fn write_datagrams(
        &mut self,
        now: Time,
        slot: usize,
        taker: &DatagramPath,
        w: &mut WireWriter<'_>,
        sent: &mut SentPacket,
    ) {
        let path_room = room(self.paths.at(slot).mtu.current());
        while let Some(next) = (self.datagrams).next(now, w.room(), w.room() >= path_room, taker) {
            Frame::Datagram {
                context: next.context,
                bytes: &next.bytes,
            }
            .encode(w);
            if next.acknowledges {
                self.note_ack_datagram(now, slot, next.bytes.len());
            }
            if let Some(flow) = next.repairs {
                self.note_repair_datagram(slot, flow, next.bytes.len() as u64);
            }
            let path = self.paths.at(slot);
            sent.eliciting = true;
            if next.acknowledges && path.gated {
                // R-GRANT-6: no payload, for which there would have to be a grant.
                continue;
            }
            path.payload_out += next.bytes.len() as u64;
            path.copied_out += u64::from(next.is_copy) * next.bytes.len() as u64;
        }
    }

    #[inline]
    pub(super) fn write_data(
        &mut self,
        now: Time,
        slot: usize,
        first: FlowId,
        mut session_room: u64,
        w: &mut WireWriter<'_>,
        sent: &mut SentPacket,
    ) {
        let path_id: PathId = self.paths.at(slot).id;
        let gated = self.paths.at(slot).gated;
        let mut next = Some(first);
        let mut out = 0;
        let send_buffer = self.config.send_buffer;
        let mut drawn = Vec::new();
        while let Some(id) = next {
            let leaves_lost = self.leaves_lost_to_other(now, slot, id);
            let flow = self
                .flows
                .get_mut(id)
                .expect("flows in line are in the table");
            let offset_max = flow.send.end();
            let head = Frame::data_head_len(id, offset_max, w.room());
            if w.room() < head + DATA_MIN {
                break;
            }
            let mut max = w.room() - head;
            if gated {
                max = max.min(flow.grants_in.room(path_id) as usize);
            }
            let taken = match leaves_lost {
                true => flow.send.take_unsent(max, session_room),
                false => flow.send.take(max, session_room),
            };
            let Some((offset, len, fin, new)) = taken else {
                break;
            };
            // take() chose a length; the header for it is at most as long as assumed.
            let at = w.written();
            Frame::encode_data_head(w, id, offset, len, fin);
            flow.send.copy(offset, w.reserve(len));
            debug_assert!(w.written() > at);
            session_room -= new;
            self.credit.sent += new;
            out += len as u64;
            // A source is asked for more as its bytes leave. ACKs alone would let it follow their clock: a receiver that was
            // asked for one ACK per many packets delays it if fewer arrive, and the path idles meanwhile.
            if flow.has_source && flow.take_writable(send_buffer) {
                drawn.push(id);
            }
            if gated {
                flow.grants_in.on_sent(path_id, len as u64);
            }
            sent.eliciting = true;
            sent.note(SentFrame::Data(SentData {
                flow: id,
                offset,
                len: len as u16,
                fin,
            }));
            if w.room() < DATA_MIN + 24 {
                break;
            }
            next = self.flows.next_for(path_id, gated, session_room);
        }
        for id in drawn {
            self.emit(SessionEvent::Writable(id));
        }
        self.flows.on_packet_filled(first);
        self.paths.at(slot).payload_out += out;
    }
}
