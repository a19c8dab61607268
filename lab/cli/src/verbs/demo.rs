//! `cedos demo`: the main job on networks of this program's own making, in under a minute.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use crate::demo;

/// Watch a download survive lost Wi-Fi, a new address and an outage, beside plain TCP
///
/// Needs no root and no network: origin, proxy and device are namespaces of this program's own,
/// joined by emulated links; where the system forbids namespaces they are parts of this process,
/// joined by the same models between loopback sockets. Exit codes: 0 whole, in
/// time, and at most 1 % sent twice; 1 not.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Print one JSON object at the end
    #[arg(long)]
    json: bool,
    /// Use loopback sockets even where namespaces are allowed
    #[arg(long, hide = true)]
    without_namespaces: bool,
    /// Show what happens in FILE instead: its first flow, its links
    #[arg(long, hide = true, value_name = "FILE")]
    scenario: Option<PathBuf>,
}

/// Carries out `cedos demo`. Must be called before the program starts threads.
///
/// # Errors
/// What kept the demonstration from being one.
pub fn run(args: &DemoArgs) -> anyhow::Result<ExitCode> {
    let summary = demo::run(args.without_namespaces, args.scenario.as_deref())?;
    if args.json {
        println!("{}", serde_json::to_string(&summary)?);
    }
    eprintln!("{summary}");
    Ok(if summary.holds() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
