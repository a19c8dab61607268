//! E3: prediction of the length of coverage holes on routes that are travelled repeatedly.

use super::runner::Measured;
use crate::verbs::foresee::{ROUND_TRIPS, figures};
use cedos_lab_link::trace::Trace;
use cedos_lab_sim::foresight::{HoleForecast, play};
use cedos_lab_sim::route::{TERRAINS, Terrain, TransitRoute, to_csv};
use serde_json::{Map, Value, json};

/// The numbers of routes of each terrain, of trips on each route, and of holes on each.
const ROUTES: u64 = 20;
const TRIPS: u64 = 10;
const HOLES: usize = 25;

/// Runs the row in virtual time.
pub fn simulate() -> anyhow::Result<Measured> {
    let mut ours = Map::new();
    let mut all = Vec::new();
    for terrain in TERRAINS {
        let seen = travel(terrain)?;
        let name = terrain.name;
        if name != "epsilon" {
            all.extend(&seen);
        }
        ours.insert(name.to_owned(), figures(&seen));
    }
    ours.insert("recorded".to_owned(), figures(&all));
    let baseline = json!({ "paper": { "median_error_s": 5.0 } });
    Ok(Measured::figures(
        Value::Object(ours),
        baseline,
        ROUTES as usize,
    ))
}

/// All holes of a terrain except those of first trips.
fn travel(terrain: Terrain) -> anyhow::Result<Vec<HoleForecast>> {
    let mut seen = Vec::new();
    for seed in 0..ROUTES {
        let route = TransitRoute::draw(terrain, HOLES, seed);
        let mut trips = Vec::new();
        for trip in 0..TRIPS {
            // Through the format of recordings, like any other trace.
            let trace = Trace::from_csv(&to_csv(&route.trip(trip)))?;
            trips.push(trace.rows("wifi").unwrap_or_default().to_vec());
        }
        seen.extend(
            play(&trips, ROUND_TRIPS)
                .into_iter()
                .filter(|hole| hole.trip > 0),
        );
    }
    Ok(seen)
}
