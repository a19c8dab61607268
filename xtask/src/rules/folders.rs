//! Which folder may depend on which.
//!
//! ```text
//!             core   edge   apps   lab    bench  dev-dependencies
//!  core        ✓                                 core, lab
//!  edge        ✓      ✓                          core, edge, lab, and a proxy to talk to
//!  apps        ✓      ✓                          anything but another app
//!  apps/agent  ✓      ✓      apps/readycast      anything but another app
//!  apps/cedos  ✓      ✓      ✓                   anything
//!  lab, bench  ✓      ✓      ✓      ✓      ✓     anything
//!  bindings    ✓      ✓      ✓                   anything but bench
//!  xtask                                         nothing of ours
//! ```
//!
//! Dev-dependencies are built for tests only, not for shipped programs, so they may include the
//! laboratory. `apps/cedos` must not depend on a crate of `lab/` indirectly either.

use std::collections::BTreeSet;

use super::sources::{Dependency, DependencyKind, Sources, WorkspacePackage};

/// Descriptions of the breaches, sorted; empty if the rules hold.
pub fn breaches(packages: &[WorkspacePackage]) -> Vec<String> {
    let find = |name: &str| packages.iter().find(|package| package.name == name);
    let mut breaches = BTreeSet::new();
    for package in packages {
        for dependency in &package.dependencies {
            let Some(needed) = find(&dependency.package) else {
                continue;
            };
            if !may_need(&package.folder, &needed.folder, dependency.kind) {
                let kind = match dependency.kind {
                    DependencyKind::Normal => "depends on",
                    DependencyKind::Dev => "has the dev-dependency",
                    DependencyKind::Build => "has the build dependency",
                };
                breaches.insert(format!("{} {kind} {}", package.folder, needed.folder));
            }
        }
        if package.folder == "apps/cedos" {
            for path in ways_into_lab(package, packages) {
                breaches.insert(format!("apps/cedos needs the laboratory: {path}"));
            }
        }
    }
    breaches.into_iter().collect()
}

fn top(folder: &str) -> &str {
    folder.split('/').next().unwrap_or(folder)
}

fn may_need(from: &str, to: &str, kind: DependencyKind) -> bool {
    let test = kind == DependencyKind::Dev;
    match (top(from), top(to)) {
        ("core", "core") | ("edge", "core" | "edge") | ("apps", "core" | "edge") => true,
        ("lab" | "bench", _) => true,
        ("core" | "edge" | "apps", "lab") => test,
        // A client is tested with its server.
        ("edge", "apps") => test,
        // The library of podcasts is a part of the agent, and opens no socket itself.
        ("apps", "apps") => {
            from == "apps/cedos" || from == to || (from == "apps/agent" && to == "apps/readycast")
        }
        ("bindings", to) => to != "bench" && (to != "lab" || test),
        _ => false,
    }
}

/// Shipped dependencies of `program` that lead to `lab/`, each as the chain of packages.
fn ways_into_lab(program: &WorkspacePackage, packages: &[WorkspacePackage]) -> Vec<String> {
    let mut ways = Vec::new();
    let mut seen = BTreeSet::new();
    let mut open = vec![(program, program.folder.clone())];
    while let Some((package, way)) = open.pop() {
        for Dependency { package, kind, .. } in &package.dependencies {
            let needed = packages.iter().find(|other| other.name == *package);
            let Some(needed) = needed.filter(|_| *kind != DependencyKind::Dev) else {
                continue;
            };
            if !seen.insert(&needed.name) {
                continue;
            }
            let way = format!("{way} → {}", needed.folder);
            if top(&needed.folder) == "lab" {
                ways.push(way);
            } else {
                open.push((needed, way));
            }
        }
    }
    ways
}

/// Checks the rule for the repository.
pub fn check(sources: &Sources) -> Vec<String> {
    breaches(&sources.packages)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(folder: &str, needs: &[(&str, DependencyKind)]) -> WorkspacePackage {
        WorkspacePackage {
            name: folder.replace('/', "-"),
            folder: folder.to_owned(),
            dependencies: needs
                .iter()
                .map(|(folder, kind)| Dependency {
                    package: folder.replace('/', "-"),
                    extern_name: folder.replace('/', "_"),
                    kind: *kind,
                    optional: false,
                })
                .collect(),
            targets: Vec::new(),
            excused: BTreeSet::new(),
        }
    }

    #[test]
    fn the_allowed_directions_hold() {
        use DependencyKind::{Dev, Normal};
        let packages = [
            package("core/time", &[("lab/link", Dev)]),
            package("edge/udp", &[("core/time", Normal), ("apps/prox", Dev)]),
            package("apps/prox", &[("edge/udp", Normal), ("lab/link", Dev)]),
            package("apps/cedos", &[("apps/prox", Normal), ("lab/link", Dev)]),
            package("lab/link", &[("apps/prox", Normal)]),
            package("bench", &[("lab/link", Normal)]),
        ];
        assert_eq!(breaches(&packages), Vec::<String>::new());
    }

    #[test]
    fn each_forbidden_direction_is_named() {
        use DependencyKind::{Build, Dev, Normal};
        for (from, to, kind) in [
            ("core/time", "edge/udp", Normal),
            ("core/time", "lab/link", Normal),
            ("core/time", "edge/udp", Dev),
            ("edge/udp", "apps/prox", Normal),
            ("edge/udp", "lab/link", Build),
            ("apps/agent", "apps/prox", Normal),
            ("apps/agent", "apps/prox", Dev),
            ("apps/prox", "lab/link", Normal),
            ("apps/prox", "bench", Normal),
        ] {
            let packages = [package(from, &[(to, kind)]), package(to, &[])];
            let found = breaches(&packages);
            assert_eq!(found.len(), 1, "{from} → {to}: {found:?}");
            assert!(
                found[0].starts_with(from) && found[0].ends_with(to),
                "{found:?}"
            );
        }
    }

    #[test]
    fn the_laboratory_is_found_behind_another_crate() {
        use DependencyKind::Normal;
        let packages = [
            package("apps/cedos", &[("apps/prox", Normal)]),
            package("apps/prox", &[("lab/link", Normal)]),
            package("lab/link", &[]),
        ];
        let found = breaches(&packages);
        let way = "apps/cedos needs the laboratory: apps/cedos → apps/prox → lab/link";
        assert!(found.iter().any(|breach| breach == way), "{found:?}");
    }
}
