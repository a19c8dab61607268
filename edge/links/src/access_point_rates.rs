//! Chooses access points by the rate that each had before, else by signal strength.

use std::collections::BTreeMap;

use d2tp_time::Time;

use crate::network::{AccessPoint, NetworkInfo};

/// The rate assumed of an unused access point at full signal, in bytes per second; it falls with
/// the square of the signal. Lower: a proven access point is left less readily.
const FULL_SIGNAL_BYTES_PER_S: f64 = 2_500_000.0; // a guess: 20 Mb/s

/// The weakest signal at which an access point counts as in reach.
const SIGNAL_MIN_PERCENT: u8 = 15; // a guess: about -88 dBm, where frames begin to be lost

/// How many times faster another access point must be to be chosen: a change takes seconds in which
/// nothing moves.
const BETTER: f64 = 1.5; // a guess

/// The weight of a new measurement.
const WEIGHT: f64 = 0.3; // a guess

/// The most access points remembered; when there are more, the one used longest ago is dropped.
pub const POINTS_MAX: usize = 512;

/// Measured rates of access points.
#[derive(Debug, Clone, Default)]
pub struct AccessPointRates {
    measured: BTreeMap<String, AccessPointRate>,
}

#[derive(Debug, Clone, Copy)]
struct AccessPointRate {
    bytes_per_s: f64,
    signal_percent: u8,
    at: Time,
}

impl AccessPointRates {
    /// Records a device's goodput on this access point.
    pub fn record_goodput(&mut self, now: Time, point: &AccessPoint, bytes_per_s: f64) {
        let before = self
            .measured
            .get(&point.bssid)
            .map(|known| known.bytes_per_s);
        if before.is_none() && self.measured.len() == POINTS_MAX {
            let oldest = self.measured.iter().min_by_key(|(_, proven)| proven.at);
            if let Some(oldest) = oldest.map(|(bssid, _)| bssid.clone()) {
                self.measured.remove(&oldest);
            }
        }
        let mean = before.map_or(bytes_per_s, |mean| mean + WEIGHT * (bytes_per_s - mean));
        let proven = AccessPointRate {
            bytes_per_s: mean,
            signal_percent: point.signal_percent,
            at: now,
        };
        self.measured.insert(point.bssid.clone(), proven);
    }

    /// The rate to expect of an access point, in bytes per second.
    pub fn expected_rate(&self, point: &AccessPoint) -> f64 {
        let signal = f64::from(point.signal_percent);
        match self.measured.get(&point.bssid) {
            Some(proven) => {
                let then = f64::from(proven.signal_percent.max(1));
                proven.bytes_per_s * (signal / then).min(1.0)
            }
            None => FULL_SIGNAL_BYTES_PER_S * (signal / 100.0).powi(2),
        }
    }

    /// A known access point that should be joined instead of the current one, if there is one that
    /// is not avoided and clearly better.
    pub fn better_than_joined<'a>(
        &self,
        network: &'a NetworkInfo,
        is_shunned: impl Fn(&str) -> bool,
    ) -> Option<&'a AccessPoint> {
        let joined = network.access_point.as_ref();
        let fits = |point: &&AccessPoint| {
            point.known
                && point.signal_percent >= SIGNAL_MIN_PERCENT
                && !is_shunned(&point.bssid)
                && joined.is_none_or(|joined| joined.bssid != point.bssid)
        };
        let others = network.in_sight.iter().filter(fits);
        let best = others.max_by(|a, b| self.expected_rate(a).total_cmp(&self.expected_rate(b)))?;
        let stays = joined.filter(|joined| !is_shunned(&joined.bssid));
        let bar = stays.map_or(0.0, |joined| BETTER * self.expected_rate(joined));
        (self.expected_rate(best) > bar).then_some(best)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(bssid: &str, signal_percent: u8) -> AccessPoint {
        AccessPoint {
            ssid: "cafe".into(),
            bssid: bssid.into(),
            signal_percent,
            frequency_mhz: 2_412,
            known: true,
        }
    }

    fn network(joined: Option<&str>, in_sight: Vec<AccessPoint>) -> NetworkInfo {
        let joined = in_sight.iter().find(|point| Some(&*point.bssid) == joined);
        NetworkInfo {
            device: "wlan0".into(),
            access_point: joined.cloned(),
            in_sight,
            ..NetworkInfo::default()
        }
    }

    fn better(points: &AccessPointRates, network: &NetworkInfo, shunned: &str) -> Option<String> {
        let found = points.better_than_joined(network, |bssid| bssid == shunned);
        found.map(|point| point.bssid.clone())
    }

    #[test]
    fn the_strongest_known_one_is_joined_where_none_is_proven() {
        let stranger = AccessPoint {
            known: false,
            ..point("c", 99)
        };
        let sight = vec![point("a", 40), point("b", 70), stranger, point("d", 10)];
        let points = AccessPointRates::default();
        assert_eq!(
            better(&points, &network(None, sight.clone()), ""),
            Some("b".into())
        );
        assert_eq!(
            better(&points, &network(None, sight), "b"),
            Some("a".into())
        );
        assert_eq!(
            better(&points, &network(None, vec![point("d", 10)]), ""),
            None
        );
    }

    #[test]
    fn what_carried_well_is_kept_against_a_stronger_signal_and_what_did_not_is_left() {
        let sight = vec![point("a", 50), point("b", 90)];
        let on_a = network(Some("a"), sight);
        let mut points = AccessPointRates::default();
        assert_eq!(better(&points, &on_a, ""), Some("b".into()));
        points.record_goodput(Time::ZERO, &point("a", 50), 3e6);
        assert_eq!(better(&points, &on_a, ""), None);
        for _ in 0..20 {
            points.record_goodput(Time::ZERO, &point("a", 50), 20_000.0);
        }
        assert_eq!(better(&points, &on_a, ""), Some("b".into()));
    }

    #[test]
    fn a_little_better_is_no_reason_to_change_but_a_shunned_one_is() {
        let on_a = network(
            Some("a"),
            vec![point("a", 60), point("b", 65), point("c", 20)],
        );
        let points = AccessPointRates::default();
        assert_eq!(better(&points, &on_a, ""), None);
        assert_eq!(better(&points, &on_a, "a"), Some("b".into()));
    }

    #[test]
    fn no_more_are_remembered_than_the_limit() {
        let mut points = AccessPointRates::default();
        for n in 0..2 * POINTS_MAX as u64 {
            points.record_goodput(Time::from_nanos(n), &point(&n.to_string(), 50), 1.0);
        }
        assert_eq!(points.measured.len(), POINTS_MAX);
        assert!(!points.measured.contains_key("0"));
    }
}
