//! Rates of metered links that earlier transfers without an agent measured, so that they need not
//! be measured again with paid bytes.
//!
//! ```text
//!  $XDG_STATE_HOME/cedos/rates   JSON: towards this device and from it, by device: bytes/s, seconds of use
//! ```
//!
//! An agent keeps its own history. Free links are measured by each transfer. A file that cannot be
//! read is ignored: the rates are measured again.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use d2tp_driver::SchedulerHandle;
use d2tp_links::{CostClass, Link};
use d2tp_sched::{LinkSurroundings, NetworkRates};
use serde::{Deserialize, Serialize};

use super::state_directory::state_directory;

/// The seconds of use for which a remembered rate counts at most. Higher: another place or hour, where the
/// link is faster or slower, is noticed later.
const KNOWN_S_MAX: f64 = 10.0; // a guess: two seconds of use outweigh a fifth of it

/// The largest file that is read.
const FILE_BYTES_MAX: u64 = 64 * 1024;

/// The most links that are remembered in each direction.
const LINKS_MAX: usize = 64;

/// The remembered rates of metered links.
#[derive(Debug)]
pub struct MeasuredRates {
    file: Option<PathBuf>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct RatesFile {
    down: BTreeMap<String, (f64, f64)>,
    up: BTreeMap<String, (f64, f64)>,
}

impl MeasuredRates {
    /// Gives a scheduler the remembered rates of the metered ones among `links`.
    pub fn restore(scheduler: &SchedulerHandle, links: &[Link]) -> MeasuredRates {
        let file = state_directory().ok().map(|state| state.join("rates"));
        let rates = MeasuredRates { file };
        rates.give(scheduler, metered(links));
        rates
    }

    fn give(&self, scheduler: &SchedulerHandle, devices: Vec<String>) {
        let known = self.file.as_deref().and_then(|file| read(file).ok());
        let known = known.unwrap_or_default();
        let rates = |known: BTreeMap<String, (f64, f64)>| {
            let rates = known.into_iter().take(LINKS_MAX);
            let rates = rates.map(|(device, (whole, known_s))| {
                let known_s = known_s.min(KNOWN_S_MAX);
                (device, NetworkRates { whole, known_s })
            });
            (BTreeMap::new(), rates.collect())
        };
        scheduler.restore([rates(known.down), rates(known.up)]);
        scheduler.observe(&LinkSurroundings {
            networks: devices
                .into_iter()
                .map(|device| (device.clone(), device))
                .collect(),
            ..LinkSurroundings::default()
        });
    }

    /// Saves what the scheduler knows of metered links now.
    pub fn save(&self, scheduler: &SchedulerHandle) {
        let [down, up] = scheduler.saved().map(|(_, rates)| {
            let rates = rates.into_iter().take(LINKS_MAX);
            rates
                .map(|(device, rates)| (device, (rates.whole, rates.known_s)))
                .collect::<BTreeMap<_, _>>()
        });
        let Some(file) = self
            .file
            .as_deref()
            .filter(|_| !down.is_empty() || !up.is_empty())
        else {
            return;
        };
        if let Err(error) = write(file, &RatesFile { down, up }) {
            tracing::debug!(%error, "cannot save the measured rates");
        }
    }
}

/// The names of the metered links.
fn metered(links: &[Link]) -> Vec<String> {
    let metered = links
        .iter()
        .filter(|link| link.class.class == CostClass::Metered);
    metered.map(|link| link.name.clone()).collect()
}

fn read(file: &Path) -> io::Result<RatesFile> {
    if std::fs::metadata(file)?.len() > FILE_BYTES_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(serde_json::from_slice(&std::fs::read(file)?)?)
}

fn write(file: &Path, rates: &RatesFile) -> io::Result<()> {
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    // Transfers may end at the same time.
    let fresh = file.with_extension(format!("new{}", std::process::id()));
    let mut out = std::fs::OpenOptions::new()
        .create(true)
        .write(true)
        .truncate(true)
        .mode(0o600)
        .open(&fresh)?;
    out.write_all(&serde_json::to_vec(rates)?)?;
    std::fs::rename(&fresh, file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_sched::{
        ClientReport, CostPolicy, DeadlineFallback, FlowDemand, Grant, LinkCandidate, LinkClass,
        SchedulerKind, TransferDirection,
    };
    use std::time::Duration;

    const SIZE_BYTES: u64 = 100_000_000;

    /// Asks for links for a transfer whose deadline is in doubt, with only a metered link up.
    fn probe_of(file: &Path, carried: u64) -> Option<u64> {
        let scheduler = SchedulerHandle::new(SchedulerKind::D2Sched);
        let rates = MeasuredRates {
            file: Some(file.to_owned()),
        };
        rates.give(&scheduler, vec!["wwan0".into()]);
        let client = scheduler.join(TransferDirection::Down, 1);
        let candidates = [LinkCandidate {
            name: "wwan0".into(),
            class: LinkClass::Metered,
            rate_bytes_per_s: None,
            metric: 0,
            stalled: false,
            in_use: true,
        }];
        let ask = |carried: u64| {
            client.decide(&ClientReport {
                demand: FlowDemand {
                    remaining_bytes: Some(SIZE_BYTES),
                    left: Some(Duration::from_secs(900)),
                    policy: CostPolicy::FreeFirst,
                    if_late: DeadlineFallback::Cell,
                    metered_bytes_left: None,
                },
                size_bytes: Some(SIZE_BYTES),
                priority: 0,
                start: None,
                candidates: &candidates,
                carried: &[("wwan0".to_owned(), carried)].into(),
                uses_several_links: true,
                always_pays: false,
                is_interactive: false,
                keeps_awake: true,
                source: d2tp_sched::SourceSupply::Ample,
            })
        };
        let first = ask(0);
        if carried > 0 {
            client.record_busy_time("wwan0", Duration::from_millis(500));
            // sleep: rates are measured over a second of the boot clock
            std::thread::sleep(Duration::from_millis(1_000));
            ask(carried);
        }
        rates.save(&scheduler);
        match first.grant {
            Grant::Probe { bytes } => Some(bytes),
            _ => None,
        }
    }

    #[test]
    fn a_metered_link_that_an_earlier_transfer_measured_is_not_probed_again() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("state/rates");
        assert!(probe_of(&file, 0).is_some());
        assert!(!file.exists(), "nothing was measured");
        assert!(probe_of(&file, 500_000).is_some());
        assert_eq!(probe_of(&file, 0), None);
        std::fs::write(&file, "{").unwrap();
        assert!(probe_of(&file, 0).is_some());
    }
}
