//! Answers to a device's SYN: SYN+ACK, COOKIE and UNKNOWN.

use d2tp_seal::{CipherSuite, PacketKeys, open_cookie, verify_unknown_token};
use d2tp_time::{Span, Time};
use d2tp_wire::{Cid, PathId, WireReader};

use crate::event::{SessionEnd, SessionEvent};
use crate::key_exchange_state::HybridAnswer;
use crate::link::Addresses;
use crate::path;
use crate::path::{PathState, SessionPath};
use crate::session::{Session, say};
use crate::session_state::Role;
use crate::syn::{SynAck, SynAckBody};
use crate::ticket::ClientTicket;
use crate::trace::TraceRecord;

impl Session {
    /// Handles a SYN+ACK for our handshake.
    pub(crate) fn handle_syn_ack(&mut self, now: Time, from: Addresses, message: &[u8]) {
        let Some(handshake) = &mut self.handshake else {
            return;
        };
        if let Some(trace) = &mut self.trace {
            trace.at(now);
        }
        let mut payload = [0; 1500];
        // R-HS-14: the answer must come from the address to which the SYN was sent.
        let asked = handshake.open.iter_mut().rev();
        let asked = asked.filter(|o| o.addresses.link == from.link);
        let mut asked = asked.filter(|o| o.addresses.remote == from.remote);
        let answered = asked.find_map(|open| {
            let answer = open.initiator.finish(message, &mut payload).ok()?;
            Some((open, answer))
        });
        let Some((open, (secrets, n))) = answered else {
            return;
        };
        let Some(mut answer) = SynAck::decode(&mut WireReader::new(&payload[..n])) else {
            return;
        };
        // R-KEM-1: what was not offered is not agreed.
        if let SynAck::Accepted(body) = &mut answer
            && !open.offers_hybrid
        {
            body.hybrid = HybridAnswer::Unused;
        }
        let (epoch, sent_at, gated) = (open.epoch, open.sent_at, open.gated);
        let (by_ticket, sent_once_at) = (open.by_ticket, open.sent_once_at());
        let round_trip_min = open.round_trip_min(now);
        let secret = open.secret.clone();
        match answer {
            SynAck::Stale { confirmed } => {
                // R-HS-4: the server has confirmed a later epoch of this instance, so continue
                // above it.
                self.epochs.start = self.epochs.start.max(confirmed.saturating_add(1));
                handshake.open.clear();
                handshake.retry_now(now, from.link);
            }
            SynAck::Refused(reason) => self.end(SessionEnd::Refused(reason)),
            SynAck::NoSuite => self.end(SessionEnd::NoCommonVersion),
            // R-HS-21: the device tries again at the pace of its timer, with another SYN, since this one has had its
            // answer.
            SynAck::Later => handshake.open.retain(|open| open.epoch != epoch),
            SynAck::NoTicket if !by_ticket => {}
            SynAck::NoTicket => {
                self.ticket = None;
                handshake.open.clear();
                handshake.retry_now(now, from.link);
            }
            // R-CLOSE-3: the server does not know the session that is being closed.
            SynAck::Accepted(body) if self.closing.is_some() && !body.resumed => {
                self.end(SessionEnd::Local);
            }
            // R-KEM-8
            SynAck::Accepted(body)
                if self.requires_hybrid && body.hybrid == HybridAnswer::Unused =>
            {
                self.end(SessionEnd::NoHybridKeys);
            }
            SynAck::Accepted(body) => {
                let Some(suite) = CipherSuite::from_code(body.suite) else {
                    return;
                };
                if !self.config.suites.contains(&suite) {
                    return;
                }
                // R-KEM-6
                let secret = match (body.hybrid, &secret) {
                    (HybridAnswer::SecretUsed, None) => return,
                    (HybridAnswer::SecretUsed, secret) => secret.as_deref(),
                    _ => None,
                };
                let handshake = self.handshake.take().expect("it is being answered");
                let mut keys = PacketKeys::with_secret(suite, &secrets, secret, true);
                if body.hybrid == HybridAnswer::Exchange {
                    keys.await_exchange(&secrets);
                }
                let waiting: Vec<_> = handshake.links().collect();
                let cids = handshake.cids;
                self.begin_generation(now, keys, epoch, &cids, &body);
                self.ticket = body.ticket.map(ClientTicket::boxed);
                let mut path = SessionPath::new(now, PathId(0), from, &self.config, body.cid);
                path.validated = true;
                path.gated = gated;
                path.state = PathState::Active;
                if let Some(sent_at) = sent_once_at {
                    path.recovery.rtt.on_sample(now.since(sent_at), Span::ZERO);
                }
                // R-HS-2: no sample, but a sign that it takes long.
                path.recovery.rtt.assume_at_least(round_trip_min);
                self.round_trip_known = round_trip_min;
                path.status_seq = 1;
                path.wants |= path::want::STATUS | path::want::PING;
                let link = from.link;
                if let Some(trace) = &mut self.trace {
                    trace.note(TraceRecord::opened(&path));
                }
                self.spare.remove(&PathId(0));
                self.use_path_id(PathId(0));
                self.paths.push(path);
                self.after_handshake(now, body.resumed);
                self.emit(SessionEvent::PathUp {
                    path: PathId(0),
                    link,
                    took: now.since(sent_at),
                });
                // Links that waited for keys open their paths now.
                for (addresses, gated) in waiting {
                    if addresses.link != link {
                        self.open_path(now, addresses, gated);
                    }
                }
            }
        }
    }

