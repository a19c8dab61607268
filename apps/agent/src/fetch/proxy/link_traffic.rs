//! The bytes that each link carried for a client of a proxy, and the link's state.

use std::collections::BTreeMap;
use std::time::Duration;

use d2tp_driver::{LinkStatus, PathState, PathStats, StreamStatus};

/// Traffic and state of a link in the session.
#[derive(Debug, Clone)]
pub struct LinkTraffic {
    /// Payload bytes received over the link (sent, for uploads), in all sessions.
    pub bytes: u64,
    /// How long payload was arriving; none for uploads, or if none arrived in this session.
    pub active_time: Option<Duration>,
    /// The recent rate in bytes per second.
    pub rate: Option<u64>,
    /// Whether packets sent over the link are not answered: it counts as down, even with an address.
    pub is_silent: bool,
    /// Whether the link's path answers; none if it has no path.
    pub is_answering: Option<bool>,
    /// Whether its packets travel in a stream, because the network blocks UDP.
    pub stream: StreamStatus,
    /// The round trip that the path measured.
    pub round_trip: Option<Duration>,
}

impl LinkTraffic {
    /// The links of a session. `before`: payload bytes of earlier sessions; `sends`: whether sent bytes
    /// are counted.
    pub(super) fn of_links(
        before: BTreeMap<String, u64>,
        statuses: Vec<LinkStatus>,
        sends: bool,
    ) -> BTreeMap<String, LinkTraffic> {
        let unused = |bytes| LinkTraffic {
            bytes,
            active_time: None,
            rate: None,
            is_silent: false,
            is_answering: None,
            stream: StreamStatus::Unused,
            round_trip: None,
        };
        let before = before.into_iter();
        let mut links: BTreeMap<String, LinkTraffic> =
            before.map(|(name, bytes)| (name, unused(bytes))).collect();
        for status in statuses {
            let traffic = links.entry(status.name).or_insert(unused(0));
            let (received, sent) = status.payload;
            traffic.bytes += if sends { sent } else { received };
            // What was sent may still wait on its way.
            traffic.active_time = (!sends).then(|| status.busy.into());
            traffic.rate = status.rate;
            let active = |path: &PathStats| path.state == PathState::Active;
            traffic.stream = status.stream;
            traffic.is_silent = status.answers.is_silent();
            traffic.is_answering = status.path.as_ref().map(active);
            let path = status.path.filter(active);
            traffic.round_trip = path.map(|path| path.rtt.into());
        }
        links
    }
}
