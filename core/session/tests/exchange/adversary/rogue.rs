//! A peer that knows the protocol and keeps none of it: a real handshake by `d2tp-seal`, then any
//! frames in any order from any address, against a server's [`Endpoint`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::LazyLock;

use d2tp_seal::{
    Initiator, KEM_CIPHERTEXT_BYTES, KEM_KEY_BYTES, KEM_SEED_BYTES, PacketKeys, SECRET_ID_BYTES,
    SYN_OVERHEAD_BYTES, SessionTicket, SynMacs, TICKET_BYTES, kem_decapsulate,
    kem_encapsulation_key,
};
use d2tp_session::*;
use d2tp_wire::{
    Cid, DATA_HEADER_BYTES, DATAGRAM_FIRST_BYTES, Frame, FrameIter, PacketKind, TAG_BYTES, VERSION,
    WireReader, WireWriter,
};

pub const MS: Span = Span::from_millis(1);
pub const HOME: &str = "192.0.2.7:4000";
const PROLOGUE: &[u8] = &[b'D', b'2', b'T', b'P', VERSION];
/// The bytes that Noise adds to the payload of a WAKE: an ephemeral key and a tag.
const WAKE_OVERHEAD_BYTES: usize = 32 + 16;
/// The number among the suites of a SYN by which it offers an exchange by ML-KEM.
const HYBRID_SUITE: u8 = 16;
/// Bytes at the end of the payload of a SYN with that offer.
const HYBRID_TRAILER_BYTES: usize = 1 + SECRET_ID_BYTES;
/// The seed of the peer's key of ML-KEM, which is the same in each handshake: nothing here is to be secret.
const KEM_SEED: [u8; KEM_SEED_BYTES] = [6; KEM_SEED_BYTES];
static KEM_KEY: LazyLock<[u8; KEM_KEY_BYTES]> = LazyLock::new(|| kem_encapsulation_key(&KEM_SEED));

pub fn at(address: &str) -> SocketAddr {
    address.parse().unwrap()
}

/// A KEY_SHARE with half of the peer's key of ML-KEM.
pub fn key_share(half: u8) -> Frame<'static> {
    let size = KEM_KEY_BYTES / 2;
    let bytes = &KEM_KEY[usize::from(half) * size..][..size];
    Frame::KeyShare { half, bytes }
}

/// The offer of an exchange by ML-KEM in a SYN or WAKE (R-KEM-1).
#[derive(Clone, Copy, Debug, Default)]
pub struct HybridOffer {
    /// The name of the session secret that the peer says it has.
    pub secret: Option<[u8; SECRET_ID_BYTES]>,
    /// Whether the peer asks that nothing of flows is sent before the keys are in force.
    pub required: bool,
}

/// A server, and one peer of it that may do anything.
pub struct Rogue {
    pub now: Time,
    pub server: Endpoint,
    pub server_key: PublicKey,
    pub secret: SecretKey,
    pub instance: u64,
    pub home: SocketAddr,
    pub keys: Option<PacketKeys>,
    pub initiator: Option<Initiator>,
    /// The encoded claims of its SYNs.
    pub claims: Vec<u8>,
    /// What its SYNs say of keys of ML-KEM.
    pub hybrid: Option<HybridOffer>,
    /// The halves of the server's ciphertext that arrived under the keys in force.
    pub ciphertext: [Vec<u8>; 2],
    /// Session secrets, which exchanges gave it.
    pub session_secrets: Vec<SessionSecret>,
    /// Tickets that SYN+ACKs brought.
    pub tickets: Vec<SessionTicket>,
    /// SYNs sent so far.
    pub knocks: u64,
    /// Ids the server sends to, by path.
    pub own: BTreeMap<u32, Cid>,
    /// Ids of the server, by path.
    pub theirs: BTreeMap<u32, Cid>,
    pub numbers: BTreeMap<u32, u64>,
    pub heard: BTreeMap<u32, u64>,
    /// Numbers that arrived on path 0.
    pub arrived: BTreeSet<u64>,
    /// The packets that the server sent since this was last taken.
    pub inbox: Vec<(SocketAddr, Vec<u8>)>,
    pub events: Vec<SessionEvent>,
}

