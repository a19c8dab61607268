//! Adds up the results that `cargo test` prints for each test binary.

use std::time::Duration;

/// What a test that failed printed, at most.
const FAILURE_LINES_MAX: usize = 12; // a guess: the message of a panic, and a few lines before it

/// What the last line of a test program begins with.
const RESULT: &str = "test result: ";

/// The numbers of tests over all binaries, and what those that failed said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TestTotals {
    /// Tests that passed.
    pub passed: u64,
    /// Tests that failed.
    pub failed: u64,
    /// Tests that are left for the nightly run.
    pub ignored: u64,
    /// The first lines that each failed test printed, under its name.
    failures: Vec<Vec<String>>,
    /// The first lines of each panic whose message was not captured, such as that of a test in a
    /// namespace: the test's name, then its lines.
    panics: Vec<Vec<String>>,
    section: OutputSection,
    /// Tests that failed while others ran, and passed alone. They have failed.
    flaky: Vec<String>,
    /// The tests whose time was reported: `test NAME ... ok <1.234s>`.
    durations: Vec<(Duration, String)>,
}

/// What the lines that are read belong to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum OutputSection {
    #[default]
    Other,
    Failure,
    Panic,
}

impl TestTotals {
    /// Reads the output of one program. Tests in namespaces run in a program of their own, whose result stands in
    /// the output of a test that failed: only the last result is the program's.
    pub fn hear_program(&mut self, output: &str) {
        let is_result = |line: &str| line.trim_start().starts_with(RESULT);
        let result = output.lines().rev().position(is_result);
        let result = result.map(|from_end| output.lines().count() - 1 - from_end);
        for (number, line) in output.lines().enumerate() {
            if !is_result(line) || Some(number) == result {
                self.hear(line);
            }
        }
    }

    /// Reads one line of output; counts it if it is the last line of a binary, and keeps it if a failed
    /// test printed it.
    pub fn hear(&mut self, line: &str) {
        self.hear_failure(line);
        self.durations.extend(reported_time(line));
        let Some(counts) = line.trim_start().strip_prefix(RESULT) else {
            return;
        };
        for part in counts.split([';', '.']) {
            let mut words = part.split_whitespace();
            let (Some(count), Some(what)) = (words.next(), words.next()) else {
                continue;
            };
            let Ok(count) = count.parse::<u64>() else {
                continue;
            };
            match what {
                "passed" => self.passed += count,
                "failed" => self.failed += count,
                "ignored" => self.ignored += count,
                _ => {}
            }
        }
    }

    /// Notes that a test that failed passed when it ran alone. It stays failed.
    pub fn note_flaky(&mut self, program: &str, test: &str) {
        self.flaky.push(format!("{program}: {test}"));
    }

    /// Whether a test failed while others ran, and passed alone.
    #[cfg(test)]
    pub fn has_flaky(&self) -> bool {
        !self.flaky.is_empty()
    }

    /// Keeps what stands under `---- NAME stdout ----` and under `thread 'NAME' panicked`, until a
    /// backtrace or the list of names.
    fn hear_failure(&mut self, line: &str) {
        let failure = line
            .strip_prefix("---- ")
            .and_then(|rest| rest.strip_suffix(" stdout ----"));
        let panic = line
            .strip_prefix("thread '")
            .filter(|rest| rest.contains("panicked at"))
            .and_then(|rest| rest.split('\'').next());
        if let Some(name) = failure {
            self.failures.push(vec![name.to_owned()]);
            self.section = OutputSection::Failure;
        } else if line == "failures:" || line.starts_with("stack backtrace:") {
            self.section = OutputSection::Other;
        } else if let Some(name) = panic
            && self.section != OutputSection::Failure
        {
            self.panics.push(vec![name.to_owned()]);
            self.section = OutputSection::Panic;
        }
        let kept = match self.section {
            OutputSection::Failure if failure.is_none() => self.failures.last_mut(),
            OutputSection::Panic => self.panics.last_mut(),
            _ => None,
        };
        if let Some(kept) = kept
            && !line.is_empty()
            && kept.len() <= FAILURE_LINES_MAX
        {
            kept.push(line.to_owned());
        }
    }

