//! The network behind all packet tunnels: one TUN device, and which client has which address.
//!
//! ```text
//!  client's session ── DATAGRAM ──▶ packet_tunnel.rs ─▶ packet_filter.rs ─▶ ┐
//!                                                                           TUN ⇄ kernel, tunnel_rules.rs
//!  client's session ◀─ DATAGRAM ── PacketAttachment ◀── by destination ◀── ┘
//! ```

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use d2tp_driver::{Connection, DatagramSource, HostKey, MemoryCharge};
use d2tp_tunnel::{
    AnswersOnly, INNER_MTU_MAX, INNER_MTU_MIN, InnerMtu, InnerPacket, MeteredFilter, PacketSource,
    SystemCommandError, TunBatch, TunDevice, TunError, TunWriter, packet_too_big,
};
use ipnet::IpNet;
use parking_lot::{Mutex, RwLock};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::client_traffic::ClientTraffic;
use crate::counters::{ProxCounters, TrafficDirection};
use crate::inner_addresses::{InnerAddressPair, InnerAddresses, InnerNets};
use crate::packet_filter::{PacketDropReason, check_packet_to_client};
use crate::refusal::ProxRefusal;
use crate::traffic_table::TrafficTable;
use crate::tunnel_dns::serve_names;
use crate::tunnel_helper::TunnelHelper;
use crate::tunnel_rules::{DEVICE, TunnelRules};

/// The delay before another attempt to open a device that another process is about to release.
const CREATE_AGAIN: Duration = Duration::from_millis(200);

