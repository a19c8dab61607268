//! The verbs of `cedos` in a program of this package, because its tests start `agent`.

use std::process::ExitCode;

use cedos::ProductVerb;
use clap::Parser;

#[derive(Debug, Parser)]
struct VerbProgram {
    #[command(subcommand)]
    verb: ProductVerb,
}

fn main() -> ExitCode {
    VerbProgram::parse().verb.run()
}
