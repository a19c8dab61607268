//! The transfers of a folder: one for each file, some at a time, all by one scheduler and with one deadline.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use d2tp_driver::SchedulerHandle;
use d2tp_links::Link;
use tokio::sync::watch;
use url::Url;

use super::mirror_reporter::{FileObserver, MirrorReporter};
use crate::fetch::object_version::ObjectVersion;
use crate::fetch::outcome::{TransferExit, TransferFailure, TransferReason};
use crate::fetch::rate_limiter::RateLimiter;
use crate::fetch::report::TransferReport;
use crate::fetch::request_method::RequestMethod;
use crate::fetch::transfer::{FollowingBytes, TransferContext};
use crate::order::{TransferOrder, TransferVerb};
use crate::prepared_transfer::{
    PreparedTransfer, SessionTuning, TransferTransport, TransportPurpose,
};
use crate::terms::TransferTerms;

/// Files that are transferred at the same time.
const TOGETHER_MAX: usize = 8; // a guess, as for several URLs of `cedos get`

/// Carries the files of a folder.
pub struct FileTransfers {
    /// What all transfers have in common.
    pub order: TransferOrder,
    /// The terms of all of them, which may change; their budget is one for all.
    pub terms: watch::Receiver<TransferTerms>,
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
    /// Whether the user spoke of metered links.
    pub asks_for_paid: bool,
    /// Whether others look at the transfers later, so that waits are reported repeatedly.
    pub repeats_waits: bool,
    /// Transports that were opened and are free.
    pub transports: Mutex<Vec<TransferTransport>>,
    /// The bytes of files that have not begun.
    pub following: Arc<FollowingBytes>,
}

/// The transfer of one file of a folder.
pub struct FileTransfer<'a> {
    /// Whether the file is downloaded or uploaded.
    pub verb: TransferVerb,
    /// The URL of the file.
    pub url: &'a Url,
    /// The file here.
    pub file: &'a Path,
    /// The length of the file, if known.
    pub bytes: Option<u64>,
    /// The version of the object that is known already.
    pub unless: Option<ObjectVersion>,
    /// The method of the requests of a download.
    pub method: RequestMethod,
    /// A header field beside those of the order.
    pub field: Option<&'static str>,
    /// The most tries without a new byte, if they are fewer than those of the order.
    pub tries_max: Option<u32>,
}

/// A file that is under way, as the scheduler is to know it.
struct FileUnderWay<'a>(&'a FollowingBytes);

impl Drop for FileUnderWay<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl FileTransfers {
    /// Files that may be transferred at the same time: one, if all of them share what metered links may carry.
    pub fn together_max(&self) -> usize {
        match self.terms.borrow().metered_bytes_max {
            Some(_) => 1,
            None => TOGETHER_MAX,
        }
    }

    /// Whether the user stopped it.
    pub fn is_stopped(&self) -> bool {
        *self.stop.borrow()
    }

    /// Carries one file.
    ///
    /// # Errors
    /// It is not whole; in words.
    pub async fn carry(
        &self,
        file: FileTransfer<'_>,
        reporter: &MirrorReporter,
    ) -> Result<TransferReport, TransferFailure> {
        if self.is_stopped() {
            return Err(stopped());
        }
        let id = self.scheduler.next_flow_number();
        self.following.begin(file.bytes.unwrap_or(0));
        let _under_way = FileUnderWay(&self.following);
        let mut order = self.order.clone();
        (order.verb, order.url) = (file.verb, file.url.to_string());
        order.file = Some(file.file.to_owned());
        order.headers.extend(file.field.map(str::to_owned));
        order.tries = order.tries.min(file.tries_max.unwrap_or(u32::MAX));
        // Each file is an upload of its own.
        order.token = None;
        if !file.method.is_of_objects() && order.prox.is_some() {
            // A proxy fetches objects; of other requests it carries the bytes.
            order.sealed = true;
        }
        let terms = self.terms_of_file(id, reporter);
        let (file_terms, terms_updates) = watch::channel(terms.clone());
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
        (job.unless, job.method) = (file.unless, file.method);
        let context = TransferContext {
            id,
            terms: self.repeats_waits.then_some(terms_updates),
            rate_limiter: self.rate_limiter.clone(),
            following: Some(self.following.clone()),
            ..TransferContext::standalone(
                self.links.clone(),
                self.stop.clone(),
                self.scheduler.clone(),
            )
        };
        let mut observer = FileObserver::new(reporter, id);
        tokio::select! {
            _ = transport.run(&job, body, context, &mut observer) => {}
            () = self.pass_terms_on(id, &file_terms, reporter) => {}
        }
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

    /// The terms of one file: of what metered links may carry, an equal part of what the others leave.
    fn terms_of_file(&self, id: u64, reporter: &MirrorReporter) -> TransferTerms {
        let mut terms = self.terms.borrow().clone();
        let left = (terms.metered_bytes_max)
            .map(|max| max.saturating_sub(reporter.metered_bytes_besides(id)));
        terms.metered_bytes_max = left.map(|left| left / self.following.under_way().max(1));
        terms
    }

    /// Passes changed terms on to a file, for as long as its transfer goes on.
    async fn pass_terms_on(
        &self,
        id: u64,
        file_terms: &watch::Sender<TransferTerms>,
        reporter: &MirrorReporter,
    ) {
        let mut terms = self.terms.clone();
        while terms.changed().await.is_ok() {
            file_terms.send_replace(self.terms_of_file(id, reporter));
        }
        // They are the last ones.
        std::future::pending().await
    }

    fn free_transports(&self) -> MutexGuard<'_, Vec<TransferTransport>> {
        (self.transports.lock()).unwrap_or_else(PoisonError::into_inner)
    }
}

/// The failure of what the user stopped.
pub fn stopped() -> TransferFailure {
    TransferFailure::of(
        TransferExit::Cancelled,
        TransferReason::UserPaused,
        "stopped",
    )
}
