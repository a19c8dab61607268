//! How a flow ended, and the line about it.

use std::time::Duration;

use d2tp_driver::{FlowIo, ResetCause};
use tokio::time::Instant;

use crate::key_text::show_key;

/// The source of a response's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServedFrom {
    /// An origin, for this flow.
    Origin,
    /// A copy pinned by an earlier flow of the same client.
    PinnedCopy,
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
}

impl ProxFlowReport {
    /// Writes the log entry.
    pub(crate) fn log<F: FlowIo>(&self, flow: &F) {
        let (outcome, cause) = match &self.outcome {
            ProxFlowOutcome::Delivered => ("delivered", String::new()),
            ProxFlowOutcome::Broken(cause) => ("broken", cause.clone()),
            ProxFlowOutcome::Reset(cause) => (cause.as_str(), cause.to_string()),
            ProxFlowOutcome::Hibernated => ("asleep", String::new()),
            ProxFlowOutcome::Forgotten => ("forgotten", String::new()),
        };
        let from = match self.served {
            ServedFrom::Origin => "origin",
            ServedFrom::PinnedCopy => "pinned",
            ServedFrom::Proxy => "proxy",
            ServedFrom::Tunnel => "tunnel",
            ServedFrom::Relay => "relay",
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
