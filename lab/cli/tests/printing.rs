//! What the laboratory's verbs print, where it cannot be written: on a full disk, and into a pipe that nobody reads.

use std::fs::OpenOptions;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// One link and one small flow: over in a second, in real time too.
const SHORT: &str = r#"
seed = 3
duration_s = 3

[[link]]
name = "wlan0"
class = "free"
down_mbps = 24
up_mbps = 10
rtt_ms = 20

[[flow]]
bytes = 200_000
deadline_s = 2
"#;

/// Verbs that print and end soon.
const PRINTING: [&str; 14] = [
    "--help",
    "--version",
    "completions bash",
    "repro",
    "repro --json",
    "repro --help",
    "sim --help",
    "sim run SCENARIO",
    "sim run SCENARIO --json",
    "sim fuzz --seeds 1",
    "lab --help",
    "lab run --help",
    "demo --help",
    "demo --json --without-namespaces --scenario SCENARIO",
];

const FULL: &str = "cannot write to standard output: No space left";

fn run(line: &str, scenario: &Path, out: impl Into<Stdio>) -> Output {
    let words = line.split(' ').map(|word| match word {
        "SCENARIO" => scenario.as_os_str(),
        word => word.as_ref(),
    });
    Command::new(env!("CARGO_BIN_EXE_cedos-lab"))
        .args(words)
        .stdin(Stdio::null())
        .stdout(out)
        .stderr(Stdio::piped())
        .output()
        .expect("it starts")
}

#[test]
fn a_full_disk_is_an_error_and_a_closed_pipe_is_none_for_every_verb_that_prints() {
    let folder = tempfile::tempdir().expect("a folder");
    let scenario = folder.path().join("short.toml");
    std::fs::write(&scenario, SHORT).expect("written");
    for line in PRINTING {
        let usual = run(line, &scenario, Stdio::piped());
        let said = String::from_utf8_lossy(&usual.stderr);
        assert!(usual.status.success(), "{line}: {said}");
        assert!(!usual.stdout.is_empty(), "{line}: {said}");

        let full = OpenOptions::new().write(true).open("/dev/full");
        let full = run(line, &scenario, full.expect("/dev/full"));
        let said = String::from_utf8_lossy(&full.stderr);
        assert_eq!(full.status.code(), Some(1), "{line}: {said}");
        assert_eq!(said.matches(FULL).count(), 1, "{line}: {said}");
        assert!(!said.contains("panicked"), "{line}: {said}");

        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let closed = run(line, &scenario, writer);
        let said = String::from_utf8_lossy(&closed.stderr);
        assert_eq!(closed.status.code(), Some(0), "{line}: {said}");
        assert!(!said.contains("panicked"), "{line}: {said}");
        assert!(!said.to_lowercase().contains("pipe"), "{line}: {said}");
    }
}
