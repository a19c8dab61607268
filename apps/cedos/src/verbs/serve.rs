//! `cedos serve`: turns options into a server, or a device that listens, and prints its address.

use cedos_terminal::{print_stdout, stdout_result};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, anyhow};
use cedos_agent::fetch::origin::follow_free_links;
use cedos_agent::fetch::session_refusal::{host_and_port, session_end_text, session_refusal};
use cedos_agent::settings::UserSettings;
use cedos_prox::parse_key;
use clap::Args;
use d2tp_driver::{
    Admission, Device, DeviceOptions, EndpointConfig, MemoryPool, PublicKey, SecretKey, Server,
    ServerAddress, ServerList, ServerOptions,
};
use d2tp_links::Link;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::device_links::watch_links;
use super::key;
use super::log_levels::log_warnings;
use super::reachable_host::host_for_devices;
use super::transport::TransportArgs;
use crate::serve::{DirectoryAccess, EtagFormat, FileService, HiddenFiles, answer};

/// Serve the files of a directory over D2TP: at an address of this machine, or with --prox as a device
/// that others reach by its key
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// The directory whose files are served
    directory: PathBuf,
    /// Listen on this UDP address, and use no proxy [default without a proxy: port 4434 of all addresses]
    #[arg(long, value_name = "ADDR", conflicts_with = "prox")]
    listen: Option<SocketAddr>,
    /// Be reachable through this proxy; packets go directly where possible: a name in the settings, or
    /// d2tp://host:port/KEY; through each of several [default: $CEDOS_PROX, or the settings' proxy.default]
    // No `env`: with --listen it would be a conflict.
    #[arg(long, value_name = "PROXY")]
    prox: Option<String>,
    /// Use no proxy, whatever the settings say
    #[arg(long)]
    no_prox: bool,
    /// Private key file, from `cedos key gen` [default: this device's own]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Public key of a client that may connect (repeatable)
    // One key in 64 begins with a hyphen.
    #[arg(long = "allow-client", value_name = "KEY", value_parser = parse_key, allow_hyphen_values = true)]
    allow_clients: Vec<[u8; 32]>,
    /// Allow any client; with --prox, any that the proxy allows
    #[arg(long)]
    allow_any_client: bool,
    /// Serve files and directories too whose name begins with a dot
    #[arg(long)]
    hidden: bool,
    /// Do not list what is in a directory: a client must know the names of the files
    #[arg(long)]
    no_listing: bool,
    /// How the validators of files are made: as a web server that serves the same directory makes them, so that downloads
    /// from there go on here
    #[arg(long, value_name = "FORMAT", default_value = "nanoseconds")]
    etags: EtagFormat,
    #[command(flatten)]
    transport: TransportArgs,
}

/// Where an origin listens unless told otherwise: beside a proxy on the same host.
const LISTEN_DEFAULT: &str = "[::]:4434";
/// Memory for the sessions of all clients. One key gets a fifth of what the others leave.
const SESSION_MEMORY_BYTES_MAX: u64 = 256 << 20; // a guess

/// Runs `cedos serve` until SIGTERM or Ctrl-C.
///
/// # Errors
/// When it cannot be begun.
pub async fn run(args: ServeArgs) -> anyhow::Result<()> {
    let admission = match (args.allow_any_client, args.allow_clients.is_empty()) {
        (true, _) => Admission::Anybody,
        (false, true) => anyhow::bail!(
            "no client is allowed; give --allow-client KEY (from `cedos key show`) or \
             --allow-any-client"
        ),
        (false, false) => {
            let keys = args.allow_clients.iter().copied().map(PublicKey);
            Admission::Only(keys.collect::<BTreeSet<_>>())
        }
    };
    let shown = args.directory.display();
    let hidden = match args.hidden {
        true => HiddenFiles::Served,
        false => HiddenFiles::Refused,
    };
    let directories = match args.no_listing {
        true => DirectoryAccess::Refused,
        false => DirectoryAccess::Listed,
    };
    let files = FileService::new(&args.directory, hidden, directories)
        .with_context(|| format!("cannot serve {shown}"))?;
    let files = Arc::new(files.with_etags(args.etags));
    let key = key::load_device_key(args.key.as_deref())?;
    let mut config = EndpointConfig::default();
    args.transport.apply(&mut config);
    log_warnings("cedos serve");
    let mut terminate = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
    // From now on: Ctrl-C right after the address is printed ends it cleanly, too.
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot wait for Ctrl-C")?;
    let is_alone = args.no_prox || args.listen.is_some();
    let proxies = UserSettings::load(None)?.proxy(args.prox.as_slice(), is_alone)?;
    let proxies = proxies.map(|text| text.parse::<ServerList>()).transpose()?;
    let leaving = watch::Sender::new(false);
    let serving = async {
        match proxies {
            Some(proxies) => {
                let device = ListeningDevice {
                    key,
                    config,
                    admission,
                    files,
                    leaving: leaving.subscribe(),
                };
                device.serve_at_all(&proxies).await
            }
            None => {
                let default = || LISTEN_DEFAULT.parse().expect("an address");
                let listen = args.listen.unwrap_or_else(default);
                config.memory = MemoryPool::new(SESSION_MEMORY_BYTES_MAX);
                let options = ServerOptions {
                    listen,
                    key,
                    admission,
                    config,
                };
                serve_alone(options, files, leaving.subscribe()).await
            }
        }
    };
    let told = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        leaving.send_replace(true);
        std::future::pending::<()>().await;
    };
    tokio::select! {
        served = serving => served,
        () = told => unreachable!("it never ends"),
    }
}

