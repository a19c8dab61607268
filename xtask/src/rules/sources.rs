//! The workspace as declared by its sources: packages, targets, their modules and the files of
//! each.
//!
//! ```text
//!  package ─ dependencies (normal, dev, build)
//!     └─ target (library, program, test, example, build script)
//!           └─ module tree, by following `mod x;` from the target's first file
//! ```
//!
//! `cargo metadata --no-deps` lists packages and targets, so nothing is built or downloaded.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use quote::ToTokens;
use serde_json::Value;

use super::tokens::{self, PathUse, SourceToken};
use crate::repository::files_below;
use crate::step::cargo;

/// The input of all rules.
#[derive(Debug)]
pub struct Sources {
    /// Packages of the workspace.
    pub packages: Vec<WorkspacePackage>,
    /// Every `.rs` file of the repository, by its path from the top folder.
    pub files: BTreeMap<String, SourceFile>,
    /// The folder of programs that were built for tests; they need not be there.
    pub programs: PathBuf,
}

/// A file and its tokens.
#[derive(Debug)]
pub struct SourceFile {
    /// The text as it is in the repository.
    pub text: String,
    /// The tokens of the file; if the whole file is test code, each is marked so.
    pub tokens: Vec<SourceToken>,
}

/// A package of the workspace.
#[derive(Debug)]
pub struct WorkspacePackage {
    /// The package's name in Cargo.toml.
    pub name: String,
    /// The package's folder from the top folder: `core/session`.
    pub folder: String,
    /// The dependencies of the package.
    pub dependencies: Vec<Dependency>,
    /// The targets of the package.
    pub targets: Vec<CrateTarget>,
    /// Dependencies that the manifest exempts from the rule of unused ones.
    pub excused: BTreeSet<String>,
}

/// The purpose of a dependency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DependencyKind {
    /// The library and the programs.
    Normal,
    /// Tests, examples and benchmarks.
    Dev,
    /// The build script.
    Build,
}

/// A line of a manifest's dependencies.
#[derive(Debug)]
pub struct Dependency {
    /// The package's name.
    pub package: String,
    /// The name that sources use.
    pub extern_name: String,
    /// The purpose of the dependency.
    pub kind: DependencyKind,
    /// Whether only a feature brings the dependency.
    pub optional: bool,
}

/// The kind of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetKind {
    /// A library or a program.
    Product,
    /// A test, an example or a benchmark.
    Test,
    /// `build.rs`.
    BuildScript,
}

/// A crate as the compiler sees it.
#[derive(Debug)]
pub struct CrateTarget {
    /// The name that Cargo uses.
    pub name: String,
    /// The kind of the target.
    pub kind: TargetKind,
    /// The modules of the target; the first is the root.
    pub modules: Vec<SourceModule>,
}

/// A module of a target.
#[derive(Debug, Default)]
pub struct SourceModule {
    /// The module that declares it; `None` for the root.
    pub parent: Option<usize>,
    /// The module's file, from the top folder.
    pub file: String,
    /// Whether the module is defined in its parent's file.
    pub inline: bool,
    /// Whether its children are in other files.
    pub has_file_children: bool,
    /// Whether the module is compiled only for tests.
    pub test: bool,
    /// Whether the module is visible outside its parent.
    pub public: bool,
    /// Modules it declares.
    pub children: BTreeMap<String, usize>,
    /// The names of its own items.
    pub items: BTreeSet<String>,
    /// The types that the module defines itself, without its children's.
    pub types: Vec<TypeDefinition>,
    /// The paths in its code and imports, without its children's and without test code.
    pub paths: Vec<PathUse>,
}

/// The location of a type's definition.
#[derive(Clone, Debug)]
pub struct TypeDefinition {
    /// The name without its module.
    pub name: String,
    /// The line of the item, counted from 1.
    pub line: usize,
    /// Whether the type has a `pub` that reaches beyond its module.
    pub public: bool,
}

impl Sources {
    /// Reads the repository at `root`.
    ///
    /// # Errors
    /// Cargo fails, or a file or its syntax cannot be read.
    pub fn read(root: &Path) -> Result<Self> {
        let metadata = metadata()?;
        let mut files = BTreeMap::new();
        for path in files_below(root, "rs")? {
            let text = std::fs::read_to_string(&path)?;
            let name = path.strip_prefix(root)?.to_string_lossy().into_owned();
            files.insert(name, text);
        }
        let built = metadata["target_directory"].as_str();
        let programs = Path::new(built.context("no target folder")?).join("debug");
        let mut packages = packages(&metadata, root)?;
        let mut test_files = BTreeSet::new();
        let mut product_files = BTreeSet::new();
        for target in packages.iter_mut().flat_map(|package| &mut package.targets) {
            for module in &target.modules {
                if target.kind == TargetKind::Test || module.test {
                    test_files.insert(module.file.clone());
                } else {
                    product_files.insert(module.file.clone());
                }
            }
        }
        let files = files
            .into_iter()
            .map(|(name, text)| {
                let named_tests = name
                    .split('/')
                    .any(|part| part == "tests" || part == "tests.rs");
                let test =
                    !product_files.contains(&name) && (test_files.contains(&name) || named_tests);
                let stream = text
                    .parse()
                    .map_err(|error| anyhow::anyhow!("{name} is not Rust: {error}"))?;
                let tokens = tokens::flatten(stream, test);
                Ok((name, SourceFile { text, tokens }))
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            packages,
            files,
            programs,
        })
    }
}

