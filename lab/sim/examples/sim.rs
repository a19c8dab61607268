//! The verb `cedos sim` alone, without the rest of the program, so that it builds quickly.

#[path = "../../../lab/cli/src/verbs/foresee.rs"]
mod foresee;
#[path = "../../../lab/cli/src/repro/plot.rs"]
#[allow(dead_code, reason = "the other rows draw more")]
mod plot;
#[path = "../../../lab/cli/src/verbs/score.rs"]
mod score;
#[path = "../../../lab/cli/src/verbs/sim.rs"]
mod sim;
mod repro {
    pub(crate) use crate::plot;
}

use clap::Parser;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    sim: sim::SimArgs,
}

fn main() -> anyhow::Result<std::process::ExitCode> {
    sim::run(Cli::parse().sim)
}
