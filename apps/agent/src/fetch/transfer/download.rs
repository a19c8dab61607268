//! A download: what is held of an object, what to ask for next, and where the bytes go.
//!
//! Whether bytes may be joined to those held is decided in one place (`joining`): the origin's strong
//! validator must be the same, the length too, and the last bytes held must come again equal. If any
//! of it fails the download starts from zero and says `origin_changed`.

mod ending;
mod joining;

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::path::PathBuf;

use bytes::Bytes;

use super::content::{AnswerEnd, IntakeResult, TransferContent};
use super::control::TransferControl;
use super::job::{Destination, TransferJob, redact_url};
use super::progress::ContentProgress;
use super::source::TransferSource;
use crate::fetch::boot_clock::BootInstant;
use crate::fetch::dial::{EgressLink, FetchFault};
use crate::fetch::exchange::{ContentPart, FetchResponse, GetRequest, exchange};
use crate::fetch::object_version::ObjectVersion;
use crate::fetch::outcome::TransferFailure;
use crate::fetch::report::human_bytes;
use crate::fetch::sink::{DownloadSink, OVERLAP_BYTES_MAX};

/// A download in progress.
pub(super) struct Download {
    sink: DownloadSink,
    /// The destination, by the name known before the origin is asked.
    named: PathBuf,
    /// The path of the record that the object is about to be renamed into place.
    pending_rename: Option<PathBuf>,
    /// Bytes that earlier runs left.
    held_at_start: u64,
    /// The most bytes that were ever held.
    most_held: u64,
    /// Bytes received in this run, for rates.
    received: u64,
    duplicate_bytes: u64,
    /// The number of restarts from zero.
    restarts: u32,
    /// Why the bytes held cannot be continued, if so.
    distrust: Option<String>,
    /// Whether the origin refuses ranges.
    ranges_refused: bool,
    /// When new bytes arrived first, and last.
    came: Option<(BootInstant, BootInstant)>,
    /// A content coding that the origin applied without request.
    encoding: Option<String>,
    said_encoding: bool,
    /// The file name that the origin suggests.
    offered_name: Option<String>,
    /// The version of the object, as the last answer names it.
    version: Option<ObjectVersion>,
    /// Whether the destination holds the object already.
    is_unchanged: bool,
}

/// An answer that continues the bytes held.
pub(super) struct JoinedAnswer {
    answer: FetchResponse,
    /// Bytes that are held and must arrive again first.
    overlap: Vec<u8>,
    /// Bytes held before its first one.
    held_before: u64,
    /// Whether the request was for everything that is missing.
    is_open_ended: bool,
}

impl Download {
    /// Opens the place where the bytes go.
    ///
    /// # Errors
    /// It cannot be written to.
    pub(super) fn open(
        job: &TransferJob,
        pending_rename: Option<PathBuf>,
    ) -> Result<Download, TransferFailure> {
        let url = redact_url(&job.url);
        let named = job.expected_path();
        let sink = match &job.destination {
            Destination::File(path) | Destination::NewFile(path) => DownloadSink::file(path, &url)?,
            Destination::InDirectory(_) => {
                job.refuse_existing()?;
                DownloadSink::file(&named, &url)?
            }
            Destination::Stdout => {
                // Not `Stdout`: it keeps what follows the last newline, and whoever reads would get
                // it after a gap only.
                let output = std::io::stdout().as_fd().try_clone_to_owned();
                let output = output.map_err(|error| {
                    TransferFailure::storage("cannot write to standard output", &error)
                })?;
                DownloadSink::output(Box::new(File::from(output)), &url)
            }
            Destination::Device(path) => {
                let device = OpenOptions::new().write(true).open(path);
                let device = device.map_err(|error| {
                    TransferFailure::storage(&format!("cannot write to {}", path.display()), &error)
                })?;
                DownloadSink::output(Box::new(device), &url)
            }
            Destination::Nowhere => DownloadSink::output(Box::new(std::io::sink()), &url),
        };
        Ok(Download {
            held_at_start: sink.held_bytes(),
            most_held: sink.held_bytes(),
            sink,
            named,
            pending_rename,
            received: 0,
            duplicate_bytes: 0,
            restarts: 0,
            distrust: None,
            ranges_refused: false,
            came: None,
            encoding: None,
            said_encoding: false,
            offered_name: None,
            version: None,
            is_unchanged: false,
        })
    }

