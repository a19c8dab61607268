//! What threads of the driver do at the same time, in the order in which they happen to do it: its tests, built with
//! ThreadSanitizer.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::bounded_command::run_within;
use super::night_context::NightContext;
use super::night_report::NightPart;
use super::tool_parts::nightly_cargo;
use crate::repository::root;

/// How long the standard library, the driver and what its tests need may take to be built so: some six minutes on two cores.
const BUILD_MAX: Duration = Duration::from_secs(20 * 60);

/// The line with which ThreadSanitizer begins a report.
const REPORT: &str = "WARNING: ThreadSanitizer";

/// Reports that are no races, each with its reason.
const SUPPRESSIONS: &str = "tools/thread-sanitizer.supp";

/// Builds the driver's tests with ThreadSanitizer, and runs them once.
pub fn run(_: &NightContext, budget: Duration) -> Result<NightPart> {
    let target = match std::env::consts::ARCH {
        "x86_64" => "x86_64-unknown-linux-gnu",
        "aarch64" => "aarch64-unknown-linux-gnu",
        _ => {
            let text = "Rust has ThreadSanitizer for x86_64 and aarch64";
            return Ok(NightPart::skipped(text));
        }
    };
    if !has_library_source()? {
        return Ok(NightPart::skipped(
            "the standard library cannot be built (rustup toolchain install nightly --component rust-src)",
        ));
    }
    let mut tests = nightly_cargo(&["test", "--locked", "-Zbuild-std", "--target", target]);
    tests
        .args(["--target-dir", "target/thread-sanitizer"])
        .args(["-p", "d2tp-driver", "--lib", "--test", "device"])
        .env("RUSTFLAGS", "-Zsanitizer=thread")
        .env(
            "TSAN_OPTIONS",
            format!("suppressions={}", root().join(SUPPRESSIONS).display()),
        );
    let ended = run_within(&mut tests, budget + BUILD_MAX)?;
    let passed = ended.output.lines().filter(|line| line.ends_with("... ok"));
    let figures = json!({"tests": passed.count()});
    Ok(if ended.output.contains(REPORT) {
        let reports = ended
            .output
            .lines()
            .skip_while(|line| !line.contains(REPORT));
        let first: Vec<&str> = reports.take(60).collect();
        NightPart::failed(first.join("\n"), figures)
    } else {
        match (ended.succeeded, ended.timed_out) {
            (true, _) => NightPart::held("the driver's tests with ThreadSanitizer", figures),
            (false, true) => NightPart::failed("it did not end in time", figures),
            (false, false) => NightPart::failed(ended.end(25), figures),
        }
    })
}

/// Whether the nightly toolchain has the source of the standard library.
fn has_library_source() -> Result<bool> {
    let mut rustc = Command::new("rustc");
    rustc
        .args(["+nightly", "--print", "sysroot"])
        .env_remove("RUSTUP_TOOLCHAIN");
    let asked = run_within(&mut rustc, Duration::from_secs(30))?;
    let source = Path::new(asked.output.trim()).join("lib/rustlib/src/rust/library");
    Ok(asked.succeeded && source.is_dir())
}
