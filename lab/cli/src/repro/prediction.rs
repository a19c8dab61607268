//! E3: how long holes in coverage will be, on ways travelled again and again.

use super::plot::{Chart, Series};
use super::runner::Measured;
use crate::verbs::foresee::{ROUND_TRIPS, WITHIN_S, figures};
use cedos_lab_link::trace::Trace;
use cedos_lab_sim::foresight::{Foreseen, play};
use cedos_lab_sim::route::{Route, TERRAINS, Terrain, to_csv};
use serde_json::{Map, Value, json};

/// Routes of each terrain, trips on each, holes of each.
const ROUTES: u64 = 12;
const TRIPS: u64 = 10;
const HOLES: usize = 25;

/// In virtual time.
pub fn simulate() -> anyhow::Result<Measured> {
    let (mut ours, mut mark) = (Map::new(), Vec::new());
    let mut all = Vec::new();
    for terrain in TERRAINS {
        let seen = travel(terrain)?;
        let name = terrain.name;
        mark.push(format!("{name}.median_error_s < {name}.best_constant_s"));
        if name != "epsilon" {
            all.extend(&seen);
        }
        ours.insert(name.to_owned(), figures(&seen));
    }
    ours.insert("recorded".to_owned(), figures(&all));
    mark.push("recorded.median_error_s < 5".to_owned());
    mark.push("recorded.median_error_s < recorded.best_constant_s".to_owned());
    mark.push("recorded.median_error_s <= recorded.ewma_s".to_owned());
    mark.push("recorded.over_5_s.in_vain_percent <= 50".to_owned());
    Ok(Measured {
        ours: Value::Object(ours),
        baseline: json!({ "paper": { "median_error_s": 5.0 } }),
        mark,
        conditions: vec![
            format!(
                "{ROUTES} routes of each terrain, {HOLES} holes each, travelled {TRIPS} times; holes of the first \
                 trip are learnt and not counted"
            ),
            "lengths of stays and holes fitted to recordings (lab/sim/src/route.rs); `recorded`: the three \
             terrains with recordings together; epsilon: the paper's own town"
                .to_owned(),
            "best_constant_s: the one number with the least median error, chosen with hindsight; ewma_s: the \
             paper's mean by square of 100 m, its weight (0.5) assumed"
                .to_owned(),
            "in_vain_percent: of holes shorter than the round trip, those bridged all the same; \
             missed_percent: of longer ones, those not bridged as they began"
                .to_owned(),
        ],
    })
}

/// All holes of a terrain but those of first trips.
fn travel(terrain: Terrain) -> anyhow::Result<Vec<Foreseen>> {
    let mut seen = Vec::new();
    for seed in 0..ROUTES {
        let route = Route::draw(terrain, HOLES, seed);
        let mut trips = Vec::new();
        for trip in 0..TRIPS {
            // By way of the recordings' form, as any other would come.
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

/// How many holes are foreseen how well.
pub fn charts(ours: &Value, _: &Value) -> Vec<Chart> {
    let curve = |name: &str| {
        let shares = ours[name]["within_percent"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let points = WITHIN_S.into_iter().zip(shares);
        let points = points.filter_map(|(s, share)| Some((s, share.as_f64()?)));
        Series::line(name, points.collect())
    };
    vec![Chart {
        title: "holes foreseen".to_owned(),
        x: "within so many seconds".to_owned(),
        y: "% of holes".to_owned(),
        series: TERRAINS.iter().map(|terrain| curve(terrain.name)).collect(),
    }]
}
