//! Where the device is, in metres.
//!
//! ```text
//!  gpsd, GeoClue ── degrees ──▶ DevicePoint ── metres, while it is fresh ──▶ squares of 100 m in LinkHistoryStore
//! ```

use std::time::{Duration, Instant};

/// How long a point counts that was measured.
const FRESH: Duration = Duration::from_secs(10); // a guess: a bus goes 100 m meanwhile
/// A degree of latitude in metres.
const DEGREE_M: f64 = 111_320.0;

/// A point that was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct DevicePoint {
    /// Metres east of the meridian of Greenwich, and north of the equator.
    metres: (f64, f64),
    measured_at: Instant,
}

impl DevicePoint {
    pub(super) fn of(latitude: f64, longitude: f64) -> Option<DevicePoint> {
        let is_on_earth = latitude.abs() <= 90.0 && longitude.abs() <= 180.0;
        // Of one length within a degree of latitude, so that squares stay where they are: as long as anywhere in it, to one part in fifty.
        let parallel = latitude.round().to_radians().cos();
        is_on_earth.then(|| DevicePoint {
            metres: (longitude * DEGREE_M * parallel, latitude * DEGREE_M),
            measured_at: Instant::now(),
        })
    }

    /// The point, unless it is old.
    pub(super) fn now(self) -> Option<(f64, f64)> {
        (self.measured_at.elapsed() < FRESH).then_some(self.metres)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_within_a_degree_are_as_far_apart_as_on_the_map() {
        let point = |lat, lon| DevicePoint::of(lat, lon).unwrap().metres;
        let (a, b) = (point(48.10, 11.5), point(48.11, 11.51));
        // 1,112 m north, 743 m east.
        assert!((b.1 - a.1 - 1_113.0).abs() < 5.0);
        assert!((b.0 - a.0 - 745.0).abs() < 10.0);
        assert_eq!(DevicePoint::of(f64::NAN, 0.0), None);
        assert_eq!(DevicePoint::of(0.0, 181.0), None);
    }
}
