//! The loop with a source and a content that follow a script.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use d2tp_driver::SchedulerHandle;
use d2tp_sched::{LinkCandidate, SchedulerKind, TransferDirection};
use tokio::sync::watch;
use url::Url;

use super::*;
use crate::fetch::dial::{ByteStream, Dial};
use crate::fetch::exchange::FetchResponse;
use crate::fetch::mode::FetchMode;
use crate::fetch::outcome::{TransferExit, TransferReason};
use crate::fetch::report::{TransferEvent, TransferObserver};
use crate::fetch::request_method::RequestMethod;
use crate::fetch::transfer::job::{Destination, TransferContext, TransferJob};
use crate::terms::TransferTerms;

/// Bytes of the object.
const LENGTH: u64 = 10;

/// What comes of a request.
enum ScriptedAnswer {
    /// A clean end after this many bytes.
    Bytes(u64),
    /// A fault after this many bytes.
    Breaks(u64),
    /// A fault in place of a head.
    Fault,
}

fn fault() -> FetchFault {
    FetchFault::Origin {
        text: "it broke".into(),
        retry_after: None,
    }
}

/// An origin that answers by a script, and what was done with it.
#[derive(Default)]
struct ScriptedOrigin {
    answers: Mutex<VecDeque<ScriptedAnswer>>,
    /// How many requests for a link are answered with a wait.
    waits: Mutex<u32>,
    done: Mutex<Vec<&'static str>>,
}

impl ScriptedOrigin {
    fn note(&self, what: &'static str) {
        self.done.lock().unwrap().push(what);
    }
}

impl Dial for ScriptedOrigin {
    async fn dial(&self, _: &Url, _: &EgressLink) -> Result<Box<dyn ByteStream>, FetchFault> {
        unreachable!("the content follows the script")
    }

    fn mode(&self) -> FetchMode {
        FetchMode::Direct
    }
}

struct ScriptedSource<'a>(&'a ScriptedOrigin);

impl<'a> TransferSource<'a> for ScriptedSource<'a> {
    type Client = ScriptedOrigin;

    fn client(&self) -> &'a ScriptedOrigin {
        self.0
    }

    fn candidates(&mut self, _: &mut TransferControl<'_>) -> Vec<LinkCandidate> {
        Vec::new()
    }

    async fn prepare(
        &mut self,
        _: &mut TransferControl<'_>,
        _: ContentProgress,
    ) -> Result<Readiness, TransferFailure> {
        let mut waits = self.0.waits.lock().unwrap();
        if *waits > 0 {
            *waits -= 1;
            self.0.note("wait");
            return Ok(Readiness::Wait(LinkWait {
                reason: TransferReason::NoPath,
                why: String::new(),
                unblocks: String::new(),
            }));
        }
        self.0.note("ask");
        Ok(Readiness::Ready(EgressLink {
            device: None,
            sources: Vec::new(),
        }))
    }

    fn review(
        &mut self,
        _: &mut TransferControl<'_>,
        _: ContentProgress,
    ) -> Result<RequestReview, TransferFailure> {
        Ok(RequestReview::Stay)
    }

    fn on_answer(
        &mut self,
        _: &FetchResponse,
        _: &mut TransferControl<'_>,
        _: ContentProgress,
    ) -> Result<(), FetchFault> {
        Ok(())
    }

    fn on_bytes(&mut self, _: u64, _: &mut TransferControl<'_>) {}

    fn on_epoch(&mut self, _: u64, _: Duration, _: &mut TransferControl<'_>) -> String {
        String::new()
    }

    fn check_silence(&mut self, _: Duration) -> Result<(), FetchFault> {
        Ok(())
    }

    fn leave(&mut self) {
        self.0.note("leave");
    }

    fn recover(
        &mut self,
        _: FetchFault,
        _: &mut TransferControl<'_>,
        _: ContentProgress,
    ) -> Result<RetryDecision, TransferFailure> {
        self.0.note("recover");
        Ok(RetryDecision::After(Backoff {
            text: "it broke".into(),
            reason: TransferReason::OriginWait,
            retry_after: None,
            counts: true,
            at_most: Duration::ZERO,
            ends_with_links: false,
            first_at_once: true,
        }))
    }

    fn answerer(&self) -> &'static str {
        "the script"
    }

    async fn close(&mut self, whole: bool, _: bool) {
        self.0.note(if whole { "close whole" } else { "close" });
    }
}

/// An object of which only the length counts.
#[derive(Default)]
struct CountedContent {
    done: u64,
}

