//! A source file as a flat sequence of tokens, each marked if it is test code.
//!
//! Several rules need the places of a name, also inside macro calls, which a syntax tree does not
//! parse. Test code is what follows `#[cfg(test)]`, `#[test]` or `#[tokio::test]` up to the end of
//! that item, and everything after `#![cfg(test)]`.

use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};

/// The kind of a token. Groups are written as an opening and a closing token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// A name or keyword.
    Ident(String),
    /// `::`, which is one token here.
    PathSeparator,
    /// Any other punctuation, one character each.
    Punct(char),
    /// `(`, `[` or `{`.
    Open(char),
    /// `)`, `]` or `}`.
    Close(char),
    /// A literal as written, with its quotes.
    Literal(String),
}

/// A token and its place.
#[derive(Clone, Debug)]
pub struct SourceToken {
    /// The kind and text of the token.
    pub kind: TokenKind,
    /// The line of the token, counted from 1.
    pub line: usize,
    /// Whether the token is compiled only for tests.
    pub test: bool,
}

impl SourceToken {
    /// The name, if it is one.
    pub fn ident(&self) -> Option<&str> {
        match &self.kind {
            TokenKind::Ident(name) => Some(name),
            _ => None,
        }
    }

    /// Whether the token is this punctuation.
    pub fn is_punct(&self, c: char) -> bool {
        self.kind == TokenKind::Punct(c)
    }

    /// Whether the token opens a group with this character.
    pub fn opens(&self, c: char) -> bool {
        self.kind == TokenKind::Open(c)
    }
}

/// Flattens `stream`; `test` is set if all of it is test code.
pub fn flatten(stream: TokenStream, test: bool) -> Vec<SourceToken> {
    let mut tokens = Vec::new();
    flatten_level(stream, test, &mut tokens);
    tokens
}

fn flatten_level(stream: TokenStream, test: bool, into: &mut Vec<SourceToken>) {
    let trees: Vec<TokenTree> = stream.into_iter().collect();
    let mut whole_level = test;
    let mut item = false;
    let mut at = 0;
    while at < trees.len() {
        if let Some(attribute) = attribute_at(&trees[at..]) {
            if is_test_only(&attribute.content) {
                if attribute.inner {
                    whole_level = true;
                } else {
                    item = true;
                }
            }
            for tree in &trees[at..at + attribute.length] {
                push(tree, whole_level || item, into);
            }
            at += attribute.length;
            continue;
        }
        let is_separator = matches!(
            (&trees[at], trees.get(at + 1)),
            (TokenTree::Punct(first), Some(TokenTree::Punct(second)))
                if first.as_char() == ':'
                    && first.spacing() == Spacing::Joint
                    && second.as_char() == ':'
        );
        if is_separator {
            into.push(SourceToken {
                kind: TokenKind::PathSeparator,
                line: line_of(&trees[at]),
                test: whole_level || item,
            });
            at += 2;
            continue;
        }
        push(&trees[at], whole_level || item, into);
        item &= !ends_item(&trees[at]);
        at += 1;
    }
}

fn ends_item(tree: &TokenTree) -> bool {
    match tree {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        TokenTree::Punct(punct) => punct.as_char() == ';',
        _ => false,
    }
}

fn push(tree: &TokenTree, test: bool, into: &mut Vec<SourceToken>) {
    let line = line_of(tree);
    let kind = match tree {
        TokenTree::Ident(ident) => TokenKind::Ident(ident.to_string()),
        TokenTree::Punct(punct) => TokenKind::Punct(punct.as_char()),
        TokenTree::Literal(literal) => TokenKind::Literal(literal.to_string()),
        TokenTree::Group(group) => {
            let ends = match group.delimiter() {
                Delimiter::Parenthesis => Some(('(', ')')),
                Delimiter::Bracket => Some(('[', ']')),
                Delimiter::Brace => Some(('{', '}')),
                Delimiter::None => None,
            };
            if let Some((open, _)) = ends {
                into.push(SourceToken {
                    kind: TokenKind::Open(open),
                    line,
                    test,
                });
            }
            flatten_level(group.stream(), test, into);
            if let Some((_, close)) = ends {
                into.push(SourceToken {
                    kind: TokenKind::Close(close),
                    line: group.span_close().start().line,
                    test,
                });
            }
            return;
        }
    };
    into.push(SourceToken { kind, line, test });
}

