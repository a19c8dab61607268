//! Inputs from a seed: the output of the real encoder, and damaged versions of it.

use d2tp_seal::{
    CipherSuite, CookieSecrets, HandshakeSecrets, Initiator, PacketKeys, Responder, Rng, SecretKey,
    SessionSecret, SessionTicket, SynMacs, TICKET_BYTES, WAKE_OVERHEAD_BYTES,
};
use d2tp_time::Span;
use d2tp_wire::*;
use serde_json::{Value, json};

use super::Case;
use super::verdict::{array, bytes_of, ticket_fields};
use crate::client_handshake::PROLOGUE;
use crate::flow_options::FlowOptions;
use crate::key_exchange_state::{HYBRID_SUITE, HybridAnswer, SynTrailer};
use crate::syn::{SynAck, SynAckBody};
use crate::{FlowRecord, Role, SessionRecord};

const HEAD: usize = 1 + CID_BYTES;

/// Numbers and bytes drawn from a seed.
struct Draw(Rng);

impl Draw {
    fn below(&mut self, n: u64) -> u64 {
        self.0.u64() % n
    }
    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
    /// A number of up to `max` bits; all bit lengths are equally likely.
    fn bits(&mut self, max: u32) -> u64 {
        let bits = self.below(u64::from(max) + 1) as u32;
        match bits {
            0 => 0,
            _ if self.one_in(8) => u64::MAX >> (64 - bits),
            _ => self.0.u64() >> (64 - bits),
        }
    }
    fn v(&mut self) -> u64 {
        self.bits(62)
    }
    /// A flow id, sometimes beyond the largest valid one.
    fn flow(&mut self) -> FlowId {
        FlowId(if self.one_in(32) {
            self.v()
        } else {
            self.bits(57)
        })
    }
    fn v32(&mut self) -> u32 {
        self.bits(32) as u32
    }
    fn byte(&mut self) -> u8 {
        self.0.u64() as u8
    }
    fn bytes(&mut self, max: u64) -> Vec<u8> {
        let mut out = vec![0; self.below(max + 1) as usize];
        self.0.fill(&mut out);
        out
    }
    fn some(&mut self) -> Option<u64> {
        (!self.one_in(3)).then(|| self.v().min(VARINT_MAX - 1))
    }
    fn cid(&mut self) -> Cid {
        Cid(self.0.array())
    }
}

/// All inputs of a seed, by the name of their reader.
pub(super) fn inputs(seed: u64) -> Vec<(&'static str, Vec<Case>)> {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_be_bytes());
    let draw = &mut Draw(Rng::new(bytes));
    vec![
        ("datagram", gather(draw, 24, 24, datagram)),
        (
            "frames",
            [chosen_frames(), gather(draw, 120, 160, frames)].concat_cases(),
        ),
        ("packet", gather(draw, 48, 64, packet)),
        ("syn", gather(draw, 8, 16, syn)),
        ("wake", gather(draw, 8, 16, wake)),
        ("syn payload", gather(draw, 24, 32, syn_payload)),
        ("syn ack", gather(draw, 10, 20, syn_ack)),
        ("syn ack payload", gather(draw, 24, 32, syn_ack_payload)),
        ("cookie", gather(draw, 8, 16, cookie)),
        ("unknown", gather(draw, 8, 12, unknown)),
        ("record", gather(draw, 40, 64, record)),
    ]
}

trait ConcatCases {
    fn concat_cases(self) -> Vec<Case>;
}

impl<const N: usize> ConcatCases for [Vec<Case>; N] {
    fn concat_cases(self) -> Vec<Case> {
        self.into_iter().flatten().collect()
    }
}

/// Calls a generator until there are enough cases of either verdict.
fn gather(
    draw: &mut Draw,
    taken: usize,
    refused: usize,
    mut make: impl FnMut(&mut Draw) -> Case,
) -> Vec<Case> {
    let mut cases: [Vec<Case>; 2] = [Vec::new(), Vec::new()];
    for _ in 0..20_000 {
        let case = make(draw);
        let (list, most) = if case.says.is_null() {
            (1, refused)
        } else {
            (0, taken)
        };
        if cases[list].len() < most {
            cases[list].push(case);
        }
        if cases[0].len() == taken && cases[1].len() == refused {
            return cases.concat_cases();
        }
    }
    panic!(
        "{} taken and {} refused of 20,000",
        cases[0].len(),
        cases[1].len()
    );
}

