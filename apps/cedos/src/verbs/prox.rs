//! `cedos prox`: run D2Prox.
//!
//! This file turns options into a [`ProxConfig`] and a D2TP server, prints its address, and waits
//! for SIGTERM or Ctrl-C. Clients that are not admitted are refused in the handshake.

use cedos_terminal::{LogWriter, print_stdout, stdout_result};
use std::fs::{DirBuilder, File, TryLockError};
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use cedos_agent::fetch::option_parsers::parse_bytes;
use cedos_agent::metrics_listener::MetricsListener;
use cedos_agent::settings::SettingsError;
use cedos_prox::{
    ACME_DIRECTORY_DEFAULT, AccessDetail, AcmeOptions, ControlError, ControlServer, METRICS_TYPE,
    Prox, ProxConfig, ProxyTakeover, StandbyOutcome, TakeoverOffer, TcpFlowListener, TunnelHelper,
    accept_until, await_replacement, finish_within_grace, is_standby, keep_certificate, parse_key,
};
use cedos_sandbox::SandboxReport;
use clap::{Args, ValueEnum};
use d2tp_driver::{
    DrwaLambda, EndpointConfig, HibernationOptions, Journal, JournalBatch, JournalError,
    MemoryPool, PublicKey, RecordStore, STREAM_PORT_DEFAULT, SecretKey, Server, ServerAddress,
    ServerOptions, SocketsAfter, StreamIdentity, TcpStreamAcceptor,
};
use d2tp_links::{ClassRules, Link, LinkKind, LinkMonitor};
use d2tp_store::{RedisStore, RedisStoreOptions};
use d2tp_tcp::multipath;
use ipnet::IpNet;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use super::balancer_args::BalancerArgs;
use super::descriptor_limit::raise_descriptor_limit;
use super::key;
use super::log_levels::log_levels;
use super::prox_config::ProxConfigFile;
use super::prox_control::{self, ProxVerb};
use super::prox_sandbox::ProxSandbox;
use super::prox_sockets::{PassedSockets, workers_of};
use super::qlog::QlogArgs;
use super::transport::TransportArgs;
use crate::help::EXPERT;

/// Where D2Prox listens unless told otherwise: every address, both families.
pub const LISTEN_DEFAULT: &str = "[::]:4433";

/// How the log is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One JSON object per line
    Json,
    /// Lines for people
    Text,
}

/// How much the access log says of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AccessLogDetail {
    /// Neither who nor what: time, kind, bytes, outcome
    Counts,
    /// The host of the server too
    Origin,
    /// The client's name and the whole URL too
    Full,
}

impl From<AccessLogDetail> for AccessDetail {
    fn from(detail: AccessLogDetail) -> AccessDetail {
        match detail {
            AccessLogDetail::Counts => AccessDetail::Counts,
            AccessLogDetail::Origin => AccessDetail::Origin,
            AccessLogDetail::Full => AccessDetail::Full,
        }
    }
}

