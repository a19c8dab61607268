//! Energy: the radios of a scenario's links, and when the device saves energy.

use serde::Deserialize;

/// When the device saves energy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SaveEnergy {
    /// Energy is saved on battery, while there is time until the deadline.
    Auto,
    /// Energy is always saved, with and without a deadline.
    Always,
    /// Energy is never saved.
    #[default]
    Never,
}

impl SaveEnergy {
    /// The word used in scenario files and on the command line.
    pub fn word(self) -> &'static str {
        match self {
            SaveEnergy::Auto => "auto",
            SaveEnergy::Always => "always",
            SaveEnergy::Never => "never",
        }
    }
}

/// The radios of the links, and when the device saves energy.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScenarioEnergy {
    /// When the device saves energy.
    #[serde(default)]
    pub save: SaveEnergy,
    /// Whether the device runs on battery, and otherwise on mains.
    #[serde(default = "yes")]
    pub battery: bool,
    /// The profile of the radio of links named `wlan…`.
    pub wifi: String,
    /// The profile of the radio of links named `wwan…`.
    pub cellular: String,
}

impl ScenarioEnergy {
    /// The profile of a link's radio; `None` if the link is neither Wi-Fi nor cellular by its name.
    pub fn radio(&self, link: &str) -> Option<&str> {
        if link.starts_with("wlan") {
            Some(&self.wifi)
        } else if link.starts_with("wwan") {
            Some(&self.cellular)
        } else {
            None
        }
    }
}

fn yes() -> bool {
    true
}
