//! The list of a directory, as HTML for people and as JSON for programs that accept it.

use std::time::SystemTime;

use cedos_agent::fetch::report::human_bytes;
use jiff::Timestamp;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::json;

/// The most entries of a list; further ones are left out, and the list says so.
pub(super) const LISTED_MAX: usize = 10_000; // a guess: nobody reads more

/// A file or directory in a list.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ListedEntry {
    pub(super) name: String,
    /// The length of a file; none for a directory.
    pub(super) bytes: Option<u64>,
    pub(super) modified: Option<SystemTime>,
}

/// What a directory contains.
#[derive(Debug)]
pub(super) struct DirectoryList {
    /// The path of the directory, as it was asked for, decoded.
    pub(super) path: String,
    pub(super) entries: Vec<ListedEntry>,
    /// Whether nothing was left out.
    pub(super) is_complete: bool,
}

impl DirectoryList {
    pub(super) fn to_json(&self) -> String {
        let shown = |entry: &ListedEntry| {
            json!({
                "name": entry.name,
                "type": if entry.bytes.is_some() { "file" } else { "directory" },
                "bytes": entry.bytes,
                "modified": entry.timestamp().map(|at| at.to_string()),
            })
        };
        let entries: Vec<_> = self.entries.iter().map(shown).collect();
        json!({"path": self.path, "entries": entries, "complete": self.is_complete}).to_string()
    }

    pub(super) fn to_html(&self) -> String {
        let title = shown_text(&self.path);
        let mut page = format!(
            "<!DOCTYPE html>\n<html><head><meta charset=\"utf-8\"><title>{title}</title></head>\n\
             <body><h1>{title}</h1>\n<table>\n"
        );
        if self.path != "/" {
            page += "<tr><td><a href=\"../\">../</a></td><td></td><td></td></tr>\n";
        }
        for entry in &self.entries {
            let slash = if entry.bytes.is_some() { "" } else { "/" };
            let link = utf8_percent_encode(&entry.name, NON_ALPHANUMERIC);
            let at = entry
                .timestamp()
                .map(|at| at.strftime("%Y-%m-%d %H:%M").to_string());
            page += &format!(
                "<tr><td><a href=\"{link}{slash}\">{}{slash}</a></td><td>{}</td><td>{}</td></tr>\n",
                shown_text(&entry.name),
                entry.bytes.map(human_bytes).unwrap_or_default(),
                at.unwrap_or_default(),
            );
        }
        page += "</table>\n";
        if !self.is_complete {
            page += &format!("<p>The first {LISTED_MAX} entries; there are more.</p>\n");
        }
        page + "</body></html>\n"
    }
}

impl ListedEntry {
    /// When the entry was changed, to the second.
    fn timestamp(&self) -> Option<Timestamp> {
        let at = Timestamp::try_from(self.modified?).ok()?;
        at.round(jiff::Unit::Second).ok()
    }
}

/// Text for HTML: markup is escaped, and characters that control the terminal or the direction of text are
/// replaced.
fn shown_text(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => shown += "&amp;",
            '<' => shown += "&lt;",
            '>' => shown += "&gt;",
            '"' => shown += "&quot;",
            '\'' => shown += "&#39;",
            // The bidirectional controls of Unicode's UAX #9.
            '\u{61c}'
            | '\u{200e}'
            | '\u{200f}'
            | '\u{202a}'..='\u{202e}'
            | '\u{2066}'..='\u{2069}' => shown.push(char::REPLACEMENT_CHARACTER),
            c if c.is_control() => shown.push(char::REPLACEMENT_CHARACTER),
            c => shown.push(c),
        }
    }
    shown
}
