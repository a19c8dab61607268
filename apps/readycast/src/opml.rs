//! Lists of subscriptions (OPML) in and out, and the feeds that a page links to.

use std::cell::RefCell;
use std::collections::HashSet;

use cedos_feed::{FEED_BYTES_MAX, FeedError, attribute, declares_entities};
use cedos_sandbox::confined;
use html5ever::tendril::StrTendril;
use html5ever::tokenizer::{
    BufferQueue, TagKind, Token, TokenSink, TokenSinkResult, Tokenizer, TokenizerOpts,
};
use quick_xml::Writer;
use quick_xml::events::{BytesDecl, BytesText, Event};
use url::Url;

use crate::channel::ChannelSummary;
use crate::parsed_feed::{OpmlFeed, OpmlImport, TITLE_BYTES_MAX};

/// The maximum number of feeds of a list.
pub const OPML_FEEDS_MAX: usize = 10_000;

/// Media types of feeds, as pages name them.
const FEED_TYPES: [&str; 4] = [
    "application/rss+xml",
    "application/atom+xml",
    "application/feed+json",
    "application/json",
];

/// Reads a list of subscriptions of any program: `xmlUrl` in any case, groups of any depth, entries without a title. It is
/// read on a thread that reaches nothing else.
///
/// # Errors
/// It is too large, declares entities of its own, or is no OPML.
pub fn read_opml(bytes: &[u8]) -> Result<OpmlImport, FeedError> {
    confined(|| parse_opml(bytes))
}

fn parse_opml(bytes: &[u8]) -> Result<OpmlImport, FeedError> {
    if bytes.len() > FEED_BYTES_MAX {
        return Err(FeedError::TooLarge);
    }
    let mut import = OpmlImport::default();
    let mut seen = HashSet::new();
    let mut reader = quick_xml::Reader::from_reader(bytes);
    reader.config_mut().check_end_names = false;
    let mut buffer = Vec::new();
    let mut is_opml = false;
    loop {
        let event = reader
            .read_event_into(&mut buffer)
            .map_err(|error| FeedError::Malformed(error.to_string()))?;
        match event {
            Event::Start(tag) | Event::Empty(tag) => {
                let name = tag.name();
                let name = name.as_ref();
                is_opml |= name.eq_ignore_ascii_case("opml");
                if is_opml && name.eq_ignore_ascii_case("outline") {
                    let title = attribute(&tag, "title").or_else(|| attribute(&tag, "text"));
                    let title =
                        crate::feed::plain_text(&title.unwrap_or_default(), TITLE_BYTES_MAX);
                    if let Some(address) = attribute(&tag, "xmlUrl") {
                        note_feed(&mut import, &mut seen, &address, title);
                    }
                }
            }
            Event::DocType(text) if declares_entities(&text) => return Err(FeedError::OwnEntities),
            Event::Eof if !is_opml => {
                return Err(FeedError::Malformed(
                    "it is no list of subscriptions (OPML)".to_owned(),
                ));
            }
            Event::Eof => return Ok(import),
            _ => {}
        }
        buffer.clear();
    }
}

fn note_feed(import: &mut OpmlImport, seen: &mut HashSet<Url>, address: &str, title: String) {
    // Apple's own schemes name the same address.
    let address = address.trim();
    let address = ["feed://", "itpc://", "pcast://"]
        .iter()
        .find_map(|scheme| address.strip_prefix(scheme))
        .map_or_else(|| address.to_owned(), |rest| format!("http://{rest}"));
    let address = address.strip_prefix("feed:").unwrap_or(&address);
    match Url::parse(address) {
        Ok(url) if !matches!(url.scheme(), "http" | "https") => import
            .skipped
            .push(format!("{url}: only http and https are read")),
        Ok(url) if !seen.insert(url.clone()) => {
            import
                .skipped
                .push(format!("{url}: it is in the list twice"));
        }
        Ok(url) if import.feeds.len() == OPML_FEEDS_MAX => import.skipped.push(format!(
            "{url}: the list has more than {OPML_FEEDS_MAX} feeds"
        )),
        Ok(url) => import.feeds.push(OpmlFeed { url, title }),
        Err(error) => {
            let address = crate::feed::plain_text(address, TITLE_BYTES_MAX);
            import.skipped.push(format!("{address}: {error}"));
        }
    }
}

