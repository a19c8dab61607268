//! What a player outside of the page plays (`cedos cast play`): the file of an episode, or its download as it grows.
//!
//! ```text
//!  file is whole ─────────────────────────────▶ its path
//!  in the queue ─▶ a part is durable ─────────▶ a link to the copy, by its tag
//!  neither: asked for, as “Play now” does ─▶ the same; why it waits while nothing came
//! ```
//!
//! The link is one of the page's port and leads to the page's copy, so nothing is fetched twice and the player has the
//! bytes that the file will have, whatever the origin sends to another request.

use std::sync::Arc;

use cedos_readycast::{Episode, EpisodeId, EpisodeState};
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::super::page::PagePort;
use super::super::state::Agent;
use super::downloads::ready_file;
use super::episode_copy::{FIRST_BYTES_LOOK_EVERY, FIRST_BYTES_WITHIN, is_coming};
use super::requests::no_episode;
use crate::fetch::outcome::TransferFailure;

impl Agent {
    /// What a player is to play, in JSON: `file`, or a `link` to what is here and the rest as it comes, or neither and
    /// `why` if nothing came within a few seconds. An episode that is not on its way is asked for unless the player asks
    /// `again`.
    ///
    /// # Errors
    /// There is no such episode, it cannot be fetched, or nobody wants it any longer.
    pub(in super::super) async fn play_episode(
        self: &Arc<Agent>,
        page: &PagePort,
        id: EpisodeId,
        policy: Option<&str>,
        again: bool,
    ) -> Result<Value, TransferFailure> {
        self.look_for_missing_files();
        let until = Instant::now() + FIRST_BYTES_WITHIN;
        let mut is_asked_for = again;
        loop {
            let episode = self.podcasts.episode(id).await?;
            let shown = self.episode_json(&episode.summary);
            if let Some(file) = ready_file(&episode).await {
                return Ok(json!({"episode": shown, "file": file}));
            }
            if !is_asked_for {
                self.ask_to_play(&episode, policy).await?;
                is_asked_for = true;
                continue;
            }
            if let Some(copy) = self.copy_of_episode(&episode).await?
                && let Some(edition) = copy.tag()
            {
                let link = page.player_link(id, edition).await?;
                return Ok(json!({"episode": shown, "link": link}));
            }
            if let Some(problem) = episode.summary.problem {
                return Err(TransferFailure::error(problem));
            }
            if !is_coming(&episode) {
                let text = format!(
                    "episode {id} is not in the queue any longer; `cedos cast play {id}` asks for it again"
                );
                return Err(TransferFailure::error(text));
            }
            if Instant::now() >= until {
                let why = self.why_episode_waits(&episode);
                return Ok(json!({"episode": shown, "why": why}));
            }
            tokio::time::sleep(FIRST_BYTES_LOOK_EVERY).await;
        }
    }

    /// Asks for an episode that is not on its way, by the policy of its channel's rule or by `policy`. One that is on its
    /// way gets the policy, and keeps its deadline.
    async fn ask_to_play(
        self: &Arc<Agent>,
        episode: &Episode,
        policy: Option<&str>,
    ) -> Result<(), TransferFailure> {
        let id = episode.summary.id;
        if is_coming(episode) && policy.is_none() {
            return Ok(());
        }
        let source = self
            .podcasts
            .with(move |library| library.episode_source(id));
        let source = source.await?.ok_or_else(|| no_episode(id))?;
        if let Some(refused) = source.refused {
            return Err(TransferFailure::error(refused));
        }
        let own = episode.own_deadline.as_ref();
        let by = match episode.summary.state {
            EpisodeState::Downloading => episode.summary.deadline,
            _ => own.and_then(|own| own.by),
        };
        let by = by.filter(|by| *by > Timestamp::now());
        self.ask_for_episode(id, by, policy).await.map(drop)
    }

    /// Why nothing of an episode came yet, in a sentence.
    fn why_episode_waits(&self, episode: &Episode) -> Option<String> {
        let transfer = self.episode_transfer(&episode.summary)?;
        transfer["last"]["why"].as_str().map(str::to_owned)
    }
}