/// Returns the input unchanged half of the time, else damages it.
fn perhaps_damaged(draw: &mut Draw, whole: &str, bytes: Vec<u8>) -> (String, Vec<u8>) {
    if draw.one_in(2) {
        return (whole.to_owned(), bytes);
    }
    let (how, bytes) = damaged(draw, bytes);
    (format!("{whole}, {how}"), bytes)
}

fn damaged(draw: &mut Draw, mut bytes: Vec<u8>) -> (&'static str, Vec<u8>) {
    if bytes.is_empty() {
        return ("a byte put in", vec![draw.byte()]);
    }
    let at = draw.below(bytes.len() as u64) as usize;
    match draw.below(7) {
        0 => {
            bytes.truncate(at);
            ("cut short", bytes)
        }
        1 => {
            bytes[at] ^= 1 << draw.below(8);
            ("a bit turned", bytes)
        }
        2 => {
            bytes[at] = draw.byte();
            ("a byte replaced", bytes)
        }
        3 => {
            // A wrong length or number.
            let liar = [0x00, 0x3f, 0x40, 0x7f, 0x80, 0xbf, 0xc0, 0xff];
            bytes[at] = liar[draw.below(8) as usize];
            ("a number that lies", bytes)
        }
        4 => {
            bytes.extend(draw.bytes(3));
            bytes.push(draw.byte());
            ("bytes put behind", bytes)
        }
        5 => {
            bytes.remove(at);
            ("a byte left out", bytes)
        }
        _ => {
            let skip = draw.below(3) as usize;
            (
                "a number in a longer form",
                longer(&bytes, 1, skip).unwrap_or(bytes),
            )
        }
    }
}

/// Encodes the `skip`-th variable-length integer from `at` on in a longer form than needed.
fn longer(bytes: &[u8], at: usize, skip: usize) -> Option<Vec<u8>> {
    let mut r = WireReader::new(bytes.get(at..)?);
    for _ in 0..skip {
        r.varint().ok()?;
    }
    let from = bytes.len() - r.remaining();
    let value = r.varint().ok()?;
    let to = bytes.len() - r.remaining();
    let long = match to - from {
        1 => (value as u16 | 0x4000).to_be_bytes().to_vec(),
        2 => (value as u32 | 0x8000_0000).to_be_bytes().to_vec(),
        4 => (value | 0xc000_0000_0000_0000).to_be_bytes().to_vec(),
        _ => return None,
    };
    Some([&bytes[..from], &long, &bytes[to..]].concat())
}

// ---- datagrams and frames ----

fn datagram(draw: &mut Draw) -> Case {
    let mut bytes = vec![draw.byte()];
    bytes.extend(draw.bytes(40));
    let (why, bytes) = perhaps_damaged(draw, "any bytes", bytes);
    Case::new("datagram", why, Value::Null, bytes)
}

fn reason(draw: &mut Draw) -> ReasonCode {
    ReasonCode::from_u8(draw.byte() % 18)
}

