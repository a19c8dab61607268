//! Exchange of subscriptions and positions with a server that speaks the API of gpodder.net.
//!
//! ```text
//!  cedos cast sync URL ─▶ account (library) ─▶ every hour, or by hand:
//!      log in ─▶ receive subscriptions ─▶ receive actions ─▶ send subscriptions ─▶ send actions
//! ```
//!
//! What was received is in the library before its number is; what was sent is noted when the server has it. So an
//! exchange that breaks off anywhere is taken up again, and nothing is lost or done twice. A subscription ends here only
//! if the server says that it was removed since the last exchange, and was not made anew here meanwhile.

mod exchange;
mod server_request;

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use cedos_readycast::{Library, SyncAccount, SyncProgress};
use jiff::Timestamp;
use serde::Serialize;
use serde_json::{Value, json};
use url::Url;

use self::exchange::SyncExchange;
use super::super::state::Agent;
use super::apps::open_port::AppPort;
use crate::fetch::outcome::TransferFailure;

/// The longest time until the account is looked at again, for clocks that were set and machines that slept.
const LOOK_MAX: Duration = Duration::from_secs(15 * 60); // a guess

/// The path of Nextcloud's app at its server.
const NEXTCLOUD_PATH: &str = "index.php/apps/gpoddersync";

/// Time until an exchange for which no network was up is tried again, if no link comes sooner.
const RETRY_MIN: Duration = Duration::from_secs(60); // a guess

/// Why subscriptions and positions are exchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SyncCause {
    /// The interval since the last exchange has passed.
    Due,
    /// A person wants it.
    ByHand {
        /// Whether the server may end many subscriptions.
        accept_removals: bool,
    },
}

/// What an exchange did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(super) struct SyncReport {
    /// Feeds that were subscribed to here.
    pub(super) subscribed: usize,
    /// Titles of podcasts whose subscription ended here, because it ended elsewhere.
    pub(super) unsubscribed: Vec<String>,
    /// Actions that were received.
    pub(super) actions_received: usize,
    /// Actions that changed an episode here.
    pub(super) actions_applied: usize,
    /// Changes of subscriptions that were sent.
    pub(super) subscriptions_sent: usize,
    /// Actions that were sent.
    pub(super) actions_sent: usize,
    /// What was left out, each with the reason.
    pub(super) skipped: Vec<String>,
}

