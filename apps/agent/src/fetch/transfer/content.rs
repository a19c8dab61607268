//! What is moved, as the transfer loop sees it: a download or an upload.

use bytes::Bytes;

use super::control::TransferControl;
use super::progress::ContentProgress;
use super::source::TransferSource;
use crate::fetch::dial::{EgressLink, FetchFault};
use crate::fetch::outcome::TransferFailure;

/// What became of bytes that an answer brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Taken {
    /// More of the answer may follow.
    More,
    /// The answer has nothing more that is needed.
    Last,
    /// The answer does not continue what is there: another request is needed.
    Unusable,
}

/// How an answer ended without a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AnswerEnd {
    /// The object is whole.
    Whole,
    /// Something is still missing.
    Incomplete,
}

/// A download or an upload over a source of kind `S`.
pub(super) trait TransferContent<'a, S: TransferSource<'a>> {
    /// What is asked.
    type Request;
    /// An answer whose head has come.
    type Answer;
    /// An answer that continues what is there, and what is known of that.
    type Body;

    /// How far it is.
    fn progress(&self) -> ContentProgress;

    /// Payload bytes moved in this run, for rates.
    fn moved_bytes(&self) -> u64;

    /// Whether there is nothing to move.
    fn is_whole(&self) -> bool;

    /// Whether an answer tells how much there is to move.
    fn learns_size(&self) -> bool;

    /// The request for what is missing.
    fn request(&mut self, source: &S, control: &TransferControl<'_>) -> Self::Request;

    /// The rest of an answer that an earlier process began to read, where there is one.
    fn continued(&mut self, source: &mut S, control: &TransferControl<'_>) -> Option<Self::Answer>;

    /// Sends a request and waits for the head of the answer.
    async fn send(
        client: &'a S::Client,
        request: &Self::Request,
        via: &EgressLink,
    ) -> Result<Self::Answer, FetchFault>;

    /// Decides whether an answer continues what is there; none where another request is needed.
    fn accept(
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
    ) -> Result<Taken, FetchFault>;

    /// Brings the progress up to date where no answer tells it.
    fn measure(&mut self, source: &mut S, control: &mut TransferControl<'_>);

    /// What a fault means for what is moved.
    fn explain(&self, fault: FetchFault) -> FetchFault;

    /// The end of an answer. `cut_short`: its rest was not wanted.
    fn conclude(
        &mut self,
        body: Self::Body,
        cut_short: bool,
        source: &mut S,
        control: &mut TransferControl<'_>,
    ) -> Result<AnswerEnd, FetchFault>;

    /// Keeps what must not be lost, when it is time for that.
    async fn checkpoint(
        &mut self,
        source: &mut S,
        control: &mut TransferControl<'_>,
    ) -> Result<(), TransferFailure>;

    /// Makes the whole object safe before the source hears that it has arrived.
    async fn settle(&mut self, source: &S) -> Result<(), TransferFailure>;

    /// Whether a later process could go on with the flow at hand.
    fn is_claimable(&self) -> bool;
}
