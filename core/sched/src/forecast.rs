//! Where and when a link carries, learnt from the device's own history of it.
//!
//! ```text
//!  lost at a place, back some metres and seconds later ─▶ holes by place: how long it will be away
//!  rate in each ten minutes of the last two weeks      ─▶ a diary: what it will carry at that hour
//!                                                             │
//!  History::hint ◀── Hint: lengths from here, days from now ◀─┘      Outlook draws its scenes from them
//! ```
//!
//! A place is whatever the caller can tell: a square of 100 m where there is a position, else the
//! network or the cells around. Holes are remembered with the metres they span, where those are known: who
//! is faster today is back sooner. All of it is what happened on this device, bounded, and a
//! few kilobytes when written down ([`LinkForecast::encode`]).

use std::collections::{BTreeMap, VecDeque};

use d2tp_time::{Span, Time};

pub use crate::daily_rates::{DailyRates, SLOT_S};

/// The side of a square.
pub const GRID_M: f64 = 100.0; // Epsilon, section 8

/// Places remembered; the one not visited for longest is forgotten for another.
pub const PLACES_MAX: usize = 1_024;

/// Holes remembered of each.
pub const HOLES_MAX: usize = 12;

/// Each hole counts so much less than the one after it.
const FADE: f64 = 0.85; // tried beside 1, on other routes than those of `cedos repro E3`

/// A hole that began so far from here counts a third.
const NEAR_M: f64 = 25.0; // tried beside 12 and 40, likewise

/// Samples that together weigh less than this say nothing: the hole is another one.
const WEIGHT_MIN: f64 = 0.2; // a guess

/// How far today's speed shortens a hole: 0 not at all, 1 in proportion. The speed when it begins says only
/// half of what it will be.
const SPEED_SHARE: f64 = 0.5; // tried beside 0.3, 0.8 and 1, likewise

/// Speed is measured over so long.
const SPEED_OVER_S: f64 = 15.0; // tried beside 40, likewise

/// Slower is standing, metres a second.
const SPEED_MIN: f64 = 0.3;

/// A place, as far as the caller can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LocationCell(u64);

impl LocationCell {
    /// The cell of a place that has a name: an SSID, or the cell towers around.
    pub fn named(name: &str) -> LocationCell {
        // FNV-1a; that two names share a place by chance costs a wrong guess.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        LocationCell(hash | 1)
    }

    /// The square around a point, metres east and north of anywhere.
    pub fn at(east_m: f64, north_m: f64) -> LocationCell {
        LocationCell::of_square(
            (east_m / GRID_M).floor() as i32,
            (north_m / GRID_M).floor() as i32,
        )
    }

    fn of_square(east: i32, north: i32) -> LocationCell {
        // 31 bits to the east: as far as the Earth goes round, and more.
        let east = u64::from(east as u32 & 0x7fff_ffff);
        LocationCell((east << 32 | u64::from(north as u32)) << 1)
    }

    pub(crate) fn number(self) -> u64 {
        self.0
    }

    pub(crate) fn numbered(number: u64) -> LocationCell {
        LocationCell(number)
    }

    /// How far east and north, in squares; none for one with a name.
    pub(crate) fn square(self) -> Option<(i32, i32)> {
        let sign_back = |east: i32| east << 1 >> 1;
        (self.0 & 1 == 0).then_some((sign_back((self.0 >> 33) as i32), (self.0 >> 1) as i32))
    }

    /// The cell and the squares around it; a named place has none around.
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
pub struct Location {
    /// The cell of the grid, or the named place.
    pub place: LocationCell,
    /// The point, metres east and north of anywhere, where it is known.
    pub point: Option<(f64, f64)>,
}

impl Location {
    /// A place without a point.
    pub fn named(name: &str) -> Location {
        Location {
            place: LocationCell::named(name),
            point: None,
        }
    }

    /// A point.
    pub fn at(east_m: f64, north_m: f64) -> Location {
        Location {
            place: LocationCell::at(east_m, north_m),
            point: Some((east_m, north_m)),
        }
    }
}

/// A hole that ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LinkOutage {
    pub(crate) seconds: f32,
    /// From where it was lost to where it was back, along the way; none where no points were known.
    pub(crate) metres: Option<f32>,
    /// Where it began.
    pub(crate) began: Option<(f32, f32)>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct LocationHistory {
    /// The latest last.
    pub(crate) holes: VecDeque<LinkOutage>,
    /// When it was visited, counting visits.
    pub(crate) visit: u32,
}

/// What is under way.
#[derive(Debug, Clone, Copy, PartialEq)]
struct OngoingOutage {
    since: Time,
    spot: Location,
    metres: f64,
    /// Metres a second as it began.
    speed: Option<f64>,
}

/// How long something will last, as a distribution.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DurationDistribution {
    /// Seconds, ascending, and how much each counts.
    weighed: Vec<(f64, f64)>,
}

impl DurationDistribution {
    fn of(mut weighed: Vec<(f64, f64)>) -> DurationDistribution {
        weighed.sort_by(|a, b| a.0.total_cmp(&b.0));
        DurationDistribution { weighed }
    }

