//! Whether the proxy answers, and since when nothing has come although it could have.

use std::time::Duration;

use d2tp_sched::format_duration;

use crate::fetch::boot_clock::BootInstant;
use crate::fetch::outcome::{TransferExit, TransferFailure, TransferReason};
use crate::fetch::proxy::SILENT_MAX;
use crate::fetch::transfer::control::{LinkWait, TransferControl};

/// How long the proxy may be silent before the user is informed.
const UNREACHABLE_AFTER: Duration = SILENT_MAX;

/// Which host is silent, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProxySilence {
    /// Nothing is silent, or not for long.
    No,
    /// The proxy answers, but not on the links that may be used.
    OnPermittedLinks,
    /// The proxy answers, but nothing comes from the origin.
    OfOrigin(Duration),
    /// The proxy does not answer at all.
    OfProxy(Duration),
}

/// Tracks whether a proxy answers.
#[derive(Debug, Default)]
pub(super) struct ProxyAnswers {
    /// Whether the proxy answered at least once.
    is_known: bool,
    /// Since when no path answers although one should.
    unanswered_since: Option<BootInstant>,
    /// When the last byte arrived, while one could have.
    last_byte: Option<BootInstant>,
    /// Since when a path that answers may carry the object.
    asked_since: Option<BootInstant>,
}

impl ProxyAnswers {
    /// Records that the proxy answered.
    pub(super) fn on_answer(&mut self) {
        self.is_known = true;
    }

    /// Records that bytes of the object arrived, or were acknowledged.
    pub(super) fn on_byte(&mut self, now: BootInstant) {
        self.last_byte = Some(now);
    }

    /// Sets whether a path that answers may carry the object.
    pub(super) fn set_asked(&mut self, asked: bool, now: BootInstant) {
        self.asked_since = asked.then(|| self.asked_since.unwrap_or(now));
    }

    /// Whether a path that answers may carry the object.
    pub(super) fn is_asked(&self) -> bool {
        self.asked_since.is_some()
    }

    /// How long no path has answered although one should; `None` while one answers, or none may be used.
    pub(super) fn unanswered_for(&self, now: BootInstant) -> Option<Duration> {
        self.unanswered_since.map(|since| now.since(since))
    }

    /// Records that no link may be used, so that no answer is due.
    pub(super) fn on_wait(&mut self) {
        self.unanswered_since = None;
    }

    /// Reports a proxy that does not answer although a network is available, or fails. `answers`:
    /// whether a path is answered; `address`: the proxy's, for users; `intercepted`: the other host
    /// that answers on a link, if any; `blocked`: the links on which neither UDP nor TCP is answered.
    pub(super) fn watch(
        &mut self,
        answers: bool,
        address: &str,
        intercepted: Option<String>,
        blocked: &[String],
        control: &mut TransferControl<'_>,
    ) -> Result<(), TransferFailure> {
        let silence = self.silence(answers, control.job.stall, BootInstant::now());
        let silent = !matches!(silence, ProxySilence::No | ProxySilence::OfOrigin(_));
        if let Some(why) = intercepted.filter(|_| silent) {
            let unblocks = "signing in | another network".to_owned();
            control.report_wait(LinkWait {
                reason: TransferReason::Portal,
                why,
                unblocks,
            });
            return Ok(());
        }
        let (reason, why, unblocks) = match silence {
            ProxySilence::No => return Ok(()),
            ProxySilence::OnPermittedLinks => (
                TransferReason::PathTooSlow,
                control.reporter.why.clone(),
                "an answer from the proxy there | --policy any",
            ),
            ProxySilence::OfOrigin(quiet) => (
                TransferReason::OriginWait,
                format!("no data for {}", format_duration(quiet)),
                "data from the server",
            ),
            ProxySilence::OfProxy(silence) => {
                let why = self.why_silent(silence, address, blocked);
                if control.job.now && !self.is_known {
                    let (exit, reason) = (TransferExit::Error, TransferReason::ProxyUnreachable);
                    let text = format!("{why} (--now does not wait)");
                    return Err(TransferFailure::of(exit, reason, text));
                }
                self.give_up_at_deadline(control, &why)?;
                match blocked.is_empty() {
                    true => {
                        let unblocks =
                            "an answer from the proxy | another network | leaving out --prox";
                        (TransferReason::ProxyUnreachable, why, unblocks)
                    }
                    false => {
                        let unblocks = "another network | an answer from the proxy";
                        (TransferReason::NetworkBlocked, why, unblocks)
                    }
                }
            }
        };
        control.report_wait(LinkWait {
            reason,
            why,
            unblocks: unblocks.to_owned(),
        });
        Ok(())
    }

