//! Feeds for other apps, with the agent's links in place of enclosures, and the list of them.

use std::collections::HashMap;

use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use cedos_feed::rewrite_feed;
use cedos_readycast::{ChannelId, KEPT_FEED_BYTES_MAX, KeptFeed, Library, write_opml};
use http::header::{CACHE_CONTROL, CONTENT_DISPOSITION, CONTENT_TYPE, ETAG, IF_NONE_MATCH};
use http::{HeaderMap, HeaderValue, StatusCode};
use jiff::Timestamp;
use sha2::{Digest, Sha256};

use super::super::super::state::Agent;
use super::AppContext;
use super::addresses::AppAddresses;
use crate::fetch::outcome::TransferFailure;

/// Says why there is no answer.
pub(super) fn problem(status: StatusCode, text: &str) -> Response {
    (status, format!("{text}\n")).into_response()
}

impl Agent {
    /// The subscriptions as OPML whose addresses are links of the agent.
    ///
    /// # Errors
    /// The library cannot be read.
    pub(super) async fn app_opml(
        &self,
        addresses: &AppAddresses,
    ) -> Result<String, TransferFailure> {
        let channels = self.podcasts.with(Library::channels).await?;
        Ok(write_opml(channels.iter(), |channel| {
            addresses.feed(channel.id)
        }))
    }
}

/// Gives the list of subscriptions.
pub(super) async fn opml(State(context): State<AppContext>) -> Response {
    match context.agent.app_opml(&context.addresses).await {
        Ok(text) => {
            let name = "attachment; filename=\"subscriptions.opml\"";
            let fields = [
                (CONTENT_TYPE, "text/x-opml; charset=utf-8"),
                (CONTENT_DISPOSITION, name),
            ];
            (fields, text).into_response()
        }
        Err(failure) => problem(StatusCode::INTERNAL_SERVER_ERROR, &failure.text),
    }
}

/// Gives a feed.
pub(super) async fn feed(
    State(context): State<AppContext>,
    Path(id): Path<i64>,
    fields: HeaderMap,
) -> Response {
    let text = match context.feed_text(ChannelId(id)).await {
        Ok(Some(text)) => text,
        Ok(None) => {
            let text = "cedos is no longer subscribed to this podcast";
            return problem(StatusCode::NOT_FOUND, text);
        }
        Err(failure) => return problem(StatusCode::BAD_GATEWAY, &failure.text),
    };
    let digest = hex::encode(&Sha256::digest(&text)[..16]);
    let tag = HeaderValue::from_str(&format!("\"{digest}\"")).expect("digits");
    let is_known = fields.get(IF_NONE_MATCH).is_some_and(|known| *known == tag);
    let mut answer = match is_known {
        true => StatusCode::NOT_MODIFIED.into_response(),
        false => {
            let media_type = match text.first() {
                Some(b'{') => "application/feed+json",
                _ => "application/xml; charset=utf-8",
            };
            ([(CONTENT_TYPE, media_type)], text).into_response()
        }
    };
    let headers = answer.headers_mut();
    headers.insert(ETAG, tag);
    // Asked for again each time, and then mostly not sent.
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    answer
}

impl AppContext {
    async fn kept(&self, channel: ChannelId) -> Result<Option<KeptFeed>, TransferFailure> {
        let now = Timestamp::now();
        let kept = self
            .agent
            .podcasts
            .with(move |library| library.kept_feed(channel, now));
        kept.await
    }

    /// The feed of a channel for apps; none if there is no such channel. It is fetched if it was not kept until now.
    async fn feed_text(&self, channel: ChannelId) -> Result<Option<Vec<u8>>, TransferFailure> {
        let mut kept = self.kept(channel).await?;
        if kept.as_ref().is_some_and(|kept| kept.body.is_none()) {
            let report = self.agent.refresh_channel(channel).await?;
            kept = self.kept(channel).await?;
            if report.is_none() && kept.as_ref().is_some_and(|kept| kept.body.is_none()) {
                let text = "no network is up that may be used for the feed; ask again later";
                return Err(TransferFailure::error(text));
            }
        }
        let Some(kept) = kept else {
            return Ok(None);
        };
        let Some(body) = kept.body else {
            let problem = kept.problem.unwrap_or_else(|| "nothing came".to_owned());
            let text = format!("the feed of {} cannot be read: {problem}", kept.title);
            return Err(TransferFailure::error(text));
        };
        if body.is_empty() {
            let text = format!(
                "the feed of {} is larger than {} MB, which is too large for other apps; they can subscribe to {}",
                kept.title,
                KEPT_FEED_BYTES_MAX >> 20,
                kept.url
            );
            return Err(TransferFailure::error(text));
        }
        let addresses = self.addresses.clone();
        let rewritten = tokio::task::spawn_blocking(move || {
            let episodes: HashMap<_, _> = kept
                .episodes
                .iter()
                .map(|(id, address)| (address.as_str(), *id))
                .collect();
            rewrite_feed(&body, &kept.url, &addresses.feed(channel), |address| {
                let id = episodes.get(address.as_str())?;
                Some(addresses.episode(*id, address))
            })
        });
        let rewritten = rewritten
            .await
            .map_err(|error| TransferFailure::error(error.to_string()))?;
        let text = rewritten.map_err(|error| TransferFailure::error(error.to_string()))?;
        Ok(Some(text))
    }
}
