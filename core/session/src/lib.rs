//! D2TP itself, sans-IO: sessions, paths, flows, recovery, congestion control.
//!
//! A pure core: datagrams, times and the application's calls go in; datagrams and events come
//! out. No clock, no socket, no thread, no randomness of its own. The same inputs give the same
//! outputs, byte for byte, on every machine.
//!
//! ```text
//!  datagram ──▶ Endpoint (whose is it?) ──▶ receive.rs opens, decodes, hands each frame to its owner
//!                                              flow · path · recovery · grant · resume
//!  Transmit ◀── transmit.rs asks the owners in a fixed order, seals ◀── owners mark what they want
//! ```
//!
//! The rules it keeps are named in `docs/protocol.md` (R-ACK-2 and the like) and so marked here.

mod acks;
mod asleep;
mod by_path;
mod calls;
mod careful;
mod census;
mod claim;
mod config;
mod congestion;
mod control;
mod datagrams;
mod delivery;
mod drwa;
mod early;
mod early_data;
mod endpoint;
mod epochs;
mod event;
mod flow;
mod grant;
mod guest;
mod half_open;
mod hole;
mod hop;
mod knock;
mod loss_kind;
mod mirror;
mod movement;
mod mtu;
mod offload;
mod pacer;
mod path;
mod path_scheduler;
mod ranges;
mod receive;
mod recent;
mod record;
mod recovery;
mod recv_half;
mod relay;
mod rendezvous;
mod resume;
mod route;
mod rtt;
mod send_half;
mod session;
mod sought;
mod syn;
#[cfg(test)]
mod tests;
mod ticket;
mod timers;
mod trace;
mod transmit;
mod ways;

pub use asleep::Lapsed;
pub use census::{Arrived, FlowState, Holdings};
pub use config::{
    ACK_RANGES_MAX, Config, DATAGRAMS_MAX, EVENTS_MAX, FLOW_GAPS_MAX, HALF_OPEN_PER_INSTANCE,
    PATHS_MAX, REFUSALS_MAX, SEEN_RANGES_AWAKE_MAX, SPARE_PATHS, THAWED_BUFFER_BYTES,
};
pub use congestion::CongestionKind;
pub use d2tp_seal::{Holder, PublicKey, Rng, SecretKey, Suite, Ticket, TicketPress};
pub use d2tp_time::{Span, Time};
pub use d2tp_wire::{FlowId, PathId, PathStatus, Reason};
pub use datagrams::{CONTEXTS, CONTEXTS_OF_COPIES, DatagramStats};
pub use drwa::{Drwa, Lambda};
pub use endpoint::{Admission, Endpoint, HibernateError, Incoming, SessionId, UnknownSession};
pub use event::{Event, FlowEnd, PeerFault, SessionEnd, SwitchKind};
pub use flow::FlowOptions;
pub use guest::{Aside, CALLS_MAX, Guest};
pub use hop::FirstHop;
pub use mirror::Mirroring;
pub use offload::AckOffload;
pub use path::{Addresses, LinkId, PathState};
pub use path_scheduler::PathSchedulerKind;
pub use record::{FlowRecord, Record, RecordError, SeenEpochs};
pub use relay::{
    Onward, RELAY_HEADER_BYTES, RelayId, RelayLimits, RelayRefusal, Relays, UNANSWERED_MAX, id_of,
    unwrapped, wrap,
};
pub use rendezvous::{ADDRESSES_MAX, LINE_BYTES_MAX, PUNCH_BYTES, Rendezvous};
pub use route::Route;
pub use session::{FlowError, Life, PathStats, Read, Role, Session};
pub use sought::{SOUGHT_MAX, Sought};
pub use trace::{TRACE_RECORDS_MAX, TraceLevel, TraceRecord};
pub use transmit::Transmit;
