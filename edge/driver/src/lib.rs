//! The asynchronous API over the D2TP core: connect, open, read, write.
//!
//! ```text
//!  Flow (AsyncRead + AsyncWrite) ─┐                         ┌─ one UDP socket per link
//!  Flow ──────────────────────────┼─ engine: one task ──────┼─ …
//!  Source (a file, a cache) ──────┘   core + clock + timers └─
//! ```
//!
//! A [`Device`] connects to a server and moves between links; a [`Server`] accepts flows. Programs
//! use [`FlowIo`]: a byte stream in each direction that survives address changes. Data that can be
//! read again is sent from a [`SendSource`], so that a flow that hibernates for hours needs an
//! offset instead of a buffer.
//!
//! Beside its session with a server, a device may have sessions that the server relays: with
//! origins and other devices ([`Peer`]), which it calls or which call it ([`PeerListener`]). They
//! share sockets and core.

mod address;
mod announced_services;
mod attach;
mod clock;
mod datagram_inbox;
mod datagram_source;
mod datagrams;
mod device;
mod device_nodes;
mod device_sender;
mod device_stream;
mod driver_core;
mod engine;
mod engine_counts;
mod engine_waker;
mod flow;
mod flow_client;
mod flow_io;
mod hibernation;
mod hibernation_state;
mod hint_trial;
mod instance;
mod instance_lease;
mod journal;
mod lease_record;
mod link_health;
mod local_hints;
mod move_question;
mod node_watch;
mod open_stream;
mod peer;
mod peer_listener;
mod provided_links;
mod proxy_reset;
mod qlog;
mod qlog_events;
mod received_store;
mod record_store;
mod refused_clients;
mod relay_dispatch;
mod relay_host;
mod relay_meter;
mod relay_state;
mod resumed_device;
mod scheduler_handle;
mod secrets;
mod serial_carriers;
mod serial_link;
mod server;
mod server_admission;
mod server_choice;
mod server_list;
mod server_lookup;
mod server_nodes;
mod service_records;
mod session_handoff;
mod session_moves;
mod session_refusal;
mod shared_records;
mod shared_state;
mod source;
mod stream_acceptor;
mod stream_queues;
mod synchronisation;
mod system_route;
mod ticket_seed;
mod version_probe;
mod wake_detector;
mod worker_links;
mod workers;

pub use address::{AddressError, NODES_MAX, NodeAddress, PORT_DEFAULT, ServerAddress, ServerNodes};
pub use announced_services::{SERVICE_KEY_ATTRIBUTE, SERVICE_TYPE};
pub use attach::{Attach, Attachment, KernelLinks};
pub use clock::boot;
pub use d2tp_device::nearest_server;
pub use d2tp_sched::CarriedByLink;
pub use d2tp_session::{
    AckOffload, Admission, ArrivedBytes, BadCidShare, CONTEXTS, CONTEXTS_OF_COPIES, CidShare,
    CipherSuite, CongestionKind, DATAGRAMS_MAX, DatagramStats, DrwaLambda, EndpointConfig,
    FirstHopStatus, FlowEnd, FlowRemainder, HybridPolicy, LinkId, MemoryAccount, MemoryCharge,
    MemoryPool, Mirroring, PathSchedulerKind, PathSelection, PathState, PathStats, PathSwitchKind,
    PublicKey, ReasonCode, RelayId, RelayLimits, RelayRefusal, RepairOffer, SecretKey, SessionEnd,
    SessionEvent, TraceLevel,
};
pub use d2tp_stream::{
    HttpProxyError, IdentityError, STREAM_PORT_DEFAULT, StreamIdentity, TcpStreamAcceptor,
    check_http_proxy, is_http_proxy_set, use_http_proxy,
};
pub use d2tp_udp::SOCKET_BUFFER_BYTES;
pub use d2tp_wire::VERSION as PROTOCOL_VERSION;
pub use datagram_inbox::{DATAGRAMS_UNREAD_MAX, Datagram};
pub use datagram_source::{DatagramSource, SourcedDatagram};
pub use datagrams::{Connection, ContextInbox, DatagramError};
pub use device::{
    Device, DeviceOptions, LinkAnswers, LinkStatus, LinkUse, StreamFailure, StreamStatus,
};
pub use device_nodes::{NodeStatus, describe_nodes};
pub use driver_core::{DriverError, MOVE_CONTEXT};
pub use engine_counts::EngineCounts;
pub use flow::{Flow, FlowSettings};
pub use flow_client::{FlowClient, FlowClientReport};
pub use flow_io::{DatagramSender, FlowHibernated, FlowIo, FlowTakenOver, HibernationSwitch};
pub use hibernation_state::HibernatedReader;
pub use instance::{FORGOTTEN, Instance, InstanceClaim};
pub use instance_lease::InstanceLease;
pub use journal::{
    Journal, JournalBatch, JournalError, JournalFlowKey, JournalPage, JournalSession,
    JournalSessionKey, StoredRecord,
};
pub use lease_record::LeaseRecord;
pub use local_hints::{
    HintSource, LOCAL_HINTS_MAX, LocalHint, TriedHint, local_hints, use_local_hints,
};
pub use peer::{CallError, Peer};
pub use peer_listener::PeerListener;
pub use provided_links::{ProvidedLink, ProvidedLinks};
pub use proxy_reset::ResetCause;
pub use qlog::{OpenQlogFile, QLOG_QUEUE_MAX, Qlog};
pub use received_store::ReceivedStore;
pub use record_store::{
    CommitReport, OwnerAnswer, OwnerQuestion, OwnershipClaim, RecordStore, SharedRecords,
    SharedSession, StoreFuture,
};
pub use relay_host::{DeviceRelays, IncomingCalls, RelayError, RelayHandle};
pub use relay_meter::RelayMeter;
pub use relay_state::CallEvent;
pub use resumed_device::{LeaseClaim, ResumedLease};
pub use scheduler_handle::{SchedulerHandle, SpendHandle};
pub use server::{HibernationOptions, Server, ServerOptions, SocketsAfter};
pub use server_choice::{
    AskedServer, ServerChoice, asked_servers, choose_server, free_links, measure_servers,
};
pub use server_list::{SERVERS_MAX, ServerList, ServerListError};
pub use server_nodes::look_up_nodes;
pub use service_records::{SVCB_SERVER_KEY, SVCB_STREAM_PORT};
pub use session_moves::{MOVE_AGAIN_AFTER, MoveReport};
pub use session_refusal::refusal_text;
pub use source::{HostKey, SendSource};
pub use system_route::{is_by_system_route, is_loopback_host};
pub use ticket_seed::TICKET_SEED_NOTE;
pub use version_probe::{VersionProbeAnswer, probe_version};
