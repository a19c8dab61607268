//! Builds programs and libraries with cargo: for this machine, and static ones with musl.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use super::context::{DistContext, call, output};
use super::tools::DistTool;
use crate::repository::{remapped_paths, root};
use crate::step::cargo;

/// The oldest glibc whose programs can load the library of a static `cedos run`: that of RHEL 7.
const GLIBC_MIN: &str = "2.17";

/// An architecture for which static programs are built.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StaticArch {
    /// 64-bit Intel and AMD
    #[value(name = "x86_64")]
    X86_64,
    /// 64-bit Arm
    #[value(name = "aarch64")]
    Aarch64,
}

impl StaticArch {
    /// The architecture of this machine.
    pub fn own() -> Result<StaticArch> {
        match std::env::consts::ARCH {
            "x86_64" => Ok(Self::X86_64),
            "aarch64" => Ok(Self::Aarch64),
            other => bail!("no static programs are made for {other}"),
        }
    }

    /// The architecture as compilers write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
        }
    }

    /// The architecture as OCI and Go write it.
    pub fn oci_name(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Aarch64 => "arm64",
        }
    }

    /// The architecture as Debian writes it.
    pub fn debian_name(self) -> &'static str {
        // By chance the same words.
        self.oci_name()
    }

    /// Rust's name of the target.
    pub fn triple(self) -> String {
        format!("{}-unknown-linux-musl", self.name())
    }
}

/// Builds the programs and libraries for this machine; returns their folder.
pub fn native(context: &DistContext) -> Result<PathBuf> {
    let packages = [
        "-p",
        "cedos",
        "-p",
        "cedos-lab",
        "-p",
        "d2tp-capi",
        "-p",
        "d2tp-node",
    ];
    let mut build = cargo(["build", "--locked", "--profile", &context.profile]);
    build.env("CARGO_ENCODED_RUSTFLAGS", remapped_paths(&root()));
    call(build.args(packages))?;
    Ok(context.built(None))
}

/// Builds the static `cedos`; returns its path. It is not stripped.
pub fn static_program(context: &DistContext, arch: StaticArch) -> Result<PathBuf> {
    context.tools.need(DistTool::CargoZigbuild)?;
    let triple = arch.triple();
    add_target(&triple)?;
    let mut build = cargo(["zigbuild", "--locked", "--profile", &context.profile]);
    build.args(["--target", &triple, "-p", "cedos"]);
    build.env("PATH", context.tools.path());
    build.env(
        format!("CC_{}_unknown_linux_gnu", arch.name()),
        glibc_compiler(context, arch)?,
    );
    call(&mut build)?;
    Ok(context.built(Some(&triple)).join("cedos"))
}

/// A C compiler for the library that `cedos run` loads into programs of glibc: zig's, which
/// supports old versions.
fn glibc_compiler(context: &DistContext, arch: StaticArch) -> Result<PathBuf> {
    let wrapper = context
        .tools
        .wrapper(&format!("cc-{}-linux-gnu", arch.name()))?;
    let target = format!("{}-linux-gnu.{GLIBC_MIN}", arch.name());
    // Build scripts that take it for clang pass target names that zig does not know.
    let script = format!(
        "#!/bin/sh\n\
         for word; do shift; case $word in --target=*) ;; *) set -- \"$@\" \"$word\" ;; esac; done\n\
         exec cargo-zigbuild zig cc -- -target {target} \"$@\"\n"
    );
    // cargo asks for the compiler by path and time.
    if std::fs::read_to_string(&wrapper).ok().as_deref() != Some(&script) {
        std::fs::write(&wrapper, script)?;
        std::fs::set_permissions(&wrapper, std::fs::Permissions::from_mode(0o755))?;
    }
    Ok(wrapper)
}

/// Installs Rust's standard library for a target with rustup if it is missing.
fn add_target(triple: &str) -> Result<()> {
    let mut rustc = Command::new("rustc");
    rustc.args(["--print", "target-libdir", "--target", triple]);
    if Path::new(output(rustc.current_dir(root()))?.trim()).is_dir() {
        return Ok(());
    }
    let mut rustup = Command::new("rustup");
    call(rustup.args(["target", "add", triple]).current_dir(root()))
}

/// Copies a program or library without debug information, for any architecture, with Rust's own
/// objcopy.
pub fn strip(from: &Path, to: &Path) -> Result<()> {
    let mut rustc = Command::new("rustc");
    let sysroot = output(rustc.args(["--print", "sysroot"]).current_dir(root()))?;
    let mut rustc = Command::new("rustc");
    let host = output(rustc.args(["--print", "host-tuple"]).current_dir(root()))?;
    let libraries = Path::new(sysroot.trim()).join("lib");
    let objcopy = libraries
        .join("rustlib")
        .join(host.trim())
        .join("bin/rust-objcopy");
    if let Some(folder) = to.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let mut command = match objcopy.is_file() {
        true => {
            let mut command = Command::new(objcopy);
            command.env("LD_LIBRARY_PATH", libraries);
            command
        }
        // A Rust of the distribution's: its binutils know this machine's files.
        false => Command::new("objcopy"),
    };
    call(command.arg("--strip-unneeded").arg(from).arg(to))
        .with_context(|| format!("cannot strip {}", from.display()))
}
