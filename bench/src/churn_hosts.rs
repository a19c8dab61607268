//! Many hosts in one process: an endpoint of the core for each, a few sockets for all.
//!
//! ```text
//!  10.128.0.0 … an address for each host         any address, few ports
//!  host 0 ─ Endpoint ─┐                    ┌── socket 0 ─┐
//!  host 1 ─ Endpoint ─┼─ by the address ───┼── socket 1 ─┼── server
//!  …                  ┘  a datagram is for └── …         ┘
//! ```
//!
//! Each host has its own key, instance and address; it shares only the process with the others,
//! which the server cannot see. A host that goes silent sends nothing more, and packets to it are
//! dropped, as when a device leaves the network; when it comes back it opens a new path.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use cedos_lab_emu::EmuClock;
use d2tp_session::{
    Addresses, Admission, Endpoint, EndpointConfig, FlowId, FlowOptions, IncomingDatagram, LinkId,
    PublicKey, ReadOutcome, SecretKey, SessionEvent, SessionId, Time,
};
use d2tp_udp::{BindOptions, LinkSocket, RecvBatch, UdpTransmit};

use crate::churn_network::{address_of, host_at};
use crate::churn_server;

/// The number of sockets of all hosts. Each holds datagrams for its hosts, and the kernel limits
/// the memory of each socket (net.core.rmem_max), so more sockets hold more.
const SOCKETS: usize = 64;
/// Receive calls on one socket in a turn.
const RECEIVES_PER_TURN: usize = 4;
/// Timers handled in one turn.
const TIMERS_PER_TURN: usize = 64;
/// Runs of datagrams received in one call.
const RUNS: usize = 16;
/// Simultaneous handshakes: far below the number that a server keeps half open.
const HANDSHAKES_MAX: usize = 256;
/// Flows opened before the open ones have a turn.
const OPENING_TOGETHER: u32 = 64;
/// A handshake that takes longer than this has failed.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(30);
/// The only link of a host.
const LINK: LinkId = LinkId(0);

/// The begin of the answer that every host expects.
const ANSWER: &[u8] = b"HTTP/1.1 200";

fn request(origin: SocketAddr) -> Bytes {
    format!("GET http://{origin}/ HTTP/1.1\r\nhost: {origin}\r\n\r\n").into()
}

/// A host of the run, with its session and its place in the schedule.
struct ChurnHost {
    core: Endpoint,
    session: SessionId,
    flow: Option<FlowId>,
    /// Bytes that the host read, with the head of the answer.
    bytes: u64,
    active: bool,
    established: bool,
    timer: Time,
}

/// All hosts of the run.
pub struct ChurnHosts {
    clock: EmuClock,
    hosts: Vec<ChurnHost>,
    sockets: Vec<LinkSocket>,
    batch: RecvBatch,
    buffer: Vec<u8>,
    timers: BTreeSet<(Time, u32)>,
    sleep: Pin<Box<tokio::time::Sleep>>,
    /// The proxies; host `n` uses number `n` modulo their count.
    servers: Vec<SocketAddr>,
    /// What every host asks.
    request: Bytes,
    connecting: usize,
    /// Datagrams that the kernel refused: none, on lo.
    pub unsent: u64,
    fault: Option<String>,
}

impl ChurnHosts {
    /// Makes the hosts; nothing is sent yet. `window_bytes`: how much each allows the server to
    /// send.
    pub fn make(
        count: usize,
        window_bytes: u64,
        card: &churn_server::ChurnServerInfo,
    ) -> Result<ChurnHosts> {
        let config = EndpointConfig {
            flow_window: window_bytes,
            session_window: window_bytes,
            ..EndpointConfig::default()
        };
        let clock = EmuClock::start();
        let now = clock.now();
        let hosts = (0..count).map(|number| {
            let mut key = [3; 32];
            key[..8].copy_from_slice(&(number as u64).to_be_bytes());
            let mut seed = key;
            seed[31] = 4;
            let local = SecretKey::from_bytes(key);
            let mut core = Endpoint::new(config.clone(), local, Admission::Nobody, seed, seed);
            let node = &card.nodes[number % card.nodes.len()];
            let server = PublicKey(node.key);
            let session = core.connect(now, server, number as u64, 1..1_000_000);
            ChurnHost {
                core,
                session,
                flow: None,
                bytes: 0,
                active: false,
                established: false,
                timer: Time::NEVER,
            }
        });
        let sockets = (0..SOCKETS.min(count))
            .map(|_| LinkSocket::bind(&BindOptions::at((Ipv4Addr::UNSPECIFIED, 0).into())))
            .collect::<Result<_, _>>()
            .context("no sockets for the hosts")?;
        Ok(ChurnHosts {
            clock,
            hosts: hosts.collect(),
            sockets,
            batch: RecvBatch::with_capacity(RUNS),
            buffer: vec![0; 1 << 16],
            timers: BTreeSet::new(),
            sleep: Box::pin(tokio::time::sleep(Duration::ZERO)),
            servers: card.nodes.iter().map(|node| node.address).collect(),
            request: request(card.origin),
            connecting: 0,
            unsent: 0,
            fault: None,
        })
    }

