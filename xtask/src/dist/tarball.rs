//! A tarball with the static `cedos`: for any Linux, without a package manager.

use std::path::PathBuf;

use anyhow::Result;

use super::archive::tar_gz;
use super::compile::{StaticArch, static_program, strip};
use super::context::{DistContext, copy};
use super::size_limit::{PROGRAM_BYTES_MAX, within};
use super::{sbom, staging};
use crate::repository::root;

/// Builds the program and packs it with its manual pages, completions and licences.
pub fn make(context: &DistContext, arch: StaticArch) -> Result<()> {
    let program = static_program(context, arch)?;
    let name = name(context, arch);
    let folder = context.scratch(&format!("static-{}", arch.name()))?;
    let top = folder.join(&name);
    let stripped = top.join("cedos");
    strip(&program, &stripped)?;
    // A program of another architecture does not run here: the native one has the same
    // descriptions.
    let speaks = match arch == StaticArch::own()? {
        true => program,
        false => static_program(context, StaticArch::own()?)?,
    };
    staging::shell_files(&speaks, "cedos", &top)?;
    staging::licences(&top)?;
    copy(&sbom::of_program(context)?, &top.join("sbom.cdx.json"))?;
    for file in ["README.md", "CHANGELOG.md"] {
        copy(&root().join(file), &top.join(file))?;
    }
    tar_gz(context, &folder, &[&name], &file(context, arch))?;
    // Last, so that one that is too large can still be tried.
    let size = std::fs::metadata(&stripped)?.len();
    let what = format!("static cedos, {}", arch.name());
    within(&what, size, PROGRAM_BYTES_MAX)
}

fn name(context: &DistContext, arch: StaticArch) -> String {
    format!("cedos-{}-linux-{}", context.version, arch.name())
}

/// The path of the tarball.
pub fn file(context: &DistContext, arch: StaticArch) -> PathBuf {
    context.out.join(format!("{}.tar.gz", name(context, arch)))
}
