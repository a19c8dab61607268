//! `libd2tp`: the BSD socket calls over D2TP (`docs/sockets.md`, `include/d2tp.h`).
//!
//! ```text
//!  the program                      │ the engine: one thread, descriptors of its own
//!  fd ── kernel TCP on loopback ────┼──── pump ── Flow ── Device or Server ══ links ══▶
//!  select, epoll, read, sendfile    │       (d2tp-driver)
//! ```
//!
//! The descriptor a program holds is one end of a loopback TCP connection, so the kernel itself answers
//! everything that is said to descriptors, and an abort reads as one (`pair`). The other end belongs
//! to a background thread that starts at first use (`engine`) and copies between it and a flow
//! (`pump`), ahead of the program where it asks for that (`ahead`). What the kernel does not know of a socket (its deadline, who the far end is, why it
//! broke) is in `table`, found by the socket's cookie, so that numbers may be reused and duplicated.
//!
//! Where the user's agent runs, it is that which carries a stream that calls out (`handed`), with this crate's
//! own tasks (`carrier`).
//!
//! Datagram sockets are UDP's on loopback, in the same way (`datagrams`).
//!
//! `calls` are the functions of the header; they, the numbers of its options and what an agent needs are all
//! that is public.

mod address;
pub mod agent_carrier;
mod agent_connection;
mod agent_message;
mod calls;
mod connect;
mod datagram_accounting;
mod datagrams;
mod dlock;
mod engine;
mod engine_state;
mod errno;
mod exit_flush;
mod fork;
mod header;
mod identity;
mod info;
mod kept_connections;
mod kernel;
mod listen;
mod memory;
mod options;
mod pair;
mod policy;
mod pump;
mod read_ahead;
mod reopen_token;
mod socket_scheduler;
mod table;
mod tunnel;

pub use calls::*;
pub use engine::share_descriptors;
pub use header::*;
