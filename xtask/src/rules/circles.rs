//! Files that need each other in a circle.
//!
//! A file needs another if its code names an item of it by a path (`crate::…`, `super::…`, a child
//! module, an imported name). An import that goes through a re-export needs the file with the
//! definition. Neither a `mod x;` nor a `pub use` in a file that declares modules counts, and tests
//! do not count. Method calls on a value have no path and are not seen.

use std::collections::{BTreeMap, BTreeSet};

use super::sources::{CrateTarget, SourceModule, Sources, TargetKind};
use super::tokens::PathUse;

/// Files of one target, each of which reaches every other.
#[derive(Clone, Debug)]
pub struct Circle {
    /// `core/session (d2tp_session)`.
    pub target: String,
    /// The files of the circle, sorted.
    pub files: Vec<String>,
    /// The uses inside the circle: `a.rs:12 needs b.rs (crate::b::Thing)`, one for each pair of
    /// files.
    pub needs: Vec<String>,
}

/// All circles of two files or more, the largest first.
pub fn check(sources: &Sources) -> Vec<Circle> {
    let mut circles = Vec::new();
    for package in &sources.packages {
        for target in &package.targets {
            if target.kind != TargetKind::Product {
                continue;
            }
            let name = format!("{} ({})", package.folder, target.name);
            circles.extend(circles_of(&name, target));
        }
    }
    circles.sort_by_key(|circle| std::cmp::Reverse(circle.files.len()));
    circles
}

fn circles_of(name: &str, target: &CrateTarget) -> Vec<Circle> {
    let needs = needs(&target.modules);
    let mut edges: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (from, to) in needs.keys() {
        edges.entry(from).or_default().insert(to);
    }
    let components = components(&edges);
    components
        .into_iter()
        .filter(|files| files.len() > 1)
        .map(|files| Circle {
            target: name.to_owned(),
            needs: needs
                .iter()
                .filter(|((from, to), _)| files.contains(from) && files.contains(to))
                .map(|((from, to), (line, path))| format!("{from}:{line} needs {to} ({path})"))
                .collect(),
            files: files.into_iter().map(str::to_owned).collect(),
        })
        .collect()
}

type Needs<'a> = BTreeMap<(&'a str, &'a str), (usize, String)>;

/// The uses from file to file, with the first line that shows each.
fn needs(modules: &[SourceModule]) -> Needs<'_> {
    let mut needs = BTreeMap::new();
    for (index, module) in modules.iter().enumerate() {
        if module.test {
            continue;
        }
        for path in &module.paths {
            if path.reexport && module.has_file_children {
                continue;
            }
            for file in files_of(modules, index, path) {
                if file != module.file {
                    needs
                        .entry((module.file.as_str(), file))
                        .or_insert_with(|| (path.line, path.segments.join("::")));
                }
            }
        }
    }
    needs
}

/// The files to which a path leads: one, or several for a glob over re-exports.
fn files_of<'a>(modules: &'a [SourceModule], from: usize, path: &PathUse) -> Vec<&'a str> {
    if path.absolute {
        return Vec::new();
    }
    let (last, before) = path.segments.split_last().expect("a path has names");
    let found = if last == "*" {
        resolve(modules, from, before, DEPTH)
    } else {
        resolve(modules, from, &path.segments, DEPTH)
    };
    found
        .map(|place| vec![modules[place.module()].file.as_str()])
        .unwrap_or_default()
}

/// The maximum depth of re-exports of re-exports.
const DEPTH: usize = 8;

#[derive(Clone, Copy, Debug)]
enum ResolvedPath {
    Module(usize),
    /// An item that this module defines.
    Item(usize),
}

impl ResolvedPath {
    fn module(self) -> usize {
        match self {
            Self::Module(index) | Self::Item(index) => index,
        }
    }
}

/// The item that `segments`, as written in the module `from`, refer to; `None` for another crate's.
fn resolve(
    modules: &[SourceModule],
    from: usize,
    segments: &[String],
    depth: usize,
) -> Option<ResolvedPath> {
    let (first, mut rest) = segments.split_first()?;
    let mut place = match first.as_str() {
        "crate" => ResolvedPath::Module(0),
        "self" => ResolvedPath::Module(from),
        "super" => ResolvedPath::Module(modules[from].parent?),
        name => member(modules, from, name, depth)?,
    };
    while let (ResolvedPath::Module(index), Some((name, after))) = (place, rest.split_first()) {
        place = if name == "super" {
            ResolvedPath::Module(modules[index].parent?)
        } else if name == "self" {
            ResolvedPath::Module(index)
        } else {
            // A name that is not found (a macro defined it) is taken for the module's own.
            member(modules, index, name, depth).unwrap_or(ResolvedPath::Item(index))
        };
        rest = after;
    }
    Some(place)
}

/// The meaning of `name` in a module: a child, an item, or an import.
fn member(
    modules: &[SourceModule],
    index: usize,
    name: &str,
    depth: usize,
) -> Option<ResolvedPath> {
    let module = &modules[index];
    if let Some(child) = module.children.get(name) {
        return Some(ResolvedPath::Module(*child));
    }
    if module.items.contains(name) {
        return Some(ResolvedPath::Item(index));
    }
    let depth = depth.checked_sub(1)?;
    let imports = || module.paths.iter().filter(|path| !path.absolute);
    for import in imports() {
        if import.imported_as.as_deref() == Some(name) && import.segments != [name] {
            return resolve(modules, index, &import.segments, depth);
        }
    }
    for import in imports() {
        if import.imported_as.as_deref() == Some("*") {
            let segments = &import.segments[..import.segments.len() - 1];
            if let Some(ResolvedPath::Module(other)) = resolve(modules, index, segments, depth)
                && other != index
                && let Some(found) = member(modules, other, name, depth)
            {
                return Some(found);
            }
        }
    }
    None
}

