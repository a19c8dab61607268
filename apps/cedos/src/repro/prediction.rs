//! E3: how long holes in coverage will be, on ways travelled again and again.

use super::Measured;
use super::plot::{Chart, Series};
use cedos_lab_energy::Span;
use cedos_lab_link::trace::Trace;
use cedos_lab_sim::foresight::{Foreseen, best_constant_error, median, play};
use cedos_lab_sim::route::{Route, TERRAINS, Terrain, to_csv};
use serde_json::{Map, Value, json};

/// Routes of each terrain, trips on each, holes of each.
const ROUTES: u64 = 12;
const TRIPS: u64 = 10;
const HOLES: usize = 25;
/// Of the links one might go over to.
pub const ROUND_TRIPS: [Span; 2] = [Span::from_secs(2), Span::from_secs(5)];
/// Those of the drawing, seconds: the share of holes foreseen within.
const WITHIN_S: [f64; 8] = [0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0];

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

/// What came of them.
pub fn figures(seen: &[Foreseen]) -> Value {
    let real: Vec<f64> = seen.iter().map(|hole| hole.real_s).collect();
    let error = |of: &dyn Fn(&Foreseen) -> Option<f64>| {
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
