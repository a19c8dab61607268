//! The page of an episode: notes, player, chapters, transcript, and when it is to be on this device.

use std::sync::Arc;

use askama::Template;
use axum::Form;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Redirect, Response};
use cedos_readycast::{Episode, EpisodeId, EpisodeState, TranscriptPassage, UpNextMove};
use cedos_text::escape_controls;
use http::StatusCode;
use jiff::{Timestamp, Zoned};
use serde::Deserialize;
use tokio::time::timeout;
use url::Url;

use super::super::super::podcasts::DISK_ANSWERS_WITHIN;
use super::super::super::podcasts::episode_copy::EpisodeCopy;
use super::super::frame::{self, PageContext, PageFrame};
use super::super::live;
use super::super::transfer_card::TransferCard;
use super::chapters::ChapterRow;
use super::episode_row::{EpisodeRow, clock};
use super::library_access::frame_of;
use crate::fetch::deadline_text::{describe_deadline, parse_deadline};
use crate::fetch::outcome::TransferFailure;
use crate::fetch::report::human_bytes;

#[derive(Template)]
#[template(path = "podcasts_episode.html")]
struct EpisodePage {
    frame: PageFrame,
    base: Arc<str>,
    live: EpisodeLive,
    notes: String,
    link: Option<Url>,
    position_ms: u64,
    position: String,
    transcript: Vec<PassageRow>,
}

/// A passage of a transcript, ready to be shown.
struct PassageRow {
    /// The start in seconds and as players show it; none if the transcript does not say it.
    start: Option<(f64, String)>,
    speaker: String,
    text: String,
}

impl PassageRow {
    fn of(passage: TranscriptPassage) -> PassageRow {
        let start = passage.start_s;
        PassageRow {
            start: start.map(|start_s| (start_s, clock(start_s as u64))),
            speaker: passage.speaker,
            text: passage.text,
        }
    }
}

#[derive(Template)]
#[template(path = "podcasts_episode_live.html")]
struct EpisodeLive {
    base: Arc<str>,
    episode: EpisodeRow,
    is_ready: bool,
    /// How much of the episode a player can have.
    playable: PlayablePart,
    /// The tag of what a player can have.
    edition: String,
    is_wanted: bool,
    played: bool,
    asked: Option<String>,
    /// Which of several files it is.
    enclosure: Option<String>,
    transfer: Option<TransferCard>,
    chapters: Vec<ChapterRow>,
    /// Whether the transcript is on this device.
    has_transcript: bool,
    /// The episode that follows.
    next: Option<NextEpisode>,
}

/// The episode that is heard after this one.
struct NextEpisode {
    id: i64,
    title: String,
}

/// How much of an episode a player can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PlayablePart {
    Nothing,
    /// What its download has brought, and the rest as it comes.
    Beginning,
    Whole,
}

impl PlayablePart {
    fn of(copy: Option<&EpisodeCopy>) -> PlayablePart {
        match copy {
            Some(copy) if copy.is_whole() => PlayablePart::Whole,
            // A player cannot seek where it does not know the end.
            Some(copy) if copy.length().is_some() => PlayablePart::Beginning,
            _ => PlayablePart::Nothing,
        }
    }

    /// The word for the page's script.
    fn as_str(self) -> &'static str {
        match self {
            PlayablePart::Nothing => "nothing",
            PlayablePart::Beginning => "beginning",
            PlayablePart::Whole => "whole",
        }
    }

    fn is_beginning(self) -> bool {
        self == PlayablePart::Beginning
    }

    fn is_any(self) -> bool {
        self != PlayablePart::Nothing
    }
}

