//! The links of this machine as they come and go: addresses, routes, type and class.
//!
//! ```text
//! kernel ──multicast──▶ "something changed" ─┐
//! caller ──network_changed()────────────────┴─▶ gather ─▶ read everything ─▶ latest snapshot
//!                                                                              │ compare
//! LinkMonitor::next() ◀── Appeared / Changed / Vanished ◀── known snapshot ◀───┘
//! ```
//!
//! A message of the kernel is only a hint: after one, links, addresses and routes are read anew,
//! and events are the difference between what the consumer knew and what is now. So a lost or
//! repeated message does no harm, a consumer that is slow sees fewer events and never a queue,
//! and applying the events to the first snapshot always gives the latest one.
//!
//! Facts say that a link is there, not that it carries: its first hop and its radio can be asked
//! ([`LinkProbe`]).
//!
//! Cost belongs to the network, not to the radio: each link carries a class and the evidence for
//! it ([`CostAssessment`]): the user's flags and rules ([`CostResolver`]) win over what the network manager says
//! ([`Networks`]), and that over what the kernel shows. VPNs cost what they run over.
//!
//! Whoever wants the right access point, too, has a [`WifiRoamer`]: it looks, leaves what does not answer, and
//! joins what carries more.

mod access_point_rates;
mod access_point_trials;
mod class;
mod cost_resolver;
mod event;
mod gateway_probe;
mod link;
mod link_kind;
mod link_probe;
mod link_reader;
mod monitor;
mod network;
mod network_manager;
mod network_manager_bus;
mod rules;
mod station;
mod wifi_roaming;

pub use access_point_rates::{AccessPointRates, POINTS_MAX};
pub use access_point_trials::{
    ANSWER_WITHIN, AccessPointTrials, SHUN_FIRST, SHUN_MAX, SHUNNED_MAX,
};
pub use class::{ClassRule, ClassRules, CostAssessment, CostClass, LinkClassRuleError};
pub use cost_resolver::CostResolver;
pub use event::{LinkEvent, difference};
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
