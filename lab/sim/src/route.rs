//! Routes that are travelled repeatedly: the places with Wi-Fi are constant, the speed is not.
//!
//! ```text
//!  metres   ├──stay──┤──hole──├──────stay──────┤─hole─├─ …        drawn once for a route
//!  seconds  ├─────stay─────┤───hole───├────stay────┤hole├         drawn for each trip: speed, stops, edges
//! ```
//!
//! Lengths of stays and holes are log-normal, fitted to recordings (medians and deviations of
//! logarithms; the recordings themselves are not included) and converted to metres at the terrain's
//! mean speed. Trips differ so much that the logarithm of a hole of about 15 s has a standard
//! deviation of 0.3 to 0.45 from trip to trip, as on the laps of the vehicle's recording.

use cedos_lab_link::seeded;
use cedos_lab_link::trace::TraceRow;
use d2tp_time::{Span, Time};
use rand::Rng;
use rand_pcg::Pcg32;
use std::fmt::Write as _;

/// The random stream from which routes are drawn; trips use those after it.
const ROUTE_STREAM: u64 = 1 << 35;

/// The interval between rows.
pub const BIN: Span = Span::from_millis(250);

/// The time to join an access point and get an address, in seconds. // LAB: about 1.5 s
const ATTACH_S: f64 = 1.5;
/// The standard deviation of the edges of a stay, in metres. // a guess
const EDGE_M: f64 = 3.0;
/// The share of trips on which a stay carries nothing. // a guess
const DEAD_SHARE: f64 = 0.03;
/// The deviation of the logarithm of speed between trips.
const TRIP_SIGMA: f64 = 0.15; // a guess
/// The deviation of the logarithm of speed within a trip.
const PACE_SIGMA: f64 = 0.3; // fitted with the others to the vehicle's laps, see above
/// How long the speed within a trip is correlated, in seconds.
const PACE_S: f64 = 20.0;

/// A kind of route.
#[derive(Debug, Clone, Copy)]
pub struct Terrain {
    /// The name in results.
    pub name: &'static str,
    /// The length of stays: median in seconds, and deviation of its logarithm.
    pub stay: (f64, f64),
    /// Length of holes: median in seconds, and deviation of its logarithm.
    pub hole: (f64, f64),
    /// The longest stay or hole, in seconds.
    pub longest_s: f64,
    /// The mean speed in metres per second.
    pub speed: f64,
    /// The mean length of stops in seconds, and the distance between them; none if that is 0.
    pub stop: (f64, f64),
}

/// Every terrain. On foot and by bus: availability of open access points in the PILOT recordings
/// (pedestrian p1, p3, p6: 104 holes; bus b3, b8: 18); by car: goodput on the laps of FEUP's
/// 802.11n vehicle (four access points, 103 holes); last, the town of Navda et al. as in Epsilon's
/// set I: holes of 50 s at the median and 500 s at the 90th percentile.
pub const TERRAINS: [Terrain; 4] = [
    Terrain {
        name: "pedestrian",
        stay: (21.4, 1.05),
        hole: (10.0, 1.42),
        longest_s: 600.0,
        speed: 1.3,
        stop: (0.0, 0.0),
    },
    Terrain {
        name: "bus",
        stay: (20.3, 1.08),
        hole: (17.1, 2.32),
        longest_s: 600.0,
        speed: 7.0,
        stop: (20.0, 400.0),
    },
    Terrain {
        name: "vehicle",
        stay: (14.9, 1.4),
        hole: (4.0, 1.39),
        longest_s: 600.0,
        speed: 8.0,
        stop: (0.0, 0.0),
    },
    Terrain {
        name: "epsilon",
        stay: (20.0, 1.0),
        hole: (50.0, 1.797),
        longest_s: 900.0,
        speed: 8.0,
        stop: (0.0, 0.0),
    },
];

/// A route with its coverage.
#[derive(Debug, Clone)]
pub struct TransitRoute {
    terrain: Terrain,
    seed: u64,
    /// Start and end of each stay, in metres.
    stays: Vec<(f64, f64)>,
    /// The positions of stops, in metres.
    stops: Vec<f64>,
}

