//! Checks that every promise of `docs/security.md` has a test.
//!
//! Every word of three parts or more in code marks (`` `a_forged_reset_is_ignored` ``) must be the
//! name of a test, every table with a column *test* or *tests* must name one in each row, and every
//! rule must be stated in the protocol.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::repository::files_below;

const SECURITY: &str = "docs/security.md";

/// Checks the repository at `root` against the `rules` that the protocol states; returns a
/// description of the result.
///
/// # Errors
/// A named test or rule does not exist, or a row names no test; the error lists each.
pub fn check(root: &Path, rules: &BTreeSet<String>) -> Result<String> {
    let path = root.join(SECURITY);
    if !path.is_file() {
        return Ok(format!("{SECURITY} is not there yet: no promises to check"));
    }
    let mut tests = BTreeSet::new();
    for file in files_below(root, "rs")? {
        tests.extend(tests_of(&std::fs::read_to_string(&file)?));
    }
    judge(
        &std::fs::read_to_string(&path).context(SECURITY)?,
        &tests,
        rules,
    )
}

/// Names of functions that follow a `#[test]`, `#[tokio::test]` or stand in `proptest!`.
pub(super) fn tests_of(source: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut marked = false;
    for line in source.lines().map(str::trim) {
        if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
            marked = true;
        } else if let Some(at) = line.find("fn ").filter(|_| marked) {
            let name = line[at + 3..].split(['(', '<']).next().unwrap_or_default();
            found.push(name.to_owned());
            marked = false;
        } else if !(line.starts_with("#[") || line.starts_with("//") || line.is_empty()) {
            marked = false;
        }
    }
    found
}

/// The words in code marks that have the form of test names.
fn named(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2).filter(|word| {
        word.matches('_').count() >= 2
            && word
                .chars()
                .all(|c| c == '_' || c.is_ascii_lowercase() || c.is_ascii_digit())
    })
}

fn judge(security: &str, tests: &BTreeSet<String>, rules: &BTreeSet<String>) -> Result<String> {
    let mut faults = Vec::new();
    let mut promises = 0;
    // Whether the current table has a column of tests.
    let mut tied = false;
    for line in security.lines() {
        for name in named(line).filter(|name| !tests.contains(*name)) {
            faults.push(format!("`{name}` is no test"));
        }
        for rule in super::protocol::names(line).filter(|rule| !rules.contains(rule)) {
            faults.push(format!("{rule} is not stated in the protocol"));
        }
        let Some(row) = line.strip_prefix('|') else {
            tied = false;
            continue;
        };
        let last = row
            .trim_end_matches('|')
            .rsplit('|')
            .next()
            .unwrap_or_default()
            .trim();
        if matches!(last, "test" | "tests") {
            tied = true;
        } else if tied && !last.starts_with("---") {
            promises += 1;
            if named(last).next().is_none() {
                faults.push(format!("no test is named in: {line}"));
            }
        }
    }
    if !faults.is_empty() {
        bail!(
            "{} fault(s) between {SECURITY} and the tests:\n  {}",
            faults.len(),
            faults.join("\n  ")
        );
    }
    Ok(format!(
        "{promises} promises of {SECURITY}, each with a test that exists"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECURITY: &str = "\
| promise | tests |
|---|---|
| kept | `a_lock_that_holds` |

| who | sees |
|---|---|
| anybody | `little` |
";

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|n| (*n).to_owned()).collect()
    }

    #[test]
    fn a_promise_with_a_test_holds() {
        let said = judge(SECURITY, &set(&["a_lock_that_holds"]), &set(&[])).expect("it is there");
        assert!(said.starts_with("1 promises"), "{said}");
    }

    #[test]
    fn a_promise_whose_test_is_gone_is_a_fault() {
        let error = judge(SECURITY, &set(&[]), &set(&[])).expect_err("nobody holds it");
        assert!(
            error.to_string().contains("`a_lock_that_holds` is no test"),
            "{error}"
        );
    }

    #[test]
    fn a_row_without_a_test_is_a_fault() {
        let bare = "| promise | tests |\n|---|---|\n| kept | of course |\n";
        let error = judge(bare, &set(&[]), &set(&[])).expect_err("nobody tries it");
        assert!(error.to_string().contains("no test is named in"), "{error}");
    }

    #[test]
    fn a_rule_that_is_not_stated_is_a_fault() {
        let error = judge("by R-GONE-1", &set(&[]), &set(&["R-A-1"])).expect_err("R-GONE-1");
        assert!(
            error.to_string().contains("R-GONE-1 is not stated"),
            "{error}"
        );
    }

    #[test]
    fn tests_are_told_from_other_functions() {
        let source = "fn a_b_c() {}\n#[test]\n#[ignore]\n// why\nfn d_e_f() {\n\
                      #[tokio::test(flavor = \"x\")]\nasync fn g_h_i() {}\n#[test]\nlet x;\nfn j() {}";
        assert_eq!(tests_of(source), ["d_e_f", "g_h_i"]);
    }
}