    /// The number of hosts.
    pub fn len(&self) -> usize {
        self.hosts.len()
    }

    /// Bytes that each host has read so far.
    pub fn bytes(&self) -> Vec<u64> {
        self.hosts.iter().map(|host| host.bytes).collect()
    }

    /// Whether each host is active, by its number.
    pub fn active(&self) -> Vec<bool> {
        self.hosts.iter().map(|host| host.active).collect()
    }

    /// Opens the sessions of all hosts, some at a time. Flows are opened later: their bytes would
    /// take the time that handshakes need.
    ///
    /// # Errors
    /// A handshake failed.
    pub async fn call_all(&mut self) -> Result<()> {
        let mut next = 0;
        let mut progress = Instant::now();
        let mut through = 0;
        while through < self.hosts.len() {
            while next < self.hosts.len() && self.connecting < HANDSHAKES_MAX {
                self.connecting += 1;
                self.come(next as u32);
                next += 1;
            }
            self.live_until(|hosts| hosts.connecting < HANDSHAKES_MAX / 2 || next == hosts.len())
                .await?;
            if next == self.hosts.len() {
                let left = self.connecting;
                self.live_until(|hosts| hosts.connecting < left.max(1))
                    .await?;
            }
            let now_through = next - self.connecting;
            if now_through > through {
                through = now_through;
                progress = Instant::now();
            } else if progress.elapsed() > HANDSHAKE_WITHIN {
                bail!(
                    "{} of {} handshakes went through, and no more",
                    through,
                    self.hosts.len()
                );
            }
        }
        Ok(())
    }

    /// Opens the flows of all hosts, some at a time.
    ///
    /// # Errors
    /// A session ended.
    pub async fn open_all(&mut self) -> Result<()> {
        for number in 0..self.hosts.len() as u32 {
            let host = &mut self.hosts[number as usize];
            let request = self.request.clone();
            let flow = host.core.with(host.session, |s| {
                let flow = s.open(FlowOptions::default())?;
                s.write(flow, request)?;
                Ok::<_, d2tp_session::FlowError>(flow)
            })??;
            host.flow = Some(flow);
            self.attend(number, self.clock.now());
            if number.is_multiple_of(OPENING_TOGETHER) {
                self.live(Instant::now() + Duration::from_millis(1)).await?;
            }
        }
        Ok(())
    }

    /// The number of hosts that read nothing yet.
    pub fn without_answer(&self) -> usize {
        self.hosts.iter().filter(|host| host.bytes == 0).count()
    }

    /// Puts the host on the network.
    pub fn come(&mut self, number: u32) {
        let addresses = Addresses {
            link: LINK,
            local: None,
            remote: self.servers[number as usize % self.servers.len()],
        };
        let host = &mut self.hosts[number as usize];
        host.active = true;
        let now = self.clock.now();
        let _ = (host.core).with(host.session, |s| s.open_path(now, addresses, false));
        self.attend(number, now);
    }

    /// Removes the host from the network without notice.
    pub fn leave(&mut self, number: u32) {
        let host = &mut self.hosts[number as usize];
        host.active = false;
        let now = self.clock.now();
        let _ = (host.core).with(host.session, |s| s.on_link_down(now, LINK));
        self.attend(number, now);
    }

    /// Runs all hosts until `until`.
    ///
    /// # Errors
    /// A session or flow ended.
    pub async fn live(&mut self, until: Instant) -> Result<()> {
        let end = tokio::time::sleep_until(until.into());
        tokio::pin!(end);
        std::future::poll_fn(|cx| {
            if end.as_mut().poll(cx).is_ready() {
                return Poll::Ready(());
            }
            self.turn(cx);
            if self.fault.is_some() {
                return Poll::Ready(());
            }
            Poll::Pending
        })
        .await;
        self.check()
    }

    async fn live_until(&mut self, mut is_done: impl FnMut(&ChurnHosts) -> bool) -> Result<()> {
        let patience = tokio::time::sleep(HANDSHAKE_WITHIN);
        tokio::pin!(patience);
        std::future::poll_fn(|cx| {
            self.turn(cx);
            if self.fault.is_some() || is_done(self) || patience.as_mut().poll(cx).is_ready() {
                return Poll::Ready(());
            }
            Poll::Pending
        })
        .await;
        self.check()
    }

