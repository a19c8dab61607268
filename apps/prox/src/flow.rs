//! One flow from its first byte to its end.
//!
//! ```text
//! admit ─▶ read head ─▶ parse ─┬─ CONNECT ──▶ tunnel.rs
//!                              ├─ RELAY, LISTEN ▶ relay.rs
//!                              ├─ PUT, POST ─▶ upload.rs ─▶ ask the origin ─▶ ─┐
//!                              └─ GET, HEAD ─▶ shelf or origin ─▶ part ─▶ send_source ─▶ watch
//!                                                                                        │
//!        delivered: free · deadline: free · broken: keep the copy for a while · fetch failed: reset
//! ```

use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::{FlowIo, SendSource};
use tokio::time::Instant;

use crate::answer::{self, AnswerSource, Served};
use crate::copy::PinnedCopy;
use crate::dormant::Memo;
use crate::keytext::show_key;
use crate::origin::without_query;
use crate::pin::{End, Pin};
use crate::prox::{Opened, Prox};
use crate::range::{Part, Range};
use crate::refusal::Refusal;
use crate::relay;
use crate::request::{Fetch, NoHead, Request, parse, read_head};
use crate::reset::ResetCause;
use crate::tunnel;
use crate::upload;
use crate::waking;
use crate::watch::{Gone, Watch};

/// How a flow ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The device has the whole answer (an error answer counts).
    Delivered,
    /// The device reset the flow or its session is lost; the text is the transport's.
    Broken(String),
    /// We reset the flow.
    Reset(ResetCause),
    /// It sleeps, and will be served again when its device comes back.
    Asleep,
    /// The device said that it does not want it any more.
    Forgotten,
}

/// One line about a flow that ended.
#[derive(Clone, Debug)]
pub struct FlowReport {
    /// The status that was answered; none if the flow broke before.
    pub status: Option<u16>,
    /// Where the bytes came from.
    pub served: Served,
    /// Bytes handed to the flow, heads included.
    pub bytes_down: u64,
    /// Bytes taken from the flow, for tunnels and uploads.
    pub bytes_up: u64,
    /// From its acceptance to its end.
    pub lasted: Duration,
    /// How it ended.
    pub outcome: Outcome,
    /// What was asked for: method and URL without its query, or host and port.
    pub asked: String,
}

/// What is known of a flow so far.
pub(crate) struct Record {
    began: Instant,
    pub(crate) status: Option<u16>,
    pub(crate) served: Served,
    pub(crate) bytes_down: u64,
    pub(crate) bytes_up: u64,
    pub(crate) asked: String,
}

/// Serves one flow and returns when it is over.
pub async fn serve_flow<F: FlowIo>(mut flow: F, prox: Arc<Prox>) -> FlowReport {
    let mut record = Record {
        began: Instant::now(),
        status: None,
        served: Served::Proxy,
        bytes_down: 0,
        bytes_up: 0,
        asked: String::new(),
    };
    let outcome = conduct(&mut flow, &prox, &mut record).await;
    if let Outcome::Reset(cause) = &outcome {
        flow.reset(cause.code());
    }
    let report = FlowReport {
        status: record.status,
        served: record.served,
        bytes_down: record.bytes_down,
        bytes_up: record.bytes_up,
        lasted: record.began.elapsed(),
        outcome,
        asked: record.asked,
    };
    report.log(&flow);
    report
}

impl FlowReport {
    fn log<F: FlowIo>(&self, flow: &F) {
        let (outcome, cause) = match &self.outcome {
            Outcome::Delivered => ("delivered", String::new()),
            Outcome::Broken(cause) => ("broken", cause.clone()),
            Outcome::Reset(cause) => (cause.word(), cause.to_string()),
            Outcome::Asleep => ("asleep", String::new()),
            Outcome::Forgotten => ("forgotten", String::new()),
        };
        let from = match self.served {
            Served::Origin => "origin",
            Served::Pinned => "pinned",
            Served::Proxy => "proxy",
            Served::Tunnel => "tunnel",
            Served::Relay => "relay",
        };
        tracing::info!(
            flow = flow.id(),
            client = &show_key(&flow.peer())[..8],
            asked = self.asked,
            status = self.status,
            from,
            bytes_down = self.bytes_down,
            bytes_up = self.bytes_up,
            lasted_ms = self.lasted.as_millis() as u64,
            outcome,
            cause,
            "flow ended"
        );
    }
}

async fn conduct<F: FlowIo>(flow: &mut F, prox: &Arc<Prox>, record: &mut Record) -> Outcome {
    if let Some(memo) = flow.memo() {
        return waking::serve_on(flow, prox, record, memo).await;
    }
    let mut watch = Watch::new(prox);
    match prox.admit(flow.peer(), flow.deadline_left()).await {
        Ok(permit) => {
            let outcome = serve_new(flow, prox, watch, record).await;
            permit.settle(&outcome);
            outcome
        }
        Err(refusal) => refuse(flow, prox, &mut watch, record, &refusal, false).await,
    }
}

