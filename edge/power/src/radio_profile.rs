//! Profiles of radios: what they take at work, in their tail and for a byte, read from a TOML file with the
//! source of each figure. The program has such a file (`radios.toml`); a user may have another one.

use std::collections::BTreeMap;

use d2tp_sched::energy_policy::RadioPowerModel;
use serde::Deserialize;
use thiserror::Error;

/// The most power of a radio, in milliwatts. // a guess: no phone's battery lasts an hour beside more
const MILLIWATTS_MAX: f64 = 20_000.0;
/// The longest stage, in milliseconds. // a guess: tails that were measured are below 20 s
const STAGE_MS_MAX: u64 = 60_000;
/// The most stages. // a guess: two or three were measured
const STAGES_MAX: usize = 8;
/// The most energy for a byte, in nanojoules. // a guess: ten times the most that was measured
const BYTE_NANOJOULES_MAX: f64 = 100_000.0;
/// The most profiles of a file.
const PROFILES_MAX: usize = 256;

/// A constant power for some time.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RadioStage {
    /// The length of the stage in milliseconds.
    pub ms: u64,
    /// The power during the stage in milliwatts.
    pub mw: f64,
}

/// The profile of a radio.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RadioProfile {
    /// The name of the profile.
    pub name: String,
    /// The source of the figures: who measured which radio.
    pub source: String,
    /// The power in milliwatts when the radio has carried nothing for long.
    pub idle_mw: f64,
    /// The stage from the first byte while idle until the radio carries it.
    pub ramp: RadioStage,
    /// The stages after a byte. The first is the radio at work, the others are its tail.
    pub stages: Vec<RadioStage>,
    /// Energy in nanojoules for each byte that the device sends.
    pub up_nj_per_byte: f64,
    /// Energy in nanojoules for each byte that the device receives.
    pub down_nj_per_byte: f64,
}

/// The kind of a link, as far as its radio is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RadioKind {
    /// A wireless LAN.
    Wifi,
    /// A mobile network.
    Cellular,
    /// A wired LAN.
    Ethernet,
}

/// All profiles of a file, and which is the one of each kind of link.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RadioProfiles {
    default: BTreeMap<RadioKind, String>,
    #[serde(rename = "radio")]
    radios: Vec<RadioProfile>,
}

/// An error in a file of profiles.
#[derive(Debug, Error)]
pub enum RadioProfileError {
    /// The text is not of the form that is expected.
    #[error("{0}")]
    Form(#[from] toml::de::Error),
    /// A figure is out of bounds.
    #[error("radio `{name}`: {field} is {value}, not 0 to {most}; the unit is in its name")]
    OutOfBounds {
        /// The name of the profile.
        name: String,
        /// The name of the field with the figure.
        field: &'static str,
        /// The value of the figure.
        value: f64,
        /// The most it may be.
        most: f64,
    },
    /// A radio without a stage would need nothing at work.
    #[error("radio `{0}` needs one stage at least, and 8 at most, and the first takes power")]
    Stages(String),
    /// Two profiles have one name, or there are too many.
    #[error("there are two radios `{0}`, or more than 256")]
    Names(String),
    /// A kind of link has a profile that is not there.
    #[error("`{0}` under [default] is the name of no radio of this file")]
    NoSuchRadio(String),
}

/// The file of profiles that the program has itself.
pub const BUILT_IN_RADIOS: &str = include_str!("../radios.toml");

impl RadioProfiles {
    /// The profiles that the program has itself.
    ///
    /// # Panics
    /// Never: a test reads them.
    pub fn built_in() -> RadioProfiles {
        RadioProfiles::parse(BUILT_IN_RADIOS).expect("a test reads it")
    }

    /// Reads profiles.
    ///
    /// # Errors
    /// The text is of another form, or a figure is out of bounds.
    pub fn parse(text: &str) -> Result<RadioProfiles, RadioProfileError> {
        let profiles: RadioProfiles = toml::from_str(text)?;
        for (n, radio) in profiles.radios.iter().enumerate() {
            radio.check()?;
            let before = &profiles.radios[..n];
            if n >= PROFILES_MAX || before.iter().any(|other| other.name == radio.name) {
                return Err(RadioProfileError::Names(radio.name.clone()));
            }
        }
        for name in profiles.default.values() {
            if profiles.named(name).is_none() {
                return Err(RadioProfileError::NoSuchRadio(name.clone()));
            }
        }
        Ok(profiles)
    }

