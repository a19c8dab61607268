//! `cargo xtask dist`: builds the packages, each with the usual tool of its format.
//!
//! ```text
//!  cargo build ──▶ staging (man pages, completions, notices) ──▶ cargo-deb ──▶ *.deb ──┐
//!       │                                                                               ├─▶ --try: a fresh Debian
//!       ├────────▶ bindings: wheel, npm, Go module                                      │
//!  cargo and zig, musl ──▶ static tarball ──▶ OCI image ────────────────────────────────┘
//! ```
//!
//! The results are in `target/packages`, with `SHA256SUMS`. Times in archives are those of the
//! commit, so that builds with the same compiler are reproducible.

mod archive;
mod bindings;
mod compile;
mod container;
mod context;
mod debian;
mod debs;
mod image;
mod notices;
mod patience;
mod sbom;
mod size_limit;
mod staging;
mod tarball;
mod tools;
mod trial;
mod trial_browsers;
mod trial_languages;
mod trial_network;
mod trial_packages;
mod trial_static;
mod trial_tunnels;

use anyhow::Result;
use clap::ValueEnum;

use crate::step::{StepOutcome, Steps};
use compile::StaticArch;
use context::DistContext;

/// The oldest release of Debian that packages are for, and that they are built on.
const SUITE: &str = "bookworm";

/// Options of the verb `dist`.
#[derive(clap::Args)]
pub struct DistOptions {
    /// The parts to make [default: all]
    parts: Vec<DistPart>,
    /// Cargo profile of the programs: `dist` is what is shipped, `dev` for work on the packages themselves
    #[arg(long, default_value = "dist")]
    profile: String,
    /// Architecture of the static tarball (repeatable) [default: this machine's]
    #[arg(long = "arch", value_name = "ARCH")]
    archs: Vec<StaticArch>,
    /// Debian revision: the number after the version
    #[arg(long, default_value_t = 1)]
    revision: u32,
    /// Install tools that are missing into target/packages-tools
    #[arg(long)]
    install_tools: bool,
    /// Install the packages in a fresh Debian, use, upgrade and purge them (needs root,
    /// debootstrap and a mirror)
    #[arg(long = "try")]
    try_packages: bool,
    /// The release of Debian for --try
    #[arg(long, default_value = SUITE)]
    suite: String,
}

/// A kind of package.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DistPart {
    /// Debian packages
    Deb,
    /// A tarball with the static program
    Static,
    /// An OCI image of D2Prox
    Image,
    /// Wheel, npm package, Go module
    Bindings,
    /// Bills of materials
    Sbom,
    /// Nothing: with --try, use the existing packages
    None,
}

/// Makes the selected parts, then tries them if that is selected; returns whether nothing failed.
pub fn run(options: &DistOptions) -> Result<bool> {
    let mut steps = Steps::default();
    add_steps(options, &mut steps)?;
    Ok(steps.summarise())
}

/// The nightly check's steps: every part for this machine, as shipped, and the trial. Tools are installed into the
/// target directory.
pub fn nightly(steps: &mut Steps) -> Result<()> {
    let options = DistOptions {
        parts: Vec::new(),
        profile: "dist".to_owned(),
        archs: Vec::new(),
        revision: 1,
        install_tools: true,
        try_packages: true,
        suite: SUITE.to_owned(),
    };
    add_steps(&options, steps)
}

fn add_steps(options: &DistOptions, steps: &mut Steps) -> Result<()> {
    let context = DistContext::new(&options.profile, options.revision, options.install_tools)?;
    let wants = |part| options.parts.is_empty() || options.parts.contains(&part);
    if wants(DistPart::Sbom) {
        steps.run("bills of materials", || held(sbom::make(&context)));
    }
    if wants(DistPart::Deb) {
        steps.run("Debian packages", || held(debs::make(&context)));
        steps.run("lintian", || debs::lint(&context));
    }
    let archs = match options.archs.as_slice() {
        [] => vec![StaticArch::own()?],
        archs => archs.to_vec(),
    };
    if wants(DistPart::Static) {
        for arch in archs.iter().copied() {
            let name = format!("static tarball, {}", arch.name());
            steps.run(&name, || held(tarball::make(&context, arch)));
        }
    }
    if wants(DistPart::Image) {
        steps.run("OCI image", || held(image::make(&context, &archs)));
    }
    if wants(DistPart::Bindings) {
        steps.run("Python wheel", || held(bindings::wheel(&context)));
        steps.run("npm package", || held(bindings::npm(&context)));
        steps.run("Go module", || held(bindings::go_module(&context)));
    }
    if options.try_packages {
        trial::run(&context, &options.suite, &archs, steps);
    }
    steps.run("digests and sizes", || held(archive::sums(&context)));
    Ok(())
}

fn held(made: Result<()>) -> Result<StepOutcome> {
    made.map(|()| StepOutcome::Held)
}
