//! Doc comments that do not stand alone.
//!
//! An editor shows the comment of one item without its neighbours. A comment that opens with a
//! pronoun, a conjunction or half a phrase then says nothing. What counts, by its opening words (a
//! rule's name, `R-ACK-1:`, is passed over):
//!
//! | opening | example |
//! |---|---|
//! | a pronoun: it, they, that, those, these, such, whose, ours, theirs | "It failed." "Those that pay." "Whose it is." |
//! | a conjunction or its like: and, but, or, nor, then, also, else, likewise, ditto | "And for each packet." |
//! | "So …", "As …" | "So many bytes." "As on the command line." |
//! | "Of …" | "Of one stream." |
//! | "The same …" | "The same, with links shared." |
//! | a number or quantity of something unnamed | "One that has a name." "All of them." "None while it is crashed." |
//! | a reference: see above, the above, … | "See above." "… up to this." |
//! | a question about a pronoun | "Whether it failed." "How long they wait." |
//! | one or two words that repeat the item's name | "The flow." on `flow: FlowId` |
//!
//! A possessive ("Its name.") passes: an editor shows the type of which a field is part. Other
//! faults cannot be found with lists of words.

use super::sources::Sources;
use super::tokens::{SourceToken, TokenKind};

/// Words that refer to something mentioned elsewhere, or continue a sentence.
const OPENERS: &[&str] = &[
    "it",
    "they",
    "them",
    "that",
    "those",
    "these",
    "such",
    "whose",
    "ours",
    "theirs", // pronouns
    "and",
    "but",
    "or",
    "nor",
    "yet",
    "then",
    "also",
    "too",
    "else",
    "otherwise", // conjunctions
    "likewise",
    "ditto",
    "dito",
    "same",
    "so",
    "as",
    "of",
    "none",
    "others",
    "here", //
];

/// Openings of several words.
const OPENINGS: &[&[&str]] = &[
    &["the", "same"],
    &["the", "above"],
    &["the", "former"],
    &["the", "latter"],
    &["see", "above"],
    &["see", "below"],
    &["see", "there"],
    &["another", "one"],
];

/// Words that make a preceding "one" a pronoun: "One that has a name.", "One with it."
const AFTER_ONE: &[&str] = &[
    "that", "who", "whom", "whose", "which", "of", "with", "without", "for", "to", "towards",
    "from", "in", "on", "at", "by", "after", "before", "is", "was", "has", "may", "more", "over",
];

/// Words that begin a clause, as do the same words with one of [`DEGREES`].
const CLAUSES: &[&str] = &["whether", "when", "where", "why", "how", "if"];

/// Words between "how" or "since" and the subject of their clause.
const DEGREES: &[&str] = &[
    "when", "often", "long", "many", "much", "far", "late", "soon",
];

/// Words that must not follow "all of …", "two of …".
const UNNAMED: &[&str] = &[
    "it", "them", "that", "those", "these", "this", "which", "whom",
];

/// A doc comment, as an editor shows it.
#[derive(Debug, PartialEq, Eq)]
struct DocComment {
    line: usize,
    /// The first paragraph of the comment.
    text: String,
    /// The name of the documented item; `None` for an inner comment of a module or crate.
    name: Option<String>,
}

/// Each comment that does not stand alone: `core/wire/src/frame.rs:12: It failed.`
pub fn check(sources: &Sources) -> Vec<String> {
    let mut found = Vec::new();
    for (name, file) in &sources.files {
        for comment in comments(&file.tokens) {
            if !stands_alone(&comment) {
                let DocComment { line, text, .. } = comment;
                found.push(format!("{name}:{line}: {}", shortened(&text)));
            }
        }
    }
    found
}

