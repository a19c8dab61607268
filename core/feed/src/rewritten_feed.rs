//! A feed for another app: as it came, but its enclosures are links of the agent, or of a proxy.
//!
//! ```text
//!  <enclosure url="https://a.example/1.mp3" …/>  ─▶  <enclosure url="http://127.0.0.1:PORT/TOKEN/episodes/17/1.mp3" …/>
//!  <atom:link rel="self" href="https://a.example/feed"/>  ─▶  <atom:link rel="self" href="…/feeds/3"/>
//!  <itunes:new-feed-url>, rel="hub", rel="next" …         ─▶  left out: they lead past the links
//! ```
//!
//! Everything else keeps its text. What is written is UTF-8, whatever the feed was in.

use quick_xml::Writer;
use quick_xml::encoding::DecodingReader;
use quick_xml::events::attributes::Attribute;
use quick_xml::events::{BytesDecl, BytesStart, Event};
use serde_json::Value;
use url::Url;

use crate::feed_error::{FEED_BYTES_MAX, FeedError};
use crate::feed_xml::{attribute, declares_entities, is_web_page};

/// The maximum number of bytes of a feed that was rewritten. Links are longer than many addresses.
pub const REWRITTEN_BYTES_MAX: usize = 2 * FEED_BYTES_MAX;

/// The outermost elements of feeds, by local name, in lower case: RSS, Atom, RSS 1.0.
const ROOTS: [&str; 3] = ["rss", "feed", "rdf"];

/// Links of a feed that would lead an app past its own links: other pages of the feed, and push services.
const LEFT_OUT_LINKS: [&str; 8] = [
    "hub",
    "next",
    "prev",
    "previous",
    "first",
    "last",
    "current",
    "prev-archive",
];

/// Writes a feed anew. `feed`: its address at the origin; `own`: its address here; `link`: the link for an address of
/// audio or video, none for one that stays.
///
/// # Errors
/// It is too large or becomes so, is a web page or otherwise no feed, declares entities of its own, or is not well-formed.
pub fn rewrite_feed(
    body: &[u8],
    feed: &Url,
    own: &Url,
    link: impl Fn(&Url) -> Option<Url>,
) -> Result<Vec<u8>, FeedError> {
    if body.len() > FEED_BYTES_MAX {
        return Err(FeedError::TooLarge);
    }
    if is_web_page(body) {
        return Err(FeedError::WebPage);
    }
    let rewriting = Rewriting { feed, own, link };
    let text = body.strip_prefix("\u{feff}".as_bytes()).unwrap_or(body);
    match text.trim_ascii_start().first() {
        Some(b'{') => rewriting.json(text),
        _ => rewriting.xml(body),
    }
}

struct Rewriting<'a, L> {
    feed: &'a Url,
    own: &'a Url,
    link: L,
}

fn malformed(error: &dyn std::fmt::Display) -> FeedError {
    FeedError::Malformed(error.to_string())
}

