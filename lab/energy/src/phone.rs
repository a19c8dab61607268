//! What a phone consumes that waits for Wi-Fi: asleep, awake, or looking for it.
//!
//! ```text
//!  asleep ───┐resume            suspend┌─── asleep        a look: `turn` and the scan awake,
//!            │  ┌──── scan ────┐       │                          the radio during the scan
//!            └──┴──────────────┴───────┘
//! ```

use crate::PowerStage;
use d2tp_time::Span;

/// A phone with its screen off and nothing to do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Phone {
    /// Which phone, and where its figures are from.
    pub name: &'static str,
    /// Asleep, its cellular radio paged now and then.
    pub asleep_milliwatts: f64,
    /// A processor that may not sleep, beyond that.
    pub awake_milliwatts: f64,
    /// A Wi-Fi radio that is on and carries nothing, beyond that.
    pub wifi_milliwatts: f64,
    /// A scan of all channels, beyond that.
    pub scan: PowerStage,
    /// Out of sleep and back.
    pub turn: Span,
}

impl Phone {
    /// What a look out of sleep takes beyond sleeping on, in joules.
    pub fn look_joules(&self) -> f64 {
        let awake = self.scan.span + self.turn;
        let beyond = self.awake_milliwatts + self.wifi_milliwatts;
        joules(beyond, awake) + joules(self.scan.milliwatts, self.scan.span)
    }

    /// Mean power of a time asleep with so many looks, in milliwatts.
    pub fn looking_milliwatts(&self, looks: u64, over: Span) -> f64 {
        self.asleep_milliwatts + 1e3 * looks as f64 * self.look_joules() / over.as_secs_f64()
    }

    /// Mean power held awake, with a scan so often.
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
