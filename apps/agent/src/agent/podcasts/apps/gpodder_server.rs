//! The API of gpodder.net (version 2) for apps that sync with the agent: subscriptions, positions, devices.
//!
//! ```text
//!  POST /api/2/auth/cedos/login.json                 POST /api/2/devices/cedos/DEVICE.json
//!  GET, POST, PUT /api/2/subscriptions/cedos/DEVICE.json?since=…      GET, PUT /subscriptions/cedos/DEVICE.opml
//!  GET, POST /api/2/episodes/cedos.json?since=…      GET /api/2/updates/cedos/DEVICE.json?since=…
//! ```
//!
//! All devices share the subscriptions of the library. Below `/origins` feeds and episodes have their addresses at the
//! origins, otherwise links of the agent; what apps send may have either. A list that an app puts (`PUT`) adds feeds,
//! and removes none, because the app may never have had the feeds that are missing. Podcasts are removed by `remove`.

use std::collections::HashSet;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use cedos_readycast::{
    AppDevice, ChangedFeed, LibraryError, OPML_FEEDS_MAX, SyncAction, read_opml, write_opml,
};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, Method, StatusCode};
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};
use url::Url;

use super::super::gpodder_messages::{action_json, read_action, read_feeds, web_address};
use super::AppContext;
use super::addresses::AppLink;
use super::feed_pages::problem;
use super::sessions::USER;
use crate::fetch::outcome::TransferFailure;

/// The maximum number of bytes of a request.
pub(super) const BODY_BYTES_MAX: usize = 4 << 20; // a guess: 10,000 actions of 400 bytes

/// The maximum number of actions of a request.
const ACTIONS_MAX: usize = 10_000; // a guess: apps send some hundreds

/// The maximum number of bytes of a device's name.
const DEVICE_BYTES_MAX: usize = 64; // a guess

/// The path below which feeds and episodes have their addresses at the origins.
pub(super) const ORIGINS_PATH: &str = "/origins";

/// Whether a path is one of the API.
pub(super) fn is_api(path: &str) -> bool {
    let path = path.strip_prefix(ORIGINS_PATH).unwrap_or(path);
    path.starts_with("/api/") || path.starts_with("/subscriptions/")
}

/// What a handler of the API knows.
#[derive(Clone)]
struct ApiContext {
    app: AppContext,
    /// Whether answers have the addresses at the origins.
    has_origins: bool,
}

/// Subscriptions that changed, under the addresses that an app is shown.
struct AppChanges {
    add: Vec<Url>,
    remove: Vec<Url>,
    timestamp: i64,
}

/// The routes of the API.
pub(super) fn routes(app: &AppContext) -> Router {
    let api = |has_origins| {
        Router::new()
            .route("/api/2/auth/{user}/{verb}", post(auth))
            .route("/api/2/devices/{file}", get(devices))
            .route(
                "/api/2/devices/{user}/{file}",
                post(note_device).put(note_device),
            )
            .route("/api/2/subscriptions/{user}/{file}", any(subscriptions))
            .route(
                "/api/2/episodes/{file}",
                get(episodes).post(record_episodes),
            )
            .route("/api/2/updates/{user}/{file}", get(updates))
            .route("/subscriptions/{file}", get(all_subscriptions))
            .route("/subscriptions/{user}/{file}", get(list).put(put_list))
            .with_state(ApiContext {
                app: app.clone(),
                has_origins,
            })
            .fallback(async || not_here("this part of the API is not served here"))
    };
    Router::new()
        .nest(ORIGINS_PATH, api(true))
        .merge(api(false))
}

fn not_here(text: &str) -> Response {
    problem(StatusCode::NOT_FOUND, text)
}

fn wrong(text: &str) -> Response {
    problem(StatusCode::BAD_REQUEST, text)
}

fn failed(failure: &TransferFailure) -> Response {
    problem(StatusCode::INTERNAL_SERVER_ERROR, &failure.text)
}

/// The name before the ending of a path's last part, and the ending.
fn split(file: &str) -> (&str, &str) {
    file.rsplit_once('.').unwrap_or((file, ""))
}

/// Refuses requests of another user than the one there is.
fn check_user(user: &str) -> Result<(), Box<Response>> {
    match user == USER {
        true => Ok(()),
        false => Err(Box::new(not_here(&format!(
            "there is no user here but `{USER}`"
        )))),
    }
}