impl Agent {
    /// Exchanges with the server when it is due, until the agent ends.
    pub(in super::super) async fn keep_synced(self: Arc<Agent>) {
        let service = &self.podcasts;
        let mut links = self.link_view.links();
        while !self.is_ending() {
            let account = match service.exists() {
                true => match service.with(Library::sync_account).await {
                    Ok(account) => account,
                    Err(failure) => {
                        tracing::warn!(error = failure.text, "podcasts are not synced");
                        tokio::time::sleep(LOOK_MAX).await;
                        continue;
                    }
                },
                false => None,
            };
            let Some(account) = account else {
                service.sync_changed.notified().await;
                continue;
            };
            let left = account.next_sync_at.duration_since(Timestamp::now());
            let mut wait = Duration::try_from(left).unwrap_or_default().min(LOOK_MAX);
            if wait.is_zero() {
                links.borrow_and_update();
                match self.exchange(SyncCause::Due).await {
                    Ok(_) => continue,
                    Err(failure) => {
                        tracing::warn!(error = failure.text, "podcasts are not synced");
                        // Without a network it stays due, and a new link is the time for it.
                        wait = RETRY_MIN;
                    }
                }
            }
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = service.sync_changed.notified() => {}
                changed = links.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Sets up the account at a server, and exchanges at once. User and password are in the address.
    ///
    /// # Errors
    /// There is no such server, or it does not let this device in.
    pub(super) async fn set_up_sync(
        self: &Arc<Agent>,
        address: &Url,
    ) -> Result<Value, TransferFailure> {
        let account = account_of(address)?;
        if AppPort::is_at(&account.server) {
            let text = "that is this agent's own server, for other apps; name the server that you sync with elsewhere";
            return Err(TransferFailure::usage(text));
        }
        let account = SyncExchange::find(self, account).await?;
        let service = &self.podcasts;
        let stored = account.clone();
        {
            let _syncing = service.syncing.lock().await;
            service
                .with(move |library| library.set_sync_account(&stored))
                .await?;
        }
        service.sync_changed.notify_one();
        self.exchange(SyncCause::ByHand {
            accept_removals: false,
        })
        .await
    }

    /// Exchanges with the server now.
    ///
    /// # Errors
    /// No account was set up, or why the exchange failed, in a sentence.
    pub(super) async fn exchange(
        self: &Arc<Agent>,
        cause: SyncCause,
    ) -> Result<Value, TransferFailure> {
        let service = &self.podcasts;
        let _syncing = service.syncing.lock().await;
        let account = service.with(Library::sync_account).await?;
        let account = account.ok_or_else(|| {
            TransferFailure::usage(
                "no server is set up; `cedos cast sync URL --user NAME` names one that speaks the gpodder API",
            )
        })?;
        let accept_removals = match cause {
            // Another exchange ended while this one waited for the lock.
            SyncCause::Due if account.next_sync_at > Timestamp::now() => return Ok(Value::Null),
            SyncCause::Due => false,
            SyncCause::ByHand { accept_removals } => accept_removals,
        };
        let mut exchange = SyncExchange::new(self, account, accept_removals);
        let ended = exchange.run().await;
        let problem = ended.as_ref().err().map(|failure| failure.text.clone());
        let is_offline = exchange.is_offline();
        if !is_offline {
            let now = Timestamp::now();
            let noted = service.with(move |library| library.note_sync_end(problem.as_deref(), now));
            noted.await?;
        }
        service.changed();
        ended?;
        let account = service.with(Library::sync_account).await?;
        Ok(json!({"account": account, "report": exchange.report()}))
    }

    /// The account as it is set up.
    ///
    /// # Errors
    /// The library cannot be read.
    pub(super) async fn sync_status(&self) -> Result<Value, TransferFailure> {
        let account = self.podcasts.with(Library::sync_account).await?;
        Ok(json!({"account": account}))
    }

    /// Forgets the account; subscriptions and positions stay here and at the server.
    ///
    /// # Errors
    /// The library cannot be written.
    pub(super) async fn end_sync(&self) -> Result<Value, TransferFailure> {
        let service = &self.podcasts;
        let _syncing = service.syncing.lock().await;
        let removed = service.with(Library::remove_sync_account).await?;
        service.sync_changed.notify_one();
        Ok(json!({"account": null, "was_set_up": removed}))
    }
}

/// The account of an address with user and password.
fn account_of(address: &Url) -> Result<SyncAccount, TransferFailure> {
    if !matches!(address.scheme(), "http" | "https") || address.host().is_none() {
        let text = format!("{}: is no server; use https: or http:", address.scheme());
        return Err(TransferFailure::usage(text));
    }
    let decoded = |text: &str| {
        let decoded = percent_encoding::percent_decode_str(text).decode_utf8();
        decoded.map(|text| text.into_owned())
    };
    let user = decoded(address.username());
    let password = decoded(address.password().unwrap_or_default());
    let (Ok(user), Ok(password)) = (user, password) else {
        let text = "the user name or password is not UTF-8";
        return Err(TransferFailure::usage(text));
    };
    if user.is_empty() {
        let text = "the server wants to know who you are; say --user NAME";
        return Err(TransferFailure::usage(text));
    }
    let pair = format!("{user}:{password}");
    let pair = base64::engine::general_purpose::STANDARD.encode(pair);
    let mut server = address.clone();
    // These fail for addresses without a host only.
    let _ = server.set_username("");
    let _ = server.set_password(None);
    server.set_query(None);
    server.set_fragment(None);
    let path = server.path().trim_end_matches('/');
    let is_nextcloud = path.ends_with(NEXTCLOUD_PATH);
    let path = path.strip_suffix(NEXTCLOUD_PATH).unwrap_or(path);
    let path = format!("{}/", path.trim_end_matches('/'));
    server.set_path(&path);
    Ok(SyncAccount {
        server,
        user,
        authorization: format!("Basic {pair}"),
        device: device_name(),
        // Who names its path wants it; otherwise the server is asked.
        is_nextcloud,
        synced_at: None,
        next_sync_at: Timestamp::now(),
        problem: None,
        progress: SyncProgress::default(),
    })
}

/// The name of this device at the server: that of the machine, in the letters that servers allow.
fn device_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let letters = name
        .chars()
        .filter(|c| c.is_ascii_alphanumeric() || *c == '-');
    format!("cedos-{}", letters.take(40).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_account_is_what_the_address_says() {
        let of = |text: &str| account_of(&text.parse().expect("an address"));
        let account = of("https://m%40e:p%3Aw@sync.example/base?x#y").expect("an account");
        assert_eq!(account.server.as_str(), "https://sync.example/base/");
        assert_eq!(account.user, "m@e");
        // base64 of `m@e:p:w`.
        assert_eq!(account.authorization, "Basic bUBlOnA6dw==");
        let cloud = of("https://me:x@cloud.example/index.php/apps/gpoddersync/");
        assert_eq!(
            cloud.expect("an account").server.as_str(),
            "https://cloud.example/"
        );
        let device = device_name();
        assert!(device.len() <= 64 && device.is_ascii(), "{device}");
        assert!(of("https://sync.example/").is_err());
        assert!(of("ftp://me:x@sync.example/").is_err());
    }
}