fn line_of(tree: &TokenTree) -> usize {
    match tree {
        TokenTree::Group(group) => group.span_open().start().line,
        other => other.span().start().line,
    }
}

struct Attribute {
    inner: bool,
    length: usize,
    content: Vec<TokenTree>,
}

fn attribute_at(trees: &[TokenTree]) -> Option<Attribute> {
    let punct =
        |at: usize, c: char| matches!(trees.get(at), Some(TokenTree::Punct(p)) if p.as_char() == c);
    if !punct(0, '#') {
        return None;
    }
    let inner = punct(1, '!');
    let at = 1 + usize::from(inner);
    match trees.get(at) {
        Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Bracket => {
            Some(Attribute {
                inner,
                length: at + 1,
                content: group.stream().into_iter().collect(),
            })
        }
        _ => None,
    }
}

/// Whether `attribute`, with its `#`, excludes its item from all builds but tests.
pub fn is_test_attribute(attribute: TokenStream) -> bool {
    let trees: Vec<TokenTree> = attribute.into_iter().collect();
    attribute_at(&trees).is_some_and(|attribute| is_test_only(&attribute.content))
}

/// Whether an attribute excludes its item from all builds but tests: `test`, `tokio::test`,
/// `cfg(test)`, `cfg(all(test, …))`. `cfg(any(test, …))` and `cfg(not(test))` do not.
fn is_test_only(attribute: &[TokenTree]) -> bool {
    let names: Vec<String> = attribute
        .iter()
        .filter_map(|tree| match tree {
            TokenTree::Ident(ident) => Some(ident.to_string()),
            _ => None,
        })
        .collect();
    if names.last().is_some_and(|name| name == "test") && names.len() <= 2 {
        return true;
    }
    let [TokenTree::Ident(name), TokenTree::Group(condition)] = attribute else {
        return false;
    };
    name == "cfg" && demands_test(condition.stream())
}

fn demands_test(condition: TokenStream) -> bool {
    let trees: Vec<TokenTree> = condition.into_iter().collect();
    match trees.as_slice() {
        [TokenTree::Ident(name)] => name == "test",
        [TokenTree::Ident(name), TokenTree::Group(group)] if name == "all" => {
            let parts: Vec<TokenTree> = group.stream().into_iter().collect();
            parts
                .split(|tree| matches!(tree, TokenTree::Punct(p) if p.as_char() == ','))
                .any(|part| demands_test(part.iter().cloned().collect()))
        }
        _ => false,
    }
}

/// A path that code names, `a::b::c`, or that a `use` imports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathUse {
    /// The names of the path; a glob ends in `*`.
    pub segments: Vec<String>,
    /// Whether the path begins with `::`.
    pub absolute: bool,
    /// The name that an import assigns; `None` for other uses.
    pub imported_as: Option<String>,
    /// Whether the import has any form of `pub`.
    pub reexport: bool,
    /// The line of its first name.
    pub line: usize,
    /// Whether the path is in test code.
    pub test: bool,
}

