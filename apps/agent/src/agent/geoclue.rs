//! Where the device is, by GeoClue.
//!
//! ```text
//!  GeoClue ── position, exact to 100 m ──▶ DevicePoint ── told again while no newer one comes ──▶ squares of 100 m
//! ```

use std::time::Duration;

use d2tp_links::{GeoClue, MeasuredPosition};
use tokio::sync::watch;

use super::device_point::DevicePoint;
use crate::fetch::report::print_stderr;

/// The least exact position that is used, in metres: a square of places.
const ACCURACY_M_MAX: f64 = 100.0;
/// How often a position is told again while GeoClue has no newer one: it tells changes alone.
const TELL_EVERY: Duration = Duration::from_secs(5); // a guess: half of the time for which a point counts
/// How soon GeoClue is asked again that is not there, or refused.
const AGAIN: Duration = Duration::from_secs(60); // a guess: a desktop that starts

/// Tells points until nobody asks for them any more.
pub(super) async fn follow(tell: watch::Sender<Option<DevicePoint>>) {
    let mut has_said = false;
    loop {
        match GeoClue::system().await {
            Ok(geoclue) => read_points(geoclue, &tell).await,
            Err(error) if has_said => tracing::debug!(%error, "no position"),
            Err(error) => {
                print_stderr(&format!("note: no position for radios that sleep: {error}"));
                has_said = true;
            }
        }
        if tell.is_closed() {
            return;
        }
        tokio::time::sleep(AGAIN).await;
    }
}

async fn read_points(mut geoclue: GeoClue, tell: &watch::Sender<Option<DevicePoint>>) {
    let mut latest = None;
    loop {
        tokio::select! {
            position = geoclue.next() => match position {
                Some(position) => latest = Some(position),
                None => return,
            },
            () = tokio::time::sleep(TELL_EVERY), if latest.is_some() => {}
        }
        tell.send_replace(latest.and_then(point_of));
    }
}

/// The point at a position, if that is exact enough.
fn point_of(position: MeasuredPosition) -> Option<DevicePoint> {
    let is_exact = position.accuracy_m <= ACCURACY_M_MAX;
    DevicePoint::of(position.latitude, position.longitude).filter(|_| is_exact)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_that_are_off_by_more_than_a_square_are_not_used() {
        let at = |accuracy_m| {
            point_of(MeasuredPosition {
                latitude: 52.5,
                longitude: 13.4,
                accuracy_m,
            })
        };
        assert!(at(8.0).and_then(DevicePoint::now).is_some());
        for accuracy_m in [101.0, 25_000.0, f64::NAN] {
            assert_eq!(at(accuracy_m), None, "{accuracy_m}");
        }
    }
}
