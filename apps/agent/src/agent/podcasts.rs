//! Podcasts in the agent: feeds that are due, downloads that rules ask for, files that no rule wants any longer.
//!
//! ```text
//!  cedos cast, page ─▶ PodcastService ── with ──▶ Library (SQLite, on a thread for blocking calls)
//!                        │ wakes
//!                        ▼
//!      run: follow ─▶ plan ─▶ refresh ─▶ wait for: a request, the end of a download, a new link, the next feed
//!            │         │         └─ feed_fetch: GET by a permitted link, four at once
//!            │         └─ downloads of the agent's queue, as those of `cedos get --detach`
//!            └─ how they ended
//! ```
//!
//! `apps` serves other podcast apps on this machine, `sync` exchanges subscriptions and positions with a server.
//!
//! Without a library nothing runs: no task, no timer, no memory. What is asked for is in the library before
//! anything is done for it, so an agent that is killed goes on where it was.

mod apps;
pub(super) mod chapter_fetch;
mod copy_body;
pub(super) mod directory_search;
mod downloads;
pub(super) mod episode_copy;
mod episode_documents;
mod episode_folder;
mod episode_notes;
mod episode_play;
mod feed_fetch;
mod gpodder_messages;
mod index_files;
pub(super) mod index_progress;
mod index_source;
pub(super) mod podcast_request;
mod refresh_queue;
mod refreshes;
pub(super) mod requests;
pub(super) mod service;
mod sync;
mod transcript_fetch;
mod transfer_record;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cedos_readycast::{ChannelId, Library};
use jiff::Timestamp;
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinSet;
use tokio::time::Instant;
use url::Url;

use self::apps::open_port::AppPort;
pub(super) use self::downloads::DISK_ANSWERS_WITHIN;
use self::refresh_queue::RefreshQueue;
use self::service::{PodcastService, REFRESHES_MAX};
use super::state::{Agent, lock};
use crate::fetch::origin::is_this_machine;
use crate::fetch::outcome::TransferFailure;

/// Due feeds that wait in memory; the others follow when these are fetched.
const DUE_MAX: usize = 20_000; // a guess: twice the largest list of subscriptions

/// The longest time until the library is looked at again, for clocks that were set and machines that slept.
const LOOK_MAX: Duration = Duration::from_secs(15 * 60); // a guess

/// The least time until the library is looked at again by the clock.
const LOOK_MIN: Duration = Duration::from_secs(1);

/// The downloads that are to be planned in the next turn.
#[derive(Debug, PartialEq, Eq)]
enum PlanScope {
    /// Downloads of the channels whose feeds were fetched.
    Of(BTreeSet<ChannelId>),
    /// Downloads of all channels; those that run are looked after too.
    All,
}

/// What the task of podcasts knows from turn to turn.
struct PodcastTurns {
    scope: PlanScope,
    /// When all downloads were planned last.
    planned_at: Instant,
    /// When a failed download may be tried again.
    retry_at: Option<Timestamp>,
    queue: RefreshQueue,
    refreshes: JoinSet<ChannelId>,
    /// Whether feeds may be due that are not in the queue.
    has_due: bool,
}

impl PodcastTurns {
    fn new() -> PodcastTurns {
        PodcastTurns {
            scope: PlanScope::All,
            planned_at: Instant::now(),
            retry_at: None,
            queue: RefreshQueue::default(),
            refreshes: JoinSet::new(),
            has_due: true,
        }
    }

    /// Notes that something changed.
    fn plan_all(&mut self) {
        self.scope = PlanScope::All;
        self.has_due = true;
    }

    /// Notes that the feed of a channel was fetched.
    fn note_refresh(&mut self, channel: ChannelId) {
        if let PlanScope::Of(channels) = &mut self.scope {
            channels.insert(channel);
        }
    }
}

impl PodcastService {
    /// Refreshes feeds and queues downloads until the agent ends. Waits for the first use of podcasts if there is no
    /// library.
    pub(super) async fn run(agent: Arc<Agent>) {
        let service = &agent.podcasts;
        while !service.exists() {
            service.wake.notified().await;
        }
        if let Err(failure) = service.library() {
            tracing::warn!(error = failure.text, "podcasts are not refreshed");
            // A command that uses podcasts tells the user.
            while service.library.get().is_none() {
                service.wake.notified().await;
            }
        }
        let mut events = agent.events.subscribe();
        let mut links = agent.link_view.links();
        let mut turns = PodcastTurns::new();
        while !agent.is_ending() {
            let turn = agent.podcast_turn(&mut turns).await;
            let next = turn.unwrap_or_else(|failure| {
                tracing::warn!(error = failure.text, "podcasts: will try again");
                turns.plan_all();
                LOOK_MAX
            });
            let looked_at = tokio::time::sleep(next);
            tokio::pin!(looked_at);
            loop {
                tokio::select! {
                    () = service.wake.notified() => {
                        turns.plan_all();
                        break;
                    }
                    () = &mut looked_at => {
                        turns.has_due = true;
                        break;
                    }
                    changed = links.changed() => match changed {
                        Ok(()) => {
                            agent.note_lost_networks().await;
                            turns.plan_all();
                            break;
                        }
                        Err(_) => return,
                    },
                    Some(ended) = turns.refreshes.join_next() => {
                        match ended {
                            Ok(channel) => turns.note_refresh(channel),
                            Err(_) => turns.plan_all(),
                        }
                        break;
                    }
                    event = events.recv() => match event {
                        Ok((id, event)) => if agent.note_download_event(id, &event).await {
                            turns.plan_all();
                            break;
                        },
                        Err(RecvError::Lagged(_)) => {
                            turns.plan_all();
                            break;
                        }
                        Err(RecvError::Closed) => return,
                    },
                }
            }
        }
    }
}

