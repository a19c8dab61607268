//! The memo of a hibernated flow, with which the flow is continued.
//!
//! A memo is what [`d2tp_driver::FlowIo::allow_hibernation`] keeps: which copy, which part of it, and the head
//! that was sent before it, byte for byte, since the flow's offsets count it.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::flow_report::ServedFrom;

/// The state that a server needs to resume a flow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct FlowMemo {
    /// The copy that the flow reads; none if the whole response is in `head`.
    pub(crate) copy: Option<u64>,
    pub(crate) head: String,
    pub(crate) start: u64,
    pub(crate) end: Option<u64>,
    pub(crate) status: u16,
    pub(crate) pinned: bool,
    pub(crate) asked: String,
    /// Whether the device asked how the server supplies it.
    #[serde(default)]
    pub(crate) reports_supply: bool,
    /// The tunnel that the flow is, by a number of the process that has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tunnel: Option<SleepingTunnel>,
}

/// A tunnel that sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SleepingTunnel {
    /// A connection to a server.
    Connection(u64),
    /// Packets of a client.
    Packets(u64),
}

/// The copy that a flow's memo names, if it names one: what a shared store counts.
pub fn copy_of_memo(memo: &[u8]) -> Option<u64> {
    FlowMemo::decode(memo)?.copy
}

impl FlowMemo {
    /// The memo of a tunnel.
    pub(crate) fn of_tunnel(tunnel: SleepingTunnel, asked: &str, reports_supply: bool) -> FlowMemo {
        FlowMemo {
            copy: None,
            head: String::new(),
            start: 0,
            end: None,
            status: 200,
            pinned: false,
            asked: asked.to_owned(),
            reports_supply,
            tunnel: Some(tunnel),
        }
    }

    pub(crate) fn encode(&self) -> Bytes {
        serde_json::to_vec(self).expect("text and numbers").into()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<FlowMemo> {
        serde_json::from_slice(bytes).ok()
    }

    /// The source of the flow's bytes.
    pub(crate) fn served(&self) -> ServedFrom {
        match (self.copy, self.pinned) {
            (None, _) => ServedFrom::Proxy,
            (_, true) => ServedFrom::PinnedCopy,
            (_, false) => ServedFrom::Origin,
        }
    }

    /// The response's head.
    pub(crate) fn head_bytes(&self) -> Option<Vec<u8>> {
        self.head.chars().map(|c| u8::try_from(c).ok()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memo_comes_back_and_damage_is_none() {
        let memo = FlowMemo {
            copy: Some(7),
            head: b"HTTP/1.1 200 OK\r\nX: \xff\r\n\r\n"
                .iter()
                .map(|b| char::from(*b))
                .collect(),
            start: 3,
            end: Some(9),
            status: 206,
            pinned: true,
            asked: "GET http://h/".into(),
            reports_supply: true,
            tunnel: None,
        };
        let bytes = memo.encode();
        assert_eq!(FlowMemo::decode(&bytes), Some(memo.clone()));
        assert!(memo.head_bytes().unwrap().contains(&0xff));
        for cut in 0..bytes.len() {
            assert_eq!(FlowMemo::decode(&bytes[..cut]), None);
        }
    }
}
