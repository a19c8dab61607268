//! A server: a host that accepts sessions, such as D2Prox or an origin that supports D2TP.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use d2tp_session::{Admission, Endpoint, EndpointConfig, PublicKey, RelayLimits, SecretKey};
use d2tp_stream::TcpStreamAcceptor;
use d2tp_udp::{BindOptions, LinkSocket};
use parking_lot::Mutex;

use crate::datagrams::Connection;
use crate::driver_core::{DriverError, DriverShared};
use crate::engine;
use crate::engine_counts::EngineCounts;
use crate::flow::Flow;
use crate::hibernation;
use crate::hibernation_state::{HibernatedReader, HibernationState};
use crate::journal::JournalError;
use crate::qlog::Qlog;
use crate::record_store::RecordStore;
use crate::relay_meter::RelayMeter;
use crate::relay_state::RelayHost;
use crate::secrets::{derive, seed};
use crate::session_handoff;
use crate::shared_records;
use crate::source::HostKey;
use crate::stream_acceptor::StreamAcceptor;
use crate::ticket_seed;
use crate::workers;

/// Options of a server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The address to listen at. `[::]:port` serves both address families if the system supports
    /// that.
    pub listen: SocketAddr,
    /// The key pair of the server.
    pub key: SecretKey,
    /// Which devices may connect.
    pub admission: Admission,
    /// The settings of the protocol.
    pub config: EndpointConfig,
}

/// How sessions of absent devices are kept.
#[derive(Clone, Debug, Default)]
pub struct HibernationOptions {
    /// How long a device may be silent before its session hibernates; `None`: never. Hibernation
    /// frees keys and buffers, and resuming costs a handshake.
    pub hibernate_after: Option<Duration>,
    /// The journal, which keeps sessions across restarts of this process, or the store that it shares with other nodes.
    pub journal: Option<Arc<dyn RecordStore>>,
}

/// What happens to the sockets of a server that leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketsAfter {
    /// The sockets are closed.
    Closed,
    /// The next process receives from them. Devices are informed that this one ends (R-UNKNOWN-4), and what they
    /// send waits in the sockets.
    Kept,
}

/// A listening server.
pub struct Server {
    /// The workers, which share the port; one if nothing else was requested.
    workers: Vec<Arc<DriverShared>>,
    local: SocketAddr,
    public: PublicKey,
    stream_acceptors: Mutex<Vec<StreamAcceptor>>,
}

impl Server {
    /// Binds a server, which begins to listen. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// The socket could not be bound.
    pub fn bind(options: ServerOptions) -> Result<Server, DriverError> {
        Server::bind_with(options, HibernationOptions::default())
    }

    /// Binds a server whose sessions may hibernate.
    ///
    /// # Errors
    /// The socket could not be bound, or the journal could not be read.
    pub fn bind_with(
        options: ServerOptions,
        rest: HibernationOptions,
    ) -> Result<Server, DriverError> {
        Server::start(bind_all(options.listen)?, options, rest)
    }

    /// Binds a server with several workers on its port, each of which runs its sessions beside the others. All
    /// sessions of a client are in one worker.
    ///
    /// # Errors
    /// The sockets could not be bound, the system cannot steer packets to workers, or the journal could not be read.
    pub fn bind_workers(
        workers: u16,
        options: ServerOptions,
        rest: HibernationOptions,
    ) -> Result<Server, DriverError> {
        if workers < 2 {
            return Server::bind_with(options, rest);
        }
        // Sockets that share a port would share it with another program of this user as well.
        let alone = bind_all(options.listen)?;
        let port = alone[0].local_addr().port();
        drop(alone);
        let listen = SocketAddr::new(options.listen.ip(), port);
        let mut sockets = Vec::new();
        for _ in 0..workers {
            sockets.extend(bind_each(listen, true)?);
        }
        Server::start(sockets, options, rest)
    }

    /// Starts a server on sockets that were bound before, perhaps by another process. If `listen` of the options is
    /// `[::]` and all of them are of one family, the other is bound. Sockets with the same address belong to different
    /// workers, in the order in which they were bound. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// There is no socket, one is unusable, or the journal could not be read.
    pub fn on_sockets(
        sockets: Vec<UdpSocket>,
        options: ServerOptions,
        rest: HibernationOptions,
    ) -> Result<Server, DriverError> {
        let sockets = sockets.into_iter().map(LinkSocket::from_std);
        let mut sockets: Vec<LinkSocket> = sockets
            .collect::<std::io::Result<_>>()
            .map_err(DriverError::Socket)?;
        bind_missing_family(&mut sockets, options.listen);
        Server::start(sockets, options, rest)
    }

