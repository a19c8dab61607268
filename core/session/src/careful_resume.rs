//! Careful Resume (RFC 9959): a new path between addresses that the session used before starts from
//! the remembered metrics.
//!
//! ```text
//!  a path is closed ─▶ cached: addresses, window, round trip
//!  a new one, same addresses ─▶ its first window used up, nothing lost, a similar round trip?
//!        ─▶ half the cached window, spread over a round trip
//!              all of that arrives ─▶ slow start up to the cached window
//!              some of it is lost  ─▶ half of what arrived
//! ```
//!
//! Metrics belong to a pair of addresses. A device that returns to an access point usually has the
//! address that it had, and so does its NAT. Otherwise the path begins like any other.

use d2tp_time::{Span, Time};

use crate::careful_resume_state::{AddressPair, CachedPathMetrics};
use crate::congestion::WINDOW_INITIAL_DATAGRAMS;
use crate::path::{PathState, SessionPath};
use crate::session::Session;

/// How long the metrics of a path are remembered. They depend on who else uses the network.
const KNOWN_FOR: Span = Span::from_secs(600); // a guess

impl SessionPath {
    fn address_pair(&self) -> AddressPair {
        AddressPair {
            link: self.addresses.link,
            local: self.addresses.local,
            remote: self.addresses.remote.ip(),
        }
    }

    /// The metrics of a path to be remembered, if its window grew beyond that of a new path.
    pub(crate) fn measured_metrics(&self) -> Option<CachedPathMetrics> {
        if self.is_stream() {
            return None;
        }
        let window = self.recovery.controller.window();
        let enough = window / 2 > WINDOW_INITIAL_DATAGRAMS * self.mtu.current() as u64;
        let measured = self.validated && self.recovery.rtt.is_measured();
        (enough && measured && !self.recovery.is_careful()).then_some(CachedPathMetrics {
            pair: self.address_pair(),
            window,
            rtt: self.recovery.rtt.min(),
            at: self.last_rx,
        })
    }
}

impl Session {
    /// R-CC-3: after the first round trip of a new path, resumes with the remembered metrics of its
    /// pair of addresses, if there are any.
    pub(crate) fn resume_known_path(&mut self, now: Time, slot: usize) {
        let path = &self.paths[slot];
        let (id, pair, rtt) = (path.id, path.address_pair(), path.recovery.rtt.min());
        let controller = &path.recovery.controller;
        let window = controller.window();
        if !path.is_new {
            return;
        }
        let unharmed = controller.in_slow_start() && path.recovery.lost_total == 0;
        // A window that never grew was not used up, so nothing is known of the path's capacity.
        if unharmed && window <= WINDOW_INITIAL_DATAGRAMS * path.mtu.current() as u64 {
            return;
        }
        self.paths.at(slot).is_new = false;
        let others = || {
            self.paths
                .iter()
                .filter(|p| p.id != id && p.address_pair() == pair)
        };
        if !unharmed || others().any(|p| p.state != PathState::Silent) {
            return;
        }
        // A peer that came back may not have reported yet that the previous path is closed.
        let silent = others().find_map(SessionPath::measured_metrics);
        let known = self
            .path_metrics_cache
            .take(pair)
            .or(silent)
            .filter(|known| {
                now.since(known.at) <= KNOWN_FOR && known.is_like(rtt) && known.window / 2 > window
            });
        if let Some(known) = known {
            let path = self.paths.at(slot);
            path.recovery.resume(known.window / 2, known.window);
            path.paced_evenly_until = now + path.recovery.rtt.smoothed();
        }
    }
}
