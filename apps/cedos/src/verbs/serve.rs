//! `cedos serve`: turns options into a server, or a device that listens, and prints its address.

use cedos_terminal::{print_stdout, stdout_result};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, anyhow};
use cedos_agent::fetch::session_refusal::{host_and_port, session_refusal};
use cedos_agent::settings::UserSettings;
use cedos_prox::parse_key;
use clap::Args;
use d2tp_driver::{
    Admission, Device, DeviceOptions, EndpointConfig, Flow, LinkUse, MemoryPool, PublicKey, Server,
    ServerAddress, ServerList, ServerOptions,
};
use d2tp_links::CostClass;
use tokio::signal::unix::{SignalKind, signal};

use super::device_links::watch_links;
use super::key;
use super::log_levels::log_warnings;
use super::prox::host_for_devices;
use super::transport::TransportArgs;
use crate::serve::{DirectoryAccess, FileService, HiddenFiles, answer};

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
    /// d2tp://host:port/KEY [default: $CEDOS_PROX, or the settings' proxy.default]
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
    let files = Arc::new(files);
    let key = key::load_device_key(args.key.as_deref())?;
    let mut config = EndpointConfig::default();
    args.transport.apply(&mut config);
    log_warnings();
    let mut terminate = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
    // From now on: Ctrl-C right after the address is printed ends it cleanly, too.
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot wait for Ctrl-C")?;
    let serve = |flow: Flow| tokio::spawn(answer(flow, files.clone()));
    let is_alone = args.no_prox || args.listen.is_some();
    let proxy = UserSettings::load(None)?.proxy(args.prox.as_slice(), is_alone)?;
    let proxy = proxy.map(|text| text.parse::<ServerList>()).transpose()?;
    // Those who fetch from here call at one proxy: the preferred one.
    let Some(server) = proxy.map(|proxies| proxies.first().clone()) else {
        let default = || LISTEN_DEFAULT.parse().expect("an address");
        let listen = args.listen.unwrap_or_else(default);
        config.memory = MemoryPool::new(SESSION_MEMORY_BYTES_MAX);
        let server = Server::bind(ServerOptions {
            listen,
            key,
            admission,
            config,
        })?;
        let local = server.local_addr();
        let address = ServerAddress {
            host: host_for_devices(local).await.to_string(),
            port: local.port(),
            key: server.public_key(),
            stream: None,
            nodes: Default::default(),
            requires_hybrid: false,
        };
        print_stdout(&format!("{address}/"));
        stdout_result()?;
        loop {
            tokio::select! {
                flow = server.accept() => match flow {
                    Some(flow) => drop(serve(flow)),
                    None => return Ok(()),
                },
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
            }
        }
        server.close().await;
        return Ok(());
    };
    let public = key.public();
    let proxy = format!("the proxy {}", host_and_port(&server));
    let here = cedos_agent::fetch::origin::is_this_machine(&server.host);
    let mut device = Device::new(DeviceOptions {
        server,
        key,
        config,
    })
    .await?;
    let monitor = watch_links(&[]).await;
    let monitor = monitor.map_err(|failure| anyhow!(failure.text))?;
    if here {
        device.use_default_route()?;
    } else {
        device.follow_links(monitor.subscribe(), |link| match link.class.class {
            CostClass::Free => LinkUse::Free,
            _ => LinkUse::Off,
        });
    }
    let listener = match device.listen(admission).await {
        Ok(listener) => listener,
        Err(error) => {
            let refused = device.ended();
            let refused = refused.and_then(|end| session_refusal(&end, &proxy, &public));
            return Err(refused.map_or_else(|| error.into(), |failure| anyhow!(failure.text)));
        }
    };
    print_stdout(&format!("d2tp://{public}/"));
    stdout_result()?;
    loop {
        tokio::select! {
            flow = listener.accept() => match flow {
                Some(flow) => drop(serve(flow)),
                None => return Ok(()),
            },
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        }
    }
    drop(listener);
    device.close().await;
    Ok(())
}