/// Writes a list of subscriptions; `address` is what other programs are to subscribe to.
pub fn write_opml<'a>(
    channels: impl Iterator<Item = &'a ChannelSummary>,
    address: impl Fn(&ChannelSummary) -> Url,
) -> String {
    write_feed_list(channels.map(|channel| (channel.title.as_str(), address(channel))))
}

/// Writes a list of feeds with their titles.
pub fn write_feed_list<'a>(feeds: impl Iterator<Item = (&'a str, Url)>) -> String {
    document(|writer| {
        let opml = writer
            .create_element("opml")
            .with_attribute(("version", "2.0"));
        opml.write_inner_content(|writer| {
            writer
                .create_element("head")
                .write_inner_content(|writer| {
                    let title = writer.create_element("title");
                    title.write_text_content(BytesText::new("Podcasts"))?;
                    Ok(())
                })?;
            writer
                .create_element("body")
                .write_inner_content(|writer| {
                    for (title, address) in feeds {
                        writer
                            .create_element("outline")
                            .with_attribute(("type", "rss"))
                            .with_attribute(("text", title))
                            .with_attribute(("title", title))
                            .with_attribute(("xmlUrl", address.as_str()))
                            .write_empty()?;
                    }
                    Ok(())
                })?;
            Ok(())
        })?;
        Ok(())
    })
}

fn document(write: impl FnOnce(&mut Writer<Vec<u8>>) -> std::io::Result<()>) -> String {
    let mut writer = Writer::new_with_indent(Vec::new(), b' ', 2);
    let declaration = Event::Decl(BytesDecl::new("1.0", Some("UTF-8"), None));
    let written = writer
        .write_event(declaration)
        .and_then(|()| write(&mut writer));
    written.expect("writing to memory cannot fail");
    String::from_utf8(writer.into_inner()).expect("only text was written")
}

/// The feeds that a web page links to, in its order: `<link rel="alternate" type="application/rss+xml" href=…>`.
/// The page is read on a thread that reaches nothing else.
pub fn feed_links_of_page(html: &[u8], base: &Url) -> Vec<Url> {
    confined(|| links_of_page(html, base))
}

fn links_of_page(html: &[u8], base: &Url) -> Vec<Url> {
    let html = String::from_utf8_lossy(&html[..html.len().min(FEED_BYTES_MAX)]);
    let sink = FeedLinks {
        base,
        found: RefCell::default(),
    };
    let tokenizer = Tokenizer::new(sink, TokenizerOpts::default());
    let input = BufferQueue::default();
    input.push_back(StrTendril::from_slice(&html));
    // No script runs here, so the tokenizer never asks for one.
    let _ = tokenizer.feed(&input);
    tokenizer.end();
    tokenizer.sink.found.into_inner()
}

/// Collects links to feeds from the tags of a page.
struct FeedLinks<'a> {
    base: &'a Url,
    found: RefCell<Vec<Url>>,
}

impl TokenSink for FeedLinks<'_> {
    type Handle = ();

    fn process_token(&self, token: Token, _line: u64) -> TokenSinkResult<()> {
        let Token::TagToken(tag) = token else {
            return TokenSinkResult::Continue;
        };
        if tag.kind != TagKind::StartTag || &*tag.name != "link" {
            return TokenSinkResult::Continue;
        }
        let attribute = |name: &str| {
            let found = tag.attrs.iter().find(|a| &*a.name.local == name);
            found.map(|a| a.value.trim().to_lowercase())
        };
        let is_alternate = attribute("rel")
            .is_some_and(|rel| rel.split_whitespace().any(|word| word == "alternate"));
        let is_feed = attribute("type").is_some_and(|kind| FEED_TYPES.contains(&kind.as_str()));
        let href = tag.attrs.iter().find(|a| &*a.name.local == "href");
        if let (true, true, Some(href)) = (is_alternate, is_feed, href)
            && let Ok(address) = self.base.join(href.value.trim())
            && matches!(address.scheme(), "http" | "https")
            && !self.found.borrow().contains(&address)
        {
            self.found.borrow_mut().push(address);
        }
        TokenSinkResult::Continue
    }
}
