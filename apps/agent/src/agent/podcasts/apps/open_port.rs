//! The port for apps as it is open and as it is saved: port, token and password.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use url::Url;

use super::addresses::AppAddresses;
use crate::fetch::jobs;
use crate::stream::store::random_name;

/// The port for apps, as it is saved for the next agent.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SavedAppPort {
    pub(super) token: String,
    pub(super) port: u16,
    pub(super) password: String,
}

impl SavedAppPort {
    fn path() -> anyhow::Result<PathBuf> {
        Ok(jobs::state_directory()?.join("podcast-apps.json"))
    }

    /// The saved port; none if it was never opened, or is closed.
    pub(super) fn load() -> Option<SavedAppPort> {
        let bytes = std::fs::read(SavedAppPort::path().ok()?).ok()?;
        let saved: SavedAppPort = serde_json::from_slice(&bytes).ok()?;
        // Half a secret is easier to guess than none.
        let whole = random_name().len();
        let is_whole = saved.token.len() == whole && saved.password.len() == whole;
        is_whole.then_some(saved)
    }

    pub(super) fn save(&self) -> io::Result<()> {
        let path = SavedAppPort::path().map_err(io::Error::other)?;
        if let Some(folder) = path.parent() {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(folder)?;
        }
        jobs::replace(&path, self)
    }

    pub(super) fn remove() -> io::Result<()> {
        let path = SavedAppPort::path().map_err(io::Error::other)?;
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

/// The port for apps, open or not.
#[derive(Default)]
pub(in super::super::super) struct AppPort(pub(super) Mutex<Option<OpenAppPort>>);

/// A port that is served until this is dropped.
pub(in super::super) struct OpenAppPort {
    pub(super) server: String,
    pub(super) password: String,
    pub(super) addresses: Arc<AppAddresses>,
    /// The task that serves it.
    pub(super) serving: JoinSet<()>,
}

impl AppPort {
    /// Whether an earlier agent had the port open, so that apps may ask at any time.
    pub(in super::super) fn is_saved() -> bool {
        SavedAppPort::load().is_some()
    }

    /// Whether this is the address of the port for apps.
    pub(in super::super) fn is_at(address: &Url) -> bool {
        let port = SavedAppPort::load().map(|saved| saved.port);
        let is_here = matches!(address.host_str(), Some("127.0.0.1" | "localhost"));
        is_here && port.is_some() && address.port_or_known_default() == port
    }

    /// The links of the port for apps; none if it was never opened, or is closed.
    pub(in super::super) fn saved_links() -> Option<AppAddresses> {
        let saved = SavedAppPort::load()?;
        let base = format!("http://127.0.0.1:{}/{}", saved.port, saved.token);
        Some(AppAddresses::new(&base, &saved.token))
    }

    /// Stops serving, because the agent ends; the next agent opens the port again.
    pub(in super::super::super) async fn shut(&self) {
        if let Some(mut port) = self.0.lock().await.take() {
            port.serving.shutdown().await;
        }
    }
}
