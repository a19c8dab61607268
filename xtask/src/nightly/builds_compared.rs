//! Two builds of one commit in two folders, which must be one binary.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use sha2::{Digest, Sha256};

use super::bounded_command::run_within;
use super::night_context::NightContext;
use super::night_report::NightPart;
use crate::repository::root;
use crate::step::cargo;

/// How long a build may take beyond the share.
const BUILD_MAX: Duration = Duration::from_secs(45 * 60);

/// Builds the last commit twice, and compares.
pub fn run(context: &NightContext, budget: Duration) -> Result<NightPart> {
    // A long night builds what is shipped; a short one a program that is built in a minute.
    let built = match context.is_long {
        true => BuiltProgram {
            package: "cedos",
            kind: "--bin",
            name: "cedos",
            folder: "dist",
        },
        false => BuiltProgram {
            package: "cedos-lab-sim",
            kind: "--example",
            name: crate::seeds::EXAMPLE,
            folder: "dist/examples",
        },
    };
    let mut digests = Vec::new();
    // Folders of different names and lengths.
    for name in ["a", "another-folder"] {
        let folder = tempfile::Builder::new().prefix(name).tempdir()?;
        check_out(folder.path())?;
        let program = build(folder.path(), &built, budget + BUILD_MAX)?;
        digests.push(hex::encode(Sha256::digest(std::fs::read(program)?)));
    }
    let binary = built.name;
    let figures = json!({"binary": binary, "sha256": digests});
    Ok(match digests[0] == digests[1] {
        true => NightPart::held(format!("two builds of `{binary}` are one binary"), figures),
        false => NightPart::failed(format!("two builds of `{binary}` differ"), figures),
    })
}

/// Puts the files of the last commit into a folder.
fn check_out(folder: &Path) -> Result<()> {
    let archive = folder.join("commit.tar");
    let git = Command::new("git")
        .args(["archive", "--format=tar", "HEAD", "-o"])
        .arg(&archive)
        .current_dir(root())
        .status()
        .context("git")?;
    ensure!(git.success(), "git archive failed");
    let tar = Command::new("tar")
        .arg("-xf")
        .arg(&archive)
        .arg("-C")
        .arg(folder)
        .status()?;
    ensure!(tar.success(), "tar failed");
    Ok(std::fs::remove_file(archive)?)
}

/// A program that is built twice, and where cargo puts it.
struct BuiltProgram {
    package: &'static str,
    kind: &'static str,
    name: &'static str,
    folder: &'static str,
}

fn build(folder: &Path, built: &BuiltProgram, limit: Duration) -> Result<PathBuf> {
    let target = folder.join("target");
    let mut command = cargo([
        "build",
        "--locked",
        "--profile",
        "dist",
        "-p",
        built.package,
        built.kind,
        built.name,
    ]);
    command
        .current_dir(folder)
        .env("CARGO_TARGET_DIR", &target)
        .env(
            "CARGO_ENCODED_RUSTFLAGS",
            crate::repository::remapped_paths(folder),
        )
        .env(
            "CFLAGS",
            format!("-ffile-prefix-map={}=.", folder.display()),
        );
    let ended = run_within(&mut command, limit)?;
    ensure!(ended.succeeded, "{}", ended.end(20));
    Ok(target.join(built.folder).join(built.name))
}
