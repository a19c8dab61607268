//! The settings of podcasts, and what the agent has for other programs: lists of subscriptions, a server to sync with,
//! the port for other apps, the log of downloads.
//!
//! What is not of one channel is here. Each form is a request that `cedos cast` makes, too.

use std::sync::Arc;

use askama::Template;
use axum::Form;
use axum::extract::State;
use axum::response::{IntoResponse, Redirect, Response};
use cedos_readycast::{StudySummary, TransferLogEntry, TransferLogPage, anonymous_log};
use http::header::{CONTENT_DISPOSITION, CONTENT_TYPE};
use jiff::{Timestamp, Zoned};
use serde::Deserialize;
use serde_json::{Value, json};
use url::Url;

use super::super::super::podcasts::directory_search::{KEY_SETTING, SECRET_SETTING};
use super::super::super::podcasts::index_progress::IndexProgress;
use super::super::super::podcasts::podcast_request::PodcastRequest;
use super::super::frame::{self, PageContext, PageFact, PageFrame};
use super::library_access::frame_of;
use crate::fetch::deadline_text::describe_time;
use crate::fetch::netrc_file::set_credentials;
use crate::fetch::outcome::TransferFailure;
use crate::fetch::own_file;
use crate::fetch::report::human_bytes;
use crate::fetch::state_directory::state_directory;
use crate::settings::{SettingsChange, UserSettings};

/// The setting of the folder of episodes.
const DIRECTORY: &str = "podcasts.directory";
/// The setting of the directory that searches ask.
const SEARCH_URL: &str = "podcasts.search_url";

/// The file that the page writes the secret of the user's key for Podcast Index to, in the directory of the state.
const INDEX_SECRET_FILE: &str = "podcast-index.secret";

/// The version of an exported log, as `cedos cast export` writes it.
const EXPORT_VERSION: u64 = 1;

#[derive(Template)]
#[template(path = "podcasts_settings.html")]
struct PodcastSettingsPage {
    frame: PageFrame,
    base: Arc<str>,
    files: String,
    /// The settings of the user; else why they cannot be read.
    general: Result<GeneralSettings, String>,
    index: IndexView,
    sync: Option<SyncView>,
    apps: Option<Vec<PageFact>>,
}

/// Settings of the user that concern podcasts.
struct GeneralSettings {
    directory: String,
    search_url: String,
    /// The user's key for Podcast Index; empty for none.
    index_key: String,
}

/// The index of podcasts on this device.
struct IndexView {
    /// Whether there is one.
    is_here: bool,
    /// Whether one is being made.
    is_made: bool,
    text: String,
    problem: Option<String>,
}

impl IndexView {
    fn of(context: &PageContext, now: &Zoned) -> IndexView {
        let progress = context.agent.index_progress();
        let made_at = context.agent.index_made_at();
        let is_made = matches!(
            progress,
            Some(IndexProgress::Downloading(_) | IndexProgress::Reading)
        );
        let made_at = made_at.and_then(|at| Timestamp::try_from(at).ok());
        let here = made_at.map(|at| {
            let date = at.to_zoned(now.time_zone().clone());
            format!("Made on {}.", date.strftime("%-d %b %Y"))
        });
        let text = match (&progress, &here) {
            (Some(IndexProgress::Downloading(job)), _) => {
                format!("It is being downloaded by Wi-Fi and other free networks (transfer {job}).")
            }
            (Some(IndexProgress::Reading), _) => "It is being made; that takes minutes.".to_owned(),
            (_, Some(text)) => text.clone(),
            (_, None) => "There is none on this device.".to_owned(),
        };
        IndexView {
            is_here: here.is_some(),
            is_made,
            text,
            problem: match progress {
                Some(IndexProgress::Failed(why)) => Some(format!("It was not made: {why}")),
                _ => None,
            },
        }
    }
}

impl GeneralSettings {
    fn load() -> Result<GeneralSettings, String> {
        let settings = UserSettings::load(None).map_err(|error| error.to_string())?;
        let chosen = |key: &str| settings.chosen(key).unwrap_or_default();
        Ok(GeneralSettings {
            directory: chosen(DIRECTORY),
            search_url: chosen(SEARCH_URL),
            index_key: chosen(KEY_SETTING),
        })
    }
}