fn write_frame(draw: &mut Draw, out: &mut Vec<u8>) {
    let flow = draw.flow();
    let path = PathId(draw.v32());
    let (a, b, byte) = (draw.v(), draw.v(), draw.byte());
    let (nonce, cid) = (draw.0.array(), draw.cid());
    let bytes = draw.bytes(24);
    let text: Vec<u8> = if draw.one_in(3) {
        bytes.clone()
    } else {
        "späte Größe".into()
    };
    let reason = reason(draw);
    let status = [
        PathStatus::Available,
        PathStatus::Standby,
        PathStatus::Frozen,
        PathStatus::Gone,
    ][usize::from(byte % 4)];
    let on = draw.one_in(2);
    let (size, left) = (draw.some(), draw.some());
    let frame = match draw.below(29) {
        0 => Frame::Ping,
        1 => {
            let mut high = draw.bits(61) + (1 << 20);
            let mut ranges = Vec::new();
            for _ in 0..1 + draw.below(6) {
                let low = high - draw.below(1 << 12);
                ranges.push((low, high));
                high = low - 2 - draw.below(1 << 12);
            }
            let mut buf = [0; 256];
            let mut w = WireWriter::new(&mut buf);
            assert!(Frame::encode_ack(&mut w, path, a, ranges.iter().copied()));
            let n = w.written();
            return out.extend(&buf[..n]);
        }
        2 if draw.below(2) == 0 => Frame::KeyShare {
            half: draw.below(2) as u8,
            bytes: &bytes,
        },
        2 => Frame::AckRate {
            path,
            every: draw.v32(),
            delay_us: a,
        },
        3 | 4 => Frame::Data {
            flow,
            offset: a.min(VARINT_MAX - bytes.len() as u64),
            bytes: &bytes,
            fin: on,
        },
        5 => Frame::Open {
            flow,
            flags: byte,
            priority: byte >> 3,
            size,
            deadline_ms: left,
        },
        6 => Frame::Reset {
            flow,
            code: a,
            final_size: b,
        },
        7 => Frame::Stop { flow, code: a },
        8 => Frame::FlowCredit { flow, max: a },
        9 => Frame::SessionCredit { max: a },
        10 => Frame::Deadline {
            flow,
            seq: a,
            remaining_ms: left,
        },
        11 => Frame::Durable { flow, offset: a },
        12 => Frame::Committed { flow, offset: a },
        13 => Frame::Grant {
            seq: a,
            flow,
            path,
            max_sent: b,
        },
        14 => Frame::Spent {
            flow,
            path,
            sent: a,
        },
        15 => Frame::PathStatus {
            path,
            seq: a,
            status,
            gated: on,
            reason,
        },
        16 => Frame::PathLimit {
            path,
            seq: a,
            bytes: b,
        },
        17 => Frame::FlowPause {
            flow,
            seq: a,
            paused: on,
            reason,
        },
        18 => Frame::Chg { nonce },
        19 => Frame::Rsp { nonce },
        20 => Frame::Auth { path },
        21 => Frame::PathCid {
            path,
            cid,
            token: nonce,
        },
        22 => Frame::Resume {
            flow,
            received: a,
            flags: byte,
        },
        23 => Frame::Resumed { flow, received: a },
        24 => Frame::Refused { flow, reason },
        25 => Frame::ResumeEnd { flows: a },
        26 => Frame::Datagram {
            context: a,
            bytes: &bytes,
        },
        27 => Frame::Suspend { reason },
        _ => Frame::Close {
            code: a,
            text: &text,
        },
    };
    let mut buf = [0; 512];
    let mut w = WireWriter::new(&mut buf);
    frame.encode(&mut w);
    let n = w.written();
    out.extend(&buf[..n]);
}

fn frames(draw: &mut Draw) -> Case {
    let mut bytes = Vec::new();
    for _ in 0..1 + draw.below(3) {
        write_frame(draw, &mut bytes);
        if draw.one_in(4) {
            bytes.extend([0, 0]);
        }
    }
    let (why, bytes) = perhaps_damaged(draw, "frames", bytes);
    Case::new("frames", why, Value::Null, bytes)
}

