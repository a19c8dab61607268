//! Datagram sockets: from a program's UDP socket on loopback to DATAGRAM frames, and back.
//!
//! ```text
//!  program's socket                engine
//!  127.0.0.1:A ── send ─────────▶ 127.1.x.y:P    one socket for each far end, whose name that is
//!              ◀────── recv ─────
//!              ── with a cmsg ──▶ 127.0.0.1:M    one for all: a head says which far end, which way, how long
//! ```
//!
//! The kernel keeps messages apart, cuts what a reader has no room for and says so (MSG_TRUNC). A socket
//! that connects is an end of a session with a server; one that is bound is a server, and has an end for
//! each device. An end is announced by a flow, which then stays silent: its first line names the context
//! of the datagrams, both ways, and its end is theirs.
//!
//! Where an agent of the user runs it has the socket named 127.1.x.y and the session ([`crate::agent_connection`]); heads are
//! still read here, and their messages passed on.
//!
//! Nobody else can speak to either side: P is bound on every address by this user, the program's filter
//! looks at the port, and the engine's sockets are connected.
//!
//! ```text
//!  socket, message_head, announcement ◀─ peer ◀─ registry ◀─ dispatch ◀─ client, server, for_agent
//!  the program's side, what is said      one     all of      names and   what connects, what is bound, what an
//!                                        end     them        heads       agent carries
//! ```

mod announcement;
mod client;
mod dispatch;
mod for_agent;
mod message_head;
mod peer;
mod registry;
mod server;
mod socket;

pub(crate) use client::{DatagramCall, connect, no_proxy, open};
pub(crate) use dispatch::{on_close, on_options, ports};
pub(crate) use for_agent::carry_for_agent;
pub(crate) use message_head::MessageHead;
pub(crate) use peer::DatagramPeer;
pub(crate) use registry::DatagramRegistry;
pub(crate) use server::{bind, unbind};
pub(crate) use socket::{
    AgentDatagramPeer, NAMES, ProgramDatagrams, SURE_BYTES, may_be_datagram_socket, program_socket,
};
