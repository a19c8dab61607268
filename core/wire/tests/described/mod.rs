//! Frames in the notation of `docs/vectors`, for the tests of this crate and of `core/session`.

use d2tp_wire::*;
use serde_json::{Value, json};

fn status(s: PathStatus) -> u8 {
    match s {
        PathStatus::Available => 0,
        PathStatus::Standby => 1,
        PathStatus::Frozen => 2,
        PathStatus::Gone => 3,
    }
}

/// The name and fields of a frame in the notation of the test vectors.
pub fn described(frame: &Frame<'_>) -> (&'static str, Value) {
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
        Frame::KeyShare { half, bytes } => (
            "KEY_SHARE",
            json!({"half": half, "bytes": hex::encode(bytes)}),
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