/// The server that podcasts are synced with.
struct SyncView {
    facts: Vec<PageFact>,
    problem: Option<String>,
}

#[derive(Template)]
#[template(path = "podcasts_log.html")]
struct PodcastLogPage {
    frame: PageFrame,
    base: Arc<str>,
    facts: Vec<PageFact>,
}

/// The forms of the settings.
#[derive(Debug, Deserialize)]
pub(super) struct PodcastSettingsForm {
    #[serde(rename = "do")]
    action: PodcastSettingsAction,
    #[serde(default)]
    directory: String,
    #[serde(default)]
    search_url: String,
    #[serde(default)]
    server: String,
    #[serde(default)]
    user: String,
    #[serde(default)]
    password: String,
    #[serde(default)]
    index_key: String,
    #[serde(default)]
    index_secret: String,
    #[serde(default)]
    index_source: String,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum PodcastSettingsAction {
    Save,
    IndexKey,
    IndexMake,
    IndexRemove,
    SyncSetUp,
    SyncNow,
    SyncEnd,
    AppsOpen,
    AppsClose,
}

fn text_of(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

impl SyncView {
    fn of(account: &Value, now: &Zoned) -> Option<SyncView> {
        let server = account["server"].as_str()?;
        let at = |name: &str| account[name].as_str()?.parse::<Timestamp>().ok();
        let synced = match at("synced_at") {
            Some(at) => describe_time(at, now),
            None => "not yet".to_owned(),
        };
        let mut facts = vec![
            PageFact::new("Server", server),
            PageFact::new("User", &text_of(&account["user"])),
            PageFact::new("Synced", &synced),
        ];
        if let Some(at) = at("next_sync_at").filter(|at| *at > now.timestamp()) {
            facts.push(PageFact::new("Next", &describe_time(at, now)));
        }
        let problem = account["problem"].as_str();
        Some(SyncView {
            facts,
            problem: problem.map(str::to_owned),
        })
    }
}

fn apps_facts(apps: &Value) -> Vec<PageFact> {
    let fact = |label, name: &str| PageFact::new(label, &text_of(&apps[name]));
    vec![
        fact("Subscriptions (OPML)", "subscriptions"),
        fact("Server to sync with", "server"),
        fact(
            "The same, for an app that has the feeds already",
            "server_for_original_addresses",
        ),
        fact("User", "user"),
        fact("Password", "password"),
    ]
}

impl PodcastSettingsPage {
    async fn of(context: &PageContext) -> Result<PodcastSettingsPage, TransferFailure> {
        let totals = context.read_podcasts(|library| library.file_totals());
        let (number, bytes) = totals.await?;
        let general = GeneralSettings::load();
        let agent = &context.agent;
        let status = agent.answer_podcasts(PodcastRequest::SyncStatus).await?;
        let apps = agent.app_access().await;
        Ok(PodcastSettingsPage {
            frame: frame_of(context),
            base: context.base.clone(),
            files: format!("{number} episodes on this device: {}", human_bytes(bytes)),
            general,
            index: IndexView::of(context, &Zoned::now()),
            sync: SyncView::of(&status["account"], &Zoned::now()),
            apps: apps.as_ref().map(apps_facts),
        })
    }
}

/// Shows the settings.
pub(super) async fn page(State(context): State<PageContext>) -> Response {
    match PodcastSettingsPage::of(&context).await {
        Ok(page) => frame::html(&page),
        Err(failure) => frame::problem(&context, &failure),
    }
}

impl PodcastSettingsForm {
    /// Changes the user's settings. What is empty is as it was before anybody set it.
    fn save(&self) -> Result<(), TransferFailure> {
        let directory = self.directory.trim();
        let is_path =
            directory.is_empty() || directory.starts_with('/') || directory.starts_with("~/");
        if !is_path {
            return Err(TransferFailure::usage(format!(
                "`{directory}` is no folder that can be used: begin at the root (/), or in your home directory (~/)"
            )));
        }
        let known = UserSettings::load(None);
        let known = known.map_err(|error| TransferFailure::usage(error.to_string()))?;
        let mut changes = Vec::new();
        for (key, value) in [(DIRECTORY, directory), (SEARCH_URL, self.search_url.trim())] {
            let before = known.chosen(key);
            if before.as_deref().unwrap_or_default() != value {
                changes.push(match value {
                    "" => SettingsChange::Unset(key),
                    value => SettingsChange::Set(key, value),
                });
            }
        }
        let changed = UserSettings::change(&changes);
        changed
            .map(drop)
            .map_err(|error| TransferFailure::usage(format!("{error:#}")))
    }

    /// Stores the user's key for Podcast Index, and its secret in a file of its own; without a key both are forgotten. Without a
    /// secret the one stays that is there.
    fn save_index_key(&self) -> Result<(), TransferFailure> {
        let (key, secret) = (self.index_key.trim(), self.index_secret.trim());
        let failed = |error: &dyn std::fmt::Display| TransferFailure::error(error.to_string());
        let known = UserSettings::load(None);
        let known = known.map_err(|error| TransferFailure::usage(error.to_string()))?;
        let state = state_directory().map_err(|error| failed(&format!("{error:#}")))?;
        let file = state.join(INDEX_SECRET_FILE);
        let path = file.to_string_lossy();
        let changes: Vec<SettingsChange<'_>> = match (key.is_empty(), secret.is_empty()) {
            (true, _) => {
                if let Err(error) = std::fs::remove_file(&file)
                    && error.kind() != std::io::ErrorKind::NotFound
                {
                    return Err(failed(&error));
                }
                let of_key = known.chosen(KEY_SETTING).map(|_| KEY_SETTING);
                let of_secret = known.chosen(SECRET_SETTING).map(|_| SECRET_SETTING);
                let set = of_key.into_iter().chain(of_secret);
                set.map(SettingsChange::Unset).collect()
            }
            (false, false) => {
                own_file::replace(&file, secret.as_bytes()).map_err(|error| failed(&error))?;
                vec![
                    SettingsChange::Set(KEY_SETTING, key),
                    SettingsChange::Set(SECRET_SETTING, &path),
                ]
            }
            (false, true) if known.chosen(SECRET_SETTING).is_some() => {
                vec![SettingsChange::Set(KEY_SETTING, key)]
            }
            (false, true) => {
                let text = "Podcast Index gives a secret with each key; enter it, too";
                return Err(TransferFailure::usage(text));
            }
        };
        let changed = UserSettings::change(&changes);
        changed
            .map(drop)
            .map_err(|error| TransferFailure::usage(format!("{error:#}")))
    }

    /// The address of the server, with user and password.
    fn server(&self) -> Result<Url, TransferFailure> {
        let text = self.server.trim();
        let mut url: Url = text.parse().map_err(|error| {
            TransferFailure::usage(format!("`{text}` is no address of a server: {error}"))
        })?;
        if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
            let text = format!("`{text}` is no address of a server: write https://HOST");
            return Err(TransferFailure::usage(text));
        }
        set_credentials(&mut url, self.user.trim(), &self.password);
        Ok(url)
    }

