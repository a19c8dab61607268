//! Tests of the recovery contract: `cedos get` and `cedos prox`, killed or failing at system calls
//! drawn from a seed (`cedos lab kill`). The nightly run tries thousands.

use std::process::Command;

use serde_json::Value;

/// Runs the verb; `None` if programs cannot be traced here.
fn run(arguments: &[&str]) -> Option<Value> {
    let output = Command::new(env!("CARGO_BIN_EXE_cedos-lab"))
        .args(["lab", "kill", "--json"])
        .args(arguments)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let cannot = [
        "strace cannot be run",
        "strace may not watch",
        "no disk can lose power here",
    ];
    if cannot.iter().any(|why| said.contains(why)) {
        eprintln!("NOT TRIED: {said}");
        return None;
    }
    let told: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"));
    assert!(output.status.success(), "{told:#}\n{said}");
    Some(told)
}

// R-CRASH-1, R-HS-2
#[test]
fn forty_kills_at_system_calls_of_either_end_and_both_lose_and_repeat_nothing() {
    let Some(told) = run(&["--points", "40"]) else {
        return;
    };
    assert_eq!(told["points"], 40);
    assert_eq!((&told["lost"], &told["repeated"]), (&0.into(), &0.into()));
}

#[test]
fn a_disk_that_is_full_or_breaks_at_a_system_call_is_told_and_survived() {
    if let Some(told) = run(&["--fault", "disk", "--points", "14"]) {
        assert_eq!(told["points"], 14);
    }
}

// R-CRASH-1, R-HS-2
#[test]
fn twelve_power_cuts_at_system_calls_lose_and_repeat_nothing() {
    if let Some(told) = run(&["--fault", "power", "--points", "12"]) {
        assert_eq!(told["points"], 12);
    }
}

/// Points that long runs found, each of which was a fault: a proxy that was informed of the end
/// before the bytes were durable; a repeated sync; a flow aborted by the end of its session; a
/// complete object treated as a short one.
#[test]
fn points_that_once_failed_hold() {
    let found = [
        ("device:rename:4", "1484857517"),
        ("device:rename:3", "2980329912"),
        ("device:fdatasync:1:eio", "2018415445"),
        ("device:pwrite64:2:eio", "3722208605"),
        ("device:fsync:1:eio", "2245108251"),
        ("device:fdatasync:22", "1735107149"),
        ("device:fdatasync:7:enospc", "3716219200"),
        ("proxy:fdatasync:7:enospc", "1521440461"),
        ("device:write:51:enospc", "4000339103"),
    ];
    std::thread::scope(|scope| {
        for (at, seed) in found {
            scope.spawn(move || run(&["--at", at, "--seed", seed]));
        }
    });
}
