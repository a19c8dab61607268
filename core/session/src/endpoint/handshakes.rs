//! The server's side of handshakes: SYNs and WAKEs, early data, and the confirming packet.

use std::collections::BTreeSet;

use d2tp_seal::{
    HandshakeSecrets, PacketKeys, Responder, Rng, SYN_ACK_OVERHEAD_BYTES, SessionSecret, SynMacs,
    TICKET_BYTES, TicketHolder,
};
use d2tp_time::{Span, Time};
use d2tp_wire::{
    CID_BYTES, Cid, DATA_HEADER_BYTES, DATAGRAM_FIRST_BYTES, FlowId, PacketKind, PathId,
    ReasonCode, TAG_BYTES, VERSION, WireReader, WireWriter,
};

use super::{Admission, CidRoute, Endpoint, UNADMITTED_WINDOW_BYTES};
use crate::cid_share;
use crate::claim::{FlowClaim, SynClaims};
use crate::client_handshake::PROLOGUE;
use crate::config::SPARE_PATHS;
use crate::early_packets::EarlyPackets;
use crate::event::SessionEvent;
use crate::half_open::{HALF_OPEN_MAX, HalfOpen, RepeatedSyn};
use crate::handshake_budget::PROVED_HANDSHAKES_PER_SECOND;
use crate::handshake_ownership::HandshakeOwnership;
use crate::hibernated::InstanceKey;
use crate::key_exchange_state::{HybridAnswer, HybridPolicy};
use crate::link::Addresses;
use crate::path::SessionPath;
use crate::pending_lookup::PendingLookup;
use crate::session::Session;
use crate::session_id::SessionId;
use crate::session_state::Role;
use crate::stream_path_state::StreamPathId;
use crate::syn::{Syn, SynAck, SynAckBody, SynOrigin};

/// R-TICKET-4: the number of WAKEs of a host per second that may be replays and are answered without a
/// cookie. Each costs two X25519 operations: about 1 ms of a second in total.
const DOUBTFUL_WAKES_PER_SECOND: u32 = 20; // a guess
/// R-TICKET-4: the number of WAKEs of a host per second that may be replays, or are not of the holder of their ticket, up to
/// which the next ones are read under load. Reading one costs about 15 µs, most of it for hashes.
const DOUBTFUL_WAKES_READ: u32 = 1_000; // a guess: a 60th of a core
/// The smallest SYN or WAKE that is read: its answer needs that much.
pub(crate) const SYN_BYTES_MIN: usize = 160;
/// How many times longer a handshake may be half open if its SYN came without padding: an answer of 230
/// bytes and the first packet after it take 10 s at 300 bit/s.
const HALF_OPEN_SLOW_TIMES: u64 = 6; // a guess: with a repetition or two
/// How long a cookie secret is used for new cookies.
const COOKIE_PERIOD: Span = Span::from_secs(120);

/// When the period of the cookie secret ends: at the same time for all workers. R-LONG-3: a cookie is accepted for a
/// period at least, and the device's answer to it takes a round trip.
fn end_of_cookie_period(now: Time, round_trip: Span) -> Time {
    let period = COOKIE_PERIOD.max(round_trip.times(2)).as_nanos();
    Time::from_nanos((now.as_nanos() / period + 1) * period)
}

