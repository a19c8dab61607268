//! Chores of the repository, as `cargo xtask VERB`.
//!
//! - `check`: everything a change must pass. The test command; `.ci/run` calls exactly this.
//! - `nightly`: what takes longer than a change can wait.
//! - `rules`: only the script check of `docs/protocol.md` and `docs/security.md`, part of `check`.

mod check;
mod hung;
mod kills;
mod msrv;
mod nightly;
mod promises;
mod rules;
mod seeds;
mod step;
mod totals;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Chores of the repository")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Format, lints, tests, documentation, rules: everything a change must pass
    Check,
    /// What takes longer: fuzzing, ignored tests, every feature
    Nightly(nightly::Options),
    /// Whether every MUST of docs/protocol.md is named in code and in a test, and every promise of
    /// docs/security.md has one
    Rules,
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().verb {
        Verb::Check => check::run(),
        Verb::Nightly(options) => nightly::run(&options),
        Verb::Rules => rules::check(&root()).map(|said| {
            println!("{said}");
            true
        }),
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

/// The repository's top folder.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask/ is in the repository")
        .to_owned()
}

/// Every file below `folder` with `extension`, without build output and hidden folders.
fn files_below(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let entry = entry?;
            let (path, name) = (entry.path(), entry.file_name());
            let hidden = name.to_string_lossy().starts_with('.');
            if entry.file_type()?.is_dir() {
                if !hidden && name != "target" {
                    folders.push(path);
                }
            } else if path.extension().is_some_and(|e| e == extension) {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}
