//! One exchange with a server: what is received, what is done with it here, and what is sent.
//!
//! | | gpodder.net, oPodSync, gpodder2go … | Nextcloud's GPodder Sync |
//! |---|---|---|
//! | subscriptions | `api/2/subscriptions/USER/DEVICE.json` | `index.php/apps/gpoddersync/subscriptions` |
//! | to change them | `POST` to the same | `…/subscription_change/create` |
//! | actions | `api/2/episodes/USER.json` | `…/episode_action` |
//! | to send them | `POST` to the same | `…/episode_action/create` |

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;

use cedos_readycast::{ChannelSummary, LibraryError, OPML_FEEDS_MAX, SyncAccount, SyncAction};
use http::{Method, StatusCode};
use jiff::Timestamp;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Value, json};
use url::{Host, Url};

use super::super::super::state::Agent;
use super::super::apps::open_port::AppPort;
use super::super::gpodder_messages::{action_json, read_action, read_feeds, web_address};
use super::server_request::{ServerAnswer, ServerFault};
use super::{NEXTCLOUD_PATH, SyncReport};
use crate::fetch::exchange::host;
use crate::fetch::outcome::TransferFailure;

/// The maximum number of actions of a request: what servers take within a script's time.
const ACTIONS_SENT_MAX: usize = 500; // a guess

/// The maximum number of feeds of a request.
const FEEDS_SENT_MAX: usize = 500; // a guess

/// The maximum number of subscriptions that end in one exchange without a person's consent, if they
/// are more than half of all.
const REMOVALS_MAX: usize = 5; // a guess: a person who tidies up

/// Seconds before the last exchange of which actions are received again. Some servers (oPodSync) count by the time at
/// which an action happened: one that another device sent late would be missed.
const OVERLAP_S: i64 = 24 * 3_600; // a guess

/// Entries that were left out and are told.
const SKIPPED_MAX: usize = 50; // a guess

/// An exchange while it runs.
pub(super) struct SyncExchange<'a> {
    agent: &'a Arc<Agent>,
    account: SyncAccount,
    accept_removals: bool,
    cookie: Option<String>,
    report: SyncReport,
    is_offline: bool,
}

/// What a request is about.
#[derive(Clone, Copy)]
enum SyncPath {
    LogIn,
    Device,
    /// The subscriptions of all devices.
    AllSubscriptions,
    Subscriptions,
    ChangeSubscriptions,
    Actions,
    SendActions,
}

fn segment(text: &str) -> String {
    // A device's name has letters that need no escape, and some servers would not undo it.
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    match text.chars().all(is_plain) {
        true => text.to_owned(),
        false => utf8_percent_encode(text, NON_ALPHANUMERIC).to_string(),
    }
}

