//! C5: the power of waiting for Wi-Fi: kept awake, with scans at a fixed interval, and with D-Lock.
//!
//! ```text
//!  WakePlanner (core/sched) ─▶ lab/sim waiting.rs ─▶ scans, found, missed ─▶ lab/energy Phone ─▶ milliwatts
//! ```

use super::runner::Measured;
use cedos_lab_energy::{Phone, Span, Time, phones};
use cedos_lab_scenario::SampleSummary;
use cedos_lab_sim::waiting::{WifiPeriod, WifiWaitResult, draw, wait};
use d2tp_sched::ScanPeriods;
use serde_json::{Map, Value, json};

const DAY: Span = Span::from_secs(86_400);
/// The interval at which the paper's phone scans while it is kept awake.
const HELD_SCAN: Span = Span::from_secs(120);
/// The paper's intervals, in minutes.
const MINUTES: [u64; 6] = [1, 2, 3, 4, 5, 10];
/// The number of simulated days with Wi-Fi.
const SEEDS: u64 = 200;

/// The mean length of stays. // Lee et al., CoNEXT 2010: two hours
const STAY: Span = Span::from_secs(7_200);
/// The mean length of gaps between stays. // Lee et al., CoNEXT 2010: 40 minutes
const GAP: Span = Span::from_secs(2_400);
/// The longest stay: a night at home. // a guess
const LONGEST: Span = Span::from_secs(12 * 3_600);

/// Runs the row in virtual time.
pub fn simulate() -> anyhow::Result<Measured> {
    let end = Time::ZERO + DAY;
    let fixed = |minutes: u64| ScanPeriods::fixed(Span::from_secs(60 * minutes));
    let mut ours = Map::new();
    let figures_of = |phone: Phone| {
        let mut figures = Map::new();
        figures.insert("asleep_mw".into(), json!(phone.asleep_milliwatts));
        figures.insert("held_mw".into(), json!(phone.held_milliwatts(HELD_SCAN)));
        figures.insert("look_mj".into(), json!(1e3 * phone.look_joules()));
        for minutes in MINUTES {
            let looks = wait(&[], end, fixed(minutes)).looks.len() as u64;
            let mean = phone.looking_milliwatts(looks, DAY);
            figures.insert(format!("every_{minutes}_min_mw"), json!(mean));
        }
        let looks = wait(&[], end, ScanPeriods::DEFAULT).looks.len() as u64;
        figures.insert(
            "d_lock_mw".into(),
            json!(phone.looking_milliwatts(looks, DAY)),
        );
        Value::Object(figures)
    };
    ours.insert("galaxy_s3".into(), figures_of(phones::GALAXY_S3));
    // One figure changed at a time: what the result depends on.
    let variations = phones::VARIATIONS.map(|(name, phone)| (name.to_owned(), figures_of(phone)));
    ours.insert(
        "sensitivity".into(),
        Value::Object(Map::from_iter(variations)),
    );
    let days: Vec<Vec<WifiPeriod>> = (0..SEEDS)
        .map(|seed| draw(seed, STAY, GAP, LONGEST, end))
        .collect();
    let mut on_days = Map::new();
    for minutes in MINUTES {
        let name = format!("every_{minutes}_min");
        on_days.insert(name, on_days_of(&days, end, fixed(minutes)));
    }
    on_days.insert(
        "d_lock".into(),
        on_days_of(&days, end, ScanPeriods::DEFAULT),
    );
    ours.insert("days".into(), Value::Object(on_days));
    let baseline = json!({ "paper": {
        "asleep_mw": 43.0, "held_mw": 231.9,
        "every_1_min_mw": 231.9 / 3.4, "every_2_min_mw": 55.1,
    } });
    let seeds = days.len();
    Ok(Measured::figures(Value::Object(ours), baseline, seeds))
}

/// The results of days with Wi-Fi on the phone for the marks.
fn on_days_of(days: &[Vec<WifiPeriod>], end: Time, periods: ScanPeriods) -> Value {
    let waited: Vec<WifiWaitResult> = days.iter().map(|stays| wait(stays, end, periods)).collect();
    let sum = |of: &dyn Fn(&WifiWaitResult) -> f64| waited.iter().map(of).sum::<f64>();
    let held = sum(&|w| w.held.as_secs_f64());
    let missed = sum(&|w| w.missed.as_secs_f64());
    let looks = sum(&|w| w.looks.len() as f64);
    let asleep = DAY.as_secs_f64() * days.len() as f64 - held;
    let found = waited.iter().flat_map(|w| &w.found_after);
    json!({
        "looking_mw": phones::GALAXY_S3.looking_milliwatts(looks as u64, Span::from_secs_f64(asleep)),
        "looks_per_hour": looks / (asleep / 3_600.0),
        "missed_percent": 100.0 * missed / (held + missed),
        "unseen_stays": sum(&|w| w.unseen as f64) / days.len() as f64,
        "found_after_s": SampleSummary::of(found.map(|span| span.as_secs_f64())),
    })
}
