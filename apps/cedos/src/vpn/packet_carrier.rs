//! Carries packets between the device `cedos0` and the session, and opens the tunnel again when it ended.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use cedos_agent::proxy::{ConnOptions, ConnectRefusal, MeteredPackets, PacketTunnel, ProxySession};
use d2tp_driver::{Connection, MemoryCharge};
use d2tp_tunnel::{
    InnerMtu, InnerPacket, MeteredFilter, PACKET_CONTEXT, PacketSource, PieceJoiner, TunBatch,
    TunDevice, TunWriter,
};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::sleep;

use super::packet_rules::PacketRules;

/// How soon a tunnel that ended is opened again.
const OPEN_AGAIN: Duration = Duration::from_secs(1); // a guess

/// How often the inner MTU is compared with what the session's paths carry.
const MTU_CHECK_EVERY: Duration = Duration::from_secs(1); // a guess: paths find their MTU within a few round trips

/// Packets that were carried and dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PacketCounts {
    /// Packets that were handed to the session.
    pub sent: u64,
    /// Packets that came from the proxy.
    pub received: u64,
    /// Packets dropped because there was no tunnel, or no room in it, or their destination is not this machine.
    pub dropped: u64,
    /// Bytes of headers that this machine did not send, because only slow networks carried and headers were compressed.
    #[serde(default)]
    pub header_bytes_saved: u64,
}

/// Lost segments of TCP as packets that were sent again, and what came over metered networks beside free ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepairCounts {
    /// Segments that this machine sent again over the network that most packets take.
    pub same_network: u64,
    /// Segments that this machine sent again over another network.
    pub other_network: u64,
    /// Bytes of segments that this machine sent again over metered networks.
    pub metered_sent_bytes: u64,
    /// Datagrams that came over metered networks beside free ones: segments that the proxy sent again, or parts of them, and ACKs.
    pub metered_received: u64,
    /// Bytes of those datagrams.
    pub metered_received_bytes: u64,
}

/// Datagrams that came over metered networks beside free ones, and their bytes, over all tunnels.
#[derive(Debug, Default)]
struct MeteredTally {
    /// The datagrams, and their bytes, of tunnels that ended.
    before: (u64, u64),
    /// What the session had counted when the tunnel was opened.
    from: (u64, u64),
}

#[derive(Debug, Default)]
struct PacketCounters {
    sent: AtomicU64,
    received: AtomicU64,
    dropped: AtomicU64,
}

/// Carries the packets of a TUN device over a session, and back.
pub struct PacketCarrier {
    session: Arc<ProxySession>,
    /// When some packets may use metered networks.
    options: ConnOptions,
    /// Which packets may use metered networks; `None` means all.
    rules: Option<Arc<PacketRules>>,
    tun: Arc<TunDevice>,
    addresses: Vec<IpAddr>,
    connection: watch::Sender<Option<Connection>>,
    /// Packets that wait for room in the session.
    source: Arc<PacketSource>,
    /// Why there is no tunnel now.
    reason: watch::Sender<Option<String>>,
    mtu: watch::Sender<u16>,
    counters: PacketCounters,
    metered: Mutex<MeteredTally>,
}

/// The datagrams that a session has got over metered networks, and their bytes.
fn counted_metered(connection: &Connection) -> (u64, u64) {
    let stats = connection.datagram_stats();
    stats.map_or((0, 0), |(stats, _)| {
        (stats.gated_received, stats.gated_bytes_in)
    })
}

impl PacketCarrier {
    /// Carries packets of a device whose addresses are those of the first tunnel.
    pub fn new(
        session: Arc<ProxySession>,
        options: ConnOptions,
        rules: Option<Arc<PacketRules>>,
        tun: Arc<TunDevice>,
        addresses: Vec<IpAddr>,
        mtu: u16,
    ) -> Arc<PacketCarrier> {
        let filter = rules.clone().map(|rules| rules as Arc<dyn MeteredFilter>);
        Arc::new(PacketCarrier {
            session,
            options,
            rules,
            tun,
            addresses,
            connection: watch::Sender::default(),
            source: Arc::new(PacketSource::with_filter(MemoryCharge::default(), filter)),
            reason: watch::Sender::default(),
            mtu: watch::Sender::new(mtu),
            counters: PacketCounters::default(),
            metered: Mutex::default(),
        })
    }

