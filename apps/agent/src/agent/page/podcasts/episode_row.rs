//! An episode in a list.

use cedos_readycast::{EpisodeState, EpisodeSummary};
use cedos_text::escape_controls;
use jiff::Zoned;

use crate::fetch::deadline_text::describe_deadline;
use crate::fetch::report::human_bytes;

/// An episode, ready to be shown in a list.
pub(super) struct EpisodeRow {
    pub(super) id: i64,
    pub(super) channel: i64,
    pub(super) title: String,
    pub(super) channel_title: String,
    /// Season and number, publication, length and size.
    pub(super) figures: String,
    /// The state's class in the style.
    pub(super) state: &'static str,
    pub(super) state_text: String,
    pub(super) deadline: Option<String>,
    pub(super) problem: Option<String>,
}

/// Hours, minutes and seconds as players show them.
pub(super) fn clock(seconds: u64) -> String {
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match hours {
        0 => format!("{minutes}:{seconds:02}"),
        _ => format!("{hours}:{minutes:02}:{seconds:02}"),
    }
}

/// Why an episode is not here, in the page's words.
pub(super) fn problem_text(episode: &EpisodeSummary) -> Option<String> {
    let text = escape_controls(episode.problem.as_deref()?);
    let text = text.replace("`cedos cast download`", "“Download”");
    let mut letters = text.chars();
    let first = letters.next()?;
    Some(first.to_uppercase().chain(letters).collect())
}

fn state_of(episode: &EpisodeSummary) -> (&'static str, String) {
    let at = clock(episode.position_ms / 1000);
    match episode.state {
        EpisodeState::Downloading => ("waiting", "In the queue".to_owned()),
        EpisodeState::Failed => ("failed", "Not downloaded".to_owned()),
        EpisodeState::Ready if episode.played => ("done", "On this device, played".to_owned()),
        EpisodeState::Ready if episode.position_ms > 0 => {
            ("done", format!("On this device, played to {at}"))
        }
        EpisodeState::Ready => ("done", "On this device".to_owned()),
        _ if episode.played => ("played", "Played".to_owned()),
        EpisodeState::Removed => ("played", "Removed from this device".to_owned()),
        EpisodeState::New => ("new", "New".to_owned()),
    }
}

/// Season and number of an episode, as far as the feed says them.
fn numbers(episode: &EpisodeSummary) -> Option<String> {
    match (episode.season, episode.number) {
        (Some(season), Some(number)) => Some(format!("Season {season}, episode {number}")),
        (Some(season), None) => Some(format!("Season {season}")),
        (None, Some(number)) => Some(format!("Episode {number}")),
        (None, None) => None,
    }
}

impl EpisodeRow {
    /// The row of an episode.
    pub(super) fn of(episode: &EpisodeSummary, now: &Zoned) -> EpisodeRow {
        let published = episode.published.to_zoned(now.time_zone().clone());
        let mut figures: Vec<String> = numbers(episode).into_iter().collect();
        figures.push(published.strftime("%-d %b %Y").to_string());
        figures.extend(episode.duration_s.map(|s| clock(u64::from(s))));
        figures.extend(episode.bytes.filter(|bytes| *bytes > 0).map(human_bytes));
        let (state, state_text) = state_of(episode);
        let is_wanted = episode.state == EpisodeState::Downloading;
        let deadline = episode.deadline.filter(|_| is_wanted);
        let text = |text: &str| escape_controls(text).into_owned();
        EpisodeRow {
            id: episode.id.0,
            channel: episode.channel.0,
            title: text(&episode.title),
            channel_title: text(&episode.channel_title),
            figures: figures.join(" · "),
            state,
            state_text,
            deadline: deadline.map(|at| format!("By {}", describe_deadline(at, now))),
            problem: problem_text(episode),
        }
    }
}