/// Run a proxy (D2Prox): fetch for devices, and keep what they have not received yet
///
/// Run it, then invite devices with `cedos prox invite`. `invite` and `client` change a proxy that runs.
/// Without an option that names clients, only devices that were invited may use it.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct ProxArgs {
    #[command(subcommand)]
    verb: Option<ProxVerb>,
    /// UDP address to listen on
    #[arg(long, value_name = "ADDR", default_value = LISTEN_DEFAULT)]
    pub listen: SocketAddr,
    /// TCP address for devices whose networks block UDP, over TLS, or plain HTTP from a reverse proxy
    #[arg(long, value_name = "ADDR")]
    pub stream_listen: Option<SocketAddr>,
    /// TCP port at which devices reach --stream-listen, where a reverse proxy stands before it
    #[arg(long, value_name = "PORT", requires = "stream_listen")]
    pub stream_port: Option<u16>,
    /// PEM file with the certificate for --stream-listen, and its chain [default: a new self-signed one;
    /// devices accept any, for they trust this proxy's key]
    #[arg(long, value_name = "FILE", requires_all = ["stream_listen", "stream_key"])]
    pub stream_cert: Option<PathBuf>,
    /// PEM file with the private key of --stream-cert
    #[arg(long, value_name = "FILE", requires = "stream_cert")]
    pub stream_key: Option<PathBuf>,
    /// TOML file with settings, which SIGHUP and `cedos prox reload` read again; options override it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Name of this host for which an authority is asked for the certificate of --stream-listen, by ACME
    /// (repeatable). The authority connects to port 443 of it; you agree to its terms
    #[arg(
        long = "acme",
        value_name = "NAME",
        requires = "stream_listen",
        conflicts_with = "stream_cert"
    )]
    pub acme_names: Vec<String>,
    /// Directory of the ACME authority, whose own certificate --ca may vouch for
    #[arg(long, value_name = "URL", default_value = ACME_DIRECTORY_DEFAULT, requires = "acme_names")]
    pub acme_directory: String,
    /// E-mail address to which the ACME authority may write
    #[arg(long, value_name = "EMAIL", requires = "acme_names")]
    pub acme_contact: Option<String>,
    /// Private key file, from `cedos key gen` [default: a new key, kept in --state-dir; without that, for
    /// this run only]
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// The host in the addresses that this proxy prints and invites to [default: the best address of this
    /// machine]
    #[arg(long, value_name = "HOST")]
    pub public_host: Option<String>,
    /// Public key of a client that may use this proxy, beside those that were invited (repeatable)
    // One key in 64 begins with a hyphen.
    #[arg(long = "allow-client", value_name = "KEY", value_parser = parse_key, allow_hyphen_values = true)]
    pub allow_clients: Vec<[u8; 32]>,
    /// Serve any client: everybody who knows the proxy's address may use it
    #[arg(long)]
    pub allow_any_client: bool,
    /// TCP address of an HTTP proxy for clients without D2TP, over TCP or kernel MPTCP; see --allow-address
    #[arg(long, value_name = "ADDR")]
    pub tcp_listen: Option<SocketAddr>,
    /// Network whose hosts may use --tcp-listen; they have no key (repeatable)
    #[arg(long = "allow-address", value_name = "CIDR", requires = "tcp_listen", value_parser = parse_net)]
    pub allow_addresses: Vec<IpNet>,
    /// Let clients reach private and loopback networks (metadata services stay refused)
    #[arg(long)]
    pub allow_private: bool,
    /// Let clients reach this network or address; a metadata service only by its own address (repeatable)
    #[arg(long = "allow-net", value_name = "CIDR", value_parser = parse_net)]
    pub allow_nets: Vec<IpNet>,
    /// Do not relay packets between clients, or between clients and servers that speak D2TP
    #[arg(long)]
    pub no_relay: bool,
    /// Networks from which clients get inner addresses for `cedos vpn`: one of IPv4, such as 10.83.0.0/16, and one of
    /// IPv6 if wanted. Needs CAP_NET_ADMIN, ip and nft
    #[arg(long = "tunnel-net", value_name = "CIDR", value_delimiter = ',', value_parser = parse_net)]
    pub tunnel_nets: Vec<IpNet>,
    /// PEM file with more certificate authorities for servers
    #[arg(long, value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// Directory for clients, copies, sessions and flows, which then survive a restart and a crash [default:
    /// ~/.local/state/cedos/prox; none if an option names the clients: then nothing survives]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Store that several nodes with one key share: redis://[[USER]:PASSWORD@]HOST[:PORT][/DB], of Redis 7 or Valkey.
    /// Each node wakes the others' sessions. A password is safer in --config
    #[arg(long, value_name = "URL")]
    pub store: Option<String>,
    /// Name of this node, which no other node of --store has
    #[arg(long, value_name = "NAME")]
    pub node: Option<String>,
    /// Directory for copies that all nodes of --store see
    #[arg(long, value_name = "DIR")]
    pub copies_dir: Option<PathBuf>,
    /// Memory for pinned copies, such as 500M or 2GiB [default: 256MiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub memory_quota: Option<u64>,
    /// Memory for devices' sessions: unread and unacknowledged bytes, state, and buffers of tunnels.
    /// One device gets a fifth of what the others leave [default: 512MiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub session_memory: Option<u64>,
    /// Bucket that has the bytes of copies and uploads too, s3://BUCKET/PREFIX; endpoint and keys: AWS_… in the
    /// environment [default: none]
    #[arg(long, value_name = "URL")]
    pub copies: Option<String>,
    /// Disk for pinned copies, such as 500M or 2GiB [default: 16GiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub disk_quota: Option<u64>,
    /// Bytes of memory and disk for the cache that all clients share, such as 500M or 2GiB; 0: no cache
    /// [default: 4GiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub cache_quota: Option<u64>,
    /// How long a device may be silent before its session becomes a small record, such as 60s
    #[arg(long, value_name = "SPAN", value_parser = cedos_agent::fetch::option_parsers::parse_span)]
    pub sleep_after: Option<Duration>,
    /// Keep the queues of devices' networks short while they upload, as in `cedos get`
    #[arg(long, value_name = "LAMBDA", num_args = 0..=1, require_equals = true, default_missing_value = "3")]
    pub drwa: Option<DrwaLambda>,
    #[command(flatten)]
    pub transport: TransportArgs,
    #[command(flatten)]
    pub qlog: QlogArgs,
    /// TCP address at which Prometheus reads metrics, without names, addresses and URLs: whoever reaches it may read
    #[arg(long, value_name = "ADDR")]
    pub metrics_listen: Option<SocketAddr>,
    /// File to which one JSON object is appended for each flow that ends, or - for standard output. SIGHUP opens it again
    #[arg(long, value_name = "FILE")]
    pub access_log: Option<PathBuf>,
    /// What --access-log says of a flow
    #[arg(
        long,
        value_name = "DETAIL",
        default_value = "counts",
        requires = "access_log"
    )]
    pub access_log_detail: AccessLogDetail,
    #[command(flatten)]
    pub balancer: BalancerArgs,
    /// Serve devices in this many workers, each on a core of its own. More than one neither relays nor takes
    /// --stream-listen yet
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub workers: u16,
    /// Take the proxy over that runs with the same --state-dir: its sockets, and then what it holds. Devices see a
    /// short pause. If this process cannot serve, the other one goes on. Without one running, just start
    #[arg(long)]
    pub upgrade: bool,
    /// Keep every right that this process was started with. Without this option, files, system calls and
    /// capabilities that a proxy does not need are given up before it serves
    #[arg(long, help_heading = EXPERT)]
    pub no_sandbox: bool,
    /// How to write the log
    #[arg(long, value_name = "FORM", default_value = "text")]
    pub log: LogFormat,
}

impl ProxArgs {
    /// Whether a server begins: neither a command to one that runs, nor a process that was one before a takeover.
    pub(super) fn begins_server(&self) -> bool {
        self.verb.is_none() && !is_standby()
    }

    /// Chooses the state directory, where the options leave that open.
    ///
    /// # Errors
    /// The settings make no sense.
    pub(super) fn settle_state_dir(&mut self) -> anyhow::Result<()> {
        if let (None, Some(path)) = (&self.state_dir, &self.config) {
            self.state_dir = ProxConfigFile::read(path)?.state_dir;
        }
        if self.state_dir.is_none() && !self.config()?.is_for_anybody() {
            // Clients that are invited must be kept somewhere.
            self.state_dir = Some(prox_control::default_state_dir()?);
        }
        Ok(())
    }

