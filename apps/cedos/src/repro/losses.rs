//! S3: random losses of Wi-Fi fetched over the other radio.
//!
//! ```text
//!  wlan0 ══ 1 ═ 2 ═ ✕ ═ 4 ══   up to 3 % of packets lost after the queue, both ways
//!  wwan0 ─────── 3 ─────────   EVDO, metered: lent for this alone
//! ```
//!
//! What is compared with is the same link without loss.

use super::Measured;
use super::offload::{EVDO_DOWN_MBPS, EVDO_RTT_MS, EVDO_UP_MBPS};
use anyhow::Context;
use cedos_lab_scenario::{Report, Scenario, ScenarioFault};
use serde_json::{Value, json};

const SECONDS: u32 = 100;
const RTTS_MS: [u32; 2] = [50, 200];
const LOSSES: [f64; 5] = [0.001, 0.003, 0.01, 0.02, 0.03];
/// What the other link is lent for, in bytes a second: nearly all EVDO carries down.
const LENT: &str = "50000";

/// A way to send.
#[derive(Clone, Copy)]
struct Way {
    /// `[transport]`'s `mirror`; with `None` there is no other link.
    mirror: Option<&'static str>,
    congestion: &'static str,
}

const OURS: Way = Way {
    mirror: Some(LENT),
    congestion: "cubic",
};
const BESIDE: [(&str, Way); 3] = [
    (
        "without_mirroring",
        Way {
            mirror: Some("\"never\""),
            congestion: "cubic",
        },
    ),
    (
        "one_link",
        Way {
            mirror: None,
            congestion: "cubic",
        },
    ),
    (
        "one_link_bbr",
        Way {
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
        conditions: vec![
            format!("one flow for {SECONDS} s, down and up, loss at random both ways after the queue"),
            format!(
                "Wi-Fi 20 Mb/s with a queue of 100 kB (assumed: the paper states neither); EVDO \
                 {EVDO_DOWN_MBPS} and {EVDO_UP_MBPS} Mb/s, RTT {EVDO_RTT_MS} ms, metered, lent for {LENT} B/s"
            ),
            "bytes of the application that arrived, each counted once, over whichever link".to_owned(),
            "baseline: D2TP downloading, as a share of the same loss-free throughput; kernels run in the lab"
                .to_owned(),
        ],
    })
}

struct Carried {
    mbps: f64,
    fetched: u64,
}

fn carried(rtt_ms: u32, loss: f64, direction: &str, way: Way) -> anyhow::Result<Carried> {
    let text = scenario(rtt_ms, loss, direction, way);
    let scenario = Scenario::parse("S3", &text, &mut |name| {
        Err(ScenarioFault {
            file: name.to_owned(),
            fault: "this scenario reads no files".to_owned(),
        })
    })?;
    let report: Report = cedos_lab_sim::run(&scenario, None)?.report;
    let flow = report.flows.first().context("the report has no flow")?;
    let all: u64 = flow.bytes_by_link.values().sum();
    let fetched = flow.bytes_by_link.get("wwan0").copied().unwrap_or(0);
    Ok(Carried {
        mbps: (all - flow.duplicate_bytes) as f64 * 8.0 / 1e6 / f64::from(SECONDS),
        fetched,
    })
}

fn scenario(rtt_ms: u32, loss: f64, direction: &str, way: Way) -> String {
    let Way { mirror, congestion } = way;
    let mut text = format!(
        r#"
seed = 3
duration_s = {SECONDS}

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
