//! The agent: one per user and device. It owns the links, the sessions, the scheduler and a queue
//! that survives it.
//!
//! ```text
//!  cedos get, ls, why … ── Unix socket ── door ─┐
//!                                              Agent ── task: errand, transfer ─┐
//!  links (roads) ── hooks                       │ ├──── task                    ├── dispatcher
//!  libd2tp ── Unix socket, descriptors ─ door ──┼─┼──── sockets: flows ─────────┤
//!  Prometheus ── loopback TCP ── metrics ───────┘ └──── task                    ┘
//!                        queue, ledger: $XDG_STATE_HOME/cedos
//! ```
//!
//! Everything runs on one thread: transfers wait for networks and disks, not for cores.

mod allowance;
pub mod api;
mod atlas;
pub mod client;
mod door;
mod hindsight;
mod hooks;
mod ledger;
mod meter;
mod metrics;
mod notices;
mod queue;
mod roads;
mod shown;
mod sockets;
mod streams;
mod task;
mod vigil;

use std::collections::BTreeMap;
use std::fs::{DirBuilder, File, OpenOptions};
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, bail};
use d2tp_driver::{SecretKey, ServerAddress};
use d2tp_links::{ClassRules, CostResolver, Link, LinkKind, LinkMonitor, NetworkRules};
use d2tp_power::LinuxMachine;
use serde_json::Value;
use tokio::net::UnixListener;
use tokio::sync::{broadcast, watch};

use crate::dispatcher::{Dispatcher, Kind, Radio, Surroundings};
use crate::fetch::clock::Moment;
use crate::fetch::jobs;
use crate::proxy::{self, Door, Far, Line};
use crate::settings;
use atlas::Atlas;
use hindsight::Hindsight;
pub use hooks::Hooks;
use ledger::Ledger;
use meter::Meter;
use notices::Notices;
use queue::Wish;
use roads::Roads;
pub use shown::net_object;
use task::Task;
use vigil::Posture;

/// Events that a slow listener may be behind before it misses some.
const NEWS_MAX: usize = 1_024;

/// How often what changes slowly is written down and looked at.
const HOUSEKEEPING: Duration = Duration::from_secs(5);

/// How often it is looked back on what free links carried and could have.
const LOOK_BACK: Duration = Duration::from_secs(1);

/// Time for transfers to put down what they hold when the agent ends.
const FAREWELL: Duration = Duration::from_secs(20); // a guess: a sync on a slow disk

type News = broadcast::Sender<(u64, Value)>;

/// How an agent runs.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Where its socket is; none is the usual place.
    pub socket: Option<PathBuf>,
    /// What links cost, said with the command.
    pub flags: ClassRules,
    /// What the user's settings say of networks.
    pub rules: NetworkRules,
    /// Nobody is told anything on the desktop.
    pub quiet: bool,
    /// While a transfer waits, how often links are looked for; none: when it is worth it.
    pub look_every: Option<Duration>,
    /// How it is decided.
    pub scheduler: Kind,
    /// Where Prometheus finds its figures, if anywhere.
    pub metrics: Option<SocketAddr>,
    /// What is started when free links come and go.
    pub hooks: Hooks,
    /// The proxy for programs, if there is to be one.
    pub local: Option<LocalProxy>,
}

/// A proxy on this machine, for programs that know nothing of D2TP.
#[derive(Debug, Clone)]
pub struct LocalProxy {
    /// Where it listens: an address of loopback.
    pub at: SocketAddr,
    /// The D2Prox that it goes by.
    pub server: ServerAddress,
    /// This device's key.
    pub key: SecretKey,
    /// On what terms, where a program does not say.
    pub wish: proxy::Wish,
}

/// The agent.
struct Agent {
    dispatcher: Arc<Dispatcher>,
    roads: Roads,
    tasks: Mutex<BTreeMap<u64, Task>>,
    news: News,
    meter: Mutex<Meter>,
    ledger: Mutex<Ledger>,
    /// Networks whose caps are used up, since when.
    capped_at: Mutex<BTreeMap<String, Moment>>,
    atlas: Mutex<Atlas>,
    hindsight: Mutex<Hindsight>,
    posture: Mutex<Posture>,
    notices: Notices,
    /// One stream looks for access points for all.
    scouting: tokio::sync::Mutex<()>,
    /// What links that cost may still carry.
    left: watch::Sender<Option<u64>>,
    is_ending: AtomicBool,
}

fn lock<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Names the socket where it is elsewhere; `none`: there is to be no agent.
pub const SOCKET_VARIABLE: &str = "CEDOS_AGENT";

