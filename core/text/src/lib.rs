//! Text from other hosts, made safe to display; and times as people write them.
//!
//! A terminal interprets what it is sent: an escape sequence sets colours, the window title or the
//! clipboard, a carriage return overwrites the line, and a bidirectional control makes `exe.mp3`
//! look like `3pm.exe`. Every character that is more than a visible sign is therefore shown as JSON
//! would write it (`\u001b`). The result is also safe inside a JSON string and means the same
//! there.
//!
//! ```text
//! proxy, peer, origin ─ RemoteText::new ─▶ one short line ─┐
//! file names ──────────────────────────────────────────────┼─▶ escape_controls ─▶ terminal, log
//! our own messages, of several lines ──────────────────────┘
//! ```
//!
//! [`escape_controls`] is applied to all output where it leaves the program. [`RemoteText`] is made
//! where another host's text arrives, because only there can its line breaks be told from those of
//! our own messages.

mod time_words;

pub use time_words::{parse_span, parse_time_of_day, parse_weekday};

use std::borrow::Cow;
use std::fmt::{self, Write as _};

/// The most characters of another host's text that are shown.
pub const REMOTE_CHARS_MAX: usize = 200; // a guess: two lines of a terminal

/// Whether a character can change how a terminal shows other text: controls (C0, C1), bidirectional
/// controls (Unicode UAX #9 §2), line and paragraph separators, interlinear annotation, tags, and
/// the byte order mark.
pub fn is_control(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{061c}'
                | '\u{200e}'
                | '\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2066}'..='\u{2069}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e007f}'
        )
}

/// The text with every control except line breaks and tabs written as JSON would write it.
pub fn escape_controls(text: &str) -> Cow<'_, str> {
    let is_kept = |c: char| matches!(c, '\n' | '\t') || !is_control(c);
    if text.chars().all(is_kept) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match is_kept(c) {
            true => escaped.push(c),
            false => push_escaped(&mut escaped, c),
        }
    }
    Cow::Owned(escaped)
}

fn push_escaped(to: &mut String, c: char) {
    for unit in c.encode_utf16(&mut [0; 2]) {
        let _ = write!(to, "\\u{unit:04x}"); // writing to a String cannot fail
    }
}

/// Text of another host, as one short line without control characters.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct RemoteText(String);

impl RemoteText {
    /// Makes the text of another host safe. A web page is reduced to its title, and each run of
    /// white space to one blank.
    pub fn new(text: &str) -> RemoteText {
        let text = page_title(text).unwrap_or(text);
        let mut line = String::new();
        let mut chars = 0;
        'words: for word in text.split_whitespace() {
            if !line.is_empty() {
                line.push(' ');
            }
            for c in word.chars() {
                if chars == REMOTE_CHARS_MAX {
                    line.push('…');
                    break 'words;
                }
                chars += 1;
                match is_control(c) {
                    true => push_escaped(&mut line, c),
                    false => line.push(c),
                }
            }
            chars += 1;
        }
        RemoteText(line)
    }

    /// Makes the bytes of another host safe; invalid UTF-8 becomes U+FFFD.
    pub fn from_bytes(bytes: &[u8]) -> RemoteText {
        RemoteText::new(&String::from_utf8_lossy(bytes))
    }

    /// Whether the text is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The text as a string slice.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RemoteText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<RemoteText> for String {
    fn from(text: RemoteText) -> String {
        text.0
    }
}

/// The title of a web page; `None` if the text is no web page or has no title.
fn page_title(text: &str) -> Option<&str> {
    let text = text.trim_start();
    text.starts_with('<').then_some(())?;
    // ASCII lower case has the same length, so the offsets agree.
    let lower = text.to_ascii_lowercase();
    let open = lower.find("<title")?;
    let from = open + lower[open..].find('>')? + 1;
    let to = from + lower[from..].find("</title")?;
    Some(text[from..to].trim()).filter(|title| !title.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn no_control_of_any_kind_reaches_a_terminal() {
        for c in '\0'..=char::MAX {
            let text = format!("a{c}b");
            let shown = escape_controls(&text);
            let is_clean = |c: char| matches!(c, '\n' | '\t') || !is_control(c);
            assert!(shown.chars().all(is_clean), "{c:?}");
            assert_eq!(shown == text, is_clean(c), "{c:?}");
            let line = RemoteText::new(&text);
            assert!(!line.as_str().contains(is_control), "{c:?}");
        }
    }

    #[test]
    fn what_is_escaped_can_be_read_back() {
        assert_eq!(
            escape_controls("\x1b]0;title\x07"),
            "\\u001b]0;title\\u0007"
        );
        assert_eq!(escape_controls("\u{9b}31m"), "\\u009b31m");
        assert_eq!(escape_controls("\u{202e}3pm.exe"), "\\u202e3pm.exe");
        assert_eq!(escape_controls("\u{e0041}"), "\\udb40\\udc41");
        assert_eq!(
            escape_controls("a\rb\n\tç 日本 👩‍🚀"),
            "a\\u000db\n\tç 日本 👩‍🚀"
        );
    }

    #[test]
    fn a_page_is_its_title_and_lines_are_one_line() {
        let page = "<!DOCTYPE html>\n<html><head>\n<TITLE>502 Bad\nGateway</TITLE></head><body>x";
        assert_eq!(RemoteText::new(page).as_str(), "502 Bad Gateway");
        assert_eq!(RemoteText::new(" one\r\n\n two\n").as_str(), "one two");
        assert_eq!(
            RemoteText::new("<b>no title</b>").as_str(),
            "<b>no title</b>"
        );
        let long = RemoteText::new(&"é".repeat(1000));
        assert_eq!(long.as_str(), "é".repeat(REMOTE_CHARS_MAX) + "…");
    }

    proptest! {
        #[test]
        fn any_text_becomes_one_short_line_without_controls(text in any::<String>()) {
            let line = RemoteText::new(&text);
            prop_assert!(!line.as_str().contains(is_control));
            // An escape is 12 characters at most.
            prop_assert!(line.as_str().chars().count() <= 13 * REMOTE_CHARS_MAX);
            prop_assert_eq!(RemoteText::new(line.as_str()).as_str().contains(is_control), false);
        }

        #[test]
        fn any_bytes_become_one_line(bytes in any::<Vec<u8>>()) {
            prop_assert!(!RemoteText::from_bytes(&bytes).as_str().contains(is_control));
        }
    }
}
