//! Encoding and decoding of a [`LinkForecast`].
//!
//! ```text
//!  version ─ visits ─ places: { place, visit, holes: { flags, seconds, metres?, began? } } ─ days: { day, slots }
//! ```
//!
//! Numbers are varints of seven bits each, low ones first: hundredths of a second, tenths of a
//! metre. A point is stored as its grid cell and two bytes for the position within the cell.

use crate::daily_rates::{DAYS_MAX, SLOTS};
use crate::forecast::{
    GRID_M, HOLES_MAX, LinkForecast, LinkOutage, LocationCell, LocationHistory, PLACES_MAX,
};

const VERSION: u8 = 1;
const HAS_METRES: u8 = 1;
const HAS_BEGAN: u8 = 2;
/// The largest length and distance that is stored, in the stored units' base: seconds and metres.
const MOST: f32 = 1e7;

/// The bytes are not a complete forecast.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForecastDecodeError;

impl std::fmt::Display for ForecastDecodeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("these bytes are no forecast")
    }
}

impl std::error::Error for ForecastDecodeError {}

impl LinkForecast {
    /// Encodes what was learnt, without the current outage: a few kilobytes, at most 100.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![VERSION];
        put(&mut out, u64::from(self.visits));
        put(&mut out, self.cells.len() as u64);
        for (place, cell) in &self.cells {
            out.extend(place.number().to_le_bytes());
            put(&mut out, u64::from(cell.visit));
            out.push(cell.holes.len() as u8);
            for hole in &cell.holes {
                let within = hole.began.and_then(|began| place.within(began));
                let flags = u8::from(hole.metres.is_some()) * HAS_METRES
                    + u8::from(within.is_some()) * HAS_BEGAN;
                out.push(flags);
                put(&mut out, (hole.seconds.min(MOST) * 100.0) as u64);
                if let Some(metres) = hole.metres {
                    put(&mut out, (metres.min(MOST) * 10.0) as u64);
                }
                out.extend(within.into_iter().flatten());
            }
        }
        put(&mut out, self.diary.days.len() as u64);
        for (day, slots) in &self.diary.days {
            put(&mut out, u64::from(*day));
            out.extend(slots);
        }
        out
    }

    /// Decodes what [`LinkForecast::encode`] wrote.
    ///
    /// # Errors
    /// The bytes have another format or are damaged.
    pub fn decode(bytes: &[u8]) -> Result<LinkForecast, ForecastDecodeError> {
        let mut from = ForecastReader { bytes };
        let mut forecast = LinkForecast::new();
        if from.byte()? != VERSION {
            return Err(ForecastDecodeError);
        }
        forecast.visits = from.number()?.try_into().map_err(|_| ForecastDecodeError)?;
        for _ in 0..from.count(PLACES_MAX)? {
            let place = LocationCell::numbered(u64::from_le_bytes(from.array()?));
            let visit = from.number()?.try_into().map_err(|_| ForecastDecodeError)?;
            let mut cell = LocationHistory {
                visit,
                ..LocationHistory::default()
            };
            for _ in 0..from.byte()?.min(HOLES_MAX as u8) {
                let flags = from.byte()?;
                let seconds = from.number()? as f32 / 100.0;
                let metres = (flags & HAS_METRES > 0).then(|| from.number());
                let began = (flags & HAS_BEGAN > 0).then(|| from.array());
                cell.holes.push_back(LinkOutage {
                    seconds: seconds.min(MOST),
                    metres: metres
                        .transpose()?
                        .map(|metres| (metres as f32 / 10.0).min(MOST)),
                    began: began.transpose()?.map(|within| place.point(within)),
                });
            }
            forecast.cells.insert(place, cell);
        }
        for _ in 0..from.count(DAYS_MAX)? {
            let day = from.number()?.try_into().map_err(|_| ForecastDecodeError)?;
            forecast.diary.days.push_back((day, from.array::<SLOTS>()?));
        }
        if !from.bytes.is_empty() || !forecast.diary.days.iter().is_sorted_by(|a, b| a.0 < b.0) {
            return Err(ForecastDecodeError);
        }
        Ok(forecast)
    }
}

impl LocationCell {
    /// A point's position in this cell, in parts of 256; `None` for a named place.
    fn within(self, (east, north): (f32, f32)) -> Option<[u8; 2]> {
        let (e, n) = self.square()?;
        let part = |metres: f32, square: i32| {
            let off = f64::from(metres) - f64::from(square) * GRID_M;
            (off / GRID_M * 256.0).clamp(0.0, 255.0) as u8
        };
        Some([part(east, e), part(north, n)])
    }

