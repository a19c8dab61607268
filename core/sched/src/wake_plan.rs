//! D-Lock: plans when the machine is woken to scan for links, and when it is kept awake.
//!
//! ```text
//!  nothing waits, nothing runs ──▶ no alarm, no hold: the machine sleeps undisturbed
//!  a flow runs                 ──▶ hold
//!  a flow waits                ──▶ an alarm when a scan is worth it       ╴╴╴╴╴scans╴╴╴╴▶│ … │ …
//!                                  an alarm when it must begin elsewhere  ╴╴╴╴╴╴╴╴╴╴╴╴╴start▶│
//! ```
//!
//! Section III.E of the Cedos paper scans every two minutes. Here the next scan is due when it
//! finds a link with the probability [`WORTH`]: soon after a link was lost, less often the longer
//! it stays away, and as often as the forecast for the place and hour suggests. A flow that runs
//! keeps the machine awake on any link that it was given, also a metered one: otherwise the alarm
//! at its latest start would be useless.

use d2tp_time::{Span, Time};

/// The probability of finding a link that makes a scan worth a wake-up. Higher: fewer wake-ups, links
/// are found later.
pub const WORTH: f64 = 0.3; // a guess; `cedos repro C5` shows what both cost

/// How long no link at all may have been up before scans become rarer: a cellar, a flight.
pub const DARK_AFTER: Span = Span::from_secs(30 * 60); // a guess

/// The longest interval between wake-ups without any link: fewer than three wake-ups in an hour.
pub const DARK_MOST: Span = Span::from_secs(45 * 60);

/// A start this soon after a scan is joined with it: one wake-up instead of two.
const JOINED: Span = Span::from_secs(10); // a guess

/// The ratio between the scan intervals that are tried.
const STEP: (u64, u64) = (5, 4);

/// Bounds of the interval between scans.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScanPeriods {
    /// The shortest interval.
    pub least: Span,
    /// The longest interval while any link is up.
    pub most: Span,
}

impl ScanPeriods {
    /// The default: from one to ten minutes.
    pub const DEFAULT: ScanPeriods = ScanPeriods {
        least: Span::from_secs(60),
        most: Span::from_secs(600),
    };

    /// Scans at a fixed interval, as in the paper.
    pub fn fixed(period: Span) -> ScanPeriods {
        ScanPeriods {
            least: period,
            most: period,
        }
    }
}

/// What the flows of a device need of the machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WakeNeeds {
    /// Whether a flow waits for a link that is not up.
    pub waits: bool,
    /// Whether a flow is running on a link.
    pub runs: bool,
    /// When the first waiting flow must begin on a metered link.
    pub latest_start: Option<Time>,
    /// Since when no link at all has been up.
    pub dark_since: Option<Time>,
}

/// What the planner asks of the machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WakePlan {
    /// Whether to keep the machine awake.
    pub hold: bool,
    /// When to wake the machine for a scan.
    pub scan_at: Option<Time>,
    /// When to wake the machine to begin a flow.
    pub start_at: Option<Time>,
}

/// Plans when to scan for links and when to keep the machine awake.
///
/// ```
/// use d2tp_sched::{ScanPeriods, WakeNeeds, WakePlanner};
/// use d2tp_time::{Span, Time};
/// let mut planner = WakePlanner::new(ScanPeriods::DEFAULT);
/// let now = Time::ZERO;
/// planner.on_scan(now);
/// let waiting = WakeNeeds { waits: true, ..WakeNeeds::default() };
/// // No link is expected: ten minutes.
/// assert_eq!(planner.plan(now, &waiting, |_| 0.0).scan_at, Some(now + Span::from_secs(600)));
/// assert_eq!(planner.plan(now, &WakeNeeds::default(), |_| 0.0).scan_at, None);
/// ```
#[derive(Debug, Clone)]
pub struct WakePlanner {
    periods: ScanPeriods,
    looked_at: Option<Time>,
}

impl WakePlanner {
    /// Creates a planner with these intervals.
    pub fn new(periods: ScanPeriods) -> WakePlanner {
        WakePlanner {
            periods,
            looked_at: None,
        }
    }

    /// Records a scan, whether it was planned or something else woke the machine.
    pub fn on_scan(&mut self, now: Time) {
        self.looked_at = Some(now);
    }

    /// The current plan, to be updated at every change and after every scan. `comes(span)`: the
    /// probability that a useful link comes up within this span.
    pub fn plan(&self, now: Time, standby: &WakeNeeds, comes: impl Fn(Span) -> f64) -> WakePlan {
        let start = standby.latest_start.filter(|_| standby.waits);
        let look = standby.waits.then(|| {
            let since = self.looked_at.map_or(Span::MAX, |at| now.since(at));
            let dark = standby
                .dark_since
                .is_some_and(|at| now.since(at) >= DARK_AFTER);
            now + self.period(dark, comes).saturating_sub(since)
        });
        let joined = |look: Time| match start {
            Some(start) if start >= look && start.since(look) < JOINED => start,
            _ => look,
        };
        WakePlan {
            hold: standby.runs,
            scan_at: look.map(joined),
            start_at: start,
        }
    }

