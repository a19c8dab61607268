//! Crashes of either end, and how long a sleeping session stays in memory: what a scenario says
//! about processes rather than links. The simulator does them; the lab runs real programs.

use crate::check::seconds;
use serde::Deserialize;

/// Idle time after which both ends turn a session into its record, where nothing is said.
pub const HIBERNATE_AFTER_S_DEFAULT: f64 = 600.0;
/// How long a crashed process is away where nothing is said. // a guess: a service manager's restart
pub const CRASH_FOR_S_DEFAULT: f64 = 1.0;
/// Crashes a scenario has at most.
pub const CRASHES_MAX: usize = 1_000;

/// Which end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Who {
    /// The device.
    Device,
    /// The proxy.
    Proxy,
}

/// An end stops without a word and comes back from its journal.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Crash {
    /// Which end.
    pub who: Who,
    /// When.
    pub t_s: f64,
    /// How long it is away.
    #[serde(default = "crash_for_default")]
    pub for_s: f64,
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