    fn start(
        sockets: Vec<LinkSocket>,
        options: ServerOptions,
        rest: HibernationOptions,
    ) -> Result<Server, DriverError> {
        let mut addresses = sockets.iter().map(LinkSocket::local_addr);
        let first = addresses.clone().next();
        let is_of_both = |at: &SocketAddr| at.is_ipv6() && at.ip().is_unspecified();
        let Some(local) = addresses.find(is_of_both).or(first) else {
            return Err(DriverError::Socket(ErrorKind::NotFound.into()));
        };
        let public = options.key.public();
        let ticket_seed = ticket_seed::load_or_create(rest.journal.as_deref())?;
        let token_seed = token_seed(&options, &rest, &ticket_seed);
        let cookie_seed = seed();
        let sockets = workers::assign(sockets, &options.key)?;
        let count = sockets.len();
        let mut workers = Vec::with_capacity(count);
        for (share, sockets) in sockets {
            let config = EndpointConfig {
                worker: share,
                ..options.config.clone()
            };
            let (key, admission) = (options.key.clone(), options.admission.clone());
            let mut core = Endpoint::new(config, key, admission, seed(), token_seed);
            core.set_ticket_seed(ticket_seed);
            if count > 1 {
                core.set_cookie_seed(cookie_seed);
            }
            let shared = engine::start(core, true);
            shared.inner.lock().hibernation =
                HibernationState::new(rest.hibernate_after, rest.journal.clone());
            if let Some(journal) = rest.journal.clone() {
                let more = match journal.as_journal() {
                    Some(journal) => hibernation::load(&mut shared.inner.lock(), journal)?,
                    None => {
                        shared.inner.lock().core.set_records_shared(true);
                        None
                    }
                };
                if let Some(after) = more {
                    tokio::spawn(hibernation::journal_loader(shared.clone(), journal, after));
                }
                tokio::spawn(hibernation::journal_writer(shared.clone()));
            }
            workers.push((shared, sockets));
        }
        let engines: Vec<_> = workers.iter().map(|(shared, _)| shared.clone()).collect();
        workers::connect(&engines);
        if let Some(store) = rest.journal.and_then(RecordStore::as_shared) {
            let workers: Vec<_> = engines.iter().map(Arc::downgrade).collect();
            tokio::spawn(session_handoff::answer_questions(
                store.clone(),
                workers.clone(),
            ));
            tokio::spawn(shared_records::hear_losses(store, workers));
        }
        for (shared, sockets) in workers {
            for socket in sockets {
                let is_wildcard = socket.local_addr().ip().is_unspecified();
                shared.add_socket(socket, is_wildcard);
            }
        }
        Ok(Server {
            workers: engines,
            local,
            public,
            stream_acceptors: Mutex::default(),
        })
    }

    pub(crate) fn workers(&self) -> &[Arc<DriverShared>] {
        &self.workers
    }

