//! Runs the test programs that cargo builds, several at once.
//!
//! ```text
//!  cargo test --no-run ▸ executables ▸ a queue, the longest first ▸ PROGRAMS_AT_ONCE workers
//! ```
//!
//! `cargo test` runs one program at a time, and the cores are idle while its last tests run. Most of the time goes
//! to tests over links and of processes, which wait: for a link with a rate, for a timer, for another process. So
//! more of them run at once than there are cores. The line of a program says how long it took, and how long a core
//! was busy with it. The output of a program is shown if it failed. What failed is run once more, alone, to tell
//! why: [`crate::second_attempt`].

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::hung;
use crate::processor_time;
use crate::second_attempt::{self, SecondAttempt};
use crate::step::cargo;
use crate::totals::TestTotals;

/// A compiled program of unit or integration tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TestProgram {
    /// The package and target of the program: `d2tp-session exchange`.
    pub name: String,
    path: PathBuf,
    /// The package's folder, where cargo would run it.
    pub folder: PathBuf,
}

/// Programs that take long, in the order in which they start. Those that compute stand between those that wait, and
/// behind `measured`.
const LONGEST_FIRST: [&str; 20] = [
    "cedos agent",
    "cedos get",
    "cedos measured",
    "cli nats",
    "cedos run",
    "tests languages",
    "cedos sockets",
    "session exchange",
    "cli lab",
    "sim runs",
    "cli applications",
    "cli kill",
    "cedos vpn",
    "capi header",
    "emu world",
    "driver device",
    "cedos messages",
    "emu first_hop",
    "cedos setup",
    "cli demo",
];

/// Programs whose tests wait nearly all the time, each for some seconds.
const WAITING: [&str; 9] = [
    "cedos agent",
    "cedos get",
    "cedos run",
    "cedos measured",
    "cedos sockets",
    "cedos setup",
    "cedos vpn",
    "cli applications",
    "cli lab",
];

/// The number of tests of [`WAITING`] that run at once, for each core.
const WAITING_PER_CORE: usize = 2;

/// The number of programs that run at once.
const PROGRAMS_AT_ONCE: usize = 3;

/// Arguments of a test program that add its time to the line of each test.
pub const REPORT_TIME: [&str; 2] = ["-Zunstable-options", "--report-time"];

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

impl TestProgram {
    /// The program described by a line of cargo's messages.
    fn from_message(line: &str) -> Option<TestProgram> {
        let message: Value = serde_json::from_str(line).ok()?;
        let target = &message["target"];
        let is_test = message["profile"]["test"].as_bool()?;
        let path = message["executable"].as_str().filter(|_| is_test)?;
        let manifest = Path::new(message["manifest_path"].as_str()?);
        let folder = manifest.parent()?;
        let package = folder.file_name()?.to_string_lossy();
        Some(TestProgram {
            name: format!("{package} {}", target["name"].as_str()?),
            path: path.into(),
            folder: folder.to_owned(),
        })
    }

    /// The command that runs it, as cargo would.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        command
            .current_dir(&self.folder)
            .env("CARGO_MANIFEST_DIR", &self.folder);
        command
    }

    /// The number of its tests that run at once.
    fn threads(&self) -> usize {
        let waits = WAITING.contains(&self.name.as_str());
        cores() * if waits { WAITING_PER_CORE } else { 1 }
    }

    /// A key by which programs that take long come last. A large program is often a slow one.
    fn duration_order(&self) -> (usize, u64) {
        let listed = LONGEST_FIRST.iter().rev();
        let behind = listed.zip(1..).find(|(name, _)| **name == self.name);
        (behind.map_or(0, |(_, behind)| behind), self.bytes())
    }

    fn bytes(&self) -> u64 {
        std::fs::metadata(&self.path).map_or(0, |file| file.len())
    }
}

/// Builds an example or another program by these arguments of cargo; returns its path.
pub fn example(name: &str, arguments: &[&str]) -> Result<PathBuf> {
    let output = cargo(arguments.iter().copied())
        .args(["--message-format", "json-render-diagnostics"])
        .stderr(Stdio::inherit())
        .output()
        .context("cargo build could not be started")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let messages = text.lines().map(serde_json::from_str::<Value>);
    let mut programs = messages
        .filter_map(std::result::Result::ok)
        .filter(|message| message["target"]["name"] == name);
    programs
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
        .with_context(|| format!("the program {name} was not built"))
}

