//! The events of a transfer for its observer, without repetitions.

use d2tp_sched::{format_duration, likelihood};
use std::collections::BTreeMap;
use std::time::Duration;

use super::progress::ContentProgress;
use crate::fetch::boot_clock::BootInstant;
use crate::fetch::mode::FetchMode;
use crate::fetch::outcome::TransferReason;
use crate::fetch::report::{
    DeadlinePromise, TransferEvent, TransferObserver, TransferReport, human_bytes,
};

/// The interval at which an agent repeats the reason for a wait, since the time left changes.
const SAID_AGAIN: Duration = Duration::from_secs(10); // a guess

/// Reports events to an observer, each once.
pub(super) struct TransferReporter<'a> {
    observer: &'a mut dyn TransferObserver,
    mode: FetchMode,
    start: BootInstant,
    /// Whether a wait is reported repeatedly, for users who look at it later.
    repeats_waits: bool,
    /// The wait that was reported last, and when; none while bytes move.
    waiting: Option<(TransferReason, BootInstant)>,
    said_infeasible: bool,
    /// Whether a report said that the deadline passed during a wait.
    said_late: bool,
    said_probe: bool,
    said_spending: bool,
    /// Whether a metered link is being measured.
    is_probing: bool,
    /// The estimate when links had carried something for the first time.
    first_promise: Option<DeadlinePromise>,
    /// Why the current link is used, in words.
    pub(super) why: String,
    /// Which of the proxy's nodes is used and why, if it has several.
    pub(super) node: Option<String>,
}

/// What links carried in a moment.
pub(super) struct CurrentTraffic<'a> {
    /// The links that carried them.
    pub(super) link: &'a str,
    /// The current rate in bytes per second.
    pub(super) rate_bytes_per_s: f64,
    /// Payload bytes of each link since the beginning.
    pub(super) bytes_by_link: &'a BTreeMap<String, u64>,
    /// Payload bytes of metered links since the beginning.
    pub(super) metered_bytes: u64,
}

