//! How a flow ended, and the line about it.

use std::time::Duration;

use d2tp_driver::{FlowIo, ResetCause};
use tokio::time::Instant;

use crate::key_text::show_key;

/// Where the bytes of an answer came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServedFrom {
    /// Fetched for this flow.
    Origin,
    /// A copy pinned by an earlier flow of the same client.
    PinnedCopy,
    /// The proxy itself: an error answer.
    Proxy,
    /// The request opens a tunnel.
    Tunnel,
    /// Nothing: packets passed on, beside the flow.
    Relay,
}

/// How a flow ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProxFlowOutcome {
    /// The device has the whole answer (an error answer counts).
    Delivered,
    /// The device reset the flow or its session is lost; the text is the transport's.
    Broken(String),
    /// We reset the flow.
    Reset(ResetCause),
    /// The flow is hibernated, and will be served again when its device comes back.
    Hibernated,
    /// The device said that it does not want it any more.
    Forgotten,
}

/// One line about a flow that ended.
#[derive(Clone, Debug)]
pub struct ProxFlowReport {
    /// The status that was answered; none if the flow broke before.
    pub status: Option<u16>,
    /// Where the bytes came from.
    pub served: ServedFrom,
    /// Bytes handed to the flow, heads included.
    pub bytes_down: u64,
    /// Bytes taken from the flow, for tunnels and uploads.
    pub bytes_up: u64,
    /// From its acceptance to its end.
    pub lasted: Duration,
    /// How it ended.
    pub outcome: ProxFlowOutcome,
    /// What was asked for: method and URL without its query, or host and port.
    pub asked: String,
}

/// What is known of a flow so far.
pub(crate) struct FlowLogRecord {
    pub(crate) began: Instant,
    pub(crate) status: Option<u16>,
    pub(crate) served: ServedFrom,
    pub(crate) bytes_down: u64,
    pub(crate) bytes_up: u64,
    pub(crate) asked: String,
}

impl ProxFlowReport {
    /// Writes the line.
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
