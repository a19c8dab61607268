//! The terms of a transfer: its cost policy and its deadline, which can be changed while it runs.

use std::time::Duration;

use d2tp_sched::{CostPolicy, DeadlineFallback, EnergySaving};
use jiff::{SignedDuration, Timestamp};

use crate::fetch::boot_clock::BootInstant;

/// The time of a deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DueTime {
    /// At a point in time: the time left changes when the clock is set.
    At(Timestamp),
    /// After a length of time, which includes sleep and does not depend on the wall clock.
    In(BootInstant),
}

impl DueTime {
    /// A deadline this long from now.
    pub fn within(span: Duration) -> DueTime {
        DueTime::In(BootInstant::now().after(span))
    }

    /// The time left; zero once the deadline has passed.
    pub fn time_left(self) -> Duration {
        match self {
            DueTime::In(moment) => moment.since(BootInstant::now()),
            DueTime::At(at) => {
                let left = at.duration_since(Timestamp::now());
                Duration::try_from(left).unwrap_or_default()
            }
        }
    }

    /// The time from `start`, which is in the past, to the deadline.
    pub fn after(self, start: BootInstant) -> Duration {
        let now = BootInstant::now();
        match self {
            DueTime::In(moment) => moment.since(start),
            DueTime::At(at) => {
                let passed = SignedDuration::try_from(now.since(start)).unwrap_or_default();
                let whole = at.duration_since(Timestamp::now()) + passed;
                Duration::try_from(whole).unwrap_or_default()
            }
        }
    }

    /// The wall clock time of the deadline, unless the clock is set.
    pub fn at(self) -> Timestamp {
        match self {
            DueTime::At(at) => at,
            DueTime::In(_) => {
                let left =
                    SignedDuration::try_from(self.time_left()).unwrap_or(SignedDuration::MAX);
                Timestamp::now()
                    .saturating_add(left)
                    .unwrap_or(Timestamp::MAX)
            }
        }
    }
}

/// The terms of a transfer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransferTerms {
    /// The deadline; none is no deadline.
    pub due: Option<DueTime>,
    /// The cost policy.
    pub policy: CostPolicy,
    /// What to do when free links are too slow for the deadline.
    pub if_late: DeadlineFallback,
    /// The most bytes that metered links may carry.
    pub metered_bytes_max: Option<u64>,
    /// The priority when not all transfers can be in time: 0 to 7, higher goes first.
    pub priority: u8,
    /// The bytes at the beginning that are wanted before the rest of other transfers that have such a beginning; none is
    /// no sooner than the rest.
    pub start_bytes: Option<u64>,
    /// When the transfer saves energy; none is as the device does.
    pub energy: Option<EnergySaving>,
}

impl TransferTerms {
    /// The time that is left.
    pub fn time_left(&self) -> Option<Duration> {
        self.due.map(DueTime::time_left)
    }
}

impl Default for TransferTerms {
    /// Free links first, no deadline.
    fn default() -> TransferTerms {
        TransferTerms {
            due: None,
            policy: CostPolicy::FreeFirst,
            if_late: DeadlineFallback::Cell,
            metered_bytes_max: None,
            priority: 0,
            start_bytes: None,
            energy: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_never_is_less_than_nothing() {
        let past = Timestamp::now() - SignedDuration::from_secs(60);
        assert_eq!(DueTime::At(past).time_left(), Duration::ZERO);
        assert_eq!(DueTime::within(Duration::ZERO).time_left(), Duration::ZERO);
        assert!(DueTime::At(past).after(BootInstant::now()) == Duration::ZERO);
    }

    #[test]
    fn both_kinds_say_the_same_of_the_same_time() {
        let hour = Duration::from_secs(3_600);
        let start = BootInstant::now();
        let at = DueTime::At(Timestamp::now() + SignedDuration::from_secs(3_600));
        for due in [at, DueTime::within(hour)] {
            let off = |span: Duration| span.abs_diff(hour);
            assert!(off(due.time_left()) < Duration::from_secs(5), "{due:?}");
            assert!(off(due.after(start)) < Duration::from_secs(5), "{due:?}");
            let at = due.at().duration_since(Timestamp::now());
            assert!((3_590..3_610).contains(&at.as_secs()), "{at}");
        }
    }
}
