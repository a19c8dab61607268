//! S3: random losses of Wi-Fi fetched over the other radio.
//!
//! ```text
//!  wlan0 ══ 1 ═ 2 ═ ✕ ═ 4 ══   up to 3 % of packets lost after the queue, both ways
//!  wwan0 ─────── 3 ─────────   EVDO, metered: lent for this alone
//! ```
//!
//! What is compared with is the same link without loss; on real sockets kernel TCP and kernel MPTCP go through
//! the same, at the same time.

use super::emulated::{D2TP, Emulated, LongFlowResult, MPTCP, TCP};
use super::offload::{EVDO_DOWN_MBPS, EVDO_RTT_MS, EVDO_UP_MBPS};
use super::plot::{Chart, Series};
use super::runner::Measured;
use anyhow::Context;
use cedos_lab_scenario::{RunReport, Scenario, ScenarioFault};
use serde_json::{Value, json};

const SECONDS: u32 = 100;
/// On real sockets.
const LAB_SECONDS: u32 = 20;
const LAB_LOSSES: [f64; 2] = [0.01, 0.03];
const RTTS_MS: [u32; 2] = [50, 200];
const LOSSES: [f64; 5] = [0.001, 0.003, 0.01, 0.02, 0.03];
/// What the other link is lent for, in bytes a second: nearly all EVDO carries down.
const LENT: &str = "50000";

/// A way to send.
#[derive(Clone, Copy)]
struct SendVariant {
    /// `[transport]`'s `mirror`; with `None` there is no other link.
    mirror: Option<&'static str>,
    congestion: &'static str,
}

const OURS: SendVariant = SendVariant {
    mirror: Some(LENT),
    congestion: "cubic",
};
const ALONE: SendVariant = SendVariant {
    mirror: None,
    congestion: "cubic",
};
const BESIDE: [(&str, SendVariant); 3] = [
    (
        "without_mirroring",
        SendVariant {
            mirror: Some("\"never\""),
            congestion: "cubic",
        },
    ),
    ("one_link", ALONE),
    (
        "one_link_bbr",
        SendVariant {
            mirror: None,
            congestion: "bbr",
        },
    ),
];

/// In virtual time.
pub fn simulate() -> anyhow::Result<Measured> {
    let (mut rows, mut beside) = (Vec::new(), Vec::new());
    let mut least = f64::MAX;
    for rtt_ms in RTTS_MS {
        for direction in ["down", "up"] {
            let case = |loss, way| carried(rtt_ms, loss, direction, way);
            let whole = case(0.0, OURS)?;
            for loss in LOSSES {
                let got = case(loss, OURS)?;
                let share = got.mbps / whole.mbps;
                least = least.min(share);
                rows.push(json!({
                    "rtt_ms": rtt_ms,
                    "direction": direction,
                    "loss": loss,
                    "loss_free_mbps": whole.mbps,
                    "mbps": got.mbps,
                    "share_of_loss_free": share,
                    "fetched_bytes": got.fetched,
                }));
                if direction == "up" {
                    continue;
                }
                let mut row = json!({"rtt_ms": rtt_ms, "loss": loss});
                for (name, way) in BESIDE {
                    row[name] = json!(case(loss, way)?.mbps / whole.mbps);
                }
                row["gain_over_one_link"] =
                    json!(share / row["one_link"].as_f64().unwrap_or(f64::NAN) - 1.0);
                beside.push(row);
            }
        }
    }
    Ok(Measured {
        ours: json!({"share_of_loss_free_min": least, "cases": rows}),
        baseline: Value::Array(beside),
        mark: vec!["share_of_loss_free_min >= 0.9".to_owned()],
        conditions: {
            let mut all = conditions(SECONDS, "down and up");
            all.push(
                "baseline: D2TP downloading, as a share of the same loss-free throughput; kernels run in the \
                 lab"
                .to_owned(),
            );
            all
        },
    })
}

fn conditions(seconds: u32, directions: &str) -> Vec<String> {
    vec![
        format!("one flow for {seconds} s, {directions}, loss at random both ways after the queue"),
        format!(
            "Wi-Fi 20 Mb/s with a queue of 100 kB (assumed: the paper states neither); EVDO {EVDO_DOWN_MBPS} \
             and {EVDO_UP_MBPS} Mb/s, RTT {EVDO_RTT_MS} ms, metered, lent for {LENT} B/s"
        ),
        "bytes of the application that arrived, each counted once, over whichever link".to_owned(),
    ]
}

