//! The verbs and options of our programs, as their `--help` lists them.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The programs whose options are looked up. The build of the tests makes the first two.
pub const PROGRAMS: [&str; 3] = ["cedos", "cedos-lab", "cedos-bench"];

/// Verbs that `cedos` passes on to the other programs.
const PASSED_ON: [(&str, &str); 5] = [
    ("demo", "cedos-lab"),
    ("lab", "cedos-lab"),
    ("sim", "cedos-lab"),
    ("repro", "cedos-lab"),
    ("bench", "cedos-bench"),
];

/// Programs that have been built, and what they said of their verbs so far.
#[derive(Debug)]
pub struct ProgramHelp {
    folder: PathBuf,
    known: RefCell<BTreeMap<Vec<String>, VerbHelp>>,
}

/// What a verb takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct VerbHelp {
    verbs: BTreeSet<String>,
    /// Options, and whether a word follows as their value.
    options: BTreeMap<String, bool>,
}

impl ProgramHelp {
    /// The programs in `folder`, where Cargo puts them, or `None` if they have not been built.
    pub fn of(folder: &Path) -> Option<ProgramHelp> {
        let are_built = PROGRAMS[..2].iter().all(|name| folder.join(name).is_file());
        are_built.then(|| ProgramHelp {
            folder: folder.to_owned(),
            known: RefCell::default(),
        })
    }

    /// The error in a command of one of our programs, if there is one.
    ///
    /// # Errors
    /// The program could not be asked.
    pub fn fault(&self, words: &[String]) -> Result<Option<String>> {
        let verb = words.get(1).map(String::as_str);
        let passed_on = PASSED_ON
            .iter()
            .find(|(passed, _)| words[0] != "cedos-bench" && verb == Some(passed));
        let (program, rest) = match passed_on {
            Some((_, program @ "cedos-bench")) => (*program, &words[2..]),
            Some((_, program)) => (*program, &words[1..]),
            None => (words[0].as_str(), &words[1..]),
        };
        if !self.folder.join(program).is_file() {
            return Ok(None); // `cedos-bench`, which has no tests of the whole program.
        }
        let mut chain = vec![program.to_owned()];
        let mut help = self.verb_help(&chain)?;
        let mut rest = rest.iter();
        while let Some(word) = rest.next() {
            let word = word.trim_matches(|c| "[](),.\"'".contains(c));
            if word == "--" {
                break; // What follows is another program's.
            }
            if let Some(option) = word.strip_prefix("--") {
                let (name, has_value) = match option.split_once(['=', '[']) {
                    Some((name, _)) => (name, true),
                    None => (option, false),
                };
                match help.options.get(name) {
                    Some(takes_value) if *takes_value && !has_value => drop(rest.next()),
                    Some(_) => {}
                    None if is_placeholder(name) => {}
                    None => {
                        return Ok(Some(format!(
                            "{} as last built has no --{name}",
                            chain.join(" ")
                        )));
                    }
                }
            } else if help.verbs.contains(word) {
                chain.push(word.to_owned());
                help = self.verb_help(&chain)?;
            } else if !help.verbs.is_empty() && is_verb(word) {
                chain.push(word.to_owned());
                help = match self.verb_help(&chain) {
                    Ok(help) => help, // A verb that the list leaves out.
                    Err(_) => {
                        let before = chain[..chain.len() - 1].join(" ");
                        return Ok(Some(format!("{before} as last built has no verb {word}")));
                    }
                };
            } else if chain.last().is_some_and(|verb| verb == "run") && chain.len() == 2 {
                break; // The options of the program that is run.
            }
        }
        Ok(None)
    }

    fn verb_help(&self, chain: &[String]) -> Result<VerbHelp> {
        if let Some(known) = self.known.borrow().get(chain) {
            return Ok(known.clone());
        }
        let told = Command::new(self.folder.join(&chain[0]))
            .args(&chain[1..])
            .arg("--help")
            .output()
            .with_context(|| format!("{} could not be started", chain[0]))?;
        if !told.status.success() {
            let said = String::from_utf8_lossy(&told.stderr);
            bail!("{} --help: {}", chain.join(" "), said.trim());
        }
        let help = read_help(&String::from_utf8_lossy(&told.stdout));
        self.known.borrow_mut().insert(chain.to_vec(), help.clone());
        Ok(help)
    }
}

fn is_placeholder(word: &str) -> bool {
    word.is_empty() || word.contains('…') || word.chars().any(|c| c.is_ascii_uppercase())
}

fn is_verb(word: &str) -> bool {
    word.starts_with(|c: char| c.is_ascii_lowercase())
        && word.chars().all(|c| c == '-' || c.is_ascii_lowercase())
}

/// Reads what clap prints: verbs stand two columns in, with two spaces behind them, below a heading, and options at the
/// beginning of their lines.
fn read_help(text: &str) -> VerbHelp {
    let mut help = VerbHelp::default();
    let mut lists_verbs = false;
    for line in text.lines() {
        if !line.starts_with(' ') && !line.is_empty() {
            lists_verbs = line.ends_with(':') && line != "Examples:";
        }
        let word = line.trim_start();
        if let Some((name, rest)) = option_of(word) {
            help.options.insert(name, rest.starts_with(" <"));
        } else if lists_verbs
            && line.len() - word.len() == 2
            && let Some((verb, _)) = word.split_once("  ")
            && is_verb(verb)
        {
            help.verbs.insert(verb.to_owned());
        }
    }
    help
}

/// The long option with which a line of help begins, and the rest of the line.
fn option_of(line: &str) -> Option<(String, &str)> {
    let long = match line.strip_prefix("--") {
        Some(long) => long,
        None => line.strip_prefix('-')?.split_once(", --")?.1,
    };
    let end = long
        .find(|c: char| !(c == '-' || c.is_ascii_alphanumeric()))
        .unwrap_or(long.len());
    Some((long[..end].to_owned(), &long[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELP: &str = "\
Examples:
  cedos get list  shows a list

Fetches

Usage: cedos get [OPTIONS] <URL>

Commands:
  list  Lists
  show  Shows one

Options:
      --by <TIME>        Finish by then
  -o, --output <FILE>    Where
      --policy[=<WORD>]  Which
  -h, --help             Print help
";

    #[test]
    fn verbs_and_options_are_read_from_help() {
        let help = read_help(HELP);
        assert_eq!(help.verbs.iter().collect::<Vec<_>>(), ["list", "show"]);
        let options: Vec<(&str, bool)> = help
            .options
            .iter()
            .map(|(name, takes_value)| (name.as_str(), *takes_value))
            .collect();
        assert_eq!(
            options,
            [
                ("by", true),
                ("help", false),
                ("output", true),
                ("policy", false)
            ]
        );
    }
}
