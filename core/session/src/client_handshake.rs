//! The device's side of a handshake.
//!
//! A SYN is sent at once and repeated until it is answered. Each candidate link has its own timer,
//! so that a link without an answer delays no other. A SYN is first repeated unchanged, which costs
//! neither end a public-key operation, then replaced by one with a new epoch and a new ephemeral
//! key. The session and its old paths stay until the answer arrives. Where an earlier path, or the settings, tell of longer
//! round trips, the intervals are longer, too.
//!
//! ```text
//!  wlan0  SYN ─ 0.6 s ─ SYN ──── 1.2 s ──── SYN ─ …          no answer
//!  wwan0              (added after 1 s) SYN ──▶ SYN+ACK       the first answer decides
//! ```

use std::collections::VecDeque;

use d2tp_seal::{
    Initiator, PublicKey, Rng, SYN_OVERHEAD_BYTES, SecretKey, SessionSecret, SynMacs, TICKET_BYTES,
    WAKE_OVERHEAD_BYTES,
};
use d2tp_time::{Span, Time};
use d2tp_wire::{CID_BYTES, Cid, DATAGRAM_FIRST_BYTES, PacketKind, PathId, VERSION, WireWriter};

use crate::claim::{FlowClaim, SynClaims};
use crate::config::{EndpointConfig, SPARE_PATHS};
use crate::key_exchange_state::{HYBRID_SUITE, SHARE_DATAGRAM_MIN, SYN_TRAILER_BYTES, SynTrailer};
use crate::link::{Addresses, LinkId};
use crate::long_round_trip::LONG_RETRY_DOUBLINGS_MAX;
use crate::serial_path::SerialPathId;
use crate::session_state::CidChange;
use crate::syn::EARLY_DATA_MARK;
use crate::ticket::ClientTicket;

/// The interval between SYNs at the start, and at most.
const RETRY_FIRST: Span = Span::from_millis(600);
const RETRY_MAX: Span = Span::from_secs(2);
/// SYNs without an answer after which the interval on a link grows.
const RETRY_EAGER: u32 = 10;
/// The interval between SYNs on a link that has been silent for long: an access point may carry nothing
/// for hours, and every SYN wakes the radio.
const RETRY_PATIENT: Span = Span::from_secs(30);

/// The number of SYNs per link whose answers are still accepted: a busy server answers late, and a new
/// SYN for each retry would keep it busy.
const OPEN_PER_LINK_MAX: usize = 4;

/// The smallest payload of a SYN on a serial line: its answer must not be larger than the SYN, and has one
/// connection id at least.
const SERIAL_PAYLOAD_MIN: usize = 48;

/// R-HS-2: the number of times that a SYN is repeated unchanged to the same address, while its content
/// stays valid.
const COPIES_MAX: u8 = 2;

/// The protocol, version and suites, with which both ends begin the transcript.
pub(crate) const PROLOGUE: &[u8] = &[b'D', b'2', b'T', b'P', VERSION];

/// A device's side of a handshake.
pub(crate) struct ClientHandshake {
    candidates: Vec<HandshakeCandidate>,
    /// Ids for path 0 and the spare ones, to be used if this handshake succeeds.
    pub(crate) cids: Vec<Cid>,
    /// SYNs that may still be answered, the newest last.
    pub(crate) open: VecDeque<PendingSyn>,
    pub(crate) failed: bool,
    /// How long an answer is expected to take.
    round_trip: Span,
}

/// A local and remote address over which the handshake is tried.
struct HandshakeCandidate {
    addresses: Addresses,
    gated: bool,
    /// SYNs sent to this candidate.
    tries: u32,
    next_at: Time,
    /// The cookie that the server sent to this candidate, which proves its address.
    cookie: Option<[u8; 16]>,
}

impl HandshakeCandidate {
    fn new(now: Time, addresses: Addresses, gated: bool) -> Self {
        HandshakeCandidate {
            addresses,
            gated,
            tries: 0,
            next_at: now,
            cookie: None,
        }
    }

    /// How long to wait for an answer before the next SYN. `round_trip`: how long it is expected to take.
    fn retry_after(&self, round_trip: Span) -> Span {
        // R-LONG-1
        let doublings = self.tries.min(LONG_RETRY_DOUBLINGS_MAX);
        self.retry_after_within(round_trip.scaled(5, 4).times(1 << doublings))
    }

