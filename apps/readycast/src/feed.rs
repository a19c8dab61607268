//! Reading feeds: RSS of all versions, Atom and JSON Feed, with the podcast and iTunes namespaces.
//!
//! ```text
//!  bytes ─┬─ refused: too large, a web page, entities of its own
//!         ├─ namespaces ──────────▶ chapters, new address ─────┐
//!         └─ feed-rs ─────────────▶ titles, notes, enclosures ─┴─▶ ParsedFeed
//! ```
//!
//! A feed is written by a stranger: titles become plain text, show notes are sanitised, everything has a limit.

mod namespaces;
mod text;

use std::collections::HashSet;
use std::panic::catch_unwind;

use cedos_feed::{FEED_BYTES_MAX, FeedError, is_web_page};
use cedos_sandbox::confined;
use feed_rs::model::{Entry, Feed, Link, MediaContent};
use feed_rs::parser::Builder;
use jiff::Timestamp;
use url::Url;

use self::namespaces::{FeedExtras, ItemExtras, ListedAlternate, readable};
use self::text::{find, html_notes};
pub(crate) use self::text::{markup_lines, plain_text};
use crate::enclosure_choice::EpisodeEnclosure;
use crate::parsed_feed::{
    FEED_EPISODES_MAX, NOTES_BYTES_MAX, ParsedEpisode, ParsedFeed, SkippedItems, TITLE_BYTES_MAX,
};

/// Reads a feed that was fetched from `url`, on a thread that reaches nothing else.
///
/// # Errors
/// It is too large, a web page, declares entities of its own, or cannot be parsed.
pub fn parse_feed(bytes: &[u8], url: &Url) -> Result<ParsedFeed, FeedError> {
    confined(|| parse(bytes, url))
}

fn parse(bytes: &[u8], url: &Url) -> Result<ParsedFeed, FeedError> {
    if bytes.len() > FEED_BYTES_MAX {
        return Err(FeedError::TooLarge);
    }
    if is_web_page(bytes) {
        return Err(FeedError::WebPage);
    }
    let extras = FeedExtras::read(bytes)?;
    let feed = match extras.is_unreadable {
        true => read_with_feed_rs(&readable(bytes)?, url)?,
        false => match read_with_feed_rs(bytes, url) {
            // One person with a role that feed-rs does not know makes it refuse the whole feed.
            Err(_) if find(bytes, b"person").is_some() => {
                read_with_feed_rs(&readable(bytes)?, url)?
            }
            read => read?,
        },
    };
    let title = feed.title.map(|t| plain_text(&t.content, TITLE_BYTES_MAX));
    let first_author = feed.authors.iter().find_map(|a| a.name.as_deref());
    let description = feed.description.map(|t| t.content).unwrap_or_default();
    let site = feed
        .links
        .iter()
        .find(|l| l.rel.as_deref().is_none_or(|rel| rel == "alternate"))
        .and_then(|l| web_address(&l.href, url));
    let image = feed.logo.or(feed.icon);
    let mut parsed = ParsedFeed {
        title: title
            .filter(|t| !t.is_empty())
            .unwrap_or_else(|| url.to_string()),
        author: plain_text(first_author.unwrap_or_default(), TITLE_BYTES_MAX),
        description: plain_text(&description, NOTES_BYTES_MAX),
        site,
        image: image.and_then(|image| web_address(&image.uri, url)),
        new_url: extras.new_url.and_then(|new| new.parse().ok()),
        ttl_minutes: feed.ttl,
        episodes: Vec::new(),
        skipped: SkippedItems::default(),
    };
    // What feed-rs leaves out belongs to the item at the same place in the feed.
    let mut extras_of_items = extras.items;
    if extras_of_items.len() != feed.entries.len() {
        extras_of_items.clear();
    }
    extras_of_items.resize_with(feed.entries.len(), ItemExtras::default);
    let mut episodes = Vec::new();
    for (entry, extras) in feed.entries.into_iter().zip(extras_of_items) {
        match episode(entry, &extras, url) {
            Some(episode) => episodes.push(episode),
            None => parsed.skipped.without_enclosure += 1,
        }
    }
    // Stable: where dates are missing or equal, the feed's own order stays.
    episodes.sort_by_key(|episode| {
        std::cmp::Reverse(episode.episode.published.unwrap_or(Timestamp::MAX))
    });
    let mut guids = HashSet::new();
    for unread in episodes {
        if !guids.insert(unread.episode.guid.clone()) {
            parsed.skipped.duplicates += 1;
        } else if parsed.episodes.len() == FEED_EPISODES_MAX {
            parsed.skipped.beyond_limit += 1;
        } else {
            parsed.episodes.push(unread.with_notes());
        }
    }
    Ok(parsed)
}

