//! An interactive ssh session: the delay of a key's echo, directly and by `cedos run` on the same
//! path at the same time; the delay after a change of networks; and the cost of an idle session.
//!
//! ```text
//!  keys.py ── ssh ────────────────────────────── TCP ──┐
//!                                                      ├── sshd ── dd, which echoes each byte
//!  keys.py ── cedos run -- ssh ══ D2Prox ─────── TCP ──┘
//! ```

use super::site::ProgramFolder;
use anyhow::Context;
use cedos_lab_scenario::SampleSummary;
use serde_json::{Value, json};
use std::fmt::Write as _;

/// The number of keys typed in each way.
const KEYS: u32 = 400;
/// The interval between keys, in seconds.
const EVERY_S: f64 = 0.06;
/// How long nothing is typed, twice, while CPU time is measured, in seconds.
const IDLE_S: u32 = 30;

const WIFI_RTT_MS: f64 = 20.0;
const CELLULAR_RTT_MS: f64 = 50.0;
/// Switches of each kind.
const SWITCHES: u32 = 6;

const PATH: &str = r#"
seed = 11
duration_s = 150
origin = "builtin"
[[link]]
name = "wlan0"
down_mbps = 40
up_mbps = 40
rtt_ms = 20
"#;

/// The scenario's switches. Wi-Fi is lost while cellular is up, from 6 s on every 8 s, and is back
/// 4 s later; then cellular is lost permanently, and Wi-Fi alone is lost every 6 s for 2 s. Also
/// returns the end, in seconds.
fn switches() -> (String, u32) {
    let mut text = format!(
        "seed = 11\nduration_s = 300\norigin = \"builtin\"\n\
         [[link]]\nname = \"wlan0\"\ndown_mbps = 40\nup_mbps = 40\nrtt_ms = {WIFI_RTT_MS}\n"
    );
    let mut at = |t_s: u32, up: bool| {
        let _ = writeln!(text, "[[link.at]]\nt_s = {t_s}\nup = {up}");
    };
    for n in 0..SWITCHES {
        at(6 + 8 * n, false);
        at(10 + 8 * n, true);
    }
    let alone = 6 + 8 * SWITCHES;
    for n in 0..SWITCHES {
        at(alone + 4 + 6 * n, false);
        at(alone + 6 + 6 * n, true);
    }
    let _ = writeln!(
        text,
        "[[link]]\nname = \"wwan0\"\nclass = \"metered\"\ndown_mbps = 40\nup_mbps = 40\nrtt_ms = {CELLULAR_RTT_MS}\n\
         [[link.at]]\nt_s = {alone}\nup = false"
    );
    (text, alone + 2 + 6 * SWITCHES)
}

/// The command of `keys.py` with these arguments, the remote program for this many keys, and the
/// command that runs ssh.
fn typing(out: &str, keys: u32, words: &str, run: &str) -> String {
    format!(
        "python3 $AT/keys.py $AT/{out} {keys} {words} -- {run} ssh -F $AT/ssh_config -tt lab \
         'stty raw -echo; echo ready; exec dd bs=1 count={} status=none' 2>$AT/{out}.errors",
        keys + 1
    )
}