/// How soon a proxy that could not be listened at is tried again, while others serve: at first, and at most.
const AGAIN_AFTER: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(300)); // a guess

/// Completes when the program is to end.
async fn told_to_leave(leaving: &mut watch::Receiver<bool>) {
    let _ = leaving.wait_for(|leaves| *leaves).await;
}

/// Serves as a server at an address of this machine.
async fn serve_alone(
    options: ServerOptions,
    files: Arc<FileService>,
    mut leaving: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    let server = Server::bind(options)?;
    let local = server.local_addr();
    let address = ServerAddress::new(
        host_for_devices(local).await.to_string(),
        local.port(),
        server.public_key(),
    );
    print_stdout(&format!("{address}/"));
    stdout_result()?;
    loop {
        tokio::select! {
            flow = server.accept() => match flow {
                Some(flow) => drop(tokio::spawn(answer(flow, files.clone()))),
                None => return Ok(()),
            },
            () = told_to_leave(&mut leaving) => break,
        }
    }
    server.close().await;
    Ok(())
}

/// A device that listens at proxies.
#[derive(Clone)]
struct ListeningDevice {
    key: SecretKey,
    config: EndpointConfig,
    admission: Admission,
    files: Arc<FileService>,
    leaving: watch::Receiver<bool>,
}

impl ListeningDevice {
    /// Listens at every proxy of the list, so that those who fetch may use any of them. It ends when the last session
    /// does; one that cannot begin is an error if there is no other.
    async fn serve_at_all(&self, proxies: &ServerList) -> anyhow::Result<()> {
        let monitor = watch_links(&[]).await;
        let monitor = monitor.map_err(|failure| anyhow!(failure.text))?;
        let printed = Arc::new(AtomicBool::new(false));
        let servers = proxies.servers();
        let mut pauses = vec![AGAIN_AFTER.0; servers.len()];
        let (mut sessions, mut pausing) = (JoinSet::new(), JoinSet::new());
        let begin = |sessions: &mut JoinSet<_>, at: usize| {
            let (device, proxy) = (self.clone(), servers[at].clone());
            let (links, printed) = (monitor.subscribe(), printed.clone());
            sessions.spawn(async move { (at, device.serve_at(proxy, links, &printed).await) });
        };
        for at in 0..servers.len() {
            begin(&mut sessions, at);
        }
        loop {
            tokio::select! {
                Some(ended) = sessions.join_next() => {
                    let (at, ended) = ended.context("a task of a session")?;
                    let Err(error) = ended else {
                        if sessions.is_empty() {
                            return Ok(());
                        }
                        continue;
                    };
                    if sessions.is_empty() {
                        return Err(error);
                    }
                    tracing::warn!("{error:#}. Devices reach this one through the others");
                    let pause = pauses[at];
                    pauses[at] = (pause * 2).min(AGAIN_AFTER.1);
                    pausing.spawn(async move {
                        tokio::time::sleep(pause).await;
                        at
                    });
                }
                Some(at) = pausing.join_next() => begin(&mut sessions, at.context("a pause")?),
            }
        }
    }

    async fn serve_at(
        mut self,
        server: ServerAddress,
        links: watch::Receiver<Arc<Vec<Link>>>,
        printed: &AtomicBool,
    ) -> anyhow::Result<()> {
        let public = self.key.public();
        let proxy = format!("the proxy {}", host_and_port(&server));
        let host = server.host.clone();
        let mut device = Device::new(DeviceOptions {
            server,
            key: self.key,
            config: self.config,
        })
        .await?;
        follow_free_links(&mut device, &host, links)?;
        let listener = tokio::select! {
            listener = device.listen(self.admission) => listener,
            () = told_to_leave(&mut self.leaving) => return Ok(()),
        };
        let listener = match listener {
            Ok(listener) => listener,
            Err(error) => {
                let Some(end) = device.ended() else {
                    return Err(error.into());
                };
                let refused = session_refusal(&end, &proxy, &public);
                return Err(match refused {
                    Some(failure) => anyhow!(failure.text),
                    None => anyhow!(session_end_text(&end, &proxy)),
                });
            }
        };
        if !printed.swap(true, Ordering::Relaxed) {
            print_stdout(&format!("d2tp://{public}/"));
            stdout_result()?;
        }
        loop {
            tokio::select! {
                flow = listener.accept() => match flow {
                    Some(flow) => drop(tokio::spawn(answer(flow, self.files.clone()))),
                    None => match device.ended() {
                        Some(end) => return Err(anyhow!(session_end_text(&end, &proxy))),
                        None => return Ok(()),
                    },
                },
                () = told_to_leave(&mut self.leaving) => break,
            }
        }
        drop(listener);
        device.close().await;
        Ok(())
    }
}
