//! Models of links as pure queues: rate, delay, loss, outages, traces.
//!
//! Nothing here reads a clock or touches the system: time is an argument and chance comes from a
//! seed, so the simulator (virtual time) and the lab (real time) run the same models.
//!
//! ```text
//!            Link                    Pipe::push(now, bytes, packet) -> Verdict
//!  device ── upward ─▶ network       Pipe::next_event() -> Option<Time>
//!         ◀─ down ────               Pipe::pop(now) -> Option<packet>
//! ```
#![forbid(unsafe_code)]

mod link;
mod loss;
mod nat;
mod pipe;
mod rate;
pub mod trace;

pub use d2tp_time::{Span, Time};
pub use link::{Condition, Link, seeded};
pub use loss::{Burst, Loss};
pub use nat::{MAPPINGS_MAX, Nat, PORT_FIRST};
pub use pipe::{
    Counters, FLIGHT_PACKETS_MAX, Packet, Pipe, Profile, QUEUE_PACKETS_MAX, Queue, Verdict,
};
pub use rate::{OPPORTUNITY_BYTES, Opportunities, Rate};
