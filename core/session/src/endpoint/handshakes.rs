//! Who comes in: SYNs and WAKEs, what is said early in them, and the packet that confirms.

use std::collections::BTreeSet;

use d2tp_seal::{
    PacketKeys, Responder, SYN_ACK_OVERHEAD_BYTES, SynMacs, TICKET_BYTES, TicketHolder,
};
use d2tp_time::{Span, Time};
use d2tp_wire::{
    CID_BYTES, Cid, DATA_HEADER_BYTES, DATAGRAM_FIRST_BYTES, FlowId, PacketKind, PathId,
    ReasonCode, TAG_BYTES, VERSION, WireReader, WireWriter,
};

use super::{Admission, CidRoute, Endpoint, SessionId};
use crate::claim::{FlowClaim, SynClaims};
use crate::client_handshake::PROLOGUE;
use crate::config::SPARE_PATHS;
use crate::early_packets::EarlyPackets;
use crate::event::SessionEvent;
use crate::half_open::{HALF_OPEN_MAX, HalfOpen, RepeatedSyn};
use crate::hibernated::InstanceKey;
use crate::link::Addresses;
use crate::path::SessionPath;
use crate::pending_lookup::PendingLookup;
use crate::session::Session;
use crate::session_state::Role;
use crate::syn::{Syn, SynAck, SynAckBody, SynOrigin};