fn shortened(text: &str) -> String {
    const CHARS: usize = 70;
    match text.char_indices().nth(CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// The number of doc comments.
pub fn count(sources: &Sources) -> usize {
    let files = sources.files.values();
    files.map(|file| comments(&file.tokens).len()).sum()
}

fn stands_alone(comment: &DocComment) -> bool {
    let text = without_rule_names(&comment.text);
    if text.starts_with('…') || text.starts_with("...") {
        return false;
    }
    let words: Vec<String> = text
        .split_whitespace()
        .map(|word| {
            // `It's` opens with `it`; code in backticks keeps them and is not one of these words.
            let word = word.split(['\'', '’']).next().unwrap_or(word);
            word.trim_matches(|c: char| ",.;:!?()\"".contains(c))
                .to_lowercase()
        })
        .filter(|word| !word.is_empty())
        .collect();
    let Some(first) = words.first() else {
        return true;
    };
    if OPENERS.contains(&first.as_str()) {
        return false;
    }
    let begins_with = |opening: &[&str]| {
        words.len() >= opening.len() && opening.iter().zip(&words).all(|(a, b)| a == b)
    };
    if OPENINGS.iter().any(|opening| begins_with(opening)) {
        return false;
    }
    if asks_about_pronoun(&words) {
        return false;
    }
    let second = words.get(1).map(String::as_str);
    if first == "one" && second.is_none_or(|second| AFTER_ONE.contains(&second)) {
        return false;
    }
    let of = words.iter().take(3).position(|word| word == "of");
    let unnamed = of
        .and_then(|of| words.get(of + 1))
        .is_some_and(|word| UNNAMED.contains(&word.as_str()));
    // "All of them.", "The first of those.", "Two of it."; not "The end of this transfer."
    let ends_there = of.is_some_and(|of| {
        let next = words.get(of + 2).map(String::as_str);
        matches!(
            words[of + 1..].first().map(String::as_str),
            Some("it" | "them")
        ) || next.is_none()
            || next.is_some_and(|next| ["that", "who", "which", "in", "on"].contains(&next))
    });
    if unnamed && ends_there {
        return false;
    }
    !repeats_name(&words, comment.name.as_deref())
}

/// Finds "Whether it failed.", "How long they wait.", "Since when it is used."
fn asks_about_pronoun(words: &[String]) -> bool {
    let word = |n: usize| words.get(n).map_or("", String::as_str);
    let has_degree = ["how", "since"].contains(&word(0)) && DEGREES.contains(&word(1));
    let subject = match has_degree {
        true => word(2),
        false if CLAUSES.contains(&word(0)) => word(1),
        false => return false,
    };
    ["it", "they"].contains(&subject)
}

/// `R-ACK-1, R-ACK-2: The text.` without the names.
fn without_rule_names(text: &str) -> &str {
    let mut rest = text.trim_start();
    while let Some((name, after)) = rest.split_once([':', ',', ' ']) {
        let is_rule = name.starts_with("R-") && name.ends_with(|c: char| c.is_ascii_digit());
        if !is_rule {
            break;
        }
        rest = after.trim_start();
    }
    rest
}

/// Whether the comment consists of one or two words, beside an article, that the name contains
/// already.
fn repeats_name(words: &[String], name: Option<&str>) -> bool {
    let Some(name) = name else {
        return false;
    };
    let articles = ["a", "an", "the", "its"];
    let skipped = usize::from(articles.contains(&words[0].as_str()));
    let words = &words[skipped..];
    let parts = parts_of_name(name);
    let is_part = |word: &String| {
        let word = word.trim_matches('`');
        let singular = word.strip_suffix('s').unwrap_or(word);
        parts
            .iter()
            .any(|part| part.strip_suffix('s').unwrap_or(part) == singular)
    };
    (1..=2).contains(&words.len()) && words.iter().all(is_part)
}

/// The words of `TicketBytes`, `ticket_bytes` or `TICKET_BYTES` in lower case.
fn parts_of_name(name: &str) -> Vec<String> {
    let mut parts: Vec<String> = Vec::new();
    let mut before = '_';
    for c in name.chars() {
        let begins = before == '_' || (c.is_uppercase() && !before.is_uppercase());
        if c != '_' {
            if begins {
                parts.push(String::new());
            }
            let part = parts.last_mut().expect("the first character begins one");
            part.extend(c.to_lowercase());
        }
        before = c;
    }
    parts
}

/// Every doc comment of a file.
fn comments(tokens: &[SourceToken]) -> Vec<DocComment> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let Some((inner, _, _)) = doc_line(tokens, at) else {
            at += 1;
            continue;
        };
        let line = tokens[at].line;
        let mut lines = Vec::new();
        while let Some((other_inner, text, after)) = doc_line(tokens, at) {
            if other_inner != inner {
                break;
            }
            lines.push(text);
            at = after;
        }
        let text = lines.join("\n");
        let paragraph = text.trim_start().lines().map(str::trim);
        let paragraph: Vec<&str> = paragraph.take_while(|line| !line.is_empty()).collect();
        if paragraph.is_empty() {
            continue;
        }
        found.push(DocComment {
            line,
            text: paragraph.join(" "),
            name: (!inner).then(|| name_at(tokens, at)).flatten(),
        });
    }
    found
}