    /// The interval between SYNs, which is not shorter than `answered_within`.
    fn retry_after_within(&self, answered_within: Span) -> Span {
        // R-SERIAL-3
        let line = SerialPathId::of(&self.addresses.remote);
        let on_line = line.map_or(Span::ZERO, SerialPathId::handshake_time);
        (on_line + self.retry_after_on_any()).max(answered_within)
    }

    /// The interval between SYNs on a link whose rate does not matter.
    fn retry_after_on_any(&self) -> Span {
        if self.tries < RETRY_EAGER {
            RETRY_FIRST.times(1 << self.tries.min(5)).min(RETRY_MAX)
        } else {
            RETRY_MAX
                .times(1 << (self.tries - RETRY_EAGER + 1).min(5))
                .min(RETRY_PATIENT)
        }
    }
}

/// A SYN that was sent.
pub(crate) struct PendingSyn {
    pub(crate) initiator: Initiator,
    pub(crate) mac1: [u8; 16],
    pub(crate) epoch: u32,
    pub(crate) addresses: Addresses,
    pub(crate) gated: bool,
    pub(crate) by_ticket: bool,
    pub(crate) offers_hybrid: bool,
    /// The session secret that the SYN named.
    pub(crate) secret: Option<Box<SessionSecret>>,
    pub(crate) sent_at: Time,
    /// When its last copy was sent.
    copied_at: Time,
    /// Whether the SYN claimed flows. Claims are valid only while nothing else changes those flows.
    claimed: bool,
    datagram: Box<[u8]>,
    /// The SYN's payload without epoch and padding.
    says: Box<[u8]>,
    copies: u8,
}

/// The SYN that [`ClientHandshake::poll_syn`] wrote.
pub(crate) struct OutgoingSyn {
    pub(crate) len: usize,
    pub(crate) to: Addresses,
    pub(crate) epoch: u32,
    /// Whether the SYN is new, not a copy of an earlier one.
    pub(crate) is_new: bool,
}

impl PendingSyn {
    /// When the SYN was sent, if it was sent only once, so that its answer measures the round trip.
    pub(crate) fn sent_once_at(&self) -> Option<Time> {
        (self.copies == 0).then_some(self.sent_at)
    }

    /// The shortest round trip that an answer at this time allows for: to the last copy.
    pub(crate) fn round_trip_min(&self, now: Time) -> Span {
        now.since(self.copied_at)
    }
}

impl ClientHandshake {
    /// Begins a handshake over one link; `round_trip`: how long an answer is expected to take.
    pub(crate) fn new(
        now: Time,
        addresses: Addresses,
        gated: bool,
        round_trip: Span,
        rng: &mut Rng,
    ) -> Self {
        ClientHandshake {
            candidates: vec![HandshakeCandidate::new(now, addresses, gated)],
            cids: (0..=SPARE_PATHS).map(|_| Cid(rng.array())).collect(),
            open: VecDeque::new(),
            failed: false,
            round_trip,
        }
    }

    /// Adds a candidate and tries it at once.
    pub(crate) fn add(&mut self, now: Time, addresses: Addresses, gated: bool) {
        if self.candidates.iter().any(|c| c.addresses == addresses) {
            return;
        }
        self.candidates
            .retain(|c| c.addresses.link != addresses.link);
        self.candidates
            .push(HandshakeCandidate::new(now, addresses, gated));
        // If several candidates are due at once, those on ungated links come first.
        self.candidates.sort_by_key(|c| c.gated);
    }

    /// Removes a link that went down. False if no candidate is left.
    pub(crate) fn drop_link(&mut self, link: LinkId) -> bool {
        self.candidates.retain(|c| c.addresses.link != link);
        let newest = self.open.back().map(|o| o.addresses.link);
        // An answer may still wait in a socket. It would begin a path on a link that is gone.
        self.open.retain(|o| o.addresses.link != link);
        if newest == Some(link) {
            for candidate in &mut self.candidates {
                candidate.next_at = Time::ZERO;
            }
        }
        !self.candidates.is_empty()
    }