/// Builds the test programs that these arguments of `cargo test` select; `None` when that fails.
pub fn build(arguments: &[&str]) -> Result<Option<Vec<TestProgram>>> {
    let mut child = cargo(arguments.iter().copied())
        .args(["--no-run", "--message-format", "json-render-diagnostics"])
        .stdout(Stdio::piped())
        .spawn()
        .context("cargo test could not be started")?;
    let messages = BufReader::new(child.stdout.take().expect("piped above"));
    let mut programs = Vec::new();
    for line in messages.lines() {
        programs.extend(TestProgram::from_message(&line?));
    }
    Ok(child.wait()?.success().then_some(programs))
}

/// Runs programs, some of them at once; returns whether all succeeded. A program without output for `patience` is
/// killed.
pub fn run<'a>(
    programs: impl Iterator<Item = &'a TestProgram>,
    arguments: &[&str],
    patience: Duration,
    totals: &mut TestTotals,
) -> Result<bool> {
    // Taken from the end.
    let mut waiting: Vec<&TestProgram> = programs.collect();
    waiting.sort_by_key(|program| program.duration_order());
    let waiting = Mutex::new(waiting);
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..PROGRAMS_AT_ONCE {
            let (tell, waiting) = (tell.clone(), &waiting);
            scope.spawn(move || {
                while let Some(program) = next(waiting) {
                    let ran = run_one(program, arguments, patience);
                    if tell.send((program, ran)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(tell);
        let mut failed = Vec::new();
        for (program, ran) in told {
            let ran = ran.with_context(|| format!("{} could not be run", program.name))?;
            if ran.held {
                println!("{} ({})", program.name, ran.times());
            } else {
                println!("{}\nFAILED {} ({})", ran.output, program.name, ran.times());
            }
            totals.hear_program(&ran.output);
            if !ran.held {
                failed.push((program, second_attempt::failed_tests(&ran.output)));
            }
        }
        run_failed_again(&failed, patience, totals)?;
        Ok(failed.is_empty())
    })
}

/// Runs the tests that failed once more, one at a time, to tell whether they fail alone. They have failed in any
/// case.
fn run_failed_again(
    failed: &[(&TestProgram, Vec<String>)],
    patience: Duration,
    totals: &mut TestTotals,
) -> Result<()> {
    if !second_attempt::is_worthwhile(failed.iter().map(|(_, tests)| tests.len())) {
        return Ok(());
    }
    for (program, tests) in failed {
        for test in tests {
            println!("once more, alone: {}: {test}", program.name);
            let ran = run_one(program, &second_attempt::arguments(test), patience)?;
            match SecondAttempt::judge(ran.held, &ran.output) {
                SecondAttempt::Passed => totals.note_flaky(&program.name, test),
                SecondAttempt::Failed => println!("{}", ran.output),
            }
        }
    }
    Ok(())
}

fn next<'a>(waiting: &Mutex<Vec<&'a TestProgram>>) -> Option<&'a TestProgram> {
    waiting.lock().expect("no worker panics").pop()
}

/// How a program ended.
struct TestProgramRun {
    held: bool,
    output: String,
    took: Duration,
    /// The time for which cores were busy with the program and the processes that it started and waited for.
    processor_time: Option<Duration>,
}

impl TestProgramRun {
    /// How long the program took, and how long of that a core was busy.
    fn times(&self) -> String {
        let took = self.took.as_secs_f64();
        self.processor_time.map_or_else(
            || format!("{took:.1} s"),
            |busy| format!("{took:.1} s, {:.1} s of a core", busy.as_secs_f64()),
        )
    }
}

fn run_one(
    program: &TestProgram,
    arguments: &[&str],
    patience: Duration,
) -> Result<TestProgramRun> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let begun = Instant::now();
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    // A file instead of a pipe: a process left by a test may keep its output open.
    let said = std::env::temp_dir().join(format!("xtask-{}-{number}", std::process::id()));
    let file = File::create(&said).with_context(|| said.display().to_string())?;
    let mut command = program.command();
    if arguments.contains(&REPORT_TIME[0]) {
        // Stable test programs take these arguments as nightly ones do when this is set.
        command.env("RUSTC_BOOTSTRAP", "1");
    }
    let mut child = command
        .env("RUST_TEST_THREADS", program.threads().to_string())
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file)
        .spawn()?;
    let id = child.id();
    let (tell, told) = mpsc::channel::<()>();
    let heard = said.clone();
    let watch = std::thread::spawn(move || {
        let bytes = || std::fs::metadata(&heard).map_or(0, |file| file.len());
        let mut known = bytes();
        while told.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
            let now = bytes();
            if now == known {
                hung::kill_with_descendants(id);
                return true;
            }
            known = now;
        }
        false
    });
    let processor_time = processor_time::at_the_end(&child);
    let status = child.wait()?;
    drop(tell);
    let is_hung = watch.join().expect("it does not panic");
    let bytes = std::fs::read(&said)?;
    std::fs::remove_file(&said)?;
    let mut output = String::from_utf8_lossy(&bytes).into_owned();
    if is_hung {
        output.push_str("killed: it said nothing for too long");
    }
    Ok(TestProgramRun {
        held: status.success() && !is_hung,
        output,
        took: begun.elapsed(),
        processor_time,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: &str, test: bool) -> String {
        serde_json::json!({
            "reason": "compiler-artifact",
            "manifest_path": "/r/core/wire/Cargo.toml",
            "target": { "kind": [kind], "name": "d2tp_wire" },
            "profile": { "test": test },
            "executable": "/t/debug/deps/d2tp_wire-1",
        })
        .to_string()
    }

    fn shell(script: &str) -> TestProgram {
        let path = std::env::temp_dir();
        TestProgram {
            name: script.to_owned(),
            path: "/bin/sh".into(),
            folder: path,
        }
    }

    #[test]
    fn test_programs_are_told_from_other_artifacts() {
        let program = TestProgram::from_message(&message("lib", true)).expect("a program");
        assert_eq!(program.folder, Path::new("/r/core/wire"));
        assert_eq!(program.threads(), cores());
        assert_eq!(TestProgram::from_message(&message("bin", false)), None);
        assert_eq!(TestProgram::from_message("Compiling d2tp-wire"), None);
    }

    #[test]
    fn programs_that_are_named_exist_and_those_that_wait_are_among_the_long_ones() {
        for name in LONGEST_FIRST {
            let (package, target) = name.split_once(' ').expect("a package and a target");
            let tests = ["apps", "core", "edge", "lab", "bindings"].map(|folder| {
                let folder = crate::repository::root().join(folder).join(package);
                // The tests of the bindings are a package of that name.
                [folder.join("tests"), folder]
            });
            let mut files = tests.iter().flatten().flat_map(|tests| {
                [format!("{target}.rs"), format!("{target}/main.rs")].map(|file| tests.join(file))
            });
            assert!(files.any(|file| file.is_file()), "{name}");
        }
        let is_long = |name| LONGEST_FIRST.contains(name);
        assert!(WAITING.iter().all(is_long));
    }

    #[test]
    fn what_takes_long_begins_first() {
        let [long, longest, other] = ["driver device", "cedos agent", "udp loopback"].map(shell);
        assert!(other.duration_order() < long.duration_order());
        assert!(long.duration_order() < longest.duration_order());
        assert!(longest.threads() > other.threads());
    }

    #[test]
    fn results_add_up_and_a_failure_is_one() {
        let long = Duration::from_secs(60);
        let mut totals = TestTotals::default();
        let said = "echo 'test result: ok. 2 passed; 0 failed; 0 ignored'; exit $0";
        let run = |code, totals: &mut TestTotals| {
            let programs = [shell("a"), shell("b")];
            let arguments = ["-c", said, code];
            super::run(programs.iter(), &arguments, long, totals).expect("it runs")
        };
        assert!(run("0", &mut totals));
        assert_eq!(totals.passed, 4);
        assert!(!run("7", &mut totals));
    }

    /// A shell that fails a test named `t` at first; alone, it runs `script`.
    fn fails_beside_others(script: &str) -> (bool, TestTotals) {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("t"), script).expect("a script");
        let program = TestProgram {
            folder: folder.path().to_owned(),
            ..shell("a")
        };
        let said = r"printf 'failures:\n\nfailures:\n    t\n\ntest result: FAILED. 3 passed; 1 failed;\n'; exit 101";
        let mut totals = TestTotals::default();
        let long = Duration::from_secs(60);
        let arguments = ["-c", said];
        let held = run([&program].into_iter(), &arguments, long, &mut totals);
        (held.expect("it runs"), totals)
    }

    #[test]
    fn a_test_that_failed_has_failed_whether_it_passes_alone_or_not() {
        for script in ["echo 'test result: ok. 1 passed; 0 failed;'", "exit 101"] {
            let (held, totals) = fails_beside_others(script);
            assert!(!held);
            assert_eq!((totals.passed, totals.failed), (3, 1));
            assert_eq!(totals.has_flaky(), script.starts_with("echo"));
        }
    }

    #[test]
    fn a_program_that_hangs_is_killed() {
        let short = Duration::from_millis(50);
        let ran = run_one(&shell("a"), &["-c", "sleep 1000 & wait"], short).expect("it runs");
        assert!(!ran.held && ran.took < Duration::from_secs(60));
    }
}
