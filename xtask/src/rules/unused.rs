//! Dependencies that no source names.
//!
//! A dependency is used where a path begins with its name (`serde::Serialize`, also inside a macro
//! call or an attribute, quoted there or not) or an import names it. Dependencies of the library
//! and the programs must be named outside tests: a dependency that only tests name belongs under
//! `[dev-dependencies]`. Examples in documentation count as tests.
//!
//! A package can exempt a dependency that it has only for its features:
//! `[package.metadata.cargo-machete] ignored = ["name"]`, which cargo-machete reads too.

use std::collections::BTreeSet;

use super::sources::{DependencyKind, SourceFile, Sources, TargetKind, WorkspacePackage};
use super::tokens::{self, SourceToken, TokenKind};

/// The names of other crates that one package's sources use.
#[derive(Debug, Default)]
struct CrateNames {
    product: BTreeSet<String>,
    tests: BTreeSet<String>,
    build: BTreeSet<String>,
}

/// Each unused dependency: `core/session: d2tp-sched (normal)`.
pub fn check(sources: &Sources) -> Vec<String> {
    let packages = sources.packages.iter();
    packages
        .flat_map(|package| judge(package, &names(sources, package)))
        .collect()
}

fn judge(package: &WorkspacePackage, names: &CrateNames) -> Vec<String> {
    let mut unused = Vec::new();
    for dependency in &package.dependencies {
        let name = &dependency.extern_name;
        let fault = match dependency.kind {
            DependencyKind::Normal if names.product.contains(name) => continue,
            DependencyKind::Normal if names.tests.contains(name) => "only tests use it",
            DependencyKind::Normal => "normal",
            DependencyKind::Dev if names.tests.contains(name) => continue,
            DependencyKind::Dev => "dev",
            DependencyKind::Build if names.build.contains(name) => continue,
            DependencyKind::Build => "build",
        };
        if !package.excused.contains(&dependency.package) {
            unused.push(format!(
                "{}: {} ({fault})",
                package.folder, dependency.package
            ));
        }
    }
    unused.sort();
    unused.dedup();
    unused
}

fn names(sources: &Sources, package: &WorkspacePackage) -> CrateNames {
    let mut names = CrateNames::default();
    for target in &package.targets {
        let mut files = BTreeSet::new();
        for module in target.modules.iter().filter(|module| !module.inline) {
            if !files.insert(&module.file) {
                continue;
            }
            let Some(file) = sources.files.get(&module.file) else {
                continue;
            };
            let whole_is_test = target.kind == TargetKind::Test || module.test;
            for (name, test) in used(file) {
                let set = match target.kind {
                    TargetKind::BuildScript => &mut names.build,
                    _ if whole_is_test || test => &mut names.tests,
                    _ => &mut names.product,
                };
                set.insert(name);
            }
        }
    }
    names
}

/// Names that may be crates, and whether each is in test code.
fn used(file: &SourceFile) -> Vec<(String, bool)> {
    let mut used: Vec<(String, bool)> = tokens::paths(&file.tokens)
        .into_iter()
        .filter_map(|path| Some((path.segments.first()?.clone(), path.test)))
        .collect();
    used.extend(quoted(&file.tokens));
    used
}

/// Names before `::` in strings of attributes (`with = "hex::serde"`) and in examples of
/// documentation, which are tests.
fn quoted(tokens: &[SourceToken]) -> Vec<(String, bool)> {
    let mut found = Vec::new();
    let mut depth = 0;
    let mut example = false;
    for (at, token) in tokens.iter().enumerate() {
        match &token.kind {
            TokenKind::Open('[') => {
                let hash = |back: usize| at >= back && tokens[at - back].is_punct('#');
                if depth > 0 || hash(1) || (hash(2) && tokens[at - 1].is_punct('!')) {
                    depth += 1;
                }
            }
            TokenKind::Close(']') if depth > 0 => depth -= 1,
            TokenKind::Literal(literal) if depth > 0 => {
                let doc = at >= 2 && tokens[at - 2].ident() == Some("doc");
                if doc && literal.contains("```") {
                    example = !example;
                }
                if doc && !example {
                    continue;
                }
                let words = literal.split(|c: char| !(c.is_alphanumeric() || "_:".contains(c)));
                for word in words {
                    if let Some((name, _)) = word.split_once("::") {
                        found.push((name.to_owned(), doc || token.test));
                    }
                }
            }
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::sources::Dependency;
    use super::*;

    fn file(text: &str) -> SourceFile {
        SourceFile {
            tokens: tokens::flatten(text.parse().expect("valid tokens"), false),
            text: text.to_owned(),
        }
    }

    fn names_of(text: &str) -> CrateNames {
        let mut names = CrateNames::default();
        for (name, test) in used(&file(text)) {
            let set = if test {
                &mut names.tests
            } else {
                &mut names.product
            };
            set.insert(name);
        }
        names
    }

    fn package(dependencies: &[(&str, DependencyKind)]) -> WorkspacePackage {
        WorkspacePackage {
            name: "p".into(),
            folder: "p".into(),
            dependencies: dependencies
                .iter()
                .map(|(name, kind)| Dependency {
                    package: (*name).to_owned(),
                    extern_name: name.replace('-', "_"),
                    kind: *kind,
                    optional: false,
                })
                .collect(),
            targets: Vec::new(),
            excused: BTreeSet::from(["for-features".to_owned()]),
        }
    }

    #[test]
    fn every_way_to_name_a_crate_counts() {
        let names = names_of(
            "use a_b::{c, d::e};
             #[derive(f::G)] #[serde(with = \"h::i\")] struct X;
             fn x() { j::k!(l::m); ::n::o(); }
             extern crate p;",
        );
        for name in ["a_b", "f", "h", "j", "l", "n", "p"] {
            assert!(names.product.contains(name), "{name}: {names:?}");
        }
        // An inner part of an import is not a crate.
        assert!(!names.product.contains("d"), "{names:?}");
    }

    #[test]
    fn a_variable_or_a_word_of_prose_is_no_use() {
        let names = names_of("/// Sends bytes::of nothing.\nfn x(bytes: u8) { bytes + 1; }");
        assert!(
            !names.product.contains("bytes") && !names.tests.contains("bytes"),
            "{names:?}"
        );
    }

    #[test]
    fn an_example_in_documentation_is_a_test() {
        let names = names_of("/// ```\n/// let a = b::c();\n/// ```\nfn x() {}");
        assert!(
            names.tests.contains("b") && !names.product.contains("b"),
            "{names:?}"
        );
    }

    #[test]
    fn kinds_are_judged_apart() {
        use DependencyKind::{Build, Dev, Normal};
        let names = names_of("use a::x; #[cfg(test)] mod t { use b::x; use c::x; }");
        let package = package(&[
            ("a", Normal),
            ("b", Normal),
            ("c", Dev),
            ("a", Dev),
            ("d-e", Normal),
            ("a", Build),
            ("for-features", Normal),
        ]);
        let unused = judge(&package, &names);
        assert_eq!(
            unused,
            [
                "p: a (build)",
                "p: a (dev)",
                "p: b (only tests use it)",
                "p: d-e (normal)"
            ]
        );
    }
}
