//! The messages of all verbs about a server that ended this device's session, or never accepts one.

use cedos_text::RemoteText;
use d2tp_driver::{
    NodeAddress, PublicKey, ReasonCode, ServerAddress, ServerNodes, SessionEnd, refusal_text,
};

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

/// How a session ended that another one may follow, in one sentence. `server` names the server, as in "the proxy HOST:PORT".
pub fn session_end_text(end: &SessionEnd, server: &str) -> String {
    match end {
        SessionEnd::Peer { code, text } => match RemoteText::new(text) {
            words if words.is_empty() => format!("{server} closed the session (code {code:#x})"),
            words => format!("{server} closed the session: {words}"),
        },
        SessionEnd::Refused(ReasonCode::LimitReached) => {
            format!("{server} has as many sessions as it takes; try again later")
        }
        end => format!("{server}: {end}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_a_server_that_closes_are_one_line_without_controls() {
        let text = |text: &str| {
            let text = text.to_owned();
            session_end_text(&SessionEnd::Peer { code: 3, text }, "the server s:4433")
        };
        assert_eq!(
            text("closed for\r\n\u{1b}[31mrepairs"),
            "the server s:4433 closed the session: closed for \\u001b[31mrepairs"
        );
        assert_eq!(
            text(" \n"),
            "the server s:4433 closed the session (code 0x3)"
        );
        let full = SessionEnd::Refused(ReasonCode::LimitReached);
        assert_eq!(
            session_end_text(&full, "the proxy p:4433"),
            "the proxy p:4433 has as many sessions as it takes; try again later"
        );
    }

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
