//! An upload through a proxy: one flow that draws from a file, and the origin's answer.
//!
//! ```text
//!  file ── flow, over links as `sched` allows ──▶ proxy's spool ── whole ──▶ origin
//!  what the proxy acknowledged is progress           answer ◀──────────────┘
//! ```
//!
//! The flow moves between links and sleeps like any other. If it is lost, another one goes on where
//! the proxy's spool ends, which says so before the body is sent; a proxy that restarted has none, and
//! the upload begins again from the file's first byte.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use http::header::{LOCATION, RETRY_AFTER};
use tokio::io::AsyncReadExt;
use tokio::time::{MissedTickBehavior, interval};

use super::proxied::{ProxyTransferState, answers_changed, next_event};
use super::*;
use crate::fetch::proxy;
use crate::fetch::upload_body::{
    ANSWER_BYTES_MAX, InterimResponse, UploadBody, UploadResponse as Answered, UploadSource,
};

/// An upload under way.
pub(super) struct UploadState {
    pub(super) parcel: Arc<UploadBody>,
    /// Bytes of the file that the proxy has.
    pub(super) acknowledged: u64,
    /// The body as the flow at hand reads it.
    drawn: Option<Arc<UploadSource>>,
    /// The proxy keeps what it has if the flow is lost.
    kept: bool,
    /// Whether all of the body was sent once, so that the origin may have it.
    whole_once: bool,
    answer: Option<Answered>,
}

impl UploadState {
    fn new(parcel: UploadBody) -> UploadState {
        UploadState {
            parcel: Arc::new(parcel),
            acknowledged: 0,
            drawn: None,
            kept: false,
            whole_once: false,
            answer: None,
        }
    }

    fn head_bytes(&self) -> u64 {
        self.drawn.as_ref().map_or(0, |drawn| drawn.head_bytes())
    }
}

/// Runs an upload through a proxy to its end and reports it.
pub async fn run_upload(
    job: &TransferJob,
    parcel: UploadBody,
    proxy: &ProxyClient,
    setting: TransferContext,
    observer: &mut dyn TransferObserver,
) -> TransferExit {
    match begin(job, proxy, setting, TransferDirection::Up, observer) {
        Ok((mut transfer, _)) => {
            transfer.outgoing = Some(UploadState::new(parcel));
            let outcome = transfer.exchange_proxied().await;
            transfer.finish_upload(outcome)
        }
        Err(exit) => exit,
    }
}