    /// The configuration that file and options ask for.
    ///
    /// # Errors
    /// The file cannot be read or makes no sense, or both together do not.
    pub fn config(&self) -> Result<ProxConfig, SettingsError> {
        let config = match &self.config {
            Some(path) => ProxConfigFile::read(path)?.config,
            None => ProxConfig::default(),
        };
        let config = self.config_over(config);
        if let Some(text) = self.mistake_in_sharing(&config) {
            return Err(SettingsError {
                path: None,
                text: text.to_owned(),
            });
        }
        if self.workers > 1 && self.stream_listen.is_some() {
            return Err(SettingsError {
                path: None,
                text: "--stream-listen needs --workers 1: streams do not reach other workers yet"
                    .to_owned(),
            });
        }
        if self.tcp_listen.is_some() && config.allow_addresses.is_empty() {
            return Err(SettingsError {
                path: None,
                text: "--tcp-listen needs --allow-address, or allow_addresses in the file of --config: \
                       nobody could use it"
                    .to_owned(),
            });
        }
        Ok(config)
    }

    /// What is wrong with the settings of a store that nodes share.
    fn mistake_in_sharing(&self, config: &ProxConfig) -> Option<&'static str> {
        let is_shared = config.store.is_some();
        if !is_shared && config.node.is_some() {
            return Some("--node needs --store: a proxy without a store has no other nodes");
        }
        if !is_shared && config.copies_dir.is_some() {
            return Some(
                "--copies-dir needs --store: without it this proxy would remove the copies of others that it does not \
                 know. Leave it out, or name the store",
            );
        }
        None
    }

    /// The configuration that these options make of another one.
    fn config_over(&self, mut config: ProxConfig) -> ProxConfig {
        config.allow_clients.extend(&self.allow_clients);
        config.allow_addresses.extend(&self.allow_addresses);
        config.allow_nets.extend(&self.allow_nets);
        config.tunnel_nets.extend(&self.tunnel_nets);
        config.allow_any_client |= self.allow_any_client;
        config.allow_private |= self.allow_private;
        config.relay &= !self.no_relay;
        if let Some(path) = &self.ca {
            config.ca_file = Some(path.clone());
        }
        if let Some(dir) = &self.state_dir {
            config.state_dir = dir.clone();
        }
        for (given, setting) in [
            (&self.store, &mut config.store),
            (&self.node, &mut config.node),
        ] {
            if given.is_some() {
                setting.clone_from(given);
            }
        }
        if self.copies_dir.is_some() {
            config.copies_dir.clone_from(&self.copies_dir);
        }
        if let Some(span) = self.sleep_after {
            config.sleep_after = span;
        }
        if let Some(bytes) = self.memory_quota {
            config.memory_quota_bytes = bytes;
        }
        if let Some(url) = &self.copies {
            config.copies = Some(url.clone());
        }
        if let Some(bytes) = self.session_memory {
            config.session_memory_bytes_max = bytes;
        }
        if let Some(bytes) = self.disk_quota {
            config.disk_quota_bytes = bytes;
        }
        if let Some(bytes) = self.cache_quota {
            config.cache_bytes_max = bytes;
        }
        config
    }

    /// The protocol settings these options ask for.
    fn endpoint_config(&self, config: &ProxConfig) -> EndpointConfig {
        let mut protocol = EndpointConfig {
            drwa: self.drwa,
            cid_share: self.balancer.cid_share(),
            ..EndpointConfig::default()
        };
        self.transport.apply(&mut protocol);
        // A session that may sleep sooner counts as silent sooner.
        protocol.silence_max = protocol.silence_max.min(config.sleep_after.into());
        protocol
    }

    /// The host's private key: from its file, or a new one for this run.
    ///
    /// # Errors
    /// When the file is no usable key file.
    pub fn secret_key(&self) -> anyhow::Result<SecretKey> {
        match (&self.key, &self.state_dir) {
            (Some(path), _) => key::read(path),
            (None, Some(dir)) => {
                let path = dir.join("key");
                if !path.exists() {
                    create_private_dir(dir)
                        .with_context(|| format!("cannot make {}", dir.display()))?;
                    key::write_new(&key::generate()?, &path)?;
                }
                key::read(&path)
            }
            (None, None) => {
                tracing::warn!("no --key: this proxy's address changes at every start");
                key::generate()
            }
        }
    }

    /// The listener for devices whose networks block UDP.
    fn stream_acceptor(
        &self,
        passed: &mut PassedSockets,
    ) -> anyhow::Result<Option<TcpStreamAcceptor>> {
        let Some(at) = self.stream_listen else {
            return Ok(None);
        };
        let identity = match (&self.stream_cert, &self.stream_key) {
            (Some(chain), Some(key)) => StreamIdentity::from_pem_files(chain, key)?,
            // A name that says nothing of who runs it.
            _ => StreamIdentity::self_signed("localhost")?,
        };
        let listeners = passed.take_tcp(at);
        let acceptor = match listeners.is_empty() {
            true => TcpStreamAcceptor::bind(at, identity),
            false => TcpStreamAcceptor::on_sockets(listeners, identity),
        };
        Ok(Some(
            acceptor.with_context(|| format!("cannot listen on TCP {at}"))?,
        ))
    }

    /// The listener for clients without D2TP.
    fn tcp_listener(&self, passed: &mut PassedSockets) -> anyhow::Result<Option<TcpListener>> {
        let Some(at) = self.tcp_listen else {
            return Ok(None);
        };
        let listener = match passed.take_tcp(at).pop() {
            Some(listener) => Ok(listener),
            None => multipath::listen(at),
        };
        let listener = listener.with_context(|| format!("cannot listen on TCP {at}"))?;
        Ok(Some(listener))
    }

    /// What is asked of an ACME authority, if anything.
    fn acme(&self) -> anyhow::Result<Option<AcmeOptions>> {
        if self.acme_names.is_empty() {
            return Ok(None);
        }
        let state = self.state_dir.as_deref();
        let state = state.context("--acme needs --state-dir, to keep the certificate")?;
        Ok(Some(AcmeOptions {
            names: self.acme_names.clone(),
            directory: self.acme_directory.clone(),
            contact: self.acme_contact.clone(),
            root: self.ca.clone(),
            store: state.join("acme"),
        }))
    }

    /// Sends the log to stderr in the form asked for. `RUST_LOG` chooses levels; `info` without.
    pub fn start_log(&self) {
        let log = tracing_subscriber::fmt::layer().with_writer(LogWriter::default);
        let log = match self.log {
            LogFormat::Json => log.json().flatten_event(true).boxed(),
            LogFormat::Text => log.with_ansi(false).boxed(),
        };
        let log = log.with_filter(log_levels(LevelFilter::INFO));
        // A second call (in tests) keeps the first log.
        let _ = tracing_subscriber::registry().with(log).try_init();
    }
}

