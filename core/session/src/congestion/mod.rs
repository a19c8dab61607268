//! Congestion control: how many bytes a path may have in flight.
//!
//! One trait of few methods. A controller sees its own path's events and, through
//! [`Siblings`], what the session's other paths are doing, which coupled methods need.

mod bbr;
#[cfg(test)]
mod course;
mod cubic;
mod hystart;
mod newreno;

use d2tp_time::{Span, Time};

use crate::delivery::{Fate, Sample};

/// Which method a session uses on new paths.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CongestionKind {
    /// CUBIC (RFC 9438) with HyStart++ (RFC 9406).
    #[default]
    Cubic,
    /// NewReno as in RFC 9002 §7.
    NewReno,
    /// BBR version 3 (draft-ietf-ccwg-bbr-04): by the rate delivered, not by loss.
    Bbr,
}

/// Bytes a path may always have in flight: two full datagrams (RFC 9002 §7.2).
pub(crate) const WINDOW_MIN_DATAGRAMS: u64 = 2;
/// Bytes a new path may have in flight: ten datagrams (RFC 9002 §7.2).
pub(crate) const WINDOW_INITIAL_DATAGRAMS: u64 = 10;

/// Acknowledged bytes, as a controller sees them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Acked {
    pub(crate) now: Time,
    pub(crate) bytes: u64,
    /// When the newest of the acknowledged packets was sent.
    pub(crate) sent_at: Time,
    /// The path's round trip, measured by this very ACK if `fresh`.
    pub(crate) rtt: Span,
    pub(crate) fresh: bool,
    /// The sender had less to send than it was allowed.
    pub(crate) app_limited: bool,
    /// Largest packet number acknowledged, and the next one to be sent.
    pub(crate) largest: u64,
    pub(crate) next_number: u64,
    /// Bytes still in flight.
    pub(crate) in_flight: u64,
    /// What the ACK tells of the path's rate, for a controller that wants to know.
    pub(crate) sample: Option<Sample>,
}

/// What the other paths of the session are doing: `(window, smoothed RTT)` each.
pub(crate) type Siblings<'a> = &'a [(u64, Span)];

/// A congestion controller of one path.
pub(crate) trait Controller: Send + std::fmt::Debug {
    fn on_ack(&mut self, acked: Acked, siblings: Siblings<'_>);
    /// Packets were lost, the newest of them sent at `sent_at`. At most one response per round.
    fn on_loss(&mut self, now: Time, sent_at: Time);
    /// Nothing came back for so long that the path must start over (RFC 9002 §7.6).
    fn on_persistent_congestion(&mut self);
    /// The last response was a mistake: what was taken for lost had arrived.
    fn on_spurious(&mut self);
    /// The path's datagram size changed.
    fn set_datagram(&mut self, bytes: u64);
    /// Bytes that may be in flight.
    fn window(&self) -> u64;
    fn in_slow_start(&self) -> bool;
    /// Each packet that counts as lost, if the controller wants samples.
    fn on_packet_lost(&mut self, _packet: Fate) {}
    /// Bytes per second the pacer is to keep to; none if the window says it.
    fn pacing_rate(&self) -> Option<u64> {
        None
    }
    /// Whether the path's rate is to be measured.
    fn wants_samples(&self) -> bool {
        false
    }
}

pub(crate) fn controller(kind: CongestionKind, datagram: u64) -> Box<dyn Controller> {
    match kind {
        CongestionKind::Cubic => Box::new(cubic::Cubic::new(datagram)),
        CongestionKind::NewReno => Box::new(newreno::NewReno::new(datagram)),
        CongestionKind::Bbr => Box::new(bbr::Bbr::new(datagram)),
    }
}
