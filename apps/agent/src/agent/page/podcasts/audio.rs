//! The audio of an episode by ranges, as players ask for it: of its file, or of its download as far as it has come.
//!
//! The page's own player says how far an episode was heard; of other players it is known that they read.

use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use cedos_readycast::EpisodeId;
use http::{HeaderMap, Method, StatusCode};
use jiff::Timestamp;
use serde::Deserialize;
use tokio::time::Instant;

use super::super::super::podcasts::episode_copy::{
    FIRST_BYTES_LOOK_EVERY, FIRST_BYTES_WITHIN, is_coming,
};
use super::super::frame::{self, PageContext};
use crate::fetch::outcome::TransferFailure;
use crate::stream::response_body::RESERVE_BYTES;

/// Browsers wait for as long as a connection is open: nothing is kept back for them.
const BROWSER_RESERVE_BYTES: u64 = 0;

/// The query of a player's request.
#[derive(Debug, Deserialize)]
pub(super) struct AudioQuery {
    /// The tag of the bytes of which the player has the beginning, so that it never mixes two copies: no player
    /// sends `If-Range` in every request.
    edition: Option<String>,
}

/// Answers the page's own player.
pub(super) async fn audio(
    State(context): State<PageContext>,
    Path(id): Path<i64>,
    Query(query): Query<AudioQuery>,
    fields: HeaderMap,
) -> Response {
    let answer = answer(
        &context,
        EpisodeId(id),
        &query,
        &fields,
        BROWSER_RESERVE_BYTES,
    );
    match answer.await {
        Ok(answer) => answer,
        Err(failure) => frame::problem(&context, &failure),
    }
}

/// Answers a player that `cedos cast play` gave a link to, and notes that the episode is played.
pub(super) async fn played_audio(
    State(context): State<PageContext>,
    Path(id): Path<i64>,
    Query(query): Query<AudioQuery>,
    method: Method,
    fields: HeaderMap,
) -> Response {
    let id = EpisodeId(id);
    match answer(&context, id, &query, &fields, RESERVE_BYTES).await {
        Ok(answer) => {
            if method == Method::GET && answer.status().is_success() {
                let noted = context
                    .change_podcasts(move |library| library.note_begun(id, Timestamp::now()));
                if let Err(failure) = noted.await {
                    tracing::warn!(error = failure.text, "a play is not noted");
                }
            }
            answer
        }
        // Not as a page: its links would tell the token.
        Err(failure) => (StatusCode::CONFLICT, format!("{}\n", failure.text)).into_response(),
    }
}

async fn answer(
    context: &PageContext,
    id: EpisodeId,
    query: &AudioQuery,
    fields: &HeaderMap,
    reserve_bytes: u64,
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
            return Ok(copy.answer(&context.agent, &episode, fields, reserve_bytes));
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
