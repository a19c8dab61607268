//! Learns where and when a link carries, from the device's own history of it.
//!
//! ```text
//!  lost at a place, back some metres and seconds later ─▶ outages by place: how long it will be away
//!  rate in each ten minutes of the last two weeks      ─▶ daily rates: what it will carry at that hour
//!                                                             │
//!  LinkHistory ◀── ForecastHint: lengths from here, days from now ◀─┘   CapacityForecast draws scenarios from it
//! ```
//!
//! The caller names the place: a square of 100 m where there is a position, else the network or the
//! cells in reach. Outages are stored with their length in metres, where that is known, because a
//! device that moves faster leaves an outage sooner. All data comes from this device, is bounded,
//! and takes a few kilobytes in encoded form ([`LinkForecast::encode`]).

use std::collections::{BTreeMap, VecDeque};

use d2tp_time::{Span, Time};

pub use crate::daily_rates::{DailyRates, SLOT_S};

/// The side of a grid cell in metres.
pub const GRID_M: f64 = 100.0; // Epsilon, section 8

/// The most places remembered; when there are more, the one visited longest ago is dropped.
pub const PLACES_MAX: usize = 1_024;

/// The most outages remembered per place.
pub const HOLES_MAX: usize = 12;

/// The factor by which an outage counts less than the following one.
const FADE: f64 = 0.85; // chosen over 1, on other routes than those of `cedos repro E3`

/// The distance in metres at which an outage that began there counts one third.
const NEAR_M: f64 = 25.0; // chosen over 12 and 40, on the same routes

/// The least total weight of samples. With less, there is no forecast of the current outage.
const WEIGHT_MIN: f64 = 0.2; // a guess

/// How much the current speed shortens an outage: 0 not at all, 1 in proportion. The speed at its start
/// predicts only half of the later speed.
const SPEED_SHARE: f64 = 0.5; // chosen over 0.3, 0.8 and 1, on the same routes

/// The time over which speed is measured, in seconds.
const SPEED_OVER_S: f64 = 15.0; // chosen over 40, on the same routes

/// The speed below which the device counts as standing, in metres per second.
const SPEED_MIN: f64 = 0.3;

/// A grid cell or a named place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LocationCell(u64);

impl LocationCell {
    /// The cell of a named place: an SSID, or the cell towers in reach.
    pub fn named(name: &str) -> LocationCell {
        // FNV-1a. If two names share a cell by chance, a guess is wrong.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        LocationCell(hash | 1)
    }

    /// The grid cell of a point, in metres east and north of any origin.
    pub fn at(east_m: f64, north_m: f64) -> LocationCell {
        LocationCell::of_square(
            (east_m / GRID_M).floor() as i32,
            (north_m / GRID_M).floor() as i32,
        )
    }

    fn of_square(east: i32, north: i32) -> LocationCell {
        // 31 bits for the column, more than the circumference of the Earth needs.
        let east = u64::from(east as u32 & 0x7fff_ffff);
        LocationCell((east << 32 | u64::from(north as u32)) << 1)
    }

    pub(crate) fn number(self) -> u64 {
        self.0
    }

    pub(crate) fn numbered(number: u64) -> LocationCell {
        LocationCell(number)
    }

    /// The cell's column and row; `None` for a named place.
    pub(crate) fn square(self) -> Option<(i32, i32)> {
        let sign_back = |east: i32| east << 1 >> 1;
        (self.0 & 1 == 0).then_some((sign_back((self.0 >> 33) as i32), (self.0 >> 1) as i32))
    }

    /// The cell and its neighbours; a named place has no neighbours.
    fn around(self) -> impl Iterator<Item = LocationCell> {
        let others = self.square().into_iter().flat_map(|(east, north)| {
            let near = move |e: i32, n: i32| (east.wrapping_add(e), north.wrapping_add(n));
            let around = (-1..=1).flat_map(move |e| (-1..=1).map(move |n| (e, n)));
            let around = around.filter(|there| *there != (0, 0));
            around.map(move |(e, n)| near(e, n))
        });
        let others = others.map(|(east, north)| LocationCell::of_square(east, north));
        std::iter::once(self).chain(others)
    }
}

