//! `cedos prox`: the options of D2Prox, and the [`ProxConfig`] that they make. `prox_process.rs` runs it.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use cedos_agent::fetch::option_parsers::parse_bytes;
use cedos_agent::settings::SettingsError;
use cedos_prox::{
    ACME_DIRECTORY_DEFAULT, AccessDetail, AcmeOptions, ProxConfig, is_standby, parse_key,
};
use cedos_terminal::LogWriter;
use clap::{Args, ValueEnum};
use d2tp_driver::{DrwaLambda, EndpointConfig, SecretKey, StreamIdentity, TcpStreamAcceptor};
use d2tp_tcp::multipath;
use ipnet::IpNet;
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use super::balancer_args::BalancerArgs;
use super::key;
use super::log_levels::log_levels;
use super::prox_config::ProxConfigFile;
use super::prox_control::ProxVerb;
use super::prox_sockets::PassedSockets;
use super::prox_state::create_private_dir;
use super::qlog::QlogArgs;
use super::transport::TransportArgs;
use super::which_proxy;
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
    pub(super) verb: Option<ProxVerb>,
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
    /// Address at which podcast apps reach --tcp-listen, such as https://proxy.example, where a web server in front ends
    /// TLS: `cedos prox feeds` makes links of it. They work from everywhere, and lead to the feeds that you list
    #[arg(long, value_name = "URL", requires = "tcp_listen")]
    pub feeds_url: Option<String>,
    /// Let clients reach private and loopback networks (metadata services stay refused)
    #[arg(long)]
    pub allow_private: bool,
    /// Let clients reach this network or address; a metadata service only by its own address (repeatable)
    #[arg(long = "allow-net", value_name = "CIDR", value_parser = parse_net)]
    pub allow_nets: Vec<IpNet>,
    /// Announce this proxy on its local networks (DNS-SD): devices that have its key find it there. Every host of those
    /// networks learns its key
    #[arg(long)]
    pub announce: bool,
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
    /// Serve devices in this many workers, each on a core of its own
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
        let config = self.config()?;
        if self.state_dir.is_none() && (!config.is_for_anybody() || config.feeds_url.is_some()) {
            // Clients that are invited, or have links, must be kept somewhere.
            self.state_dir = Some(which_proxy::default_state_dir()?);
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
        if config.announce && self.listen.ip().is_loopback() {
            return Err(SettingsError {
                path: None,
                text: format!(
                    "--announce needs --listen with an address of a local network: {} is this machine's alone",
                    self.listen
                ),
            });
        }
        let is_for_nobody = config.allow_addresses.is_empty() && config.feeds_url.is_none();
        if self.tcp_listen.is_some() && is_for_nobody {
            return Err(SettingsError {
                path: None,
                text: "--tcp-listen needs --allow-address, or allow_addresses in the file of --config: \
                       nobody could use it"
                    .to_owned(),
            });
        }
        if self.tcp_listen.is_none() && config.feeds_url.is_some() {
            return Err(SettingsError {
                path: None,
                text: "feeds_url needs --tcp-listen: podcast apps reach the proxy there".to_owned(),
            });
        }
        Ok(config)
    }

    /// The error in the settings of a store that nodes share, if there is one.
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
        config.announce |= self.announce;
        if let Some(path) = &self.ca {
            config.ca_file = Some(path.clone());
        }
        if let Some(dir) = &self.state_dir {
            config.state_dir = dir.clone();
        }
        for (given, setting) in [
            (&self.store, &mut config.store),
            (&self.node, &mut config.node),
            (&self.feeds_url, &mut config.feeds_url),
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
    pub(super) fn endpoint_config(&self, config: &ProxConfig) -> EndpointConfig {
        let mut protocol = EndpointConfig {
            drwa: self.drwa,
            cid_share: self.balancer.cid_share(),
            ..EndpointConfig::default()
        };
        self.transport.apply(&mut protocol);
        // A session that may sleep sooner counts as silent sooner.
        if !protocol.has_long_round_trip() {
            protocol.silence_max = protocol.silence_max.min(config.sleep_after.into());
        }
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
    pub(super) fn stream_acceptor(
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
    pub(super) fn tcp_listener(
        &self,
        passed: &mut PassedSockets,
    ) -> anyhow::Result<Option<TcpListener>> {
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

    /// The options for certificates from an ACME authority, if any are requested.
    pub(super) fn acme(&self) -> anyhow::Result<Option<AcmeOptions>> {
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

/// Parses a network, or an address, which is the network of that address alone.
pub(crate) fn parse_net(text: &str) -> Result<IpNet, String> {
    text.parse()
        .or_else(|_| text.parse::<IpAddr>().map(IpNet::from))
        .map_err(|_| format!("{text} is neither a network, like 10.0.0.0/8, nor an address"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use d2tp_driver::PublicKey;

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
}
