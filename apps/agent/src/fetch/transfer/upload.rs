//! An upload through a proxy: one flow that is read from a file, and the origin's answer.
//!
//! ```text
//!  file ── flow, over links as `sched` allows ──▶ proxy's spool ── whole ──▶ origin
//!  what the proxy acknowledged is progress           answer ◀──────────────┘
//! ```
//!
//! The flow moves between links and hibernates like any other. If it is lost, a new flow continues
//! from the end of the proxy's spool, which the proxy reports before the body is sent; after a
//! restart the proxy has no spool, and the upload begins again from the file's first byte.

mod answer;

use std::path::PathBuf;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use tokio::io::AsyncReadExt;

use super::content::{AnswerEnd, IntakeResult, TransferContent};
use super::control::TransferControl;
use super::progress::ContentProgress;
use super::proxied::ProxySource;
use crate::fetch::dial::{ByteStream, EgressLink, FetchFault};
use crate::fetch::outcome::{TransferExit, TransferFailure};
use crate::fetch::proxy::ProxyClient;
use crate::fetch::rate_limiter::RateLimiter;
use crate::fetch::upload_body::{
    ANSWER_BYTES_MAX, InterimResponse, UploadBody, UploadResponse, UploadSource,
};

/// The size of reads from an answer.
const ANSWER_READ_BYTES: usize = 8192;

/// An upload in progress.
pub(super) struct Upload {
    body: Arc<UploadBody>,
    /// Bytes of the file that the proxy has.
    acknowledged: u64,
    /// The most bytes of the file that the proxy ever had: a try that sends them again is no growth.
    most: u64,
    /// Bytes of the file that the proxy received in this run, for rates.
    sent: u64,
    /// Whether a flow was opened before, so that the proxy may have some of the file.
    is_begun: bool,
    /// Whether the proxy keeps what it has if the flow is lost.
    is_kept: bool,
    /// Whether a proxy acknowledged all of the body once.
    was_whole_once: bool,
    /// How often a proxy asked for the body from its first byte: each time, another copy began.
    starts: u32,
    /// Whether the origin accepted or refused the upload for good.
    is_answered: bool,
    answer: Option<UploadResponse>,
    /// The limit on the rate at which the file is sent.
    limiter: Option<Arc<RateLimiter>>,
    /// The file as the source of the current flow.
    drawn: Arc<UploadSource>,
}

/// A flow that carries an upload, with what it received of the answer.
pub(super) struct UploadFlow {
    stream: Box<dyn ByteStream>,
    /// The beginning of the received bytes.
    kept: Vec<u8>,
    /// The number of received bytes.
    total: u64,
}

impl Upload {
    /// Creates an upload of which nothing has been sent.
    pub(super) fn new(body: Arc<UploadBody>, limiter: Option<Arc<RateLimiter>>) -> Upload {
        Upload {
            drawn: Arc::new(UploadSource::new(body.clone(), false)),
            limiter,
            body,
            acknowledged: 0,
            most: 0,
            sent: 0,
            is_begun: false,
            is_kept: false,
            was_whole_once: false,
            starts: 0,
            is_answered: false,
            answer: None,
        }
    }

    /// Handles the proxy's request for the file from some byte on.
    fn begin_body(&mut self, leave: InterimResponse) -> Result<(), FetchFault> {
        let length = self.body.length;
        let from = match leave {
            InterimResponse::FromStart => 0,
            InterimResponse::FromOffset(from) => from,
        };
        self.is_kept = leave != InterimResponse::FromStart;
        if from > length {
            let text = format!("the proxy has {from} bytes of a file of {length}");
            return Err(FetchFault::Proxy(text));
        }
        self.starts += u32::from(from == 0);
        if self.body.post && self.may_reach_twice(from) {
            return Err(FetchFault::Final(TransferFailure::error(
                "the proxy lost the POST. The server may have received it, so it is not sent again",
            )));
        }
        self.acknowledged = from;
        self.drawn.start_at(from);
        Ok(())
    }