/// On real sockets, all of a case at once, each over links of its own: a minute and a half.
pub fn on_real_sockets() -> anyhow::Result<Measured> {
    let (mut rows, mut beside) = (Vec::new(), Vec::new());
    let mut least = f64::MAX;
    for rtt_ms in RTTS_MS {
        for loss in LAB_LOSSES {
            let begin = |loss, way, options| {
                Emulated::begin(&scenario(LAB_SECONDS, rtt_ms, loss, "down", way), options)
            };
            let whole = begin(0.0, OURS, D2TP)?;
            let ours = begin(loss, OURS, D2TP)?;
            let alone = begin(loss, ALONE, D2TP)?;
            let tcp = begin(loss, ALONE, TCP)?;
            let mptcp = begin(loss, OURS, MPTCP)?;
            let mbps = |run| anyhow::Ok(LongFlowResult::of(run)?.mbps(LAB_SECONDS));
            let (whole, alone, tcp) = (mbps(whole)?, mbps(alone)?, mbps(tcp)?);
            let (ours, mptcp) = (LongFlowResult::of(ours)?, LongFlowResult::of(mptcp)?);
            let share = ours.mbps(LAB_SECONDS) / whole;
            least = least.min(share);
            rows.push(json!({
                "rtt_ms": rtt_ms,
                "loss": loss,
                "loss_free_mbps": whole,
                "mbps": share * whole,
                "share_of_loss_free": share,
                "more_than_tcp": share * whole / tcp - 1.0,
                "bytes_by_link": ours.flow.bytes_by_link,
            }));
            beside.push(json!({
                "rtt_ms": rtt_ms,
                "loss": loss,
                "one_link": alone / whole,
                "tcp": tcp / whole,
                "mptcp": mptcp.mbps(LAB_SECONDS) / whole,
                "mptcp_bytes_by_link": mptcp.flow.bytes_by_link,
            }));
        }
    }
    let mut conditions = conditions(LAB_SECONDS, "down");
    conditions.push(
        "all of a case at once, each in a lab of its own, counted from the first byte on; baseline as shares of \
         what D2TP carries without loss: D2TP and kernel TCP (CUBIC) over Wi-Fi alone, kernel MPTCP with EVDO \
         as backup"
        .to_owned(),
    );
    Ok(Measured {
        ours: json!({"share_of_loss_free_min": least, "cases": rows}),
        baseline: Value::Array(beside),
        mark: vec!["share_of_loss_free_min >= 0.9".to_owned()],
        conditions,
    })
}

/// Throughput over loss, a chart for each round trip.
pub fn charts(ours: &Value, baseline: &Value) -> Vec<Chart> {
    const BESIDE: [(&str, &str); 6] = [
        ("up", "mirrored, upload"),
        ("without_mirroring", "not mirrored"),
        ("one_link", "Wi-Fi alone"),
        ("one_link_bbr", "Wi-Fi alone, BBR"),
        ("tcp", "kernel TCP"),
        ("mptcp", "kernel MPTCP"),
    ];
    let points = |rows: &Value, rtt_ms: u32, direction: &str, key: &str| -> Vec<(f64, f64)> {
        let rows = rows.as_array().into_iter().flatten();
        rows.filter(|row| {
            row["rtt_ms"] == rtt_ms && row["direction"].as_str().unwrap_or("down") == direction
        })
        .filter_map(|row| Some((row["loss"].as_f64()? * 100.0, row[key].as_f64()? * 100.0)))
        .collect()
    };
    let cases = &ours["cases"];
    let chart = |rtt_ms| {
        let of = |(key, name): (&str, &str)| {
            let points = match key {
                "up" => points(cases, rtt_ms, "up", "share_of_loss_free"),
                _ => points(baseline, rtt_ms, "down", key),
            };
            Series::line(name, points)
        };
        let mut series = vec![Series::line(
            "mirrored",
            points(cases, rtt_ms, "down", "share_of_loss_free"),
        )];
        series.extend(BESIDE.map(of));
        series.retain(|series| !series.points.is_empty());
        Chart {
            title: format!("{rtt_ms} ms away"),
            x: "lost at random, %".to_owned(),
            y: "of the loss-free throughput, %".to_owned(),
            series,
        }
    };
    RTTS_MS.map(chart).into()
}

struct LossRunBytes {
    mbps: f64,
    fetched: u64,
}

fn carried(
    rtt_ms: u32,
    loss: f64,
    direction: &str,
    way: SendVariant,
) -> anyhow::Result<LossRunBytes> {
    let text = scenario(SECONDS, rtt_ms, loss, direction, way);
    let scenario = Scenario::parse("S3", &text, &mut |name| {
        Err(ScenarioFault {
            file: name.to_owned(),
            fault: "this scenario reads no files".to_owned(),
        })
    })?;
    let report: RunReport = cedos_lab_sim::run(&scenario, None)?.report;
    let flow = report.flows.first().context("the report has no flow")?;
    let all: u64 = flow.bytes_by_link.values().sum();
    let fetched = flow.bytes_by_link.get("wwan0").copied().unwrap_or(0);
    Ok(LossRunBytes {
        mbps: (all - flow.duplicate_bytes) as f64 * 8.0 / 1e6 / f64::from(SECONDS),
        fetched,
    })
}

fn scenario(seconds: u32, rtt_ms: u32, loss: f64, direction: &str, way: SendVariant) -> String {
    let SendVariant { mirror, congestion } = way;
    let mut text = format!(
        r#"
seed = 3
duration_s = {seconds}
origin = "builtin"

[transport]
congestion = "{congestion}"
mirror = {}

[[flow]]
bytes = 1_000_000_000
direction = "{direction}"
policy = "free-only"

[[link]]
name = "wlan0"
down_mbps = 20
up_mbps = 20
rtt_ms = {rtt_ms}
queue_bytes = 100000
loss = {loss}
"#,
        mirror.unwrap_or("\"never\"")
    );
    if mirror.is_some() {
        text += &format!(
            r#"
[[link]]
name = "wwan0"
class = "metered"
down_mbps = {EVDO_DOWN_MBPS}
up_mbps = {EVDO_UP_MBPS}
rtt_ms = {EVDO_RTT_MS}
queue_ms = 500
"#
        );
    }
    text
}
