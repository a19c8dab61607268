//! Radios, with measurements by others.
//!
//! "2012": Huang et al., *A Close Examination of Performance and Power Characteristics of 4G LTE
//! Networks*, MobiSys 2012, tables 3 and 4 (an HTC ThunderBolt): ramp, tail and idle as measured,
//! power at work as β and per byte as 8 α of their linear model. "G1": the HTC Dream of Zhang et
//! al., *Accurate Online Power Estimation and Automatic Battery Behavior Based Power Model
//! Generation for Smartphones*, CODES+ISSS 2010 (PowerTutor), the phone that Super-aggregation's
//! authors used too; the power of states only, its terms for channel rate and signal left out.
//! "i997": the Samsung i997 (Infuse) as its profile in AT&T's Application Resource Optimizer has
//! it, the tool of Qian et al., *Profiling Resource Usage for Mobile Applications*, MobiSys 2011;
//! promotion, states and their timers, power of states only.
//!
//! Checked against a source: all of the i997 (`i997.conf` of that tool), all of the G1 (constants
//! of PowerTutor's library), and of LTE ramp, tail power, α and the 100 ms (`lte.conf`, which has
//! 1.2 W for β = 1.288 W and 10.1 s for the tail of 11.6 s). Not checked, for no copy of the tables
//! was at hand: those two of LTE, and 3G and Wi-Fi of 2012.

use crate::{PowerStage, Radio};
use d2tp_time::Span;

const NONE: PowerStage = stage(0, 0.0);

const fn stage(millis: u64, milliwatts: f64) -> PowerStage {
    PowerStage {
        span: Span::from_millis(millis),
        milliwatts,
    }
}

/// How long after a byte the radio counts as being at work. // the shortest tail measured, 100 ms
/// of LTE's inactivity before it first sleeps (Huang et al., table 3)
const AT_WORK_MS: u64 = 100;

/// An LTE radio of 2012.
pub const LTE_2012: Radio = Radio {
    name: "LTE (Huang et al. 2012)",
    idle_milliwatts: 0.0,
    ramp: stage(260, 1210.7),
    stages: &[stage(AT_WORK_MS, 1288.04), stage(11_476, 1060.0)],
    up_nanojoules: 8.0 * 438.39,
    down_nanojoules: 8.0 * 51.97,
};

/// A 3G radio of 2012: a dedicated channel, then a shared one.
pub const UMTS_2012: Radio = Radio {
    name: "3G (Huang et al. 2012)",
    idle_milliwatts: 0.0,
    ramp: stage(582, 659.4),
    stages: &[
        stage(AT_WORK_MS, 817.88),
        stage(7_988, 803.9),
        stage(824, 601.3),
    ],
    up_nanojoules: 8.0 * 868.98,
    down_nanojoules: 8.0 * 122.12,
};

/// A Wi-Fi radio of 2012.
pub const WIFI_2012: Radio = Radio {
    name: "Wi-Fi (Huang et al. 2012)",
    idle_milliwatts: 0.0,
    ramp: stage(79, 124.4),
    stages: &[stage(AT_WORK_MS, 132.86), stage(138, 119.3)],
    up_nanojoules: 8.0 * 283.17,
    down_nanojoules: 8.0 * 137.01,
};

/// The 3G radio of the G1: 4 s in the dedicated channel, 6 s in the shared one.
pub const UMTS_G1: Radio = Radio {
    name: "3G (HTC Dream, PowerTutor)",
    idle_milliwatts: 10.0,
    ramp: NONE,
    stages: &[stage(4_000, 570.0), stage(6_000, 401.0)],
    up_nanojoules: 0.0,
    down_nanojoules: 0.0,
};

/// The Wi-Fi radio of the G1. PowerTutor samples once a second.
pub const WIFI_G1: Radio = Radio {
    name: "Wi-Fi (HTC Dream, PowerTutor)",
    idle_milliwatts: 20.0,
    ramp: NONE,
    stages: &[stage(1_000, 710.0)],
    up_nanojoules: 0.0,
    down_nanojoules: 0.0,
};

/// The 3G radio of the i997: 2 s of promotion, 4 s in the dedicated channel, 10 s in the shared
/// one.
pub const UMTS_I997: Radio = Radio {
    name: "3G (Samsung i997, ARO)",
    idle_milliwatts: 0.0,
    ramp: stage(2_000, 650.0),
    stages: &[stage(4_000, 1_300.0), stage(10_000, 300.0)],
    up_nanojoules: 0.0,
    down_nanojoules: 0.0,
};

/// The Wi-Fi radio of the i997.
pub const WIFI_I997: Radio = Radio {
    name: "Wi-Fi (Samsung i997, ARO)",
    idle_milliwatts: 20.0,
    ramp: NONE,
    stages: &[stage(250, 1_160.0)],
    up_nanojoules: 0.0,
    down_nanojoules: 0.0,
};
