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
//! re-readable they hand over as a [`SendSource`], so that a flow that sleeps for hours holds a cursor
//! instead of a buffer.
//!
//! Beside its session with a server, a device may have sessions with others by way of it: with origins
//! and other devices ([`Peer`]), called by it or calling ([`PeerListener`]). They share sockets and core.

mod address;
mod attach;
mod clock;
mod datagram_inbox;
mod datagrams;
mod device;
mod driver_core;
mod engine;
mod flow;
mod flow_client;
mod flow_io;
mod hibernation;
mod hibernation_state;
mod instance;
mod instance_lease;
mod journal;
mod link_health;
mod peer;
mod peer_listener;
mod provided_links;
mod proxy_reset;
mod qlog;
mod qlog_events;
mod refused_clients;
mod relay_dispatch;
mod relay_host;
mod relay_state;
mod resumed_device;
mod scheduler_handle;
mod server;
mod source;
mod ticket_seed;
mod wake_detector;

pub use address::{AddressError, ServerAddress};
pub use attach::{Attach, Attachment, KernelLinks};
pub use clock::boot;
pub use d2tp_sched::CarriedByLink;
pub use d2tp_session::{
    AckOffload, Admission, CONTEXTS, CONTEXTS_OF_COPIES, CipherSuite, CongestionKind,
    DATAGRAMS_MAX, DatagramStats, DrwaLambda, EndpointConfig, FirstHopStatus, FlowEnd, LinkId,
    MemoryAccount, MemoryCharge, MemoryPool, Mirroring, PathSchedulerKind, PathSelection,
    PathState, PathStats, PathSwitchKind, PublicKey, ReasonCode, RelayId, RelayLimits,
    RelayRefusal, SecretKey, SessionEnd, SessionEvent, TraceLevel,
};
pub use datagram_inbox::{DATAGRAMS_UNREAD_MAX, Datagram};
pub use datagrams::{Connection, ContextInbox, DatagramError};
pub use device::{Device, DeviceOptions, LinkAnswers, LinkStatus, LinkUse};
pub use driver_core::DriverError;
pub use flow::{Flow, FlowSettings};
pub use flow_client::{FlowClient, FlowClientReport};
pub use flow_io::{FlowHibernated, FlowIo};
pub use hibernation_state::HibernatedReader;
pub use instance::{FORGOTTEN, Instance, InstanceClaim};
pub use instance_lease::InstanceLease;
pub use journal::{
    Journal, JournalBatch, JournalError, JournalFlowKey, JournalPage, JournalSession,
    JournalSessionKey, StoredRecord,
};
pub use peer::{CallError, Peer};
pub use peer_listener::PeerListener;
pub use provided_links::{ProvidedLink, ProvidedLinks};
pub use proxy_reset::ResetCause;
pub use qlog::{OpenQlogFile, QLOG_QUEUE_MAX, Qlog};
pub use relay_host::{DeviceRelays, IncomingCalls, RelayError, RelayHandle};
pub use relay_state::CallEvent;
pub use scheduler_handle::{SchedulerHandle, SpendHandle};
pub use server::{HibernationOptions, Server, ServerOptions};
pub use source::{HostKey, SendSource};
pub use ticket_seed::TICKET_SEED_NOTE;
