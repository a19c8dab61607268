//! An admitted client that forges the addresses of others: whatever it composes, an address that has
//! not answered gets no more bytes than came from it.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use d2tp_seal::{Rng, SynMacs, open_cookie};
use d2tp_session::*;
use d2tp_wire::{Cid, Frame, FrameIter, PacketKind};

use crate::adversary::rogue::*;
use crate::adversary::small_depth::{FRAMES, STARTS, write_frame};

/// Steps of one walk.
const STEPS: u64 = 14;
/// Walks in the ordinary run.
const WALKS: u64 = 1500;
/// Walks in the nightly run.
const NIGHT_WALKS: u64 = 100_000;
/// The size of a SYN without padding, in bytes.
pub(super) const SHORT_SYN_BYTES: usize = 300;
const RELAY_LIMITS: RelayLimits = RelayLimits {
    client: 16,
    all: 64,
};

pub(super) fn victim() -> SocketAddr {
    at("203.0.113.1:1")
}

/// A host outside, to which a relay of the attacker leads. It never says anything by itself.
pub(super) fn outside() -> SocketAddr {
    at("198.51.100.9:443")
}

/// Bytes that went to an address and have not been taken out of the inbox.
fn sent_to(r: &Rogue, to: SocketAddr) -> usize {
    let sent = r.inbox.iter().filter(|(at, _)| *at == to);
    sent.map(|(_, b)| b.len()).sum()
}

/// A client whose SYN went out from a victim's address and from its own.
fn split_handshake() -> Rogue {
    let mut r = Rogue::with(EndpointConfig::default());
    let syn = r.syn(1, None);
    r.throw(victim(), syn.clone());
    r.throw(r.home, syn);
    let (to, answer) = r.inbox.pop().expect("the copy is answered");
    assert_eq!(to, r.home);
    r.welcome(&answer);
    r
}

#[test]
fn an_answer_that_also_went_elsewhere_proves_no_address() {
    // R-PATH-16
    let mut r = split_handshake();
    let packet = r.packet(0, &[status(0, 1, false), data(flow(0), 0, b"x")]);
    let brought = 1200 + packet.len();
    r.throw(victim(), packet);
    r.with_session(|s| s.write(flow(0), vec![1; 500_000].into()).unwrap());
    r.wait(Span::from_secs(10));
    let got = sent_to(&r, victim());
    assert!(got <= brought, "{got} bytes for {brought}");
}

#[test]
fn a_device_whose_syn_was_copied_proves_its_address_by_a_challenge() {
    // R-PATH-16: a witness who copies a SYN delays the device by one round trip and no more.
    let mut r = Rogue::with(EndpointConfig::default());
    let syn = r.syn(1, None);
    r.throw(r.home, syn.clone());
    let (_, answer) = r.inbox.pop().unwrap();
    r.throw(victim(), syn);
    r.inbox.clear();
    r.welcome(&answer);
    r.say(&[status(0, 1, false), Frame::Ping]);
    let nonces = r.heard_frames(|f| match f {
        Frame::Chg { nonce } => Some(*nonce),
        _ => None,
    });
    assert_eq!(nonces.len(), 1);
    r.say(&[Frame::Rsp { nonce: nonces[0] }, data(flow(0), 0, b"x")]);
    r.with_session(|s| s.write(flow(0), vec![1; 500_000].into()).unwrap());
    assert!(sent_to(&r, r.home) > 5_000);
}

#[test]
fn packets_from_elsewhere_give_an_unproved_address_no_bytes() {
    // R-PATH-2: packets below the largest number do not move the path, and pay for nobody.
    let mut r = Rogue::inside(EndpointConfig::default());
    r.say(&[data(flow(0), 0, b"x")]);
    r.with_session(|s| s.write(flow(0), vec![1; 500_000].into()).unwrap());
    let ahead = r.packet_numbered(0, 1000, &[Frame::Ping]);
    let brought = ahead.len();
    r.inbox.clear();
    r.throw(victim(), ahead);
    for n in 100..150 {
        let text = [[1].as_slice(), &[0; 1100]].concat();
        let packet = r.packet_of(0, n, &text);
        r.throw(r.home, packet);
    }
    r.wait(Span::from_secs(2));
    let got = sent_to(&r, victim());
    assert!(got <= brought, "{got} bytes for {brought}");
}