/// Every path of at least two names in `tokens`, and every import.
pub fn paths(tokens: &[SourceToken]) -> Vec<PathUse> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let token = &tokens[at];
        let Some(name) = token.ident() else {
            at += 1;
            continue;
        };
        let before = at.checked_sub(1).map(|before| &tokens[before]);
        if name == "use" && !tokens.get(at + 1).is_some_and(|next| next.is_punct('<')) {
            at = import(tokens, at, &mut found);
            continue;
        }
        if name == "crate" && before.is_some_and(|before| before.ident() == Some("extern")) {
            if let Some(imported) = tokens.get(at + 1).and_then(SourceToken::ident) {
                found.push(PathUse {
                    segments: vec![imported.to_owned()],
                    absolute: true,
                    imported_as: Some(imported.to_owned()),
                    reexport: false,
                    line: token.line,
                    test: token.test,
                });
            }
            at += 2;
            continue;
        }
        let mut end = at + 1;
        let mut segments = vec![name.to_owned()];
        while tokens
            .get(end)
            .is_some_and(|t| t.kind == TokenKind::PathSeparator)
        {
            let Some(next) = tokens.get(end + 1).and_then(SourceToken::ident) else {
                break;
            };
            segments.push(next.to_owned());
            end += 2;
        }
        let goes_on = tokens
            .get(end)
            .is_some_and(|t| t.kind == TokenKind::PathSeparator);
        let absolute = before.is_some_and(|before| before.kind == TokenKind::PathSeparator)
            // Not `<T as Trait>::name`, nor `Vec::<u8>::new`.
            && !(at >= 2 && (tokens[at - 2].is_punct('>') || tokens[at - 2].ident().is_some()));
        let continues =
            before.is_some_and(|before| before.kind == TokenKind::PathSeparator) && !absolute;
        let variable = name != "crate" && before.is_some_and(|before| before.is_punct('$'));
        // `pub(in crate::somewhere)` sets visibility and uses nothing.
        let visibility = at >= 3
            && before.is_some_and(|before| before.ident() == Some("in"))
            && tokens[at - 2].opens('(')
            && tokens[at - 3].ident() == Some("pub");
        if (segments.len() > 1 || goes_on) && !continues && !variable && !visibility {
            found.push(PathUse {
                segments,
                absolute,
                imported_as: None,
                reexport: false,
                line: token.line,
                test: token.test,
            });
        }
        at = end;
    }
    found
}

/// Reads the `use` at `at`; returns the index after it.
fn import(tokens: &[SourceToken], at: usize, found: &mut Vec<PathUse>) -> usize {
    let before = at.checked_sub(1).map(|before| &tokens[before]);
    let reexport = match before {
        Some(before) if before.ident() == Some("pub") => true,
        Some(before) if before.kind == TokenKind::Close(')') => {
            let open = (0..at).rev().find(|i| tokens[*i].opens('('));
            open.and_then(|open| open.checked_sub(1))
                .is_some_and(|i| tokens[i].ident() == Some("pub"))
        }
        _ => false,
    };
    let mut end = at + 1;
    let absolute = tokens
        .get(end)
        .is_some_and(|t| t.kind == TokenKind::PathSeparator);
    end += usize::from(absolute);
    let template = PathUse {
        segments: Vec::new(),
        absolute,
        imported_as: None,
        reexport,
        line: tokens[at].line,
        test: tokens[at].test,
    };
    end = import_tree(tokens, end, &template, found);
    end
}

