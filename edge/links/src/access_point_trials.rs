//! Access points that give an address and carry nothing: they are detected within seconds, avoided
//! for a while, and tried again.
//!
//! ```text
//!  joined ──ANSWER_WITHIN without an authenticated packet──▶ avoided ──a minute, later an hour──▶ tried
//!     └────an authenticated packet of our own server────────▶ it carries data: earlier failures
//!                                                              are forgotten
//! ```
//!
//! Only authenticated packets count, because a captive portal cannot forge them.

use std::collections::BTreeMap;

use d2tp_time::{Span, Time};

/// How long a path has for its first authenticated packet. Higher: a dead network costs more;
/// lower: a slow one counts as dead.
pub const ANSWER_WITHIN: Span = Span::from_secs(4); // a guess: three SYNs at a round trip of a second

/// How long an access point is avoided the first time; it doubles.
pub const SHUN_FIRST: Span = Span::from_secs(60); // a guess: time for a user to sign in
/// The longest time for which an access point is avoided.
pub const SHUN_MAX: Span = Span::from_secs(3_600); // a guess

/// The most access points remembered; when there are more, the one whose time ends first is
/// dropped.
pub const SHUNNED_MAX: usize = 256;

/// Access points on trial, and those that are avoided.
#[derive(Debug, Clone, Default)]
pub struct AccessPointTrials {
    current: BTreeMap<String, AccessPointTrial>,
    blocked: BTreeMap<String, BlockedAccessPoint>,
}

/// The trial of the access point that a device is on.
#[derive(Debug, Clone)]
struct AccessPointTrial {
    bssid: String,
    /// When the trial ends; `None` once the access point has answered.
    until: Option<Time>,
}

#[derive(Debug, Clone, Copy)]
struct BlockedAccessPoint {
    until: Time,
    span: Span,
}

impl AccessPointTrials {
    /// Records that a device is on this access point. Repeated calls have no effect.
    pub fn joined(&mut self, now: Time, device: &str, bssid: &str) {
        if self
            .current
            .get(device)
            .is_some_and(|trial| trial.bssid == bssid)
        {
            return;
        }
        let until = Some(now + ANSWER_WITHIN);
        let bssid = bssid.to_owned();
        self.current
            .insert(device.to_owned(), AccessPointTrial { bssid, until });
    }

    /// Records that a device is on no access point.
    pub fn left(&mut self, device: &str) {
        self.current.remove(device);
    }

    /// Records that an authenticated packet arrived by this device.
    pub fn answered(&mut self, device: &str) {
        if let Some(trial) = self.current.get_mut(device) {
            trial.until = None;
            self.blocked.remove(&trial.bssid);
        }
    }

    /// Records that the network behind a device, which carried data before, no longer answers.
    pub fn fell_silent(&mut self, now: Time, device: &str) {
        if let Some(trial) = self.current.get_mut(device)
            && trial.until.is_none()
        {
            trial.until = Some(now + ANSWER_WITHIN);
        }
    }

    /// Ends trials that are due: returns the devices whose access points did not answer in time, which
    /// are avoided from now on.
    pub fn block_unresponsive(&mut self, now: Time) -> Vec<(String, String)> {
        let mut guilty = Vec::new();
        for (device, trial) in &mut self.current {
            if trial.until.is_none_or(|until| until > now) {
                continue;
            }
            let before = self.blocked.get(&trial.bssid);
            let span = before.map_or(SHUN_FIRST, |before| before.span.times(2).min(SHUN_MAX));
            let until = now + span;
            make_room(&mut self.blocked, &trial.bssid);
            self.blocked
                .insert(trial.bssid.clone(), BlockedAccessPoint { until, span });
            // A device that stays there begins another trial.
            trial.until = Some(until + ANSWER_WITHIN);
            guilty.push((device.clone(), trial.bssid.clone()));
        }
        guilty
    }

    /// Whether an access point is avoided now.
    pub fn is_blocked(&self, now: Time, bssid: &str) -> bool {
        self.blocked
            .get(bssid)
            .is_some_and(|shunned| shunned.until > now)
    }

