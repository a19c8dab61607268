//! Tells a scheduler what it needs to save energy: the user's choice, what the machine runs on, and what the
//! radios of its links take.
//!
//! ```text
//!  settings: energy.save, energy.radios, energy.supplies ─┐
//!  links: Wi-Fi, cellular, Ethernet ──────────────────────┼─▶ SchedulerHandle
//!  /sys/class/power_supply, read while there are clients ─┘
//! ```

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use d2tp_driver::SchedulerHandle;
use d2tp_links::{Link, LinkKind};
use d2tp_power::{POWER_SUPPLIES, RadioKind, RadioProfiles, read_power_source};
use d2tp_sched::{EnergySaving, PowerSource};
use tokio::sync::watch;

use crate::settings::UserSettings;

/// How often the power supplies are read while something uses the scheduler. Longer: a plug that is pulled
/// is noticed later.
const READ_EVERY: Duration = Duration::from_secs(5); // a guess: a small part of a transfer

/// The most bytes of a file of radio profiles.
const PROFILES_BYTES_MAX: u64 = 1 << 20;

/// What the settings say of energy.
#[derive(Debug, Clone)]
pub struct EnergySettings {
    saving: EnergySaving,
    profiles: RadioProfiles,
    supplies: PathBuf,
}

impl EnergySettings {
    /// Reads the settings.
    ///
    /// # Errors
    /// The file of radio profiles cannot be read, or says something that makes no sense; in words.
    pub fn load(settings: &UserSettings) -> Result<EnergySettings, String> {
        let profiles = match settings.path("energy.radios") {
            None => RadioProfiles::built_in(),
            Some(file) => read_profiles(&file)?,
        };
        Ok(EnergySettings {
            saving: settings
                .parsed("energy.save", str::parse)
                .unwrap_or_default(),
            profiles,
            supplies: supplies(settings),
        })
    }
}

/// The directory of the power supplies.
fn supplies(settings: &UserSettings) -> PathBuf {
    let chosen = settings.path("energy.supplies");
    chosen.unwrap_or_else(|| POWER_SUPPLIES.into())
}

/// What the machine runs on now.
pub fn current_power_source(settings: &UserSettings) -> PowerSource {
    read_power_source(&supplies(settings))
}

fn read_profiles(file: &Path) -> Result<RadioProfiles, String> {
    let shown = file.display();
    let size = std::fs::metadata(file).map(|found| found.len());
    let size = size.map_err(|error| format!("cannot read radio profiles from {shown}: {error}"))?;
    if size > PROFILES_BYTES_MAX {
        return Err(format!(
            "{shown} has {size} bytes, too many for radio profiles"
        ));
    }
    let text = std::fs::read_to_string(file)
        .map_err(|error| format!("cannot read radio profiles from {shown}: {error}"))?;
    RadioProfiles::parse(&text).map_err(|error| {
        format!("{shown} is no file of radio profiles: {error}; correct it, or `cedos config unset energy.radios`")
    })
}

/// Keeps a scheduler informed as long as it lives.
pub fn watch_energy(
    scheduler: &Arc<SchedulerHandle>,
    mut links: watch::Receiver<Arc<Vec<Link>>>,
    settings: EnergySettings,
) {
    scheduler.set_energy_saving(settings.saving);
    tell_radios(scheduler, &links.borrow_and_update(), &settings.profiles);
    // Once before anything is decided, although it may take a moment.
    scheduler.set_power_source(read_power_source(&settings.supplies));
    let mut changes = scheduler.changes();
    let scheduler = Arc::downgrade(scheduler);
    tokio::spawn(async move {
        loop {
            let has_clients = Weak::upgrade(&scheduler).is_some_and(|s| s.has_clients());
            tokio::select! {
                changed = links.changed() => if changed.is_err() { return },
                changed = changes.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(READ_EVERY), if has_clients => {}
            }
            let directory = settings.supplies.clone();
            // A driver may ask the battery itself, which takes a while.
            let read = tokio::task::spawn_blocking(move || read_power_source(&directory));
            let power = read.await.unwrap_or_default();
            let Some(scheduler) = scheduler.upgrade() else {
                return;
            };
            scheduler.set_power_source(power);
            tell_radios(&scheduler, &links.borrow(), &settings.profiles);
        }
    });
}

/// Tells a scheduler what the radios of links take.
fn tell_radios(scheduler: &SchedulerHandle, links: &[Link], profiles: &RadioProfiles) {
    let of_link = |link: &Link| {
        let profile = profiles.of_kind(radio_kind(link.kind)?)?;
        Some((link.name.clone(), profile.power_model()))
    };
    let radios: BTreeMap<_, _> = links.iter().filter_map(of_link).collect();
    let expected = profiles.of_kind(RadioKind::Wifi);
    scheduler.set_radio_power(radios, expected.map(|profile| profile.power_model()));
}

/// The kind of a link's radio; `None` if nothing is known of it, or it is none of its own.
fn radio_kind(kind: LinkKind) -> Option<RadioKind> {
    match kind {
        LinkKind::Wifi => Some(RadioKind::Wifi),
        LinkKind::Cellular => Some(RadioKind::Cellular),
        LinkKind::Ethernet => Some(RadioKind::Ethernet),
        LinkKind::Loopback | LinkKind::Vpn | LinkKind::Serial | LinkKind::Other => None,
    }
}