/// Where the device is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceLocation {
    /// The cell of the grid, or the named place.
    pub place: LocationCell,
    /// The point, in metres east and north of any origin, if known.
    pub point: Option<(f64, f64)>,
}

impl DeviceLocation {
    /// A named place without a point.
    pub fn named(name: &str) -> DeviceLocation {
        DeviceLocation {
            place: LocationCell::named(name),
            point: None,
        }
    }

    /// A point, with its grid cell.
    pub fn at(east_m: f64, north_m: f64) -> DeviceLocation {
        DeviceLocation {
            place: LocationCell::at(east_m, north_m),
            point: Some((east_m, north_m)),
        }
    }
}

/// An outage that ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LinkOutage {
    pub(crate) seconds: f32,
    /// The distance between the outage's start and its end along the path; `None` without points.
    pub(crate) metres: Option<f32>,
    /// The point where the outage began.
    pub(crate) began: Option<(f32, f32)>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct LocationHistory {
    /// The outages, the latest last.
    pub(crate) holes: VecDeque<LinkOutage>,
    /// The number of the last visit to the place.
    pub(crate) visit: u32,
}

/// The current outage.
#[derive(Debug, Clone, Copy, PartialEq)]
struct OngoingOutage {
    since: Time,
    spot: DeviceLocation,
    metres: f64,
    /// The speed at the start of the outage in metres per second.
    speed: Option<f64>,
}

/// A distribution of durations.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DurationDistribution {
    /// Durations in seconds, ascending, each with its weight.
    weighed: Vec<(f64, f64)>,
}

impl DurationDistribution {
    fn of(mut weighed: Vec<(f64, f64)>) -> DurationDistribution {
        weighed.sort_by(|a, b| a.0.total_cmp(&b.0));
        DurationDistribution { weighed }
    }

    /// The quantile for this share, in seconds.
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let all: f64 = self.weighed.iter().map(|(_, weight)| weight).sum();
        let mut below = 0.0;
        let found = self.weighed.iter().find(|(_, weight)| {
            below += weight;
            below >= share * all
        });
        found.or(self.weighed.last()).map(|(seconds, _)| *seconds)
    }

    /// The probability of a longer duration.
    pub fn longer_than(&self, seconds: f64) -> f64 {
        let all: f64 = self.weighed.iter().map(|(_, weight)| weight).sum();
        let longer = self.weighed.iter().filter(|(length, _)| *length > seconds);
        longer.map(|(_, weight)| weight).sum::<f64>() / all
    }

    /// The observed durations in seconds.
    pub fn seconds(&self) -> impl Iterator<Item = f64> {
        self.weighed.iter().map(|(seconds, _)| *seconds)
    }
}

/// The forecast of a link for the current place and time.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ForecastHint {
    /// Lengths in seconds of outages that began here.
    pub away_s: Vec<f64>,
    /// Bytes per second in each slot from now on, from past days; `None` if unknown.
    pub days: Vec<Vec<Option<f32>>>,
    /// Seconds since the current slot began.
    pub into_slot_s: f64,
}

/// The history of one link by place and by hour.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LinkForecast {
    pub(crate) cells: BTreeMap<LocationCell, LocationHistory>,
    pub(crate) visits: u32,
    pub(crate) diary: DailyRates,
    carries: bool,
    open: Option<OngoingOutage>,
    /// Points of the last seconds: the time, and the distance along the path.
    trail: VecDeque<(Time, f64)>,
    point: Option<(f64, f64)>,
    along_m: f64,
}

impl LinkForecast {
    /// A forecast without observations.
    pub fn new() -> LinkForecast {
        LinkForecast::default()
    }

    /// Records the device's location and whether the link carries there: at each change of either, and
    /// every few seconds while moving.
    pub fn observe(&mut self, now: Time, spot: &DeviceLocation, carries: bool) {
        self.walk(now, spot);
        match (self.open, carries) {
            (None, false) if self.carries => {
                self.open = Some(OngoingOutage {
                    since: now,
                    spot: *spot,
                    metres: self.along_m,
                    speed: self.speed(),
                });
            }
            (Some(open), true) => {
                self.learn(now, open, spot);
                self.open = None;
            }
            _ => {}
        }
        self.carries = carries;
    }

