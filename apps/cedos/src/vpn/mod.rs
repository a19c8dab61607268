//! `cedos vpn`: everything that this machine sends goes through D2Prox.
//!
//! ```text
//!  program ── TCP ──▶ nftables: redirect ──▶ tcp_flows.rs ──▶ a flow each ───────────┐
//!          ── rest ─▶ cedos0 (TUN) ────────▶ packet_carrier.rs ─▶ DATAGRAM frames ──┴▶ D2Prox
//!
//!  what goes in: tunnel_scope.rs           routes, names, marks: vpn_rules.rs
//!  what it may cost: rule_set.rs           who runs it, and how it is: vpn_state.rs
//!                    (packets: packet_rules.rs)
//! ```
//!
//! The session's own sockets are bound to their links, and the proxy's address has a route of its own, so that nothing of
//! the session goes into the tunnel.

mod cgroup_match;
mod packet_carrier;
mod packet_rules;
mod rule_set;
mod tcp_flows;
mod tunnel_scope;
mod vpn_rules;
mod vpn_state;

pub use packet_carrier::{PacketCarrier, RepairCounts};
pub use packet_rules::PacketRules;
pub use rule_set::RuleSet;
pub use tcp_flows::{TcpFlows, TcpMode};
pub use tunnel_scope::{ScopeEntry, TunnelScope};
pub use vpn_rules::{
    DEVICE, VpnRoutes, VpnRules, remove_kill_switch, remove_rules, set_kill_switch,
};
pub use vpn_state::{RuleConnections, RuleStatus, RunningVpn, VpnState, VpnStatus};
