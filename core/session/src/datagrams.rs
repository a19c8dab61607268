//! Unreliable datagrams of a session: sending and receiving. [`crate::datagram_queue`] holds those
//! that wait.

use bytes::Bytes;
use d2tp_time::Time;
use d2tp_wire::PathStatus;

use crate::datagram_queue::{
    CONTEXTS, CONTEXTS_OF_COPIES, DatagramPath, DatagramStats, HEAD_MAX, NUMBERS, QueuedDatagram,
    ROOM_SURE, room,
};
use crate::event::SessionEvent;
use crate::path::{PathState, SessionPath};
use crate::path_selection::PathSelection;
use crate::session::Session;
use crate::slow_path::{FAR_FASTER, WAS_FAR_FASTER};

/// Spreads the first numbers of successive epochs. // odd, about NUMBERS times the golden ratio
const NUMBER_STEP: u32 = 0x13c6_ef37;

impl Session {
    /// Sends an unreliable datagram; drops it if it could not leave by `expires`. It leaves on any
    /// path that is available, not gated, and not far slower than another one. Without such a path it
    /// waits, and newer ones may displace it.
    pub fn send_datagram(&mut self, context: u64, bytes: Bytes, expires: Time) {
        self.send_datagram_on(PathSelection::Any, context, bytes, expires);
    }

    /// Sends an unreliable datagram that acknowledges, for the application's own protocol, what arrives in other datagrams.
    /// R-ACK-8: it may leave on another path than those, also on a gated one, as ACKs of this protocol do
    /// ([`crate::EndpointConfig::ack_offload`]); else it is like any other.
    ///
    /// # Panics
    /// If the context is not below [`CONTEXTS`].
    pub fn send_ack_datagram(&mut self, context: u64, bytes: Bytes, expires: Time) {
        assert!(context < CONTEXTS, "context {context} of a datagram");
        self.datagrams.push(QueuedDatagram {
            context,
            bytes,
            expires,
            route: PathSelection::Any,
            left_on: Vec::new(),
            acknowledges: true,
            repairs: None,
        });
    }

    /// Sends a datagram on the paths that `route` selects. With [`PathSelection::Each`] it is
    /// copied, and the peer's application gets the first copy that arrives.
    ///
    /// # Panics
    /// If the context is not below [`CONTEXTS`], or, with [`PathSelection::Each`], not below
    /// [`CONTEXTS_OF_COPIES`].
    pub fn send_datagram_on(
        &mut self,
        route: PathSelection,
        context: u64,
        bytes: Bytes,
        expires: Time,
    ) {
        let context = match route {
            PathSelection::Each => {
                assert!(
                    context < CONTEXTS_OF_COPIES,
                    "context {context} of a copied datagram"
                );
                // A session that starts again must not reuse its first numbers, because the peer
                // may remember them.
                let fresh = self.epoch.wrapping_mul(NUMBER_STEP) % NUMBERS;
                let number = self.datagrams.number.unwrap_or(fresh);
                self.datagrams.number = Some((number + 1) % NUMBERS);
                CONTEXTS + u64::from(number) * CONTEXTS_OF_COPIES + context
            }
            PathSelection::Any | PathSelection::Steadiest => {
                assert!(context < CONTEXTS, "context {context} of a datagram");
                context
            }
        };
        self.datagrams.push(QueuedDatagram {
            context,
            bytes,
            expires,
            route,
            left_on: Vec::new(),
            acknowledges: false,
            repairs: None,
        });
    }

    /// Returns the path in `slot` if datagrams wait that may leave on it.
    pub(crate) fn datagram_path(&self, now: Time, slot: usize) -> Option<DatagramPath> {
        if self.datagrams.is_empty() {
            return None;
        }
        let path = self.paths.nth(slot);
        let carrier = self.datagrams.ack_carrier;
        let is_carrier = carrier == Some(path.id);
        let takes_any = path.takes_payload() && !path.gated;
        let takes_repairs = self.takes_repair(path);
        if !takes_any && !is_carrier && !takes_repairs {
            return None;
        }
        let is_slow = path.is_slow();
        if is_slow && path.has_datagram_queue() {
            return None;
        }
        let mut carriers = self.paths.iter().filter(|p| p.takes_datagrams());
        let is_far_slower = is_slow && carriers.any(|other| other.is_faster_than(path, FAR_FASTER));
        let mut taker = DatagramPath {
            path: path.id,
            is_far_slower,
            takes_acks: match carrier {
                Some(_) => is_carrier,
                None => !is_far_slower && takes_any,
            },
            takes_repairs,
            takes_only_acks: !takes_any,
            steadiest: None,
            all: Vec::new(),
        };
        if self.datagrams.routed {
            taker.steadiest = self.steadiest(now);
            let all = self.paths.iter().filter(|p| p.takes_datagrams());
            taker.all = all.map(|p| p.id).collect();
        }
        self.datagrams.has_for(&taker).then_some(taker)
    }

