//! `cedos sim score TRACE… [--jobs FILE] [--policy NAME] [--json] [--dump-optimum FILE] …`:
//! evaluates a policy on recorded links, compared with the clairvoyant optimum.

use crate::repro::plot::{self, Chart, Series};
use anyhow::{Context, anyhow, bail};
use cedos_lab_link::Span;
use cedos_lab_link::trace::Trace;
use cedos_lab_scenario::TextTable;
use cedos_lab_sim::score::altered;
use cedos_lab_sim::score::course::{self, JobDirection, LinkCourse};
use cedos_lab_sim::score::jobs::{self, JobMix, MIXES, ScoreJob};
use cedos_lab_sim::score::pledge;
use cedos_lab_sim::score::sheet::{self, ScoreCase, ScoreFigures, ScoreRow};
use cedos_terminal::{print_stderr, print_stdout};
use clap::{Args, ValueEnum};
use d2tp_sched::SchedulerMode;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The number of jobs in a drawn set, unless they are alone.
const JOBS: usize = 3;

/// The policies that are compared if none is named.
const POLICIES: [&str; 5] = [
    "wifi-only",
    "wifi-first",
    "both-always",
    "algorithm-1",
    "d2sched",
];

/// Play jobs with deadlines over recorded links and compare with the clairvoyant optimum.
///
/// Exit codes: 0 played, 1 no trace to play or a file that cannot be read, 2 usage.
#[derive(Debug, Args)]
pub struct ScoreArgs {
    /// Traces: CSV files, `t_s,iface,up,down_mbps,up_mbps,rtt_ms,loss`.
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// Jobs for each trace: CSV, `arrival_s,size_bytes,deadline_s`, the deadline in seconds from the job's
    /// arrival; drawn if not given.
    #[arg(long, value_name = "FILE")]
    jobs: Option<PathBuf>,
    /// Only this policy: wifi-only, wifi-first, both-always, algorithm-1, algorithm-1+50 (a margin of
    /// 50 % of the time needed), d2sched. May be given more than once; all of them if not given.
    #[arg(long = "policy", value_name = "NAME", value_parser = policy)]
    policies: Vec<(String, SchedulerMode)>,
    /// The first seed of the jobs.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Sets of jobs drawn for each trace, three each, with a seed each.
    #[arg(long, default_value_t = 1)]
    sets: u64,
    /// How jobs are drawn: mixed, large or short; see docs/repro/score.md.
    #[arg(long, default_value = MIXES[0].name, value_parser = mix)]
    mix: JobMix,
    /// Make each set a single job.
    #[arg(long)]
    alone: bool,
    /// Do not tell policies the sizes of jobs.
    #[arg(long = "unsized", conflicts_with = "promises")]
    untold: bool,
    /// Jobs are uploads.
    #[arg(long)]
    uploads: bool,
    /// Change the traces first.
    #[arg(long, value_name = "HOW")]
    altered: Option<TraceChange>,
    /// Draw sizes, promise each a time at 90 %, and count how many finish by then.
    #[arg(long, conflicts_with_all = ["jobs", "policies", "dump_optimum", "plot"])]
    promises: bool,
    /// Make a forecast for each drawn job this many seconds after its arrival, and compare the
    /// forecast probability of success with the share of successes.
    #[arg(long, value_name = "SECONDS", conflicts_with_all = ["jobs", "policies", "dump_optimum", "plot", "promises"])]
    calibration: Option<f64>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Write the optimum's solutions to this file, as JSON, for another solver to check.
    #[arg(long, value_name = "FILE")]
    dump_optimum: Option<PathBuf>,
    /// Draw the figures into this file, an SVG; of a single set, bytes by link over time under each policy.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum TraceChange {
    /// Reversed in time.
    Reversed,
    /// Free links shifted in time by half the length of the trace.
    Apart,
    /// Free links combined with the metered ones of the next trace.
    Recombined,
}

fn policy(name: &str) -> Result<(String, SchedulerMode), String> {
    let mode = match name {
        "wifi-only" => SchedulerMode::FreeOnly,
        "wifi-first" => SchedulerMode::FreeFirst,
        "both-always" => SchedulerMode::Always,
        "d2sched" => SchedulerMode::Forecast,
        "algorithm-1" => SchedulerMode::AlgorithmOne { margin: 0.0 },
        other => {
            let percent = other
                .strip_prefix("algorithm-1+")
                .and_then(|percent| percent.parse::<u32>().ok())
                .ok_or_else(|| format!("one of {}, algorithm-1+PERCENT", POLICIES.join(", ")))?;
            SchedulerMode::AlgorithmOne {
                margin: f64::from(percent) / 100.0,
            }
        }
    };
    Ok((name.to_owned(), mode))
}

