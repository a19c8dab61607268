//! Checks that every rule of `docs/protocol.md` is named in code and in a test.
//!
//! ```text
//!  docs/protocol.md   **R-RESUME-3.** A device MUST …        the rule
//!  core/…/resume.rs   // R-RESUME-3                          the line that implements it
//!  core/…/resume.rs   #[cfg(test)] … // R-RESUME-3           the test of the rule
//! ```
//!
//! A rule is stated in the paragraph, list item or table row that *begins* with its name (after
//! list marks, emphasis and table bars); it is a MUST if that text contains MUST. Other mentions
//! are references. Every MUST has to occur in code and in a test: in a `.rs` file, *test* is what
//! follows the first `#[cfg(test)]`, and everything in a folder or file called `tests`; the rest is
//! code. SHOULD rules are not checked.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::repository::files_below;

/// The file that states the rules.
const PROTOCOL: &str = "docs/protocol.md";

/// Checks the repository at `root`; returns a description of the result, and the stated rules.
///
/// # Errors
/// A rule is missing in code or in tests, or stated twice; the error lists each.
pub fn check(root: &Path) -> Result<(String, BTreeSet<String>)> {
    let protocol = root.join(PROTOCOL);
    let text = std::fs::read_to_string(&protocol).context(PROTOCOL)?;
    let mut found = RuleNames::default();
    for file in files_below(root, "rs")? {
        // The examples of this file do not count.
        let path = file.strip_prefix(root)?;
        if path.starts_with("xtask") {
            continue;
        }
        found.read(path, &std::fs::read_to_string(&file)?);
    }
    let said = judge(&text, &found)?;
    Ok((said, rules(&text).into_keys().collect()))
}

/// The rule names found in the sources.
#[derive(Debug, Default)]
struct RuleNames {
    code: BTreeSet<String>,
    tests: BTreeSet<String>,
}

impl RuleNames {
    fn read(&mut self, path: &Path, source: &str) {
        let is_test = path
            .components()
            .any(|part| part.as_os_str() == "tests" || part.as_os_str() == "tests.rs");
        let border = match source.find("#[cfg(test)]") {
            _ if is_test => 0,
            Some(at) => at,
            None => source.len(),
        };
        self.code.extend(names(&source[..border]));
        self.tests.extend(names(&source[border..]));
    }
}

fn judge(protocol: &str, found: &RuleNames) -> Result<String> {
    let stated = rules(protocol);
    let mut faults = Vec::new();
    for (name, texts) in &stated {
        if texts.len() > 1 {
            faults.push(format!("{name} is stated {} times", texts.len()));
        }
        if !texts.iter().any(|text| has_word(text, "MUST")) {
            continue;
        }
        let missing: Vec<_> = [("code", &found.code), ("a test", &found.tests)]
            .into_iter()
            .filter(|(_, names)| !names.contains(name))
            .map(|(place, _)| place)
            .collect();
        if !missing.is_empty() {
            faults.push(format!(
                "{name} is not named in {}",
                missing.join(" nor in ")
            ));
        }
    }
    for name in found.code.union(&found.tests) {
        if !stated.contains_key(name) {
            faults.push(format!(
                "{name} is named in the source but not stated in {PROTOCOL}"
            ));
        }
    }
    if !faults.is_empty() {
        bail!(
            "{} fault(s) between {PROTOCOL}, code and tests:\n  {}",
            faults.len(),
            faults.join("\n  ")
        );
    }
    let musts = stated
        .values()
        .filter(|texts| texts.iter().any(|text| has_word(text, "MUST")))
        .count();
    Ok(format!(
        "{} rules stated, {musts} of them MUST, each named in code and in a test",
        stated.len()
    ))
}

/// Rule names and the texts that state them.
fn rules(protocol: &str) -> BTreeMap<String, Vec<String>> {
    let mut stated: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut current: Option<String> = None;
    for line in protocol.lines() {
        let bare = line.trim_start_matches(|c: char| " \t>|-*+_`#[(".contains(c));
        let opens = rule_at(bare);
        if let Some(name) = opens {
            stated
                .entry(name.to_owned())
                .or_default()
                .push(line.to_owned());
            current = Some(name.to_owned());
        } else if line.trim().is_empty() {
            current = None;
        } else if is_item(line) {
            // A new list item or table row without a rule's name.
            current = None;
        } else if let Some(name) = &current {
            let texts = stated.get_mut(name).expect("the current rule was stated");
            let text = texts.last_mut().expect("with a text");
            text.push('\n');
            text.push_str(line);
        }
    }
    stated
}

