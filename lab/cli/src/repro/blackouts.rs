//! S2: what a Wi-Fi link carries that is dead for a while every 20 s, of what it could.
//!
//! ```text
//!  wlan0 ──┤dead├────────────┤dead├────────────┤dead├────
//!  wwan0 ─────────── control only: no payload may be paid for ───────────
//! ```
//!
//! The ideal is the authors': what the same link carries without blackouts, times the share of the time
//! that it is there.
//!
//! On real sockets kernel TCP and kernel MPTCP go through the same, at the same time.

use super::emulated::{D2TP, Emulated, LongFlowResult, MPTCP, TCP};
use super::plot::{Chart, Series};
use super::runner::Measured;
use cedos_lab_scenario::{RunReport, Scenario, ScenarioFault};
use serde_json::{Value, json};

const SECONDS: u32 = 100;
/// On real sockets: the first two blackouts, each with what follows it.
const LAB_SECONDS: u32 = 40;
const LAB_BLACKOUTS: u32 = 2;
const EVERY_S: u32 = 20;
/// Not in phase with the begin or the end: a connection's first seconds are whole.
const FIRST_S: u32 = 7;
/// Round trip in ms and length of a blackout in s: each is changed while the other is the paper's.
const CASES: [(u32, u32); 8] = [
    (50, 1),
    (50, 2),
    (50, 5),
    (50, 10),
    (100, 2),
    (150, 2),
    (200, 2),
    (200, 10),
];
/// The cases for which the paper states a gain.
const LAB_CASES: [(u32, u32); 3] = [(50, 2), (50, 10), (200, 2)];

/// In virtual time.
pub fn simulate() -> anyhow::Result<Measured> {
    let mut rows = Vec::new();
    let (mut least, mut least_alone) = (f64::MAX, f64::MAX);
    for (rtt_ms, dark_s) in CASES {
        let whole = carried(rtt_ms, 0, false)?;
        let there = 1.0 - f64::from(dark_s) / f64::from(EVERY_S);
        let share = |bytes: f64| bytes / (whole * there);
        let both = share(carried(rtt_ms, dark_s, true)?);
        let alone = share(carried(rtt_ms, dark_s, false)?);
        least = least.min(both);
        least_alone = least_alone.min(alone);
        rows.push(json!({
            "rtt_ms": rtt_ms,
            "blackout_s": dark_s,
            "ideal_mbps": whole * there * 8.0 / f64::from(SECONDS) / 1e6,
            "share_of_ideal": both,
            "share_of_ideal_one_link": alone,
        }));
    }
    Ok(Measured {
        ours: json!({
            "share_of_ideal_min": least,
            "share_of_ideal_one_link_min": least_alone,
            "cases": rows,
        }),
        baseline: serde_json::Value::Null,
        mark: vec!["share_of_ideal_min >= 0.95".to_owned()],
        conditions: {
            let mut conditions = conditions(SECONDS);
            conditions.push("no baseline in virtual time: kernels run in the lab".to_owned());
            conditions
        },
    })
}

/// Share of the ideal against the length of a blackout and against the round trip.
pub fn charts(ours: &Value, _: &Value) -> Vec<Chart> {
    let cases = ours["cases"].as_array().map_or(&[][..], Vec::as_slice);
    let curve = |name: &str, figure: &str, x: &str, fixed: (&str, u64)| {
        let of = cases.iter().filter(|case| case[fixed.0] == fixed.1);
        let points =
            of.filter_map(|case| Some((case[x].as_f64()?, 100.0 * case[figure].as_f64()?)));
        Series::line(name, points.collect())
    };
    let chart = |title: &str, axis: &str, x: &str, fixed: (&str, u64)| Chart {
        title: title.to_owned(),
        x: axis.to_owned(),
        y: "% of the ideal".to_owned(),
        series: vec![
            curve("with the other link", "share_of_ideal", x, fixed),
            curve("Wi-Fi alone", "share_of_ideal_one_link", x, fixed),
        ],
    };
    vec![
        chart(
            "round trip 50 ms",
            "blackout, s",
            "blackout_s",
            ("rtt_ms", 50),
        ),
        chart(
            "blackouts of 2 s",
            "round trip, ms",
            "rtt_ms",
            ("blackout_s", 2),
        ),
    ]
}

fn conditions(seconds: u32) -> Vec<String> {
    vec![
        format!("one download for {seconds} s, a blackout every {EVERY_S} s, the first at {FIRST_S} s"),
        "Wi-Fi 20 Mb/s with a queue of 100 kB (assumed: the paper states neither); the other link 0.6 \
         Mb/s down, 0.15 up, RTT 150 ms, as EVDO, for control alone"
            .to_owned(),
        "nobody is told of a blackout or of its end".to_owned(),
        "one_link: without the other radio, where the sender freezes itself".to_owned(),
    ]
}