    fn check(&mut self) -> Result<()> {
        match self.fault.take() {
            Some(fault) => bail!("{fault}"),
            None => Ok(()),
        }
    }

    /// One turn: handles received datagrams and timers that are due.
    fn turn(&mut self, cx: &mut Context<'_>) {
        let mut any = false;
        for at in 0..self.sockets.len() {
            for _ in 0..RECEIVES_PER_TURN {
                match self.sockets[at].poll_recv(cx, &mut self.batch) {
                    Poll::Pending => break,
                    // ICMP: the server has ended. Its silence shows that too.
                    Poll::Ready(Err(_)) => any = true,
                    Poll::Ready(Ok(_)) => {
                        any = true;
                        self.take_in();
                    }
                }
            }
        }
        // 65,536 devices would have as many processors: received packets must not wait behind all
        // timers.
        let now = self.clock.now();
        for _ in 0..TIMERS_PER_TURN {
            let Some((_, number)) = self.timers.first().copied().filter(|t| t.0 <= now) else {
                break;
            };
            self.hosts[number as usize].core.handle_timeouts(now);
            self.attend(number, now);
            any = true;
        }
        if any {
            cx.waker().wake_by_ref();
            return;
        }
        if let Some((at, _)) = self.timers.first() {
            let wait: Duration = at.since(now).into();
            self.sleep
                .as_mut()
                .reset(tokio::time::Instant::now() + wait);
            if self.sleep.as_mut().poll(cx).is_ready() {
                cx.waker().wake_by_ref();
            }
        }
    }

    fn take_in(&mut self) {
        let now = self.clock.now();
        let mut touched = Vec::with_capacity(RUNS);
        for run in self.batch.received() {
            let Some(IpAddr::V4(to)) = run.dst_ip else {
                continue;
            };
            let Some(number) = host_at(to) else {
                continue;
            };
            let Some(host) = self.hosts.get_mut(number as usize) else {
                continue;
            };
            if !host.active {
                continue; // The server has ended.
            }
            let addresses = Addresses {
                link: LINK,
                local: None,
                remote: run.from,
            };
            let incoming = IncomingDatagram {
                addresses,
                bytes: run.data,
            };
            host.core.handle_datagrams(now, incoming, run.stride);
            touched.push(number);
        }
        for number in touched {
            self.attend(number, now);
        }
    }

    /// Reads available data, sends packets, and sets the host's next timer.
    fn attend(&mut self, number: u32, now: Time) {
        let host = &mut self.hosts[number as usize];
        while let Some((_, event)) = host.core.poll_event() {
            match event {
                SessionEvent::Established { .. } if !host.established => {
                    host.established = true;
                    self.connecting -= 1;
                }
                SessionEvent::Ended { .. }
                | SessionEvent::Closed(_)
                | SessionEvent::EpochsUsedUp => {
                    self.fault = Some(format!("host {number}: {event:?}"));
                }
                _ => {}
            }
        }
        if let Some(flow) = host.flow {
            let bytes = &mut host.bytes;
            let fault = host.core.with(host.session, |s| {
                loop {
                    match s.read(flow, usize::MAX) {
                        Ok(ReadOutcome::Chunk(chunk)) => {
                            if *bytes == 0 && !chunk.starts_with(ANSWER) {
                                let answer = String::from_utf8_lossy(&chunk);
                                return Some(answer.into_owned());
                            }
                            *bytes += chunk.len() as u64;
                        }
                        Ok(ReadOutcome::Pending) => return None,
                        Ok(ReadOutcome::End) => return Some("the object ended".to_owned()),
                        Err(error) => return Some(error.to_string()),
                    }
                }
            });
            if let Ok(Some(fault)) = fault {
                self.fault = Some(format!("host {number}: {fault}"));
            }
        }
        let socket = &self.sockets[number as usize % self.sockets.len()];
        while let Some(transmit) = host.core.poll_transmit(now, &mut self.buffer) {
            let sent = socket.try_send(&UdpTransmit {
                dst: transmit.remote,
                src_ip: Some(address_of(number).into()),
                ecn: None,
                contents: &self.buffer[..transmit.len],
                segment_size: (transmit.len > transmit.segment).then_some(transmit.segment),
            });
            if sent.is_err() {
                self.unsent += 1;
            }
        }
        let next = host.core.next_timeout();
        if next != host.timer {
            self.timers.remove(&(host.timer, number));
            host.timer = next;
            if next != Time::NEVER {
                self.timers.insert((next, number));
            }
        }
    }
}
