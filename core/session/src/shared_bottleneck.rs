//! Whether paths of a session share a bottleneck.
//!
//! ```text
//!  path 0 ──┐                 queueing delay, a mean for each 200 ms
//!           ├── queue ──▶     path 0  ▁▂▄▆█▃▄▆█▃        in one queue: both change alike,
//!  path 1 ──┘                 path 1  ▁▂▄▆█▃▄▆█▃        and their difference hardly at all
//! ```
//!
//! Packets that wait in one queue are delayed alike, whatever the rest of their way is. So the delays of two paths vary
//! much, and the difference of both little. Where the queues are two, the difference varies as much as both together. RFC
//! 8382 compares what a receiver sees of flows of different senders; one sender of all paths can compare each moment.
//!
//! Paths that share a bottleneck take together what one connection would
//! ([`Controller::set_share`](crate::congestion::Controller::set_share)). A path says nothing while it carries nothing, in
//! slow start, and where no queue builds up; until another verdict the last one holds.

use d2tp_time::{Span, Time};
use d2tp_wire::PathId;

use crate::session::Session;

/// The length of a mean: longer than the round trips of most paths differ, shorter than a queue needs to fill and drain.
const MEAN_OVER: Span = Span::from_millis(200); // a guess
/// The weight of the past in variances is this many means: about 13 s.
const MEMORY: i64 = 64; // a guess
/// The number of means after which a pair is judged: 8 s.
const MEANS_MIN: i64 = 40; // a guess
/// The least variance of a queue's delay that says something: a standard deviation of a millisecond, in µs².
const VARIANCE_MIN: i64 = 1_000_000; // a guess: above the noise of schedulers and Wi-Fi
/// A pair shares a bottleneck once the variance of its difference is below this percentage of both variances together, and
/// no more above the second.
const SHARED_BELOW: i64 = 25; // a guess
const SEPARATE_ABOVE: i64 = 60; // a guess

/// A mean and a variance over the last values, in microseconds.
#[derive(Clone, Copy, Debug, Default)]
struct DelayVariation {
    mean: i64,
    variance: i64,
}

impl DelayVariation {
    /// Adds a value, the `count`th.
    fn add(&mut self, value: i64, count: i64) {
        let memory = count.clamp(1, MEMORY);
        let off = value - self.mean;
        self.mean += off / memory;
        // The first value has no variance.
        if count > 1 {
            self.variance += (off * off - self.variance) / memory;
        }
    }
}

/// Two paths, the first of which has the smaller number.
#[derive(Debug)]
struct PathPair {
    ids: (PathId, PathId),
    delays: [DelayVariation; 2],
    difference: DelayVariation,
    count: i64,
    is_shared: bool,
}

impl PathPair {
    fn add(&mut self, [first, second]: [i64; 2]) {
        self.count += 1;
        self.delays[0].add(first, self.count);
        self.delays[1].add(second, self.count);
        self.difference.add(first - second, self.count);
        let [first, second] = self.delays.map(|delay| delay.variance);
        if self.count < MEANS_MIN || first.min(second) < VARIANCE_MIN {
            return;
        }
        let percentage = 100 * self.difference.variance / (first + second);
        self.is_shared = match self.is_shared {
            true => percentage <= SEPARATE_ABOVE,
            false => percentage < SHARED_BELOW,
        };
    }
}

/// The delays of a path since the last mean, in microseconds.
#[derive(Clone, Copy, Debug)]
struct PathDelays {
    id: PathId,
    sum: i64,
    count: i64,
}

/// Which paths of a session share a bottleneck.
#[derive(Debug)]
pub(crate) struct SharedBottlenecks {
    mean_since: Time,
    delays: Vec<PathDelays>,
    pairs: Vec<PathPair>,
}

impl SharedBottlenecks {
    pub(crate) fn new(now: Time) -> SharedBottlenecks {
        SharedBottlenecks {
            mean_since: now,
            delays: Vec::new(),
            pairs: Vec::new(),
        }
    }

