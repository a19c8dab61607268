//! Waiting: for a link, after a fault, until the deadline; and when to stop waiting.

use std::time::Duration;

use d2tp_sched::{CostPolicy, DeadlineFallback};

use super::{
    BootInstant, Dial, EPOCH, FetchFault, TransferEvent, TransferExit, TransferFailure,
    TransferReason, TransferRun,
};

/// First wait after a fault; it doubles up to [`BACKOFF_MAX`].
pub(super) const BACKOFF_FIRST: Duration = Duration::from_millis(250); // a guess

/// Longest wait between tries.
const BACKOFF_MAX: Duration = Duration::from_secs(30); // a guess

/// How long a link that carried nothing is taken as the worst choice.
const STALL_MEMORY: Duration = Duration::from_secs(30); // a guess

/// After so long an agent says again what is waited for: the time that is left is another.
const SAID_AGAIN: Duration = Duration::from_secs(10); // a guess

impl<D: Dial> TransferRun<'_, D> {
    /// After a fault: give up, or wait a little and say so.
    pub(super) async fn recover(
        &mut self,
        fault: FetchFault,
        link: &str,
    ) -> Result<(), TransferFailure> {
        let (text, reason, retry_after, counts) = match fault {
            FetchFault::Final(failure) => return Err(failure),
            FetchFault::UntrustedPeer(text) | FetchFault::CaptivePortal(text) => {
                return self.mark_suspect(link, text);
            }
            // Once it had an address, a resolver that knows none is a bad network's.
            FetchFault::NameNotFound(text) if self.best_length == 0 => {
                return Err(TransferFailure::error(text));
            }
            FetchFault::Path(_) | FetchFault::NameNotFound(_)
                if self.egress_link(link).is_none() =>
            {
                return Ok(());
            } // an outage
            FetchFault::Path(text) | FetchFault::NameNotFound(text) => {
                self.stalled_until
                    .insert(link.to_owned(), BootInstant::now().after(STALL_MEMORY));
                // Once the origin has answered, a bad network is waited out.
                (
                    format!("{link}: {text}"),
                    TransferReason::PathTooSlow,
                    None,
                    self.best_length == 0,
                )
            }
            FetchFault::Origin { text, retry_after } => {
                (text, TransferReason::OriginWait, retry_after, true)
            }
            FetchFault::Proxy(text) => (text, TransferReason::ProxyUnreachable, None, true),
        };
        self.tries += 1;
        if counts && self.tries >= self.job.tries_max {
            let text = format!(
                "{text}; gave up after {} tries without a new byte",
                self.tries
            );
            return Err(TransferFailure::of(TransferExit::Error, reason, text));
        }
        let doublings = self.tries.saturating_sub(1).min(10);
        let pause = retry_after.unwrap_or((BACKOFF_FIRST * 2u32.pow(doublings)).min(BACKOFF_MAX));
        let next = format!("the next try in {:.1} s", pause.as_secs_f64());
        let until = BootInstant::now().after(pause);
        self.said_waiting = None;
        loop {
            let left = until.since(BootInstant::now());
            if left.is_zero() {
                return Ok(());
            }
            self.check_deadline()?;
            let before = self.links.borrow().clone();
            self.wait(reason, text.clone(), next.clone(), left.min(EPOCH))
                .await?;
            if before != *self.links.borrow() && retry_after.is_none() {
                return Ok(());
            }
        }
    }

    /// Sleeps until something changes, saying why once per reason.
    pub(super) async fn wait(
        &mut self,
        reason: TransferReason,
        why: String,
        unblocks: String,
        at_most: Duration,
    ) -> Result<(), TransferFailure> {
        self.report_waiting(reason, why, unblocks);
        self.check_stop()?;
        self.sink.tick().await?;
        let (links, stop) = (&mut self.links, &mut self.stop);
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => {}
            Ok(()) = links.changed() => {}
            () = tokio::time::sleep(at_most) => {}
        }
        self.check_stop()
    }

    /// Says why nothing moves: once, and in an agent every now and then, for those who come to look.
    pub(super) fn report_waiting(&mut self, reason: TransferReason, why: String, unblocks: String) {
        let now = BootInstant::now();
        let again =
            self.orders.is_some() && (self.said_at).is_some_and(|at| now.since(at) >= SAID_AGAIN);
        if self.said_waiting != Some(reason) || again {
            self.said_waiting = Some(reason);
            self.said_at = Some(now);
            let t_s = self.t_s();
            self.observer.on_event(&TransferEvent::Waiting {
                t_s,
                reason,
                why,
                unblocks,
            });
        }
    }

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

    pub(super) fn check_deadline(&self) -> Result<(), TransferFailure> {
        if self.time_left() != Some(Duration::ZERO) || self.terms.if_late != DeadlineFallback::Fail
        {
            return Ok(());
        }
        Err(self.late_failure())
    }

    /// Why it is not whole at its deadline, for who did not want it later.
    pub(super) fn late_failure(&self) -> TransferFailure {
        let late = "the deadline passed, and --if-late is fail";
        let (exit, reason, text) = match &self.held {
            Some((reason @ (TransferReason::PathCost | TransferReason::RoamingBlocked), why)) => (
                TransferExit::NoPermittedPath,
                Some(*reason),
                format!(
                    "{late}: {why}, which may not be used. To allow it: --if-late cell or \
                     --policy any"
                ),
            ),
            Some((TransferReason::OverBudget, why)) => {
                let limit = match self.metered_bytes_to_spend() {
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

    pub(super) fn refuse_to_wait(
        &self,
        reason: TransferReason,
        why: &str,
    ) -> Result<(), TransferFailure> {
        // What the device may spend grows again on its reset day: only the transfer's own limit is final.
        let spent =
            reason == TransferReason::OverBudget && self.metered_bytes_to_spend() == Some(0);
        let timeless = matches!(self.terms.policy, CostPolicy::Any | CostPolicy::Fast);
        if spent && (timeless || self.time_left() == Some(Duration::ZERO)) {
            let text = format!("{why} (--max-cell), and no free network is up");
            return Err(TransferFailure::of(
                TransferExit::BudgetExhausted,
                reason,
                text,
            ));
        }
        if self.job.now && self.bytes_by_link.is_empty() {
            let text = format!("{why}, and --now does not wait");
            let exit = match reason {
                TransferReason::OverBudget => TransferExit::BudgetExhausted,
                _ => TransferExit::NoPermittedPath,
            };
            return Err(TransferFailure::of(exit, reason, text));
        }
        Ok(())
    }
}
