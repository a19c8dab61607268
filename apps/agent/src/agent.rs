//! The agent: one per user and device. It owns the links, the sessions, the scheduler and a queue
//! that survives it.
//!
//! ```text
//!  cedos get, ls, why … ── Unix socket ── api  ─┐
//!                                              Agent ── task: order, transfer  ─┐
//!  links ── hooks                               │ ├──── task                    ├── scheduler
//!  libd2tp ── Unix socket, descriptors ─ api  ──┼─┼──── sockets: flows ─────────┤
//!  browsers ── loopback TCP ── page ────────────┤ │                             │
//!  podcast apps ── loopback TCP ── podcasts ────┤ │                             │
//!  Prometheus ── loopback TCP ── metrics ───────┘ ├──── task                    ┘
//!                                                 └──── podcasts: feeds, rules ─▶ queue
//!                        queue, ledger: $XDG_STATE_HOME/cedos
//! ```
//!
//! Everything runs on one thread: transfers wait for networks and disks, not for cores.

mod allowance;
pub mod api;
mod api_lines;
mod api_server;
mod bridge_watch;
mod budget_ledger;
pub mod client;
pub mod contact_log;
mod counters;
mod desktop_notifier;
mod device_point;
mod geoclue;
mod gpsd;
mod hooks;
mod idle;
mod json_views;
mod link_history_store;
mod link_view;
mod listening_socket;
mod mirror_task;
mod notifications;
mod page;
mod podcasts;
mod queue;
mod recurring;
mod regret_meter;
mod saved_recurrence;
mod schedule;
mod sockets;
mod state;
mod streams;
mod task;
mod transfer_task;
mod wake_control;
mod wake_status;

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, bail};
use d2tp_driver::{SecretKey, ServerList};
use d2tp_links::{ClassRules, CostResolver, IneffectiveRuleError, Link, LinkMonitor, NetworkRules};
use d2tp_power::LinuxMachine;
use tokio::sync::{broadcast, watch};

use crate::energy_watch::{EnergySettings, watch_energy};
use crate::fetch::boot_clock::BootInstant;
use crate::fetch::jobs;
use crate::fetch::rate_limiter::RateLimiters;
use crate::fetch::report::print_stderr;
use crate::metrics_listener::MetricsListener;
use crate::proxy::{self, LocalProxyListener, ProxySession, ProxySessionPeer};
use crate::settings::{self, UserSettings};
use bridge_watch::PositionSource;
use budget_ledger::BudgetLedger;
pub use budget_ledger::BudgetSettings;
use d2tp_driver::SchedulerHandle;
use d2tp_sched::SchedulerKind;
use d2tp_session::DrwaLambda;
use desktop_notifier::DesktopNotifier;
pub use hooks::{Hooks, run_hooks};
pub use idle::IDLE_MAX;
pub use json_views::link_json;
use link_history_store::LinkHistoryStore;
use link_view::LinkView;
use listening_socket::ListeningSocket;
pub use listening_socket::is_locked;
use page::PagePort;
use podcasts::service::PodcastService;
use queue::TransferIntent;
use state::{Agent, lock};
use transfer_task::TransferTask;

/// The media type of the agent's metrics: the text format of Prometheus.
const METRICS_TYPE: &str = "text/plain; version=0.0.4";

/// Events that are kept for a slow subscriber before it misses some.
const NEWS_MAX: usize = 1_024;

/// The interval at which slowly changing state is checked and saved.
const HOUSEKEEPING: Duration = Duration::from_secs(5);

/// The interval at which avoidable cost is computed.
const LOOK_BACK: Duration = Duration::from_secs(1);

/// Time for transfers to save their state when the agent ends.
const FAREWELL: Duration = Duration::from_secs(20); // a guess: a sync on a slow disk

