//! The qlog events of trace records: one name and one object for each record.

use d2tp_session::{
    FlowEnd, FlowId, LinkId, PathStatus, PathSwitchKind, ReasonCode, SessionEnd, SessionEvent,
    TraceRecord,
};
use d2tp_wire::Frame;
use serde_json::{Value, json};

/// The name and data of the qlog event for a record. `name_of` returns the device's names of links.
pub(crate) fn qlog_event(
    record: &TraceRecord,
    name_of: &impl Fn(LinkId) -> Option<String>,
) -> (String, Value) {
    let link = |id: LinkId| name_of(id).unwrap_or_else(|| format!("link{}", id.0));
    let (name, data) = match record {
        TraceRecord::HandshakeSent { link: on, epoch } => (
            "handshake_sent",
            json!({ "link": link(*on), "epoch": epoch }),
        ),
        TraceRecord::PathOpened {
            path,
            addresses,
            gated,
        } => (
            "path_opened",
            json!({
                "path": path.0,
                "link": link(addresses.link),
                "remote": addresses.remote.to_string(),
                "gated": gated,
            }),
        ),
        TraceRecord::FlowOpened(flow) => {
            ("flow_opened", json!({ "flow": id(*flow), "by": "local" }))
        }
        TraceRecord::Event(event) => return event_words(event, &link),
        TraceRecord::Packet {
            sent,
            path,
            number,
            bytes,
        } => (
            if *sent {
                "packet_sent"
            } else {
                "packet_received"
            },
            json!({ "path": path.0, "packet_number": number, "length": bytes }),
        ),
        TraceRecord::Frame { sent, path, frame } => {
            let (name, mut data) = frame_words(frame);
            data["on_path"] = json!(path.0);
            data["by"] = json!(sender(*sent));
            (name, data)
        }
        TraceRecord::Datagram {
            sent,
            path,
            context,
            bytes,
        } => (
            "datagram",
            json!({ "on_path": path.0, "by": sender(*sent), "context": context, "length": bytes }),
        ),
        TraceRecord::Lost { path, packets } => (
            "packets_lost",
            json!({ "path": path.0, "packets": packets }),
        ),
        TraceRecord::Metrics {
            path,
            rtt,
            rtt_min,
            rtt_latest,
            window,
            in_flight,
            mtu,
        } => (
            "metrics_updated",
            json!({
                "path": path.0,
                "smoothed_rtt": rtt.as_secs_f64() * 1e3,
                "min_rtt": rtt_min.as_secs_f64() * 1e3,
                "latest_rtt": rtt_latest.as_secs_f64() * 1e3,
                "congestion_window": window,
                "bytes_in_flight": in_flight,
                "datagram_size": mtu,
            }),
        ),
        TraceRecord::KeysUpdated { sent } => ("key_updated", json!({ "by": sender(*sent) })),
        TraceRecord::Dropped(count) => ("events_dropped", json!({ "count": count })),
    };
    (format!("d2tp:{name}"), data)
}

fn event_words(event: &SessionEvent, link: &impl Fn(LinkId) -> String) -> (String, Value) {
    let (name, data) = match event {
        SessionEvent::Established { resumed, .. } => ("established", json!({ "resumed": resumed })),
        SessionEvent::PathUp {
            path,
            link: on,
            took,
        } => (
            "path_up",
            json!({ "path": path.0, "link": link(*on), "took_ms": took.as_secs_f64() * 1e3 }),
        ),
        SessionEvent::PathQuiet { path, link: on } => {
            ("path_quiet", json!({ "path": path.0, "link": link(*on) }))
        }
        SessionEvent::PathSilent { path, link: on } => {
            ("path_silent", json!({ "path": path.0, "link": link(*on) }))
        }
        SessionEvent::PathDown { path, link: on } => {
            ("path_closed", json!({ "path": path.0, "link": link(*on) }))
        }
        SessionEvent::Switched {
            from,
            to,
            kind,
            silence,
        } => (
            "switched",
            json!({
                "from": from.map(link),
                "to": link(*to),
                "kind": match kind {
                    PathSwitchKind::MakeBeforeBreak => "make-before-break",
                    PathSwitchKind::BreakBeforeMake => "break-before-make",
                },
                "silence_ms": silence.as_secs_f64() * 1e3,
            }),
        ),
        SessionEvent::Opened(flow) => ("flow_opened", json!({ "flow": id(*flow), "by": "remote" })),
        SessionEvent::SendFrom { flow, offset } => (
            "flow_resumed",
            json!({ "flow": id(*flow), "offset": offset }),
        ),
        SessionEvent::PeerDurable { flow, offset } => (
            "flow_durable",
            json!({ "flow": id(*flow), "offset": offset }),
        ),
        SessionEvent::DeadlineChanged(flow) => ("deadline_changed", json!({ "flow": id(*flow) })),
        SessionEvent::Ended { flow, end } => (
            "flow_closed",
            json!({ "flow": id(*flow), "end": end_word(end), "text": end.to_string() }),
        ),
        SessionEvent::Suspended(why) => ("suspended", json!({ "reason": reason(*why) })),
        SessionEvent::Woken { after } => {
            ("woken", json!({ "after_ms": after.as_secs_f64() * 1e3 }))
        }
        SessionEvent::Closed(end) => (
            "session_closed",
            json!({
                "by": match end {
                    SessionEnd::Local => "local",
                    _ => "remote",
                },
                "text": end.to_string(),
            }),
        ),
        other => ("event", json!({ "text": format!("{other:?}") })),
    };
    (format!("d2tp:{name}"), data)
}