/// Runs `cedos prox` until SIGTERM or Ctrl-C.
///
/// # Errors
/// When the configuration cannot be run.
pub async fn run(mut args: ProxArgs, sandbox: Option<ProxSandbox>) -> anyhow::Result<ExitCode> {
    if let Some(verb) = args.verb {
        return prox_control::run(verb).await;
    }
    raise_descriptor_limit();
    let resumed = match tokio::task::spawn_blocking(await_replacement).await?? {
        StandbyOutcome::Replaced => return Ok(ExitCode::SUCCESS),
        StandbyOutcome::Resumed(sockets) => Some(sockets),
        StandbyOutcome::NotStandby => None,
    };
    args.start_log();
    let tunnel_helper = match sandbox {
        Some(sandbox) => {
            log_sandbox(&sandbox.report);
            sandbox.tunnel_helper
        }
        // It has the helper that it had before it began anew.
        None if resumed.is_some() => TunnelHelper::adopt(),
        None => None,
    };
    args.settle_state_dir()?;
    let args = Arc::new(args);
    let config = args.config()?;
    let has_addresses = !config.allow_addresses.is_empty();
    let mut terminate = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
    let stopping = CancellationToken::new();
    let stopped = stopping.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
        stopped.cancel();
    });
    let stop = stopping.clone().cancelled_owned();
    let key = args.secret_key()?;
    let mut takeover = None;
    let is_resumed = resumed.is_some();
    let mut passed = match resumed {
        Some(sockets) => {
            tracing::error!("the new process failed; this one serves again");
            PassedSockets::of(sockets)?
        }
        None => PassedSockets::from_systemd()?,
    };
    // systemd keeps its sockets, and devices' packets in them, while no process serves.
    let are_kept = !passed.is_empty();
    if let (true, Some(dir)) = (args.upgrade, &args.state_dir) {
        match ProxyTakeover::begin(dir).await {
            Ok((begun, sockets)) => {
                takeover = Some(begun);
                passed = PassedSockets::of(sockets)?;
            }
            Err(ControlError::NotRunning(_)) => {
                tracing::info!("no proxy runs with this state directory; starting one");
            }
            Err(error) => return Err(error.into()),
        }
    }
    if let Some(dir) = &args.state_dir {
        create_private_dir(dir)
            .with_context(|| format!("cannot make the state directory {}", dir.display()))?;
    }
    let shared = SharedStoreSettings::of(&config, &args)?;
    let sleep_after = Some(config.sleep_after);
    let mut protocol = args.endpoint_config(&config);
    let relay_limits = config.relay_limits();
    let resolver = Arc::new(cedos_prox::SystemResolver);
    // What can fail does so before a running proxy ends.
    let prepared = Prox::prepare(config, resolver, args.state_dir.is_some())?;
    prepared.check_copy_bucket(key.public()).await?;
    let udp = passed.take_udp(args.listen);
    // Streams are one worker's; the number that was passed stays whatever --workers says.
    let passed_workers = workers_of(&udp);
    anyhow::ensure!(
        args.stream_listen.is_none() || passed_workers < 2,
        "--stream-listen needs one worker, and the sockets that were passed are for {passed_workers}: \
         end the running proxy, and start one with --workers 1"
    );
    let stream_acceptor = args.stream_acceptor(&mut passed)?;
    let tcp_listener = args.tcp_listener(&mut passed)?;
    let acme = args.acme()?;
    if let Some(path) = args
        .access_log
        .as_deref()
        .filter(|path| *path != Path::new("-"))
    {
        cedos_prox::check_access_log(path)
            .with_context(|| format!("cannot write the access log {}", path.display()))?;
    }
    passed.close_unused();
    let store = match shared {
        Some(shared) if is_resumed => Some(shared.open_patiently(&key).await),
        Some(shared) => Some(shared.open(&key).await?),
        None => None,
    };
    if let Some(takeover) = &mut takeover {
        takeover.release().await?;
    }
    // Held until this process ends.
    let mut _node_lock = None;
    let journal: Option<Arc<dyn RecordStore>> = match (store, &args.state_dir) {
        (Some(store), Some(dir)) => {
            _node_lock = Some(lock_node(dir).await?);
            store.begin();
            Some(store)
        }
        (None, Some(dir)) if is_resumed || takeover.is_some() => {
            Some(Arc::new(reopen_journal(dir, &key).await?))
        }
        (None, Some(dir)) => Some(Arc::new(open_journal(dir, &key)?)),
        (_, None) => None,
    };
    let prox = Prox::start(prepared, journal.clone())?;
    prox.open_packet_network(args.state_dir.as_deref(), tunnel_helper.clone())?;
    let _kept_copies = prox.keep_copies_at_exit();
    if args.config.is_some() {
        let args = args.clone();
        prox.set_config_source(move || args.config().map_err(|error| error.to_string()));
    }
    if let Some(path) = &args.access_log {
        let path = Some(path.as_path()).filter(|path| *path != Path::new("-"));
        prox.log_access(path, args.access_log_detail.into())
            .with_context(|| format!("cannot write the access log {}", shown(path)))?;
    }
    tokio::spawn(reload_at_hangup(
        prox.clone(),
        signal(SignalKind::hangup())?,
    ));
    protocol.memory = prox.session_memory().clone();
    protocol.flow_memory = cedos_prox::flow_task_bytes();
    tokio::spawn(warn_of_full_memory(protocol.memory.clone()));
    prox.fetch_missing_copies().await;
    if let Some(journal) = journal.as_ref().and_then(|journal| journal.as_journal()) {
        let copies = prox.restore_from_journal(journal)?;
        tracing::info!(copies, journal = %journal.path().display(), "copies restored");
    }
    tokio::spawn(prox.clone().work_on_bucket(key.public(), journal.clone()));
    if let Some(shared) = prox.shared_records() {
        tracing::info!(
            node = shared.node(),
            store = shared.place(),
            "shares its sessions with other nodes"
        );
        tokio::spawn(prox.clone().remove_free_copies());
        tokio::spawn(prox.clone().share_clients());
    }
    let options = ServerOptions {
        listen: args.listen,
        key,
        admission: prox.clients().admission(),
        config: protocol,
    };
    let rest = HibernationOptions {
        hibernate_after: sleep_after,
        journal: journal.clone(),
    };
    let server = Arc::new(match udp.is_empty() {
        true => Server::bind_workers(args.workers, options, rest)?,
        // As many workers as there are sockets.
        false => Server::on_sockets(udp, options, rest)?,
    });
    let workers = server.counts_by_worker().len();
    if workers != usize::from(args.workers) {
        tracing::warn!(
            workers,
            asked = args.workers,
            "there are as many workers as passed sockets of one address, not as --workers says"
        );
    }
    if workers > 1 && relay_limits.is_some() {
        tracing::warn!(workers, "several workers do not relay between devices");
    }
    let mut sockets = server.share_sockets()?;
    if let Some(limits) = relay_limits {
        server.relay_for_devices(limits);
        server.meter_relays(prox.clone());
    }
    if let Some(at) = args.metrics_listen {
        let listener = MetricsListener::bind(at).await?;
        tracing::info!(listening = %listener.local_addr()?, "serving metrics");
        let (prox, server) = (prox.clone(), server.clone());
        let metrics = move || prox.metrics(Some(&server));
        tokio::spawn(listener.serve(METRICS_TYPE, metrics));
    }
    let reader = prox.clone();
    server.set_hibernated_reader(Arc::new(move |memo, offset, max| {
        reader.peek(memo, offset, max)
    }));
    let log = args.qlog.open()?;
    if let Some(log) = &log {
        server.log_to(log);
    }
    tokio::spawn(prox.clone().watch_expired_flows(server.clone()));
    let mut stream_port = None;
    if let Some(acceptor) = stream_acceptor {
        sockets.extend(acceptor.share_sockets()?);
        let at = acceptor.local_addr()?;
        tracing::info!(listening = %at, "listening for devices whose networks block UDP");
        let port = args.stream_port.unwrap_or(at.port());
        prox.announce_stream_port(port);
        stream_port = Some(port);
        if let Some(options) = acme {
            tokio::spawn(keep_certificate(acceptor.identity(), options));
        }
        server.accept_streams(acceptor);
    }
    tokio::spawn(prox.clone().watch_clients(server.clone()));
    let local = server.local_addr();
    let host = match &args.public_host {
        Some(host) => host.clone(),
        None => host_for_devices(local).await.to_string(),
    };
    let address = ServerAddress {
        host,
        port: local.port(),
        key: server.public_key(),
        // Devices try the usual port by themselves.
        stream: stream_port.filter(|port| *port != STREAM_PORT_DEFAULT),
        nodes: Default::default(),
        requires_hybrid: false,
    };
    if local.ip().is_unspecified() && args.public_host.is_none() {
        tracing::info!(
            listening = %local,
            host = %address.host,
            "listening on every address; devices elsewhere may need another host: --public-host"
        );
    }
    let stop_tcp = stopping.child_token();
    let mut tcp_flows = match tcp_listener {
        Some(listener) => {
            sockets.push(listener.as_fd().try_clone_to_owned()?);
            let listener = TcpFlowListener::on_socket(listener, prox.clone())?;
            tracing::info!(listening = %listener.local_addr()?, "listening for TCP and MPTCP");
            let (serving, stop) = (prox.clone(), stop_tcp.clone().cancelled_owned());
            Some(tokio::spawn(async move {
                let (flows, listener) = accept_until(listener, &serving, stop).await;
                finish_within_grace(&flows, &serving).await;
                (flows, listener)
            }))
        }
        None => None,
    };
    let (offer, mut on_release) = TakeoverOffer::new(sockets);
    let control = match args.state_dir.as_deref().map(ControlServer::bind) {
        Some(Ok(control)) => {
            let serving = control.serve(prox.clone(), address.clone(), offer);
            Some(tokio::spawn(serving))
        }
        Some(Err(error)) if error.kind() == std::io::ErrorKind::AddrInUse => {
            return Err(error).context("cannot use the state directory");
        }
        Some(Err(error)) => {
            tracing::error!(%error, "no control socket: clients cannot be invited or removed");
            None
        }
        None => None,
    };
    if !prox.clients().has_clients() && !has_addresses {
        tracing::info!("no client yet; `cedos prox invite` invites one");
    }
    tracing::info!(%address, "ready");
    // Whoever read the address may not read any more.
    if !is_resumed {
        print_stdout(&address.to_string());
        stdout_result()?;
    }
    if let Some(takeover) = takeover {
        takeover.complete();
    }
    // What this process becomes when another takes it over.
    let mut successor = None;
    let stop_accepting = async {
        tokio::select! {
            () = stop => {}
            () = prox.clone().drained(server.clone()) => {}
            released = on_release.recv() => successor = released,
        }
        if let (Some(_), Some(flows)) = (&successor, &mut tcp_flows) {
            // Their connections cannot be handed over. Devices are served until these are over.
            stop_tcp.cancel();
            let _ = flows.await;
        }
    };
    let (flows, listener) = accept_until(server.clone(), &prox, stop_accepting).await;
    if journal.is_some() {
        prox.until_answered(ANSWERED_WITHIN).await;
        server.until_kept(KEPT_WITHIN).await;
        let sockets = match successor.is_some() || are_kept {
            true => SocketsAfter::Kept,
            false => SocketsAfter::Closed,
        };
        // Flows that may sleep do; the next process goes on with them.
        let stopping = cedos_prox::ResetCause::Stopping.code();
        if let Err(error) = server.leave(stopping, sockets).await {
            tracing::error!(%error, "devices must request their flows again");
        }
        if successor.is_some() {
            // What their flows leave behind is for the next process as well.
            let _ = tokio::time::timeout(FLOWS_END_WITHIN, flows.wait()).await;
        }
        if let Err(error) = prox.persist_copies().await {
            tracing::error!(%error, "copies must be fetched again");
        }
    }
    // The next process makes its own.
    prox.close_packet_network();
    if let Some(control) = control {
        // Its socket goes with it.
        control.abort();
        let _ = control.await;
    }
    prox.save_clients();
    prox.flush_access_log().await;
    if successor.is_some() {
        prox.finish_sharing().await;
    }
    if let Some(standby) = successor {
        if let Some(log) = log {
            log.finish();
        }
        let standby = match &tunnel_helper {
            Some(helper) => standby.with_variable(helper.environment()),
            None => standby,
        };
        return Err(standby.begin()).context("cannot hold the sockets for the new process");
    }
    if !finish_within_grace(&flows, &prox).await {
        prox.end_flows();
        flows.wait().await;
    }
    if journal.is_none() {
        server.close().await;
    }
    drop(listener);
    if let Some(tcp_flows) = tcp_flows {
        let (flows, _listener) = tcp_flows.await?;
        prox.end_flows();
        flows.wait().await;
    }
    if journal.is_some() {
        // What was retained since, because its flow was reset.
        if let Err(error) = prox.persist_copies().await {
            tracing::error!(%error, "copies must be fetched again");
        }
    }
    // What flows did in the grace.
    prox.finish_sharing().await;
    prox.save_clients();
    prox.flush_access_log().await;
    tracing::info!("stopped");
    if let Some(log) = log {
        log.finish();
    }
    Ok(ExitCode::SUCCESS)
}

