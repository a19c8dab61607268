//! The results of decoding inputs with the code of `core/`.

use d2tp_seal::{CipherSuite, Initiator, PacketKeys, PublicKey, Responder, SecretKey, SynMacs};
use d2tp_seal::{SessionTicket, TICKET_BYTES, open_cookie, verify_unknown_token};
use d2tp_time::Time;
use d2tp_wire::{
    CID_BYTES, DATA_HEADER_BYTES, FrameIter, PacketKind, PathId, TAG_BYTES, VERSION, WireReader,
};
use serde_json::{Value, json};

use super::inputs::secrets;
use crate::client_handshake::PROLOGUE;
use crate::endpoint::handshakes::SYN_BYTES_MIN;
use crate::endpoint::{Admission, Endpoint, IncomingDatagram};
use crate::key_exchange_state::HybridAnswer;
use crate::link::{Addresses, LinkId};
use crate::syn::{Syn, SynAck};
use crate::{EndpointConfig, Role, SessionRecord};

#[path = "../../../../wire/tests/described/mod.rs"]
mod described;

const HEAD: usize = 1 + CID_BYTES;

/// The fields that the reader named `case` finds in `bytes`; null if it refuses them.
pub(super) fn verdict(case: &str, given: &Value, bytes: &[u8]) -> Value {
    let said = match case {
        "datagram" => datagram(bytes),
        "frames" => frames(bytes),
        "packet" => packet(given, bytes),
        "syn" => syn(given, bytes),
        "wake" => wake(given, bytes),
        "syn payload" => Syn::decode(&mut WireReader::new(bytes)).map(|syn| syn_fields(&syn)),
        "syn ack" => syn_ack(given, bytes),
        "syn ack payload" => syn_ack_payload(bytes).map(|(fields, _)| fields),
        "cookie" => cookie(given, bytes),
        "unknown" => unknown(given, bytes),
        "record" => SessionRecord::decode(bytes)
            .ok()
            .map(|record| record_fields(&record)),
        other => panic!("no reader is called {other}"),
    };
    said.unwrap_or(Value::Null)
}

pub(super) fn bytes_of(v: &Value) -> Vec<u8> {
    hex::decode(v.as_str().expect("a string of hex")).expect("hex")
}

pub(super) fn array<const N: usize>(v: &Value) -> [u8; N] {
    bytes_of(v).try_into().expect("the right length")
}

fn datagram(bytes: &[u8]) -> Option<Value> {
    let (kind, version, cid, rest) = PacketKind::split(bytes)?;
    let name = match kind {
        PacketKind::Data => "DATA",
        PacketKind::Syn => "SYN",
        PacketKind::Wake => "WAKE",
        PacketKind::SynAck => "SYN+ACK",
        PacketKind::Cookie => "COOKIE",
        PacketKind::Unknown => "UNKNOWN",
        PacketKind::Version => "VERSION",
    };
    let version = (kind != PacketKind::Data).then_some(version);
    Some(
        json!({"kind": name, "version": version, "cid": hex::encode(cid.0),
                "rest": hex::encode(rest)}),
    )
}

/// Connection id and body of a packet of `kind` and of this version.
fn body(kind: PacketKind, bytes: &[u8]) -> Option<(String, &[u8])> {
    let (is, version, cid, rest) = PacketKind::split(bytes)?;
    (is == kind && version == VERSION).then(|| (hex::encode(cid.0), rest))
}

fn frames(bytes: &[u8]) -> Option<Value> {
    let found: Result<Vec<_>, _> = FrameIter::new(bytes)
        .map(|frame| frame.map(|f| described::described(&f)))
        .collect();
    found.ok().map(|frames| json!(frames))
}

fn packet(given: &Value, bytes: &[u8]) -> Option<Value> {
    let number = |name: &str| given[name].as_u64().expect("a number");
    let suite = CipherSuite::from_code(number("suite") as u8).expect("a suite");
    let by_initiator = given["sender"] == "initiator";
    let mut tx = PacketKeys::new(suite, &secrets(), by_initiator);
    let mut rx = PacketKeys::new(suite, &secrets(), !by_initiator);
    let newest = number("generation");
    for _ in 0..newest {
        tx.advance();
        let mut next = vec![0; DATA_HEADER_BYTES + TAG_BYTES];
        tx.seal(PathId(0), 0, &mut next);
        rx.open(PathId(0), 0, &mut next).expect("ours");
    }
    let path = PathId(u32::try_from(number("path")).expect("32 bits"));
    let mut packet = bytes.to_vec();
    let opened = rx.open(path, number("expected"), &mut packet).ok()?;
    let bits = u64::from(packet[0] >> 3 & 3);
    let generation = (newest.saturating_sub(1)..newest + 2).find(|g| g % 4 == bits);
    assert_eq!(opened.key_advanced, generation == Some(newest + 1));
    Some(json!({"number": opened.number, "generation": generation,
                "frames": hex::encode(&packet[DATA_HEADER_BYTES..opened.end])}))
}

