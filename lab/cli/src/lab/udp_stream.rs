//! `cedos lab udp-send` and `cedos lab udp-receive`: packets at a steady rate over plain UDP, and when they arrive.
//!
//! ```text
//!  number (8 bytes), zeros ─▶ … ─▶ bytes of new packets in each second of the wall clock
//! ```

use anyhow::{Context, ensure};
use cedos_terminal::print_stdout;
use clap::Args;
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::{heed_interrupts, is_interrupted};

/// The bytes of a packet's number.
const NUMBER_BYTES: usize = 8;
/// The largest payload of a packet.
const PAYLOAD_MAX: usize = 65_507;
/// How often a receiver checks whether it is to end.
const CHECK_EVERY: Duration = Duration::from_millis(100);
/// The most packets that are counted: a day of 1,000 a second.
const PACKETS_MAX: usize = 86_400_000;

/// Send packets at a steady rate, and print when as JSON.
#[derive(Debug, Args)]
pub struct UdpSendArgs {
    /// Host and port of the receiver.
    to: SocketAddr,
    /// Payload in kilobits per second.
    #[arg(long)]
    kbps: u32,
    /// Payload bytes of a packet.
    #[arg(long)]
    bytes: usize,
    #[arg(long)]
    seconds: u64,
}

/// Receive such packets until SIGTERM, and write what arrived as JSON.
#[derive(Debug, Args)]
pub struct UdpReceiveArgs {
    /// The address to receive at.
    at: SocketAddr,
    #[arg(long)]
    output: PathBuf,
}

/// What a sender did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UdpSent {
    /// Seconds since 1970 at its beginning.
    pub begun_s: u64,
    /// Its length in seconds.
    pub seconds: u64,
    /// Packets that it sent, or that the system refused.
    pub packets: u64,
}

/// What a receiver got.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UdpReceived {
    /// The first second since 1970 of `bytes`.
    pub first_s: u64,
    /// Payload bytes of packets that arrived for the first time, in each second.
    pub bytes: Vec<u64>,
    /// Packets that arrived, each counted once.
    pub packets: u64,
}

impl UdpReceived {
    fn count(&mut self, second: u64, bytes: usize) {
        if self.bytes.is_empty() {
            self.first_s = second;
        }
        // The clock may be set back by a little.
        let n = second.saturating_sub(self.first_s) as usize;
        if self.bytes.len() <= n {
            self.bytes.resize(n + 1, 0);
        }
        self.bytes[n] += bytes as u64;
        self.packets += 1;
    }

    /// The payload bytes that arrived in a second.
    pub fn in_second(&self, second: u64) -> u64 {
        let n = second.checked_sub(self.first_s);
        n.and_then(|n| self.bytes.get(n as usize).copied())
            .unwrap_or(0)
    }
}

fn unix_second() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// Carries out `cedos lab udp-send`.
///
/// # Errors
/// There is no socket, or a packet of this size is not possible.
pub fn send(args: &UdpSendArgs) -> anyhow::Result<ExitCode> {
    ensure!(
        (NUMBER_BYTES..=PAYLOAD_MAX).contains(&args.bytes) && args.kbps > 0,
        "a packet has {NUMBER_BYTES} to {PAYLOAD_MAX} bytes, and a stream a rate"
    );
    heed_interrupts()?;
    let any: SocketAddr = match args.to {
        SocketAddr::V4(_) => ([0, 0, 0, 0], 0).into(),
        SocketAddr::V6(_) => ([0_u16; 8], 0).into(),
    };
    let socket = UdpSocket::bind(any).context("no UDP socket")?;
    let every = Duration::from_secs_f64(args.bytes as f64 * 8e-3 / f64::from(args.kbps));
    let (begun, begun_s) = (Instant::now(), unix_second());
    let mut packet = vec![0; args.bytes];
    let mut number = 0_u64;
    while begun.elapsed() < Duration::from_secs(args.seconds) && !is_interrupted() {
        packet[..NUMBER_BYTES].copy_from_slice(&number.to_be_bytes());
        // A link that is down refuses, as a real sender sees it: the packet is lost.
        let _ = socket.send_to(&packet, args.to);
        number += 1;
        let due = begun + every.mul_f64(number as f64);
        // sleep: the rate is the subject
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    let sent = UdpSent {
        begun_s,
        seconds: begun.elapsed().as_secs(),
        packets: number,
    };
    print_stdout(&serde_json::to_string(&sent)?);
    Ok(ExitCode::SUCCESS)
}

/// Carries out `cedos lab udp-receive`.
///
/// # Errors
/// There is no socket, or the file cannot be written.
pub fn receive(args: &UdpReceiveArgs) -> anyhow::Result<ExitCode> {
    heed_interrupts()?;
    let socket = UdpSocket::bind(args.at).with_context(|| format!("no socket at {}", args.at))?;
    socket.set_read_timeout(Some(CHECK_EVERY))?;
    let mut received = UdpReceived::default();
    let mut seen: Vec<bool> = Vec::new();
    let mut packet = vec![0; PAYLOAD_MAX];
    while !is_interrupted() {
        let length = match socket.recv(&mut packet) {
            Ok(length) => length,
            Err(error)
                if [ErrorKind::WouldBlock, ErrorKind::Interrupted].contains(&error.kind()) =>
            {
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let number = packet[..length].first_chunk().copied();
        let Some(number) = number.map(u64::from_be_bytes).map(|n| n as usize) else {
            continue;
        };
        if number >= PACKETS_MAX {
            continue;
        }
        if seen.len() <= number {
            seen.resize(number + 1, false);
        }
        if !std::mem::replace(&mut seen[number], true) {
            received.count(unix_second(), length);
        }
    }
    std::fs::write(&args.output, serde_json::to_string(&received)?)
        .with_context(|| format!("cannot write {}", args.output.display()))?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_without_a_packet_have_no_bytes() {
        let mut received = UdpReceived::default();
        for (second, bytes) in [(100, 10), (100, 5), (103, 7)] {
            received.count(second, bytes);
        }
        let of = |second| received.in_second(second);
        assert_eq!([99, 100, 101, 103, 104].map(of), [0, 15, 0, 7, 0]);
        assert_eq!(received.packets, 3);
    }
}