impl Rogue {
    pub fn with(config: EndpointConfig) -> Self {
        let key = SecretKey::from_bytes([22; 32]);
        let server_key = key.public();
        let server = Endpoint::new(config, key, Admission::Anybody, [3; 32], [4; 32]);
        Rogue {
            now: Time::ZERO + MS.times(1000),
            server,
            server_key,
            secret: SecretKey::from_bytes([66; 32]),
            instance: 5,
            home: at(HOME),
            keys: None,
            initiator: None,
            claims: Vec::new(),
            hybrid: None,
            ciphertext: Default::default(),
            session_secrets: Vec::new(),
            tickets: Vec::new(),
            knocks: 0,
            own: (0..5).map(|n| (n, Cid([n as u8 + 1; 8]))).collect(),
            theirs: BTreeMap::new(),
            numbers: BTreeMap::new(),
            heard: BTreeMap::new(),
            arrived: BTreeSet::new(),
            inbox: Vec::new(),
            events: Vec::new(),
        }
    }

    /// A peer whose handshake is done and confirmed by `frames` on path 0.
    pub fn inside(config: EndpointConfig) -> Self {
        let mut rogue = Rogue::with(config);
        rogue.enter(1);
        rogue
    }

    pub fn enter(&mut self, epoch: u32) {
        let syn = self.syn(epoch, None);
        self.throw(self.home, syn);
        let (_, answer) = self.inbox.pop().expect("the server answers");
        self.welcome(&answer);
        self.say(&[status(0, 1, false)]);
        assert_eq!(self.server.counts().0, 1);
        assert_eq!(self.server.counts().2, 0);
    }

    /// A SYN of full size.
    pub fn syn(&mut self, epoch: u32, cookie: Option<[u8; 16]>) -> Vec<u8> {
        self.syn_of(DATAGRAM_FIRST_BYTES, epoch, cookie)
    }

    /// A SYN of `len` bytes: over a serial line it has no padding.
    pub fn syn_of(&mut self, len: usize, epoch: u32, cookie: Option<[u8; 16]>) -> Vec<u8> {
        self.knocks += 1;
        self.own.insert(0, Cid((self.knocks << 32).to_be_bytes()));
        self.write_syn(len, epoch, cookie)
    }

    /// The next SYN of the same handshake, with the same cid as the previous one.
    pub fn syn_again(&mut self, epoch: u32, cookie: Option<[u8; 16]>) -> Vec<u8> {
        self.write_syn(DATAGRAM_FIRST_BYTES, epoch, cookie)
    }

    fn write_syn(&mut self, len: usize, epoch: u32, cookie: Option<[u8; 16]>) -> Vec<u8> {
        let mut buf = vec![0; len];
        let mut payload = vec![0; len - 9 - SYN_OVERHEAD_BYTES - SynMacs::BYTES];
        self.write_syn_payload(epoch, &mut payload);
        buf[0] = PacketKind::Syn.first_byte();
        buf[1..9].copy_from_slice(&self.own[&0].0);
        let end = buf.len() - SynMacs::BYTES;
        let (initiator, n) = Initiator::start(
            &self.secret,
            &self.server_key,
            PROLOGUE,
            self.syn_seed(epoch),
            &payload,
            &mut buf[9..end],
        )
        .unwrap();
        assert_eq!(9 + n, end);
        self.initiator = Some(initiator);
        SynMacs::write(&mut buf, &self.server_key, cookie.as_ref());
        buf
    }

    /// A WAKE of full size: a SYN with this ticket instead of our key.
    pub fn wake(
        &mut self,
        epoch: u32,
        ticket: &SessionTicket,
        cookie: Option<[u8; 16]>,
    ) -> Vec<u8> {
        self.knocks += 1;
        self.own.insert(0, Cid((self.knocks << 32).to_be_bytes()));
        let mut buf = vec![0; DATAGRAM_FIRST_BYTES];
        let end = buf.len() - SynMacs::BYTES;
        let mut payload = vec![0; end - 9 - TICKET_BYTES - WAKE_OVERHEAD_BYTES];
        self.write_syn_payload(epoch, &mut payload);
        buf[0] = PacketKind::Wake.first_byte();
        buf[1..9].copy_from_slice(&self.own[&0].0);
        let (shown, message) = buf[9..end].split_at_mut(TICKET_BYTES);
        shown.copy_from_slice(&ticket.bytes);
        let (initiator, n) = Initiator::start_by_ticket(
            &self.secret,
            &self.server_key,
            ticket,
            PROLOGUE,
            self.syn_seed(epoch),
            &payload,
            message,
        )
        .unwrap();
        assert_eq!(n, message.len());
        self.initiator = Some(initiator);
        SynMacs::write(&mut buf, &self.server_key, cookie.as_ref());
        buf
    }