    /// Other descriptors of the server's sockets, for the next process.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn share_sockets(&self) -> std::io::Result<Vec<OwnedFd>> {
        let mut shared = Vec::new();
        for worker in &self.workers {
            for socket in worker.inner.lock().sockets.values() {
                shared.push(socket.io.as_fd().try_clone_to_owned()?);
            }
        }
        Ok(shared)
    }

    /// The address that the server listens at: `[::]` if it is one of several.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }
    /// The server's public key.
    pub fn public_key(&self) -> PublicKey {
        self.public
    }

    /// Serves devices whose networks carry no UDP: their packets come in streams that `acceptor` accepts. Each
    /// stream goes to the worker that has its device's sessions. Must be called on a tokio runtime.
    pub fn accept_streams(&self, acceptor: TcpStreamAcceptor) {
        let accepting = StreamAcceptor::start(Arc::downgrade(&self.workers[0]), acceptor);
        self.stream_acceptors.lock().push(accepting);
    }

    /// The next flow that a device opens; `None` when the server has stopped.
    pub async fn accept(&self) -> Option<Flow> {
        std::future::poll_fn(|cx| {
            let mut polls = self.workers.iter().map(|worker| worker.poll_accept(cx));
            polls.find(Poll::is_ready).unwrap_or(Poll::Pending)
        })
        .await
    }

    /// Logs sessions to `log` from now on, each into its own file.
    pub fn log_to(&self, log: &Arc<Qlog>) {
        self.workers.iter().for_each(|worker| worker.log_to(log));
    }

    /// All sessions that are awake.
    pub fn connections(&self) -> Vec<Connection> {
        let of_worker = |worker: &Arc<DriverShared>| {
            let inner = worker.inner.lock();
            let ids = inner.core.ids().into_iter();
            let connections = ids.filter_map(|id| {
                let peer = inner.core.session(id)?.peer();
                Some(Connection::new(worker.clone(), id, peer))
            });
            connections.collect::<Vec<_>>()
        };
        self.workers.iter().flat_map(of_worker).collect()
    }

    /// Whether the journal is loaded completely. Until then a session is looked up when its device
    /// connects; only deadlines of unloaded sessions have to wait.
    pub fn knows_all(&self) -> bool {
        let mut workers = self.workers.iter();
        workers.all(|worker| worker.inner.lock().hibernation.knows_all())
    }

    /// The numbers of awake, hibernated and half-open sessions.
    pub fn counts(&self) -> (usize, usize, usize) {
        let counts = self.counts_by_worker().into_iter();
        counts.fold((0, 0, 0), |sum, of| {
            (sum.0 + of.0, sum.1 + of.1, sum.2 + of.2)
        })
    }

    /// The numbers of awake, hibernated and half-open sessions of each worker.
    pub fn counts_by_worker(&self) -> Vec<(usize, usize, usize)> {
        let workers = self.workers.iter();
        workers.map(|w| w.inner.lock().core.counts()).collect()
    }

    /// The number of packets that one worker received and another handled: some first packets, and what the kernel
    /// does not steer.
    pub fn passed_between_workers(&self) -> u64 {
        self.workers.iter().map(|w| w.workers.passed()).sum()
    }

    /// What the server's engines did so far.
    pub fn engine_counts(&self) -> EngineCounts {
        let counts = self.workers.iter().map(|w| w.inner.lock().counts);
        counts.fold(EngineCounts::default(), EngineCounts::plus)
    }

    /// The next memo of a flow that expired while it was hibernated, and its device. `None` when the
    /// server has stopped.
    pub async fn next_expired(&self) -> Option<(HostKey, Bytes)> {
        let next = std::future::poll_fn(|cx| {
            let mut polls = (self.workers.iter()).map(|w| hibernation::poll_next_expired(w, cx));
            polls.find(Poll::is_ready).unwrap_or(Poll::Pending)
        });
        let (key, memo) = next.await?;
        Some((key.peer.0, memo))
    }

    /// Sets the reader of hibernated flows, which allows their first bytes to be sent with the
    /// answer to a SYN, one round trip sooner. It is called while the server's lock is held.
    pub fn set_hibernated_reader(&self, peek: Arc<HibernatedReader>) {
        for worker in &self.workers {
            worker.inner.lock().hibernation.peek = Some(peek.clone());
        }
    }

    /// Stages a note of the application, which is written with the next changes; `None` removes it.
    pub fn note(&self, name: Vec<u8>, value: Option<Bytes>) {
        self.workers[0].inner.lock().hibernation.note(name, value);
    }

    /// Allows flows of this server to open relays, through [`crate::FlowIo::relays`]. Of several workers each allows its
    /// part of all relays.
    pub fn relay_for_devices(&self, limits: RelayLimits) {
        let all = limits.all.div_ceil(self.workers.len());
        for worker in &self.workers {
            let host = RelayHost::new(RelayLimits { all, ..limits }, seed());
            worker.inner.lock().relays.host = Some(host);
        }
    }

    /// Has each packet that a relay forwards counted, and dropped where its client may not have it forwarded now.
    /// [`Server::relay_for_devices`] comes before.
    pub fn meter_relays(&self, meter: Arc<dyn RelayMeter>) {
        for worker in &self.workers {
            if let Some(host) = &mut worker.inner.lock().relays.host {
                host.meter = Some(meter.clone());
            }
        }
    }

    /// Waits until each accepted flow is over or may hibernate, at most for `max`: some never may.
    pub async fn until_kept(&self, max: Duration) {
        let every_flow_is_kept = || {
            let mut workers = self.workers.iter();
            workers.all(|worker| {
                let inner = worker.inner.lock();
                let mut flows = inner.flows.values();
                flows.all(|entry| entry.memo.is_some() || entry.end.is_some() || entry.unclaimed)
            })
        };
        let kept = async {
            while !every_flow_is_kept() {
                tokio::time::sleep(KEPT_CHECK_EVERY).await;
            }
        };
        let _ = tokio::time::timeout(max, kept).await;
    }

    /// Stops without informing devices whose flows may hibernate: the next process with the journal
    /// continues them. Other flows are reset with `code`.
    ///
    /// # Errors
    /// The journal could not be written.
    pub async fn leave(&self, code: u64, sockets: SocketsAfter) -> Result<(), JournalError> {
        let accepting = std::mem::take(&mut *self.stream_acceptors.lock());
        for acceptor in accepting {
            acceptor.stop(STREAMS_OPEN_WITHIN).await;
        }
        self.stop_receiving().await;
        for worker in &self.workers {
            let mut inner = worker.inner.lock();
            if sockets == SocketsAfter::Kept {
                let paths = inner.core.announce_restart();
                tracing::debug!(paths, "announced the restart");
            }
            hibernation::hibernate_all(&mut inner, code);
            drop(inner);
            worker.wake();
        }
        // The resets are sent in the task's next turn. Devices wait, so records are written meanwhile.
        let last_packets = async {
            tokio::time::sleep(CLOSE_GRACE).await;
            for worker in &self.workers {
                worker.inner.lock().streams.close_all();
            }
        };
        let (early, ()) = tokio::join!(self.write_records(), last_packets);
        if let Err(error) = early {
            tracing::warn!(%error, "records of sessions are written again");
        }
        // What the last turn changed.
        let written = self.write_records().await;
        self.workers.iter().for_each(|worker| worker.stop());
        written
    }

    /// Receives nothing more, and waits until all that was received is handled: a worker that has no session of a device any
    /// more would begin one anew for a handshake that another worker passes to it.
    async fn stop_receiving(&self) {
        for worker in &self.workers {
            worker.inner.lock().is_deaf = true;
        }
        let handled = async {
            // First each worker passes on what it has received, then each handles what was passed to it.
            for _ in 0..2 {
                self.finish_turns().await;
            }
        };
        if tokio::time::timeout(RECEIVED_HANDLED_WITHIN, handled)
            .await
            .is_err()
        {
            tracing::debug!("the last packets are left to the next process");
        }
    }

    /// Waits until each engine has had a whole turn.
    async fn finish_turns(&self) {
        let turns = |worker: &Arc<DriverShared>| worker.inner.lock().counts.turns;
        // One turn may be under way.
        let workers = self
            .workers
            .iter()
            .map(|worker| (worker, turns(worker) + 2));
        let mut awaited: Vec<_> = workers.collect();
        loop {
            awaited.retain(|(worker, after)| turns(worker) < *after);
            if awaited.is_empty() {
                return;
            }
            awaited.iter().for_each(|(worker, _)| worker.wake());
            tokio::time::sleep(TURN_CHECK_EVERY).await;
        }
    }

    /// Writes what changed of the records of sessions.
    async fn write_records(&self) -> Result<(), JournalError> {
        let mut written = Ok(());
        for worker in &self.workers {
            let journal = worker.inner.lock().hibernation.journal.clone();
            if let Some(journal) = journal {
                written = written.and(hibernation::write_batch(worker, &journal).await);
            }
        }
        written
    }

    /// Informs every device that this host stops, without waiting as [`Server::close`] does.
    pub fn say_goodbye(&self) {
        for worker in &self.workers {
            let mut inner = worker.inner.lock();
            for id in inner.core.ids() {
                let _ = inner.core.with(id, |s| s.close(0, "the proxy is stopping"));
            }
            drop(inner);
            worker.wake();
        }
    }

    /// Informs every device that this host stops, and stops.
    pub async fn close(&self) {
        self.say_goodbye();
        // The CLOSE frames are sent in the task's next turn.
        tokio::time::sleep(CLOSE_GRACE).await;
        self.workers.iter().for_each(|worker| worker.stop());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.workers.iter().for_each(|worker| worker.stop());
    }
}

