//! Carries out an order: selects the mode, the keys and the trusted authorities, and runs the
//! transfer.
//!
//! ```text
//!  Order ─▶ PreparedTransfer::prepare   reports every fault of the order, starts nothing
//!              └▶ open_transport ─ Direct │ EndToEnd │ Proxied ─▶ TransferTransport::run ─▶ exit code
//! ```

use std::path::PathBuf;
use std::sync::Arc;

use d2tp_driver::{AckOffload, EndpointConfig, Qlog, SecretKey, ServerList, ServerListError};
use d2tp_links::Link;
use d2tp_sched::CostPolicy;
use d2tp_session::{Drwa, DrwaLambda};
use tokio::sync::watch;
use url::Url;

use crate::fetch::alt_svc;
use crate::fetch::alt_svc_upgrade::{AltSvcOptions, UpgradingConnector};
use crate::fetch::cookie_file::CookieFile;
use crate::fetch::dial::Dial as _;
use crate::fetch::direct::DirectConnector;
use crate::fetch::header::HeaderField;
use crate::fetch::local_hosts::LocalHosts;
use crate::fetch::mode::FetchMode;
use crate::fetch::netrc_file::NetrcFile;
use crate::fetch::origin::{D2tpOrigin, D2tpTarget};
use crate::fetch::outcome::{TransferExit, TransferFailure};
use crate::fetch::proxy::ProxyClient;
use crate::fetch::rate_limiter::RateLimiter;
use crate::fetch::report::TransferObserver;
use crate::fetch::state_directory::state_directory;
use crate::fetch::tls::OriginTls;
use crate::fetch::transfer::{self, TransferContext, TransferJob};
use crate::fetch::tunnel::OriginTunnel;
use crate::fetch::upload_body::UploadBody;
use crate::key;
use crate::order::{TransferOrder, TransferVerb};
use crate::terms::TransferTerms;

/// Options of sessions beside what the order contains.
#[derive(Default)]
pub struct SessionTuning {
    /// The configuration of sessions.
    pub config: EndpointConfig,
    /// ACK offload of Wi-Fi to other links.
    pub offload_acks: AckOffload,
    /// The factor of DRWA, which keeps queues short.
    pub drwa: Option<DrwaLambda>,
    /// The factor of DRWA on bloated paths alone, where another process moves the windows of TCP connections.
    pub path_drwa: Option<DrwaLambda>,
    /// The log of sessions.
    pub log: Option<Arc<Qlog>>,
}

/// The purpose of a transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransportPurpose {
    /// To carry out the order.
    Carry,
    /// To plan what carrying out the order would do.
    DryRun,
    /// To abandon a partial transfer.
    Forget,
}

/// The file of an upload, and how it is sent.
#[derive(Clone)]
struct UploadSpec {
    file: PathBuf,
    post: bool,
    kind: Option<String>,
    token: Option<String>,
}

/// A validated order.
pub struct PreparedTransfer {
    /// The job that was prepared.
    pub job: TransferJob,
    verb: TransferVerb,
    target: Option<D2tpTarget>,
    mode: FetchMode,
    tls: Option<OriginTls>,
    key: Option<SecretKey>,
    proxy: Option<ServerList>,
    /// The upload's file, if the order is an upload.
    upload: Option<UploadSpec>,
    /// The hosts of local networks that a download may lead to.
    local_hosts: LocalHosts,
    /// The limit on the rate of a download, in bytes per second.
    limit_rate: Option<u64>,
    /// Whether D2TP to the same origin may be used if the origin supports it.
    may_go_end_to_end: bool,
}

