//! Words that were given up: one idea has one name, in code, documents, bindings and pages alike.
//!
//! A network whose bytes cost money is *metered*, as NetworkManager and Android call it. Phrases are found across the ends
//! of lines, and behind the marks of comments. The changelog, decisions and reports speak of the past and are not read.

use std::path::Path;

use anyhow::Result;

use crate::repository::files_below;

/// A phrase that is not used any more.
struct RetiredPhrase {
    /// The words, one after the other, in lower case; each is one of several.
    words: &'static [&'static [&'static str]],
    /// Words after which the phrase means something else.
    not_before: &'static [&'static str],
    /// What is written instead.
    instead: &'static str,
}

const RETIRED: [RetiredPhrase; 4] = [
    RetiredPhrase {
        words: &[
            &["network", "networks", "link", "links"],
            &["that", "which"],
            &["cost", "costs"],
        ],
        not_before: &["nothing"],
        instead: "metered network, metered link",
    },
    RetiredPhrase {
        words: &[&["nobody"], &["may"], &["come"]],
        not_before: &[],
        instead: "no client is allowed",
    },
    RetiredPhrase {
        words: &[&["sentence"], &["says"], &["whose"]],
        not_before: &[],
        instead: "see the message",
    },
    RetiredPhrase {
        words: &[&["as"], &["promised"], &["with"], &["p"]],
        not_before: &[],
        instead: "finished on time",
    },
];

/// Files that are read, by their extensions.
const EXTENSIONS: [&str; 11] = [
    "rs", "md", "toml", "h", "html", "js", "ts", "go", "java", "kt", "py",
];

/// Files that speak of the past, that others wrote, or that list the phrases.
const NOT_READ: [&str; 6] = [
    "CHANGELOG.md",
    "docs/decisions/",
    "docs/reports/",
    "xtask/src/rules/wording.rs",
    "node_modules/",
    "/build/",
];

/// The uses of retired phrases, one line each.
///
/// # Errors
/// A file cannot be read.
pub fn check(root: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for extension in EXTENSIONS {
        for path in files_below(root, extension)? {
            let name = path.strip_prefix(root)?.to_string_lossy().into_owned();
            if NOT_READ
                .iter()
                .any(|not| name.starts_with(not) || name.contains(not))
            {
                continue;
            }
            // What is no text has no words.
            let text = std::fs::read(&path)?;
            found.extend(uses_in(&name, &String::from_utf8_lossy(&text)));
        }
    }
    Ok(found)
}

/// The uses in one file.
fn uses_in(name: &str, text: &str) -> Vec<String> {
    let words: Vec<(usize, String)> = text
        .lines()
        .enumerate()
        .flat_map(|(index, line)| {
            let words = line.split(|c: char| !c.is_alphanumeric());
            let words = words.filter(|word| !word.is_empty());
            words.map(move |word| (index + 1, word.to_lowercase()))
        })
        .collect();
    let mut found = Vec::new();
    for (at, (line, _)) in words.iter().enumerate() {
        for phrase in &RETIRED {
            let Some(used) = words.get(at..at + phrase.words.len()) else {
                continue;
            };
            let is_it = used
                .iter()
                .zip(phrase.words)
                .all(|((_, word), any)| any.contains(&word.as_str()));
            let next = words.get(at + phrase.words.len());
            let is_other = next.is_some_and(|(_, next)| phrase.not_before.contains(&next.as_str()));
            if is_it && !is_other {
                let used: Vec<&str> = used.iter().map(|(_, word)| word.as_str()).collect();
                let (used, instead) = (used.join(" "), phrase.instead);
                found.push(format!("{name}:{line}: `{used}`; say: {instead}"));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phrase_is_found_across_lines_and_comments_and_in_any_case() {
        let text = "/// Networks that\n    /// cost are used.\n\nlet a = \"a link which costs\";\n * networks\n * that cost";
        let lines: Vec<String> = uses_in("a.rs", text);
        let lines: Vec<&str> = lines
            .iter()
            .map(|line| line.split(": ").next().unwrap_or_default())
            .collect();
        assert_eq!(lines, ["a.rs:1", "a.rs:4", "a.rs:5"]);
    }

    #[test]
    fn other_uses_of_the_words_are_allowed() {
        for text in [
            "networks that cost nothing",
            "metered networks",
            "it costs what the network costs",
            "links that are down cost time",
        ] {
            assert_eq!(uses_in("a.md", text), Vec::<String>::new(), "{text}");
        }
    }
}
