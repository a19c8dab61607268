//! The queue on the disk: one folder for each transfer, beside those of `cedos get --detach`.
//!
//! ```text
//! $XDG_STATE_HOME/cedos/get/7/  job.json    what `ls` shows, never credentials
//!                               order.json  the order, credentials too; its owner's alone
//!                               state.json  the last event
//!                               landing.json  the object is about to get its name
//! ```
//!
//! Each file is written completely, synced and renamed: a crash leaves the old or the new one, and
//! a few hundred transfers need no database. `order.json` is synced before the order is confirmed,
//! and removed when the object is complete, unless the transfer recurs.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::saved_recurrence::SavedRecurrence;
use crate::fetch::boot_clock::BootInstant;
use crate::fetch::jobs::{self, JobRequest, ORDER};
use crate::fetch::transfer::redact_url;
use crate::order::{TransferOrder, TransferVerb};
use crate::terms::{DueTime, TransferTerms};

/// The file of a transfer with what `ls` shows. A transfer without it is not in the queue.
const JOB: &str = "job.json";

/// The most transfers that have not ended; more are refused.
pub const QUEUED_MAX: usize = 1_000; // a guess: nobody looks through more

/// What the user wants of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransferIntent {
    /// The user wants the transfer to run.
    Run,
    /// The user wants the transfer to pause.
    Pause,
    /// The user wants the transfer to end.
    Cancel,
}

/// A deadline in its saved form.
///
/// A length of time counts on the clock of this boot; after a reboot only the time of day is left of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedDeadline {
    /// The time of day of the deadline when it was saved.
    pub at: Timestamp,
    /// The boot, and the deadline as time since that boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_boot: Option<(String, Duration)>,
}

impl SavedDeadline {
    /// The saved form of a deadline, as of now.
    pub fn of(due: DueTime) -> SavedDeadline {
        let since_boot = match due {
            DueTime::At(_) => None,
            DueTime::In(moment) => boot().map(|boot| (boot, moment.since_boot())),
        };
        SavedDeadline {
            at: due.at(),
            since_boot,
        }
    }

    /// The deadline in its usual form.
    pub fn due(&self) -> DueTime {
        match &self.since_boot {
            Some((boot, moment)) if self::boot().as_ref() == Some(boot) => {
                DueTime::In(BootInstant::from_boot(*moment))
            }
            _ => DueTime::At(self.at),
        }
    }
}

/// The id of this boot.
fn boot() -> Option<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(text.trim().to_owned())
}

/// The saved state of a transfer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SavedTransfer {
    /// The order, with the current terms.
    pub order: TransferOrder,
    /// The deadline, which takes precedence over the order's.
    pub due: Option<SavedDeadline>,
    /// What the user wants of the transfer.
    pub wish: TransferIntent,
    /// Whether transient failures are retried until the deadline.
    pub patient: bool,
    /// How far the transfer came, if it recurs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recurrence: Option<SavedRecurrence>,
}

impl SavedTransfer {
    /// The saved form of an order that was just given.
    ///
    /// # Errors
    /// It makes no sense.
    pub fn new(
        order: TransferOrder,
        patient: bool,
    ) -> Result<SavedTransfer, crate::fetch::outcome::TransferFailure> {
        let terms = order.terms()?;
        Ok(SavedTransfer {
            due: terms.due.map(SavedDeadline::of),
            recurrence: SavedRecurrence::new(&order)?,
            order,
            wish: TransferIntent::Run,
            patient,
        })
    }

    /// The current terms, of which metered links have carried these bytes already.
    ///
    /// # Errors
    /// It makes no sense.
    pub fn terms(
        &self,
        metered_bytes: u64,
    ) -> Result<TransferTerms, crate::fetch::outcome::TransferFailure> {
        let terms = self.order.terms()?;
        Ok(TransferTerms {
            due: self.due.as_ref().map(SavedDeadline::due),
            metered_bytes_max: (terms.metered_bytes_max)
                .map(|max| max.saturating_sub(metered_bytes)),
            ..terms
        })
    }
}

