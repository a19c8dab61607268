//! Kernel TCP sockets: a receiver that keeps the sender's queue short (DRWA).
//!
//! A D2TP path announces its limit as PATH_LIMIT; a TCP receiver does so with its window. The
//! kernel reports its measurements and accepts a limit; [`Drwa`] computes it, as on paths:
//!
//! ```text
//!   TCP_INFO: bytes_received, rcv_rtt ──▶ Drwa ──▶ TCP_WINDOW_CLAMP ──▶ window ──▶ any sender
//! ```
//!
//! The sender needs no change, and no root rights are needed. The window never shrinks below what
//! was offered, so a lower clamp only affects new bytes. Without a limit the clamp has no effect,
//! and the kernel's own tuning decides.
//!
//! The owner must call [`WindowClamp::update`] from time to time; it returns when to call it again.
//!
//! [`multipath`] has sockets of the kernel's MPTCP. [`KernelBuffers`] is what the kernel may hold for a connection.
#![cfg_attr(not(target_os = "linux"), forbid(unsafe_code))]

mod buffers;
#[cfg(target_os = "linux")]
mod connection_list;
#[cfg(target_os = "linux")]
mod device_queues;
#[cfg(target_os = "linux")]
mod kernel_clamps;
pub mod multipath;
#[cfg(target_os = "linux")]
mod sockopt;

use std::io;
use std::os::fd::BorrowedFd;

pub use buffers::KernelBuffers;
use d2tp_session::{Drwa, DrwaLambda, Span, Time};
#[cfg(target_os = "linux")]
pub use device_queues::{DeviceQueues, QueueLook, ReachBarrier};

/// The lowest limit: four segments of the largest ordinary size, which TCP needs to detect a loss.
const FLOOR_BYTES: u64 = 4 * 1460;
/// How often to look at least and at most. Rounds are round trips; below the first figure none is
/// bloated.
const LOOK_MIN: Span = Span::from_millis(10);
const LOOK_MAX: Span = Span::from_millis(100);

/// The kernel's measurements of a TCP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpInfo {
    /// The time since payload arrived last.
    pub since_arrival: Span,
    /// The round trip as the receiver measures it; zero before the first measurement.
    pub rcv_rtt: Span,
    /// The shortest round trip of segments that this end sent, the handshake included; `None`
    /// before the first one.
    pub min_rtt: Option<Span>,
    /// Payload bytes received.
    pub bytes_received: u64,
    /// Whether neither end has closed the connection.
    pub open: bool,
}

/// The window clamp of one socket, which follows the arriving data.
#[derive(Debug)]
pub struct WindowClamp {
    drwa: Drwa,
    received: u64,
    rcv_rtt: Span,
}

impl WindowClamp {
    /// The controller of a socket that has just connected.
    pub fn new(lambda: DrwaLambda) -> Self {
        WindowClamp {
            drwa: Drwa::new(lambda, FLOOR_BYTES),
            received: 0,
            rcv_rtt: Span::ZERO,
        }
    }

    /// Reads the kernel's measurements of the socket, and sets its clamp. Returns when to call it
    /// again; `None` if nothing more will arrive.
    ///
    /// # Errors
    /// The socket is not a TCP socket.
    #[cfg(target_os = "linux")]
    pub fn update(&mut self, socket: BorrowedFd<'_>, now: Time) -> io::Result<Option<Span>> {
        let info = sockopt::info(socket)?;
        if let Some(limit) = self.observe(now, &info) {
            sockopt::set_window_clamp(socket, limit)?;
        }
        Ok(info.open.then(|| self.next_update_in()))
    }

    /// The controller of a socket that has carried data already, as these measurements say. It leaves the connection alone
    /// unless that is bloated.
    #[cfg(target_os = "linux")]
    pub(crate) fn joining(lambda: DrwaLambda, info: &TcpInfo) -> Self {
        WindowClamp {
            drwa: Drwa::new(lambda, FLOOR_BYTES).only_beyond(Drwa::BLOATED_WAIT),
            received: info.bytes_received,
            rcv_rtt: Span::ZERO,
        }
    }

