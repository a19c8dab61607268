//! What a session knows of ways it used before, so that a new path over one of them need not begin with
//! nothing (Careful Resume, RFC 9959).
//!
//! ```text
//!  a path goes ─▶ known: way, window, round trip
//!  a new one, the same way ─▶ its first window is used up, nothing lost, the round trip alike?
//!        ─▶ half the window that was, spread over a round trip
//!              all of that arrives ─▶ slow start on to what was known
//!              some of it is lost  ─▶ half of what arrived
//! ```
//!
//! A way is a pair of addresses: a device that comes back to an access point has the address it had, and
//! its NAT too. Where it does not, the path begins as any other.

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
        // Until it grew it was not used up, and nothing is known of what it carries.
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
        // A peer that came back may not have said yet that the path before is no more.
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