fn syn_fields(syn: &Syn) -> Value {
    let mut fields = json!({
        "instance": syn.instance, "epoch": syn.epoch, "suites": syn.suites,
        "session_credit": syn.session_credit, "flow_credit": syn.flow_credit,
        "cids": syn.spare.iter().map(|c| hex::encode(c.0)).collect::<Vec<_>>(),
        "metered": syn.claims.gated,
        "early_data": syn.early_data.as_ref().map(hex::encode),
        "claims": syn.claims.list.iter()
            .map(|c| json!({"flow": c.flow.0, "received": c.received, "credit": c.credit,
                            "complete": c.is_complete()}))
            .collect::<Vec<_>>(),
    });
    if let Some(hybrid) = syn.hybrid {
        fields["hybrid"] =
            json!({"secret": hybrid.secret.map(hex::encode), "required": hybrid.required});
    }
    fields
}

/// Whether a server answers this SYN with a SYN+ACK.
fn is_answered(server: &SecretKey, bytes: &[u8]) -> bool {
    let mut endpoint = Endpoint::new(
        EndpointConfig::default(),
        server.clone(),
        Admission::Anybody,
        [1; 32],
        [2; 32],
    );
    let addresses = Addresses {
        link: LinkId(0),
        local: None,
        remote: "192.0.2.1:4000".parse().expect("an address"),
    };
    let now = Time::from_nanos(5_000_000_000);
    let mut bytes = bytes.to_vec();
    let bytes = &mut bytes[..];
    endpoint.handle_datagram(now, IncomingDatagram { addresses, bytes });
    let mut out = vec![0; 65536];
    endpoint
        .poll_transmit(now, &mut out)
        .is_some_and(|_| out[0] == PacketKind::SynAck.first_byte())
}

fn syn(given: &Value, bytes: &[u8]) -> Option<Value> {
    let server = SecretKey::from_bytes(array(&given["server_secret"]));
    let said = read_syn(&server, &given["cookie"], bytes);
    assert_eq!(
        said.is_some(),
        is_answered(&server, bytes),
        "the endpoint thinks otherwise"
    );
    said
}

fn read_syn(server: &SecretKey, cookie: &Value, bytes: &[u8]) -> Option<Value> {
    let (cid, _) = body(PacketKind::Syn, bytes)?;
    if bytes.len() < SYN_BYTES_MIN {
        return None;
    }
    let cookie: Option<[u8; 16]> = (!cookie.is_null()).then(|| array(cookie));
    let mut ours = bytes.to_vec();
    SynMacs::write(&mut ours, &server.public(), cookie.as_ref());
    if SynMacs::mac1(&ours) != SynMacs::mac1(bytes) {
        return None;
    }
    let mut payload = vec![0; bytes.len()];
    let message = &bytes[HEAD..bytes.len() - SynMacs::BYTES];
    let (responder, n) = Responder::read(server, PROLOGUE, [9; 32], message, &mut payload).ok()?;
    let syn = Syn::decode(&mut WireReader::new(&payload[..n]))?;
    Some(
        json!({"cid": cid, "device": hex::encode(responder.peer().0),
                "address_proved": cookie.is_some() && ours == bytes,
                "payload": syn_fields(&syn)}),
    )
}

/// The fields of a ticket and its secret; null if there is none.
pub(super) fn ticket_fields(ticket: Option<&SessionTicket>) -> Value {
    let fields = |t: &SessionTicket| json!([hex::encode(t.bytes), hex::encode(t.secret)]);
    ticket.map_or(Value::Null, fields)
}

/// The fields of a WAKE, read by a server that knows the holder of the ticket and its secret.
fn wake(given: &Value, bytes: &[u8]) -> Option<Value> {
    let (cid, _) = body(PacketKind::Wake, bytes)?;
    if bytes.len() < SYN_BYTES_MIN {
        return None;
    }
    let server = SecretKey::from_bytes(array(&given["server_secret"]));
    let mut ours = bytes.to_vec();
    SynMacs::write(&mut ours, &server.public(), None);
    if SynMacs::mac1(&ours) != SynMacs::mac1(bytes) {
        return None;
    }
    let message = &bytes[HEAD..bytes.len() - SynMacs::BYTES];
    let (shown, message) = message.split_first_chunk::<TICKET_BYTES>()?;
    let ticket = SessionTicket {
        bytes: *shown,
        secret: array(&given["ticket_secret"]),
    };
    let device = PublicKey(array(&given["device_public"]));
    let mut payload = vec![0; bytes.len()];
    let (_, n) = Responder::read_by_ticket(
        &server,
        device,
        &ticket,
        PROLOGUE,
        [9; 32],
        message,
        &mut payload,
    )
    .ok()?;
    let syn = Syn::decode(&mut WireReader::new(&payload[..n]))?;
    Some(json!({"cid": cid, "ticket": hex::encode(shown), "payload": syn_fields(&syn)}))
}

