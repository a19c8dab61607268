//! Parsers of foreign data that could reach more than their bytes.
//!
//! A file that parses what strangers send (heads of requests, feeds, manifests) takes bytes and returns values: it opens
//! no file and no socket, starts nothing, and knows no runtime. All of `core/` is held to that by `core/clippy.toml`; the
//! files here are in crates that do more, so this rule reads them.

use super::sources::{SourceFile, Sources};
use super::tokens::TokenKind;

/// Files that parse foreign data. A name that ends with a slash is a folder.
const PARSERS: [&str; 16] = [
    "apps/readycast/src/feed.rs",
    "apps/readycast/src/feed/",
    "apps/readycast/src/opml.rs",
    "apps/prox/src/feed_links.rs",
    "apps/prox/src/link_request.rs",
    "apps/agent/src/stream/dash.rs",
    "apps/agent/src/stream/playlist.rs",
    "apps/agent/src/fetch/header.rs",
    "apps/agent/src/agent/api.rs",
    "apps/agent/src/mirror/multistatus.rs",
    "apps/agent/src/mirror/remote_tree.rs",
    "apps/agent/src/agent/podcasts/gpodder_messages.rs",
    "apps/agent/src/proxy/http_lengths.rs",
    "apps/prox/src/request.rs",
    "apps/prox/src/range.rs",
    "apps/prox/src/flow_memo.rs",
];

/// Modules of `std` that reach the system.
const STD_MODULES: [&str; 6] = ["fs", "net", "process", "env", "thread", "os"];
/// Parts of these modules that compute only.
const PURE_PARTS: [&str; 6] = [
    "IpAddr",
    "Ipv4Addr",
    "Ipv6Addr",
    "SocketAddr",
    "SocketAddrV4",
    "SocketAddrV6",
];
/// Crates that reach the system.
const CRATES: [&str; 9] = [
    "tokio",
    "nix",
    "libc",
    "rustix",
    "socket2",
    "rusqlite",
    "hyper",
    "hyper_util",
    "tempfile",
];

/// The places in parsers that reach out, sorted. A parser that is not there is one, too: the list must follow it.
pub fn check(sources: &Sources) -> Vec<String> {
    let mut found = Vec::new();
    for parser in PARSERS {
        let is_folder = parser.ends_with('/');
        let files = sources.files.iter().filter(|(name, _)| {
            if is_folder {
                name.starts_with(parser)
            } else {
                *name == parser
            }
        });
        let mut is_there = false;
        for (name, file) in files {
            is_there = true;
            let lines = reaching_lines(file).into_iter();
            found.extend(lines.map(|(line, what)| format!("{name}:{line} {what}")));
        }
        if !is_there {
            found.push(format!("{parser} is not there"));
        }
    }
    found
}

fn reaching_lines(file: &SourceFile) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (at, token) in file.tokens.iter().enumerate() {
        let Some(name) = token.ident().filter(|_| !token.test) else {
            continue;
        };
        let follows = |n: usize| {
            let separator = file.tokens.get(at + 2 * n - 1)?;
            (separator.kind == TokenKind::PathSeparator)
                .then(|| file.tokens.get(at + 2 * n)?.ident())?
        };
        let is_root = at == 0 || file.tokens[at - 1].kind != TokenKind::PathSeparator;
        let (Some(module), true) = (follows(1), is_root) else {
            continue;
        };
        let is_pure = || follows(2).is_some_and(|part| PURE_PARTS.contains(&part));
        if CRATES.contains(&name) || (name == "std" && STD_MODULES.contains(&module) && !is_pure())
        {
            found.push((token.line, format!("{name}::{module}")));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::tokens;
    use super::*;

    fn reaching(text: &str) -> Vec<String> {
        let file = SourceFile {
            tokens: tokens::flatten(text.parse().expect("valid tokens"), false),
            text: text.to_owned(),
        };
        reaching_lines(&file)
            .into_iter()
            .map(|(_, what)| what)
            .collect()
    }

    #[test]
    fn files_sockets_and_runtimes_are_found_and_addresses_are_not() {
        assert_eq!(reaching("fn f() { std::fs::read(\"x\"); }"), ["std::fs"]);
        assert_eq!(reaching("use tokio::net::TcpStream;"), ["tokio::net"]);
        assert_eq!(reaching("use std::net::TcpStream;"), ["std::net"]);
        assert!(reaching("use std::net::IpAddr; use std::collections::BTreeMap;").is_empty());
        assert!(reaching("#[cfg(test)] mod tests { use std::fs; }").is_empty());
        assert!(reaching("use crate::fs::x;").is_empty());
    }
}
