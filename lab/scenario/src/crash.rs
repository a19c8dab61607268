//! Crashes of either end, and how long a sleeping session stays in memory: what a scenario says
//! about processes rather than links. The simulator does them; the lab runs real programs.

use crate::bounds::seconds;
use crate::state::ScenarioState;
use serde::Deserialize;

/// Idle time after which both ends turn a session into its record, where nothing is said.
pub const HIBERNATE_AFTER_S_DEFAULT: f64 = 600.0;
/// How long a crashed process is away where nothing is said. // a guess: a service manager's restart
pub const CRASH_FOR_S_DEFAULT: f64 = 1.0;
/// Crashes a scenario has at most.
pub const CRASHES_MAX: usize = 1_000;

/// Packets replayed at a time, and replays of a scenario, at most.
pub const REPLAYED_MAX: u32 = 1_000;

/// Which end.
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
pub enum Stop {
    /// The process is killed and comes back from its journal.
    #[default]
    Crash,
    /// The process stands still with all it holds, as in a suspended machine: when it goes on, its
    /// clock has jumped.
    Freeze,
}

/// An end stops without a word and comes back: from its journal, or as it stood.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Crash {
    /// Which end.
    pub who: CrashedEnd,
    /// When.
    pub t_s: f64,
    /// How long it is away.
    #[serde(default = "crash_for_default")]
    pub for_s: f64,
    /// How it stops.
    #[serde(default)]
    pub how: Stop,
    /// The process stops only after this many more things happened in the run, so that any instant
    /// between two of them can be hit.
    #[serde(default)]
    pub after_events: u64,
    /// The process stops only once an end is in this state: from `t_s` on, at the first such
    /// instant. Never, if there is none.
    #[serde(default)]
    pub when: Option<ScenarioState>,
    /// Which end, if not the one that stops.
    #[serde(default)]
    pub of: Option<CrashedEnd>,
    /// Commits that were reported safe and are lost all the same: a disk that lied.
    #[serde(default)]
    pub lost_commits: u32,
}

/// Packets sent so far arrive once more.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Replay {
    /// Who receives them.
    pub to: CrashedEnd,
    /// When.
    pub t_s: f64,
    /// How many, drawn from all that were ever sent that way.
    pub packets: u32,
    /// From another address than the first time.
    #[serde(default)]
    pub elsewhere: bool,
    /// Only once an end is in this state, as for a crash.
    #[serde(default)]
    pub when: Option<ScenarioState>,
    /// Which end, if not the one that receives them.
    #[serde(default)]
    pub of: Option<CrashedEnd>,
}

fn crash_for_default() -> f64 {
    CRASH_FOR_S_DEFAULT
}

pub(crate) fn hibernate_after_default() -> f64 {
    HIBERNATE_AFTER_S_DEFAULT
}

impl Crash {
    pub(crate) fn check(&self, duration_s: f64) -> Result<(), String> {
        seconds("t_s", self.t_s, duration_s)?;
        seconds("for_s", self.for_s, duration_s)
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
