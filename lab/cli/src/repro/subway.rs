//! C7: a film on a subway, with Wi-Fi at some stations, and LTE for the rest.
//!
//! ```text
//!  wlan0   ├─ dead ─┤     ├ dead ┼ carries ┤     ├─ dead ─┤        44 stops, 22 stations in both directions
//!          0      56.4  116.7  138.7     173.1 233.4                9 of them carry (3 without rescan)
//!  wwan0   ────────────────────────────────────────────────
//! ```
//!
//! The optimum knows everything beforehand: it uses all that Wi-Fi carries, and pays only for what
//! the film would otherwise lack.

use super::over_seeds;
use super::runner::Measured;
use anyhow::{Context, anyhow, ensure};
use cedos_lab_link::trace::CSV_HEADER;
use cedos_lab_scenario::{Scenario, ScenarioFault};
use cedos_lab_sim::{ViewerConfig, ViewingReport};
use cedos_terminal::print_stderr;
use d2tp_sched::{RefillThresholds, SwitchDelay};
use rand::SeedableRng as _;
use rand::seq::SliceRandom as _;
use rand_pcg::Pcg32;
use serde_json::{Map, Value, json};
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write as _};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Values from the paper.
const STOPS: usize = 44;
const STAY_S: f64 = 56.4;
const GAP_S: f64 = 60.3;
const CARRIES_S: f64 = 34.4;
const WIFI_MBPS: f64 = 6.29;
const WIFI_RTT_MS: f64 = 13.7;
const LTE_RTT_MS: f64 = 42.9;
const LOW_BYTES: u64 = 200_000;
const HIGH_BYTES: u64 = 3_000_000;
/// LTE's rate in the paper's experiments with deadlines; it states none for this one.
const LTE_MBPS: f64 = 4.7;
/// The interface takes 0.3 s, and the path one round trip each for the challenge and the first
/// packet.
const SWITCHING: SwitchDelay = SwitchDelay {
    interface: Duration::from_millis(300),
    challenge: Duration::from_millis(43),
    first_packet: Duration::from_millis(43),
};

/// The payload share of a full packet of 1,500 bytes, without IP, UDP and D2TP.
const PAYLOAD_SHARE: f64 = 1_432.0 / 1_500.0;

/// The stops at which Wi-Fi carries data, distributed over the trip by a seed.
#[derive(Clone, Debug)]
struct SubwayTrip {
    /// When Wi-Fi carries data: from, to, in seconds.
    carries: Vec<(f64, f64)>,
    ends_s: f64,
}

impl SubwayTrip {
    /// A trip with data at `live` of its stops.
    fn new(live: usize, seed: u64) -> SubwayTrip {
        let mut stops: Vec<usize> = (0..STOPS).collect();
        stops.shuffle(&mut Pcg32::seed_from_u64(seed));
        let mut carrying = stops[..live].to_vec();
        carrying.sort_unstable();
        let carries = carrying.iter().map(|stop| {
            let leaves = *stop as f64 * (STAY_S + GAP_S) + STAY_S;
            (leaves - CARRIES_S, leaves)
        });
        SubwayTrip {
            carries: carries.collect(),
            ends_s: STOPS as f64 * STAY_S + (STOPS - 1) as f64 * GAP_S,
        }
    }

    /// The bytes that Wi-Fi can have carried by this time.
    fn wifi_bytes(&self, by_s: f64) -> f64 {
        let shared = |(from, to): &(f64, f64)| (by_s.min(*to) - from).max(0.0);
        self.carries.iter().map(shared).sum::<f64>() * WIFI_MBPS * 1e6 / 8.0
    }

    /// The least that must be paid for `bytes` at `rate`, played from `begins_s` on without a
    /// stall.
    fn optimum_paid(&self, bytes: f64, rate: f64, begins_s: f64) -> f64 {
        let short = |at_s: f64| {
            let shown = ((at_s - begins_s).max(0.0) * rate).min(bytes);
            shown - self.wifi_bytes(at_s)
        };
        // The buffer is lowest just before Wi-Fi begins to carry, and at the end.
        let begins = self.carries.iter().map(|(from, _)| *from);
        begins
            .chain([begins_s + bytes / rate])
            .map(short)
            .fold(0.0, f64::max)
    }

