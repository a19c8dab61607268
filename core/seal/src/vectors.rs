//! Tests of handshake and packet protection against the vectors in `docs/vectors`.

use d2tp_wire::{CID_BYTES, DATA_HEADER_BYTES, PacketKind, PathId, TAG_BYTES};
use serde_json::Value;

use crate::handshake::HandshakeSecrets;
use crate::{
    CipherSuite, Initiator, PacketKeys, PublicKey, Responder, SecretKey, SessionTicket, SynMacs,
    TICKET_BYTES, kem_decapsulate, kem_encapsulate, kem_encapsulation_key, open_cookie,
};

fn load(text: &str) -> Value {
    serde_json::from_str(text).expect("vector files are JSON")
}
fn bytes(v: &Value) -> Vec<u8> {
    hex::decode(v.as_str().expect("a string of hex")).expect("hex")
}
fn array<const N: usize>(v: &Value) -> [u8; N] {
    bytes(v).try_into().expect("the right length")
}

#[test]
fn packets_are_protected_as_the_vectors_say() {
    // R-SEAL-1, R-SEAL-3
    let file = load(include_str!("../../../docs/vectors/packets.json"));
    let secrets = HandshakeSecrets {
        initiator: array(&file["noise_key_initiator"]),
        responder: array(&file["noise_key_responder"]),
        transcript: array(&file["transcript"]),
    };
    for vector in file["packets"].as_array().unwrap() {
        let suite = CipherSuite::from_code(vector["suite"].as_u64().unwrap() as u8).unwrap();
        let initiator = vector["sender"] == "initiator";
        let mut tx = PacketKeys::new(suite, &secrets, initiator);
        let generation = vector["generation"].as_u64().unwrap();
        for _ in 0..generation {
            tx.advance();
        }
        let path = PathId(vector["path"].as_u64().unwrap() as u32);
        let number = vector["number"].as_u64().unwrap();
        let (cid, frames) = (bytes(&vector["cid"]), bytes(&vector["frames"]));
        let mut packet = vec![PacketKind::Data.first_byte()];
        packet.extend(&cid);
        packet.extend([0; DATA_HEADER_BYTES - 1 - CID_BYTES]);
        packet.extend(&frames);
        packet.extend([0; TAG_BYTES]);
        tx.seal(path, number, &mut packet);
        assert_eq!(hex::encode(&packet), vector["packet"].as_str().unwrap());
        if generation < 2 {
            let mut rx = PacketKeys::new(suite, &secrets, !initiator);
            let opened = rx.open(path, number, &mut packet).unwrap();
            assert_eq!(opened.number, number);
            assert_eq!(packet[DATA_HEADER_BYTES..opened.end], frames);
        }
    }
    for vector in file["refused"].as_array().unwrap() {
        let suite = CipherSuite::from_code(vector["suite"].as_u64().unwrap() as u8).unwrap();
        let mut rx = PacketKeys::new(suite, &secrets, vector["sender"] != "initiator");
        let path = PathId(vector["path"].as_u64().unwrap() as u32);
        let number = vector["number"].as_u64().unwrap();
        let opened = rx.open(path, number, &mut bytes(&vector["packet"]));
        assert!(opened.is_err(), "{}", vector["why"]);
    }
}

