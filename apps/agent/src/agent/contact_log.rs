//! What was learnt of outages, without names, places and times: for a study of coverage, if the user hands it over.
//!
//! Nothing sends this anywhere. Places are numbered in a random order, another one each time; lengths are rounded.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};

use d2tp_sched::LinkForecast;

use super::link_history_store;

/// The steps to which lengths are rounded, in seconds and metres.
const SECONDS_STEP: f32 = 1.0;
const METRES_STEP: f32 = 10.0;

/// An outage of a link.
#[derive(Clone, Debug, PartialEq)]
pub struct ContactRecord {
    /// What failed: `Wi-Fi`, `cellular` or `other`.
    pub link: &'static str,
    /// The number of the place where it began; outages with one number began at one place.
    pub place: usize,
    /// How long the outage lasted, in seconds.
    pub seconds: f32,
    /// How far the device went meanwhile, in metres, if its position was known.
    pub metres: Option<f32>,
}

impl ContactRecord {
    /// The device's speed in the outage in metres per second, if its position was known.
    pub fn speed(&self) -> Option<f32> {
        self.metres
            .map(|metres| metres / self.seconds.max(SECONDS_STEP))
    }
}

/// The outages that this device remembers.
///
/// # Errors
/// The file of what was learnt cannot be read.
pub fn contact_log() -> anyhow::Result<Vec<ContactRecord>> {
    Ok(anonymous(&link_history_store::kept_forecasts()?))
}

fn anonymous(forecasts: &BTreeMap<String, LinkForecast>) -> Vec<ContactRecord> {
    let order = RandomState::new();
    let outages = || {
        let all = forecasts.iter();
        all.flat_map(|(slot, forecast)| forecast.outages().map(move |outage| (slot, outage)))
    };
    // A place is the same for all links.
    let mut places: Vec<_> = outages().map(|(_, (place, ..))| place).collect();
    places.sort_unstable();
    places.dedup();
    places.sort_by_cached_key(|place| order.hash_one(place));
    let record = |(slot, (place, seconds, metres)): (&String, (_, f32, Option<f32>))| {
        let rounded = |length: f32, step: f32| (length / step).round() * step;
        ContactRecord {
            link: kind(slot),
            place: places.iter().position(|known| *known == place).unwrap_or(0) + 1,
            seconds: rounded(seconds, SECONDS_STEP),
            metres: metres.map(|metres| rounded(metres, METRES_STEP)),
        }
    };
    let mut records: Vec<ContactRecord> = outages().map(record).collect();
    records.sort_by_key(|record| (record.place, record.link));
    records
}

/// What a link is; its name may say whose it is.
fn kind(slot: &str) -> &'static str {
    let slot = slot.to_ascii_lowercase();
    let has = |words: [&str; 2]| words.iter().any(|word| slot.contains(word));
    if has(["wi-fi", "wlan"]) {
        "Wi-Fi"
    } else if has(["cell", "wwan"]) {
        "cellular"
    } else {
        "other"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_sched::DeviceLocation;
    use d2tp_time::{Span, Time};

    /// A link that was lost at each of these places for so many seconds, again and again.
    fn forecast(places: &[(DeviceLocation, u64)], times: u64) -> LinkForecast {
        let (mut forecast, mut now) = (LinkForecast::new(), Time::ZERO);
        for _ in 0..times {
            for (place, seconds) in places {
                forecast.observe(now, place, true);
                now += Span::from_secs(60);
                forecast.observe(now, place, false);
                now += Span::from_secs(*seconds);
                forecast.observe(now, place, true);
                now += Span::from_secs(60);
            }
        }
        forecast
    }

    #[test]
    fn outages_are_told_without_names_and_places_and_those_of_one_place_belong_together() {
        let home = DeviceLocation::named("Home of Somebody");
        let bridge = DeviceLocation::at(897_752.3, 5_844_300.7);
        let forecasts = BTreeMap::from([
            ("Wi-Fi".to_owned(), forecast(&[(home, 40), (bridge, 7)], 3)),
            (
                "carrier:26201 wwan0".to_owned(),
                forecast(&[(bridge, 200)], 1),
            ),
        ]);
        let records = anonymous(&forecasts);
        assert_eq!(records.len(), 7);
        let text = format!("{records:?}");
        for word in ["Home", "Somebody", "26201", "8977", "58443"] {
            assert!(!text.contains(word), "{text}");
        }
        let of = |seconds: f32| -> Vec<usize> {
            let all = records.iter().filter(|record| record.seconds == seconds);
            all.map(|record| record.place).collect()
        };
        let (at_home, at_bridge, cellular) = (of(40.0), of(7.0), of(200.0));
        assert_eq!((at_home.len(), at_bridge.len(), cellular.len()), (3, 3, 1));
        assert!(at_home.iter().all(|place| *place == at_home[0]));
        assert!(
            at_bridge
                .iter()
                .chain(&cellular)
                .all(|place| *place != at_home[0])
        );
        assert_eq!(at_bridge[0], cellular[0]);
        let moved = records.iter().find(|record| record.seconds == 7.0).unwrap();
        assert_eq!(moved.speed(), Some(0.0));
    }
}