impl Endpoint {
    pub(super) fn on_syn(
        &mut self,
        now: Time,
        from: Addresses,
        kind: PacketKind,
        version: u8,
        cid: Cid,
        bytes: &[u8],
    ) {
        if matches!(self.admission, Admission::Nobody) {
            return;
        }
        // R-HS-5: no answer is larger than the SYN. A device pads it so that the answer can be whole; over a
        // serial line (R-SERIAL-1) it comes without padding, and its answer is cut to its size.
        if bytes.len() < SYN_BYTES_MIN {
            return;
        }
        // R-HS-10
        if version != VERSION {
            let mut out = vec![PacketKind::Version.first_byte()];
            out.extend(cid.0);
            out.push(VERSION);
            return self.answer(from, out);
        }
        // R-HS-6: a sender that does not know this host's key costs one hash and gets no answer.
        if !self.cookie_secrets.verify_mac1(bytes) {
            return;
        }
        if now >= self.cookie_until {
            self.cookie_until = end_of_cookie_period(now, self.config.rtt_initial);
            let seed = self.cookie_seed_at(now);
            self.cookie_secrets.rotate(seed);
        }
        self.count_syn(now);
        let Some(mac1) = SynMacs::mac1(bytes) else {
            return;
        };
        match self.half_open.answer_repeated(now, from, cid) {
            Some(RepeatedSyn::Answer(answer)) => {
                return self.answer_within(bytes.len(), from, answer);
            }
            Some(RepeatedSyn::Late) => return,
            None => {}
        }
        if self.pass_copy(now, from, cid, bytes) {
            return;
        }
        // A valid ticket is harder to get than an address, so its sender need not prove the address
        // before. R-STREAM-5: the address of a connection is proved too.
        let proved = StreamPathId::of(&from.remote).is_some()
            || self.cookie_secrets.verify_mac2(bytes, from.remote);
        let is_doubtful = match kind {
            PacketKind::Wake => {
                let most = self.part_of_host(DOUBTFUL_WAKES_READ as usize);
                self.doubtful_wakes(now) > most
            }
            _ => true,
        };
        if self.is_loaded() && is_doubtful && !proved {
            // R-HS-7, R-TICKET-4: under load the address is proved first: no state, no public-key work.
            return self.answer_cookie(from, cid, mac1);
        }
        if self.is_loaded() && proved {
            // R-HS-22: who has one address cannot have all the public-key work that this host can do.
            let most = self.part_of_host(PROVED_HANDSHAKES_PER_SECOND as usize);
            if !self.handshake_budget.take(now, &from.remote, most) {
                return;
            }
        }
        self.expire_half_open(now);
        if self.half_open.len() >= self.part_of_host(HALF_OPEN_MAX) {
            return;
        }
        let message = &bytes[1 + CID_BYTES..bytes.len() - SynMacs::BYTES];
        let mut payload = [0; 2048];
        if message.len() > payload.len() {
            return;
        }
        let read = match kind {
            PacketKind::Wake => self.read_wake(message, &mut payload),
            _ => self.read_syn(message, &mut payload),
        };
        let Some((responder, syn)) = read else {
            if kind == PacketKind::Wake {
                self.count_doubtful_wake(now);
            }
            return;
        };
        let key = (responder.peer(), syn.instance);
        let origin = SynOrigin {
            from,
            cid,
            len: bytes.len(),
            mac1,
            proved,
        };
        let handshake = PendingLookup {
            key,
            origin,
            syn,
            responder,
        };
        if !self.owns(&key.0) {
            return self.pass_handshake(now, handshake);
        }
        self.look_up_or_answer(now, handshake);
    }

    /// Counts a handshake of this second.
    fn count_syn(&mut self, now: Time) {
        if now.since(self.syn_window.0) >= Span::from_secs(1) {
            self.syn_window = (now, 0);
        }
        self.syn_window.1 += 1;
    }

    /// Whether devices must prove their addresses first (R-HS-7).
    fn is_loaded(&self) -> bool {
        self.syn_window.1 as usize > self.part_of_host(self.config.cookie_above as usize)
            || self.half_open.len() >= self.part_of_host(HALF_OPEN_MAX) / 2
    }

    /// Handles a handshake that another worker read, within this worker's bounds.
    pub(super) fn accept_passed(&mut self, now: Time, handshake: PendingLookup) {
        self.count_syn(now);
        let origin = &handshake.origin;
        if self.is_loaded() && handshake.syn.ticket_of.is_none() && !origin.proved {
            // R-HS-7: the other worker accepts this cookie.
            if now >= self.cookie_until {
                self.cookie_until = end_of_cookie_period(now, self.config.rtt_initial);
                let seed = self.cookie_seed_at(now);
                self.cookie_secrets.rotate(seed);
            }
            let (from, cid, mac1) = (origin.from, origin.cid, origin.mac1);
            return self.answer_cookie(from, cid, mac1);
        }
        self.expire_half_open(now);
        if self.half_open.len() < self.part_of_host(HALF_OPEN_MAX) {
            self.look_up_or_answer(now, handshake);
        }
    }

