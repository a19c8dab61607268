//! The streams of a simulation: connections that carry packets where a network blocks UDP
//! (docs/protocol.md §6.4).
//!
//! ```text
//!  core ─▶ transmit, to a stream ─▶ packet_queue.rs ─▶ messages.rs ─▶ TCP (tcp/) ─▶ link
//!  core ◀─ datagram, from a stream ◀────── half.rs: set-up, reading ◀──────────────┘
//! ```
//!
//! When a device opens one, and how sessions use it, is the production code: `core/device` and
//! `core/session`. What `edge/stream` and the driver do around that is repeated here without
//! sockets: the set-up of TLS and WebSocket, queues, and the room that the core hears of. An
//! interceptor is a host that answers in place of the proxy; it shows the device a page.

mod half;
mod messages;
mod packet_queue;
mod table;

pub(crate) use half::{StreamEvent, StreamHalf, StreamOpening, StreamRole};
pub(crate) use table::{SimStreams, StreamNews};
