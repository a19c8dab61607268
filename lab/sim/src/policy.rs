//! Which links a flow may use now, or when to look again, and why. A pure function.
//!
//! ```text
//!  free link                               use it
//!  metered │ policy any, fast, no deadline use it, a second of its rate at a time, or a round trip and a half
//!          │ free-first, in time without   hold, look again when it could become needed
//!          │ free-first, needed            use it
//!          │ free-only, budget spent       hold
//! ```
//!
//! A metered link is needed when what is left takes all links together as long as there is time
//! left, with a margin, and the free links alone would be late.

use cedos_lab_scenario::{Class, Policy};
use d2tp_session::{ReasonCode, Span};

/// Bytes per second assumed of a link that nothing was measured on: 1 Mb/s. // a guess, on the low
/// side: too low spends metered bytes a little early, too high misses deadlines
pub const RATE_FIRST_BYTES: u64 = 125_000;
/// A metered link is taken into use this much before it is needed: attaching the path, the first
/// round trips and slow start. // a guess
pub const MARGIN: Span = Span::from_secs(2);
/// A metered link is taken into use earlier by this share of the time needed, against rates that
/// fall. A guess: one tenth.
pub const MARGIN_SHARE: u64 = 10;
/// Grants are renewed so often.
pub const GRANT_RENEWED: Span = Span::from_millis(100);
/// The least a grant is worth: four datagrams. // a guess
pub const GRANT_BYTES_MIN: u64 = 6_000;

/// A flow as the decision sees it.
#[derive(Clone, Copy, Debug)]
pub struct Need {
    /// Bytes still to be carried.
    pub remaining: u64,
    /// Time left until the deadline.
    pub left: Option<Span>,
    /// What the user allows.
    pub policy: Policy,
    /// Bytes it may still spend on links that cost something.
    pub budget: Option<u64>,
}

/// A link that is up, as the decision sees it.
#[derive(Clone, Copy, Debug)]
pub struct Offer {
    /// What its bytes cost.
    pub class: Class,
    /// Bytes per second it was measured at, if it was.
    pub rate: Option<u64>,
    /// How long an answer takes over it, as far as is known.
    pub round_trip: Span,
}

impl Offer {
    /// How long a grant is to last: a second, or one and a half round trips and the time until it is
    /// renewed where that is longer. For less, what is measured is the grant and not the link, and the
    /// next one is smaller still.
    fn grant_lasts(&self) -> Span {
        let trips = self.round_trip + self.round_trip.divided(2);
        (trips + GRANT_RENEWED).max(Span::from_secs(1))
    }
}

/// What is decided for one flow and one link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimDecision {
    /// Use it. On a link that costs something, grant at most this many bytes at a time.
    Use {
        /// The most to grant at a time; without meaning on a free link.
        grant: u64,
    },
    /// Do not use it.
    Hold {
        /// Why.
        reason: ReasonCode,
        /// The answer may be another one after this time; never where it is `None`.
        again: Option<Span>,
    },
}

/// Decides about one link for one flow. `free_rate`: bytes per second of all free links that are
/// up, as measured or assumed.
pub fn decide(need: &Need, offer: &Offer, free_rate: u64) -> SimDecision {
    let hold = |reason, again| SimDecision::Hold { reason, again };
    if offer.class == Class::Free {
        return SimDecision::Use { grant: u64::MAX };
    }
    if need.policy == Policy::FreeOnly {
        return hold(ReasonCode::PathCost, None);
    }
    let whatever = matches!(need.policy, Policy::Any | Policy::Fast);
    if offer.class == Class::Roaming && !whatever {
        return hold(ReasonCode::PathCost, None);
    }
    if need.budget == Some(0) {
        return hold(ReasonCode::OverBudget, None);
    }
    let rate = offer.rate.unwrap_or(RATE_FIRST_BYTES).max(1);
    let lasts_ms = offer.grant_lasts().as_millis();
    let grant = (rate.saturating_mul(lasts_ms) / 1_000)
        .max(GRANT_BYTES_MIN)
        .min(need.budget.unwrap_or(u64::MAX));
    let Some(left) = need.left.filter(|_| !whatever) else {
        return SimDecision::Use { grant };
    };
    let alone = with_margin(need.remaining, free_rate);
    let together = with_margin(need.remaining, free_rate + rate);
    if alone <= left || together < left {
        // No sooner than the time that all links together can do without.
        let again = left.saturating_sub(together).max(Span::from_millis(100));
        return hold(ReasonCode::PathCost, Some(again));
    }
    SimDecision::Use { grant }
}

