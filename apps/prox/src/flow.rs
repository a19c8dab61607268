//! One flow from its first byte to its end.
//!
//! ```text
//! admit ─▶ read head ─▶ parse ─┬─ CONNECT ──▶ tunnel.rs
//!                              ├─ RELAY, LISTEN ▶ relay.rs
//!                              ├─ MAILBOX ──▶ mailbox.rs
//!                              ├─ CONNECT-IP ▶ packet_tunnel.rs
//!                              ├─ /feeds/… ─▶ link_flow.rs, of apps without a key
//!                              ├─ ENROL ────▶ enrolment.rs, also of devices that are not admitted
//!                              ├─ PUT, POST ─▶ upload.rs ─▶ ask the origin ─▶ ─┐
//!                              └─ GET, HEAD ─▶ copy or origin ─▶ part ─▶ flow_answer.rs ─▶ watch
//!                                                                                        │
//!        delivered: free · deadline: free · broken: keep the copy for a while · fetch failed: reset
//! ```

use std::pin::Pin;
use std::sync::Arc;

use d2tp_driver::{FlowIo, MemoryCharge, ResetCause};

use crate::address_key::address_of;
use crate::answer::{self, AnswerSource};
use crate::cached_fetch::{FetchedAnswer, OpenedCopy};
use crate::charged_tcp::ChargedTcp;
use crate::copy_answer::{PreparedPart, is_device, prepare_copy, supply_reports};
use crate::counters::{CacheResult, TrafficKind};
use crate::enrolment;
use crate::flow_answer::{AnswerPart, MemoState, refuse, send};
use crate::flow_hibernation::{self, retain_copy};
use crate::flow_report::{FlowLogRecord, ProxFlowOutcome, ProxFlowReport, ServedFrom};
use crate::flow_watch::FlowWatch;
use crate::link_flow;
use crate::link_keys::guest_address_of;
use crate::mailbox;
use crate::metered_flow::MeteredFlow;
use crate::origin::without_query;
use crate::packet_tunnel;
use crate::prox::Prox;
use crate::refusal::ProxRefusal;
use crate::relay;
use crate::request::{FetchRequest, ProxRequest, parse};
use crate::request_head::{RequestHeadError, read_head};
use crate::tunnel;
use crate::upload;

/// Serves one flow and returns when it is over.
pub async fn serve_flow<F: FlowIo>(flow: F, prox: Arc<Prox>) -> ProxFlowReport {
    let traffic = prox.traffic.flow(flow.peer());
    let mut flow = MeteredFlow::new(flow, traffic.clone());
    let mut record = FlowLogRecord::new(traffic);
    let outcome = conduct(&mut flow, &prox, &mut record).await;
    if let ProxFlowOutcome::Reset(cause) = &outcome {
        flow.reset(cause.code());
    }
    prox.counters.on_flow_ended(outcome.as_str());
    if outcome == ProxFlowOutcome::Reset(ResetCause::MonthUsedUp) {
        prox.counters.on_limit("client_month");
    }
    let report = ProxFlowReport {
        status: record.status,
        served: record.served,
        bytes_down: record.bytes_down,
        bytes_up: record.bytes_up,
        lasted: record.began.elapsed(),
        outcome,
        asked: record.asked.clone(),
    };
    report.log(&flow);
    let client = flow.peer();
    prox.log_flow(&client, &record, &report);
    drop((flow, record));
    let is_known = prox.clients.is_known(&client);
    prox.traffic.on_flow_ended(&client, is_known);
    report
}

/// What the task that serves a flow of a device occupies, for
/// [`EndpointConfig::flow_memory`](d2tp_driver::EndpointConfig::flow_memory).
pub fn flow_task_bytes() -> u64 {
    task_bytes_of::<d2tp_driver::Flow>()
}

/// What the task that serves a flow of this type occupies.
pub(crate) fn task_bytes_of<F: FlowIo>() -> u64 {
    task_bytes(serve_flow::<F>) as u64
}

/// The size of what a function that serves flows returns.
fn task_bytes<F, T>(_: fn(F, Arc<Prox>) -> T) -> usize {
    size_of::<T>()
}

async fn conduct<F: FlowIo>(
    flow: &mut MeteredFlow<F>,
    prox: &Arc<Prox>,
    record: &mut FlowLogRecord,
) -> ProxFlowOutcome {
    if let Some(memo) = flow.memo() {
        record.traffic.set_kind(TrafficKind::Fetch);
        return flow_hibernation::serve_resumed(flow, prox, record, memo).await;
    }
    let mut watch = FlowWatch::new(prox, &record.traffic);
    if guest_address_of(&flow.peer()).is_some() {
        let mut memory = prox.memory_account(flow.peer()).charge();
        return match boxed(&mut memory, link_flow::serve(flow, prox, record)) {
            Some(serving) => serving.await,
            None => ProxFlowOutcome::Broken("no memory for a link".to_owned()),
        };
    }
    if !prox.is_client(&flow.peer()) && prox.clients.can_enrol() {
        return enrolment::serve_unadmitted(flow, prox, &mut watch, record).await;
    }
    match prox.admit(flow.peer(), flow.deadline_left()).await {
        Ok(permit) => {
            flow.limit_moved_deadlines(prox.deadline_max(&flow.peer()));
            let outcome = serve_new(flow, prox, watch, record).await;
            prox.settle_permit(permit, &outcome);
            outcome
        }
        Err(refusal) => refuse(flow, prox, &mut watch, record, &refusal, false).await,
    }
}

