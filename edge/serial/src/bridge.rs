//! The bridge: forwards the packets of mobiles on a serial line to servers over UDP, and back.
//!
//! ```text
//!  frame of mobile 01a7 ─▶ SYN or WAKE ─▶ every server: only the one it is sealed for answers
//!                       └▶ others      ─▶ the server that answered this mobile last; none did: every server
//!  UDP from a server    ─▶ queue of the mobile, equal shares ─▶ frames
//! ```
//!
//! Each mobile has a socket of its own, so that a server tells them apart and answers find their way. The
//! bridge opens nothing: it reads the first byte of a packet, which says its kind.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::UdpSocket;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::counts::LinkCounts;
use crate::frame::StationAddress;
use crate::line::SerialLine;
use crate::port::{LinkPacket, OpenLineError, SerialPort, StationRole};

/// The mobiles that a bridge knows at once. Beyond, the one that no server ever answered gives way first,
/// then the one that was silent longest.
pub const MOBILES_MAX: usize = 256; // a guess: each takes a descriptor
/// How long a mobile is known after its last packet. Shorter: a server that has something for it finds no
/// way. Longer: sockets are kept for mobiles that have left.
const MOBILE_IDLE_MAX: Duration = Duration::from_secs(3_600); // a guess
/// The largest packet that is forwarded: the size with which every path begins. A server's search for larger
/// ones ends here and costs the line nothing.
const FORWARDED_BYTES_MAX: usize = 1_200;
/// How long to wait before a device that is gone is opened again.
const REOPEN_AFTER: Duration = Duration::from_secs(1); // a guess
/// Packets from servers that may wait to be queued.
const DOWN_MAX: usize = 256; // a guess

// The kinds of packets, in the upper three bits of the first byte (docs/protocol.md, part 2).
const KIND_BITS: u8 = 0xe0;
const KIND_VERSION: u8 = 0x20;
const KIND_WAKE: u8 = 0x60;
const KIND_SYN: u8 = 0x80;
const KIND_UNKNOWN: u8 = 0xe0;

/// A bridge cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum BridgeError {
    /// The line cannot be opened.
    #[error(transparent)]
    Line(#[from] OpenLineError),
    /// There is no server to forward to.
    #[error("a bridge needs the address of at least one proxy")]
    NoServer,
}

/// What a bridge carried and dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BridgeCounts {
    /// Counters of the line, summed over all times that it was opened.
    pub line: LinkCounts,
    /// Mobiles that are known now.
    pub mobiles: usize,
    /// Packets forwarded to servers.
    pub up: u64,
    /// Packets forwarded to mobiles.
    pub down: u64,
    /// Datagrams from other hosts than the servers.
    pub strangers: u64,
    /// Packets larger than those that are forwarded.
    pub too_large: u64,
    /// Packets that the uplink did not take.
    pub unsent: u64,
    /// Mobiles that gave way to others.
    pub displaced: u64,
}

/// What happened, for whoever watches the bridge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BridgeEvent {
    /// The line is open.
    LineOpen,
    /// The device is gone; it is opened again when it comes back.
    LineGone {
        /// The system's message.
        cause: String,
    },
    /// A mobile is answered by a server.
    Answered {
        /// The address of the mobile.
        mobile: StationAddress,
        /// The address of the server.
        server: SocketAddr,
    },
}

/// A packet from a server for a mobile.
struct DownPacket {
    mobile: StationAddress,
    from: SocketAddr,
    bytes: Vec<u8>,
}

/// A mobile that the bridge knows.
struct BridgedMobile {
    /// A socket for each address family of the servers.
    sockets: Vec<Arc<UdpSocket>>,
    readers: Vec<JoinHandle<()>>,
    /// The server that answered last.
    server: Option<SocketAddr>,
    heard_at: Instant,
}

impl Drop for BridgedMobile {
    fn drop(&mut self) {
        self.readers.iter().for_each(JoinHandle::abort);
    }
}

