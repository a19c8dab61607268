//! The state on the disk after a kill, on which each end may rely afterwards.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use d2tp_driver::{Instance, Journal};
use serde_json::Value;

/// The state that a device left on its disk.
#[derive(Clone, Debug, Default)]
pub struct DeviceRemains {
    /// The number of bytes that its journal records as durable.
    pub durable: u64,
    /// For each instance, the first epoch that no process may have used.
    pub epochs: BTreeMap<u64, u32>,
    /// Whether the file exists with its final name.
    pub is_whole: bool,
    /// Descriptions of journals that cannot be read.
    pub damage: Vec<String>,
}

/// The state that a proxy left on its disk.
#[derive(Clone, Debug, Default)]
pub struct ProxyRemains {
    /// The lengths of the copies for which its journal has a flow.
    pub copies: Vec<u64>,
    /// The lengths of all copies, also of those that wait for a device whose flow has ended.
    pub files: Vec<u64>,
    /// Why its journal cannot be read; `None` if it can.
    pub damage: Option<String>,
}

/// Opens a copy of a journal, because the next process needs the original.
fn read_copy(path: &Path, scratch: &Path) -> Result<Journal, String> {
    let copy = scratch.join("journal-copy");
    let _ = fs::remove_file(&copy);
    fs::copy(path, &copy).map_err(|error| error.to_string())?;
    Journal::open(&copy).map_err(|error| error.to_string())
}

impl DeviceRemains {
    /// Reads the partial download `got` in `folder`, and the device's state beside it.
    pub fn of(folder: &Path, scratch: &Path) -> DeviceRemains {
        let note = fs::read(folder.join("got.part.json")).ok();
        let note: Option<Value> = note.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let durable = note.as_ref().and_then(|n| n["durable_bytes"].as_u64());
        let has_part = fs::metadata(folder.join("got.part")).is_ok();
        let mut remains = DeviceRemains {
            durable: durable.filter(|_| has_part).unwrap_or(0),
            is_whole: folder.join("got").exists(),
            ..DeviceRemains::default()
        };
        for file in fs::read_dir(folder.join("state/cedos/instances"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let path = file.path();
            let number = path.file_stem().and_then(OsStr::to_str);
            let number = number.and_then(|hex| u64::from_str_radix(hex, 16).ok());
            let is_journal = path.extension() == Some(OsStr::new("journal"));
            let (Some(number), true) = (number, is_journal) else {
                continue;
            };
            let journal = match read_copy(&path, scratch) {
                Ok(journal) => journal,
                Err(error) => {
                    remains.damage.push(error);
                    continue;
                }
            };
            let free = Instance::first_free_epoch(&journal);
            remains
                .epochs
                .insert(number, free.ok().flatten().unwrap_or(0));
        }
        remains
    }
}

impl ProxyRemains {
    /// Reads the state folder `state`.
    pub fn of(state: &Path, scratch: &Path) -> ProxyRemains {
        let mut remains = ProxyRemains::default();
        for file in fs::read_dir(state.join("copies"))
            .into_iter()
            .flatten()
            .flatten()
        {
            remains.files.extend(file.metadata().map(|file| file.len()));
        }
        let path = state.join("journal");
        if !path.exists() {
            return remains;
        }
        let journal = match read_copy(&path, scratch) {
            Ok(journal) => journal,
            Err(error) => {
                remains.damage = Some(error);
                return remains;
            }
        };
        let mut flows = Vec::new();
        let _ = journal.memos(|_, memo| flows.push(memo.to_vec()));
        for memo in flows {
            let memo: Value = serde_json::from_slice(&memo).unwrap_or_default();
            let copy = memo["copy"].as_u64();
            let file = copy.map(|id| state.join("copies").join(format!("{id:016x}")));
            let length = file.and_then(|file| Some(fs::metadata(file).ok()?.len()));
            remains.copies.extend(length);
        }
        remains
    }
}
