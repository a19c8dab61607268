//! Kill points: `cedos get` or `cedos prox` is killed, or its disk fails, at a system call; it is
//! started again, and the result is checked against the recovery contract.
//!
//! ```text
//!   seed ─▶ KillPoint: program, call, N ─▶ origin ◀─ cedos prox ◀─ cedos get, one of them under strace
//!                                     │  killed: its disk is inspected, it is started again
//!                                     ▼
//!                                  ContractViolations: complete? repeated? confirmed data kept?
//! ```

mod disk;
mod judge;
mod origin;
mod point;
mod remains;
mod stage;
mod strace;
mod verdict;

use cedos_terminal::{print_stderr, print_stdout};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use origin::Origin;
use point::{KillEffect, KillFaultKind, KillFaults, KillPoint};
use stage::KillSetting;
use verdict::ContractViolations;

/// Draws for each requested point before a run gives up, because some points come too late in a
/// transfer to be reached.
const DRAWS_PER_POINT_MAX: u64 = 4;
/// The number of transfers at once, which mostly wait for the origin.
const AT_ONCE: usize = 12; // a guess: it keeps two cores busy

/// Options of `cedos lab kill`.
#[derive(Debug, clap::Args)]
pub struct KillArgs {
    /// How many points to try
    #[arg(long, default_value_t = 40)]
    points: u64,
    /// The seed from which points are drawn
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// What happens at them
    #[arg(long, value_enum, default_value = "kill")]
    fault: KillFaultKind,
    /// One point alone, such as device:fsync:2 or proxy:write:9+device:openat:30; --seed is then its
    /// transfer's
    #[arg(long, value_name = "WHO:CALL:N")]
    at: Option<KillFaults>,
    /// The number of transfers that run at the same time
    #[arg(long, value_name = "N", default_value_t = AT_ONCE)]
    jobs: usize,
    /// Leave the folders of points that fail, here
    #[arg(long, value_name = "FOLDER")]
    keep: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The results of all points.
#[derive(Default)]
struct KillTally {
    /// The number of points that were reached.
    points: u64,
    /// The number of transfers that ended before their point.
    missed: u64,
    failing: Vec<(KillPoint, ContractViolations)>,
}

/// Tries the points. Returns true if all of them held.
///
/// # Errors
/// The run was not possible: no strace, no port, no folder.
pub async fn run(args: &KillArgs) -> anyhow::Result<bool> {
    strace::is_there().await.map_err(anyhow::Error::msg)?;
    let asked =
        |KillFaults(blows): &KillFaults| blows.iter().any(|blow| blow.fault == KillEffect::Power);
    if args
        .at
        .as_ref()
        .map_or(args.fault == KillFaultKind::Power, asked)
    {
        disk::enter()?;
    }
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    if let Some(folder) = &args.keep {
        std::fs::create_dir_all(folder).with_context(|| format!("{}", folder.display()))?;
    }
    let stage = Arc::new(KillSetting {
        origin: Origin::start().await?,
        program,
        keep: args.keep.clone(),
    });
    let next: Box<dyn FnMut() -> Option<KillPoint>> = match &args.at {
        Some(KillFaults(blows)) => {
            let mut point = Some(KillPoint {
                blows: blows.clone(),
                seed: args.seed,
            });
            Box::new(move || point.take())
        }
        None => {
            let (seed, fault) = (args.seed, args.fault);
            let index = AtomicU64::new(0);
            let most = args.points.saturating_mul(DRAWS_PER_POINT_MAX);
            Box::new(move || {
                let index = index.fetch_add(1, Ordering::Relaxed);
                (index < most).then(|| KillPoint::draw(seed, index, fault))
            })
        }
    };
    let wanted = if args.at.is_some() { 1 } else { args.points };
    let tally = try_points(stage, next, wanted, args.jobs.max(1)).await?;
    tell(args, &tally);
    Ok(tally.failing.is_empty() && (args.at.is_some() || tally.points >= args.points))
}

async fn try_points(
    stage: Arc<KillSetting>,
    mut next: Box<dyn FnMut() -> Option<KillPoint>>,
    wanted: u64,
    jobs: usize,
) -> anyhow::Result<KillTally> {
    let mut tally = KillTally::default();
    let mut running = JoinSet::new();
    loop {
        // Not more at once than may still be needed.
        while running.len() < jobs
            && tally.points + (running.len() as u64) < wanted
            && let Some(point) = next()
        {
            let stage = stage.clone();
            running.spawn(async move {
                let verdict = stage.run(&point).await;
                (point, verdict)
            });
        }
        let Some(ended) = running.join_next().await else {
            return Ok(tally);
        };
        let (point, verdict) = ended.context("a point's task")?;
        let verdict = verdict.with_context(|| point.replay())?;
        tally.points += u64::from(verdict.struck);
        tally.missed += u64::from(!verdict.struck);
        if !verdict.holds() {
            print_stderr(&format!("{}\n  {}", point.replay(), verdict.words()));
            tally.failing.push((point, verdict));
        }
    }
}

fn tell(args: &KillArgs, tally: &KillTally) {
    let count =
        |f: fn(&ContractViolations) -> bool| tally.failing.iter().filter(|(_, v)| f(v)).count();
    let lost = count(|v| !v.lost.is_empty());
    let repeated = count(|v| !v.repeated.is_empty());
    if args.json {
        let failing: Vec<Value> = tally
            .failing
            .iter()
            .map(|(point, verdict)| json!({ "replay": point.replay(), "what": verdict.words() }))
            .collect();
        let told = json!({
            "points": tally.points, "missed": tally.missed, "seed": args.seed,
            "lost": lost, "repeated": repeated, "failing": failing,
        });
        print_stdout(&told.to_string());
    } else {
        print_stdout(&format!(
            "{} points, {} ended before theirs; {lost} lost data, {repeated} repeated data, {} \
             failed",
            tally.points,
            tally.missed,
            tally.failing.len()
        ));
    }
}