    /// The outages that are remembered: where each began, its seconds, and the metres that it spanned, if they are known.
    pub fn outages(&self) -> impl Iterator<Item = (LocationCell, f32, Option<f32>)> + '_ {
        let cells = self.cells.iter();
        cells.flat_map(|(cell, known)| known.holes.iter().map(|o| (*cell, o.seconds, o.metres)))
    }

    /// The rates of the link by the hour.
    pub fn daily_rates(&mut self) -> &mut DailyRates {
        &mut self.diary
    }

    /// The distribution of the total length of the current outage; `None` if nothing is known of this
    /// place, or the link carries.
    pub fn ongoing_outage(&self, now: Time) -> Option<DurationDistribution> {
        let open = self.open?;
        let age = now.since(open.since).as_secs_f64();
        let mut weighed = self.lengths_here(&open.spot, open.speed);
        // Outages that were shorter than the current one say nothing any more.
        weighed.retain(|(seconds, _)| *seconds > age);
        let weight: f64 = weighed.iter().map(|(_, weight)| weight).sum();
        (weight >= WEIGHT_MIN).then(|| DurationDistribution::of(weighed))
    }

    /// Whether to switch to a link with this round trip because of the current outage: not if the
    /// outage will probably end before the first byte arrives there.
    pub fn is_worth_bridging(&self, now: Time, round_trip: Span) -> bool {
        let round_trip_s = round_trip.as_secs_f64();
        self.ongoing_outage(now).is_none_or(|hole| {
            let age = (self.open).map_or(0.0, |open| now.since(open.since).as_secs_f64());
            hole.longer_than(age + round_trip_s) >= 0.5
        })
    }

    /// Whether to switch to a link with this round trip because of the current outage, or, while the link carries, of one that would
    /// begin here.
    pub fn is_worth_bridging_here(
        &self,
        now: Time,
        here: &DeviceLocation,
        round_trip: Span,
    ) -> bool {
        if self.open.is_some() {
            return self.is_worth_bridging(now, round_trip);
        }
        let weighed = self.lengths_here(here, self.speed());
        let weight: f64 = weighed.iter().map(|(_, weight)| weight).sum();
        let is_long =
            || DurationDistribution::of(weighed).longer_than(round_trip.as_secs_f64()) >= 0.5;
        weight < WEIGHT_MIN || is_long()
    }

    /// The hint for a [`LinkHistory`](crate::LinkHistory), for this day and second of the day.
    pub fn hint(&self, now: Time, day: u32, second: u32) -> ForecastHint {
        ForecastHint {
            away_s: self
                .ongoing_outage(now)
                .map_or_else(Vec::new, |hole| hole.seconds().collect()),
            days: self.diary.days_from(day, second),
            into_slot_s: f64::from(second % SLOT_S),
        }
    }

    /// Lengths of outages that began near here, in seconds, with weights.
    fn lengths_here(&self, spot: &DeviceLocation, speed: Option<f64>) -> Vec<(f64, f64)> {
        let cells = spot
            .place
            .around()
            .filter_map(|place| self.cells.get(&place));
        let mut weighed = Vec::new();
        for cell in cells {
            let mut fade = 1.0;
            for hole in cell.holes.iter().rev() {
                let near = match (hole.began, spot.point) {
                    (Some((east, north)), Some(point)) => {
                        let apart = distance((f64::from(east), f64::from(north)), point);
                        nearness(apart / NEAR_M)
                    }
                    _ => 1.0,
                };
                let mut seconds = f64::from(hole.seconds);
                if let (Some(metres), Some(speed)) = (hole.metres, speed) {
                    let then = f64::from(metres) / seconds.max(0.1);
                    let ratio = then.max(SPEED_MIN) / speed.max(SPEED_MIN);
                    seconds *= 1.0 + SPEED_SHARE * (ratio.clamp(0.33, 3.0) - 1.0);
                }
                weighed.push((seconds, fade * near));
                fade *= FADE;
            }
        }
        weighed
    }

    fn learn(&mut self, now: Time, open: OngoingOutage, spot: &DeviceLocation) {
        let known = open.spot.point.is_some() && spot.point.is_some();
        let hole = LinkOutage {
            seconds: now.since(open.since).as_secs_f64() as f32,
            metres: known.then_some((self.along_m - open.metres) as f32),
            began: open
                .spot
                .point
                .map(|(east, north)| (east as f32, north as f32)),
        };
        self.visits += 1;
        let place = open.spot.place;
        if self.cells.len() == PLACES_MAX && !self.cells.contains_key(&place) {
            let oldest = self.cells.iter().min_by_key(|(_, cell)| cell.visit);
            if let Some(oldest) = oldest.map(|(place, _)| *place) {
                self.cells.remove(&oldest);
            }
        }
        let cell = self.cells.entry(place).or_default();
        cell.visit = self.visits;
        if cell.holes.len() == HOLES_MAX {
            cell.holes.pop_front();
        }
        cell.holes.push_back(hole);
    }

    fn walk(&mut self, now: Time, spot: &DeviceLocation) {
        let Some(point) = spot.point else {
            self.point = None;
            self.trail.clear();
            return;
        };
        self.along_m += self.point.map_or(0.0, |before| distance(before, point));
        self.point = Some(point);
        self.trail.push_back((now, self.along_m));
        let over = Span::from_secs_f64(SPEED_OVER_S);
        while self.trail.len() > 2 && now.since(self.trail[1].0) >= over {
            self.trail.pop_front();
        }
    }

    fn speed(&self) -> Option<f64> {
        let (first, last) = (self.trail.front()?, self.trail.back()?);
        let seconds = last.0.since(first.0).as_secs_f64();
        (seconds > 0.0).then(|| (last.1 - first.1) / seconds)
    }
}