    /// The seed of the cookie secret of a period. Workers of a host have the same.
    fn cookie_seed_at(&mut self, now: Time) -> [u8; 32] {
        let Some(mut seed) = self.cookie_seed else {
            return self.rng.array();
        };
        let period = end_of_cookie_period(now, self.config.rtt_initial)
            .as_nanos()
            .to_be_bytes();
        for (byte, of_period) in seed.iter_mut().zip(period) {
            *byte ^= of_period;
        }
        Rng::new(seed).array()
    }

    /// Answers a handshake, or has its session's record looked up first.
    pub(super) fn look_up_or_answer(&mut self, now: Time, handshake: PendingLookup) {
        let key = handshake.key;
        // A client that is not admitted is refused, even if a record exists elsewhere.
        let may_be_elsewhere =
            self.records_shared || (self.records_elsewhere && !self.has_session(key.0, key.1));
        if may_be_elsewhere && self.admission.admits(&key.0) {
            return self.pending_lookups.push(handshake);
        }
        self.finish_lookup(now, handshake);
    }

    /// R-TICKET-4: the number of WAKEs of this second that may be replays, or were not of the holder of their ticket.
    fn doubtful_wakes(&mut self, now: Time) -> usize {
        if now.since(self.wake_window.0) >= Span::from_secs(1) {
            self.wake_window = (now, 0);
        }
        self.wake_window.1 as usize
    }

    /// Counts one of [`Endpoint::doubtful_wakes`]; returns how many there were in this second.
    fn count_doubtful_wake(&mut self, now: Time) -> usize {
        let before = self.doubtful_wakes(now);
        self.wake_window.1 = self.wake_window.1.saturating_add(1);
        before + 1
    }

    /// Asks for a proof of address with a COOKIE, without a public-key operation and without state.
    fn answer_cookie(&mut self, from: Addresses, cid: Cid, mac1: [u8; 16]) {
        let nonce: [u8; 12] = self.rng.array();
        let mut out = vec![PacketKind::Cookie.first_byte()];
        out.extend(cid.0);
        out.extend(nonce);
        out.extend(self.cookie_secrets.seal_cookie(mac1, from.remote, nonce));
        self.answer(from, out);
    }

    fn read_syn(&mut self, message: &[u8], payload: &mut [u8]) -> Option<(Responder, Syn)> {
        let seed = self.rng.array();
        let (responder, n) = Responder::read(&self.local, PROLOGUE, seed, message, payload).ok()?;
        let syn = Syn::decode(&mut WireReader::new(&payload[..n]))?;
        Some((responder, syn))
    }

    /// R-TICKET-1: reads a SYN with a ticket. The ticket identifies its holder.
    fn read_wake(&mut self, body: &[u8], payload: &mut [u8]) -> Option<(Responder, Syn)> {
        let (ticket, message) = body.split_first_chunk::<TICKET_BYTES>()?;
        let (holder, ticket) = self.ticket_issuer.open(ticket).ok()?;
        let seed = self.rng.array();
        let (responder, n) = Responder::read_by_ticket(
            &self.local,
            holder.peer,
            &ticket,
            PROLOGUE,
            seed,
            message,
            payload,
        )
        .ok()?;
        let mut syn = Syn::decode(&mut WireReader::new(&payload[..n]))?;
        syn.ticket_of = Some(holder.epoch);
        (syn.instance == holder.instance).then_some((responder, syn))
    }

