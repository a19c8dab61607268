//! Sending: chooses the path, collects frames from their owners in a fixed order, and seals the
//! packet.
//!
//! One call fills one buffer with datagrams of one path, all of one size except the last, ready for
//! one GSO send. The order within a packet: challenge, ACK, path, session, flows, data.

mod close;
mod frames;

use std::net::{IpAddr, SocketAddr};

use d2tp_seal::KEY_UPDATE_PACKETS;
use d2tp_time::Time;
use d2tp_wire::{
    CID_BYTES, DATA_HEADER_BYTES, FlowId, Frame, PacketKind, PathStatus, TAG_BYTES, WireWriter,
};

use crate::config::PATHS_MAX;
use crate::event::{SessionEnd, SessionEvent};
use crate::link::LinkId;
use crate::path;
use crate::path::{PathState, SessionPath};
use crate::path_scheduler::{CopyMode, PacketCopy, SendBacklog, UNSENT_MAX};
use crate::sent_packet::SentPacket;
use crate::session::{Session, on_frame_fate, say};
use crate::session_id::SessionId;
use crate::session_state::SessionState;
use crate::trace::TraceRecord;

/// The most datagrams of a batch: the limit of kernels for one GSO send.
const BATCH_MAX: usize = 64;
/// The most bytes of a batch.
const BATCH_BYTES_MAX: usize = 65_000;
/// The most zeros that a packet is given so that datagrams which wait may follow in its batch: what an ACK took of the
/// batch's first packet.
const BATCH_PADDING_MAX: usize = 32; // a guess: an ACK frame with few ranges

/// The smallest room in which a packet is begun, in bytes.
const ROOM_MIN: usize = 17;
/// The smallest piece of data at the end of a packet, in bytes.
const DATA_MIN: usize = 32;

/// A batch to send: `len` bytes of the buffer, in datagrams of `segment` bytes (the last may be
/// shorter).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// The session that sends, if it is established.
    pub session: Option<SessionId>,
    /// The link to send on.
    pub link: LinkId,
    /// The source address, if the link has several.
    pub local: Option<IpAddr>,
    /// The destination address.
    pub remote: SocketAddr,
    /// The number of bytes used in the buffer.
    pub len: usize,
    /// The size of each datagram except the last, in bytes.
    pub segment: usize,
}

/// What one packet may contain.
struct PacketPermissions {
    now: Time,
    /// Whether the packet may hold ack-eliciting frames: the window has room, or the packet is a probe.
    eliciting: bool,
    /// Whether the packet is a probe of its path.
    probing: bool,
    /// Whether the packet may hold control frames of session and flows.
    control: bool,
    /// The slot of the first path in the scheduler's order, if it is another path.
    first: Option<usize>,
    /// The size of the batch's packets; zero for its first one.
    segment: usize,
}

/// The payload of one packet.
enum PacketPayload {
    /// New or lost bytes of this flow, then of others.
    Own(FlowId),
    /// Data of a packet that another path carries.
    Repeated(PacketCopy),
    /// Bytes of this flow that another path lost.
    Lost(FlowId),
}

impl Session {
    /// Writes the next batch into `buf`, if there is something to send.
    pub fn poll_transmit(&mut self, now: Time, buf: &mut [u8]) -> Option<Transmit> {
        if self.state == SessionState::Closed {
            return None;
        }
        if let Some(transmit) = self.poll_handshake(now, buf) {
            return Some(transmit);
        }
        self.keys.as_ref()?;
        if self.closing.is_some() {
            return self.transmit_close(now, buf);
        }
        if let Some(reason) = self.suspending {
            return self.transmit_suspend(now, reason, buf);
        }
        // R-SUSPEND-1
        if self.state != SessionState::Established {
            return None;
        }
        self.route_acks(now);
        self.route_ack_datagrams(now);
        self.update_steadiest(now);
        let mut order = [0; PATHS_MAX];
        let n = self.paths.order(&mut order);
        // Control frames of session and flows leave on the best path that can carry them.
        let control_slot = self.paths.for_control(&order[..n]);
        let n = self
            .paths
            .scheduling_order(&*self.path_scheduler, &mut order);
        let first = order[..n].first().copied();
        for slot in &order[..n] {
            if self.paths[*slot].driver_frozen {
                continue;
            }
            let first = first.filter(|first| first != slot);
            if let Some(t) = self.fill(now, *slot, control_slot == Some(*slot), first, buf) {
                let path = self.paths.at(*slot);
                if path.status == PathStatus::Gone && path.wants & path::want::STATUS == 0 {
                    // The path's last packet is on its way; if it is lost, another path repeats the
                    // report.
                    let reason = path.reason;
                    let path = self.remove_path(*slot);
                    self.announce_gone(path);
                    self.suspend_if_idle(now, reason);
                }
                return Some(t);
            }
        }
        None
    }

