//! Crashes of either end, and the time until hibernation: the parts of a scenario about processes
//! instead of links. The simulator simulates them; the lab runs real programs.

use crate::bounds::seconds;
use crate::state::ScenarioState;
use serde::Deserialize;

/// The default idle time after which both ends hibernate a session, in seconds.
pub const HIBERNATE_AFTER_S_DEFAULT: f64 = 600.0;
/// The default time for which a crashed process is away, in seconds. // a guess: a service
/// manager's restart
pub const CRASH_FOR_S_DEFAULT: f64 = 1.0;
/// The most crashes of a scenario.
pub const CRASHES_MAX: usize = 1_000;

/// The most packets replayed at a time, and the most replays of a scenario.
pub const REPLAYED_MAX: u32 = 1_000;

/// The end that crashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CrashedEnd {
    /// The device's process.
    Device,
    /// The proxy's process.
    Proxy,
}

/// How an end stops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CrashKind {
    /// The process is killed and comes back from its journal.
    #[default]
    Crash,
    /// The process is frozen with its memory, as on a suspended machine: when it continues, its
    /// clock has jumped.
    Freeze,
    /// A new process takes the proxy over. The simulator crashes it instead.
    Upgrade,
    /// The proxy's devices are asked to go on at its other node, and it ends. The simulator crashes it instead.
    Drain,
}

/// A stop of an end without warning, which then comes back from its journal or continues.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Crash {
    /// The end that stops.
    pub who: CrashedEnd,
    /// The time of the stop.
    pub t_s: f64,
    /// How long the end is away, in seconds.
    #[serde(default = "crash_for_default")]
    pub for_s: f64,
    /// The kind of stop.
    #[serde(default)]
    pub how: CrashKind,
    /// The number of further events in the run before the process stops, so that any time between
    /// two events can be hit.
    #[serde(default)]
    pub after_events: u64,
    /// The state of an end for which the stop waits: it happens from `t_s` on, at the first time in
    /// this state, or never.
    #[serde(default)]
    pub when: Option<ScenarioState>,
    /// The end whose state counts, if not the one that stops.
    #[serde(default)]
    pub of: Option<CrashedEnd>,
    /// The number of commits that were reported as durable and are lost: a faulty disk.
    #[serde(default)]
    pub lost_commits: u32,
}

/// How the store of a proxy's nodes stops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StoreStop {
    /// The server is killed, and started again with what it had on disk.
    #[default]
    Kill,
    /// The server keeps its connections and answers nothing, then continues.
    Pause,
}

/// A time in which the store of a proxy's nodes does not answer.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoreOutage {
    /// When the store stops, in seconds.
    pub t_s: f64,
    /// How long the store is away, in seconds.
    #[serde(default = "crash_for_default")]
    pub for_s: f64,
    /// Whether the server is killed or paused.
    #[serde(default)]
    pub how: StoreStop,
}

/// How far away one of the proxy's nodes is, from a time on.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeDistance {
    /// From when on, in seconds.
    pub t_s: f64,
    /// The node: 1 or 2.
    pub node: u8,
    /// The round trip to the node beyond the link's own, in milliseconds.
    pub rtt_ms: f64,
}

/// A replay of packets that were sent before.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Replay {
    /// The end that receives them.
    pub to: CrashedEnd,
    /// The time of the replay.
    pub t_s: f64,
    /// The number of packets, drawn from all that were sent in that direction.
    pub packets: u32,
    /// Whether the replayed packets come from another address than the first time.
    #[serde(default)]
    pub elsewhere: bool,
    /// The state of an end for which the replay waits, as for a crash.
    #[serde(default)]
    pub when: Option<ScenarioState>,
    /// The end whose state counts, if not the one that receives them.
    #[serde(default)]
    pub of: Option<CrashedEnd>,
}

/// The longest round trip to a node beyond the link's own.
const NODE_RTT_MS_MAX: f64 = 10_000.0;

fn crash_for_default() -> f64 {
    CRASH_FOR_S_DEFAULT
}

/// The default of a flow's `count`.
pub(crate) fn one_flow() -> u32 {
    1
}

/// The default of `nodes`.
pub(crate) fn one_node() -> u8 {
    1
}

pub(crate) fn hibernate_after_default() -> f64 {
    HIBERNATE_AFTER_S_DEFAULT
}

impl Crash {
    pub(crate) fn check(&self, duration_s: f64) -> Result<(), String> {
        if self.how == CrashKind::Upgrade && self.who != CrashedEnd::Proxy {
            return Err("only the proxy is upgraded".to_owned());
        }
        if self.how == CrashKind::Drain && self.who != CrashedEnd::Proxy {
            return Err("only the proxy is drained".to_owned());
        }
        seconds("t_s", self.t_s, duration_s)?;
        seconds("for_s", self.for_s, duration_s)
    }
}

impl StoreOutage {
    pub(crate) fn check(&self, duration_s: f64) -> Result<(), String> {
        seconds("t_s", self.t_s, duration_s)?;
        seconds("for_s", self.for_s, duration_s)
    }
}

impl NodeDistance {
    pub(crate) fn check(&self, nodes: u8, duration_s: f64) -> Result<(), String> {
        if !(1..=nodes).contains(&self.node) {
            return Err(format!("node is {}, expected 1 to {nodes}", self.node));
        }
        if !(0.0..=NODE_RTT_MS_MAX).contains(&self.rtt_ms) {
            return Err(format!(
                "rtt_ms is {}, expected 0 to {NODE_RTT_MS_MAX}",
                self.rtt_ms
            ));
        }
        seconds("t_s", self.t_s, duration_s)
    }
}

impl Replay {
    pub(crate) fn check(&self, duration_s: f64) -> Result<(), String> {
        if self.packets > REPLAYED_MAX {
            return Err(format!(
                "packets is {}, at most {REPLAYED_MAX}",
                self.packets
            ));
        }
        seconds("t_s", self.t_s, duration_s)
    }
}
