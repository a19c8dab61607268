//! S1: acknowledgements of Wi-Fi over the other radio.
//!
//! ```text
//!                 data
//!  proxy ══════════════════▶ wlan0   802.11b or g: one medium for both directions
//!        ◀─ ─ ─ ─ ─ ─ ─ ─ ─         an ACK here takes the time of a third of a data packet
//!        ◀────────────────── wwan0   EVDO: 150 kb/s from the device
//! ```
//!
//! The ceiling is what a lone sender gets of the medium for full packets of UDP: what removing every
//! acknowledgement, and headers beyond UDP's, could give.

use super::emulated::{D2TP, MPTCP, TCP, emulated, mbps as mbps_of};
use super::runner::Measured;
use anyhow::Context;
use cedos_lab_link::{Medium, Span};
use cedos_lab_scenario::{RunReport, Scenario, ScenarioFault};
use serde_json::{Map, Value, json};

/// The longest a download may take on real sockets.
const LAB_SECONDS_MAX: u32 = 60;
/// From the paper: connections last so long, and so far away is the server.
const SECONDS: u32 = 100;
pub const WIFI_RTT_MS: u32 = 50;
/// EVDO, of which the paper states nothing: down what its authors' 3G phone got, up revision 0's 153 kb/s,
/// and the round trip that DRWA measured.
pub const EVDO_DOWN_MBPS: f64 = 0.42;
pub const EVDO_UP_MBPS: f64 = 0.15;
pub const EVDO_RTT_MS: u32 = 133;
/// What ACKs may cost there, in bytes a second: nearly all it carries.
pub const OFFLOAD: &str = "16000";
/// A full packet, and what UDP carries in it.
pub const PACKET_BYTES: u32 = 1500;
const UDP_BYTES: u32 = PACKET_BYTES - 28;
/// A TCP acknowledgement with timestamps, for what the closed form says of TCP.
const TCP_ACK_BYTES: u32 = 52;
/// Payload of a full packet of TCP with timestamps.
const TCP_BYTES: u32 = PACKET_BYTES - 52;

/// The media of the paper.
pub const MEDIA: [(&str, &str, Medium); 2] = [
    ("b", "802.11b", Medium::Dot11b),
    ("g", "802.11g", Medium::Dot11g),
];

/// A way to acknowledge.
struct AckVariant {
    name: &'static str,
    /// Fewer ACKs as the window grows.
    thin: bool,
    /// The value of `offload` in a scenario's `[acks]`.
    offload: &'static str,
}

const WAYS: [AckVariant; 4] = [
    AckVariant {
        name: "every_second",
        thin: false,
        offload: "\"never\"",
    },
    AckVariant {
        name: "thinned",
        thin: true,
        offload: "\"never\"",
    },
    AckVariant {
        name: "every_second_offloaded",
        thin: false,
        offload: OFFLOAD,
    },
    AckVariant {
        name: "offloaded",
        thin: true,
        offload: OFFLOAD,
    },
];

/// In virtual time, both ways and both media, all ways to acknowledge.
pub fn simulate() -> anyhow::Result<Measured> {
    let (mut ours, mut baseline, mut mark) = (Map::new(), Map::new(), Vec::new());
    for (short, standard, medium) in MEDIA {
        let ceiling = mbps(UDP_BYTES, medium.cycle(PACKET_BYTES));
        let mut figures = Map::new();
        figures.insert("ceiling_mbps".to_owned(), json!(ceiling));
        for direction in ["down", "up"] {
            let mut by_way = Map::new();
            for way in &WAYS {
                let text = scenario(standard, direction, way);
                let report = run(&text)?;
                by_way.insert(way.name.to_owned(), carried(&report, ceiling)?);
            }
            let by = |name: &str| by_way[name]["mbps"].as_f64().unwrap_or(f64::NAN);
            let gain = by("offloaded") / by("thinned") - 1.0;
            let gain_unthinned = by("every_second_offloaded") / by("every_second") - 1.0;
            by_way.insert("gain".to_owned(), json!(gain));
            by_way.insert("gain_unthinned".to_owned(), json!(gain_unthinned));
            figures.insert(direction.to_owned(), Value::Object(by_way));
            mark.push(format!("{short}.{direction}.offloaded.of_ceiling >= 0.9"));
            mark.push(format!("{short}.{direction}.gain > 0"));
            mark.push(format!("{short}.{direction}.gain_unthinned > 0"));
        }
        baseline.insert(short.to_owned(), closed_forms(medium, ceiling));
        ours.insert(short.to_owned(), Value::Object(figures));
    }
    Ok(Measured {
        ours: Value::Object(ours),
        baseline: Value::Object(baseline),
        mark,
        conditions: vec![
            format!(
                "one flow of {SECONDS} s, nothing else on the air; Wi-Fi as in lab/link/src/medium.rs, \
                 RTT {WIFI_RTT_MS} ms, queues of 100 ms; EVDO {EVDO_DOWN_MBPS} and {EVDO_UP_MBPS} Mb/s, \
                 RTT {EVDO_RTT_MS} ms, metered: it carries no payload, and at most {OFFLOAD} B/s of ACKs"
            ),
            "ceiling: 1,472 bytes of UDP payload a frame, no packet the other way; ours is application \
             bytes, so that D2TP's headers count against it"
                .to_owned(),
            "every_second: one ACK for two packets, as TCP; thinned: D2TP's default, eight a window; \
             up: the device sends, the proxy's ACKs come over EVDO as R-GRANT-6 lets them, which no user \
             raises"
                .to_owned(),
            "baseline: what the closed form of the model says of TCP with 52-byte ACKs"
                .to_owned(),
        ],
    })
}

