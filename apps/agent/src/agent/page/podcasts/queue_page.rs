//! The queue of podcasts: what is heard next, in the order of the user's own; and as a time line what is wanted, by when, and
//! what is promised.

use std::collections::HashSet;
use std::sync::Arc;

use askama::Template;
use axum::Form;
use axum::extract::State;
use axum::response::{IntoResponse, Redirect, Response};
use cedos_readycast::{
    EpisodeId, EpisodeQuery, EpisodeState, EpisodeSummary, PlannedDownload, UpNextMove,
};
use cedos_text::escape_controls;
use jiff::{Timestamp, Zoned};
use serde::Deserialize;

use super::super::frame::{self, PageContext, PageFrame};
use super::super::live;
use super::super::transfer_card::TransferCard;
use super::deadline_chart::{ChartedDownload, DeadlineChart};
use super::episode_row::{EpisodeRow, problem_text};
use super::library_access::frame_of;
use crate::fetch::deadline_text::describe_deadline;
use crate::fetch::outcome::TransferFailure;
use crate::fetch::report::DeadlinePromise;
use crate::transfer_text::promise_of;

/// Episodes of the queue that are shown.
const QUEUE_SHOWN_MAX: u32 = 500; // a guess

#[derive(Template)]
#[template(path = "podcasts_queue.html")]
struct PodcastQueuePage {
    frame: PageFrame,
    live: PodcastQueueLive,
}

#[derive(Template)]
#[template(path = "podcasts_queue_live.html")]
struct PodcastQueueLive {
    base: Arc<str>,
    /// Episodes that are ready or coming and not played, in the order in which they will be heard.
    up_next: Vec<EpisodeRow>,
    /// Whether a person gave any of them its place.
    has_places: bool,
    chart: Option<DeadlineChart>,
    times: Vec<DeadlineGroup>,
    problems: Vec<QueueEntry>,
}

/// The episodes that are wanted by the same time.
struct DeadlineGroup {
    title: String,
    entries: Vec<QueueEntry>,
}

struct QueueEntry {
    at: Option<Timestamp>,
    published: Timestamp,
    id: i64,
    title: String,
    channel_title: String,
    transfer: Option<TransferCard>,
    promise: Option<DeadlinePromise>,
    /// The text that is shown if no transfer is known.
    note: Option<String>,
}

/// The form of an episode's buttons in the order of hearing.
#[derive(Debug, Deserialize)]
pub(super) struct UpNextForm {
    #[serde(rename = "do")]
    action: UpNextAction,
    /// The episode that is moved.
    episode: Option<i64>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum UpNextAction {
    Top,
    Up,
    Down,
    /// Goes back to the order of publication.
    Reset,
}

impl QueueEntry {
    fn of_summary(context: &PageContext, episode: &EpisodeSummary, now: &Zoned) -> QueueEntry {
        let transfer = episode.job.and_then(|job| context.agent.show(job).ok());
        QueueEntry {
            at: episode.deadline,
            published: episode.published,
            id: episode.id.0,
            title: escape_controls(&episode.title).into_owned(),
            channel_title: escape_controls(&episode.channel_title).into_owned(),
            promise: transfer.as_ref().and_then(promise_of),
            transfer: transfer.map(|transfer| TransferCard::of(&transfer, now)),
            note: problem_text(episode),
        }
    }