    /// Writes only an ACK that is due; other frames wait for the session's turn.
    pub(crate) fn poll_due_ack(&mut self, now: Time, buf: &mut [u8]) -> Option<Transmit> {
        let speaks = self.state == SessionState::Established && self.keys.is_some();
        if !speaks || self.closing.is_some() || self.suspending.is_some() {
            return None;
        }
        // R-PATH-3: a challenge that waits needs the little that an unproved address may be sent.
        let is_due = |p: &SessionPath| p.acks.due() <= now && !p.must_challenge();
        let due = self.paths.iter().position(is_due)?;
        let path = self.paths.at(due);
        let at = path.addresses;
        let room = usize::try_from(path.unproved_room()).unwrap_or(usize::MAX);
        let size = path.mtu.current().min(room).min(buf.len());
        if size < ROOM_MIN + DATA_HEADER_BYTES + TAG_BYTES {
            return None;
        }
        let terms = PacketPermissions {
            now,
            eliciting: false,
            probing: false,
            control: false,
            first: None,
            segment: 0,
        };
        let n = self.write_packet(due, &terms, &mut buf[..size]);
        (n > 0).then_some(Transmit {
            session: None,
            link: at.link,
            local: at.local,
            remote: at.remote,
            len: n,
            segment: n,
        })
    }

    fn poll_handshake(&mut self, now: Time, buf: &mut [u8]) -> Option<Transmit> {
        if self.handshake.as_ref()?.next_at() > now {
            return None;
        }
        let claims = self.claims();
        // R-KEM-8
        let early_data = match self.requires_hybrid {
            true => Vec::new(),
            false => self.early_data(now),
        };
        let trailer = self.syn_trailer();
        let handshake = self.handshake.as_mut()?;
        // R-HS-2: an epoch is used for one SYN only, and was reserved before.
        if self.epochs.is_empty() {
            // R-HS-16: without an epoch no SYN can be sent, and the driver is informed of that.
            handshake.failed = true;
            if self.epochs.start == u32::MAX {
                self.end(SessionEnd::EpochsExhausted);
            } else {
                self.emit(SessionEvent::EpochsUsedUp);
            }
            return None;
        }
        let epoch = self.epochs.start;
        // R-TICKET-3
        let ticket = self.ticket.as_deref_mut();
        let ticket = ticket.filter(|_| self.paths.is_empty());
        let syn = handshake.poll_syn(
            now,
            buf,
            &self.local,
            &self.peer,
            self.instance,
            epoch,
            claims,
            &early_data,
            ticket,
            trailer.zip(Some(self.session_secret.as_deref())),
            &self.config,
            &mut self.rng,
        )?;
        if syn.is_new {
            self.epochs.start += 1;
        }
        let (to, epoch) = (syn.to, syn.epoch);
        // A copy belongs to the same handshake, and has the same epoch.
        if let Some(trace) = self.trace.as_mut().filter(|_| syn.is_new) {
            let link = to.link;
            trace
                .at(now)
                .note(TraceRecord::HandshakeSent { link, epoch });
        }
        Some(Transmit {
            session: None,
            link: to.link,
            local: to.local,
            remote: to.remote,
            len: syn.len,
            segment: syn.len,
        })
    }

    /// Answers a challenge at the address from which it came, which may be the path's previous one.
    fn fill_answer(&mut self, now: Time, slot: usize, buf: &mut [u8]) -> Option<Transmit> {
        let path = self.paths.at(slot);
        let (nonce, at) = path.take_foreign_answer()?;
        Some(self.fill_alone(now, slot, at, Frame::Rsp { nonce }, buf))
    }

    /// Sends a challenge to a path's previous address.
    fn fill_before(&mut self, now: Time, slot: usize, buf: &mut [u8]) -> Option<Transmit> {
        let at = self.paths.at(slot).previous_to_ask()?;
        let nonce = self.rng.array();
        self.paths.at(slot).challenge_previous(nonce, at);
        Some(self.fill_alone(now, slot, at, Frame::Chg { nonce }, buf))
    }

