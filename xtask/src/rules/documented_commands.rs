//! Checks the commands that documents show: each verb and option is one that the program has, each test exists, and
//! each file of the repository is there.
//!
//! ```text
//!  `cedos get --by 18:00 URL`            ──▶ `cedos get --help` has `--by`
//!  `cargo test -p cedos --test get x::`  ──▶ package cedos has the test `get`, and that has tests named `x::…`
//!  `cedos lab run lab/scenarios/y.toml`  ──▶ the file is there
//! ```
//!
//! Words with `…`, and those in capitals, stand for something and are passed over.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Result;

use super::program_help::{PROGRAMS, ProgramHelp};
use super::promises::tests_of;
use super::sources::{CrateTarget, Sources, TargetKind, WorkspacePackage};
use crate::repository::files_below;

/// Documents whose commands need not exist: those of the past, and recorded mistakes with what is said of them.
const NOT_CHECKED: [&str; 4] = [
    "CHANGELOG.md",
    "docs/decisions",
    "docs/reports",
    "docs/messages.md",
];

/// A command as a document shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DocumentedCommand {
    /// The file and the line: `docs/guide.md:12`.
    pub at: String,
    /// The program and its arguments.
    pub words: Vec<String>,
}

/// The errors in commands of the repository's documents, one line each. Options of our own programs are looked
/// up only if `help` is there.
///
/// # Errors
/// A document cannot be read, or a program cannot be asked.
pub fn check(root: &Path, sources: &Sources, help: Option<&ProgramHelp>) -> Result<Vec<String>> {
    let mut faults = BTreeSet::new();
    for command in commands_of(root)? {
        let mut found = file_faults(root, &command);
        match command.words[0].as_str() {
            "cargo" => found.extend(cargo_fault(sources, &command)),
            _ => {
                if let Some(help) = help {
                    found.extend(help.fault(&command.words)?);
                }
            }
        }
        let text = command.words.join(" ");
        faults.extend(
            found
                .iter()
                .map(|fault| format!("{}: `{text}`: {fault}", command.at)),
        );
    }
    Ok(faults.into_iter().collect())
}

/// The commands of all documents that describe the present.
fn commands_of(root: &Path) -> Result<Vec<DocumentedCommand>> {
    let mut found = Vec::new();
    for path in files_below(root, "md")? {
        let name = path.strip_prefix(root)?.to_string_lossy().into_owned();
        if !NOT_CHECKED.iter().any(|not| name.starts_with(not)) {
            found.extend(read_commands(&name, &std::fs::read_to_string(&path)?));
        }
    }
    Ok(found)
}

/// The commands in code marks and in fenced blocks of a document.
fn read_commands(name: &str, text: &str) -> Vec<DocumentedCommand> {
    let mut found = Vec::new();
    let mut fenced = false;
    // Whether commands of the block follow a prompt, and other lines are what programs print.
    let mut has_prompts = false;
    // A line of a block that ends with a backslash, and the number of its first line.
    let mut begun: Option<(usize, String)> = None;
    for (index, line) in text.lines().enumerate() {
        if let Some(kind) = line.trim_start().strip_prefix("```") {
            (fenced, begun) = (!fenced, None);
            has_prompts = matches!(kind.trim(), "text" | "console");
            continue;
        }
        if fenced {
            let (first, mut whole) = begun.take().unwrap_or((index, String::new()));
            whole.push_str(line.trim_end().trim_end_matches('\\'));
            if line.trim_end().ends_with('\\') {
                begun = Some((first, whole));
            } else {
                let command = match whole.split_once("$ ") {
                    Some((_, command)) => command,
                    None if has_prompts => continue,
                    None => &whole,
                };
                found.extend(split_commands(name, first, command));
            }
        } else {
            for code in line.split('`').skip(1).step_by(2) {
                found.extend(split_commands(name, index, code));
            }
        }
    }
    found
}

