//! The messages of all verbs about a server that never accepts this device's session.

use d2tp_driver::{NodeAddress, PublicKey, ServerAddress, ServerNodes, SessionEnd, refusal_text};

use super::outcome::{TransferExit, TransferFailure, TransferReason};

/// A server's address for users, with all nodes that it names: its key would only be in the way.
pub fn host_and_port(address: &ServerAddress) -> String {
    if address.nodes == ServerNodes::Records {
        return address.host.clone();
    }
    let nodes = address.named_nodes();
    let nodes: Vec<String> = nodes.iter().map(NodeAddress::to_string).collect();
    nodes.join(", ")
}

/// The failure that the end of a session means, if another session would end the same way. `server` names
/// the server, as in "the proxy HOST:PORT"; `device` is this device's key, which its operator must know.
pub fn session_refusal(
    end: &SessionEnd,
    server: &str,
    device: &PublicKey,
) -> Option<TransferFailure> {
    let text = refusal_text(end, server, device)?;
    let (exit, reason) = (TransferExit::Error, TransferReason::ProxyRefused);
    Some(TransferFailure::of(exit, reason, text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_driver::ReasonCode;

    #[test]
    fn a_refusal_names_the_key_that_the_operator_needs() {
        let key = PublicKey([7; 32]);
        let refused = SessionEnd::Refused(ReasonCode::NotAllowed);
        let failure = session_refusal(&refused, "the proxy p:4433", &key).expect("final");
        assert!(
            failure
                .text
                .contains("the proxy p:4433 does not let this device in")
        );
        assert!(failure.text.ends_with(&format!("--allow-client {key}")));
        // Who answers is not called silent, in no list.
        assert_eq!(failure.reason, Some(TransferReason::ProxyRefused));
        let lost = SessionEnd::Refused(ReasonCode::LimitReached);
        for end in [SessionEnd::Local, lost] {
            assert!(session_refusal(&end, "the proxy", &key).is_none(), "{end}");
        }
    }
}
