//! `struct d2tp_info`, the value of `D2TP_SO_INFO`: the state of a socket's flow and its paths.
//! [`crate::flow_info`] reads it from a flow.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::connect_wait::ConnectWait;
use crate::header::{CChar, PATHS_MAX};

/// The version of the layout. Later versions only add fields at the end.
pub(crate) const INFO_VERSION: u32 = 1;
/// The size of a link's name in bytes, with its terminating 0 (IFNAMSIZ).
pub(crate) const NAME_BYTES: usize = 16;

/// A path of a connection.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct D2tpPathInfo {
    /// The name of the link's network device.
    #[serde(serialize_with = "as_text", deserialize_with = "of_text")]
    pub(crate) dpi_link: [CChar; 16],
    /// The cost class: 0 free, 1 metered, 2 roaming.
    pub(crate) dpi_class: u32,
    /// The state of the path: 0 opening, 1 works, 2 silent.
    pub(crate) dpi_state: u32,
    /// The smoothed round trip, in microseconds.
    pub(crate) dpi_rtt_us: u32,
    /// The smallest round trip measured, in microseconds.
    pub(crate) dpi_rtt_min_us: u32,
    /// Payload bytes received by the whole session on this path.
    pub(crate) dpi_bytes_received: u64,
    /// Payload bytes sent by the whole session on this path, retransmissions included.
    pub(crate) dpi_bytes_sent: u64,
    /// The recent rate in bytes per second; 0 if unknown.
    pub(crate) dpi_rate: u64,
}

/// The value of D2TP_SO_INFO: the state of a socket.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct D2tpInfo {
    /// The version of this structure: 1.
    pub(crate) di_version: u32,
    /// The size of the structure in bytes, as the library knows it.
    pub(crate) di_size: u32,
    /// The state: 0 no connection, 1 connecting, 2 connected, 3 over.
    pub(crate) di_state: u32,
    /// Why no data moves: 0 no known reason, 1 no_path, 2 path_cost.
    pub(crate) di_reason: u32,
    /// Bytes taken from the program.
    pub(crate) di_bytes_sent: u64,
    /// Sent bytes that the peer has acknowledged.
    pub(crate) di_bytes_acked: u64,
    pub(crate) di_bytes_received: u64,
    /// Milliseconds until the deadline; -1 without a deadline.
    pub(crate) di_slack_ms: i64,
    pub(crate) di_paths_count: u32,
    pub(crate) di_reserved: u32,
    pub(crate) di_paths: [D2tpPathInfo; PATHS_MAX],
    /// Received bytes that the program has not read.
    #[serde(default)]
    pub(crate) di_bytes_ahead: u64,
}

/// Values of `di_state` in `struct d2tp_info`.
const IDLE: u32 = 0;
const OPENING: u32 = 1;
pub(crate) const OPEN: u32 = 2;
pub(crate) const OVER: u32 = 3;

/// di_reason: numbers of the reason codes that commands and logs use.
pub(crate) const NO_REASON: u32 = 0;
pub(crate) const NO_PATH: u32 = 1;
pub(crate) const PATH_COST: u32 = 2;

impl D2tpInfo {
    /// The information of a socket that has no flow.
    pub(crate) fn idle() -> D2tpInfo {
        D2tpInfo {
            di_version: INFO_VERSION,
            di_size: size_of::<D2tpInfo>() as u32,
            di_state: IDLE,
            di_slack_ms: -1,
            ..D2tpInfo::default()
        }
    }

    /// The information of a socket whose flow is being opened.
    pub(crate) fn opening(waits_for: ConnectWait) -> D2tpInfo {
        D2tpInfo {
            di_state: OPENING,
            di_reason: match waits_for {
                ConnectWait::Network => NO_PATH,
                ConnectWait::FreeNetwork => PATH_COST,
                ConnectWait::Answer => NO_REASON,
            },
            ..D2tpInfo::idle()
        }
    }

    /// What the connection waits for while it is being opened.
    pub(crate) fn waits_for(&self) -> Option<ConnectWait> {
        (self.di_state == OPENING).then_some(match self.di_reason {
            NO_PATH => ConnectWait::Network,
            PATH_COST => ConnectWait::FreeNetwork,
            _ => ConnectWait::Answer,
        })
    }

    /// The information of a socket whose flow is over, if there is none from its end.
    pub(crate) fn over() -> D2tpInfo {
        D2tpInfo {
            di_state: OVER,
            ..D2tpInfo::idle()
        }
    }

    pub(crate) fn to_bytes(self) -> Vec<u8> {
        // SAFETY: repr(C), of integers without padding (the test below checks that), so every byte
        // is initialized.
        let bytes: [u8; size_of::<D2tpInfo>()] = unsafe { std::mem::transmute(self) };
        bytes.to_vec()
    }
}

/// A link's name, to an agent and from it.
fn as_text<S: Serializer>(name: &[u8; NAME_BYTES], to: S) -> Result<S::Ok, S::Error> {
    let end = name.iter().position(|byte| *byte == 0);
    to.serialize_str(&String::from_utf8_lossy(&name[..end.unwrap_or(NAME_BYTES)]))
}

fn of_text<'de, D: Deserializer<'de>>(from: D) -> Result<[u8; NAME_BYTES], D::Error> {
    let text = String::deserialize(from)?;
    let mut name = [0; NAME_BYTES];
    let len = text.len().min(NAME_BYTES - 1);
    name[..len].copy_from_slice(&text.as_bytes()[..len]);
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_has_no_holes_and_is_the_headers() {
        assert_eq!(size_of::<D2tpPathInfo>(), 16 + 4 * 4 + 3 * 8);
        assert_eq!(size_of::<D2tpInfo>(), 4 * 4 + 4 * 8 + 2 * 4 + 8 * 56 + 8);
        assert_eq!(D2tpInfo::idle().to_bytes()[0], 1);
    }

    #[test]
    fn what_an_agent_tells_of_a_socket_is_what_it_knows() {
        let mut info = D2tpInfo::opening(ConnectWait::FreeNetwork);
        info.di_bytes_sent = u64::MAX;
        assert_eq!(info.di_reason, PATH_COST);
        info.di_paths[0].dpi_link[..5].copy_from_slice(b"wlan0");
        let text = serde_json::to_string(&info).unwrap();
        assert!(text.contains("\"wlan0\""), "{text}");
        assert_eq!(serde_json::from_str::<D2tpInfo>(&text).unwrap(), info);
    }
}
