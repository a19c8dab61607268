//! The pages of podcasts: channels, episodes with a player, the queue, search, and lists of subscriptions.
//!
//! ```text
//!  /podcasts ─┬─ channel/ID      episodes, rule                 channels
//!             ├─ episode/ID      notes, player, deadline        episode_page
//!             │   ├─ audio       the copy, by ranges            audio
//!             │   ├─ played-audio  the same, for other players  audio
//!             │   └─ position    where the player is            episode_page
//!             ├─ queue           deadlines in their order       queue_page, deadline_chart
//!             ├─ search          titles; subscribing            channels
//!             ├─ settings        folder, search, sync, apps     settings_page
//!             │   └─ OPML        in and out                     subscription_list
//!             └─ log             what downloads came to         settings_page
//! ```
//!
//! Titles and notes are other people's: titles are escaped by the templates, notes were sanitised when the feed was
//! read.

mod audio;
mod channels;
mod chapters;
mod deadline_chart;
mod episode_page;
mod episode_row;
mod library_access;
mod queue_page;
mod settings_page;
mod subscription_list;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{get, post};
use cedos_readycast::FEED_BYTES_MAX;

use super::frame::PageContext;

/// The routes of these pages.
pub(super) fn routes() -> Router<PageContext> {
    let import = post(subscription_list::import).layer(DefaultBodyLimit::max(FEED_BYTES_MAX));
    Router::new()
        .route("/podcasts", get(channels::library))
        .route("/podcasts/updates", get(channels::library_updates))
        .route("/podcasts/subscribe", post(channels::subscribe))
        .route("/podcasts/search", get(channels::search))
        .route(
            "/podcasts/channel/{id}",
            get(channels::channel).post(channels::change),
        )
        .route(
            "/podcasts/channel/{id}/updates",
            get(channels::channel_updates),
        )
        .route(
            "/podcasts/episode/{id}",
            get(episode_page::page).post(episode_page::act),
        )
        .route("/podcasts/episode/{id}/updates", get(episode_page::updates))
        .route(
            "/podcasts/episode/{id}/position",
            post(episode_page::store_position),
        )
        .route("/podcasts/episode/{id}/audio", get(audio::audio))
        .route(
            "/podcasts/episode/{id}/played-audio",
            get(audio::played_audio),
        )
        .route(
            "/podcasts/queue",
            get(queue_page::page).post(queue_page::act),
        )
        .route("/podcasts/queue/updates", get(queue_page::updates))
        .route(
            "/podcasts/settings",
            get(settings_page::page).post(settings_page::change),
        )
        .route("/podcasts/log", get(settings_page::log))
        .route("/podcasts/log.json", get(settings_page::export_log))
        .route(
            "/podcasts/anonymous-log.json",
            get(settings_page::export_anonymous_log),
        )
        .route("/podcasts/opml", import)
        .route(
            "/podcasts/subscriptions.opml",
            get(subscription_list::export),
        )
        .route(
            "/podcasts/subscriptions-for-apps.opml",
            get(subscription_list::export_for_apps),
        )
}
