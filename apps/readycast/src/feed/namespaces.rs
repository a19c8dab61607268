//! One pass over a feed before feed-rs reads it: what feed-rs leaves out, and what it must not be given.

use cedos_feed::{FeedError, attribute, declares_entities};
use quick_xml::encoding::DecodingReader;
use quick_xml::events::{BytesRef, BytesStart, Event};
use quick_xml::{Reader, Writer};

use crate::enclosure_choice::ALTERNATES_MAX;

/// Deepest nesting of a feed's elements. Categories within categories are read by recursion: a stack has an end.
const FEED_DEPTH_MAX: usize = 256; // a guess: XHTML in an Atom feed is nested by 20 or so

/// Longest length of an episode as text (`1:02:03.5`): feed-rs takes no number beyond 64 bits.
const DURATION_BYTES_MAX: usize = 16;

/// Elements with the name of a person, perhaps beside an address: feed-rs cuts one byte between the two.
const NAMES: [&str; 5] = ["author", "creator", "managingEditor", "webMaster", "name"];

/// What one pass over a feed finds, by local names: prefixes are for each feed to choose.
#[derive(Debug, Default)]
pub(super) struct FeedExtras {
    /// The extras of each item, in the feed's order.
    pub(super) items: Vec<ItemExtras>,
    /// Address in `itunes:new-feed-url` of the channel.
    pub(super) new_url: Option<String>,
    /// Whether feed-rs can read the feed only as [`readable`] leaves it.
    pub(super) is_unreadable: bool,
    /// The depth of the item that is being read.
    item_depth: Option<usize>,
}

/// The elements of an item that feed-rs leaves out: those of iTunes too, where they give neither a title nor a
/// summary.
#[derive(Debug, Default)]
pub(super) struct ItemExtras {
    /// Address in `podcast:chapters`.
    pub(super) chapters: Option<String>,
    /// Transcript in `podcast:transcript`: of several, the one that is easiest to follow.
    pub(super) transcript: Option<ListedTranscript>,
    /// Enclosures in `podcast:alternateEnclosure`.
    pub(super) alternates: Vec<ListedAlternate>,
    /// Length in seconds, of `itunes:duration`.
    pub(super) duration_s: Option<u64>,
    /// Number of the season.
    pub(super) season: Option<u32>,
    /// Number of the episode in its season.
    pub(super) number: Option<u32>,
}

/// A transcript that an item names.
#[derive(Debug)]
pub(super) struct ListedTranscript {
    /// Address as the feed writes it.
    pub(super) address: String,
    /// The place of its form among those that a page can show.
    rank: usize,
}

/// An alternate enclosure of an item, as the feed writes it.
#[derive(Debug, Default)]
pub(super) struct ListedAlternate {
    /// Address in its first `podcast:source` that the web has.
    pub(super) address: Option<String>,
    /// Media type as the feed says it.
    pub(super) media_type: Option<String>,
    /// Length in bytes.
    pub(super) bytes: Option<u64>,
    /// What the feed calls the file.
    pub(super) title: Option<String>,
}

/// Forms of transcripts, the best to show first: those with times.
const TRANSCRIPT_FORMS: [&[&str]; 5] = [
    &["text/vtt"],
    &["application/x-subrip", "application/srt", "text/srt"],
    &["application/json"],
    &["text/html"],
    &["text/plain"],
];

/// The element whose text is being read.
struct OpenElement {
    name: String,
    depth: usize,
    text: String,
}

impl FeedExtras {
    /// Reads what feed-rs will read, by the same reader, and no further: nothing of a feed in JSON.
    ///
    /// # Errors
    /// The feed declares entities of its own, or its elements are nested too deep.
    pub(super) fn read(bytes: &[u8]) -> Result<FeedExtras, FeedError> {
        let mut extras = FeedExtras::default();
        let mut reader = reader(bytes);
        let mut buffer = Vec::new();
        let mut depth = 0;
        let mut open: Option<OpenElement> = None;
        loop {
            buffer.clear();
            let Ok(event) = reader.read_event_into(&mut buffer) else {
                // feed-rs will stop here too, and say why.
                return Ok(extras);
            };
            match &event {
                Event::DocType(text) if declares_entities(text) => {
                    return Err(FeedError::OwnEntities);
                }
                Event::Decl(declaration) => {
                    if let Some(encoding) = declaration.encoder() {
                        reader.get_mut().set_encoding(encoding);
                    }
                }
                Event::Start(tag) => {
                    depth += 1;
                    if depth > FEED_DEPTH_MAX {
                        let reason =
                            format!("its elements are nested more than {FEED_DEPTH_MAX} deep");
                        return Err(FeedError::Malformed(reason));
                    }
                    extras.note_start(tag, depth);
                    open = Some(OpenElement {
                        name: local_name(tag).to_owned(),
                        depth,
                        text: String::new(),
                    });
                }
                Event::End(_) => {
                    if let Some(element) = open.take() {
                        extras.note_text(element);
                    }
                    extras.item_depth = extras.item_depth.filter(|item| *item < depth);
                    depth = depth.saturating_sub(1);
                    if depth == 0 {
                        return Ok(extras);
                    }
                }
                Event::Eof => return Ok(extras),
                event => {
                    if let Some(element) = &mut open
                        && element.is_wanted()
                    {
                        push_text(&mut element.text, event);
                    }
                }
            }
        }
    }

