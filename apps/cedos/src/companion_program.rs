//! Programs that lie beside this one: the laboratory and the benchmarks are programs of their own,
//! so that nobody has to build them to download a podcast.

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

fn how_to_build(name: &str, own: &Path) -> String {
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
}