    /// R-COPY-2: handles a received datagram, which may be a copy of an earlier one.
    pub(crate) fn on_datagram(&mut self, slot: usize, context: u64, bytes: &[u8]) {
        let is_gated = self.paths.nth(slot).gated;
        let stats = self.datagrams.stats_mut();
        stats.bytes_in += bytes.len() as u64;
        stats.gated_received += u64::from(is_gated);
        stats.gated_bytes_in += u64::from(is_gated) * bytes.len() as u64;
        match self.datagrams.take(context) {
            Some(context) => {
                self.datagrams.stats_mut().received += 1;
                let bytes = Bytes::copy_from_slice(bytes);
                self.emit(SessionEvent::Datagram { context, bytes });
            }
            None => self.datagrams.stats_mut().copies_received += 1,
        }
    }

    /// The size of the largest datagram that fits on every path that may carry one now. Slow lines with
    /// small packets count only where there is no other path. Without any, the largest that each path
    /// but such a line carries.
    pub fn datagram_max(&self) -> usize {
        let rooms = || {
            let carriers = self.paths.iter().filter(|p| p.takes_payload() && !p.gated);
            carriers.map(|p| room(p.mtu.current()))
        };
        let least = rooms().filter(|room| *room >= ROOM_SURE).min();
        let least = least.or_else(|| rooms().min());
        least.unwrap_or(ROOM_SURE) - HEAD_MAX
    }

    /// Whether a path could take datagrams now: one that is available, not silent, and needs no grants.
    pub fn carries_datagrams(&self) -> bool {
        self.paths.iter().any(|p| p.takes_payload() && !p.gated)
    }

    /// Whether paths could take datagrams now, and all of them are slow.
    pub fn carries_datagrams_by_slow_paths(&self) -> bool {
        let mut carriers = self.paths.iter().filter(|p| p.takes_payload() && !p.gated);
        self.carries_datagrams() && carriers.all(SessionPath::is_slow)
    }

    /// Whether all paths that could take datagrams now are slow, and one that fell silent is far faster than each of them. If it
    /// `was` so, all being slow is enough: the silent one may have been closed.
    pub fn carries_datagrams_slowly(&self, was: bool) -> bool {
        if !self.carries_datagrams_by_slow_paths() {
            return false;
        }
        let carriers = || self.paths.iter().filter(|p| p.takes_payload() && !p.gated);
        let is_silent = |p: &&SessionPath| match p.status {
            PathStatus::Available => p.state == PathState::Silent,
            status => status == PathStatus::Frozen,
        };
        let mut silent = self.paths.iter().filter(|p| !p.gated).filter(is_silent);
        was || silent.any(|silent| carriers().all(|p| silent.is_faster_than(p, WAS_FAR_FASTER)))
    }

    /// Whether paths could take payload, and all of them need grants for it.
    pub fn is_metered(&self) -> bool {
        let mut paths = self.paths.iter().filter(|p| p.takes_payload()).peekable();
        paths.peek().is_some() && paths.all(|p| p.gated)
    }

    /// The bytes that may be in flight where all paths that could take payload need grants for it; `None` elsewhere.
    pub fn metered_window(&self) -> Option<u64> {
        let carriers = self.paths.iter().filter(|p| p.takes_payload());
        let windows = carriers.map(|p| p.recovery.controller.window());
        self.is_metered().then(|| windows.sum())
    }

    /// How many datagrams wait to be sent, but for those that repair losses over another path than most datagrams.
    pub fn datagrams_waiting(&self) -> usize {
        self.datagrams.len_without_repairs()
    }

    /// Counts of datagrams that were sent, displaced or expired.
    pub fn datagram_stats(&self) -> DatagramStats {
        self.datagrams.stats()
    }
}
