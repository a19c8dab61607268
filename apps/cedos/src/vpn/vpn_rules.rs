//! The system's routes and rules while the VPN is up.
//!
//! ```text
//!  ip rule 5180  programs that are excluded, by their mark: table main
//!  ip rule 5181  port 53 to table 5183, where names are asked of the proxy by nftables
//!  ip rule 5182  table main, without its default routes: networks of this machine's links stay outside
//!  ip rule 5183  table 5183: what goes into the tunnel; networks that are excluded are thrown back to main
//!  ip rule 5184  programs that alone go in, by their mark: table 5184
//!  nft tables    TCP to tcp_flows.rs, by rules · queries of names to the proxy · marks;  the kill switch has its own
//! ```
//!
//! A program's socket chooses route and address before nftables marks its packets, which are routed again then. So they get the
//! address of the other route, and what matches the device by its name (`oifname`) still sees the first route: the next hop
//! (`rt nexthop`) is that of the new one.
//!
//! With the process its device and the routes by it are gone. What is left then has no effect without them, and is
//! removed by the next `cedos vpn up` or `down`. The kill switch stays until `down`.

use std::fmt::Write as _;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use d2tp_tunnel::{SystemCommandError, ip_batch, nft, run_command};
use ipnet::IpNet;

use super::rule_set::RuleSet;
use super::tcp_flows::TcpRedirect;
use super::tunnel_scope::TunnelScope;

/// The name of the network device.
pub const DEVICE: &str = "cedos0";

/// The routing table, and the preference of the rule that leads there.
const TABLE: u32 = 5183; // a guess: a number that nobody else uses
/// The table with the routes of programs that alone go into the tunnel, and the preference of the rule that leads there.
const PROGRAMS_INSIDE: u32 = 5184;
/// The preference of the rule for programs that stay outside.
const PROGRAMS_OUTSIDE: u32 = 5180;
/// The preference of the rules for queries of names.
const NAMES_FIRST: u32 = 5181;
/// The preference of the rule for networks of this machine's links.
const MAIN_FIRST: u32 = 5182;
/// The preference of the rule for `TABLE`.
const THEN_TUNNEL: u32 = 5183;

/// The mark of packets of programs that stay outside.
const OUTSIDE_MARK: u32 = 0x5183_0001; // a guess: a number that nobody else uses
/// The mark of packets of programs that alone go into the tunnel.
const INSIDE_MARK: u32 = 0x5183_0002;

/// The next hops of programs that alone go into the tunnel: no host has them, and the device needs none.
const INSIDE_NEXT_HOP: [&str; 2] = ["192.0.0.8", "fe80::5183"]; // RFC 7600: the IPv4 dummy address

/// Whether the kernel looks at marks when it checks from which link a packet may come (`rp_filter`).
const MARKS_VALIDATE: &str = "/proc/sys/net/ipv4/conf/all/src_valid_mark";

const NFT_TABLE: &str = "inet cedos_vpn";
/// The kill switch's table, which outlives the VPN.
const KILL_TABLE: &str = "inet cedos_vpn_kill";

/// What a kernel without IPv6 does not have.
const IPV6: &str = "/proc/net/if_inet6";

/// systemd-resolved's directory while it runs.
const RESOLVED: &str = "/run/systemd/resolve";

/// What goes into the tunnel, and how.
#[derive(Clone, Debug)]
pub struct VpnRoutes {
    /// The inner addresses of this machine.
    pub addresses: Vec<IpAddr>,
    /// The proxy's inner addresses.
    pub gateways: Vec<IpAddr>,
    /// The proxy's outer addresses, which stay outside.
    pub proxies: Vec<IpAddr>,
    /// What alone goes into the tunnel; nothing: all.
    pub include: TunnelScope,
    /// What stays outside.
    pub exclude: TunnelScope,
    /// Where TCP connections are handed over, in the order of the rules; none: they go as packets.
    pub redirects: Vec<TcpRedirect>,
    /// The rules that tell connections apart.
    pub rules: Arc<RuleSet>,
}

/// Routes and rules, which are removed with this.
#[derive(Debug)]
pub struct VpnRules {
    /// Whether marks did not count before when packets are checked for their link.
    had_unchecked_marks: bool,
}