/// Where the socket is: `$CEDOS_AGENT`, else `$XDG_RUNTIME_DIR/cedos/agent.sock`, else beside the state.
///
/// # Errors
/// Nobody says where, or there is to be none.
pub fn socket() -> anyhow::Result<PathBuf> {
    match std::env::var_os(SOCKET_VARIABLE) {
        Some(none) if none == "none" => bail!("{SOCKET_VARIABLE} says that there is no agent"),
        Some(path) if !path.is_empty() => return Ok(path.into()),
        _ => {}
    }
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    match runtime.filter(|path| path.is_absolute()) {
        Some(runtime) => Ok(runtime.join("cedos").join("agent.sock")),
        None => Ok(jobs::state()?.join("agent.sock")),
    }
}

/// Runs the agent until `stop` turns true. `ready` is called once it answers.
///
/// # Errors
/// It cannot begin: another runs, or the system refuses what it needs.
pub async fn run(
    options: Options,
    mut stop: watch::Receiver<bool>,
    ready: impl FnOnce(&Path, Option<SocketAddr>, Option<SocketAddr>),
) -> anyhow::Result<()> {
    let path = match &options.socket {
        Some(path) => path.clone(),
        None => socket()?,
    };
    let (listener, _lock) = listen(&path)?;
    let manager = settings::manager().await;
    let judge = CostResolver {
        flags: options.flags,
        rules: options.rules.clone(),
    };
    let (_, monitor) = LinkMonitor::start_with(judge, manager.clone()).await?;
    let (atlas, kept) = Atlas::load();
    let dispatcher = Dispatcher::new(options.scheduler);
    let (notices, inbox) = Notices::new();
    let agent = Arc::new(Agent {
        dispatcher,
        roads: Roads::new(&monitor, manager, options.rules),
        tasks: Mutex::default(),
        news: broadcast::channel(NEWS_MAX).0,
        meter: Mutex::default(),
        ledger: Mutex::new(Ledger::load()),
        capped_at: Mutex::default(),
        atlas: Mutex::new(atlas),
        hindsight: Mutex::default(),
        posture: Mutex::default(),
        notices,
        scouting: tokio::sync::Mutex::default(),
        left: watch::Sender::default(),
        is_ending: AtomicBool::new(false),
    });
    let metrics = match options.metrics {
        Some(at) => Some(metrics::listen(at).await?),
        None => None,
    };
    let figures = metrics.as_ref().and_then(|m| m.local_addr().ok());
    let local_proxy = match options.local {
        Some(local) => Some(open_door(local, agent.roads.links()).await?),
        None => None,
    };
    let programs = local_proxy.as_ref().map(|(_, _, at)| *at);
    if let Some((_, line, _)) = &local_proxy {
        line.pay_from(agent.clone());
    }
    // What is around first: it says which device's past it is.
    agent.dispatcher.look(&agent.surroundings(false));
    if let Some(kept) = kept {
        agent.dispatcher.recall(kept);
    }
    agent.allow();
    agent.look();
    let local = tokio::task::LocalSet::new();
    local
        .run_until(async {
            tokio::task::spawn_local(agent.clone().watch_links());
            match LinuxMachine::open().await {
                Ok(machine) => {
                    let periods = vigil::periods(options.look_every);
                    tokio::task::spawn_local(vigil::keep(agent.clone(), machine, periods));
                }
                Err(error) => tracing::warn!(%error, "the machine is neither woken nor kept awake"),
            }
            if !options.quiet {
                tokio::task::spawn_local(notices::serve(agent.clone(), inbox));
            }
            let _has_them = agent.take_up()?;
            if let Some(listener) = metrics {
                tokio::task::spawn_local(metrics::serve(agent.clone(), listener));
            }
            tokio::task::spawn_local(hooks::watch(options.hooks, agent.roads.links()));
            let carrier = sockets::carrier(agent.clone())?;
            tokio::task::spawn_local(door::serve(agent.clone(), carrier.clone(), listener));
            tokio::task::spawn_local(agent.clone().keep_house());
            let served = local_proxy.map(|(door, line, _)| (tokio::spawn(door.serve()), line));
            tokio::task::spawn_local(agent.clone().look_back());
            ready(&path, figures, programs);
            let _ = stop.wait_for(|stop| *stop).await;
            if let Some((serving, line)) = served {
                serving.abort();
                line.close().await;
            }
            tokio::join!(agent.end(), carrier.close());
            anyhow::Ok(())
        })
        .await?;
    let _ = std::fs::remove_file(&path);
    Ok(())
}

/// Opens the local proxy.
async fn open_door(
    local: LocalProxy,
    links: watch::Receiver<Arc<Vec<Link>>>,
) -> anyhow::Result<(Door, Arc<Line>, SocketAddr)> {
    let line = Line::new(Far::Prox, local.server, local.key, links, |_| {});
    let door = Door::bind(local.at, line.clone(), local.wish).await;
    let door = door.with_context(|| format!("no proxy for programs at {}", local.at))?;
    let at = door.local_addr()?;
    Ok((door, line, at))
}