#[test]
fn what_a_syn_leaves_of_its_size_is_all_that_answers_to_early_data_get() {
    // R-EARLY-2, R-PATH-2: the first answer takes a part, the answers to early data the rest, and no time and no
    // acknowledgement makes it more.
    let mut r = Rogue::with(EndpointConfig {
        early_data: true,
        ..EndpointConfig::default()
    });
    r.claims = early(flow(0));
    let syn = r.syn(1, None);
    let brought = syn.len();
    r.throw(victim(), syn.clone());
    let first = sent_to(&r, victim());
    let write = |r: &mut Rogue| {
        let id = r.session().expect("early data makes a session");
        let write = |s: &mut Session| s.write(flow(0), vec![1; 20_000].into());
        let _ = r.server.with(id, write);
        r.pump();
    };
    write(&mut r);
    let with_rest = sent_to(&r, victim());
    assert!(
        first < with_rest && with_rest <= brought,
        "{first}, {with_rest} of {brought}"
    );
    for _ in 0..8 {
        r.wait(Span::from_secs(1));
        write(&mut r);
    }
    let got = sent_to(&r, victim());
    assert!(got <= brought, "{got} bytes for {brought}");
    // A copy pays for its own answer, not for more of the early data.
    r.throw(victim(), syn);
    write(&mut r);
    let got = sent_to(&r, victim());
    assert!(got <= with_rest + first, "{got} bytes after a copy");
}

/// The attacker's knowledge, and the bytes sent to each address.
pub(super) struct Attacker {
    pub(super) r: Rogue,
    rng: Rng,
    pub(super) epoch: u32,
    /// Datagrams it sent, to be copied.
    pub(super) sent: Vec<Vec<u8>>,
    /// Nonces of challenges that reached its own address.
    pub(super) nonces: Vec<[u8; 16]>,
    /// Cookies for its own address.
    pub(super) cookies: Vec<[u8; 16]>,
    /// First part of each SYN and WAKE, by which a cookie for it opens.
    macs: Vec<[u8; 16]>,
    /// WAKEs that it sent.
    wakes: u64,
    relays: RelayTable,
    /// The relay that it opened to a host outside, and that of its call to itself.
    opened: Option<[RelayId; 2]>,
    /// Packets that went to the host outside, from which nothing came.
    unanswered: u32,
    /// Packets that a relay carried.
    relayed: u64,
    /// Bytes from and to each address that never answers.
    counts: BTreeMap<SocketAddr, (usize, usize)>,
    pub(super) log: Vec<String>,
}

impl Attacker {
    fn new(seed: u64) -> Self {
        let mut bytes = [7; 32];
        bytes[..8].copy_from_slice(&seed.to_be_bytes());
        let config = EndpointConfig {
            early_data: seed.is_multiple_of(2),
            // Under load at once, or after a few SYNs, or never.
            cookie_above: [u32::MAX, 0, 2][(seed / 2 % 3) as usize],
            ..EndpointConfig::default()
        };
        let mut attacker = Attacker::with_config(config);
        attacker.rng = Rng::new(bytes);
        attacker.log.push(format!("seed {seed}"));
        // Where the first SYNs need no cookie, a walk begins somewhere.
        if seed / 2 % 3 != 1 {
            attacker.begin(STARTS[(seed / 6) as usize % STARTS.len()]);
        }
        attacker
    }

    pub(super) fn with_config(config: EndpointConfig) -> Self {
        Attacker {
            r: Rogue::with(config),
            rng: Rng::new([0; 32]),
            epoch: 0,
            sent: Vec::new(),
            nonces: Vec::new(),
            cookies: Vec::new(),
            macs: Vec::new(),
            wakes: 0,
            relays: RelayTable::new(RELAY_LIMITS, [8; 32]),
            opened: None,
            unanswered: 0,
            relayed: 0,
            counts: BTreeMap::new(),
            log: Vec::new(),
        }
    }