/// Options of an agent.
#[derive(Debug, Clone, Default)]
pub struct AgentOptions {
    /// The path of the agent's socket; none is the default.
    pub socket: Option<PathBuf>,
    /// Cost classes of links from the command line.
    pub flags: ClassRules,
    /// What the user's settings say of networks.
    pub rules: NetworkRules,
    /// What the user's settings say of the budget.
    pub budget: BudgetSettings,
    /// Whether desktop notifications are disabled.
    pub no_notifications: bool,
    /// The interval of scans for links while a transfer waits; none: decided by the agent.
    pub scan_interval: Option<Duration>,
    /// The scheduling algorithm.
    pub scheduler: SchedulerKind,
    /// The address that serves metrics for Prometheus, if any.
    pub metrics: Option<SocketAddr>,
    /// Commands that run when free links come and go.
    pub hooks: Hooks,
    /// The local proxy, if there is one.
    pub local_proxy: Option<LocalProxy>,
    /// The time without anything to do after which the agent exits; none: it keeps running.
    pub exit_when_idle: Option<Duration>,
    /// The factor of DRWA on bloated paths of transfers; a process beside the agent moves the windows of TCP connections.
    pub path_drwa: Option<DrwaLambda>,
}

/// Options of the proxy on this machine for programs without D2TP.
#[derive(Debug, Clone)]
pub struct LocalProxy {
    /// The loopback address that the local proxy listens at.
    pub address: SocketAddr,
    /// The D2Prox that it uses: the nearest of several.
    pub server: ServerList,
    /// The key of this device.
    pub key: SecretKey,
    /// The options of connections for which the program gives none.
    pub options: proxy::ConnOptions,
}

/// The environment variable with the path of the agent's socket; `none` disables the agent.
pub const SOCKET_VARIABLE: &str = "CEDOS_AGENT";

/// The path of the agent's socket: `$CEDOS_AGENT`, else `$XDG_RUNTIME_DIR/cedos/agent.sock`, else
/// beside the state.
///
/// # Errors
/// No path is configured, or the agent is disabled.
pub fn socket_path() -> anyhow::Result<PathBuf> {
    match std::env::var_os(SOCKET_VARIABLE) {
        Some(none) if none == "none" => bail!("{SOCKET_VARIABLE} says that there is no agent"),
        Some(path) if !path.is_empty() => return Ok(path.into()),
        _ => {}
    }
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    match runtime.filter(|path| path.is_absolute()) {
        Some(runtime) => Ok(runtime.join("cedos").join("agent.sock")),
        None => Ok(jobs::state_directory()?.join("agent.sock")),
    }
}

