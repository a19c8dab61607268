//! The source of a transfer for the transfer loop: connections to the origin itself, or the flows
//! of a session with a proxy.

use std::path::Path;
use std::time::Duration;

use d2tp_driver::SessionEvent;
use d2tp_sched::LinkCandidate;
use tokio::sync::watch;

use super::control::{LinkWait, TransferControl};
use super::progress::ContentProgress;
use super::retry::RetryDecision;
use crate::fetch::dial::{Dial, EgressLink, FetchFault};
use crate::fetch::exchange::FetchResponse;
use crate::fetch::outcome::TransferFailure;
use crate::fetch::partial::PartialNote;

/// Whether a request can be made now.
pub(super) enum Readiness {
    /// The request can leave by this link.
    Ready(EgressLink),
    /// No request can be made before something changes.
    Wait(LinkWait),
}

/// The result of a new decision about links for a running request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestReview {
    /// The request continues.
    Stay,
    /// Another request over another link, or none for now, is better.
    Leave,
}

/// Carries a transfer: directly from the origin, or through a proxy.
pub(super) trait TransferSource<'a> {
    /// The type that opens streams to the origin.
    type Client: Dial + 'a;

    /// The client that opens streams to the origin.
    fn client(&self) -> &'a Self::Client;

    /// The candidate links, for the scheduler.
    fn candidates(&mut self, control: &mut TransferControl<'_>) -> Vec<LinkCandidate>;

    /// Finds a link, or opens a session, for the next request.
    async fn prepare(
        &mut self,
        control: &mut TransferControl<'_>,
        progress: ContentProgress,
    ) -> Result<Readiness, TransferFailure>;

    /// Decides again about links, after a change of them and once per epoch.
    fn review(
        &mut self,
        control: &mut TransferControl<'_>,
        progress: ContentProgress,
    ) -> Result<RequestReview, TransferFailure>;

    /// Notifies when what links may carry must be decided again: a link of the session changed, or a
    /// connection attempt goes unanswered. None without either.
    fn watch_candidates(&self) -> Option<watch::Receiver<()>> {
        None
    }

    /// The next event of the session; never returns without one.
    async fn next_event(&mut self) -> SessionEvent {
        std::future::pending().await
    }

    /// Handles an event of the session.
    fn on_event(
        &mut self,
        _event: SessionEvent,
        _control: &mut TransferControl<'_>,
        _progress: ContentProgress,
    ) -> Result<(), TransferFailure> {
        Ok(())
    }

    /// The most bytes of the object that a request may ask for now; none is no limit.
    fn request_limit(&self, _control: &TransferControl<'_>) -> Option<u64> {
        None
    }

    /// Takes in the head of an answer.
    ///
    /// # Errors
    /// It is not the origin's.
    fn on_answer(
        &mut self,
        answer: &FetchResponse,
        control: &mut TransferControl<'_>,
        progress: ContentProgress,
    ) -> Result<(), FetchFault>;

    /// Reports which link carries before the first byte arrives.
    fn announce_link(&mut self, _control: &mut TransferControl<'_>) {}

    /// Records that an answer brought bytes.
    fn on_bytes(&mut self, bytes: u64, control: &mut TransferControl<'_>);

    /// Records that the answer is not read now, because the user limits the rate: silence is no fault of
    /// anybody's.
    fn on_held(&mut self) {}

    /// Whether nothing more may be requested, so that the answer is cut short.
    fn is_cut_short(&self, _control: &TransferControl<'_>) -> bool {
        false
    }

    /// Ends an epoch in which `bytes` were moved. Returns the links that carried them.
    fn on_epoch(
        &mut self,
        bytes: u64,
        length: Duration,
        control: &mut TransferControl<'_>,
    ) -> String;

    /// Checks whether the answer has been silent for longer than `limit`.
    fn check_silence(&mut self, limit: Duration) -> Result<(), FetchFault>;

    /// The underlying cause of a broken stream.
    fn cause(
        &self,
        fault: FetchFault,
        _control: &TransferControl<'_>,
        _progress: ContentProgress,
    ) -> FetchFault {
        fault
    }

    /// Counts what the links carried for a finished request.
    fn on_request_end(&mut self, _control: &mut TransferControl<'_>) {}

    /// Gives up the current request.
    fn leave(&mut self) {}

    /// Says how to go on after a fault.
    ///
    /// # Errors
    /// Trying again will not help.
    fn recover(
        &mut self,
        fault: FetchFault,
        control: &mut TransferControl<'_>,
        progress: ContentProgress,
    ) -> Result<RetryDecision, TransferFailure>;

    /// The rest of an answer that an earlier process began to read, if `note` names one that can still
    /// be continued. Otherwise the name is removed from `note`.
    fn take_claimed(
        &mut self,
        _note: &mut PartialNote,
        _held_bytes: u64,
        _control: &TransferControl<'_>,
    ) -> Option<FetchResponse> {
        None
    }

    /// Records in the note how a later process can continue an answer that begins with byte `from` of
    /// the object.
    fn note_flow(&mut self, _note: &mut PartialNote, _from: u64) {}

    /// Records in the instance, once that is possible, what a later process needs.
    async fn persist_flow(
        &mut self,
        _note: &PartialNote,
        _path: Option<&Path>,
        _control: &mut TransferControl<'_>,
    ) {
    }

    /// Whether the sender frees bytes as soon as their arrival is reported, so that they must be
    /// durable here before.
    fn frees_what_arrived(&self) -> bool {
        false
    }

    /// The host that answers, for users.
    fn answerer(&self) -> &'static str;

    /// Payload bytes that were carried more than once below HTTP.
    fn duplicate_bytes(&self) -> u64 {
        0
    }

    /// Closes what is open. `whole`: the object is complete; `claimable`: a later process could
    /// continue the current flow.
    async fn close(&mut self, _whole: bool, _claimable: bool) {}
}

/// Waits until [`TransferSource::watch_candidates`] notifies; forever if it does not.
pub(super) async fn candidates_changed(candidates: &mut Option<watch::Receiver<()>>) {
    if let Some(candidates) = candidates
        && candidates.changed().await.is_ok()
    {
        return;
    }
    std::future::pending().await
}
