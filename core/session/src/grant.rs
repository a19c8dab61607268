//! Grants: how many bytes a flow may send on a gated (metered) path. The device decides, the sender
//! obeys.
//!
//! ```text
//!  device                                   sender
//!   GRANT path 2, max_sent 50,000  ──────▶   may put bytes on path 2 until it spent 50,000
//!                      ◀──────  SPENT 50,000  (and has more to send)
//!   GRANT path 2, max_sent 80,000  ──────▶
//!   GRANT path 2, max_sent 0       ──────▶   stops at once
//!                      ◀──────  SPENT 61,000  (all that can still arrive)
//! ```
//!
//! Numbers are cumulative over the path's lifetime and count payload bytes, retransmissions
//! included. A path id is never reused, so a grant never applies to another path.

use d2tp_wire::{PathId, VARINT_MAX};

#[derive(Clone, Copy, Debug)]
struct ReceivedGrant {
    path: PathId,
    seq: u64,
    max: u64,
    spent: u64,
    /// Whether SPENT must be sent.
    must_send: bool,
    blocked_reported_at: Option<u64>,
    /// The bytes that [`ReceivedGrants::report_spent`] last had reported.
    reported: u64,
}

/// R-MIRROR-4: how much a sender spends on datagrams before it reports that. Higher: grants run out before the device renews
/// them. Lower: more frames.
const REPORT_EVERY: u64 = 8 * 1024; // a guess: six packets of 1,420 bytes

/// Grants that a sender received.
#[derive(Debug, Default)]
pub(crate) struct ReceivedGrants {
    list: Vec<ReceivedGrant>,
}

impl ReceivedGrants {
    fn entry(&mut self, path: PathId) -> &mut ReceivedGrant {
        let i = match self.list.iter().position(|g| g.path == path) {
            Some(i) => i,
            None => {
                self.list.push(ReceivedGrant {
                    path,
                    seq: 0,
                    max: 0,
                    spent: 0,
                    must_send: false,
                    blocked_reported_at: None,
                    reported: 0,
                });
                self.list.len() - 1
            }
        };
        &mut self.list[i]
    }

    /// The number of payload bytes that may still be sent on `path` (R-GRANT-4).
    pub(crate) fn room(&self, path: PathId) -> u64 {
        self.list
            .iter()
            .find(|g| g.path == path)
            .map_or(0, |g| g.max.saturating_sub(g.spent))
    }
    /// The number of payload bytes sent on `path`.
    pub(crate) fn spent(&self, path: PathId) -> u64 {
        self.list
            .iter()
            .find(|g| g.path == path)
            .map_or(0, |g| g.spent)
    }
    pub(crate) fn on_sent(&mut self, path: PathId, bytes: u64) {
        self.entry(path).spent += bytes;
    }
    /// R-GRANT-2: the newest grant is valid, in whatever order grants arrive.
    pub(crate) fn on_grant(&mut self, path: PathId, seq: u64, max: u64) {
        let g = self.entry(path);
        if seq <= g.seq {
            return;
        }
        g.seq = seq;
        // R-GRANT-3: a grant below the bytes already sent is a revocation, and is answered.
        g.must_send |= max < g.max;
        g.max = max;
        g.blocked_reported_at = None;
    }

    /// Grants this many more bytes to this device's own sending, without a frame.
    pub(crate) fn set_local(&mut self, path: PathId, more: u64) {
        let g = self.entry(path);
        g.max = g.spent + more;
    }

    /// Records that data waits for a grant. This is reported once for each limit.
    pub(crate) fn on_blocked(&mut self, path: PathId) {
        let g = self.entry(path);
        if g.max <= g.spent && g.blocked_reported_at != Some(g.max) {
            g.blocked_reported_at = Some(g.max);
            g.must_send = true;
        }
    }

    /// Has SPENT sent if much was spent since it was last sent by this, or anything where `runs_out`. Returns whether it is to be
    /// sent.
    pub(crate) fn report_spent(&mut self, path: PathId, runs_out: bool) -> bool {
        let g = self.entry(path);
        let least = if runs_out { 1 } else { REPORT_EVERY };
        let is_due = g.spent >= g.reported + least;
        if is_due {
            (g.reported, g.must_send) = (g.spent, true);
        }
        is_due
    }

    /// The number of paths for which there is a grant.
    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }
    /// The payload bytes sent on each path.
    pub(crate) fn spending(&self) -> impl Iterator<Item = (PathId, u64)> {
        self.list.iter().map(|g| (g.path, g.spent))
    }
    pub(crate) fn wants(&self) -> bool {
        self.list.iter().any(|g| g.must_send)
    }
    pub(crate) fn take_spent(&mut self) -> Option<(PathId, u64)> {
        let g = self.list.iter_mut().find(|g| g.must_send)?;
        g.must_send = false;
        Some((g.path, g.spent))
    }
    pub(crate) fn on_lost(&mut self, path: PathId) {
        if let Some(g) = self.list.iter_mut().find(|g| g.path == path) {
            g.must_send = true;
        }
    }
    pub(crate) fn forget_path(&mut self, path: PathId) {
        self.list.retain(|g| g.path != path);
    }
    /// Forgets all grants, also those of unopened paths, because with new keys path ids stand for
    /// other paths.
    pub(crate) fn forget_all(&mut self) {
        self.list.clear();
    }
}

