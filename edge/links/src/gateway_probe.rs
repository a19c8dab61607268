//! Probes the first hop of a link.
//!
//! ```text
//!  an unprivileged ICMP socket (ping_group_range) ─ refused ─▶ a raw one ─ refused ─▶ a UDP datagram to
//!  its discard port: "port unreachable" counts as an answer
//! ```
//!
//! Two packets are sent, half of the waiting time apart, because one may be lost. A gateway may
//! never answer any of these, so its silence means something only if it has answered before.

use std::io::{self, ErrorKind};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

use crate::link::Link;

/// The discard port (RFC 863).
const DISCARD: u16 = 9;
/// Header of an ICMP echo: type, code, checksum, identifier, number.
const ECHO_BYTES: usize = 8;
const ECHO_V4: (u8, u8) = (8, 0); // RFC 792: request, reply
const ECHO_V6: (u8, u8) = (128, 129); // RFC 4443 §4

/// The gateway of a link, and the source address for probes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GatewayTarget {
    device: String,
    index: u32,
    local: IpAddr,
    gateway: IpAddr,
}

/// The kind of packet that a probe sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GatewayProbeMethod {
    Echo,
    /// An echo by a raw socket, which receives IPv4 headers, and other programs' answers.
    RawEcho,
    Discard,
}

impl GatewayTarget {
    /// The target on the preferred route of a link, if it has a gateway and we have an address of its
    /// family.
    pub(crate) fn of(link: &Link) -> Option<GatewayTarget> {
        let asked = |gateway: IpAddr| {
            let local = link.source_for(gateway)?;
            Some(GatewayTarget {
                device: link.name.clone(),
                index: link.index,
                local,
                gateway,
            })
        };
        link.routes.iter().find_map(|route| asked(route.gateway?))
    }

    fn at(&self, port: u16) -> SocketAddr {
        match self.gateway {
            IpAddr::V6(ip) if self.is_link_local() => {
                SocketAddrV6::new(ip, port, 0, self.index).into()
            }
            ip => SocketAddr::new(ip, port),
        }
    }

    fn is_link_local(&self) -> bool {
        matches!(self.gateway, IpAddr::V6(ip) if ip.is_unicast_link_local())
    }

    fn socket(&self, question: GatewayProbeMethod) -> io::Result<Socket> {
        let v6 = self.gateway.is_ipv6();
        let domain = if v6 { Domain::IPV6 } else { Domain::IPV4 };
        let icmp = if v6 {
            Protocol::ICMPV6
        } else {
            Protocol::ICMPV4
        };
        let socket = match question {
            GatewayProbeMethod::Echo => Socket::new(domain, Type::DGRAM, Some(icmp))?,
            GatewayProbeMethod::RawEcho => Socket::new(domain, Type::RAW, Some(icmp))?,
            GatewayProbeMethod::Discard => Socket::new(domain, Type::DGRAM, Some(Protocol::UDP))?,
        };
        socket.bind_device(Some(self.device.as_bytes()))?;
        // For a link-local address the kernel knows the sender's.
        if !self.is_link_local() {
            socket.bind(&SocketAddr::new(self.local, 0).into())?;
        }
        // A connected socket receives only its gateway's errors.
        let port = if question == GatewayProbeMethod::Discard {
            DISCARD
        } else {
            0
        };
        socket.connect(&self.at(port).into())?;
        Ok(socket)
    }

    fn message(&self, question: GatewayProbeMethod, number: u16) -> Vec<u8> {
        if question == GatewayProbeMethod::Discard {
            return vec![0];
        }
        let (request, _) = self.kinds();
        let mut echo = [request, 0, 0, 0, 0, 0, 0, 0];
        // Unprivileged ICMP sockets get an identifier from the kernel.
        echo[4..6].copy_from_slice(&identifier().to_be_bytes());
        echo[6..8].copy_from_slice(&number.to_be_bytes());
        let sum = checksum(&echo).to_be_bytes();
        echo[2..4].copy_from_slice(&sum);
        echo.to_vec()
    }

    fn kinds(&self) -> (u8, u8) {
        if self.gateway.is_ipv6() {
            ECHO_V6
        } else {
            ECHO_V4
        }
    }

    /// Whether a received packet answers this probe.
    fn is_answer(&self, question: GatewayProbeMethod, came: &[u8]) -> bool {
        let echo = match (question, self.gateway) {
            (GatewayProbeMethod::Discard, _) => return true,
            (GatewayProbeMethod::RawEcho, IpAddr::V4(_)) => {
                let header = came.first().map_or(0, |first| usize::from(first & 15) * 4);
                came.get(header..).unwrap_or(&[])
            }
            _ => came,
        };
        let (_, reply) = self.kinds();
        echo.len() >= ECHO_BYTES
            && echo[0] == reply
            && (question == GatewayProbeMethod::Echo || echo[4..6] == identifier().to_be_bytes())
    }
}

/// The identifier of our raw echoes.
fn identifier() -> u16 {
    std::process::id() as u16
}