/// Serves a flow from its request on.
async fn serve_new<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    mut watch: Watch,
    record: &mut Record,
) -> Outcome {
    let head = tokio::select! {
        head = read_head(flow, prox.config.request_timeout) => head,
        () = prox.stop.cancelled() => return Outcome::Reset(ResetCause::Stopping),
    };
    let head = match head {
        Ok(head) => head,
        Err(NoHead::Gone(error)) => return Outcome::Broken(error.to_string()),
        Err(NoHead::Refused(refusal)) => {
            return refuse(flow, prox, &mut watch, record, &refusal, false).await;
        }
    };
    match parse(&head) {
        Err(refusal) => refuse(flow, prox, &mut watch, record, &refusal, false).await,
        Ok(Request::Tunnel(target)) => {
            record.asked = format!("CONNECT {target}");
            let connecting = prox.upstream.connect(&target);
            let connected = tokio::select! {
                // A tunnel's bytes must not be thrown away: only our own stop is watched here.
                connected = connecting => connected,
                () = prox.stop.cancelled() => Err(Refusal::Stopping),
            };
            match connected {
                Ok(origin) => tunnel::serve(flow, head.rest(), origin, prox, record).await,
                Err(refusal) => refuse(flow, prox, &mut watch, record, &refusal, false).await,
            }
        }
        Ok(Request::Relay(to)) => relay::serve(flow, prox, &mut watch, record, &to).await,
        Ok(Request::Listen(callers)) => {
            relay::listen(flow, prox, &mut watch, record, &callers).await
        }
        Ok(Request::Upload(request)) => {
            let method = request.method.as_str();
            record.asked = format!("{method} {}", without_query(&request.url));
            upload::serve(flow, head.rest(), prox, &mut watch, record, &request).await
        }
        Ok(Request::Fetch(request)) => {
            let method = if request.head_only { "HEAD" } else { "GET" };
            record.asked = format!("{method} {}", without_query(&request.url));
            tracing::debug!(flow = flow.id(), url = %request.url, "asked");
            serve_fetch(flow, prox, &mut watch, record, &request).await
        }
    }
}

/// Answers a GET or HEAD.
async fn serve_fetch<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    watch: &mut Watch,
    record: &mut Record,
    request: &Fetch,
) -> Outcome {
    let client = flow.peer();
    let known = match (&request.range, &request.if_range) {
        (Some(_), Some(if_range)) if !request.head_only => {
            prox.shelf.find(client, request, if_range)
        }
        _ => None,
    };
    record.served = if known.is_some() {
        Served::Pinned
    } else {
        Served::Origin
    };
    let opened = match known {
        Some(copy) => Ok(Opened::Copy(copy)),
        None => tokio::select! {
            opened = prox.open(client, request) => opened,
            gone = watch.gone(flow, prox) => return early(gone),
        },
    };
    let copy = match opened {
        Ok(Opened::Copy(copy)) => copy,
        Ok(Opened::Bare(head, length)) => {
            record.status = Some(head.status.as_u16());
            let source = AnswerSource::head_only(answer::bare_head(&head, length.as_ref()));
            return send(flow, prox, watch, record, source, None, Keeping::New).await;
        }
        Err(refusal) => {
            return refuse(flow, prox, watch, record, &refusal, request.head_only).await;
        }
    };
    let outcome = serve_copy(flow, prox, watch, record, request, &copy).await;
    put_by(flow, prox, &outcome, copy);
    outcome
}

/// What becomes of a copy when a flow needs it no more.
pub(crate) fn put_by<F: FlowIo>(flow: &F, prox: &Prox, outcome: &Outcome, copy: Arc<PinnedCopy>) {
    let client = flow.peer();
    let intact = !matches!(copy.pin.extent().end, End::Failed(_));
    if *outcome == Outcome::Asleep {
        prox.lay_down(client, copy);
    } else if matches!(outcome, Outcome::Broken(_))
        && intact
        && copy.head.status == http::StatusCode::OK
    {
        // After the flow's deadline nobody wants it.
        let grace = flow
            .deadline_left()
            .map_or(prox.config.keep, |left| left.min(prox.config.keep));
        prox.shelf
            .keep(client, copy, grace, prox.config.client_kept_max);
    } else {
        drop(copy);
        prox.shelf.tidy(client);
    }
}

/// Answers from a copy, which may still grow.
async fn serve_copy<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    watch: &mut Watch,
    record: &mut Record,
    request: &Fetch,
    copy: &Arc<PinnedCopy>,
) -> Outcome {
    let range = range_of(request, copy);
    let (part, total) = loop {
        let extent = copy.pin.extent();
        let part = range.map_or(Part::Whole, |range| range.part(extent.have, extent.total));
        match (part, extent.end) {
            (Part::AskAgainAfter(_), End::Failed(cause)) => {
                let refusal = Refusal::BodyLost(cause.to_string());
                return refuse(flow, prox, watch, record, &refusal, false).await;
            }
            (Part::AskAgainAfter(bytes), _) => {
                tokio::select! {
                    _ = copy.pin.beyond(bytes) => {}
                    gone = watch.gone(flow, prox) => return early(gone),
                }
            }
            (part, _) => break (part, extent.total),
        }
    };
    let (start, end) = match part {
        Part::Bytes { start, end, .. } => (start, Some(end)),
        Part::Unsatisfiable { .. } => (0, Some(0)),
        Part::Whole | Part::AskAgainAfter(_) => (0, None),
    };
    record.status = Some(match part {
        Part::Bytes { .. } => 206,
        Part::Unsatisfiable { .. } => 416,
        _ => copy.head.status.as_u16(),
    });
    let attendance = Attendance::of(copy);
    let head = answer::copy_head(&copy.head, part, total, record.served);
    let source = AnswerSource::of_copy(head, copy.clone(), start, end, attendance.token());
    let part = Some((copy, end));
    send(flow, prox, watch, record, source, part, Keeping::New).await
}

