//! The control of every transfer: its job and terms, the available links, the scheduler's
//! decisions, and when waiting is useless.

use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::SpendHandle;
use d2tp_links::{CostClass, Link};
use d2tp_sched::{
    ClientDecision, ClientReport, CostPolicy, DeadlineFallback, FlowDemand, LinkCandidate,
    LinkChoice, ObjectStart, SourceSupply, TransferDirection,
};
use tokio::sync::watch;

use super::following_bytes::FollowingBytes;
use super::job::{TransferContext, TransferJob, redact_url};
use super::link_usage::LinkUsage;
use super::progress::ContentProgress;
use super::reporter::{CurrentTraffic, TransferReporter};
use super::retry::Retries;
use crate::fetch::boot_clock::BootInstant;
use crate::fetch::mode::FetchMode;
use crate::fetch::outcome::{TransferExit, TransferFailure, TransferReason};
use crate::fetch::rate_limiter::RateLimiter;
use crate::fetch::report::{DeadlinePromise, TransferObserver, TransferReport};
use crate::terms::TransferTerms;

/// The scheduling epoch of the Cedos paper (§III.D): rates are averages over it.
pub(super) const EPOCH: Duration = Duration::from_secs(1);

/// The job, the terms and the links of a transfer, and the decisions about them.
pub(super) struct TransferControl<'a> {
    pub(super) job: &'a TransferJob,
    /// The current terms.
    pub(super) terms: TransferTerms,
    /// Updates of the terms, if they can change.
    terms_updates: Option<watch::Receiver<TransferTerms>>,
    pub(super) links: watch::Receiver<Arc<Vec<Link>>>,
    pub(super) stop: watch::Receiver<bool>,
    pub(super) spending: SpendHandle,
    pub(super) usage: LinkUsage,
    pub(super) reporter: TransferReporter<'a>,
    pub(super) retries: Retries,
    /// The limit on the rate, if there is one.
    pub(super) rate_limiter: Option<Arc<RateLimiter>>,
    /// What is to be moved after the transfer by the same deadline.
    following: Option<Arc<FollowingBytes>>,
    /// What the server said when it last refused the transfer, until the object grows.
    refusal: Option<String>,
    /// Why no link may be used at present.
    blocked: Option<(TransferReason, String)>,
}

/// A wait for a link.
#[derive(Debug)]
pub(super) struct LinkWait {
    /// The reason code.
    pub(super) reason: TransferReason,
    /// Why no link is used, for people.
    pub(super) why: String,
    /// What would end the wait.
    pub(super) unblocks: String,
}

/// How and when a transfer ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct EndMoment {
    /// Whether the deadline had passed.
    pub(super) is_late: bool,
    /// Seconds from the start.
    pub(super) duration_s: f64,
}