fn metadata() -> Result<Value> {
    let output = cargo([
        "metadata",
        "--no-deps",
        "--format-version",
        "1",
        "--offline",
    ])
    .output()
    .context("cargo metadata could not be started")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("cargo metadata: {}", said.trim());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn packages(metadata: &Value, root: &Path) -> Result<Vec<WorkspacePackage>> {
    let listed = metadata["packages"].as_array().context("no packages")?;
    // Sources use the name of a library, which may differ from its package's.
    let libraries: BTreeMap<&str, &str> = listed
        .iter()
        .filter_map(|package| {
            let targets = package["targets"].as_array()?;
            let library = targets.iter().find(|target| is_library(target))?;
            Some((package["name"].as_str()?, library["name"].as_str()?))
        })
        .collect();
    listed
        .iter()
        .map(|package| read_package(package, &libraries, root))
        .collect()
}

fn is_library(target: &Value) -> bool {
    let kinds = target["kind"].as_array().into_iter().flatten();
    let mut kinds = kinds.filter_map(Value::as_str);
    kinds.any(|kind| kind.ends_with("lib") || kind == "proc-macro")
}

fn read_package(
    package: &Value,
    libraries: &BTreeMap<&str, &str>,
    root: &Path,
) -> Result<WorkspacePackage> {
    let text = |value: &Value| value.as_str().map(str::to_owned).context("cargo metadata");
    let manifest = PathBuf::from(text(&package["manifest_path"])?);
    let folder = manifest.parent().context("a manifest has a folder")?;
    let name = text(&package["name"])?;
    let mut dependencies = Vec::new();
    for dependency in package["dependencies"].as_array().into_iter().flatten() {
        let package = text(&dependency["name"])?;
        let extern_name = dependency["rename"]
            .as_str()
            .or_else(|| libraries.get(package.as_str()).copied())
            .unwrap_or(&package)
            .replace('-', "_");
        let kind = match dependency["kind"].as_str() {
            Some("dev") => DependencyKind::Dev,
            Some("build") => DependencyKind::Build,
            _ => DependencyKind::Normal,
        };
        dependencies.push(Dependency {
            package,
            extern_name,
            kind,
            optional: dependency["optional"] == true,
        });
    }
    let mut targets = Vec::new();
    for target in package["targets"].as_array().into_iter().flatten() {
        let kinds: Vec<&str> = target["kind"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        let kind = if kinds.contains(&"custom-build") {
            TargetKind::BuildScript
        } else if is_library(target) || kinds.contains(&"bin") {
            TargetKind::Product
        } else {
            TargetKind::Test
        };
        let mut reader = ModuleReader {
            root,
            modules: Vec::new(),
        };
        let file = PathBuf::from(text(&target["src_path"])?);
        let is_test = kind == TargetKind::Test;
        reader.read_file(&file, true, None, is_test, true)?;
        targets.push(CrateTarget {
            name: text(&target["name"])?,
            kind,
            modules: reader.modules,
        });
    }
    let excused = package["metadata"]["cargo-machete"]["ignored"].as_array();
    let excused = excused.into_iter().flatten().filter_map(Value::as_str);
    Ok(WorkspacePackage {
        name,
        folder: folder.strip_prefix(root)?.to_string_lossy().into_owned(),
        dependencies,
        targets,
        excused: excused.map(str::to_owned).collect(),
    })
}

/// Follows `mod x;` through the files of one target.
struct ModuleReader<'a> {
    root: &'a Path,
    modules: Vec<SourceModule>,
}

impl ModuleReader<'_> {
    /// Reads a file as a module; returns its index. `owns_folder` is set if its children are in its
    /// own folder, like those of `lib.rs` and `mod.rs`, and not in a folder with its name.
    fn read_file(
        &mut self,
        file: &Path,
        owns_folder: bool,
        parent: Option<usize>,
        test: bool,
        public: bool,
    ) -> Result<usize> {
        let text = std::fs::read_to_string(file)
            .with_context(|| format!("{} of a module", file.display()))?;
        let parsed = syn::parse_file(&text).with_context(|| file.display().to_string())?;
        let beside = file.parent().context("a file has a folder")?;
        let folder = if owns_folder {
            beside.to_owned()
        } else {
            beside.join(file.file_stem().context("a file has a name")?)
        };
        let test = test || is_test(&parsed.attrs);
        let name = file.strip_prefix(self.root).unwrap_or(file);
        let index = self.add(SourceModule {
            parent,
            file: name.to_string_lossy().into_owned(),
            test,
            public,
            ..SourceModule::default()
        });
        self.read_items(&parsed.items, index, &folder, beside)?;
        Ok(index)
    }

    fn add(&mut self, module: SourceModule) -> usize {
        self.modules.push(module);
        self.modules.len() - 1
    }

    /// Reads `items` into the module `index`. Files of child modules are in `folder`; those with
    /// `#[path]` are relative to `beside`.
    fn read_items(
        &mut self,
        items: &[syn::Item],
        index: usize,
        folder: &Path,
        beside: &Path,
    ) -> Result<()> {
        for item in items {
            if let syn::Item::Mod(module) = item {
                self.read_module(module, index, folder, beside)?;
                continue;
            }
            let inherited = self.modules[index].test;
            let stream = item.to_token_stream();
            let tokens = tokens::flatten(stream, inherited);
            let paths = tokens::paths(&tokens)
                .into_iter()
                .filter(|path| !path.test || inherited);
            let into = &mut self.modules[index];
            into.paths.extend(paths);
            if inherited || !is_test(attributes(item)) {
                into.items.extend(name_of(item));
                into.types.extend(type_of(item));
            }
        }
        Ok(())
    }

    fn read_module(
        &mut self,
        module: &syn::ItemMod,
        index: usize,
        folder: &Path,
        beside: &Path,
    ) -> Result<()> {
        let name = module.ident.to_string();
        let test = self.modules[index].test || is_test(&module.attrs);
        let public = is_public(&module.vis);
        let child = if let Some((_, items)) = &module.content {
            let child = self.add(SourceModule {
                parent: Some(index),
                file: self.modules[index].file.clone(),
                inline: true,
                test,
                public,
                ..SourceModule::default()
            });
            let below = folder.join(&name);
            self.read_items(items, child, &below, &below)?;
            child
        } else {
            self.modules[index].has_file_children |= !test;
            let (file, owns_folder) = match path_attribute(&module.attrs) {
                Some(path) => (beside.join(path), true),
                None => {
                    let plain = folder.join(format!("{name}.rs"));
                    let nested = folder.join(&name).join("mod.rs");
                    if plain.is_file() {
                        (plain, false)
                    } else {
                        (nested, true)
                    }
                }
            };
            self.read_file(&plain_path(&file), owns_folder, Some(index), test, public)?
        };
        self.modules[index].children.insert(name, child);
        Ok(())
    }
}

