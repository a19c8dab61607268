//! What `docs/vectors` says of integers and frames, both ways.

use d2tp_wire::*;
use serde_json::{Value, json};

fn load(text: &str) -> Value {
    serde_json::from_str(text).expect("vector files are JSON")
}

fn bytes(v: &Value) -> Vec<u8> {
    hex::decode(v.as_str().expect("a string of hex")).expect("hex")
}

#[test]
fn integers_are_as_the_vectors_say() {
    // R-WIRE-3
    let vectors = load(include_str!("../../../docs/vectors/varints.json"));
    for vector in vectors.as_array().unwrap() {
        let (value, hex) = (vector["value"].as_u64().unwrap(), bytes(&vector["hex"]));
        let mut r = Reader::new(&hex);
        assert_eq!(r.varint(), Ok(value), "{vector}");
        assert!(r.is_empty(), "{vector}");
        let mut out = [0; 8];
        let mut w = Writer::new(&mut out);
        w.varint(value);
        let n = w.written();
        assert_eq!(
            out[..n] == hex,
            vector["shortest"].as_bool().unwrap(),
            "{vector}"
        );
    }
}

fn status(s: PathStatus) -> u8 {
    match s {
        PathStatus::Available => 0,
        PathStatus::Standby => 1,
        PathStatus::Frozen => 2,
        PathStatus::Gone => 3,
    }
}

/// A frame's name and fields, as the vectors have them.
fn described(frame: &Frame<'_>) -> (&'static str, Value) {
    match *frame {
        Frame::Ping => ("PING", json!({})),
        Frame::Ack {
            path,
            delay_us,
            ranges,
        } => (
            "ACK",
            json!({"path": path.0, "delay_us": delay_us,
                   "ranges": ranges.iter().map(|(a, b)| json!([a, b])).collect::<Vec<_>>()}),
        ),
        Frame::AckRate {
            path,
            every,
            delay_us,
        } => (
            "ACK_RATE",
            json!({"path": path.0, "every": every, "delay_us": delay_us}),
        ),
        Frame::Data {
            flow,
            offset,
            bytes,
            fin,
        } => (
            "DATA",
            json!({"flow": flow.0, "offset": offset, "fin": fin, "bytes": hex::encode(bytes)}),
        ),
        Frame::Open {
            flow,
            flags,
            priority,
            size,
            deadline_ms,
        } => (
            "OPEN",
            json!({"flow": flow.0, "flags": flags, "priority": priority, "size": size,
                   "deadline_ms": deadline_ms}),
        ),
        Frame::Reset {
            flow,
            code,
            final_size,
        } => (
            "RESET",
            json!({"flow": flow.0, "code": code, "final_size": final_size}),
        ),
        Frame::Stop { flow, code } => ("STOP", json!({"flow": flow.0, "code": code})),
        Frame::FlowCredit { flow, max } => ("FLOW_CREDIT", json!({"flow": flow.0, "max": max})),
        Frame::SessionCredit { max } => ("SESSION_CREDIT", json!({"max": max})),
        Frame::Deadline {
            flow,
            seq,
            remaining_ms,
        } => (
            "DEADLINE",
            json!({"flow": flow.0, "seq": seq, "remaining_ms": remaining_ms}),
        ),
        Frame::Durable { flow, offset } => ("DURABLE", json!({"flow": flow.0, "offset": offset})),
        Frame::Committed { flow, offset } => {
            ("COMMITTED", json!({"flow": flow.0, "offset": offset}))
        }
        Frame::Grant {
            seq,
            flow,
            path,
            max_sent,
        } => (
            "GRANT",
            json!({"seq": seq, "flow": flow.0, "path": path.0, "max_sent": max_sent}),
        ),
        Frame::Spent { flow, path, sent } => (
            "SPENT",
            json!({"flow": flow.0, "path": path.0, "sent": sent}),
        ),
        Frame::PathStatus {
            path,
            seq,
            status: s,
            gated,
            reason,
        } => (
            "PATH_STATUS",
            json!({"path": path.0, "seq": seq, "status": status(s), "gated": gated,
                   "reason": reason as u8}),
        ),
        Frame::PathLimit { path, seq, bytes } => (
            "PATH_LIMIT",
            json!({"path": path.0, "seq": seq, "bytes": bytes}),
        ),
        Frame::FlowPause {
            flow,
            seq,
            paused,
            reason,
        } => (
            "FLOW_PAUSE",
            json!({"flow": flow.0, "seq": seq, "paused": paused, "reason": reason as u8}),
        ),
        Frame::Chg { nonce } => ("CHG", json!({"nonce": hex::encode(nonce)})),
        Frame::Rsp { nonce } => ("RSP", json!({"nonce": hex::encode(nonce)})),
        Frame::Auth { path } => ("AUTH", json!({"path": path.0})),
        Frame::PathCid { path, cid, token } => (
            "PATH_CID",
            json!({"path": path.0, "cid": hex::encode(cid.0), "token": hex::encode(token)}),
        ),
        Frame::Resume {
            flow,
            received,
            flags,
        } => (
            "RESUME",
            json!({"flow": flow.0, "received": received, "flags": flags}),
        ),
        Frame::Resumed { flow, received } => {
            ("RESUMED", json!({"flow": flow.0, "received": received}))
        }
        Frame::Refused { flow, reason } => {
            ("REFUSED", json!({"flow": flow.0, "reason": reason as u8}))
        }
        Frame::ResumeEnd { flows } => ("RESUME_END", json!({"flows": flows})),
        Frame::Datagram { context, bytes } => (
            "DATAGRAM",
            json!({"context": context, "bytes": hex::encode(bytes)}),
        ),
        Frame::Suspend { reason } => ("SUSPEND", json!({"reason": reason as u8})),
        Frame::Close { code, text } => (
            "CLOSE",
            json!({"code": code, "text": String::from_utf8_lossy(text)}),
        ),
    }
}

#[test]
fn frames_are_as_the_vectors_say() {
    let vectors = load(include_str!("../../../docs/vectors/frames.json"));
    for vector in vectors["frames"].as_array().unwrap() {
        let hex = bytes(&vector["hex"]);
        let mut frames = FrameIter::new(&hex);
        let frame = frames.next().expect("a frame").expect("that decodes");
        assert!(frames.next().is_none(), "{vector}");
        let (name, fields) = described(&frame);
        assert_eq!(
            (name, &fields),
            (vector["name"].as_str().unwrap(), &vector["fields"])
        );
        let mut out = vec![0; 2048];
        let mut w = Writer::new(&mut out);
        frame.encode(&mut w);
        let n = w.written();
        assert_eq!(hex::encode(&out[..n]), hex::encode(&hex), "{name} written");
    }
}

#[test]
fn what_is_no_frame_is_refused() {
    // R-WIRE-2
    let vectors = load(include_str!("../../../docs/vectors/frames.json"));
    for vector in vectors["malformed"].as_array().unwrap() {
        let hex = bytes(&vector["hex"]);
        assert!(
            FrameIter::new(&hex).any(|f| f.is_err()),
            "{} was taken for frames",
            vector["why"]
        );
    }
}