/// The range to answer with, if the request has one that applies to this copy.
fn range_of(request: &Fetch, copy: &PinnedCopy) -> Option<Range> {
    if copy.head.status != http::StatusCode::OK {
        return None;
    }
    let range = Range::parse(request.range.as_ref()?)?;
    match &request.if_range {
        Some(if_range) if !copy.head.is_named_by(if_range) => None,
        _ => Some(range),
    }
}

/// Whether the flow has a memo already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keeping {
    /// It gets one now.
    New,
    /// It has: it slept.
    Kept,
    /// It gets none, and its session stays awake: nothing could go on with it.
    Never,
}

/// Hands an answer to the flow and stays until the flow is over or its copy fails.
pub(crate) async fn send<F: FlowIo>(
    flow: &mut F,
    prox: &Prox,
    watch: &mut Watch,
    record: &mut Record,
    source: AnswerSource,
    copy: Option<(&Arc<PinnedCopy>, Option<u64>)>,
    keeping: Keeping,
) -> Outcome {
    let source = Arc::new(source);
    let slept = keeping == Keeping::Kept;
    let mut kept = keeping != Keeping::New;
    if slept {
        flow.resume_source(source.clone() as Arc<dyn SendSource>);
    } else {
        flow.send_source(source.clone() as Arc<dyn SendSource>);
    }
    let memo = Memo {
        copy: copy.map(|(copy, _)| copy.id),
        head: source.head().iter().map(|b| char::from(*b)).collect(),
        start: source.start(),
        end: copy.and_then(|(_, end)| end),
        status: record.status.unwrap_or(0),
        pinned: record.served == Served::Pinned,
        asked: record.asked.clone(),
    };
    // Only what the vault knows can be promised.
    let stored = async {
        if let (Some((copy, _)), Some(vault), false) = (copy, &prox.vault, slept) {
            let total = copy.pin.extent().total;
            let entry = copy.head.entry(copy.pin.client(), &copy.asked, total);
            if vault.store(copy.id, &entry).await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    };
    let mut stored = std::pin::pin!(stored);
    let failed = async {
        match copy {
            Some((copy, end)) => copy.pin.failed_before(end).await,
            None => std::future::pending().await,
        }
    };
    let mut failed = std::pin::pin!(failed);
    let outcome = loop {
        tokio::select! {
            gone = watch.gone(flow, prox) => break early(gone),
            cause = &mut failed => break Outcome::Reset(cause),
            () = &mut stored, if !kept => {
                kept = true;
                flow.allow_hibernation(memo.encode());
            }
        }
    };
    record.bytes_down = source.sent();
    outcome
}

/// Sends an error answer.
pub(crate) async fn refuse<F: FlowIo>(
    flow: &mut F,
    prox: &Prox,
    watch: &mut Watch,
    record: &mut Record,
    refusal: &Refusal,
    to_head: bool,
) -> Outcome {
    tracing::debug!(flow = flow.id(), reason = %refusal, "refused");
    record.status = Some(refusal.status());
    record.served = Served::Proxy;
    let source = AnswerSource::head_only(answer::refusal(refusal, to_head));
    send(flow, prox, watch, record, source, None, Keeping::New).await
}

/// The outcome of a flow that went by itself.
pub(crate) fn early(gone: Gone) -> Outcome {
    match gone {
        Gone::Delivered => Outcome::Delivered,
        Gone::Broken(error) => Outcome::Broken(error.to_string()),
        Gone::Deadline => Outcome::Reset(ResetCause::Deadline),
        Gone::Stopped => Outcome::Reset(ResetCause::Stopping),
        Gone::Asleep => Outcome::Asleep,
        Gone::Forgotten => Outcome::Forgotten,
    }
}

/// Somebody stands by to reset the flow with a cause. Once dropped, the source tells failures
/// itself.
pub(crate) struct Attendance {
    here: Option<Arc<()>>,
    pin: Arc<Pin>,
}

impl Attendance {
    pub(crate) fn of(copy: &PinnedCopy) -> Attendance {
        Attendance {
            here: Some(Arc::new(())),
            pin: copy.pin.clone(),
        }
    }

    pub(crate) fn token(&self) -> std::sync::Weak<()> {
        self.here.as_ref().map(Arc::downgrade).unwrap_or_default()
    }
}

impl Drop for Attendance {
    fn drop(&mut self) {
        self.here = None;
        self.pin.wake();
    }
}
