//! Whether a flow saves energy: the user's word, the power supply, and the deadline.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// When flows save energy, as users choose it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EnergySaving {
    /// Energy is saved on battery, while there is time until the deadline. A flow without a
    /// deadline is as fast as it can be.
    #[default]
    Auto,
    /// Energy is always saved, on battery and on external power, with and without a deadline.
    Always,
    /// Energy is never saved.
    Never,
}

impl EnergySaving {
    /// Every choice.
    pub const ALL: [EnergySaving; 3] = [
        EnergySaving::Auto,
        EnergySaving::Always,
        EnergySaving::Never,
    ];

    /// The name of the choice on a command line: `auto`, `always` or `never`.
    pub fn as_str(self) -> &'static str {
        match self {
            EnergySaving::Auto => "auto",
            EnergySaving::Always => "always",
            EnergySaving::Never => "never",
        }
    }

    /// Whether a flow saves energy on this supply. `left`: the time until its deadline.
    pub fn is_active(self, power: PowerSource, left: Option<Duration>) -> bool {
        match self {
            EnergySaving::Never => false,
            EnergySaving::Always => true,
            EnergySaving::Auto => power.is_battery() && left.is_some_and(|left| !left.is_zero()),
        }
    }
}

impl fmt::Display for EnergySaving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for EnergySaving {
    type Err = String;
    fn from_str(text: &str) -> Result<EnergySaving, String> {
        let found = EnergySaving::ALL
            .into_iter()
            .find(|saving| saving.as_str() == text);
        found.ok_or_else(|| format!("`{text}` is none of auto, always, never"))
    }
}

/// What the device runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PowerSource {
    /// The platform does not say.
    #[default]
    Unknown,
    /// Mains, a vehicle, or another supply that does not run out.
    External,
    /// A battery that is being discharged.
    Battery {
        /// The battery's remaining charge in percent, if the platform reports it.
        percent: Option<u8>,
    },
}

impl PowerSource {
    /// Whether the device runs on a battery.
    pub fn is_battery(self) -> bool {
        matches!(self, PowerSource::Battery { .. })
    }
}

impl fmt::Display for PowerSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PowerSource::Unknown => f.write_str("unknown power supply"),
            PowerSource::External => f.write_str("external power"),
            PowerSource::Battery { percent: None } => f.write_str("battery"),
            PowerSource::Battery { percent: Some(n) } => write!(f, "battery, {n} %"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_saves_on_battery_with_time_left_and_not_otherwise() {
        let battery = PowerSource::Battery { percent: Some(50) };
        let hour = Some(Duration::from_secs(3_600));
        for (saving, power, left, expected) in [
            (EnergySaving::Auto, battery, hour, true),
            (EnergySaving::Auto, battery, None, false),
            (EnergySaving::Auto, battery, Some(Duration::ZERO), false),
            (EnergySaving::Auto, PowerSource::External, hour, false),
            (EnergySaving::Auto, PowerSource::Unknown, hour, false),
            (EnergySaving::Always, PowerSource::External, None, true),
            (EnergySaving::Never, battery, hour, false),
        ] {
            let found = saving.is_active(power, left);
            assert_eq!(found, expected, "{saving} {power:?} {left:?}");
        }
    }

    #[test]
    fn words_lead_back_to_their_choice() {
        for saving in EnergySaving::ALL {
            assert_eq!(saving.as_str().parse(), Ok(saving));
        }
        assert!("yes".parse::<EnergySaving>().unwrap_err().contains("auto"));
    }
}
