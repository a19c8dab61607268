//! Simulates a device that waits for Wi-Fi with D-Lock: when it scans, what it finds, how long it
//! is kept awake.
//!
//! ```text
//!  Wi-Fi    ▁▁▁▁▁▁████████▁▁▁▁▁▁▁▁▁▁▁▁██████▁▁▁
//!  scans    │   │   │awake│ │  │    │    │awake    Wi-Fi before the scan that finds it is missed
//! ```
//!
//! One flow waits all the time; it runs while Wi-Fi is available and found. Cellular is always up.

use cedos_lab_link::seeded;
use d2tp_sched::{LinkClass, LinkHistory, LinkObservation, ScanPeriods, WakeNeeds, WakePlanner};
use d2tp_time::{Span, Time};
use rand::Rng;
use rand_pcg::Pcg32;

/// The random stream from which stays are drawn.
const STAYS_STREAM: u64 = 1 << 34;

/// A byte count that stands for a link that carried data.
const CARRIED_BYTES: u64 = 1_000_000;

/// A period with Wi-Fi.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WifiPeriod {
    /// The start of the period.
    pub from: Time,
    /// The end of the period.
    pub until: Time,
}

/// The result of waiting for Wi-Fi.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct WifiWaitResult {
    /// Times of scans during sleep.
    pub looks: Vec<Time>,
    /// How long the device was kept awake, on Wi-Fi that was found.
    pub held: Span,
    /// How long Wi-Fi was available while the device slept.
    pub missed: Span,
    /// For each stay that was found, the delay until it was found.
    pub found_after: Vec<Span>,
    /// The number of stays that were not found.
    pub unseen: u64,
}

/// Simulates waiting until `end`. The stays are in order and disjoint.
pub fn wait(stays: &[WifiPeriod], end: Time, periods: ScanPeriods) -> WifiWaitResult {
    let mut lock = WakePlanner::new(periods);
    let mut wifi = LinkHistory::new(LinkClass::Free);
    let mut waited = WifiWaitResult::default();
    let mut now = Time::ZERO;
    wifi.observe(now, &LinkObservation::default());
    lock.on_scan(now);
    let waits = WakeNeeds {
        waits: true,
        ..WakeNeeds::default()
    };
    let mut stays = stays.iter().peekable();
    loop {
        let plan = lock.plan(now, &waits, |span| wifi.returns_within(now, span));
        now = plan.scan_at.unwrap_or(Time::NEVER);
        while let Some(gone) = stays.next_if(|stay| stay.until <= now) {
            waited.unseen += 1;
            waited.missed = waited.missed + gone.until.min(end).since(gone.from);
        }
        if now >= end {
            let there = stays.next_if(|stay| stay.from < end);
            waited.missed = waited.missed + there.map_or(Span::ZERO, |stay| end.since(stay.from));
            return waited;
        }
        waited.looks.push(now);
        lock.on_scan(now);
        wifi.observe(now, &LinkObservation::default());
        let Some(stay) = stays.next_if(|stay| stay.from <= now) else {
            continue;
        };
        waited.missed = waited.missed + now.since(stay.from);
        waited.found_after.push(now.since(stay.from));
        let on = |up, busy| LinkObservation {
            up,
            bytes: if up { CARRIED_BYTES } else { 0 },
            busy,
        };
        wifi.observe(now, &on(true, Span::from_secs(1)));
        let until = stay.until.min(end);
        waited.held = waited.held + until.since(now);
        wifi.observe(until, &on(true, until.since(now)));
        now = until;
        wifi.observe(now, &on(false, Span::ZERO));
        // The device was awake when it was lost, so the system scans by itself.
        lock.on_scan(now);
    }
}

/// Draws stays until `end` with these mean lengths, heavy-tailed: most are short, a few make up
/// most of the time.
pub fn draw(seed: u64, stay: Span, gap: Span, longest: Span, end: Time) -> Vec<WifiPeriod> {
    let mut rng = seeded(seed, STAYS_STREAM);
    let mut stays = Vec::new();
    let mut now = Time::ZERO;
    while now < end {
        let from = now + lomax(&mut rng, gap, longest);
        now = from + lomax(&mut rng, stay, longest);
        stays.push(WifiPeriod { from, until: now });
    }
    stays
}

/// A number from the Lomax distribution with exponent 1.5 and this mean, before it is limited to
/// `longest`.
fn lomax(rng: &mut Pcg32, mean: Span, longest: Span) -> Span {
    const EXPONENT: f64 = 1.5;
    let scale = mean.as_secs_f64() * (EXPONENT - 1.0);
    let drawn = scale * ((1.0 - rng.random::<f64>()).powf(-1.0 / EXPONENT) - 1.0);
    Span::from_secs_f64(drawn.min(longest.as_secs_f64()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Time {
        Time::ZERO + Span::from_secs(seconds)
    }

    fn stay(from: u64, until: u64) -> WifiPeriod {
        WifiPeriod {
            from: at(from),
            until: at(until),
        }
    }

    const MINUTE: ScanPeriods = ScanPeriods {
        least: Span::from_secs(60),
        most: Span::from_secs(60),
    };

    #[test]
    fn without_wifi_it_looks_once_a_period_and_is_never_held() {
        let waited = wait(&[], at(3_601), MINUTE);
        assert_eq!(waited.looks.len(), 60);
        assert_eq!((waited.held, waited.missed), (Span::ZERO, Span::ZERO));
    }

    #[test]
    fn what_comes_between_two_looks_is_found_at_the_second_and_held_until_it_goes() {
        let waited = wait(&[stay(70, 85), stay(130, 400)], at(700), MINUTE);
        // At 180 s; then from 400 s on, when it was lost.
        let looks: Vec<u64> = waited
            .looks
            .iter()
            .map(|t| t.as_secs_f64() as u64)
            .collect();
        assert_eq!(looks, [60, 120, 180, 460, 520, 580, 640]);
        assert_eq!(waited.unseen, 1);
        assert_eq!(waited.found_after, [Span::from_secs(50)]);
        assert_eq!(waited.held, Span::from_secs(220));
        assert_eq!(waited.missed, Span::from_secs(15 + 50));
    }

    #[test]
    fn all_time_of_wifi_is_held_or_missed() {
        let day = at(86_400);
        for seed in 0..20 {
            let stays = draw(
                seed,
                Span::from_secs(1_000),
                Span::from_secs(2_000),
                Span::from_secs(20_000),
                day,
            );
            let there = stays.iter().fold(Span::ZERO, |sum, stay| {
                sum + stay.until.min(day).since(stay.from.min(day))
            });
            for periods in [MINUTE, ScanPeriods::DEFAULT] {
                let waited = wait(&stays, day, periods);
                assert_eq!(waited.held + waited.missed, there, "seed {seed}");
            }
        }
    }
}