/// What the model says of TCP, with nothing else in its way.
fn closed_forms(medium: Medium, ceiling: f64) -> Value {
    let tcp = |every| {
        let cycle = medium.cycle_answered(PACKET_BYTES, TCP_ACK_BYTES, every);
        mbps(TCP_BYTES, cycle)
    };
    json!({
        "tcp_every_packet_mbps": tcp(1),
        "tcp_every_second_mbps": tcp(2),
        "udp_by_tcp_every_packet": ceiling / tcp(1),
        "udp_by_tcp_every_second": ceiling / tcp(2),
    })
}

/// Payload of so many bytes in each cycle.
pub fn mbps(bytes: u32, cycle: Span) -> f64 {
    f64::from(bytes) * 8.0 / 1e6 / cycle.as_secs_f64()
}

fn carried(report: &RunReport, ceiling: f64) -> anyhow::Result<Value> {
    let flow = report.flows.first().context("the report has no flow")?;
    let by_wifi = flow.bytes_by_link.get("wlan0").copied().unwrap_or(0) - flow.duplicate_bytes;
    let mbps = by_wifi as f64 * 8.0 / 1e6 / f64::from(SECONDS);
    let of = |name: &str| report.links.iter().find(|link| link.name == name);
    let (wifi, cell) = of("wlan0").zip(of("wwan0")).context("a link is missing")?;
    Ok(json!({
        "mbps": mbps,
        "of_ceiling": mbps / ceiling,
        "wifi_up_bytes": wifi.bytes_up,
        "wifi_down_bytes": wifi.bytes_down,
        "cell_up_bytes": cell.bytes_up,
        "cell_down_bytes": cell.bytes_down,
    }))
}

/// On real sockets, downloads in turn: D2TP with and without, kernel TCP, kernel MPTCP.
pub fn on_real_sockets() -> anyhow::Result<Measured> {
    let (mut ours, mut baseline, mut mark) = (Map::new(), Map::new(), Vec::new());
    for (short, standard, medium) in MEDIA {
        let ceiling = mbps(UDP_BYTES, medium.cycle(PACKET_BYTES));
        // 15 s of it.
        let bytes = (ceiling * 1e6 / 8.0 * 15.0) as u64;
        let links = links(standard);
        let download = |offload: &str, by: &[&str]| -> anyhow::Result<f64> {
            let text = format!(
                "seed = 1\nduration_s = {LAB_SECONDS_MAX}\norigin = \"builtin\"\n\
                 [acks]\noffload = {offload}\n{links}\n\
                 [[flow]]\nbytes = {bytes}\npolicy = \"free-only\"\n"
            );
            mbps_of(&emulated(&text, by)?)
        };
        let never = "\"never\"";
        let (thinned, offloaded) = (download(never, D2TP)?, download(OFFLOAD, D2TP)?);
        let (tcp, mptcp) = (download(never, TCP)?, download(never, MPTCP)?);
        ours.insert(
            short.to_owned(),
            json!({
                "ceiling_mbps": ceiling,
                "thinned_mbps": thinned,
                "offloaded_mbps": offloaded,
                "of_ceiling": offloaded / ceiling,
                "gain": offloaded / thinned - 1.0,
                "more_than_tcp": offloaded / tcp - 1.0,
            }),
        );
        let beside = json!({ "tcp_mbps": tcp, "mptcp_mbps": mptcp });
        baseline.insert(short.to_owned(), beside);
        mark.push(format!("{short}.of_ceiling >= 0.9"));
        mark.push(format!("{short}.gain > 0"));
    }
    Ok(Measured {
        ours: Value::Object(ours),
        baseline: Value::Object(baseline),
        mark,
        conditions: vec![
            format!(
                "the links of --where sim, between namespaces; in turn, one download each of what the \
                 ceiling carries in 15 s, from its first byte to its last; {OFFLOAD} B/s of ACKs over EVDO"
            ),
            "D2TP through the proxy; TCP (CUBIC) over Wi-Fi and MPTCP with EVDO as backup straight from \
             the origin, both without encryption; MPTCP has no way to send acknowledgements alone over a \
             link"
                .to_owned(),
        ],
    })
}

fn run(text: &str) -> anyhow::Result<RunReport> {
    let scenario = Scenario::parse("S1", text, &mut |name| {
        Err(ScenarioFault {
            file: name.to_owned(),
            fault: "this scenario reads no files".to_owned(),
        })
    })?;
    Ok(cedos_lab_sim::run(&scenario, None)?.report)
}

fn scenario(standard: &str, direction: &str, way: &AckVariant) -> String {
    let (thin, offload) = (way.thin, way.offload);
    let links = links(standard);
    format!(
        r#"
seed = 1
duration_s = {SECONDS}
[acks]
thin = {thin}
offload = {offload}
{links}
[[flow]]
bytes = {bytes}
direction = "{direction}"
policy = "free-only"
"#,
        // More than either medium carries in that time.
        bytes = SECONDS * 5_000_000,
    )
}

/// Wi-Fi of this standard, and EVDO.
pub fn links(standard: &str) -> String {
    format!(
        r#"
[[link]]
name = "wlan0"
medium = "{standard}"
rtt_ms = {WIFI_RTT_MS}
[[link]]
name = "wwan0"
class = "metered"
down_mbps = {EVDO_DOWN_MBPS}
up_mbps = {EVDO_UP_MBPS}
rtt_ms = {EVDO_RTT_MS}
queue_ms = 500
"#
    )
}
