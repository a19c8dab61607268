//! Names, licences and notices of all crates in the programs, which their licences require.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use super::context::metadata;

/// Crates whose dependencies are shipped.
const SHIPPED: [&str; 4] = ["cedos", "cedos-lab", "d2tp-capi", "d2tp-node"];

/// A list of crates, then each distinct text of their packages.
pub fn text() -> Result<String> {
    of(&metadata()?)
}

fn of(metadata: &Value) -> Result<String> {
    let packages = metadata["packages"]
        .as_array()
        .context("cargo metadata lists no packages")?;
    let shipped = linked(metadata, packages);
    let mut list = String::new();
    let mut texts: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let others = packages.iter().filter(|package| {
        !package["source"].is_null()
            && package["id"]
                .as_str()
                .is_some_and(|id| shipped.contains(id))
    });
    for package in others {
        let of = |field: &str| package[field].as_str().unwrap_or("unknown").to_owned();
        let name = format!("{} {}", of("name"), of("version"));
        writeln!(list, "{name}: {}; {}", of("license"), of("repository"))?;
        let folder = Path::new(package["manifest_path"].as_str().unwrap_or_default()).parent();
        for text in folder.map(notices_in).unwrap_or_default() {
            texts.entry(text).or_default().insert(name.clone());
        }
    }
    let mut all = format!("Cedos contains these works of others.\n\n{list}");
    for (text, names) in texts {
        let names: Vec<String> = names.into_iter().collect();
        write!(
            all,
            "\n{}\n{}:\n\n{}\n",
            "-".repeat(78),
            names.join(", "),
            text.trim_end()
        )?;
    }
    Ok(all)
}

/// The ids of all packages that are linked into shipped programs, without those used only by builds
/// and tests.
fn linked<'a>(metadata: &'a Value, packages: &'a [Value]) -> BTreeSet<&'a str> {
    let nodes = metadata["resolve"]["nodes"].as_array().map(Vec::as_slice);
    let nodes: HashMap<&str, &Value> = nodes
        .unwrap_or_default()
        .iter()
        .filter_map(|node| Some((node["id"].as_str()?, node)))
        .collect();
    let mut open: Vec<&str> = packages
        .iter()
        .filter(|package| {
            package["name"]
                .as_str()
                .is_some_and(|name| SHIPPED.contains(&name))
        })
        .filter_map(|package| package["id"].as_str())
        .collect();
    let mut found = BTreeSet::new();
    while let Some(id) = open.pop() {
        if !found.insert(id) {
            continue;
        }
        let dependencies = nodes.get(id).and_then(|node| node["deps"].as_array());
        for dependency in dependencies.into_iter().flatten() {
            let kinds = dependency["dep_kinds"].as_array();
            let is_linked =
                kinds.is_none_or(|kinds| kinds.iter().any(|kind| kind["kind"].is_null()));
            if is_linked {
                open.extend(dependency["pkg"].as_str());
            }
        }
    }
    found
}

/// The texts of licences and notices in a crate's folder.
fn notices_in(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut files: Vec<_> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|file| {
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            let name = name.to_ascii_uppercase();
            let begins = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "COPYRIGHT"];
            file.is_file() && begins.iter().any(|begin| name.starts_with(begin))
        })
        .collect();
    files.sort();
    files
        .iter()
        .filter_map(|file| std::fs::read_to_string(file).ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::of;

    #[test]
    fn what_is_linked_is_listed_and_what_builds_is_not() {
        let package = |name: &str, source: Option<&str>| {
            serde_json::json!({"name": name, "version": "1.0.0", "id": name, "source": source,
                "license": "MIT", "repository": "https://example.org", "manifest_path": "/nowhere/Cargo.toml"})
        };
        let dependency = |name: &str, kind: Option<&str>| serde_json::json!({"pkg": name, "dep_kinds": [{"kind": kind}]});
        let metadata = serde_json::json!({
            "packages": [package("cedos", None), package("bytes", Some("registry")),
                package("cc", Some("registry")), package("proptest", Some("registry"))],
            "resolve": {"nodes": [{"id": "cedos", "deps": [dependency("bytes", None),
                dependency("cc", Some("build")), dependency("proptest", Some("dev"))]}]},
        });
        let text = of(&metadata).expect("a list");
        assert!(
            text.contains("bytes 1.0.0: MIT; https://example.org\n"),
            "{text}"
        );
        assert!(!text.contains("cc 1.0.0"), "{text}");
        assert!(!text.contains("proptest"), "{text}");
    }
}