fn frame_words(frame: &Frame<'_>) -> (&'static str, Value) {
    match frame {
        Frame::Chg { .. } => ("challenge", json!({})),
        Frame::Rsp { .. } => ("challenge_answered", json!({})),
        Frame::Auth { path } => ("address_confirmed", json!({ "path": path.0 })),
        Frame::PathStatus {
            path,
            status,
            gated,
            reason: why,
            ..
        } => (
            "path_status",
            json!({
                "path": path.0,
                "status": match status {
                    PathStatus::Available => "available",
                    PathStatus::Standby => "standby",
                    PathStatus::Frozen => "frozen",
                    PathStatus::Gone => "gone",
                },
                "gated": gated,
                "reason": reason(*why),
            }),
        ),
        Frame::Grant {
            flow,
            path,
            max_sent,
            ..
        } => (
            "granted",
            json!({ "flow": id(*flow), "path": path.0, "max_sent": max_sent }),
        ),
        Frame::Spent { flow, path, sent } => (
            "spent",
            json!({ "flow": id(*flow), "path": path.0, "sent": sent }),
        ),
        Frame::Reset {
            flow,
            code,
            final_size,
        } => (
            "flow_reset",
            json!({ "flow": id(*flow), "code": code, "final_size": final_size }),
        ),
        Frame::Stop { flow, code } => ("flow_stopped", json!({ "flow": id(*flow), "code": code })),
        Frame::Deadline {
            flow, remaining_ms, ..
        } => (
            "deadline",
            json!({ "flow": id(*flow), "remaining_ms": remaining_ms }),
        ),
        Frame::FlowPause {
            flow,
            paused,
            reason: why,
            ..
        } => (
            "flow_paused",
            json!({ "flow": id(*flow), "paused": paused, "reason": reason(*why) }),
        ),
        Frame::Resume { flow, received, .. } => (
            "claimed",
            json!({ "flow": id(*flow), "received": received }),
        ),
        Frame::Resumed { flow, received } => (
            "claim_accepted",
            json!({ "flow": id(*flow), "received": received }),
        ),
        Frame::Refused { flow, reason: why } => (
            "claim_refused",
            json!({ "flow": id(*flow), "reason": reason(*why) }),
        ),
        other => ("frame", json!({ "text": format!("{other:?}") })),
    }
}

/// The qlog name of the end that sent something.
fn sender(sent: bool) -> &'static str {
    if sent { "local" } else { "remote" }
}

/// A flow id as text, because its 57 bits do not fit into a number of JavaScript.
fn id(flow: FlowId) -> String {
    format!("{:x}", flow.0)
}

fn end_word(end: &FlowEnd) -> &'static str {
    match end {
        FlowEnd::Complete => "complete",
        FlowEnd::Reset(_) => "reset",
        FlowEnd::Local(_) => "local",
        FlowEnd::DeadlinePassed => "deadline_passed",
        FlowEnd::Refused(_) => "refused",
        FlowEnd::SessionEnded => "session_ended",
    }
}

/// A reason code in the form of commands and logs: `NoPath` as `no_path`.
fn reason(reason: ReasonCode) -> String {
    let mut word = String::new();
    for letter in format!("{reason:?}").chars() {
        if letter.is_ascii_uppercase() && !word.is_empty() {
            word.push('_');
        }
        word.push(letter.to_ascii_lowercase());
    }
    word
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_the_codes_of_commands_and_logs() {
        assert_eq!(reason(ReasonCode::NoPath), "no_path");
        assert_eq!(reason(ReasonCode::OverBudget), "over_budget");
        assert_eq!(reason(ReasonCode::None), "none");
    }
}
