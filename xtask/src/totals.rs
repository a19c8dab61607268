//! Adds up what `cargo test` says of each test binary.

/// Tests over all binaries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TestTotals {
    /// Tests that held.
    pub passed: u64,
    /// Tests that did not.
    pub failed: u64,
    /// Tests left for the nightly run.
    pub ignored: u64,
}

impl TestTotals {
    /// Takes one line of output; counts it if it is a binary's closing line.
    pub fn hear(&mut self, line: &str) {
        let Some(counts) = line.trim_start().strip_prefix("test result: ") else {
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
        };
        assert_eq!(totals, expected);
    }
}
