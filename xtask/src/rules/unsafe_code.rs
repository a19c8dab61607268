//! Unsafe code, counted: each block and each `unsafe impl`, with its reason.
//!
//! The reason stands above it, as `// SAFETY: …`; clippy's `undocumented_unsafe_blocks` denies what has none, and this
//! count shows where unsafe code is.

use std::collections::BTreeMap;

use super::sources::{SourceFile, Sources};

/// Unsafe code of the workspace.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct UnsafeCode {
    /// The number of unsafe blocks and implementations in what is shipped, by folder: `edge/catch`.
    pub shipped: BTreeMap<String, usize>,
    /// The number in tests and in the laboratory.
    pub in_tests: usize,
    /// The places without a reason: `edge/catch/src/pair.rs:12`.
    pub without_reason: Vec<String>,
}

/// How many lines above a block its reason may end: a statement may begin before it.
const LINES_ABOVE: usize = 6;

/// Folders of which nothing is shipped.
const UNSHIPPED: [&str; 4] = ["lab/", "bench/", "xtask/", "bindings/tests/"];

/// All unsafe code.
pub fn count(sources: &Sources) -> UnsafeCode {
    let mut code = UnsafeCode::default();
    for (name, file) in &sources.files {
        let is_unshipped =
            name.contains("/tests/") || UNSHIPPED.iter().any(|at| name.starts_with(at));
        for (line, is_test) in unsafe_lines(file) {
            match is_test || is_unshipped {
                true => code.in_tests += 1,
                false => *code.shipped.entry(folder_of(name)).or_default() += 1,
            }
            if !has_reason(file, line) {
                code.without_reason.push(format!("{name}:{line}"));
            }
        }
    }
    code
}

/// The crate's folder: `edge/catch` of `edge/catch/src/pair.rs`.
fn folder_of(name: &str) -> String {
    let end = name.find("/src/").unwrap_or(name.len());
    name[..end].to_owned()
}

/// The line of each `unsafe {` and `unsafe impl`, and whether it is test code.
fn unsafe_lines(file: &SourceFile) -> Vec<(usize, bool)> {
    let pairs = file.tokens.windows(2);
    pairs
        .filter(|pair| {
            let is_block = pair[1].opens('{') || pair[1].ident() == Some("impl");
            pair[0].ident() == Some("unsafe") && is_block
        })
        .map(|pair| (pair[0].line, pair[0].test))
        .collect()
}

fn has_reason(file: &SourceFile, line: usize) -> bool {
    let lines: Vec<&str> = file.text.lines().take(line).collect();
    let mut above = lines.iter().rev();
    if above.next().is_some_and(|own| own.contains("SAFETY:")) {
        return true;
    }
    let mut code_lines = 0;
    for text in above.map(|line| line.trim()) {
        if text.contains("SAFETY:") {
            return true;
        }
        if !text.starts_with("//") {
            code_lines += 1;
            // A statement before it has ended: what stands above that is not about this one.
            if code_lines > LINES_ABOVE || text.ends_with(';') || text.ends_with('}') {
                return false;
            }
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::super::tokens;
    use super::*;

    fn count_of(text: &str) -> UnsafeCode {
        let file = SourceFile {
            tokens: tokens::flatten(text.parse().expect("valid tokens"), false),
            text: text.to_owned(),
        };
        let files = [("edge/x/src/a.rs".to_owned(), file)].into();
        count(&Sources {
            packages: Vec::new(),
            files,
            programs: std::path::PathBuf::new(),
        })
    }

    #[test]
    fn a_block_with_a_reason_is_counted_and_one_without_is_named() {
        let with =
            "fn f() {\n    // SAFETY: it takes nothing.\n    let x =\n        unsafe { g() };\n}\n";
        let code = count_of(with);
        assert_eq!(code.shipped["edge/x"], 1);
        assert!(code.without_reason.is_empty());
        let without =
            "fn f() {\n    // SAFETY: of another.\n    unsafe { g() };\n    unsafe { h() };\n}\n";
        assert_eq!(count_of(without).without_reason, ["edge/x/src/a.rs:4"]);
    }

    #[test]
    fn an_implementation_counts_and_a_function_does_not() {
        let code = count_of("// SAFETY: one owner.\nunsafe impl Send for X {}\nunsafe fn f() {}\n");
        assert_eq!(code.shipped["edge/x"], 1);
        let test =
            "#[cfg(test)]\nmod tests {\n    // SAFETY: a test.\n    fn f() { unsafe { g() } }\n}\n";
        assert_eq!(count_of(test).in_tests, 1);
    }
}