impl<'a> TransferControl<'a> {
    /// Creates the control of a transfer that began at `start`, as a client of the scheduler.
    pub(super) fn new(
        job: &'a TransferJob,
        mode: FetchMode,
        context: TransferContext,
        direction: TransferDirection,
        observer: &'a mut dyn TransferObserver,
        start: BootInstant,
    ) -> TransferControl<'a> {
        let reporter = TransferReporter::new(observer, mode, start, context.terms.is_some());
        let spending = context.scheduler.join(direction, context.id);
        spending.set_energy_saving(job.terms.energy);
        TransferControl {
            job,
            terms: job.terms.clone(),
            terms_updates: context.terms,
            links: context.links,
            stop: context.stop,
            spending,
            usage: LinkUsage::default(),
            reporter,
            retries: Retries::default(),
            rate_limiter: context.rate_limiter,
            following: context.following,
            refusal: None,
            blocked: None,
        }
    }

    /// The time until the deadline.
    pub(super) fn time_left(&self) -> Option<Duration> {
        self.terms.time_left()
    }

    /// The time until the deadline, if it has not passed.
    pub(super) fn time_ahead(&self) -> Option<Duration> {
        self.time_left().filter(|left| !left.is_zero())
    }

    /// Applies new terms, if there are any. True if there were.
    pub(super) fn take_new_terms(&mut self) -> bool {
        let Some(updates) = &mut self.terms_updates else {
            return false;
        };
        // An agent that is gone leaves the last word standing.
        if !updates.has_changed().unwrap_or(false) {
            return false;
        }
        let terms = updates.borrow_and_update().clone();
        let changed = terms != self.terms;
        if changed {
            self.terms = terms;
            self.spending.set_energy_saving(self.terms.energy);
            self.reporter.terms_changed();
        }
        changed
    }

    /// Asks the scheduler which links may be used now. `together`: several links can be used at once;
    /// `source`: how the server supplies the transfer.
    pub(super) fn decide(
        &self,
        progress: ContentProgress,
        candidates: &[LinkCandidate],
        together: bool,
        source: SourceSupply,
    ) -> ClientDecision {
        let source = match &self.rate_limiter {
            Some(limiter) => source.throttled(limiter.bytes_per_s()),
            None => source,
        };
        let following = self.following.as_ref().map_or(0, |bytes| bytes.share());
        let with_following =
            |bytes: Option<u64>| bytes.map(|bytes| bytes.saturating_add(following));
        let demand = FlowDemand {
            remaining_bytes: with_following(progress.remaining()),
            left: self.time_left(),
            policy: self.terms.policy,
            if_late: self.terms.if_late,
            metered_bytes_left: self.metered_bytes_to_spend(progress),
        };
        self.spending.decide(&ClientReport {
            demand,
            size_bytes: with_following(progress.length),
            priority: self.terms.priority,
            start: self.object_start(progress),
            candidates,
            carried: self.usage.bytes_by_link(),
            uses_several_links: together,
            always_pays: false,
            is_interactive: false,
            keeps_awake: true,
            source,
        })
    }

    /// Whether the beginning of the object is here, if the terms ask for it before the rest. A server that cannot
    /// continue makes a pause cost all that came, so nothing is put before such an object once it has begun.
    fn object_start(&self, progress: ContentProgress) -> Option<ObjectStart> {
        let wanted = self.terms.start_bytes.filter(|bytes| *bytes > 0)?;
        let wanted = wanted.min(progress.length.unwrap_or(u64::MAX));
        progress
            .is_continuable()
            .then_some(match progress.done < wanted {
                true => ObjectStart::Missing,
                false => ObjectStart::Here,
            })
    }

    /// Records that the object is larger than it ever was: what failed before is over.
    pub(super) fn on_growth(&mut self) {
        self.retries.reset();
        if self.refusal.take().is_some() {
            self.spending.set_refused(false);
        }
    }

    /// Records that the server refused, or failed: nothing is promised until the object grows.
    pub(super) fn on_refused(&mut self, text: &str) {
        self.refusal = Some(text.to_owned());
        self.spending.set_refused(true);
    }

    /// What the server said when it last refused the transfer, if it still stands.
    pub(super) fn refusal(&self) -> Option<&str> {
        self.refusal.as_deref()
    }

    /// Reports why nothing moves, and that the deadline passed meanwhile.
    pub(super) fn report_wait(&mut self, wait: LinkWait) {
        let reason = wait.reason;
        self.reporter.waits(reason, wait.why, wait.unblocks);
        if self.time_left() == Some(Duration::ZERO) {
            self.reporter.note_late_wait(reason);
        }
    }

    /// Records why no link may be used.
    pub(super) fn block(&mut self, reason: TransferReason, why: String) {
        self.blocked = Some((reason, why));
    }

    /// Records that a link may be used.
    pub(super) fn unblock(&mut self) {
        self.blocked = None;
    }

    /// Bytes that metered links may still carry.
    pub(super) fn metered_bytes_left(&self) -> Option<u64> {
        let max = self.terms.metered_bytes_max?;
        Some(max.saturating_sub(self.usage.metered_bytes()))
    }

    /// Bytes for which using metered links is worthwhile: what they may still carry, less what was paid
    /// beside the object; zero if a new request would spend it on overlap alone.
    pub(super) fn metered_bytes_to_spend(&self, progress: ContentProgress) -> Option<u64> {
        let left = self.metered_bytes_left()?;
        if left <= progress.repeated_by_request {
            return Some(0);
        }
        Some(left.saturating_sub(self.usage.paid_besides))
    }

    /// The current estimate for the deadline.
    pub(super) fn promise(&self, progress: ContentProgress) -> Option<DeadlinePromise> {
        let left = self.time_left().filter(|_| progress.length.is_some())?;
        let promise = self.spending.promise()?;
        Some(DeadlinePromise::of(
            &promise,
            left,
            may_cost(&self.links.borrow()),
        ))
    }

    /// Reports the estimate as soon as the size is known.
    pub(super) fn report_size(&mut self, progress: ContentProgress, link: &str) {
        let promise = self.promise(progress);
        let now = CurrentTraffic {
            link,
            rate_bytes_per_s: 0.0,
            bytes_by_link: self.usage.bytes_by_link(),
            metered_bytes: self.usage.metered_bytes(),
        };
        self.reporter.size_known(progress, now, promise);
    }

    /// Reports the progress.
    pub(super) fn report_progress(&mut self, progress: ContentProgress, link: &str, rate: f64) {
        let promise = self.promise(progress);
        let now = CurrentTraffic {
            link,
            rate_bytes_per_s: rate,
            bytes_by_link: self.usage.bytes_by_link(),
            metered_bytes: self.usage.metered_bytes(),
        };
        self.reporter.progress(progress, now, promise);
    }

    /// Returns an error if the transfer was stopped.
    pub(super) fn check_stop(&self) -> Result<(), TransferFailure> {
        if *self.stop.borrow() {
            return Err(TransferFailure::of(
                TransferExit::Cancelled,
                TransferReason::UserPaused,
                "stopped",
            ));
        }
        Ok(())
    }

    /// Returns an error at the deadline, if the object is not wanted later.
    pub(super) fn check_deadline(&self, progress: ContentProgress) -> Result<(), TransferFailure> {
        if self.time_left() != Some(Duration::ZERO) || self.terms.if_late != DeadlineFallback::Fail
        {
            return Ok(());
        }
        Err(self.late_failure(progress))
    }

    /// The failure of a transfer that is incomplete at its deadline.
    pub(super) fn late_failure(&self, progress: ContentProgress) -> TransferFailure {
        let late = "the deadline passed, and --if-late is fail";
        let (exit, reason, text) = match &self.blocked {
            Some((reason @ (TransferReason::PathCost | TransferReason::RoamingBlocked), why)) => (
                TransferExit::NoPermittedPath,
                Some(*reason),
                format!(
                    "{late}: {why}, which may not be used. To allow it: --if-late cell or --policy any"
                ),
            ),
            Some((TransferReason::OverBudget, why)) => {
                let limit = match self.metered_bytes_to_spend(progress) {
                    Some(0) => "--max-cell",
                    _ => "cedos budget",
                };
                (
                    TransferExit::BudgetExhausted,
                    Some(TransferReason::OverBudget),
                    format!("{late}: {why} ({limit})"),
                )
            }
            Some((reason, why)) => (
                TransferExit::DeadlineMissed,
                Some(*reason),
                format!("{late}: {why}"),
            ),
            None => (TransferExit::DeadlineMissed, None, late.to_owned()),
        };
        TransferFailure { exit, reason, text }
    }

    /// A wait for the scheduler's reason, which names the limit that is used up: the transfer's own, or the month's.
    pub(super) fn with_limit_named(&self, wait: LinkWait, progress: ContentProgress) -> LinkWait {
        let is_own = self.metered_bytes_to_spend(progress) == Some(0);
        let is_of_month = wait.why.starts_with("the data limit of ") && !is_own;
        match wait.reason {
            TransferReason::OverBudget if is_of_month => LinkWait {
                reason: wait.reason,
                why: "the limit of the month for metered networks is used up".into(),
                unblocks: "a free network | a larger limit (`cedos budget set SIZE`)".into(),
            },
            _ => wait,
        }
    }

    /// Returns an error if a wait would never end, or waiting is not allowed.
    pub(super) fn refuse_to_wait(
        &self,
        progress: ContentProgress,
        reason: TransferReason,
        why: &str,
    ) -> Result<(), TransferFailure> {
        // What the device may spend grows again on its reset day: only the transfer's own limit is final.
        let spent = reason == TransferReason::OverBudget
            && self.metered_bytes_to_spend(progress) == Some(0);
        let timeless = matches!(self.terms.policy, CostPolicy::Any | CostPolicy::Fast);
        if spent && (timeless || self.time_left() == Some(Duration::ZERO)) {
            let text = format!("{why} (--max-cell), and no free network is up");
            return Err(TransferFailure::of(
                TransferExit::BudgetExhausted,
                reason,
                text,
            ));
        }
        if self.job.now && self.usage.bytes_by_link().is_empty() {
            let text = match reason {
                TransferReason::NoPath => {
                    format!("{why}, and --now does not wait; leave it out to wait for a network")
                }
                TransferReason::PathCost => format!(
                    "{why}, and --now does not wait; leave it out to wait for a free network, or allow \
                     this one with --policy any"
                ),
                _ => format!("{why}, and --now does not wait"),
            };
            let exit = match reason {
                TransferReason::OverBudget => TransferExit::BudgetExhausted,
                _ => TransferExit::NoPermittedPath,
            };
            return Err(TransferFailure::of(exit, reason, text));
        }
        Ok(())
    }

    /// The current moment as the transfer's end.
    pub(super) fn end_moment(&self) -> EndMoment {
        EndMoment {
            is_late: self.time_left() == Some(Duration::ZERO),
            duration_s: self.reporter.elapsed_s(),
        }
    }

    /// Reports the end of a transfer; `fill` adds what is known of its object.
    pub(super) fn finish(
        mut self,
        verb: &'static str,
        file: String,
        end: EndMoment,
        outcome: Result<(), TransferFailure>,
        fill: impl FnOnce(&mut TransferReport, bool),
    ) -> TransferExit {
        let (exit, reason, text) = match outcome {
            Ok(()) if end.is_late => (TransferExit::DeadlineMissed, None, None),
            Ok(()) => (TransferExit::Done, None, None),
            Err(failure) => (failure.exit, failure.reason, Some(failure.text)),
        };
        let whole = text.is_none();
        let start = self.reporter.start();
        let mut report = TransferReport {
            verb: verb.into(),
            url: redact_url(&self.job.url),
            mode: self.reporter.mode(),
            file,
            bytes: 0,
            sha256: String::new(),
            bytes_by_link: self.usage.bytes_by_link().clone(),
            metered_bytes: self.usage.metered_bytes(),
            held_bytes: 0,
            duration_s: end.duration_s,
            first_byte_s: None,
            last_byte_s: None,
            deadline_s: (self.terms.due).map(|due| due.after(start).as_secs_f64()),
            deadline_met: deadline_met(self.terms.due.is_some(), whole, end.is_late),
            promise: self.reporter.first_promise(),
            switches: self.usage.switches(),
            duplicate_bytes: 0,
            content_encoding: None,
            exit: exit as u8,
            reason,
            text,
            resumable_bytes: 0,
            starts_over: false,
            proxy_would_add: None,
            status: None,
            answer: None,
            unchanged: false,
            version: None,
            mirror: None,
        };
        fill(&mut report, whole);
        self.reporter.ended(report);
        exit
    }
}

