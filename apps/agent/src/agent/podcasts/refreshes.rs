//! Refreshing feeds: one request each, conditional where the feed was read before.

use cedos_readycast::{ChannelId, FEED_BYTES_MAX, RefreshOutcome, RefreshReport, RefreshRequest};
use http::StatusCode;
use jiff::Timestamp;

use super::super::state::{Agent, lock};
use super::PodcastService;
use super::feed_fetch::{FeedAnswer, FeedFault, FeedFetch};
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
        StatusCode::NOT_FOUND => format!("{host} has no feed at this address any more ({status})"),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => format!(
            "{host} wants another user name or password ({status}); `cedos cast add URL --user NAME` sets it"
        ),
        status => format!("{host} answers {status}"),
    }
}

impl Agent {
    /// Fetches a feed that is due, and stores what came.
    pub(super) async fn refresh_due(&self, request: RefreshRequest) {
        let channel = request.channel;
        match self.refresh(request).await {
            Ok(Some(report)) => {
                tracing::debug!(%channel, added = report.added, problem = report.problem, "refreshed");
            }
            Ok(None) => {}
            Err(failure) => tracing::warn!(%channel, error = failure.text, "cannot refresh"),
        }
    }

    /// Fetches a feed and stores what came; none if another task does, or no network is up.
    async fn refresh(
        &self,
        request: RefreshRequest,
    ) -> Result<Option<RefreshReport>, TransferFailure> {
        let service = &self.podcasts;
        let channel = request.channel;
        let Some(_busy) = BusyChannel::new(service, channel) else {
            return Ok(None);
        };
        let Ok(_permit) = service.refreshes.acquire().await else {
            return Ok(None);
        };
        let ask = FeedFetch {
            url: request.url,
            etag: request.etag,
            last_modified: request.last_modified,
            authorization: request.authorization,
            bytes_max: FEED_BYTES_MAX,
        };
        let outcome = match self.fetch_document(&ask).await {
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
        loop {
            // Enabled before the look, so that no end is missed.
            let ended = service.refreshed.notified();
            tokio::pin!(ended);
            ended.as_mut().enable();
            if !lock(&service.busy).contains(&channel) {
                break;
            }
            ended.await;
        }
        let now = Timestamp::now();
        let request = service.with(move |library| {
            library.refresh_now(Some(channel), now)?;
            let due = library.due_refreshes(now, usize::from(u16::MAX))?;
            Ok(due.into_iter().find(|due| due.channel == channel))
        });
        let report = match request.await? {
            Some(request) => self.refresh(request).await?,
            None => None,
        };
        service.changed();
        Ok(report)
    }
}