impl VpnRules {
    /// Sets them, on a device that exists.
    ///
    /// # Errors
    /// The system refuses one, and none stays.
    pub fn set(routes: &VpnRoutes) -> Result<VpnRules, SystemCommandError> {
        let rules = VpnRules {
            had_unchecked_marks: routes.marks_packets() && let_marks_validate(),
        };
        // First what becomes of packets in the tunnel, which matches none yet, and then the routes into it: a connection in
        // between would go there as packets.
        nft(&routes.nft_script())?;
        ip_batch(false, &routes.ip_lines(false))?;
        if Path::new(IPV6).exists() {
            ip_batch(true, &routes.ip_lines(true))?;
        }
        if routes.takes_names() && is_resolved_running() {
            routes.tell_resolved()?;
        }
        Ok(rules)
    }
}

impl Drop for VpnRules {
    fn drop(&mut self) {
        remove_rules();
        if self.had_unchecked_marks {
            let _ = std::fs::write(MARKS_VALIDATE, "0");
        }
    }
}

/// Lets marks count when packets are checked for their link. Returns whether they did not before.
fn let_marks_validate() -> bool {
    let before = std::fs::read_to_string(MARKS_VALIDATE);
    let is_off = before.is_ok_and(|text| text.trim() == "0");
    is_off && std::fs::write(MARKS_VALIDATE, "1").is_ok()
}

/// Refuses from now on what would leave outside the tunnel, but to these proxies and what is excluded. `include`: what alone
/// goes into the tunnel.
///
/// # Errors
/// The system refuses it, and an earlier kill switch stays as it was.
pub fn set_kill_switch(
    proxies: &[IpAddr],
    exclude: &TunnelScope,
    include: &TunnelScope,
) -> Result<(), SystemCommandError> {
    nft(&kill_script(proxies, exclude, include))
}

/// Lets everything out again.
pub fn remove_kill_switch() {
    // Refused only where there is no nft, and so no kill switch.
    let _ = nft(&format!("table {KILL_TABLE}\ndelete table {KILL_TABLE}\n"));
}

/// Removes what a process that ended left behind, if it left anything, but for the kill switch.
pub fn remove_rules() {
    // Each that is not there is refused.
    let _ = nft(&format!("table {NFT_TABLE}\ndelete table {NFT_TABLE}\n"));
    for family in ["-4", "-6"] {
        for preference in [
            PROGRAMS_OUTSIDE,
            NAMES_FIRST,
            MAIN_FIRST,
            THEN_TUNNEL,
            PROGRAMS_INSIDE,
        ] {
            let preference = preference.to_string();
            let words = [family, "rule", "del", "pref", &preference];
            while run_command("ip", "iproute2", &words, "").is_ok() {}
        }
        for table in [TABLE, PROGRAMS_INSIDE] {
            let table = table.to_string();
            let words = [family, "route", "flush", "table", &table];
            let _ = run_command("ip", "iproute2", &words, "");
        }
    }
}

fn is_resolved_running() -> bool {
    Path::new(RESOLVED).is_dir()
}

impl VpnRoutes {
    fn inner(list: &[IpAddr], is_ipv6: bool) -> Option<IpAddr> {
        list.iter().copied().find(|ip| ip.is_ipv6() == is_ipv6)
    }

    /// Whether names are looked up through the tunnel: where all else goes there, too.
    fn takes_names(&self) -> bool {
        self.include.is_empty() && !self.gateways.is_empty()
    }

    /// Whether packets of programs are marked.
    fn marks_packets(&self) -> bool {
        !self.include.cgroups.is_empty() || !self.exclude.cgroups.is_empty()
    }

    /// Whether nftables sends queries of names to the proxy.
    fn redirects_names(&self) -> bool {
        self.takes_names() && !is_resolved_running()
    }

