//! `cedos prox`: run D2Prox.
//!
//! This file turns options into a [`ProxConfig`] and a D2TP server, says where it is reached, and
//! waits for SIGTERM or Ctrl-C. Clients that may not come in are refused in the handshake.

use cedos_terminal::{LogWriter, print_stdout, stdout_result};
use std::collections::BTreeSet;
use std::fs::DirBuilder;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use cedos_agent::fetch::option_parsers::parse_bytes;
use cedos_prox::{ProxConfig, ProxStartError, TcpFlowListener, parse_key};
use clap::{Args, ValueEnum};
use d2tp_driver::{
    Admission, DrwaLambda, EndpointConfig, HibernationOptions, Journal, JournalBatch, MemoryPool,
    PublicKey, SecretKey, Server, ServerAddress, ServerOptions,
};
use d2tp_links::{ClassRules, Link, LinkKind, LinkMonitor};
use ipnet::IpNet;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use super::descriptor_limit::raise_descriptor_limit;
use super::key;
use super::log_levels::log_levels;
use super::qlog::QlogArgs;
use super::transport::TransportArgs;

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

/// Run a proxy (D2Prox): fetch for devices, and keep what they have not received yet
#[derive(Debug, Args)]
pub struct ProxArgs {
    /// UDP address to listen on
    #[arg(long, value_name = "ADDR", default_value = LISTEN_DEFAULT)]
    pub listen: SocketAddr,
    /// Private key file, from `cedos key gen` [default: a new key, kept in --state-dir; without that, for
    /// this run only]
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Public key of a client that may use this proxy (repeatable)
    // One key in 64 begins with a hyphen.
    #[arg(long = "allow-client", value_name = "KEY", value_parser = parse_key, allow_hyphen_values = true)]
    pub allow_clients: Vec<[u8; 32]>,
    /// Serve any client: everybody who knows the proxy's address may use it
    #[arg(long)]
    pub allow_any_client: bool,
    /// TCP address of an HTTP proxy for clients without D2TP, over TCP or kernel MPTCP; see --allow-address
    #[arg(long, value_name = "ADDR", requires = "allow_addresses")]
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
    /// PEM file with more certificate authorities for servers
    #[arg(long, value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// Directory for copies, sessions and flows, which then survive a restart and a crash. Without it they
    /// do not, and large copies go to the system's temporary directory
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Memory for pinned copies, such as 500M or 2GiB [default: 256MiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub memory_quota: Option<u64>,
    /// Memory for devices' sessions: unread and unacknowledged bytes, state, and buffers of tunnels.
    /// One device gets a fifth of what the others leave [default: 512MiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub session_memory: Option<u64>,
    /// Disk for pinned copies, such as 500M or 2GiB [default: 16GiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub disk_quota: Option<u64>,
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
    /// How to write the log
    #[arg(long, value_name = "FORM", default_value = "text")]
    pub log: LogFormat,
}

impl ProxArgs {
    /// The configuration these options ask for.
    pub fn config(&self) -> ProxConfig {
        let mut config = ProxConfig {
            allow_clients: self.allow_clients.clone(),
            allow_any_client: self.allow_any_client,
            allow_addresses: self.allow_addresses.clone(),
            allow_private: self.allow_private,
            allow_nets: self.allow_nets.clone(),
            relay: !self.no_relay,
            ca_file: self.ca.clone(),
            ..ProxConfig::default()
        };
        if let Some(dir) = &self.state_dir {
            config.state_dir = dir.clone();
        }
        if let Some(span) = self.sleep_after {
            config.sleep_after = span;
        }
        if let Some(bytes) = self.memory_quota {
            config.memory_quota_bytes = bytes;
        }
        if let Some(bytes) = self.session_memory {
            config.session_memory_bytes_max = bytes;
        }
        if let Some(bytes) = self.disk_quota {
            config.disk_quota_bytes = bytes;
        }
        config
    }