    /// Adds a delay in the queues of a path: its round trip without the smallest one. Returns whether the paths have to be
    /// compared now.
    pub(crate) fn on_delay(&mut self, now: Time, id: PathId, delay: Span) -> bool {
        let micros = i64::try_from(delay.as_micros()).unwrap_or(i64::MAX);
        // A minute is more than any queue holds, and its square can be added up.
        let micros = micros.min(60_000_000);
        match self.delays.iter_mut().find(|path| path.id == id) {
            Some(path) => {
                path.sum += micros;
                path.count += 1;
            }
            None => self.delays.push(PathDelays {
                id,
                sum: micros,
                count: 1,
            }),
        }
        now.since(self.mean_since) >= MEAN_OVER
    }

    /// Compares the paths that had delays since the last comparison. Those that are not `open` any more are forgotten.
    pub(crate) fn compare(&mut self, now: Time, open: impl Fn(PathId) -> bool) {
        self.mean_since = now;
        self.pairs
            .retain(|pair| open(pair.ids.0) && open(pair.ids.1));
        let mut means: Vec<(PathId, i64)> = self
            .delays
            .drain(..)
            .filter(|path| open(path.id))
            .map(|path| (path.id, path.sum / path.count))
            .collect();
        means.sort_unstable_by_key(|(id, _)| *id);
        for (n, (first, first_mean)) in means.iter().enumerate() {
            for (second, second_mean) in &means[n + 1..] {
                let ids = (*first, *second);
                let known = self.pairs.iter().position(|pair| pair.ids == ids);
                let at = known.unwrap_or_else(|| {
                    self.pairs.push(PathPair {
                        ids,
                        delays: Default::default(),
                        difference: DelayVariation::default(),
                        count: 0,
                        is_shared: false,
                    });
                    self.pairs.len() - 1
                });
                self.pairs[at].add([*first_mean, *second_mean]);
            }
        }
    }

    /// Whether these two paths share a bottleneck.
    fn share_one(&self, first: PathId, second: PathId) -> bool {
        self.group(first, |_| true).contains(&second)
    }

    /// The number of paths that share a bottleneck with this one, itself included. Paths that do not `compete` are left out.
    fn sharers(&self, id: PathId, competes: impl Fn(PathId) -> bool) -> u32 {
        u32::try_from(self.group(id, competes).len()).unwrap_or(1)
    }

    /// The paths that share a bottleneck with this one, and it: also those that share one with a path that does.
    fn group(&self, id: PathId, competes: impl Fn(PathId) -> bool) -> Vec<PathId> {
        let mut group = vec![id];
        let mut at = 0;
        while let Some(member) = group.get(at).copied() {
            at += 1;
            for pair in self.pairs.iter().filter(|pair| pair.is_shared) {
                let other = match pair.ids {
                    (first, second) if first == member => second,
                    (first, second) if second == member => first,
                    _ => continue,
                };
                if !group.contains(&other) && competes(other) {
                    group.push(other);
                }
            }
        }
        group
    }
}

impl Session {
    /// Lets the paths that share the bottleneck of the path in `slot` respond to its loss of a packet sent at `sent_at`.
    pub(crate) fn share_reduction(&mut self, now: Time, slot: usize, sent_at: Time) {
        let Session {
            paths,
            shared_bottlenecks,
            ..
        } = self;
        let Some(shared) = shared_bottlenecks else {
            return;
        };
        let lossy = paths.nth(slot).id;
        for path in paths.iter_mut() {
            if path.id != lossy && shared.share_one(lossy, path.id) {
                path.recovery.controller.on_shared_loss(now, sent_at);
            }
        }
    }

