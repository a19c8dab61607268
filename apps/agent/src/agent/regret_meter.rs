//! Measures unnecessary payments: compares the bytes that transfers paid for with the minimum if
//! the future of free links were known.
//!
//! ```text
//!  each second, what free links could carry ─▶ the transfer due first ─▶ the next … (computed only)
//!  at a deadline: bytes paid − bytes left in the computation = avoidable
//! ```
//!
//! The rule. A free link that is up could have carried, in a second, what it did carry, or the mean rate
//! of its network where that is more; one that was never used, nothing. Assigning each second to
//! the unfinished transfer with the earliest deadline leaves the fewest bytes at deadlines,
//! regardless of later events: for divisible bytes this equals the minimum of a linear program,
//! without knowledge of the future. The bytes left in this computation are those that had to be
//! paid for; a metered link is assumed to be able to carry them. A transfer that completed early
//! stays in the computation until its deadline, because waiting would have been right. Only
//! transfers count whose policy lets the agent decide to pay or wait (`free-first`, `balanced`); a
//! second in which the machine slept counts as one in which nothing could be carried.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::fetch::boot_clock::BootInstant;
use d2tp_sched::TransferDirection;

/// The interval between updates from which the device counts as having been asleep.
const AWAKE: Duration = Duration::from_secs(30); // a guess: a machine under load

/// The most transfers that are simulated at the same time; more are not counted.
const CASES_MAX: usize = 1_000;

/// A simulated transfer on free links alone.
#[derive(Debug, Clone, Copy, PartialEq)]
struct RegretTransfer {
    direction: TransferDirection,
    /// When the simulation is compared: at the deadline; none: at the transfer's end.
    due: Option<BootInstant>,
    /// Bytes of the whole object, as far as is known.
    bytes: u64,
    /// Bytes that free links carried in the simulation.
    given: f64,
    paid: u64,
    ended: bool,
}

impl RegretTransfer {
    fn left(&self) -> f64 {
        (self.bytes as f64 - self.given).max(0.0)
    }
}

/// Counts metered bytes that free links would have carried in time.
#[derive(Debug, Default)]
pub struct RegretMeter {
    cases: BTreeMap<u64, RegretTransfer>,
    /// The sums by direction, which may be negative for a while.
    sums: [f64; 2],
    /// The largest counts reported so far, for downloads and uploads: a counter must not fall.
    shown: [u64; 2],
    seen_at: Option<BootInstant>,
    /// Bytes that free links carried since the last update, by direction.
    carried: [u64; 2],
}

impl RegretMeter {
    /// Adds or updates a transfer, with the bytes that must be carried for it in this run.
    pub fn track(
        &mut self,
        id: u64,
        direction: TransferDirection,
        due: Option<BootInstant>,
        bytes: u64,
    ) {
        if self.cases.len() >= CASES_MAX && !self.cases.contains_key(&id) {
            return;
        }
        let case = self.cases.entry(id).or_insert(RegretTransfer {
            direction,
            due,
            bytes,
            given: 0.0,
            paid: 0,
            ended: false,
        });
        (case.due, case.bytes, case.ended) = (due, bytes, false);
    }

    /// Stops counting a transfer.
    pub fn untrack(&mut self, id: u64) {
        self.cases.remove(&id);
    }

    /// Records bytes that links carried for a transfer.
    pub fn record_carried(
        &mut self,
        id: u64,
        direction: TransferDirection,
        paid: bool,
        bytes: u64,
    ) {
        if !paid {
            self.carried[direction as usize] += bytes;
        } else if let Some(case) = self.cases.get_mut(&id) {
            case.paid += bytes;
        }
    }

    /// Records the end of a transfer; `bytes` were carried in all where it did not become whole.
    pub fn record_end(&mut self, id: u64, bytes: Option<u64>) {
        if let Some(case) = self.cases.get_mut(&id) {
            case.bytes = bytes.unwrap_or(case.bytes);
            case.ended = true;
        }
    }

    /// Whether no transfer is simulated.
    pub fn is_idle(&self) -> bool {
        self.cases.is_empty()
    }

    /// Advances the simulation; `rates`: bytes per second of the free links, by direction. Returns the
    /// avoidable bytes so far.
    pub fn advance(&mut self, now: BootInstant, rates: [f64; 2]) -> [u64; 2] {
        let passed = self
            .seen_at
            .map(|at| now.since(at))
            .filter(|passed| *passed <= AWAKE);
        self.seen_at = Some(now);
        for direction in [TransferDirection::Down, TransferDirection::Up] {
            let n = direction as usize;
            let could = passed.map_or(0.0, |passed| rates[n] * passed.as_secs_f64());
            let carried = std::mem::take(&mut self.carried[n]) as f64;
            self.give(direction, could.max(carried));
        }
        self.settle(now);
        self.shown
    }

    fn give(&mut self, direction: TransferDirection, mut bytes: f64) {
        let of_it = self
            .cases
            .values_mut()
            .filter(|case| case.direction == direction);
        let mut order: Vec<&mut RegretTransfer> = of_it.collect();
        // None is the latest.
        order.sort_by_key(|case| (case.due.is_none(), case.due));
        for case in order {
            let given = case.left().min(bytes);
            case.given += given;
            bytes -= given;
        }
    }