/// The secret of UNKNOWN tokens. It outlives the process, so that after a restart the peers of old sessions can be told
/// that those are unknown. Nodes with one key and journals of their own have different ones (R-UNKNOWN-5). Where an
/// address may move from node to node, behind a balancer or with a shared store, it is the same.
fn token_seed(
    options: &ServerOptions,
    rest: &HibernationOptions,
    ticket_seed: &[u8; 32],
) -> [u8; 32] {
    let is_own = rest
        .journal
        .as_ref()
        .is_some_and(|j| j.as_journal().is_some());
    let mut purpose = b"d2tp token secret".to_vec();
    if is_own && options.config.cid_share.is_none() {
        purpose.extend(ticket_seed);
    }
    derive(&purpose, &options.key.to_bytes())
}

/// Binds one socket, or for `[::]` one of each family: a host without IPv6, or without IPv4, still
/// serves the other family.
fn bind_all(listen: SocketAddr) -> Result<Vec<LinkSocket>, DriverError> {
    bind_each(listen, false)
}

/// Binds the family of `[::]` of which no socket is there, for as many workers as there are.
fn bind_missing_family(sockets: &mut Vec<LinkSocket>, listen: SocketAddr) {
    let Some(at) = sockets.first().map(LinkSocket::local_addr) else {
        return;
    };
    let has_both = sockets.iter().any(|s| s.local_addr().is_ipv4())
        && sockets.iter().any(|s| s.local_addr().is_ipv6());
    let is_for_both = listen.is_ipv6() && listen.ip().is_unspecified();
    if has_both || !is_for_both || !at.ip().is_unspecified() {
        return;
    }
    let missing: IpAddr = match at {
        SocketAddr::V4(_) => Ipv6Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv4Addr::UNSPECIFIED.into(),
    };
    let workers = sockets.iter().filter(|s| s.local_addr() == at).count();
    let bind = |_| {
        LinkSocket::bind(&BindOptions {
            reuse_port: workers > 1,
            ..BindOptions::at((missing, at.port()).into())
        })
    };
    match (0..workers).map(bind).collect::<Result<Vec<_>, _>>() {
        Ok(bound) => sockets.extend(bound),
        Err(error) => tracing::warn!(%error, "serving one address family only"),
    }
}