/// On real sockets, all of a case at once, each over links of its own: two minutes.
pub fn on_real_sockets() -> anyhow::Result<Measured> {
    let (mut ours, mut baseline) = (Vec::new(), Vec::new());
    let (mut least, mut least_alone) = (f64::MAX, f64::MAX);
    for (rtt_ms, dark_s) in LAB_CASES {
        let begin = |dark_s, other, options| {
            Emulated::begin(&scenario(LAB_SECONDS, rtt_ms, dark_s, other), options)
        };
        let whole = begin(0, true, D2TP)?;
        let both = begin(dark_s, true, D2TP)?;
        let alone = begin(dark_s, false, D2TP)?;
        let tcp = begin(dark_s, false, TCP)?;
        let mptcp = begin(dark_s, true, MPTCP)?;
        let whole_mbps = LongFlowResult::of(whole)?.mbps(LAB_SECONDS);
        let there_s = LAB_SECONDS - LAB_BLACKOUTS * dark_s;
        let share = |came: &LongFlowResult| came.mbps(there_s) / whole_mbps;
        let (both, alone, tcp, mptcp) = (
            LongFlowResult::of(both)?,
            LongFlowResult::of(alone)?,
            LongFlowResult::of(tcp)?,
            LongFlowResult::of(mptcp)?,
        );
        least = least.min(share(&both));
        least_alone = least_alone.min(share(&alone));
        ours.push(json!({
            "rtt_ms": rtt_ms,
            "blackout_s": dark_s,
            "whole_mbps": whole_mbps,
            "share_of_ideal": share(&both),
            "share_of_ideal_one_link": share(&alone),
            "more_than_tcp": share(&both) / share(&tcp) - 1.0,
            "more_than_mptcp": share(&both) / share(&mptcp) - 1.0,
            "bytes_by_link": both.flow.bytes_by_link,
        }));
        baseline.push(json!({
            "rtt_ms": rtt_ms,
            "blackout_s": dark_s,
            "tcp_share_of_ideal": share(&tcp),
            "mptcp_share_of_ideal": share(&mptcp),
            "mptcp_bytes_by_link": mptcp.flow.bytes_by_link,
        }));
    }
    let mut conditions = conditions(LAB_SECONDS);
    conditions.extend([
        "three of the paper's cases, those of which it tells a gain; two blackouts in each; all of a case at \
         once, each in a lab of its own; counted from the first byte on"
            .to_owned(),
        "ideal: D2TP over the same links without blackouts, for as long as Wi-Fi is there".to_owned(),
        "kernel TCP (CUBIC) over Wi-Fi alone; kernel MPTCP with the other link as backup: it may carry \
         payload there, and what it carries counts for it"
            .to_owned(),
    ]);
    Ok(Measured {
        ours: json!({
            "share_of_ideal_min": least,
            "share_of_ideal_one_link_min": least_alone,
            "cases": ours,
        }),
        baseline: Value::Array(baseline),
        mark: vec!["share_of_ideal_min >= 0.95".to_owned()],
        conditions,
    })
}

/// Bytes that came by Wi-Fi.
fn carried(rtt_ms: u32, dark_s: u32, other: bool) -> anyhow::Result<f64> {
    let text = scenario(SECONDS, rtt_ms, dark_s, other);
    let scenario = Scenario::parse("S2", &text, &mut |name| {
        Err(ScenarioFault {
            file: name.to_owned(),
            fault: "this scenario reads no files".to_owned(),
        })
    })?;
    let report: RunReport = cedos_lab_sim::run(&scenario, None)?.report;
    let bytes = report
        .flows
        .first()
        .and_then(|f| f.bytes_by_link.get("wlan0"));
    Ok(bytes.copied().unwrap_or(0) as f64)
}

fn scenario(seconds: u32, rtt_ms: u32, dark_s: u32, other: bool) -> String {
    let mut text = format!(
        r#"
seed = 2
duration_s = {seconds}
origin = "builtin"

[[flow]]
bytes = 1_000_000_000
policy = "any"
metered_bytes_max = 1

[[link]]
name = "wlan0"
down_mbps = 20
up_mbps = 20
rtt_ms = {rtt_ms}
queue_bytes = 100000
"#
    );
    if dark_s > 0 {
        text += &format!(
            r"
[[link.repeat]]
every_s = {EVERY_S}
first_s = {FIRST_S}
for_s = {dark_s}
dead = true
"
        );
    }
    if other {
        text += r#"
[[link]]
name = "wwan0"
class = "metered"
down_mbps = 0.6
up_mbps = 0.15
rtt_ms = 150
"#;
    }
    text
}