/// The commands of one line for a shell.
fn split_commands(name: &str, index: usize, line: &str) -> Vec<DocumentedCommand> {
    let line = line.split(" #").next().unwrap_or_default();
    let line = line.replace("\\|", " ALTERNATIVE ");
    let parts = line.split(['|', ';', '&', '>']).map(|part| {
        let words = part.split_whitespace().map(str::to_owned);
        words
            .skip_while(|word| word == "sudo" || is_assignment(word))
            .collect::<Vec<_>>()
    });
    let is_command = |words: &Vec<String>| {
        let mut all = words.iter();
        let is_program = all
            .next()
            .is_some_and(|program| program == "cargo" || PROGRAMS.contains(&program.as_str()));
        // `cedos get: it failed` is what a program says.
        is_program && !words[1..].first().is_some_and(|verb| verb.ends_with(':'))
    };
    parts
        .filter(is_command)
        .map(|words| DocumentedCommand {
            at: format!("{name}:{}", index + 1),
            words,
        })
        .collect()
}

fn is_assignment(word: &str) -> bool {
    word.split_once('=').is_some_and(|(name, _)| {
        !name.is_empty() && name.chars().all(|c| c == '_' || c.is_ascii_uppercase())
    })
}

/// Files of the laboratory that a command names and that are not there.
fn file_faults(root: &Path, command: &DocumentedCommand) -> Vec<String> {
    let is_missing = |word: &&String| {
        word.starts_with("lab/")
            && !word.contains(['*', '…', '{'])
            && !word.chars().any(|c| c.is_ascii_uppercase())
            && !root.join(word).exists()
    };
    let missing = command.words.iter().filter(is_missing);
    let mut faults: Vec<String> = missing.map(|word| format!("{word} is not there")).collect();
    // Rows of the papers are files.
    if let [_, verb, row, ..] = &command.words[..]
        && verb == "repro"
        && row.starts_with(|c: char| c.is_ascii_alphabetic())
        && row != "ID"
        && !root.join(format!("lab/repro/{row}.toml")).exists()
    {
        faults.push(format!("there is no row {row}"));
    }
    faults
}

/// Whether a word stands for something else.
fn is_placeholder(word: &str) -> bool {
    word.contains('…') || word.chars().any(|c| c.is_ascii_uppercase())
}

/// The error in a command of cargo, if there is one.
fn cargo_fault(sources: &Sources, command: &DocumentedCommand) -> Option<String> {
    let mut words = command.words[1..].iter().map(String::as_str);
    let mut verb = words.next()?;
    if verb.starts_with('+') {
        verb = words.next()?;
    }
    if !matches!(verb, "test" | "run" | "build" | "check" | "bench") {
        return None; // Tools of others; the verbs of xtask are looked up in their help.
    }
    let (mut packages, mut targets, mut filters) = (Vec::new(), Vec::new(), Vec::new());
    let mut is_lib = false;
    while let Some(word) = words.next() {
        match word {
            "-p" | "--package" => packages.push(words.next()?),
            "--test" | "--example" | "--bin" => targets.push(words.next()?),
            "--lib" => is_lib = true,
            "--" if verb != "test" => break,
            "--profile" | "--features" | "--target" | "--skip" => drop(words.next()),
            _ if word.starts_with('-') => {}
            _ => filters.push(word),
        }
    }
    if packages
        .iter()
        .chain(&targets)
        .any(|word| is_placeholder(word))
    {
        return None;
    }
    let named: Vec<&WorkspacePackage> = sources
        .packages
        .iter()
        .filter(|package| packages.is_empty() || packages.contains(&package.name.as_str()))
        .collect();
    if let Some(none) = packages
        .iter()
        .find(|name| named.iter().all(|package| package.name != **name))
    {
        return Some(format!("there is no package {none}"));
    }
    let all = || named.iter().flat_map(|package| &package.targets);
    if let Some(none) = targets
        .iter()
        .find(|name| all().all(|target| target.name != **name))
    {
        return Some(format!("there is no target {none}"));
    }
    if verb != "test" {
        return None;
    }
    let chosen: Vec<&CrateTarget> = all()
        .filter(|target| match (is_lib, targets.is_empty()) {
            (false, true) => true,
            (true, _) if target.kind == TargetKind::Product => true,
            _ => targets.contains(&target.name.as_str()),
        })
        .collect();
    let tests: Vec<String> = chosen
        .iter()
        .flat_map(|target| test_names(sources, target))
        .collect();
    let is_none =
        |filter: &&str| !is_placeholder(filter) && !tests.iter().any(|test| test.contains(*filter));
    let none = filters.into_iter().find(is_none)?;
    Some(format!("no test has the name {none}"))
}

