//! The cost class of a link, from all sources in order of precedence.
//!
//! ```text
//!  a flag ▶ a rule of the settings ▶ the network manager, where it is sure ▶ kind and gateway
//!  a VPN: the most expensive class of the links below it
//! ```

use std::net::IpAddr;

use crate::class::{ClassRules, CostAssessment, CostClass};
use crate::link::Link;
use crate::link_kind::LinkKind;
use crate::network::{Metered, NetworkInfo, Networks};
use crate::rules::NetworkRules;

/// The user's configuration: flags take precedence over rules.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CostResolver {
    /// Class rules from the command line.
    pub flags: ClassRules,
    /// Network rules from the settings.
    pub rules: NetworkRules,
}

impl CostResolver {
    /// The class of one link by itself.
    pub(crate) fn resolve(
        &self,
        device: &str,
        kind: LinkKind,
        gateways: &[IpAddr],
        network: Option<&NetworkInfo>,
    ) -> CostAssessment {
        if kind == LinkKind::Loopback {
            return self.flags.assess(device, kind, gateways);
        }
        if let Some(configured) = self.configured_class(device, kind, network) {
            return configured;
        }
        let says = |class, because: &str| CostAssessment {
            class,
            because: because.into(),
        };
        match network.map(|network| network.metered) {
            Some(Metered::Yes) => says(CostClass::Metered, "the network's settings say metered"),
            Some(Metered::No) => says(CostClass::Free, "the network's settings say not metered"),
            Some(Metered::GuessYes) if kind != LinkKind::Cellular => {
                says(CostClass::Metered, "the network is a phone's hotspot")
            }
            _ => self.flags.assess(device, kind, gateways),
        }
    }

    /// The class that the user configured, if any.
    fn configured_class(
        &self,
        device: &str,
        kind: LinkKind,
        network: Option<&NetworkInfo>,
    ) -> Option<CostAssessment> {
        if let Some(configured) = self.flags.configured_class(device) {
            return Some(configured);
        }
        let rule = self.rules.of(device, kind, network)?;
        Some(CostAssessment {
            class: rule.class()?,
            because: format!("your settings, for {}", rule.describe()),
        })
    }

    /// Gives tunnels the class of the links below them: those that the network manager names, else the
    /// one that the system prefers.
    pub(crate) fn resolve_tunnels(&self, links: &mut [Link], networks: &Networks) {
        let below: Vec<Link> = (links.iter())
            .filter(|link| {
                !matches!(link.kind, LinkKind::Vpn | LinkKind::Loopback) && link.is_usable()
            })
            .cloned()
            .collect();
        let named = below
            .iter()
            .filter(|link| networks.under_vpns.contains(&link.name));
        let preferred = below.iter().min_by_key(|link| link.metric());
        let dearest = named.max_by_key(|link| link.class.class).or(preferred);
        let Some(dearest) = dearest else {
            return;
        };
        for tunnel in links.iter_mut().filter(|link| link.kind == LinkKind::Vpn) {
            let network = networks.of(&tunnel.name);
            if self
                .configured_class(&tunnel.name, tunnel.kind, network)
                .is_none()
            {
                tunnel.class = CostAssessment {
                    class: dearest.class.class,
                    because: format!("a tunnel over {}: {}", dearest.name, dearest.class.because),
                };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::tests::wifi;
    use crate::network::AccessPoint;

    fn network(metered: Metered) -> NetworkInfo {
        NetworkInfo {
            device: "wlan0".into(),
            metered,
            access_point: Some(AccessPoint {
                ssid: "Train".into(),
                bssid: "02:00:00:00:00:01".into(),
                signal_percent: 50,
                frequency_mhz: 2_412,
                known: true,
            }),
            ..NetworkInfo::default()
        }
    }

    fn resolver(flag: Option<&str>, rules: &str) -> CostResolver {
        let flags = ClassRules {
            rules: flag.into_iter().map(|flag| flag.parse().unwrap()).collect(),
        };
        let rules = NetworkRules::parse(rules).unwrap();
        CostResolver { flags, rules }
    }

    const RULE: &str = "[[network]]\nssid = \"Train\"\nclass = \"roaming\"\n";

    #[test]
    fn a_flag_wins_over_a_rule_and_a_rule_over_the_manager() {
        let class = |resolver: CostResolver, metered| {
            let network = network(metered);
            resolver
                .resolve("wlan0", LinkKind::Wifi, &[], Some(&network))
                .class
        };
        let both = resolver(Some("wlan0=free"), RULE);
        assert_eq!(class(both, Metered::Yes), CostClass::Free);
        assert_eq!(class(resolver(None, RULE), Metered::No), CostClass::Roaming);
        let auto = RULE.replace("roaming", "auto");
        assert_eq!(
            class(resolver(None, &auto), Metered::Yes),
            CostClass::Metered
        );
    }

    #[test]
    fn the_manager_wins_over_the_kind_where_it_is_sure() {
        let class = |kind, metered| {
            let network = network(metered);
            CostResolver::default()
                .resolve("x0", kind, &[], Some(&network))
                .class
        };
        assert_eq!(class(LinkKind::Ethernet, Metered::Yes), CostClass::Metered);
        assert_eq!(class(LinkKind::Cellular, Metered::No), CostClass::Free);
        assert_eq!(class(LinkKind::Wifi, Metered::GuessYes), CostClass::Metered);
        assert_eq!(
            class(LinkKind::Cellular, Metered::GuessNo),
            CostClass::Metered
        );
        let hotspot: IpAddr = "172.20.10.1".parse().unwrap();
        let unsure = network(Metered::GuessNo);
        let judged =
            CostResolver::default().resolve("wlan0", LinkKind::Wifi, &[hotspot], Some(&unsure));
        assert_eq!(judged.class, CostClass::Metered);
    }

    #[test]
    fn a_tunnel_costs_what_the_dearest_link_below_it_does() {
        let cell = Link {
            name: "wwan0".into(),
            index: 4,
            kind: LinkKind::Cellular,
            class: CostAssessment {
                class: CostClass::Metered,
                because: "mobile networks are metered by default".into(),
            },
            routes: wifi()
                .routes
                .into_iter()
                .map(|r| crate::DefaultRoute { metric: 700, ..r })
                .collect(),
            ..wifi()
        };
        let tunnel = Link {
            name: "tun0".into(),
            index: 5,
            kind: LinkKind::Vpn,
            ..wifi()
        };
        let class = |resolver: CostResolver, under: &[&str]| {
            let mut links = [wifi(), cell.clone(), tunnel.clone()];
            let networks = Networks {
                under_vpns: under.iter().map(|name| (*name).to_owned()).collect(),
                ..Networks::default()
            };
            resolver.resolve_tunnels(&mut links, &networks);
            assert_eq!(links[0], wifi());
            links[2].class.clone()
        };
        // The system prefers Wi-Fi, but the manager knows the link below.
        assert_eq!(class(CostResolver::default(), &[]).class, CostClass::Free);
        let over_both = class(CostResolver::default(), &["wwan0", "wlan0"]);
        assert_eq!(over_both.class, CostClass::Metered);
        assert!(over_both.because.contains("wwan0"), "{}", over_both.because);
        let configured = resolver(Some("tun*=free"), "");
        assert_eq!(class(configured, &["wwan0"]), tunnel.class);
    }
}
