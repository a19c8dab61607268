//! What `docs/vectors` says of records, and of a SYN as a server understands it.

use d2tp_seal::Initiator;
use d2tp_session::*;
use serde_json::{Value, json};

fn load(text: &str) -> Value {
    serde_json::from_str(text).expect("vector files are JSON")
}
fn bytes(v: &Value) -> Vec<u8> {
    hex::decode(v.as_str().expect("a string of hex")).expect("hex")
}
fn array<const N: usize>(v: &Value) -> [u8; N] {
    bytes(v).try_into().expect("the right length")
}

fn described(r: &SessionRecord) -> Value {
    let flows: Vec<Value> = r
        .flows
        .iter()
        .map(|f| {
            json!({
                "id": f.id.0, "durable": f.options.durable, "hibernates": f.options.hibernates,
                "send_complete": f.send_complete, "receive_complete": f.receive_complete,
                "priority": f.options.priority, "size": f.options.size,
                "deadline_left_ms": f.deadline_left.map(Span::as_millis),
                "deadline_seq": f.deadline_seq, "sent_to": f.sent_to, "send_end": f.send_end,
                "received_to": f.received_to, "receive_end": f.receive_end,
                "reachable": f.options.reachable, "reset": f.reset, "stopped": f.stopped,
            })
        })
        .collect();
    let role = if r.role == Role::Initiator {
        "initiator"
    } else {
        "responder"
    };
    let mut fields = json!({
        "role": role, "peer": hex::encode(r.peer.0), "instance": r.instance, "epoch": r.epoch,
        "seen_floor": r.seen_floor, "seen": r.seen,
        "closing": r.closing.map(|(code, left)| json!({"code": code, "left_ms": left.as_millis()})),
        "ticket": r.ticket.as_ref().map(|t| [hex::encode(t.bytes), hex::encode(t.secret)]),
        "flows": flows, "hex": hex::encode(r.encode()),
    });
    if let Some(secret) = &r.secret {
        fields["secret"] = json!([hex::encode(secret.id), hex::encode(secret.secret)]);
    }
    fields
}

#[test]
fn records_are_as_the_vectors_say() {
    // R-REC-1
    let file = load(include_str!("../../../../docs/vectors/records.json"));
    for vector in file["records"].as_array().unwrap() {
        let record = SessionRecord::decode(&bytes(&vector["hex"])).expect("it decodes");
        assert_eq!(&described(&record), vector);
    }
    for vector in file["damaged"].as_array().unwrap() {
        let why = &vector["why"];
        assert!(
            SessionRecord::decode(&bytes(&vector["hex"])).is_err(),
            "{why}"
        );
    }
}

#[test]
fn a_server_takes_the_syn_of_the_vectors_and_welcomes_its_device() {
    let file = load(include_str!("../../../../docs/vectors/handshake.json"));
    let server = SecretKey::from_bytes(array(&file["server_secret"]));
    let device = SecretKey::from_bytes(array(&file["device_secret"]));
    let mut endpoint = Endpoint::new(
        EndpointConfig::default(),
        server.clone(),
        Admission::Anybody,
        [1; 32],
        [2; 32],
    );
    let mut syn = bytes(&file["syn"]["datagram"]);
    let addresses = Addresses {
        link: LinkId(0),
        local: None,
        remote: "192.0.2.1:4000".parse().unwrap(),
    };
    let now = Time::from_nanos(5_000_000_000);
    endpoint.handle_datagram(
        now,
        IncomingDatagram {
            addresses,
            bytes: &mut syn,
        },
    );
    assert_eq!(endpoint.counts(), (0, 0, 1));
    let mut buf = vec![0; 65536];
    let t = endpoint.poll_transmit(now, &mut buf).expect("an answer");
    assert_eq!(
        buf[..9],
        [&[0xa1][..], &bytes(&file["syn"]["cid"])].concat()
    );
    let mut message = vec![0; 1200];
    let (mut initiator, _) = Initiator::start(
        &device,
        &server.public(),
        &bytes(&file["prologue"]),
        array(&file["device_ephemeral_secret"]),
        &bytes(&file["syn"]["payload"]),
        &mut message,
    )
    .unwrap();
    let mut payload = vec![0; 500];
    let (_, n) = initiator
        .finish(&buf[9..t.len], &mut payload)
        .expect("it authenticates");
    // Welcome, then cid 8, token 16, the first suite both know, not resumed.
    assert_eq!((payload[0], payload[25], payload[26]), (0, 1, 0));
    // The credits, four spare paths, a ticket with its secret.
    assert_eq!(n, 27 + 4 + 4 + 1 + 4 * 24 + 1 + 76 + 32);
}