impl LinkWait {
    /// The index of the link that the scheduler chose, and why; or the wait that it chose.
    pub(super) fn or_use(choice: LinkChoice) -> Result<(usize, String), LinkWait> {
        match choice {
            LinkChoice::Use { index, why } => Ok((index, why)),
            LinkChoice::Wait {
                reason,
                why,
                unblocks,
            } => Err(LinkWait {
                reason: TransferReason::from(reason),
                why,
                unblocks,
            }),
        }
    }
}

/// Whether the deadline was met; none without one, and of a transfer that failed before it: that is no
/// lateness.
fn deadline_met(has_deadline: bool, is_whole: bool, is_late: bool) -> Option<bool> {
    (has_deadline && (is_whole || is_late)).then_some(is_whole && !is_late)
}

/// Whether any existing link is metered, up or not: otherwise no metered bytes are expected.
pub(crate) fn may_cost(links: &[Link]) -> bool {
    links
        .iter()
        .any(|link| link.class.class == CostClass::Metered)
}

#[cfg(test)]
mod tests {
    use d2tp_driver::SchedulerHandle;
    use d2tp_sched::{LinkClass, SchedulerKind};

    use super::*;
    use crate::fetch::report::TransferEvent;
    use crate::order::{Deadline, TransferOrder, TransferVerb};

