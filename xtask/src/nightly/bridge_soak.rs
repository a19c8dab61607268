//! The bridge of serial lines for hours: six in virtual time, and half an hour each on pseudo-terminals with and without polls.

use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::bounded_command::run_within;
use super::night_context::NightContext;
use super::night_report::NightPart;

/// The test programs.
const PROGRAMS: [&str; 7] = [
    "test",
    "-p",
    "d2tp-serial",
    "--locked",
    "--lib",
    "--test",
    "soak",
];
/// The programs, their tests, and whether these take as long as they are told.
const SOAKS: [(&str, &str, bool); 3] = [
    ("serial d2tp_serial", "six_hours_of_a_polled_air", false),
    ("serial soak", "a_bridge_lives_through_half_an_hour", true),
    (
        "serial soak",
        "a_bridge_that_polls_lives_through_half_an_hour",
        true,
    ),
];
/// How long a soak on pseudo-terminals is, at most and at least.
const SOAK_S: (u64, u64) = (1_800, 30);
/// How much longer than that it may take.
const GRACE: Duration = Duration::from_secs(5 * 60); // a guess: six hours in virtual time, on a busy machine

/// Runs the soaks of the bridge, one after the other.
pub fn run(_: &NightContext, budget: Duration) -> Result<NightPart> {
    let Some(programs) = crate::test_programs::build(&PROGRAMS)? else {
        return Ok(NightPart::failed("the tests cannot be built", json!({})));
    };
    let (longest, shortest) = SOAK_S;
    let seconds = (budget.as_secs() / 2).clamp(shortest, longest);
    let mut texts = Vec::new();
    for (name, test, is_timed) in SOAKS {
        let Some(program) = programs.iter().find(|program| program.name == name) else {
            return Ok(NightPart::failed(
                format!("there is no `{name}`"),
                json!({}),
            ));
        };
        let mut command = program.command();
        command
            .args([test, "--ignored", "--nocapture"])
            .env("CEDOS_SOAK_SECONDS", seconds.to_string());
        let limit = GRACE + Duration::from_secs(if is_timed { seconds } else { 0 });
        let ended = run_within(&mut command, limit)?;
        if !ended.succeeded || !ended.output.contains("1 passed") {
            let figures = json!({"test": test, "seconds": seconds});
            return Ok(NightPart::failed(ended.end(30), figures));
        }
        let said = ended
            .output
            .lines()
            .find(|line| line.contains(" s: ") || line.contains("answered"));
        texts.push(said.unwrap_or(test).to_owned());
    }
    let figures = json!({"virtual_hours": 6, "seconds": seconds, "said": texts});
    let text = format!("six hours in virtual time, and {seconds} s twice on pseudo-terminals");
    Ok(NightPart::held(text, figures))
}