/// Serves a new flow, beginning with its request.
///
/// What happens until the answer is there needs much memory, and sending it needs little but takes long, so
/// only the sending is part of the flow's own task.
async fn serve_new<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    mut watch: FlowWatch,
    record: &mut FlowLogRecord,
) -> ProxFlowOutcome {
    let mut memory = prox.memory_account(flow.peer()).charge();
    let Some(preparing) = boxed(&mut memory, prepare(flow, prox, &mut watch, record)) else {
        let refusal = ProxRefusal::ClientMemoryFull;
        return refuse(flow, prox, &mut watch, record, &refusal, false).await;
    };
    let prepared = match preparing.await {
        Ok(prepared) => prepared,
        Err(outcome) => return outcome,
    };
    drop(memory);
    let PreparedAnswer {
        source,
        mut of_copy,
    } = prepared;
    let part = of_copy.as_mut().map(|of_copy| AnswerPart {
        copy: &of_copy.copy,
        end: of_copy.end,
        reports_to: of_copy.reports_to.take(),
        unrecorded: of_copy.unrecorded.take(),
    });
    let new = MemoState::New;
    let outcome = send(flow, prox, &mut watch, record, source, part, new).await;
    if let Some(of_copy) = of_copy {
        drop(of_copy.guard);
        retain_copy(flow, prox, &outcome, of_copy.copy);
    }
    outcome
}

/// A part of a flow's task in memory of its own, if that can be charged to its client.
fn boxed<F: Future>(memory: &mut MemoryCharge, part: F) -> Option<Pin<Box<F>>> {
    let bytes = size_of::<F>() as u64;
    memory.try_resize(bytes).then(|| Box::pin(part))
}

/// An answer that is ready to be sent.
struct PreparedAnswer {
    source: AnswerSource,
    /// The copy that the answer is read from, if it has a body.
    of_copy: Option<PreparedPart>,
}

impl PreparedAnswer {
    /// An answer without a body.
    fn head_only(head: Vec<u8>) -> PreparedAnswer {
        PreparedAnswer {
            source: AnswerSource::head_only(head),
            of_copy: None,
        }
    }
}

/// Reads the request and serves it, up to the answer to a GET or HEAD, which is left to be sent. All else is
/// over when this returns an error, which is the flow's outcome.
async fn prepare<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    watch: &mut FlowWatch,
    record: &mut FlowLogRecord,
) -> Result<PreparedAnswer, ProxFlowOutcome> {
    let account = prox.memory_account(flow.peer());
    // Until the flow is served: the head is used to its end.
    let mut head_memory = account.charge();
    let head = tokio::select! {
        head = read_head(flow, prox.config().request_timeout, &mut head_memory) => head,
        () = prox.stop.cancelled() => return Err(ProxFlowOutcome::Reset(ResetCause::Stopping)),
    };
    let head = match head {
        Ok(head) => head,
        Err(RequestHeadError::Gone(error)) => {
            return Err(ProxFlowOutcome::Broken(error.to_string()));
        }
        Err(RequestHeadError::Refused(refusal)) => {
            return Err(refuse(flow, prox, watch, record, &refusal, false).await);
        }
    };
    let outcome = match parse(&head) {
        Err(refusal) => refuse(flow, prox, watch, record, &refusal, false).await,
        Ok(ProxRequest::Tunnel(request)) => {
            let target = &request.target;
            record.traffic.set_kind(TrafficKind::Tunnel);
            record.asked = format!("CONNECT {target}");
            record.target = Some(target.to_string());
            let mut buffers = account.charge();
            if !buffers.try_resize(tunnel::TUNNEL_BYTES) {
                let refusal = ProxRefusal::ClientMemoryFull;
                return Err(refuse(flow, prox, watch, record, &refusal, false).await);
            }
            let upstream = prox.upstream();
            prox.counters.on_origin_tunnel();
            let connecting = upstream.connect(target);
            let connected = tokio::select! {
                // A tunnel's bytes must not be thrown away: only our own stop is watched here.
                connected = connecting => connected,
                () = prox.stop.cancelled() => Err(ProxRefusal::Stopping),
            };
            match connected {
                Ok(origin) => {
                    let Some(origin) = ChargedTcp::new(origin, &prox.socket_account(flow.peer()))
                    else {
                        let refusal = ProxRefusal::ClientMemoryFull;
                        return Err(refuse(flow, prox, watch, record, &refusal, false).await);
                    };
                    let reports_to = supply_reports(flow, request.reports_supply);
                    tunnel::serve(flow, head.rest(), origin, prox, record, reports_to).await
                }
                Err(refusal) => refuse(flow, prox, watch, record, &refusal, false).await,
            }
        }
        Ok(ProxRequest::Relay(to)) => {
            record.traffic.set_kind(TrafficKind::Relay);
            relay::serve(flow, prox, watch, record, &to).await
        }
        Ok(ProxRequest::Listen(callers)) => {
            record.traffic.set_kind(TrafficKind::Relay);
            relay::listen(flow, prox, watch, record, &callers).await
        }
        Ok(ProxRequest::Mailbox(number)) => {
            record.traffic.set_kind(TrafficKind::Mailbox);
            mailbox::serve(flow, prox, watch, record, number).await
        }
        Ok(ProxRequest::PacketTunnel {
            answers_only,
            compresses,
        }) => {
            record.traffic.set_kind(TrafficKind::Packets);
            packet_tunnel::serve(flow, prox, watch, record, answers_only, compresses).await
        }
        // A client without D2TP has no key, and would show the secret to its network.
        Ok(ProxRequest::Enrol(_)) if address_of(&flow.peer()).is_some() => {
            let refusal = ProxRefusal::MethodUnsupported("ENROL".to_owned());
            refuse(flow, prox, watch, record, &refusal, false).await
        }
        Ok(ProxRequest::Enrol(request)) => {
            enrolment::serve(flow, prox, watch, record, &request).await
        }
        Ok(ProxRequest::Upload(request)) => {
            let method = request.method.as_str();
            record.traffic.set_kind(TrafficKind::Upload);
            record.target = Some(request.url.to_string());
            record.asked = format!("{method} {}", without_query(&request.url));
            upload::serve(flow, head.rest(), prox, watch, record, &request).await
        }
        Ok(ProxRequest::Fetch(request)) => {
            let method = if request.head_only { "HEAD" } else { "GET" };
            record.traffic.set_kind(TrafficKind::Fetch);
            record.target = Some(request.url.to_string());
            record.asked = format!("{method} {}", without_query(&request.url));
            tracing::debug!(flow = flow.id(), url = %request.url, "asked");
            return prepare_fetch(flow, prox, watch, record, &request).await;
        }
    };
    Err(outcome)
}

