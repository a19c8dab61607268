//! Chapters of an episode on its page.

use url::Url;

use super::super::super::podcasts::chapter_fetch::EpisodeChapter;
use super::episode_row::clock;

/// A chapter, ready to be shown.
#[derive(Debug, PartialEq)]
pub(super) struct ChapterRow {
    pub(super) start_s: f64,
    /// The start as players show it.
    pub(super) clock: String,
    pub(super) title: String,
    /// A page about it.
    pub(super) link: Option<Url>,
}

impl ChapterRow {
    /// The row of a chapter.
    pub(super) fn of(chapter: EpisodeChapter) -> ChapterRow {
        ChapterRow {
            start_s: chapter.start_s,
            clock: clock(chapter.start_s as u64),
            title: chapter.title,
            link: chapter.link,
        }
    }
}
