//! An admitted client that forges the addresses of others: whatever it composes, an address that has
//! not answered gets no more bytes than came from it.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use d2tp_seal::{PacketKeys, Rng, SessionTicket, SynMacs, open_cookie};
use d2tp_session::*;
use d2tp_wire::{Cid, Frame, FrameIter, PacketKind, WireReader};

use crate::adversary::rogue::*;
use crate::adversary::small_depth::{FRAMES, write_frame};

/// Steps of one walk.
const STEPS: u64 = 14;
/// Walks in the ordinary run.
const WALKS: u64 = 1500;
/// Walks in the nightly run.
const NIGHT_WALKS: u64 = 100_000;

pub(super) fn victim() -> SocketAddr {
    at("203.0.113.1:1")
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
    /// Tickets that SYN+ACKs brought.
    pub(super) tickets: Vec<SessionTicket>,
    /// Cookies for its own address.
    pub(super) cookies: Vec<[u8; 16]>,
    /// First part of each SYN and WAKE, by which a cookie for it opens.
    macs: Vec<[u8; 16]>,
    /// WAKEs that it sent.
    wakes: u64,
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
        attacker
    }

    pub(super) fn with_config(config: EndpointConfig) -> Self {
        Attacker {
            r: Rogue::with(config),
            rng: Rng::new([0; 32]),
            epoch: 0,
            sent: Vec::new(),
            nonces: Vec::new(),
            tickets: Vec::new(),
            cookies: Vec::new(),
            macs: Vec::new(),
            wakes: 0,
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
        self.log
            .push(format!("{what}, {} bytes from {from}", bytes.len()));
        if from != self.r.home {
            self.counts.entry(from).or_default().0 += bytes.len();
        }
        self.sent.push(bytes.clone());
        self.r.throw(from, bytes);
        self.read();
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
                Some((PacketKind::SynAck, _, cid, body)) if cid == self.r.own[&0] => {
                    let body = body.to_vec();
                    self.welcome(&body);
                }
                Some((PacketKind::Data, _, cid, _)) => self.open(cid, &mut datagram),
                Some((PacketKind::Cookie, _, _, body)) => self.open_cookie(body),
                _ => {}
            }
        }
    }

    fn welcome(&mut self, body: &[u8]) {
        let Some(initiator) = self.r.initiator.as_mut() else {
            return;
        };
        let mut payload = [0; 1500];
        let Ok((secrets, n)) = initiator.finish(body, &mut payload) else {
            return;
        };
        self.r.initiator = None;
        let mut r = WireReader::new(&payload[..n]);
        if r.u8() != Ok(0) {
            return;
        }
        self.r.theirs.insert(0, Cid(r.array().unwrap()));
        let _token: [u8; 16] = r.array().unwrap();
        let suite = CipherSuite::from_code(r.u8().unwrap()).unwrap();
        r.u8().unwrap();
        r.varint().unwrap();
        r.varint().unwrap();
        for n in 1..=u32::from(r.u8().unwrap()) {
            self.r.theirs.insert(n, Cid(r.array().unwrap()));
            let _token: [u8; 16] = r.array().unwrap();
        }
        if r.u8() == Ok(1) {
            let (bytes, secret) = (r.array().unwrap(), r.array().unwrap());
            self.tickets.push(SessionTicket { bytes, secret });
        }
        self.r.keys = Some(PacketKeys::new(suite, &secrets, true));
        self.r.numbers.clear();
        self.r.heard.clear();
        self.log.push("it has keys".to_owned());
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

    /// The content of a SYN or WAKE: nothing, a claim, or early data.
    fn draw_claims(&mut self) {
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
            if let Frame::Chg { nonce } = frame {
                self.nonces.push(nonce);
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
        let frames = match self.draw(11) {
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
            _ => vec![ping],
        };
        // An ACK of what it cannot have seen, too.
        let mut text = [0; 1300];
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
        match self.draw(19) {
            0 | 1 => {
                self.epoch += 1;
                self.draw_claims();
                let cookie = self.cookie();
                let syn = self.r.syn(self.epoch, cookie);
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
                let n = self.tickets.len() as u64;
                if n > 0 {
                    // The newest is good, an older one is not; with an epoch that is new or was used.
                    let n = if self.draw(3) > 0 {
                        n - 1
                    } else {
                        self.draw(n)
                    };
                    let ticket = self.tickets[n as usize].clone();
                    self.epoch += u32::from(self.draw(4) > 0);
                    self.draw_claims();
                    let cookie = self.cookie();
                    let wake = self.r.wake(self.epoch, &ticket, cookie);
                    self.wakes += 1;
                    self.throw_handshake("WAKE", from, wake);
                }
            }
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

fn search(seeds: std::ops::Range<u64>) {
    let (mut with_keys, mut with_cookies, mut wakes) = (0, 0, 0);
    for seed in seeds.clone() {
        let mut attacker = Attacker::new(seed);
        for _ in 0..STEPS {
            attacker.step();
        }
        with_keys += u64::from(attacker.r.keys.is_some());
        with_cookies += u64::from(!attacker.cookies.is_empty());
        wakes += attacker.wakes;
    }
    let walks = seeds.end - seeds.start;
    assert!(
        with_keys * 4 > walks,
        "too few walks reach the keys: {with_keys} of {walks}"
    );
    assert!(
        with_cookies * 8 > walks && wakes * 4 > walks,
        "too few walks get cookies ({with_cookies}) or send WAKEs ({wakes}), of {walks}"
    );
}

#[test]
fn no_mixture_of_messages_amplifies_to_an_address_that_has_not_answered() {
    // R-PATH-2, R-PATH-16
    search(0..WALKS);
}

#[test]
#[ignore = "long: the nightly run"]
fn no_mixture_of_messages_amplifies_in_a_long_search() {
    // R-PATH-2, R-PATH-16
    search(WALKS..NIGHT_WALKS);
}
