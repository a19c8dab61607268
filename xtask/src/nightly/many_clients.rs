//! Tests with as many clients as the marks name, which take too long for every change: a thousand that fetch one object of
//! 50 MB, two hundred devices whose node is killed, drained or replaced, and ten by UDP and in streams at an upgrade.
//!
//! The tests judge bytes and requests, and the silence of an upgrade without what threads waited for a processor. The report has
//! what they printed of the others.

use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::bounded_command::run_within;
use super::night_context::NightContext;
use super::night_report::NightPart;
use crate::test_programs::{self, TestProgram};

/// Test programs, and the ignored tests of each that are run.
const TESTS: [(&str, &str); 3] = [
    ("prox proxy", "megabytes_for_a_thousand"),
    ("cedos get", "many_devices::"),
    ("cedos get", "upgrade_in_streams::"),
];
/// How much longer than its share a program that has begun may take.
const GRACE: Duration = Duration::from_secs(20 * 60); // a guess: 150 GB by loopback

/// Builds and runs them, one at a time.
pub fn run(context: &NightContext, budget: Duration) -> Result<NightPart> {
    // An unoptimised proxy takes an hour for the bytes.
    if !context.is_long {
        return Ok(NightPart::skipped(
            "there is no time to build the tests optimised",
        ));
    }
    let arguments = [
        "test",
        "--workspace",
        "--locked",
        "--release",
        "--test",
        "proxy",
        "--test",
        "get",
    ];
    let Some(programs) = test_programs::build(&arguments)? else {
        return Ok(NightPart::failed("the tests cannot be built", json!({})));
    };
    let mut said = Vec::new();
    for (name, filter) in TESTS {
        let mut programs = programs.iter();
        let Some(program) = programs.find(|program: &&TestProgram| program.name == name) else {
            let text = format!("there is no test program {name}");
            return Ok(NightPart::failed(text, json!({})));
        };
        let mut command = program.command();
        command.args([filter, "--ignored", "--nocapture", "--test-threads", "1"]);
        let ended = run_within(&mut command, budget + GRACE)?;
        if !ended.succeeded {
            return Ok(NightPart::failed(ended.end(30), json!({"said": said})));
        }
        let lines = ended.output.lines();
        said.extend(lines.filter(|line| is_figure(line)).map(str::to_owned));
    }
    Ok(NightPart::held(
        "a thousand clients of one object, and two hundred devices that lose their node",
        json!({"said": said}),
    ))
}

/// Whether a test printed this, and not the program that runs tests.
fn is_figure(line: &str) -> bool {
    let of_runner = ["running ", "test ", "test result", "skipped: "];
    !line.trim().is_empty() && !of_runner.iter().any(|start| line.starts_with(start))
}
