//! `cargo xtask rules`: checks the repository's own rules, as far as a program can.
//!
//! ```text
//!  cargo metadata, *.rs ──▶ sources ──▶ folders · unused · circles · type_names
//!                              └▶ tokens ──▶ doc_comments · sleeps · unsafe_code · foreign_data
//!  cargo metadata, */Cargo.lock ──▶ lock_files
//!  packaging/systemd/*.service ──▶ units
//!  docs/protocol.md, docs/security.md ──▶ protocol · promises
//!  *.md, `--help` of our programs ──▶ documented_commands
//!  sources, documents, bindings, pages ──▶ wording
//! ```
//!
//! Each count has a ceiling ([`CEILINGS`]), which may be lowered but never raised.

mod circles;
mod doc_comments;
mod documented_commands;
mod folders;
mod foreign_data;
mod lock_files;
mod program_help;
mod promises;
mod protocol;
mod sleeps;
mod sources;
mod tokens;
mod type_names;
mod units;
mod unsafe_code;
mod unused;
mod wording;

use std::path::Path;

use anyhow::Result;
use serde_json::{Value, json};

use circles::Circle;
use program_help::ProgramHelp;
use sleeps::SleepCall;
use sources::Sources;
use units::UnitExposure;
use unsafe_code::UnsafeCode;

/// The current maximum of each count: a change that lowers a count lowers its number here, and no
/// number is ever raised. The aim is 3 for the circle of files and 0 for the others.
const CEILINGS: [(&str, usize); 11] = [
    ("folder_rule_breaches", 0),
    ("unused_dependencies", 0),
    ("differences_of_lock_files", 0),
    ("largest_file_circle", 3),
    ("duplicate_type_names", 0),
    ("doc_comments_that_do_not_stand_alone", 0),
    ("sleeps_without_reason", 0),
    ("unsafe_code_without_reason", 0),
    ("parsers_that_reach_out", 0),
    ("documented_commands_that_do_not_exist", 0),
    ("uses_of_retired_words", 0),
];

/// Options of the verb `rules`.
#[derive(Debug, Default, clap::Args)]
pub struct RulesOptions {
    /// Print one JSON object with every count and every finding
    #[arg(long)]
    json: bool,
    /// Print every finding below its count
    #[arg(long)]
    list: bool,
}

/// Runs every rule, prints what was found, and returns whether all hold.
///
/// # Errors
/// The sources cannot be read.
pub fn run(root: &Path, options: &RulesOptions) -> Result<bool> {
    let report = RulesReport::read(root)?;
    if options.json {
        println!("{:#}", report.to_json());
    } else {
        report.print(options.list);
    }
    Ok(report.holds())
}

/// The findings of every rule.
struct RulesReport {
    folder_breaches: Vec<String>,
    unused: Vec<String>,
    lock_files: Vec<String>,
    circles: Vec<Circle>,
    type_names: Vec<String>,
    doc_comments: Vec<String>,
    doc_comments_read: usize,
    sleeps: Vec<SleepCall>,
    unsafe_code: UnsafeCode,
    reaching_parsers: Vec<String>,
    missing_commands: Vec<String>,
    retired_words: Vec<String>,
    /// Whether our programs were there, so that their options could be looked up.
    options_were_read: bool,
    units: Option<Vec<UnitExposure>>,
    protocol: Result<String>,
}

impl RulesReport {
    fn read(root: &Path) -> Result<Self> {
        let sources = Sources::read(root)?;
        let help = ProgramHelp::of(&sources.programs);
        Ok(Self {
            folder_breaches: folders::check(&sources),
            unused: unused::check(&sources),
            lock_files: lock_files::check(root, &sources)?,
            circles: circles::check(&sources),
            type_names: type_names::check(&sources),
            doc_comments: doc_comments::check(&sources),
            doc_comments_read: doc_comments::count(&sources),
            sleeps: sleeps::check(&sources),
            unsafe_code: unsafe_code::count(&sources),
            reaching_parsers: foreign_data::check(&sources),
            missing_commands: documented_commands::check(root, &sources, help.as_ref())?,
            retired_words: wording::check(root)?,
            options_were_read: help.is_some(),
            units: units::check(root)?,
            protocol: documents(root),
        })
    }

    fn sleeps_without_reason(&self) -> Vec<String> {
        let bare = self.sleeps.iter().filter(|sleep| sleep.reason.is_none());
        bare.map(|sleep| sleep.at.clone()).collect()
    }

    fn largest_circle(&self) -> usize {
        self.circles.first().map_or(1, |circle| circle.files.len())
    }

    /// Each count by its name, in the order of [`CEILINGS`].
    fn counts(&self) -> [usize; 11] {
        [
            self.folder_breaches.len(),
            self.unused.len(),
            self.lock_files.len(),
            self.largest_circle(),
            self.type_names.len(),
            self.doc_comments.len(),
            self.sleeps_without_reason().len(),
            self.unsafe_code.without_reason.len(),
            self.reaching_parsers.len(),
            self.missing_commands.len(),
            self.retired_words.len(),
        ]
    }

    fn holds(&self) -> bool {
        let counts = self.counts();
        let mut pairs = CEILINGS.iter().zip(counts);
        self.protocol.is_ok()
            && self.exposed_units().is_empty()
            && pairs.all(|((_, ceiling), count)| count <= *ceiling)
    }