    /// Notes the round trip that the path in `slot` has measured, and sets what the paths of one bottleneck take of it.
    pub(crate) fn note_queue_delay(&mut self, now: Time, slot: usize) {
        let Session {
            paths,
            shared_bottlenecks,
            ..
        } = self;
        if paths.len() < 2 {
            if shared_bottlenecks.take().is_some() {
                paths.at(slot).recovery.controller.set_share(1);
            }
            return;
        }
        let path = paths.nth(slot);
        // A path over TCP has the congestion control of TCP.
        if !path.takes_payload() || path.is_stream() || path.recovery.controller.in_slow_start() {
            return;
        }
        let rtt = &path.recovery.rtt;
        let (id, delay) = (path.id, rtt.latest().saturating_sub(rtt.min()));
        let shared = shared_bottlenecks.get_or_insert_with(|| SharedBottlenecks::new(now).into());
        if !shared.on_delay(now, id, delay) {
            return;
        }
        shared.compare(now, |id| paths.get(id).is_some());
        let competes = |id| {
            let path = paths.get(id);
            path.is_some_and(|path| path.takes_payload() && !path.is_stream())
        };
        let shares: Vec<u32> = paths
            .iter()
            .map(|path| shared.sharers(path.id, competes))
            .collect();
        for (path, share) in paths.iter_mut().zip(shares) {
            path.recovery.controller.set_share(share);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A queue's delay in milliseconds that rises and falls, at a time in tenths of a second.
    fn sawtooth(at: u64, period: u64) -> u64 {
        20 + 60 * (at % period) / period
    }

    /// How many paths share a bottleneck with the first one after some time in which the paths had these delays, in
    /// milliseconds, at a time in tenths of a second.
    fn sharers_after(seconds: u64, delays: &[&dyn Fn(u64) -> u64]) -> u32 {
        let mut now = Time::from_nanos(5_000_000_000);
        let mut shared = SharedBottlenecks::new(now);
        for tenth in 0..seconds * 10 {
            now += Span::from_millis(100);
            let mut is_due = false;
            for (id, delay) in delays.iter().enumerate() {
                is_due = shared.on_delay(now, PathId(id as u32), Span::from_millis(delay(tenth)));
            }
            if is_due {
                shared.compare(now, |_| true);
            }
        }
        shared.sharers(PathId(0), |_| true)
    }

    #[test]
    fn paths_that_are_delayed_alike_share_a_bottleneck_and_others_do_not() {
        let one = |at| sawtooth(at, 31);
        // Its packets arrive there a moment later, and it has a longer way.
        let same = |at: u64| sawtooth(at.saturating_sub(1), 31) + 150;
        let other = |at| sawtooth(at, 23);
        let steady = |_| 30;
        assert_eq!(sharers_after(7, &[&one, &same]), 1, "too early");
        assert_eq!(sharers_after(30, &[&one, &same]), 2);
        assert_eq!(sharers_after(30, &[&one, &other]), 1);
        assert_eq!(sharers_after(30, &[&one, &steady]), 1);
        assert_eq!(sharers_after(30, &[&steady, &steady]), 1, "no queue");
        assert_eq!(sharers_after(30, &[&one, &same, &other]), 2);
        assert_eq!(sharers_after(30, &[&one, &same, &one]), 3);
    }

    #[test]
    fn paths_that_part_no_longer_share_one() {
        let moves = |at: u64| match at {
            ..300 => sawtooth(at, 31),
            _ => sawtooth(at, 19),
        };
        let one = |at| sawtooth(at, 31);
        assert_eq!(sharers_after(30, &[&one, &moves]), 2);
        assert_eq!(sharers_after(90, &[&one, &moves]), 1);
    }

    #[test]
    fn a_path_that_is_closed_shares_nothing() {
        let mut now = Time::from_nanos(1);
        let mut shared = SharedBottlenecks::new(now);
        for tenth in 0..300 {
            now += Span::from_millis(100);
            for id in [PathId(0), PathId(1)] {
                if shared.on_delay(now, id, Span::from_millis(sawtooth(tenth, 31))) {
                    shared.compare(now, |_| true);
                }
            }
        }
        assert_eq!(shared.sharers(PathId(0), |_| true), 2);
        assert_eq!(
            shared.sharers(PathId(0), |_| false),
            1,
            "the other carries nothing"
        );
        shared.compare(now, |id| id == PathId(0));
        assert_eq!(shared.sharers(PathId(0), |_| true), 1);
    }
}
