//! Carries packets between the device `cedos0` and the session, and opens the tunnel again when it ended.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
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
        }
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
