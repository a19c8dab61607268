//! The queue of podcasts as a time line: what is wanted, by when, and what is promised; and what is ready to be heard.

use std::collections::HashSet;
use std::sync::Arc;

use askama::Template;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use cedos_readycast::{EpisodeId, EpisodeQuery, EpisodeState, EpisodeSummary, PlannedDownload};
use cedos_text::escape_controls;
use jiff::{Timestamp, Zoned};

use super::super::frame::{self, PageContext, PageFrame};
use super::super::live;
use super::super::transfer_card::TransferCard;
use super::episode_row::{EpisodeRow, problem_text};
use super::library_access::frame_of;
use crate::fetch::deadline_text::describe_deadline;
use crate::fetch::outcome::TransferFailure;

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
    times: Vec<DeadlineGroup>,
    /// Episodes that are whole and not played, in the order in which they will be heard.
    ready: Vec<EpisodeRow>,
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
    /// The text that is shown if no transfer is known.
    note: Option<String>,
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
            note: Some("Its download has not begun.".to_owned()),
        }
    }
}

/// The entries by deadline, those without one last; the oldest first within each.
fn grouped(mut entries: Vec<QueueEntry>, now: &Zoned) -> Vec<DeadlineGroup> {
    entries.sort_by_key(|entry| (entry.at.is_none(), entry.at, entry.published, entry.id));
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
            let of = |state, played| {
                library.episodes(&EpisodeQuery {
                    state: Some(state),
                    played,
                    limit: QUEUE_SHOWN_MAX,
                    ..EpisodeQuery::default()
                })
            };
            // In the order of an episode's states: one that moves on while this reads is seen twice, never missed.
            let plan = library.planned_downloads(&at)?;
            let downloading = of(EpisodeState::Downloading, None)?;
            let failed = of(EpisodeState::Failed, None)?;
            let mut ready = of(EpisodeState::Ready, Some(false))?;
            ready.sort_by_key(|episode| (episode.published, episode.id));
            Ok((downloading, failed, ready, plan))
        });
        let (downloading, failed, ready, plan) = read.await?;
        let entry = |episode| QueueEntry::of_summary(context, episode, &now);
        let begun: HashSet<EpisodeId> = downloading.iter().chain(&failed).map(|e| e.id).collect();
        let planned = plan.start.iter().take(QUEUE_SHOWN_MAX as usize);
        let planned = planned.filter(|planned| !begun.contains(&planned.episode));
        let mut entries: Vec<QueueEntry> = downloading.iter().map(entry).collect();
        entries.extend(planned.map(QueueEntry::of_plan));
        Ok(PodcastQueueLive {
            base: context.base.clone(),
            times: grouped(entries, &now),
            ready: (ready.iter())
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
            note: None,
        }
    }

    #[test]
    fn the_queue_is_in_the_order_of_deadlines_and_then_of_publication() {
        let now = Timestamp::UNIX_EPOCH.to_zoned(jiff::tz::TimeZone::UTC);
        let entries = vec![
            entry(1, None),
            entry(2, Some(9_000)),
            entry(3, Some(5_000)),
            entry(4, Some(9_000)),
        ];
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