    /// When the next trial ends.
    pub fn next_check_at(&self) -> Option<Time> {
        self.current.values().filter_map(|trial| trial.until).min()
    }
}

/// Drops expired entries only when there is no room: an entry lengthens the next time of avoidance.
fn make_room(shunned: &mut BTreeMap<String, BlockedAccessPoint>, bssid: &str) {
    if shunned.len() < SHUNNED_MAX || shunned.contains_key(bssid) {
        return;
    }
    let first = shunned.iter().min_by_key(|(_, shunned)| shunned.until);
    if let Some(first) = first.map(|(bssid, _)| bssid.clone()) {
        shunned.remove(&first);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "02:00:00:00:00:0a";
    const B: &str = "02:00:00:00:00:0b";

    fn at(seconds: u64) -> Time {
        Time::ZERO + Span::from_secs(seconds)
    }

    #[test]
    fn an_access_point_that_does_not_answer_is_shunned_within_seconds_and_tried_again() {
        let mut trials = AccessPointTrials::default();
        trials.joined(at(0), "wlan0", A);
        assert!(trials.block_unresponsive(at(3)).is_empty());
        assert_eq!(trials.next_check_at(), Some(at(4)));
        assert_eq!(
            trials.block_unresponsive(at(4)),
            [("wlan0".to_owned(), A.to_owned())]
        );
        assert!(trials.is_blocked(at(63), A) && !trials.is_blocked(at(64), A));
        assert!(!trials.is_blocked(at(5), B));
        // The device is still there: another four seconds, then twice as long.
        assert!(trials.block_unresponsive(at(67)).is_empty());
        assert_eq!(trials.block_unresponsive(at(68)).len(), 1);
        assert!(trials.is_blocked(at(187), A) && !trials.is_blocked(at(188), A));
    }

    #[test]
    fn one_that_answers_is_cleared_of_everything() {
        let mut trials = AccessPointTrials::default();
        trials.joined(at(0), "wlan0", A);
        trials.block_unresponsive(at(4));
        trials.answered("wlan0");
        assert!(!trials.is_blocked(at(5), A));
        assert_eq!(trials.next_check_at(), None);
        trials.left("wlan0");
        trials.joined(at(100), "wlan0", A);
        trials.block_unresponsive(at(104));
        assert!(!trials.is_blocked(at(164), A), "a minute as the first time");
    }

    #[test]
    fn one_that_carried_and_falls_silent_is_judged_anew() {
        let mut trials = AccessPointTrials::default();
        trials.joined(at(0), "wlan0", A);
        trials.answered("wlan0");
        trials.fell_silent(at(50), "wlan0");
        assert!(trials.block_unresponsive(at(53)).is_empty());
        // That it is still joined changes nothing.
        trials.joined(at(53), "wlan0", A);
        assert_eq!(trials.block_unresponsive(at(54)).len(), 1);
    }

    #[test]
    fn another_access_point_has_a_trial_of_its_own() {
        let mut trials = AccessPointTrials::default();
        trials.joined(at(0), "wlan0", A);
        trials.joined(at(3), "wlan0", B);
        assert!(trials.block_unresponsive(at(6)).is_empty());
        assert_eq!(
            trials.block_unresponsive(at(7)),
            [("wlan0".to_owned(), B.to_owned())]
        );
        assert!(!trials.is_blocked(at(8), A));
    }

    #[test]
    fn no_more_are_remembered_than_the_limit() {
        let mut trials = AccessPointTrials::default();
        for n in 0..2 * SHUNNED_MAX as u64 {
            trials.joined(at(10 * n), "wlan0", &format!("{n}"));
            trials.block_unresponsive(at(10 * n + 4));
        }
        assert_eq!(trials.blocked.len(), SHUNNED_MAX);
        assert!(
            trials
                .blocked
                .contains_key(&format!("{}", 2 * SHUNNED_MAX - 1))
        );
    }
}
