//! Computes the energy that a radio has used.

use crate::{Radio, RadioDirection};
use d2tp_time::{Span, Time};

/// The energy of a radio by state, in joules.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Energy {
    /// Energy for waking the radio.
    pub ramp: f64,
    /// Energy at work, in the first stage after each byte.
    pub work: f64,
    /// Energy in the stages after that.
    pub tail: f64,
    /// Energy while it carries nothing.
    pub idle: f64,
    /// Energy for the bytes themselves.
    pub bytes: f64,
}

impl Energy {
    /// The sum of all parts, in joules.
    pub fn total(&self) -> f64 {
        self.ramp + self.work + self.tail + self.idle + self.bytes
    }
}

/// Computes the energy that a radio uses.
///
/// ```
/// use cedos_lab_energy::{RadioEnergyMeter, Span, Time, RadioDirection, radios};
/// let mut meter = RadioEnergyMeter::new(radios::radio("thunderbolt-lte"), Time::ZERO);
/// meter.on_bytes(Time::ZERO, 1500, RadioDirection::Down);
/// let hour = Time::ZERO + Span::from_secs(3600);
/// // One packet keeps the radio awake for 11.6 s.
/// assert!((meter.until(hour).total() - 12.6).abs() < 0.1);
/// ```
#[derive(Clone, Debug)]
pub struct RadioEnergyMeter {
    radio: Radio,
    /// The time up to which energy was computed.
    now: Time,
    /// When the stages began; `None` in idle.
    stages_at: Option<Time>,
    energy: Energy,
}

impl RadioEnergyMeter {
    /// The meter of a radio that is idle at `now`.
    pub fn new(radio: Radio, now: Time) -> RadioEnergyMeter {
        RadioEnergyMeter {
            radio,
            now,
            stages_at: None,
            energy: Energy::default(),
        }
    }

    /// Records bytes at `now`, which must not go back.
    pub fn on_bytes(&mut self, now: Time, bytes: u64, way: RadioDirection) {
        self.until(now);
        if self.stages_at.is_none() {
            // The ramp takes no time from the following stages, because its power is additional.
            self.energy.ramp += joules(self.radio.ramp.milliwatts, self.radio.ramp.span);
        }
        self.stages_at = Some(now);
        let nanojoules = match way {
            RadioDirection::Up => self.radio.up_nanojoules,
            RadioDirection::Down => self.radio.down_nanojoules,
        };
        self.energy.bytes += bytes as f64 * nanojoules / 1e9;
    }

    /// The energy used until `now`.
    pub fn until(&mut self, now: Time) -> Energy {
        let mut at = self.now;
        if let Some(mut begins) = self.stages_at {
            for (n, stage) in self.radio.stages.iter().enumerate() {
                let ends = begins + stage.span;
                let spent = joules(stage.milliwatts, ends.min(now).since(at.max(begins)));
                if n == 0 {
                    self.energy.work += spent;
                } else {
                    self.energy.tail += spent;
                }
                at = at.max(ends.min(now));
                begins = ends;
            }
            if begins <= now {
                self.stages_at = None;
            }
        }
        self.energy.idle += joules(self.radio.idle_milliwatts, now.since(at));
        self.now = self.now.max(now);
        self.energy
    }
}

fn joules(milliwatts: f64, span: Span) -> f64 {
    milliwatts / 1e3 * span.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PowerStage;

    fn ms(ms: u64) -> Time {
        Time::ZERO + Span::from_millis(ms)
    }

    /// The powers differ in their decimal place, so that each part can be recognized.
    fn radio() -> Radio {
        Radio {
            name: "made up".into(),
            idle_milliwatts: 1.0,
            ramp: PowerStage {
                span: Span::from_secs(1),
                milliwatts: 500.0,
            },
            stages: vec![
                PowerStage {
                    span: Span::from_secs(1),
                    milliwatts: 1000.0,
                },
                PowerStage {
                    span: Span::from_secs(2),
                    milliwatts: 100.0,
                },
            ],
            up_nanojoules: 2e6,
            down_nanojoules: 1e6,
        }
    }

    fn close(energy: Energy, expected: [f64; 5]) -> bool {
        let e = energy;
        let parts = [e.ramp, e.work, e.tail, e.idle, e.bytes];
        std::iter::zip(parts, expected).all(|(a, b)| (a - b).abs() < 1e-9)
    }

    #[test]
    fn one_byte_costs_a_ramp_and_a_whole_tail() {
        let mut meter = RadioEnergyMeter::new(radio(), ms(0));
        meter.on_bytes(ms(1000), 3, RadioDirection::Down);
        let energy = meter.until(ms(10_000));
        // Idle for 1 s before and 6 s after.
        assert!(close(energy, [0.5, 1.0, 0.2, 0.007, 0.003]), "{energy:?}");
    }

    #[test]
    fn a_byte_in_the_tail_begins_the_stages_again_and_needs_no_ramp() {
        let mut meter = RadioEnergyMeter::new(radio(), ms(0));
        meter.on_bytes(ms(0), 0, RadioDirection::Up);
        meter.on_bytes(ms(1500), 1, RadioDirection::Up);
        let energy = meter.until(ms(4500));
        assert!(close(energy, [0.5, 2.0, 0.25, 0.0, 0.002]), "{energy:?}");
        meter.on_bytes(ms(4500), 0, RadioDirection::Up);
        assert!(
            (meter.until(ms(4500)).ramp - 1.0).abs() < 1e-9,
            "it slept by then"
        );
    }

    #[test]
    fn looking_often_changes_nothing() {
        let (mut seldom, mut often) = (
            RadioEnergyMeter::new(radio(), ms(0)),
            RadioEnergyMeter::new(radio(), ms(0)),
        );
        for [before, at] in [[0, 0], [0, 300], [300, 2_000], [2_000, 9_000]] {
            seldom.on_bytes(ms(at), 10, RadioDirection::Down);
            for between in (before..at).step_by(100) {
                often.until(ms(between));
            }
            often.on_bytes(ms(at), 10, RadioDirection::Down);
        }
        let (a, b) = (seldom.until(ms(20_000)), often.until(ms(20_000)));
        assert!((a.total() - b.total()).abs() < 1e-9, "{a:?} {b:?}");
    }
}