/// The names of a target's tests as its harness lists them, and those of modules in a file of others without these
/// modules' names.
fn test_names(sources: &Sources, target: &CrateTarget) -> Vec<String> {
    let mut paths = vec![String::new(); target.modules.len()];
    let mut names = Vec::new();
    for (index, module) in target.modules.iter().enumerate() {
        // Modules follow their parents.
        for (name, child) in &module.children {
            paths[*child] = format!("{}{name}::", paths[index]);
        }
        if let Some(file) = sources.files.get(&module.file) {
            let tests = tests_of(&file.text);
            names.extend(tests.iter().map(|test| format!("{}{test}", paths[index])));
            // A program of tests that needs a main of its own names them as its functions.
            if target.kind == TargetKind::Test && file.text.contains("\nfn main()") {
                let functions = file
                    .text
                    .lines()
                    .filter_map(|line| line.strip_prefix("fn "));
                let named = functions.filter_map(|rest| rest.split_once('('));
                names.extend(named.map(|(name, _)| name.to_owned()));
            }
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<Vec<String>> {
        let found = read_commands("a.md", text).into_iter();
        found.map(|command| command.words).collect()
    }

    #[test]
    fn commands_are_found_in_code_marks_and_blocks() {
        let text = "\
See `cedos get URL` and `cedos ls | head -1`, not `cedosx` or `cedos get: no network`.

```sh
$ sudo A=1 cedos vpn \\
    up   # as root
cedos get: a line of output
curl -O x && cargo test -p a
```

```text
me@here:~$ cedos net
cedos is what this line is about
```
";
        let found = words(text);
        let found: Vec<String> = found.iter().map(|words| words.join(" ")).collect();
        assert_eq!(
            found,
            [
                "cedos get URL",
                "cedos ls",
                "cedos vpn up",
                "cargo test -p a",
                "cedos net"
            ]
        );
        let lines = read_commands("a.md", text).into_iter();
        let lines: Vec<String> = lines.map(|command| command.at).collect();
        assert_eq!(lines, ["a.md:1", "a.md:1", "a.md:4", "a.md:7", "a.md:11"]);
    }

    #[test]
    fn a_test_that_does_not_exist_is_a_fault_and_placeholders_are_none() {
        let sources = Sources::read(&crate::repository::root()).unwrap();
        let fault = |text: &str| {
            let words = text.split(' ').map(str::to_owned).collect();
            let at = String::new();
            cargo_fault(&sources, &DocumentedCommand { at, words })
        };
        assert_eq!(fault("cargo test -p xtask documented_commands::"), None);
        assert_eq!(fault("cargo test -p CRATE --test NAME"), None);
        assert_eq!(
            fault("cargo test -p xtask documented_… -- --nocapture"),
            None
        );
        let none = fault("cargo test -p xtask no_such_module::").unwrap();
        assert_eq!(none, "no test has the name no_such_module::");
        let none = fault("cargo test -p no-such-package").unwrap();
        assert_eq!(none, "there is no package no-such-package");
        let none = fault("cargo run -p xtask --bin no-such-program").unwrap();
        assert_eq!(none, "there is no target no-such-program");
    }

    #[test]
    fn a_scenario_that_is_not_there_is_a_fault() {
        let command = |file: &str| DocumentedCommand {
            at: String::new(),
            words: ["cedos", "sim", "run", file].map(str::to_owned).to_vec(),
        };
        let root = crate::repository::root();
        assert!(file_faults(&root, &command("lab/scenarios/FILE")).is_empty());
        assert!(file_faults(&root, &command("lab/scenarios/outage.toml")).is_empty());
        let faults = file_faults(&root, &command("lab/scenarios/none.toml"));
        assert_eq!(faults, ["lab/scenarios/none.toml is not there"]);
    }
}
