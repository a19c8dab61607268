//! `cedos vpn`: everything that this machine sends goes through D2Prox.
//!
//! ```text
//!  program ── TCP ──▶ nftables: redirect ──▶ tcp_flows.rs ──▶ a flow each ───────────┐
//!          ── rest ─▶ cedos0 (TUN) ────────▶ packet_carrier.rs ─▶ DATAGRAM frames ──┴▶ D2Prox
//!
//!  routes, rules, names: vpn_rules.rs      who runs it, and how it is: vpn_state.rs
//! ```
//!
//! The session's own sockets are bound to their links, and the proxy's address has a route of its own, so that nothing of
//! the session goes into the tunnel.

mod packet_carrier;
mod tcp_flows;
mod vpn_rules;
mod vpn_state;

pub use packet_carrier::PacketCarrier;
pub use tcp_flows::{TcpFlows, TcpMode};
pub use vpn_rules::{
    DEVICE, VpnRoutes, VpnRules, remove_kill_switch, remove_rules, set_kill_switch,
};
pub use vpn_state::{RunningVpn, VpnState, VpnStatus};