#[test]
fn a_handshake_is_as_the_vectors_say() {
    let file = load(include_str!("../../../docs/vectors/handshake.json"));
    let device = SecretKey::from_bytes(array(&file["device_secret"]));
    let server = SecretKey::from_bytes(array(&file["server_secret"]));
    assert_eq!(device.public().0, array(&file["device_public"]));
    assert_eq!(server.public().0, array(&file["server_public"]));
    let prologue = bytes(&file["prologue"]);

    let payload = bytes(&file["syn"]["payload"]);
    let mut syn = vec![0; 1200];
    syn[0] = PacketKind::Syn.first_byte();
    syn[1..9].copy_from_slice(&bytes(&file["syn"]["cid"]));
    let (mut initiator, n) = Initiator::start(
        &device,
        &server.public(),
        &prologue,
        array(&file["device_ephemeral_secret"]),
        &payload,
        &mut syn[9..1200 - SynMacs::BYTES],
    )
    .unwrap();
    assert_eq!(n, 1200 - 9 - SynMacs::BYTES);
    SynMacs::write(&mut syn, &server.public(), None);
    assert_eq!(hex::encode(&syn), file["syn"]["datagram"].as_str().unwrap());

    let mut out = vec![0; 2000];
    let message = &syn[9..1200 - SynMacs::BYTES];
    let seed = array(&file["server_ephemeral_secret"]);
    let (responder, n) = Responder::read(&server, &prologue, seed, message, &mut out).unwrap();
    assert_eq!(out[..n], payload);
    assert_eq!(responder.peer(), device.public());
    let answer = bytes(&file["syn_ack"]["payload"]);
    let mut syn_ack = vec![PacketKind::SynAck.first_byte()];
    syn_ack.extend(&syn[1..9]);
    let mut message = vec![0; 1000];
    let (theirs, n) = responder.answer(&answer, &mut message).unwrap();
    syn_ack.extend(&message[..n]);
    assert_eq!(
        hex::encode(&syn_ack),
        file["syn_ack"]["datagram"].as_str().unwrap()
    );
    let (ours, n) = initiator.finish(&syn_ack[9..], &mut out).unwrap();
    assert_eq!(out[..n], answer);
    for secrets in [ours, theirs] {
        assert_eq!(secrets.initiator, array(&file["noise_key_initiator"]));
        assert_eq!(secrets.responder, array(&file["noise_key_responder"]));
        assert_eq!(secrets.transcript, array(&file["transcript"]));
    }
}

#[test]
fn a_handshake_by_ticket_is_as_the_vectors_say() {
    let file = load(include_str!("../../../docs/vectors/wake.json"));
    let device = SecretKey::from_bytes(array(&file["device_secret"]));
    let server = SecretKey::from_bytes(array(&file["server_secret"]));
    let prologue = b"D2TP\x01";
    let ticket = SessionTicket {
        bytes: array(&file["ticket"]),
        secret: array(&file["ticket_secret"]),
    };

    let payload = bytes(&file["wake"]["payload"]);
    const AT: usize = 1 + CID_BYTES;
    let mut wake = vec![0; 1200];
    wake[0] = PacketKind::Wake.first_byte();
    wake[1..AT].copy_from_slice(&bytes(&file["wake"]["cid"]));
    let (shown, message) = wake[AT..1200 - SynMacs::BYTES].split_at_mut(TICKET_BYTES);
    shown.copy_from_slice(&ticket.bytes);
    let (remote, seed) = (server.public(), array(&file["device_ephemeral_secret"]));
    let (mut initiator, _) =
        Initiator::start_by_ticket(&device, &remote, &ticket, prologue, seed, &payload, message)
            .unwrap();
    SynMacs::write(&mut wake, &remote, None);
    assert_eq!(
        hex::encode(&wake),
        file["wake"]["datagram"].as_str().unwrap()
    );

    let mut out = vec![0; 2000];
    let message = &wake[AT + TICKET_BYTES..1200 - SynMacs::BYTES];
    let (peer, seed) = (device.public(), array(&file["server_ephemeral_secret"]));
    let (responder, n) =
        Responder::read_by_ticket(&server, peer, &ticket, prologue, seed, message, &mut out)
            .unwrap();
    assert_eq!(out[..n], payload);
    let answer = bytes(&file["syn_ack"]["payload"]);
    let mut syn_ack = vec![PacketKind::SynAck.first_byte()];
    syn_ack.extend(&wake[1..AT]);
    let mut message = vec![0; 1000];
    let (theirs, n) = responder.answer(&answer, &mut message).unwrap();
    syn_ack.extend(&message[..n]);
    assert_eq!(
        hex::encode(&syn_ack),
        file["syn_ack"]["datagram"].as_str().unwrap()
    );
    let (ours, n) = initiator.finish(&syn_ack[AT..], &mut out).unwrap();
    assert_eq!(out[..n], answer);
    for secrets in [ours, theirs] {
        assert_eq!(secrets.initiator, array(&file["noise_key_initiator"]));
        assert_eq!(secrets.responder, array(&file["noise_key_responder"]));
        assert_eq!(secrets.transcript, array(&file["transcript"]));
    }
}

