//! What feed-rs does not read: chapters, a feed's new address; and what it stumbles over.

use quick_xml::events::{BytesStart, Event};
use quick_xml::{Reader, Writer};

use crate::parsed_feed::FeedError;

/// Elements of the podcast and iTunes namespaces, by the place of their item in the feed.
#[derive(Debug, Default)]
pub(super) struct FeedExtras {
    /// `podcast:chapters` of each item.
    pub(super) chapters: Vec<Option<String>>,
    /// `itunes:new-feed-url`.
    pub(super) new_url: Option<String>,
}

impl FeedExtras {
    /// Reads what can be read; nothing of a feed in JSON.
    pub(super) fn read(bytes: &[u8]) -> FeedExtras {
        let mut extras = FeedExtras::default();
        let mut reader = Reader::from_reader(bytes);
        let mut buffer = Vec::new();
        let mut is_new_url = false;
        loop {
            match reader.read_event_into(&mut buffer) {
                Ok(Event::Start(tag)) => {
                    is_new_url = tag.name().as_ref() == "itunes:new-feed-url";
                    extras.note(&tag);
                }
                Ok(Event::Empty(tag)) => extras.note(&tag),
                Ok(Event::Text(text)) if is_new_url => {
                    extras.new_url = Some(text.trim().to_owned());
                    is_new_url = false;
                }
                Ok(Event::Eof) | Err(_) => return extras,
                Ok(_) => {}
            }
            buffer.clear();
        }
    }

    fn note(&mut self, tag: &BytesStart<'_>) {
        match tag.name().as_ref() {
            "item" | "entry" => self.chapters.push(None),
            "podcast:chapters" => {
                let address = attribute(tag, "url");
                if let (Some(item), Some(address)) = (self.chapters.last_mut(), address) {
                    *item = Some(address);
                }
            }
            _ => {}
        }
    }
}

/// The value of an attribute, whatever the case of its name.
pub(crate) fn attribute(tag: &BytesStart<'_>, name: &str) -> Option<String> {
    let mut attributes = tag.attributes();
    // A second use of a name, as some exporters write it, is no reason to read nothing.
    attributes.with_checks(false);
    let is_named = |key: &str| key.eq_ignore_ascii_case(name);
    let found = attributes
        .filter_map(Result::ok)
        .find(|attribute| is_named(attribute.key.as_ref()))?;
    let value = quick_xml::escape::unescape(&found.value);
    // What is no escape stays as it is: a bare `&` of an address.
    Some(value.map_or_else(|_| found.value.to_string(), |value| value.into_owned()))
}

/// The feed without its `podcast:person` elements.
pub(super) fn without_people(bytes: &[u8]) -> Result<Vec<u8>, FeedError> {
    let malformed = |error: &dyn std::fmt::Display| FeedError::Malformed(error.to_string());
    let mut reader = Reader::from_reader(bytes);
    let mut writer = Writer::new(Vec::with_capacity(bytes.len()));
    let mut buffer = Vec::new();
    let mut depth = 0_u32;
    loop {
        let event = reader.read_event_into(&mut buffer);
        let event = event.map_err(|error| malformed(&error))?;
        let is_person = |tag: &str| tag == "podcast:person";
        match &event {
            Event::Eof => return Ok(writer.into_inner()),
            Event::Start(tag) if is_person(tag.name().as_ref()) => depth += 1,
            Event::End(tag) if is_person(tag.name().as_ref()) => depth = depth.saturating_sub(1),
            Event::Empty(tag) if is_person(tag.name().as_ref()) => {}
            _ if depth > 0 => {}
            _ => writer
                .write_event(event)
                .map_err(|error| malformed(&error))?,
        }
        buffer.clear();
    }
}