/// The `#[doc = "…"]` at `at`: whether it is an inner one, its text, and the index after it.
fn doc_line(tokens: &[SourceToken], at: usize) -> Option<(bool, String, usize)> {
    if !tokens.get(at)?.is_punct('#') {
        return None;
    }
    let inner = tokens.get(at + 1)?.is_punct('!');
    let open = at + 1 + usize::from(inner);
    let is_doc = tokens.get(open)?.opens('[')
        && tokens.get(open + 1)?.ident() == Some("doc")
        && tokens.get(open + 2)?.is_punct('=');
    match &tokens.get(open + 3)?.kind {
        TokenKind::Literal(literal) if is_doc => {
            let text = syn::parse_str::<syn::LitStr>(literal).ok()?;
            Some((inner, text.value(), open + 5))
        }
        _ => None,
    }
}

/// The name of the item that begins at `at`, after further attributes.
fn name_at(tokens: &[SourceToken], mut at: usize) -> Option<String> {
    while tokens.get(at)?.is_punct('#') {
        at = after_group(tokens, at + 1);
    }
    loop {
        let token = tokens.get(at)?;
        let next = tokens.get(at + 1).and_then(SourceToken::ident);
        match token.ident() {
            Some("pub") => {
                at += 1;
                if tokens.get(at)?.opens('(') {
                    at = after_group(tokens, at);
                }
            }
            Some("const") if !matches!(next, Some("fn" | "unsafe" | "async" | "extern")) => {
                return next.map(str::to_owned);
            }
            Some("fn" | "struct" | "enum" | "trait" | "type" | "mod" | "union") => {
                return next.map(str::to_owned);
            }
            Some("static" | "async" | "unsafe" | "extern" | "const" | "mut" | "default") => at += 1,
            Some("macro_rules") => {
                return tokens
                    .get(at + 2)
                    .and_then(SourceToken::ident)
                    .map(str::to_owned);
            }
            Some(name) => return Some(name.to_owned()),
            None if matches!(token.kind, TokenKind::Literal(_)) => at += 1,
            None => return None,
        }
    }
}

/// The index after the group that opens at `at`.
fn after_group(tokens: &[SourceToken], mut at: usize) -> usize {
    let mut depth = 0;
    while let Some(token) = tokens.get(at) {
        match token.kind {
            TokenKind::Open(_) => depth += 1,
            TokenKind::Close(_) => depth -= 1,
            _ => {}
        }
        at += 1;
        if depth == 0 {
            break;
        }
    }
    at
}

#[cfg(test)]
mod tests {
    use super::super::tokens;
    use super::*;

    fn read(source: &str) -> Vec<DocComment> {
        comments(&tokens::flatten(
            source.parse().expect("valid tokens"),
            false,
        ))
    }

    fn alone(text: &str, name: &str) -> bool {
        stands_alone(&DocComment {
            line: 1,
            text: text.to_owned(),
            name: Some(name.to_owned()),
        })
    }

