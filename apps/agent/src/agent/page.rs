//! The agent's page: transfers, networks and spending, in a browser of this machine.
//!
//! ```text
//!  cedos page ── agent's socket ── PagePort ─▶ http://127.0.0.1:PORT/TOKEN/
//!                                     │ opens
//!  browser ── TokenListener ─ page::server ─ router ─┬─ transfers ─┬─ Agent
//!             token, Host, Origin     headers        ├─ networks ──┤
//!                                                    ├─ podcasts ──┤
//!                                                    └─ assets     └─ live: what changes
//! ```
//!
//! The port is opened when the page is first asked for. Token and port are saved, so that a bookmark works as
//! long as an agent runs. A further page is a file beside `networks`, with its routes in [`routes`] and its
//! entry in `frame::SECTIONS`.

mod assets;
mod frame;
mod live;
mod networks;
mod podcasts;
mod server;
mod transfer_card;
mod transfers;

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use cedos_readycast::EpisodeId;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use self::frame::PageContext;
use self::server::EntryCodes;
use super::state::Agent;
use crate::fetch::jobs;
use crate::fetch::outcome::TransferFailure;
use crate::stream::store::random_name;
use crate::token_listener::{TokenGuard, TokenListener};

/// The most bytes of a form.
const FORM_BYTES_MAX: usize = 16 * 1024;

/// The page's link, as it is saved for the next agent.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct SavedPage {
    token: String,
    port: u16,
}

impl SavedPage {
    fn path() -> anyhow::Result<PathBuf> {
        Ok(jobs::state_directory()?.join("page.json"))
    }

    /// The saved link; none if the page was never opened, or is closed.
    fn load() -> Option<SavedPage> {
        let bytes = std::fs::read(SavedPage::path().ok()?).ok()?;
        let saved: SavedPage = serde_json::from_slice(&bytes).ok()?;
        // Half a token is easier to guess than none.
        (saved.token.len() == random_name().len()).then_some(saved)
    }

    fn save(&self) -> io::Result<()> {
        let path = SavedPage::path().map_err(io::Error::other)?;
        if let Some(folder) = path.parent() {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(folder)?;
        }
        jobs::replace(&path, self)
    }

    fn remove() -> io::Result<()> {
        let path = SavedPage::path().map_err(io::Error::other)?;
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

/// The port of the page, which is open or not.
pub(super) struct PagePort {
    agent: Arc<Agent>,
    open: Mutex<Option<OpenPage>>,
}

/// A page that is served until this is dropped.
struct OpenPage {
    base: String,
    guard: Arc<TokenGuard>,
    entries: Arc<EntryCodes>,
    serving: JoinSet<()>,
}

impl PagePort {
    /// The port of this agent's page, closed.
    pub(super) fn new(agent: Arc<Agent>) -> PagePort {
        PagePort {
            agent,
            open: Mutex::default(),
        }
    }

    /// Opens the page if an earlier agent had it open.
    pub(super) async fn reopen(&self) {
        if SavedPage::load().is_some()
            && let Err(failure) = self.link(false, false).await
        {
            tracing::warn!(error = failure.text, "cannot open the page");
        }
    }

    /// The link of the page, which is opened if it is not. `new_link`: the link that was known until now no
    /// longer works. `entry`: also a link that works once, for a command line that other users can read.
    ///
    /// # Errors
    /// No port is to be had, or the link cannot be saved.
    pub(super) async fn link(&self, new_link: bool, entry: bool) -> Result<Value, TransferFailure> {
        let mut open = self.open.lock().await;
        if let Some(page) = open.take_if(|_| new_link) {
            page.end().await;
        }
        let page = match open.take() {
            Some(page) => page,
            None => self.open(new_link).await.map_err(|error| {
                TransferFailure::error(format!("cannot open the page on this machine: {error}"))
            })?,
        };
        let page = open.insert(page);
        let code = entry.then(|| page.entries.create());
        let entry = code.map(|code| format!("{}/{}{code}", page.origin(), server::ENTRY_PATH));
        Ok(json!({"link": format!("{}/", page.base), "entry": entry}))
    }

    /// The link of an episode for a player: to the copy with this tag. The page is opened if it is not.
    ///
    /// # Errors
    /// No port is to be had, or the link cannot be saved.
    pub(super) async fn player_link(
        &self,
        episode: EpisodeId,
        edition: &str,
    ) -> Result<String, TransferFailure> {
        self.link(false, false).await?;
        let open = self.open.lock().await;
        let page = open.as_ref();
        let page = page.ok_or_else(|| TransferFailure::error("the page was just closed"))?;
        let path = server::player_path(&page.guard, episode, edition);
        Ok(format!("{}/{path}", page.origin()))
    }

    /// Closes the page: its link no longer works, also not with the next agent.
    ///
    /// # Errors
    /// The saved link cannot be removed.
    pub(super) async fn close(&self) -> Result<Value, TransferFailure> {
        self.shut().await;
        SavedPage::remove()
            .map_err(|error| TransferFailure::storage("cannot forget the page's link", &error))?;
        Ok(json!({"link": null}))
    }

    /// Stops serving, because the agent ends; the next agent opens the page again.
    pub(super) async fn shut(&self) {
        if let Some(page) = self.open.lock().await.take() {
            page.end().await;
        }
    }

    async fn open(&self, new_link: bool) -> io::Result<OpenPage> {
        let listener = match SavedPage::load().filter(|_| !new_link) {
            // Whoever has the port now may learn the token from a bookmark, so it is worth nothing.
            Some(saved) => match TokenListener::bind(saved.token, saved.port).await {
                Ok(listener) => listener,
                Err(_) => TokenListener::bind(random_name(), 0).await?,
            },
            None => TokenListener::bind(random_name(), 0).await?,
        };
        let saved = SavedPage {
            token: listener.guard().prefix().trim_start_matches('/').to_owned(),
            port: listener.address().port(),
        };
        saved.save()?;
        let base = listener.base();
        let guard = listener.guard().clone();
        let entries = Arc::new(EntryCodes::default());
        let context = PageContext {
            agent: self.agent.clone(),
            base: listener.guard().prefix().into(),
        };
        let mut serving = JoinSet::new();
        serving.spawn_local(server::serve(listener, routes(context), entries.clone()));
        Ok(OpenPage {
            base,
            guard,
            entries,
            serving,
        })
    }
}

impl OpenPage {
    /// Stops serving. The port is free when this returns.
    async fn end(mut self) {
        self.serving.shutdown().await;
    }

    /// Scheme, host and port of the page.
    fn origin(&self) -> &str {
        self.base.rsplit_once('/').map_or("", |(origin, _)| origin)
    }
}

/// The routes of the page that a request without the token does not reach.
fn routes(context: PageContext) -> Router {
    Router::new()
        .merge(transfers::routes())
        .merge(networks::routes())
        .merge(podcasts::routes())
        .merge(assets::routes())
        .layer(DefaultBodyLimit::max(FORM_BYTES_MAX))
        .with_state(context)
}