    /// Answers a decoded SYN.
    pub(super) fn answer_syn(
        &mut self,
        now: Time,
        origin: SynOrigin,
        syn: Syn,
        responder: Responder,
    ) {
        let SynOrigin { from, cid, len, .. } = origin;
        let key = (responder.peer(), syn.instance);
        let peer = key.0;
        // R-HS-8: a copy of a SYN gets the answer to the original and no state of its own, so that
        // copies do not displace the original.
        if let Some(half) = self.half_open.original(&key, syn.epoch) {
            // R-PATH-16
            half.answered_elsewhere |= half.addresses.remote != from.remote;
            let answer = half.answer.clone();
            return self.answer_within(len, from, answer);
        }
        let Some((mut answer, secret)) = self.admit(&syn, key) else {
            return;
        };
        if let SynAck::Accepted(body) = &mut answer {
            body.shorten_to(len.saturating_sub(1 + CID_BYTES + SYN_ACK_OVERHEAD_BYTES));
        }
        // R-TICKET-4: a WAKE that cannot be accepted, or a repeated one, may be a replay, and its
        // answer would cost two X25519 operations.
        let accepted = matches!(answer, SynAck::Accepted(_)) && self.half_open.of(&key).len() == 0;
        let most = self.part_of_host(DOUBTFUL_WAKES_PER_SECOND as usize);
        let is_doubtful = syn.ticket_of.is_some() && !origin.proved && !accepted;
        if is_doubtful && self.count_doubtful_wake(now) > most {
            return self.answer_cookie(from, cid, origin.mac1);
        }
        let Some((secrets, out)) = seal_syn_ack(cid, responder, &answer) else {
            return;
        };
        let room = (len as u64).saturating_sub(out.len() as u64);
        self.answer(from, out.clone());
        if let SynAck::Accepted(body) = answer {
            let suite = d2tp_seal::CipherSuite::from_code(body.suite).expect("we chose it");
            let requires_hybrid = syn.hybrid.is_some_and(|hybrid| hybrid.required);
            // R-KEM-6
            let mut keys = PacketKeys::with_secret(suite, &secrets, secret.as_deref(), false);
            if body.hybrid == HybridAnswer::Exchange {
                keys.await_exchange(&secrets);
            }
            // The stored body has the peer's view reversed: the ids that the device gave us.
            let own_cids: Vec<Cid> = std::iter::once(body.cid)
                .chain(body.spare.iter().map(|s| s.0))
                .collect();
            let theirs = SynAckBody {
                cid,
                token: [0; 16],
                suite: body.suite,
                resumed: body.resumed,
                session_credit: syn.session_credit,
                flow_credit: syn.flow_credit,
                spare: syn.spare.iter().map(|c| (*c, [0; 16])).collect(),
                ticket: None,
                hybrid: body.hybrid,
            };
            // R-HS-17: an answer takes long over a line whose SYN came without padding.
            let expires = match len < DATAGRAM_FIRST_BYTES {
                true => now + self.config.half_open_max.times(HALF_OPEN_SLOW_TIMES),
                false => now + self.config.half_open_max,
            };
            let index = self.half_open.insert(HalfOpen {
                peer,
                instance: syn.instance,
                epoch: syn.epoch,
                keys,
                own_cids: own_cids.clone(),
                body: theirs,
                addresses: from,
                requires_hybrid,
                answer: out,
                answered_elsewhere: false,
                room,
                expires,
                repeated: 0,
                early: None,
                ownership: HandshakeOwnership::default(),
            });
            // The device's first packet may arrive on any of its links.
            for (cid, n) in own_cids.iter().zip(0..) {
                self.routes.insert(
                    *cid,
                    CidRoute::HalfOpen {
                        index: index as u32,
                        path: PathId(n),
                    },
                );
            }
            if let Some(oldest) = self.half_open.excess(&key) {
                self.drop_half_open(oldest);
            }
            let Syn {
                claims, early_data, ..
            } = syn;
            // R-KEM-8
            let may_send = !requires_hybrid || body.hybrid == HybridAnswer::SecretUsed;
            // R-HS-19
            if may_send && self.admission.admits(&peer) {
                self.prepare_early_packets(now, index, claims, early_data, room);
            }
        }
    }