    fn seal_packet(&mut self, slot: usize, sent: SentPacket, packet: &mut [u8]) {
        if self.paths.at(slot).recovery.is_skip_due() {
            let draw = self.rng.u64();
            self.paths.at(slot).recovery.skip(draw);
        }
        let keys = self.keys.as_mut().expect("packets are sent with keys only");
        self.sealed_packets += 1;
        if self.sealed_packets >= KEY_UPDATE_PACKETS {
            self.sealed_packets = 0;
            keys.advance();
            if let Some(trace) = &mut self.trace {
                trace
                    .at(sent.at)
                    .note(TraceRecord::KeysUpdated { sent: true });
            }
        }
        let path = self.paths.at(slot);
        let number = path.recovery.next_number();
        packet[0] = PacketKind::Data.first_byte();
        packet[1..1 + CID_BYTES].copy_from_slice(&path.cid_remote.0);
        path.last_tx = sent.at;
        path.control
            .on_sent(sent.at, packet.len() as u64, path.payload_out, path.gated);
        if let Some(trace) = &mut self.trace {
            let plaintext = &packet[DATA_HEADER_BYTES..packet.len() - TAG_BYTES];
            let bytes = packet.len();
            trace
                .at(sent.at)
                .packet(true, path.id, number, bytes, plaintext);
        }
        path.recovery.on_sent(sent);
        if !path.validated {
            path.tx_bytes += packet.len() as u64;
        }
        keys.seal(path.id, number, packet);
        let Session {
            paths,
            flows,
            issued,
            wants: says,
            gone,
            ..
        } = self;
        let path = paths.at(slot);
        let (id, mut own) = (path.id, path.wants);
        path.recovery.give_up_oldest(|said, arrived| {
            on_frame_fate(
                said,
                arrived,
                flows,
                Some((id, &mut own)),
                issued,
                says,
                gone,
            );
        });
        path.wants = own;
    }

    fn fill(
        &mut self,
        now: Time,
        slot: usize,
        control: bool,
        first: Option<usize>,
        buf: &mut [u8],
    ) -> Option<Transmit> {
        if let Some(t) = self.fill_answer(now, slot, buf) {
            return Some(t);
        }
        if let Some(t) = self.fill_before(now, slot, buf) {
            return Some(t);
        }
        let path = self.paths.at(slot);
        let mtu = path.mtu.current();
        let rate = path.pacing_rate(now);
        path.pacer.set_rate(now, rate, mtu as u64);
        path.paced_until = Time::NEVER;
        let addresses = path.addresses;
        let capacity = buf.len().min(BATCH_BYTES_MAX);
        let (mut at, mut segment) = (0, 0);
        for _ in 0..BATCH_MAX {
            let path = self.paths.at(slot);
            let size = mtu
                .min(if segment == 0 { mtu } else { segment })
                .min(capacity - at)
                .min(usize::try_from(path.unproved_room()).unwrap_or(usize::MAX));
            if size < ROOM_MIN + DATA_HEADER_BYTES + TAG_BYTES || (segment > 0 && size < segment) {
                break;
            }
            let probing = path.probe_now || path.must_challenge();
            let window = path.room() >= size as u64;
            let paced = path.pacer.allowance(now) >= size as u64;
            if window && !paced && !probing {
                path.paced_until = path.pacer.next_send().max(now);
            }
            let terms = PacketPermissions {
                now,
                eliciting: probing || (window && paced),
                probing,
                control,
                first,
                segment,
            };
            let n = self.write_packet(slot, &terms, &mut buf[at..at + size]);
            if n == 0 {
                // A datagram that is larger than this batch's segments begins the next batch.
                let has_larger = size < mtu && self.datagram_path(now, slot).is_some();
                if terms.eliciting && !probing && !has_larger {
                    self.paths.at(slot).recovery.on_nothing_to_send();
                }
                break;
            }
            let path = self.paths.at(slot);
            path.probe_now = false;
            if let Some(stream) = &mut path.stream {
                stream.room = stream.room.saturating_sub(n as u64);
            }
            at += n;
            if segment == 0 {
                segment = n;
            }
            if n < segment {
                break;
            }
        }
        if at == 0 {
            at = self.write_mtu_probe(now, slot, buf)?;
            segment = at;
        }
        Some(Transmit {
            session: None,
            link: addresses.link,
            local: addresses.local,
            remote: addresses.remote,
            len: at,
            segment,
        })
    }

