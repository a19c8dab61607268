//! Kernel TCP sockets: a receiver that keeps the sender's queue short (DRWA).
//!
//! What a D2TP path says as PATH_LIMIT a TCP receiver says as its window. The kernel tells what it
//! measured and takes a bound; the rule is [`Drwa`], the same as on paths:
//!
//! ```text
//!   TCP_INFO: bytes_received, rcv_rtt ──▶ Drwa ──▶ TCP_WINDOW_CLAMP ──▶ window ──▶ any sender
//! ```
//!
//! Nothing has to change at the sender, and nobody needs to be root. The window never shrinks below
//! what was offered, so a lower clamp only holds new bytes. Where there is no limit the clamp is out
//! of the way and the kernel's own tuning decides.
//!
//! Somebody has to look now and then: [`WindowClamp::update`] says when again.
//!
//! And sockets of the kernel's MPTCP: [`multipath`].
#![cfg_attr(not(target_os = "linux"), forbid(unsafe_code))]

pub mod multipath;
#[cfg(target_os = "linux")]
mod sockopt;

use std::io;
use std::os::fd::BorrowedFd;

use d2tp_session::{Drwa, DrwaLambda, Span, Time};

/// Four segments of the largest ordinary size: what TCP needs to notice a loss.
const FLOOR_BYTES: u64 = 4 * 1460;
/// How often to look at least and at most. Rounds are round trips; below the first figure none is
/// bloated.
const LOOK_MIN: Span = Span::from_millis(10);
const LOOK_MAX: Span = Span::from_millis(100);

/// What the kernel knows of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpInfo {
    /// The round trip as this end measures it by what it receives; zero before the first.
    pub rcv_rtt: Span,
    /// The shortest round trip of what this end sent, the handshake included; none before.
    pub min_rtt: Option<Span>,
    /// Payload bytes received.
    pub bytes_received: u64,
    /// Neither end has closed.
    pub open: bool,
}

/// The window clamp of one socket, moved by what arrives on it.
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

    /// Takes in what the kernel measured of the socket, and moves its clamp. When to come again;
    /// none: nothing more will arrive.
    ///
    /// # Errors
    /// The socket is none of TCP.
    #[cfg(target_os = "linux")]
    pub fn update(&mut self, socket: BorrowedFd<'_>, now: Time) -> io::Result<Option<Span>> {
        let info = sockopt::info(socket)?;
        let before = self.drwa.limit();
        self.on_info(now, &info);
        let limit = self.drwa.limit();
        // Where the kernel grows the buffer it moves the clamp along: said again each time.
        if limit.is_some() || limit != before {
            sockopt::set_window_clamp(socket, limit)?;
        }
        Ok(info.open.then(|| self.next_update_in()))
    }

    /// Other systems take no clamp.
    ///
    /// # Errors
    /// None.
    #[cfg(not(target_os = "linux"))]
    pub fn update(&mut self, _socket: BorrowedFd<'_>, _now: Time) -> io::Result<Option<Span>> {
        Ok(None)
    }

    /// The window that is offered at most; none: what the kernel sees fit.
    pub fn limit(&self) -> Option<u64> {
        self.drwa.limit()
    }

    fn on_info(&mut self, now: Time, info: &TcpInfo) {
        self.drwa.on_bytes(info.bytes_received - self.received);
        if self.drwa.rtt_min().is_none()
            && let Some(min) = info.min_rtt
        {
            self.drwa.on_rtt_min(now, min);
        }
        // Measured by arrivals: without any, it is the old one.
        if info.bytes_received > self.received && info.rcv_rtt > Span::ZERO {
            self.drwa.on_rtt(now, info.rcv_rtt);
        }
        self.received = info.bytes_received;
        self.rcv_rtt = info.rcv_rtt;
    }

    /// Twice a round trip.
    fn next_update_in(&self) -> Span {
        self.rcv_rtt.divided(2).max(LOOK_MIN).min(LOOK_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A second of 1 MB/s at this round trip, looked at as asked.
    fn second(clamp: &mut WindowClamp, from_ms: u64, rtt_ms: u64) {
        let mut at = Span::from_millis(from_ms);
        let end = Span::from_millis(from_ms + 1_000);
        while at < end {
            let info = TcpInfo {
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