    /// Answers a SYN of `len` bytes, unless the answer is larger (R-HS-5).
    fn answer_within(&mut self, len: usize, to: Addresses, answer: Vec<u8>) {
        if answer.len() <= len {
            self.answer(to, answer);
        }
    }

    /// R-HS-21: tells a device that its session cannot be looked up now. A refusal would end it.
    pub(super) fn answer_later(&mut self, origin: &SynOrigin, responder: Responder) {
        if let Some((_, out)) = seal_syn_ack(origin.cid, responder, &SynAck::Later) {
            self.answer(origin.from, out);
        }
    }

    /// Prepares early packets for a half-open handshake, if it claims flows of a known session.
    fn prepare_early_packets(
        &mut self,
        now: Time,
        index: usize,
        claims: SynClaims,
        early_data: Option<Vec<u8>>,
        room: u64,
    ) {
        let Some(half) = self.half_open.get_mut(index) else {
            return;
        };
        let (key, epoch) = ((half.peer, half.instance), half.epoch);
        let (cid, credit) = (half.body.cid, half.body.session_credit);
        let mut opened = Vec::new();
        let id = if !claims.list.is_empty() {
            self.restore_tentative(now, key, epoch)
        } else if let Some(early_data) = early_data.filter(|_| self.config.early_data) {
            let credits = (half.body.session_credit, half.body.flow_credit);
            self.handle_early_data(now, key, epoch, credits, &early_data, &mut opened)
        } else {
            None
        };
        let Some(id) = id else { return };
        let early = EarlyPackets::new(id, cid, claims, opened, room, credit, &self.config);
        if let Some(slot) = self.slot(id) {
            for claim in early.claims() {
                slot.session.prepare_claimed(&claim);
            }
        }
        if let Some(half) = self.half_open.get_mut(index) {
            half.early = Some(Box::new(early));
        }
        self.book_changes(id);
    }

    /// The session of this device, restored from its record if necessary. The record is kept until
    /// a handshake is confirmed (R-HS-12).
    fn restore_tentative(&mut self, now: Time, key: InstanceKey, epoch: u32) -> Option<SessionId> {
        if let Some(id) = self.by_key.get(&key).copied()
            && self.session(id).is_some()
        {
            return Some(id);
        }
        if !self.has_room_awake(0) {
            return None;
        }
        let record = self.hibernated.get(&key)?.record_at(now)?;
        // From here on the session's own timers count.
        self.hibernated.suspend_expiry(&key);
        let mut session = self.new_session(now, Role::Responder, key.0, key.1, epoch..epoch);
        session.restore(now, &record);
        let id = self.insert(session);
        self.enlist(key, id);
        self.tentative.insert(id);
        Some(id)
    }

    /// R-EARLY-2: handles the early data of an unknown device, in a session that exists as long as
    /// its handshakes can be confirmed. Returns its flows in `opened`, and how many bytes may be
    /// sent on each.
    fn handle_early_data(
        &mut self,
        now: Time,
        key: InstanceKey,
        epoch: u32,
        (session_credit, flow_credit): (u64, u64),
        early_data: &[u8],
        opened: &mut Vec<FlowClaim>,
    ) -> Option<SessionId> {
        let id = match self.by_key.get(&key).copied() {
            Some(id) if self.session(id)?.is_unconfirmed() => id,
            Some(_) => return None,
            None => {
                if !self.has_room_awake(0)
                    || self.hibernated.contains(&key)
                    || self.early_seen.get(&key).is_some()
                {
                    return None;
                }
                self.early_seen.insert(key, ());
                let mut session =
                    self.new_session(now, Role::Responder, key.0, key.1, epoch..epoch);
                session.begin_unconfirmed(session_credit, flow_credit);
                let id = self.insert(session);
                self.enlist(key, id);
                self.tentative.insert(id);
                id
            }
        };
        let beside = self.flows_by_key.get(&key.0).copied().unwrap_or(0);
        let slot = self.slot(id)?;
        slot.session.flows_elsewhere = beside.saturating_sub(slot.flows);
        match slot.session.take_early_data(now, early_data) {
            Ok(flows) => {
                let claim = |flow| FlowClaim {
                    flow,
                    received: 0,
                    credit: flow_credit,
                    flags: 0,
                };
                opened.extend(flows.into_iter().map(claim));
            }
            // The device is informed of errors in its early data when it repeats the data.
            Err(_) => slot.session.end_unconfirmed(),
        }
        Some(id)
    }