/// Strongly connected components, by Kosaraju's two passes.
fn components<'a>(edges: &BTreeMap<&'a str, BTreeSet<&'a str>>) -> Vec<BTreeSet<&'a str>> {
    let mut backwards: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (from, targets) in edges {
        for to in targets {
            backwards.entry(to).or_default().insert(from);
        }
    }
    let mut order = Vec::new();
    let mut seen = BTreeSet::new();
    for from in edges.keys() {
        walk(from, edges, &mut seen, &mut order);
    }
    let mut components = Vec::new();
    let mut seen = BTreeSet::new();
    for from in order.into_iter().rev() {
        let mut component = Vec::new();
        walk(from, &backwards, &mut seen, &mut component);
        if !component.is_empty() {
            components.push(component.into_iter().collect());
        }
    }
    components
}

/// Visits everything that `from` reaches and that is not in `seen`; adds each to `order` after its
/// successors.
fn walk<'a>(
    from: &'a str,
    edges: &BTreeMap<&'a str, BTreeSet<&'a str>>,
    seen: &mut BTreeSet<&'a str>,
    order: &mut Vec<&'a str>,
) {
    if !seen.insert(from) {
        return;
    }
    for to in edges.get(from).into_iter().flatten() {
        walk(to, edges, seen, order);
    }
    order.push(from);
}

#[cfg(test)]
mod tests {
    use super::super::tokens;
    use super::*;

    /// A crate of sibling files, the first of which is the root.
    fn target(files: &[(&str, &str)]) -> CrateTarget {
        let mut modules: Vec<SourceModule> = Vec::new();
        for (index, (name, text)) in files.iter().enumerate() {
            let tokens = tokens::flatten(text.parse().expect("valid tokens"), false);
            let item = |pair: &[tokens::SourceToken]| {
                let keyword = ["struct", "fn"].contains(&pair[0].ident()?);
                pair[1].ident().filter(|_| keyword).map(str::to_owned)
            };
            modules.push(SourceModule {
                parent: (index > 0).then_some(0),
                file: format!("{name}.rs"),
                has_file_children: index == 0,
                items: tokens.windows(2).filter_map(item).collect(),
                paths: tokens::paths(&tokens)
                    .into_iter()
                    .filter(|path| !path.test)
                    .collect(),
                ..SourceModule::default()
            });
            if index > 0 {
                modules[0].children.insert((*name).to_owned(), index);
            }
        }
        CrateTarget {
            name: "c".into(),
            kind: TargetKind::Product,
            modules,
        }
    }

    fn circles(files: &[(&str, &str)]) -> Vec<Vec<String>> {
        let found = circles_of("c", &target(files));
        found.into_iter().map(|circle| circle.files).collect()
    }

    #[test]
    fn two_files_that_import_each_other_are_a_circle() {
        let found = circles(&[
            ("lib", ""),
            ("a", "use crate::b::B; struct A;"),
            ("b", "fn f() { super::a::A; } struct B;"),
            ("c", "use crate::a::A;"),
        ]);
        assert_eq!(found, [["a.rs", "b.rs"]]);
    }

    #[test]
    fn a_circle_of_three_is_found_through_an_imported_module() {
        let found = circles(&[
            ("lib", ""),
            ("a", "use crate::b; fn f() { b::f() }"),
            ("b", "use super::c; fn f() { c::f() }"),
            ("c", "fn f() { crate::a::f() }"),
        ]);
        assert_eq!(found, [["a.rs", "b.rs", "c.rs"]]);
    }

    #[test]
    fn a_facade_that_exports_its_modules_makes_no_circle() {
        let found = circles(&[
            ("lib", "mod a; mod b; pub use a::A; pub use b::B;"),
            ("a", "struct A;"),
            ("b", "use crate::A; struct B;"),
        ]);
        assert_eq!(found, Vec::<Vec<String>>::new());
    }

    #[test]
    fn a_circle_through_the_facade_is_found() {
        let found = circles(&[
            ("lib", "mod a; mod b; pub use a::A; pub use b::*;"),
            ("a", "use crate::B; struct A;"),
            ("b", "use crate::A; struct B;"),
        ]);
        assert_eq!(found, [["a.rs", "b.rs"]]);
    }

    #[test]
    fn a_root_that_uses_a_child_that_uses_the_root_is_a_circle() {
        let found = circles(&[
            ("lib", "mod a; struct R; fn f() { a::f() }"),
            ("a", "use crate::R; fn f() {}"),
        ]);
        assert_eq!(found, [["a.rs", "lib.rs"]]);
    }

    #[test]
    fn tests_and_other_crates_make_no_circle() {
        let found = circles(&[
            ("lib", ""),
            ("a", "use crate::b::B; struct A;"),
            (
                "b",
                "#[cfg(test)] mod t { use crate::a::A; } use a::other; struct B;",
            ),
        ]);
        assert_eq!(found, Vec::<Vec<String>>::new());
    }

    #[test]
    fn the_line_that_makes_the_need_is_told() {
        let target = target(&[
            ("lib", ""),
            ("a", "struct A;\n\nuse crate::b::B;"),
            ("b", "use crate::a::A; struct B;"),
        ]);
        let circles = circles_of("c", &target);
        assert_eq!(
            circles[0].needs,
            [
                "a.rs:3 needs b.rs (crate::b::B)",
                "b.rs:1 needs a.rs (crate::a::A)"
            ]
        );
    }
}