    fn note_start(&mut self, tag: &BytesStart<'_>, depth: usize) {
        self.is_unreadable |= has_unreadable_attribute(tag);
        match local_name(tag) {
            // Of RSS 2 in the channel, of Atom and RSS 1 in the root.
            "item" | "entry" if depth <= 3 => {
                self.item_depth = Some(depth);
                self.items.push(ItemExtras::default());
            }
            "alternateEnclosure" | "source" | "transcript" if self.item_depth.is_some() => {
                if let Some(item) = self.items.last_mut() {
                    item.note(tag);
                }
            }
            "chapters" => {
                let address = attribute(tag, "url");
                if let (Some(item), Some(address)) = (self.items.last_mut(), address) {
                    item.chapters = Some(address);
                }
            }
            _ => {}
        }
    }

    fn note_text(&mut self, element: OpenElement) {
        let text = element.text.trim();
        if let Some(item) = self.items.last_mut() {
            match element.name.as_str() {
                "duration" => item.duration_s = item.duration_s.or(seconds_of(text)),
                "season" => item.season = item.season.or(text.parse().ok()),
                "episode" => item.number = item.number.or(text.parse().ok()),
                _ => {}
            }
        }
        if element.name == "new-feed-url" {
            // That of an item would be no business of the channel's.
            if element.depth <= 3 {
                self.new_url = Some(element.text.trim().to_owned());
            }
        } else {
            self.is_unreadable |= is_unreadable(&element.name, &element.text);
        }
    }
}

impl ItemExtras {
    /// Notes an element of `podcast:` that is about other forms of the episode.
    fn note(&mut self, tag: &BytesStart<'_>) {
        match local_name(tag) {
            "alternateEnclosure" if self.alternates.len() < ALTERNATES_MAX => {
                self.alternates.push(ListedAlternate {
                    address: None,
                    media_type: attribute(tag, "type"),
                    bytes: attribute(tag, "length").and_then(|bytes| bytes.trim().parse().ok()),
                    title: attribute(tag, "title"),
                });
            }
            "source" => {
                let is_web = |uri: &String| uri.starts_with("http:") || uri.starts_with("https:");
                let uri = attribute(tag, "uri").filter(is_web);
                if let Some(alternate) = self.alternates.last_mut() {
                    alternate.address = alternate.address.take().or(uri);
                }
            }
            "transcript" => {
                let form = attribute(tag, "type").unwrap_or_default();
                let form = form.split(';').next().unwrap_or_default().trim();
                let is_it = |forms: &&[&str]| forms.iter().any(|f| f.eq_ignore_ascii_case(form));
                let rank = TRANSCRIPT_FORMS.iter().position(is_it);
                let rank = rank.unwrap_or(TRANSCRIPT_FORMS.len());
                let is_better = self.transcript.as_ref().is_none_or(|t| rank < t.rank);
                if let Some(address) = attribute(tag, "url").filter(|_| is_better) {
                    self.transcript = Some(ListedTranscript { address, rank });
                }
            }
            _ => {}
        }
    }
}

impl OpenElement {
    /// Whether its text is looked at. Show notes are not: they are most of a feed.
    fn is_wanted(&self) -> bool {
        let name = self.name.as_str();
        ["new-feed-url", "duration", "season", "episode"].contains(&name) || NAMES.contains(&name)
    }
}

/// Seconds of a length as feeds write it: `1:02:03`, `62:03`, `3723`.
fn seconds_of(text: &str) -> Option<u64> {
    if text.len() > DURATION_BYTES_MAX {
        return None;
    }
    let whole = text.split('.').next()?;
    let mut parts = 0;
    let seconds = whole.split(':').try_fold(0_u64, |sum, part| {
        parts += 1;
        sum.checked_mul(60)?.checked_add(part.parse().ok()?)
    });
    seconds.filter(|_| parts <= 3)
}

