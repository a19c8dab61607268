//! Programs in the same folder as this one: the laboratory and the benchmarks are separate
//! programs, so that downloads do not require building them.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

/// The program `name` in the folder of the running program.
///
/// # Errors
/// It is not there; the sentence says what builds it.
pub fn find(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this program's own path")?;
    let beside = own.with_file_name(name);
    if beside.is_file() {
        return Ok(beside);
    }
    bail!("{}", how_to_build(name, &own));
}

/// Where programs of a distribution's packages lie.
const PACKAGED: &str = "/usr/bin";

fn how_to_build(name: &str, own: &Path) -> String {
    // No package has the other one, cedos-bench.
    if name == "cedos-lab" && own.parent() == Some(Path::new(PACKAGED)) {
        return format!("{name} is not installed: install the package {name}");
    }
    let folder = own.parent().and_then(Path::file_name);
    // A program of another profile would lie elsewhere, and be looked for in vain.
    let profile = if folder.is_some_and(|name| name == "debug") {
        ""
    } else {
        "--release "
    };
    format!(
        "{name} is not beside {}: in the source tree, `cargo build {profile}-p {name}` builds it \
         (cedos-bench with every peer: `cargo build {profile}-p cedos-bench --features peers-all`)",
        own.display()
    )
}

#[cfg(test)]
mod tests {
    use super::how_to_build;
    use std::path::Path;

    #[test]
    fn the_command_builds_it_beside_the_program_that_misses_it() {
        let sentence = |at: &str| how_to_build("cedos-lab", Path::new(at));
        let release = sentence("/src/target/release/cedos");
        assert!(
            release.contains("`cargo build --release -p cedos-lab`"),
            "{release}"
        );
        let debug = sentence("/src/target/debug/cedos");
        assert!(debug.contains("`cargo build -p cedos-lab`"), "{debug}");
    }

    #[test]
    fn a_program_of_a_package_names_the_package_that_is_missing() {
        let sentence = how_to_build("cedos-lab", Path::new("/usr/bin/cedos"));
        assert!(
            sentence.contains("install the package cedos-lab"),
            "{sentence}"
        );
        assert!(!sentence.contains("cargo"), "{sentence}");
    }
}