/// The device of a path, as gpodder.net allows names.
fn device_of(user: &str, file: &str, ending: &str) -> Result<String, Box<Response>> {
    check_user(user)?;
    let (device, found) = split(file);
    if found != ending {
        return Err(Box::new(not_here(&format!("only {ending} is served here"))));
    }
    let is_letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    match !device.is_empty() && device.len() <= DEVICE_BYTES_MAX && device.chars().all(is_letter) {
        true => Ok(device.to_owned()),
        false => Err(Box::new(wrong(
            "a device's name has letters, digits, `_`, `.` and `-`",
        ))),
    }
}

/// The query of a request for changes: since which number, and of which podcast.
#[derive(Deserialize)]
struct ChangesQuery {
    #[serde(default)]
    since: Option<String>,
    #[serde(default)]
    podcast: Option<String>,
}

impl ChangesQuery {
    fn number(&self) -> i64 {
        let text = self.since.as_deref().unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    }
}

fn parsed(body: &[u8]) -> Result<Value, Box<Response>> {
    serde_json::from_slice(body)
        .map_err(|error| Box::new(wrong(&format!("this is no JSON: {error}"))))
}

fn json_answer(value: &Value) -> Response {
    ([(CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

async fn auth(
    State(context): State<ApiContext>,
    Path((user, verb)): Path<(String, String)>,
    headers: HeaderMap,
) -> Response {
    if let Err(answer) = check_user(&user) {
        return *answer;
    }
    let sessions = &context.app.sessions;
    match verb.as_str() {
        // Whoever shows the password gets a session with the answer.
        "login.json" => json_answer(&json!({})),
        "logout.json" => {
            sessions.end(&headers);
            json_answer(&json!({}))
        }
        _ => not_here("there is login.json and logout.json"),
    }
}

async fn devices(State(context): State<ApiContext>, Path(file): Path<String>) -> Response {
    if let Err(answer) = check_user(split(&file).0) {
        return *answer;
    }
    let podcasts = &context.app.agent.podcasts;
    let found = podcasts.with(|library| {
        let channels = library.channels()?.len();
        Ok((library.app_devices()?, channels))
    });
    match found.await {
        Ok((devices, channels)) => {
            let device = |device: AppDevice| {
                json!({
                    "id": device.id, "caption": device.caption, "type": device.kind,
                    "subscriptions": channels,
                })
            };
            json_answer(&devices.into_iter().map(device).collect())
        }
        Err(failure) => failed(&failure),
    }
}

impl ApiContext {
    /// Notes a device, what is known of it, and that it was here.
    async fn see(&self, id: &str, about: &Value) -> Result<(), TransferFailure> {
        let text = |name: &str| {
            let text = about.get(name).and_then(Value::as_str).unwrap_or_default();
            text.chars().take(DEVICE_BYTES_MAX).collect::<String>()
        };
        let device = AppDevice {
            id: id.to_owned(),
            caption: text("caption"),
            kind: text("type"),
        };
        let now = Timestamp::now();
        let podcasts = &self.app.agent.podcasts;
        let noted = podcasts.with(move |library| library.note_app_device(&device, now));
        noted.await
    }

    /// The address of a feed at its origin, whatever an app sent.
    async fn feed_at_origin(&self, text: &str) -> Result<Option<Url>, TransferFailure> {
        let Some(address) = web_address(text) else {
            return Ok(None);
        };
        match self.app.addresses.read(&address) {
            Some(AppLink::Feed(channel)) => {
                let podcasts = &self.app.agent.podcasts;
                let found = podcasts.with(move |library| library.channel(channel));
                Ok(found.await?.map(|channel| channel.summary.url))
            }
            Some(AppLink::Episode(_)) => Ok(None),
            None => Ok(Some(address)),
        }
    }

    /// The address of a feed as this path shows it.
    fn shown(&self, feed: &ChangedFeed) -> Url {
        match self.has_origins {
            true => feed.url.clone(),
            false => self.app.addresses.feed(feed.channel),
        }
    }

    /// What changed since an earlier answer, under the addresses of this path.
    async fn changes(&self, since: i64) -> Result<AppChanges, TransferFailure> {
        let has_origins = self.has_origins;
        let podcasts = &self.app.agent.podcasts;
        let changes = podcasts.with(move |library| {
            let mut changes = library.subscription_changes(since, None)?;
            if !has_origins {
                // The link of a feed that moved is the same as before.
                let channels = library.channels()?;
                let ids: HashSet<_> = channels.iter().map(|channel| channel.id).collect();
                changes.remove.retain(|feed| !ids.contains(&feed.channel));
            }
            Ok(changes)
        });
        let changes = changes.await?;
        let shown = |feeds: &[ChangedFeed]| feeds.iter().map(|feed| self.shown(feed)).collect();
        Ok(AppChanges {
            add: shown(&changes.add),
            remove: shown(&changes.remove),
            timestamp: changes.timestamp,
        })
    }

    /// Subscribes to and unsubscribes from feeds. Returns the answer to the app.
    async fn change(
        &self,
        device: &str,
        add: &[&str],
        remove: &[&str],
    ) -> Result<Response, TransferFailure> {
        if add.len() + remove.len() > OPML_FEEDS_MAX {
            let text = format!("a request changes at most {OPML_FEEDS_MAX} subscriptions");
            return Ok(wrong(&text));
        }
        let removed: HashSet<&str> = remove.iter().copied().collect();
        if add.iter().any(|address| removed.contains(address)) {
            return Ok(wrong("a feed is both added and removed"));
        }
        let agent = &self.app.agent;
        let (mut added, mut updated) = (Vec::new(), Vec::new());
        for text in add {
            match self.feed_at_origin(text).await? {
                Some(feed) => added.push(((*text).to_owned(), feed)),
                // As gpodder.net says that an address is not accepted.
                None => updated.push(json!([text, ""])),
            }
        }
        let subscribing: Vec<Url> = added.iter().map(|(_, feed)| feed.clone()).collect();
        let now = Timestamp::now();
        let known = agent.podcasts.with(move |library| {
            let subscribe = |feed: Url| {
                let channel = match library.channel_of_feed(&feed)? {
                    Some(channel) => channel,
                    None => library.subscribe(&feed, now)?,
                };
                let channel = library.channel(channel)?;
                Ok(channel.map(|channel| ChangedFeed {
                    url: channel.summary.url,
                    channel: channel.summary.id,
                }))
            };
            let subscribed = subscribing.into_iter().map(subscribe);
            subscribed.collect::<Result<Vec<_>, LibraryError>>()
        });
        let known = known.await?;
        tracing::debug!(
            device,
            added = known.len(),
            removed = remove.len(),
            "an app synced"
        );
        let stays: HashSet<_> = known.iter().flatten().map(|feed| feed.channel).collect();
        for text in remove {
            let Some(feed) = self.feed_at_origin(text).await? else {
                continue;
            };
            let found = agent.podcasts.with(move |library| {
                // One that moved is still subscribed to, under its other address.
                if library.has_subscription_ended(&feed)? {
                    return Ok(None);
                }
                library.channel_of_feed(&feed)
            });
            let found = found.await?;
            if let Some(channel) = found.filter(|channel| !stays.contains(channel)) {
                agent.remove_podcast(channel).await?;
            }
        }
        agent.podcasts.changed();
        for ((text, _), feed) in added.iter().zip(&known) {
            let shown = feed.as_ref().map(|feed| self.shown(feed));
            if let Some(shown) = shown.filter(|shown| text != shown.as_str()) {
                updated.push(json!([text, shown]));
            }
        }
        let timestamp = self.changes(i64::MAX - 1).await?.timestamp;
        Ok(json_answer(
            &json!({"timestamp": timestamp, "update_urls": updated}),
        ))
    }
}

async fn note_device(
    State(context): State<ApiContext>,
    Path((user, file)): Path<(String, String)>,
    body: Bytes,
) -> Response {
    let noted = async {
        let device = device_of(&user, &file, "json")?;
        let about = match body.is_empty() {
            true => Value::Null,
            false => parsed(&body)?,
        };
        context
            .see(&device, &about)
            .await
            .map_err(|f| Box::new(failed(&f)))?;
        Ok::<_, Box<Response>>(json_answer(&json!({})))
    };
    noted.await.unwrap_or_else(|answer| *answer)
}

async fn subscriptions(
    State(context): State<ApiContext>,
    Path((user, file)): Path<(String, String)>,
    Query(since): Query<ChangesQuery>,
    method: Method,
    body: Bytes,
) -> Response {
    let device = match device_of(&user, &file, "json") {
        Ok(device) => device,
        Err(answer) => return *answer,
    };
    if let Err(failure) = context.see(&device, &Value::Null).await {
        return failed(&failure);
    }
    let answered = match method {
        Method::GET => context.changes(since.number()).await.map(|changes| {
            json_answer(&json!({
                "add": changes.add, "remove": changes.remove, "timestamp": changes.timestamp,
            }))
        }),
        Method::POST => {
            let changes = match parsed(&body) {
                Ok(changes) => changes,
                Err(answer) => return *answer,
            };
            let (add, remove) = (read_feeds(&changes["add"]), read_feeds(&changes["remove"]));
            context.change(&device, &add, &remove).await
        }
        Method::PUT => return put(&context, &device, "json", &body).await,
        _ => {
            return problem(
                StatusCode::METHOD_NOT_ALLOWED,
                "GET, POST and PUT are served here",
            );
        }
    };
    answered.unwrap_or_else(|failure| failed(&failure))
}

/// Adds the feeds of a whole list; it removes none.
async fn put(context: &ApiContext, device: &str, ending: &str, body: &[u8]) -> Response {
    let feeds: Vec<String> = match ending {
        "opml" | "xml" => match read_opml(body) {
            Ok(list) => list.feeds.into_iter().map(|feed| feed.url.into()).collect(),
            Err(error) => return wrong(&error.to_string()),
        },
        "txt" => {
            let text = String::from_utf8_lossy(body);
            let lines = text.lines().map(str::trim);
            lines
                .filter(|line| !line.is_empty())
                .map(str::to_owned)
                .collect()
        }
        _ => match parsed(body) {
            Ok(list) => read_feeds(&list).into_iter().map(str::to_owned).collect(),
            Err(answer) => return *answer,
        },
    };
    let feeds: Vec<&str> = feeds.iter().map(String::as_str).collect();
    match context.change(device, &feeds, &[]).await {
        Ok(answer) if answer.status() == StatusCode::OK => StatusCode::OK.into_response(),
        Ok(refusal) => refusal,
        Err(failure) => failed(&failure),
    }
}

async fn put_list(
    State(context): State<ApiContext>,
    Path((user, file)): Path<(String, String)>,
    body: Bytes,
) -> Response {
    let ending = split(&file).1.to_owned();
    match device_of(&user, &file, &ending) {
        Ok(device) => put(&context, &device, &ending, &body).await,
        Err(answer) => *answer,
    }
}

async fn list(
    State(context): State<ApiContext>,
    Path((user, file)): Path<(String, String)>,
) -> Response {
    match check_user(&user) {
        Ok(()) => list_in(&context, split(&file).1, false).await,
        Err(answer) => *answer,
    }
}

async fn all_subscriptions(
    State(context): State<ApiContext>,
    Path(file): Path<String>,
) -> Response {
    let (user, ending) = split(&file);
    match check_user(user) {
        Ok(()) => list_in(&context, ending, true).await,
        Err(answer) => *answer,
    }
}

/// All subscriptions in a format. `has_titles`: JSON has more than addresses.
async fn list_in(context: &ApiContext, ending: &str, has_titles: bool) -> Response {
    let channels = match context
        .app
        .agent
        .podcasts
        .with(|library| library.channels())
        .await
    {
        Ok(channels) => channels,
        Err(failure) => return failed(&failure),
    };
    let address = |channel: &cedos_readycast::ChannelSummary| match context.has_origins {
        true => channel.url.clone(),
        false => context.app.addresses.feed(channel.id),
    };
    match ending {
        "json" if !has_titles => json_answer(
            &channels
                .iter()
                .map(|channel| json!(address(channel)))
                .collect(),
        ),
        "json" => {
            let entry = |channel| {
                let url = address(channel);
                json!({"url": url, "feed": url, "title": channel.title, "author": channel.author})
            };
            json_answer(&channels.iter().map(entry).collect())
        }
        "txt" => {
            let lines: String = channels
                .iter()
                .map(|c| format!("{}\n", address(c)))
                .collect();
            ([(CONTENT_TYPE, "text/plain; charset=utf-8")], lines).into_response()
        }
        "opml" | "xml" => {
            let text = write_opml(channels.iter(), address);
            ([(CONTENT_TYPE, "text/x-opml; charset=utf-8")], text).into_response()
        }
        _ => not_here("json, opml and txt are served here"),
    }
}

async fn episodes(
    State(context): State<ApiContext>,
    Path(file): Path<String>,
    Query(query): Query<ChangesQuery>,
) -> Response {
    if let Err(answer) = check_user(split(&file).0) {
        return *answer;
    }
    match context.actions(&query).await {
        Ok(value) => json_answer(&value),
        Err(failure) => failed(&failure),
    }
}

impl ApiContext {
    async fn actions(&self, query: &ChangesQuery) -> Result<Value, TransferFailure> {
        let since = query.number();
        let of = match &query.podcast {
            Some(text) => Some(self.feed_at_origin(text).await?),
            None => None,
        };
        let podcasts = &self.app.agent.podcasts;
        let (actions, timestamp, numbers) = podcasts
            .with(move |library| {
                let (mut actions, timestamp) = library.episode_actions(since, None)?;
                if let Some(podcast) = of {
                    actions.retain(|action| Some(&action.podcast) == podcast.as_ref());
                }
                let numbers = library.episode_numbers(&actions)?;
                Ok((actions, timestamp, numbers))
            })
            .await?;
        let addresses = &self.app.addresses;
        let written = actions.iter().zip(numbers).map(|(action, subject)| {
            let (podcast, address) = match self.has_origins {
                true => (None, None),
                false => (
                    subject.channel.map(|channel| addresses.feed(channel)),
                    subject
                        .episode
                        .map(|episode| addresses.episode(episode, &action.episode)),
                ),
            };
            let podcast = podcast.as_ref().unwrap_or(&action.podcast);
            let address = address.as_ref().unwrap_or(&action.episode);
            action_json(action, podcast, address, USER)
        });
        let written: Vec<Value> = written.collect();
        Ok(json!({"actions": written, "timestamp": timestamp}))
    }

    /// The action under the addresses at the origin; none if it is on something that is not here any more.
    async fn action_at_origin(
        &self,
        mut action: SyncAction,
    ) -> Result<Option<SyncAction>, TransferFailure> {
        let podcasts = &self.app.agent.podcasts;
        if self.app.addresses.read(&action.podcast).is_some() {
            match self.feed_at_origin(action.podcast.as_str()).await? {
                Some(feed) => action.podcast = feed,
                None => return Ok(None),
            }
        }
        if let Some(link) = self.app.addresses.read(&action.episode) {
            let AppLink::Episode(id) = link else {
                return Ok(None);
            };
            match podcasts.with(move |library| library.episode(id)).await? {
                Some(episode) => action.episode = episode.enclosure,
                None => return Ok(None),
            }
        }
        Ok(Some(action))
    }
}

async fn record_episodes(
    State(context): State<ApiContext>,
    Path(file): Path<String>,
    body: Bytes,
) -> Response {
    let recorded = async {
        check_user(split(&file).0)?;
        let list = parsed(&body)?;
        let Some(list) = list.as_array() else {
            return Err(Box::new(wrong("this is no list of actions")));
        };
        if list.len() > ACTIONS_MAX {
            let text = format!("a request has at most {ACTIONS_MAX} actions");
            return Err(Box::new(wrong(&text)));
        }
        let now = Timestamp::now();
        let error = |failure: TransferFailure| Box::new(failed(&failure));
        let mut actions = Vec::new();
        for action in list.iter().filter_map(|value| read_action(value, now)) {
            actions.extend(context.action_at_origin(action).await.map_err(error)?);
        }
        let podcasts = &context.app.agent.podcasts;
        let timestamp = podcasts.with(move |library| {
            let device = actions.first().map(|action| action.device.clone());
            let source = format!("app:{}", device.unwrap_or_default());
            library.record_episode_actions(&actions, &source, now)?;
            Ok(library.episode_actions(i64::MAX - 1, None)?.1)
        });
        let timestamp = timestamp.await.map_err(error)?;
        podcasts.changed();
        Ok(json_answer(
            &json!({"timestamp": timestamp, "update_urls": []}),
        ))
    };
    recorded.await.unwrap_or_else(|answer| *answer)
}

/// What changed for a device: its subscriptions. Episodes it finds in their feeds.
async fn updates(
    State(context): State<ApiContext>,
    Path((user, file)): Path<(String, String)>,
    Query(since): Query<ChangesQuery>,
) -> Response {
    if let Err(answer) = device_of(&user, &file, "json") {
        return *answer;
    }
    match context.changes(since.number()).await {
        Ok(changes) => {
            let entry = |url| json!({"url": url, "title": url, "description": ""});
            json_answer(&json!({
                "add": changes.add.iter().map(entry).collect::<Vec<_>>(), "remove": changes.remove, "updates": [],
                "timestamp": changes.timestamp,
            }))
        }
        Err(failure) => failed(&failure),
    }
}