/// Reads one tree of an import whose path so far is `so_far`; returns the index after it.
fn import_tree(
    tokens: &[SourceToken],
    mut at: usize,
    so_far: &PathUse,
    found: &mut Vec<PathUse>,
) -> usize {
    let mut path = so_far.clone();
    loop {
        let Some(token) = tokens.get(at) else {
            return at;
        };
        match &token.kind {
            TokenKind::Ident(name) => {
                path.line = token.line;
                path.segments.push(name.clone());
                at += 1;
                match tokens.get(at) {
                    Some(next) if next.kind == TokenKind::PathSeparator => at += 1,
                    Some(next) if next.ident() == Some("as") => {
                        let name = tokens.get(at + 1).and_then(SourceToken::ident);
                        path.imported_as = name.map(str::to_owned);
                        found.push(path);
                        return at + 2;
                    }
                    _ => {
                        // `use a::b::{self}` imports `b`.
                        if path.segments.len() > 1
                            && path.segments.last().is_some_and(|s| s == "self")
                        {
                            path.segments.pop();
                        }
                        path.imported_as = path.segments.last().cloned();
                        found.push(path);
                        return at;
                    }
                }
            }
            TokenKind::Punct('*') => {
                path.segments.push("*".to_owned());
                path.imported_as = Some("*".to_owned());
                found.push(path);
                return at + 1;
            }
            TokenKind::Open('{') => {
                at += 1;
                loop {
                    match tokens.get(at).map(|token| &token.kind) {
                        None => return at,
                        Some(TokenKind::Close('}')) => return at + 1,
                        Some(TokenKind::Punct(',')) => at += 1,
                        Some(
                            TokenKind::Ident(_) | TokenKind::Punct('*') | TokenKind::Open('{'),
                        ) => {
                            at = import_tree(tokens, at, &path, found);
                        }
                        // A macro's variable: it cannot be resolved here.
                        Some(_) => at += 1,
                    }
                }
            }
            _ => return at + 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(source: &str) -> Vec<SourceToken> {
        flatten(source.parse().expect("valid tokens"), false)
    }

    fn found(source: &str) -> Vec<(String, bool)> {
        paths(&read(source))
            .into_iter()
            .map(|path| (path.segments.join("::"), path.test))
            .collect()
    }

    #[test]
    fn paths_are_found_in_imports_code_macros_and_attributes() {
        let source = "
            use a::{b, c::{self, d as e}, f::*};
            #[g::h]
            fn x() { let i = i::j::<u8>::k(); l!(m::n, |o| o.p); }
        ";
        let names: Vec<String> = found(source).into_iter().map(|(path, _)| path).collect();
        assert_eq!(
            names,
            ["a::b", "a::c", "a::c::d", "a::f::*", "g::h", "i::j", "m::n"]
        );
    }

    #[test]
    fn an_import_tells_its_new_name_and_whether_it_is_public() {
        let uses = paths(&read("pub(crate) use a::b as c; use d::e; extern crate f;"));
        let told: Vec<_> = uses
            .iter()
            .map(|path| (path.imported_as.as_deref(), path.reexport))
            .collect();
        assert_eq!(
            told,
            [(Some("c"), true), (Some("e"), false), (Some("f"), false)]
        );
    }

    #[test]
    fn code_below_a_test_attribute_is_test_code_and_what_follows_is_not() {
        let source = "
            fn a() { x::a(); }
            #[cfg(test)] use x::{b};
            #[cfg(all(unix, test))] mod t { fn c() { x::c(); } }
            #[tokio::test(flavor = \"current_thread\")] async fn d() { x::d(); }
            #[cfg(not(test))] fn e() { x::e(); }
            #[cfg(any(test, unix))] fn f() { x::f(); }
        ";
        let tests: Vec<bool> = found(source)
            .into_iter()
            .filter(|(path, _)| path.starts_with("x::"))
            .map(|(_, test)| test)
            .collect();
        assert_eq!(tests, [false, true, true, true, false, false]);
    }

    #[test]
    fn an_inner_attribute_makes_the_whole_file_test_code() {
        assert!(
            read("#![cfg(test)] fn a() {} fn b() {}")
                .last()
                .unwrap()
                .test
        );
    }

    #[test]
    fn who_may_see_an_item_is_no_use_of_a_path() {
        assert_eq!(found("pub(in crate::a) fn b() {}"), []);
        assert_eq!(found("fn b() { for x in crate::a::all() {} }").len(), 1);
    }

    #[test]
    fn a_qualified_path_does_not_begin_after_its_type() {
        assert_eq!(found("fn a() { <T as X>::b::c(); }"), []);
        let absolute = &paths(&read("fn a() { (::b::c()); }"))[0];
        assert!(absolute.absolute, "{absolute:?}");
    }
}
