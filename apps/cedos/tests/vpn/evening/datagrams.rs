//! Streams of datagrams: stand-ins for a call and for a game, and what arrived of them.
//!
//! ```text
//!  call: 50 packets a second of 172 bytes each way, as G.711 over RTP has     device ⇄ server
//!  game: 30 packets a second of 60 bytes, each of which the server echoes     device → server → device
//!  video: 16 Mb/s in packets of 1,200 bytes                                    server → device
//! ```

use std::net::{SocketAddr, UdpSocket};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use cedos_lab_emu::plan::ORIGIN_V4;

use super::lab_vpn::ScenarioClock;

const CALL_PORT: u16 = 4_000;
const CALL_EVERY: Duration = Duration::from_millis(20);
/// A header of RTP and 20 ms of G.711.
const CALL_BYTES: usize = 172;

const GAME_PORT: u16 = 4_001;
const GAME_EVERY: Duration = Duration::from_millis(33);
const GAME_BYTES: usize = 60;

const VIDEO_PORT: u16 = 4_002;
const VIDEO_EVERY: Duration = Duration::from_micros(600);
const VIDEO_BYTES: usize = 1_200;
/// How often who watches says so.
const WATCH_EVERY: Duration = Duration::from_millis(200);

/// How often a receiver checks whether the scenario is over.
const CHECK_EVERY: Duration = Duration::from_millis(100);

/// When packets left, and when they arrived, in seconds of the scenario.
#[derive(Clone, Debug, Default)]
pub struct PacketTimes {
    /// When each packet was sent, by its number.
    pub sent: Vec<f64>,
    /// When packets arrived, in this order, and their numbers.
    pub arrived: Vec<(f64, usize)>,
}

/// The longest time in which no packet arrived.
#[derive(Clone, Copy, Debug, Default)]
pub struct ArrivalGap {
    /// When the last packet before it arrived.
    pub from_s: f64,
    /// When the first packet after it arrived.
    pub to_s: f64,
}

impl ArrivalGap {
    /// The length of the gap.
    pub fn ms(self) -> f64 {
        (self.to_s - self.from_s) * 1e3
    }
}

impl PacketTimes {
    /// The longest gap that overlaps the time from `from_s` to `to_s`.
    pub fn longest_gap(&self, from_s: f64, to_s: f64) -> ArrivalGap {
        let mut last = 0.0;
        let mut longest = ArrivalGap::default();
        let arrivals = self.arrived.iter().map(|(at, _)| *at);
        // A stream that ended for good has a gap as well.
        for at in arrivals.chain([to_s]) {
            let gap = ArrivalGap {
                from_s: last,
                to_s: at,
            };
            if at >= from_s && last <= to_s && gap.ms() > longest.ms() {
                longest = gap;
            }
            last = f64::max(last, at);
        }
        longest
    }

    /// How long after `from_s` the first packet arrived.
    pub fn back_after(&self, from_s: f64) -> Option<f64> {
        let arrivals = self.arrived.iter().map(|(at, _)| at - from_s);
        arrivals.filter(|after| *after >= 0.0).reduce(f64::min)
    }

    /// How long packets that were sent in this time were under way, in milliseconds: the shortest first.
    pub fn delays_ms(&self, from_s: f64, to_s: f64) -> Vec<f64> {
        let delays = self.arrived.iter().filter_map(|(at, number)| {
            let sent = *self.sent.get(*number)?;
            (from_s..to_s).contains(&sent).then(|| (at - sent) * 1e3)
        });
        let mut delays: Vec<f64> = delays.collect();
        delays.sort_by(f64::total_cmp);
        delays
    }

    /// How many of the packets that were sent in this time never arrived.
    pub fn lost(&self, from_s: f64, to_s: f64) -> usize {
        let mut has_come = vec![false; self.sent.len()];
        for (_, number) in &self.arrived {
            if let Some(come) = has_come.get_mut(*number) {
                *come = true;
            }
        }
        let sent = self.sent.iter().zip(&has_come);
        sent.filter(|(at, come)| (from_s..to_s).contains(*at) && !**come)
            .count()
    }
}

/// The device's end of the call: what it sent, and what it heard of the server.
pub fn call_at_device(clock: &ScenarioClock) -> PacketTimes {
    let socket = UdpSocket::bind("0.0.0.0:0").expect("a port");
    let server = SocketAddr::from((ORIGIN_V4, CALL_PORT));
    stream(&socket, clock, CALL_EVERY, CALL_BYTES, Some(server))
}

