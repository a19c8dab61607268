//! The rules that tell traffic apart, in order, and the policy of everything else.

use cedos_agent::proxy::{ConnOptions, PortTransport, TrafficMatch, TrafficRule, packets_may_pay};
use d2tp_sched::CostPolicy;
use d2tp_tunnel::{InnerPacket, PROTOCOL_TCP, PROTOCOL_UDP};
use jiff::Zoned;

use super::cgroup_match::CgroupMatch;

/// The number of a rule. Those behind the last rule stand for everything else.
pub type RuleNumber = u16;

/// Rules, the first of which that matches decides, and the policy of everything else.
#[derive(Clone, Debug)]
pub struct RuleSet {
    rules: Vec<(TrafficRule, Option<CgroupMatch>)>,
    rest: ConnOptions,
}

impl RuleSet {
    /// Rules, and the options of everything else. Finds the cgroups that they name.
    ///
    /// # Errors
    /// There are too many, or a cgroup cannot be told apart.
    pub fn new(rules: Vec<TrafficRule>, rest: ConnOptions) -> anyhow::Result<RuleSet> {
        TrafficRule::check_count(rules.len()).map_err(anyhow::Error::msg)?;
        let find = |rule: TrafficRule| {
            let cgroup = match &rule.traffic {
                TrafficMatch::Cgroup(path) => Some(CgroupMatch::find(path)?),
                TrafficMatch::Port { .. } | TrafficMatch::Dscp(_) => None,
            };
            anyhow::Ok((rule, cgroup))
        };
        let rules = rules.into_iter().map(find).collect::<Result<_, _>>()?;
        Ok(RuleSet { rules, rest })
    }

    /// Whether there are no rules.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Whether a rule is for a cgroup.
    pub fn has_cgroups(&self) -> bool {
        self.rules.iter().any(|(_, cgroup)| cgroup.is_some())
    }

    /// The number of everything else.
    pub fn rest(&self) -> RuleNumber {
        self.rules.len() as RuleNumber
    }

    /// The numbers of all rules, and that of everything else.
    pub fn numbers(&self) -> impl Iterator<Item = RuleNumber> + use<> {
        0..=self.rest()
    }

    /// A rule; none for everything else.
    pub fn rule(&self, number: RuleNumber) -> Option<&TrafficRule> {
        self.rules.get(usize::from(number)).map(|(rule, _)| rule)
    }

    /// The name of the policy of everything else.
    pub fn rest_policy(&self) -> CostPolicy {
        self.rest.policy
    }

    /// The options of a connection under a rule that begins now.
    ///
    /// # Errors
    /// Its deadline has passed.
    pub fn options(&self, number: RuleNumber) -> Result<ConnOptions, String> {
        let options = match self.rule(number) {
            Some(rule) => ConnOptions::of_rule(rule, &Zoned::now())?,
            None => self.rest,
        };
        Ok(ConnOptions {
            rule: Some(number),
            ..options
        })
    }

    /// The options of the tunnel's own flow, which may use metered networks if some packets may.
    pub fn tunnel_options(&self) -> ConnOptions {
        match self.rules.iter().any(|(rule, _)| rule.lets_packets_pay()) {
            true => ConnOptions {
                policy: CostPolicy::Any,
                ..self.rest
            },
            false => self.rest,
        }
    }

    /// Whether packets under a rule may use metered networks while no free one is up.
    pub fn lets_packets_pay(&self, number: RuleNumber) -> bool {
        match self.rule(number) {
            Some(rule) => rule.lets_packets_pay(),
            None => packets_may_pay(self.rest.policy),
        }
    }

    /// Whether any packets may use metered networks.
    pub fn lets_some_packets_pay(&self) -> bool {
        self.numbers().any(|number| self.lets_packets_pay(number))
    }

    /// What nftables matches TCP connections under a rule by; `None` if the rule is not for TCP.
    pub fn tcp_match(&self, number: RuleNumber, is_ipv6: bool) -> Option<String> {
        let Some((rule, cgroup)) = self.rules.get(usize::from(number)) else {
            return Some("meta l4proto tcp".to_owned());
        };
        match (&rule.traffic, cgroup) {
            (TrafficMatch::Port { transport, .. }, _) if *transport == Some(PortTransport::Udp) => {
                None
            }
            (TrafficMatch::Port { first, last, .. }, _) => {
                Some(format!("tcp dport {first}-{last}"))
            }
            (TrafficMatch::Dscp(code), _) => {
                let family = if is_ipv6 { "ip6" } else { "ip" };
                Some(format!("{family} dscp {code} meta l4proto tcp"))
            }
            (TrafficMatch::Cgroup(_), Some(cgroup)) => {
                Some(format!("meta l4proto tcp {}", cgroup.expression()))
            }
            (TrafficMatch::Cgroup(_), None) => None,
        }
    }

