//! `cedos sim run FILE [--seed N] [--json] [--log FILE]`: a scenario in virtual time.
//! `cedos sim fuzz --seeds N [--salt S] [--json]`: scenarios drawn from seeds, in search of faults.

use anyhow::Context;
use cedos_lab_scenario::{Report, Scenario};
use cedos_lab_sim::fuzz;
use clap::{Args, Subcommand};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::process::ExitCode;

/// Simulate networks in virtual time: hours in seconds, the same for the same seed.
#[derive(Debug, Args)]
pub struct SimArgs {
    #[command(subcommand)]
    verb: SimVerb,
}

#[derive(Debug, Subcommand)]
enum SimVerb {
    /// Run a scenario; exit code 0 if every expectation holds.
    Run(RunArgs),
    /// Run scenarios drawn from seeds; exit code 0 if all of them complete.
    Fuzz(FuzzArgs),
}

#[derive(Debug, Args)]
struct RunArgs {
    /// The scenario file; see docs/scenarios.md.
    file: PathBuf,
    /// Use this seed instead of the file's.
    #[arg(long)]
    seed: Option<u64>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Write every event and datagram to this file, a JSON object per line.
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct FuzzArgs {
    /// How many seeds to try.
    #[arg(long, default_value_t = 100)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Other scenarios for the same seeds.
    #[arg(long, default_value_t = 0)]
    salt: u64,
    /// Print one JSON object instead of lines.
    #[arg(long)]
    json: bool,
    /// Write the scenarios that fail into this folder.
    #[arg(long, value_name = "FOLDER")]
    keep: Option<PathBuf>,
}

/// Carry out `cedos sim …`.
///
/// # Errors
/// The scenario cannot be read or simulated, or an invariant of the core broke.
pub fn run(args: SimArgs) -> anyhow::Result<ExitCode> {
    match args.verb {
        SimVerb::Run(args) => run_one(&args),
        SimVerb::Fuzz(args) => run_many(&args),
    }
}

fn run_one(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let mut scenario = Scenario::load(&args.file)?;
    if let Some(seed) = args.seed {
        scenario.seed = seed;
    }
    let mut log = match &args.log {
        Some(path) => {
            let file = File::create(path).with_context(|| format!("{}", path.display()))?;
            Some(BufWriter::new(file))
        }
        None => None,
    };
    let outcome = cedos_lab_sim::run(&scenario, log.as_mut().map(|log| log as &mut dyn Write))
        .with_context(|| {
            let file = args.file.display();
            format!("repeat with: cedos sim run {file} --seed {}", scenario.seed)
        })?;
    if let Some(log) = &mut log {
        log.flush().context("the log cannot be written")?;
    }
    if args.json {
        println!("{}", serde_json::to_string(&outcome.report)?);
    } else {
        print_table(&outcome.report);
        println!(
            "ended at {:.3} s after {} steps",
            outcome.ended_s, outcome.steps
        );
    }
    Ok(if outcome.report.holds() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn run_many(args: &FuzzArgs) -> anyhow::Result<ExitCode> {
    if let Some(folder) = &args.keep {
        std::fs::create_dir_all(folder).with_context(|| format!("{}", folder.display()))?;
    }
    let mut failed = Vec::new();
    for seed in args.first..args.first.saturating_add(args.seeds) {
        let Err(fault) = fuzz::try_seed(seed, args.salt) else {
            continue;
        };
        if let Some(folder) = &args.keep {
            let path = folder.join(format!("fuzz-{}-{seed}.toml", args.salt));
            std::fs::write(&path, fuzz::scenario_text(seed, args.salt))
                .with_context(|| format!("{}", path.display()))?;
        }
        if !args.json {
            println!("seed {seed}: {fault}");
        }
        failed.push((seed, fault));
    }
    if args.json {
        let failed: Vec<_> = failed
            .iter()
            .map(|(seed, fault)| {
                let repeat = format!(
                    "cedos sim fuzz --first {seed} --seeds 1 --salt {} --keep .",
                    args.salt
                );
                serde_json::json!({ "seed": seed, "fault": fault, "repeat": repeat })
            })
            .collect();
        let report = serde_json::json!({
            "seeds": args.seeds, "first": args.first, "salt": args.salt, "failed": failed,
        });
        println!("{report}");
    } else {
        println!("{} of {} seeds failed", failed.len(), args.seeds);
    }
    Ok(if failed.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn print_table(report: &Report) {
    for flow in &report.flows {
        let when = flow
            .finished_s
            .map_or("not finished".to_owned(), |at| format!("done at {at:.3} s"));
        let by_link: Vec<_> = flow
            .bytes_by_link
            .iter()
            .map(|(link, n)| format!("{link} {n}"))
            .collect();
        println!(
            "flow {:8} {:>12} bytes  {when}  {}  {} twice",
            flow.id,
            flow.bytes,
            by_link.join(" "),
            flow.duplicate_bytes
        );
    }
    for link in &report.links {
        println!(
            "link {:8} {:8} {:>12} bytes down {:>12} up   {} packets while down",
            link.name, link.class, link.bytes_down, link.bytes_up, link.packets_while_down
        );
    }
    for switch in &report.switches {
        println!(
            "switch at {:.3} s  {} to {}  silent for {:.1} ms",
            switch.at_s, switch.from, switch.to, switch.silence_ms
        );
    }
    for expectation in &report.expectations {
        let (mark, why) = if expectation.holds {
            ("holds", "")
        } else {
            ("FAILS", &*expectation.why)
        };
        println!("{mark}  {}  {why}", expectation.text);
    }
}