/// A transfer of the queue.
#[derive(Debug)]
pub struct QueuedTransfer {
    /// The transfer's number.
    pub id: u64,
    /// The request as `ls` shows it.
    pub request: JobRequest,
    /// The saved state.
    pub saved: SavedTransfer,
    /// The last event; null before the first.
    pub event: Value,
}

/// Takes an order in.
///
/// # Errors
/// The disk refuses.
pub fn add(kept: SavedTransfer) -> anyhow::Result<QueuedTransfer> {
    let root = jobs::jobs_directory()?;
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&root)
        .with_context(|| format!("cannot make {}", root.display()))?;
    jobs::remove_old(&root);
    let asked = asked(&kept);
    let id = jobs::claim(&root)?;
    let folder = root.join(id.to_string());
    // The order first: a folder with `job.json` alone is one of a process of its own, which would count as gone.
    let written = write(&folder.join(ORDER), &kept)
        .and_then(|()| write(&folder.join(JOB), &asked))
        .and_then(|()| sync(&root));
    if let Err(error) = written {
        let _ = std::fs::remove_dir_all(&folder);
        return Err(error).with_context(|| format!("cannot write into {}", folder.display()));
    }
    Ok(QueuedTransfer {
        id,
        request: asked,
        saved: kept,
        event: Value::Null,
    })
}

fn asked(kept: &SavedTransfer) -> JobRequest {
    let order = &kept.order;
    let url = order
        .url
        .parse()
        .map_or_else(|_| String::new(), |url| redact_url(&url));
    let file = match (order.verb, &order.file) {
        (_, Some(file)) => file.clone(),
        (TransferVerb::Put | TransferVerb::Get, None) => order
            .job()
            .map_or_else(|_| PathBuf::new(), |job| job.expected_path()),
    };
    JobRequest {
        verb: order.verb,
        url,
        file,
        // Not rounded up: nothing may have happened to it before.
        since: whole_seconds(second_of(Timestamp::now())),
        deadline: kept.due.as_ref().map(|anchor| whole_seconds(anchor.at)),
    }
}

/// The beginning of the second in which a time is.
fn second_of(at: Timestamp) -> Timestamp {
    Timestamp::from_second(at.as_second()).unwrap_or(at)
}

/// A time in the form in which it is shown to users.
pub fn whole_seconds(at: Timestamp) -> String {
    at.round(jiff::Unit::Second).unwrap_or(at).to_string()
}

/// All of the queue, oldest first. What cannot be read is passed over.
///
/// # Errors
/// The state cannot be read.
pub fn load() -> anyhow::Result<Vec<QueuedTransfer>> {
    let root = jobs::jobs_directory()?;
    let of = |job: jobs::BackgroundJob| {
        let text = std::fs::read(root.join(job.id.to_string()).join(ORDER)).ok()?;
        let kept = match serde_json::from_slice(&text) {
            Ok(kept) => kept,
            Err(error) => {
                tracing::warn!(id = job.id, %error, "cannot read a queued transfer");
                return None;
            }
        };
        Some(QueuedTransfer {
            id: job.id,
            request: job.request,
            saved: kept,
            event: job.event,
        })
    };
    Ok(jobs::list()?.into_iter().filter_map(of).collect())
}

/// Removes orders of which an earlier agent was killed before it had confirmed them. Only who has the lock of all
/// transfers may call this.
///
/// # Errors
/// The disk refuses.
pub fn remove_unconfirmed() -> anyhow::Result<()> {
    let root = jobs::jobs_directory()?;
    remove_unconfirmed_in(&root).with_context(|| format!("cannot write into {}", root.display()))
}

fn remove_unconfirmed_in(root: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(root)? {
        let folder = entry?.path();
        if folder.join(ORDER).exists() && !folder.join(JOB).exists() {
            std::fs::remove_dir_all(folder)?;
        }
    }
    Ok(())
}

/// Writes down what is kept of one now.
///
/// # Errors
/// The disk refuses.
pub fn save(id: u64, kept: &SavedTransfer) -> anyhow::Result<()> {
    let folder = jobs::jobs_directory()?.join(id.to_string());
    write(&folder.join(ORDER), kept)?;
    let asked = asked(kept);
    let known: Option<JobRequest> = std::fs::read(folder.join(JOB))
        .ok()
        .and_then(|text| serde_json::from_slice(&text).ok());
    let since = known.map_or_else(|| asked.since.clone(), |known| known.since);
    write(&folder.join(JOB), &JobRequest { since, ..asked })?;
    Ok(())
}