    /// Bytes sent to an address.
    pub(super) fn sent_to(&self, to: SocketAddr) -> usize {
        self.counts.get(&to).map_or(0, |count| count.1)
    }

    fn draw(&mut self, n: u64) -> u64 {
        self.rng.u64() % n
    }

    /// Its own address, or one of two victims'.
    fn place(&mut self) -> SocketAddr {
        match self.draw(4) {
            0 | 1 => self.r.home,
            2 => victim(),
            _ => at("203.0.113.2:2"),
        }
    }

    pub(super) fn throw(&mut self, what: &str, from: SocketAddr, bytes: Vec<u8>) {
        self.count(what, from, &bytes);
        self.sent.push(bytes.clone());
        self.r.throw(from, bytes);
        self.read();
    }

    fn count(&mut self, what: &str, from: SocketAddr, bytes: &[u8]) {
        self.log
            .push(format!("{what}, {} bytes from {from}", bytes.len()));
        if from != self.r.home {
            self.counts.entry(from).or_default().0 += bytes.len();
        }
    }

    /// Asks for a relay to a host outside, and for one to itself by a call.
    pub(super) fn open_relays(&mut self) {
        let Some(id) = self.r.session() else {
            return;
        };
        let server = &self.r.server;
        let Ok(outward) = self.relays.open(server, id) else {
            return;
        };
        let own = self.r.secret.public();
        let _ = self.relays.listen(server, id, Admission::Anybody);
        if let Ok((inward, ..)) = self.relays.call(server, id, own) {
            self.log.push("it has relays".to_owned());
            self.opened = Some([outward, inward]);
            self.unanswered = 0;
        }
    }

    /// Sends a packet to one of its relays: that to the host outside, or that to itself.
    pub(super) fn throw_relayed(&mut self, from: SocketAddr, nth: usize, packet: &[u8]) {
        let Some(id) = self.opened.map(|opened| opened[nth]) else {
            return;
        };
        let mut datagram = Vec::new();
        wrap_relayed(id, packet, &mut datagram);
        self.count("relayed packet", from, &datagram);
        let from = Addresses {
            link: LinkId(0),
            local: None,
            remote: from,
        };
        let server = &self.r.server;
        match self.relays.forward_from_device(server, id, &from, packet) {
            Some(ForwardTarget::Outside(_)) => {
                self.relayed += 1;
                self.unanswered += 1;
                // R-RELAY-3
                assert!(
                    self.unanswered <= UNANSWERED_MAX,
                    "a {}th packet to a host that never answered, after\n{}",
                    self.unanswered,
                    self.log.join("\n")
                );
            }
            Some(ForwardTarget::Device(id, at)) => {
                self.relayed += 1;
                let mut datagram = Vec::new();
                wrap_relayed(id, packet, &mut datagram);
                self.r.inbox.push((at.remote, datagram));
            }
            Some(ForwardTarget::Worker(half)) => unreachable!("{half:?} of the only worker"),
            None => {}
        }
        self.read();
    }

    /// Lets the host outside, or somebody in its name, send a packet to the relay.
    pub(super) fn answer_from_outside(&mut self, packet: &[u8]) {
        let Some([outward, _]) = self.opened else {
            return;
        };
        self.log
            .push(format!("{} bytes from {}", packet.len(), outside()));
        let server = &self.r.server;
        if let Some(at) = self.relays.forward_to_device(server, outward, packet) {
            self.relayed += 1;
            self.unanswered = 0;
            let mut datagram = Vec::new();
            wrap_relayed(outward, packet, &mut datagram);
            self.r.inbox.push((at.remote, datagram));
        }
        self.read();
    }

    /// Any packet, as a relay sees it.
    pub(super) fn any_packet() -> Vec<u8> {
        let mut packet = vec![0; 1200];
        packet[0] = PacketKind::Data.first_byte();
        packet
    }

