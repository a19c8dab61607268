//! One proxy: its configuration, its connections to origins, its ledger and its copies.

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use d2tp_driver::{HostKey, MemoryAccount, MemoryPool, PublicKey, RecordStore, RelayMeter};
use http::StatusCode;
use nix::sys::resource::{Resource, getrlimit};
use parking_lot::{Mutex, RwLock};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use crate::access_log::{AccessDetail, AccessLog};
use crate::address_key::address_of;
use crate::client_limits::ClientLimitTable;
use crate::client_store::ClientStore;
use crate::config::{FeedsUrlError, ProxConfig, ReloadReport};
use crate::copy_bucket::{CHECK_WITHIN, CopyBucket, CopyBucketError, bucket_owner};
use crate::copy_fetcher::{CopyFetchSource, CopyFetcher};
use crate::copy_head::{CopyHead, CopyRequest};
use crate::copy_store::CopyStore;
use crate::counters::{ProxCounters, TrafficDirection};
use crate::dial::{Resolve, SystemResolver};
use crate::drain_state::DrainState;
use crate::flow_report::{FlowLogRecord, ProxFlowReport};
use crate::hibernated_copies::HibernatedCopies;
use crate::hibernation_count::HibernationCount;
use crate::key_text::show_key;
use crate::link_keys::guest_address_of;
use crate::link_state::LinkState;
use crate::mailbox_table::MailboxTable;
use crate::origin::{OriginBody, OriginConnector, OriginMemory, OriginResponse};
use crate::packet_network::PacketNetwork;
use crate::pinned_copy::PinnedCopy;
use crate::quota_ledger::{FlowPermit, QuotaExceeded, QuotaLedger, SHARED};
use crate::refusal::ProxRefusal;
use crate::request::{FetchRequest, UploadRequest};
use crate::retained_copies::RetainedCopies;
use crate::shared_cache::SharedCache;
use crate::shared_copies::SharedCopies;
use crate::shared_usage::SharedUsage;
use crate::sleeping_tunnels::SleepingTunnels;
use crate::spooled_body::{SpoolError, SpoolFile, SpoolStatus, SpooledBody};
use crate::stored_upload::StoredUpload;
use crate::tls::ProxTlsError;
use crate::traffic_table::TrafficTable;
use crate::upload_table::{UploadRoom, UploadTable};

/// How long a flow above the limit waits for another to end: one that is over may still be counted.
const PLACE_WITHIN: Duration = Duration::from_secs(1); // a guess

/// The part of the process's descriptors that copies of the cache may have. A guess.
const CACHED_FILES_PART: u64 = 4;

