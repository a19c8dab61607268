//! `cedos sim run FILE [--seed N] [--json] [--log FILE]`: a scenario in virtual time.
//! `cedos sim fuzz --seeds N [--salt S] [--json] [--require-coverage]`: scenarios drawn from seeds,
//! in search of faults.
//! `cedos sim vary FILE --seeds N [--first K]`: a scenario at other times, drawn from seeds.
//! `cedos sim score TRACE…`: a policy on recorded links (`score.rs`).
//! `cedos sim foresee TRIP…`: holes on ways travelled again (`foresee.rs`).

use super::foresee::{self, ForeseeArgs};
use super::score::{self, ScoreArgs};
use anyhow::Context;
use cedos_lab_scenario::{RunReport, Scenario};
use cedos_lab_sim::coverage::CoveragePair;
use cedos_lab_sim::{fuzz, vary};
use cedos_terminal::{print_stderr, print_stdout};
use clap::{Args, Subcommand};
use std::collections::BTreeMap;
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
    /// Run a scenario.
    ///
    /// Exit codes: 0 every expectation holds, 1 not, or no such scenario, 2 usage.
    Run(SimRunArgs),
    /// Run scenarios drawn from seeds.
    ///
    /// Exit codes: 0 all of them complete, 1 not, 2 usage.
    Fuzz(FuzzArgs),
    /// Run a scenario with other times, drawn from seeds.
    ///
    /// Exit codes: 0 every flow is whole, connects within 2.5 s and is never silent for longer than 1.5 s, 1 not,
    /// 2 usage.
    Vary(VaryArgs),
    Score(Box<ScoreArgs>),
    Foresee(ForeseeArgs),
}

