//! Which running proxy an operator's command is for.

use std::path::{Path, PathBuf};

use anyhow::bail;
use cedos_agent::fetch::state_directory::state_directory;
use cedos_prox::{ControlClient, ControlError, ControlRequest};
use clap::Args;
use serde_json::Value;

/// The state directory of a proxy that the system runs.
const SYSTEM_STATE_DIR: &str = "/var/lib/cedos-prox";

/// The state directory of a proxy for which none is named.
///
/// # Errors
/// The user has no such directory.
pub fn default_state_dir() -> anyhow::Result<PathBuf> {
    Ok(state_directory()?.join("prox"))
}

/// Which proxy is meant.
#[derive(Debug, Args)]
pub(super) struct WhichProxy {
    /// The --state-dir of the proxy that runs [default: this user's proxy, else the system's in
    /// /var/lib/cedos-prox]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
}

impl WhichProxy {
    /// Connects to the proxy.
    ///
    /// # Errors
    /// No such proxy runs.
    pub(super) async fn connect(&self) -> anyhow::Result<ControlClient> {
        if let Some(directory) = &self.state_dir {
            return Ok(ControlClient::connect(directory).await?);
        }
        let own = default_state_dir()?;
        for directory in [own.as_path(), Path::new(SYSTEM_STATE_DIR)] {
            match ControlClient::connect(directory).await {
                Err(ControlError::NotRunning(_)) => {}
                connected => return Ok(connected?),
            }
        }
        bail!(
            "no proxy runs with its state in {} or {SYSTEM_STATE_DIR}; start one (`cedos prox`), or name its \
             directory with --state-dir",
            own.display()
        )
    }

    /// Asks it.
    ///
    /// # Errors
    /// No such proxy runs, or it says no.
    pub(super) async fn ask(&self, request: ControlRequest) -> anyhow::Result<Value> {
        Ok(self.connect().await?.ask(&request).await?)
    }
}
