//! What the queue stores of a transfer that recurs: how far it came, the file as the last run left it, and how that
//! ended.

use std::path::Path;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::fetch::file_stamp::FileStamp;
use crate::fetch::object_version::ObjectVersion;
use crate::fetch::outcome::TransferFailure;
use crate::fetch::report::TransferReport;
use crate::order::TransferOrder;
use crate::recurrence::RecurrenceProgress;

/// The file as the last complete run left it, or sent it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownFile {
    stamp: FileStamp,
    /// The version of the object that was downloaded to it, if the origin names one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    version: Option<ObjectVersion>,
}

/// How a run of a recurring transfer ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecurringRunEnd {
    /// When the run ended.
    pub ended: String,
    /// `done`, `unchanged` or `failed`.
    pub outcome: String,
    /// Whether its deadline had passed.
    pub late: bool,
    /// Why the run failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// What the queue stores of a recurring transfer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedRecurrence {
    /// How far the run came.
    pub progress: RecurrenceProgress,
    /// The file as the last complete run left it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    known: Option<KnownFile>,
    /// How the last run ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    last: Option<RecurringRunEnd>,
}

impl SavedRecurrence {
    /// The state of an order that was just given; none if it does not recur.
    ///
    /// # Errors
    /// It makes no sense.
    pub fn new(order: &TransferOrder) -> Result<Option<SavedRecurrence>, TransferFailure> {
        let recurs = order.recurrence()?;
        Ok(recurs.map(|_| SavedRecurrence {
            progress: RecurrenceProgress::new(Timestamp::now()),
            known: None,
            last: None,
        }))
    }

    /// The version of the object that the file at `path` holds.
    pub fn held_version(&self, path: &Path) -> Option<ObjectVersion> {
        let known = self.known.as_ref()?;
        let is_same = FileStamp::of(path) == Some(known.stamp);
        known.version.clone().filter(|_| is_same)
    }

    /// Whether the file of an upload is the one that the last run sent.
    pub fn has_sent(&self, stamp: FileStamp) -> bool {
        self.known
            .as_ref()
            .is_some_and(|known| known.stamp == stamp)
    }

    /// How the last run ended; none before the first one.
    pub fn last_run(&self) -> Option<&RecurringRunEnd> {
        self.last.as_ref()
    }

    /// Records the end of a run; `stamp`: of the file that it brought or sent.
    pub fn end_run(&mut self, report: &TransferReport, stamp: Option<FileStamp>) {
        self.progress.current = None;
        let is_whole = report.text.is_none();
        self.last = Some(RecurringRunEnd {
            ended: at_second(Timestamp::now()),
            outcome: match (is_whole, report.unchanged) {
                (true, true) => "unchanged",
                (true, false) => "done",
                (false, _) => "failed",
            }
            .to_owned(),
            late: report.deadline_met == Some(false),
            text: report.text.clone(),
        });
        if is_whole && !report.unchanged {
            let version = report.version.clone();
            self.known = stamp.map(|stamp| KnownFile { stamp, version });
        }
    }
}

/// A time to the second, for users.
fn at_second(at: Timestamp) -> String {
    at.round(jiff::Unit::Second).unwrap_or(at).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::TransferVerb;

    #[test]
    fn a_file_that_was_changed_or_is_gone_is_not_the_version_that_was_fetched() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a");
        std::fs::write(&path, "one").expect("written");
        let mut order = TransferOrder::new(TransferVerb::Get, "http://h/a");
        order.every = Some("07:30".to_owned());
        let mut recurrence = SavedRecurrence::new(&order)
            .expect("an order")
            .expect("it recurs");
        assert_eq!(recurrence.held_version(&path), None);
        let mut headers = http::HeaderMap::new();
        headers.insert("etag", "\"v1\"".parse().expect("a value"));
        let url = "http://h/a".parse().expect("a URL");
        let version = ObjectVersion::from_headers(&headers, &url).expect("a version");
        recurrence.known = FileStamp::of(&path).map(|stamp| KnownFile {
            stamp,
            version: Some(version.clone()),
        });
        assert_eq!(recurrence.held_version(&path), Some(version));
        std::fs::write(&path, "longer").expect("written");
        assert_eq!(recurrence.held_version(&path), None);
        std::fs::remove_file(&path).expect("removed");
        assert_eq!(recurrence.held_version(&path), None);
    }

    #[test]
    fn an_order_that_recurs_has_no_other_deadline() {
        let mut order = TransferOrder::new(TransferVerb::Get, "http://h/a");
        assert_eq!(SavedRecurrence::new(&order).expect("an order"), None);
        order.every = Some("07:30".to_owned());
        order.deadline = Some(crate::order::Deadline::WithinS(60.0));
        let failure = SavedRecurrence::new(&order).expect_err("two deadlines");
        assert!(failure.text.contains("no other"), "{}", failure.text);
    }
}
