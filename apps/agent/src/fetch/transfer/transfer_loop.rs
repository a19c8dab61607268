//! The loop of every transfer: choose a link or wait, send the request, transfer bytes, and retry
//! after a fault.
//!
//! Each step returns the event that leads to the next state ([`TransferState`]), whose table alone
//! defines the transitions. The content ([`TransferContent`]) and the source ([`TransferSource`])
//! do not depend on each other's states.

use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::content::{AnswerEnd, IntakeResult, TransferContent};
use super::control::{EPOCH, LinkWait, TransferControl};
use super::progress::ContentProgress;
use super::retry::{Backoff, NextTry, RetryDecision};
use super::source::{Readiness, RequestReview, TransferSource, candidates_changed};
use super::state::{TransferState, TransferTrigger};
use crate::fetch::boot_clock::BootInstant;
use crate::fetch::dial::{EgressLink, FetchFault, HEAD_MAX};
use crate::fetch::outcome::{TransferFailure, TransferReason};
use crate::fetch::rate_limiter::RateLimiter;

/// A running transfer.
pub(super) struct TransferLoop<'a, S, C> {
    pub(super) control: TransferControl<'a>,
    pub(super) source: S,
    pub(super) content: C,
    state: TransferState,
}

/// How a step of the loop ended, with what the next one needs.
enum StepEnd<B> {
    LinkGranted(EgressLink),
    LinkDenied(LinkWait),
    Answered(B, Interval),
    Left,
    Faulted(FetchFault),
    WaitOver,
    Completed,
    GaveUp(TransferFailure),
}

impl<B> StepEnd<B> {
    fn trigger(&self) -> TransferTrigger {
        match self {
            StepEnd::LinkGranted(_) => TransferTrigger::LinkGranted,
            StepEnd::LinkDenied(_) => TransferTrigger::LinkDenied,
            StepEnd::Answered(..) => TransferTrigger::Answered,
            StepEnd::Left => TransferTrigger::Left,
            StepEnd::Faulted(_) => TransferTrigger::Faulted,
            StepEnd::WaitOver => TransferTrigger::WaitOver,
            StepEnd::Completed => TransferTrigger::Completed,
            StepEnd::GaveUp(_) => TransferTrigger::GaveUp,
        }
    }
}

impl<B> From<FetchFault> for StepEnd<B> {
    fn from(fault: FetchFault) -> StepEnd<B> {
        match fault {
            FetchFault::Final(failure) => StepEnd::GaveUp(failure),
            fault => StepEnd::Faulted(fault),
        }
    }
}

impl<B> From<TransferFailure> for StepEnd<B> {
    fn from(failure: TransferFailure) -> StepEnd<B> {
        StepEnd::GaveUp(failure)
    }
}

/// Bytes since the last epoch.
struct Epoch {
    start: BootInstant,
    moved_before: u64,
}

