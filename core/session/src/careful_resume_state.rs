//! What a session and its paths hold of ways used before ([`crate::careful_resume`]).

use std::net::IpAddr;

use d2tp_time::{Span, Time};

use crate::config::PATHS_MAX;
use crate::link::LinkId;

/// Where packets go from and to, whatever the ports. A driver that gives a link another number each time
/// it is attached knows no way again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AddressPair {
    pub(crate) link: LinkId,
    pub(crate) local: Option<IpAddr>,
    pub(crate) remote: IpAddr,
}

/// What was measured on a way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CachedPathMetrics {
    pub(crate) pair: AddressPair,
    pub(crate) window: u64,
    pub(crate) rtt: Span,
    pub(crate) at: Time,
}

impl CachedPathMetrics {
    /// RFC 9959 §3.2: a round trip far from the one known is another path.
    pub(crate) fn is_like(&self, rtt: Span) -> bool {
        rtt.times(2) >= self.rtt && rtt <= self.rtt.times(10)
    }
}

/// Ways of paths that went, the latest last.
#[derive(Debug, Default)]
pub(crate) struct PathMetricsCache(Vec<CachedPathMetrics>);

impl PathMetricsCache {
    /// Remembers what was measured on a path that goes.
    pub(crate) fn note(&mut self, known: CachedPathMetrics) {
        self.0.retain(|k| k.pair != known.pair);
        if self.0.len() == PATHS_MAX {
            self.0.remove(0);
        }
        self.0.push(known);
    }

    /// What is known of a way serves one path: two at once would take it twice.
    pub(crate) fn take(&mut self, pair: AddressPair) -> Option<CachedPathMetrics> {
        let at = self.0.iter().position(|known| known.pair == pair)?;
        Some(self.0.remove(at))
    }
}

/// A window that was not measured on this path, while packets that left under it are on their way.
#[derive(Debug)]
pub(crate) struct CarefulResume {
    /// The first packet that left under it, and the one that ends the doubt once a packet under it was answered.
    first: u64,
    until: Option<u64>,
    /// Bytes that the path is known to take.
    pipe: u64,
    threshold: u64,
}

/// What an ACK says of a window that is in doubt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ValidationStep {
    Unchanged,
    /// A packet that left under it was answered: no more than was used of it.
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

    /// R-CC-3: something was lost: the window with which the path goes on.
    pub(crate) fn retreat(&self) -> u64 {
        self.pipe / 2
    }
}