impl PreparedTransfer {
    /// Says what is wrong with an order, if anything is. `paid_asked`: the user spoke of
    /// metered links.
    ///
    /// # Errors
    /// Whose fault it is, in words.
    pub fn prepare(
        order: &TransferOrder,
        mut job: TransferJob,
        paid_asked: bool,
    ) -> Result<PreparedTransfer, TransferFailure> {
        read_credentials(order, &mut job)?;
        let proxy = match order.prox.as_deref().filter(|text| !text.is_empty()) {
            Some(text) => {
                let read = text.parse::<ServerList>();
                Some(read.map_err(|e: ServerListError| TransferFailure::usage(e.to_string()))?)
            }
            None => None,
        };
        if order.verb == TransferVerb::Put {
            return PreparedTransfer::prepare_upload(order, job, proxy);
        }
        let plain = may_go_end_to_end(order, &job);
        let whom = end_to_end(order, &mut job, paid_asked)?;
        let mode = match whom {
            Some(_) => FetchMode::Direct,
            None => mode(order, &job, proxy.is_some())?,
        };
        let tls = match mode {
            FetchMode::Direct | FetchMode::Sealed if whom.is_none() => {
                Some(OriginTls::new(order.ca.as_deref())?)
            }
            _ => None,
        };
        let key = match (&proxy, &whom) {
            (Some(_), _) | (_, Some(_)) => Some(own_key(order)?),
            (None, None) => None,
        };
        Ok(PreparedTransfer {
            job,
            verb: TransferVerb::Get,
            target: whom,
            mode,
            tls,
            key,
            proxy,
            upload: None,
            local_hosts: order.local_hosts.clone(),
            limit_rate: order.limit_rate,
            may_go_end_to_end: plain,
        })
    }

    fn prepare_upload(
        order: &TransferOrder,
        job: TransferJob,
        proxy: Option<ServerList>,
    ) -> Result<PreparedTransfer, TransferFailure> {
        if !matches!(job.url.scheme(), "http" | "https") || !job.url.has_host() {
            let text = format!("{} is not an http:// or https:// URL", job.url);
            return Err(TransferFailure::usage(text));
        }
        if carries_credentials(&job) {
            let text = "the proxy that keeps the upload would see its credentials, so they are not sent; \
                        `curl -T FILE URL` sends them to the server directly, with --netrc or --user";
            return Err(TransferFailure::usage(text));
        }
        if proxy.is_none() {
            let text =
                "uploads go through a proxy: join one (`cedos join LINE`), or give --prox ADDR";
            return Err(TransferFailure::usage(text));
        }
        let Some(file) = order.file.clone() else {
            return Err(TransferFailure::usage("an upload needs a file"));
        };
        Ok(PreparedTransfer {
            job,
            verb: TransferVerb::Put,
            target: None,
            mode: FetchMode::ProxyFetch,
            tls: None,
            key: Some(own_key(order)?),
            proxy,
            upload: Some(UploadSpec {
                file,
                post: order.post,
                kind: order.content_type.clone(),
                token: order.token.clone(),
            }),
            local_hosts: LocalHosts::ANY,
            limit_rate: None,
            may_go_end_to_end: false,
        })
    }

    /// The job of another order for the same server, with the same options, which a transport that is open can carry.
    ///
    /// # Errors
    /// The order makes no sense; in words.
    pub fn job_beside(
        order: &TransferOrder,
        terms: TransferTerms,
    ) -> Result<TransferJob, TransferFailure> {
        let mut job = order.job_on(terms)?;
        read_credentials(order, &mut job)?;
        end_to_end(order, &mut job, false)?;
        Ok(job)
    }

    /// Which host talks to the origin.
    pub fn mode(&self) -> FetchMode {
        self.mode
    }

    /// Whether another process can carry out the order.
    pub fn is_web_origin(&self) -> bool {
        self.target.is_none()
    }

