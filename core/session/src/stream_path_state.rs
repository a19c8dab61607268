//! What identifies a path over a reliable stream, and how it differs from one over datagrams. What a
//! session does with it is in [`crate::stream_path`].

use std::net::{Ipv6Addr, SocketAddr};

use d2tp_time::{Span, Time};
use d2tp_wire::DATAGRAM_MAX_BYTES;

use crate::congestion::{AckEvent, Controller, SiblingPaths, WINDOW_INITIAL_DATAGRAMS};

/// Bytes that a new stream path may pass to the driver before the driver reports room: one batch.
/// Larger: more bytes stay in queues when the path is abandoned.
pub const STREAM_ROOM_BYTES: u64 = 64 * 1024;
/// The shortest silence after which a stream path counts as silent. TCP waits at least 200 ms
/// before it retransmits a lost segment, and twice as long if that is lost too.
pub(crate) const STREAM_SILENCE_MIN: Span = Span::from_secs(1); // a guess
/// The port of all addresses that identify streams. Those of relays have port 0.
const STREAM_PORT: u16 = 1;
/// A pacing rate that never delays a packet, in bytes per second.
const UNPACED: u64 = 1 << 40;
/// The divisor by which the window of a stream path decreases towards the bytes in flight, for each
/// ACK.
const WINDOW_FALL: u64 = 16; // a guess: within a few round trips

/// The number of a connection that carries packets of paths. Each end numbers its own connections.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct StreamPathId(pub u64);

impl StreamPathId {
    /// The address that identifies the connection in paths. No host has it: packets to this block
    /// are discarded. // RFC 6666
    pub fn address(self) -> SocketAddr {
        let [a, b, c, d, e, f, g, h] = self.0.to_be_bytes();
        let low = [[a, b], [c, d], [e, f], [g, h]].map(u16::from_be_bytes);
        let ip = Ipv6Addr::new(0x100, 0, 0, 0, low[0], low[1], low[2], low[3]);
        SocketAddr::from((ip, STREAM_PORT))
    }

    /// The connection that an address identifies, if any.
    pub fn of(address: &SocketAddr) -> Option<StreamPathId> {
        let SocketAddr::V6(v6) = address else {
            return None;
        };
        let bytes = v6.ip().octets();
        let stands = v6.port() == STREAM_PORT && bytes[..8] == [1, 0, 0, 0, 0, 0, 0, 0];
        stands.then(|| {
            StreamPathId(u64::from_be_bytes(
                bytes[8..].try_into().expect("eight of sixteen"),
            ))
        })
    }
}

/// The congestion controller of a stream path, which has no effect: the underlying connection has
/// its own. Its window only shows how much the path usually holds, for schedulers that compare
/// paths.
#[derive(Debug)]
pub(crate) struct StreamWindow {
    window: u64,
    floor: u64,
}

impl StreamWindow {
    pub(crate) fn new() -> StreamWindow {
        let floor = WINDOW_INITIAL_DATAGRAMS * DATAGRAM_MAX_BYTES as u64;
        StreamWindow {
            window: floor,
            floor,
        }
    }
}

impl Controller for StreamWindow {
    fn on_ack(&mut self, acked: AckEvent, _: SiblingPaths<'_>) {
        let held = acked.in_flight + acked.bytes;
        let fall = self.window.saturating_sub(held) / WINDOW_FALL;
        self.window = held.max(self.window - fall).max(self.floor);
    }
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
    fn pacing_rate(&self) -> Option<u64> {
        Some(UNPACED)
    }
}

/// The additional state of a stream path.
#[derive(Debug)]
pub(crate) struct StreamPathState {
    /// Bytes that the driver still accepts.
    pub(crate) room: u64,
    /// Whether the connection has ended, so that nothing is sent there any more.
    pub(crate) closed: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::RelayId;

    #[test]
    fn an_address_stands_for_one_stream_and_for_no_relay() {
        for n in [0, 1, 77, u64::MAX] {
            let address = StreamPathId(n).address();
            assert_eq!(StreamPathId::of(&address), Some(StreamPathId(n)));
            assert_eq!(RelayId::of(&address), None);
            assert_eq!(StreamPathId::of(&RelayId(n.to_be_bytes()).address()), None);
        }
        for other in ["192.0.2.1:1", "[2001:db8::1]:1", "[100:0:0:1::1]:1"] {
            assert_eq!(StreamPathId::of(&other.parse().unwrap()), None, "{other}");
        }
    }

    #[test]
    fn the_window_of_a_stream_follows_what_is_in_flight() {
        let mut window = StreamWindow::new();
        let ack = |in_flight| AckEvent {
            now: Time::ZERO,
            bytes: 10_000,
            sent_at: Time::ZERO,
            smoothed: Span::from_millis(50),
            rtt: Span::from_millis(50),
            fresh: true,
            app_limited: false,
            largest: 0,
            next_number: 1,
            in_flight,
            sample: None,
        };
        window.on_ack(ack(990_000), &[]);
        assert_eq!(window.window(), 1_000_000);
        window.on_loss(Time::ZERO, Time::ZERO);
        window.on_persistent_congestion();
        assert_eq!(window.window(), 1_000_000);
        for _ in 0..200 {
            window.on_ack(ack(0), &[]);
        }
        assert!(window.window() < 100_000, "{}", window.window());
    }
}