    fn write_syn_payload(&self, epoch: u32, payload: &mut [u8]) {
        let suites = [CipherSuite::ChaCha20Poly1305.code(), HYBRID_SUITE];
        let suites = &suites[..1 + usize::from(self.hybrid.is_some())];
        let mut rest = payload;
        if let Some(offer) = self.hybrid {
            let (fields, trailer) = rest.split_at_mut(rest.len() - HYBRID_TRAILER_BYTES);
            trailer[0] = u8::from(offer.secret.is_some()) | (2 * u8::from(offer.required));
            trailer[1..].copy_from_slice(&offer.secret.unwrap_or_default());
            rest = fields;
        }
        let mut w = WireWriter::new(rest);
        w.u64(self.instance);
        w.u32(epoch);
        w.u8(suites.len() as u8);
        w.bytes(suites);
        w.varint(1 << 30);
        w.varint(1 << 30);
        w.u8(4);
        for n in 1..=4 {
            w.bytes(&self.own[&n].0);
        }
        w.bytes(&self.claims);
    }

    fn syn_seed(&self, epoch: u32) -> [u8; 32] {
        let mut seed = [epoch as u8; 32];
        seed[..8].copy_from_slice(&self.instance.to_be_bytes());
        seed
    }

    /// Takes in a SYN+ACK that welcomes us.
    pub fn welcome(&mut self, datagram: &[u8]) {
        let (kind, _, cid, body) = PacketKind::split(datagram).unwrap();
        assert_eq!((kind, cid), (PacketKind::SynAck, self.own[&0]));
        assert!(self.take_answer(body), "not a welcome");
    }

    /// Takes in the body of a SYN+ACK to the newest SYN or WAKE. Returns whether it gave us keys.
    pub fn take_answer(&mut self, body: &[u8]) -> bool {
        let Some(initiator) = self.initiator.as_mut() else {
            return false;
        };
        let mut payload = [0; 1500];
        let Ok((secrets, n)) = initiator.finish(body, &mut payload) else {
            return false;
        };
        self.initiator = None;
        let mut r = WireReader::new(&payload[..n]);
        if r.u8() != Ok(0) {
            return false;
        }
        self.theirs.insert(0, Cid(r.array().unwrap()));
        let _token: [u8; 16] = r.array().unwrap();
        let suite = CipherSuite::from_code(r.u8().unwrap()).unwrap();
        r.u8().unwrap();
        r.varint().unwrap();
        r.varint().unwrap();
        for n in 1..=u32::from(r.u8().unwrap()) {
            self.theirs.insert(n, Cid(r.array().unwrap()));
            let _token: [u8; 16] = r.array().unwrap();
        }
        if r.u8() == Ok(1) {
            let (bytes, secret) = (r.array().unwrap(), r.array().unwrap());
            self.tickets.push(SessionTicket { bytes, secret });
        }
        let hybrid = r.u8().unwrap_or(0);
        let named = self.hybrid.and_then(|offer| offer.secret);
        let known = self.session_secrets.iter();
        let used = known.filter(|_| hybrid == 2).find(|s| Some(s.id) == named);
        let mut keys = PacketKeys::with_secret(suite, &secrets, used, true);
        if hybrid == 1 {
            keys.await_exchange(&secrets);
        }
        self.ciphertext = Default::default();
        self.keys = Some(keys);
        self.numbers.clear();
        self.heard.clear();
        self.arrived.clear();
        true
    }