    /// Creates the transport of the transfer's requests.
    pub async fn open_transport(
        &mut self,
        links: &watch::Receiver<Arc<Vec<Link>>>,
        tuning: &SessionTuning,
        purpose: TransportPurpose,
    ) -> TransferTransport {
        let origin = |whom, key| {
            let proxies = self.proxy.clone();
            let (links, log) = (links.clone(), tuning.log.clone());
            D2tpOrigin::new(whom, proxies, key, self.session_config(tuning), links, log)
        };
        let end_to_end = match (self.target.clone(), &self.key) {
            (Some(whom), Some(key)) => Some(origin(whom, key.clone())),
            (None, _) if self.may_go_end_to_end && purpose == TransportPurpose::Carry => {
                self.alternative(links, origin).await
            }
            _ => None,
        };
        let tls = self.tls.take();
        match (end_to_end, self.proxy.clone(), self.key.clone(), tls) {
            (Some(origin), ..) => TransferTransport::EndToEnd(Box::new(origin)),
            (None, Some(address), Some(key), tls) => {
                let tunnel = tls.map(OriginTunnel::new);
                let mut proxy =
                    ProxyClient::new(address, key, links.clone(), tunnel).with_config(|config| {
                        *config = self.session_config(tuning);
                        config.ack_offload = tuning.offload_acks;
                        config.drwa = tuning.drwa.or(tuning.path_drwa);
                        if tuning.drwa.is_none() {
                            config.drwa_wait_min = Drwa::BLOATED_WAIT;
                        }
                    });
                if let Some(log) = &tuning.log {
                    proxy.log_to(log.clone());
                }
                if self.verb == TransferVerb::Put {
                    return TransferTransport::Proxied(Box::new(proxy.for_uploads()));
                }
                // Only a flow of which the proxy knows what it carries goes on in another process.
                let lasts = match purpose {
                    TransportPurpose::Forget => true,
                    TransportPurpose::Carry => self.mode == FetchMode::ProxyFetch,
                    TransportPurpose::DryRun => false,
                };
                if let Some(directory) = state_directory().ok().filter(|_| lasts) {
                    proxy = proxy.with_state_directory(directory.join("instances"));
                }
                TransferTransport::Proxied(Box::new(proxy))
            }
            (None, _, _, Some(tls)) => {
                let window = self.limit_rate.map(RateLimiter::window);
                let dial = DirectConnector::new(tls)
                    .with_drwa(tuning.drwa)
                    .with_local_hosts(self.local_hosts.clone());
                let dial = dial.with_receive_buffer(window);
                let may_go_over = self.may_go_end_to_end && purpose == TransportPurpose::Carry;
                let options = may_go_over.then(|| AltSvcOptions {
                    key: self.key.clone(),
                    config: self.session_config(tuning),
                    links: links.clone(),
                    log: tuning.log.clone(),
                });
                TransferTransport::Direct(Box::new(UpgradingConnector::new(dial, options)))
            }
            (None, _, _, None) => unreachable!("a download without a proxy has its own trust"),
        }
    }

    /// The configuration of the transfer's sessions. With a limit on the rate, no more may arrive ahead than
    /// that lets in within a second.
    fn session_config(&self, tuning: &SessionTuning) -> EndpointConfig {
        let mut config = tuning.config.clone();
        if let Some(limit_rate) = self.limit_rate {
            config.flow_window = config.flow_window.min(RateLimiter::window(limit_rate));
        }
        config
    }

    /// The transport by D2TP to the origin, if the origin announced D2TP before and answers now.
    async fn alternative(
        &self,
        links: &watch::Receiver<Arc<Vec<Link>>>,
        origin: impl Fn(D2tpTarget, SecretKey) -> D2tpOrigin,
    ) -> Option<D2tpOrigin> {
        let proxy = self.proxy.as_ref().map(|all| all.first().to_string());
        let address = alt_svc::known_server(&self.job.url, proxy.as_deref())?;
        let key = match &self.key {
            Some(key) => key.clone(),
            None => key::load_device_key(None).ok()?,
        };
        let origin = origin(D2tpTarget::Address(address), key);
        // Without a network nobody is there, which says nothing of the origin.
        let may_ask = origin.needs_no_link() || links.borrow().iter().any(Link::is_usable);
        if !may_ask {
            return None;
        }
        if !origin.is_available(&self.job.url).await {
            alt_svc::forget_server(&self.job.url);
            return None;
        }
        Some(origin)
    }

    /// Reads what an upload sends, telling how far that is.
    ///
    /// # Errors
    /// The file cannot be read, or it was stopped.
    pub async fn open_upload_body(
        &self,
        stop: watch::Receiver<bool>,
        mut read: impl FnMut(u64, u64) + Send + 'static,
    ) -> Result<Option<UploadBody>, TransferFailure> {
        let Some(sent) = self.upload.clone() else {
            return Ok(None);
        };
        let url = self.job.url.clone();
        let reading = tokio::task::spawn_blocking(move || {
            let stopped = || *stop.borrow();
            let (file, kind) = (&sent.file, sent.kind.as_deref());
            UploadBody::open(file, &url, sent.post, kind, sent.token, stopped, &mut read)
        });
        reading.await.expect("reading does not panic").map(Some)
    }
}

/// The transport of a transfer's requests.
pub enum TransferTransport {
    /// TCP and TLS to the origin, over one link at a time; by D2TP once the origin says on the way that it speaks it.
    Direct(Box<UpgradingConnector>),
    /// A D2TP session with the origin itself.
    EndToEnd(Box<D2tpOrigin>),
    /// A session with a proxy.
    Proxied(Box<ProxyClient>),
}

