//! The links of this machine and their changes: addresses, routes, kind and cost class.
//!
//! ```text
//! kernel ──multicast──▶ "something changed" ─┐
//! caller ──network_changed()────────────────┴─▶ gather ─▶ read everything ─▶ latest snapshot
//!                                                                              │ compare
//! LinkMonitor::next() ◀── Appeared / Changed / Vanished ◀── known snapshot ◀───┘
//! ```
//!
//! A message of the kernel is only a hint: after one, links, addresses and routes are read again,
//! and events are the difference between the consumer's snapshot and the new one. So a lost or
//! repeated message does no harm, a slow consumer sees fewer events instead of a queue, and
//! applying the events to the first snapshot always gives the latest one.
//!
//! These facts show that a link exists, not that it carries data. For that, its first hop and its
//! radio can be probed ([`LinkProbe`]).
//!
//! The cost class belongs to the network, not to the radio. Each link has a class and the reason
//! for it ([`CostAssessment`]): the user's flags and rules ([`CostResolver`]) take precedence over
//! the network manager ([`Networks`]), and that over what the kernel shows. A VPN has the class of
//! the links below it.
//!
//! A [`WifiRoamer`] chooses access points: it scans, leaves those that do not answer, and joins
//! faster ones.

mod access_point_rates;
mod access_point_trials;
mod class;
mod cost_resolver;
mod dhcp_option;
mod event;
mod gateway_probe;
mod geoclue;
mod link;
mod link_kind;
mod link_probe;
mod link_reader;
mod monitor;
mod network;
mod network_manager;
mod network_manager_bus;
mod rules;
mod serial_links;
mod station;
mod wifi_roaming;

pub use access_point_rates::{AccessPointRates, POINTS_MAX};
pub use access_point_trials::{
    ANSWER_WITHIN, AccessPointTrials, SHUN_FIRST, SHUN_MAX, SHUNNED_MAX,
};
pub use class::{
    ClassRule, ClassRules, CostAssessment, CostClass, IneffectiveRuleError, LinkClassRuleError,
};
pub use cost_resolver::CostResolver;
pub use dhcp_option::DHCP_PROXY_OPTION;
pub use event::{LinkEvent, difference};
pub use geoclue::{GeoClue, GeoClueError, MeasuredPosition};
pub use link::{DefaultRoute, Link};
pub use link_kind::LinkKind;
pub use link_probe::{HOP_PATIENCE, KernelLinkProbe, LinkProbe, NoLinkProbe, ProbeFuture};
pub use monitor::{ChangeHandle, GATHER, LinkError, LinkMonitor, READ_INTERVAL_MIN};
pub use network::{AccessPoint, Connectivity, Metered, NetworkInfo, Networks};
pub use network_manager::{NetworkManager, NetworkManagerError};
pub use rules::{
    CapCutoff, CostClassSetting, LinkKindSetting, NetworkRule, NetworkRuleError, NetworkRules,
    ResetDay,
};
pub use station::StationStats;
pub use wifi_roaming::{LOOK_STREAMING, RoamOutcome, WifiRoamer};
