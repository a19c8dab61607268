//! Packet tunnels whose client asks the proxy's own address for answers, as fast as it can, and lets them lie.
//!
//! ```text
//!  CONNECT-IP ─▶ 200, Tunnel-Address, Tunnel-Gateway     then echo requests in datagrams ─▶ TUN ─▶ echoes ─▶ datagrams
//! ```

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use bytes::Bytes;
use d2tp_session::{EndpointConfig, FlowId, FlowOptions, ReadOutcome, Session, SessionEvent, Span};

use super::attack_context::{AttackContext, AttackTally, FIRST};
use crate::handshake_hosts::{HandshakeHosts, key_of};

/// The context of datagrams that are packets: "ip" in ASCII (docs/vpn.md).
const PACKET_CONTEXT: u64 = 0x6970;
/// Sessions of each key. A later tunnel of a client takes the place of an earlier one.
const SESSIONS: u64 = 4;
/// The size of a packet, which one datagram holds.
const PACKET_BYTES: usize = 1_100;
/// Datagrams that wait in a session at once.
const WAITING: usize = 16;
/// After this time the client receives no more, and after as long again begins anew.
const DEAF_AFTER: Duration = Duration::from_secs(2);

/// A session with its tunnel, once that is open.
struct AttackTunnel {
    place: usize,
    flow: Option<FlowId>,
    head: Vec<u8>,
    packet: Option<Bytes>,
}

/// Opens tunnels and floods them until the time is over.
pub fn packet_tunnels(context: &AttackContext) -> Result<AttackTally> {
    let mut tally = AttackTally::default();
    let mut round = 0;
    while Instant::now() < context.until {
        flood_tunnels(context, round, &mut tally)?;
        round += 1;
    }
    ensure!(tally.sessions > 0, "no hostile client got in");
    ensure!(tally.datagrams > 0, "the proxy opened no tunnel");
    Ok(tally)
}

fn flood_tunnels(context: &AttackContext, round: u64, tally: &mut AttackTally) -> Result<()> {
    let config = EndpointConfig::default();
    let mut crowd = HandshakeHosts::with_config(context.proxy, context.proxy_key, 4, config)?;
    let mut told = Vec::new();
    let mut tunnels: Vec<AttackTunnel> = Vec::new();
    for number in 0..SESSIONS * context.keys {
        let key = key_of(FIRST + number % context.keys);
        let mut flow = None;
        let instance = round * SESSIONS * context.keys + number;
        let place = crowd.begin(instance, key, |session| flow = ask(session));
        tunnels.push(AttackTunnel {
            place,
            flow,
            head: Vec::new(),
            packet: None,
        });
    }
    let deaf_at = Instant::now() + DEAF_AFTER;
    while Instant::now() < context.until.min(deaf_at) {
        crowd.turn(Duration::from_millis(1), &mut told)?;
        for (_, event) in told.drain(..) {
            tally.sessions += u64::from(matches!(event, SessionEvent::Established { .. }));
        }
        let now = crowd.now();
        for tunnel in &mut tunnels {
            let Some(host) = crowd.host(tunnel.place) else {
                continue;
            };
            let sent = host.with(|session| {
                if tunnel.packet.is_none() {
                    tunnel.read_head(session);
                    tally.flows += u64::from(tunnel.packet.is_some());
                }
                let Some(packet) = &tunnel.packet else {
                    return 0;
                };
                let room = WAITING.saturating_sub(session.datagrams_waiting());
                for _ in 0..room {
                    let expires = now + Span::from_millis(100);
                    session.send_datagram(PACKET_CONTEXT, packet.clone(), expires);
                }
                room as u64
            });
            tally.datagrams += sent.unwrap_or(0);
            crowd.pump(tunnel.place, now);
        }
    }
    // The proxy still has answers, and nobody acknowledges them.
    std::thread::sleep(DEAF_AFTER.min(context.until.saturating_duration_since(Instant::now())));
    Ok(())
}

fn ask(session: &mut Session) -> Option<FlowId> {
    let head = b"CONNECT-IP * HTTP/1.1\r\nHost: d2prox\r\n\r\n";
    let flow = session.open(FlowOptions::default()).ok()?;
    session.write(flow, Bytes::from_static(head)).ok()?;
    Some(flow)
}

impl AttackTunnel {
    /// Reads the answer; when it is whole, the packet that the tunnel sends is known.
    fn read_head(&mut self, session: &mut Session) {
        let Some(flow) = self.flow else {
            return;
        };
        while let Ok(ReadOutcome::Chunk(chunk)) = session.read(flow, usize::MAX) {
            self.head.extend_from_slice(&chunk);
        }
        let text = String::from_utf8_lossy(&self.head);
        if !text.ends_with("\r\n\r\n") {
            return;
        }
        let address = |name: &str| -> Option<Ipv4Addr> {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.split(',').find_map(|text| text.trim().parse().ok())
        };
        let ends = address("tunnel-address:").zip(address("tunnel-gateway:"));
        self.packet = ends.map(|(from, to)| echo_request(from, to));
    }
}

/// An echo request of ICMP in IPv4.
fn echo_request(from: Ipv4Addr, to: Ipv4Addr) -> Bytes {
    let mut packet = vec![0; PACKET_BYTES];
    packet[0] = 0x45;
    packet[2..4].copy_from_slice(&(PACKET_BYTES as u16).to_be_bytes());
    packet[8..10].copy_from_slice(&[64, 1]);
    packet[12..16].copy_from_slice(&from.octets());
    packet[16..20].copy_from_slice(&to.octets());
    let sum = checksum(&packet[..20]);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet[20] = 8;
    let sum = checksum(&packet[20..]);
    packet[22..24].copy_from_slice(&sum.to_be_bytes());
    packet.into()
}

/// The checksum of the Internet (RFC 1071).
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_of_a_packet_with_its_checksum_is_zero() {
        let packet = echo_request([10, 83, 0, 2].into(), [10, 83, 0, 1].into());
        assert_eq!(checksum(&packet[..20]), 0);
        assert_eq!(checksum(&packet[20..]), 0);
    }
}