/// The server's end of the call, which answers whom it heard last.
pub fn call_at_server(clock: &ScenarioClock) -> PacketTimes {
    let socket = UdpSocket::bind((ORIGIN_V4, CALL_PORT)).expect("a port");
    stream(&socket, clock, CALL_EVERY, CALL_BYTES, None)
}

/// The device's end of the game: what it sent, and which echoes came.
pub fn game_at_device(clock: &ScenarioClock) -> PacketTimes {
    let socket = UdpSocket::bind("0.0.0.0:0").expect("a port");
    let server = SocketAddr::from((ORIGIN_V4, GAME_PORT));
    stream(&socket, clock, GAME_EVERY, GAME_BYTES, Some(server))
}

/// Echoes the game's packets until the scenario is over.
pub fn game_at_server(clock: &ScenarioClock) {
    let socket = UdpSocket::bind((ORIGIN_V4, GAME_PORT)).expect("a port");
    let wait = Some(CHECK_EVERY);
    socket.set_read_timeout(wait).expect("a length of time");
    let mut packet = [0; 2_048];
    while !clock.is_over() {
        if let Ok((n, from)) = socket.recv_from(&mut packet) {
            let _ = socket.send_to(&packet[..n], from);
        }
    }
}

/// Sends a video to whom it heard last.
pub fn video_at_server(clock: &ScenarioClock) -> PacketTimes {
    let socket = UdpSocket::bind((ORIGIN_V4, VIDEO_PORT)).expect("a port");
    stream(&socket, clock, VIDEO_EVERY, VIDEO_BYTES, None)
}

/// Watches the video.
pub fn video_at_device(clock: &ScenarioClock) -> PacketTimes {
    let socket = UdpSocket::bind("0.0.0.0:0").expect("a port");
    let server = SocketAddr::from((ORIGIN_V4, VIDEO_PORT));
    stream(&socket, clock, WATCH_EVERY, GAME_BYTES, Some(server))
}

/// Sends numbered packets until the scenario is over, and notes what arrives. `to`: whom to send to; `None` for whom it
/// heard last.
fn stream(
    socket: &UdpSocket,
    clock: &ScenarioClock,
    every: Duration,
    bytes: usize,
    to: Option<SocketAddr>,
) -> PacketTimes {
    let wait = Some(CHECK_EVERY);
    socket.set_read_timeout(wait).expect("a length of time");
    let peer = Mutex::new(to);
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| {
            let mut arrived = Vec::new();
            let mut packet = [0; 2_048];
            while !clock.is_over() {
                // An error: nothing came, or an earlier packet was refused for want of a network.
                let Ok((n, from)) = socket.recv_from(&mut packet) else {
                    continue;
                };
                let Some(number) = packet[..n].first_chunk::<8>() else {
                    continue;
                };
                arrived.push((clock.now_s(), u64::from_be_bytes(*number) as usize));
                if to.is_none() {
                    *peer.lock().expect("no panic") = Some(from);
                }
            }
            arrived
        });
        let mut sent = Vec::new();
        let mut packet = vec![0; bytes];
        let mut due = Instant::now();
        while !clock.is_over() {
            let to = *peer.lock().expect("no panic");
            if let Some(to) = to {
                packet[..8].copy_from_slice(&(sent.len() as u64).to_be_bytes());
                sent.push(clock.now_s());
                // What cannot leave is lost.
                let _ = socket.send_to(&packet, to);
            }
            due += every;
            // sleep: the rate is the subject
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        }
        let arrived = receiving.join().expect("no panic");
        PacketTimes { sent, arrived }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_counts_if_it_overlaps_a_time_and_a_packet_is_lost_that_never_came() {
        let times = PacketTimes {
            sent: vec![0.0, 1.0, 2.0, 3.0, 4.0],
            arrived: vec![(0.1, 0), (1.1, 1), (3.5, 3), (3.6, 2)],
        };
        let gap = times.longest_gap(2.0, 3.0);
        assert_eq!((gap.from_s, gap.to_s), (1.1, 3.5));
        assert_eq!(times.longest_gap(0.0, 1.0).ms().round(), 1_000.0);
        // It ended with the fourth packet.
        assert_eq!(times.longest_gap(5.0, 9.6).ms().round(), 6_000.0);
        assert_eq!((times.lost(0.0, 4.0), times.lost(0.0, 9.0)), (0, 1));
        assert_eq!(times.back_after(2.0), Some(1.5));
        assert_eq!(times.back_after(4.0), None);
        let delays = times.delays_ms(1.0, 3.0);
        assert_eq!(
            delays.iter().map(|ms| ms.round()).collect::<Vec<_>>(),
            [100.0, 1_600.0]
        );
    }
}