    fn settle(&mut self, now: BootInstant) {
        let is_over = |case: &RegretTransfer| match case.due {
            Some(due) => due <= now,
            None => case.ended,
        };
        let sums = &mut self.sums;
        self.cases.retain(|_, case| {
            if is_over(case) {
                sums[case.direction as usize] += case.paid as f64 - case.left();
            }
            !is_over(case)
        });
        for (shown, sum) in self.shown.iter_mut().zip(self.sums) {
            *shown = (*shown).max(sum as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    fn at(seconds: u64) -> BootInstant {
        BootInstant::from_boot(Duration::from_secs(1_000 + seconds))
    }

    /// Looks at each second from one until another, at this rate.
    fn pass(hindsight: &mut RegretMeter, from: u64, until: u64, rate: u64) -> u64 {
        let seen = (from..=until).map(|s| hindsight.advance(at(s), [rate as f64, 0.0])[0]);
        seen.last().unwrap_or(0)
    }

    fn takes(hindsight: &mut RegretMeter, id: u64, due: u64, megabytes: u64) {
        hindsight.track(id, TransferDirection::Down, Some(at(due)), megabytes * MB);
    }

    fn pays(hindsight: &mut RegretMeter, id: u64, megabytes: u64) {
        hindsight.record_carried(id, TransferDirection::Down, true, megabytes * MB);
    }

    #[test]
    fn what_free_links_would_have_carried_by_the_deadline_was_avoidable_though_it_was_done_before()
    {
        let mut hindsight = RegretMeter::default();
        takes(&mut hindsight, 1, 100, 10);
        pass(&mut hindsight, 0, 10, 0);
        pays(&mut hindsight, 1, 10);
        hindsight.record_end(1, None);
        // Wi-Fi comes back for 4 s at 1 MB/s.
        assert_eq!(pass(&mut hindsight, 11, 50, 0), 0);
        pass(&mut hindsight, 51, 54, MB);
        assert_eq!(pass(&mut hindsight, 55, 99, 0), 0, "it is not over");
        assert_eq!(pass(&mut hindsight, 100, 101, 0), 4 * MB);
        assert!(hindsight.is_idle());
    }

    #[test]
    fn what_had_to_be_paid_for_was_not_avoidable() {
        let mut hindsight = RegretMeter::default();
        takes(&mut hindsight, 1, 20, 10);
        // 6 of 10 by free links, which carried them really.
        for second in 0..6 {
            hindsight.record_carried(1, TransferDirection::Down, false, MB);
            hindsight.advance(at(second), [0.0; 2]);
        }
        pays(&mut hindsight, 1, 4);
        assert_eq!(pass(&mut hindsight, 6, 30, 0), 0);
    }

    #[test]
    fn the_one_due_first_has_the_free_links_and_all_are_judged_together() {
        let mut hindsight = RegretMeter::default();
        takes(&mut hindsight, 1, 10, 5);
        takes(&mut hindsight, 2, 20, 10);
        // Really the later one had the free link, and the first one paid.
        for second in 0..=10 {
            hindsight.record_carried(2, TransferDirection::Down, false, MB);
            hindsight.advance(at(second), [0.0; 2]);
        }
        pays(&mut hindsight, 1, 5);
        // Too late for the case: what is carried after its end is nobody's.
        assert_eq!(hindsight.shown[0], 0);
        let mut hindsight = RegretMeter::default();
        takes(&mut hindsight, 1, 10, 5);
        takes(&mut hindsight, 2, 20, 10);
        pays(&mut hindsight, 1, 5);
        pass(&mut hindsight, 0, 10, MB);
        assert_eq!(hindsight.shown[0], 5 * MB);
        // On paper the second got what the first left of 10 s, and nothing more: 5 had to be paid.
        pays(&mut hindsight, 2, 5);
        assert_eq!(pass(&mut hindsight, 11, 30, 0), 5 * MB);
    }

    #[test]
    fn a_time_asleep_carries_nothing_and_a_transfer_that_failed_needs_only_what_came() {
        let mut hindsight = RegretMeter::default();
        takes(&mut hindsight, 1, 1_000, 10);
        pays(&mut hindsight, 1, 2);
        hindsight.advance(at(0), [1e6, 0.0]);
        hindsight.advance(at(900), [1e6, 0.0]);
        hindsight.record_end(1, Some(2 * MB));
        hindsight.advance(at(1_001), [0.0; 2]);
        assert_eq!(hindsight.shown[0], 0, "2 MB had to be paid for");
        takes(&mut hindsight, 2, 3_000, 10);
        hindsight.untrack(2);
        assert!(hindsight.is_idle());
    }

    #[test]
    fn directions_do_not_share_links() {
        let mut hindsight = RegretMeter::default();
        hindsight.track(1, TransferDirection::Up, Some(at(10)), MB);
        hindsight.record_carried(1, TransferDirection::Up, true, MB);
        hindsight.advance(at(0), [1e9, 0.0]);
        hindsight.advance(at(1), [1e9, 0.0]);
        assert_eq!(hindsight.advance(at(10), [1e9, 0.0]), [0, 0]);
        hindsight.track(2, TransferDirection::Up, None, MB);
        hindsight.record_carried(2, TransferDirection::Up, true, MB);
        hindsight.advance(at(11), [0.0, 1e9]);
        hindsight.record_end(2, None);
        assert_eq!(hindsight.advance(at(12), [0.0, 0.0]), [0, 1_000_000]);
    }
}
