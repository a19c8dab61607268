//! How long a new connection waits, and for which conditions.
//!
//! ```text
//!  no network, or none that it may use   as long as the program does
//!  a network, and a proxy that is silent the answer limit, then "the proxy does not answer"
//!  no place for one more connection      ROOM_WAIT_MAX, then "too many connections"
//! ```

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, sleep, timeout};

use super::super::conn_options::ConnOptions;
use super::super::refusal::{ConnectRefusal, RefusalCause};
use super::super::target::TargetAddress;
use super::session_flows::lock;
use super::{ProxyConnection, ProxySession};

/// Connections of a session at once: what D2Prox takes of a device by default.
pub const SESSION_CONNECTIONS_MAX: usize = 1_024;

/// How long a connection waits for a proxy that is silent although there is a network.
pub const ANSWER_LIMIT: Duration = Duration::from_secs(30); // a guess: a restart takes a few

/// How long a connection waits for another one to end.
const ROOM_WAIT_MAX: Duration = Duration::from_secs(60); // a guess: half of what TCP waits for an answer

/// The delay before the proxy is asked again whether it has room.
const ROOM_AGAIN: Duration = Duration::from_millis(500); // a guess

/// The interval of checks whether the proxy answers, while a connection waits for it.
const ANSWER_CHECK: Duration = Duration::from_secs(1);

impl ProxySession {
    /// A connection to `target`, once it is made.
    ///
    /// # Errors
    /// Why it is not.
    pub async fn open(
        self: &Arc<ProxySession>,
        target: &TargetAddress,
        conn_options: ConnOptions,
    ) -> Result<ProxyConnection, ConnectRefusal> {
        let since = Instant::now();
        loop {
            let moves = self.proxy.moves();
            let made = self.within_limit(self.try_open(target, conn_options)).await;
            match made {
                // Nothing of the program's has been sent: it is asked for at the other proxy.
                Err(_) if self.proxy.moves() != moves && since.elapsed() < ANSWER_LIMIT => {}
                Err(refusal)
                    if refusal.cause == RefusalCause::Full && since.elapsed() < ROOM_WAIT_MAX =>
                {
                    self.report_full(&refusal.text);
                    sleep(ROOM_AGAIN).await;
                }
                made => return made,
            }
        }
    }

    /// Sets how long connections wait for a proxy that is silent although a network is available;
    /// `None`: as long as programs wait.
    pub fn set_answer_limit(&self, limit: Option<Duration>) {
        *lock(&self.answer_limit) = limit;
    }

    /// Waits for a place for one more connection.
    pub(super) async fn room(&self) -> Result<OwnedSemaphorePermit, ConnectRefusal> {
        let places = self.places.clone();
        if let Ok(place) = places.clone().try_acquire_owned() {
            return Ok(place);
        }
        let text = format!("{SESSION_CONNECTIONS_MAX} connections are open");
        self.report_full(&text);
        match timeout(ROOM_WAIT_MAX, places.acquire_owned()).await {
            Ok(Ok(place)) => Ok(place),
            _ => Err(ConnectRefusal::new(RefusalCause::Full, text)),
        }
    }

    fn report_full(&self, text: &str) {
        match self.reported_full.swap(true, Relaxed) {
            false => tracing::warn!("{text}. More connections wait until others end"),
            true => tracing::debug!("{text}"),
        }
    }

    /// The result of `work`, or a refusal when the proxy has been silent for too long meanwhile.
    pub(super) async fn within_limit<T>(
        &self,
        work: impl Future<Output = Result<T, ConnectRefusal>>,
    ) -> Result<T, ConnectRefusal> {
        tokio::select! {
            biased;
            done = work => done,
            refusal = self.unanswered() => Err(refusal),
        }
    }

    /// Completes when the proxy has been silent for the answer limit.
    async fn unanswered(&self) -> ConnectRefusal {
        let Some(limit) = *lock(&self.answer_limit) else {
            return std::future::pending().await;
        };
        let mut links = self.links.clone();
        let mut silent = Duration::ZERO;
        while silent < limit {
            if !self.is_online() {
                silent = Duration::ZERO;
                if links.changed().await.is_err() {
                    return std::future::pending().await;
                }
                continue;
            }
            sleep(ANSWER_CHECK).await;
            silent = match self.answers() || self.waits_for_permitted_link().is_some() {
                true => Duration::ZERO,
                false => silent + ANSWER_CHECK,
            };
        }
        ConnectRefusal::new(
            RefusalCause::NoProxy,
            format!(
                "the proxy {} does not answer ({} s). Is it running, and are its address and key \
                 right?",
                self.proxy.address_text(),
                limit.as_secs()
            ),
        )
    }

    /// Whether the proxy answers on a network.
    fn answers(&self) -> bool {
        let device = self.proxy.device();
        device.is_some_and(|device| {
            let statuses = device.link_statuses();
            statuses.iter().any(|status| status.answers.is_up())
        })
    }
}
