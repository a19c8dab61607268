//! A policy that changes during a transfer: `cedos edit` of a download at an agent, from
//! `free-only` to `any` and back. The bytes on the metered link are counted at the interface.
//!
//! ```text
//!        0        14                               45
//!  wlan0 ├─────────┤                                ├───────
//!  wwan0               ├──────────┤
//!        free-only  20 ▲ any   30 ▲ free-only
//! ```
//!
//! `any` pays only if no free link works, so Wi-Fi is off meanwhile.

use super::disturbance::{Disturbance, SEED};
use crate::repro::emulated::commanded_in_lab;
use anyhow::{Context, ensure};
use cedos_lab_scenario::content;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// The size of the download in bytes: more than the links carry before Wi-Fi is back.
const BYTES: u64 = 8_000_000;
/// When Wi-Fi is lost, in seconds.
const GOES_S: u32 = 14;
/// When the policy `any` is set, in seconds.
const ANY_AT_S: u32 = 20;
/// When the policy `free-only` is set, in seconds.
const FREE_ONLY_AT_S: u32 = 30;
/// When Wi-Fi is back, in seconds.
const BACK_S: u32 = 45;
/// When the run ends at the latest, in seconds.
const DURATION_S: u32 = 150;
/// From this number of bytes since the policy changed, payload is moving: a handshake is smaller.
const FLOWS_BYTES: f64 = 20_000.0;
/// From this number of bytes between two readings of the counters, payload is moving: ACKs and
/// probes are smaller.
const LOOK_BYTES: f64 = 3_000.0;
/// The time in seconds after which granted bytes and bytes in flight have arrived.
const SETTLED_S: f64 = 2.0;

const SCRIPT: &str = r#"
cd "$AT" || exit 1
export HOME="$AT" XDG_STATE_HOME="$AT/state" XDG_CONFIG_HOME="$AT/config" CEDOS_AGENT="$AT/agent.sock"
unset XDG_RUNTIME_DIR CEDOS_PROX http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY
now() { date +%s.%N; }
begun=$(now)
until_s() { sleep "$(echo "$1 $begun $(now)" | awk '{ t = $1 - ($3 - $2); print (t > 0) ? t : 0 }')"; }
edit() { echo "$1 $(now)" >>asked; "$CEDOS" edit "$id" --policy "$1"; }
"$CEDOS" agent --no-notifications --link wlan0=free --link wwan0=metered & agent=$!
tries=0
until [ -S agent.sock ] || [ $((tries += 1)) -gt 100 ]; do sleep 0.1; done
while :; do
    echo "$(now) $(awk '{ sub(":", " ") } $1 == "wwan0" { print $2 }' /proc/net/dev)"; sleep 0.05
done >counted & counting=$!
id=$("$CEDOS" get --detach --json --policy free-only --prox "$CEDOS_LAB_PROX" -o "$AT/out" "$CEDOS_LAB_ORIGIN/bytes/$BYTES" | sed -n 's/.*"id":\([0-9]*\).*/\1/p' | head -n 1)
until_s "$ANY_AT_S"
edit any
until_s "$FREE_ONLY_AT_S"
edit free-only
"$CEDOS" wait "$id"
kill $counting $agent
sha256sum <out | cut -d' ' -f1 >digest
wait
exit 0
"#;

/// Runs the measurement, in `folder`.
///
/// # Errors
/// There is no lab, or the download was not followed to its end.
pub fn run(folder: &Path) -> anyhow::Result<Value> {
    let at = folder.join("policy");
    fs::create_dir(&at)?;
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let variables = [
        ("AT", at.display().to_string()),
        ("CEDOS", program.display().to_string()),
        ("BYTES", BYTES.to_string()),
        ("ANY_AT_S", ANY_AT_S.to_string()),
        ("FREE_ONLY_AT_S", FREE_ONLY_AT_S.to_string()),
    ];
    let scenario = Disturbance::Cellular.scenario(GOES_S, BACK_S - GOES_S, DURATION_S);
    commanded_in_lab(&scenario, SCRIPT, &variables)?;
    let read = |name: &str| fs::read_to_string(at.join(name)).unwrap_or_default();
    let right = read("digest").trim() == hex::encode(content::sha256(SEED, BYTES));
    figures(&read("asked"), &read("counted"), right)
}

/// Computes the figures from the times of the policy changes and the readings of the metered link's
/// counter.
fn figures(asked: &str, counted: &str, right: bool) -> anyhow::Result<Value> {
    let asked: Vec<f64> = asked
        .lines()
        .filter_map(|line| line.split(' ').nth(1)?.parse().ok())
        .collect();
    let counted: Vec<(f64, f64)> = counted
        .lines()
        .filter_map(|line| {
            let (at, bytes) = line.split_once(' ')?;
            Some((at.parse().ok()?, bytes.parse().ok()?))
        })
        .collect();
    ensure!(asked.len() == 2, "the policy was not changed twice");
    let (any, free_only) = (asked[0], asked[1]);
    let end = free_only + f64::from(BACK_S - FREE_ONLY_AT_S);
    let carried_at = |at: f64| counted.iter().rfind(|(t, _)| *t <= at).map(|(_, b)| *b);
    let carried = |from: f64, to: f64| Some(carried_at(to)? - carried_at(from)?);
    let first = counted.first().context("nothing was counted")?.0;
    let since = carried_at(any).context("nothing was counted before")?;
    let flows = counted
        .iter()
        .find(|(at, bytes)| *at > any && bytes - since > FLOWS_BYTES);
    let last = counted
        .windows(2)
        .rfind(|pair| (free_only..end).contains(&pair[1].0) && pair[1].1 - pair[0].1 > LOOK_BYTES);
    Ok(json!({
        "right": right,
        "before_bytes": carried(first, any),
        "to_any_s": flows.map(|(at, _)| at - any),
        "any_bytes": carried(any, free_only),
        "to_free_only_s": last.map_or(0.0, |pair| pair[1].0 - free_only),
        "free_only_bytes": carried(free_only, end),
        "settled_bytes": carried(free_only + SETTLED_S, end),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test input: 0 until 10.4 s, then 25,000 bytes each tenth of a second until `until`.
    fn counted(until: f64) -> String {
        let line = |n: u32| {
            let at = f64::from(n) / 10.0;
            let bytes = ((at.min(until) - 10.4).max(0.0) * 250_000.0).round();
            format!("{at} {bytes}\n")
        };
        (50..350).map(line).collect()
    }

    #[test]
    fn how_long_a_policy_takes_to_hold_is_read_off_the_counters() {
        let asked = "any 10\nfree-only 15\n";
        let told = figures(asked, &counted(15.5), true).unwrap();
        let s = |key: &str| (told[key].as_f64().unwrap() * 1000.0).round() / 1000.0;
        assert_eq!((s("to_any_s"), s("to_free_only_s")), (0.5, 0.5));
        assert_eq!((s("before_bytes"), s("settled_bytes")), (0.0, 0.0));
        let never_back = figures(asked, &counted(30.0), true).unwrap();
        assert!(never_back["to_free_only_s"].as_f64() > Some(7.0));
        assert!(never_back["settled_bytes"].as_f64() > Some(1e6));
        assert!(figures("any 10\n", &counted(15.0), true).is_err());
    }
}