    /// Units that are more exposed than they may be.
    fn exposed_units(&self) -> Vec<&UnitExposure> {
        let measured = self.units.iter().flatten();
        measured
            .filter(|unit| unit.tenths > unit.tenths_max)
            .collect()
    }

    fn to_json(&self) -> Value {
        let circles: Vec<Value> = self
            .circles
            .iter()
            .map(|circle| {
                json!({
                    "target": circle.target,
                    "size": circle.files.len(),
                    "files": circle.files,
                    "needs": circle.needs,
                })
            })
            .collect();
        let sleeps: Vec<Value> = self
            .sleeps
            .iter()
            .map(|sleep| json!({"at": sleep.at, "reason": sleep.reason}))
            .collect();
        let ceilings: serde_json::Map<String, Value> = CEILINGS
            .iter()
            .map(|(name, ceiling)| ((*name).to_owned(), json!(ceiling)))
            .collect();
        let protocol = match &self.protocol {
            Ok(said) => json!({"hold": true, "found": said}),
            Err(error) => json!({"hold": false, "found": format!("{error:#}")}),
        };
        json!({
            "folder_rules_hold": self.folder_breaches.is_empty(),
            "folder_rule_breaches": self.folder_breaches,
            "unused_dependencies": self.unused.len(),
            "unused_dependencies_list": self.unused,
            "differences_of_lock_files": self.lock_files.len(),
            "differences_of_lock_files_list": self.lock_files,
            "largest_file_circle": self.largest_circle(),
            "file_circles": circles,
            "duplicate_type_names": self.type_names.len(),
            "duplicate_type_names_list": self.type_names,
            "doc_comments": self.doc_comments_read,
            "doc_comments_that_do_not_stand_alone": self.doc_comments.len(),
            "doc_comments_that_do_not_stand_alone_list": self.doc_comments,
            "sleeps_without_reason": self.sleeps_without_reason().len(),
            "sleeps_in_tests": sleeps,
            "unsafe_code": self.unsafe_code.shipped.values().sum::<usize>(),
            "unsafe_code_by_crate": self.unsafe_code.shipped,
            "unsafe_code_in_tests": self.unsafe_code.in_tests,
            "unsafe_code_without_reason": self.unsafe_code.without_reason.len(),
            "unsafe_code_without_reason_list": self.unsafe_code.without_reason,
            "parsers_that_reach_out": self.reaching_parsers.len(),
            "parsers_that_reach_out_list": self.reaching_parsers,
            "documented_commands_that_do_not_exist": self.missing_commands.len(),
            "documented_commands_that_do_not_exist_list": self.missing_commands,
            "uses_of_retired_words": self.retired_words.len(),
            "uses_of_retired_words_list": self.retired_words,
            "documented_options_were_read": self.options_were_read,
            "unit_exposure": self.units.as_ref().map(|units| units.iter().map(UnitExposure::to_json).collect::<Vec<_>>()),
            "protocol_rules": protocol,
            "ceilings": ceilings,
            "holds": self.holds(),
        })
    }

    fn print(&self, list: bool) {
        let circles: Vec<String> = self
            .circles
            .iter()
            .filter(|circle| circle.files.len() > LISTED_CIRCLE)
            .map(|circle| {
                let (size, target) = (circle.files.len(), &circle.target);
                let mut text = format!("{size} files in {target}: {}", circle.files.join(" "));
                if list {
                    for need in &circle.needs {
                        text.push_str("\n      ");
                        text.push_str(need);
                    }
                }
                text
            })
            .collect();
        let bare = self.sleeps_without_reason();
        let findings: [&[String]; 11] = [
            &self.folder_breaches,
            &self.unused,
            &self.lock_files,
            &circles,
            &self.type_names,
            &self.doc_comments,
            &bare,
            &self.unsafe_code.without_reason,
            &self.reaching_parsers,
            &self.missing_commands,
            &self.retired_words,
        ];
        for (((name, ceiling), count), found) in CEILINGS.iter().zip(self.counts()).zip(findings) {
            let words = name.replace('_', " ");
            let verdict = if count > *ceiling { "FAILED" } else { "ok    " };
            println!("{verdict}  {count:>5}  {words} (at most {ceiling})");
            // Failures are always listed.
            if list || count > *ceiling {
                for line in found {
                    println!("    {line}");
                }
            }
        }
        let shipped: usize = self.unsafe_code.shipped.values().sum();
        let in_tests = self.unsafe_code.in_tests;
        println!("unsafe code: {shipped} places, and {in_tests} in tests and the laboratory");
        if !self.options_were_read {
            println!(
                "skipped: the options in documents, for the programs are not built (cargo test --workspace --no-run)"
            );
        }
        match &self.units {
            Some(units) => units.iter().for_each(|unit| println!("{unit}")),
            None => {
                println!("skipped: the exposure of units, for systemd-analyze is not installed")
            }
        }
        match &self.protocol {
            Ok(said) => println!("{said}"),
            Err(error) => println!("FAILED  {error:#}"),
        }
    }
}

/// Checks the documents whose rules and promises name code and tests; returns a description of the
/// result.
fn documents(root: &Path) -> Result<String> {
    let (protocol, stated) = protocol::check(root)?;
    let promises = promises::check(root, &stated)?;
    Ok(format!("{protocol}\n{promises}"))
}

/// Circles of at most this size are the aim, and are not listed.
const LISTED_CIRCLE: usize = 3;
