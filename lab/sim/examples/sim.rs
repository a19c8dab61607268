//! The verb `cedos sim` alone, without the rest of the program: quick to build.

#[path = "../../../apps/cedos/src/verbs/sim.rs"]
mod sim;

use clap::Parser;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    sim: sim::SimArgs,
}

fn main() -> anyhow::Result<std::process::ExitCode> {
    sim::run(Cli::parse().sim)
}