    /// Seconds that this share of them is shorter than.
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let all: f64 = self.weighed.iter().map(|(_, weight)| weight).sum();
        let mut below = 0.0;
        let found = self.weighed.iter().find(|(_, weight)| {
            below += weight;
            below >= share * all
        });
        found.or(self.weighed.last()).map(|(seconds, _)| *seconds)
    }

    /// How likely it lasts longer.
    pub fn longer_than(&self, seconds: f64) -> f64 {
        let all: f64 = self.weighed.iter().map(|(_, weight)| weight).sum();
        let longer = self.weighed.iter().filter(|(length, _)| *length > seconds);
        longer.map(|(_, weight)| weight).sum::<f64>() / all
    }

    /// The durations that were observed, in seconds, as they are.
    pub fn seconds(&self) -> impl Iterator<Item = f64> {
        self.weighed.iter().map(|(seconds, _)| *seconds)
    }
}

/// What a link's forecast tells its [`LinkHistory`](crate::LinkHistory).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ForecastHint {
    /// How long holes that begin here last.
    pub away_s: Vec<f64>,
    /// Bytes a second in each slot from now on, as on past days; none where nobody knows.
    pub days: Vec<Vec<Option<f32>>>,
    /// Seconds of the slot under way that are over.
    pub into_slot_s: f64,
}

/// What is learnt of one link.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LinkForecast {
    pub(crate) cells: BTreeMap<LocationCell, LocationHistory>,
    pub(crate) visits: u32,
    pub(crate) diary: DailyRates,
    carries: bool,
    open: Option<OngoingOutage>,
    /// Points of the last seconds: when, and how far along.
    trail: VecDeque<(Time, f64)>,
    point: Option<(f64, f64)>,
    along_m: f64,
}

impl LinkForecast {
    /// The forecast of a link that nothing is known of.
    pub fn new() -> LinkForecast {
        LinkForecast::default()
    }

    /// Takes down where the device is and whether the link carries there: at each change of either, and
    /// every few seconds on the move.
    pub fn observe(&mut self, now: Time, spot: &Location, carries: bool) {
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

    /// The rates of the link by the hour.
    pub fn daily_rates(&mut self) -> &mut DailyRates {
        &mut self.diary
    }

    /// How long the hole under way will have lasted in all; none where nothing is known of this place, or
    /// the link carries.
    pub fn ongoing_outage(&self, now: Time) -> Option<DurationDistribution> {
        let open = self.open?;
        let age = now.since(open.since).as_secs_f64();
        let mut weighed = self.lengths_here(&open.spot, open.speed);
        // Those that would be over by now say nothing any more.
        weighed.retain(|(seconds, _)| *seconds > age);
        let weight: f64 = weighed.iter().map(|(_, weight)| weight).sum();
        (weight >= WEIGHT_MIN).then(|| DurationDistribution::of(weighed))
    }

    /// Whether to go over to a link with this round trip because of the hole under way: not for one that
    /// will probably be over before the first byte over there is back.
    pub fn is_worth_bridging(&self, now: Time, round_trip: Span) -> bool {
        let round_trip_s = round_trip.as_secs_f64();
        self.ongoing_outage(now).is_none_or(|hole| {
            let age = (self.open).map_or(0.0, |open| now.since(open.since).as_secs_f64());
            hole.longer_than(age + round_trip_s) >= 0.5
        })
    }

    /// For the link's history, at this day and second of it.
    pub fn hint(&self, now: Time, day: u32, second: u32) -> ForecastHint {
        ForecastHint {
            away_s: self
                .ongoing_outage(now)
                .map_or_else(Vec::new, |hole| hole.seconds().collect()),
            days: self.diary.days_from(day, second),
            into_slot_s: f64::from(second % SLOT_S),
        }
    }

    /// Lengths of holes that began near here, in seconds, weighed.
    fn lengths_here(&self, spot: &Location, speed: Option<f64>) -> Vec<(f64, f64)> {
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

    fn learn(&mut self, now: Time, open: OngoingOutage, spot: &Location) {
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

    fn walk(&mut self, now: Time, spot: &Location) {
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

/// A third at one, a ninth at two: without the platform's exponential function.
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

    /// Walks a line of 1 km at a speed, with holes from and until these metres, a look a second.
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
            forecast.observe(now, &Location::at(metres, 50.0), carries);
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
        forecast.observe(now, &Location::named("home"), true);
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
    fn a_hole_that_is_shorter_than_the_round_trip_is_not_bridged_and_an_unknown_one_is() {
        let mut forecast = LinkForecast::new();
        let mut now = Time::ZERO;
        let second = Span::from_secs(1);
        let mut lose = |forecast: &mut LinkForecast, name: &str, millis: u64| {
            forecast.observe(now, &Location::named(name), true);
            now += second;
            forecast.observe(now, &Location::named(name), false);
            let bridged = forecast.is_worth_bridging(now, Span::from_millis(600));
            now += Span::from_millis(millis);
            forecast.observe(now, &Location::named(name), true);
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
        let spot = Location::named("stairs");
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
                    forecast.observe(now, &Location::named(&n.to_string()), carries);
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
