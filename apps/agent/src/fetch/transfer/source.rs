//! What carries a transfer, as the transfer loop sees it: connections to the origin itself, or the
//! flows of a session with a proxy.

use std::path::Path;
use std::time::Duration;

use d2tp_driver::SessionEvent;
use d2tp_sched::LinkCandidate;
use tokio::sync::watch;

use super::control::{LinkWait, TransferControl};
use super::progress::ContentProgress;
use super::retry::Retry;
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

/// What the links are worth to a request under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Review {
    /// The request goes on.
    Stay,
    /// Another request over another link, or none for now, is better.
    Leave,
}

/// What carries a transfer.
pub(super) trait TransferSource<'a> {
    /// What opens streams to the origin.
    type Client: Dial + 'a;

    /// What opens streams to the origin.
    fn client(&self) -> &'a Self::Client;

    /// The links it could use now, as the scheduler sees them.
    fn candidates(&mut self, control: &mut TransferControl<'_>) -> Vec<LinkCandidate>;

    /// Finds a link, or opens a session, for the next request.
    async fn prepare(
        &mut self,
        control: &mut TransferControl<'_>,
        progress: ContentProgress,
    ) -> Result<Readiness, TransferFailure>;

    /// Decides again about links, after a change of them and once in each epoch.
    fn review(
        &mut self,
        control: &mut TransferControl<'_>,
        progress: ContentProgress,
    ) -> Result<Review, TransferFailure>;

    /// Tells when a link of its session begins to answer, or counts as silent; none without a session.
    fn watch_answers(&self) -> Option<watch::Receiver<()>> {
        None
    }

    /// The next event of its session; never, where it has none.
    async fn next_event(&mut self) -> SessionEvent {
        std::future::pending().await
    }

    /// Takes in an event of its session.
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

    /// Says which link carries, before the first byte has come.
    fn announce_link(&mut self, _control: &mut TransferControl<'_>) {}

    /// Takes in that an answer brought bytes.
    fn on_bytes(&mut self, bytes: u64, control: &mut TransferControl<'_>);

    /// Whether nothing more may be asked of the answer, however much of it is to come.
    fn is_cut_short(&self, _control: &TransferControl<'_>) -> bool {
        false
    }

    /// Ends an epoch, in which `bytes` were moved: returns the links that carried them.
    fn on_epoch(
        &mut self,
        bytes: u64,
        length: Duration,
        control: &mut TransferControl<'_>,
    ) -> String;

    /// Finds out whether the answer has been silent for too long; `limit` is what is too long.
    fn check_silence(&mut self, limit: Duration) -> Result<(), FetchFault>;

    /// What a broken stream is really about.
    fn cause(
        &self,
        fault: FetchFault,
        _control: &TransferControl<'_>,
        _progress: ContentProgress,
    ) -> FetchFault {
        fault
    }

    /// Counts what the links carried for a request that is over.
    fn on_request_end(&mut self, _control: &mut TransferControl<'_>) {}

    /// Gives the request at hand up, for another one.
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
    ) -> Result<Retry, TransferFailure>;

    /// The rest of an answer that an earlier process began to read, where `note` names one and it can
    /// still be had. Without one, `note` names none any more.
    fn take_claimed(
        &mut self,
        _note: &mut PartialNote,
        _held_bytes: u64,
        _control: &TransferControl<'_>,
    ) -> Option<FetchResponse> {
        None
    }

    /// Notes how a later process can go on with an answer that begins with byte `from` of the object.
    fn note_flow(&mut self, _note: &mut PartialNote, _from: u64) {}

    /// Keeps, once that is possible, what a later process needs for it.
    async fn persist_flow(
        &mut self,
        _note: &PartialNote,
        _path: Option<&Path>,
        _control: &mut TransferControl<'_>,
    ) {
    }

    /// Whether what has arrived is freed elsewhere as soon as that is told, so that it must be safe
    /// here before.
    fn frees_what_arrived(&self) -> bool {
        false
    }

    /// Who answers, for people.
    fn answerer(&self) -> &'static str;

    /// Payload bytes that were carried more than once below the object.
    fn duplicate_bytes(&self) -> u64 {
        0
    }

    /// Ends what it has open. `whole`: the object has arrived; `claimable`: a later process could go
    /// on with the flow at hand.
    async fn close(&mut self, _whole: bool, _claimable: bool) {}
}

/// Waits until a link of the session begins to answer, or counts as silent; without a session, for ever.
pub(super) async fn answers_changed(answers: &mut Option<watch::Receiver<()>>) {
    if let Some(answers) = answers
        && answers.changed().await.is_ok()
    {
        return;
    }
    std::future::pending().await
}
