//! The transfers of `cedos sync`: one for each file, some at a time, all by one scheduler and with one deadline.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cedos_agent::fetch::object_version::ObjectVersion;
use cedos_agent::fetch::outcome::{TransferExit, TransferFailure};
use cedos_agent::fetch::rate_limiter::RateLimiter;
use cedos_agent::fetch::report::TransferReport;
use cedos_agent::fetch::transfer::TransferContext;
use cedos_agent::order::{TransferOrder, TransferVerb};
use cedos_agent::prepared_transfer::{
    PreparedTransfer, SessionTuning, TransferTransport, TransportPurpose,
};
use cedos_agent::terms::TransferTerms;
use d2tp_driver::SchedulerHandle;
use d2tp_links::Link;
use tokio::sync::watch;
use url::Url;

use super::sync_reporter::{FileObserver, SyncReporter};

/// Files that are transferred at the same time.
const TOGETHER_MAX: usize = 8; // a guess, as for several URLs of `cedos get`

/// Carries files one by one.
pub struct FileTransfers {
    /// What all transfers have in common.
    pub order: TransferOrder,
    /// The terms of all of them; their budget is one for all.
    pub terms: TransferTerms,
    /// The links of this device.
    pub links: watch::Receiver<Arc<Vec<Link>>>,
    /// Ends all transfers when it becomes true.
    pub stop: watch::Receiver<bool>,
    /// The scheduler that decides about links.
    pub scheduler: Arc<SchedulerHandle>,
    /// How sessions are to send.
    pub tuning: SessionTuning,
    /// The limit on the rate of all of them together.
    pub rate_limiter: Option<Arc<RateLimiter>>,
    /// Whether the user spoke of links that cost.
    pub asks_for_paid: bool,
    /// Transports that were opened and are free.
    pub transports: Mutex<Vec<TransferTransport>>,
    /// The number of the last transfer.
    pub last_id: AtomicU64,
}

impl FileTransfers {
    /// Files that may be transferred at the same time: one, if all of them share what metered links may carry.
    pub fn together_max(&self) -> usize {
        match self.terms.metered_bytes_max {
            Some(_) => 1,
            None => TOGETHER_MAX,
        }
    }

    /// Whether the user stopped it.
    pub fn is_stopped(&self) -> bool {
        *self.stop.borrow()
    }

    /// Carries one file: from `url` into `file`, or the other way round. `unless`: the version of the object that is
    /// known already; `field`: one more header field.
    ///
    /// # Errors
    /// It is not whole; in words.
    pub async fn carry(
        &self,
        verb: TransferVerb,
        url: &Url,
        file: &Path,
        unless: Option<ObjectVersion>,
        field: Option<&str>,
        reporter: &SyncReporter,
    ) -> Result<TransferReport, TransferFailure> {
        if self.is_stopped() {
            return Err(stopped());
        }
        let mut order = self.order.clone();
        (order.verb, order.url) = (verb, url.to_string());
        order.file = Some(file.to_owned());
        order.headers.extend(field.map(str::to_owned));
        let spent = reporter.metered_bytes();
        let mut terms = self.terms.clone();
        terms.metered_bytes_max = (terms.metered_bytes_max).map(|max| max.saturating_sub(spent));
        let free = self.free_transports().pop();
        let (transport, mut job, body) = match free {
            Some(transport) => (
                transport,
                PreparedTransfer::job_beside(&order, terms)?,
                None,
            ),
            None => {
                let job = order.job_on(terms)?;
                let mut prepared = PreparedTransfer::prepare(&order, job, self.asks_for_paid)?;
                let body = prepared.open_upload_body(self.stop.clone(), |_, _| ());
                let body = body.await?;
                let opened =
                    prepared.open_transport(&self.links, &self.tuning, TransportPurpose::Carry);
                let transport = opened.await;
                (transport, prepared.job, body)
            }
        };
        job.unless = unless;
        let context = TransferContext {
            id: self.last_id.fetch_add(1, Ordering::Relaxed) + 1,
            rate_limiter: self.rate_limiter.clone(),
            ..TransferContext::standalone(
                self.links.clone(),
                self.stop.clone(),
                self.scheduler.clone(),
            )
        };
        let mut observer = FileObserver::new(reporter);
        transport.run(&job, body, context, &mut observer).await;
        // A session with a proxy is for one transfer.
        if !matches!(transport, TransferTransport::Proxied(_)) {
            self.free_transports().push(transport);
        }
        let report = observer.report;
        let report = report.ok_or_else(|| TransferFailure::error("it ended without a message"))?;
        match report.text {
            None => Ok(report),
            Some(text) => Err(TransferFailure {
                exit: TransferExit::of(report.exit.into()).unwrap_or(TransferExit::Error),
                reason: report.reason,
                text,
            }),
        }
    }

    fn free_transports(&self) -> std::sync::MutexGuard<'_, Vec<TransferTransport>> {
        (self.transports.lock()).unwrap_or_else(PoisonError::into_inner)
    }
}

/// The failure of what the user stopped.
pub fn stopped() -> TransferFailure {
    TransferFailure {
        exit: TransferExit::Cancelled,
        ..TransferFailure::error("stopped")
    }
}