    /// Reports the destination, and the part of an earlier run.
    pub(super) fn announce(&mut self, control: &mut TransferControl<'_>) {
        let file = control.job.destination.describe(&self.named);
        let held = self.sink.held_bytes();
        control
            .reporter
            .begun(redact_url(&control.job.url), file, held);
        if let Some(why) = self.sink.discard_reason.take() {
            let text = format!("{why}; starting from the first byte");
            control.reporter.note(None, text);
        }
        if held > 0 {
            let text = format!("{} are here from an earlier run", human_bytes(held));
            control.reporter.note(None, text);
        }
    }

    /// Makes the source continue the answer that an earlier process began to read, if it can.
    pub(super) fn claim_flow(&self, claim: impl FnOnce(&crate::fetch::partial::FlowNote, u64)) {
        if let Some(flow) = &self.sink.note.flow {
            claim(flow, self.sink.note.durable_bytes);
        }
    }

    /// The next request: for the whole object, or for the rest with some overlap. `limit`: the most
    /// bytes that may be requested.
    fn next_request(&self, job: &TransferJob, limit: Option<u64>) -> GetRequest {
        let held = self.sink.held_bytes();
        let continues = held > 0 && self.distrust.is_none() && self.sink.note.validator.is_some();
        let overlap = match continues {
            true => self.sink.tail().len().min(OVERLAP_BYTES_MAX) as u64,
            false => 0,
        };
        let from = if continues { held - overlap } else { 0 };
        // From its first byte all of the object may have to come again.
        let to = limit
            .filter(|_| !self.ranges_refused && (continues || held == 0))
            .map(|limit| from + limit.max(overlap + 1) - 1)
            .filter(|to| self.sink.note.length.is_none_or(|length| to + 1 < length));
        GetRequest {
            from,
            to,
            if_range: self.sink.note.validator.clone().filter(|_| continues),
            unless: job.unless.clone().filter(|_| held == 0),
            ..whole_object(job)
        }
    }

    /// Appends bytes after the overlap. False if the overlap differs.
    fn append(
        &mut self,
        bytes: &[u8],
        overlap: &mut Vec<u8>,
        control: &mut TransferControl<'_>,
    ) -> Result<bool, TransferFailure> {
        let repeated = overlap.len().min(bytes.len());
        self.duplicate_bytes += repeated as u64;
        if bytes[..repeated] != overlap[..repeated] {
            self.duplicate_bytes += (bytes.len() - repeated) as u64;
            let text = "the server says that the object is the same, but its bytes differ";
            self.distrust = Some(text.into());
            return Ok(false);
        }
        overlap.drain(..repeated);
        if repeated < bytes.len() {
            let now = BootInstant::now();
            self.came = Some((self.came.map_or(now, |(first, _)| first), now));
        }
        self.sink.append(&bytes[repeated..])?;
        if self.sink.held_bytes() > self.most_held {
            self.most_held = self.sink.held_bytes();
            control.on_growth();
        }
        Ok(true)
    }

    /// The object is complete if its length says so, or if the length is unknown and the answer ended
    /// cleanly.
    fn end_of_answer(&self, ended_cleanly: bool) -> AnswerEnd {
        match self.sink.note.length {
            Some(length) if self.sink.held_bytes() >= length => AnswerEnd::Whole,
            None if ended_cleanly => AnswerEnd::Whole,
            _ => AnswerEnd::Incomplete,
        }
    }
}

/// A request for the whole object of the job.
pub(super) fn whole_object(job: &TransferJob) -> GetRequest {
    GetRequest {
        url: job.url.clone(),
        from: 0,
        to: None,
        if_range: None,
        unless: None,
        cookies: job.cookies.clone(),
        allow_downgrade: job.allow_downgrade,
        fields: job.fields.clone(),
        method: job.method,
    }
}