    fn why_silent(&self, silence: Duration, address: &str, blocked: &[String]) -> String {
        match self.is_known {
            _ if !blocked.is_empty() => format!(
                "{} reaches {address} neither over UDP nor over TCP: the network blocks both, or the proxy's \
                 host is off",
                blocked.join(", ")
            ),
            true => format!(
                "{address} has not answered for {}",
                format_duration(silence)
            ),
            false => format!(
                "the proxy {address} does not answer. Is it running, is the key in --prox right, does \
                 this network allow UDP?"
            ),
        }
    }

    /// Gives up at the deadline if the proxy has never answered.
    pub(super) fn give_up_at_deadline(
        &self,
        control: &TransferControl<'_>,
        why: &str,
    ) -> Result<(), TransferFailure> {
        if self.is_known || control.time_left() != Some(Duration::ZERO) {
            return Ok(());
        }
        let text = format!("{why}; the deadline passed without an answer from the proxy");
        Err(TransferFailure::of(
            TransferExit::DeadlineMissed,
            TransferReason::ProxyUnreachable,
            text,
        ))
    }

    /// Which host is silent. `answers`: a path does; `stall`: how long the origin may be silent.
    fn silence(&mut self, answers: bool, stall: Duration, now: BootInstant) -> ProxySilence {
        self.is_known |= answers;
        if answers && self.is_asked() {
            self.unanswered_since = None;
            return match self.quiet(now).filter(|quiet| *quiet >= stall) {
                Some(quiet) => ProxySilence::OfOrigin(quiet),
                None => ProxySilence::No,
            };
        }
        let silence = now.since(*self.unanswered_since.get_or_insert(now));
        match silence >= UNREACHABLE_AFTER {
            true if answers => ProxySilence::OnPermittedLinks,
            true => ProxySilence::OfProxy(silence),
            false => ProxySilence::No,
        }
    }

    /// How long nothing arrived although it could have.
    fn quiet(&self, now: BootInstant) -> Option<Duration> {
        Some(now.since(self.last_byte?).min(now.since(self.asked_since?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> BootInstant {
        BootInstant::from_boot(Duration::from_secs(100 + seconds))
    }

    #[test]
    fn who_was_held_back_is_quiet_only_from_when_something_may_carry_it() {
        let mut answers = ProxyAnswers::default();
        answers.on_byte(at(1));
        answers.set_asked(true, at(0));
        assert_eq!(answers.quiet(at(5)), Some(Duration::from_secs(4)));
        answers.set_asked(false, at(6));
        assert_eq!(answers.quiet(at(11)), None);
        answers.set_asked(true, at(11));
        assert_eq!(answers.quiet(at(12)), Some(Duration::from_secs(1)));
    }

    #[test]
    fn silence_is_the_proxys_the_links_or_the_origins() {
        let stall = Duration::from_secs(10);
        let mut answers = ProxyAnswers::default();
        assert_eq!(answers.silence(false, stall, at(0)), ProxySilence::No);
        let silent = ProxySilence::OfProxy(Duration::from_secs(4));
        assert_eq!(answers.silence(false, stall, at(4)), silent);
        let elsewhere = answers.silence(true, stall, at(5));
        assert_eq!(elsewhere, ProxySilence::OnPermittedLinks);
        answers.set_asked(true, at(5));
        answers.on_byte(at(6));
        assert_eq!(answers.silence(true, stall, at(15)), ProxySilence::No);
        let quiet = ProxySilence::OfOrigin(stall);
        assert_eq!(answers.silence(true, stall, at(16)), quiet);
        // Whoever answered begins anew when it falls silent.
        assert_eq!(answers.silence(false, stall, at(17)), ProxySilence::No);
    }
}
