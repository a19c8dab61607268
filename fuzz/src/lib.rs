//! The fuzz targets: one function for each, so that the same code runs under `cargo +nightly fuzz
//! run TARGET` and, over the corpus, in `core/session/tests/exchange/corpus.rs`.
//!
//! ```text
//!  frames      bytes → frames → bytes → the same frames
//!  datagram    bytes → a server with a session; its answers are bounded
//!  record      bytes → a session record → bytes → the same; restored sessions run
//!  handshake   bytes → payload of an authentic SYN; plaintext of an authentic packet
//!  operations  bytes → named actions on a pair of sessions and the links between them
//! ```

mod operations;

use std::net::SocketAddr;

use d2tp_seal::{Initiator, PacketKeys, Responder, SynMacs};
use d2tp_session::*;
use d2tp_wire::*;

pub use operations::operations;

const PROLOGUE: &[u8] = b"D2TP\x01";

fn here() -> SocketAddr {
    "192.0.2.1:4000".parse().expect("an address")
}

fn addresses() -> Addresses {
    Addresses {
        link: LinkId(0),
        local: None,
        remote: here(),
    }
}

fn at(ms: u64) -> Time {
    Time::ZERO + Span::from_millis(ms)
}

/// Checks that decoded frames are encoded as they were read.
pub fn frames(bytes: &[u8]) {
    let mut out = vec![0; 2 * bytes.len() + 64];
    for frame in FrameIter::new(bytes) {
        let Ok(frame) = frame else { return };
        if let Frame::Ack { ranges, .. } = frame
            && ranges.iter().count() > 64
        {
            continue; // Never written: receivers keep at most this many.
        }
        let mut w = WireWriter::new(&mut out);
        frame.encode(&mut w);
        let n = w.written();
        let again = FrameIter::new(&out[..n]).next();
        // Ranges keep their encoding, which may be longer than necessary: compare the values.
        match (frame, again) {
            (
                Frame::Ack {
                    path,
                    delay_us,
                    ranges,
                },
                Some(Ok(Frame::Ack {
                    path: p,
                    delay_us: d,
                    ranges: r,
                })),
            ) => {
                assert_eq!((path, delay_us), (p, d));
                assert!(ranges.iter().eq(r.iter()));
            }
            (frame, again) => assert_eq!(Some(Ok(frame)), again),
        }
    }
}

fn server() -> Endpoint {
    let key = SecretKey::from_bytes([22; 32]);
    Endpoint::new(
        EndpointConfig::default(),
        key,
        Admission::Anybody,
        [3; 32],
        [4; 32],
    )
}

fn drain(endpoint: &mut Endpoint, now: Time) -> usize {
    let mut buf = vec![0; 65536];
    let mut sent = 0;
    for _ in 0..10_000 {
        let mut idle = true;
        while let Some(t) = endpoint.poll_transmit(now, &mut buf) {
            sent += t.len;
            idle = false;
        }
        while endpoint.poll_event().is_some() {
            idle = false;
        }
        if idle {
            return sent;
        }
    }
    panic!("the endpoint never falls silent");
}

fn throw(endpoint: &mut Endpoint, now: Time, mut bytes: Vec<u8>) -> usize {
    endpoint.handle_datagram(
        now,
        IncomingDatagram {
            addresses: addresses(),
            bytes: &mut bytes,
        },
    );
    drain(endpoint, now)
}

/// Lets a minute pass; a timer that fires repeatedly at one instant is a fault.
fn pass(endpoint: &mut Endpoint, from: Time) {
    let mut now = from;
    let until = from + Span::from_secs(60);
    for _ in 0..20_000 {
        let next = endpoint.next_timeout();
        if next > until {
            return;
        }
        now = if next > now { next } else { now };
        endpoint.handle_timeouts(now);
        drain(endpoint, now);
    }
    panic!("a timer fires and fires");
}

/// Delivers datagrams, each after its length (two bytes), to a server without sessions.
pub fn datagram(bytes: &[u8]) {
    let _ = PacketKind::split(bytes);
    let mut endpoint = server();
    let mut rest = bytes;
    while let Some((head, tail)) = rest.split_first_chunk::<2>() {
        let n = usize::from(u16::from_be_bytes(*head)).min(tail.len());
        let sent = throw(&mut endpoint, at(1000), tail[..n].to_vec());
        assert!(sent <= n, "{sent} bytes for {n}");
        rest = &tail[n..];
    }
    assert_eq!(endpoint.counts().0, 0, "a session came out of nothing");
}