impl<'a, S: TransferSource<'a>> TransferContent<'a, S> for Download {
    type Request = GetRequest;
    type Answer = FetchResponse;
    type Body = JoinedAnswer;

    fn progress(&self) -> ContentProgress {
        ContentProgress {
            done: self.sink.held_bytes(),
            length: self.sink.note.length,
            repeated_by_request: self.sink.tail().len() as u64,
            most: self.most_held,
            is_recognisable: self.sink.note.validator.is_some(),
        }
    }

    fn moved_bytes(&self) -> u64 {
        self.received
    }

    fn is_whole(&self) -> bool {
        let held = self.sink.held_bytes();
        held > 0 && self.sink.note.length == Some(held)
    }

    fn learns_size(&self) -> bool {
        true
    }

    fn request(&mut self, source: &S, control: &TransferControl<'_>) -> GetRequest {
        self.next_request(control.job, source.request_limit(control))
    }

    fn continued(
        &mut self,
        source: &mut S,
        control: &TransferControl<'_>,
    ) -> Option<FetchResponse> {
        let held = self.sink.held_bytes();
        source.take_claimed(&mut self.sink.note, held, control)
    }

    async fn send(
        client: &'a S::Client,
        request: &GetRequest,
        via: &EgressLink,
    ) -> Result<FetchResponse, FetchFault> {
        exchange(client, request, via).await
    }

    async fn accept(
        &mut self,
        answer: FetchResponse,
        request: GetRequest,
        source: &mut S,
        control: &mut TransferControl<'_>,
    ) -> Result<Option<JoinedAnswer>, FetchFault> {
        let progress = TransferContent::<'a, S>::progress(self);
        source.on_answer(&answer, control, progress)?;
        let Some(overlap) = self.join(&answer, &request, control).await? else {
            return Ok(None);
        };
        let from = match answer.part {
            ContentPart::Range { from, .. } => from,
            _ => 0,
        };
        source.note_flow(&mut self.sink.note, from);
        Ok(Some(JoinedAnswer {
            answer,
            overlap,
            held_before: self.sink.held_bytes(),
            is_open_ended: request.to.is_none(),
        }))
    }

    async fn next(body: &mut JoinedAnswer) -> Option<Result<Bytes, FetchFault>> {
        body.answer.next().await
    }

    fn take_in(
        &mut self,
        bytes: &Bytes,
        body: &mut JoinedAnswer,
        source: &mut S,
        control: &mut TransferControl<'_>,
    ) -> Result<IntakeResult, FetchFault> {
        self.received += bytes.len() as u64;
        source.on_bytes(bytes.len() as u64, control);
        let fits = self.append(bytes, &mut body.overlap, control);
        if !fits.map_err(FetchFault::Final)? {
            return Ok(IntakeResult::Unusable);
        }
        // All may be held and only now be known to be all: what is compared must come.
        let is_last = self.sink.note.length == Some(self.sink.held_bytes());
        Ok(match is_last && body.overlap.is_empty() {
            true => IntakeResult::Last,
            false => IntakeResult::More,
        })
    }

    fn measure(&mut self, _source: &mut S, _control: &mut TransferControl<'_>) {}

    fn explain(&self, fault: FetchFault) -> FetchFault {
        fault
    }

    fn conclude(
        &mut self,
        body: JoinedAnswer,
        cut_short: bool,
        source: &mut S,
        _control: &mut TransferControl<'_>,
    ) -> Result<AnswerEnd, FetchFault> {
        if self.is_unchanged {
            return Ok(AnswerEnd::Whole);
        }
        if cut_short {
            return Ok(self.end_of_answer(false));
        }
        if !body.overlap.is_empty() {
            self.distrust = Some("the object is shorter than what was received before".into());
            return Ok(AnswerEnd::Incomplete);
        }
        match self.end_of_answer(body.is_open_ended) {
            AnswerEnd::Incomplete if self.sink.held_bytes() == body.held_before => {
                Err(FetchFault::Origin {
                    text: format!("{} answered with nothing new", source.answerer()),
                    retry_after: None,
                })
            }
            end => Ok(end),
        }
    }

    async fn checkpoint(
        &mut self,
        source: &mut S,
        control: &mut TransferControl<'_>,
    ) -> Result<(), TransferFailure> {
        let (note, path) = (&self.sink.note, self.sink.note_path());
        source.persist_flow(note, path, control).await;
        self.sink.tick().await
    }

    async fn settle(&mut self, source: &S) -> Result<(), TransferFailure> {
        if !source.frees_what_arrived() || self.is_unchanged {
            return Ok(());
        }
        // Nobody can be asked for the length any more, if nobody knew it before.
        self.sink.note.length = Some(self.sink.held_bytes());
        self.sink.sync().await
    }

    fn is_claimable(&self) -> bool {
        self.sink.note.flow.is_some()
    }
}
