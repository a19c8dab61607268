//! Debian packages, by cargo-deb from the `[package.metadata.deb]` of the crates.
//!
//! cargo-deb gets the libraries that a program needs from dpkg, and writes the scripts of systemd's
//! units. Features that it lacks are added to its packages afterwards: the version in dependencies
//! of one package on another, and `shlibs`, from which other packages derive their dependencies.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::context::{DistContext, call, files_like, output};
use super::size_limit::{PROGRAM_BYTES_MAX, within};
use super::tools::{DistTool, system_program};
use super::{compile, staging};
use crate::repository::root;
use crate::step::{StepOutcome, run as run_command};

/// A Debian package: its crate, and the variant of the metadata there.
struct DebPackage {
    name: &'static str,
    package: &'static str,
    variant: Option<&'static str>,
    multiarch: Option<&'static str>,
    /// Whether the package holds programs or shared libraries, which need a C library of some
    /// version.
    has_binaries: bool,
    /// Whether the package is the same on every architecture.
    is_for_all: bool,
}

const PACKAGES: [DebPackage; 6] = [
    DebPackage {
        name: "cedos",
        package: "cedos",
        variant: None,
        multiarch: None,
        has_binaries: true,
        is_for_all: false,
    },
    DebPackage {
        name: "cedos-prox",
        package: "cedos-prox",
        variant: None,
        multiarch: None,
        has_binaries: false,
        is_for_all: false,
    },
    DebPackage {
        name: "cedos-lab",
        package: "cedos-lab",
        variant: None,
        multiarch: None,
        has_binaries: true,
        is_for_all: false,
    },
    DebPackage {
        name: "libd2tp1",
        package: "d2tp-capi",
        variant: Some("library"),
        multiarch: Some("same"),
        has_binaries: true,
        is_for_all: false,
    },
    DebPackage {
        name: "libd2tp-dev",
        package: "d2tp-capi",
        variant: None,
        multiarch: Some("same"),
        has_binaries: false,
        is_for_all: false,
    },
    DebPackage {
        name: "webext-cedos",
        package: "cedos",
        variant: Some("browser"),
        multiarch: None,
        has_binaries: false,
        is_for_all: true,
    },
];

/// Builds, stages and packs all packages.
pub fn make(context: &DistContext) -> Result<()> {
    context.tools.need(DistTool::CargoDeb)?;
    let built = compile::native(context)?;
    let staging = staging::stage(context, &built)?;
    for package in &PACKAGES {
        for old in files_like(&context.out, &format!("{}_", package.name), ".deb")? {
            std::fs::remove_file(old)?;
        }
        pack(context, package, &staging)?;
    }
    for program in ["cedos", "cedos-lab"] {
        let size = std::fs::metadata(staging.join("release").join(program))?.len();
        match context.profile.as_str() {
            "dev" => eprintln!("{program}: not optimised, {:.1} MB", size as f64 / 1e6),
            _ => within(program, size, PROGRAM_BYTES_MAX)?,
        }
    }
    Ok(())
}

/// The packages of this version, all of them.
pub fn made(context: &DistContext) -> Result<Vec<PathBuf>> {
    let end = format!("_{}_", context.deb_version);
    let mut found = Vec::new();
    for package in &PACKAGES {
        let files = files_like(&context.out, &format!("{}{end}", package.name), ".deb")?;
        found.extend(files);
    }
    if found.len() != PACKAGES.len() {
        bail!(
            "not all Debian packages of {} are there: `cargo xtask dist deb`",
            context.deb_version
        );
    }
    Ok(found)
}

fn pack(context: &DistContext, package: &DebPackage, staging: &Path) -> Result<()> {
    let mut deb = Command::new(context.tools.find("cargo-deb").context("cargo-deb")?);
    deb.args(["deb", "--no-build", "--no-strip", "--no-dbgsym", "--quiet"]);
    // It is compressed well when it is packed again.
    deb.args(["--fast", "--compress-type", "gz", "--compress-system"]);
    deb.args([
        "-p",
        package.package,
        "--deb-version",
        &context.deb_version,
        "-o",
    ])
    .arg(&context.out);
    if let Some(variant) = package.variant {
        deb.args(["--variant", variant]);
    }
    if let Some(multiarch) = package.multiarch {
        deb.args(["--multiarch", multiarch]);
    }
    deb.current_dir(root());
    // The profile does not matter here: cargo-deb refuses some.
    deb.env("CARGO_TARGET_DIR", staging);
    // It asks the first cargo of the path for that directory, which may be another one than this.
    deb.env("PATH", context.tools.path_with_cargo());
    deb.env("SOURCE_DATE_EPOCH", context.epoch.to_string());
    call(&mut deb)?;
    let begin = format!("{}_{}_", package.name, context.deb_version);
    let files = files_like(&context.out, &begin, ".deb")?;
    let [file] = files.as_slice() else {
        bail!("cargo-deb made {} packages {begin}…", files.len());
    };
    let mut to = file.clone();
    if package.is_for_all {
        to.set_file_name(format!("{begin}all.deb"));
    }
    repack(context, file, &context.deb_version, &to)?;
    if to != *file {
        std::fs::remove_file(file)?;
    }
    let depends = field(&to, "Depends")?;
    if package.has_binaries && !depends.contains("libc6 (>= ") {
        bail!(
            "{} does not say which libc6 it needs: {depends:?}",
            package.name
        );
    }
    Ok(())
}

