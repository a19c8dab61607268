//! `--try`: tests packages in a fresh Debian, with one step for each requirement.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use super::bindings::{go_file, only};
use super::compile::StaticArch;
use super::context::DistContext;
use super::debian::DebianTrial;
use super::tools::system_program;
use crate::step::{StepOutcome, Steps};

/// A step of the trial: one of its methods.
type TrialStep<'a> = fn(&mut DebianTrial<'a>) -> Result<()>;

/// Tests the packages, and what is static for `archs`. A part that was not made is skipped with a message.
pub fn run<'a>(context: &'a DistContext, suite: &str, archs: &[StaticArch], steps: &mut Steps) {
    if let Some(missing) = missing() {
        steps.run("a fresh Debian", || Ok(StepOutcome::Skipped(missing)));
        return;
    }
    let mut trial = None;
    steps.run(&format!("a fresh Debian, {suite}"), || {
        trial = Some(DebianTrial::new(context, suite)?);
        Ok(StepOutcome::Held)
    });
    let Some(mut trial) = trial else { return };
    // What is installed once is used by the steps after it.
    let installed: [(&str, TrialStep<'a>); 9] = [
        ("install", DebianTrial::install),
        ("units", DebianTrial::units),
        (
            "a service and a first download",
            DebianTrial::first_download,
        ),
        ("sockets that systemd holds", DebianTrial::sockets_held),
        ("the agent of a user", DebianTrial::agent),
        ("libd2tp for C", DebianTrial::c_library),
        (
            "programs' connections through restarts",
            DebianTrial::tunnels_kept,
        ),
        (
            "upgrade during a download and programs' connections",
            DebianTrial::upgrade,
        ),
        ("purge leaves nothing", DebianTrial::purge),
    ];
    let mut works = true;
    for (name, step) in installed {
        steps.run(name, || {
            if !works {
                return Ok(StepOutcome::Skipped("a step before it failed".to_owned()));
            }
            works = false;
            step(&mut trial)?;
            works = true;
            Ok(StepOutcome::Held)
        });
    }
    // Its port is used by the steps after it.
    trial.container = None;
    for arch in archs.iter().copied() {
        let name = arch.name();
        steps.run(&format!("static program, {name}"), || {
            trial.static_program(arch)
        });
        steps.run(&format!("OCI image, {name}"), || trial.image(arch));
    }
    let out = &context.out;
    let others: [(&str, Result<PathBuf>, TrialStep<'a>); 4] = [
        ("wheel", only(out, "d2tp-", ".whl"), DebianTrial::wheel),
        ("npm package", only(out, "d2tp-", ".tgz"), DebianTrial::npm),
        ("Go module", Ok(go_file(context)), DebianTrial::go),
        (
            "the extension in Debian's browsers",
            only(out, "webext-cedos_", ".deb"),
            DebianTrial::browsers,
        ),
    ];
    for (name, file, step) in others {
        steps.run(name, || match file {
            Ok(file) if file.is_file() => step(&mut trial).map(|()| StepOutcome::Held),
            _ => Ok(StepOutcome::Skipped("was not made".to_owned())),
        });
    }
}

/// The reason why packages cannot be tried on this machine, if any.
fn missing() -> Option<String> {
    let user = Command::new("id").arg("-u").output();
    if !user.is_ok_and(|user| user.stdout == b"0\n") {
        return Some("only root may enter another Debian".to_owned());
    }
    ["debootstrap", "ip", "tc", "systemd-nspawn"]
        .into_iter()
        .find(|tool| !system_program(tool))
        .map(|tool| format!("{tool} is not installed"))
}
