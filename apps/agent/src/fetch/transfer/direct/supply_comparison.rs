//! Whether a metered link helps a direct transfer, found out by using it.
//!
//! ```text
//!  free link, 120 kB/s ─▶ metered link, 120 kB/s as well ─▶ the server is slow: back to the free link
//!                                                            for a while, each time for longer
//! ```
//!
//! Nobody tells a device how fast a server could send. But a transfer that has one connection at a time
//! gains nothing on a metered link that is no faster for it, whatever the cause.

use std::time::Duration;

use d2tp_sched::SourceSupply;

use crate::fetch::boot_clock::BootInstant;

/// The factor by which a metered link must be faster for the transfer.
const GAIN: f64 = 1.25; // a guess: less is within what rates vary by
/// The beginning of a connection that does not count.
const STARTS: Duration = Duration::from_secs(2); // a guess: a slow start over a long way
/// How long a metered link is measured.
const MEASURED: Duration = Duration::from_secs(3); // a guess
/// How long a free link must have been measured.
const FREE_MEASURED: Duration = Duration::from_millis(800); // a guess: what is left of an epoch after the head
/// How long metered links are left alone at first; each following time is twice as long.
const REST_FIRST: Duration = Duration::from_secs(600); // a guess
/// The longest of these times.
const REST_MAX: Duration = Duration::from_secs(4_800); // a guess

/// What a transfer's links carried for it.
#[derive(Debug)]
pub(super) struct SupplyComparison {
    /// The link at present, and whether it is metered.
    current: Option<(String, bool)>,
    measured: CarriedSample,
    /// The last rate of a free link in bytes per second.
    free_rate: Option<f64>,
    /// The server's rate, and until when it counts.
    verdict: Option<(f64, BootInstant)>,
    rest: Duration,
}

/// What one connection carried.
#[derive(Debug, Clone, Copy, Default)]
struct CarriedSample {
    age: Duration,
    bytes: u64,
    span: Duration,
}

impl Default for SupplyComparison {
    fn default() -> SupplyComparison {
        SupplyComparison {
            current: None,
            measured: CarriedSample::default(),
            free_rate: None,
            verdict: None,
            rest: REST_FIRST,
        }
    }
}

impl SupplyComparison {
    /// Counts what a link carried in an epoch that ends now.
    pub(super) fn on_epoch(
        &mut self,
        link: &str,
        is_metered: bool,
        (bytes, length): (u64, Duration),
        now: BootInstant,
    ) {
        let this = (link, is_metered);
        if self
            .current
            .as_ref()
            .map(|(link, is_metered)| (&**link, *is_metered))
            != Some(this)
        {
            self.current = Some((link.to_owned(), is_metered));
            self.measured = CarriedSample::default();
        }
        let sample = &mut self.measured;
        sample.age += length;
        if is_metered && sample.age < STARTS {
            return;
        }
        sample.bytes += bytes;
        sample.span += length;
        let rate = sample.bytes as f64 / sample.span.as_secs_f64().max(1e-3);
        match (is_metered, self.free_rate) {
            (false, _) if sample.span >= FREE_MEASURED => {
                self.free_rate = Some(rate);
                // A free link's last moments say more than its first ones.
                if sample.span >= MEASURED {
                    *sample = CarriedSample::default();
                }
            }
            (true, Some(free)) if sample.span >= MEASURED => {
                if rate <= GAIN * free {
                    self.verdict = Some((free, now.after(self.rest)));
                    self.rest = (self.rest * 2).min(REST_MAX);
                }
                *sample = CarriedSample {
                    age: sample.age,
                    ..CarriedSample::default()
                };
            }
            _ => {}
        }
    }

    /// Whether no free link has been measured yet, so that a metered one could be compared with none.
    pub(super) fn lacks_free_rate(&self) -> bool {
        self.free_rate.is_none()
    }

    /// The server's supply, as far as it is known.
    pub(super) fn supply(&self, now: BootInstant) -> SourceSupply {
        match self.verdict {
            Some((rate, until)) if now < until => SourceSupply::NoFasterOnMetered {
                bytes_per_s: rate.max(1.0),
            },
            _ => SourceSupply::Ample,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> BootInstant {
        BootInstant::from_boot(Duration::from_secs(100 + seconds))
    }

    /// Lets a link carry for some seconds from this moment on.
    fn carry(
        comparison: &mut SupplyComparison,
        from: u64,
        seconds: u64,
        (link, is_metered): (&str, bool),
        rate: u64,
    ) {
        for second in from + 1..=from + seconds {
            let epoch = (rate, Duration::from_secs(1));
            comparison.on_epoch(link, is_metered, epoch, at(second));
        }
    }

    const WIFI: (&str, bool) = ("wlan0", false);
    const CELL: (&str, bool) = ("wwan0", true);

    #[test]
    fn a_metered_link_that_is_no_faster_is_left_alone_each_time_for_longer() {
        let mut comparison = SupplyComparison::default();
        carry(&mut comparison, 0, 2, WIFI, 118_000);
        carry(&mut comparison, 2, 3, CELL, 120_000);
        assert_eq!(comparison.supply(at(5)), SourceSupply::Ample);
        carry(&mut comparison, 5, 1, CELL, 120_000);
        let limited = SourceSupply::NoFasterOnMetered {
            bytes_per_s: 118_000.0,
        };
        assert_eq!(comparison.supply(at(6)), limited);
        carry(&mut comparison, 6, 594, WIFI, 118_000);
        assert_eq!(comparison.supply(at(605)), limited);
        assert_eq!(comparison.supply(at(606)), SourceSupply::Ample);
        carry(&mut comparison, 610, 5, CELL, 120_000);
        assert_eq!(comparison.supply(at(1_800)), limited);
    }

    #[test]
    fn a_free_link_is_not_measured_by_the_end_of_an_epoch() {
        let mut comparison = SupplyComparison::default();
        let mut carry_for = |ms: u64| {
            let epoch = (120 * ms, Duration::from_millis(ms));
            comparison.on_epoch("wlan0", false, epoch, at(1));
            comparison.lacks_free_rate()
        };
        // The head came late.
        assert!(carry_for(300));
        assert!(!carry_for(1_000));
    }

    #[test]
    fn a_metered_link_that_is_faster_goes_on() {
        let mut comparison = SupplyComparison::default();
        carry(&mut comparison, 0, 4, WIFI, 118_000);
        carry(&mut comparison, 4, 60, CELL, 200_000);
        assert_eq!(comparison.supply(at(64)), SourceSupply::Ample);
    }

    #[test]
    fn without_a_free_link_there_is_nothing_to_compare_with() {
        let mut comparison = SupplyComparison::default();
        carry(&mut comparison, 0, 60, CELL, 120_000);
        assert_eq!(comparison.supply(at(60)), SourceSupply::Ample);
    }
}
