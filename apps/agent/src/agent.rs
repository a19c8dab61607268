//! The agent: one per user and device. It owns the links, the sessions, the scheduler and a queue
//! that survives it.
//!
//! ```text
//!  cedos get, ls, why … ── Unix socket ── door ─┐
//!                                              Agent ── task: errand, transfer ─┐
//!  links (roads) ── hooks                       │ ├──── task                    ├── dispatcher
//!  Prometheus ── loopback TCP ── metrics ───────┘ └──── task                    ┘
//!                        queue, ledger: $XDG_STATE_HOME/cedos
//! ```
//!
//! Everything runs on one thread: transfers wait for networks and disks, not for cores.

pub mod api;
pub mod client;
mod door;
mod hooks;
mod ledger;
mod meter;
mod metrics;
mod queue;
mod roads;
mod shown;
mod task;

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
use d2tp_links::{ClassRules, Link, LinkMonitor};
use serde_json::Value;
use tokio::net::UnixListener;
use tokio::sync::{broadcast, watch};

use crate::dispatcher::{Dispatcher, Kind};
use crate::fetch::jobs;
use crate::proxy::{Door, Line, Wish};
pub use hooks::Hooks;
use ledger::Ledger;
use meter::Meter;
use queue::Wish;
use roads::Roads;
pub use shown::net_object;
use task::Task;

/// Events that a slow listener may be behind before it misses some.
const NEWS_MAX: usize = 1_024;

/// How often what changes slowly is written down and looked at.
const HOUSEKEEPING: Duration = Duration::from_secs(5);

/// Time for transfers to put down what they hold when the agent ends.
const FAREWELL: Duration = Duration::from_secs(20); // a guess: a sync on a slow disk

type News = broadcast::Sender<(u64, Value)>;

/// How an agent runs.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Where its socket is; none is the usual place.
    pub socket: Option<PathBuf>,
    /// What links cost.
    pub rules: ClassRules,
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
    pub wish: Wish,
}

/// The agent.
struct Agent {
    dispatcher: Arc<Dispatcher>,
    roads: Roads,
    tasks: Mutex<BTreeMap<u64, Task>>,
    news: News,
    meter: Mutex<Meter>,
    ledger: Mutex<Ledger>,
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
    let (_, monitor) = LinkMonitor::start(options.rules).await?;
    let agent = Arc::new(Agent {
        dispatcher: Dispatcher::new(options.scheduler),
        roads: Roads::new(monitor.subscribe()),
        tasks: Mutex::default(),
        news: broadcast::channel(NEWS_MAX).0,
        meter: Mutex::default(),
        ledger: Mutex::new(Ledger::load()),
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
    agent.dispatcher.allow(lock(&agent.ledger).left());
    let local = tokio::task::LocalSet::new();
    local
        .run_until(async {
            agent.take_up()?;
            if let Some(listener) = metrics {
                tokio::task::spawn_local(metrics::serve(agent.clone(), listener));
            }
            tokio::task::spawn_local(hooks::watch(options.hooks, agent.roads.links()));
            tokio::task::spawn_local(door::serve(agent.clone(), listener));
            tokio::task::spawn_local(agent.clone().keep_house());
            let served = local_proxy.map(|(door, line, _)| (tokio::spawn(door.serve()), line));
            ready(&path, figures, programs);
            let _ = stop.wait_for(|stop| *stop).await;
            if let Some((serving, line)) = served {
                serving.abort();
                line.close().await;
            }
            agent.end().await;
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
    let line = Line::new(local.server, local.key, links, |_| {});
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

    /// Takes up the queue as an earlier agent left it.
    fn take_up(self: &Arc<Agent>) -> anyhow::Result<()> {
        let mut begin = Vec::new();
        for record in queue::load()? {
            let (id, task) = (record.id, Task::new(record));
            if !task.has_ended() && task.kept.wish == Wish::Run {
                begin.push(id);
            }
            lock(&self.tasks).insert(id, task);
        }
        begin.into_iter().for_each(|id| self.begin(id));
        Ok(())
    }

    /// Writes down what changes slowly.
    async fn keep_house(self: Arc<Agent>) {
        loop {
            tokio::time::sleep(HOUSEKEEPING).await;
            lock(&self.ledger).save();
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
    }
}