impl<'a> TransferContent<'a, ScriptedSource<'a>> for CountedContent {
    type Request = ();
    type Answer = ScriptedAnswer;
    type Body = ScriptedAnswer;

    fn progress(&self) -> ContentProgress {
        ContentProgress {
            done: self.done,
            length: Some(LENGTH),
            ..ContentProgress::default()
        }
    }

    fn moved_bytes(&self) -> u64 {
        self.done
    }

    fn is_whole(&self) -> bool {
        self.done == LENGTH
    }

    fn learns_size(&self) -> bool {
        true
    }

    fn request(&mut self, _: &ScriptedSource<'a>, _: &TransferControl<'_>) {}

    fn continued(
        &mut self,
        _: &mut ScriptedSource<'a>,
        _: &TransferControl<'_>,
    ) -> Option<ScriptedAnswer> {
        None
    }

    async fn send(
        origin: &'a ScriptedOrigin,
        (): &(),
        _: &EgressLink,
    ) -> Result<ScriptedAnswer, FetchFault> {
        let answer = origin.answers.lock().unwrap().pop_front();
        match answer {
            Some(ScriptedAnswer::Fault) => Err(fault()),
            Some(answer) => Ok(answer),
            None => std::future::pending().await,
        }
    }

    async fn accept(
        &mut self,
        answer: ScriptedAnswer,
        (): (),
        _: &mut ScriptedSource<'a>,
        _: &mut TransferControl<'_>,
    ) -> Result<Option<ScriptedAnswer>, FetchFault> {
        Ok(Some(answer))
    }

    async fn next(body: &mut ScriptedAnswer) -> Option<Result<Bytes, FetchFault>> {
        let (ScriptedAnswer::Bytes(left) | ScriptedAnswer::Breaks(left)) = body else {
            return Some(Err(fault()));
        };
        if *left > 0 {
            *left -= 1;
            return Some(Ok(Bytes::from_static(b"x")));
        }
        match body {
            ScriptedAnswer::Bytes(_) => None,
            _ => Some(Err(fault())),
        }
    }

    fn take_in(
        &mut self,
        bytes: &Bytes,
        _: &mut ScriptedAnswer,
        _: &mut ScriptedSource<'a>,
        control: &mut TransferControl<'_>,
    ) -> Result<IntakeResult, FetchFault> {
        self.done += bytes.len() as u64;
        control.retries.reset();
        Ok(match self.done == LENGTH {
            true => IntakeResult::Last,
            false => IntakeResult::More,
        })
    }

    fn measure(&mut self, _: &mut ScriptedSource<'a>, _: &mut TransferControl<'_>) {}

    fn explain(&self, fault: FetchFault) -> FetchFault {
        fault
    }

    fn conclude(
        &mut self,
        _: ScriptedAnswer,
        _: bool,
        _: &mut ScriptedSource<'a>,
        _: &mut TransferControl<'_>,
    ) -> Result<AnswerEnd, FetchFault> {
        Ok(match self.done == LENGTH {
            true => AnswerEnd::Whole,
            false => AnswerEnd::Incomplete,
        })
    }

    async fn checkpoint(
        &mut self,
        _: &mut ScriptedSource<'a>,
        _: &mut TransferControl<'_>,
    ) -> Result<(), TransferFailure> {
        Ok(())
    }

    async fn settle(&mut self, source: &ScriptedSource<'a>) -> Result<(), TransferFailure> {
        source.0.note("settle");
        Ok(())
    }

    fn is_claimable(&self) -> bool {
        false
    }
}

struct NoObserver;

impl TransferObserver for NoObserver {
    fn on_event(&mut self, _: &TransferEvent) {}
}

/// Runs the loop with these answers; `waits`: links that are not there yet; `stopped` from the start.
async fn run(
    answers: impl IntoIterator<Item = ScriptedAnswer>,
    waits: u32,
    stopped: bool,
) -> (Result<(), TransferFailure>, Vec<&'static str>) {
    let job = TransferJob {
        url: "http://origin.example/a".parse().unwrap(),
        destination: Destination::Stdout,
        terms: TransferTerms::default(),
        now: false,
        integrity: None,
        tries_max: 2,
        stall: Duration::from_secs(10),
        allow_downgrade: false,
        fields: [].into(),
        cookies: None,
        unless: None,
        keep_older: 0,
        method: RequestMethod::Get,
    };
    let (links, watched) = watch::channel(Arc::new(Vec::new()));
    let (_stop, stop) = watch::channel(stopped);
    let scheduler = SchedulerHandle::new(SchedulerKind::default());
    let context = TransferContext::standalone(watched, stop, scheduler);
    // A change that nobody has seen yet ends the first wait at once.
    links.send_replace(Arc::new(Vec::new()));
    let origin = ScriptedOrigin {
        answers: Mutex::new(answers.into_iter().collect()),
        waits: Mutex::new(waits),
        ..ScriptedOrigin::default()
    };
    let mut observer = NoObserver;
    let (start, direction) = (BootInstant::now(), TransferDirection::Down);
    let mode = FetchMode::Direct;
    let control = TransferControl::new(&job, mode, context, direction, &mut observer, start);
    let content = CountedContent::default();
    let mut transfer = TransferLoop::new(control, ScriptedSource(&origin), content);
    let (outcome, _) = transfer.run().await;
    drop(transfer);
    (outcome, origin.done.into_inner().unwrap())
}

#[tokio::test]
async fn a_transfer_goes_on_after_waits_faults_and_short_answers_until_it_is_whole() {
    let answers = [
        ScriptedAnswer::Fault,
        ScriptedAnswer::Bytes(3),
        ScriptedAnswer::Breaks(2),
        ScriptedAnswer::Bytes(5),
    ];
    let (outcome, done) = run(answers, 1, false).await;
    assert!(outcome.is_ok(), "{outcome:?}");
    let expected = [
        "wait",
        "ask",
        "recover",
        "ask",
        "leave",
        "ask",
        "recover",
        "ask",
        "settle",
        "close whole",
    ];
    assert_eq!(done, expected);
}

#[tokio::test]
async fn tries_without_a_new_byte_run_out() {
    let answers = [ScriptedAnswer::Fault, ScriptedAnswer::Fault];
    let (outcome, done) = run(answers, 0, false).await;
    let failure = outcome.expect_err("the origin is given up");
    assert_eq!(failure.exit, TransferExit::Error);
    assert_eq!(
        failure.text,
        "it broke; gave up after 2 tries without new data"
    );
    assert_eq!(done, ["ask", "recover", "ask", "recover", "close"]);
}

#[tokio::test]
async fn a_transfer_that_was_stopped_asks_for_nothing() {
    let (outcome, done) = run([ScriptedAnswer::Bytes(LENGTH)], 0, true).await;
    assert_eq!(outcome.expect_err("stopped").exit, TransferExit::Cancelled);
    assert_eq!(done, ["close"]);
}
