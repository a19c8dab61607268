//! Whether a flow waits for its server or the server's bytes wait for the flow's links.
//!
//! ```text
//!  server ──▶ copy ──▶ flow ══▶ device     a read that finds nothing: the flow waits for the server
//!                                          no read at all: the flow is full, its links are slower
//! ```
//!
//! A device that requested reports gets one about each second, while data is read: only the device
//! can spend or save metered bytes.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use cedos_http::{SUPPLY_CONTEXT, SupplyReport};
use d2tp_driver::DatagramSender;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

/// The time from the first byte to the first report; higher: a device pays unnecessarily for
/// longer.
const FIRST_AFTER: Duration = Duration::from_millis(500); // a guess: a slow start over a long way
/// The interval of reports: the device decides as often.
const EVERY: Duration = Duration::from_secs(1);
/// How many intervals are averaged. Higher: steadier, and a change is noticed later.
const AVERAGED: usize = 3; // a guess
/// The share of the time in which the flow must have waited for the server.
const WAITING_SHARE: f64 = 0.5; // a guess: a link that is the bottleneck never waits
/// How long nothing may come before there are no more reports.
const QUIET_MAX: Duration = Duration::from_secs(10); // a guess: nothing is known of such a server

/// What a flow read from its server, and how long it waited for more.
#[derive(Debug, Default)]
pub(crate) struct SupplyMeter {
    current: Mutex<SupplyPeriod>,
    /// Notified when bytes were read.
    moved: Notify,
}

/// The reads of one interval.
#[derive(Debug, Default)]
struct SupplyPeriod {
    bytes: u64,
    waited: Duration,
    /// Since when the flow waits, if it does.
    waiting_since: Option<Instant>,
}

/// A finished interval.
#[derive(Debug, Clone, Copy)]
struct PeriodSum {
    bytes: u64,
    waited: Duration,
    length: Duration,
}

impl SupplyMeter {
    fn current(&self) -> MutexGuard<'_, SupplyPeriod> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a read that found nothing.
    pub(crate) fn on_wait(&self, now: Instant) {
        self.current().waiting_since.get_or_insert(now);
    }

    /// Records a read of this many bytes; zero at the end.
    pub(crate) fn on_read(&self, now: Instant, bytes: usize) {
        let mut current = self.current();
        if let Some(since) = current.waiting_since.take() {
            current.waited += now - since;
        }
        current.bytes += bytes as u64;
        drop(current);
        if bytes > 0 {
            self.moved.notify_one();
        }
    }

    /// Ends the current interval and returns its sums.
    fn take(&self, now: Instant, length: Duration) -> PeriodSum {
        let mut current = self.current();
        let still = current
            .waiting_since
            .map_or(Duration::ZERO, |since| now - since);
        if let Some(since) = &mut current.waiting_since {
            *since = now;
        }
        PeriodSum {
            bytes: std::mem::take(&mut current.bytes),
            waited: std::mem::take(&mut current.waited) + still,
            length,
        }
    }

    /// Reports on a flow to its device, if that asked. Nothing is computed while nothing is read.
    pub(crate) async fn report(&self, to: Option<&DatagramSender>, flow: u64) -> Infallible {
        if let Some(send) = to {
            self.report_while_in_session(send, flow).await;
        }
        std::future::pending().await
    }

    /// Returns when the session is over.
    async fn report_while_in_session(&self, send: &DatagramSender, flow: u64) {
        loop {
            self.moved.notified().await;
            let mut last = VecDeque::with_capacity(AVERAGED);
            let (mut moved_at, mut every) = (Instant::now(), FIRST_AFTER);
            while moved_at.elapsed() < QUIET_MAX {
                let begun = Instant::now();
                sleep(every).await;
                every = EVERY;
                let period = self.take(Instant::now(), begun.elapsed());
                if period.bytes > 0 {
                    moved_at = Instant::now();
                }
                if last.len() == AVERAGED {
                    last.pop_front();
                }
                last.push_back(period);
                // Neither read nor waited for: the device is away, or has all.
                if period.bytes == 0 && period.waited.is_zero() {
                    continue;
                }
                let limit = supply_limit(last.make_contiguous());
                let report = Bytes::copy_from_slice(&SupplyReport { flow, limit }.encode());
                if !send(SUPPLY_CONTEXT, report, EVERY) {
                    return;
                }
            }
        }
    }
}

/// What the server sends in bytes per second, if the flow waited for it.
fn supply_limit(periods: &[PeriodSum]) -> Option<u64> {
    let sum = |of: fn(&PeriodSum) -> Duration| periods.iter().map(of).sum::<Duration>();
    let (waited, length) = (sum(|period| period.waited), sum(|period| period.length));
    let bytes: u64 = periods.iter().map(|period| period.bytes).sum();
    let waits = waited.as_secs_f64() >= WAITING_SHARE * length.as_secs_f64();
    waits.then(|| (bytes as f64 / length.as_secs_f64().max(1e-3)) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A second of a flow that reads so many bytes each tenth, and finds nothing for so long after each.
    fn second(meter: &SupplyMeter, begin: Instant, bytes: usize, waits: Duration) -> PeriodSum {
        let tenth = Duration::from_millis(100);
        for n in 0..10 {
            let moment = begin + n * tenth;
            meter.on_read(moment, bytes);
            if !waits.is_zero() {
                meter.on_wait(moment + tenth - waits);
            }
        }
        meter.take(begin + 10 * tenth, 10 * tenth)
    }

    #[test]
    fn a_flow_that_finds_nothing_most_of_the_time_waits_for_its_server() {
        let (meter, begin) = (SupplyMeter::default(), Instant::now());
        let period = second(&meter, begin, 12_000, Duration::from_millis(90));
        assert_eq!(supply_limit(&[period]), Some(120_000));
        let next = begin + Duration::from_secs(1);
        let faster = second(&meter, next, 36_000, Duration::from_millis(60));
        assert_eq!(supply_limit(&[period, faster]), Some(240_000));
    }

    #[test]
    fn a_flow_that_is_full_does_not_wait_for_its_server() {
        let (meter, begin) = (SupplyMeter::default(), Instant::now());
        let full = second(&meter, begin, 12_000, Duration::ZERO);
        assert_eq!(supply_limit(&[full]), None);
        let next = begin + Duration::from_secs(1);
        let at_times = second(&meter, next, 12_000, Duration::from_millis(30));
        assert_eq!(supply_limit(&[full, at_times]), None);
    }

    #[test]
    fn waiting_that_goes_on_counts_in_each_interval() {
        let (meter, begin) = (SupplyMeter::default(), Instant::now());
        let second = Duration::from_secs(1);
        meter.on_wait(begin);
        assert_eq!(meter.take(begin + second, second).waited, second);
        let still = meter.take(begin + 2 * second, second);
        assert_eq!(supply_limit(&[still]), Some(0));
    }
}
