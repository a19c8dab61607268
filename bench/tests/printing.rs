//! What `cedos-bench` prints, where it cannot be written: on a full disk, and into a pipe that nobody reads.

use std::fs::OpenOptions;
use std::process::{Command, Output, Stdio};

/// Verbs that print at once. The grid without rounds is an empty table.
const PRINTING: [&str; 6] = [
    "--help",
    "--version",
    "hostile --help",
    "help throughput",
    "grid --rounds 0",
    "grid --rounds 0 --json",
];

const FULL: &str = "cannot write to standard output: No space left";

fn run(line: &str, out: impl Into<Stdio>, err: impl Into<Stdio>) -> Output {
    Command::new(env!("CARGO_BIN_EXE_cedos-bench"))
        .args(line.split(' '))
        .stdin(Stdio::null())
        .stdout(out)
        .stderr(err)
        .output()
        .expect("it starts")
}

fn full_disk() -> Stdio {
    let full = OpenOptions::new().write(true).open("/dev/full");
    full.expect("/dev/full").into()
}

/// A pipe that nobody reads.
fn closed_pipe() -> Stdio {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    writer.into()
}

#[test]
fn a_full_disk_is_an_error_and_a_closed_pipe_is_none() {
    for line in PRINTING {
        let usual = run(line, Stdio::piped(), Stdio::piped());
        if !usual.status.success() {
            let said = String::from_utf8_lossy(&usual.stderr);
            assert!(line.starts_with("grid"), "{line}: {said}");
            eprintln!("skipped {line}: {said}");
            continue;
        }
        assert!(!usual.stdout.is_empty(), "{line}");
        let full = run(line, full_disk(), Stdio::piped());
        let said = String::from_utf8_lossy(&full.stderr);
        assert_eq!(full.status.code(), Some(1), "{line}: {said}");
        assert_eq!(said.matches(FULL).count(), 1, "{line}: {said}");
        let closed = run(line, closed_pipe(), Stdio::piped());
        let said = String::from_utf8_lossy(&closed.stderr);
        assert_eq!(closed.status.code(), Some(0), "{line}: {said}");
        assert_eq!(said, "", "{line}");
    }
}

#[test]
fn an_error_that_nobody_reads_keeps_its_exit_code() {
    for (line, code) in [
        ("hostile --kinds none", 1),
        ("hostile --no-such-option", 2),
        ("no-such-verb", 2),
    ] {
        for errors in [full_disk(), closed_pipe()] {
            let run = run(line, Stdio::piped(), errors);
            assert_eq!(run.status.code(), Some(code), "{line}");
            assert!(run.stdout.is_empty(), "{line}");
        }
    }
}