/// How long origins may take to answer before a new process requests the same again. Devices' new requests wait as long.
const ANSWERED_WITHIN: Duration = Duration::from_secs(2); // a guess: most origins answer within one

/// How long flows that have just begun are waited for: what the next process goes on with must be in the journal.
const KEPT_WITHIN: Duration = Duration::from_millis(500); // a guess: an answer is kept after 60 ms

/// How long flows that hibernated or were reset may take to end while a new process waits.
const FLOWS_END_WITHIN: Duration = Duration::from_millis(50); // a guess: they wait for nothing any more

/// A path for messages, or standard output.
fn shown(path: Option<&Path>) -> String {
    path.map_or_else(|| "-".to_owned(), |path| path.display().to_string())
}

/// Reads the settings again at each SIGHUP, and opens the access log again.
async fn reload_at_hangup(prox: Arc<Prox>, mut hangup: Signal) {
    while hangup.recv().await.is_some() {
        prox.reopen_access_log();
        if !prox.can_reload() {
            continue;
        }
        // A file is read.
        let reloading = prox.clone();
        let reloaded = tokio::task::spawn_blocking(move || reloading.reload()).await;
        if let Ok(Err(reason)) = reloaded {
            tracing::error!(reason, "the settings stay as they were");
        }
    }
}

