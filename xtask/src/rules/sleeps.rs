//! Tests that sleep.
//!
//! A test waits for a condition, not for a time: a pause that is long enough on one machine is too
//! short on another, and wastes time on most. Each call of `sleep` or `sleep_until` in test code
//! needs a reason: `// sleep: the time between two packets is the subject`, on its line or the line
//! above.

use super::sources::{SourceFile, Sources};

/// A call of `sleep` in test code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SleepCall {
    /// The location: `core/session/tests/exchange/slice.rs:12`.
    pub at: String,
    /// The stated reason; `None` if there is none.
    pub reason: Option<String>,
}

/// The prefix of the reason.
const MARK: &str = "// sleep:";

/// The names of calls that count.
const NAMES: &[&str] = &["sleep", "sleep_ms", "sleep_until"];

/// Crates that are used only by tests.
const TEST_FOLDERS: &[&str] = &["lab/rig/"];

/// All calls, sorted by place.
pub fn check(sources: &Sources) -> Vec<SleepCall> {
    let files = sources.files.iter();
    files
        .flat_map(|(name, file)| {
            let whole = TEST_FOLDERS.iter().any(|folder| name.starts_with(folder));
            sleeps_of(name, file, whole)
        })
        .collect()
}

fn sleeps_of(name: &str, file: &SourceFile, whole: bool) -> Vec<SleepCall> {
    let lines: Vec<&str> = file.text.lines().collect();
    let mut found: Vec<SleepCall> = Vec::new();
    for (at, token) in file.tokens.iter().enumerate() {
        let is_call = token.ident().is_some_and(|name| NAMES.contains(&name))
            && file.tokens.get(at + 1).is_some_and(|next| next.opens('('))
            && !(at > 0 && file.tokens[at - 1].ident() == Some("fn"));
        if !is_call || !(whole || token.test) {
            continue;
        }
        let line = |number: usize| lines.get(number.wrapping_sub(1)).copied();
        let here = line(token.line).and_then(reason);
        let above = || {
            let above = line(token.line - 1)?;
            above
                .trim_start()
                .starts_with("//")
                .then(|| reason(above))?
        };
        found.push(SleepCall {
            at: format!("{name}:{}", token.line),
            reason: here.or_else(above),
        });
    }
    found
}

fn reason(line: &str) -> Option<String> {
    let (_, reason) = line.split_once(MARK)?;
    let reason = reason.trim();
    (!reason.is_empty()).then(|| reason.to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::tokens;
    use super::*;

    fn sleeps(text: &str) -> Vec<(String, Option<String>)> {
        let file = SourceFile {
            tokens: tokens::flatten(text.parse().expect("valid tokens"), false),
            text: text.to_owned(),
        };
        let found = sleeps_of("a.rs", &file, false).into_iter();
        found.map(|sleep| (sleep.at, sleep.reason)).collect()
    }

    #[test]
    fn a_sleep_in_a_test_is_found_with_its_reason() {
        let found = sleeps(
            "fn product() { sleep(x); }\n\
             #[test] fn t() {\n\
               thread::sleep(x);\n\
               // sleep: time is the subject\n\
               tokio::time::sleep(x).await;\n\
               sleep(x); // sleep: so it is here\n\
               // nothing is said\n\
               sleep(x);\n\
               sleep(x); // sleep:\n\
             }\n",
        );
        let reason = |text: &str| Some(text.to_owned());
        assert_eq!(
            found,
            [
                ("a.rs:3".to_owned(), None),
                ("a.rs:5".to_owned(), reason("time is the subject")),
                ("a.rs:6".to_owned(), reason("so it is here")),
                ("a.rs:8".to_owned(), None),
                ("a.rs:9".to_owned(), None),
            ]
        );
    }

    #[test]
    fn defining_or_importing_sleep_is_not_sleeping() {
        let found = sleeps("#[cfg(test)] mod t { use std::thread::sleep; fn sleep(x: u8) {} }");
        assert_eq!(found, []);
    }

    #[test]
    fn one_reason_does_not_serve_two_sleeps() {
        let found = sleeps("#[test] fn t() {\nsleep(x); // sleep: yes\nsleep(x);\n}");
        assert_eq!(found[1].1, None);
    }
}