impl<'a> SyncExchange<'a> {
    /// An exchange that has not begun.
    pub(super) fn new(
        agent: &'a Arc<Agent>,
        account: SyncAccount,
        accept_removals: bool,
    ) -> SyncExchange<'a> {
        SyncExchange {
            agent,
            account,
            accept_removals,
            cookie: None,
            report: SyncReport::default(),
            is_offline: false,
        }
    }

    /// Finds out which API a server speaks, and whether it lets this device in.
    ///
    /// # Errors
    /// It speaks none, refuses, or is not reached.
    pub(super) async fn find(
        agent: &Arc<Agent>,
        account: SyncAccount,
    ) -> Result<SyncAccount, TransferFailure> {
        let mut exchange = SyncExchange::new(agent, account, false);
        if !exchange.account.is_nextcloud {
            let answer = exchange
                .ask(SyncPath::LogIn, Method::POST, None, None)
                .await?;
            if answer.status.is_success() {
                return Ok(exchange.account);
            }
            if answer.status == StatusCode::UNAUTHORIZED {
                return Err(exchange.refused());
            }
        }
        exchange.account.is_nextcloud = true;
        let answer = exchange
            .ask(SyncPath::Subscriptions, Method::GET, Some(0), None)
            .await?;
        match answer.status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(exchange.refused()),
            status if status.is_success() && answer.json().is_some() => Ok(exchange.account),
            status => {
                let server = host(&exchange.account.server);
                Err(TransferFailure::error(format!(
                    "{server} speaks neither the gpodder API nor that of Nextcloud's GPodder Sync (it answers {status}); \
                     check the address"
                )))
            }
        }
    }

    /// What was done until now.
    pub(super) fn report(&self) -> &SyncReport {
        &self.report
    }

    /// Whether the exchange failed because no network was up: nobody is to blame.
    pub(super) fn is_offline(&self) -> bool {
        self.is_offline
    }

    fn refused(&self) -> TransferFailure {
        TransferFailure::error(format!(
            "{} refuses the user name or the password of {}; `cedos cast sync {} --user NAME` sets them",
            host(&self.account.server),
            self.account.user,
            self.account.server,
        ))
    }

    fn url(&self, path: SyncPath, since: Option<i64>) -> Url {
        let (user, device) = (segment(&self.account.user), segment(&self.account.device));
        let path = match (path, self.account.is_nextcloud) {
            (SyncPath::LogIn, _) => format!("api/2/auth/{user}/login.json"),
            (SyncPath::Device, _) => format!("api/2/devices/{user}/{device}.json"),
            (SyncPath::AllSubscriptions, _) => format!("subscriptions/{user}.json"),
            (SyncPath::Subscriptions | SyncPath::ChangeSubscriptions, false) => {
                format!("api/2/subscriptions/{user}/{device}.json")
            }
            (SyncPath::Actions | SyncPath::SendActions, false) => {
                format!("api/2/episodes/{user}.json")
            }
            (SyncPath::Subscriptions, true) => format!("{NEXTCLOUD_PATH}/subscriptions"),
            (SyncPath::ChangeSubscriptions, true) => {
                format!("{NEXTCLOUD_PATH}/subscription_change/create")
            }
            (SyncPath::Actions, true) => format!("{NEXTCLOUD_PATH}/episode_action"),
            (SyncPath::SendActions, true) => format!("{NEXTCLOUD_PATH}/episode_action/create"),
        };
        let mut url = self.account.server.clone();
        url.set_path(&format!("{}{path}", self.account.server.path()));
        if let Some(since) = since {
            url.set_query(Some(&format!("since={since}")));
        }
        url
    }

    async fn ask(
        &mut self,
        path: SyncPath,
        method: Method,
        since: Option<i64>,
        body: Option<&Value>,
    ) -> Result<ServerAnswer, TransferFailure> {
        let url = self.url(path, since);
        let cookie = self.cookie.as_deref();
        let answer = self
            .agent
            .ask_server(&self.account, cookie, method, &url, body);
        match answer.await {
            Ok(answer) => {
                if let Some(cookie) = answer.cookie() {
                    self.cookie = Some(cookie.to_owned());
                }
                Ok(answer)
            }
            Err(ServerFault::NoNetwork) => {
                self.is_offline = true;
                let text = "no network is up that may be used; podcasts are synced when one is";
                Err(TransferFailure::error(text))
            }
            Err(ServerFault::Failed(text)) => Err(TransferFailure::error(text)),
        }
    }

    /// The JSON that a request brings.
    async fn json(
        &mut self,
        path: SyncPath,
        method: Method,
        since: Option<i64>,
        body: Option<&Value>,
    ) -> Result<Value, TransferFailure> {
        let answer = self.ask(path, method, since, body).await?;
        let server = host(&self.account.server);
        match answer.status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(self.refused()),
            status if !status.is_success() => Err(TransferFailure::error(format!(
                "{server} cannot sync podcasts now: it answers {status}"
            ))),
            _ => answer.json().ok_or_else(|| {
                TransferFailure::error(format!(
                    "{server} does not answer in the gpodder API; check the address of the server"
                ))
            }),
        }
    }

    fn skip(&mut self, what: String) {
        if self.report.skipped.len() < SKIPPED_MAX {
            self.report.skipped.push(what);
        }
    }

    /// Exchanges everything.
    ///
    /// # Errors
    /// Why it broke off, in a sentence; what was done until then stays done.
    pub(super) async fn run(&mut self) -> Result<(), TransferFailure> {
        if !self.account.is_nextcloud {
            let answer = self.ask(SyncPath::LogIn, Method::POST, None, None).await?;
            if answer.status == StatusCode::UNAUTHORIZED {
                return Err(self.refused());
            }
            let caption =
                json!({"caption": format!("Cedos ({})", self.account.device), "type": "laptop"});
            // A server that keeps no devices refuses, and needs none.
            self.ask(SyncPath::Device, Method::POST, None, Some(&caption))
                .await?;
        }
        self.receive_subscriptions().await?;
        self.receive_actions().await?;
        self.send().await
    }

    async fn save_progress(&self) -> Result<(), TransferFailure> {
        let progress = self.account.progress;
        let noted = self
            .agent
            .podcasts
            .with(move |library| library.note_sync_progress(progress));
        noted.await
    }

    /// The timestamp of an answer.
    fn timestamp(&self, answer: &Value) -> Result<i64, TransferFailure> {
        let number = &answer["timestamp"];
        let text = || number.as_str().and_then(|text| text.parse().ok());
        number.as_i64().or_else(text).ok_or_else(|| {
            TransferFailure::error(format!(
                "{} does not say how far its answer is; it is not a server of the gpodder API that can be used",
                host(&self.account.server)
            ))
        })
    }

    async fn receive_subscriptions(&mut self) -> Result<(), TransferFailure> {
        let since = self.account.progress.subscriptions_since;
        let is_first = since == 0;
        let changes = self
            .json(SyncPath::Subscriptions, Method::GET, Some(since), None)
            .await?;
        let timestamp = self.timestamp(&changes)?;
        let mut add: Vec<String> = owned(read_feeds(&changes["add"]));
        if is_first && !self.account.is_nextcloud {
            // A device that is new to gpodder.net has no subscriptions yet, but the user has.
            let all = self
                .ask(SyncPath::AllSubscriptions, Method::GET, None, None)
                .await?;
            if let Some(all) = all.json().filter(|_| all.status.is_success()) {
                add.extend(owned(read_feeds(&all)));
            }
        }
        let remove: Vec<String> = match is_first {
            // They ended before this device took part.
            true => Vec::new(),
            false => owned(read_feeds(&changes["remove"])),
        };
        let added: HashSet<&String> = add.iter().collect();
        let remove: Vec<String> = remove
            .into_iter()
            .filter(|address| !added.contains(address))
            .collect();
        self.remove(&remove).await?;
        self.add(&add).await?;
        self.account.progress.subscriptions_since = timestamp;
        self.save_progress().await
    }

    async fn add(&mut self, addresses: &[String]) -> Result<(), TransferFailure> {
        if addresses.len() > OPML_FEEDS_MAX {
            return Err(TransferFailure::error(format!(
                "{} sends {} subscriptions at once; {OPML_FEEDS_MAX} is the most",
                host(&self.account.server),
                addresses.len(),
            )));
        }
        let own = AppPort::saved_links();
        let mut feeds = Vec::new();
        for address in addresses {
            match web_address(address) {
                Some(feed) if is_foreign_loopback(&feed, &self.account.server) => {
                    self.skip(format!(
                        "{feed}: another device's own address means nothing here"
                    ));
                }
                // The agent's own feeds for other apps, which one of them has sent there.
                Some(feed) if own.as_ref().is_some_and(|own| own.read(&feed).is_some()) => {
                    self.skip(format!(
                        "{feed}: a link of this agent is no feed of its own"
                    ));
                }
                Some(feed) => feeds.push(feed),
                None => self.skip(format!("{address}: only http and https are read")),
            }
        }
        let (source, sent_until) = (self.account.source(), self.account.progress.sent_until);
        let now = Timestamp::now();
        let added = self.agent.podcasts.with(move |library| {
            let removed_here = library.subscription_changes(sent_until, Some(&source))?;
            let removed_here: HashSet<Url> = removed_here
                .remove
                .into_iter()
                .map(|feed| feed.url)
                .collect();
            // A person removed it here, and the server hears of it now.
            feeds.retain(|feed| !removed_here.contains(feed));
            library.subscribe_received(&feeds, &source, now)
        });
        self.report.subscribed = added.await?;
        Ok(())
    }

    async fn remove(&mut self, addresses: &[String]) -> Result<(), TransferFailure> {
        let sent_until = self.account.progress.sent_until;
        let feeds: Vec<Url> = addresses
            .iter()
            .filter_map(|text| web_address(text))
            .collect();
        let found = self.agent.podcasts.with(move |library| {
            let mut ended = Vec::new();
            for feed in feeds {
                if library.is_subscribed_since(&feed, sent_until)? {
                    continue;
                }
                if let Some(id) = library.channel_of_feed(&feed)?
                    && let Some(channel) = library.channel(id)?
                    // One that moved is still subscribed to, under its other address.
                    && !library.has_subscription_ended(&feed)?
                    && !ended.iter().any(|known: &ChannelSummary| known.id == id)
                {
                    ended.push(channel.summary);
                }
            }
            Ok::<_, LibraryError>((ended, library.channels()?.len()))
        });
        let (ended, all) = found.await?;
        if ended.len() > REMOVALS_MAX && ended.len() * 2 > all && !self.accept_removals {
            return Err(TransferFailure::error(format!(
                "{} says that {} of {all} subscriptions ended, which is more than people end at once; nothing was \
                 removed. If it is right, say `cedos cast sync --accept-removals`",
                host(&self.account.server),
                ended.len(),
            )));
        }
        let source = self.account.source();
        for channel in ended {
            // A device that has followed the feed to another address says the same: it is followed here first.
            if let Err(failure) = self.agent.refresh_channel(channel.id).await {
                tracing::debug!(error = failure.text, "a feed that ended is not read");
            }
            let feed = channel.url.clone();
            let has_moved = self
                .agent
                .podcasts
                .with(move |library| library.has_subscription_ended(&feed));
            if has_moved.await? {
                continue;
            }
            self.agent.remove_podcast(channel.id).await?;
            let (url, source) = (channel.url, source.clone());
            let marked = self
                .agent
                .podcasts
                .with(move |library| library.set_change_source(&[url], &source));
            marked.await?;
            self.report.unsubscribed.push(channel.title);
        }
        Ok(())
    }

    async fn receive_actions(&mut self) -> Result<(), TransferFailure> {
        let since = (self
            .account
            .progress
            .actions_since
            .saturating_sub(OVERLAP_S))
        .max(0);
        let answer = self
            .json(SyncPath::Actions, Method::GET, Some(since), None)
            .await?;
        let timestamp = self.timestamp(&answer)?;
        let now = Timestamp::now();
        let list = answer["actions"].as_array();
        let actions: Vec<SyncAction> = list
            .into_iter()
            .flatten()
            .filter_map(|value| read_action(value, now))
            .collect();
        self.report.actions_received = actions.len();
        let source = self.account.source();
        let recorded = self
            .agent
            .podcasts
            .with(move |library| library.record_episode_actions(&actions, &source, now));
        self.report.actions_applied = recorded.await?.applied;
        self.account.progress.actions_since = timestamp;
        self.save_progress().await
    }

    /// Sends what changed here since the last exchange.
    async fn send(&mut self) -> Result<(), TransferFailure> {
        let (source, sent_until) = (self.account.source(), self.account.progress.sent_until);
        let found = self.agent.podcasts.with(move |library| {
            let changes = library.subscription_changes(sent_until, Some(&source))?;
            let (mut actions, _) = library.episode_actions(sent_until, Some(&source))?;
            // Some servers subscribe to a podcast of which an action comes.
            let channels = library.channels()?;
            let feeds: HashSet<&Url> = channels.iter().map(|channel| &channel.url).collect();
            actions.retain(|action| feeds.contains(&action.podcast));
            Ok((changes, actions))
        });
        let (changes, actions) = found.await?;
        let add: Vec<&Url> = changes.add.iter().map(|feed| &feed.url).collect();
        let remove: Vec<&Url> = changes.remove.iter().map(|feed| &feed.url).collect();
        for feeds in add.chunks(FEEDS_SENT_MAX) {
            let body = json!({"add": feeds, "remove": []});
            self.send_subscriptions(&body).await?;
        }
        for feeds in remove.chunks(FEEDS_SENT_MAX) {
            let body = json!({"add": [], "remove": feeds});
            self.send_subscriptions(&body).await?;
        }
        self.report.subscriptions_sent = add.len() + remove.len();
        for part in actions.chunks(ACTIONS_SENT_MAX) {
            let device = &self.account.device;
            let body = part
                .iter()
                .map(|a| action_json(a, &a.podcast, &a.episode, device));
            let body: Value = body.collect();
            self.json_or_nothing(SyncPath::SendActions, &body).await?;
            self.report.actions_sent += part.len();
        }
        self.account.progress.sent_until = changes.timestamp;
        self.save_progress().await
    }

    /// Sends a list; an answer without JSON is as good as one with it.
    async fn json_or_nothing(
        &mut self,
        path: SyncPath,
        body: &Value,
    ) -> Result<Option<Value>, TransferFailure> {
        let answer = self.ask(path, Method::POST, None, Some(body)).await?;
        match answer.status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(self.refused()),
            status if status.is_success() => Ok(answer.json()),
            status => Err(TransferFailure::error(format!(
                "{} does not take what changed here: it answers {status}",
                host(&self.account.server)
            ))),
        }
    }

    async fn send_subscriptions(&mut self, body: &Value) -> Result<(), TransferFailure> {
        let answer = self
            .json_or_nothing(SyncPath::ChangeSubscriptions, body)
            .await?;
        let updated = answer
            .as_ref()
            .and_then(|answer| answer["update_urls"].as_array());
        let pairs = updated.into_iter().flatten().filter_map(|pair| {
            let old = web_address(pair.get(0)?.as_str()?)?;
            let new = web_address(pair.get(1)?.as_str()?)?;
            (old != new).then_some((old, new))
        });
        let pairs: Vec<(Url, Url)> = pairs.collect();
        // The server's name of a feed: what it says of that later is about this channel.
        let noted = self.agent.podcasts.with(move |library| {
            for (old, new) in &pairs {
                if library.channel_of_feed(new)?.is_none()
                    && let Some(channel) = library.channel_of_feed(old)?
                {
                    library.add_feed_alias(channel, new)?;
                }
            }
            Ok(())
        });
        noted.await
    }
}

