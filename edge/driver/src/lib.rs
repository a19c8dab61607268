//! The asynchronous API over the D2TP core: connect, open, read, write.
//!
//! ```text
//!  Flow (AsyncRead + AsyncWrite) ─┐                         ┌─ one UDP socket per link
//!  Flow ──────────────────────────┼─ engine: one task ──────┼─ …
//!  Source (a file, a cache) ──────┘   core + clock + timers └─
//! ```
//!
//! A [`Device`] calls a server and moves between links; a [`Server`] accepts flows. Programs see
//! [`FlowIo`]: a byte stream each way that outlives addresses. What they want sent from something
//! re-readable they hand over as a [`Source`], so that a flow that sleeps for hours holds a cursor
//! instead of a buffer.
//!
//! Beside its session with a server, a device may have sessions with others by way of it: with origins
//! and other devices ([`Peer`]), called by it or calling ([`Listener`]). They share sockets and core.

mod address;
mod attach;
mod clock;
mod datagrams;
mod device;
mod engine;
mod flow;
mod given;
mod hop;
mod hosting;
mod instance;
mod journal;
mod lease;
mod listener;
mod peer;
mod qlog;
mod qlog_words;
mod relaying;
mod rest;
mod server;
mod source;
mod standby;
mod tickets;

pub use address::{AddressError, ServerAddress};
pub use attach::{Attach, Attachment, KernelLinks};
pub use clock::boot;
pub use d2tp_session::{
    AckOffload, Admission, CONTEXTS, CONTEXTS_OF_COPIES, CipherSuite, CongestionKind,
    DATAGRAMS_MAX, DatagramStats, DrwaLambda, EndpointConfig, FirstHopStatus, FlowEnd, LinkId,
    Mirroring, PathSchedulerKind, PathSelection, PathState, PathStats, PathSwitchKind, PublicKey,
    ReasonCode, RelayId, RelayLimits, RelayRefusal, SecretKey, SessionEnd, SessionEvent,
    TraceLevel,
};
pub use datagrams::{Connection, ContextInbox, DATAGRAMS_UNREAD_MAX, Datagram, DatagramError};
pub use device::{Device, DeviceOptions, LinkAnswers, LinkUse, Way};
pub use engine::DriverError;
pub use flow::{Flow, FlowSettings};
pub use given::{GivenLink, GivenLinks};
pub use hosting::{CallNews, Hosting, Listening, Relay, RelayFault};
pub use instance::{Claim, FORGOTTEN, Instance};
pub use journal::{Batch, FlowKey, Journal, JournalError, Kept, Part, SessionKey, Stored};
pub use lease::Lease;
pub use listener::Listener;
pub use peer::{CallError, Peer};
pub use qlog::{OpenLog, QLOG_QUEUE_MAX, Qlog};
pub use rest::Peek;
pub use server::{RestOptions, Server, ServerOptions};
pub use source::{Asleep, FlowIo, HostKey, Source};
pub use tickets::TICKET_SEED_NOTE;
