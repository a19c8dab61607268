//! Congestion control: how many bytes a path may have in flight.
//!
//! A controller is a trait with few methods. It sees the events of its own path and, through
//! [`SiblingPaths`], the state of the session's other paths, which coupled controllers need.

mod bbr;
mod controller;
mod coupled;
mod cubic;
mod hystart;
mod known_rate;
mod newreno;
#[cfg(test)]
pub(crate) mod path_model;

pub(crate) use controller::{
    AckEvent, Controller, SiblingPath, SiblingPaths, WINDOW_INITIAL_DATAGRAMS,
};
use controller::{WINDOW_MIN_DATAGRAMS, resumed};
use coupled::{Coupled, CouplingMethod};
pub(crate) use known_rate::KnownRate;

/// The congestion controller of new paths.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CongestionKind {
    /// CUBIC (RFC 9438) with HyStart++ (RFC 9406).
    #[default]
    Cubic,
    /// NewReno as in RFC 9002 §7.
    NewReno,
    /// BBR version 3 (draft-ietf-ccwg-bbr-04), which follows the delivery rate instead of losses.
    Bbr,
    /// LIA (RFC 6356): paths that share a bottleneck together take the share of one connection.
    Lia,
    /// OLIA: like LIA, but leaves congested paths sooner.
    Olia,
    /// BALIA: between LIA and OLIA, and faster to follow changes.
    Balia,
}

impl CongestionKind {
    /// Every congestion controller.
    pub const ALL: [CongestionKind; 6] = [
        CongestionKind::Cubic,
        CongestionKind::NewReno,
        CongestionKind::Bbr,
        CongestionKind::Lia,
        CongestionKind::Olia,
        CongestionKind::Balia,
    ];

    /// The name of the controller on a command line, such as `cubic`.
    pub fn as_str(self) -> &'static str {
        match self {
            CongestionKind::Cubic => "cubic",
            CongestionKind::NewReno => "new-reno",
            CongestionKind::Bbr => "bbr",
            CongestionKind::Lia => "lia",
            CongestionKind::Olia => "olia",
            CongestionKind::Balia => "balia",
        }
    }
}

pub(crate) fn controller(kind: CongestionKind, datagram: u64) -> Box<dyn Controller> {
    match kind {
        CongestionKind::Cubic => Box::new(cubic::Cubic::new(datagram)),
        CongestionKind::NewReno => Box::new(newreno::NewReno::new(datagram)),
        CongestionKind::Bbr => Box::new(bbr::Bbr::new(datagram)),
        CongestionKind::Lia => Box::new(Coupled::new(CouplingMethod::Lia, datagram)),
        CongestionKind::Olia => Box::new(Coupled::new(CouplingMethod::Olia, datagram)),
        CongestionKind::Balia => Box::new(Coupled::new(CouplingMethod::Balia, datagram)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // R-CC-3
    #[test]
    fn a_window_in_doubt_is_never_less_than_a_new_paths() {
        use CongestionKind::{Balia, Cubic, Lia, NewReno, Olia};
        for kind in [Cubic, NewReno, Lia, Olia, Balia] {
            let mut controller = controller(kind, 1_200);
            // The packet that is acknowledged first may be a PING, with nothing else in flight.
            controller.resume(40, 600_000);
            assert_eq!(controller.window(), 12_000, "{kind:?}");
            controller.resume(300_000, 600_000);
            assert_eq!(controller.window(), 300_000, "{kind:?}");
        }
    }
}
