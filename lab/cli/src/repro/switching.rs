//! C3: how long a download is silent when the device changes between LTE and Wi-Fi.
//!
//! ```text
//!  wwan0 ────────────────┤        ┊ radio starts ├───────────┤
//!  wlan0         ├────────────────┤                      ├────────
//!                ▲ LTE to Wi-Fi   ▲ Wi-Fi to LTE         ▲
//!        t = 10 s         11      20 s          20.493   30 s
//! ```
//!
//! As on the authors' phone, LTE stays until Wi-Fi is ready, but its radio starts only when Wi-Fi is
//! gone. They took 100 of each.

use super::emulated::{D2TP, emulated};
use super::runner::{Measured, RowVenue};
use super::spread::SampleSummary;
use anyhow::ensure;
use cedos_lab_scenario::{RunReport, Scenario, ScenarioFault, Switch, SwitchKind};
use serde_json::json;

/// From the paper: 581 ms on average, of which 88 ms are authentication.
const RADIO_START_MS: f64 = 493.0;
const LTE_RTT_MS: f64 = 42.9;
const WIFI_RTT_MS: f64 = 13.7;
/// A change each way takes this long.
const CYCLE_S: u32 = 20;

/// In virtual time, 100 of each as in the paper.
pub fn simulate() -> anyhow::Result<Measured> {
    let text = scenario(100);
    let scenario = Scenario::parse("C3", &text, &mut |name| {
        Err(ScenarioFault {
            file: name.to_owned(),
            fault: "this scenario reads no files".to_owned(),
        })
    })?;
    let report = cedos_lab_sim::run(&scenario, None)?.report;
    measure(&report, RowVenue::Sim, 100)
}

/// On real sockets, ten of each: 200 s.
pub fn emulate() -> anyhow::Result<Measured> {
    let changes = 10;
    let report = emulated(&scenario(changes), D2TP)?;
    measure(&report, RowVenue::Lab, changes)
}

/// `changes` of each kind. The flow is larger than what the links carry in that time.
fn scenario(changes: u32) -> String {
    let duration = changes * CYCLE_S;
    format!(
        r#"
seed = 3
duration_s = {duration}

[[link]]
name = "wwan0"
class = "metered"
down_mbps = 4.7
up_mbps = 2
rtt_ms = {LTE_RTT_MS}
attach_s = {radio_s}
[[link.repeat]]
every_s = {CYCLE_S}
first_s = 11
for_s = 9
up = false

[[link]]
name = "wlan0"
down_mbps = 6.3
up_mbps = 3
rtt_ms = {WIFI_RTT_MS}
up = false
[[link.repeat]]
every_s = {CYCLE_S}
first_s = 10
for_s = 10
up = true

[[flow]]
bytes = {bytes}
policy = "any"
"#,
        radio_s = RADIO_START_MS / 1e3,
        // What both links carry in all that time.
        bytes = u64::from(duration) * 11_000_000 / 8,
    )
}

fn measure(report: &RunReport, place: RowVenue, changes: u32) -> anyhow::Result<Measured> {
    let silences = |kind: SwitchKind, to: &str| {
        let of_kind = |switch: &&Switch| switch.kind == kind && switch.to == to;
        let found: Vec<f64> = report
            .switches
            .iter()
            .filter(of_kind)
            .map(|switch| switch.silence_ms)
            .collect();
        found
    };
    let to_wifi = silences(SwitchKind::MakeBeforeBreak, "wlan0");
    let to_lte = silences(SwitchKind::BreakBeforeMake, "wwan0");
    // The run ends as the last change begins.
    let least = changes as usize - 1;
    ensure!(
        to_wifi.len() >= least && to_lte.len() >= least,
        "only {} changes to Wi-Fi and {} to LTE of {changes} were seen",
        to_wifi.len(),
        to_lte.len()
    );
    let whole = to_lte.iter().map(|silence| silence + RADIO_START_MS);
    let ours = json!({
        "lte_to_wifi_ms": SampleSummary::of(to_wifi),
        "wifi_to_lte_ms": SampleSummary::of(whole),
        "wifi_to_lte_after_address_ms": SampleSummary::of(to_lte),
        "packets_while_down": report.links.iter().map(|link| link.packets_while_down).sum::<u64>(),
    });
    let mark = vec![
        "lte_to_wifi_ms.mean <= 45".to_owned(),
        format!("lte_to_wifi_ms.p95 <= {:.1}", WIFI_RTT_MS + 20.0),
        "wifi_to_lte_ms.mean <= 581".to_owned(),
        format!(
            "wifi_to_lte_after_address_ms.p95 <= {:.1}",
            2.0 * LTE_RTT_MS + 100.0
        ),
        "packets_while_down == 0".to_owned(),
    ];
    let conditions =
        vec![
        format!("{changes} changes each way, one download ({})", place.word()),
        format!(
            "LTE 4.7 Mb/s, RTT {LTE_RTT_MS} ms; Wi-Fi 6.3 Mb/s, RTT {WIFI_RTT_MS} ms: the paper's \
             figures of its other experiments, since it states none for this one"
        ),
        format!(
            "LTE's radio takes {RADIO_START_MS} ms to start once Wi-Fi is gone: the paper's 581 ms \
             less its 88 ms of authentication"
        ),
        "to Wi-Fi: from the last data over LTE to the first over Wi-Fi, counted when Wi-Fi begins to \
         carry and, where it was not alone by then, again when LTE goes; to LTE: from the loss of \
         Wi-Fi"
            .to_owned(),
        "no baseline: plain TCP survives neither change".to_owned(),
    ];
    Ok(Measured {
        ours,
        baseline: serde_json::Value::Null,
        mark,
        conditions,
    })
}
