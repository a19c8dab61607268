//! The `cedos` command: the verbs of the product, and those of the laboratory if `cedos-lab` is in
//! the same folder.

#![deny(clippy::print_stdout, clippy::print_stderr)]

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use anyhow::anyhow;
use cedos::help::with_examples_and_groups;
use cedos::{
    CompletionsArgs, EXIT_CODES, ManPagesArgs, ProductVerb, companion_program, exit_code,
    parse_arguments,
};
use clap::{Args, CommandFactory, Parser, Subcommand};

/// Transfers that move between networks, sleep through outages and finish by the deadline.
#[derive(Debug, Parser)]
#[command(version, after_help = EXIT_CODES)]
struct CedosCommand {
    #[command(subcommand)]
    verb: CedosVerb,
}

#[derive(Debug, Subcommand)]
enum CedosVerb {
    #[command(flatten)]
    Product(ProductVerb),
    /// Watch a download survive lost Wi-Fi, a new address and an outage, beside plain TCP
    Demo(LaboratoryArgs),
    /// Run scenarios on emulated networks, by cedos-lab
    Lab(LaboratoryArgs),
    /// Run scenarios in virtual time, by cedos-lab
    Sim(LaboratoryArgs),
    /// Reproduce the papers' results, by cedos-lab
    Repro(LaboratoryArgs),
    /// Measure speed and CPU cost beside other transports, by cedos-lab
    Bench(LaboratoryArgs),
    Completions(CompletionsArgs),
    #[command(hide = true)]
    ManPages(ManPagesArgs),
}

/// Verbs that `cedos-lab` carries out and documents: `cedos-lab.1` is the page of that program.
const LABORATORY_VERBS: [&str; 5] = ["demo", "lab", "sim", "repro", "bench"];

/// What a verb of the laboratory is given: `cedos-lab` reads it.
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
struct LaboratoryArgs {
    /// The arguments of the verb: `--help` shows them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

fn main() -> ExitCode {
    let arguments = cedos_agent::fetch::jobs::handed_over_arguments();
    let arguments = arguments.unwrap_or_else(|| std::env::args_os().collect());
    let cli = match parse_arguments::<CedosCommand>(arguments) {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    match cli.verb {
        CedosVerb::Product(verb) => verb.run(),
        CedosVerb::Demo(args) => laboratory("demo", &args),
        CedosVerb::Lab(args) => laboratory("lab", &args),
        CedosVerb::Sim(args) => laboratory("sim", &args),
        CedosVerb::Repro(args) => laboratory("repro", &args),
        CedosVerb::Bench(args) => laboratory("bench", &args),
        CedosVerb::Completions(args) => {
            args.run(CedosCommand::command());
            exit_code("cedos completions", Ok(ExitCode::SUCCESS))
        }
        CedosVerb::ManPages(args) => exit_code(
            "cedos man-pages",
            args.run(
                with_examples_and_groups(CedosCommand::command()),
                &LABORATORY_VERBS,
            )
            .map(|()| ExitCode::SUCCESS),
        ),
    }
}

/// Becomes the `cedos-lab` beside this program; returns only where that cannot be.
fn laboratory(verb: &str, args: &LaboratoryArgs) -> ExitCode {
    let error = match companion_program::find("cedos-lab") {
        Ok(program) => {
            let error = Command::new(&program)
                .arg(verb)
                .args(&args.arguments)
                .exec();
            anyhow!("cannot run {}: {error}", program.display())
        }
        Err(error) => error,
    };
    exit_code(&format!("cedos {verb}"), Err(error))
}