/// How long `bytes` take at `rate`, with the margin.
fn with_margin(bytes: u64, rate: u64) -> Span {
    if rate == 0 {
        return Span::MAX;
    }
    let takes = Span::from_secs(1).scaled(bytes, rate);
    takes + takes.divided(MARGIN_SHARE) + MARGIN
}

#[cfg(test)]
mod tests {
    use super::*;

    const METERED: Offer = Offer {
        class: Class::Metered,
        rate: Some(1_000_000),
        round_trip: Span::from_millis(60),
    };

    fn need(remaining: u64, left_s: Option<u64>, policy: Policy) -> Need {
        Need {
            remaining,
            left: left_s.map(Span::from_secs),
            policy,
            budget: None,
        }
    }

    fn uses(verdict: SimDecision) -> bool {
        matches!(verdict, SimDecision::Use { .. })
    }

    #[test]
    fn a_free_link_is_always_used() {
        let free = Offer {
            class: Class::Free,
            rate: None,
            round_trip: Span::ZERO,
        };
        assert!(uses(decide(
            &need(1, Some(9999), Policy::FreeOnly),
            &free,
            0
        )));
    }

    #[test]
    fn a_metered_link_waits_until_the_deadline_needs_it() {
        let early = decide(&need(10_000_000, Some(60), Policy::FreeFirst), &METERED, 0);
        // 10 s at its rate, 1 s and 2 s of margin.
        let again = Some(Span::from_secs(47));
        assert_eq!(
            early,
            SimDecision::Hold {
                reason: ReasonCode::PathCost,
                again
            }
        );
        let late = need(10_000_000, Some(13), Policy::FreeFirst);
        assert_eq!(
            decide(&late, &METERED, 0),
            SimDecision::Use { grant: 1_000_000 }
        );
    }

    #[test]
    fn a_free_link_that_makes_it_alone_leaves_the_metered_one_unused() {
        let need = need(10_000_000, Some(8), Policy::FreeFirst);
        assert!(uses(decide(&need, &METERED, 500_000)));
        assert!(!uses(decide(&need, &METERED, 5_000_000)));
    }

    #[test]
    fn without_a_deadline_any_permitted_link_is_used_at_once() {
        assert!(uses(decide(&need(1, None, Policy::FreeFirst), &METERED, 0)));
        assert!(!uses(decide(&need(1, None, Policy::FreeOnly), &METERED, 0)));
        let roaming = Offer {
            class: Class::Roaming,
            rate: None,
            round_trip: Span::ZERO,
        };
        assert!(!uses(decide(
            &need(1, None, Policy::FreeFirst),
            &roaming,
            0
        )));
        assert!(uses(decide(&need(1, None, Policy::Any), &roaming, 0)));
    }

    #[test]
    fn a_grant_outlasts_the_round_trip() {
        let need = need(100_000_000, None, Policy::Any);
        let granted = |ms| {
            let offer = Offer {
                round_trip: Span::from_millis(ms),
                ..METERED
            };
            match decide(&need, &offer, 0) {
                SimDecision::Use { grant } => grant,
                held => panic!("{held:?}"),
            }
        };
        assert_eq!(granted(20), 1_000_000);
        assert_eq!(granted(600), 1_000_000);
        assert_eq!(granted(2_000), 3_100_000);
    }

    #[test]
    fn a_grant_is_never_more_than_the_budget() {
        let mut need = need(1, None, Policy::Any);
        need.budget = Some(700);
        assert_eq!(decide(&need, &METERED, 0), SimDecision::Use { grant: 700 });
        need.budget = Some(0);
        let verdict = decide(&need, &METERED, 0);
        assert_eq!(
            verdict,
            SimDecision::Hold {
                reason: ReasonCode::OverBudget,
                again: None
            }
        );
    }
}
