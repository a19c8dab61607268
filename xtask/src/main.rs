//! Chores of the repository, as `cargo xtask VERB`.
//!
//! - `check`: everything that a change must pass. `.ci/run` calls exactly this.
//! - `times`: the tests of `check`, and how long each took.
//! - `quick`: format, rules, lints and unit tests of what changed; between two commits.
//! - `nightly`: checks that take too long for every change, within a time.
//! - `rules`: the repository's own rules, as far as a program can check them; part of `check`.
//! - `model`: the symbolic models of the handshake, by Verifpal; part of `nightly`.
//! - `header`: the C header of libd2tp, from its sources.
//! - `dist`: packages, and tests that they install, work and uninstall without a trace.

mod check;
mod dist;
mod header;
mod hung;
mod kills;
mod model;
mod msrv;
mod nightly;
mod processor_time;
mod quick;
mod repository;
mod rules;
mod second_attempt;
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
    /// Format, lints, tests, documentation, rules: everything that a change must pass
    Check,
    /// The tests of `check` alone, and how long they took: of each program also how long a core was busy, and the
    /// 40 longest tests
    Times,
    /// What changed and what depends on it: format, rules, lints, unit tests, a few random scenarios
    Quick(quick::QuickOptions),
    /// Checks that take longer, within a time: random scenarios, kill points, fuzzing, Miri, mutants, sanitizers, …
    Nightly(nightly::NightlyOptions),
    /// The repository's own rules, as far as a program can check them: folders, dependencies,
    /// circles of files, type names, doc comments, sleeping tests, unsafe code, parsers, exposure of units; the MUSTs of docs/protocol.md
    /// and the promises of docs/security.md and their tests
    Rules(rules::RulesOptions),
    /// The symbolic models in docs/model, checked by Verifpal: each promise holds, and each attack is found
    /// where a protection is taken out
    Model,
    /// Generate edge/capi/include/d2tp.h from the sources of libd2tp
    Header,
    /// Make packages: .deb, static tarball, OCI image, wheel, npm package, Go module, SBOM
    /// (docs/packaging.md); with --try, install and use them in a fresh Debian
    Dist(dist::DistOptions),
}

fn main() -> ExitCode {
    let outcome = match XtaskCli::parse().verb {
        XtaskVerb::Check => check::run(),
        XtaskVerb::Times => check::times(),
        XtaskVerb::Quick(options) => quick::run(&options),
        XtaskVerb::Nightly(options) => nightly::run(&options),
        XtaskVerb::Rules(options) => rules::run(&repository::root(), &options),
        XtaskVerb::Model => model::run(),
        XtaskVerb::Header => header::run(),
        XtaskVerb::Dist(options) => dist::run(&options),
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
