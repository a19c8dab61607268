//! Titles as plain text, show notes as HTML that can do nothing.

use std::sync::LazyLock;

use ammonia::Builder;

/// Elements that show notes may have: text, lists, links. No pictures, which would tell their host who reads.
const TAGS: [&str; 20] = [
    "a",
    "b",
    "blockquote",
    "br",
    "cite",
    "code",
    "dd",
    "dl",
    "dt",
    "em",
    "hr",
    "i",
    "li",
    "ol",
    "p",
    "pre",
    "s",
    "strong",
    "u",
    "ul",
];

static NOTES: LazyLock<Builder<'static>> = LazyLock::new(|| {
    let mut builder = Builder::default();
    builder
        .tags(TAGS.into())
        .url_schemes(["http", "https", "mailto"].into())
        .url_relative(ammonia::UrlRelative::Deny)
        .link_rel(Some("noopener noreferrer nofollow"));
    builder
});

static PLAIN: LazyLock<Builder<'static>> = LazyLock::new(Builder::empty);

/// Where `part` first is in `bytes`.
pub(super) fn find(bytes: &[u8], part: &[u8]) -> Option<usize> {
    let (first, rest) = part.split_first()?;
    let mut from = 0;
    while let Some(at) = bytes[from..].iter().position(|byte| byte == first) {
        let at = from + at;
        if bytes[at + 1..].starts_with(rest) {
            return Some(at);
        }
        from = at + 1;
    }
    None
}

/// The text of something that may be HTML, as one line without controls, of at most `bytes_max` bytes.
pub(crate) fn plain_text(text: &str, bytes_max: usize) -> String {
    // Markup is longer than the text in it; a limit beforehand bounds the work.
    let text = truncated(text, bytes_max.saturating_mul(4));
    let cleaned = match text.contains(['<', '&']) {
        // A blank keeps the words of two paragraphs apart.
        true => decoded(&PLAIN.clean(&text.replace('<', " <")).to_string()),
        false => text.to_owned(),
    };
    let mut line = String::with_capacity(cleaned.len());
    let is_blank = |c: char| c.is_whitespace() || cedos_text::is_control(c);
    for word in cleaned.split(is_blank).filter(|word| !word.is_empty()) {
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    truncated(&line, bytes_max).to_owned()
}

/// Show notes as HTML of [`TAGS`] only, of at most `bytes_max` bytes.
pub(super) fn html_notes(notes: &str, bytes_max: usize) -> String {
    let mut room = bytes_max;
    loop {
        let source = truncated(notes, room);
        let html = match source.contains('<') {
            true => NOTES.clean(source).to_string(),
            false => paragraphs(source),
        };
        // Escapes make the text longer.
        if html.len() <= bytes_max {
            return html;
        }
        room /= 2;
    }
}

/// Plain text with its line breaks.
fn paragraphs(text: &str) -> String {
    let lines = text.trim().lines();
    let lines = lines.map(|line| ammonia::clean_text(&decoded(line.trim_end())));
    // The sanitiser's escapes of blanks are meant for attributes.
    let lines = lines.map(|line| line.replace("&#32;", " "));
    lines.collect::<Vec<_>>().join("<br>")
}

/// The text whose five escapes of XML, and that of a blank, are undone.
fn decoded(text: &str) -> String {
    let escapes = [
        ("&lt;", "<"),
        ("&gt;", ">"),
        ("&quot;", "\""),
        ("&#39;", "'"),
        ("&nbsp;", " "),
        // The last, so that nothing is undone twice.
        ("&amp;", "&"),
    ];
    let mut text = text.to_owned();
    for (escape, c) in escapes {
        if text.contains(escape) {
            text = text.replace(escape, c);
        }
    }
    text
}

/// The text up to `bytes_max` bytes, whole characters only.
pub(super) fn truncated(text: &str, bytes_max: usize) -> &str {
    &text[..text.floor_char_boundary(bytes_max)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn titles_are_plain_text() {
        let plain = |text| plain_text(text, 100);
        assert_eq!(plain("  A\n B\u{202e} C "), "A B C");
        assert_eq!(plain("AT&amp;T &lt;3"), "AT&T <3");
        assert_eq!(plain("<p>one</p><p>two</p>"), "one two");
        assert_eq!(plain("<script>alert(1)</script>x"), "x");
        assert_eq!(plain("a &amp;lt; b"), "a &lt; b");
        assert_eq!(plain_text("ééé", 3), "é");
    }

    #[test]
    fn show_notes_can_do_nothing() {
        let notes = |text| html_notes(text, 10_000);
        let cleaned = notes(
            "<p onclick=x>a<script>b</script><img src=http://t/><iframe src=x></iframe>\
             <a href='javascript:x'>c</a><a href='http://d/' target=_blank>d</a><style>e</style></p>",
        );
        assert_eq!(
            cleaned,
            "<p>a<a rel=\"noopener noreferrer nofollow\">c</a>\
             <a href=\"http://d/\" rel=\"noopener noreferrer nofollow\">d</a></p>"
        );
        assert_eq!(notes("one\ntwo & three"), "one<br>two &amp; three");
        assert_eq!(notes("5 > 3 \"x\""), "5 &gt; 3 &quot;x&quot;");
    }

    #[test]
    fn notes_have_a_limit_after_escaping_too() {
        let long = "&".repeat(1000);
        assert!(html_notes(&long, 1000).len() <= 1000);
        let long = "<b>&".repeat(1000);
        assert!(html_notes(&long, 1000).len() <= 1000);
    }
}
