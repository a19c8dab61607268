//! Chapters of an episode: those that its feed names, else lines of its notes that begin with a time.

use url::Url;

use super::super::super::podcasts::chapter_fetch::{CHAPTERS_MAX, EpisodeChapter};
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

/// The lines of sanitised notes, as text.
fn lines(notes: &str) -> Vec<String> {
    let mut text = String::with_capacity(notes.len());
    let mut rest = notes;
    while let Some((before, after)) = rest.split_once('<') {
        text.push_str(before);
        let Some((tag, after)) = after.split_once('>') else {
            break;
        };
        let name = tag.trim_start_matches('/').split([' ', '/']).next();
        if matches!(name, Some("br" | "p" | "li" | "ul" | "ol" | "dd" | "dt")) {
            text.push('\n');
        }
        rest = after;
    }
    text.push_str(rest);
    let text = text
        .replace("&nbsp;", " ")
        .replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&quot;", "\"")
        .replace("&amp;", "&");
    text.lines().map(|line| line.trim().to_owned()).collect()
}

/// Seconds of `1:02:03` or `2:03`.
fn seconds(clock: &str) -> Option<u32> {
    let parts: Vec<&str> = clock.split(':').collect();
    if !(2..=3).contains(&parts.len()) {
        return None;
    }
    parts.iter().enumerate().try_fold(0_u32, |sum, (at, part)| {
        let digits = part.bytes().all(|byte| byte.is_ascii_digit());
        let number: u32 = part.parse().ok().filter(|_| digits && part.len() <= 2)?;
        (at == 0 || number < 60).then_some(sum * 60 + number)
    })
}

/// The chapters that sanitised notes list; none if there are fewer than two, or if their times do not rise.
pub(super) fn chapters_of(notes: &str) -> Vec<ChapterRow> {
    let mut chapters: Vec<ChapterRow> = Vec::new();
    for line in lines(notes) {
        let line = line.trim_start_matches(['(', '[']);
        let end = line.find(|c: char| !c.is_ascii_digit() && c != ':');
        let (time, title) = line.split_at(end.unwrap_or(line.len()));
        let Some(start_s) = seconds(time).map(f64::from) else {
            continue;
        };
        let title = title.trim_start_matches([')', ']', ' ', '-', '–', '—', ':', '|']);
        if title.is_empty() {
            continue;
        }
        if chapters.last().is_some_and(|last| last.start_s >= start_s) {
            return Vec::new();
        }
        chapters.push(ChapterRow {
            start_s,
            clock: time.to_owned(),
            title: title.to_owned(),
            link: None,
        });
        if chapters.len() == CHAPTERS_MAX {
            break;
        }
    }
    match chapters.len() {
        0 | 1 => Vec::new(),
        _ => chapters,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_begin_with_rising_times_are_chapters() {
        let notes = "<p>Today:</p><ul><li>0:00 Opening</li><li>(12:34) – Guests &amp; friends</li></ul>\
                     <p>1:02:03 <b>End</b><br>no chapter at 12:00</p>";
        let found = chapters_of(notes);
        let found: Vec<_> = found
            .iter()
            .map(|chapter| (chapter.start_s, &*chapter.title))
            .collect();
        assert_eq!(
            found,
            [
                (0.0, "Opening"),
                (754.0, "Guests & friends"),
                (3723.0, "End")
            ]
        );
    }

    #[test]
    fn what_only_looks_like_chapters_is_none() {
        for notes in [
            "",
            "12:00 only one",
            "10:00 later<br>5:00 earlier",
            "99:99:99 a<br>1:2:3:4 b",
            "0:00<br>1:00",
            "<p 0:00 a",
        ] {
            assert_eq!(chapters_of(notes), [], "{notes}");
        }
    }
}