impl Agent {
    /// Does what the library asks for now. Returns when to look again.
    async fn podcast_turn(
        self: &Arc<Agent>,
        turns: &mut PodcastTurns,
    ) -> Result<Duration, TransferFailure> {
        let service = &self.podcasts;
        service.with(Library::apply_pending_actions).await?;
        let now = Timestamp::now();
        if turns.retry_at.is_some_and(|at| at <= now) || turns.planned_at.elapsed() >= LOOK_MAX {
            turns.scope = PlanScope::All;
        }
        self.plan_downloads(turns).await?;
        self.fetch_due(turns, now).await?;
        let service = &self.podcasts;
        let refresh_at = match turns.queue.is_empty() {
            true => {
                let next = service.with(move |library| library.next_refresh_after(now));
                next.await?
            }
            // A new link, or the end of a refresh, is heard of sooner.
            false => None,
        };
        let next = [refresh_at, turns.retry_at].into_iter().flatten();
        let wait = next.min().map_or(LOOK_MAX, |at| {
            Duration::try_from(at.duration_since(now)).unwrap_or_default()
        });
        Ok(wait.clamp(LOOK_MIN, LOOK_MAX))
    }

    /// Queues the downloads that rules ask for, as far as something changed since the last turn.
    async fn plan_downloads(
        self: &Arc<Agent>,
        turns: &mut PodcastTurns,
    ) -> Result<(), TransferFailure> {
        let service = &self.podcasts;
        let nothing = PlanScope::Of(BTreeSet::new());
        match std::mem::replace(&mut turns.scope, nothing) {
            PlanScope::Of(channels) if channels.is_empty() => {}
            PlanScope::Of(channels) => {
                let _planning = service.planning.lock().await;
                let channels: Vec<ChannelId> = channels.into_iter().collect();
                let retry_at = self.start_downloads(Some(channels)).await?;
                turns.retry_at = turns.retry_at.into_iter().chain(retry_at).min();
            }
            PlanScope::All => {
                turns.planned_at = Instant::now();
                self.look_for_missing_files();
                {
                    let _planning = service.planning.lock().await;
                    self.follow_downloads().await?;
                    turns.retry_at = self.start_downloads(None).await?;
                }
                let has_scheduled = service.with(Library::has_scheduled_channels).await?;
                let is_synced = service.with(Library::sync_account).await?.is_some();
                let has_work = has_scheduled || is_synced || AppPort::is_saved();
                self.has_subscriptions.store(has_work, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// Begins to fetch the feeds that are due, as many as may be fetched at the same time.
    async fn fetch_due(
        self: &Arc<Agent>,
        turns: &mut PodcastTurns,
        now: Timestamp,
    ) -> Result<(), TransferFailure> {
        let service = &self.podcasts;
        if turns.has_due || turns.queue.is_empty() {
            let due = service.with(move |library| library.due_refreshes(now, DUE_MAX));
            let due = due.await?;
            let busy = lock(&service.busy).clone();
            let due = due.into_iter().filter(|due| !busy.contains(&due.channel));
            turns.queue = RefreshQueue::of(due);
            turns.has_due = false;
        }
        // For all feeds of this machine, and for all others, the answer is the same.
        let (mut here, mut elsewhere) = (None, None);
        let mut can_fetch = |url: &Url| {
            let is_here = is_this_machine(url.host_str().unwrap_or_default());
            let known = if is_here { &mut here } else { &mut elsewhere };
            *known.get_or_insert_with(|| self.can_fetch(url))
        };
        while turns.refreshes.len() < REFRESHES_MAX {
            let next = turns.queue.take(&service.hosts, &mut can_fetch);
            let Some((channel, permit)) = next else {
                break;
            };
            let agent = self.clone();
            turns.refreshes.spawn_local(async move {
                agent.refresh_due(channel, permit).await;
                channel
            });
        }
        Ok(())
    }
}