    /// The profile with this name.
    pub fn named(&self, name: &str) -> Option<&RadioProfile> {
        self.radios.iter().find(|radio| radio.name == name)
    }

    /// The profile for a kind of link.
    pub fn of_kind(&self, kind: RadioKind) -> Option<&RadioProfile> {
        self.named(self.default.get(&kind)?)
    }

    /// Every profile.
    pub fn all(&self) -> &[RadioProfile] {
        &self.radios
    }
}

impl RadioProfile {
    fn check(&self) -> Result<(), RadioProfileError> {
        let within = |field, value: f64, most: f64| match (0.0..=most).contains(&value) {
            true => Ok(()),
            false => Err(RadioProfileError::OutOfBounds {
                name: self.name.clone(),
                field,
                value,
                most,
            }),
        };
        within("idle_mw", self.idle_mw, MILLIWATTS_MAX)?;
        within("up_nj_per_byte", self.up_nj_per_byte, BYTE_NANOJOULES_MAX)?;
        within(
            "down_nj_per_byte",
            self.down_nj_per_byte,
            BYTE_NANOJOULES_MAX,
        )?;
        for stage in self.stages.iter().chain([&self.ramp]) {
            within("mw", stage.mw, MILLIWATTS_MAX)?;
            within("ms", stage.ms as f64, STAGE_MS_MAX as f64)?;
        }
        let takes_power = self.stages.first().is_some_and(|stage| stage.mw > 0.0);
        if !takes_power || self.stages.len() > STAGES_MAX {
            return Err(RadioProfileError::Stages(self.name.clone()));
        }
        Ok(())
    }

    /// The profile as the scheduler uses it: what goes down counts for each byte, and the whole of the
    /// stages for each time that the radio is left.
    pub fn power_model(&self) -> RadioPowerModel {
        let joules = |stage: &RadioStage| stage.mw / 1e3 * (stage.ms as f64 / 1e3);
        RadioPowerModel {
            wake_joules: joules(&self.ramp),
            work_watts: self.stages[0].mw / 1e3,
            byte_joules: self.down_nj_per_byte / 1e9,
            tail_joules: self.stages.iter().map(joules).sum(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = r#"
        [default]
        wifi = "a"
        [[radio]]
        name = "a"
        source = "a test"
        idle_mw = 1.0
        ramp = { ms = 1000, mw = 500.0 }
        stages = [{ ms = 100, mw = 1000.0 }, { ms = 2000, mw = 100.0 }]
        up_nj_per_byte = 2.0
        down_nj_per_byte = 1.0
    "#;

    #[test]
    fn every_kind_of_link_has_a_built_in_profile_with_a_source() {
        let profiles = RadioProfiles::built_in();
        for kind in [RadioKind::Wifi, RadioKind::Cellular, RadioKind::Ethernet] {
            assert!(profiles.of_kind(kind).is_some(), "{kind:?}");
        }
        assert!(profiles.all().iter().all(|radio| radio.source.len() > 20));
    }

    #[test]
    fn a_profile_becomes_joules_and_watts() {
        let profiles = RadioProfiles::parse(ONE).expect("it is right");
        let model = profiles.named("a").expect("it is there").power_model();
        let close = |a: f64, b: f64| (a - b).abs() < 1e-12;
        assert!(close(model.wake_joules, 0.5), "{model:?}");
        assert!(close(model.work_watts, 1.0), "{model:?}");
        assert!(close(model.tail_joules, 0.3), "{model:?}");
        assert!(close(model.byte_joules, 1e-9), "{model:?}");
    }

    #[test]
    fn figures_out_of_bounds_are_refused_with_their_names() {
        for (from, to, named) in [
            ("idle_mw = 1.0", "idle_mw = -1.0", "idle_mw"),
            ("mw = 500.0", "mw = 500000.0", "mw"),
            ("ms = 2000", "ms = 2000000", "ms"),
            (
                "up_nj_per_byte = 2.0",
                "up_nj_per_byte = nan",
                "up_nj_per_byte",
            ),
            ("mw = 1000.0", "mw = 0.0", "stage"),
            ("wifi = \"a\"", "wifi = \"b\"", "`b`"),
            ("source = \"a test\"", "", "source"),
            ("ramp = {", "watts = 1\nramp = {", "watts"),
        ] {
            let text = ONE.replace(from, to);
            assert_ne!(text, ONE);
            let error = RadioProfiles::parse(&text).expect_err(to).to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}