    fn write_mtu_probe(&mut self, now: Time, slot: usize, buf: &mut [u8]) -> Option<usize> {
        let path = self.paths.at(slot);
        let size = path.mtu.probe(path.payload_in + path.payload_out)?;
        if !path.validated
            || path.state != PathState::Active
            || !path.recovery.rtt.is_measured()
            || path.status != PathStatus::Available
            || path.gated
            || path.room() < size as u64
            || buf.len() < size
        {
            return None;
        }
        path.mtu.on_probe_sent();
        let mut w = WireWriter::new(&mut buf[DATA_HEADER_BYTES..size - TAG_BYTES]);
        Frame::Ping.encode(&mut w);
        let rest = w.room();
        w.zeros(rest);
        let mut sent = SentPacket::new(now);
        sent.bytes = size as u16;
        sent.eliciting = true;
        sent.mtu_probe = true;
        self.seal_packet(slot, sent, &mut buf[..size]);
        Some(size)
    }

    /// Writes and seals one packet into `buf`. Returns its length; zero if there is nothing to
    /// send.
    fn write_packet(&mut self, slot: usize, terms: &PacketPermissions, buf: &mut [u8]) -> usize {
        let now = terms.now;
        let awaits_hybrid = self.awaits_hybrid();
        let session_room = self.credit.peer_max.saturating_sub(self.credit.sent);
        let flush_control = terms.control
            && (self.wants_with_room(slot) & !say::RESUME_END != 0
                || (!awaits_hybrid
                    && (self.ends_claims()
                        || (self.flows.has_dirty() && !self.inherits_instance)
                        || self.flows.has_refusals()))
                || self.gone.iter().any(|g| g.must_send)
                || self.issued.values().any(|i| i.must_send));
        let path = self.paths.at(slot);
        let (path_id, gated) = (path.id, path.gated);
        // An address that is not validated is challenged first; the few bytes that may be sent
        // there are not for payload.
        let proves = path.validated || buf.len() >= DATA_UNPROVED_MIN;
        let payload = if terms.eliciting && proves && !awaits_hybrid {
            self.next_payload(slot, terms, session_room)
        } else {
            None
        };
        let mut datagrams = match terms.eliciting && !awaits_hybrid {
            true => self.datagram_path(now, slot),
            false => None,
        };
        let path = self.paths.at(slot);
        let path_wants = path.wants != 0 || path.has_answer();
        let ack_due = path.acks.due() <= now && !self.is_ack_rerouted(slot);
        let carries = self.carries_acks(path_id);
        let other = payload.is_some()
            || datagrams.is_some()
            || carries
            || (terms.eliciting && (path_wants || flush_control));
        let path = self.paths.at(slot);
        if !other && !ack_due {
            return 0;
        }
        // R-GRANT-6: on a metered path control frames wait for their budget. Probes, challenges, frames beside
        // granted payload, and ACKs within their budget do not.
        let held = gated && !terms.probing && !carries && !path.control.may_send(now);
        let flush_control = flush_control && !held;
        // Granted payload, too.
        let repairs = datagrams.as_ref().is_some_and(|by| by.takes_repairs);
        if held && payload.is_none() && !repairs {
            path.paced_until = path.paced_until.min(path.control.next_send_at());
            return 0;
        }

        if held && let Some(by) = &mut datagrams {
            by.takes_acks = false;
        }

        let end = buf.len() - TAG_BYTES;
        let mut sent = SentPacket::new(now);
        let mut w = WireWriter::new(&mut buf[DATA_HEADER_BYTES..end]);
        let mut least = 0;

        // 1. A challenge: ACK ranges take what room there is, and an unproved address is sent little.
        if terms.eliciting && !held {
            least = self.write_challenge(slot, &mut w, &mut sent);
        }
        // 2. ACKs of packets that arrived on this path.
        let path = self.paths.at(slot);
        if (path.acks.is_wanted() || ack_due) && path.acks.write(path_id, now, &mut w, &mut sent) {
            path.acks.on_ack_sent();
            path.on_direct_ack_sent(now);
        }
        if carries {
            self.write_carried_acks(now, slot, &mut w, &mut sent);
        }
        if terms.eliciting {
            // 3. Control frames of the path.
            if !held {
                let padded = self.write_path_frames(slot, &mut w, &mut sent);
                least = least.max(padded);
            }
            // 4. and 5. Control frames of the session and of flows.
            if flush_control {
                self.write_session_frames(&mut w, &mut sent);
                if !awaits_hybrid {
                    self.write_flow_frames(now, &mut w, &mut sent);
                }
            }
            // 6. Datagrams, then data.
            if let Some(taker) = &datagrams {
                self.write_datagrams(now, slot, taker, &mut w, &mut sent);
            }
            match payload {
                Some(PacketPayload::Own(flow)) => {
                    self.write_data(now, slot, flow, session_room, &mut w, &mut sent);
                }
                Some(PacketPayload::Lost(flow)) => self.write_lost(slot, flow, &mut w, &mut sent),
                Some(PacketPayload::Repeated(packet)) => {
                    self.write_copy(slot, &packet, &mut w, &mut sent);
                }
                None => {}
            }
        }
        let written = w.written();
        if written == 0 {
            return 0;
        }
        let mut total = DATA_HEADER_BYTES + written + TAG_BYTES;
        let short = terms.segment.saturating_sub(total);
        if sent.eliciting && short <= BATCH_PADDING_MAX && !self.datagrams.is_empty() {
            least = least.max(terms.segment);
        }
        if total < least && buf.len() >= least {
            buf[DATA_HEADER_BYTES + written..least - TAG_BYTES].fill(0);
            total = least;
        }
        sent.bytes = total as u16;
        let path = self.paths.at(slot);
        if sent.eliciting {
            path.pacer.on_sent(total as u64);
            let in_flight = path.recovery.in_flight + total as u64;
            sent.app_limited = path.is_window_underused(in_flight);
        }
        self.seal_packet(slot, sent, &mut buf[..total]);
        total
    }

