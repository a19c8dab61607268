//! Parts that could go on for ever: random scenarios, random times, kill points, fuzz targets. They go on until their time is over, in
//! portions that each end by themselves.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::json;

use super::bounded_command::run_within;
use super::night_context::NightContext;
use super::night_report::NightPart;
use super::tool_parts::nightly_cargo;
use crate::repository::root;
use crate::step::has_subcommand;

/// Random scenarios of a portion: with all checks on, 20 to 40 s of two cores.
const SEEDS_AT_ONCE: u64 = 5_000;
/// Random times of a portion, of one scenario: 10 to 20 s of two cores.
const TIMES_AT_ONCE: u64 = 500;
/// The parts of the search for amplification.
const SEARCH_PARTS: u64 = 1_000;
/// Kill points of a portion.
const POINTS_AT_ONCE: u64 = 40;
/// How much longer than its share a portion that has begun may take.
const GRACE: Duration = Duration::from_secs(20 * 60); // a guess: builds are in the first

/// Random scenarios, each portion with a salt of its own.
pub fn seeds(context: &NightContext, budget: Duration) -> Result<NightPart> {
    let at_once = match context.is_long {
        true => SEEDS_AT_ONCE,
        false => 500,
    };
    let portions = |n: u64, seeds: u64| match context.is_long {
        true => Ok(crate::seeds::night(seeds, context.salt + n)),
        false => crate::seeds::short_night(seeds, context.salt + n),
    };
    let (done, failure) = in_portions(context.seeds, at_once, budget, portions)?;
    let figures = json!({"seeds": done, "asked": context.seeds});
    Ok(match failure {
        None => NightPart::held(
            format!("{done} random scenarios of {}", context.seeds),
            figures,
        ),
        Some(text) => NightPart::failed(text, figures),
    })
}

/// Scenarios of networks that carry nothing, at random times: other ones in each night.
pub fn vary(context: &NightContext, budget: Duration) -> Result<NightPart> {
    let at_once = match context.is_long {
        true => TIMES_AT_ONCE,
        false => 50,
    };
    let files = crate::seeds::VARIED_FILES;
    let first = first_time(context.salt);
    let portions = |n: u64, times: u64| {
        let (nth, file) = (n / files.len() as u64, n as usize % files.len());
        crate::seeds::varied(files[file], first + nth * at_once, times, context.is_long)
    };
    let all = context.times * files.len() as u64;
    let (done, failure) = in_portions(all, at_once, budget, portions)?;
    let figures = json!({"times": done, "asked": all, "first": first});
    Ok(match failure {
        None => {
            let text = format!("{done} runs of {all} of scenarios whose networks carry nothing");
            NightPart::held(text, figures)
        }
        Some(text) => NightPart::failed(text, figures),
    })
}

/// The first seed of a night's random times: no two nights in a row have a seed in common.
fn first_time(salt: u64) -> u64 {
    (salt % (1 << 32)) * crate::seeds::WHOLE_TIMES
}

/// Mixtures of messages of a client that forges addresses, longer ones than a check tries: parts of the ignored tests of
/// `core/session`, from another one on each night.
pub fn search(context: &NightContext, budget: Duration) -> Result<NightPart> {
    let arguments = ["test", "--workspace", "--locked", "--test", "exchange"];
    let programs = crate::test_programs::build(&arguments)?;
    let mut programs = programs.unwrap_or_default().into_iter();
    let Some(program) = programs.find(|program| program.name == "session exchange") else {
        return Ok(NightPart::failed("the tests cannot be built", json!({})));
    };
    let portions = |n: u64, _| {
        let part = (context.salt.wrapping_add(n)) % SEARCH_PARTS;
        let mut command = program.command();
        command
            .args([
                "--ignored",
                "amplifies_in_a_long_search",
                "mixture_of_three",
            ])
            .env("D2TP_SEARCH_PART", format!("{part}/{SEARCH_PARTS}"));
        Ok(command)
    };
    let (done, failure) = in_portions(SEARCH_PARTS, 1, budget, portions)?;
    let figures = json!({"parts": done, "of": SEARCH_PARTS});
    Ok(match failure {
        None => NightPart::held(
            format!("{done} parts of {SEARCH_PARTS} of the search for amplification"),
            figures,
        ),
        Some(text) => NightPart::failed(text, figures),
    })
}