/// Frames at the ends and limits of their fields, and every invalid type.
fn chosen_frames() -> Vec<Case> {
    let mut cases: Vec<(String, Vec<u8>)> = Vec::new();
    for ty in 0..=255u8 {
        // Long enough, and all zeros, so that only the type can be wrong.
        let bytes = [&[ty][..], &[0; 40]].concat();
        cases.push((format!("type {ty:02x}, then zeros"), bytes));
    }
    let v = |value: u64| (value | 0xc000_0000_0000_0000).to_be_bytes();
    let four = |frame: &str, head: &[u8], tail: &[u8], limit: u64| {
        [limit - 1, limit].map(|at| {
            let bytes = [head, &v(at), tail].concat();
            (format!("{frame} with {at:x}"), bytes)
        })
    };
    cases.extend(four("ACK of a path", &[0x02], &[5, 0, 0, 5], 1 << 32));
    cases.extend(four("ACK_RATE of a path", &[0x03], &[5, 0], 1 << 32));
    cases.extend(four("ACK_RATE every", &[0x03, 1], &[0], 1 << 32));
    cases.extend(four("GRANT of a path", &[0x18, 1, 2], &[9], 1 << 32));
    cases.extend(four("SPENT of a path", &[0x19, 2], &[9], 1 << 32));
    cases.extend(four(
        "PATH_STATUS of a path",
        &[0x1a],
        &[1, 0, 0, 0],
        1 << 32,
    ));
    cases.extend(four("PATH_LIMIT of a path", &[0x1b], &[1, 0], 1 << 32));
    cases.extend(four("AUTH of a path", &[0x22], &[], 1 << 32));
    cases.extend(four("PATH_CID of a path", &[0x23], &[7; 24], 1 << 32));
    cases.extend(four("DATA at", &[0x08, 2], &[1, b'x'], VARINT_MAX));
    cases.extend(four("DATA without bytes at", &[0x09, 2], &[0], VARINT_MAX));
    for (field, head) in [
        ("a path's status", vec![0x1a, 1, 1]),
        ("gated", vec![0x1a, 1, 1, 0]),
    ] {
        for at in 0..6 {
            let bytes = [&head[..], &[at], &[0; 2][..4 - head.len().min(4) + 1]].concat();
            cases.push((format!("{field} {at}"), bytes));
        }
    }
    for at in 0..3 {
        cases.push((format!("paused {at}"), vec![0x1c, 2, 1, at, 0]));
    }
    for at in 14..19 {
        cases.push((format!("reason {at}"), vec![0x3c, at]));
        cases.push((format!("refused with reason {at}"), vec![0x2a, 2, at]));
    }
    for n in [0, 255, 256, 257] {
        let mut bytes = vec![0x3e, 1];
        bytes.extend((n | 0x4000u16).to_be_bytes());
        bytes.extend(vec![b'a'; usize::from(n)]);
        cases.push((format!("CLOSE with {n} bytes"), bytes));
    }
    for text in [
        &[0xff][..],
        &[0xe2, 0x82],
        &[b'a', 0xf0, 0x9f, 0x98, b'b'],
        &[0xed, 0xa0, 0x80],
    ] {
        let bytes = [&[0x3e, 0, text.len() as u8][..], text].concat();
        cases.push(("CLOSE with a text that is not UTF-8".to_owned(), bytes));
    }
    for (why, bytes) in [
        ("down to number 0", vec![0x02, 0, 9, 0, 2, 1, 1, 1, 0, 2]),
        ("below number 0", vec![0x02, 0, 9, 0, 2, 1, 1, 1, 0, 3]),
        ("first beyond largest", vec![0x02, 0, 9, 0, 0, 10]),
        ("more ranges than bytes", vec![0x02, 0, 63, 0, 60, 0, 0, 0]),
        (
            "2^62 - 1 ranges",
            [&[0x02, 0, 63, 0][..], &[0xff; 8], &[0, 0, 0]].concat(),
        ),
        (
            "a gap of 2^62 - 1",
            [&[0x02, 0, 63, 0, 1, 0][..], &[0xff; 8], &[0]].concat(),
        ),
        (
            "70 ranges",
            [&[0x02, 0, 0x43, 0xff, 0, 0x40, 70, 0][..], &[0; 140]].concat(),
        ),
    ] {
        cases.push((format!("ACK {why}"), bytes));
    }
    for (why, bytes) in [
        ("nothing", vec![]),
        ("padding alone", vec![0; 20]),
        ("padding, PING, padding", vec![0, 0, 1, 0]),
        ("a length beyond the end", vec![0x30, 5, 0x3f, 1, 2]),
        (
            "a length of 2^62 - 1",
            [&[0x30, 5][..], &[0xff; 8]].concat(),
        ),
        (
            "a string in an 8 byte length",
            [&[0x30, 5][..], &v(2), b"hi"].concat(),
        ),
        ("size 0 and deadline 0", vec![0x10, 2, 0, 0, 1, 1]),
        ("every flag and priority 255", vec![0x10, 2, 255, 255, 0, 0]),
        ("every flag of RESUME", vec![0x28, 2, 3, 255]),
        (
            "a flow id of 62 bits",
            [&[0x12][..], &[0xff; 8], &[0]].concat(),
        ),
    ] {
        cases.push((why.to_owned(), bytes));
    }
    cases
        .into_iter()
        .map(|(why, bytes)| Case::new("frames", why, Value::Null, bytes))
        .collect()
}

// ---- packets under the keys of docs/vectors/handshake.json ----

fn told() -> Value {
    serde_json::from_str(include_str!("../../../../../docs/vectors/handshake.json"))
        .expect("vector files are JSON")
}

/// The secrets of the handshake in the vectors.
pub(super) fn secrets() -> HandshakeSecrets {
    let told = told();
    let server = SecretKey::from_bytes(array(&told["server_secret"]));
    let mut out = [0; 2048];
    let syn = bytes_of(&told["syn"]["datagram"]);
    let message = &syn[HEAD..syn.len() - SynMacs::BYTES];
    let seed = array(&told["server_ephemeral_secret"]);
    let (responder, _) =
        Responder::read(&server, PROLOGUE, seed, message, &mut out).expect("a vector");
    let payload = bytes_of(&told["syn_ack"]["payload"]);
    responder.answer(&payload, &mut out).expect("a vector").0
}