    /// Whether the origin may have all of the body already, while a proxy that does not know this asks for it from
    /// `from` on: one that has restarted, or another node.
    fn may_reach_twice(&self, from: u64) -> bool {
        if self.was_whole_once {
            return from < self.body.length;
        }
        if !self.body.is_handed_over() {
            return false;
        }
        // The copy to which all was sent goes on where it ended. Of several, it is not known which one this is.
        let is_the_copy = from > 0 && from >= self.most && self.starts < 2;
        !is_the_copy && from < self.body.length
    }

    /// Whether the origin may have all of the body.
    fn may_have_arrived(&self) -> bool {
        self.was_whole_once || self.body.is_handed_over()
    }

    fn set_acknowledged(&mut self, bytes: u64) {
        self.acknowledged = bytes;
        self.was_whole_once |= bytes == self.body.length;
    }

    /// The fault of a flow that broke: if the proxy keeps what it has, a retry sends nothing twice. An empty body does
    /// not wait for the proxy to say so, and another node does not have it.
    fn lost(&self, fault: FetchFault) -> FetchFault {
        match self.is_kept && self.body.length > 0 {
            true => fault,
            false => self.once_only(fault),
        }
    }

    /// Makes a fault final for a POST that the origin may have seen: it is not sent again.
    fn once_only(&self, fault: FetchFault) -> FetchFault {
        let text = match &fault {
            FetchFault::Final(_) => return fault,
            FetchFault::Origin { text, .. }
            | FetchFault::Path(text)
            | FetchFault::Proxy(text)
            | FetchFault::NameNotFound(text)
            | FetchFault::UntrustedPeer(text)
            | FetchFault::CaptivePortal(text) => text,
        };
        if !self.body.post || !self.may_have_arrived() {
            return fault;
        }
        FetchFault::Final(TransferFailure::error(format!(
            "{text}. The server may have received the POST, so it is not sent again"
        )))
    }

    /// Reports the end of the upload.
    pub(super) fn finish(
        self,
        control: TransferControl<'_>,
        outcome: Result<(), TransferFailure>,
    ) -> TransferExit {
        let end = control.end_moment();
        let file = PathBuf::from(&self.body.path).display().to_string();
        let carried = control.usage.total_bytes();
        control.finish("put", file, end, outcome, |report, whole| {
            report.bytes = self.acknowledged;
            report.sha256 = self.body.sha256.clone();
            // What the links carried beyond one copy and its head.
            let once = self.acknowledged + self.drawn.head_bytes();
            report.duplicate_bytes = carried.saturating_sub(once);
            // After an answer, or with another content, the same command begins another upload.
            let is_over = self.is_answered || self.body.check_unchanged().is_err();
            report.resumable_bytes = match self.is_kept && !whole && !is_over {
                true => self.acknowledged,
                false => 0,
            };
            report.status = self.answer.as_ref().map(|answer| answer.status.as_u16());
            report.answer = self.answer.map(|answer| answer.body_text);
        })
    }
}