/// Says in the log what the sandbox holds.
fn log_sandbox(sandbox: &SandboxReport) {
    match sandbox.is_whole() {
        true => tracing::debug!("sandbox: {sandbox}"),
        false => tracing::warn!("sandbox: {sandbox}"),
    }
}

/// Creates a directory that only this user can use: requests in it may contain credentials. One that exists
/// is left as it is.
pub(super) fn create_private_dir(dir: &Path) -> std::io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true).mode(0o700).create(dir)
}

/// How often the log says that memory was refused.
const MEMORY_WARNING_EVERY: Duration = Duration::from_secs(60);

/// Says in the log that devices were refused memory, while they are.
async fn warn_of_full_memory(memory: MemoryPool) {
    let mut reported = 0;
    loop {
        tokio::time::sleep(MEMORY_WARNING_EVERY).await;
        let refusals = memory.refusals();
        if refusals > reported {
            let (used, max) = (memory.used(), memory.max());
            tracing::warn!(
                refusals = refusals - reported,
                used,
                max,
                "a device filled its share of the memory for sessions and is slowed down; \
                 --session-memory gives more"
            );
        }
        reported = refusals;
    }
}

/// How soon a process that serves again tries again what it cannot do without.
const RESUME_AGAIN_AFTER: Duration = Duration::from_secs(2); // a guess