    fn point(self, [east, north]: [u8; 2]) -> (f32, f32) {
        let (e, n) = self.square().unwrap_or_default();
        let metres = |part: u8, square: i32| {
            ((f64::from(square) + (f64::from(part) + 0.5) / 256.0) * GRID_M) as f32
        };
        (metres(east, e), metres(north, n))
    }
}

fn put(out: &mut Vec<u8>, mut number: u64) {
    while number > 0x7f {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// The bytes that are not read yet.
struct ForecastReader<'a> {
    bytes: &'a [u8],
}

impl ForecastReader<'_> {
    fn byte(&mut self) -> Result<u8, ForecastDecodeError> {
        Ok(self.array::<1>()?[0])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], ForecastDecodeError> {
        let (array, rest) = self
            .bytes
            .split_first_chunk::<N>()
            .ok_or(ForecastDecodeError)?;
        self.bytes = rest;
        Ok(*array)
    }

    fn number(&mut self) -> Result<u64, ForecastDecodeError> {
        let mut number = 0;
        for shift in (0..63).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(ForecastDecodeError)
    }

    fn count(&mut self, most: usize) -> Result<usize, ForecastDecodeError> {
        let count = self.number()? as usize;
        if count <= most {
            Ok(count)
        } else {
            Err(ForecastDecodeError)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forecast::DeviceLocation;
    use d2tp_time::{Span, Time};

    /// A forecast of two weeks on a way to work with five outages.
    fn learnt() -> LinkForecast {
        let mut forecast = LinkForecast::new();
        let mut now = Time::ZERO;
        for day in 0..14 {
            forecast
                .daily_rates()
                .note(day, 0..86_400, f64::from(day) * 1e5);
            for second in 0..1_000u32 {
                let metres = f64::from(second) * (5.0 + f64::from(day) / 10.0);
                let carries = second % 200 < 170;
                forecast.observe(now, &DeviceLocation::at(-1_000.0 + metres, 33.0), carries);
                now += Span::from_secs(1);
            }
            forecast.observe(now, &DeviceLocation::named("work"), true);
        }
        forecast
    }

    #[test]
    fn what_is_written_down_predicts_the_same() {
        let forecast = learnt();
        let bytes = forecast.encode();
        assert!(bytes.len() < 5_000, "{} bytes", bytes.len());
        let mut back = LinkForecast::decode(&bytes).unwrap();
        assert_eq!(back.encode(), bytes);
        let mut forecast = forecast;
        for metres in [0.0, 10.0] {
            let at = |seconds: u64| Time::ZERO + Span::from_secs(100_000 + seconds);
            let (here, there) = (
                DeviceLocation::at(-50.0 + metres, 33.0),
                DeviceLocation::at(-40.0 + metres, 33.0),
            );
            let mut medians = [&mut forecast, &mut back].map(|forecast| {
                forecast.observe(at(0), &here, true);
                forecast.observe(at(2), &there, false);
                let hole = forecast
                    .ongoing_outage(at(2))
                    .expect("it was here every day");
                forecast.observe(at(3), &there, true);
                hole.quantile(0.5).unwrap()
            });
            medians.sort_by(f64::total_cmp);
            assert!(medians[1] - medians[0] < 0.5, "{medians:?}");
        }
    }

    #[test]
    fn damaged_bytes_are_refused_or_read_and_never_panic() {
        let bytes = learnt().encode();
        for cut in 0..bytes.len() {
            assert_eq!(
                LinkForecast::decode(&bytes[..cut]),
                Err(ForecastDecodeError),
                "{cut}"
            );
        }
        for n in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[n / 8] ^= 1 << (n % 8);
            if let Ok(forecast) = LinkForecast::decode(&flipped) {
                forecast.encode();
            }
        }
        let longer: Vec<u8> = bytes.iter().copied().chain([0]).collect();
        assert_eq!(LinkForecast::decode(&longer), Err(ForecastDecodeError));
    }

    #[test]
    fn a_full_one_is_no_larger_than_promised() {
        let mut forecast = LinkForecast::new();
        let mut now = Time::ZERO;
        for n in 0..2_000 * HOLES_MAX {
            let spot = DeviceLocation::at((n / HOLES_MAX) as f64 * GRID_M, 0.0);
            for carries in [true, false, true] {
                forecast.observe(now, &spot, carries);
                now += Span::from_secs(500);
            }
        }
        let bytes = forecast.encode().len();
        assert!((50_000..100_000).contains(&bytes), "{bytes} bytes");
    }
}