/// Prepares the answer to a GET or HEAD.
async fn prepare_fetch<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    watch: &mut FlowWatch,
    record: &mut FlowLogRecord,
    request: &FetchRequest,
) -> Result<PreparedAnswer, ProxFlowOutcome> {
    let client = flow.peer();
    let unanswered = prox.unanswered.token();
    let unrecorded = prox.unrecorded.token();
    if prox.unanswered.is_closed() && is_device(flow) {
        // What is asked now might not be recorded any more: the device asks the next process.
        drop((unanswered, unrecorded));
        return Err(watch.gone(flow, prox).await.outcome());
    }
    let known = match (&request.range, &request.if_range) {
        (Some(_), Some(if_range)) if !request.head_only => {
            match prox.retained.find(client, request, if_range) {
                None => prox.find_retained(client, request, if_range).await,
                known => known,
            }
        }
        _ => None,
    };
    record.served = ServedFrom::Origin;
    let opened = match known {
        Some(copy) => Ok(FetchedAnswer::Copy(OpenedCopy::pinned(copy))),
        None => tokio::select! {
            opened = prox.open(client, request) => opened,
            gone = watch.gone(flow, prox) => return Err(gone.outcome()),
        },
    };
    prox.counters.on_cache_lookup(match &opened {
        Ok(FetchedAnswer::Copy(opened) | FetchedAnswer::BareCopy { opened, .. }) => {
            match opened.served {
                ServedFrom::SharedCache => CacheResult::Hit,
                ServedFrom::PinnedCopy => CacheResult::Pinned,
                _ => CacheResult::Miss,
            }
        }
        Ok(FetchedAnswer::HeadOnly { .. }) | Err(_) => CacheResult::Miss,
    });
    let opened = match opened {
        Ok(FetchedAnswer::Copy(opened)) => opened,
        Ok(FetchedAnswer::BareCopy {
            opened,
            not_modified,
        }) => {
            record.served = opened.served;
            record.status = Some(match not_modified {
                true => 304,
                false => opened.copy.head.status.as_u16(),
            });
            let head = answer::bare_copy_head(&opened, not_modified, is_device(flow));
            return Ok(PreparedAnswer::head_only(head));
        }
        Ok(FetchedAnswer::HeadOnly {
            head,
            length,
            cache_status,
        }) => {
            record.status = Some(head.status.as_u16());
            let head = answer::bare_head(&head, length.as_ref(), cache_status);
            return Ok(PreparedAnswer::head_only(head));
        }
        Err(refusal) => {
            return Err(refuse(flow, prox, watch, record, &refusal, request.head_only).await);
        }
    };
    record.served = opened.served;
    let prepared = prepare_copy(flow, prox, watch, record, request, &opened).await;
    match prepared {
        Ok((source, part)) => Ok(PreparedAnswer {
            source,
            of_copy: Some(PreparedPart {
                unrecorded: Some(unrecorded),
                ..part
            }),
        }),
        Err(outcome) => {
            retain_copy(flow, prox, &outcome, opened.copy);
            Err(outcome)
        }
    }
}
