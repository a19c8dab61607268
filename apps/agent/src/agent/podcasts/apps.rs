//! Other podcast apps on this machine: feeds whose episodes come through the agent, and a server that they sync with.
//!
//! ```text
//!  app ── http://127.0.0.1:PORT ── port ─┬─ /TOKEN/subscriptions.opml, /TOKEN/feeds/3   feed_pages
//!         Host, Origin, token or password├─ /TOKEN/episodes/17/one.mp3                  episode_link ─ episode_copy
//!                                        └─ /api/2/…, /subscriptions/…                  gpodder_server
//! ```
//!
//! The port is opened when `cedos cast apps` or `cedos cast opml export --for-apps` first asks for it. Port, token and
//! password are saved, so that what an app subscribed to works as long as an agent runs.

mod addresses;
mod episode_link;
mod feed_pages;
mod gpodder_server;
pub(super) mod open_port;
mod port;
mod sessions;

use std::sync::Arc;

use self::addresses::AppAddresses;
use self::sessions::AppSessions;
use super::super::state::Agent;

/// What the handlers of apps' requests know.
#[derive(Clone)]
struct AppContext {
    agent: Arc<Agent>,
    addresses: Arc<AppAddresses>,
    sessions: Arc<AppSessions>,
}