/// A bridge between a serial line and servers.
pub struct Bridge {
    line: SerialLine,
    servers: Vec<SocketAddr>,
    mobiles: BTreeMap<StationAddress, BridgedMobile>,
    counts: BridgeCounts,
    /// Counters of the line before it was last opened.
    before: LinkCounts,
    give_down: mpsc::Sender<DownPacket>,
    down: mpsc::Receiver<DownPacket>,
    port: SerialPort,
    packets: mpsc::Receiver<LinkPacket>,
}

impl Bridge {
    /// Opens the line. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// The line cannot be opened, or there is no server.
    pub fn open(line: SerialLine, servers: Vec<SocketAddr>) -> Result<Bridge, BridgeError> {
        if servers.is_empty() {
            return Err(BridgeError::NoServer);
        }
        let (port, packets) = SerialPort::open(&line, StationRole::Bridge)?;
        let (give_down, down) = mpsc::channel(DOWN_MAX);
        Ok(Bridge {
            line,
            servers,
            mobiles: BTreeMap::new(),
            counts: BridgeCounts::default(),
            before: LinkCounts::default(),
            give_down,
            down,
            port,
            packets,
        })
    }

    /// What was carried and dropped until now.
    pub fn counts(&self) -> BridgeCounts {
        BridgeCounts {
            line: sum(self.before, self.port.counts()),
            mobiles: self.mobiles.len(),
            ..self.counts
        }
    }

    /// Forwards packets until the future is dropped. A device that is unplugged is opened again when it is
    /// back.
    pub async fn run(&mut self, mut on_event: impl FnMut(&BridgeCounts, BridgeEvent)) {
        on_event(&self.counts(), BridgeEvent::LineOpen);
        loop {
            tokio::select! {
                packet = self.packets.recv() => match packet {
                    Some(packet) => self.forward_up(packet).await,
                    None => {
                        let cause = self.port.end().unwrap_or_else(|| "the line ended".to_owned());
                        on_event(&self.counts(), BridgeEvent::LineGone { cause });
                        self.reopen().await;
                        on_event(&self.counts(), BridgeEvent::LineOpen);
                    }
                },
                Some(packet) = self.down.recv() => {
                    if let Some(event) = self.forward_down(packet) {
                        on_event(&self.counts(), event);
                    }
                }
            }
        }
    }

    async fn reopen(&mut self) {
        self.before = sum(self.before, self.port.counts());
        loop {
            tokio::time::sleep(REOPEN_AFTER).await;
            match SerialPort::open(&self.line, StationRole::Bridge) {
                Ok((port, packets)) => {
                    (self.port, self.packets) = (port, packets);
                    return;
                }
                Err(error) => tracing::debug!(%error, "the line is not back yet"),
            }
        }
    }

    async fn forward_up(&mut self, LinkPacket { address, bytes }: LinkPacket) {
        if bytes.len() > FORWARDED_BYTES_MAX {
            self.counts.too_large += 1;
            return;
        }
        if !self.mobiles.contains_key(&address)
            && let Err(error) = self.add_mobile(address).await
        {
            tracing::warn!(mobile = %address, %error, "no socket for a mobile");
            self.counts.unsent += 1;
            return;
        }
        let Some(mobile) = self.mobiles.get_mut(&address) else {
            return;
        };
        mobile.heard_at = Instant::now();
        let begins = matches!(bytes[0] & KIND_BITS, KIND_SYN | KIND_WAKE);
        let known = mobile.server.filter(|_| !begins);
        let everybody = self.servers.iter().copied();
        for server in known
            .into_iter()
            .chain(everybody.filter(|_| known.is_none()))
        {
            let of_family = |socket: &&Arc<UdpSocket>| {
                let local = socket.local_addr();
                local.is_ok_and(|local| local.is_ipv6() == server.is_ipv6())
            };
            let sent = match mobile.sockets.iter().find(of_family) {
                Some(socket) => socket.send_to(&bytes, server).await,
                None => Err(io::ErrorKind::AddrNotAvailable.into()),
            };
            match sent {
                Ok(_) => self.counts.up += 1,
                Err(error) => {
                    tracing::debug!(mobile = %address, %server, %error, "the uplink takes nothing");
                    self.counts.unsent += 1;
                }
            }
        }
    }

