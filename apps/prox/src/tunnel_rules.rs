//! The system's rules for packet tunnels: forwarding, translation of addresses, the device's own address.
//!
//! ```text
//!  client ── cedos-prox0 ──▶ forward ──▶ masquerade ──▶ any server
//!                              ▲ only answers come back, nothing passes between clients
//! ```
//!
//! All rules are in one table, which is removed at the end, and at the next start if the process was killed.

use std::fmt::Write as _;
use std::path::Path;

use d2tp_tunnel::{SystemCommandError, ip_batch, nft, run_command};

use crate::inner_addresses::InnerNets;

/// The network device of all clients' packets.
pub(crate) const DEVICE: &str = "cedos-prox0";

/// The table, of both families.
const TABLE: &str = "inet cedos_tunnel";

/// Connections of one client that the system tracks at once; it drops further ones.
const TRACKED_PER_CLIENT_MAX: u32 = 4096; // a guess

/// A chain without rules, which says that forwarding of IPv4 was off before.
const FORWARDING_WAS_OFF: &str = "forwarding_was_off";

const FORWARD_V4: &str = "/proc/sys/net/ipv4/ip_forward";
const FORWARD_V6: &str = "/proc/sys/net/ipv6/conf/all/forwarding";

/// The rules, which are removed with this.
#[derive(Debug)]
pub(crate) struct TunnelRules {
    forwarding_was_off: bool,
}

impl TunnelRules {
    /// Sets the device's addresses and all rules.
    pub(crate) fn set(nets: &InnerNets) -> Result<TunnelRules, SystemCommandError> {
        let marker = ["list", "chain", "inet", "cedos_tunnel", FORWARDING_WAS_OFF];
        // A process that was killed left the table, and forwarding on.
        let was_left = run_command("nft", "nftables", &marker, "").is_ok();
        let forwarding_was_off = was_left || is_off(FORWARD_V4);
        let gateway = nets.gateway();
        let address = format!(
            "address add {}/{} dev {DEVICE}\n",
            gateway.v4,
            nets.v4.prefix_len()
        );
        ip_batch(false, &(address + &format!("link set {DEVICE} up\n")))?;
        if let Some((address, net)) = gateway.v6.zip(nets.v6) {
            let length = net.prefix_len();
            ip_batch(
                true,
                &format!("address add {address}/{length} dev {DEVICE} nodad\n"),
            )?;
        }
        if let Err(error) = nft(&script(nets, forwarding_was_off, true)) {
            tracing::warn!(%error, "the system cannot limit connections of each client in packet tunnels");
            nft(&script(nets, forwarding_was_off, false))?;
        }
        let rules = TunnelRules { forwarding_was_off };
        if is_off(FORWARD_V4)
            && let Err(error) = std::fs::write(FORWARD_V4, "1")
        {
            tracing::error!(%error, "cannot turn on forwarding of IPv4: packet tunnels reach only this host; set net.ipv4.ip_forward=1");
        }
        if nets.v6.is_some() && is_off(FORWARD_V6) {
            // A router takes no addresses and routes from others, which may be how this host has its own.
            tracing::warn!(
                "this host does not forward IPv6: packet tunnels carry IPv4 only; set net.ipv6.conf.all.forwarding=1"
            );
        }
        Ok(rules)
    }
}

impl Drop for TunnelRules {
    fn drop(&mut self) {
        if self.forwarding_was_off {
            let _ = std::fs::write(FORWARD_V4, "0");
        }
        if let Err(error) = nft(&format!("delete table {TABLE}\n")) {
            tracing::warn!(%error, "the rules of packet tunnels stay");
        }
    }
}

/// Whether a switch of the kernel is off. One that the kernel does not have is not.
fn is_off(path: &str) -> bool {
    std::fs::read_to_string(Path::new(path)).is_ok_and(|text| text.trim() == "0")
}

/// The clients of each family whose connections are counted.
const CLIENT_SETS: &str = "  set clients4 { type ipv4_addr; size 65536; flags dynamic; }
  set clients6 { type ipv6_addr; size 65536; flags dynamic; }
";

fn client_limits() -> String {
    [("ip", "clients4"), ("ip6", "clients6")]
        .map(|(family, set)| {
            format!("    iifname \"{DEVICE}\" ct state new add @{set} {{ {family} saddr ct count over {TRACKED_PER_CLIENT_MAX} }} drop\n")
        })
        .concat()
}

/// The table, in place of one that is left.
fn script(nets: &InnerNets, forwarding_was_off: bool, is_limited: bool) -> String {
    let marker = match forwarding_was_off {
        true => format!("chain {FORWARDING_WAS_OFF} {{ }}"),
        false => String::new(),
    };
    // Who did not forward before forwards nothing else now.
    let rest = match forwarding_was_off {
        true => "drop",
        false => "accept",
    };
    let masquerade: String = nets.all().fold(String::new(), |mut rules, net| {
        let family = if net.addr().is_ipv6() { "ip6" } else { "ip" };
        let _ = writeln!(
            rules,
            "    {family} saddr {net} oifname != \"{DEVICE}\" masquerade"
        );
        rules
    });
    let (sets, limits) = match is_limited {
        true => (CLIENT_SETS, client_limits()),
        false => ("", String::new()),
    };
    format!(
        r#"table {TABLE}
delete table {TABLE}
table {TABLE} {{
  {marker}
{sets}  chain forward {{
    type filter hook forward priority filter; policy {rest};
    iifname "{DEVICE}" oifname "{DEVICE}" drop
    iifname "{DEVICE}" tcp flags syn tcp option maxseg size set rt mtu
    oifname "{DEVICE}" tcp flags syn tcp option maxseg size set rt mtu
{limits}    iifname "{DEVICE}" accept
    oifname "{DEVICE}" ct state established,related accept
    oifname "{DEVICE}" drop
  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat;
{masquerade}  }}
}}
"#
    )
}