/// The form of an episode's buttons.
#[derive(Debug, Deserialize)]
pub(super) struct EpisodeForm {
    #[serde(rename = "do")]
    action: EpisodeAction,
    #[serde(default)]
    by: String,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum EpisodeAction {
    Play,
    /// Puts the episode first in the order of hearing.
    HearNext,
    Download,
    NotWanted,
    Played,
    Unplayed,
}

/// Where a player is.
#[derive(Debug, Deserialize)]
pub(super) struct PositionForm {
    position_ms: u64,
    duration_ms: Option<u64>,
}

/// The error for an episode that is not in the library.
pub(super) fn missing(id: EpisodeId) -> TransferFailure {
    TransferFailure::error(format!("There is no episode with the number {id}."))
}

async fn find(context: &PageContext, id: EpisodeId) -> Result<Episode, TransferFailure> {
    let found = context.read_podcasts(move |library| library.episode(id));
    found.await?.ok_or_else(|| missing(id))
}

/// Which of several files an episode on this device is, or will be.
fn enclosure_text(episode: &Episode) -> Option<String> {
    let state = episode.summary.state;
    let has_file = matches!(state, EpisodeState::Downloading | EpisodeState::Ready);
    if !has_file || episode.alternates.is_empty() {
        return None;
    }
    let Some(chosen) = &episode.chosen else {
        return Some("The podcast's own file, of several that it offers.".to_owned());
    };
    let words = [
        Some(chosen.title.clone()),
        chosen.media_type.clone(),
        chosen.bytes.map(human_bytes),
    ];
    let words: Vec<String> = words.into_iter().flatten().collect();
    let named = words.iter().filter(|word| !word.is_empty());
    let named: Vec<&str> = named.map(String::as_str).collect();
    let text = format!(
        "One of several files that the podcast offers: {}.",
        named.join(", ")
    );
    Some(escape_controls(&text).into_owned())
}

impl EpisodeLive {
    async fn of(context: &PageContext, episode: &Episode) -> Result<EpisodeLive, TransferFailure> {
        // A disk that does not answer keeps no page.
        let looking = context.agent.look_at_copy(episode);
        let copy = timeout(DISK_ANSWERS_WITHIN, looking)
            .await
            .unwrap_or(Ok(None))?;
        let now = Zoned::now();
        let summary = &episode.summary;
        let is_wanted = summary.state == EpisodeState::Downloading;
        let transfer = summary.job.filter(|_| is_wanted);
        let transfer = transfer.and_then(|job| context.agent.show(job).ok());
        let own = episode.own_deadline.as_ref();
        let asked = own.filter(|_| summary.state != EpisodeState::Ready);
        let next = context.agent.next_to_hear(Some(summary.id)).await?;
        let chapters = context.agent.chapters(episode);
        let chapters = chapters.into_iter().map(ChapterRow::of).collect();
        Ok(EpisodeLive {
            base: context.base.clone(),
            is_ready: episode.file.is_some(),
            playable: PlayablePart::of(copy.as_ref()),
            edition: copy
                .as_ref()
                .and_then(EpisodeCopy::tag)
                .unwrap_or_default()
                .to_owned(),
            enclosure: enclosure_text(episode),
            is_wanted: is_wanted || own.is_some(),
            played: summary.played,
            has_transcript: context.agent.has_transcript(episode),
            next: next.map(|next| NextEpisode {
                id: next.id.0,
                title: escape_controls(&next.title).into_owned(),
            }),
            chapters,
            asked: asked.map(|asked| match asked.by {
                Some(at) => format!("Wanted by {}.", describe_deadline(at, &now)),
                None => "Wanted, without a deadline.".to_owned(),
            }),
            transfer: transfer.map(|transfer| TransferCard::of(&transfer, &now)),
            episode: EpisodeRow::of(summary, &now),
        })
    }
}

/// Shows an episode.
pub(super) async fn page(State(context): State<PageContext>, Path(id): Path<i64>) -> Response {
    let found = async {
        let episode = find(&context, EpisodeId(id)).await?;
        let live = EpisodeLive::of(&context, &episode).await?;
        let transcript = context.agent.transcript(&episode).await;
        Ok::<_, TransferFailure>((episode, live, transcript))
    };
    match found.await {
        Ok((episode, live, transcript)) => frame::html(&EpisodePage {
            frame: frame_of(&context),
            base: context.base.clone(),
            live,
            position_ms: episode.summary.position_ms,
            position: clock(episode.summary.position_ms / 1000),
            notes: episode.notes,
            link: episode.link,
            transcript: transcript.into_iter().map(PassageRow::of).collect(),
        }),
        Err(failure) => frame::problem(&context, &failure),
    }
}

/// Sends the state of an episode when it changes.
pub(super) async fn updates(State(context): State<PageContext>, Path(id): Path<i64>) -> Response {
    // An event stream that ends at once would be asked for again and again.
    if let Err(failure) = find(&context, EpisodeId(id)).await {
        return frame::problem(&context, &failure);
    }
    let view = context.clone();
    let look = move || {
        let view = view.clone();
        async move {
            let episode = find(&view, EpisodeId(id)).await.ok()?;
            EpisodeLive::of(&view, &episode).await.ok()
        }
    };
    live::updates(&context, look).into_response()
}

/// Asks for an episode, or marks it.
pub(super) async fn act(
    State(context): State<PageContext>,
    Path(id): Path<i64>,
    Form(form): Form<EpisodeForm>,
) -> Response {
    let id = EpisodeId(id);
    let done = async {
        match form.action {
            EpisodeAction::Play => {
                context.agent.ask_for_episode(id, None, None).await?;
            }
            EpisodeAction::HearNext => {
                context.agent.move_up_next(id, UpNextMove::Top).await?;
            }
            EpisodeAction::Download => {
                let by = own_deadline(&form.by)?;
                context.agent.ask_for_episode(id, by, None).await?;
            }
            EpisodeAction::NotWanted => {
                context.agent.take_back_episode(id).await?;
            }
            EpisodeAction::Played => {
                context.agent.podcasts.mark_played(id, true).await?;
            }
            EpisodeAction::Unplayed => {
                context.agent.podcasts.mark_played(id, false).await?;
            }
        }
        Ok::<_, TransferFailure>(())
    };
    match done.await {
        Ok(()) => Redirect::to(&format!("{}/podcasts/episode/{id}", context.base)).into_response(),
        Err(failure) => frame::problem(&context, &failure),
    }
}

/// The deadline that a person wrote; none for nothing.
fn own_deadline(by: &str) -> Result<Option<Timestamp>, TransferFailure> {
    let text = by.trim();
    if text.is_empty() {
        return Ok(None);
    }
    let deadline = parse_deadline(text, &Zoned::now()).map_err(TransferFailure::usage)?;
    Ok(Some(deadline.due().at()))
}

/// Stores where a player is.
pub(super) async fn store_position(
    State(context): State<PageContext>,
    Path(id): Path<i64>,
    Form(form): Form<PositionForm>,
) -> Response {
    let podcasts = &context.agent.podcasts;
    let stored = podcasts.store_position(EpisodeId(id), form.position_ms, form.duration_ms);
    match stored.await {
        Ok(()) => StatusCode::NO_CONTENT.into_response(),
        Err(failure) => frame::problem(&context, &failure),
    }
}
