//! Datagram sockets: they carry datagrams between a program's UDP socket on loopback and DATAGRAM
//! frames.
//!
//! ```text
//!  program's socket                engine
//!  127.0.0.1:A ── send ─────────▶ 127.1.x.y:P    one socket for each peer, whose name that is
//!              ◀────── recv ─────
//!              ── with a cmsg ──▶ 127.0.0.1:M    one for all: a head has the peer, route, expiry
//! ```
//!
//! The kernel keeps message boundaries, and truncates messages for which a reader has no room
//! (MSG_TRUNC). A socket that connects has one peer, a server; a bound socket is a server, and has
//! a peer for each device. A flow announces each pairing: its first line names the context of the
//! datagrams in both directions, it carries nothing else, and its end is the end of the datagrams.
//!
//! If an agent of the user runs, it has the socket named 127.1.x.y and the session
//! ([`crate::agent_connection`]); datagrams with a head are still read here and forwarded to it.
//!
//! No other process can send to either side: P is bound on every address by this user, the
//! program's filter checks the port, and the engine's sockets are connected.
//!
//! ```text
//!  socket, message_head, announcement ◀─ peer ◀─ registry ◀─ dispatch ◀─ client, server, for_agent
//!  the program's side, messages          one     all of      names and   connecting, bound sockets, sockets of
//!                                        peer    them        heads       other processes
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
