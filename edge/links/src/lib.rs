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
//! it ([`Judgement`]), and the user's [`ClassRules`] win over all evidence.

mod class;
mod echo;
mod event;
mod kind;
mod link;
mod monitor;
mod read;
mod signs;
mod station;

pub use class::{Class, ClassRule, ClassRuleError, ClassRules, Judgement};
pub use event::{LinkEvent, difference};
pub use kind::Kind;
pub use link::{DefaultRoute, Link};
pub use monitor::{ChangeHandle, GATHER, LinkError, LinkMonitor, READ_INTERVAL_MIN};
pub use signs::{Answer, HOP_PATIENCE, KernelSigns, NoSigns, Signs};
pub use station::Station;
