//! The content of a transfer for the transfer loop: a download or an upload.

use bytes::Bytes;

use super::control::TransferControl;
use super::progress::ContentProgress;
use super::source::TransferSource;
use crate::fetch::dial::{EgressLink, FetchFault};
use crate::fetch::outcome::TransferFailure;

/// The result of taking in bytes of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IntakeResult {
    /// More of the answer may follow.
    More,
    /// The answer has nothing more that is needed.
    Last,
    /// The answer does not continue the object: another request is needed.
    Unusable,
}

/// How an answer ended without a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AnswerEnd {
    /// The object is complete.
    Whole,
    /// Something is still missing.
    Incomplete,
}

/// A download or an upload over a source of type `S`.
pub(super) trait TransferContent<'a, S: TransferSource<'a>> {
    /// The type of a request.
    type Request;
    /// An answer whose head was received.
    type Answer;
    /// An answer that continues the object.
    type Body;

    /// The progress of the content.
    fn progress(&self) -> ContentProgress;

    /// Payload bytes moved in this run, for rates.
    fn moved_bytes(&self) -> u64;

    /// Whether there is nothing left to move.
    fn is_whole(&self) -> bool;

    /// Whether an answer shows how much there is to move.
    fn learns_size(&self) -> bool;

    /// The request for the missing bytes.
    fn request(&mut self, source: &S, control: &TransferControl<'_>) -> Self::Request;

    /// The rest of an answer that an earlier process began to read, if there is one.
    fn continued(&mut self, source: &mut S, control: &TransferControl<'_>) -> Option<Self::Answer>;

    /// Sends a request and waits for the head of the answer.
    async fn send(
        client: &'a S::Client,
        request: &Self::Request,
        via: &EgressLink,
    ) -> Result<Self::Answer, FetchFault>;

    /// Checks whether an answer continues the object; none if another request is needed.
    async fn accept(
        &mut self,
        answer: Self::Answer,
        request: Self::Request,
        source: &mut S,
        control: &mut TransferControl<'_>,
    ) -> Result<Option<Self::Body>, FetchFault>;

    /// The next bytes of an answer; none at its clean end.
    async fn next(body: &mut Self::Body) -> Option<Result<Bytes, FetchFault>>;

    /// Takes in bytes of an answer.
    fn take_in(
        &mut self,
        bytes: &Bytes,
        body: &mut Self::Body,
        source: &mut S,
        control: &mut TransferControl<'_>,
    ) -> Result<IntakeResult, FetchFault>;

    /// Updates the progress if answers do not show it.
    fn measure(&mut self, source: &mut S, control: &mut TransferControl<'_>);

    /// The meaning of a fault for this content.
    fn explain(&self, fault: FetchFault) -> FetchFault;

    /// Handles the end of an answer. `cut_short`: its rest was not wanted.
    fn conclude(
        &mut self,
        body: Self::Body,
        cut_short: bool,
        source: &mut S,
        control: &mut TransferControl<'_>,
    ) -> Result<AnswerEnd, FetchFault>;

    /// Saves progress when it is time.
    async fn checkpoint(
        &mut self,
        source: &mut S,
        control: &mut TransferControl<'_>,
    ) -> Result<(), TransferFailure>;

    /// Makes the complete object durable before the source is informed of its arrival.
    async fn settle(&mut self, source: &S) -> Result<(), TransferFailure>;

    /// Whether a later process could continue the current flow.
    fn is_claimable(&self) -> bool;
}
