//! Counts what becomes of the files of a folder, adds up what their transfers carry, and tells an observer.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::mirror_event::{MirrorEvent, MirrorObserver};
use super::relative_path::RelativePath;
use crate::fetch::boot_clock::BootInstant;
use crate::fetch::mode::FetchMode;
use crate::fetch::outcome::{TransferExit, TransferFailure, TransferReason};
use crate::fetch::report::{
    DeadlinePromise, MirrorCounts, TransferEvent, TransferObserver, TransferReport, done_to_files,
};
use crate::terms::TransferTerms;

/// The interval at which the progress of all files is reported, if metered links carry nothing.
const PROGRESS_EVERY: Duration = Duration::from_secs(1); // a scheduling epoch

/// The interval after which the same wait is reported again, since the time left changes.
const WAIT_AGAIN: Duration = Duration::from_secs(9); // less than the 10 s at which a transfer in the agent repeats it

/// A file that is being transferred.
#[derive(Debug, Default)]
struct FileProgress {
    bytes: u64,
    rate_bytes_per_s: f64,
    link: String,
    why: String,
    bytes_by_link: BTreeMap<String, u64>,
    metered_bytes: u64,
    promise: Option<DeadlinePromise>,
}

#[derive(Debug, Default)]
struct ReporterState {
    counts: MirrorCounts,
    /// Bytes of the files that are complete.
    bytes: u64,
    /// Bytes of all files that are to be transferred, if the listing tells them.
    planned_bytes: Option<u64>,
    /// The first failure, with the path.
    failure: Option<TransferFailure>,
    /// The reason for a wait that was reported last, and when.
    waits: Option<(TransferReason, BootInstant)>,
    /// What transfers that have ended carried.
    bytes_by_link: BTreeMap<String, u64>,
    metered_bytes: u64,
    duplicate_bytes: u64,
    switches: u32,
    first_promise: Option<DeadlinePromise>,
    under_way: BTreeMap<u64, FileProgress>,
    /// When the progress was reported last, and the metered bytes that it had.
    progress_at: Option<BootInstant>,
    reported_metered_bytes: u64,
}

/// Counts the files of a folder, and tells an observer.
pub struct MirrorReporter {
    observer: Box<dyn MirrorObserver>,
    dry_run: bool,
    /// `get` or `put`.
    verb: &'static str,
    mode: FetchMode,
    /// Whether a wait is reported repeatedly.
    repeats_waits: bool,
    start: BootInstant,
    state: Mutex<ReporterState>,
}

