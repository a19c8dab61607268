//! One proxy: its configuration, its way to origins, its ledger and its copies.

use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::{HostKey, Journal, MemoryPool};
use http::{Method, StatusCode};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::address_key::address_of;
use crate::config::ProxConfig;
use crate::copy_fetcher::CopyFetcher;
use crate::copy_store::CopyStore;
use crate::dial::{Resolve, SystemResolver};
use crate::egress::EgressFilter;
use crate::hibernated_copies::HibernatedCopies;
use crate::key_text::show_key;
use crate::origin::{OriginBody, OriginResponse, Upstream};
use crate::pinned_copy::{CopyHead, CopyRequest, PinnedCopy};
use crate::quota_ledger::{FlowPermit, QuotaExceeded, QuotaLedger};
use crate::refusal::ProxRefusal;
use crate::request::{FetchRequest, UploadRequest};
use crate::retained_copies::RetainedCopies;
use crate::spooled_body::{SpoolError, SpoolFile, SpoolStatus, SpooledBody};
use crate::tls::{ProxTlsError, client_config};
use crate::upload_table::UploadTable;

/// How long a flow above the limit waits for another to end: one that is over may still be counted.
const PLACE_WITHIN: Duration = Duration::from_secs(1); // a guess

/// Why a proxy cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum ProxStartError {
    /// Nobody could use it.
    #[error(
        "no client may use this proxy; give --allow-client KEY (from `cedos key show`) or --allow-any-client, \
         or --tcp-listen with --allow-address"
    )]
    NoClients,
    /// TLS certificates of origins could not be verified.
    #[error(transparent)]
    Tls(#[from] ProxTlsError),
    /// The directory for spilled copies is not usable.
    #[error("cannot write in the state directory {path}: {cause}; choose another with --state-dir")]
    StateDir {
        /// The directory.
        path: String,
        /// The system's error.
        cause: std::io::Error,
    },
}

/// What a proxy holds, for logs and tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProxHoldings {
    /// Flows being served.
    pub flows: u32,
    /// Bytes pinned in memory.
    pub memory_bytes: u64,
    /// Bytes pinned on disk.
    pub disk_bytes: u64,
    /// Copies kept for devices that may return.
    pub retained_copies: usize,
    /// Uploads kept for devices that may return.
    pub retained_uploads: usize,
    /// Copies that hibernated flows read.
    pub hibernated_copies: usize,
}

/// A proxy, shared by all its flows.
pub struct Prox {
    pub(crate) config: ProxConfig,
    pub(crate) upstream: Arc<Upstream>,
    pub(crate) ledger: Arc<QuotaLedger>,
    pub(crate) retained: Arc<RetainedCopies>,
    pub(crate) uploads: Arc<UploadTable>,
    pub(crate) hibernated: HibernatedCopies,
    /// The named files of copies, if copies outlive the process.
    pub(crate) copy_store: Option<Arc<CopyStore>>,
    /// What sessions and tunnels of clients occupy.
    pub(crate) session_memory: MemoryPool,
    /// Ends every flow.
    pub(crate) stop: CancellationToken,
}

/// An origin's response.
pub(crate) enum FetchedAnswer {
    /// A response with a body, which is being fetched.
    Copy(Arc<PinnedCopy>),
    /// A response without a body.
    HeadOnly(Box<CopyHead>, Option<http::HeaderValue>),
}

impl Prox {
    /// A proxy that resolves names as the machine does.
    ///
    /// # Errors
    /// [`ProxStartError`] when nobody could use it, nothing could be verified or nothing be spilled.
    pub fn new(config: ProxConfig) -> Result<Arc<Prox>, ProxStartError> {
        Prox::with_resolver(config, Arc::new(SystemResolver))
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
        journal: Option<Arc<Journal>>,
    ) -> Result<Arc<Prox>, ProxStartError> {
        if !config.is_for_anybody() {
            return Err(ProxStartError::NoClients);
        }
        if let Err(cause) = tempfile::tempfile_in(&config.state_dir) {
            let path = config.state_dir.display().to_string();
            return Err(ProxStartError::StateDir { path, cause });
        }
        let copy_store = journal.map(|journal| CopyStore::open(&config.state_dir, journal));
        let copy_store = copy_store
            .transpose()
            .map_err(|cause| ProxStartError::StateDir {
                path: config.state_dir.display().to_string(),
                cause,
            })?;
        let upstream = Arc::new(Upstream {
            filter: EgressFilter {
                allow_private: config.allow_private,
                allow_nets: config.allow_nets.clone(),
                refused_ports: config.refused_ports.clone(),
            },
            resolver,
            tls: client_config(config.ca_file.as_deref(), config.native_roots)?,
            dns_timeout: config.dns_timeout,
            connect_timeout: config.connect_timeout,
            response_timeout: config.response_timeout,
            idle_timeout: config.idle_timeout,
            redirects_max: config.redirects_max,
        });
        Ok(Arc::new(Prox {
            ledger: Arc::new(QuotaLedger::new(&config)),
            retained: Arc::new(RetainedCopies::default()),
            uploads: Arc::default(),
            hibernated: HibernatedCopies::default(),
            copy_store,
            session_memory: MemoryPool::new(config.session_memory_bytes_max),
            stop: CancellationToken::new(),
            upstream,
            config,
        }))
    }

