//! Refreshing feeds: one request each, conditional where the feed was read before.

use std::time::Duration;

use cedos_readycast::{ChannelId, FEED_BYTES_MAX, RefreshOutcome, RefreshReport, RefreshRequest};
use http::StatusCode;
use jiff::Timestamp;
use tokio::sync::OwnedSemaphorePermit;

use super::super::state::{Agent, lock};
use super::feed_fetch::{FeedAnswer, FeedFault, FeedFetch};
use super::service::PodcastService;
use crate::fetch::exchange::host;
use crate::fetch::outcome::TransferFailure;

/// A channel whose feed is being fetched, until this is dropped.
struct BusyChannel<'a>(&'a PodcastService, ChannelId);

impl<'a> BusyChannel<'a> {
    /// Marks the channel; none if another task fetches its feed.
    fn new(service: &'a PodcastService, channel: ChannelId) -> Option<BusyChannel<'a>> {
        let is_first = lock(&service.busy).insert(channel);
        is_first.then_some(BusyChannel(service, channel))
    }
}

impl Drop for BusyChannel<'_> {
    fn drop(&mut self) {
        lock(&self.0.busy).remove(&self.1);
        self.0.refreshed.notify_waiters();
    }
}

/// What an answer means for a feed.
pub(super) fn outcome_of(answer: FeedAnswer) -> RefreshOutcome {
    match answer.status {
        StatusCode::NOT_MODIFIED => RefreshOutcome::NotModified,
        StatusCode::OK => RefreshOutcome::Feed {
            etag: answer.etag(),
            last_modified: answer.last_modified(),
            moved_to: answer.moved_to,
            bytes: answer.body,
        },
        status => RefreshOutcome::Failed {
            reason: status_text(&answer, status),
            gone: status == StatusCode::GONE,
            retry_after: answer.retry_after(),
        },
    }
}

/// The sentence for a status that brings no feed.
pub(super) fn status_text(answer: &FeedAnswer, status: StatusCode) -> String {
    let host = host(&answer.url);
    match status {
        StatusCode::GONE => {
            format!("{host} says that the feed is gone for good; its episodes stay")
        }
        StatusCode::NOT_FOUND => format!("{host} has no feed at this address ({status})"),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => format!(
            "{host} wants another user name or password ({status}); `cedos cast add URL --user NAME` sets it"
        ),
        status => format!("{host} answers {status}"),
    }
}

/// How long a feed is left alone whose refresh could not be stored: the disk is full, for example.
const UNSTORED_PAUSE: Duration = Duration::from_secs(60); // a guess

impl Agent {
    /// Fetches the feed of a channel that is due, and stores what came. `_permit` is its host's.
    pub(super) async fn refresh_due(&self, channel: ChannelId, _permit: OwnedSemaphorePermit) {
        let service = &self.podcasts;
        let Some(busy) = BusyChannel::new(service, channel) else {
            return;
        };
        match self.refresh(&busy, false).await {
            Ok(Some(report)) => {
                tracing::debug!(%channel, added = report.added, problem = report.problem, "refreshed");
            }
            Ok(None) => {}
            Err(failure) => {
                tracing::warn!(%channel, error = failure.text, "cannot refresh");
                // The feed is still due, and nothing else keeps it from being fetched again at once.
                tokio::time::sleep(UNSTORED_PAUSE).await;
            }
        }
    }

    /// Fetches a feed and stores what came; none if it is not due, or no network is up. `now`: whether it is due in
    /// any case. What is asked for is read from the library only here, while no other task fetches the feed: an older
    /// request could have the address that the feed moved from.
    async fn refresh(
        &self,
        busy: &BusyChannel<'_>,
        now: bool,
    ) -> Result<Option<RefreshReport>, TransferFailure> {
        let service = &self.podcasts;
        let channel = busy.1;
        let Ok(_permit) = service.refreshes.acquire().await else {
            return Ok(None);
        };
        let at = Timestamp::now();
        let adding = service.adding.lock().await;
        let request = service.with(move |library| {
            if now {
                library.refresh_now(Some(channel), at)?;
            }
            library.due_refresh(channel, at)
        });
        let request = request.await?;
        drop(adding);
        let Some(request) = request else {
            return Ok(None);
        };
        let outcome = match self.fetch_document(&fetch_of(request)).await {
            Ok(answer) => outcome_of(answer),
            // It stays due: nobody is to blame.
            Err(FeedFault::NoNetwork) => return Ok(None),
            Err(FeedFault::Failed(reason)) => RefreshOutcome::Failed {
                reason,
                gone: false,
                retry_after: None,
            },
        };
        let now = Timestamp::now();
        let applied = service.with(move |library| library.apply_refresh(channel, outcome, now));
        Ok(Some(applied.await?))
    }

    /// Refreshes a channel now, and returns what came; none if no network is up.
    pub(in super::super) async fn refresh_channel(
        &self,
        channel: ChannelId,
    ) -> Result<Option<RefreshReport>, TransferFailure> {
        let service = &self.podcasts;
        let busy = loop {
            // Enabled before the claim, so that no end is missed.
            let ended = service.refreshed.notified();
            tokio::pin!(ended);
            ended.as_mut().enable();
            if let Some(busy) = BusyChannel::new(service, channel) {
                break busy;
            }
            ended.await;
        };
        let address = service
            .with(move |library| library.channel(channel))
            .await?;
        let address = address.map(|channel| channel.summary.url);
        let _permit = match &address {
            Some(address) => service.hosts.acquire(address).await,
            None => None,
        };
        let report = self.refresh(&busy, true).await;
        drop(busy);
        service.changed();
        report
    }
}

/// The request for the feed that is to be refreshed.
fn fetch_of(request: RefreshRequest) -> FeedFetch {
    FeedFetch {
        url: request.url,
        etag: request.etag,
        last_modified: request.last_modified,
        authorization: request.authorization,
        fields: Vec::new(),
        local_host: request.local_host,
        bytes_max: FEED_BYTES_MAX,
    }
}