    #[test]
    fn comments_that_lean_on_their_neighbours_are_found() {
        for text in [
            "The same, but for flows that wait.",
            "The same as an argument: nothing without one.",
            "Of those, what was acknowledged.",
            "Of one stream.",
            "So many bytes of a packet were repeated.",
            "So long from now.",
            "As many as may be open.",
            "As on the command line.",
            "And for flows whose policy is balanced.",
            "But only after three looks.",
            "Or for so many round trips.",
            "Nor does it wait.",
            "Those that pay, in order.",
            "These bytes.",
            "That of an agent.",
            "It failed.",
            "It's over.",
            "They no longer are.",
            "Whose it is.",
            "Likewise, for uploads.",
            "Ditto.",
            "See above.",
            "Then said.",
            "Also the names others have.",
            "None while it is crashed.",
            "One that has a name.",
            "One of them.",
            "One.",
            "All of them.",
            "All of it in one line.",
            "The first of those that wait.",
            "… up to this.",
            "... and no more.",
            "R-ACK-7: it goes on.",
            "Whether it was played.",
            "When they expire, in seconds since 1970.",
            "How long it may wait.",
            "How far they came.",
            "Since when it is used.",
            "R-ACK-7, R-ACK-8: And the other.",
        ] {
            assert!(!alone(text, "x"), "{text}");
        }
    }

    #[test]
    fn comments_that_say_their_subject_pass() {
        for text in [
            "Bytes granted on metered links and not yet used.",
            "Whether both directions ended.",
            "Its TCP port, for clients without D2TP.",
            "One flow at rest.",
            "One JSON object on standard output instead of the table",
            "All paths of a session, in the order they were opened.",
            "A byte of those the peer sent last.",
            "The end of this transfer.",
            "This device's key file.",
            "Another process holds the lock.",
            "Ordinary sockets.",
            "Itemises what a link cost.",
            "`so` as written in a link's name.",
            "Asks the origin for its size.",
            "R-ACK-7: chooses the path of an ACK.",
            "Offset of the first byte.",
            "Some loss was the queue's.",
            "How many devices it takes to fill the link.",
            "When the item was played.",
        ] {
            assert!(alone(text, "x"), "{text}");
        }
    }

    #[test]
    fn a_comment_that_repeats_the_name_is_found() {
        assert!(!alone("The flow.", "flow"));
        assert!(!alone("Held bytes", "HELD_BYTES"));
        assert!(!alone("A scenario.", "Scenario"));
        assert!(!alone("Its names.", "name"));
        assert!(alone("The flow that ended.", "flow"));
        assert!(alone("Bytes.", "length"));
        assert!(alone("A user's scenario.", "Scenario"));
    }

    #[test]
    fn names_are_split_into_words() {
        assert_eq!(parts_of_name("TicketBytes"), ["ticket", "bytes"]);
        assert_eq!(parts_of_name("TICKET_BYTES"), ["ticket", "bytes"]);
        assert_eq!(parts_of_name("_rtt_min"), ["rtt", "min"]);
    }

    #[test]
    fn a_comment_is_read_with_its_line_paragraph_and_item() {
        let found = read(
            "//! A module.\n//! Its second line.\n//!\n//! More.\n\
             use a::b;\n\
             /// A struct.\n///\n/// More.\n#[derive(Debug)]\npub(crate) struct S {\n\
             /// A field.\n    pub field: u8,\n}\n\
             /// A function.\npub const unsafe extern \"C\" fn f() {}\n\
             /// A constant.\nconst C: u8 = 1;\n\
             enum E {\n/// A variant.\n    V,\n}\n\
             m! {\n/// Inside a macro.\n    key = 1\n}",
        );
        let found: Vec<_> = found
            .iter()
            .map(|doc| (doc.line, doc.text.as_str(), doc.name.as_deref()))
            .collect();
        assert_eq!(
            found,
            [
                (1, "A module. Its second line.", None),
                (6, "A struct.", Some("S")),
                (11, "A field.", Some("field")),
                (14, "A function.", Some("f")),
                (16, "A constant.", Some("C")),
                (19, "A variant.", Some("V")),
                (23, "Inside a macro.", Some("key")),
            ]
        );
    }
}
