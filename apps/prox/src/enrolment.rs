//! Enrolment: how a device with an unknown key becomes a client by an invitation.
//!
//! ```text
//!  device, unknown                        D2Prox
//!   SYN ───────────────────────────────▶  an invitation is open: a session, without credit for more than this
//!   ENROL * HTTP/1.1                 ──▶  one flow, in sealed packets, never in a SYN
//!   Invitation: SECRET                      │ the hash is compared, the client written down and the
//!   Device-Name: laptop                     │ invitation used up, in one step
//!   ◀── 200, Client-Name: laptop  ─────────┘
//! ```
//!
//! No other request of a device that is not enrolled is served. Its data is not logged.

use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::{FlowIo, HostKey, PublicKey, Server};
use tokio::time::Instant;

use crate::answer::{self, AnswerSource};
use crate::client_limits::ClientLimits;
use crate::flow_answer::{MemoState, send};
use crate::flow_report::{FlowLogRecord, ProxFlowOutcome, ServedFrom};
use crate::flow_watch::FlowWatch;
use crate::key_text::show_key;
use crate::prox::Prox;
use crate::refusal::ProxRefusal;
use crate::request::{EnrolRequest, ProxRequest, parse};
use crate::request_head::{RequestHeadError, read_head};

/// Devices that may ask at the same time to be enrolled. More are refused in the handshake.
pub const ENROLLING_MAX: usize = 16;
/// How long a device may be connected without being enrolled.
pub const ENROLMENT_MAX: Duration = Duration::from_secs(15);
/// How often sessions of devices that were not enrolled are looked at, while there may be some.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The interval at which the times of clients' last connections, and what they have transferred,
/// are stored.
const SAVE_EVERY: Duration = Duration::from_secs(60);

/// Serves a flow of a device that is no client: the request to be enrolled, and nothing else.
pub(crate) async fn serve_unadmitted<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    watch: &mut FlowWatch,
    record: &mut FlowLogRecord,
) -> ProxFlowOutcome {
    let unknown = ProxRefusal::ClientUnknown(show_key(&flow.peer()));
    let mut head_memory = prox.memory_account(flow.peer()).charge();
    let head = match read_head(flow, ENROLMENT_MAX, &mut head_memory).await {
        Ok(head) => head,
        Err(RequestHeadError::Gone(error)) => return ProxFlowOutcome::Broken(error.to_string()),
        Err(RequestHeadError::Refused(_)) => {
            return refuse_unkept(flow, prox, watch, record, &unknown).await;
        }
    };
    match parse(&head) {
        Ok(ProxRequest::Enrol(request)) => serve(flow, prox, watch, record, &request).await,
        _ => refuse_unkept(flow, prox, watch, record, &unknown).await,
    }
}

/// Serves a request to be enrolled.
pub(crate) async fn serve<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    watch: &mut FlowWatch,
    record: &mut FlowLogRecord,
    request: &EnrolRequest,
) -> ProxFlowOutcome {
    record.asked = "ENROL".to_owned();
    let client = flow.peer();
    let (clients, asked) = (prox.clients.clone(), request.clone());
    // The file is synced, which takes its time.
    let enrolling = tokio::task::spawn_blocking(move || {
        clients.enrol(client, &asked.secret, asked.name.as_deref())
    });
    let name = match enrolling.await.expect("enrolment does not panic") {
        Ok(name) => name,
        Err(refusal) => {
            tracing::warn!(client = show_key(&client), %refusal, "a device was not enrolled");
            return refuse_unkept(flow, prox, watch, record, &refusal).await;
        }
    };
    tracing::info!(client = show_key(&client), name, "enrolled a client");
    // The device may open its next session as soon as it has the answer.
    prox.clients.applied().await;
    record.status = Some(200);
    record.served = ServedFrom::Proxy;
    // A field value is ASCII; a name need not be.
    let name = percent_encoding::utf8_percent_encode(&name, percent_encoding::NON_ALPHANUMERIC);
    let head = format!("HTTP/1.1 200 OK\r\nclient-name: {name}\r\ncontent-length: 0\r\n\r\n");
    let source = AnswerSource::head_only(head.into_bytes());
    send(flow, prox, watch, record, source, None, MemoState::Never).await
}

/// Sends an error response, of which nothing is written down: the session must not sleep as a record.
async fn refuse_unkept<F: FlowIo>(
    flow: &mut F,
    prox: &Prox,
    watch: &mut FlowWatch,
    record: &mut FlowLogRecord,
    refusal: &ProxRefusal,
) -> ProxFlowOutcome {
    prox.counters.on_refusal(refusal);
    record.status = Some(refusal.status());
    record.served = ServedFrom::Proxy;
    let source = AnswerSource::head_only(answer::refusal(refusal, false));
    send(flow, prox, watch, record, source, None, MemoState::Never).await
}

impl Prox {
    /// Applies to the server who may connect, now and whenever it changes, until the proxy stops: clients
    /// that were removed lose their sessions, and devices that are not enrolled may connect while an
    /// invitation is open.
    pub async fn watch_clients(self: Arc<Prox>, server: Arc<Server>) {
        let clients = &self.clients;
        let mut changes = clients.subscribe();
        let mut inviting_until = Instant::now();
        let mut saved = Instant::now();
        loop {
            let change = *changes.borrow_and_update();
            let is_inviting = clients.is_inviting();
            // Before the question who is admitted: who was removed later is ended at the next turn.
            let removed = clients.take_removed();
            server.set_admission(clients.admission());
            server.set_unadmitted_max(if is_inviting { ENROLLING_MAX } else { 0 });
            for client in removed {
                server.end_client(PublicKey(client));
                self.discard_client(client);
            }
            for (client, own) in clients.take_limits_changed() {
                self.apply_client_limits(client, own);
            }
            clients.on_applied(change);
            let now = Instant::now();
            if is_inviting {
                inviting_until = now + 2 * ENROLMENT_MAX;
            }
            server.end_unadmitted(ENROLMENT_MAX);
            if now.duration_since(saved) >= SAVE_EVERY {
                saved = now;
                let saving = self.clone();
                // Files are synced, which takes its time.
                let saved = tokio::task::spawn_blocking(move || saving.save_clients());
                saved.await.expect("saving does not panic");
            }
            let pause = if now < inviting_until {
                LOOK_EVERY
            } else {
                SAVE_EVERY
            };
            tokio::select! {
                changed = changes.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(pause) => {}
                () = self.stop.cancelled() => return,
            }
        }
    }

    /// Frees what the proxy holds for a client that was removed. What its flows still hold goes with them.
    fn discard_client(&self, client: HostKey) {
        self.retained.discard_client(client);
        self.uploads.discard_client(client);
        self.limits.set(client, ClientLimits::default());
        self.traffic.forget(&client);
        if let Some(usage) = &self.usage {
            usage.forget(client);
        }
    }

    /// Writes down what is only in memory of the clients: before the process ends.
    pub fn save_clients(&self) {
        self.clients.save_seen();
        self.traffic.sweep(|client| self.clients.is_known(client));
        let is_shared = |client: &HostKey| self.usage.is_some() && self.clients.is_known(client);
        self.traffic.save(is_shared);
    }
}
