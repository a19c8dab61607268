//! State of sessions and paths for Careful Resume ([`crate::careful_resume`]).

use std::net::IpAddr;

use d2tp_time::{Span, Time};

use crate::config::PATHS_MAX;
use crate::link::LinkId;

/// The local and the remote address of a path, without ports and without the link. A driver may
/// give a link another number each time it attaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AddressPair {
    pub(crate) link: LinkId,
    pub(crate) local: Option<IpAddr>,
    pub(crate) remote: IpAddr,
}

/// Metrics measured on a path between a pair of addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CachedPathMetrics {
    pub(crate) pair: AddressPair,
    pub(crate) window: u64,
    pub(crate) rtt: Span,
    pub(crate) at: Time,
}

impl CachedPathMetrics {
    /// RFC 9959 §3.2: whether a round trip is close enough to the remembered one to belong to the
    /// same path.
    pub(crate) fn is_like(&self, rtt: Span) -> bool {
        rtt.times(2) >= self.rtt && rtt <= self.rtt.times(10)
    }
}

/// Metrics of paths that were closed, the latest last.
#[derive(Debug, Default)]
pub(crate) struct PathMetricsCache(Vec<CachedPathMetrics>);

impl PathMetricsCache {
    /// Remembers the metrics of a path that is being closed.
    pub(crate) fn note(&mut self, known: CachedPathMetrics) {
        self.0.retain(|k| k.pair != known.pair);
        if self.0.len() == PATHS_MAX {
            self.0.remove(0);
        }
        self.0.push(known);
    }

    /// Removes and returns the metrics of a pair of addresses. Only one path may resume with them: two
    /// would take the capacity twice.
    pub(crate) fn take(&mut self, pair: AddressPair) -> Option<CachedPathMetrics> {
        let at = self.0.iter().position(|known| known.pair == pair)?;
        Some(self.0.remove(at))
    }
}

/// A resumed window that is not validated yet, while packets sent under it are unacknowledged (RFC
/// 9959).
#[derive(Debug)]
pub(crate) struct CarefulResume {
    /// The first packet sent under the resumed window, and the packet that ends validation once it is
    /// acknowledged.
    first: u64,
    until: Option<u64>,
    /// Bytes in flight that the path has proved to carry.
    pipe: u64,
    threshold: u64,
}

/// The effect of an ACK on a resumed window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ValidationStep {
    Unchanged,
    /// A packet sent under the resumed window was acknowledged: the window shrinks to what was used.
    Validating {
        threshold: u64,
    },
    Validated,
}

impl CarefulResume {
    pub(crate) fn new(next_number: u64, in_flight: u64, threshold: u64) -> CarefulResume {
        CarefulResume {
            first: next_number,
            until: None,
            pipe: in_flight,
            threshold,
        }
    }

    pub(crate) fn on_arrived(&mut self, bytes: u64) {
        self.pipe += bytes;
    }

    pub(crate) fn on_ack(&mut self, largest: u64, next_number: u64) -> ValidationStep {
        match self.until {
            None if largest >= self.first => {
                self.until = Some(next_number);
                ValidationStep::Validating {
                    threshold: self.threshold,
                }
            }
            Some(until) if largest >= until => ValidationStep::Validated,
            _ => ValidationStep::Unchanged,
        }
    }

    /// R-CC-3: the window after a loss under a resumed window.
    pub(crate) fn retreat(&self) -> u64 {
        self.pipe / 2
    }
}
