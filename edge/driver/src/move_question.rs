//! What a device asks its server that found a nearer node.

use std::net::SocketAddr;

use d2tp_session::Time;

/// A device's question whether its session can go on at another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MoveQuestion {
    /// The address of the node, as the device knows it.
    pub(crate) to: SocketAddr,
    pub(crate) asked_at: Time,
}

impl MoveQuestion {
    /// Reads the payload of a DATAGRAM that arrived now. `None` if it names no address.
    pub(crate) fn decode(payload: &[u8], now: Time) -> Option<MoveQuestion> {
        let to = std::str::from_utf8(payload).ok()?.parse().ok()?;
        Some(MoveQuestion { to, asked_at: now })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_names_an_address_and_nothing_else() {
        let read = |payload: &[u8]| MoveQuestion::decode(payload, Time::ZERO);
        let to = "[2001:db8::2]:4433".parse().unwrap();
        let asked_at = Time::ZERO;
        assert_eq!(
            read(b"[2001:db8::2]:4433"),
            Some(MoveQuestion { to, asked_at })
        );
        for payload in [
            "",
            "a.example:4433",
            "192.0.2.2",
            "192.0.2.2:4433\n",
            "192.0.2.2:70000",
        ] {
            assert_eq!(read(payload.as_bytes()), None, "{payload:?}");
        }
        assert_eq!(read(&[0xff; 40]), None);
    }
}