    /// The protocol settings these options ask for.
    fn endpoint_config(&self, config: &ProxConfig) -> EndpointConfig {
        let mut protocol = EndpointConfig {
            drwa: self.drwa,
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
pub async fn run(args: ProxArgs) -> anyhow::Result<()> {
    raise_descriptor_limit();
    args.start_log();
    let config = args.config();
    if !config.is_for_anybody() {
        // Said before a key is made or a port is taken.
        return Err(ProxStartError::NoClients.into());
    }
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
    let admission = if args.allow_any_client {
        Admission::Anybody
    } else {
        let keys: BTreeSet<PublicKey> = args.allow_clients.iter().copied().map(PublicKey).collect();
        Admission::Only(keys)
    };
    let key = args.secret_key()?;
    let journal = match &args.state_dir {
        Some(dir) => Some(Arc::new(open_journal(dir, &key)?)),
        None => None,
    };
    let sleep_after = Some(config.sleep_after);
    let mut protocol = args.endpoint_config(&config);
    let resolver = Arc::new(cedos_prox::SystemResolver);
    let relay_limits = config.relay_limits();
    let prox = cedos_prox::Prox::with_journal(config, resolver, journal.clone())?;
    protocol.memory = prox.session_memory().clone();
    tokio::spawn(warn_of_full_memory(protocol.memory.clone()));
    if let Some(journal) = &journal {
        let copies = prox.restore_from_journal(journal)?;
        tracing::info!(copies, journal = %journal.path().display(), "copies restored");
    }
    let options = ServerOptions {
        listen: args.listen,
        key,
        admission,
        config: protocol,
    };
    let rest = HibernationOptions {
        hibernate_after: sleep_after,
        journal: journal.clone(),
    };
    let server = Arc::new(Server::bind_with(options, rest)?);
    if let Some(limits) = relay_limits {
        server.relay_for_devices(limits);
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
    let local = server.local_addr();
    let address = ServerAddress {
        host: host_for_devices(local).await.to_string(),
        port: local.port(),
        key: server.public_key(),
    };
    if local.ip().is_unspecified() {
        tracing::info!(
            listening = %local,
            host = %address.host,
            "listening on every address; devices elsewhere may need another host in d2tp://host:port/KEY"
        );
    }
    let tcp_listener = match args.tcp_listen {
        Some(at) => {
            let tcp_listener = TcpFlowListener::bind(at, prox.clone())
                .with_context(|| format!("cannot listen on TCP {at}"))?;
            tracing::info!(listening = %tcp_listener.local_addr()?, "listening for TCP and MPTCP");
            let stop = stopping.cancelled_owned();
            Some(tokio::spawn(cedos_prox::serve(
                tcp_listener,
                prox.clone(),
                stop,
            )))
        }
        None => None,
    };
    tracing::info!(%address, "ready");
    print_stdout(&address.to_string());
    stdout_result()?;
    if journal.is_none() {
        cedos_prox::serve(server.clone(), prox, stop).await;
        server.close().await;
    } else {
        let (leaving, leaver) = (prox.clone(), server.clone());
        let left = async move {
            stop.await;
            // Flows that may sleep do; the next process goes on with them.
            let stopping = cedos_prox::ResetCause::Stopping.code();
            if let Err(error) = leaver.leave(stopping).await {
                tracing::error!(%error, "devices must request their flows again");
            }
            if let Err(error) = leaving.persist_copies().await {
                tracing::error!(%error, "copies must be fetched again");
            }
        };
        cedos_prox::serve(server, prox, left).await;
    }
    if let Some(tcp_listener) = tcp_listener {
        tcp_listener.await?;
    }
    if let Some(log) = log {
        log.finish();
    }
    Ok(())
}

/// Creates a directory that only this user can use: requests in it may contain credentials. One that exists
/// is left as it is.
fn create_private_dir(dir: &Path) -> std::io::Result<()> {
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

/// The journal in a state directory, which belongs to one key.
fn open_journal(dir: &Path, key: &SecretKey) -> anyhow::Result<Journal> {
    create_private_dir(dir)
        .with_context(|| format!("cannot make the state directory {}", dir.display()))?;
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
    links
        .iter()
        .filter(|link| link.kind != LinkKind::Loopback && link.up && link.carrier)
        .flat_map(|link| link.addresses.iter().copied())
        .filter(|address| address.is_ipv4() || !only_v4)
        .filter(|address| !address.is_loopback())
        .min_by_key(rank)
        .unwrap_or(if only_v4 {
            Ipv4Addr::LOCALHOST.into()
        } else {
            Ipv6Addr::LOCALHOST.into()
        })
}

/// Parses a network, or an address, which is the network of that address alone.
fn parse_net(text: &str) -> Result<IpNet, String> {
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
        let config = args.config();
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
        assert!(args.config().is_for_anybody());
        assert!(parse("prox --allow-any-client --tcp-listen [::]:3128").is_err());
        assert!(parse("prox --allow-any-client --allow-address 192.0.2.0/24").is_err());
    }

    #[test]
    fn a_key_that_begins_with_a_hyphen_is_a_key() {
        let key = PublicKey([0xf8; 32]).to_string();
        assert!(key.starts_with('-'), "{key}");
        let args = parse(&format!("prox --allow-client {key} --allow-private")).unwrap();
        assert_eq!(args.config().allow_clients, [[0xf8; 32]]);
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