    /// The trip as a trace of both links.
    fn trace(&self) -> String {
        let mut text = format!("{CSV_HEADER}\n");
        let rate = WIFI_MBPS / PAYLOAD_SHARE;
        let mut row = |at: f64, up: u8, loss: &str| {
            let _ = writeln!(text, "{at:.3},wlan0,{up},{rate:.3},3,{WIFI_RTT_MS},{loss}");
        };
        for stop in 0..STOPS {
            let comes = stop as f64 * (STAY_S + GAP_S);
            let leaves = comes + STAY_S;
            row(comes, 1, "1");
            if let Some((from, _)) = self.carries.iter().find(|(_, to)| *to == leaves) {
                // The device has left the access point for one that works.
                row(from - 0.01, 0, "1");
                row(*from, 1, "0");
            }
            row(leaves, 0, "1");
        }
        text
    }
}

/// The result of one film on one trip.
struct Film {
    name: &'static str,
    kbps: u64,
    live: usize,
}

const fn film(name: &'static str, kbps: u64, live: usize) -> Film {
    Film { name, kbps, live }
}

const FILMS: [Film; 4] = [
    film("640_rescan", 640, 9),
    film("780_rescan", 780, 9),
    film("640_no_rescan", 640, 3),
    film("780_no_rescan", 780, 3),
];

/// The variants whose buffer levels are drawn.
const DRAWN: [&str; 3] = ["640_rescan", "780_rescan", "780_no_rescan"];

/// The seeds of trips.
const SEEDS: std::ops::RangeInclusive<u64> = 1..=10;

/// Runs whole trips in virtual time, one for each seed. Drawn is the first one.
pub fn simulate() -> anyhow::Result<Measured> {
    let mut levels = Map::new();
    let each = SEEDS.map(|seed| trip(seed, &mut levels));
    let mut measured = over_seeds::combined(each.collect::<anyhow::Result<_>>()?);
    measured.ours["levels"] = Value::Object(levels);
    Ok(measured)
}

/// Runs a trip with each film, and adds what is drawn of it to `levels` unless it is there already.
fn trip(seed: u64, levels: &mut Map<String, Value>) -> anyhow::Result<Measured> {
    let mut ours = Map::new();
    for film in &FILMS {
        let (figures, watched) = watch(film, seed)?;
        if !levels.contains_key(film.name) && DRAWN.contains(&film.name) {
            let every = watched.levels.iter().step_by(10);
            let points: Vec<(f64, f64)> =
                every.map(|(t, bytes)| (*t, *bytes as f64 * 1e-6)).collect();
            levels.insert(film.name.to_owned(), json!(points));
        }
        ours.insert(film.name.to_owned(), figures);
    }
    Ok(Measured::figures(Value::Object(ours), Value::Null, 1))
}

fn watch(film: &Film, seed: u64) -> anyhow::Result<(Value, ViewingReport)> {
    let trip = SubwayTrip::new(film.live, seed);
    let rate = film.kbps * 125;
    let bytes = (trip.ends_s * rate as f64) as u64;
    let text = format!(
        r#"
seed = 7
duration_s = {duration}
[[link]]
name = "wlan0"
trace = "trip.csv"
trace_iface = "wlan0"
[[link]]
name = "wwan0"
class = "metered"
down_mbps = {lte}
up_mbps = 2
rtt_ms = {LTE_RTT_MS}
[[flow]]
bytes = {bytes}
"#,
        duration = trip.ends_s + 60.0,
        lte = LTE_MBPS / PAYLOAD_SHARE,
    );
    let csv = trip.trace();
    let scenario = Scenario::parse("C7", &text, &mut |name| match name {
        "trip.csv" => Ok(csv.clone()),
        _ => Err(ScenarioFault {
            file: name.to_owned(),
            fault: "this scenario reads one trace".to_owned(),
        }),
    })?;
    let watching = ViewerConfig {
        bytes_per_s: rate,
        thresholds: RefillThresholds {
            low_bytes: LOW_BYTES,
            high_bytes: HIGH_BYTES,
        },
        switching: SWITCHING,
    };
    let (outcome, watched) = cedos_lab_sim::run_viewed(&scenario, watching)?;
    let flow = outcome.report.flows.first().context("there is a flow")?;
    let of = |link: &str| flow.bytes_by_link.get(link).copied().unwrap_or(0) as f64;
    let (wifi, lte) = (of("wlan0"), of("wwan0"));
    let begun_s = watched.begun_s.context("nothing was shown")?;
    ensure!(flow.bytes == bytes, "{} of {bytes} bytes came", flow.bytes);
    let paid = trip.optimum_paid(bytes as f64, rate as f64, begun_s);
    let optimum = 1.0 - paid / bytes as f64;
    let share = wifi / (wifi + lte);
    let figures = json!({
        "wifi_share": share,
        "optimum_share": optimum,
        "of_optimum": share / optimum,
        "pauses": watched.pauses,
        "paused_s": watched.paused_s,
        "begun_s": begun_s,
        "wifi_mb": wifi * 1e-6,
        "lte_mb": lte * 1e-6,
        "duplicate_mb": flow.duplicate_bytes as f64 * 1e-6,
    });
    Ok((figures, watched))
}

