//! `cedos demo`: the main job on networks of this program's own making, in under a minute.

use cedos_terminal::{print_stderr, print_stdout};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use super::lab::CANCELLED;
use crate::demo;

/// Watch a download survive lost Wi-Fi, a new address and an outage, beside plain TCP
///
/// Needs no root and no network: origin, proxy and device run in network namespaces joined by emulated
/// links; where the system forbids namespaces, in this process, with the same links between loopback
/// sockets. Exit codes: 0 complete, on time, and at most 1 % sent twice; 1 not; 3 interrupted.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Print one JSON object at the end
    #[arg(long)]
    json: bool,
    /// Use loopback sockets even where namespaces are allowed
    #[arg(long, hide = true)]
    without_namespaces: bool,
    /// Run the first flow and the links of the scenario in FILE instead
    #[arg(long, hide = true, value_name = "FILE")]
    scenario: Option<PathBuf>,
}

/// Carries out `cedos demo`. Must be called before the program starts threads.
///
/// # Errors
/// The demonstration could not be run.
pub fn run(args: &DemoArgs) -> anyhow::Result<ExitCode> {
    let summary = demo::run(args.without_namespaces, args.scenario.as_deref())?;
    if args.json {
        print_stdout(&serde_json::to_string(&summary)?);
    }
    print_stderr(&format!("{summary}"));
    Ok(match summary.holds() {
        true => ExitCode::SUCCESS,
        false if summary.interrupted => ExitCode::from(CANCELLED),
        false => ExitCode::FAILURE,
    })
}
