//! Lock files of workspaces within the repository that are not the main one (`fuzz`, `bench/counts`): whether each still fits
//! the manifests of our packages.
//!
//! Builds with `--locked` refuse a lock file that does not fit, but only the nightly check builds these workspaces.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result};

use super::sources::{DependencyKind, Sources, WorkspacePackage};

/// The lock files that this rule reads, from the top folder.
const LOCK_FILES: [&str; 3] = [
    "fuzz/Cargo.lock",
    "bench/counts/Cargo.lock",
    "tools/races/Cargo.lock",
];

/// Each difference between a lock file and a manifest: `fuzz/Cargo.lock: d2tp-session needs slab`.
///
/// # Errors
/// A lock file cannot be read.
pub fn check(root: &Path, sources: &Sources) -> Result<Vec<String>> {
    let mut differences = Vec::new();
    for file in LOCK_FILES {
        let text = std::fs::read_to_string(root.join(file)).with_context(|| file.to_owned())?;
        let locked = locked_packages(&text);
        let found = differences_of(&sources.packages, &locked);
        differences.extend(found.into_iter().map(|found| format!("{file}: {found}")));
    }
    Ok(differences)
}

/// The dependencies of each package that comes from a folder, not from a registry.
fn locked_packages(text: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut packages = BTreeMap::new();
    for entry in text.split("[[package]]").skip(1) {
        let value = |key: &str| {
            let line = entry.lines().find(|line| line.starts_with(key))?;
            line.split('"').nth(1)
        };
        let (Some(name), None) = (value("name = "), value("source = ")) else {
            continue;
        };
        // A line of the list is the name, and the version where there are several.
        let lines = entry.lines().filter(|line| line.starts_with(" \""));
        let dependencies = lines.filter_map(|line| {
            let quoted = line.split('"').nth(1)?;
            Some(quoted.split(' ').next()?.to_owned())
        });
        packages.insert(name.to_owned(), dependencies.collect());
    }
    packages
}

fn differences_of(
    packages: &[WorkspacePackage],
    locked: &BTreeMap<String, BTreeSet<String>>,
) -> Vec<String> {
    let mut differences = Vec::new();
    for package in packages {
        let Some(locked) = locked.get(&package.name) else {
            continue;
        };
        // Tests of a package are not built from another workspace.
        let built = |kind| kind != DependencyKind::Dev;
        let built = package.dependencies.iter().filter(|one| built(one.kind));
        let known: BTreeMap<&str, bool> = built
            .map(|one| (one.package.as_str(), one.optional))
            .collect();
        let missing = known
            .iter()
            .filter(|(name, optional)| !**optional && !locked.contains(**name));
        differences.extend(missing.map(|(name, _)| format!("{} needs {name}", package.name)));
        let surplus = locked
            .iter()
            .filter(|name| !known.contains_key(name.as_str()));
        differences.extend(surplus.map(|name| format!("{} needs no {name}", package.name)));
    }
    differences
}

#[cfg(test)]
mod tests {
    use super::super::sources::Dependency;
    use super::*;

    const LOCK: &str = r#"
[[package]]
name = "ours"
version = "0.1.0"
dependencies = [
 "bytes",
 "rand 0.9.1",
]

[[package]]
name = "bytes"
version = "1.0.0"
source = "registry+https://example"
dependencies = [
 "serde",
]
"#;

    fn package(dependencies: &[(&str, DependencyKind, bool)]) -> WorkspacePackage {
        let dependencies = dependencies
            .iter()
            .map(|(name, kind, optional)| Dependency {
                package: (*name).to_owned(),
                extern_name: (*name).to_owned(),
                kind: *kind,
                optional: *optional,
            });
        WorkspacePackage {
            name: "ours".into(),
            folder: "ours".into(),
            dependencies: dependencies.collect(),
            targets: Vec::new(),
            excused: BTreeSet::new(),
        }
    }

    #[test]
    fn a_lock_file_that_does_not_fit_is_found() {
        use DependencyKind::{Dev, Normal};
        let locked = locked_packages(LOCK);
        let fits = package(&[
            ("bytes", Normal, false),
            ("rand", Normal, false),
            ("optional", Normal, true),
            ("for-tests", Dev, false),
        ]);
        assert_eq!(differences_of(&[fits], &locked), Vec::<String>::new());
        let changed = package(&[("bytes", Normal, false), ("slab", Normal, false)]);
        assert_eq!(
            differences_of(&[changed], &locked),
            ["ours needs slab", "ours needs no rand"]
        );
    }
}