/// Reads a feed with feed-rs, whose panics on texts that nobody foresaw are the feed's fault and not ours.
fn read_with_feed_rs(bytes: &[u8], url: &Url) -> Result<Feed, FeedError> {
    let read = catch_unwind(|| {
        Builder::new()
            .base_uri(Some(url.as_str()))
            // Show notes are sanitised below, titles are made plain.
            .sanitize_content(false)
            // Two items without an identifier may share link and title; their enclosures tell them apart.
            .id_generator(|_, _, _| String::new())
            .build()
            .parse(bytes)
    });
    match read {
        Ok(Ok(feed)) => Ok(feed),
        Ok(Err(error)) => Err(FeedError::Malformed(plain_text(&error.to_string(), 200))),
        Err(_) => Err(FeedError::Malformed(
            "a text in it has a form that no feed should have".to_owned(),
        )),
    }
}

/// An episode whose notes are not sanitised yet: that takes longest, and is done for those that are kept.
struct UnreadEpisode {
    episode: ParsedEpisode,
    notes: String,
}

impl UnreadEpisode {
    fn with_notes(self) -> ParsedEpisode {
        ParsedEpisode {
            notes: html_notes(&self.notes, NOTES_BYTES_MAX),
            ..self.episode
        }
    }
}

/// The episode of an item; none if it has nothing to hear or see.
fn episode(entry: Entry, extras: &ItemExtras, base: &Url) -> Option<UnreadEpisode> {
    let Enclosure {
        address: enclosure,
        media_type,
        bytes,
        seconds: length,
    } = enclosure(&entry, base)?;
    let media = entry.media.into_iter();
    let (mut duration_s, mut season, mut number, mut transcript) = (length, None, None, None);
    let mut described = None;
    for object in media {
        duration_s = duration_s.or(object.duration.map(|d| d.as_secs()));
        season = season.or(object.season.map(|s| s.number));
        number = number.or(object.episode.map(|e| e.number));
        let first = object.transcripts.into_iter().next();
        transcript = transcript.or(first.map(|t| t.url));
        described = described.or(object.description.map(|t| t.content));
    }
    let guid = Some(plain_text(&entry.id, TITLE_BYTES_MAX)).filter(|guid| !guid.is_empty());
    let title = entry.title.map(|t| plain_text(&t.content, TITLE_BYTES_MAX));
    let title = title.filter(|t| !t.is_empty()).unwrap_or_else(|| {
        let name = enclosure.path_segments().and_then(|mut s| s.next_back());
        plain_text(name.unwrap_or("untitled"), TITLE_BYTES_MAX)
    });
    let is_media = |link: &Link| {
        let media_type = link.media_type.as_deref().unwrap_or_default();
        media_type.starts_with("audio/") || media_type.starts_with("video/")
    };
    let is_page = |rel: Option<&str>| rel.is_none_or(|rel| rel == "alternate");
    let pages = entry.links.iter().filter(|link| !is_media(link));
    let link = pages.into_iter().find(|l| is_page(l.rel.as_deref()));
    let link = link.and_then(|l| web_address(&l.href, base));
    let notes = entry
        .content
        .and_then(|c| c.body)
        .or(entry.summary.map(|s| s.content))
        .or(described)
        .unwrap_or_default();
    let published = entry.published.or(entry.updated);
    Some(UnreadEpisode {
        episode: ParsedEpisode {
            guid: guid.unwrap_or_else(|| enclosure.to_string()),
            title,
            notes: String::new(),
            published: published.and_then(|at| Timestamp::from_second(at.timestamp()).ok()),
            enclosure,
            media_type,
            bytes,
            duration_s: duration_s
                .or(extras.duration_s)
                .and_then(|s| u32::try_from(s).ok()),
            link,
            chapters: extras
                .chapters
                .as_ref()
                .and_then(|text| web_address(text, base)),
            transcript: extras
                .transcript
                .as_ref()
                .and_then(|listed| web_address(&listed.address, base))
                .or(transcript.filter(is_web)),
            alternates: extras.alternates.iter().filter_map(alternate).collect(),
            season: season.or(extras.season),
            number: number
                .filter(|n| n.fract() == 0.0 && (0.0..1e6).contains(n))
                .map(|n| n as u32)
                .or(extras.number),
        },
        notes,
    })
}