    /// The rule that a packet of this machine is under.
    pub fn of_sent(&self, packet: &InnerPacket) -> RuleNumber {
        self.of_packet(packet.protocol, packet.destination_port, packet.dscp)
    }

    /// The rule that a packet from another host is under: that of its answers.
    pub fn of_received(&self, packet: &InnerPacket) -> RuleNumber {
        self.of_packet(packet.protocol, packet.source_port, packet.dscp)
    }

    fn of_packet(&self, protocol: u8, port: Option<u16>, dscp: u8) -> RuleNumber {
        let matches = |traffic: &TrafficMatch| match traffic {
            TrafficMatch::Port {
                transport,
                first,
                last,
            } => {
                let of_transport = match transport {
                    None => true,
                    Some(PortTransport::Tcp) => protocol == PROTOCOL_TCP,
                    Some(PortTransport::Udp) => protocol == PROTOCOL_UDP,
                };
                of_transport && port.is_some_and(|port| (*first..=*last).contains(&port))
            }
            TrafficMatch::Dscp(code) => *code == dscp,
            // A packet does not tell which program sent it.
            TrafficMatch::Cgroup(_) => false,
        };
        let found = self
            .rules
            .iter()
            .position(|(rule, _)| matches(&rule.traffic));
        found.map_or(self.rest(), |at| at as RuleNumber)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(texts: &[&str], rest: CostPolicy) -> RuleSet {
        let rules = texts.iter().map(|text| text.parse().unwrap()).collect();
        let rest = ConnOptions {
            policy: rest,
            ..ConnOptions::default()
        };
        RuleSet::new(rules, rest).unwrap()
    }

    /// A packet of UDP.
    fn packet(port: u16, dscp: u8) -> InnerPacket {
        InnerPacket {
            source: "10.83.0.2".parse().unwrap(),
            destination: "192.0.2.1".parse().unwrap(),
            protocol: PROTOCOL_UDP,
            source_port: Some(40_000),
            destination_port: Some(port),
            dscp,
            icmp_type: None,
        }
    }

    #[test]
    fn the_first_rule_that_matches_decides_and_the_rest_has_the_policy_of_all() {
        let set = rules(
            &[
                "tcp port 53 = any",
                "udp port 50-60 = any",
                "dscp ef = fast",
            ],
            CostPolicy::FreeOnly,
        );
        assert_eq!(set.of_sent(&packet(53, 46)), 1);
        assert_eq!(set.of_sent(&packet(61, 46)), 2);
        assert_eq!(set.of_sent(&packet(61, 0)), set.rest());
        let answer = InnerPacket {
            source_port: Some(60),
            ..packet(40_000, 0)
        };
        assert_eq!(set.of_received(&answer), 1);
        assert!(set.lets_packets_pay(1) && !set.lets_packets_pay(set.rest()));
        assert_eq!(set.options(3).unwrap().policy, CostPolicy::FreeOnly);
        assert_eq!(set.options(2).unwrap().rule, Some(2));
        assert_eq!(set.tcp_match(0, false).unwrap(), "tcp dport 53-53");
        assert_eq!(set.tcp_match(1, false), None);
        assert!(set.tcp_match(2, true).unwrap().starts_with("ip6 dscp 46"));
    }

    #[test]
    fn the_tunnel_may_pay_as_soon_as_one_rule_lets_packets_pay() {
        let dear = rules(&["dscp ef = any"], CostPolicy::FreeOnly);
        assert_eq!(dear.tunnel_options().policy, CostPolicy::Any);
        let cheap = rules(&["dscp ef = free-only"], CostPolicy::FreeFirst);
        assert_eq!(cheap.tunnel_options().policy, CostPolicy::FreeFirst);
        assert!(dear.lets_some_packets_pay() && !cheap.lets_some_packets_pay());
        assert!(rules(&[], CostPolicy::Any).lets_some_packets_pay());
    }
}
