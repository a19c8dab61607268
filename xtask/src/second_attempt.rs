//! Tests that failed beside others are run once more, alone.
//!
//! Tests here run real programs over real links, several at once on two cores. One that fails only beside others
//! waits for something for too short a time, or shares something it should not; one that fails alone too is easier
//! to look into. The second run tells which it is. A test that failed has failed in either case.

/// The most tests that are run again. More failures than these are no accident.
const TESTS_MAX: usize = 6;

/// How a test ended that was run once more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SecondAttempt {
    /// The test passed.
    Passed,
    /// The test failed again, or did not run.
    Failed,
}

impl SecondAttempt {
    /// The verdict on a run of one test: it must have run, and its program must have succeeded.
    pub fn judge(succeeded: bool, output: &str) -> SecondAttempt {
        let ran = output
            .lines()
            .any(|line| line.starts_with("test result: ok. 1 passed;"));
        if succeeded && ran {
            SecondAttempt::Passed
        } else {
            SecondAttempt::Failed
        }
    }
}

/// The names in the list that ends a failed program's output; none if the program ended in another way.
pub fn failed_tests(output: &str) -> Vec<String> {
    let Some((before, _)) = output.rsplit_once("\ntest result: FAILED.") else {
        return Vec::new();
    };
    let Some((_, list)) = before.rsplit_once("\nfailures:\n") else {
        return Vec::new();
    };
    list.lines()
        .filter_map(|line| line.strip_prefix("    "))
        .map(str::to_owned)
        .collect()
}

/// Whether to run again what failed, from the number of failed tests of each failed program. A program that
/// failed without a failed test, such as one that hung, is a failure whatever its tests do now.
pub fn is_worthwhile(mut counts: impl Iterator<Item = usize>) -> bool {
    let total = counts.try_fold(0, |sum, count| (count > 0).then_some(sum + count));
    total.is_some_and(|tests| tests <= TESTS_MAX)
}

/// Arguments of a test program that run one test.
pub fn arguments(test: &str) -> [&str; 3] {
    [test, "--exact", "--test-threads=1"]
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "running 3 tests
test a::b ... FAILED

failures:

---- a::b stdout ----
    indented, but no name
failures:

failures:
    a::b
    c

test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s
";

    #[test]
    fn failed_tests_are_those_of_the_last_list() {
        assert_eq!(failed_tests(OUTPUT), ["a::b", "c"]);
        assert!(failed_tests("running 1 test\nkilled").is_empty());
    }

    #[test]
    fn many_failures_and_a_program_that_hung_are_not_run_again() {
        assert!(is_worthwhile([1, 2].into_iter()));
        assert!(!is_worthwhile([1, 0].into_iter()));
        assert!(!is_worthwhile([TESTS_MAX, 1].into_iter()));
    }

    #[test]
    fn a_test_that_did_not_run_has_not_passed() {
        let passed = "test result: ok. 1 passed; 0 failed; 0 ignored";
        assert_eq!(SecondAttempt::judge(true, passed), SecondAttempt::Passed);
        assert_eq!(SecondAttempt::judge(false, passed), SecondAttempt::Failed);
        let none = "test result: ok. 0 passed; 0 failed; 0 ignored";
        assert_eq!(SecondAttempt::judge(true, none), SecondAttempt::Failed);
    }
}