/// The feed as UTF-8, without the elements that feed-rs refuses or stumbles over.
///
/// # Errors
/// The feed is not well-formed.
pub(super) fn readable(bytes: &[u8]) -> Result<Vec<u8>, FeedError> {
    let malformed = |error: &dyn std::fmt::Display| FeedError::Malformed(error.to_string());
    let mut reader = reader(bytes);
    let mut writer = Writer::new(Vec::with_capacity(bytes.len()));
    let mut buffer = Vec::new();
    // An element that perhaps goes: its name, its text, its events, and the depth within it.
    let mut held: Option<(String, String, Vec<Event<'static>>, usize)> = None;
    loop {
        buffer.clear();
        let event = reader.read_event_into(&mut buffer);
        let event = event.map_err(|error| malformed(&error))?;
        match &event {
            Event::Eof => return Ok(writer.into_inner()),
            // What is written is UTF-8, whatever the feed was in.
            Event::Decl(declaration) => {
                if let Some(encoding) = declaration.encoder() {
                    reader.get_mut().set_encoding(encoding);
                }
                continue;
            }
            Event::Start(tag) if held.is_none() => {
                let name = local_name(tag);
                let perhaps_goes = ["person", "duration"].contains(&name) || NAMES.contains(&name);
                if perhaps_goes || has_unreadable_attribute(tag) {
                    let name = match has_unreadable_attribute(tag) {
                        true => "person".to_owned(),
                        false => name.to_owned(),
                    };
                    held = Some((name, String::new(), Vec::new(), 0));
                }
            }
            _ => {}
        }
        let Some((name, text, events, depth)) = &mut held else {
            writer
                .write_event(event)
                .map_err(|error| malformed(&error))?;
            continue;
        };
        match &event {
            Event::Start(_) => *depth += 1,
            Event::End(_) => *depth -= 1,
            event => push_text(text, event),
        }
        let is_whole = *depth == 0;
        events.push(event.into_owned());
        if is_whole {
            if name != "person" && !is_unreadable(name, text) {
                for event in std::mem::take(events) {
                    writer
                        .write_event(event)
                        .map_err(|error| malformed(&error))?;
                }
            }
            held = None;
        }
    }
}

/// A reader that sees what feed-rs's reader sees.
fn reader(bytes: &[u8]) -> Reader<DecodingReader<&[u8]>> {
    let mut reader = Reader::from_reader(DecodingReader::new(bytes));
    let config = reader.config_mut();
    config.expand_empty_elements = true;
    config.trim_markup_names_in_closing_tags = true;
    reader
}

/// Whether feed-rs would panic at this text of an element.
fn is_unreadable(name: &str, text: &str) -> bool {
    match name {
        "duration" => is_unreadable_time(text),
        _ => NAMES.contains(&name) && text.contains('@') && !text.is_ascii(),
    }
}

/// Whether feed-rs would panic at a time in an attribute (`start`, `end`, `time` of Media RSS).
fn has_unreadable_attribute(tag: &BytesStart<'_>) -> bool {
    if !["text", "thumbnail"].contains(&local_name(tag)) {
        return false;
    }
    let times = ["start", "end", "time"];
    let mut times = times.iter().filter_map(|name| attribute(tag, name));
    times.any(|time| is_unreadable_time(&time))
}

fn is_unreadable_time(text: &str) -> bool {
    let text = text.trim();
    text.len() > DURATION_BYTES_MAX || !text.is_ascii()
}

fn local_name<'a>(tag: &'a BytesStart<'_>) -> &'a str {
    let name = tag.name().0;
    name.rsplit_once(':').map_or(name, |(_, local)| local)
}

/// Appends the text of an event; an escape is an event of its own.
fn push_text(text: &mut String, event: &Event<'_>) {
    match event {
        Event::Text(part) => text.push_str(part),
        Event::CData(part) => text.push_str(part),
        Event::GeneralRef(escape) => push_escape(text, escape),
        _ => {}
    }
}

fn push_escape(text: &mut String, escape: &BytesRef<'_>) {
    if let Ok(Some(c)) = escape.resolve_char_ref() {
        text.push(c);
    } else if let Some(known) = quick_xml::escape::resolve_predefined_entity(escape) {
        text.push_str(known);
    }
}
