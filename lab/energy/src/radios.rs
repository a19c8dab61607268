//! Radios by name, from the profiles that the product has (`edge/power/radios.toml`, with the source of each).
//!
//! Checked against a source: all of the i997 (`i997.conf` of AT&T's Application Resource Optimizer), all of
//! the G1 (constants of PowerTutor's library), and of LTE ramp, tail power, energy for a byte and the 100 ms
//! at work (`lte.conf` of that tool, which has 1.2 W at work for 1.288 W and 10.1 s for the tail of 11.6 s).
//! Not checked, for no copy of the tables was at hand: those two of LTE, and 3G and Wi-Fi of 2012.

use std::sync::LazyLock;

use d2tp_power::{RadioProfile, RadioProfiles, RadioStage};
use d2tp_time::Span;

use crate::{PowerStage, Radio};

static PROFILES: LazyLock<RadioProfiles> = LazyLock::new(RadioProfiles::built_in);

/// The built-in profile with this name, such as `i997-3g`.
pub fn profile(name: &str) -> Option<&'static RadioProfile> {
    PROFILES.named(name)
}

/// The radio with this name.
///
/// # Panics
/// There is none; names of scenarios are checked with [`profile`].
pub fn radio(name: &str) -> Radio {
    let profile = profile(name);
    Radio::from(profile.unwrap_or_else(|| panic!("there is no radio `{name}`")))
}

/// The built-in profiles.
pub fn all() -> &'static [RadioProfile] {
    PROFILES.all()
}

impl From<&RadioProfile> for Radio {
    fn from(profile: &RadioProfile) -> Radio {
        let stage = |stage: &RadioStage| PowerStage {
            span: Span::from_millis(stage.ms),
            milliwatts: stage.mw,
        };
        Radio {
            name: profile.name.clone(),
            idle_milliwatts: profile.idle_mw,
            ramp: stage(&profile.ramp),
            stages: profile.stages.iter().map(stage).collect(),
            up_nanojoules: profile.up_nj_per_byte,
            down_nanojoules: profile.down_nj_per_byte,
        }
    }
}