fn distance(a: (f64, f64), b: (f64, f64)) -> f64 {
    let (east, north) = (a.0 - b.0, a.1 - b.1);
    (east * east + north * north).sqrt()
}

/// A weight of one third at distance one, one ninth at two, computed without the platform's
/// exponential function.
fn nearness(x: f64) -> f64 {
    let whole = x.min(30.0) as i32;
    let mut power = 1.0;
    for _ in 0..whole {
        power /= 3.0;
    }
    let rest = x.min(30.0) - f64::from(whole);
    power / (1.0 + 2.0 * rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Walks 1 km in a straight line at a speed, with outages between these metres and an
    /// observation each second.
    fn walk(
        forecast: &mut LinkForecast,
        from: Time,
        speed: f64,
        holes: &[(f64, f64)],
    ) -> (Time, Vec<f64>) {
        let (mut now, mut metres, mut predicted) = (from, 0.0, Vec::new());
        let mut was = true;
        while metres < 1_000.0 {
            let carries = !holes.iter().any(|(a, b)| (*a..*b).contains(&metres));
            forecast.observe(now, &DeviceLocation::at(metres, 50.0), carries);
            if was && !carries {
                let median = forecast
                    .ongoing_outage(now)
                    .and_then(|hole| hole.quantile(0.5));
                predicted.push(median.unwrap_or(f64::NAN));
            }
            was = carries;
            now += Span::from_secs(1);
            metres += speed;
        }
        forecast.observe(now, &DeviceLocation::named("home"), true);
        (now, predicted)
    }

    const HOLES: [(f64, f64); 3] = [(150.0, 180.0), (300.0, 420.0), (700.0, 760.0)];

    #[test]
    fn the_first_time_nothing_is_known_and_the_second_it_is_as_it_was() {
        let mut forecast = LinkForecast::new();
        let (now, first) = walk(&mut forecast, Time::ZERO, 2.0, &HOLES);
        assert!(first.iter().all(|seconds| seconds.is_nan()), "{first:?}");
        let (_, second) = walk(&mut forecast, now, 2.0, &HOLES);
        for (predicted, real) in second.iter().zip([15.0, 60.0, 30.0]) {
            assert!((predicted - real).abs() <= 1.5, "{second:?}");
        }
    }

    #[test]
    fn who_is_faster_is_back_sooner() {
        let mut forecast = LinkForecast::new();
        let (mut now, _) = walk(&mut forecast, Time::ZERO, 2.0, &HOLES);
        (now, _) = walk(&mut forecast, now, 2.0, &HOLES);
        let (_, fast) = walk(&mut forecast, now, 4.0, &HOLES);
        // Half of the way from a minute to half of it.
        assert!((fast[1] - 45.0).abs() < 2.0, "{fast:?}");
    }

    #[test]
    fn before_a_hole_begins_it_is_known_whether_it_will_be_worth_bridging() {
        let mut forecast = LinkForecast::new();
        let (now, _) = walk(&mut forecast, Time::ZERO, 2.0, &HOLES);
        // 15 s at 150 m, 60 s at 300 m, 30 s at 700 m; none at 500 m.
        for (metres, [after_20, after_40]) in [
            (150.0, [false, false]),
            (300.0, [true, true]),
            (700.0, [true, false]),
            (500.0, [true, true]),
        ] {
            let here = DeviceLocation::at(metres - 1.0, 50.0);
            let worth = |seconds| {
                let round_trip = Span::from_secs(seconds);
                forecast.is_worth_bridging_here(now, &here, round_trip)
            };
            assert_eq!([worth(20), worth(40)], [after_20, after_40], "{metres}");
        }
    }

    #[test]
    fn a_hole_that_is_shorter_than_the_round_trip_is_not_bridged_and_an_unknown_one_is() {
        let mut forecast = LinkForecast::new();
        let mut now = Time::ZERO;
        let second = Span::from_secs(1);
        let mut lose = |forecast: &mut LinkForecast, name: &str, millis: u64| {
            forecast.observe(now, &DeviceLocation::named(name), true);
            now += second;
            forecast.observe(now, &DeviceLocation::named(name), false);
            let bridged = forecast.is_worth_bridging(now, Span::from_millis(600));
            now += Span::from_millis(millis);
            forecast.observe(now, &DeviceLocation::named(name), true);
            now += second;
            bridged
        };
        assert!(lose(&mut forecast, "lift", 300), "nothing is known of it");
        assert!(!lose(&mut forecast, "lift", 300));
        assert!(lose(&mut forecast, "tunnel", 60_000));
        assert!(lose(&mut forecast, "tunnel", 60_000));
    }

    #[test]
    fn once_a_hole_lasts_longer_than_all_before_it_nothing_is_predicted() {
        let mut forecast = LinkForecast::new();
        let at = |seconds| Time::ZERO + Span::from_secs(seconds);
        let spot = DeviceLocation::named("stairs");
        for (seconds, carries) in [(0, true), (10, false), (14, true), (100, false)] {
            forecast.observe(at(seconds), &spot, carries);
        }
        assert_eq!(
            forecast.ongoing_outage(at(101)).unwrap().quantile(0.5),
            Some(4.0)
        );
        assert_eq!(forecast.ongoing_outage(at(105)), None);
    }

    #[test]
    fn no_more_places_and_holes_are_kept_than_the_limits() {
        let mut forecast = LinkForecast::new();
        let mut now = Time::ZERO;
        for n in 0..2 * PLACES_MAX {
            for _ in 0..=(n % 2) * 2 * HOLES_MAX {
                for carries in [true, false, true] {
                    now += Span::from_secs(1);
                    forecast.observe(now, &DeviceLocation::named(&n.to_string()), carries);
                }
            }
        }
        assert_eq!(forecast.cells.len(), PLACES_MAX);
        let most = forecast.cells.values().map(|cell| cell.holes.len()).max();
        assert_eq!(most, Some(HOLES_MAX));
    }

    #[test]
    fn lengths_are_a_distribution() {
        let lengths = DurationDistribution::of(vec![(30.0, 1.0), (10.0, 2.0), (20.0, 1.0)]);
        assert_eq!(
            (lengths.quantile(0.5), lengths.quantile(0.9)),
            (Some(10.0), Some(30.0))
        );
        assert_eq!(
            (lengths.longer_than(10.0), lengths.longer_than(25.0)),
            (0.5, 0.25)
        );
    }

    #[test]
    fn squares_have_eight_around_them_and_names_none() {
        assert_eq!(LocationCell::at(-1.0, 250.0).around().count(), 9);
        assert!(
            LocationCell::at(-1.0, 250.0)
                .around()
                .any(|near| near == LocationCell::at(50.0, 350.0))
        );
        assert!(
            LocationCell::at(50.0, -1.0)
                .around()
                .any(|near| near == LocationCell::at(-50.0, -150.0))
        );
        assert_eq!(LocationCell::named("a").around().count(), 1);
    }
}
