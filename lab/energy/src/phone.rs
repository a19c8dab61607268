//! The energy of a phone that waits for Wi-Fi: asleep, awake, or scanning.
//!
//! ```text
//!  asleep ───┐resume            suspend┌─── asleep        a scan: awake for `turn` and the scan,
//!            │  ┌──── scan ────┐       │                          the radio on during the scan
//!            └──┴──────────────┴───────┘
//! ```

use crate::PowerStage;
use d2tp_time::Span;

/// A phone with its screen off and nothing to do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Phone {
    /// The phone, and the source of its figures.
    pub name: &'static str,
    /// Power while asleep, including paging of its cellular radio.
    pub asleep_milliwatts: f64,
    /// Additional power of a processor that is kept awake.
    pub awake_milliwatts: f64,
    /// Additional power of a Wi-Fi radio that is on and carries nothing.
    pub wifi_milliwatts: f64,
    /// Additional power during a scan of all channels.
    pub scan: PowerStage,
    /// The time to resume and suspend.
    pub turn: Span,
}

impl Phone {
    /// The energy of a scan during sleep, in addition to that of sleeping, in joules.
    pub fn look_joules(&self) -> f64 {
        let awake = self.scan.span + self.turn;
        let beyond = self.awake_milliwatts + self.wifi_milliwatts;
        joules(beyond, awake) + joules(self.scan.milliwatts, self.scan.span)
    }

    /// The mean power over a time asleep with this many scans, in milliwatts.
    pub fn looking_milliwatts(&self, looks: u64, over: Span) -> f64 {
        self.asleep_milliwatts + 1e3 * looks as f64 * self.look_joules() / over.as_secs_f64()
    }

    /// The mean power while kept awake, with a scan at this interval, in milliwatts.
    pub fn held_milliwatts(&self, every: Span) -> f64 {
        let scans = joules(self.scan.milliwatts, self.scan.span) / every.as_secs_f64();
        self.asleep_milliwatts + self.awake_milliwatts + self.wifi_milliwatts + 1e3 * scans
    }
}

fn joules(milliwatts: f64, span: Span) -> f64 {
    milliwatts / 1e3 * span.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PHONE: Phone = Phone {
        name: "made up",
        asleep_milliwatts: 10.0,
        awake_milliwatts: 100.0,
        wifi_milliwatts: 20.0,
        scan: PowerStage {
            span: Span::from_secs(2),
            milliwatts: 500.0,
        },
        turn: Span::from_secs(1),
    };

    #[test]
    fn a_look_costs_the_time_awake_and_the_scan() {
        // 3 s at 120 mW, 2 s at 500 mW.
        assert!((PHONE.look_joules() - 1.36).abs() < 1e-9);
        let mean = PHONE.looking_milliwatts(3, Span::from_secs(60));
        assert!((mean - 78.0).abs() < 1e-9, "{mean}");
        assert_eq!(PHONE.looking_milliwatts(0, Span::from_secs(60)), 10.0);
    }

    #[test]
    fn held_awake_it_never_sleeps_and_scans_as_well() {
        let held = PHONE.held_milliwatts(Span::from_secs(100));
        assert!((held - 140.0).abs() < 1e-9, "{held}");
    }
}
