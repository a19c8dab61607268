//! The phone that waits for Wi-Fi, with figures of one phone, and variations of each of them.
//!
//! Asleep: 43 mW, measured by Moon et al., *Cedos*, on a Galaxy S3 with LTE; nothing else is taken from there.
//! Currents, times 3.7 V (its battery's): all from the Galaxy S3's own `power_profile.xml`: 44 mA for a
//! processor held awake, 4 mA for Wi-Fi that is on, 220 mA for a scan. The last one is doubtful: the Nexus
//! One's file of 2010 has the same 220 mA with the same 4 mA and 120 mA beside it, so it was perhaps carried
//! over and not measured on this radio. The Nexus 5's has 75.48 mA, for a radio of the same maker a generation
//! later. That is one of the variations, not a part of the phone.
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

/// A Galaxy S3 with the figures of its own file.
pub const GALAXY_S3: Phone = Phone {
    name: "Galaxy S3",
    asleep_milliwatts: 43.0,
    awake_milliwatts: 44.0 * VOLTS,
    wifi_milliwatts: 4.0 * VOLTS,
    scan: scan(SCAN_BOTH_MS, 220.0),
    turn: Span::from_secs(1),
};

/// The Galaxy S3 with one figure changed at a time, each with a name.
pub const VARIATIONS: [(&str, Phone); 8] = [
    (
        "scan_110_ma",
        Phone {
            scan: scan(SCAN_BOTH_MS, 110.0),
            ..GALAXY_S3
        },
    ),
    // That of the Nexus 5.
    (
        "scan_75_ma",
        Phone {
            scan: scan(SCAN_BOTH_MS, 75.48),
            ..GALAXY_S3
        },
    ),
    (
        "scan_2_4_ghz",
        Phone {
            scan: scan(SCAN_LOW_MS, 220.0),
            ..GALAXY_S3
        },
    ),
    (
        "turn_0_5_s",
        Phone {
            turn: Span::from_millis(500),
            ..GALAXY_S3
        },
    ),
    (
        "turn_2_s",
        Phone {
            turn: Span::from_secs(2),
            ..GALAXY_S3
        },
    ),
    (
        "awake_33_ma",
        Phone {
            awake_milliwatts: 33.0 * VOLTS,
            ..GALAXY_S3
        },
    ),
    (
        "awake_55_ma",
        Phone {
            awake_milliwatts: 55.0 * VOLTS,
            ..GALAXY_S3
        },
    ),
    (
        "asleep_20_mw",
        Phone {
            asleep_milliwatts: 20.0,
            ..GALAXY_S3
        },
    ),
];
