//! Whether the stated minimum Rust version is enough for every dependency.
//!
//! `rust-version` in the workspace is a promise to users who build the workspace. Each dependency
//! states its own; the workspace's must not be lower than any of them.

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::step::cargo;

type Version = (u64, u64, u64);

/// Compares the versions; returns a description of the result.
pub fn check() -> Result<String> {
    judge(&metadata()?)
}

/// The version that the workspace states, as rustup names its toolchain.
pub fn stated_toolchain() -> Result<String> {
    let metadata = metadata()?;
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let own = packages.filter(|package| package["source"].is_null());
    own.filter_map(|package| parse(package["rust_version"].as_str()?))
        .min()
        .map(show)
        .context("no package of the workspace states a rust-version")
}

fn metadata() -> Result<Value> {
    let output = cargo([
        "metadata",
        "--all-features",
        "--format-version",
        "1",
        "--locked",
    ])
    .output()
    .context("cargo metadata could not be started")?;
    if !output.status.success() {
        bail!(
            "cargo metadata: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn judge(metadata: &Value) -> Result<String> {
    let packages = metadata["packages"]
        .as_array()
        .context("cargo metadata lists no packages")?;
    let stated = |package: &Value| -> Option<(Version, String)> {
        let version = parse(package["rust_version"].as_str()?)?;
        Some((
            version,
            format!(
                "{} {}",
                package["name"].as_str()?,
                package["version"].as_str()?
            ),
        ))
    };
    // Packages without a source are the workspace's own.
    let (own, others): (Vec<_>, Vec<_>) = packages
        .iter()
        .partition(|package| package["source"].is_null());
    let ours = own
        .into_iter()
        .filter_map(stated)
        .map(|(version, _)| version)
        .min()
        .context("no package of the workspace states a rust-version")?;
    let highest = others.into_iter().filter_map(stated).max();
    match highest {
        Some((theirs, name)) if theirs > ours => bail!(
            "the workspace states Rust {} and {name} needs {}: raise rust-version in Cargo.toml, \
             or hold that dependency back",
            show(ours),
            show(theirs)
        ),
        Some((theirs, name)) => Ok(format!(
            "stated Rust {} is enough; the most a dependency asks for is {} ({name})",
            show(ours),
            show(theirs)
        )),
        None => Ok("no dependency states a Rust version".to_owned()),
    }
}

fn parse(version: &str) -> Option<Version> {
    let mut parts = version.split('.').map(str::parse);
    let mut next = || parts.next().map_or(Some(0), Result::ok);
    Some((next()?, next()?, next()?))
}

fn show((major, minor, patch): Version) -> String {
    format!("{major}.{minor}.{patch}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(ours: &str, theirs: &str) -> Value {
        serde_json::json!({"packages": [
            {"name": "us", "version": "0.1.0", "rust_version": ours, "source": null},
            {"name": "dep", "version": "2.0.0", "rust_version": theirs, "source": "registry"},
            {"name": "old", "version": "1.0.0", "rust_version": null, "source": "registry"},
        ]})
    }

    #[test]
    fn a_dependency_that_needs_more_than_we_state_is_named() {
        let error = judge(&metadata("1.92", "1.93.1")).expect_err("1.93.1 > 1.92");
        assert!(
            error.to_string().contains("dep 2.0.0 needs 1.93.1"),
            "{error}"
        );
    }

    #[test]
    fn equal_versions_are_enough() {
        assert!(judge(&metadata("1.92", "1.92.0")).is_ok());
        assert!(judge(&metadata("1.100", "1.99")).is_ok());
    }
}