    /// The shortest interval after which a scan is worthwhile.
    fn period(&self, dark: bool, comes: impl Fn(Span) -> f64) -> Span {
        let ScanPeriods { least, mut most } = self.periods;
        if dark {
            most = most.max(DARK_MOST);
        }
        let mut period = least;
        while period < most && comes(period) < WORTH {
            period = period.scaled(STEP.0, STEP.1).min(most);
        }
        period
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::{LinkHistory, LinkObservation};
    use crate::link_choice::LinkClass;

    const WAITS: WakeNeeds = WakeNeeds {
        waits: true,
        runs: false,
        latest_start: None,
        dark_since: None,
    };

    fn at(seconds: u64) -> Time {
        Time::ZERO + Span::from_secs(seconds)
    }

    fn looked(periods: ScanPeriods, seconds: u64) -> WakePlanner {
        let mut planner = WakePlanner::new(periods);
        planner.on_scan(at(seconds));
        planner
    }

    #[test]
    fn nothing_that_waits_or_runs_asks_for_nothing() {
        let idle = WakeNeeds {
            latest_start: Some(at(5)),
            ..WakeNeeds::default()
        };
        let plan = looked(ScanPeriods::DEFAULT, 0).plan(at(1), &idle, |_| 1.0);
        assert_eq!(plan, WakePlan::default());
    }

    #[test]
    fn only_a_flow_that_runs_holds_the_machine_awake() {
        let planner = looked(ScanPeriods::DEFAULT, 0);
        for (waits, runs) in [(true, false), (false, true), (true, true)] {
            let standby = WakeNeeds {
                waits,
                runs,
                ..WakeNeeds::default()
            };
            let plan = planner.plan(at(1), &standby, |_| 0.5);
            assert_eq!((plan.hold, plan.scan_at.is_some()), (runs, waits));
        }
    }

    #[test]
    fn the_next_look_is_when_it_is_worth_it() {
        let planner = looked(ScanPeriods::DEFAULT, 0);
        let look = |comes: &dyn Fn(Span) -> f64| planner.plan(at(0), &WAITS, comes).scan_at;
        assert_eq!(look(&|_| 0.9), Some(at(60)));
        assert_eq!(look(&|_| 0.0), Some(at(600)));
        // The same probability after four minutes: the first step beyond.
        let slowly = look(&|span| span.as_secs_f64() / 800.0).expect("it waits");
        assert!(
            (240..300).contains(&slowly.since(at(0)).divided(1_000_000_000).as_nanos()),
            "{slowly:?}"
        );
    }

    #[test]
    fn a_period_counts_from_the_last_look_and_the_first_is_at_once() {
        let planner = looked(ScanPeriods::fixed(Span::from_secs(120)), 100);
        assert_eq!(
            planner.plan(at(130), &WAITS, |_| 0.0).scan_at,
            Some(at(220))
        );
        assert_eq!(
            planner.plan(at(500), &WAITS, |_| 0.0).scan_at,
            Some(at(500))
        );
        let never = WakePlanner::new(ScanPeriods::DEFAULT);
        assert_eq!(never.plan(at(7), &WAITS, |_| 0.0).scan_at, Some(at(7)));
    }

    #[test]
    fn a_flow_that_must_begin_has_an_alarm_of_its_own_or_shares_one() {
        let planner = looked(ScanPeriods::fixed(Span::from_secs(120)), 0);
        let plan = |start: u64| {
            let standby = WakeNeeds {
                latest_start: Some(at(start)),
                ..WAITS
            };
            planner.plan(at(1), &standby, |_| 0.0)
        };
        assert_eq!(
            (plan(90).scan_at, plan(90).start_at),
            (Some(at(120)), Some(at(90)))
        );
        assert_eq!(
            (plan(125).scan_at, plan(125).start_at),
            (Some(at(125)), Some(at(125)))
        );
        assert_eq!(plan(140).scan_at, Some(at(120)));
    }

    /// The times in seconds at which the machine scans, while a link that was lost a minute ago
    /// does not come back.
    fn wakes(hours: u64, dark: bool) -> Vec<u64> {
        let mut link = LinkHistory::new(LinkClass::Free);
        for (second, up) in [(0, true), (60, true), (61, false)] {
            let observation = LinkObservation {
                up,
                bytes: u64::from(up),
                busy: Span::from_secs(u64::from(up)),
            };
            link.observe(at(second), &observation);
        }
        let standby = WakeNeeds {
            dark_since: dark.then_some(at(61)),
            ..WAITS
        };
        let (mut planner, mut now, mut wakes) =
            (looked(ScanPeriods::DEFAULT, 61), at(61), Vec::new());
        loop {
            let plan = planner.plan(now, &standby, |span| link.returns_within(now, span));
            now = plan.scan_at.expect("it waits");
            if now >= at(61 + hours * 3_600) {
                return wakes;
            }
            wakes.push(now.since(Time::ZERO).as_millis() / 1_000);
            planner.on_scan(now);
        }
    }

    #[test]
    fn six_hours_without_a_network_wake_it_less_than_three_times_an_hour() {
        let wakes = wakes(6, true);
        assert!(wakes.len() < 18, "{} wake-ups at {wakes:?}", wakes.len());
    }

    #[test]
    fn while_another_link_is_up_looks_are_never_more_than_ten_minutes_apart() {
        let wakes = wakes(6, false);
        let apart: Vec<u64> = wakes.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(apart.iter().all(|s| (60..=600).contains(s)), "{apart:?}");
        // Often at first, and finally as rarely as allowed.
        assert!(apart[0] < 120 && apart[apart.len() - 1] == 600, "{apart:?}");
    }
}
