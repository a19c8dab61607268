//! The helper that a browser starts: it takes downloads from the extension, and nothing else.
//!
//! The extension names a URL and what the browser would send with it. Where the file goes, by when and
//! over which networks is decided by the settings, as for `cedos get URL --detach`.

use std::path::{Path, PathBuf};

use cedos_agent::agent::api::AgentRequest;
use cedos_agent::agent::client::AgentApiClient;
use cedos_agent::fetch::filename::free_path;
use cedos_agent::fetch::outcome::TransferFailure;
use cedos_agent::order::{TransferOrder, TransferVerb};
use cedos_agent::settings::UserSettings;
use serde_json::{Value, json};
use url::Url;

use super::host_message::{BrowserDownload, HostRequest, read_message, write_message};
use crate::verbs::agent_start;
use crate::verbs::transfer_args::TransferArgs;

/// Answers the browser's messages until it closes its end.
///
/// # Errors
/// The browser sends what is no message.
pub async fn serve() -> anyhow::Result<()> {
    let (mut input, mut output) = (tokio::io::stdin(), tokio::io::stdout());
    while let Some(message) = read_message(&mut input).await? {
        let answer = answer(&message)
            .await
            .unwrap_or_else(|failure| json!({"ok": false, "text": failure.text}));
        write_message(&mut output, &answer).await?;
    }
    Ok(())
}

async fn answer(message: &[u8]) -> Result<Value, TransferFailure> {
    let request: HostRequest = serde_json::from_slice(message)
        .map_err(|error| TransferFailure::usage(format!("not a request: {error}")))?;
    let mut agent = agent_start::connect_or_start()
        .await
        .map_err(|error| TransferFailure::error(format!("{error:#}")))?;
    match request {
        HostRequest::Hello => {
            let answer = agent.ask(&AgentRequest::Hello).await?;
            Ok(json!({"ok": true, "agent": answer["agent"]}))
        }
        HostRequest::Page => {
            let request = AgentRequest::Page {
                new_link: false,
                entry: true,
            };
            let answer = agent.ask(&request).await?;
            Ok(json!({"ok": true, "link": answer["entry"]}))
        }
        HostRequest::Download(download) => add(&mut agent, &download).await,
    }
}

async fn add(
    agent: &mut AgentApiClient,
    download: &BrowserDownload,
) -> Result<Value, TransferFailure> {
    let url: Url = (download.url.parse())
        .map_err(|error| TransferFailure::usage(format!("that is not a URL: {error}")))?;
    if !matches!(url.scheme(), "http" | "https") {
        let text = format!("{}: cannot be downloaded here", url.scheme());
        return Err(TransferFailure::usage(text));
    }
    let settings =
        UserSettings::load(None).map_err(|error| TransferFailure::usage(error.to_string()))?;
    let mut order = TransferOrder::new(TransferVerb::Get, url.as_str());
    TransferArgs::default_for_program()
        .apply_to(&mut order)
        .map_err(TransferFailure::usage)?;
    order.headers = download.headers();
    let folder = downloads_folder(&settings);
    std::fs::create_dir_all(&folder).map_err(|error| {
        TransferFailure::error(format!("cannot make {}: {error}", folder.display()))
    })?;
    order.folder = Some(folder);
    // A browser replaces no file that somebody has, and neither does this.
    let named = order.job()?.expected_path();
    let listed = agent.ask(&AgentRequest::List).await?;
    let listed: Vec<&str> = (listed["transfers"].as_array().into_iter().flatten())
        .filter(|transfer| !matches!(transfer["standing"].as_str(), Some("done" | "gone")))
        .filter_map(|transfer| transfer["file"].as_str())
        .collect();
    let is_taken = |path: &Path| {
        path.symlink_metadata().is_ok() || listed.iter().any(|file| Path::new(file) == path)
    };
    if let Some(free) = free_path(&named, is_taken) {
        (order.file, order.folder) = (Some(free), None);
        // Somebody may take that name meanwhile.
        order.replaces = false;
    }
    let order = (order.with_absolute_paths())
        .map_err(|error| TransferFailure::error(format!("the working directory: {error}")))?;
    let request = AgentRequest::Add {
        order: Box::new(order),
        patient: true,
        follow: false,
    };
    let answer = agent.ask(&request).await?;
    Ok(json!({"ok": true, "id": answer["id"]}))
}

/// Where downloads of a browser go: the settings' folder, else the desktop's, else `~/Downloads`.
fn downloads_folder(settings: &UserSettings) -> PathBuf {
    let home = std::env::var_os("HOME")
        .map(PathBuf::from)
        .unwrap_or_default();
    let config = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    let config = config
        .filter(|path| path.is_absolute())
        .unwrap_or_else(|| home.join(".config"));
    let desktop = || {
        let text = std::fs::read_to_string(config.join("user-dirs.dirs")).ok()?;
        desktop_folder(&text, &home)
    };
    (settings.path("directories.downloads"))
        .or_else(desktop)
        .unwrap_or_else(|| home.join("Downloads"))
}

/// The folder that a desktop's `user-dirs.dirs` names (xdg-user-dirs): below `$HOME`, or absolute.
fn desktop_folder(text: &str, home: &Path) -> Option<PathBuf> {
    let named = text.lines().find_map(|line| {
        let value = line.trim().strip_prefix("XDG_DOWNLOAD_DIR=")?;
        value.strip_prefix('"')?.strip_suffix('"')
    })?;
    match named.strip_prefix("$HOME/") {
        Some(below) => Some(home.join(below)),
        None => Some(PathBuf::from(named)).filter(|path| path.is_absolute()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_desktops_folder_is_read_as_the_desktop_writes_it() {
        let home = Path::new("/home/me");
        let of = |text: &str| desktop_folder(text, home);
        let text = "# a comment\nXDG_DESKTOP_DIR=\"$HOME/Desktop\"\nXDG_DOWNLOAD_DIR=\"$HOME/Herunter geladen\"\n";
        assert_eq!(of(text), Some("/home/me/Herunter geladen".into()));
        assert_eq!(of("XDG_DOWNLOAD_DIR=\"/data\""), Some("/data".into()));
        for no in [
            "",
            "XDG_DOWNLOAD_DIR=\"relative\"",
            "XDG_DOWNLOAD_DIR=",
            "XDG_DOWNLOAD_DIR=\"$HOME\"",
        ] {
            assert_eq!(of(no), None, "{no}");
        }
    }
}
