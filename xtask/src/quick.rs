//! `cargo xtask quick`: the check between two commits.
//!
//! ```text
//!  changed files ▸ their packages ▸ every package that depends on one of them
//!                                     │
//!            format ▸ lints ▸ unit tests and the core's exchanges ▸ random scenarios
//! ```
//!
//! What it builds is a part of what `cargo xtask check` builds. It omits checks that take long and
//! seldom fail alone: the test programs that start processes and networks, the bindings for other
//! languages, the documentation, the MSRV. `cargo xtask check` runs those.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::repository::root;
use crate::step::{StepOutcome, Steps, cargo, has_subcommand, run as run_command};
use crate::totals::TestTotals;
use crate::{check, rules, seeds, test_programs};

/// The test program of the core in which two endpoints exchange packets.
const EXCHANGES: &str = "exchange";
/// The folder of the bindings for other languages, which have no unit tests.
const BINDINGS: &str = "bindings/";
/// The package that runs random scenarios.
const SIMULATOR: &str = "cedos-lab-sim";

/// Options of the verb `quick`.
#[derive(clap::Args)]
pub struct QuickOptions {
    /// Check what changed since this commit [default: uncommitted changes, or the last commit if
    /// there are none]
    #[arg(long, value_name = "COMMIT")]
    since: Option<String>,
}

/// Runs the steps for the changes; returns whether all succeeded.
pub fn run(options: &QuickOptions) -> Result<bool> {
    let files = changed_files(options.since.as_deref())?;
    let packages = Packages::read()?;
    let mut affected = packages.affected_by(&files);
    affected.retain(|name| !packages.folders[name].starts_with(BINDINGS));
    if affected.is_empty() {
        eprintln!("no package changed");
    } else {
        eprintln!("{} packages: {}", affected.len(), join(&affected));
    }
    let mut steps = Steps::default();
    steps.command("format", &mut cargo(["fmt", "--all", "--check"]));
    steps.run("rules", || {
        let held = rules::run(&root(), &rules::RulesOptions::default())?;
        Ok(if held {
            StepOutcome::Held
        } else {
            StepOutcome::Failed
        })
    });
    if !affected.is_empty() {
        steps.command(
            "lints",
            cargo(["clippy", "--workspace", "--locked", "--lib", "--bins"])
                .args(["--", "-D", "warnings"]),
        );
        steps.run("unit tests", || unit_tests(&packages, &affected));
    }
    if affected.contains(SIMULATOR) {
        steps.run("random scenarios", || run_command(&mut seeds::quick()?));
    }
    Ok(steps.summarise())
}

/// Runs the unit tests of the affected packages, and the core's exchanges.
///
/// All packages are built, which costs nothing if nothing changed: cargo would build external
/// crates again for each selection of packages, since each has other features.
fn unit_tests(packages: &Packages, affected: &BTreeSet<String>) -> Result<StepOutcome> {
    let targets = [
        "--workspace",
        "--locked",
        "--lib",
        "--bins",
        "--test",
        EXCHANGES,
        "--example",
        seeds::EXAMPLE,
    ];
    if has_subcommand("nextest") {
        let names = affected.iter().map(|name| format!("package({name})"));
        let filter = names.collect::<Vec<_>>().join(" + ");
        let mut command = cargo(["nextest", "run", "--no-fail-fast"]);
        return run_command(command.args(targets).args(["-E", &filter]));
    }
    let Some(programs) = test_programs::build(&[&["test"], &targets[..]].concat())? else {
        return Ok(StepOutcome::Failed);
    };
    let folders: BTreeSet<PathBuf> = affected
        .iter()
        .map(|name| root().join(&packages.folders[name]))
        .collect();
    let programs = programs
        .iter()
        .filter(|program| folders.contains(&program.folder));
    let mut totals = TestTotals::default();
    let held = test_programs::run(programs, &["--quiet"], check::SILENCE, &mut totals)?;
    totals.print();
    Ok(if held {
        StepOutcome::Held
    } else {
        StepOutcome::Failed
    })
}

/// Files that differ from `since`, and untracked files; relative to the root.
fn changed_files(since: Option<&str>) -> Result<Vec<String>> {
    let untracked = git(&["ls-files", "--others", "--exclude-standard"])?;
    let mut files = match since {
        Some(commit) => git(&["diff", "--name-only", commit])?,
        None => git(&["diff", "--name-only", "HEAD"])?,
    };
    files.extend(untracked);
    if files.is_empty() && since.is_none() {
        files = git(&["diff", "--name-only", "HEAD~1"])?;
    }
    Ok(files)
}

