//! Paths over serial lines: point-to-point links of a known, low rate (R-SERIAL-1).
//!
//! ```text
//!  device ── serial line, its rate in the path's address ── bridge ── UDP ── server
//! ```
//!
//! A device knows the rate of its line, so it does not search for it. Its window and the limit that it
//! announces hold about a second of the line; datagrams take half a second at most, and nothing is padded.
//! The server needs to know nothing: to it, the path is one over UDP whose peer announces a small limit.

use std::net::{Ipv6Addr, SocketAddr};

use d2tp_time::{Span, Time};
use d2tp_wire::{DATAGRAM_FIRST_BYTES, VARINT_MAX};

use crate::config::EndpointConfig;
use crate::congestion::{AckEvent, Controller, SiblingPaths};
use crate::mtu::MtuDiscovery;
use crate::path::SessionPath;
use crate::path_limit::LIMIT_DATAGRAMS_MIN;
use crate::rtt::RttEstimator;

/// The port of all addresses that identify serial lines.
const SERIAL_PORT: u16 = 2;
/// The smallest datagram of a path over a serial line: a challenge and its answer, and some content.
pub(crate) const SERIAL_DATAGRAM_MIN: u64 = 160; // a guess
/// Below this size a packet is padded even on a serial line: a server answers an address that is not proved
/// with no more than it received, and its answer has a challenge of its own.
pub(crate) const SERIAL_PADDED_BYTES: usize = 96; // CHG, RSP, PATH_STATUS and ACK in one packet
/// The size of a SYN for which the intervals between SYNs allow, and of its answer.
const SYN_BYTES_USUAL: u64 = 300;

/// The number of a serial line, and its rate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SerialPathId {
    /// The number, which each end chooses for itself.
    pub number: u32,
    /// Bytes that the line carries in a second.
    pub bytes_per_second: u32,
}

impl SerialPathId {
    /// The address that identifies the line in paths. No host has it: packets to this block are
    /// discarded. // RFC 6666
    pub fn address(self) -> SocketAddr {
        let halves = |n: u32| ((n >> 16) as u16, n as u16);
        let (rate, number) = (halves(self.bytes_per_second), halves(self.number));
        let ip = Ipv6Addr::new(0x100, 0, 0, 0, rate.0, rate.1, number.0, number.1);
        SocketAddr::from((ip, SERIAL_PORT))
    }

    /// The line that an address identifies, if any.
    pub fn of(address: &SocketAddr) -> Option<SerialPathId> {
        let SocketAddr::V6(v6) = address else {
            return None;
        };
        let [0x100, 0, 0, 0, rate_high, rate_low, high, low] = v6.ip().segments() else {
            return None;
        };
        let whole = |high: u16, low: u16| u32::from(high) << 16 | u32::from(low);
        (v6.port() == SERIAL_PORT).then_some(SerialPathId {
            number: whole(high, low),
            bytes_per_second: whole(rate_high, rate_low),
        })
    }

    fn rate(self) -> u64 {
        u64::from(self.bytes_per_second).max(1)
    }

    /// How long the line takes for some bytes.
    pub(crate) fn time_of(self, bytes: u64) -> Span {
        Span::from_micros(bytes * 1_000_000 / self.rate())
    }

    /// R-SERIAL-2: the size of datagrams: half a second of the line.
    pub(crate) fn datagram(self) -> u64 {
        (self.rate() / 2).clamp(SERIAL_DATAGRAM_MIN, DATAGRAM_FIRST_BYTES as u64)
    }

    /// R-SERIAL-2: how many bytes may be in flight in each direction: a second of the line, and four
    /// datagrams at least.
    pub(crate) fn window(self) -> u64 {
        self.rate().max(LIMIT_DATAGRAMS_MIN * self.datagram())
    }

    /// R-SERIAL-3: how much longer than on other links to wait for the answer to a SYN.
    pub(crate) fn handshake_time(self) -> Span {
        self.time_of(3 * SYN_BYTES_USUAL)
    }
}

/// The size of the datagrams that a peer's limit on the bytes in flight permits (R-SERIAL-4).
pub(crate) fn datagram_within(limit: u64) -> u64 {
    (limit / LIMIT_DATAGRAMS_MIN).max(SERIAL_DATAGRAM_MIN)
}

/// The congestion controller of a path over a serial line: the window is what the line holds.
#[derive(Debug)]
pub(crate) struct SerialWindow {
    window: u64,
}