#[test]
fn sums_and_cookies_of_a_syn_are_as_the_vectors_say() {
    // R-HS-6, R-HS-7
    let file = load(include_str!("../../../docs/vectors/handshake.json"));
    let server = PublicKey(array(&file["server_public"]));
    let mut syn = bytes(&file["syn"]["datagram"]);
    let mac1 = SynMacs::mac1(&syn).unwrap();
    assert_eq!(mac1, array(&file["syn"]["mac1"]));
    let datagram = bytes(&file["cookie"]["datagram"]);
    let nonce: [u8; 12] = datagram[9..21].try_into().unwrap();
    let cookie = open_cookie(&server, mac1, nonce, &datagram[21..]).unwrap();
    assert_eq!(cookie, array(&file["cookie"]["cookie"]));
    SynMacs::write(&mut syn, &server, Some(&cookie));
    assert_eq!(syn[1184..], bytes(&file["cookie"]["mac2"]));
}

#[test]
fn an_exchange_by_ml_kem_is_as_the_vectors_say() {
    // R-KEM-3, R-KEM-4, R-KEM-6
    let file = load(include_str!("../../../docs/vectors/hybrid.json"));
    let secrets = HandshakeSecrets {
        initiator: array(&file["noise_key_initiator"]),
        responder: array(&file["noise_key_responder"]),
        transcript: array(&file["transcript"]),
    };
    let seed = array(&file["device_seed"]);
    let key = kem_encapsulation_key(&seed);
    assert_eq!(key[..], bytes(&file["encapsulation_key"]));
    let (ciphertext, theirs) = kem_encapsulate(&key, &array(&file["server_seed"])).unwrap();
    assert_eq!(ciphertext[..], bytes(&file["ciphertext"]));
    let shared = kem_decapsulate(&seed, &ciphertext).unwrap();
    for secret in [&shared, &theirs] {
        assert_eq!(secret.0[..], bytes(&file["shared"]));
    }
    let exchanged = |suite, initiator| {
        let mut keys = PacketKeys::new(suite, &secrets, initiator);
        keys.await_exchange(&secrets);
        let secret = keys.mix_in(&key, &ciphertext, &shared, initiator).unwrap();
        assert_eq!(secret.id, array(&file["secret_id"]));
        assert_eq!(secret.secret, array(&file["secret"]));
        (keys, secret)
    };
    let of = |vector: &Value| {
        let suite = CipherSuite::from_code(vector["suite"].as_u64().unwrap() as u8).unwrap();
        (suite, vector["sender"] == "initiator")
    };
    for vector in file["packets"].as_array().unwrap() {
        let (suite, by_initiator) = of(vector);
        let mut rx = exchanged(suite, !by_initiator).0;
        if vector["generation"] == 1 {
            // The generation before: its packets are the vector's predecessor.
            let before = file["packets"].as_array().unwrap().iter();
            let before = before.filter(|v| of(v) == (suite, by_initiator));
            opens(&mut rx, before.clone().next().unwrap());
        }
        opens(&mut rx, vector);
    }
    for vector in file["with_secret"].as_array().unwrap() {
        let (suite, by_initiator) = of(vector);
        let secret = exchanged(suite, true).1;
        let keys = |secret| PacketKeys::with_secret(suite, &secrets, secret, !by_initiator);
        opens(&mut keys(Some(&secret)), vector);
        let mut packet = bytes(&vector["packet"]);
        assert!(keys(None).open(PathId(0), 0, &mut packet).is_err());
    }
}

/// Asserts that keys open the packet of a vector.
fn opens(keys: &mut PacketKeys, vector: &Value) {
    let path = PathId(vector["path"].as_u64().unwrap() as u32);
    let number = vector["number"].as_u64().unwrap();
    let mut packet = bytes(&vector["packet"]);
    let opened = keys.open(path, number, &mut packet).unwrap();
    assert_eq!(opened.number, number);
    assert_eq!(
        packet[DATA_HEADER_BYTES..opened.end],
        bytes(&vector["frames"])
    );
}