/// Checks that a decoded record is encoded as it was read, and that a restored session works.
pub fn record(bytes: &[u8]) {
    let Ok(record) = SessionRecord::decode(bytes) else {
        return;
    };
    assert_eq!(SessionRecord::decode(&record.encode()), Ok(record.clone()));
    if record.flows.len() > 300 {
        return; // More than a session may have open: slow, and no new behaviour.
    }
    let mut device = Endpoint::new(
        EndpointConfig::default(),
        SecretKey::from_bytes([11; 32]),
        Admission::Nobody,
        [1; 32],
        [2; 32],
    );
    if record.role == Role::Responder {
        let _ = server().adopt(bytes);
        return;
    }
    let now = at(1000);
    let id = device.restore(now, bytes, 1..u32::MAX).expect("it decoded");
    let _ = device.with(id, |s| s.open_path(now, addresses(), false));
    drain(&mut device, now);
    pass(&mut device, now);
    let _ = device.hibernate(now, id);
}

/// The first byte selects the payload of an authentic SYN, or the plaintext of authentic packets
/// (each after its length, one byte) after a complete handshake.
pub fn handshake(bytes: &[u8]) {
    let Some((choice, rest)) = bytes.split_first() else {
        return;
    };
    let key = SecretKey::from_bytes([22; 32]).public();
    let device = SecretKey::from_bytes([11; 32]);
    let mut good = Vec::new();
    good.extend(77u64.to_be_bytes());
    good.extend(1u32.to_be_bytes());
    good.extend([1, 2, 0x80, 1, 0, 0, 0x80, 1, 0, 0, 4]);
    good.extend((1..=4u8).flat_map(|n| [n; 8]));
    let mut payload = if choice % 2 == 0 { rest.to_vec() } else { good };
    payload.resize(1063, 0);
    let mut syn = vec![0; 1200];
    syn[0] = PacketKind::Syn.first_byte();
    syn[1..9].copy_from_slice(&[9; 8]);
    let (mut initiator, _) = Initiator::start(
        &device,
        &key,
        PROLOGUE,
        [5; 32],
        &payload,
        &mut syn[9..1200 - SynMacs::BYTES],
    )
    .expect("it fits");
    SynMacs::write(&mut syn, &key, None);

    let mut endpoint = server();
    let now = at(1000);
    endpoint.handle_datagram(
        now,
        IncomingDatagram {
            addresses: addresses(),
            bytes: &mut syn,
        },
    );
    let mut buf = vec![0; 65536];
    let Some(t) = endpoint.poll_transmit(now, &mut buf) else {
        return;
    };
    assert!(t.len <= 1200);
    let mut answer = vec![0; 1200];
    let (secrets, n) = initiator
        .finish(&buf[9..t.len], &mut answer)
        .expect("it authenticates");
    if n < 26 || answer[0] != 0 || choice % 2 == 0 {
        return;
    }
    let mut keys = PacketKeys::new(
        CipherSuite::from_code(answer[25]).expect("known"),
        &secrets,
        true,
    );
    let mut rest = rest;
    let mut number = 0;
    while let Some((n, tail)) = rest.split_first() {
        let n = usize::from(*n).min(tail.len());
        let mut packet = vec![PacketKind::Data.first_byte()];
        packet.extend(&answer[1..9]);
        packet.extend([0; 4]);
        packet.extend(&tail[..n]);
        packet.extend([0; TAG_BYTES]);
        keys.seal(PathId(0), number, &mut packet);
        throw(&mut endpoint, at(1000 + 20 * number), packet);
        number += 1;
        rest = &tail[n..];
    }
    pass(&mut endpoint, at(1000 + 20 * number));
}

/// A SYN+ACK with arbitrary payload, as a server with the right key might send it. It has no target
/// of its own: [`Responder`] makes it authentic, and `operations` delivers it.
pub(crate) fn syn_ack(server: &SecretKey, syn: &[u8], payload: &[u8]) -> Option<Vec<u8>> {
    let mut out = [0; 2048];
    let message = syn.get(9..syn.len().checked_sub(SynMacs::BYTES)?)?;
    let (responder, _) = Responder::read(server, PROLOGUE, [6; 32], message, &mut out).ok()?;
    let mut answer = vec![0; 9 + 48 + payload.len()];
    answer[0] = PacketKind::SynAck.first_byte();
    answer[1..9].copy_from_slice(&syn[1..9]);
    responder.answer(payload, &mut answer[9..]).ok()?;
    Some(answer)
}