/// The lab's trip: all times are divided by this, with five stops, the second of which carries
/// data.
const LAB_SCALE: f64 = 4.0;
const LAB_STOPS: usize = 5;
const LAB_LIVE: usize = 1;
const LAB_KBPS: u64 = 640;
/// The sample rate at which ffmpeg reads bytes at 640 kb/s, as stereo sound with 16 bits.
const LAB_SAMPLES_PER_S: u64 = LAB_KBPS * 125 / 4;
/// How long ffmpeg may take to start, in seconds.
const LAB_SPARE_S: f64 = 20.0;
/// ffmpeg reports its position twice a second; it counts as late if it is this far behind the
/// clock. // a guess
const LATE_S: f64 = 1.0;

/// Measures the row on real sockets: ffmpeg reads the URL of `cedos play` at the film's rate.
pub fn emulate() -> anyhow::Result<Measured> {
    let stay_s = STAY_S / LAB_SCALE;
    let gap_s = GAP_S / LAB_SCALE;
    let carries_s = CARRIES_S / LAB_SCALE;
    let leaves_s = LAB_LIVE as f64 * (stay_s + gap_s) + stay_s;
    let trip = SubwayTrip {
        carries: vec![(leaves_s - carries_s, leaves_s)],
        ends_s: LAB_STOPS as f64 * stay_s + (LAB_STOPS - 1) as f64 * gap_s,
    };
    let rate = LAB_KBPS * 125;
    let bytes = (trip.ends_s * rate as f64) as u64;
    let mut changes = String::new();
    for stop in 0..LAB_STOPS {
        let comes = stop as f64 * (stay_s + gap_s);
        let _ = writeln!(
            changes,
            "[[link.at]]\nt_s = {comes:.3}\nup = true\ndead = true"
        );
        if stop == LAB_LIVE {
            let from = leaves_s - carries_s;
            let left = from - 0.2;
            let _ = writeln!(changes, "[[link.at]]\nt_s = {left:.3}\nup = false");
            let _ = writeln!(
                changes,
                "[[link.at]]\nt_s = {from:.3}\nup = true\ndead = false"
            );
        }
        let leaves = comes + stay_s;
        let _ = writeln!(changes, "[[link.at]]\nt_s = {leaves:.3}\nup = false");
    }
    let scenario = format!(
        r#"
duration_s = {duration:.0}
[[link]]
name = "wlan0"
up = false
down_mbps = {wifi:.3}
up_mbps = 3
rtt_ms = {WIFI_RTT_MS}
{changes}
[[link]]
name = "wwan0"
class = "metered"
down_mbps = {lte:.3}
up_mbps = 2
rtt_ms = {LTE_RTT_MS}
"#,
        duration = trip.ends_s + LAB_SPARE_S,
        wifi = WIFI_MBPS / PAYLOAD_SHARE,
        lte = LTE_MBPS / PAYLOAD_SHARE,
    );
    let high = HIGH_BYTES / LAB_SCALE as u64;
    let played = play(&scenario, bytes, high)?;
    let of = |link: &str| played.carried[link].as_f64().unwrap_or(0.0);
    let (wifi, lte) = (of("wlan0"), of("wwan0"));
    let paid = trip.optimum_paid(bytes as f64, rate as f64, played.begun_s);
    let optimum = 1.0 - paid / bytes as f64;
    let share = wifi / (wifi + lte);
    let ours = json!({
        "wifi_share": share,
        "optimum_share": optimum,
        "of_optimum": share / optimum,
        "shown_s": played.shown_s,
        "late_max_s": played.late_max_s,
        "stalls": u64::from(played.late_max_s > LATE_S),
        "wifi_mb": wifi * 1e-6,
        "lte_mb": lte * 1e-6,
    });
    let mut measured = Measured::figures(ours, Value::Null, 1);
    let all_s = bytes as f64 / rate as f64 - LATE_S;
    measured.mark.push(format!("shown_s >= {all_s:.1}"));
    Ok(measured)
}

