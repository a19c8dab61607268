//! The reason why a flow at the proxy was lost, and whether a new flow can continue.

use d2tp_driver::{FlowEnd, ResetCause, SessionEnd};

use super::ProxyClient;
use crate::fetch::outcome::TransferFailure;
use crate::fetch::session_refusal::{session_end_text, session_refusal};

/// Why a new flow must be opened at the proxy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FlowLoss {
    /// The proxy no longer knows the flow: it was restarted.
    Forgotten,
    /// The whole session ended. The text says how, and names the proxy.
    Session(String),
    /// The deadline passed.
    Deadline,
    /// The proxy reset it.
    Reset(String),
}

impl ProxyClient {
    /// How the session ended of which the flow was, if that is why a new flow must be opened.
    pub fn words_of_lost_session(&self) -> Option<String> {
        match self.flow_loss() {
            Ok(Some(FlowLoss::Session(text))) => Some(text),
            _ => None,
        }
    }

    /// Why the current flow is over, if it ended before its purpose was fulfilled.
    pub fn flow_loss(&self) -> Result<Option<FlowLoss>, TransferFailure> {
        if let Some(end) = self.device().and_then(|device| device.ended()) {
            return self.session_end(&end).map(Some);
        }
        let end = self.with_flow(|_, flow| flow.end()).flatten();
        let broken = self.state().broken.get().copied().map(FlowEnd::Reset);
        Ok(match end.or(broken) {
            None | Some(FlowEnd::Complete | FlowEnd::Local(_)) => None,
            Some(FlowEnd::DeadlinePassed) => Some(FlowLoss::Deadline),
            Some(FlowEnd::Refused(_)) => Some(FlowLoss::Forgotten),
            Some(FlowEnd::SessionEnded) => Some(FlowLoss::Session(format!(
                "the session with the proxy {} ended",
                self.address_text()
            ))),
            Some(FlowEnd::Reset(code)) => match ResetCause::from_code(code) {
                Some(ResetCause::Deadline) => Some(FlowLoss::Deadline),
                Some(cause @ ResetCause::StoreFull) => {
                    let text = format!(
                        "{cause} ({}). Without --prox it may work",
                        self.address_text()
                    );
                    return Err(TransferFailure::error(text));
                }
                Some(cause) => Some(FlowLoss::Reset(cause.to_string())),
                None => Some(FlowLoss::Reset(format!(
                    "the proxy ended the transfer (code {code:#x})"
                ))),
            },
        })
    }

    fn session_end(&self, end: &SessionEnd) -> Result<FlowLoss, TransferFailure> {
        let server = format!("the proxy {}", self.address_text());
        match session_refusal(end, &server, &self.key.public()) {
            // Another proxy of the list may let it in.
            Some(failure) if self.leave_refusing_proxy(&failure) => {
                Ok(FlowLoss::Session(failure.text))
            }
            Some(failure) => Err(failure),
            None => Ok(FlowLoss::Session(session_end_text(end, &server))),
        }
    }
}