    /// Counts what the server sent, reads what came home, and checks the bound.
    pub(super) fn read(&mut self) {
        for (to, mut datagram) in std::mem::take(&mut self.r.inbox) {
            if to != self.r.home {
                let count = self.counts.entry(to).or_default();
                count.1 += datagram.len();
                assert!(
                    count.1 <= count.0,
                    "{} bytes to {to}, {} from there, after\n{}",
                    count.1,
                    count.0,
                    self.log.join("\n")
                );
                continue;
            }
            match PacketKind::split(&datagram) {
                Some((PacketKind::SynAck, _, cid, body))
                    if cid == self.r.own[&0] && self.r.take_answer(body) =>
                {
                    self.log.push("it has keys".to_owned());
                }
                Some((PacketKind::Data, _, cid, _)) => self.open(cid, &mut datagram),
                Some((PacketKind::Cookie, _, _, body)) => self.open_cookie(body),
                _ => {}
            }
        }
    }

    /// A cookie opens by the SYN that it answers, which is one of those sent.
    fn open_cookie(&mut self, body: &[u8]) {
        let Some((nonce, sealed)) = body.split_first_chunk::<12>() else {
            return;
        };
        let mut macs = self.macs.iter().rev();
        let opened =
            macs.find_map(|mac1| open_cookie(&self.r.server_key, *mac1, *nonce, sealed).ok());
        if let Some(cookie) = opened {
            self.log.push("it has a cookie".to_owned());
            self.cookies.push(cookie);
        }
    }

    /// Any cookie that it has, wherever it was for; mostly the newest.
    fn cookie(&mut self) -> Option<[u8; 16]> {
        match self.draw(4) {
            0 => None,
            1 => Some(self.rng.array()),
            _ => self.cookies.last().copied(),
        }
    }

    /// The content of a SYN or WAKE: nothing, a claim, or early data; in half of them an offer of hybrid keys.
    fn draw_content(&mut self) {
        self.r.hybrid = None;
        if self.draw(2) == 0 {
            let newest = self.r.session_secrets.last().map(|s| s.id);
            let secret = match self.draw(4) {
                0 => None,
                1 => Some(self.rng.array()),
                _ => newest,
            };
            let required = self.draw(4) == 0;
            self.r.hybrid = Some(HybridOffer { secret, required });
        }
        self.r.claims = match self.draw(3) {
            0 => Vec::new(),
            // A claim of a flow of epoch 1 from its start, with much credit.
            1 => claim(FlowId::new(1, 0, true)),
            _ => early(FlowId::new(1, self.rng.u64() as u32 % 3, true)),
        };
    }

    pub(super) fn throw_handshake(&mut self, what: &str, from: SocketAddr, bytes: Vec<u8>) {
        self.macs.extend(SynMacs::mac1(&bytes));
        self.throw(what, from, bytes);
    }

    fn open(&mut self, cid: Cid, datagram: &mut [u8]) {
        let path = self.r.own.iter().find(|(_, c)| **c == cid);
        let (Some(path), Some(keys)) = (path.map(|(p, _)| *p), &mut self.r.keys) else {
            return;
        };
        let expected = self.r.heard.get(&path).copied().unwrap_or(0);
        let Ok(opened) = keys.open(PathId(path), expected, datagram) else {
            return;
        };
        self.r.heard.insert(path, expected.max(opened.number + 1));
        for frame in FrameIter::new(&datagram[13..opened.end]).flatten() {
            match frame {
                Frame::Chg { nonce } => self.nonces.push(nonce),
                Frame::KeyShare { half, bytes } if self.r.take_share(half, bytes) => {
                    self.log.push("it has hybrid keys".to_owned());
                }
                _ => {}
            }
        }
    }

