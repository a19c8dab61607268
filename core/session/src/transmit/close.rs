//! Packets that end or suspend a session: CLOSE, its answer, SUSPEND.

use d2tp_time::Time;
use d2tp_wire::{DATA_HEADER_BYTES, Frame, ReasonCode, TAG_BYTES, WireWriter};

use super::Transmit;
use crate::config::PATHS_MAX;
use crate::event::SessionEnd;
use crate::link::Addresses;
use crate::sent_packet::{SentFrame, SentPacket};
use crate::session::{Session, say};

/// R-CLOSE-3: how often CLOSE is sent at most. With probe timeouts that double up to two seconds
/// this takes about ten seconds on a path that loses everything.
const CLOSE_SAID_MAX: u32 = 8;
/// The most bytes of a CLOSE frame: its type, a code, the length of its text, and that.
const CLOSE_FRAME_BYTES_MAX: usize = 1 + 8 + 8 + Frame::CLOSE_TEXT_MAX;
/// The smallest packet with CLOSE, so that its answer to an address that is not validated is no larger.
const CLOSE_BYTES_MIN: usize = 64;
/// The size of the answer to CLOSE: a header, one ACK frame of one range, a tag.
const LEAVE_BYTES_MAX: usize = 64;

impl Session {
    pub(super) fn transmit_close(&mut self, now: Time, buf: &mut [u8]) -> Option<Transmit> {
        if self.wants & say::CLOSE == 0 {
            return None;
        }
        let (code, text) = *self.closing.clone().expect("asked for by the caller");
        let mut order = [0; PATHS_MAX];
        let n = self.paths.order(&mut order);
        let slot = order[..n].first().copied();
        let transmit = slot.and_then(|slot| {
            let path = self.paths.at(slot);
            let at = path.addresses;
            let room = usize::try_from(path.unproved_room()).unwrap_or(usize::MAX);
            let room = room.min(path.mtu.current()).min(buf.len());
            let mut close = [0; CLOSE_FRAME_BYTES_MAX];
            let mut w = WireWriter::new(&mut close);
            Frame::Close {
                code,
                text: text.as_bytes(),
            }
            .encode(&mut w);
            let close_bytes = w.written();
            let close = &close[..close_bytes];
            // R-PATH-2: the answer must not be larger than the packet.
            if room < (DATA_HEADER_BYTES + close.len() + TAG_BYTES).max(CLOSE_BYTES_MIN) {
                return None;
            }
            let mut sent = SentPacket::new(now);
            // R-CLOSE-5: in front, since nothing after CLOSE is read. They are repeated with CLOSE. An
            // ACK that was sent may be lost.
            let acks_end = room - TAG_BYTES - close.len();
            let mut w = WireWriter::new(&mut buf[DATA_HEADER_BYTES..acks_end]);
            for path in self.paths.iter() {
                path.acks.write(path.id, now, &mut w, &mut sent);
            }
            let acks_end = DATA_HEADER_BYTES + w.written();
            let written = acks_end + close.len();
            buf[acks_end..written].copy_from_slice(close);
            let end = (written + TAG_BYTES).max(CLOSE_BYTES_MIN);
            buf[written..end - TAG_BYTES].fill(0);
            sent.bytes = end as u16;
            sent.eliciting = true;
            sent.note(SentFrame::Session { what: say::CLOSE });
            self.seal_packet(slot, sent, &mut buf[..end]);
            Some(Transmit {
                session: None,
                link: at.link,
                local: at.local,
                remote: at.remote,
                len: end,
                segment: end,
            })
        });
        if let Some(fault) = self.peer_fault.take() {
            // R-CLOSE-2: CLOSE is sent once; nothing is kept for a peer that breaks the rules.
            self.end(SessionEnd::Fault(*fault));
        } else if transmit.is_some() {
            // R-CLOSE-3: CLOSE is repeated until it is acknowledged, or was sent often enough.
            self.wants &= !say::CLOSE;
            self.close_sent += 1;
            if self.close_sent > CLOSE_SAID_MAX {
                self.end(SessionEnd::LocalUnheard);
                return None;
            }
        }
        transmit
    }

    /// R-CLOSE-1: writes the last packet of a session that the peer closed: the acknowledgement of
    /// CLOSE.
    pub(crate) fn answer_close(&mut self, now: Time, slot: usize, number: u64) {
        let path = self.paths.at(slot);
        let (id, at) = (path.id, path.addresses);
        let room = path.unproved_room();
        let mut packet = vec![0; LEAVE_BYTES_MAX];
        let mut w = WireWriter::new(&mut packet[DATA_HEADER_BYTES..LEAVE_BYTES_MAX - TAG_BYTES]);
        if !Frame::encode_ack(&mut w, id, 0, std::iter::once((number, number))) {
            return;
        }
        let end = DATA_HEADER_BYTES + w.written() + TAG_BYTES;
        packet.truncate(end);
        if room < end as u64 || self.keys.is_none() {
            return;
        }
        let mut sent = SentPacket::new(now);
        sent.bytes = end as u16;
        self.seal_packet(slot, sent, &mut packet);
        self.close_ack = Some(Box::new((at, packet)));
    }

    /// R-SUSPEND-3: sends SUSPEND on one path after another; each path is then closed.
    pub(super) fn transmit_suspend(
        &mut self,
        now: Time,
        reason: ReasonCode,
        buf: &mut [u8],
    ) -> Option<Transmit> {
        let mut order = [0; PATHS_MAX];
        let n = self.paths.order(&mut order);
        let transmit = order[..n].first().copied().map(|slot| {
            let at = self.paths.at(slot).addresses;
            let transmit = self.fill_alone(now, slot, at, Frame::Suspend { reason }, buf);
            let path = self.remove_path(slot);
            self.announce_gone(path);
            transmit
        });
        if self.paths.is_empty() {
            self.suspending = None;
            self.suspend_if_idle(now, reason);
        }
        transmit
    }

    /// Writes a packet with a single frame, sent to `at` instead of the path's own address.
    pub(super) fn fill_alone(
        &mut self,
        now: Time,
        slot: usize,
        at: Addresses,
        frame: Frame<'_>,
        buf: &mut [u8],
    ) -> Transmit {
        let mut w = WireWriter::new(&mut buf[DATA_HEADER_BYTES..]);
        frame.encode(&mut w);
        let end = DATA_HEADER_BYTES + w.written() + TAG_BYTES;
        let mut sent = SentPacket::new(now);
        sent.bytes = end as u16;
        sent.eliciting = true;
        let path = self.paths.at(slot);
        let (elsewhere, told) = (path.addresses != at, path.tx_bytes);
        self.seal_packet(slot, sent, &mut buf[..end]);
        if elsewhere {
            // R-PATH-2 limits bytes to the current address; this packet goes to another one.
            self.paths.at(slot).tx_bytes = told;
        }
        Transmit {
            session: None,
            link: at.link,
            local: at.local,
            remote: at.remote,
            len: end,
            segment: end,
        }
    }
}