    /// Whether this device may connect, and the answer to it; `None`: no answer now.
    ///
    /// With it comes the session secret of which the keys are made, if there is one.
    fn admit(
        &mut self,
        syn: &Syn,
        key: InstanceKey,
    ) -> Option<(SynAck, Option<Box<SessionSecret>>)> {
        let refused = |answer| Some((answer, None));
        // R-HS-11
        let is_admitted = self.admission.admits(&key.0);
        if !is_admitted && (self.unadmitted_max == 0 || self.has_session(key.0, key.1)) {
            self.refused_client = Some(key.0);
            // R-HS-11: another server of the same key may know it, and a refusal would end its flows.
            return refused(match self.records_shared && !syn.claims.list.is_empty() {
                true => SynAck::Later,
                false => SynAck::Refused(ReasonCode::NotAllowed),
            });
        }
        // R-HS-19
        if !is_admitted && !self.has_room_unadmitted() {
            return refused(SynAck::Refused(ReasonCode::LimitReached));
        }
        let existing = self.by_key.get(&key).and_then(|id| self.session(*id));
        let existing = existing.filter(|s| !s.is_unconfirmed());
        let sleeping = self.hibernated.get(&key).and_then(|a| a.decode());
        let confirmed = existing
            .map(|s| s.epoch)
            .or(sleeping.as_ref().map(|r| r.epoch));
        // R-HS-1: an epoch counts once; a replayed SYN finds its own epoch used.
        if let Some(confirmed) = confirmed
            && syn.epoch <= confirmed
        {
            return refused(SynAck::Stale { confirmed });
        }
        // R-TICKET-1: a ticket from before the last handshake is not valid, whoever presents it.
        if let Some(of) = syn.ticket_of
            && confirmed.is_none_or(|confirmed| of < confirmed)
        {
            return refused(SynAck::NoTicket);
        }
        let is_awake = existing.is_some();
        let secret = match existing {
            Some(session) => session.session_secret.clone(),
            None => sleeping.and_then(|record| record.secret).map(Box::new),
        };
        let named = syn.hybrid.and_then(|hybrid| hybrid.secret);
        let secret_is_named = secret.as_ref().is_some_and(|s| Some(s.id) == named);
        // R-KEM-7: a ticket may be read with a quantum computer, the secret not.
        if syn.ticket_of.is_some() && secret.is_some() && !secret_is_named {
            return refused(SynAck::NoTicket);
        }
        let hybrid = match (syn.hybrid, self.config.hybrid) {
            (None, _) | (_, HybridPolicy::Off) => HybridAnswer::Unused,
            _ if secret_is_named => HybridAnswer::SecretUsed,
            _ => HybridAnswer::Exchange,
        };
        let secret = secret.filter(|_| hybrid == HybridAnswer::SecretUsed);
        let own = self.half_open.of(&key).len();
        let full = !self.has_room_awake(self.half_open.len() - own);
        if confirmed.is_none() {
            // R-QUOTA-1, R-QUOTA-4
            let crowd = !self.has_room_hibernated();
            let own_crowd = self.instances_of(key.0) >= self.config.sessions_per_key_max;
            let again = own > 0;
            if full || crowd || (own_crowd && !again) {
                return refused(SynAck::Refused(ReasonCode::LimitReached));
            }
        } else if full && !is_awake {
            // R-QUOTA-4: a refusal would end a session that is only hibernated; without an answer
            // the device tries again.
            return None;
        }
        let Some(suite) = self
            .config
            .suites
            .iter()
            .map(|s| s.code())
            .find(|s| syn.suites.contains(s))
        else {
            return refused(SynAck::NoSuite);
        };
        let holder = TicketHolder {
            peer: key.0,
            instance: key.1,
            epoch: syn.epoch,
        };
        let shares = self.cid_shares();
        let cid = cid_share::draw(shares, &mut self.rng);
        let spare = (0..SPARE_PATHS)
            .map(|_| {
                let cid = cid_share::draw(shares, &mut self.rng);
                (cid, self.shared_cookie_secrets.token(cid))
            })
            .collect();
        let window_max = match is_admitted {
            true => u64::MAX,
            false => UNADMITTED_WINDOW_BYTES,
        };
        let accepted = SynAck::Accepted(SynAckBody {
            cid,
            token: self.shared_cookie_secrets.token(cid),
            suite,
            resumed: confirmed.is_some(),
            session_credit: self.config.window_of_session().min(window_max),
            flow_credit: self.config.window_of_new_flow().min(window_max),
            spare,
            ticket: Some(self.ticket_issuer.issue(self.rng.array(), &holder)),
            hybrid,
        });
        Some((accepted, secret))
    }