/// Takes the socket, which one agent of a user has.
fn listen(path: &Path) -> anyhow::Result<(UnixListener, File)> {
    let folder = path.parent().context("the socket needs a folder")?;
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .with_context(|| format!("cannot make {}", folder.display()))?;
    let lock = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(path.with_extension("lock"))
        .with_context(|| format!("cannot write into {}", folder.display()))?;
    if lock.try_lock().is_err() {
        bail!("an agent of yours runs already ({})", path.display());
    }
    // Whoever left it is gone: the lock was free.
    let _ = std::fs::remove_file(path);
    let listener =
        UnixListener::bind(path).with_context(|| format!("cannot listen at {}", path.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok((listener, lock))
}

impl Agent {
    fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    /// Takes up the queue as an earlier agent left it; the lock that says so.
    fn take_up(self: &Arc<Agent>) -> anyhow::Result<Option<File>> {
        let has_them = jobs::claim_all().inspect_err(|error| {
            tracing::warn!(%error, "who does not ask the agent takes its transfers for queued");
        });
        let mut begin = Vec::new();
        for record in queue::load()? {
            let (id, task) = (record.id, Task::new(record));
            if !task.has_ended() && task.kept.wish == Wish::Run {
                begin.push(id);
            }
            lock(&self.tasks).insert(id, task);
        }
        begin.into_iter().for_each(|id| self.begin(id));
        Ok(has_them.ok())
    }

    /// What is around the device; `seen`: with the links that can be used.
    fn surroundings(&self, seen: bool) -> Surroundings {
        let links = self.roads.links().borrow().clone();
        let around = self.roads.around().borrow().clone();
        let spent = self.roads.spent();
        let slots = roads::slots(&links);
        let usable = links
            .iter()
            .filter(|link| seen && link.kind != LinkKind::Loopback && link.is_usable());
        let radio = |link: &d2tp_links::Link| Radio {
            device: link.name.clone(),
            slot: slots.get(&link.name).unwrap_or(&link.name).clone(),
            class: link.class.class.into(),
            carries: true,
            rate: None,
        };
        let devices = links.iter().map(|link| &link.name);
        let capped = devices.filter(|device| spent.contains_key(&around.name(device)));
        Surroundings {
            radios: usable.map(radio).collect(),
            networks: around.names.clone(),
            capped: capped.cloned().collect(),
            slots,
        }
    }

    /// Has the scheduler know what is around, and learns from it.
    fn look(&self) {
        let around = self.surroundings(true);
        self.dispatcher.look(&around);
        let place = self.roads.around().borrow().place().map(str::to_owned);
        lock(&self.atlas).see(&self.dispatcher, place.as_deref());
    }

    /// Follows the links, whether a transfer runs or not: what they do is worth knowing later.
    async fn watch_links(self: Arc<Agent>) {
        let (mut links, mut around) = (self.roads.links(), self.roads.around());
        loop {
            let changed = tokio::select! {
                changed = links.changed() => changed,
                changed = around.changed() => changed,
            };
            if changed.is_err() {
                return;
            }
            self.allow();
            self.look();
        }
    }

    /// Writes down what changes slowly.
    async fn keep_house(self: Arc<Agent>) {
        loop {
            tokio::time::sleep(HOUSEKEEPING).await;
            lock(&self.ledger).save();
            // A month may have begun.
            self.allow();
            self.look();
            lock(&self.atlas).keep(&self.dispatcher, false);
        }
    }

    /// Counts what was paid for in vain.
    async fn look_back(self: Arc<Agent>) {
        loop {
            tokio::time::sleep(LOOK_BACK).await;
            let rates = self.dispatcher.free_rates();
            let mut hindsight = lock(&self.hindsight);
            if !hindsight.is_idle() {
                let avoidable = hindsight.see(Moment::now(), rates);
                lock(&self.meter).avoidable(avoidable);
            }
        }
    }

    /// Has all transfers put down what they hold.
    async fn end(&self) {
        self.is_ending.store(true, Ordering::Relaxed);
        for task in lock(&self.tasks).values() {
            task.halt();
        }
        let settled = async {
            while lock(&self.tasks).values().any(|task| task.running) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        if tokio::time::timeout(FAREWELL, settled).await.is_err() {
            tracing::warn!("some transfers did not stop in time; they go on from their last sync");
        }
        lock(&self.ledger).save();
        lock(&self.atlas).keep(&self.dispatcher, true);
    }
}