fn mix(name: &str) -> Result<JobMix, String> {
    let names: Vec<&str> = MIXES.iter().map(|mix| mix.name).collect();
    let found = MIXES.into_iter().find(|mix| mix.name == name);
    found.ok_or_else(|| format!("one of {}", names.join(", ")))
}

/// Carries out `cedos sim score`.
///
/// # Errors
/// A file cannot be read or written.
pub fn run(args: &ScoreArgs) -> anyhow::Result<ExitCode> {
    let recorded = recorded(args)?;
    if args.promises {
        return promises(args, &recorded);
    }
    if let Some(after_s) = args.calibration {
        return calibration(args, &recorded, Span::from_secs_f64(after_s));
    }
    let mut cases = cases(args, &recorded)?;
    cases.iter_mut().for_each(|case| case.told = !args.untold);
    let policies = if args.policies.is_empty() {
        let all = POLICIES.iter().map(|name| policy(name));
        all.collect::<Result<_, _>>().map_err(|why| anyhow!(why))?
    } else {
        args.policies.clone()
    };
    let mut rows = Vec::new();
    for case in &cases {
        rows.extend(policies.iter().map(|(name, mode)| case.score(name, *mode)));
    }
    let figures = sheet::figures(&rows);
    if let Some(file) = &args.dump_optimum {
        let solutions: Vec<Value> = cases.iter().map(solution).collect();
        write(file, &serde_json::to_string(&solutions)?)?;
    }
    if let Some(file) = &args.plot {
        let charts = match (&cases[..], &policies[..]) {
            ([case], policies) => policies.iter().map(|policy| course(case, policy)).collect(),
            _ => charts(&cases, &rows, &figures),
        };
        write(file, &plot::picture(&charts))?;
    }
    if args.json {
        print_stdout(&json!({ "rows": rows, "figures": figures }).to_string());
    } else {
        print_rows(&rows);
        print_figures(&figures);
    }
    Ok(ExitCode::SUCCESS)
}

fn write(file: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(file, text).with_context(|| format!("{}", file.display()))
}

/// The traces by name, altered if requested.
fn recorded(args: &ScoreArgs) -> anyhow::Result<Vec<(String, Vec<LinkCourse>)>> {
    let way = if args.uploads {
        JobDirection::Up
    } else {
        JobDirection::Down
    };
    let mut all = Vec::new();
    for file in &args.traces {
        let shown = file.display();
        let text = std::fs::read_to_string(file).with_context(|| format!("{shown}"))?;
        let trace = Trace::from_csv(&text).with_context(|| format!("{shown}"))?;
        if args.uploads && !sends(&trace) {
            print_stderr(&format!(
                "{shown}: it has no uplink rates (up_mbps); skipped"
            ));
            continue;
        }
        let name = file.file_stem().unwrap_or_default().to_string_lossy();
        all.push((name.into_owned(), course::courses(&trace, way)));
    }
    let changed = |n: usize| {
        let (name, courses) = &all[n];
        let (next, others) = &all[(n + 1) % all.len()];
        match args.altered {
            None => (name.clone(), courses.clone()),
            Some(TraceChange::Reversed) => {
                let reversed = courses.iter().map(altered::reversed).collect();
                (format!("{name}~reversed"), reversed)
            }
            Some(TraceChange::Apart) => (format!("{name}~apart"), altered::apart(courses)),
            Some(TraceChange::Recombined) => (
                format!("{name}+{next}"),
                altered::recombined(courses, others),
            ),
        }
    };
    Ok((0..all.len()).map(changed).collect())
}

/// Whether any link of the trace carried data from the device.
fn sends(trace: &Trace) -> bool {
    let mut rows = trace.ifaces().filter_map(|name| trace.rows(name)).flatten();
    rows.any(|row| row.up_bps.is_some_and(|rate| rate > 0))
}

fn cases(
    args: &ScoreArgs,
    recorded: &[(String, Vec<LinkCourse>)],
) -> anyhow::Result<Vec<ScoreCase>> {
    let given = match &args.jobs {
        Some(file) => {
            let text = std::fs::read_to_string(file);
            let text = text.with_context(|| format!("{}", file.display()))?;
            let jobs = jobs::from_csv(&text);
            Some(jobs.map_err(|why| anyhow!("{}: {why}", file.display()))?)
        }
        None => None,
    };
    let mut cases = Vec::new();
    for (name, courses) in recorded {
        if let Some(jobs) = &given {
            cases.push(ScoreCase::new(
                name,
                args.seed,
                courses.clone(),
                jobs.clone(),
            ));
            continue;
        }
        for seed in args.seed..args.seed.saturating_add(args.sets) {
            // Each trace has its own set, so that drawing for one does not affect another.
            let own = seed ^ name.bytes().fold(0, mixed);
            let count = if args.alone { 1 } else { JOBS };
            match jobs::draw(courses, args.mix, count, own) {
                Some(jobs) => cases.push(ScoreCase::new(name, seed, courses.clone(), jobs)),
                None => print_stderr(&format!("{name}: no set of jobs is feasible; skipped")),
            }
        }
    }
    if cases.is_empty() {
        bail!("no trace to play");
    }
    Ok(cases)
}

