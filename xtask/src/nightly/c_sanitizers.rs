//! The C code of caught programs under AddressSanitizer and UndefinedBehaviorSanitizer, with arbitrary files as programs.

use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::bounded_command::run_within;
use super::night_context::NightContext;
use super::night_report::NightPart;
use crate::repository::root;

/// A program that includes exec.c, and what that needs.
const SOURCES: [&str; 4] = [
    "tests/c/arbitrary_programs.c",
    "src/preload.c",
    "src/replace.c",
    "src/resolver.c",
];
/// How long the compiler may take.
const BUILD_MAX: Duration = Duration::from_secs(120);

/// Compiles the program and runs it.
pub fn run(context: &NightContext, budget: Duration) -> Result<NightPart> {
    let folder = tempfile::tempdir()?;
    let program = folder.path().join("arbitrary_programs");
    let mut compiler = Command::new("cc");
    compiler
        .args([
            "-g",
            "-O1",
            "-fsanitize=address,undefined",
            "-fno-sanitize-recover=all",
        ])
        .arg("-o")
        .arg(&program)
        .args(SOURCES)
        .args(["-ldl", "-pthread"])
        .current_dir(root().join("edge/catch"));
    match run_within(&mut compiler, BUILD_MAX) {
        Ok(built) if built.succeeded => {}
        Ok(built) => {
            let text = format!("the C compiler has no sanitizers, or: {}", built.end(3));
            return Ok(NightPart::skipped(text));
        }
        Err(_) => return Ok(NightPart::skipped("there is no C compiler (cc)")),
    }
    let seconds = budget.as_secs().max(3);
    let mut command = Command::new(&program);
    command
        .arg(&program)
        .arg(folder.path())
        .args([context.salt.to_string(), seconds.to_string()])
        // What a program still has at its end is no leak.
        .env("ASAN_OPTIONS", "detect_leaks=0");
    let ended = run_within(&mut command, budget + BUILD_MAX)?;
    let text = ended.end(25);
    Ok(match ended.succeeded {
        true => NightPart::held(text, json!({"seconds": seconds})),
        false => NightPart::failed(text, json!({"seed": context.salt})),
    })
}
