//! TCP segments on links: between the device, its NAT, a host of the network, and the proxy.
//!
//! ```text
//!  device 10.n.a.2:port ──▶ pipe ──▶ NAT ──▶ proxy, TCP port 443
//!                                     │ intercept: another host answers in its place
//!                                     ├ reset: both ends get an RST
//!                                     └ an HTTP proxy alone: TCP to its port
//! ```

use std::net::SocketAddr;

use cedos_lab_link::{LinkDirection, LinkReach, PushOutcome, TcpPassage, Time};
use d2tp_session::StreamPathId;

use super::{Access, NatPassage, PROXY_PORT, SimNetwork, SimPacket, headers_bytes};
use crate::stream_paths::{StreamHalf, StreamOpening, StreamRole};
use crate::tcp::{DATA_HEADER_BYTES, ModelSegment};

/// Bytes of the UDP header, which is part of [`headers_bytes`].
const UDP_HEADER_BYTES: usize = 8;

/// The port of a network's HTTP proxy, which the model has at the proxy's own address.
const HTTP_PROXY_PORT: u16 = 3128;

/// A TCP segment with its addresses.
#[derive(Clone, Debug)]
pub(super) struct SimSegment {
    from: SocketAddr,
    to: SocketAddr,
    segment: ModelSegment,
}

impl SimSegment {
    /// Makes the checksum wrong.
    pub(super) fn damage(&mut self) {
        self.segment.damaged = true;
    }

    /// The size of the IP packet in bytes.
    fn size(&self) -> u32 {
        (headers_bytes(self.from) - UDP_HEADER_BYTES + self.segment.size()) as u32
    }

    /// A reset in answer to this segment.
    fn refusal(&self, now: Time) -> SimSegment {
        SimSegment {
            from: self.to,
            to: self.from,
            segment: ModelSegment::reset(now),
        }
    }
}

impl SimNetwork {
    /// Begins to open a stream of the device over a link that is up.
    pub(crate) fn open_stream(&mut self, now: Time, number: usize, ticket: u64) {
        let port = self.new_port();
        let mut proxy = self.proxy_address(number);
        let link = &self.links[number];
        let local = SocketAddr::new(link.local.ip(), port);
        let opening = match link.pipes.reach() {
            LinkReach::HttpProxy => StreamOpening::ByHttpProxy,
            _ if self.has_http_proxy => StreamOpening::WithoutHttpProxy,
            _ => StreamOpening::Direct,
        };
        if opening == StreamOpening::ByHttpProxy {
            proxy.set_port(HTTP_PROXY_PORT);
        }
        let half = StreamHalf::open(now, opening, link.segment_bytes());
        self.streams.insert(half, number, (local, proxy), ticket);
    }

    /// Whether streams pass beyond the link's first hop and are accepted there.
    pub(super) fn passes_streams(&self, link: &Access) -> bool {
        let direct = link.pipes.reach().passes_tcp() && link.tcp == TcpPassage::Pass;
        self.accepts_streams && (direct || link.pipes.reach() == LinkReach::HttpProxy)
    }

    /// Sends everything that TCP has to send now.
    pub(crate) fn send_segments(&mut self, now: Time) {
        while let Some((stream, segment)) = self.streams.poll(now) {
            self.send_segment(now, stream, segment);
        }
    }

    fn send_segment(&mut self, now: Time, stream: StreamPathId, segment: ModelSegment) {
        let place = &self.streams.places[&stream];
        let (number, role) = (place.link, place.role);
        let (device, proxy) = (place.device, place.proxy);
        let (from, to) = match role {
            StreamRole::Device => (device, proxy),
            StreamRole::Proxy | StreamRole::Interceptor => (proxy, device),
        };
        let packet = SimSegment { from, to, segment };
        let outcome = match role {
            StreamRole::Device if !self.links[number].has(device) => return,
            StreamRole::Device => self.push_segment(now, number, LinkDirection::Up, packet),
            StreamRole::Interceptor => self.push_segment(now, number, LinkDirection::Down, packet),
            StreamRole::Proxy => self.send_segment_down(now, number, packet),
        };
        if outcome == PushOutcome::TooBig {
            // A router says so, and which size it forwards.
            let fits = self.links[number].segment_bytes();
            if let Some(place) = self.streams.places.get_mut(&stream) {
                place.half.tcp.on_too_big(fits);
            }
        }
    }

    fn push_segment(
        &mut self,
        now: Time,
        number: usize,
        way: LinkDirection,
        packet: SimSegment,
    ) -> PushOutcome {
        let size = packet.size();
        let packet = SimPacket::Segment(packet);
        match way {
            LinkDirection::Up => self.push_up(now, number, size, packet),
            LinkDirection::Down => self.links[number].pipes.push(way, now, size, packet),
        }
    }

