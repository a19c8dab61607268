//! `cargo xtask nightly`: checks that take too long for every change, in the time that there is.
//!
//! ```text
//!  --minutes ─▶ shares of time ─▶ parts, one after the other ─▶ nightly.txt, nightly.json
//!                                   └ each: held, failed, or skipped and why; what it did, and for how long
//! ```
//!
//! Parts that could go on for ever (random scenarios and times, kill points, fuzzing, mutants) stop when their share is used up:
//! the report says how far they came. A part whose tool is missing is skipped with the command that installs it.
//! `--whole` adds what takes hours: every test optimised, every feature, packages in a fresh Debian.

mod bounded_command;
mod bridge_soak;
mod builds_compared;
mod c_sanitizers;
mod cache_suite;
mod hostile_clients;
mod instruction_counts;
mod many_clients;
mod mutants;
mod night_context;
mod night_report;
mod races;
mod thread_sanitizer;
mod tool_parts;
mod until_budget;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;

use crate::step::{Steps, cargo};
use crate::totals::TestTotals;
use night_context::NightContext;
use night_report::{NightPart, NightReport};

/// Options of the verb `nightly`.
#[derive(clap::Args)]
pub struct NightlyOptions {
    /// Time for all parts together; builds of programs count
    #[arg(long, default_value_t = 60)]
    minutes: u64,
    /// Run these parts alone (repeatable): seeds, vary, search, kills, hostile, many, cache-tests, fuzz, miri, mutants,
    /// advisories, counts, model, msrv, sanitizers, races, threads, browsers, bridge, reproducible
    #[arg(long, value_name = "PART")]
    only: Vec<String>,
    /// Random scenarios to run at most
    #[arg(long, default_value_t = crate::seeds::NIGHT_SEEDS)]
    seeds: u64,
    /// The most system calls at which a download and its proxy are killed
    #[arg(long, default_value_t = crate::kills::NIGHT_POINTS)]
    kill_points: u64,
    /// Other scenarios for the same seeds, and other kill points and mutants; by default the number of today
    #[arg(long)]
    salt: Option<u64>,
    /// Keep the instruction counts of this run, to compare later ones with
    #[arg(long)]
    keep_counts: bool,
    /// Run what takes hours, too: every test optimised, ignored ones too; every feature; packages in a fresh Debian
    #[arg(long)]
    whole: bool,
}

/// A part of the night: its name, its share of the time, and what it does within it.
type PartRun = fn(&NightContext, Duration) -> Result<NightPart>;

/// All parts, the shorter ones first. The shares are hundredths of the time.
const PARTS: [(&str, u32, PartRun); 20] = [
    ("advisories", 2, tool_parts::advisories),
    ("model", 3, tool_parts::model),
    ("msrv", 2, tool_parts::msrv),
    ("sanitizers", 3, c_sanitizers::run),
    ("races", 2, races::run),
    ("threads", 2, thread_sanitizer::run),
    ("browsers", 4, tool_parts::browsers),
    ("counts", 5, instruction_counts::run),
    ("cache-tests", 3, cache_suite::run),
    ("miri", 8, tool_parts::miri),
    ("hostile", 8, hostile_clients::run),
    ("many", 6, many_clients::run),
    ("search", 6, until_budget::search),
    ("vary", 8, until_budget::vary),
    ("bridge", 4, bridge_soak::run),
    ("fuzz", 20, until_budget::fuzz),
    ("seeds", 20, until_budget::seeds),
    ("kills", 15, until_budget::kills),
    ("mutants", 12, mutants::run),
    ("reproducible", 10, builds_compared::run),
];

/// The length of a night from which programs are built optimised, which alone takes ten minutes.
const LONG: Duration = Duration::from_secs(30 * 60);

/// Runs every part; returns whether none failed.
pub fn run(options: &NightlyOptions) -> Result<bool> {
    let total = Duration::from_secs(60 * options.minutes);
    let context = NightContext {
        salt: options.salt.unwrap_or_else(today),
        seeds: options.seeds,
        times: match options.whole {
            true => crate::seeds::WHOLE_TIMES,
            false => crate::seeds::NIGHT_TIMES,
        },
        kill_points: options.kill_points,
        keep_counts: options.keep_counts,
        is_long: total >= LONG,
    };
    let is_wanted =
        |name: &str| options.only.is_empty() || options.only.iter().any(|only| only == name);
    if let Some(unknown) = options
        .only
        .iter()
        .find(|name| PARTS.iter().all(|part| part.0 != *name))
    {
        anyhow::bail!("there is no part `{unknown}`; `cargo xtask nightly --help` lists them");
    }
    let shares: u32 = PARTS
        .iter()
        .filter(|part| is_wanted(part.0))
        .map(|part| part.1)
        .sum();
    let mut report = NightReport::begin(context.salt, options.minutes)?;
    for (name, share, part) in PARTS {
        match is_wanted(name) {
            true => report.run(name, || part(&context, total * share / shares))?,
            false => report.leave_out(name)?,
        }
    }
    let mut held = report.finish()?;
    if options.whole {
        held &= whole()?;
    }
    Ok(held)
}

/// Runs the parts of the night that take hours.
fn whole() -> Result<bool> {
    let mut steps = Steps::default();
    let mut totals = TestTotals::default();
    steps.command(
        "every feature",
        &mut cargo([
            "clippy",
            "--workspace",
            "--all-targets",
            "--all-features",
            "--locked",
            "--",
            "-D",
            "warnings",
        ]),
    );
    steps.run("tests, optimised, ignored ones too", || {
        crate::check::tests(&mut totals, &["--release", "--", "--include-ignored"])
    });
    crate::dist::nightly(&mut steps)?;
    let held = steps.summarise();
    totals.print();
    Ok(held && totals.failed == 0)
}

/// The number of days since 1970, so that every night tries new scenarios.
fn today() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs() / 86_400)
}
