//! A feed for another app: as it came, but its enclosures are links of the agent.
//!
//! ```text
//!  <enclosure url="https://a.example/1.mp3" …/>  ─▶  <enclosure url="http://127.0.0.1:PORT/TOKEN/episodes/17/1.mp3" …/>
//!  <atom:link rel="self" href="https://a.example/feed"/>  ─▶  <atom:link rel="self" href="…/feeds/3"/>
//!  <itunes:new-feed-url>, rel="hub", rel="next" …         ─▶  left out: they lead past the agent
//! ```
//!
//! Everything else keeps its text. What is written is UTF-8, whatever the feed was in.

use quick_xml::Writer;
use quick_xml::encoding::DecodingReader;
use quick_xml::events::attributes::Attribute;
use quick_xml::events::{BytesDecl, BytesStart, Event};
use serde_json::Value;
use url::Url;

use crate::feed::{attribute, declares_entities};
use crate::parsed_feed::{FEED_BYTES_MAX, FeedError};

/// Links of a feed that would lead an app past the agent: other pages of the feed, and push services.
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
/// It is too large, declares entities of its own, or is not well-formed.
pub fn rewrite_feed(
    body: &[u8],
    feed: &Url,
    own: &Url,
    link: impl Fn(&Url) -> Option<Url>,
) -> Result<Vec<u8>, FeedError> {
    if body.len() > FEED_BYTES_MAX {
        return Err(FeedError::TooLarge);
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
        for item in items.into_iter().flatten() {
            let attachments = item.get_mut("attachments").and_then(Value::as_array_mut);
            for attachment in attachments.into_iter().flatten() {
                let address = attachment.get("url").and_then(Value::as_str);
                if let Some(link) = address.and_then(|address| self.link_of(address)) {
                    attachment["url"] = link.as_str().into();
                }
            }
        }
        serde_json::to_vec(&feed).map_err(|error| malformed(&error))
    }

    fn xml(&self, body: &[u8]) -> Result<Vec<u8>, FeedError> {
        let mut reader = quick_xml::Reader::from_reader(DecodingReader::new(body));
        let config = reader.config_mut();
        config.trim_markup_names_in_closing_tags = true;
        let mut writer = Writer::new(Vec::with_capacity(body.len()));
        let mut write = |event: Event<'_>| {
            let written = writer.write_event(event);
            written.map_err(|error| malformed(&error))
        };
        write(Event::Decl(BytesDecl::new("1.0", Some("UTF-8"), None)))?;
        let mut buffer = Vec::new();
        // The depth within an element that is left out.
        let mut left_out = 0_usize;
        let mut has_root = false;
        loop {
            buffer.clear();
            let event = reader.read_event_into(&mut buffer);
            match event.map_err(|error| malformed(&error))? {
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
                    has_root = true;
                    match self.tag(tag) {
                        Some(tag) => write(Event::Start(tag))?,
                        None => left_out = 1,
                    }
                }
                Event::Empty(tag) => {
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
        let name = tag.name().0;
        let local = name.rsplit_once(':').map_or(name, |(_, local)| local);
        let in_attribute = match local {
            "new-feed-url" => return None,
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
    use crate::feed::parse_feed;

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
        let parsed = parse_feed(text.as_bytes(), &url("http://127.0.0.1:1/")).expect("a feed");
        assert_eq!(parsed.episodes.len(), 2);
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
    fn what_is_no_feed_is_refused() {
        let bomb = "<!DOCTYPE r [<!ENTITY a \"b\">]><rss>&a;</rss>";
        assert_eq!(rewritten(bomb.as_bytes()), Err(FeedError::OwnEntities));
        for wrong in [&b""[..], b"{", b"<rss><channel></rss>", b"   "] {
            assert!(
                matches!(rewritten(wrong), Err(FeedError::Malformed(_))),
                "{wrong:?}"
            );
        }
    }
}