    fn of_plan(planned: &PlannedDownload) -> QueueEntry {
        QueueEntry {
            at: planned.deadline,
            published: planned.published,
            id: planned.episode.0,
            title: escape_controls(&planned.title).into_owned(),
            channel_title: escape_controls(&planned.channel_title).into_owned(),
            transfer: None,
            promise: None,
            note: Some("Its download has not begun.".to_owned()),
        }
    }
}

/// Sorts the entries by deadline, those without one last; the oldest first within each.
fn sort(entries: &mut [QueueEntry]) {
    entries.sort_by_key(|entry| (entry.at.is_none(), entry.at, entry.published, entry.id));
}

/// The picture of the entries that have a deadline.
fn chart_of(entries: &[QueueEntry], now: &Zoned) -> Option<DeadlineChart> {
    let charted = entries.iter().filter_map(|entry| {
        Some(ChartedDownload {
            title: &entry.title,
            deadline: entry.at?,
            percent: entry.transfer.as_ref().and_then(|card| card.percent),
            promise: entry.promise,
        })
    });
    DeadlineChart::of(&charted.collect::<Vec<_>>(), now)
}

/// The entries, which are sorted, by deadline.
fn grouped(entries: Vec<QueueEntry>, now: &Zoned) -> Vec<DeadlineGroup> {
    let same = entries
        .chunk_by(|one, next| one.at == next.at)
        .map(<[_]>::len);
    let lengths: Vec<usize> = same.collect();
    let mut rest = entries.into_iter();
    let groups = lengths.into_iter().map(|length| {
        let entries: Vec<QueueEntry> = rest.by_ref().take(length).collect();
        let at = entries.first().and_then(|entry| entry.at);
        DeadlineGroup {
            title: match at {
                Some(at) => format!("By {}", describe_deadline(at, now)),
                None => "Without a deadline".to_owned(),
            },
            entries,
        }
    });
    groups.collect()
}

impl PodcastQueueLive {
    async fn of(context: &PageContext) -> Result<PodcastQueueLive, TransferFailure> {
        let now = Zoned::now();
        let at = now.clone();
        let read = context.read_podcasts(move |library| {
            let of = |state| {
                library.episodes(&EpisodeQuery {
                    state: Some(state),
                    limit: QUEUE_SHOWN_MAX,
                    ..EpisodeQuery::default()
                })
            };
            // In the order of an episode's states: one that moves on while this reads is seen twice, never missed.
            let plan = library.planned_downloads(&at)?;
            let downloading = of(EpisodeState::Downloading)?;
            let failed = of(EpisodeState::Failed)?;
            let up_next = library.up_next(QUEUE_SHOWN_MAX)?;
            Ok((downloading, failed, up_next, plan))
        });
        let (downloading, failed, up_next, plan) = read.await?;
        let entry = |episode| QueueEntry::of_summary(context, episode, &now);
        let begun: HashSet<EpisodeId> = downloading.iter().chain(&failed).map(|e| e.id).collect();
        let planned = plan.start.iter().take(QUEUE_SHOWN_MAX as usize);
        let planned = planned.filter(|planned| !begun.contains(&planned.episode));
        let mut entries: Vec<QueueEntry> = downloading.iter().map(entry).collect();
        entries.extend(planned.map(QueueEntry::of_plan));
        sort(&mut entries);
        Ok(PodcastQueueLive {
            base: context.base.clone(),
            chart: chart_of(&entries, &now),
            times: grouped(entries, &now),
            has_places: up_next.iter().any(|episode| episode.up_next.is_some()),
            up_next: (up_next.iter())
                .map(|episode| EpisodeRow::of(episode, &now))
                .collect(),
            problems: failed.iter().map(entry).collect(),
        })
    }
}

/// Shows the queue.
pub(super) async fn page(State(context): State<PageContext>) -> Response {
    match PodcastQueueLive::of(&context).await {
        Ok(live) => frame::html(&PodcastQueuePage {
            frame: frame_of(&context),
            live,
        }),
        Err(failure) => frame::problem(&context, &failure),
    }
}

/// Sends the queue when it changes.
pub(super) async fn updates(State(context): State<PageContext>) -> Response {
    let view = context.clone();
    let look = move || {
        let view = view.clone();
        async move { PodcastQueueLive::of(&view).await.ok() }
    };
    live::updates(&context, look).into_response()
}

/// Moves an episode in the order of hearing.
pub(super) async fn act(
    State(context): State<PageContext>,
    Form(form): Form<UpNextForm>,
) -> Response {
    let to = match form.action {
        UpNextAction::Top => Some(UpNextMove::Top),
        UpNextAction::Up => Some(UpNextMove::Up),
        UpNextAction::Down => Some(UpNextMove::Down),
        UpNextAction::Reset => None,
    };
    let done = match (to, form.episode) {
        (None, _) => context.agent.reset_up_next().await,
        (Some(to), Some(id)) => context.agent.move_up_next(EpisodeId(id), to).await,
        (Some(_), None) => Err(TransferFailure::usage("the form names no episode")),
    };
    match done {
        Ok(()) => Redirect::to(&format!("{}/podcasts/queue", context.base)).into_response(),
        Err(failure) => frame::problem(&context, &failure),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(id: i64, at: Option<i64>) -> QueueEntry {
        let time = |s| Timestamp::from_second(s).expect("a time");
        QueueEntry {
            at: at.map(time),
            published: time(100 - id),
            id,
            title: String::new(),
            channel_title: String::new(),
            transfer: None,
            promise: None,
            note: None,
        }
    }

    #[test]
    fn the_queue_is_in_the_order_of_deadlines_and_then_of_publication() {
        let now = Timestamp::UNIX_EPOCH.to_zoned(jiff::tz::TimeZone::UTC);
        let mut entries = vec![
            entry(1, None),
            entry(2, Some(9_000)),
            entry(3, Some(5_000)),
            entry(4, Some(9_000)),
        ];
        sort(&mut entries);
        let groups = grouped(entries, &now);
        let ids: Vec<Vec<i64>> = (groups.iter())
            .map(|group| group.entries.iter().map(|entry| entry.id).collect())
            .collect();
        assert_eq!(ids, [vec![3], vec![4, 2], vec![1]]);
        assert!(
            groups[0].title.starts_with("By 01:23"),
            "{}",
            groups[0].title
        );
        assert_eq!(groups[2].title, "Without a deadline");
    }
}