#[derive(Debug, Args)]
struct SimRunArgs {
    /// The scenario file; see docs/scenarios.md.
    file: PathBuf,
    /// Use this seed instead of the file's.
    #[arg(long)]
    seed: Option<u64>,
    /// Use the times that `vary` draws from this seed, and its expectations, instead of the file's.
    #[arg(long, value_name = "SEED", conflicts_with = "seed")]
    times: Option<u64>,
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
    /// Fail if a fault never hit a state that it can hit.
    #[arg(long)]
    require_coverage: bool,
    /// Write the scenarios that fail into this folder.
    #[arg(long, value_name = "FOLDER")]
    keep: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct VaryArgs {
    /// The scenario file; see docs/scenarios.md.
    file: PathBuf,
    /// How many seeds to try.
    #[arg(long, default_value_t = 100)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    first: u64,
}

/// Carries out `cedos sim …`.
///
/// # Errors
/// The scenario cannot be read or simulated, or an invariant of the core is violated.
pub fn run(args: SimArgs) -> anyhow::Result<ExitCode> {
    match args.verb {
        SimVerb::Run(args) => run_one(&args),
        SimVerb::Fuzz(args) => run_many(&args),
        SimVerb::Vary(args) => vary_one(&args),
        SimVerb::Score(args) => score::run(&args),
        SimVerb::Foresee(args) => foresee::run(&args),
    }
}

fn run_one(args: &SimRunArgs) -> anyhow::Result<ExitCode> {
    let mut scenario = Scenario::load(&args.file)?;
    if let Some(seed) = args.seed {
        scenario.seed = seed;
    }
    if let Some(seed) = args.times {
        scenario = vary::varied(&scenario, seed);
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
            let option = args.times.map_or("seed", |_| "times");
            let seed = scenario.seed;
            format!("repeat with: cedos sim run {file} --{option} {seed}")
        })?;
    if let Some(log) = &mut log {
        log.flush().context("the log cannot be written")?;
    }
    if args.json {
        print_stdout(&serde_json::to_string(&outcome.report)?);
    } else {
        print_table(&outcome.report);
        print_stdout(&format!(
            "ended at {:.3} s after {} steps",
            outcome.ended_s, outcome.steps
        ));
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
    let seeds = args.first..args.first.saturating_add(args.seeds);
    let tried = fuzz::try_seeds(seeds, args.salt, |failing| {
        print_stderr(&format!("seed {}: {}", failing.seed, failing.what));
    });
    if let Some(folder) = &args.keep {
        for failing in &tried.failing {
            let path = folder.join(format!("fuzz-{}-{}.toml", failing.salt, failing.seed));
            std::fs::write(&path, fuzz::scenario_text(failing.seed, failing.salt))
                .with_context(|| format!("{}", path.display()))?;
        }
    }
    let missed = tried.coverage.missed();
    if args.json {
        print_stdout(&fuzz_json(args, &tried).to_string());
    } else {
        for failing in &tried.failing {
            print_stdout(&format!("{}\n  {}", failing.replay(), failing.what));
        }
        print_stdout(&format!(
            "{} of {} seeds failed; {} pairs of fault and state never hit",
            tried.failing.len(),
            args.seeds,
            missed.len()
        ));
    }
    let mut good = tried.failing.is_empty();
    if args.require_coverage {
        for pair in &missed {
            print_stderr(&format!(
                "never tried: {} × {}",
                pair.fault.word(),
                pair.state_word()
            ));
        }
        for pair in tried.coverage.surprising() {
            let (fault, state) = (pair.fault.word(), pair.state_word());
            print_stderr(&format!("listed as impossible but hit: {fault} × {state}"));
            good = false;
        }
        good &= missed.is_empty();
    }
    Ok(if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn vary_one(args: &VaryArgs) -> anyhow::Result<ExitCode> {
    let scenario = Scenario::load(&args.file)?;
    let file = args.file.display();
    let seeds = args.first..args.first.saturating_add(args.seeds);
    let run = |seed| vary::try_varied(&scenario, seed);
    let tried = fuzz::try_each(seeds, 0, run, |failing| {
        let (seed, what) = (failing.seed, &failing.what);
        print_stdout(&format!("cedos sim run {file} --times {seed}\n  {what}"));
    });
    print_stdout(&format!(
        "{} of {} seeds failed",
        tried.failing.len(),
        args.seeds
    ));
    Ok(match tried.failing.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// The results of many seeds as JSON.
fn fuzz_json(args: &FuzzArgs, tried: &fuzz::FuzzResult) -> serde_json::Value {
    let failing = tried.failing.iter().map(|f| {
        serde_json::json!({
            "seed": f.seed, "salt": f.salt, "what": f.what, "replay": f.replay(),
        })
    });
    let named = |pair: &CoveragePair| serde_json::json!({ "fault": pair.fault.word(), "state": pair.state_word() });
    let (mut matrix, mut impossible) = (BTreeMap::new(), Vec::new());
    for pair in CoveragePair::all() {
        if let Some(why) = pair.impossible() {
            let mut pair = named(&pair);
            pair["why"] = why.into();
            impossible.push(pair);
            continue;
        }
        let row: &mut BTreeMap<_, _> = matrix.entry(pair.fault.word()).or_default();
        row.insert(pair.state_word(), tried.coverage.of(pair));
    }
    serde_json::json!({
        "seeds": args.seeds,
        "first": args.first,
        "salt": args.salt,
        "violations": tried.failing.len(),
        "failing": failing.collect::<Vec<_>>(),
        "coverage": matrix,
        "missed": tried.coverage.missed().iter().map(named).collect::<Vec<_>>(),
        "surprising": tried.coverage.surprising().iter().map(named).collect::<Vec<_>>(),
        "impossible": impossible,
    })
}

fn print_table(report: &RunReport) {
    for flow in &report.flows {
        let when = flow
            .finished_s
            .map_or("not finished".to_owned(), |at| format!("done at {at:.3} s"));
        let by_link: Vec<_> = flow
            .bytes_by_link
            .iter()
            .map(|(link, n)| format!("{link} {n}"))
            .collect();
        print_stdout(&format!(
            "flow {:8} {:>12} bytes  {when}  {}  {} twice",
            flow.id,
            flow.bytes,
            by_link.join(" "),
            flow.duplicate_bytes
        ));
    }
    for link in &report.links {
        print_stdout(&format!(
            "link {:8} {:8} {:>12} bytes down {:>12} up   {} packets while down",
            link.name, link.class, link.bytes_down, link.bytes_up, link.packets_while_down
        ));
    }
    for switch in &report.switches {
        print_stdout(&format!(
            "switch at {:.3} s  {} to {}  silent for {:.1} ms",
            switch.at_s, switch.from, switch.to, switch.silence_ms
        ));
    }
    for expectation in &report.expectations {
        let (mark, why) = if expectation.holds {
            ("holds", "")
        } else {
            ("FAILS", &*expectation.why)
        };
        print_stdout(&format!("{mark}  {}  {why}", expectation.text));
    }
}