    fn request(&self) -> Result<Option<PodcastRequest>, TransferFailure> {
        Ok(Some(match self.action {
            PodcastSettingsAction::Save
            | PodcastSettingsAction::IndexKey
            | PodcastSettingsAction::IndexMake
            | PodcastSettingsAction::IndexRemove => return Ok(None),
            PodcastSettingsAction::SyncSetUp => PodcastRequest::Sync {
                url: Some(self.server()?),
                accept_removals: false,
            },
            PodcastSettingsAction::SyncNow => PodcastRequest::Sync {
                url: None,
                accept_removals: false,
            },
            PodcastSettingsAction::SyncEnd => PodcastRequest::SyncEnd,
            PodcastSettingsAction::AppsOpen => PodcastRequest::Apps { new_links: false },
            PodcastSettingsAction::AppsClose => PodcastRequest::AppsClose,
        }))
    }
}

/// Changes what no other program asks the agent to change.
async fn change_settings(
    context: &PageContext,
    form: PodcastSettingsForm,
) -> Result<(), TransferFailure> {
    match form.action {
        PodcastSettingsAction::IndexMake => return context.agent.make_index(&form.index_source),
        PodcastSettingsAction::IndexRemove => return context.agent.remove_index(),
        _ => {}
    }
    let saved = tokio::task::spawn_blocking(move || match form.action {
        PodcastSettingsAction::IndexKey => form.save_index_key(),
        _ => form.save(),
    });
    let saved = saved.await;
    saved.map_err(|error| TransferFailure::error(error.to_string()))?
}

