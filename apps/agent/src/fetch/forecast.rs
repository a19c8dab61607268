//! What to expect of a download before it begins: is the deadline feasible, what will it cost.
//!
//! Arithmetic on first estimates, not a promise: links that were never used count with the rates
//! that the scheduler itself assumes of them.

use std::time::Duration;

use d2tp_sched::{
    Class, FREE_RATE_FIRST_BYTES_PER_S, IfLate, METERED_RATE_FIRST_BYTES_PER_S, Need, Policy,
    SIZE_UNKNOWN_BYTES, Way,
};
use serde::Serialize;

/// The expectation.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Forecast {
    /// Bytes still to come.
    pub remaining_bytes: u64,
    /// The origin has not told a size: `remaining_bytes` is a guess.
    pub size_is_a_guess: bool,
    /// What the free links that are up carry together, bytes per second, assumed.
    pub free_rate_bytes_per_s: f64,
    /// The same for metered links that this download may use at some time.
    pub metered_rate_bytes_per_s: f64,
    /// Seconds that takes on the free links; none if there is none.
    pub free_needed_s: Option<f64>,
    /// Whether the deadline can be met with the links that are up; none without a deadline or links.
    pub feasible: Option<bool>,
    /// Bytes on metered links if everything stays as it is.
    pub metered_bytes_expected: u64,
    /// Bytes on metered links if no free link carries anything.
    pub metered_bytes_worst: u64,
}

/// Computes it. `together` says that all free links carry at once, as they do through a proxy.
pub fn forecast(need: &Need, ways: &[Way], together: bool) -> Forecast {
    let remaining = need.remaining_bytes.unwrap_or(SIZE_UNKNOWN_BYTES);
    let rate = |class: Class, first: f64| {
        let rates = ways
            .iter()
            .filter(|way| way.class == class)
            .map(|way| way.rate_bytes_per_s.unwrap_or(first));
        if together {
            rates.sum::<f64>()
        } else {
            rates.fold(0.0, f64::max)
        }
    };
    let may_pay = match need.policy {
        Policy::FreeOnly => false,
        Policy::Any | Policy::Fast => true,
        Policy::FreeFirst | Policy::Balanced => need.if_late == IfLate::Cell && need.left.is_some(),
    };
    let free = rate(Class::Free, FREE_RATE_FIRST_BYTES_PER_S);
    let metered = if may_pay {
        rate(Class::Metered, METERED_RATE_FIRST_BYTES_PER_S)
    } else {
        0.0
    };
    let budget = need.metered_bytes_left.unwrap_or(u64::MAX).min(remaining);
    let within = |rate: f64| match need.left {
        Some(left) => ((rate * left.as_secs_f64()) as u64).min(remaining),
        None if rate > 0.0 => remaining,
        None => 0,
    };
    let paid = match need.policy {
        _ if metered == 0.0 => 0,
        Policy::Fast if together => (remaining as f64 * metered / (free + metered)) as u64,
        Policy::Fast if metered > free => remaining,
        Policy::Any if free > 0.0 => 0,
        _ => remaining - within(free),
    };
    let possible = within(free).saturating_add(within(metered).min(budget));
    let up = free > 0.0 || ways.iter().any(|way| way.class == Class::Metered);
    Forecast {
        remaining_bytes: remaining,
        size_is_a_guess: need.remaining_bytes.is_none(),
        free_rate_bytes_per_s: free,
        metered_rate_bytes_per_s: metered,
        free_needed_s: (free > 0.0).then(|| remaining as f64 / free),
        feasible: need
            .left
            .filter(|_| up)
            .map(|left: Duration| !left.is_zero() && possible >= remaining),
        metered_bytes_expected: paid.min(budget),
        metered_bytes_worst: if may_pay { budget } else { 0 },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn way(name: &str, class: Class, rate: f64) -> Way {
        Way {
            name: name.into(),
            class,
            rate_bytes_per_s: Some(rate),
            metric: 0,
            stalled: false,
            in_use: false,
        }
    }

    fn need(policy: Policy, left_s: u64) -> Need {
        Need {
            remaining_bytes: Some(100_000_000),
            left: Some(Duration::from_secs(left_s)),
            policy,
            if_late: IfLate::Cell,
            metered_bytes_left: None,
        }
    }

    #[test]
    fn a_free_link_that_makes_it_costs_nothing_and_at_worst_the_whole() {
        let ways = [
            way("wlan0", Class::Free, 1e6),
            way("wwan0", Class::Metered, 1e6),
        ];
        let told = forecast(&need(Policy::FreeFirst, 200), &ways, false);
        assert_eq!(told.feasible, Some(true));
        assert_eq!(told.metered_bytes_expected, 0);
        assert_eq!(told.metered_bytes_worst, 100_000_000);
        let never = forecast(&need(Policy::FreeOnly, 200), &ways, false);
        assert_eq!(never.metered_bytes_worst, 0);
    }

    #[test]
    fn what_a_free_link_does_not_make_is_paid_for_within_the_budget() {
        let ways = [
            way("wlan0", Class::Free, 1e6),
            way("wwan0", Class::Metered, 1e6),
        ];
        let told = forecast(&need(Policy::FreeFirst, 60), &ways, true);
        assert_eq!(told.metered_bytes_expected, 40_000_000);
        assert_eq!(told.feasible, Some(true));
        let mut poor = need(Policy::FreeFirst, 60);
        poor.metered_bytes_left = Some(10_000_000);
        let told = forecast(&poor, &ways, true);
        assert_eq!(told.feasible, Some(false));
        assert_eq!(told.metered_bytes_expected, 10_000_000);
    }

    #[test]
    fn a_metered_link_that_may_not_be_used_helps_nobody() {
        let ways = [way("wwan0", Class::Metered, 1e6)];
        let told = forecast(&need(Policy::FreeOnly, 3600), &ways, false);
        assert_eq!(told.feasible, Some(false));
        assert_eq!(told.metered_bytes_expected, 0);
        let told = forecast(&need(Policy::Any, 3600), &ways, false);
        assert_eq!(told.metered_bytes_expected, 100_000_000);
    }

    #[test]
    fn without_a_network_or_a_deadline_nothing_is_promised() {
        assert_eq!(forecast(&need(Policy::Any, 60), &[], false).feasible, None);
        let mut timeless = need(Policy::FreeFirst, 60);
        timeless.left = None;
        let ways = [way("wwan0", Class::Metered, 1e6)];
        let told = forecast(&timeless, &ways, false);
        assert_eq!((told.feasible, told.metered_bytes_worst), (None, 0));
    }
}
