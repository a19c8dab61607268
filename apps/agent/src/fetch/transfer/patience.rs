//! Waiting: for a link, after a fault, until the deadline; and when to stop waiting.

use std::time::Duration;

use d2tp_sched::{CostPolicy, DeadlineFallback};

use super::{Dial, EPOCH, Event, Exit, Failure, Fault, Moment, Reason, Transfer};

/// First wait after a fault; it doubles up to [`BACKOFF_MAX`].
pub(super) const BACKOFF_FIRST: Duration = Duration::from_millis(250); // a guess

/// Longest wait between tries.
const BACKOFF_MAX: Duration = Duration::from_secs(30); // a guess

/// How long a link that carried nothing is taken as the worst choice.
const STALL_MEMORY: Duration = Duration::from_secs(30); // a guess

/// After so long an agent says again what is waited for: the time that is left is another.
const SAID_AGAIN: Duration = Duration::from_secs(10); // a guess

impl<D: Dial> Transfer<'_, D> {
    /// After a fault: give up, or wait a little and say so.
    pub(super) async fn recover(&mut self, fault: Fault, link: &str) -> Result<(), Failure> {
        let (text, reason, retry_after, counts) = match fault {
            Fault::Final(failure) => return Err(failure),
            Fault::Stranger(text) | Fault::Portal(text) => return self.doubt(link, text),
            // Once it had an address, a resolver that knows none is a bad network's.
            Fault::Nameless(text) if self.best_length == 0 => return Err(Failure::error(text)),
            Fault::Path(_) | Fault::Nameless(_) if self.via(link).is_none() => return Ok(()), // an outage
            Fault::Path(text) | Fault::Nameless(text) => {
                self.stalled_until
                    .insert(link.to_owned(), Moment::now().after(STALL_MEMORY));
                // Once the origin has answered, a bad network is waited out.
                (
                    format!("{link}: {text}"),
                    Reason::PathTooSlow,
                    None,
                    self.best_length == 0,
                )
            }
            Fault::Origin { text, retry_after } => (text, Reason::OriginWait, retry_after, true),
            Fault::Proxy(text) => (text, Reason::ProxyUnreachable, None, true),
        };
        self.tries += 1;
        if counts && self.tries >= self.job.tries_max {
            let text = format!(
                "{text}; gave up after {} tries without a new byte",
                self.tries
            );
            return Err(Failure::of(Exit::Error, reason, text));
        }
        let doublings = self.tries.saturating_sub(1).min(10);
        let pause = retry_after.unwrap_or((BACKOFF_FIRST * 2u32.pow(doublings)).min(BACKOFF_MAX));
        let next = format!("the next try in {:.1} s", pause.as_secs_f64());
        let until = Moment::now().after(pause);
        self.said_waiting = None;
        loop {
            let left = until.since(Moment::now());
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
        reason: Reason,
        why: String,
        unblocks: String,
        at_most: Duration,
    ) -> Result<(), Failure> {
        self.say_waiting(reason, why, unblocks);
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
    pub(super) fn say_waiting(&mut self, reason: Reason, why: String, unblocks: String) {
        let now = Moment::now();
        let again =
            self.orders.is_some() && (self.said_at).is_some_and(|at| now.since(at) >= SAID_AGAIN);
        if self.said_waiting != Some(reason) || again {
            self.said_waiting = Some(reason);
            self.said_at = Some(now);
            let t_s = self.t_s();
            self.observer.tell(&Event::Waiting {
                t_s,
                reason,
                why,
                unblocks,
            });
        }
    }

    pub(super) fn check_stop(&self) -> Result<(), Failure> {
        if *self.stop.borrow() {
            return Err(Failure::of(Exit::Cancelled, Reason::UserPaused, "stopped"));
        }
        Ok(())
    }

    pub(super) fn check_deadline(&self) -> Result<(), Failure> {
        if self.left() != Some(Duration::ZERO) || self.terms.if_late != DeadlineFallback::Fail {
            return Ok(());
        }
        Err(self.late())
    }

    /// Why it is not whole at its deadline, for who did not want it later.
    pub(super) fn late(&self) -> Failure {
        let late = "the deadline has passed and --if-late fail was asked for";
        let (exit, reason, text) = match &self.held {
            Some((reason @ (Reason::PathCost | Reason::RoamingBlocked), why)) => (
                Exit::NoPermittedPath,
                Some(*reason),
                format!(
                    "{late}: {why}, which may not be used; --if-late cell or --policy any let it"
                ),
            ),
            Some((Reason::OverBudget, why)) => {
                let limit = match self.metered_bytes_to_spend() {
                    Some(0) => "--max-cell",
                    _ => "cedos budget",
                };
                (
                    Exit::BudgetExhausted,
                    Some(Reason::OverBudget),
                    format!("{late}: {why} ({limit})"),
                )
            }
            Some((reason, why)) => (
                Exit::DeadlineMissed,
                Some(*reason),
                format!("{late}: {why}"),
            ),
            None => (Exit::DeadlineMissed, None, late.to_owned()),
        };
        Failure { exit, reason, text }
    }

    pub(super) fn refuse_to_wait(&self, reason: Reason, why: &str) -> Result<(), Failure> {
        // What the device may spend grows again on its reset day: only the transfer's own limit is final.
        let spent = reason == Reason::OverBudget && self.metered_bytes_to_spend() == Some(0);
        let timeless = matches!(self.terms.policy, CostPolicy::Any | CostPolicy::Fast);
        if spent && (timeless || self.left() == Some(Duration::ZERO)) {
            let text = format!("{why} (--max-cell), and no free network is up");
            return Err(Failure::of(Exit::BudgetExhausted, reason, text));
        }
        if self.job.now && self.bytes_by_link.is_empty() {
            let text = format!("{why}, and --now does not wait");
            let exit = match reason {
                Reason::OverBudget => Exit::BudgetExhausted,
                _ => Exit::NoPermittedPath,
            };
            return Err(Failure::of(exit, reason, text));
        }
        Ok(())
    }
}
