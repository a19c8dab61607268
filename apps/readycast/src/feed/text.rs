//! Titles as plain text, show notes as HTML that can do nothing.

use std::cell::RefCell;
use std::sync::LazyLock;

use ammonia::Builder;
use html5ever::LocalName;
use html5ever::tendril::StrTendril;
use html5ever::tokenizer::states::RawKind;
use html5ever::tokenizer::{
    BufferQueue, Tag, TagKind, Token, TokenSink, TokenSinkResult, Tokenizer, TokenizerOpts,
};

/// The maximum number of elements of show notes that are open at once. HTML opens unclosed ones
/// again in each paragraph, so that the work grows with depth times tags.
const NOTES_DEPTH_MAX: usize = 32; // a guess: pages that were pasted into notes have 20 or so

/// The maximum number of tags of show notes; what has more is shown as plain text.
const NOTES_TAGS_MAX: usize = 5_000; // a guess: an hour of songs with two links each has 1,000

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
        true => MarkupText::read(text, " ").text,
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

/// The text of HTML by its lines, without markup: elements that are not within words end a line.
pub(crate) fn markup_lines(html: &str) -> Vec<String> {
    let text = MarkupText::read(html, "\n").text;
    text.lines().map(str::to_owned).collect()
}

/// Show notes as HTML of [`TAGS`] only, of at most `bytes_max` bytes.
pub(super) fn html_notes(notes: &str, bytes_max: usize) -> String {
    let mut room = bytes_max;
    loop {
        let source = truncated(notes, room);
        let html = if source.contains(['<', '&']) {
            let markup = MarkupText::read(source, "\n");
            match markup.tags {
                0 => paragraphs(&markup.text),
                _ if markup.is_costly() => paragraphs(&markup.text),
                _ => NOTES.clean(source).to_string(),
            }
        } else {
            paragraphs(source)
        };
        // Escapes make the text longer.
        if html.len() <= bytes_max {
            return html;
        }
        room /= 2;
    }
}

/// Plain text with its line breaks, as HTML.
fn paragraphs(text: &str) -> String {
    let lines = text.trim().lines();
    let lines = lines.map(|line| ammonia::clean_text(line.trim_end()));
    // The sanitiser's escapes of blanks are meant for attributes.
    let lines = lines.map(|line| line.replace("&#32;", " "));
    lines.collect::<Vec<_>>().join("<br>")
}

/// The text of HTML, read from tag to tag: no tree is built, so that the work grows with the bytes alone.
#[derive(Debug, Default)]
struct MarkupText {
    text: String,
    tags: usize,
    /// Elements that are open, by name; no more than one beyond the limit.
    open: Vec<LocalName>,
    /// The maximum number of elements that were open at once.
    open_max: usize,
    /// Whether an element was met within which HTML takes end tags for nothing, so that more may be open than it seems.
    has_barrier: bool,
    /// Whether the parser is within a script or style sheet, whose text is not shown.
    is_skipping: bool,
}

impl MarkupText {
    /// `between` is what stands for a tag that separates words.
    fn read(html: &str, between: &'static str) -> MarkupText {
        let sink = MarkupTextSink {
            between,
            read: RefCell::default(),
        };
        let tokenizer = Tokenizer::new(sink, TokenizerOpts::default());
        let input = BufferQueue::default();
        input.push_back(StrTendril::from_slice(html));
        // Nothing asks it to stop for a script.
        let _ = tokenizer.feed(&input);
        tokenizer.end();
        tokenizer.sink.read.into_inner()
    }

    /// Whether building a tree of it could take very long.
    fn is_costly(&self) -> bool {
        self.tags > NOTES_TAGS_MAX || self.open_max > NOTES_DEPTH_MAX
    }

    fn note_tag(&mut self, tag: &Tag, between: &str) {
        self.tags += 1;
        // These are within words.
        if !matches!(
            &*tag.name,
            "a" | "b" | "cite" | "code" | "em" | "font" | "i" | "s" | "span" | "strong" | "u"
        ) && !self.text.ends_with(between)
        {
            self.text.push_str(between);
        }
        // These have no end, or end where the next begins.
        if matches!(
            &*tag.name,
            "br" | "dd" | "dt" | "hr" | "img" | "input" | "li" | "link" | "meta" | "p" | "wbr"
        ) {
            return;
        }
        self.has_barrier |= matches!(
            &*tag.name,
            "applet"
                | "button"
                | "caption"
                | "marquee"
                | "math"
                | "object"
                | "select"
                | "svg"
                | "table"
                | "template"
        );
        if tag.kind == TagKind::StartTag {
            if self.open.len() <= NOTES_DEPTH_MAX {
                self.open.push(tag.name.clone());
            }
        } else if let Some(at) = self.open.iter().rposition(|name| *name == tag.name)
            && !self.has_barrier
        {
            self.open.remove(at);
        }
        self.open_max = self.open_max.max(self.open.len());
    }
}

struct MarkupTextSink {
    between: &'static str,
    read: RefCell<MarkupText>,
}

impl TokenSink for MarkupTextSink {
    type Handle = ();

    fn process_token(&self, token: Token, _line: u64) -> TokenSinkResult<()> {
        let mut read = self.read.borrow_mut();
        match token {
            Token::CharacterTokens(text) if !read.is_skipping => read.text.push_str(&text),
            Token::TagToken(tag) => {
                read.note_tag(&tag, self.between);
                let is_code = matches!(&*tag.name, "script" | "style");
                read.is_skipping = is_code && tag.kind == TagKind::StartTag;
                if read.is_skipping {
                    return TokenSinkResult::RawData(RawKind::Rawtext);
                }
            }
            _ => {}
        }
        TokenSinkResult::Continue
    }
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