/// Writes down the last event. Not synced: after a crash an older one is as good.
///
/// # Errors
/// The disk refuses.
pub fn save_event(id: u64, event: &Value) -> io::Result<()> {
    let root = jobs::jobs_directory().map_err(io::Error::other)?;
    jobs::replace(&root.join(id.to_string()).join("state.json"), event)
}

/// The path of the record that a transfer's object is about to be renamed into place.
pub fn pending_rename_path(id: u64) -> Option<PathBuf> {
    Some(
        jobs::jobs_directory()
            .ok()?
            .join(id.to_string())
            .join("landing.json"),
    )
}

/// Deletes the record that a transfer's object is about to be renamed into place, once a run of a recurring transfer
/// has ended.
pub fn remove_pending_rename(id: u64) {
    if let Some(path) = pending_rename_path(id) {
        let _ = std::fs::remove_file(path);
    }
}

/// Deletes the order of a completed transfer, and the credentials in it.
pub fn remove_order(id: u64) {
    if let Ok(root) = jobs::jobs_directory() {
        let folder = root.join(id.to_string());
        let _ = std::fs::remove_file(folder.join(ORDER));
        let _ = std::fs::remove_file(folder.join("landing.json"));
    }
}

fn write(path: &Path, what: &impl Serialize) -> io::Result<()> {
    let fresh = path.with_extension("new");
    let mut file = OpenOptions::new()
        .create(true)
        .write(true)
        .truncate(true)
        .mode(0o600)
        .open(&fresh)?;
    file.write_all(&serde_json::to_vec(what)?)?;
    file.sync_all()?;
    std::fs::rename(&fresh, path)?;
    sync(path.parent().unwrap_or(Path::new(".")))
}

fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_passes_on_this_machines_clock_and_after_a_restart_on_the_walls() {
        let due = DueTime::within(Duration::from_secs(600));
        let anchor = SavedDeadline::of(due);
        assert_eq!(anchor.due(), due);
        let text = serde_json::to_string(&anchor).unwrap();
        let mut again: SavedDeadline = serde_json::from_str(&text).unwrap();
        assert_eq!(again, anchor);
        again.since_boot = Some(("another".into(), Duration::from_secs(1)));
        assert_eq!(again.due(), DueTime::At(anchor.at));
    }

    #[test]
    fn an_order_that_was_not_confirmed_is_removed_and_no_other_transfer() {
        let root = tempfile::tempdir().unwrap();
        for files in [&[ORDER][..], &[JOB], &[JOB, ORDER], &[]] {
            let folder = root.path().join(format!("a{}", files.concat()));
            std::fs::create_dir(&folder).unwrap();
            files
                .iter()
                .for_each(|file| std::fs::write(folder.join(file), "{}").unwrap());
        }
        std::fs::write(root.path().join("lock"), "").unwrap();
        remove_unconfirmed_in(root.path()).unwrap();
        let left = std::fs::read_dir(root.path()).unwrap().flatten();
        let mut left: Vec<_> = left.map(|entry| entry.file_name()).collect();
        left.sort();
        assert_eq!(left, ["a", "ajob.json", "ajob.jsonorder.json", "lock"]);
    }

    #[test]
    fn a_time_of_day_stays_one() {
        let at = "2030-01-31T07:30:00Z".parse().unwrap();
        let anchor = SavedDeadline::of(DueTime::At(at));
        assert_eq!((anchor.due(), anchor.since_boot), (DueTime::At(at), None));
    }

    #[test]
    fn a_budget_is_what_earlier_runs_left_of_it() {
        let mut order = TransferOrder::new(TransferVerb::Get, "http://h/a");
        order.max_cell = Some(1_000);
        let kept = SavedTransfer::new(order, true).unwrap();
        let left = |used| kept.terms(used).unwrap().metered_bytes_max;
        assert_eq!(
            (left(0), left(400), left(2_000)),
            (Some(1_000), Some(600), Some(0))
        );
    }
}