#[derive(Clone, Copy, Debug)]
struct IssuedGrant {
    path: PathId,
    seq: u64,
    max: u64,
    spent: u64,
    must_send: bool,
}

/// Grants that a device has issued.
#[derive(Debug, Default)]
pub(crate) struct IssuedGrants {
    list: Vec<IssuedGrant>,
}

impl IssuedGrants {
    fn entry(&mut self, path: PathId) -> &mut IssuedGrant {
        let i = match self.list.iter().position(|g| g.path == path) {
            Some(i) => i,
            None => {
                self.list.push(IssuedGrant {
                    path,
                    seq: 0,
                    max: 0,
                    spent: 0,
                    must_send: false,
                });
                self.list.len() - 1
            }
        };
        &mut self.list[i]
    }

    /// Allows `more` bytes beyond those known to be spent; zero revokes.
    pub(crate) fn grant(&mut self, path: PathId, more: u64) {
        let g = self.entry(path);
        let max = if more == 0 { 0 } else { g.spent + more };
        // The number of bytes that the peer claims to have spent may be any that the wire format
        // allows.
        let max = max.min(VARINT_MAX);
        if max != g.max {
            g.max = max;
            g.seq += 1;
            g.must_send = true;
        }
    }
    /// The number of bytes that the peer may still send, judged by what has arrived so far.
    pub(crate) fn left(&self, path: PathId) -> u64 {
        self.list
            .iter()
            .find(|g| g.path == path)
            .map_or(0, |g| g.max.saturating_sub(g.spent))
    }
    /// Records bytes that arrived on a gated path.
    pub(crate) fn on_received(&mut self, path: PathId, bytes: u64) {
        self.entry(path).spent += bytes;
    }
    /// Records the number of bytes that the sender reports as spent. Lost bytes count as well.
    pub(crate) fn on_spent(&mut self, path: PathId, spent: u64) {
        let g = self.entry(path);
        g.spent = g.spent.max(spent);
    }
    pub(crate) fn spent(&self, path: PathId) -> u64 {
        self.list
            .iter()
            .find(|g| g.path == path)
            .map_or(0, |g| g.spent)
    }
    /// The payload bytes spent on each path.
    pub(crate) fn spending(&self) -> impl Iterator<Item = (PathId, u64)> {
        self.list.iter().map(|g| (g.path, g.spent))
    }
    pub(crate) fn wants(&self) -> bool {
        self.list.iter().any(|g| g.must_send)
    }
    pub(crate) fn take_grant(&mut self) -> Option<(PathId, u64, u64)> {
        let g = self.list.iter_mut().find(|g| g.must_send)?;
        g.must_send = false;
        Some((g.path, g.seq, g.max))
    }
    pub(crate) fn on_lost(&mut self, path: PathId) {
        if let Some(g) = self.list.iter_mut().find(|g| g.path == path) {
            g.must_send = true;
        }
    }
    pub(crate) fn forget_path(&mut self, path: PathId) {
        self.list.retain(|g| g.path != path);
    }
    /// Forgets all grants, because with new keys path ids stand for other paths.
    pub(crate) fn forget_all(&mut self) {
        self.list.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: PathId = PathId(2);

    #[test]
    fn a_sender_stops_at_the_grant_and_at_once_on_revocation() {
        let mut g = ReceivedGrants::default();
        assert_eq!(g.room(P), 0, "a gated path starts at nothing");
        g.on_grant(P, 1, 100);
        g.on_sent(P, 60);
        assert_eq!(g.room(P), 40);
        g.on_grant(P, 2, 0);
        assert_eq!(g.room(P), 0);
        assert_eq!(g.take_spent(), Some((P, 60)));
        g.on_grant(P, 1, 1_000);
        assert_eq!(g.room(P), 0, "a reordered older grant does not count");
    }

    #[test]
    fn what_datagrams_spend_is_reported_now_and_then() {
        // R-MIRROR-4
        let mut g = ReceivedGrants::default();
        g.on_grant(P, 1, 100_000);
        g.on_sent(P, REPORT_EVERY - 1);
        assert!(!g.report_spent(P, false) && g.take_spent().is_none());
        g.on_sent(P, 1);
        assert!(g.report_spent(P, false));
        assert_eq!(g.take_spent(), Some((P, REPORT_EVERY)));
        assert!(!g.report_spent(P, false) && g.take_spent().is_none());
        g.on_sent(P, 1);
        assert!(g.report_spent(P, true) && !g.report_spent(P, true));
    }

    #[test]
    fn a_device_counts_lost_bytes_as_spent() {
        let mut g = IssuedGrants::default();
        g.grant(P, 100);
        assert_eq!(g.take_grant(), Some((P, 1, 100)));
        g.on_received(P, 80);
        g.on_spent(P, 100);
        assert_eq!(g.left(P), 0);
        g.grant(P, 50);
        assert_eq!(g.take_grant(), Some((P, 2, 150)));
    }
}