impl TransitRoute {
    /// Draws a route with this many holes.
    pub fn draw(terrain: Terrain, holes: usize, seed: u64) -> TransitRoute {
        let mut rng = seeded(seed, ROUTE_STREAM);
        let length = |rng: &mut Pcg32, (median, sigma): (f64, f64)| {
            terrain.speed * (median * (sigma * normal(rng)).exp()).clamp(1.0, terrain.longest_s)
        };
        let mut stays = Vec::new();
        let mut at = 0.0;
        for _ in 0..=holes {
            let end = at + length(&mut rng, terrain.stay);
            stays.push((at, end));
            at = end + length(&mut rng, terrain.hole);
        }
        let mut stops = Vec::new();
        let (_, apart) = terrain.stop;
        if apart > 0.0 {
            let mut stop = apart * rng.random::<f64>();
            while stop < at {
                stops.push(stop);
                stop += apart * (0.5 + rng.random::<f64>());
            }
        }
        TransitRoute {
            terrain,
            seed,
            stays,
            stops,
        }
    }

    /// A trip along the route.
    pub fn trip(&self, number: u64) -> Vec<TraceRow> {
        let mut rng = seeded(self.seed, ROUTE_STREAM + 1 + number);
        let bin_s = BIN.as_secs_f64();
        let ours = (TRIP_SIGMA * normal(&mut rng)).exp();
        let mut stays: Vec<(f64, f64)> = Vec::new();
        for (from, until) in &self.stays {
            let dead = rng.random::<f64>() < DEAD_SHARE;
            let mut edge = || EDGE_M * normal(&mut rng);
            let (from, until) = (from + edge(), until + edge());
            if !dead && until > from {
                stays.push((from, until));
            }
        }
        let end = self.stays.last().map_or(0.0, |stay| stay.1);
        let mut stops = self.stops.iter().copied().peekable();
        let (mut now, mut metres, mut pace) = (Time::ZERO, 0.0, PACE_SIGMA * normal(&mut rng));
        let (mut stands_s, mut in_reach_s) = (0.0, ATTACH_S);
        let mut rows = Vec::new();
        while metres < end {
            let in_reach = stays
                .iter()
                .any(|(from, until)| (*from..*until).contains(&metres));
            in_reach_s = if in_reach { in_reach_s + bin_s } else { 0.0 };
            rows.push(TraceRow {
                at: now,
                up: Some(in_reach_s >= ATTACH_S),
                pos_m: Some(metres),
                ..TraceRow::default()
            });
            now += BIN;
            // The speed follows an Ornstein-Uhlenbeck process.
            let keep = (-bin_s / PACE_S).exp();
            pace = keep * pace + (1.0 - keep * keep).sqrt() * PACE_SIGMA * normal(&mut rng);
            if stops.next_if(|stop| *stop <= metres).is_some() {
                stands_s = -self.terrain.stop.0 * (1.0 - rng.random::<f64>()).ln();
            }
            if stands_s > 0.0 {
                stands_s -= bin_s;
            } else {
                metres += self.terrain.speed * ours * pace.exp() * bin_s;
            }
        }
        rows
    }
}

/// A trip in the format of the recordings, with a column for the position in metres.
pub fn to_csv(rows: &[TraceRow]) -> String {
    let mut csv = format!("{},pos_m\n", cedos_lab_link::trace::CSV_HEADER);
    for row in rows {
        let up = u8::from(row.up == Some(true));
        let metres = row
            .pos_m
            .map_or(String::new(), |metres| format!("{metres:.1}"));
        let _ = writeln!(csv, "{:.2},wifi,{up},,,,,{metres}", row.at.as_secs_f64());
    }
    csv
}

/// A normally distributed number by the method of Box and Muller.
fn normal(rng: &mut Pcg32) -> f64 {
    let (a, b): (f64, f64) = (rng.random(), rng.random());
    (-2.0 * (1.0 - a).ln()).sqrt() * (std::f64::consts::TAU * b).cos()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cedos_lab_link::trace::Trace;

    #[test]
    fn a_route_is_the_same_each_time_and_a_trip_is_not() {
        let route = || TransitRoute::draw(TERRAINS[0], 10, 7);
        let (first, second) = (route().trip(0), route().trip(1));
        assert_eq!(first, route().trip(0));
        assert_ne!(first, second);
        let lost = |rows: &[TraceRow]| {
            rows.windows(2)
                .filter(|w| w[0].up == Some(true) && w[1].up == Some(false))
                .count()
        };
        assert!((7..=10).contains(&lost(&first)), "{}", lost(&first));
    }

    #[test]
    fn a_trip_is_read_back_from_its_csv_with_its_metres() {
        let rows = TransitRoute::draw(TERRAINS[1], 3, 1).trip(0);
        let read = Trace::from_csv(&to_csv(&rows)).unwrap();
        let back = read.rows("wifi").unwrap();
        assert_eq!(back.len(), rows.len());
        let last = (rows.len() - 1, rows[rows.len() - 1].pos_m.unwrap());
        assert!((back[last.0].pos_m.unwrap() - last.1).abs() < 0.1);
    }
}