/// The result of a player.
struct SubwayPlayback {
    /// When playback began, in seconds of the run, approximately.
    begun_s: f64,
    shown_s: f64,
    late_max_s: f64,
    /// Payload bytes by link.
    carried: Value,
}

/// Makes ffmpeg on the lab's device play this many bytes by `cedos play`.
fn play(scenario: &str, bytes: u64, high: u64) -> anyhow::Result<SubwayPlayback> {
    let mut file = tempfile::Builder::new().suffix(".toml").tempfile()?;
    file.write_all(scenario.as_bytes())?;
    let store = tempfile::tempdir()?;
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let player = format!(
        "exec \"$0\" play --json --bitrate {LAB_KBPS}k --low {LOW_BYTES} --high {high} --store \"$1\" \
         --prox \"$CEDOS_LAB_PROX\" --link wlan0*=free --link wwan0*=metered \
         \"$CEDOS_LAB_ORIGIN/bytes/{bytes}\" -- ffmpeg -loglevel error -nostats -nostdin \
         -progress pipe:2 -stats_period 0.5 -re -f s16le -ar {LAB_SAMPLES_PER_S} -ac 2 -i {{}} -f null -"
    );
    let mut child = Command::new(&program)
        .args(["lab", "run", "--json"])
        .arg(file.path())
        .args(["--", "sh", "-c", &player])
        .arg(&program)
        .arg(store.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("`cedos lab run` cannot be run")?;
    let said = BufReader::new(child.stderr.take().context("its words")?);
    let shows = std::thread::spawn(move || {
        let mut shows: Vec<(Instant, f64)> = Vec::new();
        for line in said.lines().map_while(Result::ok) {
            match line
                .strip_prefix("out_time_us=")
                .and_then(|us| us.parse::<f64>().ok())
            {
                Some(us) => shows.push((Instant::now(), us * 1e-6)),
                None if line.contains('=') => {}
                None => print_stderr(&line),
            }
        }
        shows
    });
    let mut carried = Value::Null;
    let mut begun_s = None;
    let told = BufReader::new(child.stdout.take().context("its report")?);
    for line in told.lines() {
        let Ok(event) = serde_json::from_str::<Value>(&line?) else {
            continue;
        };
        let stream = &event["streams"][0];
        if begun_s.is_none() && stream["ahead_bytes"].as_u64() > Some(LAB_KBPS * 125) {
            begun_s = event["t_s"].as_f64();
        }
        if event["event"] == "ended" {
            carried = event["bytes_by_link"].clone();
        }
    }
    child.wait()?;
    let shows = shows
        .join()
        .map_err(|_| anyhow!("nobody read what ffmpeg said"))?;
    let (first_at, first_s) = *shows
        .first()
        .context("ffmpeg showed nothing; is it installed?")?;
    let late = shows
        .iter()
        .map(|(at, shown_s)| (*at - first_at).as_secs_f64() - (shown_s - first_s));
    Ok(SubwayPlayback {
        begun_s: begun_s.context("nothing came")?,
        shown_s: shows.last().map_or(0.0, |(_, shown_s)| *shown_s),
        late_max_s: late.fold(0.0, f64::max),
        carried,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_optimum_pays_for_what_wifi_cannot_have_brought_in_time() {
        let trip = SubwayTrip {
            carries: vec![(100.0, 110.0)],
            ends_s: 200.0,
        };
        // 10 s of Wi-Fi are 7.8625 MB.
        let rate = 100_000.0;
        assert!((trip.wifi_bytes(105.0) - 3_931_250.0).abs() < 1.0);
        // 20 MB in 200 s: 12.1 MB more than Wi-Fi carries by the end.
        let paid = trip.optimum_paid(2e7, rate, 0.0);
        assert!((paid - 12_137_500.0).abs() < 1.0, "{paid}");
        // 11 MB in 110 s, 10 MB of them before Wi-Fi is available.
        let paid = trip.optimum_paid(1.1e7, rate, 0.0);
        assert!((paid - 1e7).abs() < 1.0, "{paid}");
    }

    #[test]
    fn a_trip_has_as_many_live_stops_as_it_says() {
        let trip = SubwayTrip::new(9, 1);
        let sum: f64 = trip.carries.iter().map(|(from, to)| to - from).sum();
        assert!((sum - 9.0 * CARRIES_S).abs() < 1e-6);
        assert_ne!(trip.carries, SubwayTrip::new(9, 2).carries);
        assert!(trip.carries.iter().all(|(_, to)| *to <= trip.ends_s));
    }
}
