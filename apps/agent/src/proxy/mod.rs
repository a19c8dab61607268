//! A proxy on this machine, for programs without D2TP: SOCKS5 and HTTP on one port.
//!
//! ```text
//!  program ── TCP ──▶ listener.rs: is it this user? ─┬─ 5 ──▶ socks.rs ─┐
//!                     the first bytes say which      ├─ PRI ▶ http2.rs ─┼─▶ proxy_session.rs: one flow
//!                                                    └─ else ▶ http.rs ─┘   each, CONNECT inside ──▶ D2Prox
//! ```
//!
//! Names are looked up by D2Prox, and it is D2Prox that refuses addresses: what it says is passed on. By
//! when a connection must be over and what it may cost is the line's default, unless the program says
//! otherwise ([`ConnOptions`]).

mod agent_scheduler;
mod carry;
mod conn_options;
mod http;
mod http2;
mod http_lengths;
mod listener;
mod optimistic_connect;
mod proxy_context;
mod proxy_session;
mod refusal;
mod socks;
mod target;
pub(crate) mod traffic_rule;

pub use carry::{carry, reset};
pub use conn_options::ConnOptions;
pub use listener::{CONNECTIONS_MAX, ClientPolicy, LocalProxyListener};
pub use optimistic_connect::{ConnectFailure, OptimisticConnect};
pub use proxy_session::{
    ANSWER_LIMIT, LinkPayload, MeteredPackets, PacketTunnel, ProxyConnection, ProxySession,
    ProxySessionPeer, RuleTraffic, SESSION_CONNECTIONS_MAX, SpendingBudget,
};
pub use refusal::{ConnectRefusal, RefusalCause};
pub use target::{NameLookup, TargetAddress};
pub use traffic_rule::{
    PortTransport, TRAFFIC_RULES_MAX, TrafficMatch, TrafficRule, packets_may_pay,
};