impl MirrorReporter {
    /// Creates the reporter of a run that begins now. `verb`: `get` or `put`; `repeats_waits`: for users who look at
    /// it later.
    pub fn new(
        observer: Box<dyn MirrorObserver>,
        verb: &'static str,
        mode: FetchMode,
        (dry_run, repeats_waits): (bool, bool),
    ) -> MirrorReporter {
        MirrorReporter {
            observer,
            dry_run,
            verb,
            mode,
            repeats_waits,
            start: BootInstant::now(),
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, ReporterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn elapsed_s(&self) -> f64 {
        BootInstant::now().since(self.start).as_secs_f64()
    }

    fn tell_file(&self, action: &'static str, path: &RelativePath, bytes: Option<u64>) {
        self.observer.on_event(&MirrorEvent::File {
            action: action.into(),
            path: path.text(),
            bytes,
            dry_run: self.dry_run,
        });
    }

    /// Records what is to be transferred in all; none if the listing does not tell.
    pub fn planned(&self, bytes: Option<u64>) {
        self.state().planned_bytes = bytes;
    }

    /// Records that a file was transferred.
    pub fn transferred(&self, path: &RelativePath, report: &TransferReport) {
        {
            let mut state = self.state();
            state.counts.transferred += 1;
            state.bytes += report.bytes;
            state.counts.late += u64::from(report.deadline_met == Some(false));
        }
        self.tell_file(done_to_files(self.verb), path, Some(report.bytes));
    }

    /// Records that a file would be transferred.
    pub fn would_transfer(&self, path: &RelativePath, bytes: Option<u64>) {
        {
            let mut state = self.state();
            state.counts.transferred += 1;
            state.bytes += bytes.unwrap_or(0);
        }
        self.tell_file(done_to_files(self.verb), path, bytes);
    }

    /// Records that a file is as it was.
    pub fn unchanged(&self) {
        self.state().counts.unchanged += 1;
    }

    /// Records that a file was deleted, or would be.
    pub fn deleted(&self, path: &RelativePath) {
        self.state().counts.deleted += 1;
        self.tell_file("deleted", path, None);
    }

    /// Records that a file or a folder failed.
    pub fn failed(&self, what: &str, failure: &TransferFailure) {
        {
            let mut state = self.state();
            // What was stopped with the whole is none of its own faults.
            let is_stopped = failure.exit == TransferExit::Cancelled;
            state.counts.failed += u64::from(!is_stopped);
            if state.failure.is_none() {
                let text = match is_stopped {
                    true => failure.text.clone(),
                    false => format!("{what}: {}", failure.text),
                };
                state.failure = Some(TransferFailure {
                    text,
                    ..failure.clone()
                });
            }
            if is_stopped {
                return;
            }
        }
        self.observer.on_event(&MirrorEvent::Failed {
            path: what.to_owned(),
            exit: failure.exit as u8,
            reason: failure.reason,
            text: failure.text.clone(),
        });
    }

    /// Reports information.
    pub fn note(&self, text: &str) {
        let text = text.to_owned();
        self.observer.on_event(&MirrorEvent::Note { text });
    }

    /// Bytes that metered links carried so far for the other files.
    pub fn metered_bytes_besides(&self, id: u64) -> u64 {
        let state = self.state();
        let others = (state.under_way.iter()).filter(|(other, _)| **other != id);
        let under_way: u64 = others.map(|(_, file)| file.metered_bytes).sum();
        state.metered_bytes + under_way
    }

    /// Whether any file failed.
    pub fn has_failures(&self) -> bool {
        self.state().failure.is_some()
    }

    fn waits(&self, reason: TransferReason, why: &str, unblocks: &str) {
        {
            let mut state = self.state();
            let now = BootInstant::now();
            // The others wait for the same.
            if let Some((said, at)) = state.waits
                && said == reason
                && !(self.repeats_waits && now.since(at) >= WAIT_AGAIN)
            {
                return;
            }
            state.waits = Some((reason, now));
        }
        self.observer.on_event(&MirrorEvent::Waiting {
            reason,
            why: why.to_owned(),
            unblocks: unblocks.to_owned(),
        });
    }

    /// Records the progress of a file.
    fn advance(&self, id: u64, file: FileProgress) {
        let progress = {
            let mut state = self.state();
            state.waits = None;
            state.first_promise = state.first_promise.or(file.promise);
            state.under_way.insert(id, file);
            self.progress_if_due(&mut state, false)
        };
        if let Some(progress) = progress {
            self.observer.on_progress(&progress);
        }
    }

    /// Records the end of a file's transfer.
    fn end(&self, id: u64, report: &TransferReport) {
        let progress = {
            let mut state = self.state();
            state.under_way.remove(&id);
            add_by_link(&mut state.bytes_by_link, &report.bytes_by_link);
            state.metered_bytes += report.metered_bytes;
            state.duplicate_bytes += report.duplicate_bytes;
            state.switches += report.switches;
            let has_moved = !report.bytes_by_link.is_empty();
            has_moved
                .then(|| self.progress_if_due(&mut state, true))
                .flatten()
        };
        if let Some(progress) = progress {
            self.observer.on_progress(&progress);
        }
    }

    /// The progress of all files, if it was not reported lately. `after_end`: a file has just ended.
    fn progress_if_due(&self, state: &mut ReporterState, after_end: bool) -> Option<TransferEvent> {
        let now = BootInstant::now();
        let under_way = state.under_way.values().map(|file| file.metered_bytes);
        let metered = state.metered_bytes + under_way.sum::<u64>();
        // What was paid counts at once, since a budget may be used up.
        let is_new = metered > state.reported_metered_bytes
            || (state.progress_at).is_none_or(|at| now.since(at) >= PROGRESS_EVERY);
        if !is_new || (after_end && state.waits.is_some()) {
            return None;
        }
        (state.progress_at, state.reported_metered_bytes) = (Some(now), metered);
        let mut bytes_by_link = state.bytes_by_link.clone();
        let (mut bytes, mut metered_bytes) = (state.bytes, state.metered_bytes);
        let (mut rate_bytes_per_s, mut promise) = (0.0, None);
        let (mut link, mut why) = (String::new(), String::new());
        for file in state.under_way.values() {
            add_by_link(&mut bytes_by_link, &file.bytes_by_link);
            bytes += file.bytes;
            metered_bytes += file.metered_bytes;
            rate_bytes_per_s += file.rate_bytes_per_s;
            (link, why) = (file.link.clone(), file.why.clone());
            promise = least_likely(promise, file.promise);
        }
        Some(TransferEvent::Progress {
            t_s: self.elapsed_s(),
            bytes,
            length: state.planned_bytes.map(|planned| planned.max(bytes)),
            rate_bytes_per_s,
            link,
            bytes_by_link,
            metered_bytes,
            why,
            mode: self.mode,
            promise,
        })
    }

    /// The report of the whole run. `url` and `file` are the folders; `terms` those at the end.
    pub fn report(&self, url: String, file: String, terms: &TransferTerms) -> TransferReport {
        let state = self.state();
        let counts = state.counts;
        let failure = state.failure.clone();
        let is_whole = failure.is_none();
        let exit = match (&failure, counts.late) {
            (Some(failure), _) => failure.exit,
            (None, 0) => TransferExit::Done,
            (None, _) => TransferExit::DeadlineMissed,
        };
        let others = counts.failed.saturating_sub(1);
        let failure = failure.unwrap_or_else(|| TransferFailure::error(""));
        let mut report = TransferReport::failed(self.verb, (url, file), self.mode, terms, &failure);
        report.exit = exit as u8;
        report.text = (!is_whole).then(|| match others {
            0 => failure.text.clone(),
            1 => format!("{}; another one failed, too", failure.text),
            n => format!("{}; {n} others failed, too", failure.text),
        });
        report.bytes = state.bytes;
        report.bytes_by_link.clone_from(&state.bytes_by_link);
        report.metered_bytes = state.metered_bytes;
        report.duplicate_bytes = state.duplicate_bytes;
        report.switches = state.switches;
        report.promise = state.first_promise;
        report.duration_s = self.elapsed_s();
        report.deadline_s = report.deadline_s.map(|left| left + report.duration_s);
        if report.deadline_s.is_some() && is_whole {
            report.deadline_met = Some(counts.late == 0);
        }
        report.unchanged = is_whole && counts.transferred + counts.deleted == 0;
        report.mirror = Some(counts);
        report
    }
}

fn add_by_link(to: &mut BTreeMap<String, u64>, more: &BTreeMap<String, u64>) {
    for (link, bytes) in more {
        *to.entry(link.clone()).or_default() += bytes;
    }
}

/// The promise that is less likely to hold.
fn least_likely(
    one: Option<DeadlinePromise>,
    other: Option<DeadlinePromise>,
) -> Option<DeadlinePromise> {
    match (one, other) {
        (Some(one), Some(other)) if other.p < one.p => Some(other),
        (one, other) => one.or(other),
    }
}

/// The observer of the transfer of one file.
pub struct FileObserver<'a> {
    reporter: &'a MirrorReporter,
    id: u64,
    /// The report of the end.
    pub report: Option<TransferReport>,
}

impl<'a> FileObserver<'a> {
    /// Creates an observer of a transfer that has not begun.
    pub fn new(reporter: &'a MirrorReporter, id: u64) -> FileObserver<'a> {
        FileObserver {
            reporter,
            id,
            report: None,
        }
    }
}

impl TransferObserver for FileObserver<'_> {
    fn on_event(&mut self, event: &TransferEvent) {
        match event {
            TransferEvent::Waiting {
                reason,
                why,
                unblocks,
                ..
            } => self.reporter.waits(*reason, why, unblocks),
            TransferEvent::Progress {
                bytes,
                rate_bytes_per_s,
                link,
                bytes_by_link,
                metered_bytes,
                why,
                promise,
                ..
            } => {
                let file = FileProgress {
                    bytes: *bytes,
                    rate_bytes_per_s: *rate_bytes_per_s,
                    link: link.clone(),
                    why: why.clone(),
                    bytes_by_link: bytes_by_link.clone(),
                    metered_bytes: *metered_bytes,
                    promise: *promise,
                };
                self.reporter.advance(self.id, file);
            }
            TransferEvent::Done(report) | TransferEvent::Error(report) => {
                self.reporter.end(self.id, report);
                self.report = Some(report.clone());
            }
            TransferEvent::Begun { .. }
            | TransferEvent::Switch { .. }
            | TransferEvent::Note { .. } => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[derive(Default)]
    struct Heard(Mutex<Vec<TransferEvent>>);

    impl MirrorObserver for Arc<Heard> {
        fn on_event(&self, _event: &MirrorEvent) {}

        fn on_progress(&self, progress: &TransferEvent) {
            self.0.lock().expect("heard").push(progress.clone());
        }
    }

    fn file(bytes: u64, link: &str) -> FileProgress {
        FileProgress {
            bytes,
            link: link.to_owned(),
            bytes_by_link: BTreeMap::from([(link.to_owned(), bytes)]),
            ..FileProgress::default()
        }
    }

    #[test]
    fn what_files_carry_is_added_up_and_never_counted_twice() {
        let heard = Arc::new(Heard::default());
        let observer = Box::new(heard.clone());
        let reporter = MirrorReporter::new(observer, "get", FetchMode::Direct, (false, false));
        reporter.planned(Some(1_000));
        reporter.advance(1, file(100, "wlan0"));
        reporter.advance(2, file(50, "wwan0"));
        let failure = TransferFailure::error("the server is gone");
        let asked = ("http://h/a".to_owned(), "a".to_owned());
        let terms = TransferTerms::default();
        let mut one = TransferReport::failed("get", asked, FetchMode::Direct, &terms, &failure);
        one.bytes_by_link = BTreeMap::from([("wlan0".to_owned(), 120)]);
        one.metered_bytes = 7;
        reporter.end(1, &one);
        assert_eq!(reporter.metered_bytes_besides(2), 7);
        reporter.failed("d/a", &failure);
        let report = reporter.report("http://h/".into(), "here".into(), &terms);
        assert_eq!(
            report.bytes_by_link, one.bytes_by_link,
            "of those that ended"
        );
        assert_eq!(report.text.as_deref(), Some("d/a: the server is gone"));
        assert_eq!(report.mirror.expect("a mirror").failed, 1);
        let heard = heard.0.lock().expect("heard");
        let TransferEvent::Progress { bytes, length, .. } = &heard[0] else {
            panic!("{heard:?}");
        };
        assert_eq!((*bytes, *length), (100, Some(1_000)));
        let TransferEvent::Progress { metered_bytes, .. } = &heard[1] else {
            panic!("{heard:?}");
        };
        assert_eq!(*metered_bytes, 7, "what was paid is told at once");
        assert_eq!(heard.len(), 2, "and the rest once a second");
    }
}