/// The Internet checksum (RFC 1071).
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes
        .chunks(2)
        .map(|w| u32::from(u16::from_be_bytes([w[0], w.get(1).copied().unwrap_or(0)])));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Whether the gateway answers; `None` if it cannot be probed. It waits for at most `patience`.
pub(crate) fn probe_gateway(hop: &GatewayTarget, patience: Duration) -> Option<bool> {
    for question in [
        GatewayProbeMethod::Echo,
        GatewayProbeMethod::RawEcho,
        GatewayProbeMethod::Discard,
    ] {
        match probe_with(hop, question, patience) {
            Ok(answered) => return Some(answered),
            Err(error) => {
                let gateway = hop.gateway;
                tracing::trace!(%gateway, ?question, %error, "a first hop cannot be asked so");
            }
        }
    }
    None
}

fn probe_with(
    hop: &GatewayTarget,
    question: GatewayProbeMethod,
    patience: Duration,
) -> io::Result<bool> {
    let socket = match hop.socket(question) {
        Ok(socket) => socket,
        Err(error) if is_unreachable(&error) => return Ok(false),
        Err(error) => return Err(error),
    };
    for number in 0..2 {
        let until = Instant::now() + patience / 2;
        match socket.send(&hop.message(question, number)) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => return Ok(true),
            Err(error) if is_unreachable(&error) => {}
            Err(error) => return Err(error),
        }
        if await_answer(hop, question, &socket, until)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn await_answer(
    hop: &GatewayTarget,
    question: GatewayProbeMethod,
    socket: &Socket,
    until: Instant,
) -> io::Result<bool> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        socket.set_read_timeout(Some(left))?;
        let mut came = [MaybeUninit::new(0u8); 128];
        match socket.recv(&mut came) {
            Ok(n) => {
                // SAFETY: these bytes were initialized by the receive call.
                let came = came[..n].iter().map(|byte| unsafe { byte.assume_init() });
                if hop.is_answer(question, &came.collect::<Vec<u8>>()) {
                    return Ok(true);
                }
            }
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => return Ok(true),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Ok(false);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // There is no answer at the link layer.
            Err(error) if is_unreachable(&error) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Whether the error shows that the destination is unreachable.
fn is_unreachable(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable | ErrorKind::NetworkDown
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loopback(gateway: &str) -> GatewayTarget {
        GatewayTarget {
            device: "lo".into(),
            index: 1,
            local: gateway.parse().expect("address"),
            gateway: gateway.parse().expect("address"),
        }
    }

    #[test]
    fn an_echo_sums_up() {
        for gateway in ["192.0.2.1", "2001:db8::1"] {
            let echo = loopback(gateway).message(GatewayProbeMethod::RawEcho, 0x1234);
            assert_eq!(echo.len(), ECHO_BYTES);
            assert_eq!(checksum(&echo), 0);
            assert_eq!(echo[6..], [0x12, 0x34]);
        }
    }

    #[test]
    fn only_a_reply_to_us_is_an_answer() {
        let hop = loopback("192.0.2.1");
        let mut raw = vec![0x45; 20];
        raw.extend(hop.message(GatewayProbeMethod::RawEcho, 0));
        assert!(
            !hop.is_answer(GatewayProbeMethod::RawEcho, &raw),
            "our own question"
        );
        raw[20] = 0;
        assert!(hop.is_answer(GatewayProbeMethod::RawEcho, &raw));
        assert!(!hop.is_answer(GatewayProbeMethod::RawEcho, &raw[..27]));
        raw[24] ^= 1;
        assert!(
            !hop.is_answer(GatewayProbeMethod::RawEcho, &raw),
            "another program's"
        );
        assert!(!hop.is_answer(GatewayProbeMethod::RawEcho, &[]));
    }

    #[test]
    fn loopback_answers_however_it_is_asked() {
        let hop = loopback("127.0.0.1");
        assert_eq!(probe_gateway(&hop, Duration::from_secs(5)), Some(true));
        let by_port = probe_with(&hop, GatewayProbeMethod::Discard, Duration::from_secs(5));
        assert!(by_port.is_ok_and(|answered| answered));
    }

    #[test]
    fn the_gateway_asked_is_that_of_the_best_route_with_an_address_of_ours() {
        let mut link = crate::link::tests::wifi();
        assert_eq!(
            GatewayTarget::of(&link).map(|hop| hop.gateway),
            link.routes[0].gateway
        );
        let v6 = crate::link::DefaultRoute {
            metric: 1,
            ipv6: true,
            gateway: Some("fe80::1".parse().expect("address")),
            table: 254,
        };
        link.routes.insert(0, v6);
        let gateway = GatewayTarget::of(&link).map(|hop| hop.gateway);
        assert_eq!(
            gateway, link.routes[1].gateway,
            "no IPv6 address to ask from"
        );
        link.routes.truncate(1);
        assert_eq!(GatewayTarget::of(&link), None);
    }
}
