//! The page's style, scripts, icon and web app manifest, which are parts of the program.

use axum::Router;
use axum::routing::get;
use http::header::CONTENT_TYPE;

use super::frame::PageContext;

const STYLE: &str = include_str!("../../../assets/page.css");
const SCRIPT: &str = include_str!("../../../assets/page.js");
const PLAYER: &str = include_str!("../../../assets/podcast_player.js");
const MANIFEST: &str = include_str!("../../../assets/page.webmanifest");
const ICON: &str = include_str!("../../../assets/icon.svg");

/// The routes of the assets.
pub(super) fn routes() -> Router<PageContext> {
    let asset = |media_type: &'static str, text: &'static str| {
        get(move || async move { ([(CONTENT_TYPE, media_type)], text) })
    };
    Router::new()
        .route("/assets/page.css", asset("text/css; charset=utf-8", STYLE))
        .route(
            "/assets/page.js",
            asset("text/javascript; charset=utf-8", SCRIPT),
        )
        .route(
            "/assets/podcast_player.js",
            asset("text/javascript; charset=utf-8", PLAYER),
        )
        .route(
            "/assets/page.webmanifest",
            asset("application/manifest+json", MANIFEST),
        )
        .route("/assets/icon.svg", asset("image/svg+xml", ICON))
}