fn owned(texts: Vec<&str>) -> Vec<String> {
    texts.into_iter().map(str::to_owned).collect()
}

fn is_own(ip: IpAddr) -> bool {
    ip.is_loopback() || ip.is_unspecified()
}

/// Whether an address is one of this machine alone.
fn is_this_machine(url: &Url) -> bool {
    match url.host() {
        Some(Host::Ipv4(ip)) => is_own(ip.into()),
        Some(Host::Ipv6(ip)) => is_own(IpAddr::V6(ip).to_canonical()),
        Some(Host::Domain(name)) => name == "localhost" || name.ends_with(".localhost"),
        None => true,
    }
}

/// Whether a server elsewhere names an address of this machine.
fn is_foreign_loopback(feed: &Url, server: &Url) -> bool {
    is_this_machine(feed) && !is_this_machine(server)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_elsewhere_cannot_add_addresses_of_this_machine() {
        let url = |text: &str| text.parse::<Url>().expect("an address");
        let (elsewhere, here) = (url("https://sync.example/"), url("http://127.0.0.1:8080/"));
        for feed in [
            "http://127.0.0.1/feed",
            "http://127.8.0.1:631/",
            "http://[::1]/feed",
            "http://0.0.0.0/",
            "http://[::ffff:127.0.0.1]/",
            "http://localhost:4433/",
            "http://a.localhost/",
        ] {
            assert!(is_foreign_loopback(&url(feed), &elsewhere), "{feed}");
            assert!(!is_foreign_loopback(&url(feed), &here), "{feed}");
        }
        for feed in ["https://a.example/feed", "http://192.168.1.2/feed"] {
            assert!(!is_foreign_loopback(&url(feed), &elsewhere), "{feed}");
        }
    }
}
