//! The contents of packages beside programs: manual pages, completions, notices, changelogs, units;
//! and libd2tp as installed.
//!
//! The staging folder looks to cargo-deb like a target directory with a release build, for any
//! profile.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::archive::gzip;
use super::compile::strip;
use super::context::{DistContext, MAINTAINER, call, copy, files_like, output};
use super::notices;
use crate::repository::root;

/// Fills the staging folder from the programs in `built`; returns it.
pub fn stage(context: &DistContext, built: &Path) -> Result<PathBuf> {
    let staging = context.scratch("deb")?;
    let release = staging.join("release");
    for program in ["cedos", "cedos-lab"] {
        strip(&built.join(program), &release.join(program))?;
        shell_files(&built.join(program), program, &release)?;
        for page in files_like(&release.join("man").join(program), "", ".1")? {
            gzip(&page)?;
        }
    }
    user_units(&release.join("systemd/user"))?;
    library(built, &release.join("libd2tp"))?;
    let doc = release.join("doc");
    std::fs::create_dir_all(&doc)?;
    let notices_file = doc.join("third-party-notices");
    std::fs::write(&notices_file, notices::text()?)?;
    gzip(&notices_file)?;
    let changelog = doc.join("changelog");
    std::fs::copy(root().join("CHANGELOG.md"), &changelog)?;
    gzip(&changelog)?;
    let changelog = doc.join("changelog.Debian");
    std::fs::write(&changelog, debian_changelog(context)?)?;
    gzip(&changelog)?;
    Ok(staging)
}

/// Writes manual pages and completions of a program, by the program itself, to `man/PROGRAM` and
/// `completions`.
pub fn shell_files(binary: &Path, program: &str, to: &Path) -> Result<()> {
    let man = to.join("man").join(program);
    call(Command::new(binary).arg("man-pages").arg(&man))?;
    let completions = to.join("completions");
    std::fs::create_dir_all(&completions)?;
    let names = [
        ("bash", format!("{program}.bash")),
        ("zsh", format!("_{program}")),
        ("fish", format!("{program}.fish")),
    ];
    for (shell, name) in names {
        let script = output(Command::new(binary).args(["completions", shell]))?;
        std::fs::write(completions.join(name), script)?;
    }
    Ok(())
}

/// Writes the agent's units, which start the program of a package instead of the one that cargo
/// installs.
fn user_units(to: &Path) -> Result<()> {
    std::fs::create_dir_all(to)?;
    let units = root().join("packaging/systemd");
    for unit in [
        "cedos-agent.service",
        "cedos-agent.socket",
        "cedos-unmetered.target",
    ] {
        let text = std::fs::read_to_string(units.join(unit))?;
        std::fs::write(to.join(unit), packaged_unit(&text)?)?;
    }
    Ok(())
}

/// Converts a unit for a user's own installation into a package's: without the comment on how to
/// copy it.
fn packaged_unit(text: &str) -> Result<String> {
    let start = text.find("[Unit]").context("a unit without [Unit]")?;
    let unit = text[start..].replace("%h/.cargo/bin/cedos ", "/usr/bin/cedos ");
    if unit.contains(".cargo") {
        bail!("a unit names a program of cargo's that is not replaced: {unit}");
    }
    Ok(unit)
}

/// Installs libd2tp with its own installation script.
fn library(built: &Path, to: &Path) -> Result<()> {
    let mut install = Command::new("sh");
    install.arg(root().join("edge/capi/install.sh")).arg("/usr");
    call(install.env("LIBRARIES", built).env("DESTDIR", to))?;
    for page in files_like(&to.join("usr/share/man/man3"), "", ".3")? {
        gzip(&page)?;
    }
    let config = to.join("usr/lib/pkgconfig/d2tp.pc");
    let text = std::fs::read_to_string(&config)?;
    std::fs::write(&config, multiarch_config(&text, &multiarch_tuple()?)?)?;
    Ok(())
}

fn multiarch_tuple() -> Result<String> {
    let mut asked = Command::new("dpkg-architecture");
    let tuple = output(asked.args(["-qDEB_HOST_MULTIARCH"]))?;
    Ok(tuple.trim().to_owned())
}

/// The file for pkg-config, with the library in Debian's folder of the architecture.
fn multiarch_config(text: &str, tuple: &str) -> Result<String> {
    let own = "libdir=${prefix}/lib\n";
    if !text.contains(own) {
        bail!("d2tp.pc does not say {own:?}");
    }
    Ok(text.replace(own, &format!("libdir=${{prefix}}/lib/{tuple}\n")))
}

/// Debian's changelog with the entry of this version. The changes are in the other changelog.
fn debian_changelog(context: &DistContext) -> Result<String> {
    let mut date = Command::new("date");
    let date = output(date.args(["-u", "-R", "-d", &format!("@{}", context.epoch)]))?;
    Ok(format!(
        "cedos ({}) unstable; urgency=medium\n\n  * Version {}: see changelog.gz.\n\n -- {}  {}",
        context.deb_version, context.version, MAINTAINER, date
    ))
}

/// Copies licences and notices into a shipped folder.
pub fn licences(to: &Path) -> Result<()> {
    for name in ["LICENSE-APACHE", "LICENSE-MIT"] {
        copy(&root().join(name), &to.join(name))?;
    }
    std::fs::write(to.join("NOTICE-third-party"), notices::text()?)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_for_users_can_be_packaged() {
        let folder = tempfile::tempdir().expect("a folder");
        user_units(folder.path()).expect("units");
        let service = folder.path().join("cedos-agent.service");
        let service = std::fs::read_to_string(service).expect("a service");
        assert!(
            service.contains("\nExecStart=/usr/bin/cedos agent "),
            "{service}"
        );
        assert!(service.starts_with("[Unit]"), "{service}");
    }

    #[test]
    fn pkg_config_finds_the_library_in_debians_folder() {
        let text = std::fs::read_to_string(root().join("edge/capi/d2tp.pc.in")).expect("a file");
        let text = multiarch_config(&text, "x86_64-linux-gnu").expect("its libdir");
        assert!(
            text.contains("libdir=${prefix}/lib/x86_64-linux-gnu\n"),
            "{text}"
        );
    }
}