impl<L: Fn(&Url) -> Option<Url>> Rewriting<'_, L> {
    fn link_of(&self, address: &str) -> Option<Url> {
        let address = self.feed.join(address.trim()).ok()?;
        (self.link)(&address)
    }

    fn json(&self, text: &[u8]) -> Result<Vec<u8>, FeedError> {
        let mut feed: Value = serde_json::from_slice(text).map_err(|error| malformed(&error))?;
        if let Some(fields) = feed.as_object_mut() {
            fields.remove("hubs");
            fields.remove("next_url");
            fields.insert("feed_url".to_owned(), self.own.as_str().into());
        }
        let items = feed.get_mut("items").and_then(Value::as_array_mut);
        let items = items.ok_or_else(|| malformed(&"it has no list of items"))?;
        for item in items {
            let attachments = item.get_mut("attachments").and_then(Value::as_array_mut);
            for attachment in attachments.into_iter().flatten() {
                let address = attachment.get("url").and_then(Value::as_str);
                if let Some(link) = address.and_then(|address| self.link_of(address)) {
                    attachment["url"] = link.as_str().into();
                }
            }
        }
        let written = serde_json::to_vec(&feed).map_err(|error| malformed(&error))?;
        match written.len() <= REWRITTEN_BYTES_MAX {
            true => Ok(written),
            false => Err(FeedError::TooLarge),
        }
    }

    fn xml(&self, body: &[u8]) -> Result<Vec<u8>, FeedError> {
        let mut reader = quick_xml::Reader::from_reader(DecodingReader::new(body));
        let config = reader.config_mut();
        config.trim_markup_names_in_closing_tags = true;
        let mut writer = Writer::new(Vec::with_capacity(body.len()));
        let mut write = |event: Event<'_>| {
            let written = writer.write_event(event);
            written.map_err(|error| malformed(&error))?;
            match writer.get_ref().len() <= REWRITTEN_BYTES_MAX {
                true => Ok(()),
                false => Err(FeedError::TooLarge),
            }
        };
        write(Event::Decl(BytesDecl::new("1.0", Some("UTF-8"), None)))?;
        let mut buffer = Vec::new();
        // The depth within an element that is left out.
        let mut left_out = 0_usize;
        let mut has_root = false;
        let mut depth = 0_usize;
        loop {
            buffer.clear();
            let event = reader.read_event_into(&mut buffer);
            let event = event.map_err(|error| malformed(&error))?;
            match &event {
                Event::Start(_) => depth += 1,
                Event::End(_) => depth = depth.saturating_sub(1),
                _ => {}
            }
            match event {
                Event::Eof if depth > 0 => return Err(malformed(&"it ends in the middle")),
                Event::Eof if !has_root => return Err(malformed(&"it is empty")),
                Event::Eof => break,
                Event::Decl(declaration) => {
                    if let Some(encoding) = declaration.encoder() {
                        reader.get_mut().set_encoding(encoding);
                    }
                }
                Event::DocType(text) if declares_entities(&text) => {
                    return Err(FeedError::OwnEntities);
                }
                // A style sheet of the origin's would be looked for here.
                Event::PI(_) => {}
                Event::Start(_) if left_out > 0 => left_out += 1,
                Event::End(_) if left_out > 0 => left_out -= 1,
                _ if left_out > 0 => {}
                Event::Start(tag) => {
                    if !has_root {
                        check_root(&tag)?;
                        has_root = true;
                    }
                    match self.tag(tag) {
                        Some(tag) => write(Event::Start(tag))?,
                        None => left_out = 1,
                    }
                }
                Event::Empty(tag) => {
                    if !has_root {
                        return Err(malformed(&"it is empty"));
                    }
                    if let Some(tag) = self.tag(tag) {
                        write(Event::Empty(tag))?;
                    }
                }
                event => write(event)?,
            }
        }
        Ok(writer.into_inner())
    }

    /// The tag as it is written; none if the element is left out.
    fn tag<'t>(&self, tag: BytesStart<'t>) -> Option<BytesStart<'t>> {
        let in_attribute = match local_name(&tag) {
            "new-feed-url" => return None,
            "content" if is_picture(&tag) => return Some(tag),
            "enclosure" | "content" => "url",
            "source" => "uri",
            "link" => {
                let rel = attribute(&tag, "rel").unwrap_or_default().to_lowercase();
                match rel.as_str() {
                    "self" => return Some(with_attribute(&tag, "href", self.own)),
                    "enclosure" => "href",
                    rel if LEFT_OUT_LINKS.contains(&rel) => return None,
                    _ => return Some(tag),
                }
            }
            _ => return Some(tag),
        };
        let address = attribute(&tag, in_attribute);
        match address.and_then(|address| self.link_of(&address)) {
            Some(link) => Some(with_attribute(&tag, in_attribute, &link)),
            None => Some(tag),
        }
    }
}

/// The name of a tag without its prefix.
fn local_name<'t>(tag: &'t BytesStart<'_>) -> &'t str {
    let name = tag.name().0;
    name.rsplit_once(':').map_or(name, |(_, local)| local)
}

