//! The audio of an episode by ranges, as players ask for it: of its file, or of its download as far as it has come.

use axum::extract::{Path, Query, State};
use axum::response::Response;
use cedos_readycast::EpisodeId;
use http::HeaderMap;
use serde::Deserialize;
use tokio::time::Instant;

use super::super::super::podcasts::episode_copy::{
    FIRST_BYTES_LOOK_EVERY, FIRST_BYTES_WITHIN, is_coming,
};
use super::super::frame::{self, PageContext};
use crate::fetch::outcome::TransferFailure;

/// Browsers wait for as long as a connection is open: nothing is kept back for them.
const RESERVE_BYTES: u64 = 0;

/// The query of a player's request.
#[derive(Debug, Deserialize)]
pub(super) struct AudioQuery {
    /// The tag of the bytes of which the player has the beginning, so that it never mixes two copies: no player
    /// sends `If-Range` in every request.
    edition: Option<String>,
}

/// Answers a player.
pub(super) async fn audio(
    State(context): State<PageContext>,
    Path(id): Path<i64>,
    Query(query): Query<AudioQuery>,
    fields: HeaderMap,
) -> Response {
    match answer(&context, EpisodeId(id), &query, &fields).await {
        Ok(answer) => answer,
        Err(failure) => frame::problem(&context, &failure),
    }
}

async fn answer(
    context: &PageContext,
    id: EpisodeId,
    query: &AudioQuery,
    fields: &HeaderMap,
) -> Result<Response, TransferFailure> {
    let until = Instant::now() + FIRST_BYTES_WITHIN;
    loop {
        let episode = context.read_podcasts(move |library| library.episode(id));
        let episode = episode
            .await?
            .ok_or_else(|| super::episode_page::missing(id))?;
        if let Some(copy) = context.agent.copy_of_episode(&episode).await? {
            let edition = query.edition.as_deref();
            if edition.is_some_and(|edition| copy.tag() != Some(edition)) {
                let text = "The server has other bytes of this episode by now: reload the page.";
                return Err(TransferFailure::error(text));
            }
            return Ok(copy.answer(&context.agent, &episode, fields, RESERVE_BYTES));
        }
        if !is_coming(&episode) || Instant::now() >= until {
            let text = match episode.file {
                Some(file) => format!("The file {} is not there any more.", file.display()),
                None => "Nothing of this episode is on this device yet: download it first.".into(),
            };
            return Err(TransferFailure::error(text));
        }
        tokio::time::sleep(FIRST_BYTES_LOOK_EVERY).await;
    }
}
