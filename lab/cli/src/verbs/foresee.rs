//! `cedos sim foresee TRIP…`: prediction of outages on a route that is travelled repeatedly.

use anyhow::{Context, bail};
use cedos_lab_link::trace::{Trace, TraceRow};
use cedos_lab_sim::foresight::{HoleForecast, best_constant_error, median, play};
use cedos_lab_sim::route::{TERRAINS, TransitRoute, to_csv};
use cedos_terminal::print_stdout;
use clap::Args;
use d2tp_session::Span;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::ExitCode;

/// Assumed round trips of the links to which a device might switch.
pub const ROUND_TRIPS: [Span; 2] = [Span::from_secs(2), Span::from_secs(5)];
/// The error limits in seconds for which the share of predicted outages is counted.
pub const WITHIN_S: [f64; 8] = [0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0];

/// Play recordings of the same route, in the order given, and predict holes; holes count from the second trip on.
///
/// CSV traces as for `cedos sim score`, with one more column `pos_m`: the position along the route in metres.
/// Without it, all holes count as beginning at one place. With `--make` trips are made instead, like those
/// of `cedos repro E3`.
#[derive(Debug, Args)]
pub struct ForeseeArgs {
    /// Recorded trips to play.
    trips: Vec<PathBuf>,
    /// The link of the trips that is forecast.
    #[arg(long, default_value = "wifi")]
    iface: String,
    /// Write trips of this terrain here instead, and play nothing.
    #[arg(
        long,
        value_name = "TERRAIN",
        requires = "into",
        conflicts_with = "trips"
    )]
    make: Option<String>,
    /// The folder for them, made if it is not there.
    #[arg(long, value_name = "FOLDER")]
    into: Option<PathBuf>,
    /// How many holes and trips are made.
    #[arg(long, default_value_t = 25)]
    holes: usize,
    /// The number of holes.
    #[arg(long, default_value_t = 10)]
    count: u64,
    /// Which route is made.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Carries out `cedos sim foresee`. Prints one JSON object.
///
/// # Errors
/// A trip cannot be read or written.
pub fn run(args: &ForeseeArgs) -> anyhow::Result<ExitCode> {
    if let (Some(terrain), Some(folder)) = (&args.make, &args.into) {
        let terrain = TERRAINS.into_iter().find(|known| known.name == terrain);
        let known = TERRAINS.map(|terrain| terrain.name).join(", ");
        let terrain = terrain.with_context(|| format!("terrains are {known}"))?;
        let route = TransitRoute::draw(terrain, args.holes, args.seed);
        let made = std::fs::create_dir_all(folder);
        made.with_context(|| format!("cannot make {}", folder.display()))?;
        for trip in 0..args.count {
            let file = folder.join(format!("{}-{}-trip{trip}.csv", terrain.name, args.seed));
            let written = std::fs::write(&file, to_csv(&route.trip(trip)));
            written.with_context(|| format!("cannot write {}", file.display()))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut trips: Vec<Vec<TraceRow>> = Vec::new();
    for file in &args.trips {
        let shown = file.display();
        let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {shown}"))?;
        let trace = Trace::from_csv(&text).with_context(|| format!("{shown}"))?;
        let rows = trace.rows(&args.iface);
        let rows = rows.with_context(|| format!("{shown} has no link {}", args.iface))?;
        trips.push(rows.to_vec());
    }
    let mut seen = play(&trips, ROUND_TRIPS);
    // A single recording of many laps is one trip: only its first outage is learnt and not counted.
    let first = if trips.len() > 1 { 1 } else { 0 };
    seen.retain(|hole| hole.trip >= first && hole.ours_s.is_some());
    if seen.is_empty() {
        bail!(
            "no hole to predict: give several trips of one route, or one trip with several holes"
        );
    }
    print_stdout(&figures(&seen).to_string());
    Ok(ExitCode::SUCCESS)
}

/// The figures of the outages.
pub fn figures(seen: &[HoleForecast]) -> Value {
    let real: Vec<f64> = seen.iter().map(|hole| hole.real_s).collect();
    let error = |of: &dyn Fn(&HoleForecast) -> Option<f64>| {
        let errors = seen
            .iter()
            .filter_map(|hole| Some((of(hole)? - hole.real_s).abs()));
        errors.collect::<Vec<f64>>()
    };
    let ours = error(&|hole| hole.ours_s);
    let known: Vec<f64> = error(&|hole| hole.ours_s.filter(|_| hole.place_known));
    let within = WITHIN_S.map(|s| share(ours.iter(), |error| **error <= s));
    let mut figures = json!({
        "holes": seen.len(),
        "median_hole_s": median(&real),
        "median_error_s": median(&ours),
        "median_error_where_known_s": median(&known),
        "place_known_percent": share(seen.iter(), |hole| hole.place_known),
        "ewma_s": median(&error(&|hole| hole.ewma_s)),
        "best_constant_s": best_constant_error(&real),
        "within_percent": within,
    });
    for (n, rtt) in ROUND_TRIPS.iter().enumerate() {
        let rtt_s = rtt.as_secs_f64();
        let short = || seen.iter().filter(|hole| hole.real_s < rtt_s);
        let long = || seen.iter().filter(|hole| hole.real_s >= rtt_s);
        figures[format!("over_{rtt_s}_s")] = json!({
            "shorter": short().count(),
            "in_vain_percent": share(short(), |hole| hole.bridged[n]),
            "missed_percent": share(long(), |hole| !hole.bridged[n]),
        });
    }
    figures
}

fn share<T>(of: impl Iterator<Item = T>, is: impl Fn(&T) -> bool) -> Option<f64> {
    let (mut all, mut those) = (0u32, 0u32);
    for one in of {
        all += 1;
        those += u32::from(is(&one));
    }
    (all > 0).then(|| 100.0 * f64::from(those) / f64::from(all))
}
