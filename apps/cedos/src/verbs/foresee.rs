//! `cedos sim foresee TRIP…`: how well the holes of a way are foreseen that is travelled again and again.

use crate::repro::prediction::{ROUND_TRIPS, figures};
use anyhow::{Context, bail};
use cedos_lab_link::trace::{Row, Trace};
use cedos_lab_sim::foresight::play;
use cedos_lab_sim::route::{Route, TERRAINS, to_csv};
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;

/// Play recordings of the same way, in the order given; holes from the second on are counted.
///
/// CSV traces as for `cedos sim score`, with a further column `pos_m`: how far along the way the device was.
/// Without it, all holes are taken to begin at one place. With `--make` trips are made instead, as those
/// of `cedos repro E3`.
#[derive(Debug, Args)]
pub struct ForeseeArgs {
    /// The trips.
    trips: Vec<PathBuf>,
    /// Which link of them.
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
    /// The folder for them.
    #[arg(long, value_name = "FOLDER")]
    into: Option<PathBuf>,
    /// How many holes and trips are made.
    #[arg(long, default_value_t = 25)]
    holes: usize,
    /// See `--holes`.
    #[arg(long, default_value_t = 10)]
    count: u64,
    /// Which route is made.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Carry out `cedos sim foresee`. Prints one JSON object.
///
/// # Errors
/// A trip cannot be read or written.
pub fn run(args: &ForeseeArgs) -> anyhow::Result<ExitCode> {
    if let (Some(terrain), Some(folder)) = (&args.make, &args.into) {
        let terrain = TERRAINS.into_iter().find(|known| known.name == terrain);
        let known = TERRAINS.map(|terrain| terrain.name).join(", ");
        let terrain = terrain.with_context(|| format!("terrains are {known}"))?;
        let route = Route::draw(terrain, args.holes, args.seed);
        for trip in 0..args.count {
            let file = folder.join(format!("{}-{}-trip{trip}.csv", terrain.name, args.seed));
            let written = std::fs::write(&file, to_csv(&route.trip(trip)));
            written.with_context(|| format!("cannot write {}", file.display()))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut trips: Vec<Vec<Row>> = Vec::new();
    for file in &args.trips {
        let shown = file.display();
        let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {shown}"))?;
        let trace = Trace::from_csv(&text).with_context(|| format!("{shown}"))?;
        let rows = trace.rows(&args.iface);
        let rows = rows.with_context(|| format!("{shown} has no link {}", args.iface))?;
        trips.push(rows.to_vec());
    }
    let mut seen = play(&trips, ROUND_TRIPS);
    // A single recording of many laps is one trip: its first hole alone is learnt and not counted.
    let first = if trips.len() > 1 { 1 } else { 0 };
    seen.retain(|hole| hole.trip >= first && hole.ours_s.is_some());
    if seen.is_empty() {
        bail!("no hole to foresee: give trips of the same way, or one with several holes");
    }
    println!("{}", figures(&seen));
    Ok(ExitCode::SUCCESS)
}