fn is_item(line: &str) -> bool {
    let line = line.trim_start();
    ["- ", "* ", "+ ", "|", "#"]
        .iter()
        .any(|mark| line.starts_with(mark))
}

/// Every rule name in `text`.
pub(super) fn names(text: &str) -> impl Iterator<Item = String> {
    text.match_indices("R-")
        .filter(|(at, _)| {
            // Not the end of another word.
            !text[..*at].ends_with(|c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_')
        })
        .filter_map(|(at, _)| rule_at(&text[at..]))
        .map(str::to_owned)
}

/// The rule name at the beginning of `text`: `R-`, capitals, digits or inner hyphens, `-`, a
/// number.
fn rule_at(text: &str) -> Option<&str> {
    let rest = text.strip_prefix("R-")?;
    let length = rest
        .find(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '-'))
        .unwrap_or(rest.len());
    let name = rest[..length].trim_end_matches('-');
    let (area, number) = name.rsplit_once('-')?;
    let is_rule = area.starts_with(|c: char| c.is_ascii_uppercase())
        && !number.is_empty()
        && number.chars().all(|c| c.is_ascii_digit());
    is_rule.then(|| &text[..2 + name.len()])
}

fn has_word(text: &str, word: &str) -> bool {
    text.split(|c: char| !c.is_ascii_alphanumeric())
        .any(|part| part == word)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROTOCOL: &str = "\
# Resume
**R-RESUME-1.** A device MUST store the epoch
before it is used. See R-PATH-2.

- R-PATH-2: A receiver SHOULD wait.
- a plain item that says MUST
| R-ACK-10 | The sender MUST NOT send. |
";

    fn found(files: &[(&str, &str)]) -> RuleNames {
        let mut found = RuleNames::default();
        for (path, source) in files {
            found.read(Path::new(path), source);
        }
        found
    }

    #[test]
    fn rules_named_in_code_and_test_hold() {
        let found = found(&[
            (
                "core/a.rs",
                "// R-RESUME-1, R-ACK-10\n#[cfg(test)]\n// R-RESUME-1\n",
            ),
            ("core/tests/b.rs", "// R-ACK-10"),
        ]);
        let said = judge(PROTOCOL, &found).expect("complete");
        assert!(said.starts_with("3 rules stated, 2 of them MUST"), "{said}");
    }

    #[test]
    fn a_must_without_test_is_named() {
        let found = found(&[(
            "core/a.rs",
            "// R-RESUME-1\n// R-ACK-10\n#[cfg(test)] // R-ACK-10",
        )]);
        let error = judge(PROTOCOL, &found).expect_err("R-RESUME-1 has no test");
        assert!(
            error
                .to_string()
                .contains("R-RESUME-1 is not named in a test"),
            "{error}"
        );
        assert!(!error.to_string().contains("R-ACK-10"), "{error}");
    }

    #[test]
    fn a_longer_number_is_another_rule() {
        let found = found(&[(
            "core/a.rs",
            "// R-ACK-1\n#[cfg(test)] // R-ACK-1 R-RESUME-12",
        )]);
        let error = judge(PROTOCOL, &found)
            .expect_err("neither is meant")
            .to_string();
        assert!(
            error.contains("R-ACK-10 is not named in code nor in a test"),
            "{error}"
        );
        assert!(error.contains("R-RESUME-1 is not named in code"), "{error}");
    }

    #[test]
    fn a_name_the_document_does_not_know_is_a_fault() {
        let found = found(&[(
            "core/a.rs",
            "// R-RESUME-1 R-ACK-10 R-GONE-1\n#[cfg(test)] // R-RESUME-1 R-ACK-10",
        )]);
        let error = judge(PROTOCOL, &found).expect_err("R-GONE-1").to_string();
        assert!(error.contains("R-GONE-1 is named in the source"), "{error}");
    }

    #[test]
    fn a_rule_stated_twice_is_a_fault() {
        let error = judge("R-A-1 x\n\nR-A-1 y\n", &RuleNames::default()).expect_err("twice");
        assert!(error.to_string().contains("stated 2 times"), "{error}");
    }
}
