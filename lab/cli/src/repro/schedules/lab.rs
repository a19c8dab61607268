//! C4a, C4b, C4c on real sockets: `cedos get` with deadlines, through an agent and each alone.

use super::{CELL, Line, POOR_WIFI, WIFI};
use crate::repro::emulated::commanded_in_lab;
use crate::repro::runner::Measured;
use anyhow::Context;
use d2tp_sched::LinkClass;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

/// Rates are goodput: a full packet of 1,500 bytes has 1,432 bytes of payload.
const PAYLOAD_SHARE: f64 = 1_432.0 / 1_500.0;
const RTT_MS: u64 = 40;
const BYTES: u64 = 100_000_000;
/// The divisor for bytes and times of C4b and C4c.
const SCALE: u64 = 6;
/// How long a run may continue after the last deadline, in seconds, for late downloads.
const SPARE_S: u64 = 420;

/// A batch of downloads: their number, the bytes of each, and their deadline in seconds after the
/// start of the run.
type Batch = (u64, u64, u64);

/// How the downloads are carried.
#[derive(Clone, Copy)]
enum ScheduleTransport {
    /// One agent runs all jobs.
    Agent,
    /// Each job runs in a process of its own, with this scheduler.
    Itself(&'static str),
}

/// The objects differ by a byte, so that no stored copy serves two.
const SCRIPT: &str = r#"
cd "$AT" || exit 1
export HOME="$AT" XDG_STATE_HOME="$AT/state" XDG_CONFIG_HOME="$AT/config"
unset XDG_RUNTIME_DIR CEDOS_PROX http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY
links="--link wlan0*=free --link wwan0*=metered"
if [ "$SCHEDULER" = agent ]; then
    export CEDOS_AGENT="$AT/agent.sock"
    "$CEDOS" agent --no-notifications $links & agent=$!
    tries=0
    until [ -S agent.sock ] || [ $((tries += 1)) -gt 100 ]; do sleep 0.1; done
    how=--detach
else
    export CEDOS_AGENT=none
    how="--alone $links --scheduler $SCHEDULER"
fi
n=0
pids=
while read -r count bytes within; do
    while [ "$count" -gt 0 ]; do
        "$CEDOS" get $how --json --within "${within}s" --prox "$CEDOS_LAB_PROX" -o "$AT/out$n" "$CEDOS_LAB_ORIGIN/bytes/$((bytes + n))" >"told$n" 2>"err$n" & pids="$pids $!"
        n=$((n + 1)); count=$((count - 1))
    done
done <batches
wait $pids
if [ "$SCHEDULER" = agent ]; then
    while [ $((n -= 1)) -ge 0 ]; do
        id=$(sed -n 's/.*"id":\([0-9]*\).*/\1/p' "told$n" | head -n 1)
        "$CEDOS" wait --json "$id" >"told$n" 2>>"err$n"
    done
    kill "$agent"
    wait "$agent"
fi
exit 0
"#;

/// The result of a run.
struct LabScheduleEnd {
    met: u64,
    wifi: f64,
    all: f64,
}

impl LabScheduleEnd {
    fn figures(&self) -> Value {
        json!({ "met": self.met, "wifi_percent": 100.0 * self.wifi / self.all.max(1.0) })
    }
}

fn scenario(lines: &[Line], last_s: u64) -> String {
    let duration_s = last_s + SPARE_S;
    let mut text = format!("seed = 1\nduration_s = {duration_s}\norigin = \"builtin\"\n");
    for line in lines {
        let (name, more) = match line.class {
            LinkClass::Free => ("wlan0", ""),
            _ => ("wwan0", "class = \"metered\"\n"),
        };
        let mbps = line.mbps / PAYLOAD_SHARE;
        let _ = write!(
            text,
            "[[link]]\nname = \"{name}\"\ndown_mbps = {mbps:.4}\nup_mbps = 2\nrtt_ms = {RTT_MS}\n{more}"
        );
    }
    text
}

/// Runs batches of downloads over links.
fn carried(
    lines: &[Line],
    batches: &[Batch],
    by: ScheduleTransport,
) -> anyhow::Result<LabScheduleEnd> {
    let folder = tempfile::tempdir()?;
    let at = folder.path();
    let told = |(count, bytes, within_s): &Batch| format!("{count} {bytes} {within_s}\n");
    fs::write(
        at.join("batches"),
        batches.iter().map(told).collect::<String>(),
    )?;
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let variables = [
        ("AT", at.display().to_string()),
        ("CEDOS", program.display().to_string()),
        (
            "SCHEDULER",
            match by {
                ScheduleTransport::Agent => "agent".to_owned(),
                ScheduleTransport::Itself(scheduler) => scheduler.to_owned(),
            },
        ),
    ];
    let last_s = batches.iter().map(|batch| batch.2).max().unwrap_or(0);
    commanded_in_lab(&scenario(lines, last_s), SCRIPT, &variables)?;
    let count = batches.iter().map(|batch| batch.0).sum();
    ended(at, count)
}

fn ended(at: &Path, count: u64) -> anyhow::Result<LabScheduleEnd> {
    let mut ended = LabScheduleEnd {
        met: 0,
        wifi: 0.0,
        all: 0.0,
    };
    for n in 0..count {
        let told = fs::read_to_string(at.join(format!("told{n}"))).unwrap_or_default();
        let last = told.lines().next_back().unwrap_or_default();
        // A download that was still running at the end of the run has reported no result.
        let report: Value = serde_json::from_str(last).unwrap_or_default();
        let of = |link: &str| report["bytes_by_link"][link].as_f64().unwrap_or(0.0);
        ended.met += u64::from(report["deadline_met"] == true && report["event"] == "done");
        ended.wifi += of("wlan0");
        ended.all += of("wlan0") + of("wwan0");
    }
    Ok(ended)
}

/// Runs several at once, each in a separate lab.
fn beside(
    lines: &[Line],
    batches: &[Batch],
    ways: [ScheduleTransport; 2],
) -> anyhow::Result<[LabScheduleEnd; 2]> {
    let [first, second] = std::thread::scope(|scope| {
        ways.map(|by| scope.spawn(move || carried(lines, batches, by)))
            .map(|run| run.join().expect("a run does not panic"))
    });
    Ok([first?, second?])
}

/// Runs C4a in real time.
pub fn poor_wifi() -> anyhow::Result<Measured> {
    let lines = [POOR_WIFI, CELL];
    let [both, one] = beside(
        &lines,
        &[(1, BYTES, 300)],
        [
            ScheduleTransport::Itself("d2sched"),
            ScheduleTransport::Itself("algorithm-1"),
        ],
    )?;
    let ours = json!({
        "one_link_at_a_time": one.figures(),
        "both_links": both.figures(),
    });
    let baseline = json!({
        "optimum": { "one_link_at_a_time_percent": 15.6, "both_links_percent": 30.0 },
    });
    Ok(Measured::figures(ours, baseline, 1))
}

/// Runs C4b in real time, scaled.
pub fn cellular_alone() -> anyhow::Result<Measured> {
    contended(&[CELL], &[(10, BYTES / SCALE, 1_800 / SCALE)])
}

/// Runs C4c in real time, scaled.
pub fn one_urgent() -> anyhow::Result<Measured> {
    let within = [1_800 / SCALE, 300 / SCALE];
    contended(
        &[WIFI],
        &[(9, BYTES / SCALE, within[0]), (1, BYTES / SCALE, within[1])],
    )
}

fn contended(lines: &[Line], batches: &[Batch]) -> anyhow::Result<Measured> {
    let [together, alone] = beside(
        lines,
        batches,
        [
            ScheduleTransport::Agent,
            ScheduleTransport::Itself("algorithm-1"),
        ],
    )?;
    let ours = json!({ "together": together.figures() });
    let baseline = json!({ "each_by_itself": alone.figures() });
    Ok(Measured::figures(ours, baseline, 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cedos_lab_scenario::Scenario;

    #[test]
    fn links_are_the_papers_and_only_reports_of_an_end_in_time_count() {
        let text = scenario(&[POOR_WIFI, CELL], 300);
        let scenario = Scenario::parse("C4a", &text, &mut |_| unreachable!()).unwrap();
        assert_eq!(scenario.links.len(), 2);
        let folder = tempfile::tempdir().unwrap();
        let told = [
            r#"{"event":"done","deadline_met":true,"bytes_by_link":{"wlan0":10,"wwan0":30}}"#,
            r#"{"event":"done","deadline_met":false,"bytes_by_link":{"wwan0":60}}"#,
            r#"{"event":"progress"}"#,
        ];
        for (n, told) in told.iter().enumerate() {
            fs::write(folder.path().join(format!("told{n}")), told).unwrap();
        }
        let ended = ended(folder.path(), 4).unwrap();
        assert_eq!((ended.met, ended.wifi, ended.all), (1, 10.0, 100.0));
    }
}