/// Runs the agent until `stop` turns true. `ready` is called once it answers.
///
/// # Errors
/// It cannot begin: another runs, or the system refuses what it needs.
pub async fn run(
    options: AgentOptions,
    mut stop: watch::Receiver<bool>,
    ready: impl FnOnce(&Path, Option<SocketAddr>, Option<SocketAddr>),
) -> anyhow::Result<()> {
    let path = match &options.socket {
        Some(path) => path.clone(),
        None => socket_path()?,
    };
    let ListeningSocket {
        listener,
        path,
        is_handed_over,
        _lock,
    } = ListeningSocket::open(&path)?;
    let manager = settings::network_manager().await;
    let resolver = CostResolver {
        flags: options.flags,
        rules: options.rules.clone(),
    };
    let flags = resolver.flags.clone();
    let (_, monitor) = LinkMonitor::start_with(resolver, manager.clone()).await?;
    match flags.check(&monitor.links()) {
        // The agent may start with the machine, before a modem is there.
        Err(error @ IneffectiveRuleError::UnknownDevice { .. }) => {
            print_stderr(&format!("note: {error}"));
        }
        checked => checked?,
    }
    let (store, kept) = LinkHistoryStore::load();
    let scheduler = SchedulerHandle::new(options.scheduler);
    let (notices, inbox) = DesktopNotifier::new();
    let mut ledger = BudgetLedger::load();
    ledger.apply(&options.budget);
    let agent = Arc::new(Agent {
        scheduler,
        link_view: LinkView::new(&monitor, manager, options.rules),
        tasks: Mutex::default(),
        events: broadcast::channel(NEWS_MAX).0,
        meter: Mutex::default(),
        ledger: Mutex::new(ledger),
        capped_at: Mutex::default(),
        link_history: Mutex::new(store),
        regret_meter: Mutex::default(),
        wake_status: Mutex::default(),
        notifier: notices,
        scan_lock: tokio::sync::Mutex::default(),
        left: watch::Sender::default(),
        rate_limiters: RateLimiters::default(),
        path_drwa: options.path_drwa,
        is_ending: AtomicBool::new(false),
        open_connections: AtomicUsize::new(0),
        podcasts: PodcastService::default(),
        has_subscriptions: AtomicBool::new(false),
    });
    let metrics = match options.metrics {
        Some(at) if !at.ip().is_loopback() => {
            bail!("{at} is not a loopback address; metrics are for this machine only")
        }
        Some(at) => Some(MetricsListener::bind(at).await?),
        None => None,
    };
    let figures = metrics.as_ref().and_then(|m| m.local_addr().ok());
    let local_proxy = match options.local_proxy {
        Some(local) => Some(open_local_proxy(local, agent.link_view.links()).await?),
        None => None,
    };
    let programs = local_proxy.as_ref().map(|(_, _, at)| *at);
    if let Some((_, line, _)) = &local_proxy {
        line.set_budget(agent.clone());
    }
    // What is around first: it says which device's past it is.
    agent.scheduler.observe(&agent.surroundings(false));
    if let Some(kept) = kept {
        agent.scheduler.restore(kept);
    }
    agent.update_allowance();
    agent.look();
    let mut position = None;
    match UserSettings::load(None) {
        Ok(settings) => {
            let gpsd = settings.parsed("agent.gpsd", str::parse);
            let geoclue = settings.parsed("agent.geoclue", str::parse) == Some(true);
            position = gpsd.map(PositionSource::Gpsd);
            position = position.or(geoclue.then_some(PositionSource::GeoClue));
            match EnergySettings::load(&settings) {
                Ok(energy) => watch_energy(&agent.scheduler, agent.link_view.links(), energy),
                Err(error) => print_stderr(&format!("note: no energy is saved: {error}")),
            }
        }
        Err(error) => print_stderr(&format!("note: no energy is saved: {error}")),
    }
    let local = tokio::task::LocalSet::new();
    local
        .run_until(async {
            tokio::task::spawn_local(agent.clone().watch_links());
            tokio::task::spawn_local(agent.clone().watch_sleeping_radios(position));
            match LinuxMachine::open().await {
                Ok(machine) => {
                    let periods = wake_control::scan_periods(options.scan_interval);
                    tokio::task::spawn_local(wake_control::run(agent.clone(), machine, periods));
                }
                Err(error) => tracing::warn!(%error, "the machine can be neither woken nor kept \
                    awake"),
            }
            if !options.no_notifications {
                tokio::task::spawn_local(notifications::serve(agent.clone(), inbox));
            }
            let _has_them = agent.take_up()?;
            if let Some(listener) = metrics {
                let metered = agent.clone();
                tokio::task::spawn_local(listener.serve(METRICS_TYPE, move || {
                    lock(&metered.meter).render(&metered.state_counts())
                }));
            }
            tokio::task::spawn_local(hooks::watch(options.hooks, agent.link_view.links()));
            let carrier = sockets::carrier(agent.clone())?;
            let page = Rc::new(PagePort::new(agent.clone()));
            page.reopen().await;
            agent.reopen_apps().await;
            let served = api_server::serve(agent.clone(), carrier.clone(), page.clone(), listener);
            let accepting = tokio::task::spawn_local(served);
            tokio::task::spawn_local(agent.clone().keep_records());
            tokio::task::spawn_local(PodcastService::run(agent.clone()));
            tokio::task::spawn_local(agent.clone().keep_synced());
            let served =
                local_proxy.map(|(local_proxy, line, _)| (tokio::spawn(local_proxy.serve()), line));
            let idle = agent.clone().idle_for(options.exit_when_idle, &path);
            tokio::task::spawn_local(agent.clone().look_back());
            ready(&path, figures, programs);
            tokio::select! {
                _ = stop.wait_for(|stop| *stop) => {}
                () = idle => tracing::info!("nothing to do; the agent starts again by need"),
            }
            // Whoever connects from here on finds no agent, rather than one that does not answer.
            accepting.abort();
            page.shut().await;
            agent.podcasts.apps.shut().await;
            if let Some((serving, line)) = served {
                serving.abort();
                line.close().await;
            }
            tokio::join!(agent.end(), carrier.flush());
            // As late as possible: until the next agent begins, connections that it goes on with wait.
            carrier.close().await;
            anyhow::Ok(())
        })
        .await?;
    if !is_handed_over {
        let _ = std::fs::remove_file(&path);
    }
    Ok(())
}