/// A step of FNV-1a.
fn mixed(sum: u64, byte: u8) -> u64 {
    (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
}

fn promises(args: &ScoreArgs, recorded: &[(String, Vec<LinkCourse>)]) -> anyhow::Result<ExitCode> {
    let mut kept = pledge::PromiseOutcome::default();
    for (name, courses) in recorded {
        let own = args.seed ^ name.bytes().fold(0, mixed);
        kept += pledge::keep(courses, args.sets, own);
    }
    if args.json {
        print_stdout(&serde_json::to_string(&kept)?);
    } else {
        print_stdout(&format!(
            "{} promises at {:.0} %: {} kept, {:.1} %",
            kept.promised,
            pledge::AT * 100.0,
            kept.kept,
            100.0 * kept.share()
        ));
    }
    Ok(ExitCode::SUCCESS)
}

fn calibration(
    args: &ScoreArgs,
    recorded: &[(String, Vec<LinkCourse>)],
    after: Span,
) -> anyhow::Result<ExitCode> {
    let mut bins = [pledge::CalibrationBin::default(); 10];
    for (name, courses) in recorded {
        let own = args.seed ^ name.bytes().fold(0, mixed);
        let more = pledge::calibrate(courses, args.sets, own, after);
        bins.iter_mut()
            .zip(more)
            .for_each(|(bin, more)| *bin += more);
    }
    if args.json {
        print_stdout(&serde_json::to_string(&bins)?);
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = TextTable::new(["forecast", "jobs", "on time"]);
    for bin in bins.iter().filter(|bin| bin.forecasts > 0) {
        table.row([
            format!("{:.1} %", 100.0 * bin.forecast()),
            bin.forecasts.to_string(),
            format!("{:.1} %", 100.0 * bin.share()),
        ]);
    }
    print_stdout(&table.to_text());
    Ok(ExitCode::SUCCESS)
}

/// The optimum's problem and solution, for another solver to check.
fn solution(case: &ScoreCase) -> Value {
    let job = |job: &ScoreJob| {
        json!({
            "arrival_s": job.arrival.as_secs_f64(),
            "size_bytes": job.bytes,
            "deadline_s": job.deadline.as_secs_f64(),
        })
    };
    let mut moments: Vec<_> = case
        .jobs
        .iter()
        .flat_map(|j| [j.arrival, j.due()])
        .collect();
    moments.sort_unstable();
    moments.dedup();
    let mut rooms = Vec::new();
    for pair in moments.windows(2) {
        for course in &case.courses {
            rooms.push(json!({
                "link": course.name, "class": format!("{:?}", course.class).to_lowercase(),
                "from_s": pair[0].as_secs_f64(), "to_s": pair[1].as_secs_f64(),
                "bytes": course.bytes_between(pair[0], pair[1]),
            }));
        }
    }
    let parts = case.optimum.iter().flat_map(|optimum| &optimum.parts);
    let part = |part: &cedos_lab_sim::score::optimum::JobShare| {
        json!({
            "job": part.job, "link": case.courses[part.link].name,
            "from_s": part.from.as_secs_f64(), "to_s": part.to.as_secs_f64(),
            "bytes": part.bytes,
        })
    };
    json!({
        "trace": case.trace, "seed": case.seed,
        "jobs": case.jobs.iter().map(job).collect::<Vec<_>>(),
        "rooms": rooms,
        "metered_bytes": case.optimum.as_ref().map(|optimum| optimum.metered_bytes),
        "parts": parts.map(part).collect::<Vec<_>>(),
    })
}

fn print_rows(rows: &[ScoreRow]) {
    let mut table = TextTable::with_notes([
        "trace",
        "seed",
        "policy",
        "met",
        "bytes",
        "metered",
        "late",
        "optimum",
        "avoidable",
        "",
    ]);
    for row in rows {
        let optimum = row.optimum_metered_bytes.map(|bytes| bytes.to_string());
        let is_judged = row.feasible > 0;
        table.row([
            row.trace.clone(),
            row.seed.to_string(),
            row.policy.clone(),
            format!("{} of {}", row.met, row.jobs),
            row.bytes.to_string(),
            row.metered_bytes.to_string(),
            row.late_bytes.to_string(),
            optimum.unwrap_or_else(|| "none".to_owned()),
            row.avoidable_share.map_or_else(String::new, percent),
            if is_judged { "" } else { "not judged" }.to_owned(),
        ]);
    }
    print_stdout(&table.to_text());
}

fn print_figures(figures: &[ScoreFigures]) {
    let mut table = TextTable::new([
        "policy",
        "sets",
        "jobs",
        "missed",
        "avoidable",
        "95th",
        "offloaded",
    ]);
    for row in figures {
        table.row([
            row.policy.clone(),
            row.sets.to_string(),
            row.jobs.to_string(),
            percent(row.missed),
            percent(row.avoidable_mean),
            percent(row.avoidable_p95),
            percent(row.offloaded),
        ]);
    }
    print_stdout(&format!("\n{}", table.to_text()));
}

fn percent(share: f64) -> String {
    format!("{:.2} %", 100.0 * share)
}

/// One set with one policy: bytes by link over time, and the bytes due over time.
fn course(case: &ScoreCase, (policy, mode): &(String, SchedulerMode)) -> Chart {
    let course = case.course(*mode);
    let mega = |bytes: f64| bytes * 1e-6;
    let mut series: Vec<Series> = (case.courses.iter().enumerate())
        .map(|(n, link)| {
            let points = course.iter();
            let points = points.map(|(at, carried)| (at.as_secs_f64(), mega(carried[n])));
            Series::line(&link.name, points.collect())
        })
        .collect();
    let all = course.iter();
    let all = all.map(|(at, carried)| (at.as_secs_f64(), mega(carried.iter().sum())));
    series.push(Series::line("all links", all.collect()));
    let mut jobs: Vec<&ScoreJob> = case.jobs.iter().collect();
    jobs.sort_by_key(|job| job.due());
    let mut due = vec![(0.0, 0.0)];
    for job in jobs {
        let (at, before) = (job.due().as_secs_f64(), due[due.len() - 1].1);
        due.extend([(at, before), (at, before + mega(job.bytes as f64))]);
    }
    series.push(Series::line("due by then", due));
    Chart {
        title: policy.clone(),
        x: "s".to_owned(),
        y: "MB".to_owned(),
        series,
    }
}

/// Charts: missed against avoidable; the share of free links against the jobs' deadlines.
fn charts(cases: &[ScoreCase], rows: &[ScoreRow], figures: &[ScoreFigures]) -> Vec<Chart> {
    let dot = |f: &ScoreFigures| {
        let at = (100.0 * f.avoidable_mean, 100.0 * f.missed);
        Series::dots(&f.policy, vec![at])
    };
    let mut offload = Vec::new();
    let each = rows.len() / cases.len();
    for (n, of) in figures.iter().enumerate() {
        let point = |(case, row): (&ScoreCase, &ScoreRow)| {
            let longest = case.jobs.iter().map(|job| job.deadline.as_secs_f64());
            let delivered = row.bytes.saturating_sub(row.late_bytes).max(1) as f64;
            let share = 100.0 * (1.0 - row.metered_bytes as f64 / delivered);
            (longest.fold(0.0, f64::max), share)
        };
        let of_policy = rows.iter().skip(n).step_by(each);
        let judged = cases
            .iter()
            .zip(of_policy)
            .filter(|(_, row)| row.feasible > 0);
        offload.push(Series::line(
            &of.policy,
            by_deadline(judged.map(point).collect()),
        ));
    }
    vec![
        Chart {
            title: "deadlines missed, bytes avoidable".to_owned(),
            x: "avoidable share, %".to_owned(),
            y: "missed, %".to_owned(),
            series: figures.iter().map(dot).collect(),
        },
        Chart {
            title: "what free links carried".to_owned(),
            x: "longest deadline, log10 s".to_owned(),
            y: "% of what was delivered".to_owned(),
            series: offload,
        },
    ]
}

/// The means of groups whose deadlines are within the same third of a decade.
fn by_deadline(mut points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    let class = |s: f64| (3.0 * s.max(1.0).log10()).floor() as i64;
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
        .chunk_by(|a, b| class(a.0) == class(b.0))
        .map(|chunk| {
            let mean = chunk.iter().map(|p| p.1).sum::<f64>() / chunk.len() as f64;
            ((class(chunk[0].0) as f64 + 0.5) / 3.0, mean)
        })
        .collect()
}
