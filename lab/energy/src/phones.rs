//! Phones that wait for Wi-Fi, with figures from their makers and from measurements by others.
//!
//! Asleep: 43 mW, measured by Moon et al., *Cedos*, on a Galaxy S3 with LTE; nothing else is taken
//! from there. Currents, times 3.7 V (its battery's): the Galaxy S3's own `power_profile.xml` (44
//! mA for a processor held awake, 4 mA for Wi-Fi that is on). That file has 220 mA for a scan, as
//! the Nexus One's of 2010 has it, with the same 4 mA and 120 mA beside it: it was carried over,
//! not measured on this radio. The Nexus 5's has 75.48 mA, for a radio of the same maker a
//! generation later, and is that of the paper's other phone: it is what [`GALAXY_S3`] takes, and
//! [`GALAXY_S3_OWN_SCAN`] what its own file says.
//!
//! A scan: 13 channels of 2.4 GHz and 8 of 5 GHz with 40 ms each, 11 more where probes are
//! forbidden (DFS) with 130 ms each. Times: `DHD_SCAN_ACTIVE_TIME` and `DHD_SCAN_PASSIVE_TIME` of
//! the driver of these phones (bcmdhd); channels: those of Korea, where the paper measured.
//!
//! A guess, and fitted to nothing: one second to resume and suspend.

use crate::{Phone, PowerStage};
use d2tp_time::Span;

/// Volts of a Galaxy S3's battery.
const VOLTS: f64 = 3.7;

/// A scan of both bands: 21 channels with probes, 11 where the radio only listens.
const SCAN_BOTH_MS: u64 = 21 * 40 + 11 * 130;
/// A scan of 2.4 GHz alone.
const SCAN_LOW_MS: u64 = 13 * 40;

const fn scan(millis: u64, milliamperes: f64) -> PowerStage {
    PowerStage {
        span: Span::from_millis(millis),
        milliwatts: milliamperes * VOLTS,
    }
}

/// A Galaxy S3 whose radio scans at the Nexus 5's current.
pub const GALAXY_S3: Phone = Phone {
    name: "Galaxy S3, the Nexus 5's scan",
    asleep_milliwatts: 43.0,
    awake_milliwatts: 44.0 * VOLTS,
    wifi_milliwatts: 4.0 * VOLTS,
    scan: scan(SCAN_BOTH_MS, 75.48),
    turn: Span::from_secs(1),
};

/// The Galaxy S3 with all figures of its own file.
pub const GALAXY_S3_OWN_SCAN: Phone = Phone {
    name: "Galaxy S3, its own file's scan",
    scan: scan(SCAN_BOTH_MS, 220.0),
    ..GALAXY_S3
};

/// The Galaxy S3 with its own file, scanning only 2.4 GHz, which most networks then used.
pub const GALAXY_S3_OWN_SCAN_LOW: Phone = Phone {
    name: "Galaxy S3, its own file's scan, 2.4 GHz",
    scan: scan(SCAN_LOW_MS, 220.0),
    ..GALAXY_S3
};