/// Refuses what is no feed by its outermost element.
fn check_root(tag: &BytesStart<'_>) -> Result<(), FeedError> {
    let name = local_name(tag).to_lowercase();
    match name.as_str() {
        "html" => Err(FeedError::WebPage),
        name if ROOTS.contains(&name) => Ok(()),
        _ => Err(malformed(&"its outermost element is not that of a feed")),
    }
}

/// Whether an element of Media RSS is a picture: nothing to download.
fn is_picture(tag: &BytesStart<'_>) -> bool {
    let kind = |name| attribute(tag, name).unwrap_or_default().to_lowercase();
    kind("medium") == "image" || kind("type").starts_with("image/")
}

/// A tag with another value of an attribute.
fn with_attribute(tag: &BytesStart<'_>, name: &str, value: &Url) -> BytesStart<'static> {
    let mut changed = BytesStart::new(tag.name().0.to_owned());
    let mut attributes = tag.attributes();
    attributes.with_checks(false);
    for Attribute { key, value: raw } in attributes.filter_map(Result::ok) {
        match key.0.eq_ignore_ascii_case(name) {
            true => changed.push_attribute((key.0, value.as_str())),
            false => changed.push_attribute(Attribute { key, value: raw }),
        }
    }
    changed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> Url {
        text.parse().expect("an address")
    }

    /// Gives links to all addresses on `a.example`.
    fn rewritten(body: &[u8]) -> Result<String, FeedError> {
        let own = url("http://127.0.0.1:1/token/feeds/3");
        let link = |address: &Url| {
            let is_known = address.host_str() == Some("a.example");
            is_known.then(|| {
                url(&format!(
                    "http://127.0.0.1:1/token/episodes{}?x&y",
                    address.path()
                ))
            })
        };
        let bytes = rewrite_feed(body, &url("https://a.example/feed"), &own, link)?;
        Ok(String::from_utf8(bytes).expect("UTF-8"))
    }

    #[test]
    fn enclosures_lead_here_and_everything_else_stays_as_it_came() {
        let feed = r#"<?xml version="1.0"?><?xml-stylesheet href="/s.xsl"?>
<rss version="2.0" xmlns:atom="http://www.w3.org/2005/Atom" xmlns:itunes="i" xmlns:media="m" xmlns:podcast="p"><channel>
<!-- kept --><title>A &amp; B</title><link>https://a.example/</link>
<atom:link rel="self" href="https://a.example/feed"/><atom:link rel="hub" href="https://hub.example/"/>
<itunes:new-feed-url>https://b.example/<x>y</x></itunes:new-feed-url><unknown:tag kept='"yes"'>&#x41;</unknown:tag>
<item><guid>1</guid><title>One</title><description><![CDATA[<a href="https://a.example/1.mp3">x</a>]]></description>
<enclosure length="5" url="/1.mp3?a=1&amp;b=2" type="audio/mpeg"/>
<media:content url="https://a.example/1.mp3"/><media:thumbnail url="https://a.example/1.png"/>
<podcast:alternateEnclosure type="audio/opus"><podcast:source uri="https://a.example/1.opus"/></podcast:alternateEnclosure></item>
<item><guid>2</guid><title>Two</title><enclosure url="https://other.example/2.mp3" type="audio/mpeg"/></item>
</channel></rss>"#;
        let text = rewritten(feed.as_bytes()).expect("a feed");
        for here in [
            "<enclosure length=\"5\" url=\"http://127.0.0.1:1/token/episodes/1.mp3?x&amp;y\" type=\"audio/mpeg\"/>",
            "<media:content url=\"http://127.0.0.1:1/token/episodes/1.mp3?x&amp;y\"/>",
            "<podcast:source uri=\"http://127.0.0.1:1/token/episodes/1.opus?x&amp;y\"/>",
            "<atom:link rel=\"self\" href=\"http://127.0.0.1:1/token/feeds/3\"/>",
            "<enclosure url=\"https://other.example/2.mp3\" type=\"audio/mpeg\"/>",
            "<media:thumbnail url=\"https://a.example/1.png\"/>",
            "<![CDATA[<a href=\"https://a.example/1.mp3\">x</a>]]>",
            "<unknown:tag kept='\"yes\"'>&#x41;</unknown:tag>",
            "<!-- kept --><title>A &amp; B</title>",
        ] {
            assert!(text.contains(here), "{here} is not in {text}");
        }
        for past in ["new-feed-url", "b.example", "hub", "stylesheet"] {
            assert!(!text.contains(past), "{past} is in {text}");
        }
        assert_eq!(text.matches("<item>").count(), 2);
    }

    #[test]
    fn feeds_of_other_kinds_and_encodings_are_rewritten_too() {
        let atom = "<?xml version=\"1.0\" encoding=\"ISO-8859-1\"?><feed xmlns=\"http://www.w3.org/2005/Atom\">\
            <title>caf\u{e9}</title><link rel=\"next\" href=\"?page=2\"/>\
            <entry><id>1</id><link rel=\"enclosure\" href=\"1.mp3\"/></entry></feed>";
        let latin: Vec<u8> = atom.chars().map(|c| c as u8).collect();
        let text = rewritten(&latin).expect("a feed");
        assert!(
            text.contains("caf\u{e9}") && text.contains("encoding=\"UTF-8\""),
            "{text}"
        );
        assert!(text.contains("/token/episodes/1.mp3?x&amp;y"), "{text}");
        assert!(!text.contains("page=2"), "{text}");
        let json = r#"{"version": "https://jsonfeed.org/version/1.1", "title": "J", "next_url": "/2", "hubs": [],
            "items": [{"id": "1", "attachments": [{"url": "https://a.example/1.mp3", "mime_type": "audio/mpeg"}]}]}"#;
        let text = rewritten(json.as_bytes()).expect("a feed");
        assert!(text.contains("/token/episodes/1.mp3?x&y"), "{text}");
        assert!(
            text.contains("/token/feeds/3") && !text.contains("next_url"),
            "{text}"
        );
    }

    #[test]
    fn pictures_stay_where_they_are() {
        let feed = r#"<rss><channel><item><media:content medium="image" url="https://a.example/1.png"/>
<media:content type="image/png" url="https://a.example/2"/><media:content url="https://a.example/3"/></item></channel></rss>"#;
        let text = rewritten(feed.as_bytes()).expect("a feed");
        assert!(text.contains("\"https://a.example/1.png\""), "{text}");
        assert!(text.contains("\"https://a.example/2\""), "{text}");
        assert!(!text.contains("\"https://a.example/3\""), "{text}");
    }

    #[test]
    fn a_feed_that_grows_beyond_measure_is_refused() {
        let enclosure = "<enclosure url=\"/\"/>";
        let long = format!("http://127.0.0.1:1/{}", "x".repeat(4_000));
        let long = url(&long);
        let count = REWRITTEN_BYTES_MAX / 4_000 + 1;
        let feed = format!("<rss><channel>{}</channel></rss>", enclosure.repeat(count));
        let own = url("http://127.0.0.1:1/token/feeds/3");
        let rewritten = rewrite_feed(feed.as_bytes(), &url("https://a.example/"), &own, |_| {
            Some(long.clone())
        });
        assert_eq!(rewritten, Err(FeedError::TooLarge));
    }

    #[test]
    fn what_is_no_feed_is_refused() {
        let bomb = "<!DOCTYPE r [<!ENTITY a \"b\">]><rss>&a;</rss>";
        assert_eq!(rewritten(bomb.as_bytes()), Err(FeedError::OwnEntities));
        for page in [
            "<!DOCTYPE html><title>Log in</title><p>Accept</p>",
            "<?xml version=\"1.0\"?><x:html xmlns:x=\"h\"><x:body/></x:html>",
        ] {
            assert_eq!(rewritten(page.as_bytes()), Err(FeedError::WebPage));
        }
        for wrong in [
            &b""[..],
            b"{",
            b"{\"a\": 1}",
            b"<rss><channel></rss>",
            b"<rss><channel><item>",
            b"<svg><rss></rss></svg>",
            b"<rss/>",
            b"text",
            b"   ",
        ] {
            assert!(
                matches!(rewritten(wrong), Err(FeedError::Malformed(_))),
                "{wrong:?}"
            );
        }
    }
}