/// Kill points, by SIGKILL. Disks that fail and lose power are tried by `cedos lab kill --fault disk` and `power`.
pub fn kills(context: &NightContext, budget: Duration) -> Result<NightPart> {
    let portions =
        |n: u64, points: u64| crate::kills::portion(points, context.salt + n, context.is_long);
    let (done, failure) = in_portions(context.kill_points, POINTS_AT_ONCE, budget, portions)?;
    let figures = json!({"points": done, "asked": context.kill_points});
    Ok(match failure {
        None => NightPart::held(
            format!("{done} kill points of {}", context.kill_points),
            figures,
        ),
        Some(text) => NightPart::failed(text, figures),
    })
}

/// Runs portions until `all` are done or the time is over. Returns how many were done, and the end of the output of the
/// portion that failed.
fn in_portions(
    all: u64,
    at_once: u64,
    budget: Duration,
    portion: impl Fn(u64, u64) -> Result<Command>,
) -> Result<(u64, Option<String>)> {
    let begun = Instant::now();
    let mut done = 0;
    for n in 0.. {
        if done >= all || (n > 0 && begun.elapsed() >= budget) {
            break;
        }
        let count = at_once.min(all - done);
        let mut command = portion(n, count)?;
        let ended = run_within(&mut command, budget + GRACE)?;
        if !ended.succeeded {
            let end = ended.end(30);
            return Ok((done, Some(format!("{command:?}:\n{end}"))));
        }
        done += count;
    }
    Ok((done, None))
}

/// Every fuzz target for an equal share of the time.
pub fn fuzz(_: &NightContext, budget: Duration) -> Result<NightPart> {
    if !has_subcommand("fuzz") {
        return Ok(NightPart::skipped(
            "cargo-fuzz is not installed (cargo install --locked cargo-fuzz; it needs a nightly toolchain)",
        ));
    }
    let targets = fuzz_targets()?;
    let built = run_within(&mut nightly_cargo(&["fuzz", "build"]), budget + GRACE)?;
    if !built.succeeded {
        return Ok(NightPart::failed(built.end(20), json!({})));
    }
    let seconds = (budget.as_secs() / targets.len().max(1) as u64).max(5);
    let mut runs = serde_json::Map::new();
    for target in &targets {
        let limit = format!("-max_total_time={seconds}");
        let mut command = nightly_cargo(&["fuzz", "run", target, "--", &limit]);
        let ended = run_within(&mut command, Duration::from_secs(seconds) + GRACE)?;
        if !ended.succeeded {
            let text = format!("{target}: {}", ended.end(30));
            return Ok(NightPart::failed(text, json!({"runs": runs})));
        }
        runs.insert(target.clone(), runs_of(&ended.output).into());
    }
    let text = format!("{} targets, {seconds} s each", targets.len());
    Ok(NightPart::held(
        text,
        json!({"seconds_each": seconds, "runs": runs}),
    ))
}

/// The names of `fuzz/fuzz_targets/*.rs`.
fn fuzz_targets() -> Result<Vec<String>> {
    let targets = crate::repository::files_below(&root().join("fuzz/fuzz_targets"), "rs")?;
    let names = targets.iter().filter_map(|file| file.file_stem());
    Ok(names
        .map(|name| name.to_string_lossy().into_owned())
        .collect())
}

/// The number of inputs that libFuzzer says it has run: `Done 123456 runs in 60 second(s)`.
fn runs_of(output: &str) -> u64 {
    let mut counts = output.lines().filter_map(|line| {
        let count = line.strip_prefix("Done ")?.split(' ').next()?;
        count.parse().ok()
    });
    counts.next_back().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn portions_go_on_until_all_is_done_and_stop_at_a_failure() {
        let long = Duration::from_secs(3600);
        let good = |_, _| Ok(Command::new("true"));
        assert_eq!(in_portions(5, 2, long, good).unwrap(), (5, None));
        let (done, failure) = in_portions(5, 2, long, |n, _| match n {
            0 => Ok(Command::new("true")),
            _ => Ok(Command::new("false")),
        })
        .unwrap();
        assert_eq!(done, 2);
        assert!(failure.is_some());
        // One portion is always run.
        assert_eq!(in_portions(5, 2, Duration::ZERO, good).unwrap().0, 2);
    }

    #[test]
    fn nights_in_a_row_try_other_times() {
        let between = first_time(20_001) - first_time(20_000);
        assert!(between >= crate::seeds::WHOLE_TIMES);
        assert!(crate::seeds::NIGHT_TIMES.is_multiple_of(TIMES_AT_ONCE));
        first_time(u64::MAX);
    }

    #[test]
    fn libfuzzers_count_is_read() {
        assert_eq!(
            runs_of("#1\tDONE\nDone 123456 runs in 60 second(s)\n"),
            123_456
        );
    }
}