    /// The lines for `ip` of one family.
    fn ip_lines(&self, is_ipv6: bool) -> String {
        let is_of_it = |net: &IpNet| net.addr().is_ipv6() == is_ipv6;
        let hosts = |list: &[IpAddr]| {
            let nets: Vec<IpNet> = list
                .iter()
                .map(|ip| IpNet::from(*ip))
                .filter(is_of_it)
                .collect();
            nets
        };
        let mut lines = String::new();
        let flags = if is_ipv6 { " nodad" } else { "" };
        for address in hosts(&self.addresses) {
            let _ = writeln!(lines, "address add {address} dev {DEVICE}{flags}");
        }
        let _ = writeln!(lines, "link set {DEVICE} up");
        let takes_programs = !self.include.cgroups.is_empty();
        let outside = self.exclude.nets.iter().copied().filter(is_of_it);
        for net in outside.chain(hosts(&self.proxies)) {
            let _ = writeln!(lines, "route replace throw {net} table {TABLE}");
            if takes_programs {
                let _ = writeln!(lines, "route replace throw {net} table {PROGRAMS_INSIDE}");
            }
        }
        // Without an inner address of IPv6 it is refused there, so that nothing of it leaves outside.
        let all = if is_ipv6 { "::/0" } else { "0.0.0.0/0" };
        let all = all.parse().into_iter().filter(|_| self.include.is_empty());
        let nets = self.include.nets.iter().copied();
        let include = nets.filter(is_of_it).chain(all);
        for net in hosts(&self.gateways).into_iter().chain(include) {
            let _ = writeln!(lines, "route replace {net} dev {DEVICE} table {TABLE}");
        }
        if self.redirects_names() {
            for transport in ["udp", "tcp"] {
                let _ = writeln!(
                    lines,
                    "rule add pref {NAMES_FIRST} ipproto {transport} dport 53 table {TABLE}"
                );
            }
        }
        if !self.exclude.cgroups.is_empty() {
            let _ = writeln!(
                lines,
                "rule add pref {PROGRAMS_OUTSIDE} fwmark {OUTSIDE_MARK} table main"
            );
        }
        if takes_programs {
            let next_hop = INSIDE_NEXT_HOP[usize::from(is_ipv6)];
            let _ = writeln!(
                lines,
                "route replace default via {next_hop} dev {DEVICE} onlink table {PROGRAMS_INSIDE}\n\
                 rule add pref {PROGRAMS_INSIDE} fwmark {INSIDE_MARK} table {PROGRAMS_INSIDE}"
            );
        }
        lines
            + &format!(
                "rule add pref {MAIN_FIRST} table main suppress_prefixlength 0\n\
                 rule add pref {THEN_TUNNEL} table {TABLE}\n"
            )
    }

    fn nft_script(&self) -> String {
        let names = match self.redirects_names() {
            true => self.name_rules(),
            false => String::new(),
        };
        let (redirect, sources) = (self.redirect_rules(), self.source_rules());
        let refused: String = match Self::inner(&self.addresses, true) {
            Some(_) => String::new(),
            None => {
                let refuse = "meta nfproto ipv6 reject with icmpv6 no-route";
                let tunneled = self.tunneled(true);
                tunneled
                    .map(|into| format!("    {into} {refuse}\n"))
                    .collect()
            }
        };
        let marks = self.mark_chains();
        // It is seen with its first route.
        let outside = match self.exclude.cgroups.is_empty() {
            true => String::new(),
            false => format!("    meta mark {OUTSIDE_MARK} accept\n"),
        };
        format!(
            "table {NFT_TABLE}\ndelete table {NFT_TABLE}\ntable {NFT_TABLE} {{
{marks}  chain output_nat {{
    type nat hook output priority -100;
{outside}{names}{redirect}  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat;
{sources}  }}
  chain output {{
    type filter hook output priority filter;
{outside}{refused}  }}
}}\n"
        )
    }

    /// What nftables matches packets by that go into the tunnel.
    fn tunneled(&self, is_ipv6: bool) -> impl Iterator<Item = String> + use<> {
        let by_device = format!("oifname \"{DEVICE}\"");
        let programs = !self.include.cgroups.is_empty();
        let by_next_hop = programs.then(|| inside_next_hop(is_ipv6));
        [by_device].into_iter().chain(by_next_hop)
    }

    /// Packets of programs are marked, and routed again; answers have the mark of their connection.
    fn mark_chains(&self) -> String {
        if !self.marks_packets() {
            return String::new();
        }
        let known = format!("ct mark {{ {OUTSIDE_MARK}, {INSIDE_MARK} }} meta mark set ct mark");
        let mut rules = format!("    {known} accept\n    meta mark != 0 accept\n");
        for (scope, mark) in [(&self.exclude, OUTSIDE_MARK), (&self.include, INSIDE_MARK)] {
            for cgroup in &scope.cgroups {
                let _ = writeln!(
                    rules,
                    "    {} meta mark set {mark} ct mark set {mark} accept",
                    cgroup.expression()
                );
            }
        }
        format!(
            "  chain output_mark {{
    type route hook output priority mangle;
{rules}  }}
  chain prerouting_mark {{
    type filter hook prerouting priority mangle;
    {known}
  }}
