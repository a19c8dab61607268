//! Earliest completion first (Lim et al., CoNEXT 2017): a slow path takes bytes only if the fast
//! one could not carry them sooner.
//!
//! ```text
//!  fast  ▐███████ full ▐ room ▐██ the rest, n round trips ██▐ done
//!  slow  ▐ room ▐─────────────── one round trip ────────────────────────▐ done: do not use it
//! ```
//!
//! With `k` unsent bytes the fast path is done after about `1 + k / window` of its round trips. The
//! bytes wait for it if that is sooner than one round trip of the slow path, and the part of `k`
//! that the slow path would carry meanwhile does not compensate for that. Waiting ends only with
//! hysteresis.

use d2tp_time::Span;

use super::{PathCandidate, PathScheduler, SendBacklog};

/// The hysteresis of waiting: the slow path must be better by this share to be used. // the paper's β
const STAY_SHARE: (u64, u64) = (1, 4);

#[derive(Debug, Default)]
pub(super) struct Ecf {
    waiting: bool,
}

impl PathScheduler for Ecf {
    fn takes(&mut self, own: &PathCandidate, first: &PathCandidate, waiting: &SendBacklog) -> bool {
        if own.would_block(first, waiting.window) {
            return false;
        }
        let unsent = waiting.unsent;
        let variance = own.variance.max(first.variance);
        let by_waiting = first.rtt + rounds(first, unsent);
        let at_once = own.rtt + variance;
        let at_once = match self.waiting {
            true => at_once + at_once.scaled(STAY_SHARE.0, STAY_SHARE.1),
            false => at_once,
        };
        if by_waiting >= at_once {
            self.waiting = false;
            return true;
        }
        // The path must also be so slow that sharing the rest with it does not help.
        let alone = rounds(own, unsent).max(own.rtt);
        let waits = alone >= first.rtt.times(2) + variance;
        self.waiting |= waits;
        !waits
    }
}

/// How long a path takes to send `bytes`, at one window per round trip.
fn rounds(path: &PathCandidate, bytes: u64) -> Span {
    path.rtt.scaled(bytes, path.window.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(rtt_ms: u64, window: u64) -> PathCandidate {
        PathCandidate {
            rtt: Span::from_millis(rtt_ms),
            variance: Span::from_millis(1),
            window,
            in_flight: 0,
        }
    }

    fn load(unsent: u64) -> SendBacklog {
        SendBacklog {
            unsent,
            window: u64::MAX,
        }
    }

    #[test]
    fn a_few_bytes_wait_for_the_fast_path_and_many_do_not() {
        let (fast, slow) = (offer(10, 20_000), offer(200, 20_000));
        assert!(!Ecf::default().takes(&slow, &fast, &load(20_000)));
        assert!(Ecf::default().takes(&slow, &fast, &load(2_000_000)));
    }

    #[test]
    fn alike_paths_never_wait_for_each_other() {
        let (one, other) = (offer(20, 30_000), offer(22, 30_000));
        for unsent in [1_000, 30_000, 1_000_000] {
            assert!(
                Ecf::default().takes(&other, &one, &load(unsent)),
                "{unsent}"
            );
        }
    }

    #[test]
    fn once_waiting_it_takes_more_to_stop() {
        let (fast, slow) = (offer(10, 20_000), offer(200, 20_000));
        // 10 ms + 10 ms for each 20 kB, against 201 ms.
        let between = 400_000;
        assert!(Ecf::default().takes(&slow, &fast, &load(between)));
        let mut waiting = Ecf::default();
        assert!(!waiting.takes(&slow, &fast, &load(20_000)));
        assert!(!waiting.takes(&slow, &fast, &load(between)));
        assert!(waiting.takes(&slow, &fast, &load(600_000)));
    }
}