    struct NobodyObserves;

    impl TransferObserver for NobodyObserves {
        fn on_event(&mut self, _: &TransferEvent) {}
    }

    /// The chance that 1 kB, and what is to be moved after it, is there in ten minutes.
    fn chance_with_following(bytes: u64) -> f64 {
        let following = Arc::new(FollowingBytes::default());
        following.add(bytes);
        following.begin(0);
        let mut order = TransferOrder::new(TransferVerb::Get, "http://h/a");
        order.deadline = Some(Deadline::WithinS(600.0));
        let job = order.job().expect("an order");
        let (_links, links) = watch::channel(Arc::new(Vec::new()));
        let (_stop, stop) = watch::channel(false);
        let context = TransferContext {
            following: Some(following),
            ..TransferContext::standalone(
                links,
                stop,
                SchedulerHandle::new(SchedulerKind::default()),
            )
        };
        let (mode, direction) = (FetchMode::Direct, TransferDirection::Down);
        let mut observer = NobodyObserves;
        let start = BootInstant::now();
        let control = TransferControl::new(&job, mode, context, direction, &mut observer, start);
        let progress = ContentProgress {
            length: Some(1_000),
            ..ContentProgress::default()
        };
        let wifi = LinkCandidate {
            name: "wlan0".into(),
            class: LinkClass::Free,
            rate_bytes_per_s: Some(100_000.0),
            metric: 0,
            stalled: false,
            in_use: true,
        };
        control.decide(progress, &[wifi], false, SourceSupply::Ample);
        control.promise(progress).expect("a promise").p
    }

    #[test]
    fn what_is_to_follow_by_the_same_deadline_counts() {
        let (alone, before_much) = (chance_with_following(0), chance_with_following(1 << 40));
        assert!(alone > 0.9 && before_much < 0.05, "{alone} {before_much}");
    }

    #[test]
    fn only_who_is_behind_the_deadline_missed_it() {
        assert_eq!(deadline_met(true, true, false), Some(true));
        assert_eq!(deadline_met(true, true, true), Some(false));
        assert_eq!(deadline_met(true, false, true), Some(false));
        // A 404 with six hours left.
        assert_eq!(deadline_met(true, false, false), None);
        assert_eq!(deadline_met(false, true, false), None);
    }
}