    /// Prints the tests that took longest, of those whose time was reported.
    pub fn print_longest(&mut self, number: usize) {
        self.durations.sort();
        for (took, test) in self.durations.iter().rev().take(number) {
            println!("{:7.1} s  {test}", took.as_secs_f64());
        }
    }

    /// Prints what failed and the totals, so that the end of a long output says everything.
    pub fn print(&self) {
        for failure in &self.failures {
            println!("FAILED {}", failure.join("\n    "));
            for panic in self.panics.iter().filter(|panic| panic[0] == failure[0]) {
                println!("    {}", panic[1..].join("\n    "));
            }
        }
        for test in &self.flaky {
            println!("{test}: failed while others ran, and passed alone");
        }
        println!("{} passed, {} failed", self.passed, self.failed);
    }
}

/// The time and the name in `test NAME ... ok <1.234s>`.
fn reported_time(line: &str) -> Option<(Duration, String)> {
    let (name, rest) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let (_, seconds) = rest.strip_suffix("s>")?.rsplit_once('<')?;
    let took = Duration::try_from_secs_f64(seconds.parse().ok()?).ok()?;
    Some((took, name.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_add_up_and_others_do_not() {
        let mut totals = TestTotals::default();
        for line in [
            "running 3 tests",
            "test a ... ok",
            "test result: ok. 9 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.15s",
            "test result: FAILED. 2 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out; finished in 12.00s",
        ] {
            totals.hear(line);
        }
        let expected = TestTotals {
            passed: 11,
            failed: 3,
            ignored: 1,
            ..TestTotals::default()
        };
        assert_eq!(totals, expected);
    }

    #[test]
    fn the_time_of_a_test_is_read_where_it_is_reported() {
        let mut totals = TestTotals::default();
        totals.hear_program("test a::b ... ok <1.250s>\ntest c ... ok\ntest d ... FAILED <0.5s>\n");
        let milliseconds = |(took, name): &(Duration, String)| (took.as_millis(), name.clone());
        let read: Vec<_> = totals.durations.iter().map(milliseconds).collect();
        assert_eq!(read, [(1_250, "a::b".into()), (500, "d".into())]);
    }

    #[test]
    fn a_test_that_failed_in_a_program_of_its_own_counts_once() {
        let mut totals = TestTotals::default();
        totals.hear_program(
            "---- a stdout ----\ntest result: FAILED. 0 passed; 1 failed; 0 ignored;\n\n\
             test result: FAILED. 46 passed; 1 failed; 0 ignored;\n",
        );
        assert_eq!((totals.passed, totals.failed), (46, 1));
    }

    #[test]
    fn what_a_failed_test_printed_is_kept_under_its_name() {
        let mut totals = TestTotals::default();
        for line in [
            "thread 'b' (12) panicked at tests/b.rs:1:1:",
            "what is not captured",
            "stack backtrace:",
            "test a ... FAILED",
            "failures:",
            "",
            "---- a stdout ----",
            "",
            "thread 'a' panicked at tests/a.rs:1:1:",
            "the message",
            "stack backtrace:",
            "   0: main",
            "---- b stdout ----",
            "another message",
            "",
            "failures:",
            "    a",
            "    b",
        ] {
            totals.hear(line);
        }
        let expected = [
            vec!["a", "thread 'a' panicked at tests/a.rs:1:1:", "the message"],
            vec!["b", "another message"],
        ];
        assert_eq!(totals.failures, expected);
        let panic = [
            "b",
            "thread 'b' (12) panicked at tests/b.rs:1:1:",
            "what is not captured",
        ];
        assert_eq!(totals.panics, [panic]);
    }
}