impl<'a> TransferContent<'a, ProxySource<'a>> for Upload {
    type Request = Arc<UploadSource>;
    type Answer = UploadFlow;
    type Body = UploadFlow;

    fn progress(&self) -> ContentProgress {
        ContentProgress {
            done: self.acknowledged,
            length: Some(self.body.length),
            repeated_by_request: 0,
            most: self.most,
            is_recognisable: true,
        }
    }

    fn moved_bytes(&self) -> u64 {
        self.sent
    }

    fn is_whole(&self) -> bool {
        false // the origin's answer is wanted, too
    }

    fn learns_size(&self) -> bool {
        false
    }

    fn request(
        &mut self,
        _source: &ProxySource<'a>,
        _control: &TransferControl<'_>,
    ) -> Arc<UploadSource> {
        let source = UploadSource::new(self.body.clone(), self.is_begun);
        self.drawn = Arc::new(source.limited(self.limiter.clone()));
        self.acknowledged = 0;
        self.drawn.clone()
    }

    fn continued(
        &mut self,
        _source: &mut ProxySource<'a>,
        _control: &TransferControl<'_>,
    ) -> Option<UploadFlow> {
        None
    }

    async fn send(
        client: &'a ProxyClient,
        request: &Arc<UploadSource>,
        _via: &EgressLink,
    ) -> Result<UploadFlow, FetchFault> {
        // The answer comes in the flow that the body leaves by.
        Ok(UploadFlow {
            stream: client.post(request.clone())?,
            kept: Vec::new(),
            total: 0,
        })
    }

    async fn accept(
        &mut self,
        answer: UploadFlow,
        _request: Arc<UploadSource>,
        _source: &mut ProxySource<'a>,
        _control: &mut TransferControl<'_>,
    ) -> Result<Option<UploadFlow>, FetchFault> {
        self.is_begun = true;
        Ok(Some(answer))
    }

    async fn next(body: &mut UploadFlow) -> Option<Result<Bytes, FetchFault>> {
        let mut piece = BytesMut::with_capacity(ANSWER_READ_BYTES);
        match body.stream.read_buf(&mut piece).await {
            Ok(0) => None,
            Ok(_) => Some(Ok(piece.freeze())),
            Err(error) => Some(Err(FetchFault::Proxy(error.to_string()))),
        }
    }

    fn take_in(
        &mut self,
        bytes: &Bytes,
        body: &mut UploadFlow,
        _source: &mut ProxySource<'a>,
        _control: &mut TransferControl<'_>,
    ) -> Result<IntakeResult, FetchFault> {
        body.total += bytes.len() as u64;
        let room = ANSWER_BYTES_MAX - body.kept.len();
        body.kept.extend_from_slice(&bytes[..bytes.len().min(room)]);
        if self.drawn.from().is_none()
            && let Some(leave) = InterimResponse::read(&body.kept)
        {
            self.begin_body(leave)?;
        }
        Ok(IntakeResult::More)
    }

    fn measure(&mut self, source: &mut ProxySource<'a>, control: &mut TransferControl<'_>) {
        let Some(from) = self.drawn.from() else {
            return;
        };
        let head = self.drawn.head_bytes();
        let done = from + source.acknowledged_bytes().saturating_sub(head);
        if done > self.acknowledged {
            self.sent += done - self.acknowledged;
            self.set_acknowledged(done);
            if done > self.most {
                self.most = done;
                control.on_growth();
            }
            source.on_arrival(control);
        }
    }

    fn explain(&self, fault: FetchFault) -> FetchFault {
        match self.body.check_unchanged() {
            Ok(()) => self.lost(fault),
            Err(failure) => FetchFault::Final(failure),
        }
    }

    fn conclude(
        &mut self,
        body: UploadFlow,
        _cut_short: bool,
        source: &mut ProxySource<'a>,
        control: &mut TransferControl<'_>,
    ) -> Result<AnswerEnd, FetchFault> {
        self.measure(source, control);
        // A small file is there before the first epoch is over.
        source.report_first_byte(control);
        let answer = UploadResponse::read(&body.kept, body.total)
            .map_err(|what| self.lost(FetchFault::Proxy(what.into())))?;
        source.end_sending();
        let host = control.job.url.host_str().unwrap_or_default();
        let decision = match answer::check_answer(&answer, host, self.body.post) {
            Err(answer::Refusal::Open(fault)) => Err(self.once_only(fault)),
            Err(answer::Refusal::Told(fault)) => Err(fault),
            Ok(()) => self.body.check_unchanged().map_err(FetchFault::Final),
        };
        if matches!(decision, Ok(()) | Err(FetchFault::Final(_))) {
            self.is_answered = true;
            self.body.set_answered();
        }
        decision?;
        self.set_acknowledged(self.body.length);
        self.answer = Some(answer);
        Ok(AnswerEnd::Whole)
    }

    async fn checkpoint(
        &mut self,
        _source: &mut ProxySource<'a>,
        _control: &mut TransferControl<'_>,
    ) -> Result<(), TransferFailure> {
        Ok(())
    }

    async fn settle(&mut self, _source: &ProxySource<'a>) -> Result<(), TransferFailure> {
        Ok(())
    }

    fn is_claimable(&self) -> bool {
        false
    }
}