/// `a/b/../c` as `a/c`.
fn plain_path(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            std::path::Component::ParentDir => {
                plain.pop();
            }
            other => plain.push(other),
        }
    }
    plain
}

fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes
        .iter()
        .any(|attribute| tokens::is_test_attribute(attribute.to_token_stream()))
}

fn path_attribute(attributes: &[syn::Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| {
        let syn::Meta::NameValue(pair) = &attribute.meta else {
            return None;
        };
        let syn::Expr::Lit(syn::ExprLit {
            lit: syn::Lit::Str(path),
            ..
        }) = &pair.value
        else {
            return None;
        };
        pair.path.is_ident("path").then(|| path.value())
    })
}

/// Whether the item is visible beyond its module: any `pub` but `pub(self)`.
fn is_public(visibility: &syn::Visibility) -> bool {
    match visibility {
        syn::Visibility::Public(_) => true,
        syn::Visibility::Restricted(restricted) => !restricted.path.is_ident("self"),
        _ => false,
    }
}

fn attributes(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Const(item) => &item.attrs,
        syn::Item::Enum(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Macro(item) => &item.attrs,
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Static(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Trait(item) => &item.attrs,
        syn::Item::Type(item) => &item.attrs,
        syn::Item::Union(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

fn name_of(item: &syn::Item) -> Option<String> {
    let ident = match item {
        syn::Item::Const(item) => &item.ident,
        syn::Item::Fn(item) => &item.sig.ident,
        syn::Item::Static(item) => &item.ident,
        syn::Item::Macro(item) => item.ident.as_ref()?,
        other => return type_of(other).map(|defined| defined.name),
    };
    Some(ident.to_string())
}

fn type_of(item: &syn::Item) -> Option<TypeDefinition> {
    let (ident, visibility) = match item {
        syn::Item::Enum(item) => (&item.ident, &item.vis),
        syn::Item::Struct(item) => (&item.ident, &item.vis),
        syn::Item::Trait(item) => (&item.ident, &item.vis),
        syn::Item::Type(item) => (&item.ident, &item.vis),
        syn::Item::Union(item) => (&item.ident, &item.vis),
        _ => return None,
    };
    Some(TypeDefinition {
        name: ident.to_string(),
        line: ident.span().start().line,
        public: is_public(visibility),
    })
}
