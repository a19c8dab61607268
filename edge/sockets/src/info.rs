//! The state of a connection and its paths (`D2TP_SO_INFO`).

use std::io;
use std::time::Duration;

/// The state of a connection: its progress, its byte counts and its paths.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectionInfo {
    /// The state of the connection.
    pub state: ConnectionState,
    /// Why no data moves, if that is known.
    pub reason: Option<StallReason>,
    /// Bytes taken from the program.
    pub bytes_sent: u64,
    /// Bytes that the program wrote and the peer has acknowledged.
    pub bytes_acked: u64,
    /// Bytes received from the peer.
    pub bytes_received: u64,
    /// Bytes that arrived and the program has not read.
    pub bytes_ahead: u64,
    /// Time until the deadline, to the millisecond; `None` without a deadline.
    pub slack: Option<Duration>,
    /// The paths of the connection's session, at most eight.
    pub paths: Vec<ConnectionPath>,
}

/// The state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionState {
    /// The socket is not a connection.
    Idle,
    /// The connection is being established.
    Connecting,
    /// The connection is established.
    Connected,
    /// The connection ended or broke.
    Over,
}

/// Why no data moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StallReason {
    /// There is no network.
    NoPath,
    /// There are only metered networks, and the connection may not use them now.
    PathCost,
}

/// A path of a connection's session, which other connections may share.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectionPath {
    /// The name of the network device, such as `wlan0`. Empty if it is not known, as for accepted
    /// connections.
    pub link: String,
    /// The cost class of the link.
    pub cost: NetworkCost,
    /// Whether the path works.
    pub state: PathActivity,
    /// The smoothed round trip, in microseconds.
    pub rtt: Duration,
    /// The smallest round trip measured, in microseconds.
    pub rtt_min: Duration,
    /// Payload bytes that the whole session received on the path.
    pub bytes_received: u64,
    /// Payload bytes that the whole session sent on the path, retransmissions included.
    pub bytes_sent: u64,
    /// The recent rate in bytes per second, if it is known.
    pub rate: Option<u64>,
}

/// The cost class of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkCost {
    /// Free: a byte costs nothing.
    Free,
    /// Metered: bytes cost money.
    Metered,
    /// Roaming: bytes cost more than on a metered link, because the network is a foreign one.
    Roaming,
}

/// Whether a path works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathActivity {
    /// The path is being tried.
    Opening,
    /// The path works.
    Works,
    /// The path has not received anything for some time.
    Silent,
}

/// Reads the fields of a C struct one after another; these structs have no padding.
struct StructFields<'a>(&'a [u8]);

impl StructFields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*field)
    }

    fn word(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    fn long(&mut self) -> Option<u64> {
        self.take().map(u64::from_ne_bytes)
    }
}

/// Bytes of a link's name with its 0 (IFNAMSIZ).
const NAME_BYTES: usize = 16;
/// The value of D2TP_PATHS_MAX.
const PATHS_MAX: usize = 8;

impl ConnectionInfo {
    /// Size of a `struct d2tp_info`.
    pub(crate) const BYTES: usize = 4 * 4 + 4 * 8 + 2 * 4 + PATHS_MAX * 56 + 8;

    pub(crate) fn of_bytes(bytes: &[u8]) -> io::Result<ConnectionInfo> {
        let unknown = || {
            io::Error::new(
                io::ErrorKind::InvalidData,
                "a struct d2tp_info of no kind that is known",
            )
        };
        ConnectionInfo::read(&mut StructFields(bytes)).ok_or_else(unknown)
    }

    fn read(from: &mut StructFields<'_>) -> Option<ConnectionInfo> {
        let (_version, _size) = (from.word()?, from.word()?);
        let state = match from.word()? {
            0 => ConnectionState::Idle,
            1 => ConnectionState::Connecting,
            2 => ConnectionState::Connected,
            3 => ConnectionState::Over,
            _ => return None,
        };
        let reason = match from.word()? {
            1 => Some(StallReason::NoPath),
            2 => Some(StallReason::PathCost),
            _ => None,
        };
        let (bytes_sent, bytes_acked, bytes_received) = (from.long()?, from.long()?, from.long()?);
        let slack = i64::from_ne_bytes(from.take()?);
        let (count, _reserved) = (from.word()?, from.word()?);
        let paths: Option<Vec<ConnectionPath>> =
            (0..PATHS_MAX).map(|_| ConnectionPath::read(from)).collect();
        let mut paths = paths?;
        paths.truncate(count as usize);
        Some(ConnectionInfo {
            state,
            reason,
            bytes_sent,
            bytes_acked,
            bytes_received,
            bytes_ahead: from.long()?,
            slack: u64::try_from(slack).ok().map(Duration::from_millis),
            paths,
        })
    }
}

impl ConnectionPath {
    fn read(from: &mut StructFields<'_>) -> Option<ConnectionPath> {
        let name: [u8; NAME_BYTES] = from.take()?;
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        Some(ConnectionPath {
            link: String::from_utf8_lossy(name).into_owned(),
            cost: match from.word()? {
                0 => NetworkCost::Free,
                1 => NetworkCost::Metered,
                _ => NetworkCost::Roaming,
            },
            state: match from.word()? {
                0 => PathActivity::Opening,
                1 => PathActivity::Works,
                _ => PathActivity::Silent,
            },
            rtt: Duration::from_micros(from.word()?.into()),
            rtt_min: Duration::from_micros(from.word()?.into()),
            bytes_received: from.long()?,
            bytes_sent: from.long()?,
            rate: Some(from.long()?).filter(|rate| *rate > 0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_are_where_the_header_has_them() {
        let words =
            |words: &[u32]| -> Vec<u8> { words.iter().flat_map(|w| w.to_ne_bytes()).collect() };
        let longs =
            |longs: &[u64]| -> Vec<u8> { longs.iter().flat_map(|w| w.to_ne_bytes()).collect() };
        let mut path = b"wlan0\0\0\0\0\0\0\0\0\0\0\0".to_vec();
        path.extend(words(&[1, 2, 30_000, 20_000]));
        path.extend(longs(&[5, 6, 0]));
        let mut bytes = words(&[1, ConnectionInfo::BYTES as u32, 2, 1]);
        bytes.extend(longs(&[10, 9, 8, 1500]));
        bytes.extend(words(&[1, 0]));
        bytes.extend(path);
        bytes.resize(ConnectionInfo::BYTES - 8, 0);
        bytes.extend(longs(&[7]));
        let info = ConnectionInfo::of_bytes(&bytes).unwrap();
        let path = ConnectionPath {
            link: "wlan0".into(),
            cost: NetworkCost::Metered,
            state: PathActivity::Silent,
            rtt: Duration::from_millis(30),
            rtt_min: Duration::from_millis(20),
            bytes_received: 5,
            bytes_sent: 6,
            rate: None,
        };
        let expected = ConnectionInfo {
            state: ConnectionState::Connected,
            reason: Some(StallReason::NoPath),
            bytes_sent: 10,
            bytes_acked: 9,
            bytes_received: 8,
            bytes_ahead: 7,
            slack: Some(Duration::from_millis(1500)),
            paths: vec![path],
        };
        assert_eq!(info, expected);
        assert!(ConnectionInfo::of_bytes(&bytes[..100]).is_err());
    }
}