    /// Takes in measurements of the socket. Returns the clamp that is to be set, if one is.
    #[cfg(target_os = "linux")]
    pub(crate) fn observe(&mut self, now: Time, info: &TcpInfo) -> Option<Option<u64>> {
        let before = self.drwa.limit();
        self.on_info(now, info);
        let limit = self.drwa.limit();
        // When the kernel grows the buffer it also moves the clamp, so the clamp is set each time.
        (limit.is_some() || limit != before).then_some(limit)
    }

    /// Does nothing on this system, which has no window clamp.
    ///
    /// # Errors
    /// There are none.
    #[cfg(not(target_os = "linux"))]
    pub fn update(&mut self, _socket: BorrowedFd<'_>, _now: Time) -> io::Result<Option<Span>> {
        Ok(None)
    }

    /// The largest window that is offered; `None`: the kernel decides.
    pub fn limit(&self) -> Option<u64> {
        self.drwa.limit()
    }

    /// The shortest round trip that is known.
    #[cfg(target_os = "linux")]
    pub(crate) fn rtt_min(&self) -> Option<Span> {
        self.drwa.rtt_min()
    }

    fn on_info(&mut self, now: Time, info: &TcpInfo) {
        self.drwa.on_bytes(info.bytes_received - self.received);
        if self.drwa.rtt_min().is_none()
            && let Some(min) = info.min_rtt
        {
            self.drwa.on_rtt_min(now, min);
        }
        // The round trip is measured by arriving data; without any, it is an old one.
        if info.bytes_received > self.received && info.rcv_rtt > Span::ZERO {
            self.drwa.on_rtt(now, info.rcv_rtt);
        }
        self.received = info.bytes_received;
        self.rcv_rtt = info.rcv_rtt;
    }

    /// The time until the next update: two round trips.
    pub(crate) fn next_update_in(&self) -> Span {
        self.rcv_rtt.divided(2).max(LOOK_MIN).min(LOOK_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates a second of 1 MB/s at this round trip, with updates when they are due.
    fn second(clamp: &mut WindowClamp, from_ms: u64, rtt_ms: u64) {
        let mut at = Span::from_millis(from_ms);
        let end = Span::from_millis(from_ms + 1_000);
        while at < end {
            let info = TcpInfo {
                since_arrival: Span::ZERO,
                rcv_rtt: Span::from_millis(rtt_ms),
                min_rtt: Some(Span::from_millis(40)),
                bytes_received: at.as_millis() * 1_000,
                open: true,
            };
            clamp.on_info(Time::ZERO + at, &info);
            at = at + clamp.next_update_in();
        }
    }

    #[test]
    fn the_clamp_is_three_times_what_the_path_takes_and_goes_when_the_queue_has_gone() {
        let mut clamp = WindowClamp::new(DrwaLambda::default());
        second(&mut clamp, 0, 45);
        assert_eq!(clamp.limit(), None);
        second(&mut clamp, 1_000, 150);
        second(&mut clamp, 2_000, 150);
        let limit = clamp.limit().unwrap();
        assert!(
            (80_000..=130_000).contains(&limit),
            "{limit}, not 3 x 40,000"
        );
        second(&mut clamp, 3_000, 45);
        assert_eq!(clamp.limit(), None);
    }

    #[test]
    fn who_is_looked_at_often_is_looked_at_within_bounds() {
        let clamp = |rcv_rtt| WindowClamp {
            rcv_rtt,
            ..WindowClamp::new(DrwaLambda::default())
        };
        assert_eq!(clamp(Span::ZERO).next_update_in(), LOOK_MIN);
        assert_eq!(
            clamp(Span::from_millis(80)).next_update_in(),
            Span::from_millis(40)
        );
        assert_eq!(clamp(Span::from_secs(2)).next_update_in(), LOOK_MAX);
    }
}