impl TransferRun<'_, ProxyClient> {
    /// Sends the file in one flow and reads the answer.
    pub(super) async fn attempt_upload(
        &mut self,
        parcel: Arc<UploadBody>,
        helm: &mut ProxyTransferState,
    ) -> Result<AttemptEnd, FetchFault> {
        let again = self.outgoing.as_ref().is_some_and(|o| o.drawn.is_some());
        let drawn = Arc::new(UploadSource::new(parcel.clone(), again));
        let mut held = self.dial.post(drawn.clone())?;
        if let Some(outgoing) = &mut self.outgoing {
            outgoing.drawn = Some(drawn.clone());
            outgoing.acknowledged = 0;
        }
        self.receiving = true;
        let mut epoch = interval(EPOCH);
        epoch.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut links, mut stop) = (self.links.clone(), self.stop.clone());
        let mut answers = self.dial.watch_answers();
        let (mut epoch_start, mut epoch_bytes) = (BootInstant::now(), 0u64);
        let (mut kept, mut total) = (Vec::new(), 0u64);
        let mut piece = [0; 8192];
        loop {
            tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => return Ok(AttemptEnd::ChooseAgain),
                Ok(()) = links.changed() => self.update_spending(helm).map_err(FetchFault::Final)?,
                () = answers_changed(&mut answers) => self.update_spending(helm).map_err(FetchFault::Final)?,
                event = next_event(&mut helm.events) => self.on_session_event(event, helm).map_err(FetchFault::Final)?,
                _ = epoch.tick() => {
                    let now = BootInstant::now();
                    self.look(&drawn, helm);
                    let done = self.acknowledged();
                    let seconds = now.since(epoch_start).as_secs_f64().max(1e-3);
                    let used = self.count_links(helm);
                    // What was spent is told before it is asked what may be.
                    self.tell_progress(&used, done.saturating_sub(epoch_bytes) as f64 / seconds);
                    self.update_spending(helm).map_err(FetchFault::Final)?;
                    (epoch_start, epoch_bytes) = (now, done);
                }
                read = held.read(&mut piece) => match read {
                    Ok(0) => break,
                    Ok(bytes) => {
                        total += bytes as u64;
                        let room = ANSWER_BYTES_MAX - kept.len();
                        kept.extend_from_slice(&piece[..bytes.min(room)]);
                        if drawn.from().is_none() && let Some(leave) = InterimResponse::read(&kept) {
                            self.begin_body(&drawn, leave)?;
                            epoch_bytes = self.acknowledged();
                        }
                    }
                    Err(error) => {
                        parcel.check_unchanged().map_err(FetchFault::Final)?;
                        let fault = self.flow_cause(FetchFault::Proxy(error.to_string()));
                        return Err(self.lost(fault));
                    }
                },
            }
        }
        self.look(&drawn, helm);
        // A small file is there before the first epoch is over.
        if self.last_link.is_none() {
            self.report_first_byte(helm);
        }
        let answer = Answered::read(&kept, total)
            .map_err(|what| self.lost(FetchFault::Proxy(what.into())))?;
        let verdict = self.judge(&parcel, answer);
        if matches!(verdict, Ok(_) | Err(FetchFault::Final(_))) {
            parcel.set_answered();
        }
        verdict
    }

    /// The proxy has said from which byte on it wants the file.
    fn begin_body(
        &mut self,
        drawn: &UploadSource,
        leave: InterimResponse,
    ) -> Result<(), FetchFault> {
        let Some(outgoing) = &mut self.outgoing else {
            return Ok(());
        };
        let length = outgoing.parcel.length;
        let from = match leave {
            InterimResponse::FromStart => 0,
            InterimResponse::FromOffset(from) => from,
        };
        outgoing.kept = leave != InterimResponse::FromStart;
        if from > length {
            let text = format!("the proxy has {from} bytes of a file of {length}");
            return Err(FetchFault::Proxy(text));
        }
        if from < length && outgoing.whole_once && outgoing.parcel.post {
            // It forgot that it had it, and with it what became of it.
            return Err(FetchFault::Final(TransferFailure::error(
                "the proxy lost the POST. The server may have received it, so it is not sent again",
            )));
        }
        outgoing.acknowledged = from;
        drawn.start_at(from);
        Ok(())
    }

    /// Brings the progress up to date.
    fn look(&mut self, drawn: &UploadSource, helm: &mut ProxyTransferState) {
        let far = self.dial.with_flow(|_, flow| flow.acknowledged());
        let Some(from) = drawn.from() else {
            return;
        };
        let done = from + far.unwrap_or(0).saturating_sub(drawn.head_bytes());
        if done > self.acknowledged() {
            self.note_acknowledged(done);
            helm.last_byte = Some(BootInstant::now());
            self.said_waiting = None;
            self.tries = 0;
            if self.last_link.is_none() {
                self.report_first_byte(helm);
            }
        }
    }

    fn note_acknowledged(&mut self, bytes: u64) {
        if let Some(outgoing) = &mut self.outgoing {
            outgoing.acknowledged = bytes;
            outgoing.whole_once |= bytes == outgoing.parcel.length;
        }
    }

    fn acknowledged(&self) -> u64 {
        self.outgoing.as_ref().map_or(0, |o| o.acknowledged)
    }

    /// A flow that broke off: where the proxy keeps what it has, asking again sends nothing twice.
    fn lost(&self, fault: FetchFault) -> FetchFault {
        match &self.outgoing {
            Some(outgoing) if outgoing.kept => fault,
            _ => self.once_only(fault),
        }
    }

    /// A POST that the origin may have seen is not sent again.
    fn once_only(&self, fault: FetchFault) -> FetchFault {
        let whole = |o: &UploadState| o.parcel.post && o.acknowledged == o.parcel.length;
        let text = match &fault {
            FetchFault::Final(_) => return fault,
            FetchFault::Origin { text, .. }
            | FetchFault::Path(text)
            | FetchFault::Proxy(text)
            | FetchFault::NameNotFound(text)
            | FetchFault::UntrustedPeer(text)
            | FetchFault::CaptivePortal(text) => text,
        };
        if !self.outgoing.as_ref().is_some_and(whole) {
            return fault;
        }
        FetchFault::Final(TransferFailure::error(format!(
            "{text}. The server may have received the POST, so it is not sent again"
        )))
    }

    /// What the answer means.
    fn judge(&mut self, parcel: &UploadBody, answer: Answered) -> Result<AttemptEnd, FetchFault> {
        let host = self.job.url.host_str().unwrap_or_default();
        if let Some(fault) = proxy::refusal(answer.status, &answer.headers, &answer.body_text) {
            // The proxy's words say whether it reached the origin; only these two leave it open.
            let told = answer.headers.get("proxy-status");
            let told = told.and_then(|told| told.to_str().ok()).unwrap_or_default();
            let open = ["connection_terminated", "http_response_timeout"];
            let open = open.iter().any(|token| told.contains(token));
            return Err(if open { self.once_only(fault) } else { fault });
        }
        let text = |name| Some(answer.headers.get(name)?.to_str().ok()?.to_owned());
        match answer.status {
            status if status.is_success() => {
                parcel.check_unchanged().map_err(FetchFault::Final)?;
                self.note_acknowledged(parcel.length);
                if let Some(outgoing) = &mut self.outgoing {
                    outgoing.answer = Some(answer);
                }
                Ok(AttemptEnd::Whole)
            }
            status if status.is_redirection() => {
                let to = text(LOCATION).unwrap_or_else(|| "nowhere".into());
                let text =
                    format!("{host} did not accept the upload ({status}) and redirects to {to}");
                Err(FetchFault::Final(TransferFailure::error(text)))
            }
            StatusCode::UNAUTHORIZED => {
                let text = format!("{host} requires credentials ({})", answer.status);
                Err(FetchFault::Final(TransferFailure::of(
                    TransferExit::Error,
                    TransferReason::AuthRequired,
                    text,
                )))
            }
            status => {
                let words: String = answer.body_text.trim().chars().take(200).collect();
                let text_of_fault = format!("{host} answers {status}: {words}");
                let not_now = matches!(status.as_u16(), 408 | 425 | 429 | 503);
                // These do not change by waiting, and each try costs the whole body.
                let never = matches!(status.as_u16(), 501 | 505 | 507 | 508);
                if not_now || (status.is_server_error() && !never && !parcel.post) {
                    let wait = text(RETRY_AFTER).and_then(|wait| wait.trim().parse().ok());
                    return Err(FetchFault::Origin {
                        text: text_of_fault,
                        retry_after: wait.map(Duration::from_secs),
                    });
                }
                Err(FetchFault::Final(TransferFailure::error(text_of_fault)))
            }
        }
    }

    /// Reports.
    fn finish_upload(mut self, outcome: Result<(), TransferFailure>) -> TransferExit {
        let late = self.time_left() == Some(Duration::ZERO);
        let duration_s = self.t_s();
        let (start, promise) = (self.start, self.first_promise);
        let (exit, reason, text) = match outcome {
            Ok(()) if late => (TransferExit::DeadlineMissed, None, None),
            Ok(()) => (TransferExit::Done, None, None),
            Err(failure) => (failure.exit, failure.reason, Some(failure.text)),
        };
        let whole = text.is_none();
        let Some(outgoing) = self.outgoing.take() else {
            return exit;
        };
        let carried: u64 = self.bytes_by_link.values().sum();
        let report = TransferReport {
            verb: "put".into(),
            mode: self.dial.mode(),
            url: redact_url(&self.job.url),
            file: PathBuf::from(&outgoing.parcel.path).display().to_string(),
            bytes: outgoing.acknowledged,
            sha256: outgoing.parcel.sha256.clone(),
            // What the links carried beyond one copy and its head.
            duplicate_bytes: carried.saturating_sub(outgoing.acknowledged + outgoing.head_bytes()),
            bytes_by_link: self.bytes_by_link,
            duration_s,
            first_byte_s: None,
            last_byte_s: None,
            deadline_s: (self.terms.due).map(|due| due.after(start).as_secs_f64()),
            deadline_met: self.terms.due.map(|_| whole && !late),
            promise,
            switches: self.switches,
            content_encoding: None,
            exit: exit as u8,
            reason,
            text,
            resumable_bytes: match outgoing.kept && !whole {
                true => outgoing.acknowledged,
                false => 0,
            },
            proxy_would_add: None,
            status: outgoing
                .answer
                .as_ref()
                .map(|answer| answer.status.as_u16()),
            answer: outgoing.answer.map(|answer| answer.body_text),
        };
        self.observer.on_event(&if whole {
            TransferEvent::Done(report)
        } else {
            TransferEvent::Error(report)
        });
        exit
    }
}
