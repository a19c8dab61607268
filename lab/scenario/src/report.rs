//! The report of a run: the one object that `lab run --json` and `sim run --json` print.
//!
//! All times are seconds of the run's own clock. Bytes of links are bytes of IP packets, counted
//! when the link delivers them.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// The report of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunReport {
    /// The results of the flows, in the scenario's order.
    pub flows: Vec<FlowReport>,
    /// The results of the links, in the scenario's order.
    pub links: Vec<LinkReport>,
    /// Changes of the link that carries the data, in order of time.
    pub switches: Vec<DataSwitch>,
    /// The number of requests to the origin that began at a byte of an object at which an earlier
    /// request for it had begun; `null` if the origin could not be observed.
    #[serde(default)]
    pub origin_requests_twice: Option<u64>,
    /// The number of sessions that the second node took over from the first; absent if the scenario has one node, or no
    /// store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sessions_taken_over: Option<u64>,
    /// The number of packets that passed the device, both ways, until the first payload of a flow arrived; `null` if none
    /// did, or if packets were not observed one by one.
    #[serde(default)]
    pub packets_to_payload: Option<u64>,
    /// The energy of the radios; absent if the scenario names none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy: Option<EnergyReport>,
    /// The results of the scenario's podcasts; absent if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub podcasts: Option<PodcastReport>,
    /// The results of the scenario's expectations.
    pub expectations: Vec<Expectation>,
}

/// The energy of the radios above idle, until they slept after the last packet.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EnergyReport {
    /// The energy of all radios, in joules.
    pub joules: f64,
    /// The energy of each link's radio, in joules.
    pub joules_by_link: BTreeMap<String, f64>,
    /// Megabits that flows got for a joule; `null` if none was used.
    pub mbit_per_joule: Option<f64>,
    /// Megabits that flows got in a second of the run.
    pub mbps: Option<f64>,
}

/// The results of podcasts. Shares are 0 to 1, and `null` of nothing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PodcastReport {
    /// The policy of the downloads.
    pub policy: String,
    /// The results of the episodes, in the order of publication.
    pub episodes: Vec<EpisodeReport>,
    /// Share of the episodes that were whole by their deadline.
    pub in_time_share: Option<f64>,
    /// Share of the played episodes that were whole when they were played.
    pub heard_whole_share: Option<f64>,
    /// Share of the bytes that free links carried.
    pub free_share: Option<f64>,
    /// The largest such share with which every deadline can be met, if all is known beforehand; `null` if they cannot all
    /// be met.
    pub optimum_free_share: Option<f64>,
    /// Bytes that a client fetches again which begins anew whenever it loses its network, as a share of the
    /// episodes' bytes.
    pub restart_share: Option<f64>,
    /// Moves of downloads to another network.
    pub switches: u64,
    /// What the device's own log answers to the questions of the paper's field study: `cedos cast log --summary --json`.
    #[serde(default)]
    pub study: Value,
}

/// The result of an episode.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EpisodeReport {
    /// The id of the feed.
    pub feed: String,
    /// The number of the episode in its feed, from 0.
    pub number: usize,
    /// The size of the flow.
    pub bytes: u64,
    /// When the episode was published.
    pub published_s: f64,
    /// The flow's deadline; `null` if it has none, or was never requested.
    pub deadline_s: Option<f64>,
    /// When its last byte came; `null` if it was never whole.
    pub whole_s: Option<f64>,
    /// Whether the episode was complete by its deadline.
    pub in_time: bool,
    /// Whether the episode had the origin's content when it was played; `null` if it was not
    /// played.
    pub heard_whole: Option<bool>,
    /// Bytes by class of link: `free`, `metered`, `roaming`.
    pub bytes_by_class: BTreeMap<String, u64>,
    /// Moves to another network.
    pub switches: u64,
    /// Bytes that were there when its network was last lost.
    pub restart_bytes: u64,
}

/// The result of a flow.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FlowReport {
    /// The flow's id in the scenario.
    pub id: String,
    /// Bytes delivered to the application.
    pub bytes: u64,
    /// Whether everything arrived and has the digest of the origin's content.
    pub sha256_ok: bool,
    /// When the flow was complete, in seconds; `null` if it never was.
    pub finished_s: Option<f64>,
    /// When the first byte of content arrived; `null` if none did, or it could not be observed.
    pub first_byte_s: Option<f64>,
    /// When the last new byte arrived.
    pub last_byte_s: Option<f64>,
    /// The longest time between two arrivals of new bytes; `null` if none arrived, or they could
    /// not be observed.
    #[serde(default)]
    pub silence_max_s: Option<f64>,
    /// The deadline in seconds; `null` if there was none.
    pub deadline_s: Option<f64>,
    /// Whether the flow was complete at its deadline; without a deadline, whether it was complete.
    pub deadline_met: bool,
    /// Payload bytes by the link that carried them, retransmissions included.
    pub bytes_by_link: BTreeMap<String, u64>,
    /// Payload bytes that arrived more than once.
    pub duplicate_bytes: u64,
}

/// The traffic of a link.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LinkReport {
    /// Name of the link.
    pub name: String,
    /// `free`, `metered` or `roaming`.
    pub class: String,
    /// Bytes of IP packets delivered to the device.
    pub bytes_down: u64,
    /// Bytes of IP packets that the device sent on the link.
    pub bytes_up: u64,
    /// Packets that the device tried to send on the link while it was down.
    pub packets_while_down: u64,
    /// The mean time that packets to the device were in the queue, including their transmission
    /// time.
    pub wait_down_ms: f64,
    /// The mean time that packets from the device were in the queue, including their transmission
    /// time.
    pub wait_up_ms: f64,
    /// The longest time in the queue of a packet to the device.
    pub wait_down_max_ms: f64,
}

/// How the data moved to another link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SwitchKind {
    /// Another link was up when the old one was left.
    MakeBeforeBreak,
    /// No path was up in between.
    BreakBeforeMake,
}

/// A change of the link, or of its address, that carries the data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DataSwitch {
    /// When the old link was lost, or the new one came up beside it.
    pub at_s: f64,
    /// The link that carried the data before.
    pub from: String,
    /// The link that carried the data afterwards.
    pub to: String,
    /// Make before break, or break before make.
    pub kind: SwitchKind,
    /// The time without data. Make before break: from the last data on the old link to the first on
    /// the new one. Break before make: from the new address to the first data.
    pub silence_ms: f64,
}

/// The result of an expectation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Expectation {
    /// The expectation as the scenario gives it.
    pub text: String,
    /// Whether the expectation is true of this report.
    pub holds: bool,
    /// Why the expectation does not hold, in words; not part of the printed object.
    #[serde(skip)]
    pub why: String,
}

impl RunReport {
    /// Whether every expectation holds.
    pub fn holds(&self) -> bool {
        self.expectations
            .iter()
            .all(|expectation| expectation.holds)
    }
}