fn sealed(keys: &mut PacketKeys, cid: Cid, path: u32, number: u64, frames: &[u8]) -> Vec<u8> {
    let mut packet = vec![PacketKind::Data.first_byte()];
    packet.extend(cid.0);
    packet.extend([0; PN_BYTES]);
    packet.extend(frames);
    packet.extend([0; TAG_BYTES]);
    keys.seal(PathId(path), number, &mut packet);
    packet
}

fn suite(draw: &mut Draw) -> CipherSuite {
    if draw.one_in(2) {
        CipherSuite::Aes128Gcm
    } else {
        CipherSuite::ChaCha20Poly1305
    }
}

fn packet(draw: &mut Draw) -> Case {
    let told = told();
    let suite = suite(draw);
    let sender = if draw.one_in(2) {
        "initiator"
    } else {
        "responder"
    };
    let mut keys = PacketKeys::new(suite, &secrets(), sender == "initiator");
    let newest = draw.below(4);
    // Mostly the newest generation, the ones before and after it, and others that are not valid any
    // more or yet.
    let generation =
        (newest + draw.below(8).saturating_sub(4).min(3)).saturating_sub(draw.below(3));
    for _ in 0..generation {
        keys.advance();
    }
    let (cid, path, number) = (draw.cid(), draw.v32(), draw.v() / 2);
    // A receiver that received most packets; for one in eight the expected number is 2^31 away.
    let near = draw.bits(30);
    let mut expected = if draw.one_in(2) {
        number + near
    } else {
        number.saturating_sub(near)
    };
    if draw.one_in(8) {
        expected = number.saturating_sub(1 << 31) + draw.below(3);
    }
    let mut frames = Vec::new();
    for _ in 0..draw.below(3) {
        write_frame(draw, &mut frames);
    }
    let packet = sealed(&mut keys, cid, path, number, &frames);
    let (why, packet) = perhaps_damaged(draw, "a packet", packet);
    let said_path = if draw.one_in(8) { path ^ 1 } else { path };
    let given = json!({"suite": suite.code(), "sender": sender, "generation": newest,
        "key": told[format!("noise_key_{sender}")], "transcript": told["transcript"],
        "path": said_path, "expected": expected});
    Case::new("packet", why, given, packet)
}

// ---- handshakes ----

fn write_syn_payload(draw: &mut Draw) -> Vec<u8> {
    let mut buf = [0; 2_400];
    let mut w = WireWriter::new(&mut buf);
    w.u64(draw.0.u64());
    w.u32(draw.v32());
    let mut suites = draw.bytes(4);
    let offers = draw.one_in(3);
    if offers {
        suites.push(HYBRID_SUITE);
    }
    w.u8(suites.len() as u8);
    w.bytes(&suites);
    w.varint(draw.v());
    w.varint(draw.v());
    let n = draw.below(11);
    w.u8(n as u8);
    for _ in 0..n {
        w.bytes(&draw.cid().0);
    }
    if draw.one_in(3) {
        write_early_data(draw, &mut w);
    } else {
        write_claims(draw, &mut w);
    }
    if offers && draw.one_in(2) {
        w.zeros(draw.below(20) as usize);
        let trailer = SynTrailer {
            secret: draw.one_in(2).then(|| draw.0.array()),
            required: draw.one_in(2),
        };
        w.bytes(&trailer.encode());
    }
    let n = w.written();
    buf[..n].to_vec()
}

fn write_early_data(draw: &mut Draw, w: &mut WireWriter<'_>) {
    w.u8(255);
    let mut buf = [0; 1_000];
    let mut frames = WireWriter::new(&mut buf);
    // Mostly ids of the device, of an epoch before the SYN's.
    for _ in 0..draw.below(4) {
        let flow = match draw.below(8) {
            0 => draw.flow(),
            n => FlowId::new(n as u32 % 2, draw.v32() & FlowId::COUNTER_MAX, true),
        };
        match draw.below(12) {
            0 => Frame::Ping.encode(&mut frames),
            1 => Frame::Stop { flow, code: 1 }.encode(&mut frames),
            2..7 => {
                let frame = Frame::Open {
                    flow,
                    flags: draw.below(8) as u8,
                    priority: draw.below(8) as u8,
                    size: draw.some(),
                    deadline_ms: draw.some(),
                };
                frame.encode(&mut frames);
            }
            _ => {
                let bytes = draw.bytes(40);
                let frame = Frame::Data {
                    flow,
                    offset: draw.bits(10),
                    bytes: &bytes,
                    fin: draw.one_in(2),
                };
                frame.encode(&mut frames);
            }
        }
    }
    let n = frames.written();
    w.varint(n as u64);
    w.bytes(&buf[..n]);
}

