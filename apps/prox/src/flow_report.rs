//! How a flow ended, and its line in the log.

use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::{FlowIo, ResetCause};
use tokio::time::Instant;

use crate::client_traffic::FlowTraffic;
use crate::key_text::show_key;

/// The source of a response's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServedFrom {
    /// An origin, for this flow.
    Origin,
    /// A copy pinned by an earlier flow of the same client.
    PinnedCopy,
    /// The cache that all clients share.
    SharedCache,
    /// The proxy itself: an error answer.
    Proxy,
    /// The request opens a tunnel.
    Tunnel,
    /// The flow carries no response: packets are relayed beside it.
    Relay,
}

/// The outcome of a flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProxFlowOutcome {
    /// The device has the whole response (an error response counts).
    Delivered,
    /// The device reset the flow or its session is lost; the text is the transport's.
    Broken(String),
    /// We reset the flow.
    Reset(ResetCause),
    /// The flow is hibernated, and will be served again when its device comes back.
    Hibernated,
    /// Another node has taken over the flow.
    TakenOver,
    /// The device gave the flow up.
    Forgotten,
}

/// The log entry of a flow that ended.
#[derive(Clone, Debug)]
pub struct ProxFlowReport {
    /// The status of the response; none if the flow broke before.
    pub status: Option<u16>,
    /// The source of the bytes.
    pub served: ServedFrom,
    /// Bytes written to the flow, heads included.
    pub bytes_down: u64,
    /// Bytes read from the flow, for tunnels and uploads.
    pub bytes_up: u64,
    /// The time from acceptance to end.
    pub lasted: Duration,
    /// The outcome of the flow.
    pub outcome: ProxFlowOutcome,
    /// The request: method and URL without its query, or host and port.
    pub asked: String,
}

/// The log entry of a running flow.
pub(crate) struct FlowLogRecord {
    pub(crate) began: Instant,
    pub(crate) status: Option<u16>,
    pub(crate) served: ServedFrom,
    pub(crate) bytes_down: u64,
    pub(crate) bytes_up: u64,
    pub(crate) asked: String,
    /// The URL that was asked for, or host and port.
    pub(crate) target: Option<String>,
    pub(crate) traffic: Arc<FlowTraffic>,
}

impl FlowLogRecord {
    /// The record of a flow that begins now.
    pub(crate) fn new(traffic: Arc<FlowTraffic>) -> FlowLogRecord {
        FlowLogRecord {
            began: Instant::now(),
            status: None,
            served: ServedFrom::Proxy,
            bytes_down: 0,
            bytes_up: 0,
            asked: String::new(),
            target: None,
            traffic,
        }
    }
}

impl ProxFlowOutcome {
    /// The word for it in logs and metrics.
    pub(crate) fn as_str(&self) -> &'static str {
        match self {
            ProxFlowOutcome::Delivered => "delivered",
            ProxFlowOutcome::Broken(_) => "broken",
            ProxFlowOutcome::Reset(cause) => cause.as_str(),
            ProxFlowOutcome::Hibernated => "asleep",
            ProxFlowOutcome::TakenOver => "taken over",
            ProxFlowOutcome::Forgotten => "forgotten",
        }
    }
}

impl ServedFrom {
    /// The word for it in logs.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            ServedFrom::Origin => "origin",
            ServedFrom::PinnedCopy => "pinned",
            ServedFrom::SharedCache => "cache",
            ServedFrom::Proxy => "proxy",
            ServedFrom::Tunnel => "tunnel",
            ServedFrom::Relay => "relay",
        }
    }
}

impl ProxFlowReport {
    /// Writes the log entry.
    pub(crate) fn log<F: FlowIo>(&self, flow: &F) {
        let cause = match &self.outcome {
            ProxFlowOutcome::Broken(cause) => cause.clone(),
            ProxFlowOutcome::Reset(cause) => cause.to_string(),
            _ => String::new(),
        };
        tracing::info!(
            flow = flow.id(),
            client = &show_key(&flow.peer())[..8],
            asked = self.asked,
            status = self.status,
            from = self.served.as_str(),
            bytes_down = self.bytes_down,
            bytes_up = self.bytes_up,
            lasted_ms = self.lasted.as_millis() as u64,
            outcome = self.outcome.as_str(),
            cause,
            "flow ended"
        );
    }
}