impl<'a, S: TransferSource<'a>, C: TransferContent<'a, S>> TransferLoop<'a, S, C> {
    /// Creates a transfer without a request.
    pub(super) fn new(
        control: TransferControl<'a>,
        source: S,
        content: C,
    ) -> TransferLoop<'a, S, C> {
        TransferLoop {
            control,
            source,
            content,
            state: TransferState::Choosing,
        }
    }

    /// Moves bytes until the object is complete or a failure ends it; then closes the source. Also
    /// returns the payload bytes that the source carried more than once.
    pub(super) async fn run(&mut self) -> (Result<(), TransferFailure>, u64) {
        let mut outcome = self.move_object().await;
        if outcome.is_ok() {
            outcome = self.content.settle(&self.source).await;
        }
        let duplicates = self.source.duplicate_bytes();
        let claimable = self.content.is_claimable();
        self.source.close(outcome.is_ok(), claimable).await;
        (outcome, duplicates)
    }

    async fn move_object(&mut self) -> Result<(), TransferFailure> {
        let mut end = match self.content.is_whole() {
            true => StepEnd::Completed,
            false => self.choose().await,
        };
        loop {
            let trigger = end.trigger();
            let next = self.state.after(trigger);
            tracing::trace!(from = ?self.state, ?trigger, to = ?next, "a step of the transfer");
            self.state = next.expect("a step ends as its state can");
            end = match (self.state, end) {
                (TransferState::Choosing, _) => self.choose().await,
                (TransferState::Waiting, StepEnd::LinkDenied(wait)) => self.wait(wait).await,
                (TransferState::Asking, StepEnd::LinkGranted(via)) => {
                    let end = self.ask(&via).await.unwrap_or_else(StepEnd::from);
                    self.end_request(end)
                }
                (TransferState::Moving, StepEnd::Answered(body, epoch)) => {
                    let end = self.move_bytes(body, epoch).await;
                    self.end_request(end.unwrap_or_else(StepEnd::from))
                }
                (TransferState::BackingOff, StepEnd::Faulted(fault)) => self.back_off(fault).await,
                (TransferState::Whole, _) => return Ok(()),
                (TransferState::Failed, StepEnd::GaveUp(failure)) => return Err(failure),
                (state, end) => unreachable!("{:?} does not lead to {state:?}", end.trigger()),
            };
        }
    }

    /// The progress of the content. Bytes that a new request would repeat do not count while there is
    /// an answer.
    fn progress(&self) -> ContentProgress {
        let progress = self.content.progress();
        match self.state {
            TransferState::Moving => ContentProgress {
                repeated_by_request: 0,
                ..progress
            },
            _ => progress,
        }
    }

    fn is_stopped(&self) -> bool {
        *self.control.stop.borrow()
    }

    /// Chooses a link for the next request.
    async fn choose(&mut self) -> StepEnd<C::Body> {
        let progress = self.progress();
        let checked = self.control.check_deadline(progress);
        if let Err(failure) = checked.and_then(|()| self.control.check_stop()) {
            return failure.into();
        }
        match self.source.prepare(&mut self.control, progress).await {
            Ok(Readiness::Ready(via)) => StepEnd::LinkGranted(via),
            Ok(Readiness::Wait(wait)) => StepEnd::LinkDenied(wait),
            Err(failure) => failure.into(),
        }
    }

    /// Waits until something changes.
    async fn wait(&mut self, wait: LinkWait) -> StepEnd<C::Body> {
        match self.sleep(wait, EPOCH).await {
            Ok(()) => StepEnd::WaitOver,
            Err(failure) => failure.into(),
        }
    }

    /// Reports why nothing moves, and waits until something changes.
    async fn sleep(&mut self, wait: LinkWait, at_most: Duration) -> Result<(), TransferFailure> {
        let control = &mut self.control;
        control.report_wait(wait);
        control.check_stop()?;
        self.content.checkpoint(&mut self.source, control).await?;
        let (links, stop) = (&mut control.links, &mut control.stop);
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => {}
            Ok(()) = links.changed() => {}
            () = tokio::time::sleep(at_most) => {}
        }
        control.check_stop()
    }

    /// Sends a request, and waits for the head of an answer that continues the object.
    async fn ask(&mut self, via: &EgressLink) -> Result<StepEnd<C::Body>, FetchFault> {
        let control = &mut self.control;
        let request = self.content.request(&self.source, control);
        let mut epoch = interval(EPOCH);
        epoch.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let answer = match self.content.continued(&mut self.source, control) {
            Some(answer) => answer,
            None => {
                let progress = self.content.progress();
                let mut links = control.links.clone();
                let mut stop = control.stop.clone();
                let mut candidates = self.source.watch_candidates();
                let mut sent = pin!(C::send(self.source.client(), &request, via));
                loop {
                    tokio::select! {
                        biased;
                        _ = stop.wait_for(|stop| *stop) => return Ok(StepEnd::Left),
                        answer = &mut sent => {
                            break answer.map_err(|fault| {
                                let fault = self.source.cause(fault, control, progress);
                                self.content.explain(fault)
                            })?;
                        }
                        Ok(()) = links.changed() => {}
                        () = candidates_changed(&mut candidates) => {}
                        event = self.source.next_event() => {
                            let taken = self.source.on_event(event, control, progress);
                            taken.map_err(FetchFault::Final)?;
                            continue;
                        }
                        _ = epoch.tick() => {}
                    }
                    let review = self.source.review(control, progress);
                    if review.map_err(FetchFault::Final)? == RequestReview::Leave {
                        return Ok(StepEnd::Left);
                    }
                    self.source.check_silence(HEAD_MAX)?;
                }
            }
        };
        let accepted = self
            .content
            .accept(answer, request, &mut self.source, control)
            .await?;
        Ok(match accepted {
            Some(body) => StepEnd::Answered(body, epoch),
            None => StepEnd::Left,
        })
    }

    /// Moves the bytes of one answer, until it ends or there is a reason to leave it.
    async fn move_bytes(
        &mut self,
        mut body: C::Body,
        mut tick: Interval,
    ) -> Result<StepEnd<C::Body>, FetchFault> {
        self.promise_by_size()?;
        let mut links = self.control.links.clone();
        let mut stop = self.control.stop.clone();
        let mut candidates = self.source.watch_candidates();
        let limiter = self.control.rate_limiter.clone();
        let mut epoch = self.begin_epoch();
        let cut_short = loop {
            tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => return Ok(StepEnd::Left),
                Ok(()) = links.changed() => {
                    if self.review()? == RequestReview::Leave {
                        return Ok(StepEnd::Left);
                    }
                }
                () = candidates_changed(&mut candidates) => {
                    if self.review()? == RequestReview::Leave {
                        return Ok(StepEnd::Left);
                    }
                }
                event = self.source.next_event() => {
                    let progress = self.progress();
                    let taken = self.source.on_event(event, &mut self.control, progress);
                    taken.map_err(FetchFault::Final)?;
                }
                _ = tick.tick() => {
                    self.content.measure(&mut self.source, &mut self.control);
                    // What was spent is told before it is asked what may be.
                    let (used, rate) = self.end_epoch(&epoch);
                    self.control.report_progress(self.progress(), &used, rate);
                    epoch = self.begin_epoch();
                    let review = self.review()?;
                    let kept = self.content.checkpoint(&mut self.source, &mut self.control).await;
                    kept.map_err(FetchFault::Final)?;
                    if review == RequestReview::Leave {
                        return Ok(StepEnd::Left);
                    }
                    if limiter.as_ref().is_some_and(|limiter| limiter.is_holding()) {
                        self.source.on_held();
                    }
                    self.source.check_silence(self.control.job.stall)?;
                }
                bytes = next_within::<S, C>(limiter.as_deref(), &mut body) => {
                    let Some(bytes) = bytes else { break false };
                    let bytes = bytes.map_err(|fault| {
                        let fault = self.source.cause(fault, &self.control, self.progress());
                        self.content.explain(fault)
                    })?;
                    if let Some(limiter) = &limiter {
                        limiter.take(bytes.len() as u64);
                    }
                    let (source, control) = (&mut self.source, &mut self.control);
                    match self.content.take_in(&bytes, &mut body, source, control)? {
                        IntakeResult::Unusable => return Ok(StepEnd::Left),
                        IntakeResult::Last => break false,
                        IntakeResult::More => {}
                    }
                    if self.source.is_cut_short(&self.control) {
                        break true;
                    }
                }
            }
        };
        self.end_epoch(&epoch);
        let (source, control) = (&mut self.source, &mut self.control);
        let end = self.content.conclude(body, cut_short, source, control)?;
        Ok(match end {
            AnswerEnd::Whole => StepEnd::Completed,
            AnswerEnd::Incomplete => StepEnd::Left,
        })
    }

    fn begin_epoch(&self) -> Epoch {
        Epoch {
            start: BootInstant::now(),
            moved_before: self.content.moved_bytes(),
        }
    }

    /// The links that carried in an epoch, and the rate in bytes per second.
    fn end_epoch(&mut self, epoch: &Epoch) -> (String, f64) {
        let moved = self.content.moved_bytes() - epoch.moved_before;
        let length = BootInstant::now().since(epoch.start);
        let used = self.source.on_epoch(moved, length, &mut self.control);
        (used, moved as f64 / length.as_secs_f64().max(1e-3))
    }

    fn review(&mut self) -> Result<RequestReview, FetchFault> {
        let progress = self.progress();
        let review = self.source.review(&mut self.control, progress);
        review.map_err(FetchFault::Final)
    }

    /// Reports the estimate once an answer has shown the size, if none was reported before.
    fn promise_by_size(&mut self) -> Result<(), FetchFault> {
        let progress = self.progress();
        let control = &self.control;
        let promised = control.reporter.first_promise().is_some();
        let is_new = self.content.learns_size() && progress.length.is_some() && !promised;
        if !is_new || control.terms.due.is_none() {
            return Ok(());
        }
        self.review()?;
        self.source.announce_link(&mut self.control);
        let epoch = self.begin_epoch();
        let (used, _) = self.end_epoch(&epoch);
        self.control.report_size(self.progress(), &used);
        Ok(())
    }

    /// Ends a request that is not continued; after a stop its flow is left as it is.
    fn end_request(&mut self, end: StepEnd<C::Body>) -> StepEnd<C::Body> {
        if matches!(end, StepEnd::Answered(..)) {
            return end;
        }
        self.source.on_request_end(&mut self.control);
        if matches!(end, StepEnd::Left) && !self.is_stopped() {
            self.source.leave();
        }
        end
    }

    /// Waits after a fault, or gives up.
    async fn back_off(&mut self, fault: FetchFault) -> StepEnd<C::Body> {
        let progress = self.progress();
        let retry = self.source.recover(fault, &mut self.control, progress);
        let waited = match retry {
            Ok(RetryDecision::Now) => Ok(()),
            Ok(RetryDecision::After(backoff)) => self.wait_for_next_try(backoff).await,
            Err(failure) => Err(failure),
        };
        match waited {
            Ok(()) => StepEnd::WaitOver,
            Err(failure) => failure.into(),
        }
    }

    async fn wait_for_next_try(&mut self, backoff: Backoff) -> Result<(), TransferFailure> {
        let control = &mut self.control;
        if backoff.reason == TransferReason::OriginWait {
            control.on_refused(&backoff.text);
        }
        let pause = match control.retries.next_try(&backoff, control.job.tries_max)? {
            NextTry::In(pause) => pause,
            NextTry::AtOnce => {
                let text = format!("{}; trying again", backoff.text);
                control.reporter.note(Some(backoff.reason), text);
                return Ok(());
            }
        };
        let until = BootInstant::now().after(pause);
        control.reporter.wait_is_over();
        loop {
            let left = until.since(BootInstant::now());
            if left.is_zero() {
                return Ok(());
            }
            self.control.check_deadline(self.progress())?;
            let before = self.control.links.borrow().clone();
            let wait = LinkWait {
                reason: backoff.reason,
                why: backoff.text.clone(),
                unblocks: format!("the next try in {:.1} s", left.as_secs_f64()),
            };
            self.sleep(wait, left.min(EPOCH)).await?;
            let changed = before != *self.control.links.borrow();
            if changed && backoff.ends_with_links && backoff.retry_after.is_none() {
                return Ok(());
            }
        }
    }
}

/// The next bytes of an answer, when the limit on the rate lets them in; none at its clean end.
async fn next_within<'a, S: TransferSource<'a>, C: TransferContent<'a, S>>(
    limiter: Option<&RateLimiter>,
    body: &mut C::Body,
) -> Option<Result<Bytes, FetchFault>> {
    if let Some(limiter) = limiter {
        limiter.ready().await;
    }
    C::next(body).await
}

#[cfg(test)]
mod tests;
