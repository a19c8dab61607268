//! The report of a night: `target/nightly/nightly.json` and `nightly.txt`, written after each part.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use serde_json::{Value, json};

use crate::repository::root;

/// The verdict on a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NightVerdict {
    /// All that was tried held.
    Held,
    /// Something that was tried did not hold.
    Failed,
    /// Nothing was tried.
    Skipped,
}

/// What a part of the night came to.
#[derive(Debug)]
pub struct NightPart {
    /// The verdict on what was tried.
    pub verdict: NightVerdict,
    /// What was done, or why it was not, in a sentence.
    pub text: String,
    /// Figures, for machines.
    pub figures: Value,
}

impl NightPart {
    /// A part that held, with what was done.
    pub fn held(text: impl Into<String>, figures: Value) -> NightPart {
        NightPart {
            verdict: NightVerdict::Held,
            text: text.into(),
            figures,
        }
    }

    /// A part that failed.
    pub fn failed(text: impl Into<String>, figures: Value) -> NightPart {
        NightPart {
            verdict: NightVerdict::Failed,
            ..NightPart::held(text, figures)
        }
    }

    /// A part that was not run, and why.
    pub fn skipped(why: impl Into<String>) -> NightPart {
        NightPart {
            verdict: NightVerdict::Skipped,
            ..NightPart::held(why, Value::Null)
        }
    }
}

/// The parts so far.
pub struct NightReport {
    folder: PathBuf,
    salt: u64,
    minutes: u64,
    parts: Vec<(String, NightPart, f64)>,
}

impl NightReport {
    /// An empty report.
    pub fn begin(salt: u64, minutes: u64) -> Result<NightReport> {
        let folder = match std::env::var_os("CARGO_TARGET_DIR") {
            Some(target) => PathBuf::from(target),
            None => root().join("target"),
        };
        let folder = folder.join("nightly");
        std::fs::create_dir_all(&folder)?;
        Ok(NightReport {
            folder,
            salt,
            minutes,
            parts: Vec::new(),
        })
    }

    /// Runs a part. One that cannot be run has failed; the others run all the same.
    pub fn run(&mut self, name: &str, part: impl FnOnce() -> Result<NightPart>) -> Result<()> {
        eprintln!("── {name}");
        let begun = Instant::now();
        let part =
            part().unwrap_or_else(|error| NightPart::failed(format!("{error:#}"), Value::Null));
        self.add(name, part, begun.elapsed().as_secs_f64())
    }

    /// Notes a part that was not asked for.
    pub fn leave_out(&mut self, name: &str) -> Result<()> {
        self.add(name, NightPart::skipped("not asked for (--only)"), 0.0)
    }

    fn add(&mut self, name: &str, part: NightPart, seconds: f64) -> Result<()> {
        eprintln!("{}", line(name, &part, seconds));
        self.parts.push((name.to_owned(), part, seconds));
        self.write()
    }

    /// Prints all parts, and returns whether none failed.
    pub fn finish(&self) -> Result<bool> {
        print!("{}", self.text());
        println!("{}", self.folder.join("nightly.json").display());
        let is_failed =
            |(_, part, _): &(String, NightPart, f64)| part.verdict == NightVerdict::Failed;
        Ok(!self.parts.iter().any(is_failed))
    }

    fn write(&self) -> Result<()> {
        let parts: Vec<Value> = self
            .parts
            .iter()
            .map(|(name, part, seconds)| {
                json!({
                    "part": name,
                    "verdict": word(part.verdict),
                    "text": part.text,
                    "seconds": seconds.round(),
                    "figures": part.figures,
                })
            })
            .collect();
        let report = json!({"salt": self.salt, "minutes": self.minutes, "parts": parts});
        std::fs::write(self.folder.join("nightly.json"), format!("{report:#}\n"))?;
        Ok(std::fs::write(
            self.folder.join("nightly.txt"),
            self.text(),
        )?)
    }

    fn text(&self) -> String {
        let mut text = format!("night of {} minutes, salt {}\n", self.minutes, self.salt);
        for (name, part, seconds) in &self.parts {
            text += &line(name, part, *seconds);
            text.push('\n');
        }
        text
    }
}

fn line(name: &str, part: &NightPart, seconds: f64) -> String {
    let word = word(part.verdict);
    format!("{word:<8} {name:<13} {seconds:>5.0} s  {}", part.text)
}

fn word(verdict: NightVerdict) -> &'static str {
    match verdict {
        NightVerdict::Held => "held",
        NightVerdict::Failed => "FAILED",
        NightVerdict::Skipped => "skipped",
    }
}