/// How long a process that ends may still have the journal.
const JOURNAL_FREE_WITHIN: Duration = Duration::from_secs(5); // a guess: it has ended already

/// The journal in a state directory that another process is about to release.
async fn reopen_journal(dir: &Path, key: &SecretKey) -> anyhow::Result<Journal> {
    let began = tokio::time::Instant::now();
    loop {
        match open_journal(dir, key) {
            Err(error) if is_taken(&error) && began.elapsed() < JOURNAL_FREE_WITHIN => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            opened => return opened,
        }
    }
}

fn is_taken(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(JournalError::Taken { .. }))
}

/// The journal in a state directory, which belongs to one key.
fn open_journal(dir: &Path, key: &SecretKey) -> anyhow::Result<Journal> {
    let journal = Journal::open(&dir.join("journal"))?;
    let ours = key.public().0.to_vec();
    match journal.note(b"key")? {
        Some(theirs) if theirs != ours => anyhow::bail!(
            "the state in {} belongs to another key ({}); use that key, or name another directory",
            dir.display(),
            PublicKey(theirs.try_into().unwrap_or_default())
        ),
        Some(_) => {}
        None => {
            let mut batch = JournalBatch::default();
            batch.notes.insert(b"key".to_vec(), Some(ours.into()));
            journal.commit(&batch)?;
        }
    }
    Ok(journal)
}

/// The file in a node's state directory that says which node it is. Its process has locked it.
const NODE_FILE: &str = "node";

/// Locks a node's state directory, which a process that ends may still have.
async fn lock_node(dir: &Path) -> anyhow::Result<File> {
    let path = dir.join(NODE_FILE);
    let file = File::options().read(true).write(true).open(&path);
    let file = file.with_context(|| format!("cannot open {}", path.display()))?;
    let began = tokio::time::Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if began.elapsed() < JOURNAL_FREE_WITHIN => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Err(TryLockError::WouldBlock) => anyhow::bail!(
                "{} is in use by another process; stop the other proxy, or give another --state-dir",
                dir.display()
            ),
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("cannot lock {}", path.display()));
            }
        }
    }
}

