//! Chapters of an episode, as its notes list them: lines that begin with a time.

/// Chapters that are shown of one episode.
const CHAPTERS_MAX: usize = 200; // a guess

/// A part of an episode.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct EpisodeChapter {
    pub(super) start_s: u32,
    /// The start as the notes write it.
    pub(super) clock: String,
    pub(super) title: String,
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
pub(super) fn chapters_of(notes: &str) -> Vec<EpisodeChapter> {
    let mut chapters: Vec<EpisodeChapter> = Vec::new();
    for line in lines(notes) {
        let line = line.trim_start_matches(['(', '[']);
        let end = line.find(|c: char| !c.is_ascii_digit() && c != ':');
        let (clock, title) = line.split_at(end.unwrap_or(line.len()));
        let Some(start_s) = seconds(clock) else {
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
            clock: clock.to_owned(),
            title: title.to_owned(),
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
            [(0, "Opening"), (754, "Guests & friends"), (3723, "End")]
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