/// The fields of a SYN+ACK payload, and the suite if it accepts the device.
fn syn_ack_payload(payload: &[u8]) -> Option<(Value, Option<CipherSuite>)> {
    Some(match SynAck::decode(&mut WireReader::new(payload))? {
        SynAck::Accepted(b) => {
            let suite = CipherSuite::from_code(b.suite)?;
            let spare: Vec<_> = b
                .spare
                .iter()
                .map(|(c, t)| [hex::encode(c.0), hex::encode(t)])
                .collect();
            let mut fields = json!({
                "kind": "welcome", "cid": hex::encode(b.cid.0), "token": hex::encode(b.token),
                "suite": b.suite, "resumed": b.resumed, "session_credit": b.session_credit,
                "flow_credit": b.flow_credit, "spare": spare, "ticket": ticket_fields(b.ticket.as_ref()),
            });
            if b.hybrid != HybridAnswer::Unused {
                fields["hybrid"] = json!(b.hybrid.code());
            }
            (fields, Some(suite))
        }
        SynAck::Stale { confirmed } => (json!({"kind": "stale", "confirmed": confirmed}), None),
        SynAck::Refused(reason) => (json!({"kind": "refused", "reason": reason as u8}), None),
        SynAck::NoSuite => (json!({"kind": "no suite"}), None),
        SynAck::NoTicket => (json!({"kind": "no ticket"}), None),
        SynAck::Later => (json!({"kind": "later"}), None),
    })
}

fn syn_ack(given: &Value, bytes: &[u8]) -> Option<Value> {
    let (cid, message) = body(PacketKind::SynAck, bytes)?;
    let mut out = vec![0; 4096];
    let device = SecretKey::from_bytes(array(&given["device_secret"]));
    let server = PublicKey(array(&given["server_public"]));
    let seed = array(&given["device_ephemeral"]);
    let payload = bytes_of(&given["payload"]);
    let started = if given["ticket"].is_null() {
        Initiator::start(&device, &server, PROLOGUE, seed, &payload, &mut out)
    } else {
        let ticket = SessionTicket {
            bytes: array(&given["ticket"][0]),
            secret: array(&given["ticket"][1]),
        };
        Initiator::start_by_ticket(
            &device, &server, &ticket, PROLOGUE, seed, &payload, &mut out,
        )
    };
    let (mut initiator, _) = started.expect("it fits");
    let (secrets, n) = initiator.finish(message, &mut out).ok()?;
    let (fields, suite) = syn_ack_payload(&out[..n])?;
    let mut said = json!({"cid": cid, "payload": fields});
    if let Some(suite) = suite {
        // Keys are private to core/seal, so a packet that they open shows that they are equal.
        let mut packet = bytes_of(&given["first_packet"]);
        let opened = PacketKeys::new(suite, &secrets, true)
            .open(PathId(0), 0, &mut packet)
            .ok()?;
        said["first_packet"] = json!({"number": opened.number, "generation": 0,
            "frames": hex::encode(&packet[DATA_HEADER_BYTES..opened.end])});
    }
    Some(said)
}

fn cookie(given: &Value, bytes: &[u8]) -> Option<Value> {
    let (cid, rest) = body(PacketKind::Cookie, bytes)?;
    let (nonce, sealed) = rest.split_first_chunk::<12>()?;
    let server = PublicKey(array(&given["server_public"]));
    let cookie = open_cookie(&server, array(&given["mac1"]), *nonce, sealed).ok()?;
    Some(json!({"cid": cid, "cookie": hex::encode(cookie)}))
}

fn unknown(given: &Value, bytes: &[u8]) -> Option<Value> {
    let (cid, token) = body(PacketKind::Unknown, bytes)?;
    verify_unknown_token(&array(&given["token"]), token).then(|| json!({"cid": cid}))
}

pub(crate) fn record_fields(r: &SessionRecord) -> Value {
    let flows: Vec<Value> = r
        .flows
        .iter()
        .map(|f| {
            json!({
                "id": f.id.0, "durable": f.options.durable, "hibernates": f.options.hibernates,
                "reachable": f.options.reachable, "reset": f.reset, "stopped": f.stopped,
                "send_complete": f.send_complete, "receive_complete": f.receive_complete,
                "priority": f.options.priority, "size": f.options.size,
                "deadline_left_ms": f.deadline_left.map(d2tp_time::Span::as_millis),
                "deadline_seq": f.deadline_seq, "sent_to": f.sent_to, "send_end": f.send_end,
                "received_to": f.received_to, "receive_end": f.receive_end,
            })
        })
        .collect();
    let role = if r.role == Role::Initiator {
        "initiator"
    } else {
        "responder"
    };
    let mut fields = json!({"role": role, "peer": hex::encode(r.peer.0), "instance": r.instance,
           "epoch": r.epoch, "seen_floor": r.seen_floor, "seen": r.seen, "flows": flows,
           "ticket": ticket_fields(r.ticket.as_ref()),
           "closing": r.closing.map(|(code, left)| json!({"code": code, "left_ms": left.as_millis()}))});
    if let Some(secret) = &r.secret {
        fields["secret"] = json!([hex::encode(secret.id), hex::encode(secret.secret)]);
    }
    fields
}