    fn packet(&mut self) -> Option<Vec<u8>> {
        self.r.keys.as_ref()?;
        let path = [0, 0, 0, 1, 2][self.draw(5) as usize];
        self.r.theirs.get(&path)?;
        let id = FlowId::new(self.epoch.max(1), self.rng.u64() as u32 % 3, true);
        let known = self.nonces.len().max(1) as u64;
        let nth = self.draw(known) as usize;
        let nonce = self.nonces.get(nth).copied().unwrap_or([0; 16]);
        let (seq, largest) = (1 + self.draw(9), self.draw(30));
        let ping = Frame::Ping;
        let frames = match self.draw(14) {
            0 | 1 => vec![status(path, seq, false), data(id, 0, b"x")],
            2 => vec![Frame::Chg { nonce: [9; 16] }; 3],
            3 => vec![Frame::Rsp { nonce }],
            4 => vec![Frame::Resume {
                flow: id,
                received: 0,
                flags: 0,
            }],
            5 => vec![Frame::Close { code: 0, text: b"" }],
            6 => vec![Frame::Suspend {
                reason: ReasonCode::None,
            }],
            7 => vec![Frame::Stop { flow: id, code: 1 }, ping],
            8 => vec![Frame::PathCid {
                path: PathId(path + 1),
                cid: Cid([8; 8]),
                token: [0; 16],
            }],
            9 => vec![key_share(0)],
            10 => vec![key_share(1)],
            11 => vec![key_share(0), key_share(1)],
            _ => vec![ping],
        };
        // An ACK of what it cannot have seen, too.
        let mut text = [0; 2500];
        let mut w = d2tp_wire::WireWriter::new(&mut text);
        for frame in &frames {
            frame.encode(&mut w);
        }
        if self.draw(3) == 0 {
            // Any frame there is.
            let nth = self.draw(FRAMES as u64) as usize;
            write_frame(&mut w, nth, path, nonce);
        }
        if self.draw(3) == 0 {
            let ranges = std::iter::once((0, largest));
            Frame::encode_ack(&mut w, PathId(path), 0, ranges);
        }
        let mut len = w.written();
        if self.draw(2) == 0 {
            len = len.max(1150);
        }
        // Numbers left out now are sent later, below the largest.
        let next = self.r.numbers.entry(path).or_insert(20);
        let number = *next;
        *next += 1;
        let number = match self.draw(3) {
            0 => number.saturating_sub(20),
            _ => number,
        };
        Some(self.r.packet_of(path, number, &text[..len]))
    }

    fn step(&mut self) {
        let from = self.place();
        match self.draw(22) {
            0 | 1 => {
                self.epoch += 1;
                self.draw_content();
                let cookie = self.cookie();
                let syn = match self.draw(5) {
                    0 => self.r.syn_of(SHORT_SYN_BYTES, self.epoch, cookie),
                    _ => self.r.syn(self.epoch, cookie),
                };
                self.throw_handshake("SYN", from, syn);
            }
            2..=4 => {
                let n = self.sent.len() as u64;
                if n > 0 {
                    let newest = self.draw(2) == 0;
                    let n = if newest { n - 1 } else { self.draw(n) };
                    let mut bytes = self.sent[n as usize].clone();
                    match self.draw(6) {
                        0 => bytes.truncate(bytes.len() / 2),
                        1 => bytes.extend([0; 40]),
                        _ => {}
                    }
                    self.throw("copy", from, bytes);
                }
            }
            5..=12 => {
                if let Some(packet) = self.packet() {
                    self.throw("packet", from, packet);
                }
            }
            13 => {
                let span = MS.times([5, 300, 3000, 11_000][self.draw(4) as usize]);
                self.log.push(format!("{span:?} pass"));
                self.r.wait(span);
                self.read();
            }
            14 => {
                if let Some(id) = self.r.session() {
                    self.log.push("the server lets it sleep".to_owned());
                    let _ = self.r.server.hibernate(self.r.now, id);
                    self.r.pump();
                    self.read();
                }
            }
            15..=17 => {
                let n = self.r.tickets.len() as u64;
                if n > 0 {
                    // The newest is good, an older one is not; with an epoch that is new or was used.
                    let n = if self.draw(3) > 0 {
                        n - 1
                    } else {
                        self.draw(n)
                    };
                    let ticket = self.r.tickets[n as usize].clone();
                    self.epoch += u32::from(self.draw(4) > 0);
                    self.draw_content();
                    let cookie = self.cookie();
                    let wake = self.r.wake(self.epoch, &ticket, cookie);
                    self.wakes += 1;
                    self.throw_handshake("WAKE", from, wake);
                }
            }
            18 if self.opened.is_none() => self.open_relays(),
            18 | 19 => {
                let nth = self.draw(2) as usize;
                let packet = self.sent.last().cloned().unwrap_or_default();
                self.throw_relayed(from, nth, &packet);
            }
            20 => self.answer_from_outside(&Attacker::any_packet()),
            _ => {}
        }
        self.server_writes();
    }

