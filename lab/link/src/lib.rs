//! Models of links as pure queues: rate, delay, loss, outages, traces.
//!
//! The models read no clock and make no system calls: time is an argument and random values come
//! from a seed, so the simulator (virtual time) and the lab (real time) use the same models.
//!
//! ```text
//!            LinkModel                LinkModel::push(way, now, bytes, packet) -> PushOutcome
//!  device ── upward ─▶ network       LinkModel::next_event() -> Option<Time>
//!         ◀─ down ────               LinkModel::pop(way, now) -> Option<packet>
//! ```
//!
//! The directions of a link are independent, unless they share a medium ([`Medium`]): then every
//! packet of one direction takes time from the other. A link may have holes ([`Holes`]);
//! [`Disruption`] computes what TCP loses by them.
#![forbid(unsafe_code)]

mod air;
mod behaviour;
mod disruption;
mod holes;
mod link;
mod loss;
mod medium;
mod nat;
mod pipe;
mod rate;
pub mod trace;

pub use behaviour::{Behaviour, FilteringNat};
pub use d2tp_time::{Span, Time};
pub use disruption::Disruption;
pub use holes::{DurationModel, Holes};
pub use link::{LinkCondition, LinkDirection, LinkModel, LinkReach, TcpPassage, seeded};
pub use loss::{Burst, Loss};
pub use medium::Medium;
pub use nat::{MAPPINGS_MAX, Nat, PORT_FIRST};
pub use pipe::{
    Counters, FLIGHT_PACKETS_MAX, Packet, Pipe, Profile, PushOutcome, QUEUE_PACKETS_MAX, Queue,
};
pub use rate::{OPPORTUNITY_BYTES, Opportunities, Rate};
