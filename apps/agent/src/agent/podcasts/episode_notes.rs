//! What a person reads of an episode: its notes as text, and its chapters, of which some are lines of the notes.

use std::sync::Arc;

use cedos_readycast::Episode;

use super::super::state::Agent;
use super::chapter_fetch::{CHAPTERS_MAX, EpisodeChapter};

/// The text of sanitised notes; each link's address follows its words if `with_links`.
fn text_of(notes: &str, with_links: bool) -> String {
    let mut text = String::with_capacity(notes.len());
    // Where the words of a link begin, and its address.
    let mut link: Option<(usize, &str)> = None;
    let mut rest = notes;
    while let Some((before, after)) = rest.split_once('<') {
        text.push_str(before);
        let Some((tag, after)) = after.split_once('>') else {
            rest = "";
            break;
        };
        let name = tag.trim_start_matches('/').split([' ', '/']).next();
        match (name, tag.starts_with('/')) {
            (Some("br" | "p" | "li" | "ul" | "ol" | "dd" | "dt"), _) => text.push('\n'),
            (Some("a"), false) => {
                let address = tag.split_once("href=\"").map(|(_, address)| address);
                let address = address.and_then(|address| address.split('"').next());
                link = address.map(|address| (text.len(), address));
            }
            (Some("a"), true) => {
                if let Some((from, address)) = link.take().filter(|_| with_links)
                    && text[from..].trim() != address
                {
                    text.push_str(&format!(" ({address})"));
                }
            }
            _ => {}
        }
        rest = after;
    }
    text.push_str(rest);
    text.replace("&nbsp;", " ")
        .replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&quot;", "\"")
        .replace("&amp;", "&")
}

/// Sanitised notes as text: a line for each paragraph, with the addresses of links.
pub(super) fn notes_text(notes: &str) -> String {
    let text = text_of(notes, true);
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join("\n")
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
fn chapters_of(notes: &str) -> Vec<EpisodeChapter> {
    let mut chapters: Vec<EpisodeChapter> = Vec::new();
    for line in text_of(notes, false).lines() {
        let line = line.trim().trim_start_matches(['(', '[']);
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
        chapters.push(EpisodeChapter {
            start_s,
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

impl Agent {
    /// The chapters of an episode: those that its feed names, else those that its notes list.
    pub(in super::super) fn chapters(self: &Arc<Agent>, episode: &Episode) -> Vec<EpisodeChapter> {
        let listed = self.listed_chapters(episode);
        match listed.is_empty() {
            true => chapters_of(&episode.notes),
            false => listed,
        }
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

    #[test]
    fn notes_are_lines_of_text_with_the_addresses_of_their_links() {
        let notes = "<p>Three &lt;stories&gt;.</p>\n<ul><li>0:00 Opening</li></ul>\
                     <p>See <a href=\"https://a.example/?x=1&amp;y=2\" rel=\"nofollow\">our page</a> and \
                     <a href=\"https://b.example/\">https://b.example/</a></p>";
        assert_eq!(
            notes_text(notes),
            "Three <stories>.\n0:00 Opening\n\
             See our page (https://a.example/?x=1&y=2) and https://b.example/"
        );
        assert_eq!(notes_text("<p>cut <a href=\"https://a.example/"), "cut");
    }
}
