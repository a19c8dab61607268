//! Tools that a test needs and this machine lacks: the test says so and ends, unless the run requires the tool.
//!
//! ```text
//!  CEDOS_REQUIRE unset, or without it ─▶ a line on standard error, the test passes
//!  CEDOS_REQUIRE=browsers             ─▶ the test fails where Chromium, Firefox or the accessibility checker is missing
//! ```
//!
//! A run that is to be relied on names what it must have; `cargo xtask nightly` does so for browsers.

use std::path::PathBuf;

/// The environment variable with the tools that a run of the tests must have, separated by commas.
pub const REQUIRE_VARIABLE: &str = "CEDOS_REQUIRE";

/// The word for all of [`BROWSERS`].
const BROWSERS_WORD: &str = "browsers";

/// What the tests of pages need.
const BROWSERS: [&str; 3] = ["chromium", "firefox", "axe"];

/// All that may be required.
const TOOLS: [&str; 10] = [
    "chromium",
    "firefox",
    "axe",
    "namespaces",
    "dbus",
    "redis",
    "gpodder",
    "podget",
    "mpv",
    "strace",
];

/// Whether a run that must have `required` must have this tool.
fn is_required(required: &str, tool: &str) -> bool {
    let words = required.split(',').map(str::trim);
    let mut words = words.filter(|word| !word.is_empty());
    words.any(|word| {
        let is_known = word == BROWSERS_WORD || TOOLS.contains(&word);
        assert!(
            is_known,
            "{REQUIRE_VARIABLE} names `{word}`, which is none of {BROWSERS_WORD}, {}",
            TOOLS.join(", ")
        );
        word == tool || word == BROWSERS_WORD && BROWSERS.contains(&tool)
    })
}

/// Says that a test cannot run because a tool is missing; `text` is the sentence.
///
/// # Panics
/// The run requires the tool.
pub fn skip_without(tool: &str, text: &str) {
    assert!(TOOLS.contains(&tool), "`{tool}` cannot be required");
    let required = std::env::var(REQUIRE_VARIABLE).unwrap_or_default();
    assert!(
        !is_required(&required, tool),
        "{text}; {REQUIRE_VARIABLE}={required} asks for it"
    );
    eprintln!("skipped: {text}");
}

/// The path of a program; none if it is not installed.
#[must_use]
pub fn program_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Ordinary users often lack the folders where servers live.
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    let mut found = folders.map(|folder| folder.join(name));
    found.find(|file| file.is_file())
}

/// Whether a program is installed; says that the test is skipped if not.
#[must_use]
pub fn is_installed(name: &str) -> bool {
    let found = program_path(name).is_some();
    if !found {
        eprintln!("skipped: {name} is not installed");
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_requires_what_it_names_and_nothing_else() {
        assert!(!is_required("", "chromium"));
        assert!(is_required("browsers", "axe"));
        assert!(is_required("redis, chromium", "chromium"));
        assert!(!is_required("redis,chromium", "firefox"));
        assert!(!is_required("browsers", "redis"));
    }

    #[test]
    #[should_panic(expected = "`chrome`, which is none of browsers, chromium")]
    fn a_word_that_means_nothing_is_refused_rather_than_passed_over() {
        is_required("chrome", "redis");
    }
}
