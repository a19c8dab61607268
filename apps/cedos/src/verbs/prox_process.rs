//! The process of `cedos prox`: from its options to a D2TP server that runs until SIGTERM.
//!
//! ```text
//!  options ─▶ sockets: bound, of systemd, or of the proxy that is replaced ─┐
//!          ─▶ records: a journal, or a store that nodes share ──────────────┼─▶ Prox and Server ─▶ address printed
//!          ─▶ what can fail is tried before a running proxy ends ───────────┘          │
//!                                      SIGTERM, drained, or replaced by the next one ◀─┘
//! ```
//!
//! Clients that are not admitted are refused in the handshake.

use std::fs::File;
use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use cedos_agent::metrics_listener::MetricsListener;
use cedos_prox::{
    ControlError, ControlServer, METRICS_TYPE, PassedTunnels, Prox, ProxyTakeover,
    ServiceAnnouncement, StandbyOutcome, TakeoverOffer, TcpFlowListener, TunnelHelper,
    accept_until, await_replacement, finish_within_grace, keep_certificate,
};
use cedos_sandbox::{SandboxReport, release_free_heap};
use cedos_terminal::{print_stdout, stdout_result};
use d2tp_driver::{
    HibernationOptions, MemoryPool, PublicKey, RecordStore, STREAM_PORT_DEFAULT, SecretKey, Server,
    ServerAddress, ServerOptions, SocketsAfter,
};
use d2tp_links::{ClassRules, LinkMonitor};
use d2tp_store::RedisStore;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::descriptor_limit::raise_descriptor_limit;
use super::prox::ProxArgs;
use super::prox_control;
use super::prox_sandbox::ProxSandbox;
use super::prox_sockets::PassedSockets;
use super::prox_state::{
    SharedStoreSettings, create_private_dir, lock_node, open_journal, reopen_journal,
};
use super::reachable_host::host_for_devices;
use super::service_manager::{ServiceManager, announce_readiness};

/// How long origins may take to answer before a new process requests the same again. Devices' new requests wait as long.
const ANSWERED_WITHIN: Duration = Duration::from_secs(2); // a guess: most origins answer within one

/// How long the bucket that nodes share may take to get what is complete, before the node ends: other nodes read it there.
const IN_BUCKET_WITHIN: Duration = Duration::from_secs(10); // a guess: some parts
/// How long the journal may take to record copies of answers that have just begun, before the next process requests the
/// same again. Devices' new requests wait as long.
const RECORDED_WITHIN: Duration = Duration::from_secs(5); // a guess: a disk that other programs write to

/// How long other flows that have just begun are waited for: what the next process goes on with must be in the journal.
const KEPT_WITHIN: Duration = Duration::from_millis(500); // a guess: an answer is kept after 60 ms

/// How long flows that hibernated or were reset may take to end while a new process waits.
const FLOWS_END_WITHIN: Duration = Duration::from_millis(500); // a guess: they wait for nothing but a processor any more

