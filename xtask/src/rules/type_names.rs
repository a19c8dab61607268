//! One name, one type.
//!
//! A name that several structs, enums, unions, traits or type aliases of the workspace share is a
//! duplicate if another file could refer to one of them: if at least one has any form of `pub`, or
//! is in a file whose child modules see it. So is a name that hides a well-known type of the
//! standard library. Tests, examples and types inside functions do not count; types that a macro
//! defines are not seen.

use std::collections::{BTreeMap, BTreeSet};

use super::sources::{SourceModule, Sources, TargetKind};

/// Types of the standard library that a name must not hide.
const STANDARD: &[&str] = &[
    "Arc",
    "AsRef",
    "BTreeMap",
    "BTreeSet",
    "BinaryHeap",
    "Box",
    "BufRead",
    "BufReader",
    "BufWriter",
    "Bytes",
    "CStr",
    "CString",
    "Cell",
    "Child",
    "Clone",
    "Command",
    "Context",
    "Copy",
    "Cow",
    "Cursor",
    "Debug",
    "Default",
    "Deref",
    "Display",
    "Drop",
    "Duration",
    "Eq",
    "ExitCode",
    "ExitStatus",
    "File",
    "Fn",
    "FnMut",
    "FnOnce",
    "From",
    "Future",
    "Hash",
    "HashMap",
    "HashSet",
    "Hasher",
    "Infallible",
    "Instant",
    "Into",
    "IntoIterator",
    "IpAddr",
    "Ipv4Addr",
    "Ipv6Addr",
    "Iterator",
    "LazyLock",
    "Mutex",
    "MutexGuard",
    "NonNull",
    "NonZero",
    "Once",
    "OnceCell",
    "OnceLock",
    "OpenOptions",
    "Option",
    "Ord",
    "Ordering",
    "OsStr",
    "OsString",
    "PartialEq",
    "PartialOrd",
    "Path",
    "PathBuf",
    "PhantomData",
    "Pin",
    "Poll",
    "Range",
    "Rc",
    "Read",
    "Receiver",
    "Ref",
    "RefCell",
    "RefMut",
    "Result",
    "RwLock",
    "Seek",
    "Send",
    "Sender",
    "Sized",
    "SocketAddr",
    "SocketAddrV4",
    "SocketAddrV6",
    "Stdio",
    "String",
    "Sync",
    "SystemTime",
    "TcpListener",
    "TcpStream",
    "ToOwned",
    "ToString",
    "TryFrom",
    "TryInto",
    "UdpSocket",
    "UnixListener",
    "UnixStream",
    "Unpin",
    "Vec",
    "VecDeque",
    "Waker",
    "Weak",
    "Write",
];

/// The definition of a type.
#[derive(Debug)]
struct Definition {
    at: String,
    visible: bool,
}

/// Each name of several types, or that hides one of the standard library, with its places.
pub fn check(sources: &Sources) -> Vec<String> {
    let mut seen = BTreeSet::new();
    let mut definitions: BTreeMap<String, Vec<Definition>> = BTreeMap::new();
    let targets = sources.packages.iter().flat_map(|package| &package.targets);
    for target in targets.filter(|target| target.kind != TargetKind::Test) {
        for (index, module) in target.modules.iter().enumerate() {
            if module.test {
                continue;
            }
            for defined in &module.types {
                let at = format!("{}:{}", module.file, defined.line);
                // A file may be a module of two targets.
                if seen.insert(at.clone()) {
                    let visible = is_visible(&target.modules, index, defined.public);
                    let places = definitions.entry(defined.name.clone()).or_default();
                    places.push(Definition { at, visible });
                }
            }
        }
    }
    judge(&definitions)
}

/// Whether another file can name a type of the module `index`.
fn is_visible(modules: &[SourceModule], mut index: usize, mut public: bool) -> bool {
    loop {
        let module = &modules[index];
        if module.has_file_children {
            return true;
        }
        let Some(parent) = module.parent.filter(|_| module.inline) else {
            return public;
        };
        public &= module.public;
        if !public && !modules[parent].has_file_children {
            return false;
        }
        index = parent;
    }
}

fn judge(definitions: &BTreeMap<String, Vec<Definition>>) -> Vec<String> {
    let mut faults = Vec::new();
    for (name, places) in definitions {
        let at: Vec<&str> = places.iter().map(|place| place.at.as_str()).collect();
        if STANDARD.contains(&name.as_str()) {
            faults.push(format!("{name} hides a name of std: {}", at.join(", ")));
        } else if places.len() > 1 && places.iter().any(|place| place.visible) {
            faults.push(format!("{name}: {}", at.join(", ")));
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(types: &[(&str, bool)]) -> Vec<String> {
        let mut definitions: BTreeMap<String, Vec<Definition>> = BTreeMap::new();
        for (line, (name, visible)) in types.iter().enumerate() {
            definitions
                .entry((*name).to_owned())
                .or_default()
                .push(Definition {
                    at: format!("a.rs:{line}"),
                    visible: *visible,
                });
        }
        judge(&definitions)
    }

    #[test]
    fn a_name_of_two_types_is_a_fault_when_one_is_visible() {
        assert_eq!(judged(&[("A", true), ("A", false)]), ["A: a.rs:0, a.rs:1"]);
        assert_eq!(judged(&[("A", false), ("A", false)]), Vec::<String>::new());
        assert_eq!(judged(&[("A", true), ("B", true)]), Vec::<String>::new());
    }

    #[test]
    fn a_name_of_the_standard_library_is_a_fault_even_once() {
        assert_eq!(
            judged(&[("Pin", false)]),
            ["Pin hides a name of std: a.rs:0"]
        );
    }

    #[test]
    fn a_private_type_is_visible_where_child_files_see_it() {
        let module = |inline, has_file_children, parent| SourceModule {
            inline,
            has_file_children,
            parent,
            ..SourceModule::default()
        };
        let leaf = [module(false, false, None)];
        assert!(!is_visible(&leaf, 0, false) && is_visible(&leaf, 0, true));
        let parent = [module(false, true, None)];
        assert!(is_visible(&parent, 0, false));
        // `pub` in a private inline module reaches the file, and further only with children.
        let inline = [module(false, false, None), module(true, false, Some(0))];
        assert!(!is_visible(&inline, 1, true));
        let inline = [module(false, true, None), module(true, false, Some(0))];
        assert!(is_visible(&inline, 1, true));
    }

    #[test]
    fn the_names_of_std_are_sorted_and_unique() {
        assert!(STANDARD.windows(2).all(|pair| pair[0] < pair[1]));
    }
}
