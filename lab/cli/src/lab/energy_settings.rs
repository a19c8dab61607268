//! The settings of energy on the lab's device, in the form of the user's settings: which radios it has, what
//! it runs on, and when it saves energy.

use std::fs;
use std::path::Path;

use cedos_lab_scenario::ScenarioEnergy;
use d2tp_power::BUILT_IN_RADIOS;

/// Writes the files that the settings name, and returns the settings.
///
/// # Errors
/// From the disk.
pub fn write_energy_settings(energy: &ScenarioEnergy, folder: &Path) -> anyhow::Result<String> {
    let radios = folder.join("radios.toml");
    let profiles = BUILT_IN_RADIOS
        .find("[[radio]]")
        .map_or("", |at| &BUILT_IN_RADIOS[at..]);
    let (wifi, cellular) = (&energy.wifi, &energy.cellular);
    fs::write(
        &radios,
        format!("[default]\nwifi = \"{wifi}\"\ncellular = \"{cellular}\"\n\n{profiles}"),
    )?;
    let supplies = folder.join("power_supply");
    let (name, files) = match energy.battery {
        true => ("BAT0", [("type", "Battery"), ("status", "Discharging")]),
        false => ("AC0", [("type", "Mains"), ("online", "1")]),
    };
    fs::create_dir_all(supplies.join(name))?;
    for (file, text) in files {
        fs::write(supplies.join(name).join(file), text)?;
    }
    Ok(format!(
        "[energy]\nsave = \"{}\"\nradios = \"{}\"\nsupplies = \"{}\"\n",
        energy.save.word(),
        radios.display(),
        supplies.display()
    ))
}