/// Why packet tunnels cannot be served.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Each variant's message is its documentation.
pub enum PacketNetworkError {
    #[error("{0}")]
    Nets(String),
    #[error("cannot read the inner addresses of clients: {0}")]
    Addresses(std::io::Error),
    #[error("--tunnel-net: {0}")]
    Tun(#[from] TunError),
    #[error("--tunnel-net: {0}")]
    Rules(#[from] SystemCommandError),
    #[error("--tunnel-net: {0}")]
    Helper(String),
}

/// A client whose packets are carried now.
pub(crate) struct PacketAttachment {
    pub(crate) addresses: InnerAddressPair,
    pub(crate) connection: Connection,
    pub(crate) traffic: Arc<ClientTraffic>,
    /// Cancelled when a newer tunnel of the same client has taken its place.
    pub(crate) replaced: CancellationToken,
    /// Packets that wait for room in the session.
    pub(crate) source: Arc<PacketSource>,
    /// What may leave over metered links, where the client restricts that.
    pub(crate) answers: Option<Arc<AnswersOnly>>,
    inner_mtu: Mutex<InnerMtu>,
    /// Whether the session sleeps: packets are held as in an outage.
    is_asleep: AtomicBool,
    /// How many packets the source had dropped when that was last counted.
    dropped: AtomicU64,
    /// How many packets had been dropped because the client pays for answers only, when that was last counted.
    unasked: AtomicU64,
}

/// The network of inner addresses, with its TUN device and the clients that have tunnels.
pub(crate) struct PacketNetwork {
    addresses: InnerAddresses,
    counters: Arc<ProxCounters>,
    traffic: Arc<TrafficTable>,
    attached: RwLock<HashMap<IpAddr, Arc<PacketAttachment>>>,
    /// Tunnels whose sessions sleep, by the numbers in their memos. They stay attached.
    sleeping: Mutex<HashMap<u64, Arc<PacketAttachment>>>,
    /// The helper process that changes the system's network, where this process may not.
    helper: Option<TunnelHelper>,
    /// The device; none before another process has released it.
    device: Mutex<Option<OpenDevice>>,
    /// The task that waits for the device.
    opening: Mutex<Option<AbortOnDropHandle<()>>>,
}

/// The device with what belongs to it: the rules end before the device is free for another process.
struct OpenDevice {
    tasks: Vec<AbortOnDropHandle<()>>,
    /// The rules, unless the helper has set them.
    rules: Option<TunnelRules>,
    tun: Arc<TunDevice>,
}

impl PacketNetwork {
    /// The network of these inner addresses. `directory`: where the addresses of clients are kept. Must be called on a
    /// runtime.
    ///
    /// # Errors
    /// The networks make no sense, or the process may not change the system's network.
    pub(crate) fn start(
        nets: &[IpNet],
        directory: Option<&Path>,
        counters: Arc<ProxCounters>,
        traffic: Arc<TrafficTable>,
        helper: Option<TunnelHelper>,
    ) -> Result<Arc<PacketNetwork>, PacketNetworkError> {
        let nets = InnerNets::of(nets).map_err(PacketNetworkError::Nets)?;
        let addresses = InnerAddresses::open(nets, directory);
        let network = Arc::new(PacketNetwork {
            addresses: addresses.map_err(PacketNetworkError::Addresses)?,
            counters,
            traffic,
            attached: RwLock::default(),
            sleeping: Mutex::default(),
            helper,
            device: Mutex::default(),
            opening: Mutex::default(),
        });
        match network.open() {
            // The process that is being taken over, most likely.
            Err(PacketNetworkError::Tun(TunError::InUse(_))) => {
                let task = tokio::spawn(network.clone().open_later());
                *network.opening.lock() = Some(AbortOnDropHandle::new(task));
            }
            opened => opened?,
        }
        Ok(network)
    }

    fn open(self: &Arc<Self>) -> Result<(), PacketNetworkError> {
        let nets = self.addresses.nets();
        let (tun, rules) = match &self.helper {
            Some(helper) if helper.open()? => {
                let attached = TunDevice::attach(DEVICE);
                if attached.is_err() {
                    helper.close();
                }
                (attached?, None)
            }
            Some(_) => return Err(TunError::InUse(DEVICE.to_owned()).into()),
            None => {
                let tun = TunDevice::create(DEVICE, INNER_MTU_MAX)?;
                (tun, Some(TunnelRules::set(&nets)?))
            }
        };
        let tun = Arc::new(tun);
        let reading = tokio::spawn(deliver(Arc::downgrade(self), tun.clone()));
        let mut tasks = vec![AbortOnDropHandle::new(reading)];
        for at in nets.gateway().all() {
            let names = async move {
                if let Err(error) = serve_names(at).await {
                    tracing::error!(%at, %error, "packet tunnels have no name server");
                }
            };
            tasks.push(AbortOnDropHandle::new(tokio::spawn(names)));
        }
        *self.device.lock() = Some(OpenDevice { tasks, rules, tun });
        tracing::info!(v4 = %nets.v4, v6 = ?nets.v6, device = DEVICE, "carries packets of tunnels");
        Ok(())
    }

    async fn open_later(self: Arc<Self>) {
        tracing::info!(
            device = DEVICE,
            "another process carries packets of tunnels; waiting for its end"
        );
        loop {
            tokio::time::sleep(CREATE_AGAIN).await;
            match self.open() {
                Ok(()) => return,
                Err(PacketNetworkError::Tun(TunError::InUse(_))) => {}
                Err(error) => return tracing::error!("{error}"),
            }
        }
    }

    /// Ends the network, and removes the device and its rules.
    pub(crate) fn close(&self) {
        *self.opening.lock() = None;
        self.sleeping.lock().clear();
        self.attached
            .write()
            .drain()
            .for_each(|(_, old)| old.replaced.cancel());
        let Some(OpenDevice { tasks, rules, tun }) = self.device.lock().take() else {
            return;
        };
        drop((tasks, rules));
        drop(tun);
        if let Some(helper) = &self.helper {
            helper.close();
        }
    }

    /// The inner networks.
    pub(crate) fn nets(&self) -> InnerNets {
        self.addresses.nets()
    }

    /// The device, for packets of clients.
    pub(crate) fn tun(&self) -> Option<Arc<TunDevice>> {
        self.device.lock().as_ref().map(|open| open.tun.clone())
    }

    /// Begins to carry a client's packets, in place of an earlier tunnel of it.
    pub(crate) fn attach(
        &self,
        client: HostKey,
        connection: Connection,
        memory: MemoryCharge,
        answers_only: bool,
    ) -> Result<Arc<PacketAttachment>, ProxRefusal> {
        let answers = answers_only.then(Arc::<AnswersOnly>::default);
        let filter = answers
            .clone()
            .map(|answers| answers as Arc<dyn MeteredFilter>);
        let source = Arc::new(PacketSource::with_filter(memory, filter));
        let attachment = Arc::new(PacketAttachment {
            addresses: self.addresses.of(client)?,
            connection,
            traffic: self.traffic.of(client),
            replaced: CancellationToken::new(),
            source: source.clone(),
            answers,
            inner_mtu: Mutex::new(InnerMtu::new(INNER_MTU_MIN)),
            is_asleep: AtomicBool::new(false),
            dropped: AtomicU64::new(0),
            unasked: AtomicU64::new(0),
        });
        let mut attached = self.attached.write();
        // Under the lock: the source of the tunnel that is in the table is the session's.
        attachment.connection.set_datagram_source(source);
        for address in attachment.addresses.all() {
            if let Some(old) = attached.insert(address, attachment.clone()) {
                old.replaced.cancel();
            }
        }
        Ok(attachment)
    }

    /// Keeps a tunnel whose session sleeps: its address, and what it holds of connections. Senders are held as in an
    /// outage.
    pub(crate) fn put_to_sleep(&self, number: u64, attachment: &Arc<PacketAttachment>) {
        attachment.source.on_outage();
        attachment.is_asleep.store(true, Ordering::Relaxed);
        self.sleeping.lock().insert(number, attachment.clone());
    }

    /// Goes on with a client's tunnel that slept, in its session. None if it is another process's, a newer tunnel of the
    /// client has taken its place, or the client has other addresses now; the tunnel is over then.
    pub(crate) fn wake(
        &self,
        number: u64,
        client: HostKey,
        connection: Connection,
    ) -> Option<Arc<PacketAttachment>> {
        let before = self.sleeping.lock().remove(&number)?;
        let has_addresses = || {
            self.addresses
                .of(client)
                .is_ok_and(|now| now == before.addresses)
        };
        if before.replaced.is_cancelled() || !has_addresses() {
            self.detach(&before);
            return None;
        }
        let source = before.source.clone();
        let counted = |count: &AtomicU64| AtomicU64::new(count.load(Ordering::Relaxed));
        let attachment = Arc::new(PacketAttachment {
            addresses: before.addresses,
            connection,
            traffic: before.traffic.clone(),
            replaced: CancellationToken::new(),
            source: source.clone(),
            answers: before.answers.clone(),
            inner_mtu: Mutex::new(InnerMtu::new(INNER_MTU_MIN)),
            is_asleep: AtomicBool::new(false),
            dropped: counted(&before.dropped),
            unasked: counted(&before.unasked),
        });
        let mut attached = self.attached.write();
        attachment.connection.set_datagram_source(source);
        for address in attachment.addresses.all() {
            attached.insert(address, attachment.clone());
        }
        drop(attached);
        attachment.connection.datagrams_ready();
        Some(attachment)
    }

    /// Ends a tunnel whose session will not wake any more.
    pub(crate) fn forget_sleeping(&self, number: u64) {
        if let Some(attachment) = self.sleeping.lock().remove(&number) {
            self.detach(&attachment);
        }
    }

    /// Carries no more packets of this tunnel.
    pub(crate) fn detach(&self, attachment: &Arc<PacketAttachment>) {
        let is_it = |_: &IpAddr, now: &mut Arc<PacketAttachment>| !Arc::ptr_eq(now, attachment);
        self.attached.write().retain(is_it);
        attachment.source.clear();
    }

    /// Whether the client may have a packet moved now.
    pub(crate) fn admits(
        &self,
        attachment: &PacketAttachment,
        direction: TrafficDirection,
        bytes: usize,
    ) -> bool {
        self.traffic
            .admits_packet(&attachment.traffic, direction, bytes)
    }

    /// Counts a packet that is dropped.
    pub(crate) fn on_drop(&self, reason: PacketDropReason) {
        self.counters.on_tunnel_packets_dropped(reason.as_str(), 1);
    }

    /// The tunnel of the client for whom a packet is.
    fn receiver(&self, bytes: &[u8]) -> Result<Arc<PacketAttachment>, PacketDropReason> {
        let packet = InnerPacket::parse(bytes).map_err(PacketDropReason::Header)?;
        check_packet_to_client(&packet, &self.nets())?;
        let attached = self.attached.read();
        let attachment = attached.get(&packet.destination);
        let attachment = attachment.ok_or(PacketDropReason::NoTunnel)?;
        match self.admits(attachment, TrafficDirection::Down, bytes.len()) {
            true => Ok(attachment.clone()),
            false => Err(PacketDropReason::OverLimit),
        }
    }

    /// Sends packets to their clients; returns answers for the senders of those that are too large.
    fn deliver(&self, batch: &TunBatch) -> Vec<Bytes> {
        let mut groups: Vec<(Arc<PacketAttachment>, Vec<&[u8]>)> = Vec::new();
        for packet in batch.packets() {
            match self.receiver(packet) {
                Ok(to) => match groups.last_mut() {
                    Some((last, packets)) if Arc::ptr_eq(last, &to) => packets.push(packet),
                    _ => groups.push((to, vec![packet])),
                },
                // This machine's own on a new device, such as router solicitations: no router forwards any here.
                Err(PacketDropReason::Multicast) => {}
                Err(reason) => self.on_drop(reason),
            }
        }
        let mut answers = Vec::new();
        for (to, packets) in groups {
            let too_big = to.send(&packets, &mut answers);
            let late = to.newly_dropped();
            for (reason, dropped) in [
                (PacketDropReason::TooBig, too_big),
                (PacketDropReason::QueueFull, late),
                (PacketDropReason::Unasked, to.newly_unasked()),
            ] {
                if dropped > 0 {
                    self.counters
                        .on_tunnel_packets_dropped(reason.as_str(), dropped);
                }
            }
        }
        answers
    }
}

impl PacketAttachment {
    /// Sends packets to the client as its session has room, and returns how many were too large. Their senders get
    /// `answers`.
    fn send(&self, packets: &[&[u8]], answers: &mut Vec<Bytes>) -> u64 {
        let is_asleep = self.is_asleep.load(Ordering::Relaxed);
        if self.connection.datagram_max().is_none() && !is_asleep {
            // The session is over.
            return 0;
        }
        let carried = self.connection.datagram_max_now();
        let mtu = self.inner_mtu.lock().follow(Instant::now(), carried);
        let answered = answers.len();
        let fitting = packets.iter().copied().filter(|packet| {
            if packet.len() <= usize::from(mtu) {
                return true;
            }
            // A router's answer; its address is the client's own, because the kernel takes none from itself here.
            let from = match packet[0] >> 4 {
                6 => self.addresses.v6.map(IpAddr::from),
                _ => Some(self.addresses.v4.into()),
            };
            let answer = from.and_then(|from| packet_too_big(packet, from, mtu));
            let is_refused = answer.is_some();
            answers.extend(answer.map(Bytes::from));
            !is_refused
        });
        let closed_windows = self.source.push(&self.connection, fitting);
        let too_big = (answers.len() - answered) as u64;
        answers.extend(closed_windows);
        too_big
    }

    /// How many packets were dropped since the last call because they waited too long, or the queue was full.
    fn newly_dropped(&self) -> u64 {
        let (counts, too_long) = self.source.counts();
        let all = counts.dropped() + too_long;
        all - self.dropped.swap(all, Ordering::Relaxed)
    }

    fn newly_unasked(&self) -> u64 {
        let all = self.answers.as_ref().map_or(0, |answers| answers.refused());
        all - self.unasked.swap(all, Ordering::Relaxed)
    }
}

/// Hands packets from the kernel to clients until the device is gone.
async fn deliver(network: std::sync::Weak<PacketNetwork>, tun: Arc<TunDevice>) {
    let (mut batch, mut writer) = (TunBatch::default(), TunWriter::default());
    loop {
        if let Err(error) = tun.recv(&mut batch).await {
            return tracing::error!(%error, device = DEVICE, "no packets reach clients any more");
        }
        let Some(network) = network.upgrade() else {
            return;
        };
        let answers = network.deliver(&batch);
        if !answers.is_empty() {
            let _ = tun.send(&mut writer, &answers);
        }
    }
}

#[cfg(test)]
mod tests {
    use d2tp_driver::{EndpointConfig, MemoryPool};

    use super::*;
    use crate::client_limits::ClientLimitTable;
    use crate::config::ProxConfig;
    use crate::session_pair::SessionPair;

    /// A network without a device.
    fn network() -> PacketNetwork {
        let nets = InnerNets::of(&["10.83.0.0/16".parse().unwrap()]).unwrap();
        let limits = Arc::new(ClientLimitTable::new(&ProxConfig::default()));
        let counters = Arc::<ProxCounters>::default();
        let traffic = TrafficTable::open(None, limits, counters.clone()).unwrap();
        PacketNetwork {
            addresses: InnerAddresses::open(nets, None).unwrap(),
            counters,
            traffic: Arc::new(traffic),
            attached: RwLock::default(),
            sleeping: Mutex::default(),
            helper: None,
            device: Mutex::default(),
            opening: Mutex::default(),
        }
    }

    #[tokio::test]
    async fn a_sleeping_tunnel_whose_client_has_other_addresses_now_is_detached_when_it_is_refused()
    {
        let pair = SessionPair::start(EndpointConfig::default()).await;
        let (client, network) = (pair.far.connection().peer().0, network());
        let memory = || {
            MemoryPool::default()
                .account(pair.far.connection().peer())
                .charge()
        };
        let attach = || network.attach(client, pair.far.connection(), memory(), false);
        let attachment = attach().unwrap();
        network.put_to_sleep(1, &attachment);
        assert_eq!(network.attached.read().len(), 1);
        // As if another client had its addresses now, and it had been given others.
        network.addresses.renumber(client);
        assert!(network.wake(1, client, pair.far.connection()).is_none());
        assert!(network.attached.read().is_empty());
        assert!(network.sleeping.lock().is_empty());
        // The client opens another tunnel.
        attach().unwrap();
        assert_eq!(network.attached.read().len(), 1);
    }
}