/// Why a proxy cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum ProxStartError {
    /// No client could use the proxy.
    #[error(
        "no client may use this proxy; give --state-dir DIR and invite devices (`cedos prox invite`), or \
         --allow-client KEY (from `cedos key show`), --allow-any-client, or --tcp-listen with --allow-address"
    )]
    NoClients,
    /// The clients that were enrolled cannot be read.
    #[error("cannot read the clients of this proxy: {0}")]
    Clients(std::io::Error),
    /// What clients have transferred this month cannot be read.
    #[error("cannot read what clients have transferred: {0}")]
    Traffic(std::io::Error),
    /// TLS certificates of origins could not be verified.
    #[error(transparent)]
    Tls(#[from] ProxTlsError),
    /// The directory for spilled copies is not usable.
    #[error("cannot write in the state directory {path}: {cause}; choose another with --state-dir")]
    StateDir {
        /// The directory that cannot be used.
        path: String,
        /// The error of the operating system.
        cause: std::io::Error,
    },
    /// The address for links of podcast apps is none.
    #[error(transparent)]
    FeedsUrl(#[from] FeedsUrlError),
    /// The bucket of copies must not be used.
    #[error(transparent)]
    CopyBucket(#[from] CopyBucketError),
    /// There is a bucket of copies and no state directory.
    #[error("--copies needs --state-dir: what copies belong to is in its journal")]
    NoStateDir,
}

/// What a proxy holds, for logs and tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProxHoldings {
    /// Flows being served.
    pub flows: u32,
    /// Bytes pinned in memory, those of the shared cache included.
    pub memory_bytes: u64,
    /// Bytes pinned on disk, those of the shared cache included.
    pub disk_bytes: u64,
    /// Copies kept for devices that may return.
    pub retained_copies: usize,
    /// Uploads kept for devices that may return.
    pub retained_uploads: usize,
    /// Copies that hibernated flows read.
    pub hibernated_copies: usize,
    /// Clients of which copies are listed in memory: flows read them, or the clients may come back for them.
    pub listed_clients: usize,
    /// Responses in the cache that all clients share.
    pub cached_responses: usize,
    /// Bytes of copies that all clients share, in memory and on disk.
    pub cached_bytes: u64,
}

/// Settings that say which origins are reached and believed: what was fetched under others is not served after a
/// change.
const REACH_SETTINGS: [&str; 5] = [
    "allow_private",
    "allow_nets",
    "refused_ports",
    "ca_file",
    "native_roots",
];

/// Reads the settings again.
type ConfigSource = Arc<dyn Fn() -> Result<ProxConfig, String> + Send + Sync>;

/// A proxy that can start: its settings are in order.
pub struct PreparedProx {
    pub(crate) config: ProxConfig,
    pub(crate) upstream: OriginConnector,
    counters: Arc<ProxCounters>,
    bucket: Option<CopyBucket>,
}

impl PreparedProx {
    /// Checks the bucket of the settings, if they name one, for the proxy with this key. One that does not answer is
    /// checked again later.
    ///
    /// # Errors
    /// The bucket must not be used.
    pub async fn check_copy_bucket(&self, key: PublicKey) -> Result<(), CopyBucketError> {
        match &self.bucket {
            Some(bucket) => {
                let owner = bucket_owner(key, self.config.store.is_some());
                bucket.check(&owner, CHECK_WITHIN).await
            }
            None => Ok(()),
        }
    }
}

/// A proxy, shared by all its flows.
pub struct Prox {
    /// The settings, which the operator may change while it runs.
    config: RwLock<Arc<ProxConfig>>,
    /// Where the settings are read again.
    config_source: Mutex<Option<ConfigSource>>,
    /// The lock held while the settings are read again and applied.
    reloading: Mutex<()>,
    pub(crate) clients: Arc<ClientStore>,
    /// What each client may do.
    pub(crate) limits: Arc<ClientLimitTable>,
    /// What each client transfers.
    pub(crate) traffic: Arc<TrafficTable>,
    /// What clients do at all nodes, if nodes share a store.
    pub(crate) usage: Option<Arc<SharedUsage>>,
    pub(crate) counters: Arc<ProxCounters>,
    access_log: Mutex<Option<AccessLog>>,
    upstream: RwLock<Arc<OriginConnector>>,
    pub(crate) ledger: Arc<QuotaLedger>,
    pub(crate) retained: Arc<RetainedCopies>,
    /// The copies that all clients share.
    pub(crate) cache: Arc<SharedCache>,
    pub(crate) uploads: Arc<UploadTable>,
    pub(crate) hibernated: Arc<HibernatedCopies>,
    /// Flows that hibernated since free memory was given back.
    pub(crate) hibernations: HibernationCount,
    pub(crate) shared_copies: SharedCopies,
    pub(crate) drain: DrainState,
    /// The named files of copies, if copies outlive the process.
    pub(crate) copy_store: Option<Arc<CopyStore>>,
    /// Copies and uploads that only a bucket has which has not answered yet; none if there is nothing to wait for.
    pub(crate) awaited: Mutex<Option<HashSet<u64>>>,
    /// What sessions and tunnels of clients occupy.
    pub(crate) session_memory: MemoryPool,
    /// The buffers of connections in the kernel.
    pub(crate) socket_memory: MemoryPool,
    /// The servers' connections of tunnels whose sessions sleep.
    pub(crate) sleeping_tunnels: SleepingTunnels,
    /// Clients that wait for another one to exchange some bytes with.
    pub(crate) mailboxes: Arc<MailboxTable>,
    /// Where packets of clients' tunnels come from and go to, if the proxy carries them.
    pub(crate) packet_network: OnceLock<Arc<PacketNetwork>>,
    /// What links of podcast apps share.
    pub(crate) link_state: LinkState,
    /// Cancelled when every flow is to end.
    pub(crate) stop: CancellationToken,
    /// Cancelled when another process is about to go on with the flows.
    pub(crate) leaving: CancellationToken,
    /// One token for each GET or HEAD whose answer is not there yet.
    pub(crate) unanswered: TaskTracker,
    /// One token for each GET whose answer's copy is not recorded yet, so that another process would request it again.
    pub(crate) unrecorded: TaskTracker,
    /// The TCP port at which devices reach streams, once it is known.
    pub(crate) stream_port: OnceLock<u16>,
}

impl Prox {
    /// Tells devices with each download that this TCP port takes streams. Only the first call counts.
    pub fn announce_stream_port(&self, port: u16) {
        let _ = self.stream_port.set(port);
    }

    /// A proxy that resolves names as the machine does.
    ///
    /// # Errors
    /// [`ProxStartError`] if no client could use it, or if certificates cannot be verified or
    /// copies cannot be spilled.
    pub fn new(config: ProxConfig) -> Result<Arc<Prox>, ProxStartError> {
        Prox::with_resolver(config, Arc::new(SystemResolver))
    }

    /// Prepares a proxy: all that may fail and needs no journal. `is_kept`: clients may be invited, because there is
    /// a place where they are kept.
    ///
    /// # Errors
    /// As [`Prox::new`].
    pub fn prepare(
        config: ProxConfig,
        resolver: Arc<dyn Resolve>,
        is_kept: bool,
    ) -> Result<PreparedProx, ProxStartError> {
        if !config.is_for_anybody() && !is_kept {
            return Err(ProxStartError::NoClients);
        }
        config.feeds_base()?;
        if let Err(cause) = tempfile::tempfile_in(&config.state_dir) {
            let path = config.state_dir.display().to_string();
            return Err(ProxStartError::StateDir { path, cause });
        }
        let counters: Arc<ProxCounters> = Arc::default();
        let upstream = OriginConnector::new(&config, resolver, counters.clone())?;
        let bucket = match &config.copies {
            Some(_) if !is_kept => return Err(ProxStartError::NoStateDir),
            Some(url) => Some(CopyBucket::new(url, upstream.tls.clone())?),
            None => None,
        };
        Ok(PreparedProx {
            config,
            upstream,
            counters,
            bucket,
        })
    }

    /// Waits until origins have answered every GET and HEAD that was sent to them, at most for `max`. The next process
    /// sends those again that have no answer by then.
    /// From now on devices' requests are sent to no origin: they are left to the next process.
    pub async fn until_answered(&self, max: Duration) {
        self.unanswered.close();
        let _ = timeout(max, self.unanswered.wait()).await;
    }

    /// Waits until the copies of all answers are recorded, at most for `max`. The next process sends requests again
    /// whose copies are not.
    pub async fn until_recorded(&self, max: Duration) {
        self.unrecorded.close();
        let _ = timeout(max, self.unrecorded.wait()).await;
    }

    /// Has every tunnel sleep when the server leaves its devices, for another process that goes on with it:
    /// [`Prox::take_tunnels`].
    pub fn begin_leaving(&self) {
        self.leaving.cancel();
    }

    /// Resets every flow that is being served.
    pub fn end_flows(&self) {
        self.stop.cancel();
    }

    /// A proxy with a resolver of the caller's.
    ///
    /// # Errors
    /// As [`Prox::new`].
    pub fn with_resolver(
        config: ProxConfig,
        resolver: Arc<dyn Resolve>,
    ) -> Result<Arc<Prox>, ProxStartError> {
        Prox::with_journal(config, resolver, None)
    }

    /// A proxy whose flows and copies outlive the process, in `state_dir` and this journal. Must
    /// be called on a runtime; [`Prox::restore_from_journal`] follows.
    ///
    /// # Errors
    /// As [`Prox::new`].
    pub fn with_journal(
        config: ProxConfig,
        resolver: Arc<dyn Resolve>,
        journal: Option<Arc<dyn RecordStore>>,
    ) -> Result<Arc<Prox>, ProxStartError> {
        let prepared = Prox::prepare(config, resolver, journal.is_some())?;
        Prox::start(prepared, journal)
    }

    /// Starts a proxy that was prepared, as [`Prox::with_journal`] does.
    ///
    /// # Errors
    /// The state directory is not usable.
    pub fn start(
        prepared: PreparedProx,
        journal: Option<Arc<dyn RecordStore>>,
    ) -> Result<Arc<Prox>, ProxStartError> {
        let PreparedProx {
            config,
            upstream,
            counters,
            bucket,
        } = prepared;
        let enrolled_in = journal.as_ref().map(|_| config.state_dir.as_path());
        let shared = journal.clone().and_then(RecordStore::as_shared);
        let clients = ClientStore::open(&config, enrolled_in, shared.clone());
        let clients = clients.map_err(ProxStartError::Clients)?;
        let copies_in = config.copies_dir.as_ref().unwrap_or(&config.state_dir);
        let copy_store = journal.map(|journal| CopyStore::open(copies_in, journal));
        let copy_store = copy_store
            .transpose()
            .map_err(|cause| ProxStartError::StateDir {
                path: config.state_dir.display().to_string(),
                cause,
            })?;
        let awaited = bucket.as_ref().map(|_| HashSet::new());
        if let (Some(copy_store), Some(bucket)) = (&copy_store, bucket) {
            copy_store.use_bucket(bucket);
        }
        let shared_copies = SharedCopies::default();
        if let Some(copy_store) = copy_store.as_ref().filter(|s| s.node_bucket().is_some()) {
            *shared_copies.left_files.lock() = copy_store.files();
        }
        let hibernated = Arc::<HibernatedCopies>::default();
        if let Some(copy_store) = &copy_store {
            hibernated.follow_records(copy_store);
        }
        let limits = Arc::new(ClientLimitTable::new(&config));
        for client in clients.enrolled() {
            limits.set(client.key, client.limits);
        }
        let traffic = TrafficTable::open(enrolled_in, limits.clone(), counters.clone());
        let traffic = traffic.map_err(ProxStartError::Traffic)?;
        // No node takes up from a shared store what another retained or cached.
        let restored_store = copy_store.clone();
        let restored_store = restored_store.filter(|store| store.shared().is_none());
        Ok(Arc::new(Prox {
            ledger: Arc::new(QuotaLedger::new(&config, limits.clone(), shared.is_some())),
            limits,
            traffic: Arc::new(traffic),
            usage: shared.map(|store| Arc::new(SharedUsage::new(store))),
            counters,
            access_log: Mutex::default(),
            retained: Arc::new(RetainedCopies::new(restored_store.clone())),
            cache: Arc::new(SharedCache::new(
                config.cache_bytes_max,
                config.cache_object_bytes_max,
                match &copy_store {
                    Some(_) => cached_files_max(),
                    None => usize::MAX,
                },
                restored_store,
            )),
            uploads: Arc::default(),
            sleeping_tunnels: SleepingTunnels::default(),
            mailboxes: Arc::default(),
            hibernated,
            hibernations: HibernationCount::default(),
            shared_copies,
            drain: DrainState::default(),
            copy_store,
            awaited: Mutex::new(awaited),
            session_memory: MemoryPool::new(config.session_memory_bytes_max),
            socket_memory: MemoryPool::new(config.socket_memory_bytes_max()),
            packet_network: OnceLock::new(),
            link_state: LinkState::default(),
            stop: CancellationToken::new(),
            leaving: CancellationToken::new(),
            unanswered: TaskTracker::new(),
            unrecorded: TaskTracker::new(),
            stream_port: OnceLock::new(),
            clients: Arc::new(clients),
            upstream: RwLock::new(Arc::new(upstream)),
            config: RwLock::new(Arc::new(config)),
            config_source: Mutex::default(),
            reloading: Mutex::default(),
        }))
    }

    /// The current settings.
    pub fn config(&self) -> Arc<ProxConfig> {
        self.config.read().clone()
    }

    /// The way to origins now. What is fetched goes on by the way by which it began.
    pub(crate) fn upstream(&self) -> Arc<OriginConnector> {
        self.upstream.read().clone()
    }

    /// Names where [`Prox::reload`] reads the settings again: a file and options, or the reason why they make no
    /// sense.
    pub fn set_config_source(
        &self,
        source: impl Fn() -> Result<ProxConfig, String> + Send + Sync + 'static,
    ) {
        *self.config_source.lock() = Some(Arc::new(source));
    }

    /// Whether there is somewhere to read the settings again.
    pub fn can_reload(&self) -> bool {
        self.config_source.lock().is_some()
    }

    /// Reads the settings again, and takes those that can be taken while the proxy runs.
    ///
    /// # Errors
    /// They make no sense, or there is no source of them. Nothing has changed then.
    pub fn reload(&self) -> Result<ReloadReport, String> {
        let _alone = self.reloading.lock();
        let source = self.config_source.lock().clone();
        let source =
            source.ok_or("this proxy runs without --config: there is nothing to read again")?;
        let (config, report) = self.config().changed_to(source()?);
        config.feeds_base().map_err(|error| error.to_string())?;
        let resolver = self.upstream().resolver.clone();
        let upstream = OriginConnector::new(&config, resolver, self.counters.clone());
        let upstream = upstream.map_err(|error| error.to_string())?;
        self.limits.set_defaults(&config);
        self.traffic.apply_limits(None);
        self.ledger.set_limits(&config);
        let (bytes, object_bytes) = (config.cache_bytes_max, config.cache_object_bytes_max);
        self.cache.set_limits(bytes, object_bytes);
        while self.ledger.pinned_by(SHARED) > bytes && self.cache.make_room(None) {}
        *self.upstream.write() = Arc::new(upstream);
        *self.config.write() = Arc::new(config);
        let reaches = |name: &String| REACH_SETTINGS.contains(&name.as_str());
        if report.taken.iter().any(reaches) {
            self.cache.clear();
            self.record_cache_settings();
        }
        tracing::info!(taken = ?report.taken, at_restart = ?report.at_restart, "read the settings again");
        Ok(report)
    }

    /// Writes an access log from now on: into a file, which is appended to, or to standard output if `path` is none.
    ///
    /// # Errors
    /// The file cannot be opened, or no thread be started.
    pub fn log_access(&self, path: Option<&Path>, detail: AccessDetail) -> io::Result<()> {
        let log = AccessLog::start(path, detail, self.counters.clone())?;
        *self.access_log.lock() = Some(log);
        Ok(())
    }

    /// The access log, if there is one.
    fn access_log(&self) -> Option<AccessLog> {
        self.access_log.lock().clone()
    }

    /// Opens the file of the access log again, which was renamed.
    pub fn reopen_access_log(&self) {
        if let Some(log) = self.access_log() {
            log.reopen();
        }
    }

    /// Waits until what ended so far is in the access log, for a second at most.
    pub async fn flush_access_log(&self) {
        if let Some(log) = self.access_log() {
            let _ = tokio::task::spawn_blocking(move || log.flush()).await;
        }
    }

    /// Writes the line of a flow that ended into the access log, if there is one.
    pub(crate) fn log_flow(
        &self,
        client: &HostKey,
        record: &FlowLogRecord,
        report: &ProxFlowReport,
    ) {
        let address = address_of(client).or_else(|| guest_address_of(client));
        let name = || match address {
            Some(address) => address.to_string(),
            None => self
                .clients
                .name_of(client)
                .unwrap_or_else(|| show_key(client)),
        };
        if let Some(log) = self.access_log() {
            log.write(name, record, report);
        }
    }

    /// The memory for sessions, for the [`EndpointConfig`](d2tp_driver::EndpointConfig) of the server whose
    /// flows are served here. Tunnels charge their buffers to it.
    pub fn session_memory(&self) -> &MemoryPool {
        &self.session_memory
    }

    /// The account of what a client makes the proxy hold.
    pub(crate) fn memory_account(&self, client: HostKey) -> MemoryAccount {
        self.session_memory.account(PublicKey(client))
    }

    /// The memory that the kernel may hold for clients' connections: twice as much as sessions may have.
    pub fn socket_memory(&self) -> &MemoryPool {
        &self.socket_memory
    }

    /// The account of what the kernel holds for a client's connections.
    pub(crate) fn socket_account(&self, client: HostKey) -> MemoryAccount {
        self.socket_memory.account(PublicKey(client))
    }

    /// The accounts of a client for whom an origin is asked.
    pub(crate) fn origin_memory(&self, client: HostKey) -> OriginMemory {
        OriginMemory {
            session: self.memory_account(client),
            sockets: self.socket_account(client),
        }
    }

    /// The clients, those that invitations enrolled among them.
    pub fn clients(&self) -> &Arc<ClientStore> {
        &self.clients
    }

    /// Whether this client may use the proxy.
    pub(crate) fn is_client(&self, client: &HostKey) -> bool {
        match address_of(client) {
            Some(address) => self.config().admits(address),
            None => self.clients.admits(client),
        }
    }

    /// What the proxy holds now.
    pub fn holdings(&self) -> ProxHoldings {
        let (memory_bytes, disk_bytes) = self.ledger.pinned();
        ProxHoldings {
            flows: self.ledger.flows(),
            memory_bytes,
            disk_bytes,
            retained_copies: self.retained.retained_count(),
            retained_uploads: self.uploads.retained_count(),
            hibernated_copies: self.hibernated.len(),
            listed_clients: self.retained.listed_count(),
            cached_responses: self.cache.len(),
            cached_bytes: self.ledger.pinned_by(SHARED),
        }
    }

    /// Admits a flow of this client, with this much time until its deadline. Waits a moment if a limit
    /// is reached.
    pub(crate) async fn admit(
        &self,
        client: HostKey,
        deadline: Option<Duration>,
    ) -> Result<FlowPermit, ProxRefusal> {
        self.refresh_usage(client).await;
        let place = async {
            loop {
                let left = self.ledger.flow_released();
                match self.admit_now(client, deadline) {
                    Err(ProxRefusal::ClientFlowsFull(_) | ProxRefusal::FlowsFull(_)) => left.await,
                    admitted => return admitted,
                }
            }
        };
        match timeout(PLACE_WITHIN, place).await {
            Ok(admitted) => admitted,
            Err(_) => {
                // Flows at other nodes may have ended meanwhile.
                self.refresh_usage(client).await;
                self.admit_now(client, deadline)
            }
        }
    }

    /// Learns what a known client does at other nodes, if nodes share a store.
    async fn refresh_usage(&self, client: HostKey) {
        if let Some(usage) = &self.usage
            && self.clients.is_known(&client)
        {
            usage.refresh(client, &self.traffic).await;
        }
    }

    /// The furthest deadline that a client may give its flows.
    pub(crate) fn deadline_max(&self, client: &HostKey) -> Duration {
        self.limits.of(client).deadline
    }

    fn admit_now(
        &self,
        client: HostKey,
        deadline: Option<Duration>,
    ) -> Result<FlowPermit, ProxRefusal> {
        if !self.is_client(&client) {
            return Err(ProxRefusal::ClientUnknown(show_key(&client)));
        }
        let furthest = self.deadline_max(&client);
        if deadline.is_some_and(|left| left > furthest) {
            return Err(ProxRefusal::DeadlineTooFar(furthest));
        }
        self.traffic.check_month(&client)?;
        let elsewhere = self.usage.as_ref();
        let elsewhere = elsewhere.map_or(0, |usage| usage.flows_elsewhere(&client));
        let permit = self.ledger.admit(client, elsewhere)?;
        self.clients.on_seen(&client);
        Ok(permit)
    }

    /// Pins the body of a response to an upload, which cannot be continued; under this id in the copy store if it has
    /// one.
    pub(crate) fn pin_upload_answer(
        &self,
        client: HostKey,
        request: &UploadRequest,
        response: OriginResponse,
        name: Option<u64>,
    ) -> Result<Arc<PinnedCopy>, ProxRefusal> {
        let asked = FetchRequest {
            head_only: false,
            url: request.url.clone(),
            headers: http::HeaderMap::new(),
            range: None,
            if_range: None,
            reports_supply: false,
        };
        let head = CopyHead::relayed(&response);
        self.take_over(client, &asked, head, response.body, name)
    }

    /// Appends bytes to an upload, and drops kept copies if there is no room.
    pub(crate) async fn append_upload(
        &self,
        client: HostKey,
        pin: &Arc<SpooledBody>,
        bytes: bytes::Bytes,
    ) -> Result<(), ProxRefusal> {
        loop {
            match pin.append(bytes.clone()).await {
                Ok(()) => return Ok(()),
                Err(fault) => self.after(client, fault)?,
            }
        }
    }

    /// Makes room if the error is a limit that this can resolve.
    fn after(&self, client: HostKey, fault: SpoolError) -> Result<(), ProxRefusal> {
        let full = match fault {
            SpoolError::Full(full) => full,
            SpoolError::Disk(error) => {
                tracing::error!(%error, "the state directory cannot be written");
                return Err(ProxRefusal::StoreFailed);
            }
        };
        // What nobody reads is fetched again more easily than what a client waits for.
        if (full != QuotaExceeded::Client || client == SHARED) && self.cache.make_room(None) {
            return Ok(());
        }
        if client == SHARED {
            return Err(ProxRefusal::StoreFull);
        }
        let only_of = (full == QuotaExceeded::Client).then_some(client);
        if self.retained.make_room(only_of) || self.uploads.make_room(only_of) {
            return Ok(());
        }
        Err(match full {
            QuotaExceeded::Client => {
                ProxRefusal::ClientPinnedFull(self.ledger.client_pinned_max(&client))
            }
            QuotaExceeded::Memory | QuotaExceeded::Disk => ProxRefusal::StoreFull,
        })
    }

    /// Pins a body, under this id in the copy store if it has one, and starts fetching it.
    pub(crate) fn take_over(
        &self,
        client: HostKey,
        request: &FetchRequest,
        head: CopyHead,
        body: OriginBody,
        name: Option<u64>,
    ) -> Result<Arc<PinnedCopy>, ProxRefusal> {
        let pin = self.reserve_spool(client, body.size(), name)?;
        Ok(self.fill(client, request, head, body, Arc::new(pin), name))
    }

    /// Starts fetching a body for a client into its spool, which has this id in the copy store if it has one.
    pub(crate) fn fill(
        &self,
        client: HostKey,
        request: &FetchRequest,
        head: CopyHead,
        body: OriginBody,
        pin: Arc<SpooledBody>,
        name: Option<u64>,
    ) -> Arc<PinnedCopy> {
        let id = name.unwrap_or_else(random_name);
        let asked = CopyRequest {
            url: request.url.clone(),
            headers: request.headers.clone(),
        };
        self.start_fetch(client, id, head, pin, asked, CopyFetchSource::Origin(body))
    }

    /// A copy that is being fetched from this source.
    pub(crate) fn start_fetch(
        &self,
        client: HostKey,
        id: u64,
        head: CopyHead,
        pin: Arc<SpooledBody>,
        asked: CopyRequest,
        source: CopyFetchSource,
    ) -> Arc<PinnedCopy> {
        let copy = Arc::new_cyclic(|copy: &Weak<PinnedCopy>| {
            let filler = CopyFetcher {
                upstream: self.upstream(),
                memory: self.origin_memory(client),
                retained: Arc::downgrade(&self.retained),
                cache: Arc::downgrade(&self.cache),
                copy: copy.clone(),
                id,
                client,
                spool: pin.clone(),
                asked_url: asked.url.clone(),
                url: head.url.clone(),
                headers: asked.headers.clone(),
                // Only a complete answer can be continued.
                validator: head
                    .origin_validator
                    .clone()
                    .filter(|_| head.status == StatusCode::OK),
                total: pin.extent().total,
                retry_wait: self.config().retry_wait,
                patience: self.config().origin_patience,
            };
            let whole = pin.extent().status == SpoolStatus::Complete;
            let work = async move {
                if !whole {
                    filler.run(source).await;
                }
            };
            PinnedCopy {
                id,
                head,
                body: pin,
                request: asked,
                cache: Arc::downgrade(&self.cache),
                listings: Mutex::default(),
                _fetch: AbortOnDropHandle::new(tokio::spawn(work)),
            }
        });
        if self.shared_records().is_some() {
            self.shared_copies.note(&copy);
        }
        copy
    }

    /// Reserves room for the body of an upload. One with a token outlives the process if there is a copy store.
    pub(crate) fn reserve_upload(
        &self,
        client: HostKey,
        request: &UploadRequest,
    ) -> Result<UploadRoom, ProxRefusal> {
        // Where nodes share copies, an upload is its node's own.
        let named = self.copy_store.as_ref();
        let named = named.filter(|store| request.token.is_some() && store.shared().is_none());
        let named = named.map(|copy_store| (copy_store, random_name()));
        let spool = self.reserve_spool(client, request.length, named.map(|(_, id)| id))?;
        let stored = named.and_then(|(notes, id)| StoredUpload::new(notes, id, client, request));
        Ok(UploadRoom { spool, stored })
    }

    /// The settings under which the shared cache is filled: it is not used under others.
    pub(crate) fn cache_settings(&self) -> serde_json::Value {
        let all = self.config().to_map();
        let of_reach = |(name, _): &(String, _)| REACH_SETTINGS.contains(&name.as_str());
        serde_json::Value::Object(all.into_iter().filter(of_reach).collect())
    }

    /// Records under which settings the shared cache is filled from now on.
    pub(crate) fn record_cache_settings(&self) {
        if let Some(copy_store) = &self.copy_store {
            copy_store.record_cache_settings(&self.cache_settings());
        }
    }

    /// Reserves room for an object, and drops kept copies if necessary; under this id in the copy
    /// store, if it has one.
    pub(crate) fn reserve_spool(
        &self,
        client: HostKey,
        total: Option<u64>,
        id: Option<u64>,
    ) -> Result<SpooledBody, ProxRefusal> {
        let home = self.copy_store.clone().zip(id);
        let home = home.map(|(copy_store, id)| SpoolFile { copy_store, id });
        let max = self.ledger.object_max(&client);
        if let Some(bytes) = total.filter(|bytes| *bytes > max) {
            return Err(ProxRefusal::ObjectTooLarge { bytes, max });
        }
        loop {
            let made = SpooledBody::new(
                self.ledger.clone(),
                client,
                self.config().state_dir.clone(),
                self.config().object_memory_bytes_max,
                total,
                home.clone(),
            );
            match made {
                Ok(pin) => return Ok(pin),
                Err(fault) => self.after(client, fault)?,
            }
        }
    }
}

impl RelayMeter for Prox {
    fn admits(&self, client: HostKey, is_from_client: bool, bytes: usize) -> bool {
        let direction = match is_from_client {
            true => TrafficDirection::Up,
            false => TrafficDirection::Down,
        };
        self.traffic.relays(client, direction, bytes)
    }
}

/// The most copies of the cache that may have a file open: a quarter of the descriptors that the process may have.
fn cached_files_max() -> usize {
    let limit = getrlimit(Resource::RLIMIT_NOFILE);
    let files = limit.map_or(u64::MAX, |(soft, _)| soft / CACHED_FILES_PART);
    usize::try_from(files).unwrap_or(usize::MAX).max(1)
}

/// A random id for a copy.
pub(crate) fn random_name() -> u64 {
    getrandom::u64().expect("the system has randomness")
}