fn bind_each(listen: SocketAddr, is_shared: bool) -> Result<Vec<LinkSocket>, DriverError> {
    let bind = |at| {
        LinkSocket::bind(&BindOptions {
            reuse_port: is_shared,
            ..BindOptions::at(at)
        })
    };
    let first = bind(listen);
    if !(listen.is_ipv6() && listen.ip().is_unspecified()) {
        return Ok(vec![first?]);
    }
    let port = first
        .as_ref()
        .map_or(listen.port(), |s| s.local_addr().port());
    let second = bind((Ipv4Addr::UNSPECIFIED, port).into());
    match (first, second) {
        (Ok(v6), Ok(v4)) => Ok(vec![v6, v4]),
        (Ok(one), Err(error)) | (Err(error), Ok(one)) => {
            tracing::warn!(%error, "serving one address family only");
            Ok(vec![one])
        }
        (Err(error), Err(_)) => Err(error.into()),
    }
}

/// How long connections that were accepted may take to become streams before the server leaves its devices.
const STREAMS_OPEN_WITHIN: Duration = Duration::from_millis(500); // a guess: three round trips
/// How long workers may take to handle what they have received before the server leaves its devices.
const RECEIVED_HANDLED_WITHIN: Duration = Duration::from_millis(200); // a guess: some turns on a busy machine
/// The interval of checks whether engines have had a turn.
const TURN_CHECK_EVERY: Duration = Duration::from_millis(1);

/// The interval of checks whether flows may hibernate.
const KEPT_CHECK_EVERY: Duration = Duration::from_millis(5);

/// Time for the last packets to be sent.
pub(crate) const CLOSE_GRACE: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use d2tp_session::CidShare;

    use super::*;

    #[test]
    fn nodes_with_journals_of_their_own_have_different_token_secrets() {
        // R-UNKNOWN-5
        let mut options = ServerOptions {
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
            key: SecretKey::from_bytes([7; 32]),
            admission: Admission::Nobody,
            config: EndpointConfig::default(),
        };
        let dir = tempfile::tempdir().unwrap();
        let journal = crate::Journal::open(&dir.path().join("journal")).unwrap();
        let kept = HibernationOptions {
            hibernate_after: None,
            journal: Some(Arc::new(journal)),
        };
        let forgotten = HibernationOptions::default();
        let own = token_seed(&options, &kept, &[1; 32]);
        assert_eq!(own, token_seed(&options, &kept, &[1; 32]), "a restart");
        assert_ne!(own, token_seed(&options, &kept, &[2; 32]), "another node");
        // Nothing of such a process outlives it but its key.
        let of_key = token_seed(&options, &forgotten, &[1; 32]);
        assert_eq!(of_key, token_seed(&options, &forgotten, &[2; 32]));
        // Behind a balancer another node answers for a share that has become its own.
        options.config.cid_share = CidShare::new(1, 0, 2).ok();
        assert_eq!(of_key, token_seed(&options, &kept, &[1; 32]));
    }
}
