//! How the kinds of hostile clients attack.
//!
//! Most kinds complete the handshake with an admitted key and use `d2tp-session` directly, so that
//! they can open flows and leave them unread; some send their own frames or datagrams.

use std::net::{Ipv4Addr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use d2tp_seal::SecretKey;
use d2tp_session::{
    Addresses, Admission, Endpoint, EndpointConfig, FlowId, FlowOptions, IncomingDatagram, LinkId,
    Session, SessionEvent, Time,
};
use d2tp_wire::{Cid, Frame, PacketKind};

use super::attack_context::{AttackContext, AttackTally, FIRST, STRANGERS, hostile_keys};
use super::cache_attack::{CacheAttack, attack_cache};
use super::compressed_bombs::compressed_bombs;
use super::enrolment_guests::enrolment_guests;
use super::forged_sockets::ForgedSockets;
use super::hostile_kind::HostileKind;
use super::http2_attack::{Http2Attack, attack_http2};
use super::packet_tunnels::packet_tunnels;
use super::quota_attack::be_at_every_quota;
use super::raw_client::{RawClient, syn};
use super::slow_origins::slow_origins;
use super::stream_strangers::{StreamAbuse, attack_streams};
use crate::handshake_hosts::{HandshakeHosts, key_of};

/// The number of flows that the proxy allows one key.
const FLOWS_MAX: u64 = 1_024;
/// The number of sessions that the proxy allows one key.
const SESSIONS_MAX: u64 = 1_000;
/// Bytes written to a flow at once.
static ZEROS: [u8; 32 * 1024] = [0; 32 * 1024];

/// Attacks until the time is over, and then leaves without notice.
///
/// # Errors
/// The attack did not take place: a socket failed, or no hostile client could connect.
pub fn attack(kind: HostileKind, context: &AttackContext) -> Result<AttackTally> {
    let http = context.http;
    let get = |path: &str| format!("GET http://{http}{path} HTTP/1.1\r\nHost: {http}\r\n\r\n");
    let plan = match kind {
        HostileKind::UnreadFlows => FlowPlan::asking(400, get("/object/1000000")),
        HostileKind::SlowReaders => FlowPlan {
            reads_slowly: true,
            ..FlowPlan::asking(400, get("/object/1000000"))
        },
        HostileKind::Unacknowledged => FlowPlan {
            deaf_after: Some(Duration::from_secs(1)),
            ..FlowPlan::asking(64, get("/object/4000000"))
        },
        HostileKind::ManyFlows => FlowPlan::open(FLOWS_MAX, "G".to_owned()),
        HostileKind::ManySessions => FlowPlan {
            sessions: SESSIONS_MAX,
            ..FlowPlan::open(1, "G".to_owned())
        },
        HostileKind::UnreadTunnels => {
            let to = context.blast;
            let head = format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n\r\n");
            FlowPlan::open(FLOWS_MAX, head)
        }
        HostileKind::EndlessUploads => {
            let head = format!(
                "PUT http://{http}/upload HTTP/1.1\r\nHost: {http}\r\nContent-Length: 4000000\r\n\r\n"
            );
            FlowPlan {
                // All but the end. So small a body is kept in memory.
                body: 3_900_000,
                ..FlowPlan::open(128, head)
            }
        }
        HostileKind::EndlessRequestHeads => {
            let field = format!("x-filler: {}\r\n", "f".repeat(1000));
            let head = format!("GET http://{http}/ HTTP/1.1\r\nHost: {http}\r\n");
            FlowPlan::open(FLOWS_MAX, head + &field.repeat(31))
        }
        HostileKind::EndlessResponseHeads => FlowPlan::asking(FLOWS_MAX, get("/head")),
        HostileKind::EndlessBodies => FlowPlan::asking(32, get("/endless")),
        HostileKind::StalledTls => {
            let to = context.silent;
            let head = format!("GET https://{to}/ HTTP/1.1\r\nHost: {to}\r\n\r\n");
            FlowPlan::asking(FLOWS_MAX, head)
        }
        HostileKind::Relays => {
            let head = format!("RELAY {http} HTTP/1.1\r\nHost: {http}\r\n\r\n");
            FlowPlan::open(FLOWS_MAX, head)
        }
        HostileKind::SlowOrigins => return slow_origins(context),
        HostileKind::SparsePieces => return sparse_pieces(context),
        HostileKind::UnreadDatagrams => return unread_datagrams(context),
        HostileKind::PacketTunnels => return packet_tunnels(context),
        HostileKind::SilentStreams => return attack_streams(StreamAbuse::Silence, context),
        HostileKind::GarbageStreams => return attack_streams(StreamAbuse::Garbage, context),
        HostileKind::StrangePackets => return attack_streams(StreamAbuse::Packets, context),
        HostileKind::StreamPings => return attack_streams(StreamAbuse::Pings, context),
        HostileKind::Http2Resets => return attack_http2(Http2Attack::Resets, context),
        HostileKind::Http2Heads => return attack_http2(Http2Attack::Heads, context),
        HostileKind::Http2Windows => return attack_http2(Http2Attack::Windows, context),
        HostileKind::Http2Control => return attack_http2(Http2Attack::Control, context),
        HostileKind::EnrolmentGuests => return enrolment_guests(context),
        HostileKind::CacheChurn => return attack_cache(CacheAttack::Churn, context),
        HostileKind::CacheUnread => return attack_cache(CacheAttack::Unread, context),
        HostileKind::CacheVariants => return attack_cache(CacheAttack::Variants, context),
        HostileKind::CompressedBombs => return compressed_bombs(context),
        HostileKind::EveryQuota => return be_at_every_quota(context),
        HostileKind::HalfOpen => {
            let keys: Vec<SecretKey> = hostile_keys(context.keys).collect();
            let instances = 0..SESSIONS_MAX * 2;
            let syns = instances.map(|n| (keys[n as usize % keys.len()].clone(), n));
            return flood(context, &syns_of(context, syns)?);
        }
        HostileKind::SynFlood => {
            let strangers = (0..SESSIONS_MAX).map(|n| (key_of(STRANGERS + n), n));
            return flood(context, &syns_of(context, strangers)?);
        }
        HostileKind::WakeReplay => return flood(context, &captured_wakes(context)?),
        HostileKind::Garbage => {
            let mut random = d2tp_session::Rng::new([0x6a; 32]);
            let mut datagram = || (0..150).flat_map(|_| random.u64().to_le_bytes()).collect();
            let datagrams: Vec<Vec<u8>> = (0..1_000).map(|_| datagram()).collect();
            return flood(context, &datagrams);
        }
    };
    plan.carry_out(context)
}

/// A plan of sessions with flows, which use the protocol's own core.
struct FlowPlan {
    /// Sessions of each key.
    sessions: u64,
    /// Flows of each session.
    flows: u64,
    /// The beginning of each flow.
    head: String,
    /// Whether the device sends only the head.
    ends: bool,
    /// Bytes after the head, as credit allows.
    body: u64,
    /// Whether a kilobyte of each flow is read per second; otherwise nothing is.
    reads_slowly: bool,
    /// After this time packets are no longer received, and other sessions begin.
    deaf_after: Option<Duration>,
}

impl FlowPlan {
    fn open(flows: u64, head: String) -> FlowPlan {
        FlowPlan {
            sessions: 1,
            flows,
            head,
            ends: false,
            body: 0,
            reads_slowly: false,
            deaf_after: None,
        }
    }

    fn asking(flows: u64, head: String) -> FlowPlan {
        FlowPlan {
            ends: true,
            ..FlowPlan::open(flows, head)
        }
    }

    fn carry_out(&self, context: &AttackContext) -> Result<AttackTally> {
        let mut tally = AttackTally::default();
        let mut round = 0;
        while Instant::now() < context.until {
            self.round(context, round, &mut tally)?;
            round += 1;
        }
        ensure!(tally.sessions > 0, "no hostile client got in");
        Ok(tally)
    }

    /// Runs the sessions that begin together, until they stop receiving or the attack ends.
    fn round(&self, context: &AttackContext, round: u64, tally: &mut AttackTally) -> Result<()> {
        let config = EndpointConfig {
            flow_window: 8 << 20,
            session_window: 1 << 30,
            ..EndpointConfig::default()
        };
        let mut crowd = HandshakeHosts::with_config(context.proxy, context.proxy_key, 4, config)?;
        let begun = Instant::now();
        let mut flows: Vec<(usize, FlowId, u64)> = Vec::new();
        let (mut told, mut next_look) = (Vec::new(), begun);
        let sessions = (0..context.keys).flat_map(|key| (0..self.sessions).map(move |n| (key, n)));
        for (key, session) in sessions {
            let number = (round * context.keys + key) * self.sessions + session;
            let mut opened = Vec::new();
            let place = crowd.begin(number, key_of(FIRST + key), |s| opened = self.begin(s));
            tally.flows += opened.len() as u64;
            flows.extend(opened.into_iter().map(|flow| (place, flow, self.body)));
            crowd.turn(Duration::ZERO, &mut told)?;
        }
        let deaf_at = self.deaf_after.map(|after| begun + after);
        while Instant::now() < context.until {
            if deaf_at.is_some_and(|at| Instant::now() >= at) {
                // Wait until the proxy has filled its buffers of unacknowledged data.
                std::thread::sleep(Duration::from_millis(500));
                return Ok(());
            }
            crowd.turn(Duration::from_millis(5), &mut told)?;
            for (_, event) in told.drain(..) {
                tally.sessions += u64::from(matches!(event, SessionEvent::Established { .. }));
            }
            let now = Instant::now();
            if self.body > 0 {
                feed(&mut crowd, &mut flows);
            } else if self.reads_slowly && now >= next_look {
                next_look = now + Duration::from_secs(1);
                for (place, flow, _) in &flows {
                    let read = |s: &mut Session| s.read(*flow, 1_000).is_ok();
                    let _ = crowd.host(*place).and_then(|host| host.with(read));
                }
            }
        }
        Ok(())
    }

    fn begin(&self, session: &mut Session) -> Vec<FlowId> {
        let head = Bytes::from(self.head.clone());
        let mut flows = Vec::new();
        for _ in 0..self.flows {
            let Ok(flow) = session.open(FlowOptions::default()) else {
                break;
            };
            let _ = session.write(flow, head.clone());
            if self.ends {
                let _ = session.finish(flow);
            }
            flows.push(flow);
        }
        flows
    }
}

/// Writes as much as the flows accept.
fn feed(crowd: &mut HandshakeHosts, flows: &mut [(usize, FlowId, u64)]) {
    let now = crowd.now();
    for (place, flow, left) in flows.iter_mut().filter(|(_, _, left)| *left > 0) {
        let Some(host) = crowd.host(*place) else {
            continue;
        };
        let written = host.with(|s| {
            let room = s.write_room(*flow).unwrap_or(0).min(*left);
            let piece = room.min(ZEROS.len() as u64);
            let _ = s.write(*flow, Bytes::from_static(&ZEROS[..piece as usize]));
            piece
        });
        *left -= written.unwrap_or(0);
    }
    for place in 0..flows.last().map_or(0, |(place, _, _)| place + 1) {
        crowd.pump(place, now);
    }
}

/// Sends single bytes, 64 apart: the pieces with the highest cost for each byte, 256 of them in
/// every flow.
fn sparse_pieces(context: &AttackContext) -> Result<AttackTally> {
    const GAPS: u64 = 256;
    const PER_PACKET: usize = 64;
    let mut tally = AttackTally::default();
    let keys: Vec<SecretKey> = hostile_keys(context.keys).collect();
    let mut instance = 0;
    while Instant::now() < context.until {
        let key = &keys[instance as usize % keys.len()];
        instance += 1;
        let entered = RawClient::enter(context.proxy, &context.proxy_key, key, instance);
        let Ok(mut client) = entered else {
            // Its share is used up: no further session is admitted.
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        tally.sessions += 1;
        for n in 0..FLOWS_MAX as u32 {
            let pieces: Vec<Frame<'_>> = (0..GAPS)
                .map(|gap| Frame::Data {
                    flow: FlowId::new(1, n, true),
                    offset: gap * 64 + 1,
                    bytes: b"x",
                    fin: false,
                })
                .collect();
            for frames in pieces.chunks(PER_PACKET) {
                client.send(frames)?;
                // Some hundred thousand packets per second would alone fill the socket's buffer.
                std::thread::sleep(Duration::from_micros(20));
            }
            tally.flows += 1;
            if Instant::now() >= context.until {
                break;
            }
        }
    }
    ensure!(tally.sessions > 0, "no hostile client got in");
    Ok(tally)
}

/// Sends datagrams of many contexts, none of which anybody reads. Half of the sessions send datagrams of one byte, which
/// cost the most beside their bytes, and half of full size. Sessions take turns.
fn unread_datagrams(context: &AttackContext) -> Result<AttackTally> {
    const SESSIONS: u64 = 512;
    const PER_PACKET: u64 = 100;
    const LARGE_BYTES: usize = 1_100;
    let mut tally = AttackTally::default();
    let mut clients = Vec::new();
    for instance in 1..=SESSIONS * context.keys {
        let key = key_of(FIRST + instance % context.keys);
        let entered = RawClient::enter(context.proxy, &context.proxy_key, &key, instance);
        clients.extend(entered.ok());
        if Instant::now() >= context.until {
            break;
        }
    }
    ensure!(!clients.is_empty(), "no hostile client got in");
    tally.sessions = clients.len() as u64;
    let mut next_context = 0;
    while Instant::now() < context.until {
        for (place, client) in clients.iter_mut().enumerate() {
            let (per_packet, bytes): (u64, &[u8]) = match place % 2 {
                0 => (PER_PACKET, b"x"),
                _ => (1, &ZEROS[..LARGE_BYTES]),
            };
            let contexts = next_context..next_context + per_packet;
            let frames: Vec<Frame<'_>> = contexts
                .map(|context| Frame::Datagram { context, bytes })
                .collect();
            client.send(&frames)?;
            next_context += per_packet;
            tally.datagrams += per_packet;
            // Some hundred thousand packets per second would alone fill the socket's buffer.
            std::thread::sleep(Duration::from_micros(20));
        }
    }
    Ok(tally)
}

/// SYNs of these keys and instances.
fn syns_of(
    context: &AttackContext,
    clients: impl Iterator<Item = (SecretKey, u64)>,
) -> Result<Vec<Vec<u8>>> {
    clients
        .map(|(key, instance)| {
            let cid = Cid((instance << 8).to_be_bytes());
            Ok(syn(&context.proxy_key, &key, instance, 1, cid)?.1)
        })
        .collect()
}

/// WAKEs captured from returning devices: each was used by its device, and is stale.
fn captured_wakes(context: &AttackContext) -> Result<Vec<Vec<u8>>> {
    const DEVICES: u64 = 64;
    let key = || key_of(FIRST);
    let config = EndpointConfig::default();
    let mut crowd =
        HandshakeHosts::with_config(context.proxy, context.proxy_key, 1, config.clone())?;
    let places: Vec<usize> = (0..DEVICES)
        .map(|n| crowd.begin(n, key(), |_| {}))
        .collect();
    let (mut told, mut up) = (Vec::new(), 0);
    while up < DEVICES && Instant::now() < context.until {
        crowd.turn(Duration::from_millis(5), &mut told)?;
        up += told
            .drain(..)
            .filter(|(_, event)| matches!(event, SessionEvent::PathUp { .. }))
            .count() as u64;
    }
    ensure!(up == DEVICES, "not every hostile client got in");
    let addresses = Addresses {
        link: LinkId(0),
        local: None,
        remote: context.proxy,
    };
    let mut wakes = Vec::new();
    for place in places {
        let now = crowd.now();
        let host = crowd.host(place).context("it was there")?;
        let record = host.hibernate(now)?;
        let seed = [place as u8; 32];
        let nobody = Admission::Nobody;
        let mut device = Endpoint::new(config.clone(), key(), nobody, seed, seed);
        let session = device.restore(now, &record, 2..1_000)?;
        let _ = device.with(session, |s| s.open_path(now, addresses, false));
        let wake = first_datagram(&mut device, now)?;
        come_back(&mut device, addresses, &wake, || crowd.now())?;
        wakes.push(wake);
    }
    Ok(wakes)
}

/// Completes the handshake that a device began with this WAKE.
fn come_back(
    device: &mut Endpoint,
    addresses: Addresses,
    wake: &[u8],
    now: impl Fn() -> Time,
) -> Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    socket.connect(addresses.remote)?;
    socket.set_read_timeout(Some(Duration::from_millis(20)))?;
    socket.send(wake)?;
    let (begun, mut space) = (Instant::now(), vec![0; 64 * 1024]);
    while begun.elapsed() < Duration::from_secs(5) {
        if let Ok(length) = socket.recv(&mut space) {
            let bytes = &mut space[..length];
            device.handle_datagram(now(), IncomingDatagram { addresses, bytes });
        }
        device.handle_timeouts(now());
        while let Some(transmit) = device.poll_transmit(now(), &mut space) {
            for datagram in space[..transmit.len].chunks(transmit.segment.max(1)) {
                socket.send(datagram)?;
            }
        }
        while let Some((_, event)) = device.poll_event() {
            if matches!(event, SessionEvent::PathUp { .. }) {
                return Ok(());
            }
        }
    }
    bail!("a device does not come back by its ticket")
}

fn first_datagram(device: &mut Endpoint, now: Time) -> Result<Vec<u8>> {
    let mut space = vec![0; 64 * 1024];
    let transmit = device.poll_transmit(now, &mut space).context("a WAKE")?;
    let datagram = space[..transmit.segment.min(transmit.len)].to_vec();
    let kind = PacketKind::split(&datagram).map(|(kind, ..)| kind);
    ensure!(kind == Some(PacketKind::Wake), "{kind:?} is no WAKE");
    Ok(datagram)
}

fn flood(context: &AttackContext, datagrams: &[Vec<u8>]) -> Result<AttackTally> {
    let sockets = ForgedSockets::open()?;
    let sent = sockets.flood(context.proxy, datagrams, context.rate, context.until);
    Ok(AttackTally {
        datagrams: sent,
        ..AttackTally::default()
    })
}