    pub(super) fn drop_half_open(&mut self, index: usize) -> Option<HalfOpen> {
        let half = self.half_open.remove(index)?;
        for cid in &half.own_cids {
            self.routes.remove(cid);
        }
        Some(half)
    }

    pub(super) fn expire_half_open(&mut self, now: Time) {
        while let Some(index) = self.half_open.next_expired(now) {
            if let Some(half) = self.drop_half_open(index) {
                self.revert_to_record(now, (half.peer, half.instance));
            }
        }
    }

    /// R-RESUME-8: hibernates a tentatively restored session again, because its last handshake expired.
    pub(super) fn revert_to_record(&mut self, now: Time, key: InstanceKey) {
        let Some(id) = self.by_key.get(&key).copied() else {
            return;
        };
        if !self.tentative.contains(&id) || self.half_open.of(&key).len() > 0 {
            return;
        }
        if self.session(id).is_some_and(Session::is_unconfirmed) {
            if let Some(slot) = self.slot(id) {
                slot.session.end_unconfirmed();
            }
            self.book_changes(id);
        } else if self.hibernate(now, id).is_ok() {
            self.events.push_back((id, SessionEvent::Asleep));
        }
    }

    /// Makes a tentatively restored session permanent: its record is dropped, and its flows count as
    /// awake.
    fn commit_tentative(&mut self, id: SessionId, key: InstanceKey) {
        if let Some(asleep) = self.hibernated.get(&key)
            && let Some(session) = self.session(id)
            && asleep.flows() != session.flows.len()
            && let Some(before) = asleep.decode()
        {
            let left: BTreeSet<FlowId> = session.flows.iter().map(|f| f.id).collect();
            self.hibernated
                .expire_flows(&key, &before, |id| !left.contains(&id));
        }
        self.drop_hibernated(key);
        let beside = self.flows_by_key.get(&key.0).copied().unwrap_or(0);
        if let Some(slot) = self.slot(id) {
            slot.session.flows_elsewhere = beside.saturating_sub(slot.flows);
        }
    }