    /// The links on which paths are to be opened, and whether payload on each needs grants.
    pub(crate) fn links(&self) -> impl Iterator<Item = (Addresses, bool)> + '_ {
        self.candidates.iter().map(|c| (c.addresses, c.gated))
    }

    /// Whether a SYN with claims may still be answered.
    pub(crate) fn has_claimed(&self) -> bool {
        self.open.iter().any(|o| o.claimed)
    }

    pub(crate) fn has_link(&self, link: LinkId) -> bool {
        self.candidates.iter().any(|c| c.addresses.link == link)
    }

    pub(crate) fn next_at(&self) -> Time {
        let due = self.candidates.iter().map(|c| c.next_at).min();
        due.filter(|_| !self.failed).unwrap_or(Time::NEVER)
    }

    /// Sends a SYN over `link` again at once, because the server answered with a COOKIE or another
    /// request.
    pub(crate) fn retry_now(&mut self, now: Time, link: LinkId) {
        let on_link = |c: &&mut HandshakeCandidate| c.addresses.link == link;
        if let Some(candidate) = self.candidates.iter_mut().find(on_link) {
            candidate.next_at = now;
        }
    }

    /// R-HS-13: handles a COOKIE for `link`. The first one is answered at once, later ones when the
    /// timer is due, because everybody who sees a SYN can forge them.
    pub(crate) fn on_cookie(&mut self, now: Time, link: LinkId, cookie: [u8; 16]) {
        let on_link = |c: &&mut HandshakeCandidate| c.addresses.link == link;
        if let Some(candidate) = self.candidates.iter_mut().find(on_link)
            && candidate.cookie.replace(cookie).is_none()
        {
            candidate.next_at = now;
        }
    }

    /// The connection ids that lead to this session while the handshake runs.
    pub(crate) fn routes(&self, generation: u32) -> Vec<CidChange> {
        self.cids
            .iter()
            .zip(0..)
            .map(|(cid, n)| CidChange::Add {
                cid: *cid,
                path: PathId(n),
                generation,
            })
            .collect()
    }

    /// Writes the next SYN into `buf` if one is due. A new SYN gets `epoch`.
    pub(crate) fn poll_syn(
        &mut self,
        now: Time,
        buf: &mut [u8],
        local: &SecretKey,
        server: &PublicKey,
        instance: u64,
        epoch: u32,
        claims: Vec<FlowClaim>,
        early_data: &[u8],
        ticket: Option<&mut ClientTicket>,
        hybrid: Option<(SynTrailer, Option<&SessionSecret>)>,
        config: &EndpointConfig,
        rng: &mut Rng,
    ) -> Option<OutgoingSyn> {
        if self.next_at() > now || buf.len() < DATAGRAM_FIRST_BYTES {
            return None;
        }
        let due = |c: &&mut HandshakeCandidate| c.next_at <= now;
        let candidate = self.candidates.iter_mut().find(due)?;
        candidate.next_at = now + candidate.retry_after(self.round_trip);
        candidate.tries += 1;
        let (addresses, gated, cookie) = (candidate.addresses, candidate.gated, candidate.cookie);
        let line = SerialPathId::of(&addresses.remote);
        // R-SERIAL-5: a slow line has no room for an exchange, but the name of a secret is short.
        let has_room = line.is_none_or(|line| line.datagram() >= SHARE_DATAGRAM_MIN);
        let may_offer = |(trailer, _): &(SynTrailer, _)| has_room || trailer.secret.is_some();
        let hybrid = match hybrid {
            // R-KEM-8: it would end with keys that are not enough.
            Some(offer) if offer.0.required && !may_offer(&offer) => return None,
            hybrid => hybrid.filter(may_offer),
        };

        const HEAD: usize = 1 + CID_BYTES;
        const BODY: usize = DATAGRAM_FIRST_BYTES - HEAD - SynMacs::BYTES;
        // A WAKE has less room for its payload than a SYN.
        const PAYLOAD: usize = BODY - TICKET_BYTES - WAKE_OVERHEAD_BYTES;
        let mut payload = [0; BODY];
        let early = claims.is_empty() && !early_data.is_empty() && !gated;
        // R-EARLY-1: a server that gave a ticket may know the instance.
        let fields_end = match early {
            true => BODY - SYN_OVERHEAD_BYTES,
            false => PAYLOAD,
        } - SYN_TRAILER_BYTES;
        let ticket = ticket.filter(|_| !early);
        let mut w = WireWriter::new(&mut payload[..fields_end]);
        w.u64(instance);
        w.u32(epoch);
        const SAYS: usize = 8 + 4;
        w.u8(config.suites.len() as u8 + u8::from(hybrid.is_some()));
        for suite in &config.suites {
            w.u8(suite.code());
        }
        // R-KEM-1
        if hybrid.is_some() {
            w.u8(HYBRID_SUITE);
        }
        w.varint(config.window_of_session());
        w.varint(config.window_of_new_flow());
        w.u8(SPARE_PATHS as u8);
        for cid in &self.cids[1..] {
            w.bytes(&cid.0);
        }
        let list = claims;
        let claimed = !list.is_empty();
        // R-EARLY-1: early data is not sent on metered links, because nothing limits it before
        // there is a path.
        if early {
            w.u8(EARLY_DATA_MARK);
            w.varint(early_data.len() as u64);
            w.bytes(early_data);
        }
        SynClaims { gated, list }.encode(&mut w);
        let says = SAYS..w.written();
        let mut before = self.open.iter_mut().rev();
        let before = before.find(|o| o.addresses == addresses && o.copies < COPIES_MAX);
        if let Some(open) = before.filter(|o| *o.says == payload[says.clone()]) {
            open.copies += 1;
            open.copied_at = now;
            let buf = &mut buf[..open.datagram.len()];
            buf.copy_from_slice(&open.datagram);
            // The server may have sent a COOKIE since the SYN was first sent.
            SynMacs::write(buf, server, cookie.as_ref());
            return Some(OutgoingSyn {
                len: buf.len(),
                to: addresses,
                epoch: open.epoch,
                is_new: false,
            });
        }
        let ticket = ticket.and_then(ClientTicket::show);
        // The payload is padded so that the datagram has its full size (R-HS-5).
        let full = match ticket {
            Some(_) => PAYLOAD,
            None => BODY - SYN_OVERHEAD_BYTES,
        };
        // R-SERIAL-1: a serial line carries no padding but what makes room for the answer.
        let trailer_bytes = match hybrid {
            Some(_) => SYN_TRAILER_BYTES,
            None => 0,
        };
        let padded = match line {
            Some(_) => (says.end + trailer_bytes).max(SERIAL_PAYLOAD_MIN).min(full),
            None => full,
        };
        let buf = &mut buf[..DATAGRAM_FIRST_BYTES - (full - padded)];
        if let Some((trailer, _)) = hybrid {
            payload[padded - SYN_TRAILER_BYTES..padded].copy_from_slice(&trailer.encode());
        }
        let padded = &payload[..padded];
        buf[1..HEAD].copy_from_slice(&self.cids[0].0);
        let end = buf.len() - SynMacs::BYTES;
        let seed = rng.array();
        let (kind, started) = match ticket {
            Some(ticket) => {
                let (shown, message) = buf[HEAD..end].split_at_mut(TICKET_BYTES);
                shown.copy_from_slice(&ticket.bytes);
                let started = Initiator::start_by_ticket(
                    local, server, ticket, PROLOGUE, seed, padded, message,
                );
                (PacketKind::Wake, started)
            }
            None => {
                let message = &mut buf[HEAD..end];
                let started = Initiator::start(local, server, PROLOGUE, seed, padded, message);
                (PacketKind::Syn, started)
            }
        };
        let (initiator, _) = started.ok()?;
        buf[0] = kind.first_byte();
        SynMacs::write(buf, server, cookie.as_ref());
        let mac1 = SynMacs::mac1(buf).expect("a SYN is long enough");
        let on_link = |o: &PendingSyn| o.addresses.link == addresses.link;
        if self.open.iter().filter(|o| on_link(o)).count() >= OPEN_PER_LINK_MAX
            && let Some(oldest) = self.open.iter().position(on_link)
        {
            self.open.remove(oldest);
        }
        self.open.push_back(PendingSyn {
            initiator,
            mac1,
            epoch,
            addresses,
            gated,
            by_ticket: kind == PacketKind::Wake,
            offers_hybrid: hybrid.is_some(),
            secret: hybrid.and_then(|(_, secret)| secret.cloned().map(Box::new)),
            sent_at: now,
            copied_at: now,
            claimed,
            datagram: (&*buf).into(),
            says: payload[says].into(),
            copies: 0,
        });
        Some(OutgoingSyn {
            len: buf.len(),
            to: addresses,
            epoch,
            is_new: true,
        })
    }
}

impl std::fmt::Debug for ClientHandshake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tries: u32 = self.candidates.iter().map(|c| c.tries).sum();
        let next = self.next_at();
        write!(f, "ClientHandshake(tries {tries}, next {next:?})")
    }
}