    /// Chooses the payload of a packet on this path.
    #[inline]
    fn next_payload(
        &mut self,
        slot: usize,
        terms: &PacketPermissions,
        session_room: u64,
    ) -> Option<PacketPayload> {
        // R-RESUME-5
        if self.inherits_instance {
            return None;
        }
        let path = self.paths.nth(slot);
        let (id, gated, takes_payload) = (path.id, path.gated, path.takes_payload());
        if self.paths.len() > 1
            && let Some(flow) = self.next_lost(terms.now, slot)
        {
            return Some(PacketPayload::Lost(flow));
        }
        if !takes_payload {
            return None;
        }
        if self.paths.len() == 1 {
            return self
                .flows
                .next_for(id, gated, session_room)
                .map(PacketPayload::Own);
        }
        let copies = self.path_scheduler.copies();
        if copies == CopyMode::All
            && let Some(packet) = self.next_copy(terms.now, slot, copies)
        {
            return Some(PacketPayload::Repeated(packet));
        }
        if copies != CopyMode::All
            && self.flows.routed
            && let Some(packet) = self.next_copy(terms.now, slot, CopyMode::Chosen)
        {
            return Some(PacketPayload::Repeated(packet));
        }
        if let Some(flow) = self.flows.next_for(id, gated, session_room) {
            return (self.takes(slot, flow, terms.first)).then_some(PacketPayload::Own(flow));
        }
        if copies == CopyMode::All || !self.config.reinjection {
            return None;
        }
        self.next_copy(terms.now, slot, copies)
            .map(PacketPayload::Repeated)
    }

    /// Whether a path takes a flow's bytes now, or leaves them to the first path in order.
    fn takes(&mut self, slot: usize, flow: FlowId, first: Option<usize>) -> bool {
        let Some(first) = first else { return true };
        let (own, first) = (self.paths.nth(slot), self.paths.nth(first));
        // The first path must be able to carry the bytes, and its next ACK or timer continues here.
        let busy = first.recovery.is_waiting() || first.paced_until != Time::NEVER;
        let works = first.takes_payload() && first.recovery.rtt.is_measured();
        if !works || !busy || first.gated {
            return true;
        }
        let window = self.flows.get(flow).map_or(u64::MAX, |f| f.send.window());
        let waiting = SendBacklog {
            unsent: self.flows.unsent(UNSENT_MAX),
            window: window.min(self.config.send_buffer),
        };
        let (own, first) = (own.candidate(), first.candidate());
        self.path_scheduler.takes(&own, &first, &waiting)
    }
}

/// The smallest packet that may carry payload to an address that is not validated.
const DATA_UNPROVED_MIN: usize = 600;

/// The sequence number of the PATH_STATUS of a closed path: the last one.
const PATH_GONE_SEQ: u64 = u32::MAX as u64;

/// R-PATH-9: the size of a probe of a quiet gated path, in bytes. Higher: costs more money. Lower
/// than a challenge with a short ACK: a server could answer only the second probe from an address that
/// is not validated.
const PROBE_GATED_BYTES: usize = 128;