/// R-TICKET-4: WAKEs that may be replays and are answered without a cookie, per second. Two X25519
/// operations each: about 1 ms of a second.
const DOUBTFUL_WAKES_PER_SECOND: u32 = 20; // a guess
/// How long a cookie secret is used for new cookies.
const COOKIE_PERIOD: Span = Span::from_secs(120);

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
        // R-HS-5: a SYN has its full size, so that no answer is larger.
        if bytes.len() < DATAGRAM_FIRST_BYTES {
            return;
        }
        // R-HS-10
        if version != VERSION {
            let mut out = vec![PacketKind::Version.first_byte()];
            out.extend(cid.0);
            out.push(VERSION);
            return self.answer(from, out);
        }
        // R-HS-6: who does not know our key costs one hash and hears nothing.
        if !self.cookie_secrets.verify_mac1(bytes) {
            return;
        }
        if now >= self.cookie_until {
            self.cookie_until = now + COOKIE_PERIOD;
            let seed = self.rng.array();
            self.cookie_secrets.rotate(seed);
        }
        if now.since(self.syn_window.0) >= Span::from_secs(1) {
            self.syn_window = (now, 0);
        }
        self.syn_window.1 += 1;
        let Some(mac1) = SynMacs::mac1(bytes) else {
            return;
        };
        match self.half_open.answer_repeated(now, from, cid) {
            Some(RepeatedSyn::Answer(answer)) => return self.answer(from, answer),
            Some(RepeatedSyn::Late) => return,
            None => {}
        }
        let loaded = self.syn_window.1 > self.config.cookie_above
            || self.half_open.len() >= HALF_OPEN_MAX / 2;
        // A ticket is dearer to have than an address: who shows a true one costs nothing before that.
        let proved = self.cookie_secrets.verify_mac2(bytes, from.remote);
        if loaded && kind == PacketKind::Syn && !proved {
            // R-HS-7: under load the address is proved first: no state, no public-key work.
            return self.answer_cookie(from, cid, mac1);
        }
        self.expire_half_open(now);
        if self.half_open.len() >= HALF_OPEN_MAX {
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
        // Whoever is not admitted is refused, whatever lies elsewhere.
        if self.records_elsewhere
            && self.admission.admits(&key.0)
            && !self.has_session(key.0, key.1)
        {
            return self.pending_lookups.push(PendingLookup {
                key,
                origin,
                syn,
                responder,
            });
        }
        self.answer_syn(now, origin, syn, responder);
    }

    /// R-TICKET-4: counts an unproved WAKE that may be a replay; whether too many came in this second.
    fn is_wake_budget_spent(&mut self, now: Time) -> bool {
        if now.since(self.wake_window.0) >= Span::from_secs(1) {
            self.wake_window = (now, 0);
        }
        self.wake_window.1 = self.wake_window.1.saturating_add(1);
        self.wake_window.1 > DOUBTFUL_WAKES_PER_SECOND
    }

    /// Asks for proof of an address. Costs no public-key operation and keeps no state.
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
        // R-HS-8: a copy of a SYN gets the answer of its original and no state of its own, so that
        // copies do not push the original out.
        if let Some(half) = self.half_open.original(&key, syn.epoch) {
            // R-PATH-16
            half.answered_elsewhere |= half.addresses.remote != from.remote;
            let answer = half.answer.clone();
            return self.answer(from, answer);
        }
        let Some(answer) = self.admit(&syn, key) else {
            return;
        };
        // R-TICKET-4: a WAKE that cannot be accepted, or a second one, may be a replay, and an answer
        // would take two X25519 operations.
        let accepted = matches!(answer, SynAck::Accepted(_)) && self.half_open.of(&key).len() == 0;
        if syn.ticket_of.is_some() && !origin.proved && !accepted && self.is_wake_budget_spent(now)
        {
            return self.answer_cookie(from, cid, origin.mac1);
        }
        let mut out = vec![0; 1 + CID_BYTES + SYN_ACK_OVERHEAD_BYTES + 400];
        out[0] = PacketKind::SynAck.first_byte();
        out[1..1 + CID_BYTES].copy_from_slice(&cid.0);
        let mut body = [0; 400];
        let mut w = WireWriter::new(&mut body);
        answer.encode(&mut w);
        let n = w.written();
        let Ok((secrets, n)) = responder.answer(&body[..n], &mut out[1 + CID_BYTES..]) else {
            return;
        };
        out.truncate(1 + CID_BYTES + n);
        let room = (len as u64).saturating_sub(out.len() as u64);
        self.answer(from, out.clone());
        if let SynAck::Accepted(body) = answer {
            let suite = d2tp_seal::CipherSuite::from_code(body.suite).expect("we chose it");
            let keys = PacketKeys::new(suite, &secrets, false);
            // The body kept is the peer's view turned round: what the *device* told us.
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
            };
            let expires = now + self.config.half_open_max;
            let index = self.half_open.insert(HalfOpen {
                peer,
                instance: syn.instance,
                epoch: syn.epoch,
                keys,
                own_cids: own_cids.clone(),
                body: theirs,
                addresses: from,
                answer: out,
                answered_elsewhere: false,
                room,
                expires,
                repeated: 0,
                early: None,
            });
            // The device's first packet may come on any of its links.
            for (cid, n) in own_cids.iter().zip(0..) {
                self.routes.insert(
                    *cid,
                    CidRoute::HalfOpen {
                        index,
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
            self.prepare_early_packets(now, index, claims, early_data, room);
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

    /// The session of this device, restored from its record if necessary. The record remains until a
    /// handshake is confirmed (R-HS-12).
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
        // From here the session's own timers are the ones that count.
        self.hibernated.suspend_expiry(&key);
        let mut session = self.new_session(now, Role::Responder, key.0, key.1, epoch..epoch);
        session.restore(now, &record);
        let id = self.insert(session);
        self.enlist(key, id);
        self.tentative.insert(id);
        Some(id)
    }

    /// R-EARLY-2: takes in the early data of an unknown device, in a session that lasts as long as its
    /// handshakes may be confirmed. `opened`: its flows, and how many bytes may be sent on each.
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
            // What is wrong with it, the device hears when it says it again.
            Err(_) => slot.session.end_unconfirmed(),
        }
        Some(id)
    }

    /// Whether this device may connect, and the answer; `None`: not now.
    fn admit(&mut self, syn: &Syn, key: InstanceKey) -> Option<SynAck> {
        // R-HS-11
        if !self.admission.admits(&key.0) {
            self.refused_client = Some(key.0);
            return Some(SynAck::Refused(ReasonCode::NotAllowed));
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
            return Some(SynAck::Stale { confirmed });
        }
        // R-TICKET-1: what came before the last handshake is over, whoever holds it.
        if let Some(of) = syn.ticket_of
            && confirmed.is_none_or(|confirmed| of < confirmed)
        {
            return Some(SynAck::NoTicket);
        }
        let own = self.half_open.of(&key).len();
        let full = !self.has_room_awake(self.half_open.len() - own);
        if confirmed.is_none() {
            // R-QUOTA-1, R-QUOTA-4
            let crowd = !self.has_room_hibernated();
            let own_crowd = self.instances_of(key.0) >= self.config.sessions_per_key_max;
            let again = own > 0;
            if full || crowd || (own_crowd && !again) {
                return Some(SynAck::Refused(ReasonCode::LimitReached));
            }
        } else if full && existing.is_none() {
            // R-QUOTA-4: to refuse would end what only sleeps; the device knocks again.
            return None;
        }
        let Some(suite) = self
            .config
            .suites
            .iter()
            .map(|s| s.code())
            .find(|s| syn.suites.contains(s))
        else {
            return Some(SynAck::NoSuite);
        };
        let holder = TicketHolder {
            peer: key.0,
            instance: key.1,
            epoch: syn.epoch,
        };
        let cid = Cid(self.rng.array());
        let spare = (0..SPARE_PATHS)
            .map(|_| {
                let cid = Cid(self.rng.array());
                (cid, self.shared_cookie_secrets.token(cid))
            })
            .collect();
        Some(SynAck::Accepted(SynAckBody {
            cid,
            token: self.shared_cookie_secrets.token(cid),
            suite,
            resumed: confirmed.is_some(),
            session_credit: self.config.session_window,
            flow_credit: self.config.flow_window,
            spare,
            ticket: Some(self.ticket_issuer.issue(self.rng.array(), &holder)),
        }))
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
    fn revert_to_record(&mut self, now: Time, key: InstanceKey) {
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
        // R-HS-17: a handshake nobody confirmed in time is no more, whether or not a timer fired.
        if half.expires <= now {
            self.expire_half_open(now);
            return;
        }
        let Ok(opened) = half.keys.open(path, 0, bytes) else {
            return;
        };
        let half = self.drop_half_open(index).expect("it was just there");
        self.half_open
            .remember(&half, now + self.config.half_open_max);
        let key = (half.peer, half.instance);
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
        let slot = self.slot(id).expect("it was just found or made");
        let session = &mut slot.session;
        if half.epoch <= session.epoch && session.generation > 0 {
            return;
        }
        session.begin_generation(now, half.keys, half.epoch, &half.own_cids, &half.body);
        session.accept_path(now, path, from);
        if path != PathId(0) && half.early.as_ref().is_some_and(|e| e.has_sent()) {
            // Numbers of path 0 are used up already, whichever path confirms (R-SEAL-2).
            session.accept_path(now, PathId(0), half.addresses);
        }
        if from.remote == half.addresses.remote
            && !half.answered_elsewhere
            && let Some(path) = session.paths.get_mut(path)
        {
            // R-PATH-16: the device's keys depend on our answer, so it received it where we sent it.
            path.validated = true;
            path.challenges.clear();
            path.wants = 0;
        }
        session.after_handshake(now, half.body.resumed);
        // R-PATH-2: what the SYN brought and its answers left counts for the address that it came from.
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