    /// The application of the server always has more to say.
    pub(super) fn server_writes(&mut self) {
        for id in self.r.server.ids() {
            let write = |s: &mut Session| {
                for flow in s.flow_ids() {
                    let _ = s.write(flow, vec![1; 20_000].into());
                }
            };
            let _ = self.r.server.with(id, write);
        }
        self.r.pump();
        self.read();
    }
}

pub(super) fn claim(flow: FlowId) -> Vec<u8> {
    let mut buf = [0; 64];
    let mut w = d2tp_wire::WireWriter::new(&mut buf);
    w.u8(1);
    w.u8(0);
    w.varint(flow.0);
    w.varint(0);
    w.varint(50_000);
    w.u8(0);
    let n = w.written();
    buf[..n].to_vec()
}

/// Early data in the place of claims: a flow with its first byte.
fn early(flow: FlowId) -> Vec<u8> {
    let mut buf = [0; 64];
    let mut w = d2tp_wire::WireWriter::new(&mut buf);
    data(flow, 0, b"x").encode(&mut w);
    let n = w.written();
    [&[255, n as u8], &buf[..n]].concat()
}

/// The part of a long search that the variable `D2TP_SEARCH_PART` names, such as `17/1000`: its number from 0 on, and
/// the number of all. Without it the search is whole.
pub(super) fn search_part() -> (u64, u64) {
    #[expect(
        clippy::disallowed_methods,
        reason = "the nightly run chooses the part of an ignored test"
    )]
    let Ok(text) = std::env::var("D2TP_SEARCH_PART") else {
        return (0, 1);
    };
    let part = text.split_once('/').and_then(|(part, parts)| {
        let (part, parts) = (part.parse().ok()?, parts.parse().ok()?);
        (part < parts).then_some((part, parts))
    });
    part.unwrap_or_else(|| panic!("{text} is no part of a search"))
}

/// What random walks have reached.
#[derive(Debug, Default)]
struct WalkCounts {
    with_keys: u64,
    with_hybrid_keys: u64,
    with_cookies: u64,
    wakes: u64,
    relayed: u64,
}

fn search(seeds: std::ops::Range<u64>) -> WalkCounts {
    let mut counts = WalkCounts::default();
    for seed in seeds {
        let mut attacker = Attacker::new(seed);
        for _ in 0..STEPS {
            attacker.step();
        }
        counts.with_keys += u64::from(attacker.r.keys.is_some());
        counts.with_hybrid_keys += u64::from(!attacker.r.session_secrets.is_empty());
        counts.with_cookies += u64::from(!attacker.cookies.is_empty());
        counts.wakes += attacker.wakes;
        counts.relayed += attacker.relayed;
    }
    counts
}

#[test]
fn no_mixture_of_messages_amplifies_to_an_address_that_has_not_answered() {
    // R-PATH-2, R-PATH-16
    let counts = search(0..WALKS);
    let enough = counts.with_keys * 4 > WALKS
        && counts.with_hybrid_keys * 10 > WALKS
        && counts.with_cookies * 8 > WALKS
        && counts.wakes * 4 > WALKS
        && counts.relayed * 10 > WALKS;
    assert!(enough, "too few of {WALKS} walks: {counts:?}");
}

#[test]
#[ignore = "long: the nightly run"]
fn no_mixture_of_messages_amplifies_in_a_long_search() {
    // R-PATH-2, R-PATH-16
    let (part, parts) = search_part();
    let at = |part| WALKS + (NIGHT_WALKS - WALKS) * part / parts;
    search(at(part)..at(part + 1));
}
