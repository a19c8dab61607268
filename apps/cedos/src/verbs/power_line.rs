//! What the machine runs on, and when energy is saved, for `cedos net` and `cedos ls`.

use cedos_agent::energy_watch::current_power_source;
use cedos_agent::settings::UserSettings;
use d2tp_sched::{EnergySaving, PowerSource};
use serde_json::{Value, json};

/// What the machine runs on; `None` if the system does not say, as on a server.
pub struct PowerLine {
    power: PowerSource,
    saving: EnergySaving,
}

impl PowerLine {
    /// Reads the power supplies and the settings.
    ///
    /// # Errors
    /// The settings make no sense.
    pub fn read() -> anyhow::Result<Option<PowerLine>> {
        let settings = UserSettings::load(None)?;
        let saving = settings
            .parsed("energy.save", str::parse)
            .unwrap_or_default();
        let power = current_power_source(&settings);
        Ok((power != PowerSource::Unknown).then_some(PowerLine { power, saving }))
    }

    /// The power supply and the setting as one JSON object.
    pub fn to_json(&self) -> Value {
        let percent = match self.power {
            PowerSource::Battery { percent } => percent,
            PowerSource::External | PowerSource::Unknown => None,
        };
        let power = match self.power.is_battery() {
            true => "battery",
            false => "external",
        };
        json!({"power": power, "percent": percent, "save_energy": self.saving.as_str()})
    }

    /// The power supply and the setting as a line for people.
    pub fn to_line(&self) -> String {
        let saves = match (self.saving, self.power.is_battery()) {
            (EnergySaving::Auto, true) => "transfers save energy while there is time",
            (EnergySaving::Auto, false) => "no energy is saved",
            (EnergySaving::Always, _) => "transfers always save energy",
            (EnergySaving::Never, _) => "transfers never save energy",
        };
        format!(
            "Power: {}; {saves} (energy.save = {})",
            self.power, self.saving
        )
    }
}