    /// Takes in half of the server's ciphertext. Returns whether the keys are hybrid now.
    pub fn take_share(&mut self, half: u8, bytes: &[u8]) -> bool {
        self.ciphertext[usize::from(half)] = bytes.to_vec();
        let ciphertext = self.ciphertext.concat();
        if ciphertext.len() != KEM_CIPHERTEXT_BYTES {
            return false;
        }
        let shared = kem_decapsulate(&KEM_SEED, &ciphertext).unwrap();
        let keys = self.keys.as_mut().unwrap();
        let secret = keys.mix_in(&KEM_KEY, &ciphertext, &shared, true);
        let is_agreed = secret.is_some();
        self.session_secrets.extend(secret);
        is_agreed
    }

    /// A sealed packet of these frames with the next number of its path.
    pub fn packet(&mut self, path: u32, frames: &[Frame<'_>]) -> Vec<u8> {
        let number = self.numbers.entry(path).or_default();
        let n = *number;
        *number += 1;
        self.packet_numbered(path, n, frames)
    }

    pub fn packet_numbered(&mut self, path: u32, number: u64, frames: &[Frame<'_>]) -> Vec<u8> {
        let mut text = [0; 9000];
        let mut w = WireWriter::new(&mut text);
        for frame in frames {
            frame.encode(&mut w);
        }
        let n = w.written();
        self.packet_of(path, number, &text[..n])
    }

    /// A sealed packet of arbitrary plaintext.
    pub fn packet_of(&mut self, path: u32, number: u64, text: &[u8]) -> Vec<u8> {
        let mut packet = vec![PacketKind::Data.first_byte()];
        packet.extend(self.theirs[&path].0);
        packet.extend([0; 4]);
        packet.extend(text);
        packet.extend([0; TAG_BYTES]);
        let keys = self.keys.as_mut().unwrap();
        keys.seal(PathId(path), number, &mut packet);
        packet
    }

    /// Sends frames on path 0 from home.
    pub fn say(&mut self, frames: &[Frame<'_>]) {
        let packet = self.packet(0, frames);
        self.throw(self.home, packet);
    }

    /// Acknowledges everything the server sent on path 0 so far.
    pub fn acknowledge(&mut self) {
        self.open_inbox();
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        for n in self.arrived.iter().rev() {
            match ranges.last_mut() {
                Some(last) if last.0 == n + 1 => last.0 = *n,
                _ => ranges.push((*n, *n)),
            }
        }
        if ranges.is_empty() {
            return;
        }
        let packet = self.ack_packet(&ranges);
        self.throw(self.home, packet);
    }

    /// A packet that acknowledges these numbers of path 0, highest first, true or not.
    pub fn ack_packet(&mut self, ranges: &[(u64, u64)]) -> Vec<u8> {
        let mut buf = [0; 512];
        let mut w = WireWriter::new(&mut buf);
        Frame::encode_ack(&mut w, PathId(0), 0, ranges.iter().copied());
        let n = w.written();
        let number = self.numbers.entry(0).or_default();
        *number += 1;
        let number = *number - 1;
        self.packet_of(0, number, &buf[..n])
    }

    /// A datagram to the server, and all it has to say to that.
    pub fn throw(&mut self, from: SocketAddr, mut bytes: Vec<u8>) {
        self.throw_run(from, &mut bytes, usize::MAX);
    }

    /// Several datagrams of `stride` bytes at once, as a kernel hands them over.
    pub fn throw_run(&mut self, from: SocketAddr, bytes: &mut [u8], stride: usize) {
        let addresses = Addresses {
            link: LinkId(0),
            local: None,
            remote: from,
        };
        let incoming = IncomingDatagram { addresses, bytes };
        self.server.handle_datagrams(self.now, incoming, stride);
        self.pump();
    }

    pub fn pump(&mut self) {
        let mut buf = vec![0; 65536];
        for _ in 0..1000 {
            let mut idle = true;
            while let Some(t) = self.server.poll_transmit(self.now, &mut buf) {
                for datagram in buf[..t.len].chunks(t.segment) {
                    self.inbox.push((t.remote, datagram.to_vec()));
                }
                idle = false;
            }
            while let Some((_, e)) = self.server.poll_event() {
                self.events.push(e);
                idle = false;
            }
            if idle {
                return;
            }
        }
        panic!("the server never falls silent");
    }

    /// Lets time pass at the server.
    pub fn wait(&mut self, span: Span) {
        let until = self.now + span;
        let mut spins = (self.now, 0);
        while self.server.next_timeout() <= until {
            spins = if spins.0 == self.now {
                (self.now, spins.1 + 1)
            } else {
                (self.now, 0)
            };
            assert!(spins.1 < 100, "a timer fires and fires and nothing happens");
            self.now = self.now.max(self.server.next_timeout());
            self.server.handle_timeouts(self.now);
            self.pump();
        }
        self.now = until;
        self.server.handle_timeouts(self.now);
        self.pump();
    }

    pub fn session(&self) -> Option<SessionId> {
        self.server.ids().first().copied()
    }

    pub fn with_session<R>(&mut self, f: impl FnOnce(&mut Session) -> R) -> R {
        let id = self.session().expect("there is a session");
        let r = self.server.with(id, f).unwrap();
        self.pump();
        r
    }

    pub fn is_alive(&self) -> bool {
        self.session()
            .and_then(|id| self.server.session(id))
            .is_some_and(|s| s.state() == SessionState::Established)
    }

    /// Why the server ended the session, if it did.
    pub fn verdict(&self) -> Option<SessionEnd> {
        self.events.iter().find_map(|e| match e {
            SessionEvent::Closed(end) => Some(end.clone()),
            _ => None,
        })
    }

    /// Everything the server sent, opened: path and plaintext of each packet.
    pub fn open_inbox(&mut self) -> Vec<(u32, u64, Vec<u8>)> {
        let mut out = Vec::new();
        for (_, mut datagram) in std::mem::take(&mut self.inbox) {
            let Some((PacketKind::Data, _, cid, _)) = PacketKind::split(&datagram) else {
                continue;
            };
            let Some((path, _)) = self.own.iter().find(|(_, c)| **c == cid) else {
                continue;
            };
            let path = *path;
            let expected = self.heard.get(&path).copied().unwrap_or(0);
            let keys = self.keys.as_mut().unwrap();
            // What was sent under the keys before is of no interest.
            let Ok(opened) = keys.open(PathId(path), expected, &mut datagram) else {
                continue;
            };
            self.heard.insert(path, expected.max(opened.number + 1));
            if path == 0 {
                self.arrived.insert(opened.number);
            }
            let text = datagram[DATA_HEADER_BYTES..opened.end].to_vec();
            for frame in FrameIter::new(&text) {
                if let Ok(Frame::PathCid { path, cid, .. }) = frame {
                    self.theirs.insert(path.0, cid);
                }
            }
            out.push((path, opened.number, text));
        }
        out
    }

    /// Frames the server sent for which `pick` gives something.
    pub fn heard_frames<T>(&mut self, mut pick: impl FnMut(&Frame<'_>) -> Option<T>) -> Vec<T> {
        let mut found = Vec::new();
        for (_, _, text) in self.open_inbox() {
            for frame in FrameIter::new(&text) {
                found.extend(pick(&frame.expect("the server's frames decode")));
            }
        }
        found
    }
}

pub fn status(path: u32, seq: u64, gated: bool) -> Frame<'static> {
    Frame::PathStatus {
        path: PathId(path),
        seq,
        status: PathStatus::Available,
        gated,
        reason: ReasonCode::None,
    }
}

pub fn data(flow: FlowId, offset: u64, bytes: &[u8]) -> Frame<'_> {
    Frame::Data {
        flow,
        offset,
        bytes,
        fin: false,
    }
}

/// The n-th flow a device opens in epoch 1.
pub fn flow(n: u32) -> FlowId {
    FlowId::new(1, n, true)
}

/// Limits that a test soon reaches.
pub fn small() -> EndpointConfig {
    EndpointConfig {
        flow_window: 60_000,
        session_window: 100_000,
        flows_max: 16,
        ..EndpointConfig::default()
    }
}

/// The code with which the server ended the session.
pub fn fault(rogue: &Rogue) -> PeerFault {
    match rogue.verdict() {
        Some(SessionEnd::Fault(fault)) => fault,
        other => panic!("the server ended it with {other:?}"),
    }
}