"
        )
    }

    /// Queries of names go to the proxy, whatever name server a program asks, but those that stay outside the device.
    fn name_rules(&self) -> String {
        let mut rules = String::new();
        for gateway in &self.gateways {
            let (family, protocol) = match gateway {
                IpAddr::V4(_) => ("ip", "ipv4"),
                IpAddr::V6(_) => ("ip6", "ipv6"),
            };
            for transport in ["udp", "tcp"] {
                let _ = writeln!(
                    rules,
                    "    oifname \"{DEVICE}\" meta nfproto {protocol} {transport} dport 53 dnat {family} to {gateway}"
                );
            }
        }
        rules
    }

    fn redirect_rules(&self) -> String {
        let mut rules = String::new();
        for TcpRedirect { to, rule } in &self.redirects {
            let (family, port) = (family(to.ip()), to.port());
            let Some(gateway) = Self::inner(&self.gateways, to.is_ipv6()) else {
                continue;
            };
            let Some(traffic) = self.rules.tcp_match(*rule, to.is_ipv6()) else {
                continue;
            };
            for into in self.tunneled(to.is_ipv6()) {
                let _ = writeln!(
                    rules,
                    "    {into} {family} daddr != {gateway} {traffic} redirect to :{port}"
                );
            }
        }
        rules
    }

    /// What is forwarded, or was to leave by another link, gets the inner address.
    fn source_rules(&self) -> String {
        let mut rules = String::new();
        for address in &self.addresses {
            let family = family(*address);
            let _ = writeln!(
                rules,
                "    oifname \"{DEVICE}\" {family} saddr != {address} masquerade"
            );
        }
        if !self.exclude.cgroups.is_empty() {
            let _ = writeln!(
                rules,
                "    oifname != {{ \"lo\", \"{DEVICE}\" }} meta mark {OUTSIDE_MARK} masquerade"
            );
        }
        rules
    }

    fn tell_resolved(&self) -> Result<(), SystemCommandError> {
        let resolvectl = |words: &[&str]| run_command("resolvectl", "systemd-resolved", words, "");
        let gateways: Vec<String> = self.gateways.iter().map(IpAddr::to_string).collect();
        let mut servers = vec!["dns", DEVICE];
        servers.extend(gateways.iter().map(String::as_str));
        resolvectl(&servers)?;
        resolvectl(&["domain", DEVICE, "~."])?;
        resolvectl(&["default-route", DEVICE, "yes"]).map(drop)
    }
}

/// What nftables matches packets by of programs that alone go into the tunnel.
fn inside_next_hop(is_ipv6: bool) -> String {
    let family = if is_ipv6 { "ip6" } else { "ip" };
    let next_hop = INSIDE_NEXT_HOP[usize::from(is_ipv6)];
    format!("rt {family} nexthop {next_hop}")
}

fn kill_script(proxies: &[IpAddr], exclude: &TunnelScope, include: &TunnelScope) -> String {
    let rules = kill_rules(proxies, &exclude.nets);
    let mut programs = String::new();
    for cgroup in &exclude.cgroups {
        let _ = writeln!(programs, "    {} accept", cgroup.expression());
    }
    if !include.cgroups.is_empty() {
        for is_ipv6 in [false, true] {
            let _ = writeln!(programs, "    {} accept", inside_next_hop(is_ipv6));
        }
    }
    format!(
        "table {KILL_TABLE}\ndelete table {KILL_TABLE}\ntable {KILL_TABLE} {{
  chain output {{
    type filter hook output priority filter;
{programs}{rules}  }}
  chain forward {{
    type filter hook forward priority filter;
    iifname \"{DEVICE}\" accept
{rules}  }}
}}\n"
    )
}