/// Runs `cedos prox` until SIGTERM or Ctrl-C.
///
/// # Errors
/// When the configuration cannot be run.
pub async fn run(mut args: ProxArgs, sandbox: Option<ProxSandbox>) -> anyhow::Result<ExitCode> {
    if let Some(verb) = args.verb {
        return prox_control::run(verb).await;
    }
    raise_descriptor_limit();
    let (resumed, mut tunnels) = match tokio::task::spawn_blocking(await_replacement).await?? {
        StandbyOutcome::Replaced => return Ok(ExitCode::SUCCESS),
        StandbyOutcome::Resumed(sockets, tunnels) => (Some(sockets), tunnels),
        StandbyOutcome::NotStandby => (None, None),
    };
    args.start_log();
    // Until then SIGHUP ends this process; from now on it waits.
    let hangup = signal(SignalKind::hangup()).context("cannot wait for SIGHUP")?;
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
    let is_announced = config.announce;
    let stopping = cancelled_by_signals()?;
    let key = args.secret_key()?;
    let public_key = key.public();
    let is_resumed = resumed.is_some();
    let (mut passed, mut takeover, are_kept) = take_sockets(&args, resumed).await?;
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
        tunnels = takeover.release().await?;
    }
    let tunnels = tunnels.or_else(|| passed.take_tunnels());
    // The lock is held until this process ends.
    let (journal, _node_lock) =
        open_records(&args, &key, store, is_resumed || takeover.is_some()).await?;
    let prox = Prox::start(prepared, journal.clone())?;
    prox.use_link_key(&key.to_bytes());
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
    tokio::spawn(reload_at_hangup(prox.clone(), hangup));
    protocol.memory = prox.session_memory().clone();
    protocol.flow_memory = cedos_prox::flow_task_bytes();
    tokio::spawn(warn_of_full_memory(protocol.memory.clone()));
    prox.fetch_missing_copies().await;
    if let Some(journal) = journal.as_ref().and_then(|journal| journal.as_journal()) {
        let copies = prox.restore_from_journal(journal)?;
        tracing::info!(copies, journal = %journal.path().display(), "copies restored");
    }
    if let Some(manager) = ServiceManager::from_env() {
        match manager.keeper() {
            Ok(keeper) => prox.keep_tunnels_with(Arc::new(keeper)),
            Err(error) => tracing::warn!(%error, "connections of tunnels do not outlive a crash"),
        }
    }
    adopt_tunnels(&prox, tunnels);
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
    let server = Arc::new(start_server(args.workers, udp, options, rest)?);
    let workers = server.counts_by_worker().len();
    prox.log_memory_bound(workers);
    let mut sockets = server.share_sockets()?;
    if let Some(limits) = relay_limits {
        server.relay_for_devices(limits);
        server.meter_relays(prox.clone());
    }
    if let Some(at) = args.metrics_listen {
        serve_metrics(at, &prox, &server).await?;
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
    let sleeping = prox.clone();
    tokio::spawn(async move {
        let releasing = sleeping.release_memory_after_hibernations(release_free_heap);
        releasing.await;
    });
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
    let address = address_for_devices(&args, &server, stream_port).await;
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
    // The offer lives as long as this process serves: without it `on_release` ends, and so would the proxy.
    let (offer, mut on_release) = TakeoverOffer::new(sockets);
    let control = serve_control(&args, &prox, &address, &offer)?;
    if !prox.clients().has_clients() && !has_addresses {
        tracing::info!("no client yet; `cedos prox invite` invites one");
    }
    tracing::info!(%address, "ready");
    announce_readiness();
    // Whoever read the address may not read any more.
    if !is_resumed {
        print_stdout(&address.to_string());
        stdout_result()?;
    }
    if let Some(takeover) = takeover {
        takeover.complete();
    }
    let announcement = match is_announced {
        true => announce(public_key, server.local_addr()).await,
        false => None,
    };
    // What this process becomes when another takes it over.
    let mut successor = None;
    let mut ended_tcp = None;
    let stop_accepting = async {
        tokio::select! {
            () = stopping.cancelled() => {}
            () = prox.clone().drained(server.clone()) => {}
            () = prox.clone().answer_move_questions(server.clone()) => {}
            released = on_release.recv() => successor = released,
        }
        let sockets_are_kept = successor.is_some() || are_kept;
        if let Some(flows) = tcp_flows.take_if(|_| sockets_are_kept) {
            // Their connections cannot be handed over. Devices are served until these are over.
            stop_tcp.cancel();
            ended_tcp = Some(flows.await);
        }
    };
    let (flows, listener) = accept_until(server.clone(), &prox, stop_accepting).await;
    // A process that takes this one's place is at the same addresses, and has announced that.
    if let (Some(announcement), None) = (announcement, &successor) {
        announcement.end().await;
    }
    if journal.is_some() {
        let sockets = match successor.is_some() || are_kept {
            true => SocketsAfter::Kept,
            false => SocketsAfter::Closed,
        };
        let is_followed = successor.is_some() || ServiceManager::from_env().is_some();
        if is_followed {
            prox.begin_leaving();
        }
        leave_devices(&prox, &server, sockets).await;
        if is_followed {
            // What their flows leave behind is for the next process as well.
            let _ = tokio::time::timeout(FLOWS_END_WITHIN, flows.wait()).await;
        }
        if successor.is_some() {
            // Devices wait for that process: what does not depend on each other is written at once.
            tokio::join!(
                persist_copies(&prox),
                save_clients(&prox),
                prox.flush_access_log(),
                prox.finish_sharing(),
            );
        } else {
            keep_tunnels(&prox);
            persist_copies(&prox).await;
            prox.until_in_bucket(IN_BUCKET_WITHIN).await;
        }
    }
    // The next process makes its own.
    prox.close_packet_network();
    if let Some(control) = control {
        // Its socket goes with it.
        control.abort();
        let _ = control.await;
    }
    if let Some(standby) = successor {
        if let Some(log) = log {
            log.finish();
        }
        let standby = match &tunnel_helper {
            Some(helper) => standby.with_variable(helper.environment()),
            None => standby,
        };
        let standby = standby
            .with_tunnels(take_tunnels(&prox))
            .context("cannot keep the connections of tunnels")?;
        return Err(standby.begin()).context("cannot hold the sockets for the new process");
    }
    prox.save_clients();
    prox.flush_access_log().await;
    // Flows of devices that were left end in the next process: here they would wait in vain.
    if journal.is_none() {
        if !finish_within_grace(&flows, &prox).await {
            prox.end_flows();
        }
        flows.wait().await;
        server.close().await;
    }
    drop(listener);
    if let Some(tcp_flows) = tcp_flows {
        ended_tcp = Some(tcp_flows.await);
    }
    prox.end_flows();
    flows.wait().await;
    if let Some(ended) = ended_tcp {
        let (flows, _listener) = ended?;
        flows.wait().await;
    }
    if journal.is_some() {
        // What was retained since, because its flow was reset.
        persist_copies(&prox).await;
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

/// Announces the proxy on its local networks.
async fn announce(key: PublicKey, listening: SocketAddr) -> Option<ServiceAnnouncement> {
    match LinkMonitor::start(ClassRules::default()).await {
        Ok((_, monitor)) => Some(ServiceAnnouncement::begin(
            key,
            listening,
            monitor.subscribe(),
        )),
        Err(error) => {
            tracing::warn!(%error, "not announced on the local network");
            None
        }
    }
}

/// Cancelled by SIGTERM or Ctrl-C.
fn cancelled_by_signals() -> anyhow::Result<CancellationToken> {
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
    Ok(stopping)
}

/// The sockets that this process was given: by the process that it began anew from, by systemd, or by the running proxy
/// that it takes over. The last value says whether systemd keeps them, and devices' packets in them, while no process
/// serves.
async fn take_sockets(
    args: &ProxArgs,
    resumed: Option<Vec<OwnedFd>>,
) -> anyhow::Result<(PassedSockets, Option<ProxyTakeover>, bool)> {
    let passed = match resumed {
        Some(sockets) => {
            tracing::error!("the new process failed; this one serves again");
            PassedSockets::of(sockets)?
        }
        None => PassedSockets::from_systemd()?,
    };
    let are_kept = !passed.is_empty();
    let Some(dir) = args.state_dir.as_deref().filter(|_| args.upgrade) else {
        return Ok((passed, None, are_kept));
    };
    match ProxyTakeover::begin(dir).await {
        Ok((takeover, sockets)) => Ok((PassedSockets::of(sockets)?, Some(takeover), are_kept)),
        Err(ControlError::NotRunning(_)) => {
            tracing::info!("no proxy runs with this state directory; starting one");
            Ok((passed, None, are_kept))
        }
        Err(error) => Err(error.into()),
    }
}

/// The store of sessions' records, if there is one: shared by nodes, or this directory's journal. A node's state directory
/// is locked as long as the file exists. `is_next`: another process is about to release the journal.
async fn open_records(
    args: &ProxArgs,
    key: &SecretKey,
    store: Option<Arc<RedisStore>>,
    is_next: bool,
) -> anyhow::Result<(Option<Arc<dyn RecordStore>>, Option<File>)> {
    let Some(dir) = &args.state_dir else {
        return Ok((None, None));
    };
    if let Some(store) = store {
        let lock = lock_node(dir).await?;
        store.begin();
        return Ok((Some(store), Some(lock)));
    }
    let journal = match is_next {
        true => reopen_journal(dir, key).await?,
        false => open_journal(dir, key)?,
    };
    Ok((Some(Arc::new(journal)), None))
}

/// Starts the server, with as many workers as there are sockets of an earlier process, or as `workers` says.
fn start_server(
    workers: u16,
    passed: Vec<UdpSocket>,
    options: ServerOptions,
    rest: HibernationOptions,
) -> anyhow::Result<Server> {
    let server = match passed.is_empty() {
        true => Server::bind_workers(workers, options, rest)?,
        false => Server::on_sockets(passed, options, rest)?,
    };
    let running = server.counts_by_worker().len();
    if running != usize::from(workers) {
        tracing::warn!(
            workers = running,
            asked = workers,
            "there are as many workers as passed sockets of one address, not as --workers says"
        );
    }
    Ok(server)
}

/// Serves metrics for Prometheus at this address.
async fn serve_metrics(
    at: SocketAddr,
    prox: &Arc<Prox>,
    server: &Arc<Server>,
) -> anyhow::Result<()> {
    let listener = MetricsListener::bind(at).await?;
    tracing::info!(listening = %listener.local_addr()?, "serving metrics");
    let (prox, server) = (prox.clone(), server.clone());
    let metrics = move || prox.metrics(Some(&server));
    tokio::spawn(listener.serve(METRICS_TYPE, metrics));
    Ok(())
}

/// The proxy's address, as devices need it.
async fn address_for_devices(
    args: &ProxArgs,
    server: &Server,
    stream_port: Option<u16>,
) -> ServerAddress {
    let local = server.local_addr();
    let host = match &args.public_host {
        Some(host) => host.clone(),
        None => host_for_devices(local).await.to_string(),
    };
    let address = ServerAddress {
        // Devices try the usual port by themselves.
        stream: stream_port.filter(|port| *port != STREAM_PORT_DEFAULT),
        round_trip: args.transport.round_trip().map(Into::into),
        ..ServerAddress::new(host, local.port(), server.public_key())
    };
    if local.ip().is_unspecified() && args.public_host.is_none() {
        tracing::info!(
            listening = %local,
            host = %address.host,
            "listening on every address; devices elsewhere may need another host: --public-host"
        );
    }
    address
}

/// Serves requests of `cedos prox invite`, `client` and other commands, if there is a state directory.
fn serve_control(
    args: &ProxArgs,
    prox: &Arc<Prox>,
    address: &ServerAddress,
    offer: &Arc<TakeoverOffer>,
) -> anyhow::Result<Option<JoinHandle<()>>> {
    match args.state_dir.as_deref().map(ControlServer::bind) {
        Some(Ok(control)) => {
            let serving = control.serve(prox.clone(), address.clone(), offer.clone());
            Ok(Some(tokio::spawn(serving)))
        }
        Some(Err(error)) if error.kind() == ErrorKind::AddrInUse => {
            Err(error).context("cannot use the state directory")
        }
        Some(Err(error)) => {
            tracing::error!(%error, "no control socket: clients cannot be invited or removed");
            Ok(None)
        }
        None => Ok(None),
    }
}

/// Has the tunnels of an earlier process go on here when their devices are back.
fn adopt_tunnels(prox: &Arc<Prox>, tunnels: Option<PassedTunnels>) {
    let adopted = tunnels.map(|tunnels| prox.adopt_tunnels(tunnels));
    match adopted {
        Some(Ok(tunnels)) => tracing::info!(tunnels, "connections of tunnels taken over"),
        Some(Err(error)) => {
            tracing::error!(%error, "the tunnels of the earlier process are reset");
        }
        None => return,
    }
    if let Some(manager) = ServiceManager::from_env()
        && let Err(error) = manager.forget_tunnels()
    {
        tracing::warn!(%error, "systemd keeps connections that are over");
    }
}

/// The tunnels that sleep, for the next process.
fn take_tunnels(prox: &Prox) -> Option<PassedTunnels> {
    prox.take_tunnels().unwrap_or_else(|error| {
        tracing::error!(%error, "tunnels are reset");
        None
    })
}

/// Has the service manager keep the tunnels that sleep until the next process.
fn keep_tunnels(prox: &Prox) {
    let Some(manager) = ServiceManager::from_env() else {
        return;
    };
    let Some(tunnels) = take_tunnels(prox) else {
        return;
    };
    if let Err(error) = manager.keep(&tunnels) {
        tracing::error!(%error, "systemd does not keep the connections of tunnels, which are reset");
    }
}

/// Hibernates or resets the flows of devices, which go on with the next process.
async fn leave_devices(prox: &Prox, server: &Server, sockets: SocketsAfter) {
    prox.until_answered(ANSWERED_WITHIN).await;
    prox.until_recorded(RECORDED_WITHIN).await;
    server.until_kept(KEPT_WITHIN).await;
    let stopping = cedos_prox::ResetCause::Stopping.code();
    if let Err(error) = server.leave(stopping, sockets).await {
        tracing::error!(%error, "devices must request their flows again");
    }
}

/// Keeps copies for the next process.
async fn persist_copies(prox: &Prox) {
    if let Err(error) = prox.persist_copies().await {
        tracing::error!(%error, "copies must be fetched again");
    }
}

/// Keeps what clients have transferred, and when they were seen.
async fn save_clients(prox: &Arc<Prox>) {
    let prox = prox.clone();
    let saved = tokio::task::spawn_blocking(move || prox.save_clients());
    saved.await.expect("no panic");
}

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