fn write_claims(draw: &mut Draw, w: &mut WireWriter<'_>) {
    if draw.one_in(4) {
        return;
    }
    // Mostly valid values, sometimes not.
    let rarely = |draw: &mut Draw, often, rare| if draw.one_in(16) { rare } else { often };
    let most = rarely(draw, 6, 70);
    let n = draw.below(most);
    w.u8(n as u8);
    if n == 0 {
        return;
    }
    let most = rarely(draw, 2, 256);
    w.u8(draw.below(most) as u8);
    let mut last = draw.flow();
    for _ in 0..n {
        if !draw.one_in(32) {
            last = draw.flow();
        }
        w.varint(last.0);
        w.varint(draw.v() / 2);
        let most = rarely(draw, 40, 62);
        w.varint(draw.bits(most as u32));
        let most = rarely(draw, 2, 256);
        w.u8(draw.below(most) as u8);
    }
}

fn syn_payload(draw: &mut Draw) -> Case {
    let payload = write_syn_payload(draw);
    let (why, payload) = perhaps_damaged(draw, "a SYN's payload", payload);
    Case::new("syn payload", why, Value::Null, payload)
}

fn syn(draw: &mut Draw) -> Case {
    let server = SecretKey::from_bytes(draw.0.array());
    let device = SecretKey::from_bytes(draw.0.array());
    let mut payload = write_syn_payload(draw);
    let (mut why, damage) = ("a SYN".to_owned(), draw.one_in(4));
    if damage {
        let how;
        (how, payload) = damaged(draw, payload);
        why = format!("{why}, {how} in its payload");
    }
    let size = match draw.below(4) {
        0 => 1199,
        1 => 1200 + draw.below(100) as usize,
        _ => 1200,
    };
    payload.resize(size - HEAD - 96 - SynMacs::BYTES, 0);
    let mut syn = vec![0; size];
    syn[0] = PacketKind::Syn.first_byte();
    if draw.one_in(8) {
        syn[0] = 0b100 << 5 | draw.below(32) as u8;
    }
    syn[1..HEAD].copy_from_slice(&draw.cid().0);
    let known = if draw.one_in(8) {
        device.public()
    } else {
        server.public()
    };
    let message = &mut syn[HEAD..size - SynMacs::BYTES];
    Initiator::start(&device, &known, PROLOGUE, draw.0.array(), &payload, message)
        .expect("it fits");
    let cookie: [u8; 16] = draw.0.array();
    let (given_cookie, used) = match draw.below(4) {
        0 => (Some(cookie), Some(cookie)),
        1 => (Some(cookie), Some([7; 16])),
        2 => (Some(cookie), None),
        _ => (None, None),
    };
    // With the right key for mac1 but the wrong one for Noise, or the reverse.
    let mac_key = if draw.one_in(8) {
        device.public()
    } else {
        server.public()
    };
    SynMacs::write(&mut syn, &mac_key, used.as_ref());
    let (why, syn) = perhaps_damaged(draw, &why, syn);
    let given = json!({"server_secret": hex::encode(server.to_bytes()),
        "cookie": given_cookie.map(hex::encode)});
    Case::new("syn", why, given, syn)
}

fn ticket(draw: &mut Draw) -> SessionTicket {
    SessionTicket {
        bytes: draw.0.array(),
        secret: draw.0.array(),
    }
}

fn perhaps_a_ticket(draw: &mut Draw) -> Option<SessionTicket> {
    draw.one_in(2).then(|| ticket(draw))
}