/// Our figures and TCP's.
///
/// # Errors
/// There is no lab, or some echoes were missing.
pub fn run(site: &ProgramFolder) -> anyhow::Result<(Value, Value)> {
    let script = format!(
        "{} &\nwaits=$!\nsleep 0.03\n{}\nwait $waits\n",
        typing("direct", KEYS, &format!("{EVERY_S} 0"), ""),
        typing("through", KEYS, &format!("{EVERY_S} {IDLE_S}"), "$RUN"),
    );
    site.lab(PATH, &site.filled(&script, ""))?;
    let (scenario, end_s) = switches();
    let keys = (f64::from(end_s) / EVERY_S) as u32;
    let script = typing(
        "switched",
        keys,
        &format!("{EVERY_S} 0 wlan0,wwan0"),
        "$RUN",
    );
    site.lab(&scenario, &site.filled(&script, ""))?;
    let told = |name: &str| -> anyhow::Result<Value> {
        let errors = || format!("{name}: {}", site.text(&format!("{name}.errors")).trim());
        let told: Value = serde_json::from_str(&site.text(name)).with_context(errors)?;
        anyhow::ensure!(
            told["echoed"] == told["typed"] && told["wrong"] == 0,
            "{name}: {} keys, {} echoes, {} of them wrong",
            told["typed"],
            told["echoed"],
            told["wrong"]
        );
        Ok(told)
    };
    let (direct, through, switched) = (told("direct")?, told("through")?, told("switched")?);
    let (tcp, d2tp) = (latency(&direct), latency(&through));
    let after = FirstEchoDelays::of(&switched);
    let added = |which: &str| Some(d2tp[which].as_f64()? - tcp[which].as_f64()?);
    let ours = json!({
        "echo_ms": d2tp,
        "added_ms": added("p50"),
        "added_p99_ms": added("p99"),
        "first_echo_with_another_ms": SampleSummary::of(after.with_another),
        "first_echo_with_none_ms": SampleSummary::of(after.with_none),
        "switches": 2 * SWITCHES,
        "idle_cpu_ticks": through["idle_ticks"],
        "idle_cpu_ms": through["idle_ms"],
        "settled_cpu_ticks": through["settled_ticks"],
        "settled_cpu_ms": through["settled_ms"],
    });
    Ok((ours, json!({ "echo_ms": tcp })))
}

fn numbers(list: &Value) -> Vec<f64> {
    let all = list.as_array().into_iter().flatten();
    all.filter_map(Value::as_f64).collect()
}

fn latency(told: &Value) -> Value {
    let mut sorted = numbers(&told["ms"]);
    sorted.sort_by(f64::total_cmp);
    // Nearest rank.
    let rank = |share: f64| {
        let nearest = (share * sorted.len() as f64).ceil().max(1.0) as usize;
        sorted.get(nearest - 1).copied()
    };
    json!({ "n": sorted.len(), "p50": rank(0.50), "p99": rank(0.99), "max": sorted.last() })
}

/// The delays of first echoes after switches, in ms.
#[derive(Debug, Default, PartialEq)]
struct FirstEchoDelays {
    /// Wi-Fi was lost while cellular was up.
    with_another: Vec<f64>,
    /// There was no network, and Wi-Fi returned.
    with_none: Vec<f64>,
}

impl FirstEchoDelays {
    fn of(told: &Value) -> FirstEchoDelays {
        let echoes = numbers(&told["echoes"]);
        let mut after = FirstEchoDelays::default();
        let mut cellular = true;
        for change in told["changes"].as_array().into_iter().flatten() {
            let (Some(at), Some(link), Some(up)) =
                (change[0].as_f64(), change[1].as_str(), change[2].as_bool())
            else {
                continue;
            };
            let first = |rtt_ms: f64| {
                let since = echoes.iter().map(|came| 1000.0 * (came - at));
                since.into_iter().find(|ms| *ms > rtt_ms / 2.0)
            };
            match (link, up, cellular) {
                ("wwan0", up, _) => cellular = up,
                ("wlan0", false, true) => after.with_another.extend(first(CELLULAR_RTT_MS)),
                ("wlan0", true, false) => after.with_none.extend(first(WIFI_RTT_MS)),
                _ => {}
            }
        }
        after
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_echo_after_a_switch_is_one_of_the_new_path() {
        let told = json!({
            // The first one arrived by the old path, a moment after it was lost.
            "echoes": [10.005, 10.25, 10.5, 13.08, 13.1],
            "changes": [
                [10.0, "wlan0", false], [11.0, "wlan0", true], [12.0, "wwan0", false],
                [12.5, "wlan0", false], [13.0, "wlan0", true],
            ],
        });
        let FirstEchoDelays {
            with_another,
            with_none,
        } = FirstEchoDelays::of(&told);
        assert_eq!(
            with_another.iter().map(|ms| ms.round()).collect::<Vec<_>>(),
            [250.0]
        );
        assert_eq!(
            with_none.iter().map(|ms| ms.round()).collect::<Vec<_>>(),
            [80.0]
        );
    }

    #[test]
    fn the_scenario_has_as_many_switches_as_it_says() {
        let (text, end_s) = switches();
        let wifi = text.split("wwan0").next().unwrap();
        assert_eq!(wifi.matches("up = false").count(), 2 * SWITCHES as usize);
        assert!(end_s < 300);
    }
}