/// What distinguishes the node with this state directory from others, for all of its processes.
fn node_identity(dir: &Path) -> std::io::Result<String> {
    let path = dir.join(NODE_FILE);
    match std::fs::read_to_string(&path) {
        Ok(identity) if !identity.trim().is_empty() => return Ok(identity.trim().to_owned()),
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let identity = format!("{:016x}", getrandom::u64()?);
    std::fs::write(&path, format!("{identity}\n"))?;
    Ok(identity)
}

/// The settings of a store that this proxy shares with other nodes of its key.
struct SharedStoreSettings {
    url: String,
    node: String,
    holder: String,
}

impl SharedStoreSettings {
    /// The settings, if there is a store, and their directories, which are made.
    fn of(config: &ProxConfig, args: &ProxArgs) -> anyhow::Result<Option<Self>> {
        let Some(url) = config.store.clone() else {
            return Ok(None);
        };
        let node = config.node.clone();
        let node = node.context("--store needs --node NAME, a name that no other node has")?;
        let dir = args.state_dir.as_deref();
        let dir = dir.context("--store needs --state-dir DIR, a directory of this node")?;
        let copies = config.copies_dir.as_deref();
        let copies =
            copies.context("--store needs --copies-dir DIR, a directory that all nodes see")?;
        anyhow::ensure!(
            config.copies.is_none(),
            "--store keeps copies in --copies-dir; leave --copies out"
        );
        anyhow::ensure!(
            args.key.is_some(),
            "--store needs --key FILE, the same key on all nodes: they share nothing otherwise"
        );
        for dir in [dir, copies] {
            create_private_dir(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        }
        let holder = node_identity(dir)
            .with_context(|| format!("cannot use the state directory {}", dir.display()))?;
        Ok(Some(SharedStoreSettings { url, node, holder }))
    }

    /// Opens and checks the store. A running process of this node notices nothing of it.
    async fn open(&self, key: &SecretKey) -> anyhow::Result<Arc<RedisStore>> {
        let key = &key.public().0[..8];
        let prefix: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        let options = RedisStoreOptions {
            url: self.url.clone(),
            node: self.node.clone(),
            holder: self.holder.clone(),
            prefix: format!("cedos:{prefix}"),
            object_of: Arc::new(cedos_prox::copy_of_memo),
        };
        let opened = tokio::task::spawn_blocking(move || RedisStore::open(options));
        Ok(Arc::new(opened.await??))
    }

    /// Opens the store, which is waited for if it is away: devices wait in the sockets, and nothing else serves them.
    async fn open_patiently(&self, key: &SecretKey) -> Arc<RedisStore> {
        loop {
            match self.open(key).await {
                Ok(store) => return store,
                Err(error) => {
                    tracing::error!(
                        error = format!("{error:#}"),
                        "cannot serve yet; trying again"
                    );
                    tokio::time::sleep(RESUME_AGAIN_AFTER).await;
                }
            }
        }
    }
}

/// The host to write into the address: what is listened on, or for a wildcard this machine's best
/// address.
pub(crate) async fn host_for_devices(listening: SocketAddr) -> IpAddr {
    if !listening.ip().is_unspecified() {
        return listening.ip();
    }
    // Where the links cannot be read there is still this machine itself.
    let links = LinkMonitor::start(ClassRules::default())
        .await
        .map(|(links, _)| links)
        .unwrap_or_default();
    best_address(&links, listening.is_ipv4())
}

/// The address that most devices can reach: public IPv4, then public IPv6, then private ones.
fn best_address(links: &[Link], only_v4: bool) -> IpAddr {
    let rank = |address: &IpAddr| match address {
        IpAddr::V4(v4) if v4.is_private() || v4.is_link_local() => 2,
        IpAddr::V4(_) => 0,
        IpAddr::V6(v6) if v6.is_unique_local() => 3,
        IpAddr::V6(_) => 1,
    };
    // An address beside the default route is one of a network inside: of containers, of virtual machines.
    let is_beside = |link: &Link, address: &IpAddr| {
        let routes = &mut link.routes.iter();
        !routes.any(|route| route.ipv6 == address.is_ipv6())
    };
    links
        .iter()
        .filter(|link| link.kind != LinkKind::Loopback && link.up && link.carrier)
        .flat_map(|link| link.addresses.iter().map(move |address| (link, *address)))
        .filter(|(_, address)| address.is_ipv4() || !only_v4)
        .filter(|(_, address)| !address.is_loopback())
        .min_by_key(|(link, address)| (rank(address), is_beside(link, address)))
        .map(|(_, address)| address)
        .unwrap_or(if only_v4 {
            Ipv4Addr::LOCALHOST.into()
        } else {
            Ipv6Addr::LOCALHOST.into()
        })
}

/// Parses a network, or an address, which is the network of that address alone.
pub(crate) fn parse_net(text: &str) -> Result<IpNet, String> {
    text.parse()
        .or_else(|_| text.parse::<IpAddr>().map(IpNet::from))
        .map_err(|_| format!("{text} is neither a network, like 10.0.0.0/8, nor an address"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: ProxArgs,
    }

    fn parse(line: &str) -> Result<ProxArgs, clap::Error> {
        Cli::try_parse_from(line.split(' ')).map(|cli| cli.args)
    }

    #[test]
    fn options_reach_the_configuration() {
        let key = PublicKey([5; 32]).to_string();
        let args = parse(&format!(
            "prox --allow-client {key} --allow-net 10.0.0.0/8 --memory-quota 64M --session-memory 100MiB --disk-quota 2G \
             --state-dir /var/tmp --ca /tmp/ca.pem --log json"
        ))
        .unwrap();
        let config = args.config().unwrap();
        assert_eq!(config.allow_clients, [[5; 32]]);
        assert_eq!(config.memory_quota_bytes, 64_000_000);
        assert_eq!(config.session_memory_bytes_max, 100 << 20);
        assert_eq!(config.disk_quota_bytes, 2_000_000_000);
        assert_eq!(config.state_dir, PathBuf::from("/var/tmp"));
        assert_eq!(config.allow_nets, ["10.0.0.0/8".parse().unwrap()]);
        assert!(!config.allow_private && !config.allow_any_client);
        assert_eq!(args.log, LogFormat::Json);
        assert_eq!(args.listen.to_string(), LISTEN_DEFAULT);
    }

    #[test]
    fn a_tcp_listener_needs_named_networks_and_they_need_it() {
        let args = parse("prox --tcp-listen [::]:3128 --allow-address 192.0.2.0/24").unwrap();
        assert_eq!(args.tcp_listen, Some("[::]:3128".parse().unwrap()));
        assert!(args.config().unwrap().is_for_anybody());
        let args = parse("prox --allow-any-client --tcp-listen [::]:3128").unwrap();
        assert!(args.config().is_err());
        assert!(parse("prox --allow-any-client --allow-address 192.0.2.0/24").is_err());
    }

    #[test]
    fn a_key_that_begins_with_a_hyphen_is_a_key() {
        let key = PublicKey([0xf8; 32]).to_string();
        assert!(key.starts_with('-'), "{key}");
        let args = parse(&format!("prox --allow-client {key} --allow-private")).unwrap();
        assert_eq!(args.config().unwrap().allow_clients, [[0xf8; 32]]);
        assert!(args.allow_private);
    }

    #[test]
    fn what_is_no_key_no_network_or_no_size_is_refused() {
        for line in [
            "--allow-client xyz",
            "--allow-net 10.0.0.0/99",
            "--memory-quota 5X",
            "--listen 1",
        ] {
            assert!(parse(&format!("prox {line}")).is_err(), "{line}");
        }
    }

    fn link(name: &str, addresses: &[&str]) -> Link {
        Link {
            name: name.into(),
            index: 2,
            kind: LinkKind::Ethernet,
            class: d2tp_links::CostAssessment {
                class: d2tp_links::CostClass::Free,
                because: "test".into(),
            },
            up: true,
            carrier: true,
            mtu_bytes: 1500,
            addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
            routes: Vec::new(),
        }
    }

    #[test]
    fn a_wildcard_is_told_as_the_address_most_devices_reach() {
        let private = link("eth0", &["fd00::1", "192.168.1.2", "2001:db8::7"]);
        let public = link("eth1", &["192.0.2.1"]);
        let best = |links: &[Link], only_v4| best_address(links, only_v4).to_string();
        assert_eq!(best(&[private.clone(), public], false), "192.0.2.1");
        assert_eq!(best(std::slice::from_ref(&private), false), "2001:db8::7");
        assert_eq!(best(std::slice::from_ref(&private), true), "192.168.1.2");
        assert_eq!(best(&[], true), "127.0.0.1");
        assert_eq!(best(&[], false), "::1");
    }
}
