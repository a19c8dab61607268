//! Retries after a fault: at once, or after a wait that doubles.

use std::time::Duration;

use crate::fetch::outcome::{TransferExit, TransferFailure, TransferReason};

/// The first delay after a fault; it doubles up to the limit of its [`Backoff`].
const BACKOFF_FIRST: Duration = Duration::from_millis(250); // a guess

/// A delay before the next try.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Backoff {
    /// What happened, for users.
    pub(super) text: String,
    /// The reason code of the delay.
    pub(super) reason: TransferReason,
    /// The delay that the origin asked for.
    pub(super) retry_after: Option<Duration>,
    /// Whether the try counts towards the limit after which the origin is given up.
    pub(super) counts: bool,
    /// The longest delay, if the origin asked for none.
    pub(super) at_most: Duration,
    /// Whether a change of links ends a delay that the origin did not ask for.
    pub(super) ends_with_links: bool,
    /// Whether the first retry is immediate.
    pub(super) first_at_once: bool,
}

/// How to continue after a fault that does not end the transfer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RetryDecision {
    /// Choose again, without counting a try.
    Now,
    /// Try again after a delay.
    After(Backoff),
}

/// When the next try is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NextTry {
    /// The next try is due immediately.
    AtOnce,
    /// The next try is due after this time.
    In(Duration),
}

/// Counts tries since the last new byte.
#[derive(Debug, Default)]
pub(super) struct Retries {
    tries: u32,
}

impl Retries {
    /// Records that the object grew.
    pub(super) fn reset(&mut self) {
        self.tries = 0;
    }

    /// Counts a try that failed; says when the next one is due.
    ///
    /// # Errors
    /// There were `tries_max` of those that count.
    pub(super) fn next_try(
        &mut self,
        backoff: &Backoff,
        tries_max: u32,
    ) -> Result<NextTry, TransferFailure> {
        self.tries += 1;
        let tries = self.tries;
        if backoff.counts && tries >= tries_max {
            let text = &backoff.text;
            let text = match tries {
                1 => format!("{text}; gave up after one try"),
                tries => format!("{text}; gave up after {tries} tries without new data"),
            };
            let exit = TransferExit::Error;
            return Err(TransferFailure::of(exit, backoff.reason, text));
        }
        if tries == 1 && backoff.first_at_once && backoff.retry_after.is_none() {
            return Ok(NextTry::AtOnce);
        }
        let doublings = tries.saturating_sub(1).min(10);
        let pause = (BACKOFF_FIRST * 2u32.pow(doublings)).min(backoff.at_most);
        Ok(NextTry::In(backoff.retry_after.unwrap_or(pause)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backoff() -> Backoff {
        Backoff {
            text: "it broke".into(),
            reason: TransferReason::OriginWait,
            retry_after: None,
            counts: true,
            at_most: Duration::from_secs(1),
            ends_with_links: true,
            first_at_once: false,
        }
    }

    fn pauses(backoff: &Backoff, tries_max: u32) -> Vec<Duration> {
        let mut retries = Retries::default();
        let mut pauses = Vec::new();
        for _ in 0..tries_max {
            match retries.next_try(backoff, tries_max) {
                Ok(NextTry::In(pause)) => pauses.push(pause),
                Ok(NextTry::AtOnce) => pauses.push(Duration::ZERO),
                Err(failure) => assert!(failure.text.contains("gave up"), "{}", failure.text),
            }
        }
        pauses
    }

    #[test]
    fn waits_double_up_to_their_limit_until_the_origin_is_given_up() {
        let ms = Duration::from_millis;
        assert_eq!(
            pauses(&backoff(), 5),
            [ms(250), ms(500), ms(1000), ms(1000)]
        );
    }

    #[test]
    fn a_try_that_does_not_count_is_never_the_last() {
        let patient = Backoff {
            counts: false,
            first_at_once: true,
            ..backoff()
        };
        let pauses = pauses(&patient, 20);
        assert_eq!(pauses.len(), 20);
        assert_eq!(pauses[0], Duration::ZERO);
    }

    #[test]
    fn a_wait_that_the_origin_asked_for_is_kept_from_the_first_try_on() {
        let asked = Backoff {
            retry_after: Some(Duration::from_secs(90)),
            counts: false,
            first_at_once: true,
            ..backoff()
        };
        assert_eq!(pauses(&asked, 2), [Duration::from_secs(90); 2]);
    }

    #[test]
    fn a_new_byte_makes_the_next_wait_short_again() {
        let mut retries = Retries::default();
        let first = retries.next_try(&backoff(), 9).unwrap();
        assert_ne!(retries.next_try(&backoff(), 9).unwrap(), first);
        retries.reset();
        assert_eq!(retries.next_try(&backoff(), 9).unwrap(), first);
    }
}