impl Controller for SerialWindow {
    fn on_ack(&mut self, _: AckEvent, _: SiblingPaths<'_>) {}
    fn on_loss(&mut self, _: Time, _: Time) {}
    fn on_persistent_congestion(&mut self) {}
    fn on_blackout(&mut self, _: Span, _: bool) {}
    fn on_spurious(&mut self) {}
    fn set_datagram(&mut self, _: u64) {}
    fn window(&self) -> u64 {
        self.window
    }
    fn in_slow_start(&self) -> bool {
        false
    }
}

impl SessionPath {
    /// The serial line that the path uses, if it does.
    pub(crate) fn serial(&self) -> Option<SerialPathId> {
        SerialPathId::of(&self.addresses.remote)
    }

    /// R-SERIAL-2: sets up a path over a serial line.
    pub(crate) fn set_serial_line(&mut self, config: &EndpointConfig, line: SerialPathId) {
        self.mtu = MtuDiscovery::fixed(line.datagram() as u16);
        self.recovery.controller = Box::new(SerialWindow {
            window: line.window(),
        });
        self.recovery.is_narrow = self.mtu.is_small();
        if !self.recovery.rtt.is_measured() {
            // R-SERIAL-3
            let both_ways = line.time_of(2 * line.datagram());
            self.recovery.rtt = RttEstimator::new(config.rtt_initial + both_ways);
        }
        self.set_app_limit(line.window());
    }

    /// The size to which packets of a device are padded that may be the first from their address.
    pub(crate) fn first_packet_bytes(&self) -> usize {
        match self.serial() {
            Some(_) => SERIAL_PADDED_BYTES,
            None => DATAGRAM_FIRST_BYTES,
        }
    }

    /// R-SERIAL-4: applies the peer's limit to the size of datagrams: four of them fit into it.
    pub(crate) fn fit_datagrams_to_limit(&mut self) {
        if self.stream.is_some() || self.serial().is_some() {
            return;
        }
        let size = datagram_within(self.limit().unwrap_or(VARINT_MAX));
        let small = (size < DATAGRAM_FIRST_BYTES as u64).then_some(size as u16);
        if !self.mtu.set_limit(small) {
            return;
        }
        self.recovery.is_narrow = self.mtu.is_small();
        let datagram = self.mtu.current() as u64;
        self.recovery.controller.set_datagram(datagram);
    }
}

#[cfg(test)]
mod tests {
    use d2tp_wire::{CID_BYTES, Cid, DATAGRAM_MAX_BYTES, PathId};

    use super::*;
    use crate::link::{Addresses, LinkId};
    use crate::relay::RelayId;
    use crate::reserved_address::is_reserved_address;
    use crate::stream_path_state::StreamPathId;

    #[test]
    fn a_limit_stands_when_the_path_was_over_a_stream_meanwhile() {
        // R-SERIAL-4
        let addresses = Addresses {
            link: LinkId(0),
            local: None,
            remote: "192.0.2.1:2".parse().unwrap(),
        };
        let config = EndpointConfig::default();
        let cid = Cid([1; CID_BYTES]);
        let mut path = SessionPath::new(Time::ZERO, PathId(0), addresses, &config, cid);
        path.on_peer_limit(1, 1_920);
        for (remote, bytes) in [
            (addresses.remote, 480),
            (StreamPathId(3).address(), DATAGRAM_MAX_BYTES),
            (addresses.remote, 480),
        ] {
            path.addresses.remote = remote;
            path.set_carrier(&config);
            assert_eq!(
                (path.mtu.current(), path.mtu.probe(u64::MAX)),
                (bytes, None)
            );
        }
    }

    fn line(bytes_per_second: u32) -> SerialPathId {
        SerialPathId {
            number: 7,
            bytes_per_second,
        }
    }

    #[test]
    fn an_address_stands_for_one_line_and_for_nothing_else() {
        for rate in [5, 30, 960, 11_520, u32::MAX] {
            let address = line(rate).address();
            assert_eq!(SerialPathId::of(&address), Some(line(rate)));
            assert!(is_reserved_address(&address));
            assert_eq!(StreamPathId::of(&address), None);
            assert_eq!(RelayId::of(&address), None);
        }
        for other in [
            "192.0.2.1:2",
            "[2001:db8::1]:2",
            "[100:0:0:1::1]:2",
            "[100::1]:1",
        ] {
            assert_eq!(SerialPathId::of(&other.parse().unwrap()), None, "{other}");
        }
    }

    #[test]
    fn sizes_follow_the_rate_of_the_line() {
        // R-SERIAL-2
        let sizes = |rate| (line(rate).datagram(), line(rate).window());
        assert_eq!(sizes(30), (160, 640)); // 300 bit/s
        assert_eq!(sizes(960), (480, 1_920)); // 9.6 kb/s
        assert_eq!(sizes(11_520), (1_200, 11_520)); // 115.2 kb/s
        assert_eq!(datagram_within(640), 160);
        assert_eq!(datagram_within(1_920), 480);
        assert!(datagram_within(4_800) >= 1_200);
    }
}