fn git(arguments: &[&str]) -> Result<Vec<String>> {
    let output = Command::new("git")
        .args(arguments)
        .current_dir(root())
        .output()
        .context("git could not be started")?;
    ensure!(
        output.status.success(),
        "git {}: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let text = String::from_utf8(output.stdout).context("git printed a name that is not UTF-8")?;
    Ok(text.lines().map(str::to_owned).collect())
}

/// The workspace's packages: the folder of each, and the packages that each needs.
struct Packages {
    folders: BTreeMap<String, String>,
    needs: BTreeMap<String, BTreeSet<String>>,
}

impl Packages {
    fn read() -> Result<Packages> {
        let output = cargo(["metadata", "--format-version", "1", "--no-deps", "--locked"])
            .output()
            .context("cargo metadata could not be started")?;
        ensure!(
            output.status.success(),
            "cargo metadata: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        let metadata = serde_json::from_slice(&output.stdout).context("cargo metadata")?;
        Packages::from_metadata(&metadata, &root())
    }

    fn from_metadata(metadata: &Value, root: &Path) -> Result<Packages> {
        let mut packages = Packages {
            folders: BTreeMap::new(),
            needs: BTreeMap::new(),
        };
        let listed = metadata["packages"]
            .as_array()
            .context("cargo metadata lists no packages")?;
        for package in listed {
            let name = package["name"].as_str().context("a package has no name")?;
            let manifest = package["manifest_path"]
                .as_str()
                .with_context(|| format!("{name} has no manifest"))?;
            let folder = Path::new(manifest)
                .parent()
                .and_then(|folder| folder.strip_prefix(root).ok())
                .with_context(|| format!("{manifest} is not in the repository"))?;
            let needs = package["dependencies"].as_array().into_iter().flatten();
            let needs = needs
                .filter(|dependency| dependency["path"].is_string())
                .filter_map(|dependency| dependency["name"].as_str().map(str::to_owned));
            packages.needs.insert(name.to_owned(), needs.collect());
            packages
                .folders
                .insert(name.to_owned(), folder.to_string_lossy().into_owned());
        }
        Ok(packages)
    }

    /// The packages that contain `files`, and every package that depends on one of these, directly
    /// or not. A file at the top that affects the whole build affects every package.
    fn affected_by(&self, files: &[String]) -> BTreeSet<String> {
        let mut affected = BTreeSet::new();
        for file in files {
            if matches!(file.as_str(), "Cargo.toml" | "Cargo.lock") {
                return self.folders.keys().cloned().collect();
            }
            affected.extend(self.owner(file).map(str::to_owned));
        }
        loop {
            let before = affected.len();
            for (name, needs) in &self.needs {
                if !needs.is_disjoint(&affected) {
                    affected.insert(name.clone());
                }
            }
            if affected.len() == before {
                return affected;
            }
        }
    }

    /// The package with the longest folder that contains `file`.
    fn owner(&self, file: &str) -> Option<&str> {
        self.folders
            .iter()
            .filter(|(_, folder)| Path::new(file).starts_with(folder))
            .max_by_key(|(_, folder)| folder.len())
            .map(|(name, _)| name.as_str())
    }
}

fn join(names: &BTreeSet<String>) -> String {
    names
        .iter()
        .map(String::as_str)
        .collect::<Vec<_>>()
        .join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packages() -> Packages {
        let package = |name: &str, folder: &str, needs: &[&str]| {
            let needs: Vec<Value> = needs
                .iter()
                .map(|need| serde_json::json!({ "name": need, "path": format!("/r/{need}") }))
                .chain([serde_json::json!({ "name": "serde", "path": null })])
                .collect();
            serde_json::json!({
                "name": name,
                "manifest_path": format!("/r/{folder}/Cargo.toml"),
                "dependencies": needs,
            })
        };
        let metadata = serde_json::json!({ "packages": [
            package("wire", "core/wire", &[]),
            package("session", "core/session", &["wire"]),
            package("agent", "apps/agent", &["session"]),
            package("traces", "lab/traces", &[]),
        ]});
        Packages::from_metadata(&metadata, Path::new("/r")).expect("well-formed")
    }

    fn affected(files: &[&str]) -> Vec<String> {
        let files: Vec<String> = files.iter().map(|file| (*file).to_owned()).collect();
        packages().affected_by(&files).into_iter().collect()
    }

    #[test]
    fn a_change_reaches_every_package_that_depends_on_it() {
        assert_eq!(
            affected(&["core/session/src/recovery.rs"]),
            ["agent", "session"]
        );
        assert_eq!(
            affected(&["core/wire/Cargo.toml"]),
            ["agent", "session", "wire"]
        );
        assert_eq!(affected(&["lab/traces/src/lib.rs"]), ["traces"]);
    }

    #[test]
    fn a_change_of_the_docs_alone_reaches_no_package() {
        assert!(affected(&["docs/testing.md", "README.md", "core/clippy.toml"]).is_empty());
    }

    #[test]
    fn a_change_of_the_workspace_reaches_every_package() {
        assert_eq!(
            affected(&["Cargo.lock"]),
            ["agent", "session", "traces", "wire"]
        );
    }

    #[test]
    fn a_folder_that_only_begins_alike_is_not_the_packages() {
        assert!(affected(&["core/wireless/src/lib.rs"]).is_empty());
    }
}
