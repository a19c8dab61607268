//! Chores of the repository, as `cargo xtask VERB`.
//!
//! - `check`: everything a change must pass. The test command; `.ci/run` calls exactly this.
//! - `quick`: format, rules, lints and unit tests of what changed; between two commits.
//! - `nightly`: what takes longer than a change can wait.
//! - `rules`: what a machine can see of the repository's own rules; part of `check`.
//! - `header`: C's header of libd2tp, from its sources.

mod check;
mod header;
mod hung;
mod kills;
mod msrv;
mod nightly;
mod quick;
mod repository;
mod rules;
mod seeds;
mod step;
mod test_programs;
mod totals;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Chores of the repository")]
struct XtaskCli {
    #[command(subcommand)]
    verb: XtaskVerb,
}

#[derive(Subcommand)]
enum XtaskVerb {
    /// Format, lints, tests, documentation, rules: everything a change must pass
    Check,
    /// What changed and what depends on it: format, rules, lints, unit tests, a few random scenarios
    Quick(quick::QuickOptions),
    /// What takes longer: fuzzing, ignored tests, every feature
    Nightly(nightly::NightlyOptions),
    /// What a machine can see of the repository's own rules: folders, dependencies, circles of
    /// files, type names, doc comments, sleeping tests; the MUSTs of docs/protocol.md and the
    /// promises of docs/security.md and their tests
    Rules(rules::RulesOptions),
    /// Make edge/capi/include/d2tp.h anew from the sources of libd2tp
    Header,
}

fn main() -> ExitCode {
    let outcome = match XtaskCli::parse().verb {
        XtaskVerb::Check => check::run(),
        XtaskVerb::Quick(options) => quick::run(&options),
        XtaskVerb::Nightly(options) => nightly::run(&options),
        XtaskVerb::Rules(options) => rules::run(&repository::root(), &options),
        XtaskVerb::Header => header::run(),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
