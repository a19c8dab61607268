//! Many devices in one process: each with an endpoint and a key, and a few sockets for all of them.
//!
//! ```text
//!  host 0 … host n    each an `Endpoint` with one session, as on its own device
//!      ╲  │  ╱
//!   socket 0 … k      the connection id of a datagram identifies the host: its own, or in UNKNOWN the server's
//! ```
//!
//! A driver for each would need as many tasks and timers; here one loop runs all of them.

use std::collections::{BTreeSet, HashMap};
use std::io::IoSliceMut;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::Result;
use d2tp_session::{
    Addresses, Admission, Endpoint, EndpointConfig, FlowId, FlowOptions, FlowRecord, HybridPolicy,
    IncomingDatagram, LinkId, PublicKey, Role, SecretKey, Session, SessionEvent, SessionId,
    SessionRecord, Span, TicketHolder, TicketIssuer, Time,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use quinn_udp::{BATCH_SIZE, RecvMeta, UdpSockRef, UdpSocketState};

/// Bytes of each receive buffer: the server sends single datagrams and short runs.
const BUFFER_BYTES: usize = 64 * 1024;
/// The buffer of each socket: a thousand hosts are answered at once.
const SOCKET_BUFFER_BYTES: usize = 4 << 20;
/// The first bits of packets that carry the id of their sender: SYN and WAKE.
const HANDSHAKE_KINDS: [u8; 2] = [0b100, 0b011];

/// The total number of bytes of every flow.
pub const FLOW_BYTES: u64 = 8 * 1024;
/// Bytes of the object that a device has read when it hibernates.
pub const READ_BEFORE_BYTES: u64 = 1024;
/// The time to the deadline of a hibernated flow.
pub const DEADLINE: Span = Span::from_secs(6 * 3600);

/// `len` bytes from `offset` on of the flow of host `number`.
pub fn content(number: u64, offset: u64, len: usize) -> Vec<u8> {
    let seed = number.wrapping_mul(0x2545_f491_4f6c_dd1d);
    let words = offset / 8..(offset + len as u64).div_ceil(8);
    let mut bytes = Vec::with_capacity(len + 16);
    for n in words {
        bytes.extend_from_slice(&mix(seed ^ n).to_le_bytes());
    }
    bytes.drain(..(offset % 8) as usize);
    bytes.truncate(len);
    bytes
}

/// SplitMix64's output for state `n`: a byte of a content follows from its offset, without a
/// generator's state for each of a million hosts.
fn mix(n: u64) -> u64 {
    let mut z = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The key of host `number`. Nothing here is secret.
pub fn key_of(number: u64) -> SecretKey {
    let mut bytes = [0; 32];
    for (i, word) in bytes.chunks_mut(8).enumerate() {
        word.copy_from_slice(&mix(number * 4 + i as u64).to_le_bytes());
    }
    SecretKey::from_bytes(bytes)
}

/// The flow of every host: the first one that it opens.
pub fn flow_id() -> FlowId {
    FlowId::new(1, 0, true)
}

/// The secret from which the servers here make their tickets.
pub const TICKET_SEED: [u8; 32] = [0x71; 32];

/// The record of the device with this key, with the ticket of its last handshake.
pub fn record_with_ticket(server: PublicKey, key: &SecretKey, number: u64) -> SessionRecord {
    let mut random = [0; 16];
    random[..8].copy_from_slice(&mix(!number).to_le_bytes());
    let mut record = record_of(Role::Initiator, server, number);
    let holder = TicketHolder {
        peer: key.public(),
        instance: number,
        epoch: record.epoch,
    };
    record.ticket = Some(TicketIssuer::new(TICKET_SEED).issue(random, &holder));
    record
}

/// The record of either end of a hibernated session with one flow: the device sent a request of
/// eight bytes and has the first part of the answer.
pub fn record_of(role: Role, peer: PublicKey, number: u64) -> SessionRecord {
    let server = role == Role::Responder;
    let (asked, had) = (8, READ_BEFORE_BYTES);
    let (sent_to, received_to) = if server { (had, asked) } else { (asked, had) };
    SessionRecord {
        role,
        peer,
        instance: number,
        epoch: 1,
        seen_floor: 0,
        seen: if server {
            vec![(1, vec![(0, 1)])]
        } else {
            Vec::new()
        },
        closing: None,
        ticket: None,
        secret: None,
        flows: vec![FlowRecord {
            id: flow_id(),
            options: FlowOptions {
                hibernates: true,
                ..FlowOptions::default()
            },
            deadline_left: Some(DEADLINE),
            deadline_seq: 0,
            sent_to,
            send_end: (!server).then_some(asked),
            send_complete: !server,
            received_to,
            receive_end: server.then_some(asked),
            receive_complete: server,
            reset: None,
            stopped: None,
        }],
    }
}

/// A device with an endpoint of its own.
pub struct HandshakeHost {
    /// The number of the host.
    pub number: u64,
    core: Endpoint,
    session: SessionId,
    cids: Vec<[u8; 8]>,
    /// The connection ids to which the host sends: UNKNOWN comes with one of them.
    peer_cids: Vec<[u8; 8]>,
    timer: Time,
}

impl HandshakeHost {
    /// Calls a function with the host's session.
    pub fn with<R>(&mut self, f: impl FnOnce(&mut Session) -> R) -> Option<R> {
        self.core.with(self.session, f).ok()
    }

    /// Turns the session into its record.
    pub fn hibernate(&mut self, now: Time) -> Result<Vec<u8>> {
        Ok(self.core.hibernate(now, self.session)?)
    }
}

/// All devices of the run, on shared sockets.
pub struct HandshakeHosts {
    server: SocketAddr,
    server_key: PublicKey,
    config: EndpointConfig,
    sockets: Vec<(UdpSocket, UdpSocketState)>,
    hosts: Vec<Option<HandshakeHost>>,
    free: Vec<usize>,
    by_cid: HashMap<[u8; 8], usize>,
    timers: BTreeSet<(Time, usize)>,
    buffers: Vec<u8>,
    out: Vec<u8>,
    started: Instant,
    turned: usize,
    /// Hosts that sent since events were last taken, and whose events may have changed.
    spoke: Vec<usize>,
}

impl HandshakeHosts {
    /// Creates an empty crowd with `sockets` sockets to the server. Its hosts agree keys by ML-KEM or not.
    ///
    /// # Errors
    /// The sockets cannot be opened.
    pub fn new(
        server: SocketAddr,
        server_key: PublicKey,
        sockets: usize,
        hybrid: HybridPolicy,
    ) -> Result<HandshakeHosts> {
        // A window of what a sleeper has read before: the server holds the rest back.
        let config = EndpointConfig {
            flow_window: READ_BEFORE_BYTES,
            session_window: 2 * FLOW_BYTES,
            hybrid,
            ..EndpointConfig::default()
        };
        HandshakeHosts::with_config(server, server_key, sockets, config)
    }

    /// Creates an empty crowd with `sockets` sockets to the server, and these settings for every
    /// host.
    ///
    /// # Errors
    /// No sockets.
    pub fn with_config(
        server: SocketAddr,
        server_key: PublicKey,
        sockets: usize,
        config: EndpointConfig,
    ) -> Result<HandshakeHosts> {
        let open = |_| -> Result<_> {
            let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
            socket.set_nonblocking(true)?;
            let known = socket2::SockRef::from(&socket);
            known.set_recv_buffer_size(SOCKET_BUFFER_BYTES)?;
            known.set_send_buffer_size(SOCKET_BUFFER_BYTES)?;
            let state = UdpSocketState::new(UdpSockRef::from(&socket))?;
            Ok((socket, state))
        };
        Ok(HandshakeHosts {
            server,
            server_key,
            config,
            sockets: (0..sockets).map(open).collect::<Result<_>>()?,
            hosts: Vec::new(),
            free: Vec::new(),
            by_cid: HashMap::new(),
            timers: BTreeSet::new(),
            buffers: vec![0; BATCH_SIZE * BUFFER_BYTES],
            out: vec![0; BUFFER_BYTES],
            started: Instant::now(),
            turned: 0,
            spoke: Vec::new(),
        })
    }

    /// The time of the hosts.
    pub fn now(&self) -> Time {
        // Not zero: the core uses zero for the distant past.
        Time::from_nanos(1_000_000_000 + self.started.elapsed().as_nanos() as u64)
    }

    /// The host at this place.
    pub fn host(&mut self, place: usize) -> Option<&mut HandshakeHost> {
        self.hosts.get_mut(place)?.as_mut()
    }

    fn core(&self, number: u64, key: SecretKey) -> Endpoint {
        let seed = |salt: u64| {
            let mut seed = [0; 32];
            seed[..8].copy_from_slice(&number.to_le_bytes());
            seed[8..16].copy_from_slice(&salt.to_le_bytes());
            let since = self.started.elapsed().as_nanos() as u64;
            seed[16..24].copy_from_slice(&since.to_le_bytes());
            seed[24..28].copy_from_slice(&std::process::id().to_le_bytes());
            seed
        };
        Endpoint::new(
            self.config.clone(),
            key,
            Admission::Nobody,
            seed(1),
            seed(2),
        )
    }

    /// Starts a new host; `prepare` acts on its session.
    pub fn begin(
        &mut self,
        number: u64,
        key: SecretKey,
        prepare: impl FnOnce(&mut Session),
    ) -> usize {
        let now = self.now();
        let mut core = self.core(number, key);
        let session = core.connect(now, self.server_key, number, 1..1_000);
        let _ = core.with(session, prepare);
        self.take_in(number, core, session)
    }

    /// Wakes a hibernated host, with epochs that it did not use before.
    ///
    /// # Errors
    /// The record is damaged.
    pub fn wake(
        &mut self,
        number: u64,
        key: SecretKey,
        record: &[u8],
        epoch: u32,
    ) -> Result<usize> {
        let now = self.now();
        let mut core = self.core(number, key);
        let session = core.restore(now, record, epoch..epoch + 1_000)?;
        Ok(self.take_in(number, core, session))
    }

    fn take_in(&mut self, number: u64, mut core: Endpoint, session: SessionId) -> usize {
        let now = self.now();
        self.turned += 1;
        let addresses = Addresses {
            link: LinkId((self.turned % self.sockets.len()) as u32),
            local: None,
            remote: self.server,
        };
        let _ = core.with(session, |s| s.open_path(now, addresses, false));
        let host = HandshakeHost {
            number,
            core,
            session,
            cids: Vec::new(),
            peer_cids: Vec::new(),
            timer: Time::NEVER,
        };
        let place = match self.free.pop() {
            Some(place) => {
                self.hosts[place] = Some(host);
                place
            }
            None => {
                self.hosts.push(Some(host));
                self.hosts.len() - 1
            }
        };
        self.pump(place, now);
        place
    }

    /// Removes a host without notice.
    pub fn drop_host(&mut self, place: usize) {
        if let Some(host) = self.hosts.get_mut(place).and_then(Option::take) {
            self.timers.remove(&(host.timer, place));
            for cid in host.cids.into_iter().chain(host.peer_cids) {
                self.by_cid.remove(&cid);
            }
            self.free.push(place);
        }
    }

    /// Sends all packets of a host.
    pub fn pump(&mut self, place: usize, now: Time) {
        let Some(Some(host)) = self.hosts.get_mut(place) else {
            return;
        };
        self.spoke.push(place);
        while let Some(transmit) = host.core.poll_transmit(now, &mut self.out) {
            let bytes = &self.out[..transmit.len];
            let cid: [u8; 8] = bytes[1..9].try_into().expect("eight bytes");
            let known = match HANDSHAKE_KINDS.contains(&(bytes[0] >> 5)) {
                true => &mut host.cids,
                false => &mut host.peer_cids,
            };
            if !known.contains(&cid) {
                known.push(cid);
                self.by_cid.insert(cid, place);
            }
            let (socket, state) = &self.sockets[transmit.link.0 as usize];
            for datagram in bytes.chunks(transmit.segment.max(1)) {
                let message = quinn_udp::Transmit {
                    destination: transmit.remote,
                    ecn: None,
                    contents: datagram,
                    segment_size: None,
                    src_ip: None,
                };
                // A full socket is like a lossy network: recovery retransmits.
                let _ = state.try_send(UdpSockRef::from(socket), &message);
            }
        }
        let timer = host.core.next_timeout();
        if timer != host.timer {
            self.timers.remove(&(host.timer, place));
            host.timer = timer;
            if timer != Time::NEVER {
                self.timers.insert((timer, place));
            }
        }
    }

    /// Receives, handles timers and sends; waits at most `patience` if there is nothing to do.
    /// Events are passed to `told`, with their hosts.
    ///
    /// # Errors
    /// A socket failed.
    pub fn turn(
        &mut self,
        patience: Duration,
        told: &mut Vec<(usize, SessionEvent)>,
    ) -> Result<()> {
        for place in std::mem::take(&mut self.spoke) {
            self.take_events(place, told);
        }
        let any = self.receive(told)?;
        let now = self.now();
        while let Some((at, place)) = self.timers.first().copied() {
            if at > now {
                break;
            }
            if let Some(Some(host)) = self.hosts.get_mut(place) {
                host.core.handle_timeouts(now);
            }
            self.take_events(place, told);
            self.pump(place, now);
            if self.timers.first() == Some(&(at, place)) {
                // It has no timer after all: not before a millisecond.
                self.timers.remove(&(at, place));
                let later = now + Span::from_millis(1);
                self.timers.insert((later, place));
                if let Some(Some(host)) = self.hosts.get_mut(place) {
                    host.timer = later;
                }
            }
        }
        if !any && !patience.is_zero() {
            let until = self
                .timers
                .first()
                .map_or(Span::MAX, |(at, _)| at.since(now));
            let wait = patience.min(until.into());
            let mut polled: Vec<PollFd> = self
                .sockets
                .iter()
                .map(|(socket, _)| PollFd::new(socket.as_fd(), PollFlags::POLLIN))
                .collect();
            let wait = u16::try_from(wait.as_micros().div_ceil(1_000)).unwrap_or(u16::MAX);
            let _ = poll(&mut polled, PollTimeout::from(wait));
        }
        Ok(())
    }

    fn take_events(&mut self, place: usize, told: &mut Vec<(usize, SessionEvent)>) {
        if let Some(Some(host)) = self.hosts.get_mut(place) {
            while let Some((_, event)) = host.core.poll_event() {
                told.push((place, event));
            }
        }
    }

    fn receive(&mut self, told: &mut Vec<(usize, SessionEvent)>) -> Result<bool> {
        let mut any = false;
        let mut touched: Vec<usize> = Vec::new();
        for index in 0..self.sockets.len() {
            let (socket, state) = &self.sockets[index];
            let mut meta = [RecvMeta::default(); BATCH_SIZE];
            let mut slices: Vec<IoSliceMut<'_>> = self
                .buffers
                .chunks_mut(BUFFER_BYTES)
                .map(IoSliceMut::new)
                .collect();
            let received = match state.recv(UdpSockRef::from(socket), &mut slices, &mut meta) {
                Ok(n) => n,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
                // The server is being restarted.
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => continue,
                Err(error) => return Err(error.into()),
            };
            any = true;
            let now = self.now();
            let addresses = Addresses {
                link: LinkId(index as u32),
                local: None,
                remote: self.server,
            };
            for (buffer, meta) in self.buffers.chunks_mut(BUFFER_BYTES).zip(&meta[..received]) {
                for bytes in buffer[..meta.len].chunks_mut(meta.stride.max(1)) {
                    let Some(place) = bytes.get(1..9).and_then(|cid| self.by_cid.get(cid)) else {
                        continue;
                    };
                    if let Some(Some(host)) = self.hosts.get_mut(*place) {
                        host.core
                            .handle_datagram(now, IncomingDatagram { addresses, bytes });
                        if touched.last() != Some(place) {
                            touched.push(*place);
                        }
                    }
                }
            }
        }
        let now = self.now();
        for place in touched {
            self.take_events(place, told);
            self.pump(place, now);
        }
        Ok(any)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_made_here_is_one_the_core_reads() {
        let server = key_of(0).public();
        let ours = record_with_ticket(server, &key_of(7), 7);
        assert_eq!(SessionRecord::decode(&ours.encode()), Ok(ours));
        let theirs = record_of(Role::Responder, key_of(7).public(), 7);
        assert_eq!(SessionRecord::decode(&theirs.encode()), Ok(theirs));
    }

    /// A server whose sessions are lost when it is made again, with the same key and secrets.
    fn server(key: &SecretKey) -> Endpoint {
        let config = EndpointConfig::default();
        Endpoint::new(
            config,
            key.clone(),
            Admission::Anybody,
            [1; 32],
            TICKET_SEED,
        )
    }

    /// Lets server and hosts exchange datagrams until `is_so` is true of the host at `place`.
    fn exchange(
        server: &mut Endpoint,
        socket: &UdpSocket,
        hosts: &mut HandshakeHosts,
        place: usize,
        is_so: impl Fn(&mut Session) -> bool,
    ) {
        let begun = Instant::now();
        let mut buffer = [0; 65_536];
        while !hosts
            .host(place)
            .and_then(|host| host.with(&is_so))
            .unwrap()
        {
            assert!(begun.elapsed() < Duration::from_secs(90), "never");
            let now = hosts.now();
            while let Ok((n, remote)) = socket.recv_from(&mut buffer) {
                let addresses = Addresses {
                    link: LinkId(0),
                    local: None,
                    remote,
                };
                let bytes = &mut buffer[..n];
                server.handle_datagram(now, IncomingDatagram { addresses, bytes });
            }
            while let Some(transmit) = server.poll_transmit(now, &mut buffer) {
                for datagram in buffer[..transmit.len].chunks(transmit.segment.max(1)) {
                    socket.send_to(datagram, transmit.remote).unwrap();
                }
            }
            hosts
                .turn(Duration::from_millis(1), &mut Vec::new())
                .unwrap();
        }
    }

    #[test]
    fn a_host_whose_server_forgot_its_session_hears_that_and_begins_a_new_one() {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        socket.set_nonblocking(true).unwrap();
        let key = key_of(9);
        let mut hosts = HandshakeHosts::new(
            socket.local_addr().unwrap(),
            key.public(),
            1,
            HybridPolicy::Offered,
        )
        .unwrap();
        let place = hosts.begin(1, key_of(1), |s| {
            let id = s.open(FlowOptions::default()).unwrap();
            s.write(id, vec![7; 10].into()).unwrap();
        });
        let mut before = server(&key);
        exchange(&mut before, &socket, &mut hosts, place, |s| {
            s.is_flushed(flow_id())
        });
        let mut after = server(&key);
        let now = hosts.now();
        hosts.host(place).unwrap().with(|s| {
            s.write(flow_id(), vec![7; 10].into()).unwrap();
        });
        hosts.pump(place, now);
        // The new server does not know the flow.
        exchange(&mut after, &socket, &mut hosts, place, |s| {
            s.flow_ids().is_empty()
        });
    }

    #[test]
    fn hosts_have_keys_and_contents_of_their_own() {
        assert_ne!(key_of(1).public(), key_of(2).public());
        assert_ne!(content(1, 0, 64), content(2, 0, 64));
        assert_eq!(content(1, 0, 64)[9..60], content(1, 9, 51));
    }
}
