//! Tarballs, compressed files and digests that are the same for the same input: by GNU tar and gzip.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use sha2::{Digest as _, Sha256};

use super::context::{DistContext, call, files_like};

/// Compresses a file in place, as gzip does: `NAME` becomes `NAME.gz`.
pub fn gzip(file: &Path) -> Result<()> {
    call(Command::new("gzip").args(["-9nf"]).arg(file))
}

/// Packs `names` in `folder` into a tarball, not compressed. Files belong to root unless `owner` is
/// given.
pub fn tar(
    context: &DistContext,
    folder: &Path,
    names: &[&str],
    to: &Path,
    owner: u32,
) -> Result<()> {
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--numeric-owner", "--format=posix"]);
    // Otherwise posix headers contain the process's number and times of change.
    tar.arg("--pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime");
    tar.arg(format!("--owner={owner}"))
        .arg(format!("--group={owner}"));
    tar.arg(format!("--mtime=@{}", context.epoch));
    tar.arg("-C").arg(folder).arg("-cf").arg(to).args(names);
    call(&mut tar)
}

/// Packs `names` in `folder` into `to`, which ends in `.tar.gz` or `.tgz`.
pub fn tar_gz(context: &DistContext, folder: &Path, names: &[&str], to: &Path) -> Result<()> {
    let plain = to.with_extension("");
    tar(context, folder, names, &plain, 0)?;
    gzip(&plain)?;
    let compressed = PathBuf::from(format!("{}.gz", plain.display()));
    if compressed != to {
        std::fs::rename(compressed, to)?;
    }
    Ok(())
}

/// The SHA-256 of bytes, in hexadecimal.
pub fn digest(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// Writes `SHA256SUMS` over all files in the packages' folder, and prints their sizes.
pub fn sums(context: &DistContext) -> Result<()> {
    let mut lines = String::new();
    for file in files_like(&context.out, "", "")? {
        let name = file
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if !file.is_file() || name == "SHA256SUMS" {
            continue;
        }
        let bytes = std::fs::read(&file)?;
        writeln!(lines, "{}  {name}", digest(&bytes))?;
        println!("{:>8.2} MB  {name}", bytes.len() as f64 / 1e6);
    }
    std::fs::write(context.out.join("SHA256SUMS"), lines)?;
    Ok(())
}