/// An alternate enclosure; none if the feed names no address of the web for it.
fn alternate(listed: &ListedAlternate) -> Option<EpisodeEnclosure> {
    let text = |text: &Option<String>| text.as_ref().map(|t| plain_text(t, TITLE_BYTES_MAX));
    let url: Url = listed.address.as_ref()?.trim().parse().ok()?;
    Some(EpisodeEnclosure {
        url: Some(url).filter(is_web)?,
        media_type: text(&listed.media_type),
        bytes: listed.bytes,
        title: text(&listed.title).unwrap_or_default(),
    })
}

/// What an item is about, as the feed describes it.
struct Enclosure {
    address: Url,
    media_type: Option<String>,
    bytes: Option<u64>,
    seconds: Option<u64>,
}

/// What an item is about: its first audio, else its first video.
fn enclosure(entry: &Entry, base: &Url) -> Option<Enclosure> {
    let contents = || entry.media.iter().flat_map(|object| &object.content);
    let of_kind = |kinds: &[&str]| {
        let found = contents().find(|content| {
            let kind = media_kind(content);
            content.url.is_some() && kinds.contains(&kind.as_str())
        })?;
        let media_type = found.content_type.as_ref().map(ToString::to_string);
        let seconds = found.duration.map(|d| d.as_secs());
        Some(Enclosure {
            address: found.url.clone()?,
            media_type,
            bytes: found.size,
            seconds,
        })
    };
    let linked = |kind: &str| {
        let link = entry.links.iter().find(|link| {
            match (link.rel.as_deref(), link.media_type.as_deref()) {
                (Some("enclosure"), media_type) => media_type.unwrap_or(kind).starts_with(kind),
                // An attachment of a JSON feed.
                (None, Some(media_type)) => media_type.starts_with(kind),
                _ => false,
            }
        })?;
        let address = base.join(&link.href).ok()?;
        Some(Enclosure {
            address,
            media_type: link.media_type.clone(),
            bytes: link.length,
            seconds: None,
        })
    };
    of_kind(&["audio"])
        .or_else(|| linked("audio"))
        .or_else(|| of_kind(&["video"]))
        .or_else(|| linked("video"))
        // Feeds often say `application/octet-stream`, or nothing.
        .or_else(|| of_kind(&["application", ""]))
}

/// The first part of a media type; empty if there is none.
fn media_kind(content: &MediaContent) -> String {
    let media_type = content.content_type.as_ref();
    media_type.map_or(String::new(), |t| t.ty().to_string().to_lowercase())
}

fn is_web(address: &Url) -> bool {
    matches!(address.scheme(), "http" | "https")
}

fn web_address(text: &str, base: &Url) -> Option<Url> {
    base.join(text.trim()).ok().filter(is_web)
}