impl<'a> TransferReporter<'a> {
    /// Creates the reporter of a transfer that began at `start`.
    pub(super) fn new(
        observer: &'a mut dyn TransferObserver,
        mode: FetchMode,
        start: BootInstant,
        repeats_waits: bool,
    ) -> TransferReporter<'a> {
        TransferReporter {
            observer,
            mode,
            start,
            repeats_waits,
            waiting: None,
            said_infeasible: false,
            said_late: false,
            said_probe: false,
            said_spending: false,
            is_probing: false,
            first_promise: None,
            why: String::new(),
            node: None,
        }
    }

    /// When the transfer began.
    pub(super) fn start(&self) -> BootInstant {
        self.start
    }

    /// Which host talks to the origin.
    pub(super) fn mode(&self) -> FetchMode {
        self.mode
    }

    /// The first estimate.
    pub(super) fn first_promise(&self) -> Option<DeadlinePromise> {
        self.first_promise
    }

    /// Seconds since the start.
    pub(super) fn elapsed_s(&self) -> f64 {
        BootInstant::now().since(self.start).as_secs_f64()
    }

    /// Reports that the destination is open.
    pub(super) fn begun(&mut self, url: String, file: String, held_bytes: u64) {
        self.observer.on_event(&TransferEvent::Begun {
            url,
            file,
            mode: self.mode,
            held_bytes,
        });
    }

    /// Why the link is used, and which node of the proxy.
    fn link_and_node(&self) -> String {
        match (&self.node, self.why.is_empty()) {
            (None, _) => self.why.clone(),
            (Some(node), true) => format!("proxy {node}"),
            (Some(node), false) => format!("{}; proxy {node}", self.why),
        }
    }

    /// Reports information that does not affect the transfer.
    pub(super) fn note(&mut self, reason: Option<TransferReason>, text: String) {
        let t_s = self.elapsed_s();
        self.observer
            .on_event(&TransferEvent::Note { t_s, reason, text });
    }

    /// Reports that another link carries from now on.
    pub(super) fn switched(&mut self, from: Option<String>, to: String, why: String) {
        let t_s = self.elapsed_s();
        self.observer.on_event(&TransferEvent::Switch {
            t_s,
            from,
            to,
            why,
            kind: None,
            silence_ms: None,
        });
    }

    /// Reports that a session moved to another link: how, and how long nothing arrived.
    pub(super) fn session_switched(
        &mut self,
        from: Option<String>,
        to: String,
        kind: &'static str,
        silence: Duration,
    ) {
        let t_s = self.elapsed_s();
        self.observer.on_event(&TransferEvent::Switch {
            t_s,
            from,
            to,
            why: self.why.clone(),
            kind: Some(kind.into()),
            silence_ms: Some(silence.as_secs_f64() * 1e3),
        });
    }

    /// Reports why nothing moves: once, and in an agent repeatedly.
    pub(super) fn waits(&mut self, reason: TransferReason, why: String, unblocks: String) {
        let now = BootInstant::now();
        if let Some((said, at)) = self.waiting
            && said == reason
            && !(self.repeats_waits && now.since(at) >= SAID_AGAIN)
        {
            return;
        }
        self.waiting = Some((reason, now));
        let t_s = self.elapsed_s();
        self.observer.on_event(&TransferEvent::Waiting {
            t_s,
            reason,
            why,
            unblocks,
        });
    }

    /// Reports, once, that the deadline passed while the transfer waits, which goes on, and what would end the wait.
    pub(super) fn note_late_wait(&mut self, reason: TransferReason) {
        if std::mem::replace(&mut self.said_late, true) {
            return;
        }
        let text = match reason {
            TransferReason::PathCost | TransferReason::RoamingBlocked => {
                "the deadline passed without a free network; the transfer goes on when there is one. To go on now: \
                 --policy any"
            }
            TransferReason::PathTooSlow => {
                "the deadline passed without an answer over a free network; the transfer goes on when one carries. To \
                 go on now: --policy any"
            }
            TransferReason::NoPath => {
                "the deadline passed without a network; the transfer goes on when there is one"
            }
            TransferReason::OverBudget => {
                "the deadline passed, and the data limit is used up; the transfer goes on when a free network is up"
            }
            _ => "the deadline passed; the transfer goes on, and will be late",
        };
        self.note(Some(reason), text.to_owned());
    }

    /// Lets a new deadline be reported as the first one was.
    pub(super) fn terms_changed(&mut self) {
        self.said_late = false;
        self.wait_is_over();
        self.note(None, "its terms have changed".into());
    }

    /// Ends a wait, so that the next one is reported again.
    pub(super) fn wait_is_over(&mut self) {
        self.waiting = None;
    }

    /// Reports the estimate as soon as the size is known, when rates of links are not measured yet.
    pub(super) fn size_known(
        &mut self,
        progress: ContentProgress,
        now: CurrentTraffic<'_>,
        promise: Option<DeadlinePromise>,
    ) {
        self.note_infeasible(promise);
        self.bytes(progress, now, promise);
    }

    /// Reports the progress, and the estimate by the rates so far.
    pub(super) fn progress(
        &mut self,
        progress: ContentProgress,
        now: CurrentTraffic<'_>,
        promise: Option<DeadlinePromise>,
    ) {
        self.first_promise = self.first_promise.or(promise);
        self.note_infeasible(promise);
        self.bytes(progress, now, promise);
    }

    /// Reports, before each measurement, that a metered link carries some bytes to be measured, and
    /// what was spent so far. `probe`: the link and the most bytes; none while nothing is measured.
    pub(super) fn note_probe(&mut self, probe: Option<(&str, u64)>, spent_bytes: u64) {
        let was_probing = std::mem::replace(&mut self.is_probing, probe.is_some());
        let Some((link, bytes)) = probe.filter(|_| !was_probing) else {
            return;
        };
        let kilobytes = bytes.div_ceil(1_000);
        let text = match std::mem::replace(&mut self.said_probe, true) {
            false => format!(
                "measuring {link} with up to {kilobytes} kB of mobile data: free networks alone may miss the \
                 deadline"
            ),
            true => format!(
                "measuring {link} again with up to {kilobytes} kB of mobile data, after {} so far",
                human_bytes(spent_bytes)
            ),
        };
        self.note(None, text);
    }

    /// Reports, once, that metered links carry the transfer beside free ones, and why.
    pub(super) fn note_spending(&mut self, because: &str) {
        if !std::mem::replace(&mut self.said_spending, true) {
            self.note(None, format!("using mobile data too: {because}"));
        }
    }

    /// Reports once that the transfer will probably be late.
    fn note_infeasible(&mut self, promise: Option<DeadlinePromise>) {
        let Some(promise) = promise.filter(|promise| promise.infeasible && !self.said_infeasible)
        else {
            return;
        };
        self.said_infeasible = true;
        let left = format_duration(Duration::from_secs_f64(promise.left_s));
        self.note(
            None,
            format!(
                "it will probably be late: {} likely to finish in {left}",
                likelihood(promise.p)
            ),
        );
    }

    fn bytes(
        &mut self,
        progress: ContentProgress,
        now: CurrentTraffic<'_>,
        promise: Option<DeadlinePromise>,
    ) {
        if self.waiting.is_some() {
            return; // that it waits says more than what still trickles in
        }
        let event = TransferEvent::Progress {
            t_s: self.elapsed_s(),
            bytes: progress.done,
            length: progress.length,
            rate_bytes_per_s: now.rate_bytes_per_s,
            link: now.link.to_owned(),
            bytes_by_link: now.bytes_by_link.clone(),
            metered_bytes: now.metered_bytes,
            why: self.link_and_node(),
            mode: self.mode,
            promise,
        };
        self.observer.on_event(&event);
    }

    /// Reports the end.
    pub(super) fn ended(&mut self, report: TransferReport) {
        self.observer.on_event(&match report.text {
            None => TransferEvent::Done(report),
            Some(_) => TransferEvent::Error(report),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Kinds(Vec<&'static str>);

    impl TransferObserver for Kinds {
        fn on_event(&mut self, event: &TransferEvent) {
            self.0.push(match event {
                TransferEvent::Waiting { .. } => "waiting",
                TransferEvent::Progress { .. } => "progress",
                TransferEvent::Note { .. } => "note",
                _ => "other",
            });
        }
    }

    fn said(tell: impl FnOnce(&mut TransferReporter<'_>)) -> Vec<&'static str> {
        let mut kinds = Kinds::default();
        let start = BootInstant::now();
        tell(&mut TransferReporter::new(
            &mut kinds,
            FetchMode::Direct,
            start,
            false,
        ));
        kinds.0
    }

    fn tell_progress(reporter: &mut TransferReporter<'_>, promise: Option<DeadlinePromise>) {
        let now = CurrentTraffic {
            link: "wlan0",
            rate_bytes_per_s: 1.0,
            bytes_by_link: &BTreeMap::new(),
            metered_bytes: 0,
        };
        reporter.progress(ContentProgress::default(), now, promise);
    }

    #[test]
    fn a_wait_is_said_once_for_each_reason_and_hides_what_trickles_in() {
        let wait = |reporter: &mut TransferReporter<'_>, reason| {
            reporter.waits(reason, String::new(), String::new());
        };
        let told = said(|reporter| {
            wait(reporter, TransferReason::NoPath);
            wait(reporter, TransferReason::NoPath);
            tell_progress(reporter, None);
            wait(reporter, TransferReason::PathCost);
            reporter.wait_is_over();
            tell_progress(reporter, None);
            wait(reporter, TransferReason::PathCost);
        });
        assert_eq!(told, ["waiting", "waiting", "progress", "waiting"]);
    }

    #[test]
    fn a_deadline_that_passes_during_a_wait_is_said_once_and_again_for_new_terms() {
        let told = said(|reporter| {
            reporter.note_late_wait(TransferReason::PathCost);
            reporter.note_late_wait(TransferReason::NoPath);
        });
        assert_eq!(told, ["note"]);
        let told = said(|reporter| {
            reporter.note_late_wait(TransferReason::PathCost);
            reporter.terms_changed();
            reporter.note_late_wait(TransferReason::PathCost);
        });
        assert_eq!(told, ["note"; 3]);
    }

    #[test]
    fn each_measurement_of_a_metered_link_is_said_and_what_is_spent_once() {
        #[derive(Default)]
        struct Notes(Vec<String>);
        impl TransferObserver for Notes {
            fn on_event(&mut self, event: &TransferEvent) {
                if let TransferEvent::Note { text, .. } = event {
                    self.0.push(text.clone());
                }
            }
        }
        let mut notes = Notes::default();
        let start = BootInstant::now();
        let mut reporter = TransferReporter::new(&mut notes, FetchMode::ProxyFetch, start, false);
        let probe = Some(("wwan0", 100_000));
        for (probe, spent) in [(None, 0), (probe, 0), (probe, 60_000), (None, 100_000)] {
            reporter.note_probe(probe, spent);
        }
        reporter.note_probe(probe, 100_000);
        reporter.note_probe(probe, 100_000);
        reporter.note_spending("free networks are slow");
        reporter.note_spending("free networks are slow");
        assert_eq!(
            notes.0,
            [
                "measuring wwan0 with up to 100 kB of mobile data: free networks alone may miss the deadline",
                "measuring wwan0 again with up to 100 kB of mobile data, after 100.00 kB so far",
                "using mobile data too: free networks are slow",
            ]
        );
    }

    #[test]
    fn a_deadline_that_will_hardly_be_met_is_said_once() {
        let promise = Some(DeadlinePromise {
            p: 0.0,
            infeasible: true,
            metered_bytes_expected: 0,
            metered_bytes_95: 0,
            metered_bytes_worst: 0,
            left_s: 3.0,
        });
        let told = said(|reporter| {
            tell_progress(reporter, promise);
            tell_progress(reporter, promise);
        });
        assert_eq!(told, ["note", "progress", "progress"]);
    }
}
