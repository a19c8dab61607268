//! What lies on the disk after a blow: what each end may count on from then on.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use d2tp_driver::{Instance, Journal};
use serde_json::Value;

/// What a device left.
#[derive(Clone, Debug, Default)]
pub struct DeviceRemains {
    /// Bytes that its note says are safe.
    pub durable: u64,
    /// For each instance the first epoch that no process may have used.
    pub epochs: BTreeMap<u64, u32>,
    /// The file is there under its own name.
    pub is_whole: bool,
    /// Journals that cannot be read.
    pub damage: Vec<String>,
}

/// What a proxy left.
#[derive(Clone, Debug, Default)]
pub struct ProxyRemains {
    /// Lengths of the copies that its journal knows a flow for.
    pub copies: Vec<u64>,
    /// Its journal cannot be read.
    pub damage: Option<String>,
}

/// Opens a copy of a journal: the true one is the next process's.
fn read_copy(path: &Path, scratch: &Path) -> Result<Journal, String> {
    let copy = scratch.join("journal-copy");
    let _ = fs::remove_file(&copy);
    fs::copy(path, &copy).map_err(|error| error.to_string())?;
    Journal::open(&copy).map_err(|error| error.to_string())
}

impl DeviceRemains {
    /// Looks at the part of `got` in `folder` and at the device's state beside it.
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
    /// Looks at the state folder `state`.
    pub fn of(state: &Path, scratch: &Path) -> ProxyRemains {
        let mut remains = ProxyRemains::default();
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
