//! Path schedulers: which path carries which bytes, if a session has several.
//!
//! ```text
//!  a flow's bytes   ── new or lost ──▶ the first path in line with room that takes them
//!                   ── in flight ────▶ sent again on another path (reinjection.rs), if
//!                                      a faster path has nothing else to send  (reinjection)
//!                                      or everything goes everywhere           (redundant)
//! ```
//!
//! | scheduler | first in line | a path further back takes new bytes |
//! |---|---|---|
//! | free first | free before metered, then the shortest round trip | unless it would block |
//! | lowest RTT | the shortest round trip | unless it would block |
//! | ECF | as free first | unless waiting for the first in line ends sooner ([`ecf`]) |
//! | redundant | as free first | when it has repeated what the others carry |
//!
//! A slow path blocks if the peer's credit or this end's buffer would be used up before its bytes
//! arrive, so that the fast path stands still (Ferlin et al., BLEST, IFIP Networking 2016).
//!
//! Schedulers do not decide whether a path may carry payload at all. The device does: for a link by
//! PATH_STATUS, for a flow on a metered link by GRANT.

mod ecf;
mod reinjection;

use d2tp_time::Span;

pub(crate) use reinjection::PacketCopy;

/// How a session with several paths distributes the data that it sends. Each end decides for its
/// own direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PathSchedulerKind {
    /// Free paths before metered ones, then the shortest round trip.
    #[default]
    FreeFirst,
    /// The shortest round trip, whether the path is metered or not.
    LowestRtt,
    /// Earliest completion first: a slow path is not used if waiting for a fast one is quicker.
    /// Best for short transfers; long ones have bytes for every path anyway.
    Ecf,
    /// Every byte on every path: the failure of a path causes no delay, but the rate does not
    /// increase.
    Redundant,
}

impl PathSchedulerKind {
    /// Every path scheduler.
    pub const ALL: [PathSchedulerKind; 4] = [
        PathSchedulerKind::FreeFirst,
        PathSchedulerKind::LowestRtt,
        PathSchedulerKind::Ecf,
        PathSchedulerKind::Redundant,
    ];

    /// The name of the scheduler on a command line, such as `lowest-rtt`.
    pub fn as_str(self) -> &'static str {
        match self {
            PathSchedulerKind::FreeFirst => "free-first",
            PathSchedulerKind::LowestRtt => "lowest-rtt",
            PathSchedulerKind::Ecf => "ecf",
            PathSchedulerKind::Redundant => "redundant",
        }
    }
}

/// Which unacknowledged data of other paths a path repeats.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CopyMode {
    /// Copies of data that would arrive sooner here, while there is nothing else to send.
    Sooner,
    /// All data, before anything else.
    All,
    /// Data of flows that select each path, before anything else.
    Chosen,
}

/// How far a path that repeats everything has repeated the packets of another path: all packets
/// below `number`, and the first `bytes` of payload of that packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CopyProgress {
    pub(crate) number: u64,
    pub(crate) bytes: u64,
}

/// A path that may carry payload, as schedulers see it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PathCandidate {
    /// Smoothed round trip of the path, and its variation.
    pub(crate) rtt: Span,
    pub(crate) variance: Span,
    /// The congestion window in bytes.
    pub(crate) window: u64,
    /// Bytes in flight.
    pub(crate) in_flight: u64,
}

impl PathCandidate {
    /// Whether the first path would use up the window before bytes sent here now arrive.
    pub(crate) fn would_block(&self, first: &PathCandidate, window: u64) -> bool {
        let nanos = |span: Span| u128::from(span.as_nanos().max(1));
        let meanwhile = u128::from(first.window) * nanos(self.rtt) / nanos(first.rtt);
        meanwhile + u128::from(self.in_flight) > u128::from(window)
    }
}

/// The amount of data that waits to be sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SendBacklog {
    /// Bytes that were never sent, or were lost, up to [`UNSENT_MAX`].
    pub(crate) unsent: u64,
    /// Bytes of the next flow that may be in flight or unread at once.
    pub(crate) window: u64,
}

/// A backlog beyond this size makes no difference to any scheduler, in bytes.
pub(crate) const UNSENT_MAX: u64 = 64 << 20;

/// Distributes what a session sends over its paths.
pub(crate) trait PathScheduler: Send + std::fmt::Debug {
    /// The path's rank: a path with a lower rank is used first.
    fn rank(&self, gated: bool, rtt: Span) -> (bool, Span) {
        (gated, rtt)
    }
    /// Whether the path `own` takes the next bytes, or leaves them to `first`, the first path in
    /// order, which has no room now but will soon.
    fn takes(&mut self, own: &PathCandidate, first: &PathCandidate, waiting: &SendBacklog) -> bool {
        !own.would_block(first, waiting.window)
    }
    fn copies(&self) -> CopyMode {
        CopyMode::Sooner
    }
}

#[derive(Debug)]
struct FreeFirst;

impl PathScheduler for FreeFirst {}

#[derive(Debug)]
struct LowestRtt;

impl PathScheduler for LowestRtt {
    fn rank(&self, _gated: bool, rtt: Span) -> (bool, Span) {
        (false, rtt)
    }
}

#[derive(Debug)]
struct Redundant;

impl PathScheduler for Redundant {
    fn takes(
        &mut self,
        _own: &PathCandidate,
        _first: &PathCandidate,
        _waiting: &SendBacklog,
    ) -> bool {
        true
    }
    fn copies(&self) -> CopyMode {
        CopyMode::All
    }
}

pub(crate) fn path_scheduler(kind: PathSchedulerKind) -> Box<dyn PathScheduler> {
    match kind {
        PathSchedulerKind::FreeFirst => Box::new(FreeFirst),
        PathSchedulerKind::LowestRtt => Box::new(LowestRtt),
        PathSchedulerKind::Ecf => Box::new(ecf::Ecf::default()),
        PathSchedulerKind::Redundant => Box::new(Redundant),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lowest_rtt_puts_a_metered_path_before_a_slower_free_one() {
        let (free, metered) = (
            (false, Span::from_millis(50)),
            (true, Span::from_millis(10)),
        );
        for (kind, first) in [
            (PathSchedulerKind::FreeFirst, free),
            (PathSchedulerKind::Ecf, free),
            (PathSchedulerKind::Redundant, free),
            (PathSchedulerKind::LowestRtt, metered),
        ] {
            let scheduler = path_scheduler(kind);
            let best = [free, metered]
                .into_iter()
                .min_by_key(|(gated, rtt)| scheduler.rank(*gated, *rtt));
            assert_eq!(best, Some(first), "{kind:?}");
        }
    }

    #[test]
    fn a_path_that_would_block_leaves_the_bytes_to_the_first_in_line() {
        let offer = |rtt_ms, window| PathCandidate {
            rtt: Span::from_millis(rtt_ms),
            variance: Span::from_millis(1),
            window,
            in_flight: 10_000,
        };
        let (first, own) = (offer(20, 50_000), offer(200, 50_000));
        let takes = |kind, window| {
            let waiting = SendBacklog {
                unsent: 1 << 20,
                window,
            };
            path_scheduler(kind).takes(&own, &first, &waiting)
        };
        // In 200 ms the first carries 500 kB.
        for kind in [PathSchedulerKind::FreeFirst, PathSchedulerKind::LowestRtt] {
            assert!(!takes(kind, 500_000) && takes(kind, 520_000), "{kind:?}");
        }
        assert!(takes(PathSchedulerKind::Redundant, 1_000));
    }
}
