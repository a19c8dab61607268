//! Chapters of episodes whose feed names a file of them (`podcast:chapters`, in JSON): titles, times and links.
//!
//! Pictures of chapters are not fetched: the page shows nothing that is not on this device.

use std::sync::Arc;

use cedos_readycast::Episode;
use cedos_text::escape_controls;
use serde::{Deserialize, Serialize};
use url::Url;

use super::super::state::Agent;
use super::episode_documents::DocumentKind;

/// The maximum number of bytes of a file of chapters.
const CHAPTER_FILE_BYTES_MAX: usize = 1 << 20; // a guess: 200 chapters are 40 kB

/// The maximum number of chapters of an episode.
pub(in super::super) const CHAPTERS_MAX: usize = 200; // a guess

/// The maximum number of bytes of a chapter's title.
const CHAPTER_TITLE_BYTES_MAX: usize = 300; // a guess

/// The latest start of a chapter, in seconds: four days.
const CHAPTER_START_S_MAX: f64 = 4.0 * 24.0 * 3_600.0; // a guess

/// A part of an episode.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(in super::super) struct EpisodeChapter {
    /// The start of the chapter, in seconds.
    pub(in super::super) start_s: f64,
    /// Title, never empty.
    pub(in super::super) title: String,
    /// A page about it.
    pub(in super::super) link: Option<Url>,
}

/// A file of chapters, as the podcast namespace defines it; of what it may hold, what is used here.
#[derive(Deserialize)]
struct ChapterFile {
    chapters: Vec<ListedChapter>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListedChapter {
    start_time: f64,
    #[serde(default)]
    title: String,
    url: Option<String>,
    /// Whether the chapter is in the table of contents; chapters that are not only change the
    /// picture.
    toc: Option<bool>,
}

/// Reads a file of chapters: those that have a title and are in the table of contents, by their start.
fn parse_chapters(bytes: &[u8]) -> Option<Vec<EpisodeChapter>> {
    let file: ChapterFile = serde_json::from_slice(bytes).ok()?;
    let listed = file.chapters.into_iter().filter_map(|chapter| {
        let title = title_of(&chapter.title)?;
        let is_shown = chapter.toc != Some(false);
        let is_time = (0.0..=CHAPTER_START_S_MAX).contains(&chapter.start_time);
        let link = chapter.url.and_then(|text| text.parse().ok());
        (is_shown && is_time).then(|| EpisodeChapter {
            start_s: (chapter.start_time * 1000.0).round() / 1000.0,
            title,
            link: link.filter(|url: &Url| matches!(url.scheme(), "http" | "https")),
        })
    });
    let mut chapters: Vec<EpisodeChapter> = listed.take(CHAPTERS_MAX).collect();
    chapters.sort_by(|one, other| one.start_s.total_cmp(&other.start_s));
    Some(chapters)
}

fn title_of(text: &str) -> Option<String> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let mut title = escape_controls(&words.join(" ")).into_owned();
    let end = title.floor_char_boundary(CHAPTER_TITLE_BYTES_MAX);
    title.truncate(end);
    (!title.is_empty()).then_some(title)
}

/// Files of chapters.
const CHAPTERS: DocumentKind<Vec<EpisodeChapter>> = DocumentKind {
    name: "chapters",
    bytes_max: CHAPTER_FILE_BYTES_MAX,
    parse: parse_chapters,
};

impl Agent {
    /// The chapters that the feed of an episode names. Those that are not on this device are fetched, and are here the
    /// next time.
    pub(in super::super) fn listed_chapters(
        self: &Arc<Agent>,
        episode: &Episode,
    ) -> Vec<EpisodeChapter> {
        let Some(url) = &episode.chapters else {
            return Vec::new();
        };
        CHAPTERS.kept(url).unwrap_or_else(|| {
            self.fetch_document_of(episode, url, &CHAPTERS);
            Vec::new()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn titles(json: &str) -> Option<Vec<(f64, String)>> {
        let chapters = parse_chapters(json.as_bytes())?;
        Some(chapters.into_iter().map(|c| (c.start_s, c.title)).collect())
    }

    #[test]
    fn chapters_are_read_in_their_order_and_only_those_in_the_table_of_contents() {
        let json = r#"{"version": "1.2.0", "chapters": [
            {"startTime": 90.5, "title": " Two\nwords ", "img": "https://a.example/1.png"},
            {"startTime": 0, "title": "Opening"},
            {"startTime": 5, "title": "", "img": "https://a.example/2.png"},
            {"startTime": 7, "title": "Picture", "toc": false},
            {"startTime": -1, "title": "Early"},
            {"startTime": 1e300, "title": "Late"}
        ]}"#;
        let expected = [(0.0, "Opening".to_owned()), (90.5, "Two words".to_owned())];
        assert_eq!(titles(json).expect("chapters"), expected);
        for wrong in ["", "[]", "{}", r#"{"chapters": [{"title": "no time"}]}"#] {
            assert_eq!(titles(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn links_of_chapters_are_pages_of_the_web_and_titles_are_short_and_plain() {
        let long = "ö".repeat(400);
        let json = serde_json::json!({"chapters": [
            {"startTime": 0, "title": "a\u{202e}b", "url": "javascript:alert(1)"},
            {"startTime": 1, "title": long, "url": "https://a.example/"},
        ]});
        let chapters = parse_chapters(json.to_string().as_bytes()).expect("chapters");
        assert_eq!(chapters[0].link, None);
        assert!(!chapters[0].title.contains('\u{202e}'));
        assert_eq!(chapters[1].title.len(), CHAPTER_TITLE_BYTES_MAX);
        assert_eq!(
            chapters[1].link.as_ref().map(Url::as_str),
            Some("https://a.example/")
        );
        let many = (0..2 * CHAPTERS_MAX).map(|n| serde_json::json!({"startTime": n, "title": "x"}));
        let many = serde_json::json!({"chapters": many.collect::<Vec<_>>()}).to_string();
        assert_eq!(
            parse_chapters(many.as_bytes()).expect("chapters").len(),
            CHAPTERS_MAX
        );
    }
}