fn kill_rules(proxies: &[IpAddr], exclude: &[IpNet]) -> String {
    let mut rules = format!("    oifname {{ \"lo\", \"{DEVICE}\" }} accept\n");
    let outside = proxies.iter().map(|ip| IpNet::from(*ip));
    for net in exclude.iter().copied().chain(outside) {
        let _ = writeln!(rules, "    {} daddr {net} accept", family(net.addr()));
    }
    // DHCP, and what finds neighbours and routers of IPv6: without them no link gets an address.
    rules += "    udp dport { 67, 547 } accept\n";
    rules += "    icmpv6 type { nd-router-solicit, nd-neighbor-solicit, nd-neighbor-advert, mld2-listener-report } accept\n";
    rules += "    reject\n";
    rules
}

/// The word of nftables for an address's family.
fn family(address: IpAddr) -> &'static str {
    match address {
        IpAddr::V4(_) => "ip",
        IpAddr::V6(_) => "ip6",
    }
}

#[cfg(test)]
mod tests {
    use cedos_agent::proxy::ConnOptions;

    use super::*;

    fn nets(net: &str) -> TunnelScope {
        TunnelScope {
            nets: vec![net.parse().unwrap()],
            ..TunnelScope::default()
        }
    }

    fn routes() -> VpnRoutes {
        let rules = ["udp port 53 = any", "port 443 = free-only"];
        let rules = rules.iter().map(|text| text.parse().unwrap()).collect();
        let rules = RuleSet::new(rules, ConnOptions::default()).unwrap();
        VpnRoutes {
            addresses: vec!["10.83.0.2".parse().unwrap()],
            gateways: vec!["10.83.0.1".parse().unwrap()],
            proxies: vec!["192.0.2.1".parse().unwrap()],
            include: TunnelScope::default(),
            exclude: nets("198.51.100.0/24"),
            redirects: [(1, "127.0.0.1:4710"), (2, "127.0.0.1:4711")]
                .map(|(rule, to)| TcpRedirect {
                    to: to.parse().unwrap(),
                    rule,
                })
                .to_vec(),
            rules: Arc::new(rules),
        }
    }

    #[test]
    fn the_proxy_and_what_is_excluded_stay_outside_and_the_rest_goes_in() {
        let lines = routes().ip_lines(false);
        for line in [
            "route replace throw 192.0.2.1/32 table 5183",
            "route replace throw 198.51.100.0/24 table 5183",
            "route replace 0.0.0.0/0 dev cedos0 table 5183",
        ] {
            assert!(lines.contains(line), "{line}: {lines}");
        }
        let six = routes().ip_lines(true);
        assert!(six.contains("route replace ::/0 dev cedos0"), "{six}");
        assert!(!six.contains("192.0.2.1"), "{six}");
        let some = VpnRoutes {
            include: nets("203.0.113.0/24"),
            ..routes()
        };
        let lines = some.ip_lines(false);
        assert!(
            lines.contains("route replace 203.0.113.0/24 dev cedos0"),
            "{lines}"
        );
        assert!(!lines.contains("0.0.0.0/0"), "{lines}");
        assert!(!some.nft_script().contains("dport 53"));
    }

    #[test]
    fn ipv6_without_an_inner_address_is_refused_and_the_kill_switch_ends_with_a_refusal() {
        let script = routes().nft_script();
        assert!(script.contains("nfproto ipv6 reject"), "{script}");
        let web = script.find("tcp dport 443-443 redirect to :4710");
        let rest = script.find("meta l4proto tcp redirect to :4711");
        assert!(web.unwrap() < rest.unwrap(), "{script}");
        assert!(!script.contains("mark"), "{script}");
        let kill = kill_script(&routes().proxies, &routes().exclude, &routes().include);
        assert_eq!(kill.matches("    reject\n").count(), 2, "{kill}");
        assert!(kill.contains("ip daddr 192.0.2.1/32 accept"), "{kill}");
    }
}