fn wake(draw: &mut Draw) -> Case {
    let server = SecretKey::from_bytes(draw.0.array());
    let device = SecretKey::from_bytes(draw.0.array());
    let ticket = ticket(draw);
    let mut payload = write_syn_payload(draw);
    let size = match draw.below(4) {
        0 => 1199,
        1 => 1200 + draw.below(100) as usize,
        _ => 1200,
    };
    payload.resize(
        size - HEAD - TICKET_BYTES - WAKE_OVERHEAD_BYTES - SynMacs::BYTES,
        0,
    );
    let mut datagram = vec![0; size];
    datagram[0] = PacketKind::Wake.first_byte();
    if draw.one_in(8) {
        datagram[0] = 0b011 << 5 | draw.below(32) as u8;
    }
    datagram[1..HEAD].copy_from_slice(&draw.cid().0);
    let end = size - SynMacs::BYTES;
    let (shown, message) = datagram[HEAD..end].split_at_mut(TICKET_BYTES);
    shown.copy_from_slice(&ticket.bytes);
    // The ticket's bytes, its secret and both keys must all match.
    let mut used = ticket.clone();
    if draw.one_in(8) {
        used.bytes[draw.below(TICKET_BYTES as u64) as usize] ^= 1;
    }
    if draw.one_in(8) {
        used.secret[draw.below(32) as usize] ^= 1;
    }
    let (as_device, to) = match draw.below(8) {
        0 => (&server, server.public()),
        1 => (&device, device.public()),
        _ => (&device, server.public()),
    };
    let seed = draw.0.array();
    Initiator::start_by_ticket(as_device, &to, &used, PROLOGUE, seed, &payload, message)
        .expect("it fits");
    let mac_key = if draw.one_in(8) {
        device.public()
    } else {
        server.public()
    };
    SynMacs::write(&mut datagram, &mac_key, None);
    let (why, datagram) = perhaps_damaged(draw, "a WAKE", datagram);
    let given = json!({"server_secret": hex::encode(server.to_bytes()),
        "device_public": hex::encode(device.public().0),
        "ticket_secret": hex::encode(ticket.secret)});
    Case::new("wake", why, given, datagram)
}

fn write_syn_ack_payload(draw: &mut Draw) -> Vec<u8> {
    let answer = match draw.below(8) {
        0 => SynAck::Stale {
            confirmed: draw.v32(),
        },
        1 => SynAck::Refused(reason(draw)),
        2 => SynAck::NoSuite,
        3 => SynAck::NoTicket,
        _ => SynAck::Accepted(SynAckBody {
            cid: draw.cid(),
            token: draw.0.array(),
            suite: if draw.one_in(8) {
                draw.byte()
            } else {
                suite(draw).code()
            },
            resumed: draw.one_in(2),
            session_credit: draw.v(),
            flow_credit: draw.v(),
            spare: (0..draw.below(10))
                .map(|_| (draw.cid(), draw.0.array()))
                .collect(),
            ticket: perhaps_a_ticket(draw),
            hybrid: HybridAnswer::from_code(draw.below(4) as u8),
        }),
    };
    let mut buf = [0; 400];
    let mut w = WireWriter::new(&mut buf);
    answer.encode(&mut w);
    let n = w.written();
    buf[..n].to_vec()
}

fn syn_ack_payload(draw: &mut Draw) -> Case {
    let payload = write_syn_ack_payload(draw);
    let (why, payload) = perhaps_damaged(draw, "a SYN+ACK's payload", payload);
    Case::new("syn ack payload", why, Value::Null, payload)
}

fn syn_ack(draw: &mut Draw) -> Case {
    let server = SecretKey::from_bytes(draw.0.array());
    let device = SecretKey::from_bytes(draw.0.array());
    let ephemeral: [u8; 32] = draw.0.array();
    let payload = draw.bytes(20);
    let (mut message, mut out) = ([0; 256], [0; 1024]);
    let (seed, remote, peer) = (draw.0.array(), server.public(), device.public());
    let ticket = perhaps_a_ticket(draw);
    let responder = match &ticket {
        None => Initiator::start(
            &device,
            &remote,
            PROLOGUE,
            ephemeral,
            &payload,
            &mut message,
        )
        .and_then(|(_, n)| Responder::read(&server, PROLOGUE, seed, &message[..n], &mut out)),
        Some(t) => {
            let message = &mut message;
            Initiator::start_by_ticket(&device, &remote, t, PROLOGUE, ephemeral, &payload, message)
                .and_then(|(_, n)| {
                    let message = &message[..n];
                    Responder::read_by_ticket(&server, peer, t, PROLOGUE, seed, message, &mut out)
                })
        }
    };
    let (responder, _) = responder.expect("it fits and is whole");
    let mut answer = write_syn_ack_payload(draw);
    let (mut why, damage) = ("a SYN+ACK".to_owned(), draw.one_in(4));
    if damage {
        let how;
        (how, answer) = damaged(draw, answer);
        why = format!("{why}, {how} in its payload");
    }
    let (secrets, n) = responder.answer(&answer, &mut out).expect("it fits");
    let mut datagram = vec![PacketKind::SynAck.first_byte()];
    if draw.one_in(8) {
        datagram[0] = 0b101 << 5 | draw.below(32) as u8;
    }
    datagram.extend(draw.cid().0);
    datagram.extend(&out[..n]);
    let suite = answer
        .get(25)
        .and_then(|code| CipherSuite::from_code(*code));
    let mut keys = PacketKeys::new(suite.unwrap_or(CipherSuite::Aes128Gcm), &secrets, false);
    let first = sealed(&mut keys, draw.cid(), 0, draw.below(5), &[1]);
    let (why, datagram) = perhaps_damaged(draw, &why, datagram);
    let given = json!({"device_secret": hex::encode(device.to_bytes()),
        "device_ephemeral": hex::encode(ephemeral), "server_public": hex::encode(server.public().0),
        "ticket": ticket_fields(ticket.as_ref()),
        "payload": hex::encode(&payload), "first_packet": hex::encode(first)});
    Case::new("syn ack", why, given, datagram)
}

