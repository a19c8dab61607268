//! Tests whether a host supports D2TP, without knowing its key: every server answers a SYN of a
//! version that does not exist with VERSION (R-HS-10), at no cost.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use d2tp_wire::{CID_BYTES, DATAGRAM_FIRST_BYTES, PacketKind};
use tokio::net::UdpSocket;

/// The pauses after which the probe is sent again, because packets are lost. Each has an id of its own, so that an
/// answer that comes after the next was sent is counted from its own probe.
const REPEATED_AFTER: [Duration; 3] = [Duration::from_millis(250); 3]; // RFC 8305 §5
/// The version that no host supports: version numbers have five bits and begin at 1.
const NO_VERSION: u8 = 0x1f;

/// The result of a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VersionProbeAnswer {
    /// The host supports D2TP.
    Answered {
        /// The supported versions.
        versions: Vec<u8>,
        /// The time from the probe to the answer.
        round_trip: Duration,
    },
    /// The host, or a router, reports that the port is closed: the system's error.
    Rejected(io::ErrorKind),
    /// No answer came.
    Silent,
}

/// Asks the host at `address` for its versions of D2TP, and waits `patience` for the answer.
///
/// # Errors
/// The socket cannot be opened.
pub async fn probe_version(
    address: SocketAddr,
    patience: Duration,
) -> io::Result<VersionProbeAnswer> {
    let local: SocketAddr = match address.is_ipv4() {
        true => (Ipv4Addr::UNSPECIFIED, 0).into(),
        false => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    probe_version_from(UdpSocket::bind(local).await?, address, patience).await
}

/// Asks the host at `address` for its versions of D2TP from a socket that is used for nothing else.
///
/// # Errors
/// None: what the socket says is part of the answer.
pub(crate) async fn probe_version_from(
    socket: UdpSocket,
    address: SocketAddr,
    patience: Duration,
) -> io::Result<VersionProbeAnswer> {
    // Only a connected socket receives ICMP errors.
    if let Err(error) = socket.connect(address).await {
        return Ok(VersionProbeAnswer::Rejected(error.kind()));
    }
    let mut question = vec![0; DATAGRAM_FIRST_BYTES];
    question[0] = PacketKind::Syn.first_byte() & 0xe0 | NO_VERSION;
    let mut sent: Vec<([u8; CID_BYTES], Instant)> = Vec::new();
    let mut rejected = None;
    let until = Instant::now() + patience;
    let pauses = REPEATED_AFTER.into_iter().map(Some).chain([None]);
    for pause in pauses.take_while(|_| Instant::now() < until) {
        getrandom::fill(&mut question[1..=CID_BYTES]).expect("the system has randomness");
        let cid = question[1..=CID_BYTES].try_into().expect("a whole id");
        sent.push((cid, Instant::now()));
        if let Err(error) = socket.send(&question).await {
            rejected = Some(error.kind());
        }
        let left = until.saturating_duration_since(Instant::now());
        let left = pause.map_or(left, |pause| pause.min(left));
        match tokio::time::timeout(left, receive(&socket, &sent)).await {
            Ok(Ok((versions, round_trip))) => {
                return Ok(VersionProbeAnswer::Answered {
                    versions,
                    round_trip,
                });
            }
            // It may be about an earlier probe, and the next one may be answered.
            Ok(Err(error)) => rejected = Some(error.kind()),
            Err(_) => {}
        }
    }
    Ok(rejected.map_or(VersionProbeAnswer::Silent, VersionProbeAnswer::Rejected))
}

/// The versions in the next answer to one of the probes, and the time since that one was sent.
async fn receive(
    socket: &UdpSocket,
    sent: &[([u8; CID_BYTES], Instant)],
) -> io::Result<(Vec<u8>, Duration)> {
    let mut buffer = [0; 256];
    loop {
        let len = socket.recv(&mut buffer).await?;
        let Some((PacketKind::Version, _, theirs, versions)) = PacketKind::split(&buffer[..len])
        else {
            continue;
        };
        if let Some((_, at)) = sent.iter().find(|(cid, _)| theirs.0 == *cid) {
            return Ok((versions.to_vec(), at.elapsed()));
        }
    }
}

#[cfg(test)]
mod tests {
    use d2tp_wire::VERSION;

    use super::*;

    /// Answers probes after `delay` on loopback, the first `lost` of them never.
    async fn slow_host(delay: Duration, mut lost: u32) -> SocketAddr {
        let socket = std::sync::Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
        let at = socket.local_addr().unwrap();
        tokio::spawn(async move {
            let mut bytes = vec![0; 2_000];
            while let Ok((_, from)) = socket.recv_from(&mut bytes).await {
                if lost > 0 {
                    lost -= 1;
                    continue;
                }
                let mut answer = vec![PacketKind::Version.first_byte()];
                answer.extend_from_slice(&bytes[1..=CID_BYTES]);
                answer.push(VERSION);
                let socket = socket.clone();
                tokio::spawn(async move {
                    // sleep: the delay of the network is the subject
                    tokio::time::sleep(delay).await;
                    let _ = socket.send_to(&answer, from).await;
                });
            }
        });
        at
    }

    #[tokio::test]
    async fn a_round_trip_longer_than_the_repetition_is_counted_from_the_probe_that_is_answered() {
        for (delay_ms, lost) in [(280, 0), (280, 1), (1_200, 0)] {
            let delay = Duration::from_millis(delay_ms);
            let host = slow_host(delay, lost).await;
            let answer = probe_version(host, Duration::from_secs(20)).await;
            let Ok(VersionProbeAnswer::Answered { round_trip, .. }) = answer else {
                panic!("{answer:?}");
            };
            assert!(round_trip >= delay, "{round_trip:?} of {delay:?}");
        }
    }
}