    fn forward_down(&mut self, packet: DownPacket) -> Option<BridgeEvent> {
        let DownPacket {
            mobile: address,
            from,
            bytes,
        } = packet;
        if !self.servers.contains(&from) {
            self.counts.strangers += 1;
            return None;
        }
        if bytes.len() > FORWARDED_BYTES_MAX || bytes.is_empty() {
            self.counts.too_large += 1;
            return None;
        }
        let mobile = self.mobiles.get_mut(&address)?;
        self.port.send(address, &bytes);
        self.counts.down += 1;
        // A server that does not know a mobile says so, too.
        let knows = !matches!(bytes[0] & KIND_BITS, KIND_UNKNOWN | KIND_VERSION);
        let is_new = knows && mobile.server.replace(from) != Some(from);
        is_new.then_some(BridgeEvent::Answered {
            mobile: address,
            server: from,
        })
    }

    async fn add_mobile(&mut self, address: StationAddress) -> io::Result<()> {
        let now = Instant::now();
        self.mobiles
            .retain(|_, m| now.saturating_duration_since(m.heard_at) < MOBILE_IDLE_MAX);
        if self.mobiles.len() >= MOBILES_MAX {
            let least =
                |(_, m): &(&StationAddress, &BridgedMobile)| (m.server.is_some(), m.heard_at);
            let least = self.mobiles.iter().min_by_key(least).map(|(a, _)| *a);
            if let Some(least) = least {
                self.mobiles.remove(&least);
                self.counts.displaced += 1;
            }
        }
        let mut mobile = BridgedMobile {
            sockets: Vec::new(),
            readers: Vec::new(),
            server: None,
            heard_at: now,
        };
        for ipv6 in [false, true] {
            if !self.servers.iter().any(|server| server.is_ipv6() == ipv6) {
                continue;
            }
            let local: SocketAddr = match ipv6 {
                true => (Ipv6Addr::UNSPECIFIED, 0).into(),
                false => (Ipv4Addr::UNSPECIFIED, 0).into(),
            };
            let socket = Arc::new(UdpSocket::bind(local).await?);
            let (reads, give) = (socket.clone(), self.give_down.clone());
            mobile.sockets.push(socket);
            mobile
                .readers
                .push(tokio::spawn(receive(reads, address, give)));
        }
        self.mobiles.insert(address, mobile);
        Ok(())
    }
}

/// Passes on what arrives for a mobile.
async fn receive(socket: Arc<UdpSocket>, mobile: StationAddress, give: mpsc::Sender<DownPacket>) {
    let mut buffer = [0; FORWARDED_BYTES_MAX + 1];
    loop {
        match socket.recv_from(&mut buffer).await {
            Ok((n, from)) => {
                let packet = DownPacket {
                    mobile,
                    from,
                    bytes: buffer[..n].to_vec(),
                };
                if give.send(packet).await.is_err() {
                    return;
                }
            }
            // ICMP errors of earlier packets: a server that is not there yet.
            Err(error) => tracing::debug!(%mobile, %error, "receive"),
        }
    }
}

fn sum(a: LinkCounts, b: LinkCounts) -> LinkCounts {
    LinkCounts {
        packets_in: a.packets_in + b.packets_in,
        packets_out: a.packets_out + b.packets_out,
        bytes_in: a.bytes_in + b.bytes_in,
        bytes_out: a.bytes_out + b.bytes_out,
        noise: a.noise + b.noise,
        unknown: a.unknown + b.unknown,
        foreign: a.foreign + b.foreign,
        reflected: a.reflected + b.reflected,
        contradicting: a.contradicting + b.contradicting,
        incomplete: a.incomplete + b.incomplete,
        too_large: a.too_large + b.too_large,
        queue_full: a.queue_full + b.queue_full,
        not_taken: a.not_taken + b.not_taken,
        out_of_turn: a.out_of_turn + b.out_of_turn,
        turns: a.turns + b.turns,
        unanswered_turns: a.unanswered_turns + b.unanswered_turns,
    }
}
