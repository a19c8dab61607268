//! The D2TP protocol, sans-IO: sessions, paths, flows, recovery, congestion control.
//!
//! Datagrams, times and the application's calls go in; datagrams and events come out. The crate
//! uses no clock, socket, thread or randomness of its own. Equal inputs give equal outputs, byte
//! for byte, on every machine.
//!
//! ```text
//!  datagram ──▶ Endpoint (which session?) ─▶ receive.rs opens, decodes, hands each frame to its owner
//!                                              flow · path · recovery · grant · resume
//!  Transmit ◀── transmit.rs asks the owners in a fixed order, seals ◀── owners mark what they want
//! ```
//!
//! `docs/protocol.md` names the protocol's rules (R-ACK-2 and so on). The code that fulfils a rule
//! carries its name.

mod ack_offload;
mod ack_offload_state;
mod acks;
mod address_validation;
mod blackout;
mod careful_resume;
mod careful_resume_state;
mod cid_share;
mod claim;
mod client_handshake;
mod config;
mod congestion;
mod control_budget;
mod datagram_queue;
mod datagrams;
mod delivery_rate;
mod drwa;
mod early_data;
mod early_packets;
mod endpoint;
mod epochs;
mod event;
mod first_hop;
mod flow;
mod flow_api;
mod flow_options;
mod grant;
mod half_open;
mod handshake_budget;
mod handshake_ownership;
mod hibernated;
mod introspect;
mod key_exchange;
mod key_exchange_state;
mod limited_path;
mod link;
mod long_round_trip;
mod loss_classifier;
mod memory_pool;
mod memory_waiters;
mod mirror;
mod mirror_state;
mod mtu;
mod pacer;
mod path;
mod path_control;
mod path_limit;
mod path_map;
mod path_scheduler;
mod path_selection;
mod peer_address;
mod pending_lookup;
mod ranges;
mod receive;
mod recent_map;
mod record;
mod record_log;
mod recovery;
mod recv_half;
mod relay;
mod relay_client;
mod rendezvous;
mod repair_datagrams;
mod reserved_address;
mod resume;
mod rtt;
mod send_half;
mod sent_packet;
mod serial_path;
mod session;
mod session_id;
mod session_state;
mod shared_bottleneck;
mod slow_path;
mod steadiest_path;
mod stream_path;
mod stream_path_state;
mod syn;
#[cfg(test)]
mod tests;
mod ticket;
mod timers;
mod trace;
mod transmit;

pub use ack_offload_state::AckOffload;
pub use cid_share::{BadCidShare, CID_SHARES_MAX, CidShare};
pub use config::{
    ACK_RANGES_MAX, DATAGRAMS_MAX, EVENTS_MAX, EndpointConfig, FLOW_GAPS_MAX,
    HALF_OPEN_PER_INSTANCE, PATHS_MAX, REFUSALS_MAX, RESTORED_BUFFER_BYTES, SEEN_RANGES_AWAKE_MAX,
    SPARE_PATHS,
};
pub use congestion::CongestionKind;
pub use d2tp_seal::{
    CipherSuite, PublicKey, Rng, SecretKey, SessionSecret, SessionTicket, TicketHolder,
    TicketIssuer,
};
pub use d2tp_time::{Span, Time};
pub use d2tp_wire::{FlowId, PathId, PathStatus, ReasonCode};
pub use datagram_queue::{CONTEXTS, CONTEXTS_OF_COPIES, DatagramStats};
pub use drwa::{Drwa, DrwaLambda};
pub use endpoint::{
    Admission, Endpoint, HibernateError, IncomingDatagram, Misdirected, OWNERSHIP_REQUESTS_MAX,
    RESTART_NOTICES_MAX, UNADMITTED_WINDOW_BYTES, UnknownSession,
};
pub use event::{FlowArrival, FlowEnd, PathSwitchKind, PeerFault, SessionEnd, SessionEvent};
pub use first_hop::FirstHopStatus;
pub use flow_api::FlowRemainder;
pub use flow_options::FlowOptions;
pub use handshake_ownership::{OwnershipAnswer, OwnershipRequest};
pub use hibernated::HibernatedExpiry;
pub use introspect::{FlowState, SessionUsage};
pub use key_exchange_state::HybridPolicy;
pub use link::{Addresses, LinkId};
pub use memory_pool::{KEY_SHARE, MemoryAccount, MemoryCharge, MemoryPool};
pub use mirror_state::Mirroring;
pub use path::PathState;
pub use path_scheduler::PathSchedulerKind;
pub use path_selection::PathSelection;
pub use pending_lookup::{PENDING_LOOKUPS_MAX, PendingLookup};
pub use record::{FlowRecord, RecordError, SessionRecord, UsedFlowIds};
pub use recv_half::ArrivedBytes;
pub use relay::{
    CallHalf, ForwardTarget, RELAY_HEADER_BYTES, RelayId, RelayLimits, RelayRefusal, RelayTable,
    UNANSWERED_MAX, relayed_id, unwrap_relayed, wrap_relayed,
};
pub use relay_client::{CALLS_MAX, InterceptedDatagram, RelayClient};
pub use rendezvous::{ADDRESSES_MAX, LINE_BYTES_MAX, PUNCH_BYTES, Rendezvous, RendezvousReach};
pub use repair_datagrams::RepairOffer;
pub use reserved_address::is_reserved_address;
pub use serial_path::SerialPathId;
pub use session::{FlowError, PathStats, ReadOutcome, Session};
pub use session_id::SessionId;
pub use session_state::{Role, SessionState};
pub use stream_path_state::{STREAM_ROOM_BYTES, StreamPathId};
pub use trace::{TRACE_RECORDS_MAX, TraceLevel, TraceRecord};
pub use transmit::Transmit;