    /// Whether there is a tunnel now, and if not, why.
    pub fn connected(&self) -> Result<(), Option<String>> {
        match self.connection.borrow().is_some() {
            true => Ok(()),
            false => Err(self.reason.borrow().clone()),
        }
    }

    /// The inner MTU now.
    pub fn mtu(&self) -> u16 {
        *self.mtu.borrow()
    }

    /// The numbers of packets carried and dropped so far.
    pub fn counts(&self) -> PacketCounts {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (queue, too_long) = self.source.counts();
        let refused = self.rules.as_ref().map_or(0, |rules| rules.refused());
        let unsent = queue.dropped() + too_long + refused;
        PacketCounts {
            sent: load(&self.counters.sent).saturating_sub(unsent),
            received: load(&self.counters.received),
            dropped: load(&self.counters.dropped) + unsent,
            header_bytes_saved: self.source.header_bytes_saved(),
        }
    }

    /// Lost segments that were sent again so far.
    pub fn repairs(&self) -> RepairCounts {
        let sent = self.source.repair_counts();
        let connection = self.connection.borrow().clone();
        let (metered_received, metered_received_bytes) = self.metered_received(connection.as_ref());
        RepairCounts {
            same_network: sent.usual,
            other_network: sent.elsewhere,
            metered_sent_bytes: sent.metered_bytes,
            metered_received,
            metered_received_bytes,
        }
    }

    fn metered_tally(&self) -> MutexGuard<'_, MeteredTally> {
        self.metered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What came over metered networks beside free ones so far. `connection`: that of the tunnel that is open.
    fn metered_received(&self, connection: Option<&Connection>) -> (u64, u64) {
        let tally = self.metered_tally();
        let now = connection.map_or(tally.from, counted_metered);
        let more = |now: u64, from: u64| now.saturating_sub(from);
        (
            tally.before.0 + more(now.0, tally.from.0),
            tally.before.1 + more(now.1, tally.from.1),
        )
    }

    /// Carries packets, beginning with this tunnel, until the device is gone.
    pub async fn run(self: Arc<Self>, first: PacketTunnel) {
        tokio::select! {
            () = self.send_packets() => {}
            () = self.keep_tunnel(first) => {}
        }
    }

    /// Receives packets, and opens the tunnel again whenever it ended.
    async fn keep_tunnel(&self, first: PacketTunnel) {
        let mut next = Some(first);
        loop {
            let opened = match next.take() {
                Some(tunnel) => Ok(tunnel),
                None => {
                    let metered = match self.rules {
                        Some(_) => MeteredPackets::AnswersOnly,
                        None => MeteredPackets::All,
                    };
                    self.session
                        .open_packet_tunnel(PACKET_CONTEXT, self.options, metered)
                        .await
                }
            };
            match opened {
                Ok(tunnel) if tunnel.addresses == self.addresses => {
                    self.reason.send_replace(None);
                    self.receive_packets(tunnel).await;
                    self.connection.send_replace(None);
                    tracing::info!("the packet tunnel ended; opening it again");
                }
                Ok(_) => self.note_failure(
                    "the proxy gave this device other addresses; `cedos vpn down` and `up`",
                ),
                Err(ConnectRefusal { text, .. }) => self.note_failure(&text),
            }
            sleep(OPEN_AGAIN).await;
        }
    }

    fn note_failure(&self, text: &str) {
        let is_new = self.reason.send_if_modified(|known| {
            let is_new = known.as_deref() != Some(text);
            *known = Some(text.to_owned());
            is_new
        });
        if is_new {
            tracing::warn!("no packet tunnel: {text}");
        }
    }