/// Does what a form of the settings says.
pub(super) async fn change(
    State(context): State<PageContext>,
    Form(form): Form<PodcastSettingsForm>,
) -> Response {
    let done = async {
        match form.request()? {
            Some(request) => context.agent.answer_podcasts(request).await.map(drop),
            None => change_settings(&context, form).await,
        }
    };
    match done.await {
        Ok(()) => Redirect::to(&format!("{}/podcasts/settings", context.base)).into_response(),
        Err(failure) => frame::problem(&context, &failure),
    }
}

/// All entries of the log, the oldest first.
async fn entries(context: &PageContext) -> Result<Vec<TransferLogEntry>, TransferFailure> {
    let mut entries = Vec::new();
    let mut next = Some(0);
    while let Some(after) = next {
        let ask = PodcastRequest::Log { since: None, after };
        let answer = context.agent.answer_podcasts(ask).await?;
        let page: TransferLogPage = serde_json::from_value(answer)
            .map_err(|error| TransferFailure::error(error.to_string()))?;
        entries.extend(page.entries);
        next = page.next;
    }
    Ok(entries)
}

fn share(share: Option<f64>) -> String {
    share.map_or("unknown yet".to_owned(), |share| {
        format!("{:.1} %", 100.0 * share)
    })
}

fn summary_facts(summary: &StudySummary) -> Vec<PageFact> {
    let whole = format!("{}, {}", summary.downloads, human_bytes(summary.bytes));
    let saved = format!(
        "{}, {}",
        human_bytes(summary.saved_bytes),
        share(summary.saved_share)
    );
    [
        ("Downloads that are whole", whole),
        ("Downloads that might wait", share(summary.delayed_share)),
        ("In time for their deadline", share(summary.in_time_share)),
        ("Carried by Wi-Fi", share(summary.wifi_share)),
        ("Carried by mobile networks", share(summary.cellular_share)),
        (
            "Saved against a client that begins again when it loses its network",
            saved,
        ),
        (
            "Whole when they were played first",
            share(summary.ready_when_played_share),
        ),
    ]
    .map(|(label, text)| PageFact::new(label, &text))
    .into()
}

/// Shows what the log of downloads comes to.
pub(super) async fn log(State(context): State<PageContext>) -> Response {
    match entries(&context).await {
        Ok(entries) => frame::html(&PodcastLogPage {
            frame: frame_of(&context),
            base: context.base.clone(),
            facts: summary_facts(&StudySummary::of(&entries)),
        }),
        Err(failure) => frame::problem(&context, &failure),
    }
}

/// Gives the log as `cedos cast export` writes it.
pub(super) async fn export_log(State(context): State<PageContext>) -> Response {
    exported(&context, false).await
}

/// Gives the log as `cedos cast export --anonymous` writes it.
pub(super) async fn export_anonymous_log(State(context): State<PageContext>) -> Response {
    exported(&context, true).await
}

async fn exported(context: &PageContext, is_anonymous: bool) -> Response {
    let entries = match entries(context).await {
        Ok(entries) if is_anonymous => anonymous_log(&entries),
        Ok(entries) => entries,
        Err(failure) => return frame::problem(context, &failure),
    };
    let log = json!({"version": EXPORT_VERSION, "anonymous": is_anonymous, "entries": entries});
    let fields = [
        (CONTENT_TYPE, "application/json"),
        (
            CONTENT_DISPOSITION,
            "attachment; filename=\"podcast-downloads.json\"",
        ),
    ];
    (fields, log.to_string()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_of_any_characters_comes_to_the_server_as_it_was_written() {
        let form = PodcastSettingsForm {
            action: PodcastSettingsAction::SyncSetUp,
            directory: String::new(),
            search_url: String::new(),
            server: " https://sync.example.org ".to_owned(),
            user: "me@home".to_owned(),
            password: "100%41 :/?#ö".to_owned(),
            index_key: String::new(),
            index_secret: String::new(),
            index_source: String::new(),
        };
        let url = form.server().expect("an address");
        let decoded = |text: &str| {
            let decoded = percent_encoding::percent_decode_str(text).decode_utf8();
            decoded.expect("text").into_owned()
        };
        assert_eq!(decoded(url.username()), form.user);
        assert_eq!(url.password().map(decoded), Some(form.password));
    }
}
