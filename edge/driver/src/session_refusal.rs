//! Explains to the user of a device why a server never accepts its session. All programs that call servers use these
//! words, so that each says what to do.

use d2tp_session::{PublicKey, ReasonCode, SessionEnd};

/// Why every session of `device` with `server` would end like this one, and what to do; `None` if another session may
/// succeed. `server` names the server, as in "the proxy HOST:PORT"; its operator needs the device's key.
pub fn refusal_text(end: &SessionEnd, server: &str, device: &PublicKey) -> Option<String> {
    match end {
        SessionEnd::Refused(ReasonCode::NotAllowed) => Some(format!(
            "{server} does not let this device in; its operator invites it (`cedos prox invite`), or adds \
             --allow-client {device}"
        )),
        SessionEnd::NoCommonVersion => Some(format!("{server}: {end}; update the older one")),
        SessionEnd::NoHybridKeys => Some(format!(
            "{server} has no post-quantum keys, and its address requires them (hybrid=required); its operator updates \
             it, or you remove that from the address"
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_another_session_would_not_change_is_explained() {
        let key = PublicKey([7; 32]);
        let text = |end: SessionEnd| refusal_text(&end, "the proxy p:4433", &key);
        let refused = text(SessionEnd::Refused(ReasonCode::NotAllowed)).expect("final");
        assert!(refused.contains("the proxy p:4433 does not let this device in"));
        assert!(refused.ends_with(&format!("--allow-client {key}")));
        for end in [SessionEnd::NoCommonVersion, SessionEnd::NoHybridKeys] {
            assert!(text(end.clone()).is_some(), "{end}");
        }
        for end in [
            SessionEnd::Local,
            SessionEnd::Refused(ReasonCode::LimitReached),
        ] {
            assert!(text(end.clone()).is_none(), "{end}");
        }
    }
}