    /// R-HS-12: confirms a handshake by the device's first packet under the new keys. Only now does the
    /// session use them.
    pub(super) fn confirm(
        &mut self,
        now: Time,
        from: Addresses,
        index: usize,
        path: PathId,
        bytes: &mut [u8],
    ) {
        let Some(half) = self.half_open.get_mut(index) else {
            return;
        };
        if bytes.len() < DATA_HEADER_BYTES + TAG_BYTES {
            return;
        }
        // R-HS-17: a handshake that was not confirmed in time is void, whether or not its timer
        // fired.
        if half.expires <= now {
            self.expire_half_open(now);
            return;
        }
        // R-HS-20
        if self.awaits_ownership(index) {
            return self.hold_for_ownership(from, index, path, bytes);
        }
        let Some(half) = self.half_open.get_mut(index) else {
            return;
        };
        let Ok(opened) = half.keys.open(path, 0, bytes) else {
            return;
        };
        let half = self.drop_half_open(index).expect("it was just there");
        self.half_open
            .remember(&half, now + self.config.half_open_max);
        let key = (half.peer, half.instance);
        // R-HS-11, R-HS-19: what was answered before the client lost its admission.
        if self.unadmitted_max == 0 && !self.admission.admits(&key.0) {
            return;
        }
        for index in self.half_open.of(&key) {
            let other = self.half_open.get_mut(index);
            if let Some(early) = other.and_then(|h| h.early.as_mut()) {
                early.stop_sending();
            }
        }
        let id = match self.restore_tentative(now, key, half.epoch) {
            Some(id) => id,
            None => {
                let epochs = half.epoch..half.epoch;
                let mut session =
                    self.new_session(now, Role::Responder, half.peer, half.instance, epochs);
                if let Some(record) = self.hibernated.get(&key).and_then(|a| a.record_at(now)) {
                    session.restore(now, &record);
                }
                let id = self.insert(session);
                self.enlist(key, id);
                self.tentative.insert(id);
                id
            }
        };
        if self.tentative.remove(&id) {
            self.commit_tentative(id, key);
        }
        self.note_unadmitted(now, id, key.0);
        let slot = self.slot(id).expect("it was just found or made");
        let session = &mut slot.session;
        if half.epoch <= session.epoch && session.generation > 0 {
            return;
        }
        session.requires_hybrid = half.requires_hybrid;
        session.begin_generation(now, half.keys, half.epoch, &half.own_cids, &half.body);
        session.accept_path(now, path, from);
        if path != PathId(0) && half.early.as_ref().is_some_and(|e| e.has_sent()) {
            // Packet numbers of path 0 are already used, whichever path confirms (R-SEAL-2).
            session.accept_path(now, PathId(0), half.addresses);
        }
        if from.remote == half.addresses.remote
            && !half.answered_elsewhere
            && let Some(path) = session.paths.get_mut(path)
        {
            // R-PATH-16: the device's keys depend on our answer, so the device received it at this
            // address.
            path.validated = true;
            path.forget_challenges();
            path.wants = 0;
        }
        session.after_handshake(now, half.body.resumed);
        // R-PATH-2: the bytes that the SYN's address may still receive belong to that address.
        let room = half.early.as_ref().map_or(half.room, |e| e.room());
        let came_from = half.addresses.remote;
        let unproved = |p: &&mut SessionPath| !p.validated && p.addresses.remote == came_from;
        if let Some(path) = session.paths.iter_mut().find(unproved) {
            path.rx_bytes += room;
        }
        if let Some(early) = half.early {
            session.adopt_early(*early);
        }
        let plaintext = &bytes[DATA_HEADER_BYTES..opened.end];
        session.handle_opened(now, path, opened.number, from, bytes.len(), plaintext);
        self.book_changes(id);
    }
}

/// The datagram of a SYN+ACK, and the secrets of the handshake.
fn seal_syn_ack(
    cid: Cid,
    responder: Responder,
    answer: &SynAck,
) -> Option<(HandshakeSecrets, Vec<u8>)> {
    let mut out = vec![0; 1 + CID_BYTES + SYN_ACK_OVERHEAD_BYTES + 400];
    out[0] = PacketKind::SynAck.first_byte();
    out[1..1 + CID_BYTES].copy_from_slice(&cid.0);
    let mut body = [0; 400];
    let mut w = WireWriter::new(&mut body);
    answer.encode(&mut w);
    let n = w.written();
    let (secrets, n) = responder
        .answer(&body[..n], &mut out[1 + CID_BYTES..])
        .ok()?;
    out.truncate(1 + CID_BYTES + n);
    Some((secrets, out))
}
