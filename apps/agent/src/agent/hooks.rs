//! Commands of the user that are started when a free network becomes available, and when the last
//! one is lost.

use std::process::Stdio;
use std::sync::Arc;

use d2tp_links::{Link, LinkKind};
use tokio::process::Command;
use tokio::sync::watch;

/// Shell commands that run when free networks come and go.
#[derive(Debug, Clone, Default)]
pub struct Hooks {
    /// The command for when the first free network comes.
    pub when_free: Option<String>,
    /// The command for when the last free network goes.
    pub when_not_free: Option<String>,
}

/// Runs the hooks as free networks come and go, and once at the start.
pub(super) async fn watch(hooks: Hooks, mut links: watch::Receiver<Arc<Vec<Link>>>) {
    let mut was_free = None;
    loop {
        let is_free = links
            .borrow_and_update()
            .iter()
            .any(|link| link.kind != LinkKind::Loopback && link.is_usable() && link.is_free());
        if was_free != Some(is_free) {
            let command = match is_free {
                true => &hooks.when_free,
                false => &hooks.when_not_free,
            };
            if let Some(command) = command {
                start(command, is_free);
            }
            was_free = Some(is_free);
        }
        if links.changed().await.is_err() {
            return;
        }
    }
}

fn start(command: &str, is_free: bool) {
    let child = Command::new("/bin/sh")
        .args(["-c", command])
        .env("CEDOS_FREE", if is_free { "1" } else { "0" })
        .stdin(Stdio::null())
        .spawn();
    match child {
        Ok(mut child) => {
            let command = command.to_owned();
            tokio::task::spawn_local(async move {
                if let Ok(status) = child.wait().await
                    && !status.success()
                {
                    tracing::warn!(command, %status, "a hook failed");
                }
            });
        }
        Err(error) => tracing::warn!(command, %error, "cannot start a hook"),
    }
}
