//! The interface of a path's congestion controller: it is informed of acknowledged and lost
//! packets, and computes how many bytes may be in flight.

use d2tp_time::{Span, Time};

use crate::delivery_rate::{PacketFate, RateSample};

/// The smallest window of a path: two full datagrams (RFC 9002 §7.2).
pub(crate) const WINDOW_MIN_DATAGRAMS: u64 = 2;

/// The window of a new path: ten datagrams (RFC 9002 §7.2).
pub(crate) const WINDOW_INITIAL_DATAGRAMS: u64 = 10;

/// Acknowledged bytes, as a controller sees them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AckEvent {
    pub(crate) now: Time,
    pub(crate) bytes: u64,
    /// When the newest of the acknowledged packets was sent.
    pub(crate) sent_at: Time,
    /// The path's smoothed round trip.
    pub(crate) smoothed: Span,
    /// The path's round trip; this ACK measured it if `fresh`.
    pub(crate) rtt: Span,
    pub(crate) fresh: bool,
    /// Whether the sender had less to send than the window allowed.
    pub(crate) app_limited: bool,
    /// Largest packet number acknowledged, and the next one to be sent.
    pub(crate) largest: u64,
    pub(crate) next_number: u64,
    /// Bytes still in flight.
    pub(crate) in_flight: u64,
    /// The delivery rate sample of the ACK, for a controller that uses them.
    pub(crate) sample: Option<RateSample>,
}

/// A path of the session, as coupled controllers see it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SiblingPath {
    /// The congestion window of the path in bytes.
    pub(crate) window: u64,
    /// Smoothed round trip of the path.
    pub(crate) rtt: Span,
    /// Bytes the path delivers between losses ([`Controller::interval`]).
    pub(crate) interval: u64,
}

/// All paths of the session, the controller's own included; empty if there is no other.
pub(crate) type SiblingPaths<'a> = &'a [SiblingPath];

/// A congestion controller of one path.
pub(crate) trait Controller: Send + std::fmt::Debug {
    fn on_ack(&mut self, acked: AckEvent, siblings: SiblingPaths<'_>);
    /// Handles lost packets, the newest of them sent at `sent_at`. There is at most one response
    /// per round.
    fn on_loss(&mut self, now: Time, sent_at: Time);
    /// Handles persistent congestion: the path must start over (RFC 9002 §7.6).
    fn on_persistent_congestion(&mut self);
    /// Handles the end of an outage of length `hole`. `careful`: congestion may have caused the
    /// outage.
    fn on_blackout(&mut self, hole: Span, careful: bool);
    /// Resumes with the window and the slow start threshold of an earlier path. The window is at
    /// least that of a new path. BBR ignores this and measures the path.
    fn resume(&mut self, _window: u64, _threshold: u64) {}
    /// Reduces the window to what the path has proved to carry, after a resumed window was too large.
    fn retreat(&mut self, _window: u64) {}
    /// Undoes the last response, because the packets that counted as lost had arrived.
    fn on_spurious(&mut self);
    /// Raises the window that the last response left to at least this.
    fn raise_reduced_window(&mut self, _window: u64) {}
    /// Handles that all losses so far were random, so that the path's rate is not known yet.
    fn on_random_loss_only(&mut self) {}
    /// Handles that so many paths of the session share this path's bottleneck, itself included. Each grows by its part of
    /// what one connection would, and responds to the losses of all ([`Controller::on_shared_loss`]), so that together they
    /// take what one would. Coupled controllers do so anyway; BBR does not.
    fn set_share(&mut self, _paths: u32) {}
    /// Handles a lost packet of another path that shares the bottleneck, sent at `sent_at`.
    fn on_shared_loss(&mut self, _now: Time, _sent_at: Time) {}
    /// Handles a change of the path's datagram size.
    fn set_datagram(&mut self, bytes: u64);
    /// The number of bytes that may be in flight.
    fn window(&self) -> u64;
    fn in_slow_start(&self) -> bool;
    /// The window up to which slow start resumes on a path that was measured before. The pacing
    /// rate need not exceed what this window implies.
    fn resumed_window(&self) -> u64 {
        u64::MAX
    }
    /// Handles a packet that counts as lost, for controllers that use samples.
    fn on_packet_lost(&mut self, _packet: PacketFate) {}
    /// The rate in bytes per second for the pacer; `None` if the pacer derives it from the window.
    fn pacing_rate(&self) -> Option<u64> {
        None
    }
    /// Bytes delivered since the last loss, or between the two previous losses if that is more.
    fn interval(&self) -> u64 {
        0
    }
    /// Whether the controller uses delivery rate samples.
    fn wants_samples(&self) -> bool {
        false
    }
}

/// Window and threshold after an outage, from those before it (RFC 9959 §4: half of the measured
/// window, and slow start only up to that window).
pub(super) fn resumed(window: u64, threshold: u64, datagram: u64) -> (u64, u64) {
    let half = (window / 2).max(WINDOW_MIN_DATAGRAMS * datagram);
    (half, threshold.max(window))
}
