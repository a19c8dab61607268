//! Builds programs and libraries with cargo: for this machine, and static ones with musl.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
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
    let mut flags = remapped_paths(&root());
    if links_with_lld()? {
        flags += "\x1f-Clink-arg=-Wl,--icf=all";
    }
    build.env("CARGO_ENCODED_RUSTFLAGS", flags);
    call(build.args(packages))?;
    Ok(context.built(None))
}

/// Whether rustc links programs for this machine with its own lld, which merges functions with the same code: on x86_64,
/// with a Rust of rustup's.
fn links_with_lld() -> Result<bool> {
    Ok(cfg!(target_arch = "x86_64") && host_tools()?.join("gcc-ld/ld.lld").is_file())
}

/// Builds the static `cedos`; returns its path. It is not stripped.
///
/// C is compiled by zig, and linked by Rust's own lld with Rust's own musl: zig's linker knows neither of the two options
/// that make the program smaller, and makes one that is always loaded at the same address.
pub fn static_program(context: &DistContext, arch: StaticArch) -> Result<PathBuf> {
    context.tools.need(DistTool::CargoZigbuild)?;
    let triple = arch.triple();
    add_target(&triple)?;
    let mut build = cargo(["build", "--locked", "--profile", &context.profile]);
    build.args(["--target", &triple, "-p", "cedos"]);
    build.env("PATH", context.tools.path());
    let flags = [remapped_paths(&root()), "-Clinker-flavor=ld.lld".to_owned()];
    build.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"));
    let variable = triple.replace('-', "_");
    build.env(
        format!("CARGO_TARGET_{}_LINKER", variable.to_uppercase()),
        static_linker(context, arch)?,
    );
    let glibc = format!("{}-linux-gnu.{GLIBC_MIN}", arch.name());
    let musl = format!("{}-linux-musl", arch.name());
    build.env(format!("AR_{variable}"), archiver(context)?);
    build.env(
        format!("CC_{variable}"),
        c_compiler(context, "musl", arch, &musl)?,
    );
    // For the library that `cedos run` loads into programs of glibc: zig supports old versions.
    build.env(
        format!("CC_{}_unknown_linux_gnu", arch.name()),
        c_compiler(context, "gnu", arch, &glibc)?,
    );
    call(&mut build)?;
    let program = context.built(Some(&triple)).join("cedos");
    ensure!(
        is_position_independent(&std::fs::read(&program)?),
        "{} is always loaded at the same address",
        program.display()
    );
    Ok(program)
}

/// Rust's own lld, told to merge functions with the same code, to write relocations of addresses as bits (DT_RELR, which
/// musl has known since 1.2.4), and to make a program that may be loaded at any address: rustc asks for that on x86_64 alone,
/// though it has the objects that start such a program for aarch64, too.
fn static_linker(context: &DistContext, arch: StaticArch) -> Result<PathBuf> {
    let linker = host_tools()?.join("rust-lld");
    ensure!(
        linker.is_file(),
        "{} is not there: static programs need a Rust of rustup's",
        linker.display()
    );
    let script = format!(
        "#!/bin/sh\n\
         for word; do\n  \
           shift\n  \
           case $word in\n    \
             */crt1.o) word=${{word%crt1.o}}rcrt1.o ;;\n    \
             */crtbegin.o | */crtend.o) word=${{word%.o}}S.o ;;\n  \
           esac\n  \
           set -- \"$@\" \"$word\"\n\
         done\n\
         exec '{}' \"$@\" -pie --no-dynamic-linker -z text --icf=all --pack-dyn-relocs=relr\n",
        linker.display()
    );
    wrapper(context, &format!("ld-{}-linux-musl", arch.name()), &script)
}

/// Whether a program may be loaded at any address, as the kernel does it with those whose type in the ELF header is
/// `ET_DYN`.
fn is_position_independent(program: &[u8]) -> bool {
    const ET_DYN: [u8; 2] = [3, 0];
    program.starts_with(b"\x7fELF") && program.get(16..18) == Some(&ET_DYN)
}

/// zig as a C compiler for one of its targets.
fn c_compiler(
    context: &DistContext,
    library: &str,
    arch: StaticArch,
    target: &str,
) -> Result<PathBuf> {
    // Build scripts that take it for clang pass target names that zig does not know. zig adds checks of undefined behaviour
    // to what is not optimised, and the library that they call to what it links itself.
    let script = format!(
        "#!/bin/sh\n\
         for word; do shift; case $word in --target=*) ;; *) set -- \"$@\" \"$word\" ;; esac; done\n\
         exec cargo-zigbuild zig cc -- -target {target} -fno-sanitize=all \"$@\"\n"
    );
    let name = format!("cc-{}-linux-{library}", arch.name());
    wrapper(context, &name, &script)
}

/// zig as an archiver of objects of any architecture.
fn archiver(context: &DistContext) -> Result<PathBuf> {
    let script = "#!/bin/sh\nexec cargo-zigbuild zig ar -- \"$@\"\n";
    wrapper(context, "ar-zig", script)
}

/// Writes a script among the tools if it is not the same already: cargo asks for compilers by path and time.
fn wrapper(context: &DistContext, name: &str, script: &str) -> Result<PathBuf> {
    let wrapper = context.tools.wrapper(name)?;
    if std::fs::read_to_string(&wrapper).ok().as_deref() != Some(script) {
        std::fs::write(&wrapper, script)?;
        std::fs::set_permissions(&wrapper, std::fs::Permissions::from_mode(0o755))?;
    }
    Ok(wrapper)
}

/// The folder of the programs that rustup installs beside the compiler.
fn host_tools() -> Result<PathBuf> {
    let mut rustc = Command::new("rustc");
    let sysroot = output(rustc.args(["--print", "sysroot"]).current_dir(root()))?;
    let mut rustc = Command::new("rustc");
    let host = output(rustc.args(["--print", "host-tuple"]).current_dir(root()))?;
    let libraries = Path::new(sysroot.trim()).join("lib/rustlib");
    Ok(libraries.join(host.trim()).join("bin"))
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
    let objcopy = host_tools()?.join("rust-objcopy");
    if let Some(folder) = to.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let mut command = match objcopy.is_file() {
        true => {
            // It is linked with LLVM, which lies above, in lib.
            let libraries = objcopy.ancestors().nth(4).map(Path::to_owned);
            let mut command = Command::new(&objcopy);
            command.env("LD_LIBRARY_PATH", libraries.unwrap_or_default());
            command
        }
        // A Rust of the distribution's: its binutils know this machine's files.
        false => Command::new("objcopy"),
    };
    call(command.arg("--strip-unneeded").arg(from).arg(to))
        .with_context(|| format!("cannot strip {}", from.display()))
}

#[cfg(test)]
mod tests {
    use super::is_position_independent;

    #[test]
    fn a_program_with_a_fixed_address_is_recognised() {
        let mut header = *b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x03\0\x3e\0";
        assert!(is_position_independent(&header));
        header[16] = 2;
        assert!(!is_position_independent(&header));
        assert!(!is_position_independent(b"#!/bin/sh"));
    }
}