    /// Replaces keys, paths and ids with those of a new handshake.
    pub(crate) fn begin_generation(
        &mut self,
        now: Time,
        keys: PacketKeys,
        epoch: u32,
        own_cids: &[Cid],
        peer: &SynAckBody,
    ) {
        while !self.paths.is_empty() {
            self.remove_path(0);
        }
        for (_, issued) in std::mem::take(&mut self.issued) {
            self.cid_changes
                .push(crate::session_state::CidChange::Remove(issued.cid));
        }
        self.generation += 1;
        for (cid, n) in own_cids.iter().zip(0..) {
            let issued = crate::session::IssuedCid {
                cid: *cid,
                must_send: false,
            };
            self.issued.insert(PathId(n), issued);
            self.cid_changes.push(crate::session_state::CidChange::Add {
                cid: *cid,
                path: PathId(n),
                generation: self.generation,
            });
        }
        self.spare.clear();
        self.unknown_tokens.clear();
        self.keep_peer_id(PathId(0), peer.cid, peer.token);
        for ((cid, token), n) in peer.spare.iter().zip(1..) {
            self.keep_peer_id(PathId(n), *cid, *token);
        }
        self.issued_to = own_cids.len() as u32;
        self.gone.clear();
        self.flows.forget_claims();
        self.used_paths.clear();
        self.keys = Some(keys);
        self.keys_at = now;
        self.sealed_packets = 0;
        self.rx_key_drop_at = Time::NEVER;
        if epoch != self.flow_epoch {
            self.flow_epoch = epoch;
            self.next_flow = 0;
        }
        self.epoch = epoch;
        self.credit = crate::session::SessionCredit {
            peer_max: peer.session_credit,
            advertised: self.config.window_of_session(),
            ..Default::default()
        };
        self.initial_flow_credit = peer.flow_credit;
        self.last_rx = now;
        self.inherits_instance = (self.inherits_instance || !self.known_to_peer) && peer.resumed;
        self.known_to_peer = true;
        self.paused = false;
        self.wants = if self.closing.is_some() {
            say::CLOSE
        } else {
            0
        };
        self.on_node_settled();
        self.begin_key_exchange(peer.hybrid);
    }

    /// Handles a server's request to prove the device's address.
    pub(crate) fn handle_cookie(&mut self, now: Time, body: &[u8]) {
        let peer = self.peer;
        let Some(handshake) = &mut self.handshake else {
            return;
        };
        let Some((nonce, sealed)) = body.split_first_chunk::<12>() else {
            return;
        };
        let mut asked = handshake.open.iter().rev();
        let cookie = asked.find_map(|o| {
            let cookie = open_cookie(&peer, o.mac1, *nonce, sealed).ok()?;
            Some((o.addresses.link, cookie))
        });
        if let Some((link, cookie)) = cookie {
            handshake.on_cookie(now, link, cookie);
        }
    }

    /// Handles a server's UNKNOWN for this session.
    pub(crate) fn handle_unknown(
        &mut self,
        now: Time,
        path: PathId,
        generation: u32,
        token: &[u8],
    ) {
        if generation != self.generation || self.role == Role::Responder {
            return;
        }
        let Some(p) = self.paths.get_mut(path) else {
            return;
        };
        // R-UNKNOWN-1: only the host that issued the id knows its token.
        let expected = self.unknown_tokens.get(&path);
        if !expected.is_some_and(|expected| verify_unknown_token(expected, token)) {
            return;
        }
        p.unknown = true;
        let (addresses, gated) = (p.addresses, p.gated);
        if self.closing.is_some() {
            // R-CLOSE-3: a server that does not know the session need not be informed of its end.
            return self.end(SessionEnd::Local);
        }
        // Also while a handshake runs on other links: the link that answered may be the only one
        // that works.
        self.start_handshake(now, addresses, gated);
    }
}
