//! The state that all parts of `dist` share: folders, version, profile, time.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::tools::Tools;
use crate::repository::root;
use crate::step::cargo;

/// The maintainer of the packages, in Debian's form. Cargo.toml of each packaged crate has the
/// same.
pub const MAINTAINER: &str = "The Cedos authors <cedos@users.noreply.github.com>";

/// Folders, version, profile and time of one run of `dist`.
pub struct DistContext {
    /// Cargo's target directory.
    pub target: PathBuf,
    /// The folder for packages.
    pub out: PathBuf,
    /// The workspace's version.
    pub version: String,
    /// Version and revision in Debian's form.
    pub deb_version: String,
    /// Cargo profile of the programs.
    pub profile: String,
    /// The time of the commit in seconds since 1970, which all files in archives have.
    pub epoch: u64,
    /// External tools with which packages are made.
    pub tools: Tools,
}

impl DistContext {
    /// Collects the values from cargo and git.
    pub fn new(profile: &str, revision: u32, install_tools: bool) -> Result<DistContext> {
        let metadata = metadata()?;
        let target = metadata["target_directory"]
            .as_str()
            .context("cargo names no target directory")?;
        let target = PathBuf::from(target);
        let version = package_field(&metadata, "cedos", "version")?;
        let out = target.join("packages");
        std::fs::create_dir_all(&out)?;
        Ok(DistContext {
            deb_version: format!("{version}-{revision}"),
            version,
            profile: profile.to_owned(),
            epoch: commit_time()?,
            tools: Tools::new(target.join("packages-tools"), install_tools),
            out,
            target,
        })
    }

    /// The folder in `target` in which cargo builds this profile, for a target triple or for this
    /// machine.
    pub fn built(&self, triple: Option<&str>) -> PathBuf {
        let folder = match self.profile.as_str() {
            "dev" | "test" => "debug",
            other => other,
        };
        match triple {
            Some(triple) => self.target.join(triple).join(folder),
            None => self.target.join(folder),
        }
    }

    /// An empty folder for intermediate files.
    pub fn scratch(&self, name: &str) -> Result<PathBuf> {
        let folder = self.target.join("packages-staging").join(name);
        if folder.exists() {
            std::fs::remove_dir_all(&folder)
                .with_context(|| format!("cannot empty {}", folder.display()))?;
        }
        std::fs::create_dir_all(&folder)?;
        Ok(folder)
    }
}

/// The output of `cargo metadata` for the workspace and all its dependencies.
pub fn metadata() -> Result<Value> {
    let arguments = ["metadata", "--format-version", "1", "--locked"];
    Ok(serde_json::from_str(&output(&mut cargo(arguments))?)?)
}

fn package_field(metadata: &Value, name: &str, field: &str) -> Result<String> {
    let packages = metadata["packages"].as_array();
    let package = packages
        .and_then(|packages| packages.iter().find(|package| package["name"] == name))
        .with_context(|| format!("cargo metadata lists no package {name}"))?;
    let value = package[field].as_str();
    Ok(value
        .with_context(|| format!("{name} has no {field}"))?
        .to_owned())
}

fn commit_time() -> Result<u64> {
    if let Some(said) = std::env::var_os("SOURCE_DATE_EPOCH") {
        let said = said.to_string_lossy().into_owned();
        return said
            .parse()
            .with_context(|| format!("SOURCE_DATE_EPOCH is {said:?}"));
    }
    let mut git = Command::new("git");
    git.args(["log", "-1", "--format=%ct"]).current_dir(root());
    let said = output(&mut git).context("without git, SOURCE_DATE_EPOCH says the time")?;
    Ok(said.trim().parse()?)
}

/// Runs a command that must succeed.
pub fn call(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("{} could not be started", name_of(command)))?;
    if !status.success() {
        bail!("{command:?}: {status}");
    }
    Ok(())
}

/// Runs a command that must succeed, and returns its standard output.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command
        .output()
        .with_context(|| format!("{} could not be started", name_of(command)))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{command:?}: {}: {}", output.status, said.trim());
    }
    Ok(String::from_utf8(output.stdout)?)
}

fn name_of(command: &Command) -> String {
    command.get_program().to_string_lossy().into_owned()
}

/// Copies a file and makes the folders above it.
pub fn copy(from: &Path, to: &Path) -> Result<()> {
    if let Some(folder) = to.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::copy(from, to)
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

/// The files in a folder whose names begin with `begin` and end with `end`, sorted.
pub fn files_like(folder: &Path, begin: &str, end: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        if name.starts_with(begin) && name.ends_with(end) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}