    /// Hands packets of a tunnel to the kernel until it ends.
    async fn receive_packets(&self, mut tunnel: PacketTunnel) {
        self.source.set_headers(tunnel.headers);
        self.source.repair_elsewhere(tunnel.flow_id);
        self.metered_tally().from = counted_metered(&tunnel.connection);
        tunnel.connection.set_datagram_source(self.source.clone());
        self.connection
            .send_replace(Some(tunnel.connection.clone()));
        let connection = tunnel.connection.clone();
        let (mut flow, flow_id) = (tunnel.take_flow(), tunnel.flow_id);
        let writing = async {
            match &mut flow {
                Some(flow) => {
                    drop(self.source.write_capsules(&connection, flow_id, flow).await);
                }
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = self.receive_from(&mut tunnel, &connection) => {}
            () = writing => {}
        }
        let before = self.metered_received(Some(&connection));
        let from = counted_metered(&connection);
        *self.metered_tally() = MeteredTally { before, from };
        // Stale by the time there is another tunnel.
        self.source.clear();
    }

    async fn receive_from(&self, tunnel: &mut PacketTunnel, connection: &Connection) {
        let (mut joiner, mut writer) = (PieceJoiner::default(), TunWriter::default());
        let (mut datagrams, mut packets) = (Vec::new(), Vec::<Bytes>::new());
        let mut mtu = InnerMtu::new(self.mtu());
        loop {
            datagrams.clear();
            let received = tokio::select! {
                received = tunnel.recv_all(&mut datagrams) => received,
                () = sleep(MTU_CHECK_EVERY) => true,
            };
            self.follow_mtu(&mut mtu, connection);
            if !received {
                return;
            }
            for packet in datagrams
                .drain(..)
                .filter_map(|datagram| joiner.join(datagram))
                .map(|packet| self.source.expanded(packet))
            {
                match InnerPacket::parse(&packet) {
                    Ok(parsed) if self.addresses.contains(&parsed.destination) => {
                        if let Some(rules) = &self.rules {
                            rules.on_received(&parsed, packet.len(), tunnel.came_in_flow());
                        }
                        packets.push(packet)
                    }
                    _ => drop(self.counters.dropped.fetch_add(1, Ordering::Relaxed)),
                }
            }
            let count = packets.len() as u64;
            self.counters.received.fetch_add(count, Ordering::Relaxed);
            self.source.on_received(connection, &mut packets);
            if self.tun.send(&mut writer, &packets).is_err() {
                return;
            }
            packets.clear();
        }
    }

    /// Sets the device's MTU to what the session's paths carry.
    fn follow_mtu(&self, mtu: &mut InnerMtu, connection: &Connection) {
        let mtu = mtu.follow(Instant::now(), connection.datagram_max_now());
        if mtu != self.mtu() {
            match self.tun.set_mtu(mtu) {
                Ok(()) => drop(self.mtu.send_replace(mtu)),
                Err(error) => tracing::warn!(%error, mtu, "cannot set the MTU"),
            }
        }
    }

    /// Hands packets of the kernel to the session.
    async fn send_packets(&self) {
        let (mut batch, mut writer) = (TunBatch::default(), TunWriter::default());
        loop {
            if let Err(error) = self.tun.recv(&mut batch).await {
                return tracing::error!(%error, "the network device is gone");
            }
            let count = batch.packets().count() as u64;
            // A session that is over ends the tunnel, elsewhere.
            let (counter, answers) = match &*self.connection.borrow() {
                Some(connection) => {
                    let answers = self.source.push(connection, batch.packets());
                    (&self.counters.sent, answers)
                }
                None => (&self.counters.dropped, Vec::new()),
            };
            counter.fetch_add(count, Ordering::Relaxed);
            if !answers.is_empty() {
                let _ = self.tun.send(&mut writer, &answers);
            }
        }
    }
}