impl TransferTransport {
    /// The proxy, if there is one.
    pub fn proxy(&self) -> Option<&ProxyClient> {
        match self {
            TransferTransport::Direct(_) | TransferTransport::EndToEnd(_) => None,
            TransferTransport::Proxied(proxy) => Some(proxy),
        }
    }

    /// Runs the job. `upload_body`: the file of an upload.
    pub async fn run(
        &self,
        job: &TransferJob,
        upload_body: Option<UploadBody>,
        setting: TransferContext,
        observer: &mut dyn TransferObserver,
    ) -> TransferExit {
        match (self, upload_body) {
            (TransferTransport::Direct(dial), _) => {
                transfer::run(job, &**dial, setting, observer).await
            }
            (TransferTransport::EndToEnd(dial), _) => {
                transfer::run(job, &**dial, setting, observer).await
            }
            (TransferTransport::Proxied(proxy), None) => {
                transfer::run_proxied(job, proxy, setting, observer).await
            }
            (TransferTransport::Proxied(proxy), Some(upload_body)) => {
                transfer::run_upload(job, upload_body, proxy, setting, observer).await
            }
        }
    }
}

fn own_key(order: &TransferOrder) -> Result<SecretKey, TransferFailure> {
    key::load_device_key(order.key.as_deref())
        .map_err(|error| TransferFailure::error(format!("{error:#}")))
}

fn has_password(url: &Url) -> bool {
    !url.username().is_empty() || url.password().is_some()
}

/// Whether the request carries credentials of the user.
pub fn carries_credentials(job: &TransferJob) -> bool {
    has_password(&job.url)
        || job.cookies.is_some()
        || job.fields.iter().any(HeaderField::is_credential)
}

/// Reads the files with credentials that an order names.
fn read_credentials(order: &TransferOrder, job: &mut TransferJob) -> Result<(), TransferFailure> {
    if let Some(path) = &order.netrc {
        let file = NetrcFile::read(path).map_err(TransferFailure::usage)?;
        file.apply(&mut job.url).map_err(TransferFailure::usage)?;
    }
    if let Some(path) = &order.cookies {
        let file = CookieFile::read(path).map_err(TransferFailure::usage)?;
        job.cookies = Some(Arc::new(file));
    }
    Ok(())
}

/// The host that a `d2tp:` URL names, and the job for it. These sessions use free links only.
fn end_to_end(
    order: &TransferOrder,
    job: &mut TransferJob,
    paid_asked: bool,
) -> Result<Option<D2tpTarget>, TransferFailure> {
    if job.url.scheme() != "d2tp" {
        return Ok(None);
    }
    let (whom, url) = D2tpTarget::of(&job.url)
        .map_err(|why| TransferFailure::usage(format!("{}: {why}", job.url)))?;
    if order.sealed || order.ca.is_some() {
        let text = "d2tp:// is always end to end, and the key in it proves the server";
        return Err(TransferFailure::usage(format!(
            "{text}; leave out --sealed and --ca"
        )));
    }
    if paid_asked {
        let text = "d2tp:// uses free networks only; leave out --policy and --max-cell";
        return Err(TransferFailure::usage(text));
    }
    job.url = url;
    job.terms.policy = CostPolicy::FreeOnly;
    Ok(Some(whom))
}

/// Whether a web download may use D2TP to the same origin: over free links only, and only if nothing in it is meant
/// for the web server alone. The address that an origin announces for D2TP is not checked, so a download that must
/// not lead into local networks stays with the web server.
fn may_go_end_to_end(order: &TransferOrder, job: &TransferJob) -> bool {
    job.terms.policy == CostPolicy::FreeOnly
        && !carries_credentials(job)
        && !order.sealed
        && order.local_hosts.is_any()
}

/// Which host talks to the origin. No proxy sees the user's credentials unless the user asks for it.
fn mode(
    order: &TransferOrder,
    job: &TransferJob,
    through_proxy: bool,
) -> Result<FetchMode, TransferFailure> {
    let refuse = |text: &str| Err(TransferFailure::usage(text));
    if !through_proxy {
        return match order.sealed {
            true => refuse("--sealed needs a proxy: give --prox too, or leave it out"),
            false => Ok(FetchMode::Direct),
        };
    }
    if order.sealed || carries_credentials(job) {
        return Ok(FetchMode::Sealed);
    }
    if order.ca.is_some() {
        return refuse(
            "--ca has no effect here, because the proxy verifies the server: add --sealed, or \
             give --ca to `cedos prox`",
        );
    }
    Ok(FetchMode::ProxyFetch)
}