/// Repacks a package as `version` into `to`, and adds the parts that cargo-deb omits.
pub fn repack(context: &DistContext, file: &Path, version: &str, to: &Path) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let tree = folder.path().join("tree");
    call(Command::new("dpkg-deb").arg("-R").arg(file).arg(&tree))?;
    let control = tree.join("DEBIAN/control");
    let text = finished_control(
        &std::fs::read_to_string(&control)?,
        &context.deb_version,
        version,
    );
    let of = |name| text.starts_with(&format!("Package: {name}\n"));
    let is_for_all = PACKAGES.iter().any(|one| one.is_for_all && of(one.name));
    let text = match is_for_all {
        true => for_all(&text),
        false => text,
    };
    std::fs::write(&control, &text)?;
    if text.starts_with("Package: libd2tp1\n") {
        // The dependency of programs that are linked with it: calls are added in 0.x without a
        // change of the soname.
        let shlibs = format!("libd2tp 1 libd2tp1 (>= {})\n", context.version);
        std::fs::write(tree.join("DEBIAN/shlibs"), shlibs)?;
        for folder in files_like(&tree.join("usr/lib"), "", "-linux-gnu")? {
            for library in files_like(&folder, "lib", ".so.1")? {
                std::fs::set_permissions(library, Permissions::from_mode(0o644))?;
            }
        }
    }
    let mut build = Command::new("dpkg-deb");
    let compression: &[&str] = match context.profile.as_str() {
        "dev" => &["-Zgzip", "-z1"],
        _ => &["-Zxz"],
    };
    build
        .arg("--root-owner-group")
        .args(compression)
        .arg("--build")
        .arg(&tree)
        .arg(to);
    build.env("SOURCE_DATE_EPOCH", context.epoch.to_string());
    build.stdout(std::process::Stdio::null());
    call(&mut build)
}

/// The control file with the version in place of its placeholder, and `from` replaced by `version`.
fn finished_control(text: &str, from: &str, version: &str) -> String {
    text.replace("${binary:Version}", version)
        .replace(
            &format!("Version: {from}\n"),
            &format!("Version: {version}\n"),
        )
        .replace(&format!("(= {from})"), &format!("(= {version})"))
}

/// The control file of a package that is the same on every architecture: cargo-deb writes this machine's.
fn for_all(text: &str) -> String {
    let lines = text.lines().map(|line| match line {
        line if line.starts_with("Architecture: ") => "Architecture: all\n".to_owned(),
        line => format!("{line}\n"),
    });
    lines.collect()
}

/// Runs Debian's own checks, if lintian is installed.
pub fn lint(context: &DistContext) -> Result<StepOutcome> {
    if !system_program("lintian") {
        return Ok(StepOutcome::Skipped("lintian is not installed".to_owned()));
    }
    if context.profile == "dev" {
        let why = "libraries of the profile dev are ten times as large, and take minutes";
        return Ok(StepOutcome::Skipped(why.to_owned()));
    }
    let mut lintian = Command::new("lintian");
    lintian.args(["--fail-on", "error", "--allow-root"]);
    run_command(lintian.args(made(context)?))
}

/// A field of a package.
pub fn field(file: &Path, name: &str) -> Result<String> {
    let mut ask = Command::new("dpkg-deb");
    Ok(output(ask.arg("-f").arg(file).arg(name))?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dist::context::MAINTAINER;

    #[test]
    fn packages_of_one_version_depend_on_each_other_of_that_version() {
        let control = "Package: cedos-prox\nVersion: 0.1.0-1\nDepends: cedos (= ${binary:Version}), libc6 (>= 2.34)\n";
        let made = finished_control(control, "0.1.0-1", "0.1.0-1");
        assert!(
            made.contains("cedos (= 0.1.0-1), libc6 (>= 2.34)"),
            "{made}"
        );
        let next = finished_control(&made, "0.1.0-1", "0.1.0-2");
        assert!(next.contains("Version: 0.1.0-2\n"), "{next}");
        assert!(next.contains("cedos (= 0.1.0-2)"), "{next}");
    }

    #[test]
    fn a_package_for_every_architecture_names_none() {
        let control =
            "Package: webext-cedos\nVersion: 0.1.0-1\nArchitecture: amd64\nSection: web\n";
        let expected = control.replace("amd64", "all");
        assert_eq!(for_all(control), expected);
    }

    #[test]
    fn every_crate_names_the_same_maintainer() {
        for file in ["apps/cedos", "apps/prox", "lab/cli", "edge/capi"] {
            let file = root().join(file).join("Cargo.toml");
            let text = std::fs::read_to_string(&file).expect("a manifest");
            let line = format!("maintainer = \"{MAINTAINER}\"");
            assert!(text.contains(&line), "{}", file.display());
        }
    }
}
