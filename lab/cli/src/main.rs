//! The `cedos-lab` command: emulated and simulated networks, and the reproduction of the papers'
//! results. It also has the verbs of `cedos`, which it runs on those networks.

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod demo;
mod lab;
mod repro;
mod verbs;

use std::process::ExitCode;

use cedos::help::with_examples_and_groups;
use cedos::{CompletionsArgs, ManPagesArgs, ProductVerb, exit_code, parse_arguments, usage_exit};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

/// The laboratory of Cedos: emulated and simulated networks, and the results of the papers.
#[derive(Debug, Parser)]
#[command(name = "cedos-lab", version)]
struct LabCli {
    #[command(subcommand)]
    verb: LaboratoryVerb,
}

/// The examples in the overview.
const OVERVIEW_EXAMPLES: &str =
    "Examples:\n  cedos-lab demo\n  cedos-lab lab run train.toml --client get";

#[derive(Debug, Subcommand)]
enum LaboratoryVerb {
    Lab(verbs::lab::LabArgs),
    Demo(verbs::demo::DemoArgs),
    Sim(verbs::sim::SimArgs),
    /// Measure speed and CPU cost beside other transports
    Bench(verbs::bench::BenchArgs),
    Repro(verbs::repro::ReproArgs),
    Completions(CompletionsArgs),
    #[command(hide = true)]
    ManPages(ManPagesArgs),
    #[command(flatten)]
    Product(ProductVerb),
}

fn main() -> ExitCode {
    let cli = match cedos_agent::fetch::jobs::handed_over_arguments() {
        Some(arguments) => parse_arguments(arguments),
        None => parse(),
    };
    let cli = match cli {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let (verb, result) = match cli.verb {
        LaboratoryVerb::Lab(args) => ("lab", verbs::lab::run(args)),
        LaboratoryVerb::Demo(args) => ("demo", verbs::demo::run(&args)),
        LaboratoryVerb::Sim(args) => ("sim", verbs::sim::run(args)),
        LaboratoryVerb::Bench(args) => ("bench", verbs::bench::run(&args)),
        LaboratoryVerb::Repro(args) => ("repro", verbs::repro::run(&args)),
        LaboratoryVerb::Completions(args) => {
            args.run(laboratory_command());
            ("completions", Ok(ExitCode::SUCCESS))
        }
        LaboratoryVerb::ManPages(args) => (
            "man-pages",
            args.run(laboratory_command(), &[])
                .map(|()| ExitCode::SUCCESS),
        ),
        LaboratoryVerb::Product(verb) => return verb.run(),
    };
    exit_code(&format!("cedos {verb}"), result)
}

/// The command line for help: with only the laboratory's verbs. `cedos --help` has the others.
fn laboratory_command() -> clap::Command {
    let mut command = LabCli::command();
    let product = ProductVerb::augment_subcommands(clap::Command::new("cedos"));
    for verb in product.get_subcommands() {
        command = command.mut_subcommand(verb.get_name(), |verb| verb.hide(true));
    }
    with_examples_and_groups(command).before_help(OVERVIEW_EXAMPLES)
}

fn parse() -> Result<LabCli, ExitCode> {
    let mut command = laboratory_command();
    let matches = command.clone().try_get_matches();
    matches
        .and_then(|matches| LabCli::from_arg_matches(&matches))
        .map_err(|error| usage_exit(&error.format(&mut command)))
}

#[cfg(test)]
mod tests {
    use cedos::help::{EXAMPLES, verbs_without_examples};

    use super::*;

    #[test]
    fn every_verb_has_two_examples_and_they_are_accepted() {
        assert_eq!(verbs_without_examples(&laboratory_command()), [""; 0]);
        let laboratory = |verb: &str| {
            let first = verb.split(' ').next().unwrap_or_default();
            ["lab", "demo", "sim", "repro"].contains(&first)
        };
        let examples = EXAMPLES.iter().filter(|(verb, _)| laboratory(verb));
        for example in examples.flat_map(|(_, examples)| examples) {
            let words = example.split_whitespace();
            let read = LabCli::try_parse_from(words);
            assert!(read.is_ok(), "{example}: {}", read.unwrap_err());
        }
        let help = laboratory_command().render_help().to_string();
        assert!(help.starts_with("Examples:\n  cedos-lab demo"), "{help}");
    }
}
