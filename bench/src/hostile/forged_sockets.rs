//! Datagrams from forged addresses: on loopback every address of 127.0.0.0/8 may be used.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::Result;

/// The number of source addresses.
const ADDRESSES: u8 = 64;
/// Datagrams between two readings of the clock.
const RUN: u64 = 32;
/// The most that is caught up with at once, as a part of a second: who was not scheduled sends less, not in bursts.
const CATCH_UP: u64 = 100;

/// Sockets on many addresses, which receive nothing.
pub struct ForgedSockets(Vec<UdpSocket>);

impl ForgedSockets {
    /// Opens the sockets.
    ///
    /// # Errors
    /// The system allows no more sockets.
    pub fn open() -> Result<ForgedSockets> {
        let open = |n: u8| {
            let socket = UdpSocket::bind((Ipv4Addr::new(127, 66, n, 7), 0))?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        };
        let sockets: std::io::Result<Vec<UdpSocket>> = (1..=ADDRESSES).map(open).collect();
        Ok(ForgedSockets(sockets?))
    }

    /// Sends these datagrams repeatedly, `rate` per second, until `until`. Returns the number sent.
    pub fn flood(&self, to: SocketAddr, datagrams: &[Vec<u8>], rate: u64, until: Instant) -> u64 {
        let begun = Instant::now();
        let (mut sent, mut left_out) = (0, 0);
        while Instant::now() < until {
            let due = (begun.elapsed().as_secs_f64() * rate as f64) as u64 - left_out;
            if sent >= due {
                std::thread::sleep(Duration::from_micros(200));
                continue;
            }
            left_out += (due - sent).saturating_sub(rate / CATCH_UP);
            for _ in 0..RUN.min(due - sent) {
                let socket = &self.0[(sent % self.0.len() as u64) as usize];
                let datagram = &datagrams[(sent % datagrams.len() as u64) as usize];
                // A full queue drops it, like a network.
                let _ = socket.send_to(datagram, to);
                sent += 1;
            }
        }
        sent
    }
}