    /// Sends a segment of the proxy through the network of a link.
    fn send_segment_down(&mut self, now: Time, number: usize, packet: SimSegment) -> PushOutcome {
        let link = &self.links[number];
        let Some(device) = link.inside(packet.to) else {
            return PushOutcome::Queued;
        };
        match link.tcp {
            _ if !link.passes_tcp_port(packet.from.port()) => PushOutcome::Queued,
            TcpPassage::Pass => {
                let packet = SimSegment {
                    to: device,
                    ..packet
                };
                self.push_segment(now, number, LinkDirection::Down, packet)
            }
            TcpPassage::Intercept | TcpPassage::Reset => {
                let seen = packet.to;
                self.reset_both(now, number, device, seen);
                PushOutcome::Queued
            }
        }
    }

    /// Resets a connection at both ends, as a host between them.
    fn reset_both(&mut self, now: Time, number: usize, device: SocketAddr, seen: SocketAddr) {
        if let Some(half) = self.streams.find(StreamRole::Proxy, seen) {
            half.tcp.on_segment(now, ModelSegment::reset(now));
        }
        let packet = SimSegment {
            from: self.proxy_address(number),
            to: device,
            segment: ModelSegment::reset(now),
        };
        self.push_segment(now, number, LinkDirection::Down, packet);
    }

    /// Handles a segment of the device that has passed a link's first hop.
    pub(super) fn on_segment_up(&mut self, now: Time, number: usize, packet: SimSegment) {
        let link = &mut self.links[number];
        let asked = packet.to;
        if !link.has(packet.from) || !link.passes_tcp_port(asked.port()) {
            return;
        }
        let fits = link.segment_bytes();
        let seen = link.tcp_seen_from(packet.from);
        let (role, device) = match link.tcp {
            TcpPassage::Reset => return self.reset_both(now, number, packet.from, seen),
            TcpPassage::Intercept => (StreamRole::Interceptor, packet.from),
            TcpPassage::Pass => (StreamRole::Proxy, seen),
        };
        let is_proxy = role == StreamRole::Proxy;
        if is_proxy && self.machines_off[1] {
            return;
        }
        let opens = packet.segment.syn.is_some() && packet.segment.ack.is_none();
        let answers = !is_proxy || self.accepts_streams;
        if opens && answers && self.streams.find(role, device).is_none() {
            let half = StreamHalf::answer(now, role, fits);
            self.streams.insert(half, number, (device, asked), 0);
        }
        match self.streams.find(role, device) {
            Some(half) => half.tcp.on_segment(now, packet.segment),
            None if packet.segment.rst || packet.segment.damaged => {}
            None if is_proxy => {
                let refusal = packet.refusal(now);
                self.push_segment(now, number, LinkDirection::Down, refusal);
            }
            None => self.reset_both(now, number, device, seen),
        }
    }

    /// Handles a segment that reached the device over a link.
    pub(super) fn on_segment_down(&mut self, now: Time, number: usize, packet: SimSegment) {
        if !self.links[number].has(packet.to) || self.machines_off[0] {
            return;
        }
        self.note_passage(now, number, LinkDirection::Down, packet.size());
        match self.streams.find(StreamRole::Device, packet.to) {
            Some(half) => half.tcp.on_segment(now, packet.segment),
            None if packet.segment.rst || packet.segment.damaged => {}
            None => {
                let refusal = packet.refusal(now);
                self.push_segment(now, number, LinkDirection::Up, refusal);
            }
        }
    }
}

impl Access {
    /// Whether TCP passes from and to this port of the proxy's host.
    fn passes_tcp_port(&self, port: u16) -> bool {
        match self.pipes.reach() {
            LinkReach::HttpProxy => port == HTTP_PROXY_PORT,
            reach => reach.passes_tcp() && port == PROXY_PORT,
        }
    }

    /// Whether the device has this address on the link.
    fn has(&self, address: SocketAddr) -> bool {
        self.up && self.local.ip() == address.ip()
    }

    /// Bytes of data that fit into a segment.
    fn segment_bytes(&self) -> usize {
        let profiles = [self.pipes.down().profile(), self.pipes.upward().profile()];
        let mtu = profiles[0].mtu_bytes.min(profiles[1].mtu_bytes) as usize;
        mtu - (headers_bytes(self.local) - UDP_HEADER_BYTES) - DATA_HEADER_BYTES
    }

    /// The device's address of a connection, as the proxy sees it.
    fn tcp_seen_from(&mut self, device: SocketAddr) -> SocketAddr {
        match self.way {
            NatPassage::Own => device,
            NatPassage::Nat(outer) | NatPassage::Nat64(outer) => {
                SocketAddr::from((outer, self.tcp_nat.outbound(device)))
            }
        }
    }

    /// The device's own address of a connection that the proxy sees from this one.
    fn inside(&self, seen: SocketAddr) -> Option<SocketAddr> {
        let device = match self.way {
            NatPassage::Own => seen,
            NatPassage::Nat(outer) | NatPassage::Nat64(outer) => {
                let is_ours = seen.ip() == outer;
                is_ours
                    .then(|| self.tcp_nat.inbound(seen.port()))
                    .flatten()?
            }
        };
        self.has(device).then_some(device)
    }
}
