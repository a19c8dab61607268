//! A video in two layers over DATAGRAMs: reports on the steadier link, commands and base layers on
//! both.
//!
//! ```text
//!  wlan0 ══ enhancement, base ══┤outage├════════   1 % lost
//!  wwan0 ── base again, reports, commands ──────   0.6 Mb/s, without outages
//! ```
//!
//! For comparison the same application runs on Wi-Fi alone, on both links without routes, and with
//! each route alone.

use super::runner::Measured;
use cedos_lab_scenario::{Scenario, ScenarioFault};
use cedos_lab_sim::video::{VideoLinkUse, VideoQuality, watch};
use d2tp_driver::PathSelection;
use serde_json::{Map, Value, json};

const SECONDS: u32 = 100;
const SEEDS: std::ops::RangeInclusive<u64> = 1..=20;

const PLAIN: VideoLinkUse = VideoLinkUse::plain(2);
const MANNERS: [(&str, VideoLinkUse); 6] = [
    ("wifi_alone", VideoLinkUse::plain(1)),
    ("both_plain", PLAIN),
    (
        "reports_routed",
        VideoLinkUse {
            reports: PathSelection::Steadiest,
            ..PLAIN
        },
    ),
    (
        "commands_on_both",
        VideoLinkUse {
            commands: PathSelection::Each,
            ..PLAIN
        },
    ),
    (
        "base_on_both",
        VideoLinkUse {
            base: PathSelection::Each,
            ..PLAIN
        },
    ),
    ("all_three", VideoLinkUse::THREE),
];

/// Runs the row in virtual time.
pub fn simulate() -> anyhow::Result<Measured> {
    let mut ours = Map::new();
    for (name, manner) in MANNERS {
        let mut seen = Vec::new();
        for seed in SEEDS {
            seen.push(watch(&scenario(seed)?, manner));
        }
        ours.insert(name.to_owned(), figures(&seen));
    }
    Ok(Measured::figures(
        Value::Object(ours),
        Value::Null,
        SEEDS.count(),
    ))
}

/// The figures of all runs together.
fn figures(seen: &[VideoQuality]) -> Value {
    let sum = |of: fn(&VideoQuality) -> u64| seen.iter().map(of).sum::<u64>() as f64;
    let mut commands: Vec<f64> = seen
        .iter()
        .flat_map(|w| w.commands.iter().map(|span| span.as_millis_f64()))
        .collect();
    commands.sort_by(f64::total_cmp);
    let rank = |share: f64| (commands.len() as f64 * share).ceil().max(1.0) as usize - 1;
    let at = |share: f64| commands.get(rank(share)).copied();
    let gap = seen.iter().map(|w| w.report_gap_max).max();
    let seconds = f64::from(SECONDS) * seen.len() as f64;
    let cell = |w: &VideoQuality| w.bytes_by_link.get(1).map_or(0, |(down, up)| down + up);
    let cell: u64 = seen.iter().map(cell).sum();
    json!({
        "base_in_time": sum(|w| w.base) / sum(|w| w.pictures),
        "enhancement_mbps": sum(|w| w.extra_bytes) * 8.0 / seconds / 1e6,
        "reports_in_time": sum(|w| w.reports_in_time) / sum(|w| w.reports),
        "report_gap_max_ms": gap.map(|gap| gap.as_millis_f64()),
        "commands": commands.len(),
        "commands_given_again": sum(|w| w.given_again),
        "command_p50_ms": at(0.5),
        "command_p95_ms": at(0.95),
        "command_max_ms": commands.last(),
        "other_link_mbps": cell as f64 * 8.0 / seconds / 1e6,
    })
}

fn scenario(seed: u64) -> anyhow::Result<Scenario> {
    let text = format!(
        r#"
seed = {seed}
duration_s = {SECONDS}
[[link]]
name = "wlan0"
medium = "802.11g"
rtt_ms = 50
loss = 0.01
[[link.repeat]]
every_s = 20
first_s = 7
for_s = 2
dead = true
[[link]]
name = "wwan0"
down_mbps = 0.6
up_mbps = 0.15
rtt_ms = 150
"#
    );
    Ok(Scenario::parse("video", &text, &mut |name| {
        Err(ScenarioFault {
            file: name.to_owned(),
            fault: "this scenario reads no files".to_owned(),
        })
    })?)
}
