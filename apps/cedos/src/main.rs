//! The `cedos` command: one binary, one verb per file in `verbs/`.

mod get;
mod verbs;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Transfers that move between networks, sleep through outages and finish by the deadline.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Get(verbs::get::GetArgs),
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match Cli::parse().verb {
        Verb::Get(args) => verbs::get::run(args).await,
    }
}
