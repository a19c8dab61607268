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
//! ([`Signs`]).
//!
//! Cost belongs to the network, not to the radio: each link carries a class and the evidence for
//! it ([`Judgement`]): the user's flags and rules ([`Judge`]) win over what the network manager says
//! ([`Networks`]), and that over what the kernel shows. VPNs cost what they run over.
//!
//! Whoever wants the right access point, too, has a [`Scout`]: it looks, leaves what does not answer, and
//! joins what carries more.

mod class;
mod echo;
mod event;
mod judge;
mod kind;
mod link;
mod monitor;
mod network;
mod nm;
mod points;
mod read;
mod rules;
mod scout;
mod signs;
mod station;
mod trial;

pub use class::{Class, ClassRule, ClassRuleError, ClassRules, Judgement};
pub use event::{LinkEvent, difference};
pub use judge::Judge;
pub use kind::Kind;
pub use link::{DefaultRoute, Link};
pub use monitor::{ChangeHandle, GATHER, LinkError, LinkMonitor, READ_INTERVAL_MIN};
pub use network::{AccessPoint, Connectivity, Metered, Network, Networks};
pub use nm::{NetworkManager, NetworkManagerError};
pub use points::{POINTS_MAX, Points};
pub use rules::{ClassWord, Cutoff, KindWord, NetworkRule, NetworkRules, ResetDay, RuleError};
pub use scout::{LOOK_STREAMING, Roved, Scout};
pub use signs::{Answer, HOP_PATIENCE, KernelSigns, NoSigns, Signs};
pub use station::Station;
pub use trial::{ANSWER_WITHIN, SHUN_FIRST, SHUN_MAX, SHUNNED_MAX, Trials};