fn cookie(draw: &mut Draw) -> Case {
    let server = SecretKey::from_bytes(draw.0.array()).public();
    let (mac1, nonce): ([u8; 16], [u8; 12]) = (draw.0.array(), draw.0.array());
    let jar = CookieSecrets::new(&server, draw.0.array(), [0; 32]);
    let mut datagram = vec![PacketKind::Cookie.first_byte()];
    datagram.extend(draw.cid().0);
    datagram.extend(nonce);
    datagram.extend(jar.seal_cookie(mac1, "192.0.2.1:7".parse().expect("an address"), nonce));
    let (why, datagram) = perhaps_damaged(draw, "a COOKIE", datagram);
    let told = if draw.one_in(8) { [0; 16] } else { mac1 };
    let given = json!({"server_public": hex::encode(server.0), "mac1": hex::encode(told)});
    Case::new("cookie", why, given, datagram)
}

fn unknown(draw: &mut Draw) -> Case {
    let token: [u8; 16] = draw.0.array();
    let mut datagram = vec![PacketKind::Unknown.first_byte()];
    datagram.extend(draw.cid().0);
    datagram.extend(token);
    let (why, datagram) = perhaps_damaged(draw, "an UNKNOWN", datagram);
    Case::new(
        "unknown",
        why,
        json!({"token": hex::encode(token)}),
        datagram,
    )
}

// ---- records ----

fn record(draw: &mut Draw) -> Case {
    let mut seen = Vec::new();
    for _ in 0..draw.below(4) {
        let mut ranges = Vec::new();
        let mut at = draw.bits(23);
        for _ in 0..draw.below(4) {
            let end = at + 1 + draw.bits(16);
            ranges.push((at, end));
            at = end + 1 + draw.bits(16);
        }
        seen.push((draw.v32(), ranges));
    }
    let flows = (0..draw.below(4))
        .map(|_| {
            let (sent_to, received_to) = (draw.v() / 4, draw.v() / 4);
            FlowRecord {
                id: draw.flow(),
                options: FlowOptions {
                    priority: draw.below(8) as u8,
                    size: draw.some(),
                    deadline: None,
                    durable: draw.one_in(2),
                    hibernates: draw.one_in(2),
                    reachable: draw.one_in(2),
                    early: false,
                },
                deadline_left: draw.some().map(Span::from_millis),
                deadline_seq: draw.v(),
                sent_to,
                send_end: draw.one_in(2).then(|| sent_to + draw.bits(20)),
                send_complete: draw.one_in(2),
                received_to,
                receive_end: draw.one_in(3).then(|| received_to + draw.bits(20)),
                receive_complete: draw.one_in(2),
                reset: draw.some(),
                stopped: draw.some(),
            }
        })
        .collect();
    let role = if draw.one_in(2) {
        Role::Initiator
    } else {
        Role::Responder
    };
    let ticket = perhaps_a_ticket(draw).filter(|_| role == Role::Initiator);
    let secret = draw.0.u64().is_multiple_of(2).then(|| SessionSecret {
        id: draw.0.array(),
        secret: draw.0.array(),
    });
    let record = SessionRecord {
        role,
        peer: d2tp_seal::PublicKey(draw.0.array()),
        instance: draw.0.u64(),
        epoch: draw.v32(),
        seen_floor: draw.v32(),
        seen,
        closing: draw
            .some()
            .map(|code| (code, Span::from_millis(draw.bits(40)))),
        ticket,
        secret,
        flows,
    };
    let (why, bytes) = perhaps_damaged(draw, "a record", record.encode());
    Case::new("record", why, Value::Null, bytes)
}
