//! Evaluates the prediction of outages on trips along the same route.
//!
//! ```text
//!  trip 1 ─▶ learn     trip 2: lost ─▶ how long? ─ … ─▶ back: the error     trip 3 …
//! ```
//!
//! Each outage is predicted when it begins, only from earlier outages and trips.

use cedos_lab_link::trace::TraceRow;
use d2tp_sched::{DeviceLocation, LinkForecast};
use d2tp_time::{Span, Time};
use std::collections::BTreeMap;

/// The time between trips.
const REST: Span = Span::from_secs(3_600);

/// The weight of the latest outage of a square in the paper's mean, which the paper does not state.
/// // a guess
const EWMA: f64 = 0.5;

/// An outage: its prediction and its real length.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HoleForecast {
    /// The number of the trip, from 0.
    pub trip: usize,
    /// The real length in seconds.
    pub real_s: f64,
    /// The prediction; for an unknown place the median of all outages so far.
    pub ours_s: Option<f64>,
    /// Whether the forecast knew the place.
    pub place_known: bool,
    /// The prediction of Epsilon: a decaying mean for each square.
    pub ewma_s: Option<f64>,
    /// For each requested round trip: whether it switched to a link with that round trip.
    pub bridged: [bool; 2],
}

/// Evaluates trips one after another. Without `pos_m` a place is the stay before the outage, by its
/// number.
pub fn play(trips: &[Vec<TraceRow>], round_trips: [Span; 2]) -> Vec<HoleForecast> {
    let mut forecast = LinkForecast::new();
    let mut all: Vec<f64> = Vec::new();
    let mut squares: BTreeMap<i64, f64> = BTreeMap::new();
    let mut seen: Vec<HoleForecast> = Vec::new();
    let mut began = Time::ZERO;
    for (trip, rows) in trips.iter().enumerate() {
        let (mut carried, mut open) = (false, None);
        for row in rows {
            let now = began + row.at.since(Time::ZERO);
            let dead = row.loss.is_some_and(|loss| loss >= 1.0);
            let carries = row.up == Some(true) && !dead;
            let metres = row.pos_m.unwrap_or(0.0);
            forecast.observe(now, &spot(row), carries);
            if carried && !carries {
                let here = forecast
                    .ongoing_outage(now)
                    .and_then(|hole| hole.quantile(0.5));
                let square = (metres / d2tp_sched::GRID_M).floor() as i64;
                let ewma = squares.get(&square).or(squares.get(&i64::MIN));
                let foreseen = HoleForecast {
                    trip,
                    real_s: 0.0,
                    ours_s: here.or(median(&all)),
                    place_known: here.is_some(),
                    ewma_s: ewma.copied(),
                    bridged: round_trips.map(|rtt| forecast.is_worth_bridging(now, rtt)),
                };
                open = Some((now, square, foreseen));
            }
            if carries && let Some((since, square, foreseen)) = open.take() {
                let real_s = now.since(since).as_secs_f64();
                all.push(real_s);
                // The mean of the square, and one for squares without outages so far.
                for key in [square, i64::MIN] {
                    let mean = squares.entry(key).or_insert(real_s);
                    *mean += EWMA * (real_s - *mean);
                }
                seen.push(HoleForecast { real_s, ..foreseen });
            }
            carried = carries;
        }
        let end = rows
            .last()
            .map_or(began, |row| began + row.at.since(Time::ZERO));
        forecast.observe(
            end + Span::from_secs(1),
            &DeviceLocation::named("home"),
            true,
        );
        began = end + REST;
    }
    seen
}

fn spot(row: &TraceRow) -> DeviceLocation {
    match row.pos_m {
        Some(metres) => DeviceLocation::at(metres, 0.0),
        None => DeviceLocation::named("on the way"),
    }
}

/// The median; the lower one of two.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len().saturating_sub(1) / 2).copied()
}

/// The smallest median error that a constant prediction can have, chosen with hindsight: half the
/// width of the narrowest interval that contains half of the values.
pub fn best_constant_error(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = (sorted.len().checked_sub(1)?) / 2;
    let widths = sorted
        .iter()
        .zip(&sorted[half..])
        .map(|(low, high)| high - low);
    widths.min_by(f64::total_cmp).map(|width| width / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A trip that is up and down in turn for these times in seconds, at one metre per second.
    fn trip(lengths: &[u64]) -> Vec<TraceRow> {
        let mut rows = Vec::new();
        let mut second = 0;
        for (n, length) in lengths.iter().enumerate() {
            for _ in 0..*length {
                rows.push(TraceRow {
                    at: Time::ZERO + Span::from_secs(second),
                    up: Some(n % 2 == 0),
                    pos_m: Some(second as f64),
                    ..TraceRow::default()
                });
                second += 1;
            }
        }
        rows
    }

    const RTTS: [Span; 2] = [Span::from_secs(2), Span::from_secs(8)];

    #[test]
    fn what_is_always_so_is_foreseen_from_the_second_trip_on() {
        let trips = vec![trip(&[300, 5, 400, 50, 300]); 3];
        let seen = play(&trips, RTTS);
        assert_eq!(seen.len(), 6);
        assert!(!seen[0].place_known && seen[0].ours_s.is_none());
        for hole in &seen[2..] {
            assert!(
                hole.place_known && (hole.ours_s.unwrap() - hole.real_s).abs() < 0.5,
                "{hole:?}"
            );
        }
        // Five seconds: bridged with a round trip of two seconds, not with one of eight.
        assert_eq!(
            (seen[0].bridged, seen[2].bridged),
            ([true, true], [true, false])
        );
        assert_eq!(seen[3].bridged, [true, true]);
    }

    #[test]
    fn no_constant_is_better_than_the_best_one() {
        let values = [1.0, 2.0, 2.5, 9.0, 40.0, 3.0, 7.0];
        let best = best_constant_error(&values).unwrap();
        for step in 0..500 {
            let constant = f64::from(step) / 10.0;
            let errors: Vec<f64> = values.iter().map(|v| (v - constant).abs()).collect();
            assert!(median(&errors).unwrap() >= best - 1e-9, "{constant}");
        }
        assert_eq!(best, 1.0);
    }
}
