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
//! Without a library nothing runs: no task, no timer, no memory. What is asked for is in the library before
//! anything is done for it, so an agent that is killed goes on where it was.

mod directory_search;
mod downloads;
mod feed_fetch;
pub(super) mod podcast_request;
mod refreshes;
pub(super) mod requests;
pub(super) mod service;
mod transfer_record;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cedos_readycast::{DownloadSchedule, Library};
use jiff::Timestamp;
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinSet;

use self::service::{PodcastService, REFRESHES_MAX};
use super::state::{Agent, lock};
use crate::fetch::outcome::TransferFailure;

/// Due feeds that are looked at in one turn; the next turn takes the others.
const DUE_MAX: usize = 64;

/// The longest time until the library is looked at again, for clocks that were set and machines that slept.
const LOOK_MAX: Duration = Duration::from_secs(15 * 60); // a guess

/// The least time until the library is looked at again by the clock.
const LOOK_MIN: Duration = Duration::from_secs(1);

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
        let mut refreshes = JoinSet::new();
        while !agent.is_ending() {
            let turn = agent.podcast_turn(&mut refreshes).await;
            let next = turn.unwrap_or_else(|failure| {
                tracing::warn!(error = failure.text, "podcasts: will try again");
                LOOK_MAX
            });
            let looked_at = tokio::time::sleep(next);
            tokio::pin!(looked_at);
            loop {
                tokio::select! {
                    () = service.wake.notified() => break,
                    () = &mut looked_at => break,
                    changed = links.changed() => match changed {
                        Ok(()) => {
                            agent.note_lost_networks().await;
                            break;
                        }
                        Err(_) => return,
                    },
                    Some(_) = refreshes.join_next() => break,
                    event = events.recv() => match event {
                        Ok((id, event)) => if agent.note_download_event(id, &event).await { break },
                        Err(RecvError::Lagged(_)) => break,
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
        refreshes: &mut JoinSet<()>,
    ) -> Result<Duration, TransferFailure> {
        let service = &self.podcasts;
        let retry_at = {
            let _planning = service.planning.lock().await;
            self.follow_downloads().await?;
            self.start_downloads().await?
        };
        let channels = service.with(Library::channels).await?;
        let is_regular = |schedule: DownloadSchedule| schedule != DownloadSchedule::Manual;
        let has_work = channels.iter().any(|c| is_regular(c.rule.schedule));
        self.has_subscriptions.store(has_work, Ordering::Relaxed);
        let now = Timestamp::now();
        let due = service
            .with(move |library| library.due_refreshes(now, DUE_MAX))
            .await?;
        let due = due
            .into_iter()
            .filter(|due| !lock(&service.busy).contains(&due.channel));
        let mut is_without_network = false;
        let mut is_busy = false;
        for request in due {
            if !self.can_fetch(&request.url) {
                is_without_network = true;
            } else if refreshes.len() < REFRESHES_MAX {
                let agent = self.clone();
                let channel = request.channel;
                refreshes.spawn_local(async move { agent.refresh_due(channel).await });
            } else {
                is_busy = true;
            }
        }
        if is_without_network || is_busy {
            // A new link, or the end of a refresh, is heard of sooner.
            return Ok(LOOK_MAX);
        }
        let refresh_at = service.with(Library::next_refresh_at).await?;
        let next = [refresh_at.filter(|at| *at > now), retry_at]
            .into_iter()
            .flatten()
            .min();
        let wait = next.map_or(LOOK_MAX, |at| {
            Duration::try_from(at.duration_since(now)).unwrap_or_default()
        });
        Ok(wait.clamp(LOOK_MIN, LOOK_MAX))
    }
}