    /// The memory for sessions, for the [`EndpointConfig`](d2tp_driver::EndpointConfig) of the server whose
    /// flows are served here. Tunnels charge their buffers to it.
    pub fn session_memory(&self) -> &MemoryPool {
        &self.session_memory
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
        }
    }

    /// Admits a flow of this client, with this much time until its deadline. Waits a moment if a limit
    /// is reached.
    pub(crate) async fn admit(
        &self,
        client: HostKey,
        deadline: Option<Duration>,
    ) -> Result<FlowPermit, ProxRefusal> {
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
            Err(_) => self.admit_now(client, deadline),
        }
    }

    fn admit_now(
        &self,
        client: HostKey,
        deadline: Option<Duration>,
    ) -> Result<FlowPermit, ProxRefusal> {
        let admitted = match address_of(&client) {
            Some(address) => self.config.admits(address),
            None => self.config.allow_any_client || self.config.allow_clients.contains(&client),
        };
        if !admitted {
            return Err(ProxRefusal::ClientUnknown(show_key(&client)));
        }
        if deadline.is_some_and(|left| left > self.config.deadline_horizon) {
            return Err(ProxRefusal::DeadlineTooFar(self.config.deadline_horizon));
        }
        self.ledger.admit(client)
    }

    /// Requests from the origin. A body is fetched from then on.
    pub(crate) async fn open(
        &self,
        client: HostKey,
        request: &FetchRequest,
    ) -> Result<FetchedAnswer, ProxRefusal> {
        let method = if request.head_only {
            Method::HEAD
        } else {
            Method::GET
        };
        let response = self
            .upstream
            .fetch(&method, &request.url, &request.headers)
            .await?;
        let host = response.url.host_str().unwrap_or_default();
        if response.status == StatusCode::PARTIAL_CONTENT {
            return Err(ProxRefusal::UnexpectedPartial(host.to_owned()));
        }
        let head = CopyHead::new(&response, request);
        if request.head_only || matches!(response.status.as_u16(), 204 | 304) {
            let length = response.headers.get(http::header::CONTENT_LENGTH).cloned();
            return Ok(FetchedAnswer::HeadOnly(
                Box::new(head),
                length.filter(|_| request.head_only),
            ));
        }
        let name = Some(random_name());
        let copy = self.take_over(client, request, head, response, name)?;
        if copy.head.status == StatusCode::OK {
            self.retained.list(client, request.url.as_str(), &copy);
        }
        Ok(FetchedAnswer::Copy(copy))
    }

    /// Pins the body of a response to an upload, which cannot be continued.
    pub(crate) fn pin_upload_answer(
        &self,
        client: HostKey,
        request: &UploadRequest,
        response: OriginResponse,
    ) -> Result<Arc<PinnedCopy>, ProxRefusal> {
        let asked = FetchRequest {
            head_only: false,
            url: request.url.clone(),
            headers: http::HeaderMap::new(),
            range: None,
            if_range: None,
        };
        let head = CopyHead::relayed(&response);
        self.take_over(client, &asked, head, response, None)
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
        let only_of = (full == QuotaExceeded::Client).then_some(client);
        if self.retained.make_room(only_of) || self.uploads.make_room(only_of) {
            return Ok(());
        }
        Err(match full {
            QuotaExceeded::Client => ProxRefusal::ClientPinnedFull(self.ledger.client_pinned_max()),
            QuotaExceeded::Memory | QuotaExceeded::Disk => ProxRefusal::StoreFull,
        })
    }

    /// Pins a body, under this id in the copy store if it has one, and starts fetching it.
    fn take_over(
        &self,
        client: HostKey,
        request: &FetchRequest,
        head: CopyHead,
        response: OriginResponse,
        name: Option<u64>,
    ) -> Result<Arc<PinnedCopy>, ProxRefusal> {
        let total = response.body.size();
        let id = name.unwrap_or_else(random_name);
        let pin = Arc::new(self.reserve_spool(client, total, name)?);
        let asked = CopyRequest {
            url: request.url.clone(),
            headers: request.headers.clone(),
        };
        Ok(self.start_fetch(client, id, head, pin, asked, Some(response.body)))
    }

    /// A copy that is being fetched, or continued if there is no body yet.
    pub(crate) fn start_fetch(
        &self,
        client: HostKey,
        id: u64,
        head: CopyHead,
        pin: Arc<SpooledBody>,
        asked: CopyRequest,
        body: Option<OriginBody>,
    ) -> Arc<PinnedCopy> {
        let filler = CopyFetcher {
            upstream: self.upstream.clone(),
            retained: Arc::downgrade(&self.retained),
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
            retry_wait: self.config.retry_wait,
            patience: self.config.origin_patience,
        };
        let whole = pin.extent().status == SpoolStatus::Complete;
        let work = async move {
            if !whole {
                filler.run(body).await;
            }
        };
        Arc::new(PinnedCopy {
            id,
            head,
            body: pin,
            request: asked,
            _fetch: AbortOnDropHandle::new(tokio::spawn(work)),
        })
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
        let max = self.ledger.object_max();
        if let Some(bytes) = total.filter(|bytes| *bytes > max) {
            return Err(ProxRefusal::ObjectTooLarge { bytes, max });
        }
        loop {
            let made = SpooledBody::new(
                self.ledger.clone(),
                client,
                self.config.state_dir.clone(),
                self.config.object_memory_bytes_max,
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

/// A random id for a copy.
fn random_name() -> u64 {
    getrandom::u64().expect("the system has randomness")
}