/// Opens the local proxy.
async fn open_local_proxy(
    local: LocalProxy,
    links: watch::Receiver<Arc<Vec<Link>>>,
) -> anyhow::Result<(LocalProxyListener, Arc<ProxySession>, SocketAddr)> {
    let line = ProxySession::new(
        ProxySessionPeer::Prox,
        local.server,
        local.key,
        links,
        |_| {},
    );
    let local_proxy = LocalProxyListener::bind(local.address, line.clone(), local.options).await;
    let local_proxy = local_proxy
        .with_context(|| format!("cannot open the proxy for programs at {}", local.address))?;
    let at = local_proxy.local_addr()?;
    Ok((local_proxy, line, at))
}

impl Agent {
    /// Loads the queue that an earlier agent left. Returns the lock that marks it as in use.
    fn take_up(self: &Arc<Agent>) -> anyhow::Result<Option<File>> {
        let has_them = jobs::claim_all().inspect_err(|error| {
            tracing::warn!(%error, "other commands may show the agent's transfers as queued");
        });
        if has_them.is_ok() {
            queue::remove_unconfirmed()?;
        }
        let mut begin = Vec::new();
        for record in queue::load()? {
            let (id, task) = (record.id, TransferTask::new(record));
            if !task.has_ended() && task.saved.wish == TransferIntent::Run {
                begin.push(id);
            }
            lock(&self.tasks).insert(id, task);
        }
        begin.into_iter().for_each(|id| self.start(id));
        Ok(has_them.ok())
    }

    /// Follows the links even while no transfer runs, to learn their history.
    async fn watch_links(self: Arc<Agent>) {
        let (mut links, mut around) = (self.link_view.links(), self.link_view.nearby());
        loop {
            let changed = tokio::select! {
                changed = links.changed() => changed,
                changed = around.changed() => changed,
            };
            if changed.is_err() {
                return;
            }
            self.update_allowance();
            self.look();
        }
    }

    /// Saves slowly changing state at intervals.
    async fn keep_records(self: Arc<Agent>) {
        loop {
            tokio::time::sleep(HOUSEKEEPING).await;
            lock(&self.ledger).save();
            // A month may have begun.
            self.update_allowance();
            self.look();
            lock(&self.link_history).save(&self.scheduler, false);
        }
    }

    /// Counts metered bytes that were avoidable.
    async fn look_back(self: Arc<Agent>) {
        loop {
            tokio::time::sleep(LOOK_BACK).await;
            let rates = self.scheduler.free_rates();
            let mut hindsight = lock(&self.regret_meter);
            if !hindsight.is_idle() {
                let avoidable = hindsight.advance(BootInstant::now(), rates);
                lock(&self.meter).avoidable(avoidable);
            }
        }
    }

    /// Makes all transfers save their state and stop.
    async fn end(&self) {
        self.is_ending.store(true, Ordering::Relaxed);
        for task in lock(&self.tasks).values() {
            task.request_stop();
        }
        let settled = async {
            while lock(&self.tasks).values().any(|task| task.running) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        if tokio::time::timeout(FAREWELL, settled).await.is_err() {
            tracing::warn!("some transfers did not stop in time; they resume at their last sync");
        }
        lock(&self.ledger).save();
        lock(&self.link_history).save(&self.scheduler, true);
    }
}
