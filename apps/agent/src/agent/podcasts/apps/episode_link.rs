//! The link of an episode for another app: whoever downloads it asks for the episode, and gets the agent's copy.
//!
//! ```text
//!  GET, Range ─▶ file is whole ─────────────────────────▶ its bytes
//!             ─▶ in the queue ─▶ a part is durable ─────▶ its bytes, as they come
//!             ─▶ neither: asked for, by the channel's rule ─▶ the same; 503 with Retry-After while nothing came
//! ```
//!
//! `HEAD` asks for nothing: apps look at the size of episodes that nobody wants.
//!
//! Few apps say of which copy they have the beginning (`If-Range`). When the copy is no longer the one that apps were
//! given last, such a request for a rest is answered with the whole, which apps take in place of what they have.

use std::io;

use axum::body::{Body, Bytes};
use axum::extract::{Path as RoutePath, State};
use axum::response::{IntoResponse, Response};
use cedos_readycast::{Episode, EpisodeId};
use futures_util::stream;
use http::header::{ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_TYPE, IF_RANGE, RANGE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use jiff::{Timestamp, Zoned};
use tokio::time::Instant;

use super::super::episode_copy::{
    EpisodeCopy, FIRST_BYTES_LOOK_EVERY, FIRST_BYTES_WITHIN, is_coming, media_type,
};
use super::AppContext;
use crate::fetch::outcome::TransferFailure;
use crate::stream::response_body::RESERVE_BYTES;

/// The Retry-After value while nothing came yet, in seconds.
const AGAIN_S: u32 = 300; // a guess: the episode waits for a network, and no request brings it sooner

fn words(status: StatusCode, text: &str) -> Response {
    (status, format!("{text}\n")).into_response()
}

fn refused(failure: &TransferFailure) -> Response {
    words(StatusCode::BAD_GATEWAY, &failure.text)
}

/// Answers an app.
pub(super) async fn episode(
    State(context): State<AppContext>,
    RoutePath((id, _name)): RoutePath<(i64, String)>,
    method: Method,
    fields: HeaderMap,
) -> Response {
    let answered = match method == Method::HEAD {
        true => describe(&context, EpisodeId(id)).await,
        false => give(&context, EpisodeId(id), &fields).await,
    };
    answered.unwrap_or_else(|failure| refused(&failure))
}

fn missing() -> Response {
    words(
        StatusCode::NOT_FOUND,
        "there is no such episode here any more",
    )
}

/// The answer to `HEAD`: what is known without asking for the episode.
async fn describe(context: &AppContext, id: EpisodeId) -> Result<Response, TransferFailure> {
    let Some(episode) = context.find(id).await? else {
        return Ok(missing());
    };
    let found = context.agent.copy_of_episode(&episode).await?;
    // An empty body would be given the length 0, which would be taken for that of the file.
    let nothing = stream::empty::<Result<Bytes, io::Error>>();
    let mut answer = Response::new(Body::from_stream(nothing));
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, media_type(&episode));
    headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    if let Some(found) = found {
        if let Some(length) = found.length() {
            headers.insert(CONTENT_LENGTH, length.into());
        }
        found.describe(headers);
    }
    Ok(answer)
}

async fn give(
    context: &AppContext,
    id: EpisodeId,
    fields: &HeaderMap,
) -> Result<Response, TransferFailure> {
    let until = Instant::now() + FIRST_BYTES_WITHIN;
    let mut is_asked_for = false;
    loop {
        let Some(episode) = context.find(id).await? else {
            return Ok(missing());
        };
        if let Some(found) = context.agent.copy_of_episode(&episode).await? {
            let mut fields = fields.clone();
            if context.note_given(id, &found).await? && !fields.contains_key(IF_RANGE) {
                fields.remove(RANGE);
            }
            return Ok(found.answer(&context.agent, &episode, &fields, RESERVE_BYTES));
        }
        let summary = &episode.summary;
        if !is_coming(&episode) && !is_asked_for {
            context.ask_for(&episode).await?;
            is_asked_for = true;
        } else if let (true, Some(problem)) = (is_asked_for, &summary.problem) {
            return Ok(words(StatusCode::BAD_GATEWAY, problem));
        }
        if Instant::now() >= until {
            let why = context.why_it_waits(&episode);
            let mut answer = words(StatusCode::SERVICE_UNAVAILABLE, &why);
            answer.headers_mut().insert(RETRY_AFTER, AGAIN_S.into());
            return Ok(answer);
        }
        tokio::time::sleep(FIRST_BYTES_LOOK_EVERY).await;
    }
}

impl AppContext {
    async fn find(&self, id: EpisodeId) -> Result<Option<Episode>, TransferFailure> {
        let found = self.agent.podcasts.with(move |library| library.episode(id));
        found.await
    }

    /// Notes which copy of an episode an app is given. Returns whether apps were given another one before.
    async fn note_given(&self, id: EpisodeId, copy: &EpisodeCopy) -> Result<bool, TransferFailure> {
        let Some(edition) = copy.tag().map(str::to_owned) else {
            return Ok(false);
        };
        let noted = self.agent.podcasts.with(move |library| {
            let last = library.note_app_copy(id, &edition)?;
            Ok(last.is_some_and(|last| last != edition))
        });
        noted.await
    }

    /// Asks for an episode as its channel's rule would.
    async fn ask_for(&self, episode: &Episode) -> Result<(), TransferFailure> {
        let channel = episode.summary.channel;
        let found = self
            .agent
            .podcasts
            .with(move |library| library.channel(channel));
        let rule = found.await?.map(|channel| channel.summary.rule);
        let by = rule.as_ref().and_then(|rule| {
            // As if it had been published now: an old episode is not late because an app wants it today.
            rule.schedule.deadline(Timestamp::now(), &Zoned::now())
        });
        let by = by.filter(|by| *by > Timestamp::now());
        // A policy that the rule names is followed when it changes; what its schedule implies is not known later.
        let implied = rule
            .filter(|rule| rule.policy.is_none())
            .and_then(|rule| rule.download_policy());
        let id = episode.summary.id;
        let asked = self.agent.ask_for_episode(id, by, implied.as_deref());
        asked.await.map(drop)
    }

    /// Why nothing of an episode came yet, in a sentence.
    fn why_it_waits(&self, episode: &Episode) -> String {
        let transfer = self.agent.episode_transfer(&episode.summary);
        let why = transfer.as_ref().and_then(|t| t["last"]["why"].as_str());
        match why {
            Some(why) => format!("the episode is in the queue of cedos: {why}"),
            None => "the episode is in the queue of cedos; `cedos cast queue` shows it".to_owned(),
        }
    }
}
